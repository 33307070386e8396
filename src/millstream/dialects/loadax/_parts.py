"""Parts of a dataset, and several datasets as one."""

import bisect
import functools
import itertools
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

from millstream.dialects.loadax._dataset import Dataset, Items, View, item_of, items_of, require_items
from millstream.sharding import shard_bounds
from millstream.text.errors import describe_value, require_int

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class Shardable(Protocol):
    """A dataset that can be split over hosts. Every `Dataset` is one.

    Example:
        >>> from millstream.dialects.loadax import RangeDataset
        >>> isinstance(RangeDataset(0, 10), Shardable)
        True
    """

    def split_dataset_by_node(self, world_size: int, rank: int) -> Any:
        """Part number `rank` of `world_size`."""
        ...


class PartialDataset(View[T_co]):
    """The items of a dataset from one index to before another.

    Example:
        >>> list(PartialDataset("abcdef", 2, 5))
        ['c', 'd', 'e']

    Args:
        dataset: The dataset.
        start_index: The index of the first item.
        end_index: The index after the last one. A part ends where the dataset ends, and may be empty.
    """

    def __init__(self, dataset: Items[T_co], start_index: int, end_index: int) -> None:
        require_int("PartialDataset", "start_index", start_index, least=0)
        require_int("PartialDataset", "end_index", end_index, least=0)
        super().__init__(dataset, lambda: range(self.start_index, self.end_index))
        self.start_index, self.end_index = start_index, min(end_index, len(dataset))

    def __repr__(self) -> str:
        return f"PartialDataset(dataset={self.dataset!r}, start_index={self.start_index}, end_index={self.end_index})"

    @staticmethod
    def split_dataset(dataset: Items[T], num_partitions: int) -> "list[PartialDataset[T]]":
        """All of a dataset in parts of nearly one length; the first ones have one item more.

        Example:
            >>> [list(part) for part in PartialDataset.split_dataset("abcde", 2)]
            [['a', 'b', 'c'], ['d', 'e']]

        Args:
            dataset: The dataset.
            num_partitions: How many parts. With more parts than items, the last ones are empty.
        """
        require_items("PartialDataset", dataset)
        require_int("PartialDataset.split_dataset", "num_partitions", num_partitions, least=1)
        length, more = divmod(len(dataset), num_partitions)
        starts = [part * length + min(part, more) for part in range(num_partitions + 1)]
        return [PartialDataset(dataset, *bounds) for bounds in itertools.pairwise(starts)]

    split = split_dataset


class ShardedDataset(View[T_co]):
    """The part of a dataset that belongs to one of several hosts: neighbouring items.

    A loader with `.shard(mesh)` needs no such part: it reads from the whole what its devices need.

    Example:
        >>> list(ShardedDataset("abcdefg", 3, 1)), list(ShardedDataset("abcdefg", 3, 0, drop_remainder=False))
        (['c', 'd'], ['a', 'b', 'c'])

    Args:
        dataset: The dataset.
        num_shards: How many parts.
        shard_id: Which of them, from 0.
        drop_remainder: Whether the last items are left out so that all parts have one length; if not, the first parts
            have one item more.
    """

    def __init__(self, dataset: Items[T_co], num_shards: int, shard_id: int, *, drop_remainder: bool = True) -> None:
        require_items("ShardedDataset", dataset)
        bounds = shard_bounds(num_shards, shard_id, len(dataset), drop_remainder)
        super().__init__(dataset, lambda: range(*bounds))
        self.num_shards, self.shard_id, self._bounds = num_shards, shard_id, bounds

    def shard_boundaries(self) -> tuple[int, int]:
        """The index of the first item, and the one after the last."""
        return self._bounds


def compute_shard_boundaries(
    num_shards: int, shard_id: int, dataset_size: int, *, drop_remainder: bool = True
) -> tuple[int, int]:
    """Where a part of a dataset starts and ends.

    Example:
        >>> [compute_shard_boundaries(3, shard, 8) for shard in range(3)]
        [(0, 2), (2, 4), (4, 6)]

    Args:
        num_shards: How many parts.
        shard_id: Which of them, from 0.
        dataset_size: How many items.
        drop_remainder: As in `ShardedDataset`.
    """
    return shard_bounds(num_shards, shard_id, dataset_size, drop_remainder)


class CombinedDataset(Dataset[T_co]):
    """The items of several datasets, one after the other.

    Example:
        >>> list(CombinedDataset("ab", "cd")), list(CombinedDataset(["ab", "cd", "e"]))
        (['a', 'b', 'c', 'd'], ['a', 'b', 'c', 'd', 'e'])

    Args:
        datasets: The datasets, or one list of them.
    """

    @overload
    def __init__(self, datasets: Sequence[Items[T_co]], /) -> None: ...
    @overload
    def __init__(self, dataset1: Items[T_co], dataset2: Items[T_co], /, *others: Items[T_co]) -> None: ...
    def __init__(self, *datasets: Any) -> None:
        listed = datasets[0] if len(datasets) == 1 else datasets
        if not isinstance(listed, list | tuple) or not listed:
            raise TypeError(
                f"CombinedDataset needs several datasets, or one list of them. Got {describe_value(listed)}."
            )
        for dataset in listed:
            require_items("CombinedDataset", dataset)
        self.datasets: tuple[Items[T_co], ...] = tuple(listed)

    @functools.cached_property
    def _starts(self) -> list[int]:
        """Where each dataset starts, and where the last one ends."""
        return [0, *itertools.accumulate(len(dataset) for dataset in self.datasets)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int, /) -> T_co:
        which, inside = self._place(index)
        return item_of(self.datasets[which], inside)

    def __repr__(self) -> str:
        return f"CombinedDataset(datasets={list(self.datasets)!r})"

    def __getitems__(self, indices: list[int]) -> list[T_co]:
        places = [self._place(index) for index in indices]
        items: dict[tuple[int, int], T_co] = {}
        for which in {which for which, _ in places}:
            mine = [place for place in places if place[0] == which]
            items |= zip(mine, items_of(self.datasets[which], [inside for _, inside in mine]), strict=True)
        return [items[place] for place in places]

    def _place(self, index: int) -> tuple[int, int]:
        number = self._number(index)
        which = bisect.bisect_right(self._starts, number) - 1
        return which, number - self._starts[which]
