"""Arrays that stay on the host: only the rows of a batch travel to the device."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from millstream._core.contracts import PyTree
from millstream._core.errors import require_int
from millstream._core.host_source import HostSource
from millstream._core.plan import Ordering
from millstream._core.samples import SampleSpec, narrowed, spec_of
from millstream.sources._array import check_ordering, check_rows


@dataclasses.dataclass(frozen=True, eq=False)
class HostArraySource(HostSource):
    """The rows of a tree of arrays too large for the device, or of memory-mapped files.

    Example:
        >>> source = ms.HostArraySource({"x": np.zeros((1000, 3), np.float32)})
        >>> source.read(np.array([5, 7]))["x"].shape
        (2, 3)

    Args:
        data: A pytree of NumPy arrays, memory-mapped or not, with the same number of rows. They are used as they are,
            so do not change them while a stream runs.
        ordering: "shuffle" for a new order every epoch, or "sequential".
        prefetch_size: How many samples are read before they are needed.
    """

    data: PyTree
    ordering: Ordering = "shuffle"
    prefetch_size: int = 64

    def __post_init__(self) -> None:
        check_ordering("HostArraySource", self.ordering)
        require_int("HostArraySource", "prefetch_size", self.prefetch_size, least=1)
        check_rows("HostArraySource", self.data)

    def __len__(self) -> int:
        return len(self._leaves[0])

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray]) -> None:
        for leaf, target in zip(self._leaves, out, strict=True):
            if leaf.dtype == target.dtype:
                np.take(leaf, indices, axis=0, out=target, mode="clip")  # "raise" would go through a buffer
            else:
                target[...] = narrowed("HostArraySource", np.take(leaf, indices, axis=0), target.dtype)

    @functools.cached_property
    def sample_spec(self) -> SampleSpec:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The structure of a sample."""
        import jax

        return spec_of("HostArraySource", jax.tree.map(lambda leaf: leaf[0], self.data))

    @functools.cached_property
    def _leaves(self) -> list[Any]:
        import jax

        return [np.asarray(leaf) for leaf in jax.tree.leaves(self.data)]
