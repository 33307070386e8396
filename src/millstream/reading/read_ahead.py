"""Reading rows before they are asked for: the plan says what comes next."""

import threading
import weakref
from typing import Any, Protocol

import numpy as np

from millstream.plan.keys import fold, named_key
from millstream.plan.plan import Plan
from millstream.reading.host_source import HostSource
from millstream.reading.reading import Filled, Request
from millstream.reading.stats import LoaderStats

_SLOW_SECONDS = 0.0003  # a batch that is read faster than this is read at once: handing it to a thread takes longer
_PLANNED_STEPS = 64  # planning many steps at once costs NumPy little more than planning one
_RUNS = 16  # runs whose read-ahead is kept, for several runs that step in turn


class Backend(Protocol):
    """Who reads: threads of this process, or worker processes."""

    lazy: bool

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        ...

    def prepare(self, request: Request) -> Any:
        """A batch that is read when it is collected."""
        ...

    def start(self, request: Request) -> Any:
        """Have a batch read in the background."""
        ...

    def collect(self, job: Any) -> Filled:
        """Wait for a batch, and raise what reading it raised."""
        ...

    def is_done(self, job: Any) -> bool:
        """Whether a batch can be collected without waiting, as far as is known."""
        ...

    def first_of(self, jobs: list[Any]) -> Any:
        """Wait for any of these batches."""
        ...

    def drop(self, job: Any) -> None:
        """Forget about a batch."""
        ...

    def close(self) -> None:
        """End everything that was begun; closing twice does no harm."""
        ...


class ReadAhead:
    """The rows of any step of any run, and the reading of the steps behind it.

    Asking for steps in order is fast. Any other step is read when it is asked for: what is read ahead never changes
    what is returned.

    Args:
        source: What to read.
        plan: The plan whose steps are asked for.
        backend: Who reads.
        ahead: How many batches to read ahead.
        stats: Where to count.
        stop: The first step that will not be asked for, if that is known; nothing behind it is read.
        rows: The rows of a batch that are read; None for all.
        own_backend: Whether the backend ends with this.
    """

    def __init__(
        self,
        source: HostSource,
        plan: Plan,
        backend: Backend,
        ahead: int,
        stats: LoaderStats,
        *,
        stop: int | None = None,
        rows: tuple[int, ...] | None = None,
        own_backend: bool = True,
    ) -> None:
        self._stats = stats
        self._own_backend = own_backend
        self._plan = plan
        self._rows = rows
        self._keyed = source.keyed
        self._backend = backend
        self._ahead = ahead
        self._stop = plan.step_limit if stop is None else stop
        self._slow = not backend.lazy
        self._lock = threading.Lock()
        self._runs: dict[bytes, PlannedRun] = {}
        self._forget = weakref.finalize(self, _drop_all, backend, self._runs)
        self._forget.atexit = False

    def rows(self, words: np.ndarray, step: int) -> Filled:
        """The batch of a step; rows that pad are zeros."""
        with self._lock:
            run = self._run(words)
            end = min(step + self._ahead + 1, self._stop)
            if self._slow:
                self._start(run, range(step, end))
            job = run.pending.pop(step, None)
            if job is None:
                job = self._backend.prepare(run.request(step, self._keyed))
            self._stats.ready += sum(map(self._backend.is_done, run.pending.values()))
        filled = self._collected(job)
        if self._backend.lazy:
            with self._lock:
                was_slow, self._slow = self._slow, filled.seconds > _SLOW_SECONDS
                if self._slow and not was_slow:
                    self._start(run, range(step + 1, end))
        return filled

    def any_rows(self, words: np.ndarray, steps: list[int]) -> tuple[int, Filled]:
        """Whichever of these steps, in rising order, is read first, of those that are begun."""
        with self._lock:
            run = self._run(words)
            begun = steps[: self._ahead + 1]
            for step in begun:
                if step not in run.pending:
                    run.pending[step] = self._backend.start(run.request(step, self._keyed))
            job = self._backend.first_of([run.pending[step] for step in begun])
            del run.pending[job.request.step]
        return job.request.step, self._collected(job)

    @property
    def closed(self) -> bool:
        """Whether who reads has ended."""
        return self._backend.closed

    def close(self) -> None:
        """End the reading, and forget about what was begun."""
        if self._own_backend:
            self._backend.close()  # first: it ends the waiting of other threads, whose locks are needed below
        with self._lock:
            self._forget()

    def _collected(self, job: Any) -> Filled:
        filled = self._backend.collect(job)
        filled.request = job.request
        stats, report = self._stats, filled.report
        stats.nbytes += sum(leaf.nbytes for leaf in filled.rows)
        stats.samples += filled.samples - len(report.failed)
        stats.failed += len(report.failed)
        stats.restarts += filled.restarts
        for name, seconds in report.times.items():
            stats.reading[name] = stats.reading.get(name, 0.0) + seconds
        return filled

    def _start(self, run: "PlannedRun", steps: range) -> None:
        """Have these steps read in the background, and forget about all others."""
        for number in [number for number in run.pending if number not in steps]:
            self._backend.drop(run.pending.pop(number))
        for number in steps:
            if number not in run.pending:
                run.pending[number] = self._backend.start(run.request(number, self._keyed))

    def _run(self, words: np.ndarray) -> "PlannedRun":
        name = words.tobytes()
        run = self._runs.pop(name, None)
        if run is None:
            run = PlannedRun(self._plan, words, self._rows)
        self._runs[name] = run  # the run used last comes last
        if len(self._runs) > _RUNS:
            oldest = next(iter(self._runs))
            _drop_all(self._backend, {oldest: self._runs.pop(oldest)})
        return run


def still_open(reading: ReadAhead | None) -> ReadAhead | None:
    """What reads, unless there is nothing or an error has ended it, which then lets go of all it had."""
    if reading is None or not reading.closed:
        return reading
    reading.close()
    return None


def _drop_all(backend: Backend, runs: dict[bytes, "PlannedRun"]) -> None:
    if not backend.closed:
        for run in runs.values():
            for job in run.pending.values():
                backend.drop(job)
    runs.clear()


class PlannedRun:
    """One key's steps: planned in blocks, and the batches that are being read.

    Args:
        plan: The plan.
        words: The key.
        rows: The rows of a batch that are wanted; None for all.
    """

    def __init__(self, plan: Plan, words: np.ndarray, rows: tuple[int, ...] | None = None) -> None:
        self._rows = None if rows is None else np.array(rows, np.uint64)
        self.pending: dict[int, Any] = {}
        self._plan = plan
        self._words = words.copy()
        self._name = words.tobytes()
        self._first = 0
        self._indices = self._mask = self._epochs = np.empty(0)
        self._places: list[tuple[int, int]] = []

    def request(self, step: int, keyed: bool) -> Request:
        """What a step asks for, with the keys of its samples if they are wanted."""
        if not 0 <= step - self._first < len(self._indices):
            self._first = step
            steps = step + np.arange(_PLANNED_STEPS, dtype=np.uint64)
            indices, rows = self._plan.at(np, self._words, steps, self._rows)
            flat = lambda array: array.reshape(_PLANNED_STEPS, -1)  # noqa: E731
            self._indices = flat(indices).astype(np.int64)
            self._mask, self._epochs = flat(rows[-1].mask), flat(rows[-1].epoch)
            self._places = list(zip(rows[0].epoch.tolist(), rows[0].element.tolist(), strict=True))
        at = step - self._first
        indices, epochs = self._indices[at], self._epochs[at]
        keys = sample_keys(self._words, epochs, indices) if keyed else None
        return Request(step, indices, self._mask[at], keys, epochs, self._name, self._places[at])


def sample_keys(words: np.ndarray, epochs: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """The keys of samples read on the host: functions of run key, epoch and sample index alone."""
    key = fold(np, fold(np, named_key(words, "millstream sample 1"), epochs), indices)
    return np.stack(np.broadcast_arrays(*key), axis=-1)
