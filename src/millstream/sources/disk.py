"""Samples that a function reads one by one: from disk, a database, over a network."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from millstream.plan.ordering import Ordering
from millstream.reading.contracts import Items, PyTree
from millstream.reading.host_source import Beside, SampleReader
from millstream.reading.samples import ObjectSpec, SampleSpec, first_sample, spec_of, spec_or_objects
from millstream.reading.stats import add_time
from millstream.sources.array import check_ordering
from millstream.text.errors import (
    describe_value,
    function_name,
    noted,
    require_callable,
    require_int,
    require_items,
    require_prefetch,
    require_readers,
)
from millstream.text.keywords import answer_keywords
from millstream.text.summaries import never_raising
from millstream.text.wrapping import ITERABLE, table_source


@answer_keywords
@dataclasses.dataclass(frozen=True, eq=False)
class DiskSampleSource(SampleReader):
    """The samples of any function from an index to a pytree of arrays.

    Threads read ahead: the plan is known, so the next samples are on their way while the current batch is used, in
    Python as well as inside a compiled scan. With `DataLoader(..., executor=Processes(4))` worker processes read.

    Example:
        >>> source = ms.DiskSampleSource(100, lambda index: {"square": np.float32(index**2)})
        >>> loader = ms.DataLoader([source, ms.BatchTransform(10)])

    Args:
        length: Number of samples.
        sample_fn: `sample_fn(index) -> sample`. It is called from several threads.
        sample_spec: The shapes and dtypes of a sample, as a pytree of `jax.ShapeDtypeStruct`; by default those of
            sample 0, which is then read once, or of the first one that can be read.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
        readers: How many threads read, if the loader has no executor.
    """

    whole_samples = True

    length: int
    sample_fn: Callable[[int], PyTree]
    sample_spec: PyTree = None
    ordering: Ordering = "shuffle"
    prefetch_size: int = 64
    readers: int = 4

    def __post_init__(self) -> None:
        caller = type(self).__name__
        require_callable(caller, "sample_fn", self.sample_fn, "index")
        check_ordering(caller, self.ordering)
        require_int(caller, "length", self.length, least=1)
        require_prefetch(caller, self.prefetch_size)
        require_readers(caller, "readers", self.readers)
        if self.sample_spec is not None:
            object.__setattr__(self, "sample_spec", _given_spec(caller, self.sample_spec))
            return
        first, sample = first_sample(self._sample, range(self.length))
        object.__setattr__(self, "sample_spec", spec_or_objects(caller, sample))
        object.__setattr__(self, "first_sample", first)

    def __len__(self) -> int:
        return self.length

    def read_row(self, index: int, out: Sequence[np.ndarray], row: int, key: np.ndarray | None) -> None:
        self.sample_spec.write(self._name, out, row, index, self._sample(index))

    @functools.cached_property
    def _name(self) -> str:
        return f"DiskSampleSource({function_name(self.sample_fn)})"

    def _sample(self, index: int) -> PyTree:
        try:
            begun = time.perf_counter()
            sample = self.sample_fn(index)
            add_time("sample_fn", begun)
            return sample
        except Exception as error:
            raise noted(error, f"This came from sample_fn({index}) of DiskSampleSource.")  # noqa: B904

    @never_raising
    def __repr__(self) -> str:
        return f"DiskSampleSource({len(self):,} samples of {function_name(self.sample_fn)}, {self.sample_spec})"


@answer_keywords
@dataclasses.dataclass(frozen=True, eq=False)
class DatasetSource(SampleReader):
    """The items of any object with a length and `[index]`; `__getitems__(list)` is used where there is one.

    Example:
        >>> digits = ms.datasets.DigitsDataset("train")
        >>> loader = ms.DataLoader([ms.DatasetSource(digits), ms.BatchTransform(64)])

    Args:
        dataset: The object. It is called from several threads.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
        readers: How many threads read, if the loader has no executor.
    """

    whole_samples = True

    dataset: Items
    ordering: Ordering = "shuffle"
    prefetch_size: int = 64
    readers: int = 4

    def __post_init__(self) -> None:
        caller = type(self).__name__
        if isinstance(self.dataset, Iterable) and not hasattr(self.dataset, "__getitem__"):
            found = describe_value(self.dataset)
            raise TypeError(f"{caller} needs an object with a length and [index]. Got {found}. {ITERABLE}")
        if hasattr(self.dataset, "columns") and (line := table_source(self.dataset)):
            raise TypeError(f"{caller} reads samples with [index], which gives columns of a table. {line}")
        require_items(caller, "an object", self.dataset)
        check_ordering(caller, self.ordering)
        require_prefetch(caller, self.prefetch_size)
        require_readers(caller, "readers", self.readers)

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def sample_spec(self) -> SampleSpec | ObjectSpec:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The structure of a sample: that of item 0, or of the first one that can be read."""
        return self._found[1]

    @property
    def first_sample(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The item that the spec was found by."""
        return self._found[0]

    @functools.cached_property
    def _found(self) -> tuple[int, SampleSpec | ObjectSpec]:
        number, item = first_sample(self._item, range(len(self)))
        return number, spec_or_objects(self._name, item)

    @property
    def reads_samples(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether items are asked for one by one."""
        return not hasattr(self.dataset, "__getitems__")

    def shown_spec(self) -> PyTree:
        """The shape and dtype of one sample, if it is known: to find it, a sample would be read."""
        return self.spec() if "_found" in vars(self) else None

    def item(self, index: int) -> Any:
        """The item itself."""
        return self.dataset[index]

    def read_row(self, index: int, out: Sequence[np.ndarray], row: int, key: np.ndarray | None) -> None:
        self.sample_spec.write(self._name, out, row, index, self._item(index))

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> Beside:
        if self.reads_samples:
            return super().read_rows(indices, out)
        numbers = indices.tolist()
        for row, (index, item) in enumerate(zip(numbers, self._items(numbers), strict=True)):
            self.sample_spec.write(self._name, out, row, index, item)

    @functools.cached_property
    def _name(self) -> str:
        return f"{type(self).__name__}({type(self.dataset).__name__})"

    def _item(self, number: int) -> PyTree:
        if not self.reads_samples:
            return self._items([number])[0]
        try:
            begun = time.perf_counter()
            item = self.dataset[number]
            add_time("dataset", begun)
            return item
        except Exception as error:
            raise noted(error, f"This came from {type(self.dataset).__name__}[{number}] in {type(self).__name__}.")  # noqa: B904

    def _items(self, numbers: list[int]) -> Sequence[PyTree]:
        try:
            begun = time.perf_counter()
            dataset: Any = self.dataset
            items = dataset.__getitems__(numbers)
            add_time("dataset", begun)
            return items
        except Exception as error:
            name, caller = type(self.dataset).__name__, type(self).__name__
            raise noted(error, f"This came from {name}.__getitems__({describe_value(numbers)}) in {caller}.")  # noqa: B904

    @never_raising
    def __repr__(self) -> str:
        known = f", {self.sample_spec}" if "_found" in vars(self) else ""
        return f"{type(self).__name__}({len(self):,} items of {type(self.dataset).__name__}{known})"


def _given_spec(caller: str, spec: PyTree) -> SampleSpec:
    import jax

    for leaf in jax.tree.leaves(spec):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise TypeError(
                f"{caller} needs sample_spec to be a tree of jax.ShapeDtypeStruct. Got {describe_value(leaf)}."
            )
    return spec_of(caller, spec)
