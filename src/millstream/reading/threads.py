"""Threads of this process that read."""

import dataclasses
import os
import queue
import sys
import threading
import time
import traceback
import warnings
import weakref
from typing import Any, ClassVar

import numpy as np

from millstream.errors import WorkerStalled
from millstream.plan.planned import Request
from millstream.reading._settings import settings
from millstream.reading.host_source import HostSource
from millstream.reading.reading import ReadBatch, Reading, Report
from millstream.reading.slots import Layout, Slot, Slots, slots_for
from millstream.text.errors import ends_silently, noted, require_bool, require_positive, require_readers
from millstream.text.summaries import call_text

_TICK = 0.25  # seconds: a signal that comes just before a wait is seen only after it


@dataclasses.dataclass(eq=False)
class _ThreadJob:
    """A batch that is being read, in parts.

    Attributes:
        request: What is asked for.
        slot: The memory it is read into; None for Python objects, and once it was given away.
        leaves: The arrays over it.
        started: Whether threads read it; if not, its caller does.
        left: Parts that are not read yet.
        running: Parts that a thread is reading: its first row, and the thread and the sample that it is at.
        errors: What parts raised, by their first rows.
        ended: Whether nothing of it is begun any more.
        dropped: Whether it is no longer wanted.
    """

    request: Request
    slot: Slot | None
    leaves: list[np.ndarray]
    started: bool = False
    left: int = 0
    running: dict[int, tuple[int, int | None]] = dataclasses.field(default_factory=dict)
    errors: dict[int, BaseException] = dataclasses.field(default_factory=dict)
    report: Report = dataclasses.field(default_factory=Report)
    seconds: float = 0.0
    ended: bool = False
    dropped: bool = False


class ThreadBackend:
    """Daemon threads that fill batches, started with the first one.

    Args:
        source: What to read.
        layout: Of a batch.
        count: How many threads.
        ahead: How many batches will be in flight besides the one asked for.
        tolerant: Whether samples that raise become failed rows.
        timeout: Seconds a batch may take; None for those of the settings.
        lazy: Whether a batch that takes no time is better read by the caller.
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
        # Small parts keep all threads busy to the end; what is read as a whole is one part. What was fetched ahead only
        # waits for processors: parts of a few samples would cost more than those.
        together = source.whole_batches or source.reads_together or count == 1
        self._parts = 1 if together else 4 * min(count, usable_cores()) if source.looks_ahead else 4 * count
        # The threads know the work alone, so that a forgotten backend is collected, and its threads with it.
        self._work = _Work(source, tolerant, self._slots)
        self._started = False
        self._end = weakref.finalize(self, self._work.end, count)

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return not self._end.alive

    @property
    def nbytes(self) -> int:
        """Memory that batches are read into."""
        return 0 if self._slots is None else self._slots.nbytes

    def prepare(self, request: Request) -> _ThreadJob:
        """A batch that is read when it is asked for."""
        if self._slots is None:
            return _ThreadJob(request, None, self._layout.of(request.bucket).empty())
        slot = self._slots.take()
        return _ThreadJob(request, slot, slot.leaves(request.bucket))

    def start(self, request: Request) -> _ThreadJob:
        """Have a batch read in the background, by several threads at different rows."""
        if not self._end.alive:
            raise _ended_error()
        if not self._started:
            self._started = True
            for number in range(self._count):
                name = f"millstream-reader-{number}"
                threading.Thread(target=self._work.run, daemon=True, name=name).start()
        job, size, put = self.prepare(request), len(request.indices), self._work.parts.put
        part = max(1, size // self._parts)
        firsts = range(0, size, part)
        job.started, job.left = True, len(firsts)
        for first in firsts:
            put((job, first, min(first + part, size)))
        return job

    def collect(self, job: _ThreadJob) -> ReadBatch:
        """The batch, once it is read; it raises what reading raised."""
        try:
            if job.left:
                self.first_of([job])
            elif not job.started:
                self._read_here(job)
            if job.errors:
                raise job.errors[min(job.errors)]
            if job.ended:  # by closing, in a different thread
                raise _ended_error()
        except BaseException:
            self.drop(job)
            raise
        if job.slot is None:
            rows = self._layout.of(job.request.bucket).with_axes(job.leaves)
        else:
            assert self._slots is not None
            rows = self._slots.lend(job.slot, job.request.bucket)
        return ReadBatch(rows, job.report, job.seconds, int(np.count_nonzero(job.request.real)))

    def is_done(self, job: _ThreadJob) -> bool:
        """Whether a batch can be collected without waiting."""
        return not job.left

    def first_of(self, jobs: list[_ThreadJob]) -> _ThreadJob:
        """Whichever of these batches is read first: a warning if it takes long, and an error at the end."""
        name, begun, limit = type(self._source).__name__, time.monotonic(), settings.limit(self._timeout)
        patience = settings.patience(self._timeout)
        while True:
            with self._work.changed:
                for job in jobs:
                    if not job.left:
                        return job
                left = patience - (time.monotonic() - begun)
                if left > 0:
                    self._work.changed.wait(min(left, _TICK))
                    continue
            if patience < limit:
                warnings.warn(f"{name} has been at a batch for {patience:.0f} s. {_whereabouts(jobs[0])}", stacklevel=4)
                patience = limit
                continue
            raise WorkerStalled(
                f"{name} has been reading for {limit:.0f} s without an end. {_whereabouts(jobs[0])}\n"
                "Is a disk or a server not answering? If this is how long a batch takes, give the executor a longer "
                f"timeout, or set ms.reading.settings.stall_seconds.\n{_stack(jobs[0])}"
            )

    def drop(self, job: _ThreadJob) -> None:
        """Forget a batch; its memory is free once no thread writes into it."""
        self._work.drop(job)

    def close(self) -> None:
        """End the threads after the samples they are at; closing twice does no harm."""
        self._end()

    def _read_here(self, job: _ThreadJob) -> None:
        """Read a batch in the caller's thread."""
        begun = time.perf_counter()
        reading = Reading(self._source, job.request, job.leaves, tolerant=self._tolerant)
        job.report = reading.read(0, len(job.request.indices))
        job.seconds = time.perf_counter() - begun


class _Work:
    """The parts of batches that are to be read, and what the threads do with them."""

    def __init__(self, source: HostSource, tolerant: bool, slots: Slots | None) -> None:
        self.parts: queue.SimpleQueue[tuple[_ThreadJob, int, int] | None] = queue.SimpleQueue()
        self.changed = threading.Condition()  # reentrant: a finalizer may drop a batch anywhere
        self._source = source
        self._tolerant = tolerant
        self._slots = slots

    def run(self) -> None:
        """What a thread does until there is no more work."""
        while True:
            part = self.parts.get()
            if part is None:
                return
            self._read(*part)
            del part  # a waiting thread holds on to nothing

    def _read(self, job: _ThreadJob, first: int, stop: int) -> None:
        with self.changed:
            # Only the error of the first row is told, and its thread may have begun later.
            if job.ended or job.dropped or (job.errors and min(job.errors) < first):
                return self._part_is_over(job)
            job.running[first] = threading.get_ident(), None
        begun, own = time.perf_counter(), threading.get_ident()

        def note(row: int, index: int) -> None:
            job.running[first] = own, index

        report, error = Report(), None
        try:
            report = Reading(self._source, job.request, job.leaves, tolerant=self._tolerant, at=note).read(first, stop)
        except BaseException as raised:
            error = noted(raised, "This came from a reading thread.") if ends_silently(type(raised)) else raised
        with self.changed:
            del job.running[first]
            job.seconds += time.perf_counter() - begun
            job.report.add(report)
            if error is not None:
                job.errors[first] = error
            self._part_is_over(job)

    def _part_is_over(self, job: _ThreadJob) -> None:
        job.left -= 1
        if not job.left:
            self.changed.notify_all()
        if job.dropped:
            self._free(job)

    def drop(self, job: _ThreadJob) -> None:
        """Begin nothing more of a batch."""
        with self.changed:
            job.dropped = True
            self._free(job)

    def _free(self, job: _ThreadJob) -> None:
        if job.slot is not None and not job.running:
            assert self._slots is not None
            slot, job.slot = job.slot, None
            self._slots.give_back(slot)

    def end(self, threads: int) -> None:
        """Begin nothing more, and end the threads."""
        try:
            while True:
                part = self.parts.get_nowait()
                if part is not None:
                    with self.changed:
                        part[0].ended = True
                        self._part_is_over(part[0])
        except queue.Empty:
            pass
        for _ in range(threads):
            self.parts.put(None)


def _ended_error() -> RuntimeError:
    return RuntimeError("The reading threads of this stream have been ended. Call loader.iterate(...) for a new one.")


def _first_running(job: _ThreadJob) -> tuple[int, int | None] | None:
    running = dict(job.running)
    return running[min(running)] if running else None


def _whereabouts(job: _ThreadJob) -> str:
    """Which sample a batch is at, in a sentence."""
    found = _first_running(job)
    if found is None or found[1] is None:
        return "The readers have not come to it yet: they are at batches after it."
    return f"It is at sample {found[1]}."


def _stack(job: _ThreadJob) -> str:
    """Where in the code the first of its threads is; empty if no thread is at it."""
    found = _first_running(job)
    frame: Any = None if found is None else sys._current_frames().get(found[0])
    if frame is None:
        return ""
    return "The reading thread is here:\n" + "".join(traceback.format_stack(frame)[-8:])


@dataclasses.dataclass(frozen=True)
class Threads:
    """Read batches in threads: right for disks, networks and libraries that release the GIL.

    Several threads share the samples of one batch, and its batches are those of every other executor, bit for bit.

    Example:
        >>> source = ms.DiskSampleSource(100, lambda index: {"x": np.float32(index)})
        >>> loader = ms.DataLoader([source, ms.BatchTransform(10)], executor=ms.Threads(4), prefetch=2)

    Args:
        workers: How many threads.
        ordered: False hands out whichever batch is read first. Every sample still comes exactly once, but the position
            in the stream is known at its end only.
        timeout: Seconds without a batch that are an error; None for `ms.reading.settings.stall_seconds`.
    """

    workers: int
    ordered: bool = True
    timeout: float | None = None
    reader_names: ClassVar[tuple[str, str]] = ("thread", "threads")

    def __post_init__(self) -> None:
        check_executor(self, self.workers, self.ordered, self.timeout)

    def ahead(self, prefetch: int) -> int:
        """Batches in flight besides the one that is asked for."""
        return prefetch

    def open(self, source: HostSource, layout: Layout, ahead: int, tolerant: bool) -> ThreadBackend:
        """Threads for one stream."""
        return ThreadBackend(source, layout, self.workers, ahead, tolerant=tolerant, timeout=self.timeout)

    def __repr__(self) -> str:
        return call_text(self)


def usable_cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_executor(executor: object, workers: object, ordered: object, timeout: object) -> None:
    """Refuse what no executor can work with."""
    caller = type(executor).__name__
    require_readers(caller, "workers", workers)
    require_bool(caller, "ordered", ordered)
    if timeout is not None:
        require_positive(caller, "timeout", timeout, "a number of seconds", finite=False)
