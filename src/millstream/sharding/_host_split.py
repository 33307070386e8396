"""The part of a dataset that one host reads."""

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any, Generic, Literal

from millstream.reading.contracts import Items, T
from millstream.text.errors import describe_value, require_bool, require_choice, require_int, require_items


@dataclasses.dataclass(frozen=True, eq=False)
class HostSplit(Generic[T]):
    """Some items of a dataset, seen as a dataset; made by `split_by_host`.

    Example:
        >>> view = ms.sharding.HostSplit("abcdef", range(0, 6, 2))
        >>> len(view), view[1], view[-1], list(view)
        (3, 'c', 'e', ['a', 'c', 'e'])

    Args:
        dataset: Anything with a length and `[index]`.
        items: Which of its items.
    """

    dataset: Items[T]
    items: range

    def __post_init__(self) -> None:
        require_items("HostSplit", "a dataset", self.dataset)
        if not isinstance(self.items, range):
            raise TypeError(f"HostSplit needs items to be a range. Got {describe_value(self.items)}.")

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> T:
        try:
            item = self.items[operator.index(index)]
        except IndexError:
            raise IndexError(f"HostSplit has {len(self)} items. Got index {index}.") from None
        return self.dataset[item]

    def __iter__(self) -> Iterator[T]:
        return (self.dataset[item] for item in self.items)


class BatchedHostSplit(HostSplit[T]):
    """The same of a dataset that reads many items at once, with `__getitems__`."""

    def __getitems__(self, indices: list[int]) -> Any:
        dataset: Any = self.dataset
        return dataset.__getitems__([self.items[index] for index in indices])


def split_by_host(
    dataset: Items[T],
    how: Literal["contiguous", "strided"] = "contiguous",
    *,
    drop_remainder: bool = False,
    num_shards: int | None = None,
    shard_id: int | None = None,
) -> HostSplit:
    """The items of a dataset that this host reads, as a view: nothing is copied.

    A `DataLoader` with a sharding needs no split: it reads what its host needs of the whole. Split a dataset for a
    loop of your own, or when a host can reach only a part of the data.

    Example:
        >>> list(ms.sharding.split_by_host("abcdefg", num_shards=3, shard_id=0))
        ['a', 'b', 'c']
        >>> list(ms.sharding.split_by_host("abcdefg", "strided", num_shards=3, shard_id=0))
        ['a', 'd', 'g']

    Args:
        dataset: Anything with a length and `[index]`; `__getitems__` is passed on if there is one.
        how: "contiguous" for neighbouring items, "strided" for every `num_shards`-th.
        drop_remainder: Whether the last items are left out so that all parts have one length; if not, the first
            parts have one item more.
        num_shards: How many parts; by default the number of processes.
        shard_id: Which of them; by default the number of this process.
    """
    require_items("split_by_host", "an object", dataset)
    require_choice("split_by_host", "how", how, ["contiguous", "strided"])
    if num_shards is None or shard_id is None:
        import jax

        num_shards = jax.process_count() if num_shards is None else num_shards
        shard_id = jax.process_index() if shard_id is None else shard_id
    start, end = _bounds("split_by_host", num_shards, shard_id, len(dataset), drop_remainder)
    strided = range(shard_id, shard_id + (end - start) * num_shards, num_shards)
    kind = BatchedHostSplit if hasattr(dataset, "__getitems__") else HostSplit
    return kind(dataset, strided if how == "strided" else range(start, end))


def shard_bounds(num_shards: int, shard_id: int, size: int, drop_remainder: bool = False) -> tuple[int, int]:
    """Where part number `shard_id` of `size` items starts and ends, if the parts lie one after the other.

    Example:
        >>> [ms.sharding.shard_bounds(3, shard, 8) for shard in range(3)]
        [(0, 3), (3, 6), (6, 8)]
        >>> [ms.sharding.shard_bounds(3, shard, 8, drop_remainder=True) for shard in range(3)]
        [(0, 2), (2, 4), (4, 6)]

    Args:
        num_shards: How many parts.
        shard_id: Which of them, from 0.
        size: How many items.
        drop_remainder: Whether the last items are left out so that all parts have one length; if not, the first
            parts have one item more.
    """
    return _bounds("shard_bounds", num_shards, shard_id, size, drop_remainder)


def _bounds(caller: str, num_shards: int, shard_id: int, size: int, drop_remainder: bool) -> tuple[int, int]:
    require_int(caller, "num_shards", num_shards, least=1)
    require_int(caller, "shard_id", shard_id, least=0)
    require_int(caller, "size", size, least=0)
    require_bool(caller, "drop_remainder", drop_remainder)
    if shard_id >= num_shards:
        raise ValueError(f"{caller} needs shard_id below num_shards, {num_shards}. Got {shard_id}.")
    each, extra = divmod(size, num_shards)
    if drop_remainder:
        if not each:
            raise ValueError(
                f"{caller} needs at least one item per shard if the remainder is dropped. Got {size} items for "
                f"{num_shards} shards."
            )
        extra = 0
    start = shard_id * each + min(shard_id, extra)
    return start, start + each + (shard_id < extra)
