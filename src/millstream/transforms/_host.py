"""Python functions on the host: in the middle of a compiled program, or on samples before they are batched."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax.experimental import io_callback

from millstream._core.callbacks import remembering
from millstream._core.contracts import IndexedSource, PyTree, Stream
from millstream._core.errors import function_name, noted, require_callable, require_int
from millstream._core.host_source import HostSource
from millstream._core.pipeline import Pipeline, as_stream
from millstream._core.samples import spec_of, spec_or_objects
from millstream._core.transform import Transform


@dataclasses.dataclass(frozen=True)
class HostCallbackTransform(Transform):
    """Call a Python function with every element as NumPy arrays, to look at it or to replace it.

    Calls are made in order, once per batch. It stands behind the `BatchTransform`. The function must not call JAX: the
    program that waits for it may hold the device.

    Example:
        >>> seen = []
        >>> stage = ms.HostCallbackTransform(lambda batch, mask: seen.append(int(mask.sum())))

    Args:
        fn: `fn(batch, mask)` returns None, or a batch of the same structure, shapes and dtypes to go on with.
        element_spec_override: The shapes and dtypes of what `fn` returns, if they differ from what it gets, as a pytree
            of `jax.ShapeDtypeStruct`. `fn` must then return a batch.
    """

    effects: ClassVar[bool] = True

    fn: Callable[[PyTree, np.ndarray], PyTree | None]
    element_spec_override: Any = dataclasses.field(default=None, hash=False)

    def __post_init__(self) -> None:
        require_callable("HostCallbackTransform", "fn", self.fn)

    @property
    def name(self) -> str:
        return f"HostCallbackTransform({function_name(self.fn)})"

    def apply(self, value: PyTree, mask: jax.Array, key: jax.Array | None) -> tuple[PyTree, jax.Array]:
        given = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), value)
        spec = spec_of(self.name, given if self.element_spec_override is None else self.element_spec_override)

        @remembering
        def call(value: PyTree, mask: Any) -> PyTree:
            value, mask = jax.tree.map(np.asarray, (value, mask))
            result = self.fn(value, mask)
            if result is None and self.element_spec_override is None:
                return value
            out = [np.empty((1, *shape), dtype) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
            spec.write(self.name, out, 0, None, result)
            return spec.structure.unflatten([leaf[0] for leaf in out])

        return io_callback(call, spec.tree(), value, mask, ordered=True), mask


@dataclasses.dataclass(frozen=True)
class HostMapTransform:
    """Apply a NumPy or Python function to every sample where it is read, before anything is compiled.

    It stands behind the source, or behind another such stage. Threads call it while earlier batches are used.

    Example:
        >>> source = ms.HostArraySource(np.arange(10.0))
        >>> loader = ms.DataLoader([source, ms.HostMapTransform(np.sqrt), ms.BatchTransform(5)])

    Args:
        fn: `fn(sample) -> sample`. Shapes and dtypes are those it gives for sample 0.
        readers: How many threads read and call it.
    """

    fn: Callable[[PyTree], PyTree]
    readers: int = 4

    def __post_init__(self) -> None:
        require_callable("HostMapTransform", "fn", self.fn)
        require_int("HostMapTransform", "readers", self.readers, least=1)

    def __call__(self, source: Any) -> Stream:
        """Put this stage behind a source."""
        source = as_stream(source)
        if not isinstance(source, Pipeline) or source.stages or source.source is None:
            raise TypeError(
                "HostMapTransform works on samples as they are read, so it stands behind the source and before all "
                "compiled stages. Move it up, or use MapTransform or HostCallbackTransform."
            )
        return as_stream(_MappedSource(source.source, self.fn, self.readers))


class _MappedSource(HostSource):
    def __init__(self, inner: IndexedSource, fn: Callable[[PyTree], PyTree], readers: int) -> None:
        self._inner = inner
        self._inner_objects = inner.spec() is None
        self._fn = fn
        self.ordering = inner.ordering
        self.prefetch_size = getattr(inner, "prefetch_size", 64)
        self.readers = readers
        self._name = f"HostMapTransform({function_name(fn)})"
        self.sample_spec = spec_or_objects(self._name, self._mapped(np.zeros(1, np.int64))[0])

    def __len__(self) -> int:
        return len(self._inner)

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray]) -> None:
        for row, (index, sample) in enumerate(zip(indices.tolist(), self._mapped(indices), strict=True)):
            self.sample_spec.write(self._name, out, row, index, sample)

    def _mapped(self, indices: np.ndarray) -> list[PyTree]:
        rows = self._inner.read(indices)
        mapped = []
        for row, index in enumerate(indices.tolist()):
            sample = rows[row] if self._inner_objects else jax.tree.map(lambda leaf, row=row: leaf[row], rows)
            try:
                mapped.append(self._fn(sample))
            except Exception as error:
                raise noted(error, f"This came from {self._name} at sample {index}.") from None
        return mapped
