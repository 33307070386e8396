"""Which ways to read are worth a try, and which of those that were tried is to be preferred."""

import dataclasses
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from millstream.loader._tuning.trials import Executor
from millstream.pipeline.pipeline import Pipeline
from millstream.reading.in_graph import InGraph
from millstream.reading.processes import Processes
from millstream.reading.threads import Threads

if TYPE_CHECKING:
    from millstream.loader.loader import DataLoader

_CLOSE = 0.07  # of the best: what is nearer to it than this counts as good
_CLOSE_IN_GRAPH = 0.25  # a program that makes its batches itself can also run whole epochs, in `scan_epoch`
_MOST_THREADS = 32


def present_executor(loader: "DataLoader") -> Executor:
    """Who reads now; `InGraph()` where data that are arrays are gathered by the program."""
    executor = loader._built("tune")[1]["executor"]
    return InGraph() if executor is None and loader._host is None else executor


def can_be_gathered(loader: "DataLoader") -> bool:
    """Whether the samples are arrays that the program can gather."""
    pipeline, options = loader._built("tune")
    return isinstance(pipeline, Pipeline) and pipeline.host is None and options["on_error"] == "raise"


def ladders(loader: "DataLoader") -> Iterator[list[Executor]]:
    """Ways to read: lists that are climbed as long as it helps."""
    present = present_executor(loader)
    yield [present]
    if can_be_gathered(loader):
        yield [InGraph()]
        yield [_like(present, Threads, 1)]
        return
    if getattr(present, "startup", None) is None:  # what it prepares is there in workers alone
        yield [_like(present, Threads, count) for count in _doubled(_MOST_THREADS)]
    yield [_like(present, Processes, count) for count in _doubled(_most_processes())]


def _doubled(most: int) -> list[int]:
    powers = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return powers if powers[-1] == most else [*powers, most]


def _most_processes() -> int:
    """One for each core that this process may use, and two in any case."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(2, 1 if cores is None else cores)


def exceed_processes(rates: dict[Executor, float]) -> bool:
    """Whether threads read so much, by these samples per second, that as many processes as there may be cannot."""
    threads = {executor.workers: rate for executor, rate in rates.items() if isinstance(executor, Threads)}
    return 1 in threads and max(threads.values()) > _most_processes() * threads[1]


def _like(present: Executor, kind: type[Any], workers: int) -> Any:
    """So many workers of a kind, with all else as the present executor has it."""
    if isinstance(present, kind):
        return dataclasses.replace(present, workers=workers)  # pyright: ignore[reportArgumentType]
    if isinstance(present, Threads | Processes):
        return kind(workers, ordered=present.ordered, timeout=present.timeout)
    return kind(workers)


def workers_of(loader: "DataLoader", executor: Executor) -> int:
    """How many read."""
    if executor is None:
        return 1 if loader._host is None else loader._host.source.readers
    return getattr(executor, "workers", 1)


def preferred(loader: "DataLoader", rates: dict[tuple[Executor, int], float]) -> tuple[Executor, int]:
    """The simplest executor and prefetch of those that are as good as the best, by these samples per second."""
    best = max(rates.values())
    good = [(executor, prefetch) for (executor, prefetch), rate in rates.items() if is_good(executor, rate, best)]
    return min(good, key=lambda options: _simplicity(loader, *options))


def is_good(executor: Executor, rate: float, best: float) -> bool:
    """Whether so many samples per second are as good as the best, for all that one notices."""
    return rate >= (1 - (_CLOSE_IN_GRAPH if isinstance(executor, InGraph) else _CLOSE)) * best


def _simplicity(loader: "DataLoader", executor: Executor, prefetch: int) -> tuple[int, ...]:
    """Less is simpler: the program itself, then threads, then processes; fewer of them; less memory."""
    kind = 0 if isinstance(executor, InGraph) else 2 if isinstance(executor, Processes) else 1
    is_present = executor == present_executor(loader)
    return kind, workers_of(loader, executor), 0 if is_present else 1, prefetch


def seconds_of_a_round(loader: "DataLoader", executor: Executor, per_sample: float) -> float:
    """How long the first batches will take at best, if a sample takes so long in one thread."""
    rows = math.prod(loader._source.plan.axes)
    return rows * per_sample / (1 if isinstance(executor, Processes) else workers_of(loader, executor))


def prefetch_for(loader: "DataLoader", executor: Executor, prefetch: int) -> int:
    """Enough batches under way for all workers to have something to do."""
    host = loader._host
    if host is None or not isinstance(executor, Threads):
        return max(prefetch, 1)
    whole = host.source.whole_batches or host.source.reads_together
    at_once = 1 if whole else math.prod(loader._source.plan.axes)
    return max(prefetch, 1, -(-executor.workers // at_once) - 1)
