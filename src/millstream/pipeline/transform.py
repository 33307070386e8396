"""What a transform is: a value that says what happens to one element of a pipeline."""

from typing import ClassVar, overload

import jax

from millstream.pipeline.compose import compose
from millstream.pipeline.pipeline import Pipeline
from millstream.plan.plan import Batching
from millstream.reading.contracts import IndexedSource, PyTree, Stream
from millstream.reading.iterable import IterableSource


class Transform:
    """Base of all stages; a subclass is a frozen dataclass with hashable fields and one method, `apply`.

    Before a `BatchTransform` an element is a sample and `apply` is `vmap`ped over the batch to come; after it an
    element is the whole batch. Shapes are derived by tracing `apply`.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Negate(ms.Transform):
        ...     def apply(self, value, mask, key):
        ...         return jax.tree.map(jnp.negative, value), mask
    """

    keyed: ClassVar[bool] = False
    """Whether `apply` wants a key of its own for every element; otherwise it gets None."""

    effects: ClassVar[bool] = False
    """Whether `apply` calls the host in a way that shows: it is then never run ahead of time, nor `vmap`ped. Before a
    `BatchTransform`, `apply_each` is called in its place."""

    passive: ClassVar[bool] = False
    """Whether `apply` changes nothing."""

    batches: ClassVar[bool] = False
    """Whether this stage groups elements; it then has `batching` in place of `apply`."""

    def apply(self, value: PyTree, mask: jax.Array, key: jax.Array | None) -> tuple[PyTree, jax.Array]:
        """The changed element and its mask. Traced."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it does: give it an `apply` method.")

    def apply_each(self, axes: int, value: PyTree, mask: jax.Array, key: jax.Array | None) -> tuple[PyTree, jax.Array]:
        """What `apply` does to each element of a batch to come, for a stage with `effects = True`.

        Args:
            axes: How many leading axes count the elements.
            value: The elements, stacked.
            mask: Their masks, stacked; False where there is no element.
            key: Their keys, for a stage with `keyed = True`.
        """
        raise TypeError(f"{self.name} sees whole batches, in order. Put it after the BatchTransform.")

    def batching(self, inner: int) -> Batching:
        """How the `inner` elements of an epoch are grouped, for a stage with `batches = True`."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it batches: give it a `batching` method.")

    @property
    def name(self) -> str:
        """The stage's name in error texts and in the derivation of its keys."""
        return type(self).__name__

    @overload
    def __call__(self, source: IndexedSource | Pipeline) -> Pipeline: ...
    @overload
    def __call__(self, source: Stream | IterableSource) -> Stream: ...
    def __call__(self, source: IndexedSource | Stream | IterableSource) -> Stream:
        """Put this stage after a source."""
        return compose(source, self)
