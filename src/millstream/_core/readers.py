"""A few threads that read batches. They never keep the interpreter alive, and end when nobody holds the pool."""

import dataclasses
import functools
import itertools
import queue
import sys
import threading
import time
import traceback
import warnings
import weakref
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import numpy as np

from millstream._core.errors import ends_silently, noted
from millstream._core.faults import WorkerStalled
from millstream._core.host_source import HostSource
from millstream._core.reading import Reading, Report, Request
from millstream._core.settings import settings
from millstream._core.slots import Layout, Slots


@dataclasses.dataclass
class Filled:
    """A batch that has been read.

    Attributes:
        rows: One array per leaf, with the axes of a batch in front.
        report: What came of it.
        seconds: How long it took to read, all readers together.
        samples: Samples that were asked for.
        restarts: Worker processes that died since the last batch.
        request: What was asked for.
    """

    rows: list[np.ndarray]
    report: Report
    seconds: float
    samples: int
    restarts: int = 0
    request: Request | None = None


class Readers:
    """A pool of daemon threads that fill batches, started with the first one.

    Args:
        source: What to read.
        layout: Of a batch.
        count: How many threads.
        ahead: How many batches will be under way besides the one asked for.
        tolerant: Whether samples that raise become failed rows.
        timeout: Seconds a batch may take; None for those of the settings.
        lazy: Whether a batch that is read in no time is better read by who asks for it.
    """

    def __init__(
        self,
        source: HostSource,
        layout: Layout,
        count: int,
        ahead: int,
        *,
        tolerant: bool = False,
        timeout: float | None = None,
        lazy: bool = False,
    ) -> None:
        self.lazy = lazy
        self._source = source
        self._count = count
        self._tolerant = tolerant
        self._timeout = timeout
        self._layout = layout
        self._slots = None if layout.objects else Slots(layout, ahead + 3)
        self._threads: list[threading.Thread] = []
        # The threads know the queue alone, so that a forgotten pool is collected, and its threads with it.
        self._tasks: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._end = weakref.finalize(self, _end, self._tasks, count)

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return not self._end.alive

    @property
    def nbytes(self) -> int:
        """Memory that batches are read into."""
        return 0 if self._slots is None else self._slots.nbytes

    def prepare(self, request: Request) -> "Job":
        """A batch that is read when it is asked for, unless it is started before."""
        if self._slots is None:
            return Job(request, None, self._layout.empty())
        slot = self._slots.take()
        return Job(request, slot, slot.leaves)

    def start(self, request: Request) -> "Job":
        """Have a batch read in the background, by several readers at different rows."""
        if not self._threads:
            self._threads = [
                threading.Thread(target=_work, args=(self._tasks,), daemon=True, name=f"millstream-reader-{number}")
                for number in range(self._count)
            ]
            for thread in self._threads:
                thread.start()
        job = self.prepare(request)
        size = len(request.indices)
        # Small parts keep all readers busy to the end; what is read as a whole is one part.
        together = self._source.whole_batches or self._source.reads_together or self._count == 1
        part = size if together else max(1, size // (4 * self._count))
        for first in range(0, size, part):
            job.parts.append(_Part(self._source, job, self._tolerant, first, min(first + part, size)))
            self._tasks.put(job.parts[-1])
        return job

    def collect(self, job: "Job") -> Filled:
        """The batch, once it is read; it raises what reading raised."""
        if not job.parts:
            begun = time.perf_counter()
            reading = Reading(self._source, job.request, job.leaves, tolerant=self._tolerant)
            report = reading.read(0, len(job.request.indices))
            return self._filled(job, report, time.perf_counter() - begun)
        limit = settings.limit(self._timeout)
        begun, report = time.monotonic(), Report()
        for part in job.parts:
            self._wait_for(part, begun, limit)
            report.add(part.future.result())
        return self._filled(job, report, sum(part.seconds for part in job.parts))

    def is_done(self, job: "Job") -> bool:
        """Whether a batch can be collected without waiting."""
        return all(part.future.done() for part in job.parts)

    def first_of(self, jobs: list["Job"]) -> "Job":
        """Whichever of these batches is read first."""
        while True:
            for job in jobs:
                if self.is_done(job):
                    return job
            open_parts = [part.future for job in jobs for part in job.parts if not part.future.done()]
            limit = settings.limit(self._timeout)
            if not wait(open_parts, limit, FIRST_COMPLETED).done:
                return jobs[0]  # which will be found to be stalled

    def drop(self, job: "Job") -> None:
        """Forget about a batch; its memory is free once no thread writes into it."""
        running = [part for part in job.parts if not part.future.cancel() and not part.future.done()]
        if self._slots is None:
            return
        give_back = functools.partial(self._slots.give_back, job.slot)
        left = itertools.count(len(running) - 1, -1)  # counts down atomically
        for part in running:
            part.future.add_done_callback(lambda _: next(left) == 0 and give_back())
        if not running:
            give_back()

    def close(self) -> None:
        """End the threads after the samples they are at; closing twice does no harm."""
        self._end()

    def _filled(self, job: "Job", report: Report, seconds: float) -> Filled:
        if self._slots is None:
            rows = [leaf.reshape((*self._layout.axes, *leaf.shape[1:])) for leaf in job.leaves]
        else:
            rows = self._slots.hand_out(job.slot)
        return Filled(rows, report, seconds, int(job.request.real.sum()))

    def _wait_for(self, part: "_Part", begun: float, limit: float) -> None:
        patience = min(settings.warn_seconds, limit)
        if wait([part.future], max(0.0, begun + patience - time.monotonic())).done:
            return
        if patience < limit:
            warnings.warn(f"{self._who} has been at a batch for {patience:.0f} s. {part.whereabouts()}", stacklevel=2)
        if not wait([part.future], max(0.0, begun + limit - time.monotonic())).done:
            raise WorkerStalled(self._stall_text(part, limit))

    @property
    def _who(self) -> str:
        return type(self._source).__name__

    def _stall_text(self, part: "_Part", limit: float) -> str:
        return (
            f"{self._who} has been reading for {limit:.0f} s without an end. {part.whereabouts()}\n"
            "Is a disk or a server not answering? If this is how long a batch takes, give the executor a longer "
            f"timeout, or set ms.settings.stall_seconds.\n{part.stack()}"
        )


@dataclasses.dataclass
class Job:
    """A batch that is being read.

    Attributes:
        request: What is asked for.
        slot: The memory it is read into, if it has any.
        leaves: The arrays over it.
        parts: The pieces of work it was made into.
    """

    request: Request
    slot: Any
    leaves: list[np.ndarray]
    parts: list["_Part"] = dataclasses.field(default_factory=list)


class _Part:
    """Some rows of a batch, for one thread."""

    def __init__(self, source: HostSource, job: Job, tolerant: bool, first: int, end: int) -> None:
        self._reading = Reading(source, job.request, job.leaves, tolerant=tolerant, at=self._note)
        self._rows = (first, end)
        self._thread: int | None = None
        self._sample: int | None = None
        self.seconds = 0.0
        self.future: Future[Report] = Future()

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        self._thread = threading.get_ident()
        begun = time.perf_counter()
        try:
            report = self._reading.read(*self._rows)
        except BaseException as error:
            self.seconds = time.perf_counter() - begun
            self.future.set_exception(
                noted(error, "This came from a reading thread.") if ends_silently(type(error)) else error
            )
        else:
            self.seconds = time.perf_counter() - begun
            self.future.set_result(report)

    def _note(self, row: int, index: int) -> None:
        self._sample = index

    def whereabouts(self) -> str:
        if self._sample is None:
            return "The readers have not come to it yet: they are at batches behind it."
        return f"It is at sample {self._sample}."

    def stack(self) -> str:
        frame = None if self._thread is None else sys._current_frames().get(self._thread)
        if frame is None:
            return ""
        return "The reading thread is here:\n" + "".join(traceback.format_stack(frame)[-8:])


def _end(tasks: "queue.SimpleQueue[_Part | None]", count: int) -> None:
    try:
        while True:
            waiting = tasks.get_nowait()
            if waiting is not None:
                waiting.future.cancel()
    except queue.Empty:
        pass
    for _ in range(count):
        tasks.put(None)


def _work(tasks: "queue.SimpleQueue[_Part | None]") -> None:
    while True:
        part = tasks.get()
        if part is None:
            return
        part.run()
        del part  # a waiting thread holds on to nothing
