"""What counts as a dataset, and how its items are read. Nothing here, nor in the datasets, loads JAX."""

from typing import Any, Protocol, TypeVar, runtime_checkable

from millstream._core.errors import describe_value, noted

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class Indexable(Protocol[T_co]):
    """Anything with a length and `[index]`: a `Dataset`, a list, an array, a dataset of another library.

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


def require_indexable(who: str, dataset: Any) -> None:
    """Refuse what has no length or no `[index]`."""
    if not isinstance(dataset, Indexable):
        hint = " Name its method get(index) __getitem__(index)." if hasattr(dataset, "get") else ""
        raise TypeError(f"{who} needs a dataset with a length and [index]. Got {describe_value(dataset)}.{hint}")


def items_of(dataset: Indexable[T], indices: list[int]) -> list[T]:
    """The items at some indices, by one call if the dataset has one for that; an error says at which item it was."""
    read_many = getattr(dataset, "__getitems__", None)
    if read_many is None:
        return [_item(dataset, index) for index in indices]
    items = list(read_many(indices))
    if len(items) != len(indices):
        name = type(dataset).__name__
        raise ValueError(f"{name}.__getitems__ was asked for {len(indices)} items and returned {len(items)}.")
    return items


def _item(dataset: Indexable[T], index: int) -> T:
    try:
        return dataset[index]
    except Exception as error:
        raise noted(error, f"This came from {type(dataset).__name__}[{index}].")  # noqa: B904
