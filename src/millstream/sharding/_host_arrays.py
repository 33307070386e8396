"""From the arrays of a host to global arrays, and back."""

import enum
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from millstream.reading.contracts import PyTree
from millstream.reading.dtypes import to_jax_dtype
from millstream.sharding.global_batch import common_rows, global_rows
from millstream.sharding.mesh_config import checked_axes, given_or_context_mesh, over_axes
from millstream.text.errors import describe_leaf, describe_value, table


class DataPartitionType(enum.Enum):
    """How the arrays of hosts relate to the global one.

    Example:
        >>> whole = ms.sharding.DataPartitionType.REPLICATED

    Attributes:
        FULL: Every host has rows of its own.
        REPLICATED: Every host has all of it.
    """

    FULL = "full"
    REPLICATED = "replicated"


def host_to_global_device_array(
    host_arrays: PyTree,
    *,
    partition: DataPartitionType = DataPartitionType.FULL,
    mesh: Mesh | None = None,
    batch_axis_names: str | tuple[str, ...] | None = None,
) -> PyTree:
    """Make global arrays over a mesh of what each process has.

    Example:
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> batch = ms.sharding.host_to_global_device_array({"x": np.ones((8, 2), np.float32)}, mesh=mesh)

    Args:
        host_arrays: A pytree of arrays: this process's rows, or, to be replicated, the same arrays everywhere.
        partition: Whether rows are divided over devices, or all arrays repeated on each.
        mesh: By default the one of `jax.set_mesh`.
        batch_axis_names: The axes that rows are divided over; by default all of the mesh.
    """
    caller = "host_to_global_device_array"
    _check_partition(caller, partition)
    mesh = given_or_context_mesh(caller, mesh)
    if partition is DataPartitionType.FULL:
        axes = mesh.axis_names if batch_axis_names is None else checked_axes(caller, batch_axis_names, mesh.axis_names)
        return global_rows(caller, host_arrays, over_axes(mesh, axes))
    if batch_axis_names is not None:
        raise ValueError(f"{caller} divides nothing over axes when it replicates. Leave batch_axis_names out.")
    leaves, structure = jax.tree.flatten(host_arrays)
    arrays = [to_jax_dtype(caller, leaf if hasattr(leaf, "shape") else np.asarray(leaf)) for leaf in leaves]
    shapes = [array.shape for array in arrays]
    return structure.unflatten(jax.make_array_from_process_local_data(over_axes(mesh, ()), arrays, shapes))


def global_to_host_array(global_arrays: PyTree, *, partition: DataPartitionType = DataPartitionType.FULL) -> PyTree:
    """This process's rows of global arrays as NumPy arrays: each row once, in order, replicas left out.

    Example:
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> batch = ms.sharding.host_to_global_device_array({"x": np.arange(3)}, mesh=mesh)
        >>> ms.sharding.global_to_host_array(batch)
        {'x': array([0, 1, 2], dtype=int32)}

    Args:
        global_arrays: A pytree of `jax.Array`s, with the same number of rows if they are divided.
        partition: Whether rows are divided over devices, or all arrays repeated on each.
    """
    caller = "global_to_host_array"
    _check_partition(caller, partition)
    for path, leaf in jax.tree.leaves_with_path(global_arrays):
        name = f"batch{jax.tree_util.keystr(path)}"
        if not isinstance(leaf, jax.Array):
            raise TypeError(f"{caller} needs jax.Arrays. Got {name}: {describe_value(leaf)}.")
        if partition is DataPartitionType.REPLICATED and not leaf.is_fully_replicated:
            raise ValueError(
                f"{caller} needs arrays that every device has whole, if they are REPLICATED. Got:\n"
                f"{table([(name, f'{describe_leaf(leaf)}, {leaf.sharding}')])}\n"
                "DataPartitionType.FULL gives its rows."
            )
    if partition is DataPartitionType.REPLICATED:
        return jax.tree.map(lambda leaf: np.asarray(leaf.addressable_data(0)), global_arrays)
    common_rows(caller, global_arrays)
    return jax.tree.map(_host_rows, global_arrays)


def _host_rows(leaf: jax.Array) -> np.ndarray:
    parts = {_bounds(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}  # replicas coincide
    size = leaf.sharding.shard_shape(leaf.shape)[0]
    places = {start: place * size for place, start in enumerate(sorted({bounds[0][0] for bounds in parts}))}
    rows = np.empty((len(places) * size, *leaf.shape[1:]), leaf.dtype)
    for ((start, _), *others), data in parts.items():
        place = places[start]
        rows[(slice(place, place + size), *(slice(*bounds) for bounds in others))] = np.asarray(data)
    if sum(data.size for data in parts.values()) < rows.size:
        raise ValueError(
            "global_to_host_array needs rows that are whole on this host. Got an array that is divided along other "
            f"axes over several hosts: {describe_leaf(leaf)}, {leaf.sharding}."
        )
    return rows


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _check_partition(caller: str, partition: Any) -> None:
    if not isinstance(partition, DataPartitionType):
        raise TypeError(
            f"{caller} needs partition to be DataPartitionType.FULL or DataPartitionType.REPLICATED. "
            f"Got {describe_value(partition)}."
        )
