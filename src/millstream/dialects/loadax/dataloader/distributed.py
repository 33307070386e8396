"""Loaders over a mesh, under the module that loadax keeps them in."""

from millstream.dialects.loadax._loader import DistributedDataLoader as DistributedDataLoader
from millstream.dialects.loadax._sharding import JaxShardingStrategy as JaxShardingStrategy
