"""A few threads that read batches. They never keep the interpreter alive, and end when nobody holds the pool."""

import dataclasses
import functools
import itertools
import queue
import threading
import time
import weakref
from typing import Any

import numpy as np

from millstream.reading.host_source import HostSource
from millstream.reading.read_part import Part, Patience
from millstream.reading.reading import Filled, Reading, Report, Request
from millstream.reading.slots import Layout, Slots, slots_for


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
        self._slots = None if layout.objects else Slots(layout, slots_for(ahead))
        self._threads: list[threading.Thread] = []
        # The threads know the queue alone, so that a forgotten pool is collected, and its threads with it.
        self._tasks: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
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
        if self.closed:
            raise _ended()
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
            rows = (first, min(first + part, size))
            job.parts.append(Part(self._source, request, job.leaves, self._tolerant, rows))
            self._tasks.put(job.parts[-1])
        return job

    def collect(self, job: "Job") -> Filled:
        """The batch, once it is read; it raises what reading raised."""
        try:
            report, seconds = self._reports(job) if job.parts else self._read_here(job)
        except BaseException:
            self.drop(job)
            raise
        if self._slots is None:
            rows = [leaf.reshape((*self._layout.axes, *leaf.shape[1:])) for leaf in job.leaves]
        else:
            rows = self._slots.hand_out(job.slot)
        return Filled(rows, report, seconds, int(job.request.real.sum()))

    def is_done(self, job: "Job") -> bool:
        """Whether a batch can be collected without waiting."""
        return all(part.future.done() for part in job.parts)

    def first_of(self, jobs: list["Job"]) -> "Job":
        """Whichever of these batches is read first."""
        patience = Patience(type(self._source).__name__, self._timeout)
        while True:
            for job in jobs:
                if self.is_done(job):
                    return job
            patience.wait_for_any([part for job in jobs for part in job.parts if not part.future.done()])

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

    def _read_here(self, job: "Job") -> tuple[Report, float]:
        """Read a batch in this thread: what came of it, and how long it took."""
        begun = time.perf_counter()
        reading = Reading(self._source, job.request, job.leaves, tolerant=self._tolerant)
        report = reading.read(0, len(job.request.indices))
        return report, time.perf_counter() - begun

    def _reports(self, job: "Job") -> tuple[Report, float]:
        """Wait for the threads that read a batch: what came of all its parts, and how long they took together."""
        patience, report = Patience(type(self._source).__name__, self._timeout), Report()
        for part in job.parts:
            patience.wait_for_any([part])
            if part.future.cancelled():  # by closing, in another thread
                raise _ended()
            report.add(part.future.result())
        return report, sum(part.seconds for part in job.parts)


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
    parts: list[Part] = dataclasses.field(default_factory=list)


def _end(tasks: queue.SimpleQueue[Part | None], count: int) -> None:
    try:
        while True:
            waiting = tasks.get_nowait()
            if waiting is not None:
                waiting.cancel()
    except queue.Empty:
        pass
    for _ in range(count):
        tasks.put(None)


def _ended() -> RuntimeError:
    return RuntimeError("The reading threads of this stream have been ended. Call loader.iterate(...) for a new one.")


def _work(tasks: queue.SimpleQueue[Part | None]) -> None:
    while True:
        part = tasks.get()
        if part is None:
            return
        part.run()
        del part  # a waiting thread holds on to nothing
