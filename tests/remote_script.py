"""One of several processes that read remote shards together. Run by test_remote_shards.py; prints its rows as JSON."""

import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import millstream as ms
from millstream.integrations import cloud
from millstream.integrations.parquet import ParquetSource

address, count, number, steps, *urls = sys.argv[1:]
jax.distributed.initialize(address, int(count), int(number))
cloud.configure(cache_limit=0, backoff=0.0005, retries=40)
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
stages = [ParquetSource(urls, cache_bytes=200_000), ms.BatchTransform(16)]
with ms.DataLoader(stages, executor=ms.Threads(4), sharding=sharding) as loader:
    for batch, _ in loader.iterate(loader.init_state(jax.random.key(7)), steps=int(steps)):
        for shard in batch["x"].addressable_shards:
            print(json.dumps({"start": shard.index[0].start or 0, "rows": np.asarray(shard.data)[:, :2].tolist()}))
