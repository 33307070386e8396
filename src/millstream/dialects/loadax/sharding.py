"""Meshes and placement under loadax's names: they are those of `millstream.sharding`."""

from millstream.sharding import DataPartitionType as DataPartitionType
from millstream.sharding import HybridMeshShape as HybridMeshShape
from millstream.sharding import MeshConfig as MeshConfig
from millstream.sharding import global_to_host_array as global_to_host_array
from millstream.sharding import host_to_global_device_array as host_to_global_device_array
from millstream.sharding import make_ddp_mesh_config as make_ddp_mesh_config
from millstream.sharding import make_fsdp_mesh_config as make_fsdp_mesh_config
from millstream.sharding import with_sharding_constraint as with_sharding_constraint
