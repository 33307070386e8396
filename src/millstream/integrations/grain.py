"""Grain: its sources and datasets as ours, and ours as its own.

What Grain iterates over (`grain.IterDataset`, `grain.DataLoader`) needs nothing of this: its iterators have `get_state`
and `set_state`, so a loop over them can be saved and resumes exactly.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from millstream.reading.contracts import IndexedSource, PyTree
from millstream.reading.host_source import as_host_source
from millstream.sources.disk import DatasetSource
from millstream.text.errors import describe_value, needs, require_int

if TYPE_CHECKING:
    import grain

    from millstream.loader.loader import DataLoader


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class GrainSource(DatasetSource):
    """The elements of a `grain.MapDataset`, or of any source with random access that Grain can read.

    The order is the loader's: leave out `shuffle` and `repeat`. A worker process loads JAX, because Grain does.

    Example:
        >>> import grain
        >>> from millstream.integrations.grain import GrainSource
        >>> dataset = grain.MapDataset.source([1.0, 2.0, 3.0]).map(lambda x: {"x": np.float32(x)})
        >>> loader = ms.DataLoader([GrainSource(dataset), ms.BatchTransform(2)])

    Args:
        dataset: The dataset or source. It is called from several threads.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
        readers: How many threads read, if the loader has no executor.
    """

    def __post_init__(self) -> None:
        with needs("GrainSource", "grain", "grain"):
            import grain
        if isinstance(self.dataset, grain.IterDataset | grain.DataLoader):
            raise TypeError(
                f"GrainSource needs elements that can be read in any order. Got {describe_value(self.dataset)}. Give "
                "it the MapDataset or the source behind it, or loop over it as it is."
            )
        super().__post_init__()
        if len(self.dataset) == sys.maxsize:
            raise ValueError("GrainSource needs a dataset that ends. Leave out repeat(): a loader has its own epochs.")

    def _item(self, number: int) -> PyTree:
        return self._present(number, super()._item(number))

    def _items(self, numbers: list[int]) -> Sequence[PyTree]:
        return [self._present(number, item) for number, item in zip(numbers, super()._items(numbers), strict=True)]

    def _present(self, number: int, item: PyTree) -> PyTree:
        if item is None:
            raise ValueError(
                f"GrainSource needs an element at every index, and {type(self.dataset).__name__}[{number}] is None, as "
                "filter() leaves it. Filter the source before, or mask such samples."
            )
        return item


class RandomAccess:
    """An indexed source of ours as one that Grain reads.

    Example:
        >>> import grain
        >>> from millstream.integrations.grain import RandomAccess
        >>> source = RandomAccess(ms.ArraySampleSource({"x": np.arange(10)}))
        >>> int(grain.MapDataset.source(source).shuffle(seed=0).map(lambda sample: sample["x"] + 100)[0]) >= 100
        True

    Args:
        source: Any of our sources with samples that can be read in any order.
    """

    def __init__(self, source: IndexedSource) -> None:
        if not isinstance(source, IndexedSource):
            raise TypeError(f"RandomAccess needs an indexed source of Millstream. Got {describe_value(source)}.")
        self._source = as_host_source(source)
        self._name = f"RandomAccess({type(source).__name__} of {len(source)})"

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> PyTree:
        return self._source.read_sample(self._number(index), None)[0]

    def __getitems__(self, indices: Sequence[int]) -> list[PyTree]:
        """Several samples, read together."""
        return self._source.read_samples(np.array([self._number(index) for index in indices], np.int64), None)[0]

    def _number(self, index: Any) -> int:
        """An index as a number from 0 on; -1 is the last sample."""
        number = int(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"RandomAccess has {len(self)} samples. Got {number}.")
        return number % len(self)

    def __repr__(self) -> str:
        return self._name  # Grain keeps it in the state of a loader, so it must be the same next time


def to_grain(loader: "DataLoader", state: PyTree, *, steps: int | None = None) -> "grain.IterDataset":
    """The (batch, mask) pairs of a loader as a dataset of Grain, whose iterator Grain and Orbax can save and restore.

    Example:
        >>> from millstream.integrations.grain import to_grain
        >>> batches = iter(to_grain(loader, state, steps=100))
        >>> batch, mask = next(batches)
        >>> saved = batches.get_state()  # as grain.checkpoint.CheckpointSave(batches) does

    Args:
        loader: The loader, of an indexed source.
        state: Where to start.
        steps: How many batches; by default those left in the state's epoch.
    """
    with needs("to_grain", "grain", "grain"):
        from millstream.integrations._grain_dataset import LoaderDataset
    if steps is not None:
        require_int("to_grain", "steps", steps, least=0)
    return LoaderDataset(loader, state, steps)
