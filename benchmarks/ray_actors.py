"""Batches from 2 Ray actors on this machine, beside 2 worker processes.

A batch of 38 MB is 256 items of 150 kB, a small one 128 items of 784 bytes; they cost little more than their memory.
What is measured is how long a loop without work of its own waits for a batch, in the median of a round. Starting is
left out. On one machine Ray can only lose: the figures say what its way costs, not what other machines bring. By hand,
two actors of Ray fill and return the same arrays, two calls each in flight, and nothing else is done. Ray runs its
workers with a niceness of 15; here it is 0, as that of the processes.
"""

import collections
import contextlib
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import ray
from _case import Options, main
from _measure import Entry, Reading, Run, measured
from _result import Table

import millstream as ms
from millstream.integrations.ray import RayActors

ACTORS, PROCESSES, BY_HAND = "Millstream, Ray actors", "Millstream, processes", "Ray, by hand"


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
            entries.append(Entry(BY_HAND, functools.partial(_by_hand, stack, items, shape, batches)))
            tables.append(measured(f"Batches of {title}", "ms per batch", ACTORS, entries, options.rounds(7)))
    large, small = tables
    large.hold("times as long as processes, 38 MB", large.ratio(ACTORS, PROCESSES), at_most=1.5)
    large.hold("times as long as Ray by hand, 38 MB", large.ratio(ACTORS, BY_HAND), at_most=1.5)
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

    return _waits(functools.partial(next, stream), batches)


def _waits(draw: Callable[[], Any], batches: int) -> Run:
    """A round of that many batches."""

    def run() -> Reading:
        waits, cpu = [], time.process_time()
        for _ in range(batches):
            begun = time.perf_counter()
            jax.block_until_ready(draw())
            waits.append(time.perf_counter() - begun)
        return Reading(statistics.median(waits), (time.process_time() - cpu) / batches)

    return run


class _Filler:
    """An actor that fills batches."""

    def __init__(self, items: int, shape: tuple[int, ...]) -> None:
        self._batch = np.empty((items, *shape), np.uint8)

    def fill(self, first: int) -> np.ndarray:
        for row in range(len(self._batch)):
            self._batch[row] = np.full(self._batch.shape[1:], (first + row) % 251, np.uint8)
        return self._batch


def _by_hand(stack: contextlib.ExitStack, items: int, shape: tuple[int, ...], batches: int) -> Run:
    actors: list[Any] = [ray.remote(_Filler).remote(items, shape) for _ in range(2)]
    for actor in actors:
        stack.callback(ray.kill, actor)
    calls = collections.deque((actor, actor.fill.remote(0)) for actor in (*actors, *actors))

    def draw() -> np.ndarray:
        actor, call = calls.popleft()
        batch = ray.get(call)
        calls.append((actor, actor.fill.remote(len(calls) * items)))
        return batch

    return _waits(draw, batches)


if __name__ == "__main__":
    main(measure)
