"""Batches over a mesh: which rows this process needs, and how they become one global array."""

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from millstream.reading.contracts import PyTree

Path = tuple[Any, ...]  # of keys of a tree


@dataclasses.dataclass(frozen=True)
class BatchShardings:
    """How a batch lies over a mesh.

    Attributes:
        rows: Of the first axis, which all leaves and the mask have in common.
        of_all: Of every leaf, as far as it has these axes.
        of_some: By the paths of leaves, or of trees of leaves; these have all the axes.
    """

    rows: NamedSharding
    of_all: PartitionSpec | None = None
    of_some: tuple[tuple[Path, PartitionSpec], ...] = ()

    @property
    def divides_rows_alone(self) -> bool:
        """Whether no other axis of any leaf is divided."""
        return len(self.of_all or ()) < 2 and not self.of_some

    @property
    def words(self) -> str:
        """A name, equal for equal ones."""
        some = [f"{jax.tree_util.keystr(path)} {spec}" for path, spec in self.of_some]
        return ", ".join(some or [str(self.of_all or self.rows.spec)])

    def spec(self, path: Path, shape: tuple[int, ...]) -> PartitionSpec:
        """Of one leaf of a batch; refuses a leaf that cannot be divided so."""
        spec = next((spec for of, spec in self.of_some if path[: len(of)] == of), None)
        if spec is None:
            spec = PartitionSpec(*(self.of_all or self.rows.spec)[: len(shape)])
        name = jax.tree_util.keystr(path) or "The batch"
        if len(spec) > len(shape):
            raise ValueError(
                f"DataLoader: sharding has {spec} for {name}, which has fewer axes: its batches are {list(shape)}. "
                f"Write {PartitionSpec(*spec[: len(shape)])}."
            )
        for axis, names in enumerate(spec):
            names = (names,) if isinstance(names, str) else names or ()
            parts = math.prod(self.rows.mesh.shape[name] for name in names)
            if shape[axis] % parts:
                raise ValueError(
                    f"DataLoader: sharding divides axis {axis} of {name} by {parts}, and its batches are "
                    f"{list(shape)}. Pad them, or give each leaf its own: "
                    f"sharding={{'a leaf': NamedSharding(mesh, {spec}), 'another': ...}}."
                )
        return spec

    def require_leaves(self, paths: list[Path]) -> None:
        """Refuse a sharding of a leaf that is not there."""
        for of, _ in self.of_some:
            if not any(path[: len(of)] == of for path in paths):
                raise ValueError(
                    f"DataLoader: sharding names {jax.tree_util.keystr(of)}, which batches do not have. They have "
                    f"{', '.join(jax.tree_util.keystr(path) for path in paths)}."
                )


@dataclasses.dataclass(frozen=True)
class BatchPlacement:
    """How batches of one size lie over a mesh.

    Stages are compiled over a mesh whose axes the compiler may use as it likes ("auto"), whatever the mesh of the user:
    they are written for one device. What comes out is handed over on the mesh of the user.

    Attributes:
        shardings: Of the leaves.
        size: Rows of a global batch.
    """

    shardings: BatchShardings
    size: int

    @property
    def sharding(self) -> NamedSharding:
        """Of the rows."""
        return self.shardings.rows

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh that stages are compiled over."""
        return _with_auto_axes(self.sharding.mesh)

    @functools.cached_property
    def by_rows(self) -> NamedSharding:
        """Of an array with a row per sample."""
        return NamedSharding(self.mesh, self.sharding.spec)

    def of_leaves(self, batch: PyTree) -> list[NamedSharding]:
        """Of each leaf of a batch of arrays or shapes."""
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        self.shardings.require_leaves([path for path, _ in leaves])
        return [NamedSharding(self.mesh, self.shardings.spec(path, leaf.shape)) for path, leaf in leaves]

    def require_auto(self, caller: str) -> None:
        """Refuse a mesh with explicit axes, in programs that are not made of our stages alone."""
        if self.hands_over:
            raise TypeError(
                f"{caller} compiles your function together with stages that are written for one device, which a mesh "
                "with explicit axes does not allow. Make the mesh with axis_types=(jax.sharding.AxisType.Auto,) * "
                "axes, or use iterate."
            )

    @functools.cached_property
    def hands_over(self) -> bool:
        """Whether what comes out of stages has to be handed over: the mesh of the user is a different one."""
        return self.mesh != self.sharding.mesh

    def hand_over(self, leaf: jax.Array) -> jax.Array:
        """An array over the mesh of the user."""
        return _over(self.sharding.mesh, leaf)

    @property
    def is_local(self) -> bool:
        """Whether all devices belong to this process."""
        return self.sharding.is_fully_addressable

    def local_rows(self) -> tuple[int, ...]:
        """The rows that the devices of this process need, in rising order."""
        needed = self.by_rows.addressable_devices_indices_map((self.size,)).values()
        return tuple(sorted({row for (rows,) in needed for row in range(*rows.indices(self.size))}))  # pyright: ignore

    def constrain(self, batch: PyTree, mask: jax.Array) -> tuple[PyTree, jax.Array]:
        """Have the compiler place a batch and its mask, inside a program."""
        leaves, structure = jax.tree.flatten(batch)
        placed = map(jax.lax.with_sharding_constraint, leaves, self.of_leaves(batch))
        return jax.tree.unflatten(structure, placed), jax.lax.with_sharding_constraint(mask, self.by_rows)

    def place(self, local: np.ndarray, rows: tuple[int, ...], sharding: NamedSharding | None = None) -> jax.Array:
        """This process's part of a leaf as one global array. Nothing is communicated.

        Args:
            local: The rows of the leaf that this process needs.
            rows: Their numbers in the global batch, from `local_rows`.
            sharding: That of the leaf; None divides its rows alone.
        """
        sharding = self.by_rows if sharding is None else sharding
        if len(rows) == self.size:
            return jax.make_array_from_callback(local.shape, sharding, local.__getitem__)

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(self.size)
            first = bisect.bisect_left(rows, start)
            return local[(slice(first, first + stop - start), *index[1:])]

        return jax.make_array_from_callback((self.size, *local.shape[1:]), sharding, part)

    def replicate(self, tree: PyTree) -> PyTree:
        """Data that every device of the mesh has whole, unless they lie on the mesh in some way already."""
        everywhere = NamedSharding(self.mesh, PartitionSpec())

        def on_mesh(leaf: Any) -> Any:
            if isinstance(leaf, jax.Array) and leaf.sharding.device_set == self.sharding.device_set:
                placed = leaf.sharding
                return _over(_with_auto_axes(placed.mesh), leaf) if isinstance(placed, NamedSharding) else leaf
            # `device_put` would send all data to all processes to compare them, and hang where their sizes differ.
            whole = np.asarray(leaf)
            return jax.make_array_from_callback(whole.shape, everywhere, whole.__getitem__)

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
