"""What a source is. Two shapes, told apart by their methods; no base class is needed."""

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from millstream.plan.ordering import Ordering

PyTree: TypeAlias = Any
"""Containers that JAX knows, with anything as leaves: a sample, a batch, a model. JAX has no type for it."""

# The type of a batch. Type variables have defaults from Python 3.13 on; type checkers know them already.
if TYPE_CHECKING:
    import jax
    from typing_extensions import TypeVar

    B = TypeVar("B", covariant=True, default=PyTree)
    T = TypeVar("T", covariant=True, default=PyTree)
else:
    from typing import TypeVar

    B = TypeVar("B", covariant=True)
    T = TypeVar("T", covariant=True)


class Items(Protocol[T]):
    """Anything with a length and `[index]`: a list, a dataset."""

    def __len__(self) -> int:
        """How many items there are."""
        ...

    def __getitem__(self, index: int, /) -> T:
        """One item."""
        ...


@runtime_checkable
class IndexedSource(Protocol):
    """Samples that can be read in any order: the plan decides which, the source only reads them.

    Example:
        >>> isinstance(ms.ArraySampleSource({"x": np.arange(3)}), ms.sources.IndexedSource)
        True
    """

    @property
    def ordering(self) -> Ordering | str:
        """Whether an epoch goes through the samples shuffled or in sequence."""
        ...

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def spec(self) -> PyTree:
        """The shape and dtype of one sample, as a pytree of `jax.ShapeDtypeStruct`."""
        ...

    def read(self, indices: np.ndarray, out: PyTree | None = None) -> PyTree:
        """The samples at `indices`, stacked, as NumPy arrays; into `out` if it is given."""
        ...

    @property
    def arrays(self) -> PyTree | None:
        """The samples as JAX arrays, for gathering inside a compiled program; None if they are read on the host."""
        ...


@runtime_checkable
class Stream(Protocol[B]):
    """Values that come one after the other and depend on a state: an environment, a buffer, a composed source.

    Example:
        >>> isinstance(ms.BatchTransform(4)(ms.ArraySampleSource({"x": np.arange(8)})), ms.sources.Stream)
        True
    """

    @property
    def steps_per_epoch(self) -> int:
        """How many values make an epoch."""
        ...

    def init_state(self, key: "jax.Array") -> PyTree:
        """The state before the first value."""
        ...

    def next(self, state: PyTree) -> tuple[B, "jax.Array", PyTree]:
        """The next value, its mask and the state after it. Pure and traceable."""
        ...

    def element_spec(self) -> PyTree:
        """The shape and dtype of one value."""
        ...
