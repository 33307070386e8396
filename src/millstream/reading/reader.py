"""Reading for a loader: one backend for all who ask, and the batches of the future, which the plan knows."""

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from millstream.files.data_files import is_remote, staging
from millstream.plan.block_order import mixing
from millstream.plan.mixture import Mixed
from millstream.plan.plan import Plan
from millstream.plan.planned import AnyPlan, PlannedSteps
from millstream.plan.selection import Selection
from millstream.reading.executor import Backend
from millstream.reading.host_source import HostSource
from millstream.reading.read_config import ReadConfig
from millstream.reading.reading import ReadBatch
from millstream.reading.stats import LoaderStats
from millstream.reading.threads import ThreadBackend

_SLOW_SECONDS = 0.0003  # a batch that is read faster than this is read at once: handing it to a thread takes longer
_OUTLOOK = 64  # steps that a source of other machines is told of before they are read
_USES = 8  # of a block, on average, that are told ahead at any time: it is fetched once if it is never without one
_MOST_OUTLOOK = 1024  # steps; where that is too few, samples of blocks are fetched one by one
RUNS_KEPT = 16  # runs whose read-ahead is kept, for several runs that step in turn


class _Outlook:
    """Tells a source which samples come next, long before they are read, if it has a use for that.

    Args:
        source: The source.
        steps: The run; a different object than what batches are planned by, which is at other steps.
        stop: The first step that will not be asked for.
        reach: How many steps it is told of at first. It doubles as long as steps are asked for in order.
        for_others: Whether other processes of this machine read them.
    """

    def __init__(self, source: HostSource, steps: PlannedSteps, stop: int, reach: int, for_others: bool) -> None:
        self._source = source
        self._fetching = staging if for_others else contextlib.nullcontext
        self._steps = steps
        self._stop = stop
        self._most, self._bounds = _OUTLOOK, None
        if source.divides_blocks and isinstance(steps.plan, Plan):
            self._most, self._bounds = _outlook_on_blocks(steps.plan)
        self._first_reach = self._reach = self._most if reach == _OUTLOOK else reach
        self._told = range(0)  # steps

    def look_from(self, step: int) -> None:
        """Tell what comes after a step, some steps at a time."""
        if step not in self._told:
            self.close()
            self._told, self._reach = range(step, step), self._first_reach
        if self._told.stop - step > self._reach // 2:
            return
        stop = max(self._told.stop, min(step + self._reach, self._stop))
        in_blocks, self._reach = self._reach == self._most, min(2 * self._reach, self._most)
        requests = [self._steps.request(number, False) for number in range(self._told.stop, stop)]
        if requests:
            with self._fetching():
                self._tell(np.concatenate([request.indices[request.real] for request in requests]), in_blocks)
        self._told = range(step, max(stop, step + 1))

    def _tell(self, indices: np.ndarray, in_blocks: bool) -> None:
        if self._bounds is None or not in_blocks:
            return self._source.expect(indices)
        number = np.searchsorted(self._bounds[:-1, 1], indices)
        bounds = self._bounds[number]
        outside = (indices < bounds[:, 0]) | (indices > bounds[:, 1])  # a view may have a block in any order
        bounds[outside] = indices[outside, None]
        self._source.expect_blocks(indices, bounds)

    def close(self) -> None:
        """Say that what was told will not be read."""
        if self._told:
            self._source.expect(None)
            self._told = range(0)


def _outlook_on_blocks(plan: Plan) -> tuple[int, np.ndarray | None]:
    """How many steps to look ahead so that blocks are fetched as a whole, and where they are; None for nowhere."""
    rows, most, found = math.prod(plan.axes), _OUTLOOK, []
    for own, first, share in _in_blocks(plan):
        assert own.blocks is not None and own.selection is not None
        in_flight = mixing(own.blocks, np.asarray(own.selection.tables[0]), rows).blocks
        steps = math.ceil(2 * _USES * in_flight / rows / share)  # half of them are told at any time
        bounds = own.block_bounds() if steps <= _MOST_OUTLOOK else None
        if bounds is not None:
            most, found = max(most, steps), [*found, bounds + first]
    return most, np.concatenate(found) if found else None


def _in_blocks(plan: Plan) -> Iterator[tuple[Plan, int, float]]:
    """The plan if it is a block shuffle, or those of a mixture that are; each one's first sample, and its share."""
    if plan.blocks is not None:
        yield plan, 0, 1.0
        return
    functions = () if plan.selection is None else plan.selection.functions
    if plan.selection is None or len(functions) != 1 or not isinstance(functions[0], Mixed):
        return
    mixed: Mixed = functions[0]
    table: Any = plan.selection.tables[0]
    counts = mixed.counts(table, np.array([0, mixed.length - 1]))
    shares = np.diff(counts, axis=0)[0] / mixed.length
    for part, tables, share in zip(mixed.parts, table[1], shares.tolist(), strict=True):
        own = Plan(part.length, "sequential", selection=Selection(part.selection.functions, tables))
        if own.blocks is not None and share > 0:
            yield own, part.first, share


class ReadAhead:
    """The batches of one run for one caller, and the reading of those that come next.

    Asking for steps in order is fast. Any other step is read when it is asked for: what is read ahead never changes
    what is returned.

    Args:
        host: How to read.
        steps: The run.
        backend: Who reads.
        ahead: How many batches to read ahead.
        stats: Where to count.
        stop: The first step that will not be asked for; nothing from there on is read.
        on_close: Called once, when this is closed or forgotten.
        reach: How many steps a source of other machines is told of at first.

    Attributes:
        steps: The run.
        stats: Where to count.
    """

    def __init__(
        self,
        host: ReadConfig,
        steps: PlannedSteps,
        backend: Backend,
        ahead: int,
        stats: LoaderStats,
        stop: int,
        on_close: Callable[[], None] = lambda: None,
        reach: int = 2,
    ) -> None:
        self.steps = steps
        self._backend = backend
        self._keyed = host.source.keyed
        self._ahead = ahead
        self.stats = stats
        self._stop = stop
        self._slow = not backend.lazy
        self._outlook: _Outlook | None = None
        for_others = getattr(backend, "shares_disk", False) and any(is_remote(name) for name, *_ in host.source.stamps)
        if host.source.looks_ahead and (for_others or isinstance(backend, ThreadBackend)):
            self._outlook = _Outlook(host.source, steps.again(), stop, reach, for_others)
        self._lock = threading.Lock()
        self._pending: dict[int, Any] = {}
        self._forget = weakref.finalize(self, _forget, backend, self._pending, on_close, self._outlook)
        self._forget.atexit = False

    def rows(self, step: int) -> ReadBatch:
        """The batch of a step; rows that pad are zeros."""
        backend, pending, stop = self._backend, self._pending, min(step + self._ahead + 1, self._stop)
        with self._lock:
            if self._outlook is not None:
                self._outlook.look_from(step)
            if self._slow:
                self._start(step, stop)
            job = pending.pop(step, None)
            if job is None:
                job = backend.prepare(self.steps.request(step, self._keyed))
            for waiting in pending.values():
                self.stats.ready += backend.is_done(waiting)
        filled = backend.collect(job)
        filled.request = job.request
        count_batch(self.stats, filled)
        if backend.lazy:
            with self._lock:
                was_slow, self._slow = self._slow, filled.seconds > _SLOW_SECONDS
                if self._slow and not was_slow:
                    self._start(step + 1, stop)
        return filled

    def any_rows(self, steps: list[int]) -> tuple[int, ReadBatch]:
        """Whichever of these steps, in rising order, is read first, of those that are begun."""
        with self._lock:
            if self._outlook is not None:
                self._outlook.look_from(steps[0])
            begun = steps[: self._ahead + 1]
            for step in begun:
                if step not in self._pending:
                    self._pending[step] = self._backend.start(self.steps.request(step, self._keyed))
            job = self._backend.first_of([self._pending[step] for step in begun])
            self._pending.pop(job.request.step, None)  # closing may have cleared it
        filled = self._backend.collect(job)
        filled.request = job.request
        count_batch(self.stats, filled)
        return job.request.step, filled

    @property
    def closed(self) -> bool:
        """Whether those who read have ended."""
        return self._backend.closed

    def close(self) -> None:
        """Forget what was begun, and leave the backend to others or have it end."""
        self._forget()

    def _start(self, first: int, stop: int) -> None:
        """Have these steps read in the background, and forget all others."""
        pending = self._pending
        if pending and not (first <= min(pending) and max(pending) < stop):
            for number in [number for number in pending if not first <= number < stop]:
                self._backend.drop(pending.pop(number))
        for number in range(first, stop):
            if number not in pending:
                pending[number] = self._backend.start(self.steps.request(number, self._keyed))


def count_batch(stats: LoaderStats, filled: ReadBatch) -> None:
    """Add what came of reading a batch to the statistics of its loader."""
    report = filled.report
    for leaf in filled.rows:
        stats.nbytes += leaf.nbytes
    stats.samples += filled.samples - len(report.failed)
    stats.failed += len(report.failed)
    stats.restarts += filled.restarts
    stats.cached += filled.cached
    for name, seconds in report.times.items():
        stats.reading[name] = stats.reading.get(name, 0.0) + seconds


def _forget(backend: Backend, pending: dict[int, Any], on_close: Callable[[], None], outlook: _Outlook | None) -> None:
    on_close()  # first: if it ends the backend, that ends the waiting of another thread
    if outlook is not None:
        outlook.close()
    if not backend.closed:
        for job in list(pending.values()):
            backend.drop(job)
    pending.clear()


class Reader:
    """Reads the samples of one pipeline for iterators, `next_batch` and compiled programs alike.

    There is one backend, which is opened when it is first needed and ends with the last one who needs it.

    Args:
        host: How to read.
        plan: Whose steps are asked for.

    Attributes:
        host: How to read.
        plan: Whose steps are asked for.
        stats: Where the batches count that are asked for by `rows`.
    """

    def __init__(self, host: ReadConfig, plan: AnyPlan) -> None:
        self.host = host
        self.plan = plan
        self.stats = LoaderStats()
        self._lock = threading.RLock()  # a finalizer may run while it is held
        self._backend: Backend | None = None
        self._users = 0
        self._kept = False
        self._runs: dict[bytes, ReadAhead] = {}  # of `rows`; the one used last comes last

    def read_ahead(self, steps: PlannedSteps, stats: LoaderStats, stop: int) -> ReadAhead:
        """The batches of a run, for a caller who closes it at the end."""
        with self._lock:
            backend = self._open()
            self._users += 1
        leave = _Leave(self, backend)
        return ReadAhead(self.host, steps, backend, self.host.ahead(self.plan), stats, stop, leave, _OUTLOOK)

    def rows(self, words: np.ndarray, step: int) -> ReadBatch:
        """The batch of any step of any run."""
        name = words.tobytes()
        with self._lock:
            run = self._runs.pop(name, None)
            if run is None or run.closed:
                steps = PlannedSteps(self.plan, words, self.host.rows)
                ahead, limit = self.host.ahead(self.plan), self.plan.step_limit
                run = ReadAhead(self.host, steps, self._open(), ahead, self.stats, limit)
            self._runs[name], run.stats = run, self.stats
            oldest = self._runs.pop(next(iter(self._runs))) if len(self._runs) > RUNS_KEPT else None
            self.stats.batches += 1
        if oldest is not None:
            oldest.close()
        return run.rows(step)

    def keep(self) -> None:
        """Leave the backend open, even when nothing uses it, until `close`."""
        self._kept = True

    def end_runs(self) -> None:
        """Forget what `rows` has read ahead, and end the backend unless it is still in use."""
        if not self._kept:
            self.close()

    def close(self) -> None:
        """End the backend, or leave that to the last iterator that needs it."""
        self._kept = False
        with self._lock:
            runs, self._runs = self._runs, {}
            backend = self._backend if self._users == 0 else None
        if backend is not None:
            backend.close()  # first: it ends the waiting of other threads
        for run in runs.values():
            run.close()

    def _open(self) -> Backend:
        if self._backend is not None and self._backend.closed:  # by an error
            self._backend.close()
            self._backend = None
        if self._backend is None:
            self._backend, self._users = self.host.backend(self.plan), 0
        return self._backend

    def leave(self, backend: Backend) -> None:
        """An iterator needs the backend no more."""
        with self._lock:
            if backend is not self._backend:  # it has ended already
                return
            self._users -= 1
            if self._users or self._kept or self._runs:
                return
            self._backend = None
        backend.close()


class _Leave:
    """Tells a reader that somebody needs its backend no more."""

    def __init__(self, reader: Reader, backend: Backend) -> None:
        self._reader = reader
        self._backend = backend

    def __call__(self) -> None:
        self._reader.leave(self._backend)


# Loaders and compiled programs hold on to readers. Nobody else does, so that a loader takes its data along.
_readers: "weakref.WeakValueDictionary[tuple[ReadConfig, AnyPlan], Reader]" = weakref.WeakValueDictionary()
_finding = threading.RLock()  # a finalizer may run while it is held


def reader_of(host: ReadConfig, plan: AnyPlan) -> Reader:
    """One reader per pipeline, whoever reads, also if threads ask at the same time."""
    with _finding:
        found = _readers.get((host, plan))
        if found is None:
            found = _readers[host, plan] = Reader(host, plan)
        return found
