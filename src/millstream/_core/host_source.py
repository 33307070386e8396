"""The base of sources whose samples are read on the host, batch by batch."""

from collections.abc import Sequence

import numpy as np

from millstream._core.contracts import PyTree
from millstream._core.plan import Ordering
from millstream._core.samples import ObjectSpec, SampleSpec


class HostSource:
    """An indexed source without arrays. A subclass has a length, `sample_spec` and `read_rows`; the rest follows.

    Attributes:
        ordering: "shuffle" or "sequential".
        prefetch_size: How many samples are read before they are needed.
        readers: How many threads share the reading of a batch.
        sample_spec: The structure of a sample, or that it is a Python object.
    """

    ordering: Ordering
    prefetch_size: int
    readers: int = 1
    sample_spec: SampleSpec | ObjectSpec

    arrays = None

    def __len__(self) -> int:
        raise NotImplementedError

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray]) -> None:
        """Write the samples at `indices` into the rows of `out`, one array per leaf of the spec."""
        raise NotImplementedError

    def spec(self) -> PyTree:
        """The shape and dtype of one sample; None if it is a Python object."""
        return self.sample_spec.tree()

    def read(self, indices: np.ndarray, out: PyTree | None = None) -> PyTree:
        """The samples at `indices`, stacked, as NumPy arrays, into `out` if it is given; or a list of objects."""
        import jax

        spec = self.sample_spec
        if isinstance(spec, ObjectSpec):
            objects = np.empty(len(indices), object)
            self.read_rows(indices, [objects])
            return objects.tolist()
        if out is None:
            leaves = zip(spec.shapes, spec.dtypes, strict=True)
            out = spec.structure.unflatten([np.empty((len(indices), *shape), dtype) for shape, dtype in leaves])
        self.read_rows(indices, jax.tree.leaves(out))
        return out
