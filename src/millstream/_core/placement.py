"""Batches over a mesh: which rows this process needs, and how they become one global array."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from millstream._core.contracts import PyTree


@dataclasses.dataclass(frozen=True)
class BatchPlacement:
    """A sharding of the first axes of a batch, for all of its leaves.

    Attributes:
        sharding: Of a leaf with as many axes as the spec names, or more.
        size: Rows of a global batch.
    """

    sharding: NamedSharding
    size: int

    def of(self, axes: int) -> NamedSharding:
        """For a leaf with so many axes; a label has fewer than an image."""
        return NamedSharding(self.sharding.mesh, PartitionSpec(*self.sharding.spec[:axes]))

    @property
    def is_local(self) -> bool:
        """Whether all devices belong to this process."""
        return self.sharding.is_fully_addressable

    def local_rows(self) -> tuple[int, ...]:
        """The rows that the devices of this process need, in rising order."""
        needed = self.of(1).addressable_devices_indices_map((self.size,)).values()
        return tuple(sorted({row for (rows,) in needed for row in range(*rows.indices(self.size))}))  # pyright: ignore

    def constrain(self, tree: PyTree) -> PyTree:
        """Have the compiler place a batch, inside of a program."""
        return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, self.of(leaf.ndim)), tree)

    def place(self, local: np.ndarray, rows: tuple[int, ...]) -> jax.Array:
        """This process's part of a leaf as one global array. Nothing is communicated.

        Args:
            local: The rows of the leaf that this process needs.
            rows: Their numbers in the global batch, from `local_rows`.
        """
        if len(rows) == self.size:
            return jax.make_array_from_callback(local.shape, self.of(local.ndim), local.__getitem__)
        first = np.searchsorted(rows, np.arange(self.size))

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(self.size)
            return local[(slice(first[start], first[start] + stop - start), *index[1:])]

        return jax.make_array_from_callback((self.size, *local.shape[1:]), self.of(local.ndim), part)

    def replicate(self, tree: PyTree) -> PyTree:
        """Data that every device of the mesh has whole, unless they lie on the mesh in some way already."""

        def on_mesh(leaf: Any) -> Any:
            if isinstance(leaf, jax.Array) and leaf.sharding.device_set == self.sharding.device_set:
                return leaf
            return jax.device_put(np.asarray(leaf), NamedSharding(self.sharding.mesh, PartitionSpec()))

        return jax.tree.map(on_mesh, tree)
