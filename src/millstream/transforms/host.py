"""Python functions on the host: in the middle of a compiled program, or on samples before they are batched."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, overload

import jax
import numpy as np
from jax.experimental import io_callback

from millstream.pipeline.bucketed import BucketedPipeline
from millstream.pipeline.compose import HostPipeline
from millstream.pipeline.host_calls import remembering
from millstream.pipeline.iterable import IterablePipeline
from millstream.pipeline.pipeline import Pipeline, as_stream
from millstream.pipeline.transform import Transform
from millstream.reading.contracts import IndexedSource, PyTree
from millstream.reading.derived_sources import MappedSource, map_name, unchanged
from millstream.reading.host_source import HostSource
from millstream.reading.iterable import IterableSource
from millstream.reading.samples import TRIED, SampleSpec, spec_of
from millstream.text.errors import function_name, require_callable, require_names, require_readers
from millstream.text.summaries import call_text

# What stages on the host come after.
HostStaged = IndexedSource | IterableSource | HostPipeline


@dataclasses.dataclass(frozen=True)
class HostCallbackTransform(Transform):
    """Call a Python function with every element as NumPy arrays, to look at it or to replace it.

    It may stand anywhere after the source. After the `BatchTransform` it is called once per batch, before it once per
    sample: with the samples of a batch one after the other, in the order they have in it, just before that batch is
    made, and not for padding. Batches come in order, and none is made before it is asked for. The function must not
    call JAX: the program that waits for it may hold the device.

    Example:
        >>> seen = []
        >>> stage = ms.transforms.HostCallbackTransform(lambda batch, mask: seen.append(int(mask.sum())))

    Args:
        fn: `fn(batch, mask)` returns None, or a batch of the same structure, shapes and dtypes to continue with. For
            samples, the mask is a single True.
        element_spec_override: The shapes and dtypes of what `fn` returns, if they differ from what it gets, as a pytree
            of `jax.ShapeDtypeStruct`. `fn` must then return a batch, or a sample.
    """

    effects: ClassVar[bool] = True

    fn: Callable[[PyTree, np.ndarray], PyTree | None]
    element_spec_override: PyTree = dataclasses.field(default=None, hash=False)

    def __post_init__(self) -> None:
        require_callable("HostCallbackTransform", "fn", self.fn, "batch, mask")

    @property
    def name(self) -> str:
        return f"HostCallbackTransform({function_name(self.fn)})"

    def apply(self, value: PyTree, mask: jax.Array, key: jax.Array | None) -> tuple[PyTree, jax.Array]:
        spec = self._spec(value, 0)

        @remembering
        def call(value: PyTree, mask: Any) -> PyTree:
            value, mask = jax.tree.map(np.asarray, (value, mask))
            result = self.fn(value, mask)
            if result is None and self.element_spec_override is None:
                return value
            out = spec.empty(1)
            spec.write(self.name, out, 0, None, result)
            return spec.unflatten([leaf[0] for leaf in out])

        return io_callback(call, spec.tree(), value, mask, ordered=True), mask

    def apply_each(self, axes: int, value: PyTree, mask: jax.Array, key: jax.Array | None) -> tuple[PyTree, jax.Array]:
        spec, leading = self._spec(value, axes), mask.shape[:axes]
        count = math.prod(leading)

        @remembering
        def call(value: PyTree, mask: Any) -> PyTree:
            # One call for all of them: each one from a compiled program costs more than most functions.
            value, mask = jax.tree.map(lambda leaf: np.reshape(leaf, (count, *leaf.shape[axes:])), (value, mask))
            out = [np.zeros_like(leaf) for leaf in spec.empty(count)]
            for row in range(count):
                sample, real = jax.tree.map(lambda leaf, row=row: leaf[row], (value, mask))
                if not np.any(real):
                    continue  # the BatchTransform puts zeros there in any case
                result = self.fn(sample, real)
                kept = result is None and self.element_spec_override is None
                spec.write(self.name, out, row, None, sample if kept else result)
            return spec.unflatten([leaf.reshape(leading + leaf.shape[1:]) for leaf in out])

        stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*leading, *leaf.shape), leaf.dtype), spec.tree())
        return io_callback(call, stacked, value, mask, ordered=True), mask

    def _spec(self, value: PyTree, axes: int) -> SampleSpec:
        """What the function returns for one element."""
        if self.element_spec_override is not None:
            return spec_of(f"{self.name}: element_spec_override", self.element_spec_override)
        return spec_of(self.name, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype), value))

    def __repr__(self) -> str:
        return call_text(self)


class HostStage:
    """A stage where samples are read: it makes a source of a source. A base of frozen dataclasses."""

    otherwise: ClassVar[str] = ""
    """What to use after compiled stages instead, for errors."""

    def source_over(self, inner: IndexedSource, stream: HostPipeline) -> HostSource:
        """The samples of a source through this stage.

        Args:
            inner: The source.
            stream: The pipeline that reads it.
        """
        raise NotImplementedError

    @overload
    def __call__(self, source: IndexedSource | Pipeline) -> Pipeline: ...
    @overload
    def __call__(self, source: BucketedPipeline) -> BucketedPipeline: ...
    @overload
    def __call__(self, source: IterableSource | IterablePipeline) -> IterablePipeline: ...
    def __call__(self, source: HostStaged) -> HostPipeline:
        """Put this stage after a source."""
        stream: object = as_stream(source)
        if not isinstance(stream, HostPipeline) or not stream.is_untouched or stream.source is None:
            raise TypeError(
                f"{type(self).__name__} works on samples as they are read, so it comes after the source and before all "
                f"compiled stages. Move it up{self.otherwise}."
            )
        return stream.read_through(self.source_over(stream.source, stream))

    def __repr__(self) -> str:
        return call_text(self)


@dataclasses.dataclass(frozen=True, repr=False)
class HostMapTransform(HostStage):
    """Apply a NumPy or Python function to every sample where it is read, before anything is compiled.

    It comes after the source, or after another such stage. Threads or worker processes call it while earlier batches
    are used.

    Example:
        >>> source = ms.HostArraySource(np.arange(10.0))
        >>> loader = ms.DataLoader([source, ms.HostMapTransform(np.sqrt), ms.BatchTransform(5)])

    Args:
        fn: `fn(sample) -> sample`. It gets samples as the source has them: arrays of any shape, which it may change,
            lists, text, images of Pillow, None, any object. What it returns becomes part of a batch, so it must have
            the same shapes and dtypes every time: those for sample 0, or for the first one that can be read.
        readers: How many threads read and call it, if the loader has no executor.
    """

    otherwise: ClassVar[str] = ", or use MapTransform or HostCallbackTransform"
    random: ClassVar[bool] = False

    fn: Callable[..., PyTree]
    readers: int = 4

    def __post_init__(self) -> None:
        require_callable(type(self).__name__, "fn", self.fn, "sample, rng" if self.random else "sample")
        require_readers(type(self).__name__, "readers", self.readers)

    def source_over(self, inner: IndexedSource, stream: HostPipeline) -> HostSource:
        name, first = map_name(self.fn, self.random), stream.plan.first_indices(TRIED)
        return MappedSource(inner, self.fn, self.readers, name, self.random, first)


class RandomHostMapTransform(HostMapTransform):
    """Apply a NumPy or Python function that needs randomness to every sample where it is read.

    The random numbers depend on the run's key, the function's name, the epoch and the sample, and on nothing else: not
    on which worker calls it, nor when.

    Example:
        >>> def jitter(sample, rng):
        ...     return sample + rng.normal(0, 0.1)
        >>> source = ms.HostArraySource(np.arange(10.0))
        >>> loader = ms.DataLoader([source, ms.RandomHostMapTransform(jitter), ms.BatchTransform(5)])

    Args:
        fn: `fn(sample, rng) -> sample`, where `rng` is a `numpy.random.Generator`.
        readers: How many threads read and call it, if the loader has no executor.
    """

    random: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, repr=False)
class InfoTransform(HostStage):
    """Take fields out of samples where they are read, and hand them out beside the batch, in its `BatchInfo`.

    What it takes never becomes an array of a batch: integers keep all 64 bits (document ids, timestamps, offsets in
    files), text stays text. No compiled program sees it, so nothing can cut it short; a loop's steps do not get it.
    It comes after the source, or after another stage on the host, and works with every executor and cache.

    Example:
        >>> rows = [{"x": np.float32(n), "id": 2**40 + n} for n in range(4)]
        >>> source = ms.DatasetSource(rows, ordering="sequential")
        >>> loader = ms.DataLoader([source, ms.transforms.InfoTransform("id"), ms.BatchTransform(2)])
        >>> batch, mask, info = next(loader.iterate(loader.init_state(jax.random.key(0)), with_info=True))
        >>> list(batch), info.additional["id"]
        (['x'], [1099511627776, 1099511627777])

    Args:
        fields: The name of a field of samples that are dicts, or several. Their values must be plain: numbers, text,
            bytes, arrays of NumPy, dates, or lists and dicts of these.
        readers: How many threads read, if the loader has no executor.
    """

    fields: str | Sequence[str]
    readers: int = 4

    def __post_init__(self) -> None:
        fields = [self.fields] if isinstance(self.fields, str) else self.fields
        names = tuple(require_names("InfoTransform", "fields", fields))
        if not names:
            raise ValueError("InfoTransform needs at least one field. Got none.")
        object.__setattr__(self, "fields", names)
        require_readers("InfoTransform", "readers", self.readers)

    def source_over(self, inner: IndexedSource, stream: HostPipeline) -> HostSource:
        name, first = f"InfoTransform({', '.join(map(repr, self.fields))})", stream.plan.first_indices(TRIED)
        return MappedSource(inner, unchanged, self.readers, name, False, first, beside=tuple(self.fields))
