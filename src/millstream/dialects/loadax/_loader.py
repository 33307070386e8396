"""Loaders: a dataset in batches, and a pass through it."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Self, TypeVar

import jax
import numpy as np

from millstream.dialects.loadax._dataset import Items, View, items_of, require_items
from millstream.dialects.loadax._sharding import JaxShardingStrategy
from millstream.loader.iterator import BatchIterator
from millstream.loader.loader import DataLoader as Engine
from millstream.reading.dtypes import to_jax_dtype
from millstream.reading.host_source import HostSource
from millstream.reading.interrupts import OneThread
from millstream.reading.samples import ObjectSpec
from millstream.reading.threads import Threads
from millstream.text.errors import describe_value, noted, require_callable, require_int, require_readers
from millstream.transforms.batch import BatchTransform

T = TypeVar("T")
B = TypeVar("B")
B_co = TypeVar("B_co", covariant=True)


class Batcher(Generic[T, B]):
    """Makes a batch of a list of items, where they are read: in a worker, ahead of the loop.

    Example:
        >>> Batcher(np.stack).batch([np.zeros(3), np.ones(3)]).shape
        (2, 3)

    Args:
        batch_fn: `batch_fn(items) -> batch`. What it returns is what the loop gets. The last list of a pass may be
            shorter.
        device: Where to put the arrays of a batch ahead of the loop: one of `jax.devices()`, or a sharding. By default
            they stay as they are.
    """

    def __init__(self, batch_fn: Callable[[list[T]], B], device: Any = None) -> None:
        require_callable("Batcher", "batch_fn", batch_fn)
        if not isinstance(device, jax.Device | jax.sharding.Sharding | None):
            raise TypeError(
                f"Batcher needs device to be one of jax.devices(), or a sharding. Got {describe_value(device)}."
            )
        self.batch_fn = batch_fn
        self.device = device

    def batch(self, items: list[T]) -> B:
        """The batch of some items."""
        batch = self.batch_fn(items)
        if self.device is None:
            return batch
        arrays = jax.tree.map(lambda leaf: to_jax_dtype(type(self).__name__, leaf), batch)
        return jax.device_put(arrays, self.device)


class ListBatcher(Batcher[T, list[T]]):
    """Batches that are the lists themselves.

    Example:
        >>> ListBatcher().batch([1, 2])
        [1, 2]
    """

    def __init__(self) -> None:
        super().__init__(_as_they_are)


class StackBatcher(Batcher[Any, Any]):
    """Batches of stacked items: dicts, tuples and other trees of arrays or numbers become one tree of NumPy arrays.

    Example:
        >>> StackBatcher().batch([{"x": 1, "y": [0.5, 1.5]}, {"x": 2, "y": [2.5, 3.5]}])
        {'x': array([1, 2]), 'y': [array([0.5, 2.5]), array([1.5, 3.5])]}

    Args:
        device: As for a `Batcher`.
    """

    def __init__(self, device: Any = None) -> None:
        super().__init__(_stacked, device)


def _as_they_are(items: list[T]) -> list[T]:
    return items


def _stacked(items: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *items)


class BatchSource(HostSource):
    """Reads the items of a batch together, and hands them to the batcher. What comes out may be any object.

    Args:
        dataset: The dataset.
        batcher: The batcher.
    """

    whole_batches = True
    ordering = "sequential"
    sample_spec = ObjectSpec("what a Batcher returns")

    def __init__(self, dataset: Items[Any], batcher: Batcher[Any, Any]) -> None:
        self._dataset = dataset
        self._batcher = batcher

    def __len__(self) -> int:
        return len(self._dataset)

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> None:
        numbers = indices.tolist()
        try:
            items = items_of(self._dataset, numbers)
        except Exception as error:
            raise noted(error, f"{type(self._dataset).__name__} was asked for items {describe_value(numbers)}.")  # noqa: B904
        try:
            out[0][0] = self._batcher.batch(items)
        except Exception as error:
            name = type(self._batcher).__name__
            raise noted(error, f"This came from {name}.batch, given items {describe_value(numbers)}.")  # noqa: B904


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a pass has come.

    Example:
        >>> Progress(4, 10)
        Progress(items_processed=4, items_total=10)

    Attributes:
        items_processed: Items of the batches that the loop has got; those read ahead do not count.
        items_total: Items of the whole pass.
    """

    items_processed: int
    items_total: int


@dataclasses.dataclass(frozen=True)
class Options:
    """How a loader loads.

    Attributes:
        batch_size: Items per batch.
        workers: Threads that read.
        prefetch: Batches that are read ahead, at least.
        drop_last: Whether a last, shorter batch is left out.
        sharding: Which items this process reads, if not all.
    """

    batch_size: int = 1
    workers: int = 1
    prefetch: int = 2
    drop_last: bool = False
    sharding: JaxShardingStrategy | None = None

    def __post_init__(self) -> None:
        require_int("DataLoader", "batch_size", self.batch_size, least=1)
        require_readers("DataLoader", "workers", self.workers, least=0)
        require_int("DataLoader", "prefetch", self.prefetch, least=0)


class Loader(Generic[B_co]):
    """A dataset in batches. It has no state: every `iter` is a pass of its own, from the first item on.

    Example:
        >>> from millstream.dialects.loadax import Batcher, DataLoader
        >>> loader = DataLoader(Batcher(sum)).batch_size(2).build([1, 2, 3, 4, 5])
        >>> len(loader), list(loader), list(loader)
        (3, [3, 7, 5], [3, 7, 5])

    Args:
        dataset: The dataset.
        batcher: Makes batches of its items.
        options: How to load.
    """

    def __init__(self, dataset: Items[T], batcher: Batcher[T, B_co], options: Options) -> None:
        require_items("DataLoader", dataset)
        if not callable(getattr(batcher, "batch", None)):
            raise TypeError(
                f"DataLoader needs a Batcher, or an object with a method batch(items). Got {describe_value(batcher)}."
            )
        items: Items[Any] = dataset
        if options.sharding is not None:
            shard = options.sharding.items_of_process(len(dataset), options.batch_size)
            items = View(dataset, lambda: shard)
        workers = max(1, options.workers)
        # A batch is read by one worker, so there is one in flight for each of them.
        ahead = max(options.prefetch, workers - 1)
        stages = [BatchSource(items, batcher), BatchTransform(options.batch_size, drop_last=options.drop_last)]
        self._engine = Engine(stages, executor=Threads(workers), prefetch=ahead)
        self._items = len(items) // options.batch_size * options.batch_size if options.drop_last else len(items)
        self._sharding = options.sharding

    @property
    def sharding_strategy(self) -> JaxShardingStrategy:
        """How batches lie over the mesh of `.shard(mesh)`; it makes global batches of local ones."""
        if self._sharding is None:
            raise ValueError("This loader has no mesh. Say .shard(mesh, data_axis_name=...) before .build(dataset).")
        return self._sharding

    def __len__(self) -> int:
        return self._engine.steps_per_epoch

    def num_batches(self) -> int:
        """Batches of a pass, a shorter last one included."""
        return len(self)

    def num_items(self) -> int:
        """Items of a pass: those that this process reads."""
        return self._items

    def __iter__(self) -> "LoaderIterator[B_co]":
        state = self._engine.init_state(np.zeros(2, np.uint32))
        return LoaderIterator(self._engine.iterate(state, steps=len(self)), self._items)


class LoaderIterator(Iterator[B_co]):
    """One pass through a loader. Running to the end, an error, `close` and being forgotten all end its workers.

    Example:
        >>> from millstream.dialects.loadax import Batcher, DataLoader
        >>> batches = iter(DataLoader(Batcher(sum)).batch_size(2).build([1, 2, 3, 4, 5]))
        >>> next(batches), batches.progress(), len(batches)
        (3, Progress(items_processed=2, items_total=5), 3)

    Args:
        batches: The pass of the engine.
        items: How many items it has.
    """

    def __init__(self, batches: BatchIterator, items: int) -> None:
        self._batches = batches
        self._progress = Progress(0, items)
        self._one_thread = OneThread(type(self).__name__)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> B_co:
        with self._one_thread:
            batch, _ = next(self._batches)
            items = self._progress.items_processed + self._batches.samples
            self._progress = dataclasses.replace(self._progress, items_processed=items)
            return batch

    def __len__(self) -> int:
        """Batches of the whole pass."""
        return len(self._batches)

    def progress(self) -> Progress:
        """How many items the loop has got."""
        return self._progress

    def close(self) -> None:
        """End the pass and its workers; closing twice does no harm."""
        self._batches.close()


@dataclasses.dataclass(frozen=True)
class FixedBatchStrategy:
    """How many items a batch of a `DistributedDataLoader` has.

    Example:
        >>> FixedBatchStrategy(8)
        FixedBatchStrategy(batch_size=8)

    Args:
        batch_size: Items per batch; the last one may be shorter.
    """

    batch_size: int

    def __post_init__(self) -> None:
        require_int("FixedBatchStrategy", "batch_size", self.batch_size, least=1)


class DistributedDataLoader(Loader[B_co]):
    """What `DataLoader(batcher).shard(mesh).build(dataset)` makes, with everything as an argument.

    Example:
        >>> from millstream.dialects.loadax import ListBatcher
        >>> list(DistributedDataLoader([1, 2, 3], ListBatcher(), FixedBatchStrategy(2), 1, 2))
        [[1, 2], [3]]

    Args:
        dataset: The dataset.
        batcher: Makes batches of its items.
        strategy: How many items a batch has.
        num_workers: Threads that read, one batch each.
        prefetch_factor: Batches that are read ahead.
        sharding_strategy: Which items this process reads; all of them without one.
        shard_id: Which part this process reads, if not as `sharding_strategy` has it.
        num_shards: In how many parts the items are divided, if not as `sharding_strategy` has it.
    """

    def __init__(
        self,
        dataset: Items[T],
        batcher: Batcher[T, B_co],
        strategy: FixedBatchStrategy,
        num_workers: int,
        prefetch_factor: int,
        sharding_strategy: JaxShardingStrategy | None = None,
        shard_id: int | None = None,
        num_shards: int | None = None,
    ) -> None:
        if not isinstance(strategy, FixedBatchStrategy):
            raise TypeError(
                "DistributedDataLoader needs strategy to be a FixedBatchStrategy(batch_size). "
                f"Got {describe_value(strategy)}."
            )
        given = {"shard_id": shard_id, "num_shards": num_shards}
        if sharding_strategy is not None and any(value is not None for value in given.values()):
            sharding_strategy = dataclasses.replace(sharding_strategy, **given)
        options = Options(strategy.batch_size, num_workers, prefetch_factor, sharding=sharding_strategy)
        super().__init__(dataset, batcher, options)


class Dataloader(Loader[list[T]]):
    """A dataset in lists of items.

    Example:
        >>> list(Dataloader([1, 2, 3, 4, 5], batch_size=2))
        [[1, 2], [3, 4], [5]]

    Args:
        dataset: The dataset.
        batch_size: Items per list.
        num_workers: Threads that read, one list each; 0 reads nothing ahead.
        prefetch_factor: Lists that are read ahead, at least one for each worker.
        drop_last: Leave out a last, shorter list.
    """

    def __init__(
        self,
        dataset: Items[T],
        batch_size: int,
        num_workers: int = 0,
        prefetch_factor: int = 0,
        *,
        drop_last: bool = False,
    ) -> None:
        ahead = 0 if num_workers == 0 else prefetch_factor
        super().__init__(dataset, ListBatcher(), Options(batch_size, num_workers, ahead, drop_last))
