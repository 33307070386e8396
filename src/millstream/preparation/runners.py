"""Having ranges made: in this thread, by an executor, or by the tasks of a Ray cluster."""

import collections
import dataclasses
import logging
import math
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from millstream.plan.planned import Request
from millstream.preparation.shards import RangeMaker
from millstream.reading.executor import Executor
from millstream.reading.slots import Layout
from millstream.text.errors import describe_value, needs, noted

_WAITING = 2  # tasks for each core of a cluster: one that runs, and one that is next


def made_here(maker: RangeMaker, numbers: Sequence[int]) -> Generator[tuple[int, int]]:
    """Make ranges one after the other; the number of each, and how many samples it has."""
    for number in numbers:
        yield number, maker.make(number)


def made_by_executor(maker: RangeMaker, numbers: Sequence[int], executor: Executor) -> Generator[tuple[int, int]]:
    """Have ranges made by threads or worker processes. A range that ended a worker is made again."""
    if getattr(executor, "timeout", 0) is None:  # how long a range takes is the user's affair
        executor = dataclasses.replace(executor, timeout=math.inf)  # pyright: ignore[reportArgumentType]
    # One for each worker: one more would wait at the end for a worker that is busy.
    ahead = max(executor.ahead(0), getattr(executor, "workers", 1) - 1)
    backend = executor.open(maker, Layout((1,), ((),), (np.dtype(object),)), ahead, False)
    jobs: list[Any] = []
    waiting = collections.deque(numbers)
    try:
        while waiting or jobs:
            while waiting and len(jobs) <= ahead:
                number = waiting.popleft()
                jobs.append(backend.start(Request(number, np.array([number]), np.array([True]))))
            job = backend.first_of(jobs)
            jobs = [one for one in jobs if one is not job]
            yield job.request.step, int(backend.collect(job).rows[0][0])
    finally:
        backend.close()


def made_by_ray(maker: RangeMaker, numbers: Sequence[int], address: str) -> Generator[tuple[int, int]]:
    """Have ranges made by the tasks of a Ray cluster, whose machines share the folder."""
    with needs("prepare(ray=...)", "ray", "ray"):
        import ray

    began = not ray.is_initialized()
    if began:
        try:
            ray.init(address, logging_level=logging.WARNING)
        except ConnectionError as error:
            note = "prepare(ray=...) needs the address of a Ray cluster that runs; 'local' starts one on this machine."
            raise noted(error, note)  # noqa: B904
        except (ValueError, RuntimeError) as error:  # RuntimeError: an address whose scheme Ray has no module for
            raise ValueError(
                "prepare needs ray to be the address of a cluster as ray.init takes it, such as 'auto', 'local' or "
                f"'ray://head:10001'. Got {describe_value(address)}."
            ) from error
    tasks: dict[Any, int] = {}
    waiting = collections.deque(numbers)
    try:
        shared, make = ray.put(maker), ray.remote(_make)
        room = _WAITING * max(1, int(ray.cluster_resources().get("CPU", 1)))
        while waiting or tasks:
            while waiting and len(tasks) < room:
                number = waiting.popleft()
                tasks[make.remote(shared, number)] = number
            [done], _ = ray.wait(list(tasks), num_returns=1)
            yield tasks.pop(done), ray.get(done)
    finally:
        for task in tasks:
            ray.cancel(task)
        if began:
            ray.shutdown()


def _make(maker: RangeMaker, number: int) -> int:
    return maker.make(number)
