"""Strategies over a mesh of devices: rows of the batch divided, the state repeated or spread."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from millstream.reading.contracts import PyTree
from millstream.sharding import (
    MeshConfig,
    as_batch_sharding,
    check_batch_size,
    make_ddp_mesh_config,
    make_fsdp_mesh_config,
)
from millstream.sharding.global_batch import common_rows, global_rows, local_shards
from millstream.states.strategies import Strategy, Traced, jitted
from millstream.text.errors import require_int


@dataclasses.dataclass(frozen=True)
class DataParallel(Strategy):
    """Every device has a copy of the state and rows of its own of every batch.

    A batch from the host is divided along its first axis; over several processes, each gives the rows of its own
    devices. Batches that lie on all devices already, as a sharded `DataLoader` gives them, are used as they are.

    Example:
        >>> strategy = ms.managed.DataParallel(jax.make_mesh((1,), ("data",)), donate=True)

    Args:
        mesh: A `Mesh` with an axis "data", a `MeshConfig`, or the `NamedSharding` of a batch; by default all devices.
        donate: See `Strategy`.
    """

    mesh: Mesh | MeshConfig | NamedSharding | None = None
    donate: bool = False

    @functools.cached_property
    def batch_sharding(self) -> NamedSharding:
        """How the rows of a batch are divided."""
        return with_auto_axes(as_batch_sharding(make_ddp_mesh_config() if self.mesh is None else self.mesh))

    def state_sharding(self, leaf: jax.Array) -> NamedSharding:
        """How an array of the state is divided: here not at all."""
        return NamedSharding(self.batch_sharding.mesh, PartitionSpec())

    def place(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: _placed(leaf, self.state_sharding(leaf)), tree)

    def constrain(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, self.state_sharding(leaf)), tree)

    def compile(self, traced: Traced) -> Traced:
        compiled = jitted(traced, donate=self.donate)
        sharding, seen = self.batch_sharding, {self.batch_sharding}

        def run(state: Any, batch: PyTree, elapsed: Any) -> tuple[Any, Any]:
            for leaf in jax.tree.leaves(batch):
                if getattr(leaf, "sharding", None) not in seen:
                    batch = _placed_batch(batch, sharding)
                    seen.update(leaf.sharding for leaf in jax.tree.leaves(batch) if not _is_traced(leaf))
                    break
            return compiled(state, batch, elapsed)

        return run

    def lift_batch_size(self, batch_size: int) -> int:
        return super().lift_batch_size(batch_size) * local_shards(self.batch_sharding)


@dataclasses.dataclass(frozen=True)
class FSDP(DataParallel):
    """Every device has rows of its own, and a part of each large array of the state: parameters, optimizer, averages.

    Example:
        >>> strategy = ms.managed.FSDP(min_size=2**16, donate=True)

    Args:
        mesh: A `Mesh`, over whose last axis arrays are spread and over all of whose axes rows are divided; or a
            `MeshConfig`, which says what rows are divided over; by default `make_fsdp_mesh_config()`.
        donate: See `Strategy`.
        min_size: Arrays with fewer elements are repeated on every device.
    """

    min_size: int = 1024

    def __post_init__(self) -> None:
        require_int("FSDP", "min_size", self.min_size, least=0)

    @functools.cached_property
    def batch_sharding(self) -> NamedSharding:
        mesh = make_fsdp_mesh_config() if self.mesh is None else self.mesh
        if isinstance(mesh, Mesh):
            mesh = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        return with_auto_axes(as_batch_sharding(mesh))

    def state_sharding(self, leaf: jax.Array) -> NamedSharding:
        """How an array is divided: along its longest axis that divides by the devices."""
        mesh, shape = self.batch_sharding.mesh, leaf.shape
        axis = mesh.axis_names[-1]
        devices = mesh.shape[axis]
        fitting = [number for number, length in enumerate(shape) if length and length % devices == 0]
        if devices == 1 or not fitting or math.prod(shape) < self.min_size:
            return NamedSharding(mesh, PartitionSpec())
        longest = max(fitting, key=lambda number: shape[number])
        return NamedSharding(mesh, PartitionSpec(*[None] * longest, axis))


def with_auto_axes(sharding: NamedSharding) -> NamedSharding:
    """The same over a mesh that leaves it to the compiler how values inside a program are divided."""
    mesh = sharding.mesh
    auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))  # pyright: ignore
    return NamedSharding(auto, sharding.spec, memory_kind=sharding.memory_kind)


def _placed_batch(batch: PyTree, sharding: NamedSharding) -> PyTree:
    """A batch over the devices: one from the host divided, one that lies there already as it is."""
    leaves, structure = jax.tree.flatten(batch)
    if all(_lies_on(leaf, sharding) for leaf in leaves):
        return structure.unflatten([_in_auto_axes(leaf) for leaf in leaves])
    caller = "A data-parallel step"
    if not sharding.is_fully_addressable:
        return global_rows(caller, jax.tree.map(np.asarray, batch), sharding)
    check_batch_size(caller, common_rows(caller, batch), sharding)
    return jax.device_put(batch, sharding)


def _lies_on(leaf: Any, sharding: NamedSharding) -> bool:
    return _is_traced(leaf) or (isinstance(leaf, jax.Array) and leaf.sharding.device_set == sharding.device_set)


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, Tracer)


def _in_auto_axes(leaf: Any) -> Any:
    """An array as it lies. Those over explicit axes cannot meet a state over a mesh of automatic ones in a program."""
    if _is_traced(leaf) or not isinstance(leaf.sharding, NamedSharding):
        return leaf
    if AxisType.Explicit not in leaf.sharding.mesh.axis_types:
        return leaf
    parts = [shard.data for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, with_auto_axes(leaf.sharding), parts)


def _placed(leaf: Any, sharding: NamedSharding) -> Any:
    if _is_traced(leaf):
        return jax.lax.with_sharding_constraint(leaf, sharding)
    if _lies_on(leaf, sharding):
        return jax.device_put(_in_auto_axes(leaf), sharding)
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        words = _placed(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    # `device_put` would send all data to all processes to compare them.
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)
