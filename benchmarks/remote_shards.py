"""Shards of a store that takes 30 ms for every request: opening them, and reading them.

Shards have 200 samples of 3 kB, in groups of 50; batches have 128. Opening is that of 1,000 shards, cold and with what
is kept of an earlier start. Reading is that of 500 shards with 16 threads: in order, and shuffled in blocks of which
128 are in flight, with room for an eighth of the data. The store is a process of its own on this machine; its counts
are exact. Its own speed is that of 16 threads that get whole shards and do nothing with them; by hand, they have
pyarrow or `tarfile` make arrays of each shard, too, and copy these into one.

MosaicML streaming reads the MDS shards and webdataset the tar files, shuffled, with eight worker processes each, whose
start is part of a round. Streaming knows no http: its S3 client asks the same store, twice for each shard, and keeps
shards in a folder that is empty before each round. Webdataset runs curl for each shard.
"""

import concurrent.futures
import functools
import http.client
import io
import json
import pathlib
import tarfile
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _case import Options, main
from _libraries import Libraries, Stream
from _measure import Entry, Reading, measured
from _result import Table
from _store import Counts, Store, serving

import millstream as ms
from millstream.integrations import cloud
from millstream.integrations.arrow import ArrowSource
from millstream.integrations.parquet import ParquetSource
from millstream.integrations.webdataset import WebDatasetSource
from millstream.plan.ordering import Ordering

LATENCY = 0.03
SAMPLES, GROUP, NBYTES, BATCH, THREADS = 200, 50, 3072, 128, 16
BLOCKS = ms.Shuffle("blocks", block_size=GROUP, lanes=16, window=400)
SHARDS = 500
ALONE = "the store alone"
by_hand = "{}, by hand".format
KINDS = {"parquet": "Parquet", "arrow": "Arrow", "tar": "tar"}
# The number of workers, and ours of the same shards. Both took longer with 2 and 4 workers. 16 were no faster in the
# few rounds that were tried, on a busy machine.
PEERS = {
    Stream("MosaicML streaming", "streaming_epoch", "mosaicml-streaming", "streaming"): (8, "MDS"),
    Stream("webdataset", "webdataset_epoch", "webdataset", "webdataset"): (8, "tar"),
}


def write_shards(folder: pathlib.Path, shards: int) -> None:
    """One shard of each kind, which stands for all, and the index of the MDS shards."""
    pixels = np.random.default_rng(0).integers(0, 256, (SAMPLES, NBYTES), dtype=np.uint8)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(pixels.ravel()), NBYTES)})
    pq.write_table(table, folder / "parquet", row_group_size=GROUP, compression="none")
    with pa.ipc.new_file(str(folder / "arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=GROUP)
    with tarfile.open(folder / "tar", "w") as archive:
        for number in range(SAMPLES):
            info = tarfile.TarInfo(f"{number:06}.x")
            info.size = NBYTES
            archive.addfile(info, io.BytesIO(pixels[number].tobytes()))
    begin = 4 * (SAMPLES + 2)
    places = np.arange(begin, begin + (SAMPLES + 1) * NBYTES, NBYTES, np.uint32)
    mds = np.uint32(SAMPLES).tobytes() + places.tobytes() + pixels.tobytes()
    (folder / "mds").write_bytes(mds)
    entry = {
        "format": "mds",
        "version": 2,
        "column_names": ["x"],
        "column_encodings": [f"ndarray:uint8:{NBYTES}"],
        "column_sizes": [NBYTES],
        "compression": None,
        "hashes": [],
        "samples": SAMPLES,
        "size_limit": None,
        "zip_data": None,
    }
    listed = [
        entry | {"raw_data": {"basename": f"{shard:05}", "bytes": len(mds), "hashes": {}}} for shard in range(shards)
    ]
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": listed}))


def as_pixels(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def open_shards(kind: str, store: Store, shards: int, ordering: Ordering) -> Any:
    urls = [f"{store.address}/{kind}/{shard:05}" for shard in range(shards)]
    if kind == "tar":
        return WebDatasetSource(urls, decode={"x": as_pixels}, ordering=ordering)
    if kind == "mds":
        return ms.sources.MdsSource(f"{store.address}/mds", ordering=ordering)
    return {"parquet": ParquetSource, "arrow": ArrowSource}[kind](
        urls, ordering=ordering, cache_bytes=shards * SAMPLES * NBYTES // 8
    )


def opening(kind: str, store: Store, shards: int, again: bool) -> Callable[[], Reading]:
    def run() -> Reading:
        with tempfile.TemporaryDirectory() as cache:
            cloud.configure(cache_folder=cache, cache_limit=64 << 20)
            if again:
                open_shards(kind, store, shards, "sequential")
            begun = time.perf_counter()
            open_shards(kind, store, shards, "sequential")
            return Reading(time.perf_counter() - begun)

    return run


def reading(
    kind: str, store: Store, shards: int, ordering: Ordering, counted: dict[str, Counts]
) -> Callable[[], Reading]:
    def run() -> Reading:
        cloud.configure(cache_limit=0)
        source, steps = open_shards(kind, store, shards, ordering), shards * SAMPLES // BATCH
        with ms.DataLoader([source, ms.BatchTransform(BATCH)], executor=ms.Threads(THREADS)) as loader:
            state = loader.init_state(jax.random.key(0))
            store.counts()
            begun = time.perf_counter()
            for batch, _ in loader.iterate(state, steps=steps):
                jax.block_until_ready(batch)
            found = Reading(time.perf_counter() - begun)
        counted[kind] = store.counts()
        return found

    return run


def parquet_rows(body: bytes) -> np.ndarray:
    return table_rows(pq.read_table(pa.BufferReader(body), use_threads=False))


def arrow_rows(body: bytes) -> np.ndarray:
    return table_rows(pa.ipc.open_file(pa.BufferReader(body)).read_all())


def table_rows(table: pa.Table) -> np.ndarray:
    return np.concatenate([chunk.flatten().to_numpy().reshape(-1, NBYTES) for chunk in table["x"].chunks])


def tar_rows(body: bytes) -> np.ndarray:
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        files = [archive.extractfile(member) for member in archive]
        return np.stack([as_pixels(file.read()) for file in files if file is not None])


ROWS: dict[str, Callable[[bytes], Any]] = {"parquet": parquet_rows, "arrow": arrow_rows, "tar": tar_rows}


def alone(store: Store, shards: int, kind: str = "arrow", decode: Callable[[bytes], Any] = bytes) -> Callable[[], None]:
    """The floor: nothing but requests for whole shards, and what is made of each."""

    def get(first: int) -> int:
        """One thread's share, over one connection."""
        connection, nbytes = http.client.HTTPConnection(store.address.removeprefix("http://")), 0
        for shard in range(first, shards, THREADS):
            connection.request("GET", f"/{kind}/{shard:05}")
            nbytes += memoryview(decode(connection.getresponse().read())).nbytes
        connection.close()
        return nbytes

    def run() -> None:
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            assert sum(pool.map(get, range(THREADS))) >= shards * SAMPLES * NBYTES

    return run


def opening_tables(options: Options, store: Store) -> list[Table]:
    tables, shards = [], options.size(1_000, 20)
    for title, again, most in (("Opening, cold", False, 5.0), ("Opening again", True, 1.0)):
        entries = [
            Entry(name, functools.partial(opening, kind, store, shards, again), "millstream")
            for kind, name in KINDS.items()
        ]
        table = measured(title, "s", "Parquet", entries, options.rounds(1))
        for name in KINDS.values():
            table.hold(f"{title.lower()}, {name}: seconds", table.median(name), at_most=most)
        tables.append(table)
    return tables


def reading_table(
    title: str, ordering: Ordering, kinds: dict[str, str], peers: list[Entry], options: Options, store: Store
) -> Table:
    counted: dict[str, Counts] = {}
    shards = options.size(SHARDS, 10)
    samples = shards * SAMPLES // BATCH * BATCH
    entries = [
        Entry(name, functools.partial(reading, kind, store, shards, ordering, counted), "millstream", samples)
        for kind, name in kinds.items()
    ]
    floor = Entry(ALONE, functools.partial(alone, store, shards), steps=shards * SAMPLES)
    if ordering == "sequential":
        peers = [
            Entry(by_hand(name), functools.partial(alone, store, shards, kind, ROWS[kind]), steps=shards * SAMPLES)
            for kind, name in kinds.items()
        ]
    table = measured(title, "µs per sample", "Parquet", [*entries, *peers, floor], options.rounds(3))
    for kind, name in kinds.items():
        counts, median = counted[kind], table.median(name)
        text = f"{title.lower()}, {name}"
        table.hold(f"{text}: requests per sample", counts.requests / samples, at_most=0.02)
        table.hold(f"{text}: bytes read / used", counts.nbytes / samples / NBYTES, at_most=1.3)
        assert median is not None
        table.hold(f"{text}: samples per second", 1e6 / median, at_least=5_000)
    return table


def measure(options: Options) -> list[Table]:
    shards = options.size(SHARDS, 10)
    steps = shards * SAMPLES // BATCH
    with tempfile.TemporaryDirectory() as folder, Libraries(options.also) as libraries:
        write_shards(pathlib.Path(folder), shards)
        with serving(pathlib.Path(folder), LATENCY) as store:
            tables = opening_tables(options, store)
            peers = []
            for peer, (workers, _) in PEERS.items():
                arguments = [store.address, shards, BATCH, steps - workers, options.size(workers, 2)]
                question = {"how": "pass", "module": "_remote_peers", "arguments": arguments}
                peers += libraries.entries([peer], per_round=steps * BATCH, **question)
            in_order = reading_table("Reading in order", "sequential", KINDS, [], options, store)
            shuffled = reading_table("Reading, shuffled", BLOCKS, KINDS | {"mds": "MDS"}, peers, options, store)
    for name in KINDS.values():
        for floor in (ALONE, by_hand(name)):
            in_order.hold(f"reading in order, {name}: times {floor}", in_order.ratio(name, floor), at_most=1.3)
    for peer, (_, name) in PEERS.items():
        text = f"reading, shuffled, {name}: times as fast as {peer.label}"
        shuffled.hold(text, shuffled.ratio(peer.label, name), at_least=2)
    return [*tables, in_order, shuffled]


if __name__ == "__main__":
    main(measure)
