"""Sources over a source: a Python function on every sample, or on the samples of a batch. They load no JAX."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from millstream.files import plain
from millstream.files.changed import FileStamp
from millstream.plan.keys import name_words
from millstream.plan.plan import Plan
from millstream.reading.contracts import IndexedSource, PyTree
from millstream.reading.host_source import Beside, HostSource, SampleReader, as_host_source, item_of, read_like
from millstream.reading.padding import PaddedSource
from millstream.reading.samples import TRIED, ObjectSpec, SampleSpec, first_sample, spec_of, spec_or_objects
from millstream.reading.stats import timed
from millstream.reading.view import View
from millstream.text.errors import describe_value, function_name, noted


def generator(key: np.ndarray, name: str) -> np.random.Generator:
    """The random numbers of a sample in a stage: a function of the sample's key and the stage's name."""
    words = np.array([*key, *name_words(name)], np.uint32)
    return np.random.Generator(np.random.Philox(key=words.view(np.uint64)))


def named_parts(source: HostSource) -> list[tuple[str, HostSource]]:
    """A source that is read on the host and the functions over it, first to last, each with its name in errors."""
    own = (getattr(source, attribute, None) for attribute in ("_name", "_caller"))
    name = next((name for name in own if isinstance(name, str)), type(source).__name__)
    below = named_parts(source._inner) if isinstance(source, MappedSource | CollatedSource | PaddedSource) else []
    return [*below, (name, source)]


def is_random(part: HostSource) -> bool:
    """Whether such a part makes use of the keys of samples itself."""
    if isinstance(part, CollatedSource | PaddedSource):
        return False
    return part._random if isinstance(part, MappedSource) else part.keyed


class MappedSource(SampleReader):
    """Every sample of a source, through a function. Nothing is read before it is needed.

    Args:
        inner: The source.
        fn: `fn(sample)`, or `fn(sample, rng)` if it is random.
        readers: How many threads read.
        name: The caller, for errors; also the name its random numbers belong to.
        random: Whether the function takes random numbers.
        first: The samples whose structure stands for all; None for the first ones of the source.
        beside: Fields of what the function returns that are not part of a batch, but travel with it.
    """

    whole_samples = True

    def __init__(
        self,
        inner: IndexedSource,
        fn: Callable[..., PyTree],
        readers: int,
        name: str,
        random: bool,
        first: Sequence[int] | None = None,
        beside: tuple[str, ...] = (),
    ) -> None:
        self._inner = as_host_source(inner)
        self._fn = fn
        self._name = name
        self._random = random
        self._first = range(len(self._inner))[:TRIED] if first is None else first
        self._beside = beside
        self.keyed = random or self._inner.keyed
        self.ordering = self._inner.ordering
        self.prefetch_size = self._inner.prefetch_size
        self.blocks, self.divides_blocks = self._inner.blocks, self._inner.divides_blocks
        self.cache_bytes = self._inner.cache_bytes
        self.readers = readers
        self.functions = [*self._inner.functions, fn]
        self.looks_ahead = self._inner.looks_ahead

    def __len__(self) -> int:
        return len(self._inner)

    @property
    def sample_spec(self) -> SampleSpec | ObjectSpec:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The structure of what the function returns for the first sample that can be read."""
        return self._found[1]

    @property
    def first_sample(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The sample that the spec was found by."""
        return self._found[0]

    @functools.cached_property
    def _found(self) -> tuple[int, SampleSpec | ObjectSpec]:
        key = np.zeros(2, np.uint32) if self.keyed else None
        number, (sample, _) = first_sample(lambda index: self._map_sample(index, key), self._first)
        return number, spec_or_objects(self._name, sample)

    @functools.cached_property
    def stamps(self) -> Sequence[FileStamp]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Of the files of its source, which take time to look at if there are many."""
        return self._inner.stamps

    @property
    def part_starts(self) -> np.ndarray | None:
        """Where the parts of a joined source begin: a function does not change which sample one is."""
        return getattr(self._inner, "part_starts", None)

    def item(self, index: int) -> Any:
        """The item as the source was given it."""
        return item_of(self._inner, index)

    def expect(self, indices: np.ndarray | None) -> None:
        self._inner.expect(indices)

    def expect_blocks(self, indices: np.ndarray, bounds: np.ndarray) -> None:
        self._inner.expect_blocks(indices, bounds)

    def read_row(self, index: int, out: Sequence[np.ndarray], row: int, key: np.ndarray | None) -> Any:
        mapped, extra = self._map_sample(index, key)
        if out[0].dtype.hasobject:  # for another function, which needs no spec
            out[0][row] = mapped
        else:
            self.sample_spec.write(self._name, out, row, index, mapped)
        return extra

    def _map_sample(self, index: int, key: np.ndarray | None) -> tuple[PyTree, Any]:
        with timed("reading"):
            sample, extra = self._inner.read_sample(index, key)
        try:
            with timed(self._name):
                if not self._random:
                    mapped = self._fn(sample)
                else:
                    mapped = self._fn(sample, None if key is None else generator(key, self._name))
        except Exception as error:
            raise noted(error, f"This came from {self._name} at sample {index}.")  # noqa: B904
        if not self._beside:
            return mapped, extra
        rest, own = self._split_off(index, mapped)
        return rest, own if extra is None else {**extra, **own}

    def _split_off(self, index: int, sample: Any) -> tuple[PyTree, dict[str, PyTree]]:
        """What is left of a sample without the fields that travel beside the batch, and these as plain values."""
        missing = [name for name in self._beside if type(sample) is not dict or name not in sample]
        if missing:
            raise TypeError(
                f"{self._name} needs samples that are dicts with {' and '.join(map(repr, missing))} in them. "
                f"Sample {index} is {describe_value(sample)}."
            )
        own = {name: sample[name] for name in self._beside}
        rest = {name: value for name, value in sample.items() if name not in own}
        # Through bytes on every executor, so that all of them give, and refuse, the same.
        return rest, plain.decode(plain.encode(own, f"{self._name}, at sample {index},"))

    def shown_spec(self) -> None:
        """None: to know it, a sample would be read."""

    def __repr__(self) -> str:
        return f"{self._inner!r} -> {self._name}"


def mapped(source: IndexedSource, fn: Callable[..., PyTree], random: bool, readers: int) -> MappedSource | View:
    """The samples of a source through a function; of a view, a view, so that its tables stay in the plan."""
    name = map_name(fn, random)
    if not isinstance(source, View):
        return MappedSource(source, fn, readers, name, random)
    first = Plan(len(source), "sequential", selection=source.selection).first_indices(TRIED)
    return View(MappedSource(source.source, fn, readers, name, random, first), source.selection, source.ordering)


def unchanged(sample: PyTree) -> PyTree:
    """The sample itself. It is here since a worker process, which loads no JAX, gets it by name."""
    return sample


def map_name(fn: Callable[..., PyTree], random: bool) -> str:
    """The name of a function on samples in errors: that of the stage that applies it."""
    return f"{'RandomHostMapTransform' if random else 'HostMapTransform'}({function_name(fn)})"


class FlatMappedSource(SampleReader):
    """Several samples for each sample of a source: those that a function makes of it and a number from 0 on.

    Args:
        inner: The source.
        fn: `fn(sample, number)`.
        firsts: The index of the first sample that is made of each.
        length: How many samples are made.
        name: The caller, for errors.
    """

    whole_samples = True
    readers = 4

    def __init__(
        self, inner: IndexedSource, fn: Callable[[PyTree, int], PyTree], firsts: np.ndarray, length: int, name: str
    ) -> None:
        self._inner = as_host_source(inner)
        self._fn, self._firsts, self._length, self._name = fn, firsts, length, name
        self.keyed = self._inner.keyed
        self.ordering = self._inner.ordering
        self.prefetch_size = self._inner.prefetch_size
        self.functions = [*self._inner.functions, fn]
        self.looks_ahead = self._inner.looks_ahead
        key = np.zeros(2, np.uint32) if self.keyed else None
        self.first_sample, (sample, _) = first_sample(lambda index: self._make(index, key)[1:], range(length))
        self.sample_spec = spec_or_objects(name, sample)

    @functools.cached_property
    def stamps(self) -> Sequence[FileStamp]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Of the files of its source."""
        return self._inner.stamps

    def __len__(self) -> int:
        return self._length

    def read_row(self, index: int, out: Sequence[np.ndarray], row: int, key: np.ndarray | None) -> Any:
        whole, made, extra = self._make(index, key)
        self.sample_spec.write(self._name, out, row, whole, made)
        return extra

    def expect(self, indices: np.ndarray | None) -> None:
        self._inner.expect(None if indices is None else np.searchsorted(self._firsts, indices, side="right") - 1)

    def _make(self, index: int, key: np.ndarray | None) -> tuple[int, PyTree, Any]:
        """The index of the sample that it is made of, the sample, and what its reading returned beside it."""
        whole = int(np.searchsorted(self._firsts, index, side="right")) - 1
        number = index - int(self._firsts[whole])
        with timed("reading"):
            sample, extra = self._inner.read_sample(whole, key)
        try:
            with timed(self._name):
                return whole, self._fn(sample, number), extra
        except Exception as error:
            raise noted(error, f"This came from {self._name} at sample {whole}, number {number}.")  # noqa: B904


class UnshapedSource(HostSource):
    """The samples of a source as Python objects, whatever shapes their arrays have."""

    sample_spec = ObjectSpec("samples of any shape")

    def __init__(self, inner: HostSource) -> None:
        self._inner = inner
        self.ordering = inner.ordering
        read_like(self, [inner])

    def __len__(self) -> int:
        return len(self._inner)

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> Beside:
        samples, beside = self._inner.read_samples(indices, keys)
        for row, sample in enumerate(samples):
            out[0][row] = sample
        return beside

    def expect(self, indices: np.ndarray | None) -> None:
        self._inner.expect(indices)


class CollatedSource(HostSource):
    """A source whose batches are made by a function of their samples.

    Args:
        inner: The source.
        collate: `collate(samples) -> batch`, where the arrays of the batch have a row per sample.
        size: Samples per batch.
        first: As in `MappedSource`.
    """

    whole_batches = True

    def __init__(
        self,
        inner: IndexedSource,
        collate: Callable[[list[Any]], PyTree],
        size: int,
        first: Sequence[int] | None = None,
    ) -> None:
        self._inner = as_host_source(inner)
        self._collate = collate
        self._name = f"collate function {function_name(collate)} of BatchTransform"
        self.keyed = self._inner.keyed
        self.ordering = self._inner.ordering
        self.prefetch_size = self._inner.prefetch_size
        self.readers = self._inner.readers
        self.looks_ahead = self._inner.looks_ahead
        keys = np.zeros((size, 2), np.uint32) if self.keyed else None
        same = lambda index: self._collate_samples(np.full(size, index, np.int64), keys)  # noqa: E731
        self.first_sample, (batch, _) = first_sample(same, range(len(self)) if first is None else first)
        self.sample_spec = self._spec_of_rows(batch, size)

    def __len__(self) -> int:
        return len(self._inner)

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> Beside:
        (batch, beside), spec = self._collate_samples(indices, keys), self.sample_spec
        if isinstance(spec, ObjectSpec):
            out[0][:] = None
            out[0][0] = batch
            return beside
        fix = "Pad to a fixed length, and keep to one dtype, so that nothing compiles again."
        spec.write_rows(f"The result of the {self._name}", out, batch, fix)
        return beside

    def expect(self, indices: np.ndarray | None) -> None:
        self._inner.expect(indices)

    def expect_blocks(self, indices: np.ndarray, bounds: np.ndarray) -> None:
        self._inner.expect_blocks(indices, bounds)

    def item(self, index: int) -> Any:
        """The item as the source was given it."""
        return item_of(self._inner, index)

    def _collate_samples(self, indices: np.ndarray, keys: np.ndarray | None) -> tuple[PyTree, Beside]:
        with timed("reading"):
            samples, beside = self._inner.read_samples(indices, keys)
        try:
            with timed(self._name):
                return self._collate(samples), beside
        except Exception as error:
            shown = describe_value(indices.tolist())
            raise noted(error, f"This came from the {self._name}, which was given samples {shown}.")  # noqa: B904

    def _spec_of_rows(self, batch: PyTree, size: int) -> SampleSpec | ObjectSpec:
        spec = spec_or_objects(self._name, batch)
        if isinstance(spec, ObjectSpec) and spec.refusal is not None:
            return spec
        if isinstance(spec, ObjectSpec) or any(shape[:1] != (size,) for shape in spec.shapes):
            return ObjectSpec(f"the {self._name} returned {describe_value(batch)}")
        leaves = spec.flatten(self._name, batch)
        return spec_of(self._name, spec.unflatten([np.asarray(leaf)[0] for leaf in leaves]))

    def __repr__(self) -> str:
        return repr(self._inner)
