"""Shards of a store that takes 30 ms for every request: opening them, and reading them.

Shards have 200 samples of 3 kB, in groups of 50; batches have 128. Opening is that of 1,000 shards, cold and with what
is kept of an earlier start. Reading is that of 500 shards with 16 threads: in order, and shuffled in blocks of which
128 are in flight, with room for an eighth of the data. The store is a process of its own on this machine; its counts
are exact.
"""

import functools
import io
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
SAMPLES, GROUP, NBYTES, BATCH = 200, 50, 3072, 128
ORDERS: dict[str, Ordering] = {
    "Reading in order": "sequential",
    "Reading, shuffled": ms.Shuffle("blocks", block_size=GROUP, lanes=16, window=400),
}


def write_shards(folder: pathlib.Path) -> None:
    """One shard of each kind, which stands for all."""
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


def as_pixels(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def open_shards(kind: str, store: Store, shards: int, ordering: Ordering) -> Any:
    urls = [f"{store.address}/{kind}/{shard:05}" for shard in range(shards)]
    if kind == "tar":
        return WebDatasetSource(urls, decode={"x": as_pixels}, ordering=ordering)
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
        with ms.DataLoader([source, ms.BatchTransform(BATCH)], executor=ms.Threads(16)) as loader:
            state = loader.init_state(jax.random.key(0))
            store.counts()
            begun = time.perf_counter()
            for batch, _ in loader.iterate(state, steps=steps):
                jax.block_until_ready(batch)
            found = Reading(time.perf_counter() - begun)
        counted[kind] = store.counts()
        return found

    return run


def measure(options: Options) -> list[Table]:
    tables = []
    kinds = {"parquet": "Parquet", "arrow": "Arrow", "tar": "tar"}
    with tempfile.TemporaryDirectory() as folder:
        write_shards(pathlib.Path(folder))
        with serving(pathlib.Path(folder), LATENCY) as store:
            many, shards = options.size(1_000, 20), options.size(500, 10)
            for title, again, most in (("Opening, cold", False, 5.0), ("Opening again", True, 1.0)):
                entries = [
                    Entry(name, functools.partial(opening, kind, store, many, again), "millstream")
                    for kind, name in kinds.items()
                ]
                table = measured(title, "s", "Parquet", entries, options.rounds(1))
                for name in kinds.values():
                    table.hold(f"{title.lower()}, {name}: seconds", table.median(name), at_most=most)
                tables.append(table)
            for title, ordering in ORDERS.items():
                counted: dict[str, Counts] = {}
                samples = shards * SAMPLES // BATCH * BATCH
                entries = [
                    Entry(
                        name, functools.partial(reading, kind, store, shards, ordering, counted), "millstream", samples
                    )
                    for kind, name in kinds.items()
                ]
                table = measured(title, "µs per sample", "Parquet", entries, options.rounds(1))
                for kind, name in kinds.items():
                    counts, median = counted[kind], table.median(name)
                    text = f"{title.lower()}, {name}"
                    table.hold(f"{text}: requests per sample", counts.requests / samples, at_most=0.02)
                    table.hold(f"{text}: bytes read / used", counts.nbytes / samples / NBYTES, at_most=1.3)
                    assert median is not None
                    table.hold(f"{text}: samples per second", 1e6 / median, at_least=5_000)
                tables.append(table)
    return tables


if __name__ == "__main__":
    main(measure)
