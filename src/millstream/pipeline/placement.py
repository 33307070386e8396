"""Batches over a mesh: which rows this process needs, and how they become one global array."""

import bisect
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from millstream.reading.contracts import PyTree


@dataclasses.dataclass(frozen=True)
class BatchPlacement:
    """A sharding of the first axes of a batch, for all of its leaves.

    Stages are compiled over a mesh whose axes the compiler may use as it likes ("auto"), whatever the mesh of the user:
    they are written for one device. What comes out is handed over on the mesh of the user.

    Attributes:
        sharding: Of a leaf with as many axes as the spec names, or more.
        size: Rows of a global batch.
    """

    sharding: NamedSharding
    size: int

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh that stages are compiled over."""
        return _with_auto_axes(self.sharding.mesh)

    def of(self, axes: int) -> NamedSharding:
        """For a leaf with that many axes; a label has fewer than an image."""
        return NamedSharding(self.mesh, PartitionSpec(*self.sharding.spec[:axes]))

    def require_auto(self, caller: str) -> None:
        """Refuse a mesh with explicit axes, in programs that are not made of our stages alone."""
        if self.mesh != self.sharding.mesh:
            raise TypeError(
                f"{caller} compiles your function together with stages that are written for one device, which a mesh "
                "with explicit axes does not allow. Make the mesh with axis_types=(jax.sharding.AxisType.Auto,) * "
                "axes, or use iterate."
            )

    def take_over(self, tree: PyTree) -> PyTree:
        """A state that was made under a mesh of explicit axes, as NumPy arrays."""

        def taken(leaf: Any) -> Any:
            made_under = jax.typeof(leaf).sharding.mesh.axis_types if isinstance(leaf, jax.Array) else ()
            return np.asarray(leaf) if AxisType.Explicit in made_under else leaf

        return jax.tree.map(taken, tree)

    def hand_over(self, leaf: jax.Array) -> jax.Array:
        """An array over the mesh of the user."""
        if self.mesh == self.sharding.mesh:
            return leaf
        return _over(self.sharding.mesh, leaf)

    @property
    def is_local(self) -> bool:
        """Whether all devices belong to this process."""
        return self.sharding.is_fully_addressable

    def local_rows(self) -> tuple[int, ...]:
        """The rows that the devices of this process need, in rising order."""
        needed = self.of(1).addressable_devices_indices_map((self.size,)).values()
        return tuple(sorted({row for (rows,) in needed for row in range(*rows.indices(self.size))}))  # pyright: ignore

    def constrain(self, tree: PyTree) -> PyTree:
        """Have the compiler place a batch, inside a program."""
        return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, self.of(leaf.ndim)), tree)

    def place(self, local: np.ndarray, rows: tuple[int, ...]) -> jax.Array:
        """This process's part of a leaf as one global array. Nothing is communicated.

        Args:
            local: The rows of the leaf that this process needs.
            rows: Their numbers in the global batch, from `local_rows`.
        """
        if len(rows) == self.size:
            return jax.make_array_from_callback(local.shape, self.of(local.ndim), local.__getitem__)

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(self.size)
            first = bisect.bisect_left(rows, start)
            return local[(slice(first, first + stop - start), *index[1:])]

        return jax.make_array_from_callback((self.size, *local.shape[1:]), self.of(local.ndim), part)

    def replicate(self, tree: PyTree) -> PyTree:
        """Data that every device of the mesh has whole, unless they lie on the mesh in some way already."""

        def on_mesh(leaf: Any) -> Any:
            if isinstance(leaf, jax.Array) and leaf.sharding.device_set == self.sharding.device_set:
                placed = leaf.sharding
                return _over(_with_auto_axes(placed.mesh), leaf) if isinstance(placed, NamedSharding) else leaf
            # `device_put` would send all data to all processes to compare them, and hang where their sizes differ.
            whole = np.asarray(leaf)
            return jax.make_array_from_callback(whole.shape, self.of(0), whole.__getitem__)

        return jax.tree.map(on_mesh, tree)


def _with_auto_axes(mesh: Any) -> Mesh:
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _over(mesh: Any, leaf: Any) -> jax.Array:
    """An array that stays where it is, over a mesh of the same devices whose axes have other types."""
    sharding = NamedSharding(mesh, leaf.sharding.spec, memory_kind=leaf.sharding.memory_kind)
    return jax.make_array_from_single_device_arrays(
        leaf.shape, sharding, [shard.data for shard in leaf.addressable_shards]
    )


def readable(mask: Any) -> Any:
    """A mask that every process can read as a whole, and that is on its way to the host."""
    if not isinstance(mask, jax.Array):
        return mask
    if not mask.is_fully_addressable:
        mask = _replicator(mask.sharding.mesh)(mask)  # pyright: ignore[reportAttributeAccessIssue]
    mask.copy_to_host_async()
    return mask


@functools.cache
def _replicator(mesh: Any) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda leaf: leaf, out_shardings=NamedSharding(mesh, PartitionSpec()))
