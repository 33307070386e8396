"""The actors of a stream: who has which part of a batch, and what becomes of it when one of them dies."""

import collections
import contextlib
import dataclasses
import os
import pickle
import time
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from millstream.errors import WorkerCrashed, WorkerStalled
from millstream.files.plain import decode
from millstream.plan.planned import Request
from millstream.reading.exception_record import rebuild
from millstream.reading.host_source import HostSource
from millstream.reading.reading import Report
from millstream.reading.slots import Layout, Slot, Slots, slots_for
from millstream.reading.workers.messages import report_of
from millstream.reading.workers.part_reader import PartReader, Sent, part_layout
from millstream.reading.workers.payload import pickled, pickling

_QUEUED = 2  # parts an actor has: one it reads, and one so that it never waits
_DEATHS = 3  # a sample, or a start, that has ended this many actors will end the next one too
_SHARE = 4  # batches in use may fill a quarter of Ray's object store; further ones are copied out of it
_SHOWN = 400  # characters of what Ray says
_ADVICE = "Out of memory? Ray's logs say so; give each actor more, or take fewer. Or does a decoder crash on its file?"


@dataclasses.dataclass(eq=False)
class RayJob:
    """A batch that is being read, in parts.

    Attributes:
        request: What is asked for.
        left: Rows that are not read yet.
        rows: The leaves, once they are read, if they are used where Ray has put them.
        slot: The memory that parts are copied into, if there are several.
        free: Makes the slot free; this happens by itself when the job is forgotten.
        objects: The samples, if they are Python objects.
        report: What came of the rows.
        seconds: How long it took, all actors together.
        error: Why it has failed.
        dropped: Whether it is no longer wanted.
    """

    request: Request
    left: int
    rows: list[np.ndarray] | None = None
    slot: Slot | None = None
    free: Any = None
    objects: dict[int, Any] = dataclasses.field(default_factory=dict)
    report: Report = dataclasses.field(default_factory=Report)
    seconds: float = 0.0
    error: BaseException | None = None
    dropped: bool = False

    @property
    def done(self) -> bool:
        return self.left == 0 or self.error is not None


@dataclasses.dataclass(eq=False)
class _Part:
    """Some rows of a batch.

    Attributes:
        job: The batch.
        first: The first row.
        stop: The row after the last.
        alone: Whether an actor is given nothing else meanwhile, because one has died that had it.
        deaths: How many actors have died at it alone.
    """

    job: RayJob
    first: int
    stop: int
    alone: bool = False
    deaths: int = 0

    @property
    def wanted(self) -> bool:
        return not (self.job.dropped or self.job.done)

    @property
    def request(self) -> Request:
        """What an actor is asked for."""
        own, rows = self.job.request, slice(self.first, self.stop)
        keys = None if own.keys is None else own.keys[rows]
        real = own.real[rows].copy()
        given_up = [row - self.first for row in self.job.report.failed if self.first <= row < self.stop]
        real[given_up] = False  # for an actor they are padding
        return Request(own.step, own.indices[rows], real, keys, bucket=own.bucket)

    def __str__(self) -> str:
        indices = self.job.request.indices[self.first : self.stop]
        if len(indices) == 1:
            return f"sample {indices[0]}"
        return f"rows {self.first} to {self.stop - 1} of batch {self.job.request.step}"


class _Actor:
    """An actor, and the one that takes its place when it dies.

    Attributes:
        number: Which one it is.
        handle: What Ray calls it.
        beginning: What `PartReader.begin` will return; None once it has.
        parts: What it has been asked for, first to last.
        begun: When it was asked to start.
        pid: The number of its process.
        fruitless: Actors in a row that have ended before they could read.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.handle: Any = None
        self.beginning: Any = None
        self.parts: dict[Any, _Part] = {}
        self.begun = 0.0
        self.pid: int | None = None
        self.fruitless = 0

    @property
    def ready(self) -> bool:
        return self.handle is not None and self.beginning is None

    def has_room_for(self, part: _Part) -> bool:
        """Whether it may be given a part now."""
        if part.alone:
            return not self.parts
        return len(self.parts) < _QUEUED and not any(one.alone for one in self.parts.values())

    def __str__(self) -> str:
        name = f"Actor {self.number}" + ("" if self.pid is None else f" (pid {self.pid})")
        if not self.ready:
            return f"{name} has not started yet."
        return f"{name} is at {next(iter(self.parts.values()))}." if self.parts else f"{name} has nothing to do."


class _BatchMemory:
    """Where batches are put together, or stay as Ray has them.

    Args:
        layout: Of a batch.
        ahead: How many batches will be in flight besides the one asked for.
        lend_at_most: Bytes of batches that may stay in Ray's object store while they are in use.
    """

    def __init__(self, layout: Layout, ahead: int, lend_at_most: int) -> None:
        self._layout = layout
        self._ahead = ahead
        self._lend_at_most = lend_at_most
        self._lent: dict[int, int] = {}  # bytes of the batches in use that lie where Ray has put them
        self._slots: Slots | None = None

    @property
    def nbytes(self) -> int:
        """Memory for batches of several parts; none until there is one."""
        return 0 if self._slots is None else self._slots.nbytes

    def put(self, part: _Part, memory: np.ndarray | None, answer: dict[str, Any]) -> None:
        """Put a part that was read to its batch."""
        job, first, bucket = part.job, part.first, part.job.request.bucket
        report, layout = report_of(answer), self._layout.of(part.job.request.bucket)
        failed = {row + first: error for row, error in report.failed.items()}
        job.report.add(Report(failed, {row + first: one for row, one in report.extras.items()}, report.times))
        job.seconds += answer["seconds"]
        if memory is None:
            job.objects.update(enumerate(answer["objects"], first))
        else:
            leaves = part_layout(self._layout, bucket, part.stop - first).flat(memory)
            if part.stop - first == layout.rows and self._may_lend(memory):
                job.rows = leaves
            else:
                for target, leaf in zip(self._room_of(job).leaves(bucket), leaves, strict=True):
                    target[first : part.stop] = leaf
        job.left -= part.stop - first

    def _may_lend(self, memory: np.ndarray) -> bool:
        """Whether a batch may stay where Ray has put it until it is no longer used."""
        if sum(self._lent.values()) + memory.nbytes > self._lend_at_most:
            return False
        owner = memory
        while isinstance(owner.base, np.ndarray):  # which views of it keep alive
            owner = owner.base
        self._lent[id(owner)] = memory.nbytes
        weakref.finalize(owner, self._lent.pop, id(owner), None).atexit = False
        return True

    def _room_of(self, job: RayJob) -> Slot:
        if job.slot is None:
            if self._slots is None:
                self._slots = Slots(self._layout, slots_for(self._ahead))
            job.slot, job.free = self._slots.take_for(job)
        return job.slot

    def rows(self, job: RayJob) -> list[np.ndarray]:
        """The leaves of a batch that is read."""
        layout = self._layout.of(job.request.bucket)
        if layout.objects:
            objects = layout.empty()
            objects[0][:] = [job.objects[row] for row in range(layout.rows)]
            return layout.with_axes(objects)
        if job.slot is None:
            assert job.rows is not None
            return layout.with_axes(job.rows)
        assert self._slots is not None
        job.free.detach()
        return self._slots.lend(job.slot, job.request.bucket)


class RayGroup:
    """The actors of a stream. It is for one thread at a time.

    Args:
        ray: The module, connected to a cluster.
        source: What to read.
        layout: Of a batch.
        workers: How many actors.
        ahead: How many batches will be in flight besides the one asked for.
        tolerant: Whether samples that cannot be read become failed rows.
        startup: Called once in each actor.
        options: What `ray.remote` is told about each actor.
        name: The executor as text, for errors.
        start_timeout: Seconds that a first actor may take to start.

    Attributes:
        actors: They.
        ended: Whether it has ended.
        reason: Why it has ended, or will have.
        restarts: Actors that have died.
        news: What a user should be warned of.
    """

    def __init__(
        self,
        ray: Any,
        source: HostSource,
        layout: Layout,
        workers: int,
        ahead: int,
        *,
        tolerant: bool,
        startup: Any,
        options: Mapping[str, Any],
        name: str,
        start_timeout: float,
    ) -> None:
        self._ray = ray
        self._remote = ray.remote(**options, max_restarts=0, max_task_retries=0)(PartReader)
        self._name, self._asked = name, _asked(options)
        self._layout = layout
        self._start_timeout = start_timeout
        self._memory = _BatchMemory(layout, ahead, _object_store(ray) // _SHARE)
        self._whole_batches = source.whole_batches
        self._tolerant = tolerant
        # Half as many parts as actors, so that two batches are read at a time. One part needs no copy.
        self._parts = 1 if source.whole_batches or source.reads_together else max(1, workers // 2)
        self._waiting: collections.deque[_Part] = collections.deque()
        self._warned_of_death = self._warned_of_start = False
        self.actors = [_Actor(number) for number in range(workers)]
        self.ended = False
        self.reason: BaseException = RuntimeError(
            "The Ray actors of this stream have been ended. Call loader.iterate(...) for a new one."
        )
        self.restarts = 0
        self.news: list[str] = []
        sent = _sent(source, layout, startup, tolerant)
        self._sent = [ray.put(sent)]  # arrays once for all actors of a machine; in a list, which can be emptied
        self._unready_since = time.monotonic()
        # A finalizer that knows the parts, not the group: it runs when the group is forgotten, and at exit.
        self._end = weakref.finalize(self, _end_all, ray, self.actors, self._sent, os.getpid())
        for actor in self.actors:
            self._start(actor)

    @property
    def pids(self) -> list[int]:
        """The process numbers of the actors that have started, each on its own machine."""
        return [actor.pid for actor in self.actors if actor.pid is not None]

    @property
    def nbytes(self) -> int:
        """Memory that batches are put together in, besides Ray's object store."""
        return self._memory.nbytes

    def add(self, request: Request) -> RayJob:
        """Have a batch read, in parts. Of a group that has ended, it has failed."""
        rows = self._layout.of(request.bucket).rows
        job = RayJob(request, rows)
        if self.ended:
            job.error = self.reason
            return job
        size = -(-rows // self._parts)
        self._waiting.extend(_Part(job, first, min(first + size, rows)) for first in range(0, rows, size))
        self._hand_out()
        return job

    def rows(self, job: RayJob) -> list[np.ndarray]:
        """The leaves of a batch that is read."""
        return self._memory.rows(job)

    def drop(self, job: RayJob) -> None:
        """Forget about a batch: what is read of it already is not looked at any more."""
        job.dropped = True
        if job.free is not None:
            job.free()

    def end(self, reason: BaseException) -> None:
        """End the actors. Batches that are not read yet have failed."""
        self.ended, self.reason = True, reason
        for part in [*self._waiting, *(part for actor in self.actors for part in actor.parts.values())]:
            if not part.job.done:
                part.job.error = reason
        self._waiting.clear()
        self._end()

    def describe(self) -> str:
        """Where each actor is, a line for each."""
        return "\n".join(map(str, self.actors))

    def stacks(self) -> str:
        """Empty: actors are on other machines."""
        return ""

    def poll(self, seconds: float) -> bool:
        """Take in what the actors have read, waiting for it at most that long; whether there was anything."""
        if self.ended:
            return False
        if not self._ray.is_initialized():  # asked for anything now, Ray would start a cluster of its own
            self.end(RuntimeError("Ray was shut down while this stream was reading. Close the stream first."))
            return False
        pending = [ref for actor in self.actors for ref in (actor.beginning, *actor.parts) if ref is not None]
        done = self._done(pending, seconds)
        for actor in self.actors:
            self._hear(actor, done)
        if not self.ended:
            self._check_start()
            self._hand_out()
        return bool(done) or not any(actor.ready for actor in self.actors)  # what is starting has a time of its own

    def _done(self, pending: list[Any], seconds: float) -> set[Any]:
        """What is there of all that is pending; if nothing is, the first that comes."""
        if not pending:
            return set()
        there, _ = self._ray.wait(pending, num_returns=len(pending), timeout=0)
        if not there and seconds:
            there, _ = self._ray.wait(pending, num_returns=1, timeout=seconds)
        return set(there)

    def _hear(self, actor: _Actor, done: set[Any]) -> None:
        """Take in what an actor has to say."""
        if self.ended:
            return
        try:
            if actor.beginning in done:
                actor.pid, error = self._ray.get(actor.beginning)
                if error is not None:
                    return self.end(rebuild(error))
                actor.beginning = None
            for ref in [ref for ref in actor.parts if ref in done]:
                memory, answer = self._ray.get(ref)
                part = actor.parts.pop(ref)
                actor.fruitless = 0
                if part.wanted:
                    self._finish(actor, part, memory, decode(answer))
        except self._ray.exceptions.RayTaskError as error:  # a reader returns what it has raised, so this is Ray's own
            self.end(error)
        except self._ray.exceptions.RayError as error:
            self._on_death(actor, error)

    def _finish(self, actor: _Actor, part: _Part, memory: np.ndarray | None, answer: dict[str, Any]) -> None:
        if "error" not in answer:
            return self._memory.put(part, memory, answer)
        error = rebuild(answer["error"])
        if answer["sample"] >= 0:
            error.add_note(f"It happened at sample {answer['sample']}, in Ray actor {actor.number}.")
        part.job.error = error

    def _hand_out(self) -> None:
        ready = [actor for actor in self.actors if actor.ready]
        while self._waiting:
            part = self._waiting[0]
            free = [actor for actor in ready if actor.has_room_for(part)]
            if part.wanted and not free:
                return
            self._waiting.popleft()
            if part.wanted:
                actor = min(free, key=lambda one: len(one.parts))
                # As bytes: looking through an object and its arrays would take Ray half of all its time for the call.
                request = pickle.dumps(part.request, protocol=pickle.HIGHEST_PROTOCOL)
                actor.parts[actor.handle.read.remote(request)] = part

    def _start(self, actor: _Actor) -> None:
        actor.begun, actor.pid = time.monotonic(), None
        actor.handle = self._remote.remote(self._sent[0])
        actor.beginning = actor.handle.begin.remote()

    def _check_start(self) -> None:
        """End what can never start, and warn of actors that others can do without."""
        now = time.monotonic()
        if any(actor.ready for actor in self.actors):
            self._unready_since = now
        elif now - self._unready_since >= self._start_timeout:
            return self.end(WorkerStalled(self._start_text("none of its actors could")))
        late = [actor for actor in self.actors if not actor.ready and now - actor.begun >= self._start_timeout]
        if late and not self._warned_of_start and any(actor.ready for actor in self.actors):
            self._warned_of_start = True
            text = self._start_text(f"{len(late)} of {len(self.actors)} actors could not")
            self.news.append(f"{text} The others read meanwhile.")

    def _start_text(self, who: str) -> str:
        return (
            f"{self._name}: {who} be started within {self._start_timeout:g} s. Each asks for "
            f"{_amounts(self._asked)}. The cluster has {_amounts(self._ray.cluster_resources())}, of which free: "
            f"{_amounts(self._ray.available_resources())}. Ask for less, add machines, or wait longer (start_timeout)."
        )

    def _on_death(self, actor: _Actor, error: Exception) -> None:
        """An actor has died, or what it read is lost: ask others for that, and start one in its place."""
        exceptions = self._ray.exceptions
        if actor.beginning is not None:
            actor.fruitless += 1
            died = isinstance(error, exceptions.RayActorError) and not getattr(error, "actor_init_failed", False)
            if not died or actor.fruitless >= _DEATHS:
                text = f"{self._name}: an actor could not be started. {_reason_text(error)}\n"
                advice = "Machines need the packages of this one: see runtime_env in options, and docs/ray.md."
                return self.end(WorkerCrashed(f"{text}{advice}"))
        parts = [part for part in actor.parts.values() if part.wanted]
        where = f" while it was at {' or '.join(map(str, parts))}" if parts else ""
        text = f"Ray actor {actor.number} (pid {actor.pid}) died{where}"
        self.restarts += 1
        actor.parts.clear()
        for part in reversed(parts):
            self._retry(part, text)
        if not self._warned_of_death:
            self._warned_of_death = True
            self.news.append(f"{text}: {_reason_text(error)}. What it had begun is read again, so nothing is lost.")
        with contextlib.suppress(exceptions.RayError):
            self._ray.kill(actor.handle)  # it may be a machine that cannot be reached for a while
        self._start(actor)

    def _retry(self, part: _Part, text: str) -> None:
        """Read a part again that a dead actor had: alone, row by row, to find out which one it is; or give it up."""
        job, deaths = part.job, part.deaths + 1
        if not part.alone:  # it may be read already, and the answer lost with the actor
            size = part.stop - part.first if self._whole_batches else 1
            firsts = range(part.first, part.stop, size)
            return self._waiting.extendleft(_Part(job, row, row + size, alone=True) for row in reversed(firsts))
        if deaths < _DEATHS:
            return self._waiting.appendleft(dataclasses.replace(part, deaths=deaths))
        what = "The batch of this sample" if self._whole_batches else "This sample"
        error = WorkerCrashed(f"{text}. {what} has now ended {deaths} actors. {_ADVICE}")
        if not self._tolerant:
            job.error = error
            return
        rows = [row for row in range(part.first, part.stop) if job.request.real[row]]
        job.report.failed.update(dict.fromkeys(rows, error))
        self._waiting.appendleft(dataclasses.replace(part, deaths=0))


def _sent(source: HostSource, layout: Layout, startup: Any, tolerant: bool) -> Sent:
    with pickling("RayActors", source, startup):
        data, arrays = pickled((source, layout, startup, tolerant))
    return Sent(data, arrays, [array.flags.writeable for array in arrays])


def _end_all(ray: Any, actors: list[_Actor], sent: list[Any], process_id: int) -> None:
    """End the actors and free what they were sent, if Ray is still there; a forked copy of the process leaves them."""
    if os.getpid() != process_id:
        return
    for actor in actors:
        handle, actor.handle, actor.beginning = actor.handle, None, None
        actor.parts.clear()
        if handle is not None and ray.is_initialized():
            with contextlib.suppress(Exception):
                ray.kill(handle)
    sent.clear()


def _object_store(ray: Any) -> int:
    """Bytes of the object store of this machine."""
    here = ray.get_runtime_context().get_node_id()
    found = [node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["NodeID"] == here]
    return int(sum(found))


def _asked(options: Mapping[str, Any]) -> dict[str, float]:
    """The resources that an actor asks for, under the names that Ray has for them."""
    names = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    return {name: options[option] for option, name in names.items() if options.get(option)} | dict(
        options.get("resources") or {}
    )


def _amounts(resources: Mapping[str, float]) -> str:
    """Resources as text, without those that Ray has for itself."""
    own = {name: amount for name, amount in resources.items() if not name.startswith(("node:", "object_store"))}
    shown = [
        f"{amount / 1e9:.3g} GB of memory" if name == "memory" else f"{amount:g} {name}"
        for name, amount in sorted(own.items())
    ]
    return ", ".join(shown) or "nothing"


def _reason_text(error: Exception) -> str:
    """What Ray says, which is long and ends with the reason, in one sentence."""
    last = ([line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__])[-1]
    return last.partition(". ")[0][:_SHOWN].rstrip(".")
