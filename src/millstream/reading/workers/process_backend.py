"""The worker processes of a stream, driven by the caller that waits for a batch: no thread, no queue between them.

A sample is a function of its index and its key, so what a dead worker had begun is simply asked for again: nothing is
lost and nothing comes twice.
"""

import contextlib
import functools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from millstream.files.plain import encode
from millstream.plan.planned import Request
from millstream.reading.batch_holders import describe_newest
from millstream.reading.derived_sources import named_parts
from millstream.reading.host_source import HostSource
from millstream.reading.reading import ReadBatch
from millstream.reading.slots import Layout, Slots, slots_for
from millstream.reading.workers.messages import SETUP, SlotLayout
from millstream.reading.workers.payload import explain_unpicklable, pack
from millstream.reading.workers.process import ProgressCell, WorkerProcess, describe_workers, stacks_of_busy
from millstream.reading.workers.waiting import wait_for
from millstream.reading.workers.worker_group import Job, WorkerGroup


class ProcessBackend:
    """Worker processes that fill the slots of a shared ring.

    Args:
        source: What to read.
        layout: Of a batch.
        workers: How many processes.
        ahead: How many batches will be in flight besides the one asked for.
        tolerant: Whether samples that raise become failed rows.
        startup: Called once in each worker.
        nice: Niceness relative to this process.
        timeout: Seconds without a batch that are an error; None for those of the settings.
        memory_limit: Bytes of shared memory, at most.
    """

    lazy = False

    def __init__(
        self,
        source: HostSource,
        layout: Layout,
        workers: int,
        ahead: int,
        *,
        tolerant: bool,
        startup: Any,
        nice: int,
        timeout: float | None,
        memory_limit: int,
    ) -> None:
        self._source_name = type(source).__name__
        self._form = SlotLayout(layout)
        self._objects = layout.objects
        self._timeout = timeout
        self._lock = threading.RLock()
        self._jobs = 0
        self._group = WorkerGroup(self._form, tolerant=tolerant, whole_batches=source.whole_batches)
        try:
            self._open_ring(slots_for(ahead), memory_limit)
            self._open_workers(workers, (source, self._form, startup, tolerant), nice)
        except BaseException:
            self.close()
            raise

    def _open_ring(self, slots: int, limit: int) -> None:
        layout = self._form.layout
        count = f"{slots} batches of {layout.nbytes / 1e6:,.1f} MB"
        if slots * layout.nbytes > limit:
            raise ValueError(
                f"Processes needs {count} to begin with, which is more than its memory_limit of "
                f"{limit / 1e6:,.1f} MB. Raise it, or lower prefetch or the batch size."
            )
        advice = (
            "Lower prefetch or the batch size, or give the container more shared memory (docker run --shm-size=...)."
        )
        ring = self._group.share_memory(f"The loader with {count}", advice)
        warn = functools.partial(_warn_of_held_batches, limit)
        self._slots = Slots(layout, slots, ring.grow, n_leaves=self._form.n_leaves, limit=limit, on_limit=warn)

    def _open_workers(self, count: int, knowledge: Any, nice: int) -> None:
        data = self._group.share_memory("The source's own arrays", "Keep them in files, with NpySource or np.memmap.")
        control = self._group.share_memory("The control page", "Take fewer workers.")
        try:
            start, size = pack(knowledge, data)
        except OSError:  # no room
            raise
        except Exception as error:
            source, _, startup, _ = knowledge
            text = explain_unpicklable("Processes", {**dict(named_parts(source)), "startup": startup})
            if text is None:
                raise
            raise TypeError(text) from error
        setup = encode({"start": start, "size": size, "nice": nice})
        memory = control.grow(count * ProgressCell.SIZE)
        ring, data, control = (file.fd for file in self._group.files)
        for number in range(count):
            progress = ProgressCell(memory[number * ProgressCell.SIZE : (number + 1) * ProgressCell.SIZE])
            self._group.start_worker(WorkerProcess(number, progress, (ring, data, control), (SETUP, setup)))

    @property
    def closed(self) -> bool:
        """Whether it has ended, or belongs to the process that this one was forked from."""
        return self._group.ended or self._is_fork

    @property
    def nbytes(self) -> int:
        """Shared memory that batches are read into."""
        return self._slots.nbytes

    @property
    def processes(self) -> list[int]:
        """The process numbers of the workers."""
        return [worker.pid for worker in self._group.workers]

    def start(self, request: Request) -> Job:
        """Have a batch read in the background."""
        with self._exclusive() as group:
            group.poll(0.0)  # there may be news
            self._jobs += 1
            job = Job(self._jobs, request)
            if group.ended:  # which is told when this batch is collected, after the good ones before it
                job.done, job.error = True, group.reason
                return job
            job.slot = self._slots.take()
            job.free = weakref.finalize(job, self._slots.give_back, job.slot)
            job.free.atexit = False
            group.add(job)
            return job

    prepare = start

    def collect(self, job: Job) -> ReadBatch:
        """The batch, once it is read; it raises what reading raised."""
        try:
            with self._exclusive():
                if not job.done:
                    self._wait_until(lambda: job.done)
                if job.error is not None:
                    raise job.error
                assert job.slot is not None
                rows = self._slots.lend(job.slot, job.request.bucket)
                job.free.detach()
        except BaseException:
            self.drop(job)
            raise
        finally:  # nothing is half done now, so that a warning may be an error
            while self._group.news:
                warnings.warn(self._group.news.pop(), stacklevel=2)
        if self._objects:
            batch = self._form.batch.of(job.request.bucket)
            objects = batch.empty()[0]
            objects[:] = job.objects
            rows = [objects.reshape(batch.axes)]
        restarts, self._group.restarts = self._group.restarts, 0
        return ReadBatch(rows, job.report, job.seconds, int(job.request.real.sum()), restarts)

    def is_done(self, job: Job) -> bool:
        """Whether a batch can be collected without waiting, as far as is known."""
        return job.done

    def first_of(self, jobs: list[Job]) -> Job:
        """Whichever of these batches is read first."""
        with self._exclusive():
            self._wait_until(lambda: any(job.done for job in jobs))
            return next(job for job in jobs if job.done)

    def drop(self, job: Job) -> None:
        """Forget about a batch; its memory is free once no worker writes into it."""
        if not self.closed:
            with self._exclusive() as group:
                group.drop(job)

    def close(self) -> None:
        """End the workers; closing twice does no harm. Batches that were handed out stay valid."""
        group = self._group
        group.ended = True  # a thread that waits sees it and releases the lock
        with contextlib.nullcontext() if self._is_fork else self._lock:
            group.end(group.reason)

    @property
    def _is_fork(self) -> bool:
        return os.getpid() != self._group.process_id

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[WorkerGroup]:
        """A block for one thread at a time. If an interrupt cuts it short, nothing is relied on any more."""
        if self._is_fork:
            raise RuntimeError(
                "This stream's workers belong to the process that started them, and this one was forked from it. "
                "Call loader.iterate(...) here, in the new process."
            )
        with self._lock:
            try:
                yield self._group
            except Exception:
                raise
            except BaseException:
                self.close()
                raise

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Hear the workers until something is so, or raise on a timeout."""
        wait_for(self._group, done, self._timeout, lambda: describe_workers(self._group.workers), self._stall_text)

    def _stall_text(self, limit: float) -> str:
        return (
            f"{self._source_name}: no batch for {limit:.3g} s.\n{describe_workers(self._group.workers)}\n"
            "Is a disk or a server not answering? If this is how long a batch takes, give Processes a longer timeout, "
            f"or set ms.reading.settings.stall_seconds.\n{stacks_of_busy(self._group.workers)}"
        )


def _warn_of_held_batches(limit: int, held: int) -> None:
    warnings.warn(
        f"{held} batches of this stream are held and fill its {limit / 1e6:,.0f} MB of shared memory "
        f"(Processes(memory_limit=...)). From here on batches are copied, which is slower.\n{describe_newest(held)}",
        stacklevel=2,
    )
