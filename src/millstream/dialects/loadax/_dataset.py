"""Datasets: the base class, views of other datasets, and functions on their items."""

import abc
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from millstream._core.errors import function_name, noted, require_callable, require_int
from millstream.dialects.loadax._items import Indexable, items_of, require_indexable
from millstream.dialects.loadax._order import key_words, shuffled
from millstream.sharding import shard_bounds

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")


class Dataset(abc.ABC, Generic[T_co]):
    """Items that are read by index: a base for datasets of your own. Write `__len__` and `__getitem__`.

    A loader takes anything with these two; the base adds what can be done with a dataset. Nothing is read before it
    is asked for.

    Example:
        >>> class Squares(Dataset[int]):
        ...     def __len__(self):
        ...         return 4
        ...     def __getitem__(self, index):
        ...         return index**2
        >>> list(Squares().map(str))
        ['0', '1', '4', '9']
    """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of items."""

    @abc.abstractmethod
    def __getitem__(self, index: int, /) -> T_co:
        """The item at an index."""

    def __iter__(self) -> Iterator[T_co]:
        return (self[index] for index in range(len(self)))

    def get(self, index: int) -> T_co | None:
        """The item at an index from 0 on; None if there is none."""
        return self[index] if 0 <= index < len(self) else None

    def is_empty(self) -> bool:
        """Whether there are no items."""
        return len(self) == 0

    def map(self, fn: Callable[[T_co], U]) -> "MappedDataset[U]":
        """Every item through a function; see `MappedDataset`."""
        return MappedDataset(self, fn)

    def filter(self, predicate: Callable[[T_co], Any]) -> "FilteredDataset[T_co]":
        """The items for which a function is true; see `FilteredDataset`."""
        return FilteredDataset(self, predicate)

    def map_batch(self, fn: Callable[[list[T_co]], U], batch_size: int = 32) -> "MappedBatchDataset[U]":
        """A function of so many items at a time; see `MappedBatchDataset`."""
        return MappedBatchDataset(self, fn, batch_size)

    def shuffle(self, key: Any) -> "View[T_co]":
        """The items in the order of a key or seed; see `ShuffledDataset`."""
        words = key_words(f"{type(self).__name__}.shuffle", key)
        return View(self, lambda: shuffled(len(self), words))

    def split_dataset_by_node(self, world_size: int, rank: int) -> "View[T_co]":
        """Part number `rank` of `world_size`; the first parts have one item more if it does not come out even."""
        items = range(*shard_bounds(world_size, rank, len(self)))
        return View(self, lambda: items)

    def _number(self, index: int) -> int:
        """An index as a number from 0 on; -1 is the last item."""
        number, size = operator.index(index), len(self)
        if not -size <= number < size:
            raise IndexError(f"{type(self).__name__} has {size} items. Got index {number}.")
        return number % size


class View(Dataset[T_co]):
    """Some items of a dataset in some order, seen as a dataset.

    Example:
        >>> list(View("abc", lambda: [2, 0]))
        ['c', 'a']

    Args:
        dataset: The dataset.
        find_places: Says which of its items, once, when that is first asked for.
    """

    def __init__(self, dataset: Indexable[T_co], find_places: Callable[[], Sequence[int] | np.ndarray]) -> None:
        require_indexable(type(self).__name__, dataset)
        self.dataset = dataset
        self._find_places = find_places

    @functools.cached_property
    def _places(self) -> Sequence[int] | np.ndarray:
        return self._find_places()

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int, /) -> T_co:
        return self.dataset[int(self._places[self._number(index)])]

    def __getitems__(self, indices: list[int]) -> list[T_co]:
        return items_of(self.dataset, [int(self._places[self._number(index)]) for index in indices])


class FilteredDataset(View[T_co]):
    """The items for which a function is true.

    All items are read once, when the length or an item is first asked for, which building a loader does.

    Example:
        >>> list(FilteredDataset(range(6), lambda item: item % 2))
        [1, 3, 5]

    Args:
        dataset: The dataset.
        predicate: `predicate(item)`, true for the items to keep.
    """

    def __init__(self, dataset: Indexable[T_co], predicate: Callable[[T_co], Any]) -> None:
        require_callable("FilteredDataset", "predicate", predicate)
        super().__init__(dataset, lambda: _kept(dataset, predicate))


def _kept(dataset: Indexable[T], predicate: Callable[[T], Any]) -> np.ndarray:
    return np.fromiter((index for index in range(len(dataset)) if _holds(dataset, index, predicate)), np.int64)


def _holds(dataset: Indexable[T], index: int, predicate: Callable[[T], Any]) -> Any:
    try:
        return predicate(dataset[index])
    except Exception as error:
        raise noted(error, f"This came from {function_name(predicate)}, at item {index} of FilteredDataset's dataset.")  # noqa: B904


class MappedDataset(Dataset[T_co]):
    """Every item of a dataset through a function, which is called when the item is read.

    Example:
        >>> list(MappedDataset([1, 2, 3], lambda item: item * 2))
        [2, 4, 6]

    Args:
        dataset: The dataset.
        fn: `fn(item) -> item`. The workers of a loader call it.
    """

    def __init__(self, dataset: Indexable[T], fn: Callable[[T], T_co]) -> None:
        require_indexable("MappedDataset", dataset)
        require_callable("MappedDataset", "fn", fn)
        self.dataset: Indexable[Any] = dataset
        self.fn = fn

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int, /) -> T_co:
        return self.fn(self.dataset[self._number(index)])

    def __getitems__(self, indices: list[int]) -> list[T_co]:
        numbers = [self._number(index) for index in indices]
        pairs = zip(numbers, items_of(self.dataset, numbers), strict=True)
        return [self._mapped(number, item) for number, item in pairs]

    def _mapped(self, number: int, item: Any) -> T_co:
        try:
            return self.fn(item)
        except Exception as error:
            raise noted(error, f"This came from {function_name(self.fn)}, at item {number} of MappedDataset.")  # noqa: B904


class MappedBatchDataset(Dataset[T_co]):
    """What a function makes of so many items at a time: each result is one item.

    Example:
        >>> list(MappedBatchDataset([1, 2, 3, 4, 5], sum, batch_size=2))
        [3, 7, 5]

    Args:
        dataset: The dataset.
        fn: `fn(items) -> item`, given a list; the last one may be shorter.
        batch_size: How many items it is given.
    """

    def __init__(self, dataset: Indexable[T], fn: Callable[[list[T]], T_co], batch_size: int = 32) -> None:
        require_indexable("MappedBatchDataset", dataset)
        require_callable("MappedBatchDataset", "fn", fn)
        require_int("MappedBatchDataset", "batch_size", batch_size, least=1)
        self.dataset: Indexable[Any] = dataset
        self.fn = fn
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def __getitem__(self, index: int, /) -> T_co:
        first = self._number(index) * self.batch_size
        return self.fn(items_of(self.dataset, [*range(first, min(first + self.batch_size, len(self.dataset)))]))
