"""Meshes of devices, and where the rows of a batch go on them: one file per idea.

A lazy table of contents: worker processes load `split_by_host`'s views from this room, and must not load JAX.
"""

from typing import TYPE_CHECKING

from millstream._core.lazy import loads_on_demand

if TYPE_CHECKING:
    from millstream.sharding._batch_sharding import as_batch_sharding as as_batch_sharding
    from millstream.sharding._batch_sharding import batch_axes as batch_axes
    from millstream.sharding._batch_sharding import check_batch_size as check_batch_size
    from millstream.sharding._batch_sharding import shard_count as shard_count
    from millstream.sharding._constraint import with_sharding_constraint as with_sharding_constraint
    from millstream.sharding._global_batch import distribute_global_batch as distribute_global_batch
    from millstream.sharding._host_arrays import DataPartitionType as DataPartitionType
    from millstream.sharding._host_arrays import global_to_host_array as global_to_host_array
    from millstream.sharding._host_arrays import host_to_global_device_array as host_to_global_device_array
    from millstream.sharding._host_split import HostSplit as HostSplit
    from millstream.sharding._host_split import shard_bounds as shard_bounds
    from millstream.sharding._host_split import split_by_host as split_by_host
    from millstream.sharding._mesh_config import MeshConfig as MeshConfig
    from millstream.sharding._mesh_shape import HybridMeshShape as HybridMeshShape
    from millstream.sharding._presets import make_ddp_mesh_config as make_ddp_mesh_config
    from millstream.sharding._presets import make_fsdp_mesh_config as make_fsdp_mesh_config
    from millstream.sharding._rows import rows_by_process as rows_by_process

_CONTENTS = {
    "_batch_sharding": ["as_batch_sharding", "batch_axes", "check_batch_size", "shard_count"],
    "_constraint": ["with_sharding_constraint"],
    "_global_batch": ["distribute_global_batch"],
    "_host_arrays": ["DataPartitionType", "global_to_host_array", "host_to_global_device_array"],
    "_host_split": ["HostSplit", "shard_bounds", "split_by_host"],
    "_mesh_config": ["MeshConfig"],
    "_mesh_shape": ["HybridMeshShape"],
    "_presets": ["make_ddp_mesh_config", "make_fsdp_mesh_config"],
    "_rows": ["rows_by_process"],
}

__all__ = sorted(name for names in _CONTENTS.values() for name in names)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__ = loads_on_demand(__name__, _CONTENTS)


def __dir__() -> list[str]:
    return list(__all__)
