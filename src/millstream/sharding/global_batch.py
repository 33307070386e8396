"""The rows of every process as one array over all devices."""

import jax
from jax.sharding import NamedSharding

from millstream.reading.contracts import PyTree
from millstream.reading.dtypes import dtype_of_array, holds_numbers, to_jax_dtype
from millstream.sharding.batch_sharding import BatchSharding, as_batch_sharding, nearest, shard_count
from millstream.text.errors import describe_leaf, describe_value, table


def distribute_global_batch(local_batch: PyTree, sharding: BatchSharding) -> PyTree:
    """Make global arrays of the rows that each process has read.

    Every process calls it with as many rows as its devices hold, in the order of the global batch (`rows_by_process`
    says which). Nothing is sent between hosts.

    Example:
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> batch = ms.sharding.distribute_global_batch({"x": np.ones((8, 2), np.float32)}, mesh)
        >>> batch["x"].sharding.spec
        P('data',)

    Args:
        local_batch: A pytree of arrays with the same number of rows.
        sharding: A `NamedSharding`, a `Mesh` with an axis "data", or a `MeshConfig`; see `as_batch_sharding`.
    """
    caller = "distribute_global_batch"
    return global_rows(caller, local_batch, as_batch_sharding(sharding, caller))


def global_rows(caller: str, local_batch: PyTree, sharding: NamedSharding) -> PyTree:
    """What `distribute_global_batch` does, under the name of the caller."""
    rows, shards, here = common_rows(caller, local_batch), shard_count(sharding), local_shards(sharding)
    if here == 0:
        raise ValueError(f"{caller} needs this process, number {jax.process_index()}, to have devices in the mesh.")
    if rows % here:
        raise ValueError(
            f"{caller} needs a number of rows that divides by {here}, the parts of the batch that the devices of this "
            f"process hold (of {shards} in all). Got {rows} rows. {nearest(rows, here)}"
        )
    leaves, structure = jax.tree.flatten(jax.tree.map(lambda leaf: to_jax_dtype(caller, leaf), local_batch))
    shapes = [(rows // here * shards, *leaf.shape[1:]) for leaf in leaves]
    return structure.unflatten(jax.make_array_from_process_local_data(sharding, leaves, shapes))


def common_rows(caller: str, batch: PyTree) -> int:
    """The number of rows that all leaves have."""
    leaves = [(f"batch{jax.tree_util.keystr(path)}", leaf) for path, leaf in jax.tree.leaves_with_path(batch)]
    if not leaves:
        raise ValueError(f"{caller} needs arrays. Got {describe_value(batch)}, a tree without any.")
    for name, leaf in leaves:
        dtype = dtype_of_array(leaf)
        if dtype is None or not holds_numbers(dtype) or not leaf.shape:
            raise ValueError(f"{caller} needs arrays with rows. Got:\n{table([(name, describe_leaf(leaf))])}")
        if leaf.shape[0] != leaves[0][1].shape[0]:
            found = table((name, describe_leaf(leaf)) for name, leaf in (leaves[0], (name, leaf)))
            raise ValueError(f"{caller} needs arrays with the same number of rows. Got:\n{found}")
    return leaves[0][1].shape[0]


def local_shards(sharding: NamedSharding) -> int:
    """Into how many parts the devices of this process divide their rows of a batch."""
    parts = sharding.addressable_devices_indices_map((shard_count(sharding),))
    return len({index[0].start for index in parts.values() if index is not None})
