"""Worker processes at work: who has which batch, what they say, and what becomes of it when one of them dies."""

import collections
import contextlib
import dataclasses
import functools
import os
import select
import struct
import warnings
import weakref
from typing import Any

import numpy as np

from millstream.errors import WorkerCrashed
from millstream.files.plain import decode
from millstream.plan.planned import Request
from millstream.reading.batch_holders import describe_newest
from millstream.reading.exception_record import rebuild
from millstream.reading.reading import Report
from millstream.reading.slots import Slot, Slots
from millstream.reading.workers.messages import DONE, FAILED, READ, READY, TIMED, ReadMessage, SlotLayout, report_of
from millstream.reading.workers.process import WorkerProcess, describe_workers, end_all, stacks_of_busy
from millstream.reading.workers.shared_memory import SharedFile

_CRASHES = 3  # a sample, or starting up, that has ended this many workers will end the next one too
_KILLS = (
    10  # the same by signals from outside: the kernel may be out of memory, or an operator busy with something else
)
_REST, _LONGEST_REST = 0.05, 0.5  # seconds before a worker is started again that keeps ending, doubled every time
_QUEUED = 2  # batches a worker has: one it reads, and one so that it never waits
_ADVICE = "Out of memory? The kernel's log (dmesg) says so; try fewer workers. Or does a decoder crash on its file?"


@dataclasses.dataclass(eq=False)
class Job:
    """A batch that is being read, or waits to be.

    Attributes:
        number: Which one it is, counted from 1.
        request: What is asked for.
        slot: Where it is read into; None if it never will be.
        free: Makes the slot free; this happens by itself when the job is forgotten.
        done: Whether it is read, or has failed.
        dropped: Whether it is no longer wanted.
        error: Why it has failed.
        report: What came of its rows.
        objects: The samples, if they are Python objects.
        seconds: How long it took.
        deaths: How many workers have died at each row, and whether a signal from outside has killed them.
    """

    number: int
    request: Request
    slot: Slot | None = None
    free: Any = None
    done: bool = False
    dropped: bool = False
    error: BaseException | None = None
    report: Report = dataclasses.field(default_factory=Report)
    objects: list[Any] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    deaths: collections.Counter[tuple[int, bool]] = dataclasses.field(default_factory=collections.Counter)


class WorkerGroup:
    """Worker processes and the memory they share. It is for one thread at a time.

    Args:
        form: What is in a slot.
        tolerant: Whether samples that cannot be read become failed rows.
        whole_batches: Whether a batch is read by one call, so that its samples cannot be told apart.

    Attributes:
        files: The shared memory.
        workers: The processes.
        ended: Whether it has ended.
        reason: Why it has ended, or will have.
        restarts: Workers that have died.
        news: What a user should be warned of.
    """

    def __init__(self, form: SlotLayout, *, tolerant: bool, whole_batches: bool) -> None:
        self._form = form
        self._objects = form.batch.objects
        self._tolerant = tolerant
        self._whole_batches = whole_batches
        self._waiting: collections.deque[Job] = collections.deque()
        self._running: dict[int, WorkerProcess] = {}  # by their sockets; empty if they have to be found again
        self._watch = select.poll()
        self._warned_of_death = False
        self._process_id = os.getpid()
        self._jobs = 0
        self._slots: Slots
        self.files: list[SharedFile] = []
        self.workers: list[WorkerProcess] = []
        self.ended = False
        self.reason: BaseException = RuntimeError(
            "The worker processes of this stream have been ended. Call loader.iterate(...) for a new one."
        )
        self.restarts = 0
        self.news: list[str] = []
        # A finalizer that knows the parts, not the group: it runs when the group is forgotten, and at exit.
        self._end = weakref.finalize(self, end_all, self.workers, self.files, self._process_id)

    def share_memory(self, what: str, advice: str) -> SharedFile:
        """A new file of shared memory, which ends with the group."""
        self.files.append(SharedFile(what, advice))
        return self.files[-1]

    def start_worker(self, worker: WorkerProcess) -> None:
        """Start a worker."""
        self.workers.append(worker)
        self._running = {}
        worker.start()

    def open_ring(self, slots: int, limit: int) -> None:
        """Share the memory that batches are read into.

        Args:
            slots: Batches that there is room for to begin with.
            limit: Bytes of memory, at most.
        """
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
        ring = self.share_memory(f"The loader with {count}", advice)
        warn = functools.partial(_warn_of_held_batches, limit)
        self._slots = Slots(layout, slots, ring.grow, n_leaves=self._form.n_leaves, limit=limit, on_limit=warn)

    @property
    def pids(self) -> list[int]:
        """The process numbers of the workers."""
        return [worker.pid for worker in self.workers]

    @property
    def nbytes(self) -> int:
        """Shared memory that batches are read into."""
        return self._slots.nbytes

    def add(self, request: Request) -> Job:
        """Have a batch read. Of a group that has ended, it has failed."""
        self._jobs += 1
        job = Job(self._jobs, request)
        if self.ended:
            job.done, job.error = True, self.reason
            return job
        job.slot, job.free = self._slots.take_for(job)
        self._write(job)
        self._waiting.append(job)
        self._hand_out_work()
        return job

    def rows(self, job: Job) -> list[np.ndarray]:
        """The leaves of a batch that is read."""
        assert job.slot is not None
        rows = self._slots.lend(job.slot, job.request.bucket)
        job.free.detach()
        if not self._objects:
            return rows
        layout = self._form.batch.of(job.request.bucket)
        objects = layout.empty()
        objects[0][:] = job.objects
        return layout.with_axes(objects)

    def drop(self, job: Job) -> None:
        """Forget about a batch; its slot is free once no worker writes into it."""
        job.dropped = True
        if job in self._waiting:
            self._waiting.remove(job)
            job.done = True
        if job.done:
            job.free()

    def end(self, reason: BaseException) -> None:
        """End the workers. Batches that are not read yet have failed; those that are can still be used."""
        self.ended, self.reason = True, reason
        for job in [*self._waiting, *(job for worker in self.workers for job in worker.jobs)]:
            job.error = reason
            job.done = True
        self._waiting.clear()
        end_all(self.workers, self.files, self._process_id)
        self._end.detach()  # only now: what an interrupt cuts short here is done when the group is forgotten

    def describe(self) -> str:
        """What each worker is at, a line for each."""
        return describe_workers(self.workers)

    def stacks(self) -> str:
        """The Python stacks of all workers that have something to do."""
        return stacks_of_busy(self.workers)

    def poll(self, seconds: float) -> bool:
        """Take in what the workers have to say, waiting for it at most that long; whether there was anything."""
        if self.ended:
            return False
        if not self._running:
            self._watch_running()
        gone, started = [], False
        speaking = self._watch.poll(1000 * seconds)
        for fd, _ in speaking:
            if not self.ended and not self._listen(self._running[fd]):
                gone.append(self._running[fd])
        if not speaking and seconds:
            gone = [worker for worker in self._running.values() if worker.has_ended()]
        for worker in gone:
            if not self.ended:
                self._on_death(worker)
        if len(self._running) < len(self.workers):
            started = not self.ended and self._start_rested()
        if self._waiting and not self.ended:
            self._hand_out_work()
        return bool(speaking or gone or started)

    def _watch_running(self) -> None:
        """Listen to the workers that have a process."""
        self._watch = select.poll()
        self._running = {worker.channel.fileno(): worker for worker in self.workers if not worker.rests}
        for fd in self._running:
            self._watch.register(fd, select.POLLIN)

    def _listen(self, worker: WorkerProcess) -> bool:
        """Take in what a worker has to say; whether it is still there and makes sense."""
        try:
            frames, gone = worker.channel.receive_all()
            for kind, data in frames:
                self._handle(worker, kind, data)
        except (ValueError, LookupError, TypeError, AttributeError):  # no frame, or no message of ours
            return False
        return not gone

    def _handle(self, worker: WorkerProcess, kind: int, data: bytes) -> None:
        if kind == READY:
            worker.ready = True
            if not worker.jobs:
                worker.fruitless.clear()
            return
        if kind == TIMED:
            job = worker.jobs.popleft()
            job.seconds, *times = struct.unpack(f"<{len(worker.stages) + 1}d", data)
            job.report = Report(job.report.failed, {}, dict(zip(worker.stages, times, strict=True)))
            worker.fruitless.clear()
            return self._finish(job)
        message = decode(data)
        if kind == FAILED and message["job"] < 0:
            return self.end(rebuild(message["error"]))
        job: Job = worker.jobs[0]
        if kind == DONE:
            job.report.add(report_of(message))
            job.objects, job.seconds = message["objects"], message["seconds"]
            worker.stages = tuple(message["times"])
        else:
            job.error = rebuild(message["error"])
            if message["sample"] >= 0:
                job.error.add_note(f"It happened at sample {message['sample']}, in worker {worker.number}.")
        worker.jobs.popleft()
        worker.fruitless.clear()
        self._finish(job)

    def _finish(self, job: Job) -> None:
        job.done = True
        if job.dropped:
            job.free()

    def _write(self, job: Job) -> None:
        assert job.slot is not None
        real = job.request.real.copy()
        real[[*job.report.failed]] = False  # given up: for a worker they are padding
        self._form.write(job.slot.leaves(job.request.bucket), dataclasses.replace(job.request, real=real))

    def _hand_out_work(self) -> None:
        while self._waiting:
            if not self._running:
                self._watch_running()
            worker, least = None, _QUEUED
            for one in self._running.values():
                load = len(one.jobs) + (not one.ready)
                if len(one.jobs) < _QUEUED and (worker is None or load < least):
                    worker, least = one, load
            if worker is None:
                return
            job = self._waiting.popleft()
            worker.jobs.append(job)
            assert job.slot is not None
            singly = bool(job.deaths) and not self._whole_batches
            place = (*job.slot.chunk, job.slot.offset)
            message = ReadMessage(job.number, *place, job.request.step, job.request.bucket, singly).to_bytes()
            with contextlib.suppress(ConnectionError):  # if it is gone, that is found when its answer is waited for
                worker.channel.send(READ, message)

    def _on_death(self, worker: WorkerProcess) -> None:
        """A worker has died: ask another for what it was at, and start one in its place."""
        self._running = {}
        how, stack, at = worker.bury(), worker.stack(), worker.progress
        where = "between two batches" if worker.ready else "while it started"
        if at.row >= 0:
            where = f"while reading sample {at.sample}"
        text = f"Worker {worker.number} (pid {worker.pid}) {how} {where}."
        self.restarts += 1
        wanted = not worker.ready or bool(worker.jobs)  # a worker without work may die as often as it likes
        current = self._take_back(worker)
        if current is not None:
            self._count_failure(current, at.row, worker.was_killed, text, stack)
        elif at.row < 0 and wanted:
            worker.fruitless[worker.was_killed] += 1
            times = worker.fruitless[worker.was_killed]
            if times >= _limit(worker.was_killed):
                text = f"{text} It has now ended {times} times in a row before it could read a batch. {_ADVICE}"
                return self.end(WorkerCrashed(_with_stack(text, stack)))
        if not self._warned_of_death:
            self._warned_of_death = True
            self.news.append(_with_stack(f"{text} Its batch is read again, so nothing is lost.", stack))
        again = worker.fruitless.total() - 1
        worker.rest(min(_REST * 2 ** (again - 1), _LONGEST_REST) if again > 0 else 0.0)

    def _start_rested(self) -> bool:
        """Start the workers again that have rested; whether there were any."""
        rested = [worker for worker in self.workers if worker.has_rested()]
        for worker in rested:
            self._running = {}
            try:
                worker.start()
            except OSError as error:
                self.end(error)
                break
        return bool(rested)

    def _take_back(self, worker: WorkerProcess) -> Job | None:
        """Let others read the batches of a worker; the one that it was reading a sample of."""
        jobs, at, current = [*worker.jobs], worker.progress, None
        worker.jobs.clear()
        for job in reversed(jobs):
            if job.dropped:
                self._finish(job)
                continue
            self._waiting.appendleft(job)
            if job.number == at.job and at.row >= 0:
                current = job
        return current

    def _count_failure(self, job: Job, row: int, killed: bool, text: str, stack: str) -> None:
        """Count the workers a sample has cost, and give it up when it is too many."""
        job.deaths[row, killed] += 1
        deaths = job.deaths[row, killed]
        if deaths < _limit(killed):
            return
        what = "The batch of this sample" if self._whole_batches else "This sample"
        error = WorkerCrashed(_with_stack(f"{text} {what} has now ended {deaths} workers. {_ADVICE}", stack))
        if not self._tolerant:
            self._waiting.remove(job)
            job.error = error
            return self._finish(job)
        rows = job.request.real.nonzero()[0].tolist() if self._whole_batches else [row]
        job.report.failed.update(dict.fromkeys(rows, error))
        self._write(job)


def _warn_of_held_batches(limit: int, held: int) -> None:
    warnings.warn(
        f"{held} batches of this stream are held and fill its {limit / 1e6:,.0f} MB of shared memory "
        f"(Processes(memory_limit=...)). From here on batches are copied, which is slower.\n{describe_newest(held)}",
        stacklevel=2,
    )


def _limit(killed: bool) -> int:
    return _KILLS if killed else _CRASHES


def _with_stack(text: str, stack: str) -> str:
    return f"{text}\nThe last it wrote:\n{stack}" if stack else text
