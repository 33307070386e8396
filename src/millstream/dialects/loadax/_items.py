"""What counts as a dataset, and how its items are read. Nothing here, nor in the datasets, loads JAX."""

from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from millstream.text.errors import describe_value, noted

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class Indexable(Protocol[T_co]):
    """Anything with a length and `[index]`: a `Dataset`, a list, an array, a dataset of a different library.

    `__getitems__(indices)` is used where there is one, so that many items are read by one call.

    Example:
        >>> isinstance([1, 2, 3], Indexable), isinstance({1, 2, 3}, Indexable)
        (True, False)
    """

    def __len__(self) -> int:
        """Number of items."""
        ...

    def __getitem__(self, index: int, /) -> T_co:
        """The item at an index."""
        ...


@runtime_checkable
class Gettable(Protocol[T_co]):
    """A dataset as loadax wrote it down: a length and `get(index)`. It is read by `get` if it has no `[index]`."""

    def __len__(self) -> int:
        """Number of items."""
        ...

    def get(self, index: int, /) -> T_co | None:
        """The item at an index, or None if there is none."""
        ...


Items: TypeAlias = Indexable[T] | Gettable[T]


def require_items(who: str, dataset: Any) -> None:
    """Refuse what has no length, or neither `[index]` nor `get(index)`."""
    if not isinstance(dataset, Indexable | Gettable):
        raise TypeError(
            f"{who} needs a dataset with a length and [index], or with a length and get(index). "
            f"Got {describe_value(dataset)}."
        )


def item_of(dataset: Items[T], index: int) -> T:
    """The item at an index from 0 on."""
    # Not isinstance: that of a protocol costs more than reading most items.
    read: Any = dataset
    return read[index] if hasattr(read, "__getitem__") else read.get(index)


def items_of(dataset: Items[T], indices: list[int]) -> list[T]:
    """The items at some indices, by one call if the dataset has one for that; an error says at which item it was."""
    read_many = getattr(dataset, "__getitems__", None)
    if read_many is None:
        return [_noted_item_of(dataset, index) for index in indices]
    items = list(read_many(indices))
    if len(items) != len(indices):
        name = type(dataset).__name__
        raise ValueError(f"{name}.__getitems__ was asked for {len(indices)} items and returned {len(items)}.")
    return items


def _noted_item_of(dataset: Items[T], index: int) -> T:
    try:
        return item_of(dataset, index)
    except Exception as error:
        raise noted(error, f"This came from {type(dataset).__name__}[{index}].")  # noqa: B904
