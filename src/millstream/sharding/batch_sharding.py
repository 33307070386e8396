"""How the rows of a batch are divided over devices, from any of the ways to say so."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from millstream.pipeline.pipeline import MAX_IN_GRAPH
from millstream.pipeline.placement import BatchShardings
from millstream.sharding.mesh_config import MeshConfig, checked_axes, over_axes
from millstream.text.errors import describe_value, require_int

BatchSharding = NamedSharding | Mesh | MeshConfig
LeafShardings = NamedSharding | Mapping[str, "LeafShardings"] | Sequence["LeafShardings"]


def as_batch_sharding(sharding: BatchSharding, caller: str = "as_batch_sharding") -> NamedSharding:
    """The sharding of the first axis of a batch, for leaves of any rank.

    Example:
        >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
        >>> ms.sharding.as_batch_sharding(mesh).spec
        P('data',)

    Args:
        sharding: A `NamedSharding` whose spec speaks of the first axis alone; a `Mesh` with an axis "data", over
            which rows are divided; or a `MeshConfig`.
        caller: Who needs it, for errors.
    """
    if isinstance(sharding, MeshConfig):
        return sharding.batch_sharding(sharding.create_device_mesh())
    if isinstance(sharding, Mesh):
        if "data" not in sharding.axis_names:
            raise ValueError(
                f"{caller} knows no axis 'data' to divide a batch over. The mesh has: "
                f"{', '.join(map(repr, sharding.axis_names))}. Say which one it is: "
                f"jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec({sharding.axis_names[0]!r}))."
            )
        return over_axes(sharding, checked_axes(caller, "data", sharding.axis_names))
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        raise TypeError(
            f"{caller} needs sharding to be a NamedSharding over devices, a Mesh with an axis 'data', or a MeshConfig. "
            f"Got {describe_value(sharding)}."
        )
    first, *others = (*sharding.spec, None)
    if any(entry is not None for entry in others) or first is PartitionSpec.UNCONSTRAINED:
        raise ValueError(
            f"{caller} needs a spec of the first axis alone, which fits a batch's leaves of any rank and its "
            f"mask. Got {sharding.spec}. Divide other axes in your step, with with_sharding_constraint."
        )
    if len(sharding.spec) < 2:
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(first), memory_kind=sharding.memory_kind)


def as_batch_shardings(caller: str, sharding: "BatchSharding | LeafShardings") -> BatchShardings:
    """How the leaves of a batch lie over a mesh, from any of the ways to say so."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return BatchShardings(_of_rows(caller, sharding), _entries(caller, sharding))
    if not isinstance(sharding, Mapping | Sequence):
        return BatchShardings(as_batch_sharding(sharding, caller))
    given = jax.tree_util.tree_leaves_with_path(sharding)
    if not given:
        raise ValueError(f"{caller} needs a sharding for at least one leaf. Got {describe_value(sharding)}.")
    for path, one in given:
        if not isinstance(one, NamedSharding) or not isinstance(one.mesh, Mesh):
            raise TypeError(
                f"{caller} needs sharding{jax.tree_util.keystr(path)} to be a NamedSharding over devices. "
                f"Got {describe_value(one)}."
            )
    first = _of_rows(caller, given[0][1])
    for path, one in given[1:]:
        if _of_rows(caller, one) != first:
            raise ValueError(
                f"{caller} needs shardings over one mesh that divide the rows alike: they are one batch. Got "
                f"{one.spec} over {dict(one.mesh.shape)} for {jax.tree_util.keystr(path)}, and {given[0][1].spec} over "
                f"{dict(first.mesh.shape)} for {jax.tree_util.keystr(given[0][0])}."
            )
    return BatchShardings(first, of_some=tuple((path, _entries(caller, one)) for path, one in given))


def _of_rows(caller: str, sharding: NamedSharding) -> NamedSharding:
    """The sharding of the first axis alone."""
    spec = _entries(caller, sharding)[:1]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def _entries(caller: str, sharding: NamedSharding) -> PartitionSpec:
    """A spec without axes at its end that are not divided."""
    spec = list(sharding.spec)
    if PartitionSpec.UNCONSTRAINED in spec:
        raise ValueError(f"{caller} needs a spec that says how every axis is divided. Got {sharding.spec}.")
    while len(spec) > 1 and spec[-1] is None:
        spec.pop()
    return PartitionSpec(*spec)


def batch_axes(sharding: NamedSharding) -> tuple[str, ...]:
    """The mesh axes that rows are divided over, the slowest first.

    Example:
        >>> ms.sharding.batch_axes(ms.sharding.as_batch_sharding(jax.make_mesh((1,), ("data",))))
        ('data',)
    """
    first = (*require_sharding("batch_axes", sharding).spec, None)[0]
    if first is None:
        return ()
    return (first,) if isinstance(first, str) else tuple(first)


def shard_count(sharding: NamedSharding) -> int:
    """Into how many parts the rows are divided.

    Example:
        >>> ms.sharding.shard_count(ms.sharding.as_batch_sharding(jax.make_mesh((1,), ("data",))))
        1
    """
    require_sharding("shard_count", sharding)
    return math.prod(sharding.mesh.shape[axis] for axis in batch_axes(sharding))


def require_sharding(caller: str, sharding: Any) -> NamedSharding:
    """The sharding, if it is one over a mesh."""
    if not isinstance(sharding, NamedSharding):
        raise TypeError(
            f"{caller} needs sharding to be a NamedSharding, such as as_batch_sharding(mesh) gives. "
            f"Got {describe_value(sharding)}."
        )
    return sharding


def check_batch_size(caller: str, batch_size: int, sharding: NamedSharding) -> None:
    """Refuse a global batch size that does not divide by the batch axes, and say which ones do.

    Example:
        >>> sharding = ms.sharding.as_batch_sharding(jax.make_mesh((1,), ("data",)))
        >>> ms.sharding.check_batch_size("DataLoader", 128, sharding)

    Args:
        caller: Who needs it, for the error.
        batch_size: Rows of the global batch, over all hosts.
        sharding: Of the batch.
    """
    require_int(caller, "batch_size", batch_size, least=1)
    if batch_size > MAX_IN_GRAPH:
        raise ValueError(f"{caller} needs a batch_size of at most {MAX_IN_GRAPH:,}. Got {batch_size:,}.")
    shards = shard_count(sharding)
    if batch_size % shards:
        axes = " x ".join(f"{axis!r} of size {sharding.mesh.shape[axis]}" for axis in batch_axes(sharding))
        raise ValueError(
            f"{caller} needs a global batch size that divides by {shards}, the devices that rows are divided over "
            f"(mesh axes: {axes}). Got {batch_size}. {nearest(batch_size, shards)}"
        )


def nearest(count: int, divisor: int) -> str:
    """The multiples next to a count, as advice."""
    below = count // divisor * divisor
    return f"Take {below} or {below + divisor}." if below else f"Take {divisor}."


def rows_by_process(sharding: NamedSharding, batch_size: int) -> dict[int, np.ndarray]:
    """For each process with devices in the mesh, the rows they hold, in order, each once.

    Example:
        >>> sharding = ms.sharding.as_batch_sharding(jax.make_mesh((1,), ("data",)))
        >>> ms.sharding.rows_by_process(sharding, 4)
        {0: array([0, 1, 2, 3])}

    Args:
        sharding: Of the batch, from `as_batch_sharding`.
        batch_size: Rows of the global batch, over all hosts.
    """
    require_sharding("rows_by_process", sharding)
    check_batch_size("rows_by_process", batch_size, sharding)
    devices = np.asarray(sharding.mesh.devices)
    processes = np.reshape([device.process_index for device in devices.flat], devices.shape)
    axes = [sharding.mesh.axis_names.index(axis) for axis in batch_axes(sharding)]
    return rows_on_grid(processes, axes, batch_size)


def rows_on_grid(processes: np.ndarray, axes: Sequence[int], batch_size: int) -> dict[int, np.ndarray]:
    """The same from numbers alone: the process of each device of the mesh, and which axes divide the rows."""
    by_shard = np.moveaxis(processes, axes, range(len(axes)))
    shards = int(np.prod(by_shard.shape[: len(axes)], dtype=np.int64))
    owners = by_shard.reshape(shards, -1)
    pairs = np.unique(owners * shards + np.arange(shards)[:, None])  # (process, shard), replicas once
    numbers, firsts = np.unique(pairs // shards, return_index=True)
    parts = zip(numbers.tolist(), np.split(pairs % shards, firsts[1:]), strict=True)
    size = batch_size // shards
    return {process: (part[:, None] * size + np.arange(size)).ravel() for process, part in parts}
