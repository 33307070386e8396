"""One of several processes that load together. Run by test_many_hosts.py; tells what it saw in lines of JSON."""

import dataclasses
import json
import os
import signal
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import millstream as ms

SAMPLES, BATCH = 56, 16  # three and a half batches
SEED = 3


class Pictures:
    """A dataset that notes which of its samples are read."""

    def __init__(self, length=SAMPLES):
        self.length, self.reads = length, []

    def read(self, index):
        self.reads.append(index)
        return {"index": np.int32(index), "x": np.full((4,), index, np.float32)}

    def source(self):
        spec = {"index": jax.ShapeDtypeStruct((), np.int32), "x": jax.ShapeDtypeStruct((4,), np.float32)}
        return ms.DiskSampleSource(self.length, self.read, spec, ordering="shuffle")


def arrays(length=SAMPLES):
    index = np.arange(length, dtype=np.int32)
    return {"index": index, "x": np.repeat(index[:, None], 4, axis=1).astype(np.float32)}


def jitter(sample, mask, key):
    noise = jnp.sin(jax.random.key_data(key).astype(np.float32))  # cheap to compile, and no two alike
    return {**sample, "x": sample["x"] + jnp.max(noise), "noise": noise}


def below_the_largest(batch, mask):
    return {**batch, "x": jnp.max(batch["x"]) - batch["x"]}


def viewed(source):
    """Half of the samples, drawn by weight: some come twice in an epoch, others never."""
    part = ms.views.split(source, {"a": 0.5, "b": 0.5})[0]
    return ms.views.weighted(part, np.arange(len(part)), samples=SAMPLES)


def mesh_of(*shape):
    return Mesh(np.array(jax.devices()).reshape(shape), ("data", "model")[: len(shape)])


def sharded_arrays(mesh):
    data = arrays()
    over = NamedSharding(mesh, P("data"))
    return jax.tree.map(lambda leaf: jax.make_array_from_callback(leaf.shape, over, leaf.__getitem__), data)


def tell(**facts):
    print(json.dumps(facts), flush=True)


def local_rows(tree):
    """For each row of a batch that this process holds, the bytes of all its leaves as a number."""
    rows = {}
    for leaf in jax.tree.leaves(tree):
        mine = {}
        for shard in leaf.addressable_shards:
            start, data = shard.index[0].indices(leaf.shape[0])[0], np.asarray(shard.data)
            mine |= {start + at: row.tobytes() for at, row in enumerate(data)}  # replicas are equal, or the test fails
        for row, content in mine.items():
            rows[row] = zlib.crc32(content, rows.get(row, 0))
    return rows


def local_indices(batch, mask):
    """The samples that this process holds of a batch, each once."""
    seen = {}
    for shard, real in zip(batch["index"].addressable_shards, mask.addressable_shards, strict=True):
        pairs = zip(np.asarray(shard.data).tolist(), np.asarray(real.data).tolist(), strict=True)
        seen |= {index: None for index, is_real in pairs if is_real}
    return list(seen)


def tell_batches():
    """All ways to read, over all kinds of meshes: a run of six batches through an epoch and a half."""
    # Of its own for each loader: a thread that is told to end still reads the samples it is at.
    pictures = [Pictures() for _ in range(4)]
    everything = [ms.RandomMapTransform(jitter), ms.BatchTransform(BATCH), ms.MapTransform(below_the_largest)]
    whole, plain = ms.ArraySampleSource(arrays(), ordering="shuffle"), [ms.BatchTransform(BATCH)]
    line, grid = mesh_of(8), mesh_of(4, 2)
    spread = ms.ArraySampleSource(sharded_arrays(line), ordering="shuffle")
    fsdp = ms.sharding.make_fsdp_mesh_config()
    loaders = {
        "threads, data": ms.DataLoader([pictures[0].source(), *plain], executor=ms.Threads(2), sharding=line),
        "threads, data and model": ms.DataLoader([pictures[1].source(), *plain], executor=ms.Threads(2), sharding=grid),
        "threads, rows on two hosts": ms.DataLoader(
            [pictures[2].source(), *plain], executor=ms.Threads(2), sharding=mesh_of(2, 4)
        ),
        "no executor, fsdp, stages": ms.DataLoader([pictures[3].source(), *everything], sharding=fsdp),
        "processes, data": ms.DataLoader([whole, *plain], executor=ms.Processes(1), sharding=line),
        "arrays, data and model, stages": ms.DataLoader([whole, *everything], sharding=grid),
        "sharded arrays, data": ms.DataLoader([spread, *plain], sharding=NamedSharding(line, P("data"))),
        "no executor, view": ms.DataLoader([viewed(Pictures().source()), *plain], sharding=line),
        "arrays, view": ms.DataLoader([viewed(whole), *plain], sharding=line),
    }
    for number, (name, loader) in enumerate(loaders.items()):
        rows, held = [], []
        for batch, mask in loader.iterate(loader.init_state(jax.random.key(SEED)), steps=6):
            rows.append(local_rows((batch, mask)))
            held += local_indices(batch, mask)
        reads = sorted(pictures[number].reads) if number < len(pictures) else []
        _, state, _ = loader.next_batch(loader.init_state(jax.random.key(SEED), step=1))
        batch, _, mask = loader.next_batch(state)
        loader.close()
        third, step = local_rows((batch, mask)), int(state.step)
        tell(case=name, rows=rows, held=sorted(held), reads=reads, third=third, step=step)
    tell_sums(loaders["threads, data and model"], loaders["sharded arrays, data"])


def tell_cached(folder):
    """Two passes through one cache folder of all processes: the second comes from it, each process's own rows."""
    pictures, found, wrong = Pictures(), 0, 0
    for _ in range(2):
        stages, cache = [pictures.source(), ms.BatchTransform(BATCH)], ms.BatchCache(folder)
        loader = ms.DataLoader(stages, sharding=mesh_of(8), cache=cache)
        for batch, mask, info in loader.iterate(loader.init_state(jax.random.key(SEED)), with_info=True):
            wrong += sorted(local_indices(batch, mask)) != sorted(info.indices[info.indices >= 0].tolist())
        found = loader.stats().cached
    tell(cached=found, wrong=wrong)


def tell_sums(reading, in_graph):
    """What a training step would see of an uneven epoch: sums over global batches."""

    def add(carry, batch, mask):
        return (carry[0] + jnp.sum(batch["x"][:, 0] * mask), carry[1] + jnp.sum(mask.astype(np.int32))), None

    carry, step = (jnp.float32(0), jnp.int32(0)), jax.jit(add)
    for batch, mask in reading.iterate(reading.init_state(jax.random.key(SEED))):
        carry, _ = step(carry, batch, mask)
    state, scanned, _ = in_graph.scan_epoch(
        in_graph.init_state(jax.random.key(SEED)), (jnp.float32(0), jnp.int32(0)), add
    )
    tell(sums=[float(carry[0]), int(carry[1])], scanned=[float(scanned[0]), int(scanned[1])], step=int(state.step))


@dataclasses.dataclass(frozen=True)
class EveryThird(ms.Transform):
    def apply(self, value, mask, key):
        return value, mask & (value["index"] % 3 == 0)


class Torn(Pictures):
    """A dataset of which every fifth sample cannot be read."""

    def read(self, index):
        if index % 5 == 0:
            raise OSError("torn")
        return super().read(index)


def tell_counts():
    """How many samples a run over an epoch has that masks some, or skips some that only one process reads."""
    whole, batch = ms.ArraySampleSource(arrays(), ordering="shuffle"), ms.BatchTransform(BATCH)
    loaders = {
        "masked": ms.DataLoader([whole, EveryThird(), batch], sharding=mesh_of(8)),
        "skipped": ms.DataLoader([Torn().source(), batch], sharding=mesh_of(8), on_error="skip item"),
    }
    step = jax.jit(lambda state, batch: state + jnp.sum(batch[1].astype(np.int32)))
    for name, loader in loaders.items():
        for fuse in (None, 2) if name == "masked" else (None,):
            start = jax.device_put(np.int32(0), NamedSharding(mesh_of(8), P()))
            output = ms.loop(start, loader, {ms.loops.always(): step}, key=jax.random.key(SEED), stop=4, fuse=fuse)
            tell(counted=name, samples=output.elapsed.samples, summed=int(output.state))


def steered(sharding=None):
    """Runs whose batches grow, and that leave steps out, of data in memory and of data that are read."""
    step = jax.jit(lambda state, batch: state * 3 + jnp.sum(batch[0]["index"] * batch[1].astype(np.int32)))
    for source in (ms.ArraySampleSource(arrays(), ordering="shuffle"), Pictures().source()):
        loader = ms.DataLoader([source, ms.BatchTransform({0: 8, 3: BATCH})], sharding=sharding)
        start = np.int32(0) if sharding is None else jax.device_put(np.int32(0), NamedSharding(sharding, P()))
        how = {"key": jax.random.key(SEED), "stop": 6, "skip": [(1, 2), (4, 5)]}
        output = ms.loop(start, loader, {ms.loops.always(): step}, **how)
        yield output.elapsed.samples, int(output.state)


def tell_refusals():
    """What every process says when one of them is about to do something else, and what no process can do."""
    odd = jax.process_index() == jax.process_count() - 1
    mesh, batch = mesh_of(8), ms.BatchTransform(BATCH)
    cast = ms.MapTransform(lambda batch, mask: {**batch, "index": -batch["index"]})

    def loader(source, *stages, **options):
        return ms.DataLoader([source, *stages], sharding=mesh, **options)

    usual = loader(Pictures().source(), batch)
    other_key = jax.random.key(SEED + odd)
    longer = SAMPLES + 8 * odd
    attempts = {
        "key": lambda: usual.iterate(usual.init_state(other_key)),
        "step": lambda: usual.iterate(usual.init_state(jax.random.key(SEED), step=int(odd)), steps=1),
        "length": lambda: iterated(loader(Pictures(longer).source(), batch)),
        "arrays": lambda: iterated(loader(ms.ArraySampleSource(arrays(longer)), batch)),
        "pipeline": lambda: iterated(loader(Pictures().source(), batch, *[cast] * odd)),
        "stepping": lambda: loader(ms.ArraySampleSource(arrays()), batch).next_batch(usual.init_state(other_key)),
        "scan": lambda: loader(ms.ArraySampleSource(arrays()), batch).scan_epoch(
            usual.init_state(other_key), 0, lambda carry, batch, mask: (carry, None)
        ),
        "batch size": lambda: loader(Pictures().source(), ms.BatchTransform(20)),
        "unordered": lambda: loader(Pictures().source(), batch, executor=ms.Threads(2, ordered=False)),
        "skip batch": lambda: loader(Pictures().source(), batch, on_error="skip batch"),
        "callback": lambda: usual.scan_epoch(
            usual.init_state(jax.random.key(SEED)), 0, lambda carry, batch, mask: (carry, None)
        ),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except (ValueError, TypeError) as error:
            tell(refused=name, words=str(error))
    tell(
        refused="nothing",
        rows=[local_rows(batch) for batch in usual.iterate(usual.init_state(jax.random.key(SEED)), steps=1)],
    )


def iterated(loader):
    return loader.iterate(loader.init_state(jax.random.key(SEED)))


def tell_epoch(first, last, killed_at):
    """A part of an epoch. At step `killed_at`, one process is killed; the others then wait for it in a sum."""
    pictures, ones = Pictures(), jax.jit(lambda mask: jnp.sum(mask.astype(np.int32)))
    loader = ms.DataLoader([pictures.source(), ms.BatchTransform(8)], executor=ms.Threads(2), sharding=mesh_of(8))
    batches = loader.iterate(loader.init_state(jax.random.key(SEED), step=first), steps=last - first)
    for batch, mask in batches:
        step = int(batches.state.step) - 1
        if step == killed_at and jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        tell(step=step, indices=local_indices(batch, mask), total=int(ones(mask)))


def main(address, processes, process, first, last, killed_at, *parts):
    if processes > 1:
        jax.distributed.initialize(
            address,
            processes,
            process,
            coordinator_bind_address=address,
            initialization_timeout=60,
            heartbeat_timeout_seconds=10,
            shutdown_timeout_seconds=10,
        )
    if "batches" in parts:
        tell_batches()
        tell_cached(f"cache-{processes}")
        tell_counts()
        tell(steered=list(steered(mesh_of(8))))
    if "refusals" in parts:
        tell_refusals()
    tell_epoch(first, last, killed_at)
    tell(finished=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:7]), *sys.argv[7:])
