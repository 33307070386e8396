"""Batches from 2 Ray actors on this machine, beside 2 worker processes.

A batch of 38 MB is 256 items of 150 kB, a small one 128 items of 784 bytes; they cost little more than their memory.
What is measured is how long a loop without work of its own waits for a batch, in the median of a round. Starting is
left out. On one machine Ray can only lose: the figures say what its way costs, not what other machines bring. Ray runs
its workers with a niceness of 15; here it is 0, as that of the processes.
"""

import contextlib
import functools
import statistics
import tempfile
import time
from collections.abc import Iterator

import jax
import numpy as np
import ray
from _case import Options, main
from _measure import Entry, Reading, Run, measured
from _result import Table

import millstream as ms
from millstream.integrations.ray import RayActors

ACTORS, PROCESSES = "Millstream, Ray actors", "Millstream, processes"


def measure(options: Options) -> list[Table]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(_cluster())
        tables = []
        for title, items, shape, batches in (
            ("38 MB", 256, (224, 224, 3), options.size(20, 3)),
            ("100 kB", 128, (28, 28), options.size(200, 5)),
        ):
            entries = [
                Entry(name, functools.partial(_stream, stack, executor, items, shape, batches), "millstream")
                for name, executor in ((ACTORS, RayActors(2)), (PROCESSES, ms.Processes(2)))
            ]
            tables.append(measured(f"Batches of {title}", "ms per batch", ACTORS, entries, options.rounds(7)))
    large, small = tables
    large.hold("times as long as processes, 38 MB", large.ratio(ACTORS, PROCESSES), at_most=1.5)
    small.hold("ms for a small batch", small.median(ACTORS), at_most=2)
    return tables


@contextlib.contextmanager
def _cluster() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        ray.init(
            "local",
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=2 << 30,
            _temp_dir=folder,
            _system_config={"worker_niceness": 0},
        )
        try:
            yield
        finally:
            ray.shutdown()


def _stream(
    stack: contextlib.ExitStack, executor: RayActors | ms.Processes, items: int, shape: tuple[int, ...], batches: int
) -> Run:
    source = ms.DiskSampleSource(1 << 20, lambda index: np.full(shape, index % 251, np.uint8))
    loader = stack.enter_context(ms.DataLoader([source, ms.BatchTransform(items)], executor=executor))
    stream = stack.enter_context(loader.iterate(loader.init_state(jax.random.key(0))))

    def run() -> Reading:
        waits, cpu = [], time.process_time()
        for _ in range(batches):
            begun = time.perf_counter()
            jax.block_until_ready(next(stream))
            waits.append(time.perf_counter() - begun)
        return Reading(statistics.median(waits), (time.process_time() - cpu) / batches)

    return run


if __name__ == "__main__":
    main(measure)
