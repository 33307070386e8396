"""Meshes of devices, and where they hold the rows of a batch: one file per idea.

A lazy table of contents: worker processes load `split_by_host`'s views from this room, and must not load JAX.
"""

from millstream.sharding._constraint import with_sharding_constraint as with_sharding_constraint
from millstream.sharding._host_arrays import DataPartitionType as DataPartitionType
from millstream.sharding._host_arrays import global_to_host_array as global_to_host_array
from millstream.sharding._host_arrays import host_to_global_device_array as host_to_global_device_array
from millstream.sharding._host_split import HostSplit as HostSplit
from millstream.sharding._host_split import shard_bounds as shard_bounds
from millstream.sharding._host_split import split_by_host as split_by_host
from millstream.sharding.batch_sharding import as_batch_sharding as as_batch_sharding
from millstream.sharding.batch_sharding import batch_axes as batch_axes
from millstream.sharding.batch_sharding import check_batch_size as check_batch_size
from millstream.sharding.batch_sharding import rows_by_process as rows_by_process
from millstream.sharding.batch_sharding import shard_count as shard_count
from millstream.sharding.global_batch import distribute_global_batch as distribute_global_batch
from millstream.sharding.mesh_config import HybridMeshShape as HybridMeshShape
from millstream.sharding.mesh_config import MeshConfig as MeshConfig
from millstream.sharding.mesh_config import make_ddp_mesh_config as make_ddp_mesh_config
from millstream.sharding.mesh_config import make_fsdp_mesh_config as make_fsdp_mesh_config

__all__: list[str]
