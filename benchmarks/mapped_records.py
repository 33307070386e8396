"""Shuffled batches of records in a memory-mapped file.

100,000 records of 784 bytes, batch 256. Every batch is waited for as JAX arrays, but for NumPy's, which is delivered
nowhere: it is the reading alone. cyreal reads a tenth of the epoch, for it takes long.
"""

import contextlib
import functools
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from _case import Options, main
from _images import consume
from _measure import Entry, Run, measured
from _result import Table

import millstream as ms

RECORDS, BATCH = 100_000, 256
OURS, FUNCTION = "Millstream, HostArraySource", "Millstream, a function per sample"
NUMPY, CYREAL = "NumPy, take from the map", "cyreal, a function per sample"


@contextlib.contextmanager
def mapped(count: int) -> Iterator[np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "records.npy")
        np.save(path, np.random.default_rng(0).integers(0, 256, (count, 784), dtype=np.uint8))
        yield np.load(path, mmap_mode="r")


def numpy_take(records: np.ndarray) -> Run:
    random = np.random.default_rng(0)

    def run() -> None:
        order = random.permutation(len(records))
        for step in range(len(records) // BATCH):
            np.take(records, order[step * BATCH : (step + 1) * BATCH], axis=0)

    return run


def host_array(records: np.ndarray) -> Run:
    return _iterating(ms.HostArraySource({"image": records}, prefetch_size=2 * BATCH))


def function(records: np.ndarray) -> Run:
    read = lambda index: {"image": records[index]}  # noqa: E731
    return _iterating(ms.DiskSampleSource(len(records), read, prefetch_size=2 * BATCH, readers=2))


def _iterating(source: Any) -> Run:
    loader = ms.DataLoader([source, ms.BatchTransform(BATCH, drop_last=True)])
    state = loader.init_state(jax.random.key(0))
    return lambda: consume(loader.iterate(state))


def cyreal_function(records: np.ndarray, steps: int) -> Run:
    from cyreal.loader import DataLoader
    from cyreal.sources import DiskSource
    from cyreal.transforms import BatchTransform

    source = DiskSource(len(records), lambda index: {"image": records[int(index)]}, prefetch_size=1024)
    loader = DataLoader([source, BatchTransform(BATCH, drop_last=True)])
    step, start = jax.jit(loader.next), loader.init_state(jax.random.key(0))

    def run() -> None:
        state = start
        for _ in range(steps):
            batch, state, mask = step(state)
            jax.block_until_ready((batch, mask))

    return run


def measure(options: Options) -> list[Table]:
    with mapped(options.size(RECORDS, 5_120)) as records:
        steps = len(records) // BATCH
        entries = [
            Entry(OURS, functools.partial(host_array, records), "millstream", steps),
            Entry(FUNCTION, functools.partial(function, records), "millstream", steps),
            Entry(NUMPY, functools.partial(numpy_take, records), "", steps),
            Entry(CYREAL, functools.partial(cyreal_function, records, steps // 10), "cyreal", steps // 10),
        ]
        table = measured("784-byte records, batch 256", "µs per batch", OURS, entries, options.rounds(5))
    table.hold("times NumPy's own take", table.ratio(OURS, NUMPY), at_most=4)
    table.hold("times as fast as cyreal", table.ratio(CYREAL, OURS), at_least=20)
    return [table]


if __name__ == "__main__":
    main(measure)
