"""Datasets: the base class, views of other datasets, and functions on their items."""

import abc
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np

from millstream.plan import order
from millstream.plan.keys import fold, named_key
from millstream.sharding import shard_bounds
from millstream.text.errors import describe_value, function_name, noted, require_callable, require_int

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")


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


def require_items(caller: str, dataset: Any) -> None:
    """Refuse what has no length, or neither `[index]` nor `get(index)`."""
    if not isinstance(dataset, Indexable | Gettable):
        raise TypeError(
            f"{caller} needs a dataset with a length and [index], or with a length and get(index). "
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


def key_words(caller: str, key: Any) -> np.ndarray:
    """The raw words of a seed or of a key of JAX; seed 7 is `jax.random.key(7)`."""
    if isinstance(key, int):
        require_int(caller, "key", key, least=0)
        if key >> 64:
            raise ValueError(f"{caller} needs a seed of at most 64 bits as its key. Got {key}.")
        return np.array([key >> 32, key & 0xFFFFFFFF], np.uint32)
    from millstream.pipeline import state

    return np.asarray(state.key_words(caller, key))


def shuffled(size: int, words: np.ndarray, count: int | None = None) -> np.ndarray:
    """The numbers below `size` in the order of a key, or the first `count` of them."""
    positions = np.arange(size if count is None else count, dtype=np.uint32 if size <= 1 << 31 else np.uint64)
    if not len(positions):
        return positions
    return order.shuffled(np, positions, size, order.epoch_key(np, words, np.uint32(0)))


def drawn(size: int, words: np.ndarray, count: int) -> np.ndarray:
    """Numbers below `size`, each drawn from all of them."""
    low, high = fold(np, named_key(words, "millstream draw with replacement 1"), np.arange(count, dtype=np.uint64))
    return ((high.astype(np.uint64) << np.uint64(32)) | low) % np.uint64(size)


class Dataset(abc.ABC, Generic[T_co]):
    """Items that are read by index: a base for datasets of your own. Write `__len__`, and `get` or `__getitem__`.

    The one of the two that a class does not write follows the one that it does. A loader takes anything with a length
    and one of them; the base adds what can be done with a dataset. Nothing is read before it is asked for.

    Example:
        >>> class Squares(Dataset[int]):
        ...     def __len__(self):
        ...         return 4
        ...     def get(self, index):
        ...         return index**2
        >>> list(Squares().map(str)), Squares()[-1]
        (['0', '1', '4', '9'], 9)
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _complete(cls)

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of items."""

    def __getitem__(self, index: int, /) -> T_co:
        """The item at an index; -1 is the last one."""
        raise _unreadable(self)

    def get(self, index: int) -> T_co | None:
        """The item at an index; None if there is none. -1 is the last one."""
        raise _unreadable(self)

    def __iter__(self) -> Iterator[T_co]:
        return (self[index] for index in range(len(self)))

    def is_empty(self) -> bool:
        """Whether there are no items."""
        return len(self) == 0

    def map(self, transform: Callable[[T_co], U]) -> "MappedDataset[U]":
        """Every item through a function; see `MappedDataset`."""
        return MappedDataset(self, transform)

    def filter(self, predicate: Callable[[T_co], Any]) -> "FilteredDataset[T_co]":
        """The items for which a function is true; see `FilteredDataset`."""
        return FilteredDataset(self, predicate)

    def map_batch(self, transform: Callable[[list[T_co]], U], batch_size: int = 32) -> "MappedBatchDataset[U]":
        """A function of `batch_size` items at a time; see `MappedBatchDataset`."""
        return MappedBatchDataset(self, transform, batch_size)

    def shuffle(self, seed: Any) -> "View[T_co]":
        """The items in the order of a key or seed; see `ShuffledDataset`."""
        words = key_words(f"{type(self).__name__}.shuffle", seed)
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


def _complete(cls: type[Dataset[Any]]) -> None:
    """Derive `__getitem__` from `get` or the reverse, and reading many items from both: the latest definition decides.

    Each is bound to the method of its own class, not looked up on `self`: `super().get` in an override then reaches
    the dataset below, whichever of the two that one wrote.
    """
    ages = {name: _age(cls, name) for name in ("get", "__getitem__", "__getitems__")}
    if ages["get"] < ages["__getitem__"]:
        cls.__getitem__ = _by_get(cls.get)
    elif ages["__getitem__"] < ages["get"]:
        cls.get = _by_item(cls.__getitem__)  # pyright: ignore[reportAttributeAccessIssue]
    if min(ages["get"], ages["__getitem__"]) < ages["__getitems__"]:
        cls.__getitems__ = _one_by_one  # pyright: ignore[reportAttributeAccessIssue]


def _age(cls: type, name: str) -> int:
    """How many classes up a method is defined."""
    return next((age for age, owner in enumerate(cls.__mro__) if name in vars(owner)), len(cls.__mro__))


def _by_get(get: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    @functools.wraps(Dataset.__getitem__)
    def read(self: Dataset[Any], index: int, /) -> Any:
        return get(self, self._number(index))

    return read


def _by_item(read: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    @functools.wraps(Dataset.get)
    def get(self: Dataset[Any], index: int) -> Any:
        size = len(self)
        return read(self, index % size) if -size <= index < size else None

    return get


def _one_by_one(self: Dataset[Any], indices: list[int]) -> list[Any]:
    return [self[index] for index in indices]


def _unreadable(dataset: Dataset[Any]) -> TypeError:
    return TypeError(f"{type(dataset).__name__} needs a method get(index) or __getitem__(index).")


class View(Dataset[T_co]):
    """Some items of a dataset in some order, seen as a dataset.

    Example:
        >>> list(View("abc", lambda: [2, 0]))
        ['c', 'a']

    Args:
        dataset: The dataset.
        find_places: Says which of its items, once, when that is first asked for.
    """

    def __init__(self, dataset: Items[T_co], find_places: Callable[[], Sequence[int] | np.ndarray]) -> None:
        require_items(type(self).__name__, dataset)
        self.dataset = dataset
        self._find_places = find_places

    def __repr__(self) -> str:
        return f"{type(self).__name__}(dataset={self.dataset!r})"

    @functools.cached_property
    def _places(self) -> Sequence[int] | np.ndarray:
        return self._find_places()

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int, /) -> T_co:
        return item_of(self.dataset, int(self._places[self._number(index)]))

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

    def __init__(self, dataset: Items[T_co], predicate: Callable[[T_co], Any]) -> None:
        require_callable("FilteredDataset", "predicate", predicate)
        super().__init__(dataset, lambda: _kept(dataset, predicate))


def _kept(dataset: Items[T], predicate: Callable[[T], Any]) -> np.ndarray:
    return np.fromiter((index for index in range(len(dataset)) if _holds(dataset, index, predicate)), np.int64)


def _holds(dataset: Items[T], index: int, predicate: Callable[[T], Any]) -> Any:
    try:
        return predicate(item_of(dataset, index))
    except Exception as error:
        raise noted(error, f"This came from {function_name(predicate)}, at item {index} of FilteredDataset's dataset.")  # noqa: B904


class MappedDataset(Dataset[T_co]):
    """Every item of a dataset through a function, which is called when the item is read.

    Example:
        >>> list(MappedDataset([1, 2, 3], lambda item: item * 2))
        [2, 4, 6]

    Args:
        dataset: The dataset.
        map_fn: `map_fn(item) -> item`. The workers of a loader call it.
    """

    def __init__(self, dataset: Items[T], map_fn: Callable[[T], T_co]) -> None:
        require_items("MappedDataset", dataset)
        require_callable("MappedDataset", "map_fn", map_fn)
        self.dataset: Items[Any] = dataset
        self.map_fn = map_fn

    def __repr__(self) -> str:
        return f"MappedDataset(dataset={self.dataset!r}, map_fn={function_name(self.map_fn)})"

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int, /) -> T_co:
        return self.map_fn(item_of(self.dataset, self._number(index)))

    def __getitems__(self, indices: list[int]) -> list[T_co]:
        numbers = [self._number(index) for index in indices]
        pairs = zip(numbers, items_of(self.dataset, numbers), strict=True)
        return [self._mapped(number, item) for number, item in pairs]

    def _mapped(self, number: int, item: Any) -> T_co:
        try:
            return self.map_fn(item)
        except Exception as error:
            raise noted(error, f"This came from {function_name(self.map_fn)}, at item {number} of MappedDataset.")  # noqa: B904


class MappedBatchDataset(Dataset[T_co]):
    """What a function makes of `batch_size` items at a time: each result is one item.

    Example:
        >>> list(MappedBatchDataset([1, 2, 3, 4, 5], sum, batch_size=2))
        [3, 7, 5]

    Args:
        dataset: The dataset.
        transform: `transform(items) -> item`, given a list; the last one may be shorter.
        batch_size: How many items it is given.
    """

    def __init__(self, dataset: Items[T], transform: Callable[[list[T]], T_co], batch_size: int = 32) -> None:
        require_items("MappedBatchDataset", dataset)
        require_callable("MappedBatchDataset", "transform", transform)
        require_int("MappedBatchDataset", "batch_size", batch_size, least=1)
        self.dataset: Items[Any] = dataset
        self.transform = transform
        self.batch_size = batch_size

    def __repr__(self) -> str:
        function = function_name(self.transform)
        return f"MappedBatchDataset(dataset={self.dataset!r}, transform={function}, batch_size={self.batch_size})"

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def __getitem__(self, index: int, /) -> T_co:
        first = self._number(index) * self.batch_size
        return self.transform(items_of(self.dataset, [*range(first, min(first + self.batch_size, len(self.dataset)))]))
