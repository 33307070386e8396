"""Which rows of a global batch each process needs."""

from collections.abc import Sequence

import numpy as np
from jax.sharding import NamedSharding

from millstream.sharding.batch_sharding import batch_axes, check_batch_size, require_sharding


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
