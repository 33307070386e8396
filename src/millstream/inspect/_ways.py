"""All ways to the batches of a loader, as generators that end what they begin."""

import contextlib
import dataclasses
import functools
import json
import math
import tempfile
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import numpy as np

from millstream.checkpoints import CheckpointStore
from millstream.files import plain
from millstream.inspect._compare import raw_key
from millstream.loader.info import BatchInfo
from millstream.loader.loader import DataLoader
from millstream.pipeline.host_calls import call_and_wait
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.state import key_words
from millstream.plan.planned import PlannedSteps
from millstream.reading import executor as reading
from millstream.reading.contracts import PyTree
from millstream.reading.executor import InGraph
from millstream.reading.memory import nbytes
from millstream.reading.processes import Processes
from millstream.reading.reader import Reader
from millstream.reading.samples import ObjectSpec
from millstream.reading.threads import Threads
from millstream.sharding import shard_bounds
from millstream.transforms.device import DevicePutTransform

Executor = reading.Executor | InGraph
Make = Callable[[], DataLoader]  # a new loader
Draws = Generator["Drawn", None, None]

_SCANNED_BYTES = 64 * 2**20  # what one compiled loop may return at once
_STOPS_WITHIN = (8, 32, 1 << 31)  # one random stop among this many first steps: there may not be time for all
IN_A_WORKER = (
    "A worker process is a new interpreter: does reading depend on a global variable, the order of a set, the current "
    "folder or the environment?"
)
_IN_THREADS = (
    "Several threads read at once, in any order. A function that keeps something between two calls (a position in a "
    "file, a buffer, a counter) must use a lock, or keep nothing."
)
_IN_CACHE = "The cache holds values that the source does not give now. If the data have changed, delete its folder."
_COMPILED = (
    "The same stages give different values in a different compiled program: does a function depend on anything but its "
    "arguments when it is traced?"
)
_RESUMED = (
    "Something that makes the batch is not in the state: a function or a source that remembers earlier calls. Make it "
    "depend on its arguments alone."
)
_DIVIDED = (
    "The value of a sample depends on the samples that are read beside it. Each host reads only its rows, so values "
    "must depend on the index alone, and those of a collate function on each sample alone."
)
_DRAWN_AGAIN = "The stream gives different values for the same key: keep all that changes in its state."


class NotAllowed(Exception):
    """A pipeline cannot be run in this way; the text says why."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One batch; without a value, if it is left out."""

    step: int
    value: Any = None
    mask: Any = None
    info: BatchInfo | None = None


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to the batches, and the likely cause if they differ."""

    name: str
    draw: Callable[[Any, int], Draws]  # with a key and a number of steps
    cause: str = _COMPILED
    check: str = "executors"
    stops: tuple[int, ...] = ()  # steps before which it is stopped and resumed


def iterating(make: Make, key: Any, steps: int) -> Draws:
    """By `iterate`, in the order of the steps."""
    early: dict[int, Drawn] = {}  # by step, where an executor hands out whichever batch is read first
    step, loader = 0, make()
    indexed = isinstance(loader.pipeline, Pipeline)
    ordered = not indexed or loader.pipeline.host is None or loader.pipeline.host.ordered
    with loader, contextlib.closing(loader.iterate(loader.init_state(key), steps=steps, with_info=indexed)) as batches:
        for value, mask, *info in batches:
            number = info[0].step if indexed else step
            early[number] = Drawn(number, value, mask, info[0] if indexed else None)
            while early and (step in early or ordered):
                yield early.pop(step, Drawn(step))
                step += 1
        for last in range(step, steps):
            yield early.pop(last, Drawn(last))


def _stepping(make: Make, next_batch: Callable[[DataLoader, PyTree], Any], key: Any, steps: int) -> Draws:
    """By `next_batch`, compiled or not."""
    with contextlib.closing(make()) as loader:
        state = loader.init_state(key)
        for step in range(steps):
            value, state, mask = call_and_wait(next_batch, loader, state)
            yield Drawn(step, value, mask)


def _next(loader: DataLoader, state: PyTree) -> Any:
    return loader.next_batch(state)


_compiled_next = jax.jit(_next)


def _scanning(make: Make, key: Any, steps: int) -> Draws:
    """By `scan_epoch`, as many whole epochs as there are steps for."""
    with contextlib.closing(make()) as loader:
        state, length = loader.init_state(key), loader.steps_per_epoch
        for first in range(0, steps - length + 1, length):
            state, _, batches = loader.scan_epoch(state, None, _collected)
            batches = jax.tree.map(np.asarray, batches)
            for number in range(length):
                yield Drawn(first + number, *jax.tree.map(lambda leaf, at=number: leaf[at], batches))


def _collected(carry: None, batch: PyTree, mask: jax.Array) -> tuple[None, Any]:
    return carry, jax.tree.map(raw_key, (batch, mask))


def _from_workers(make: Make, key: Any, steps: int) -> Draws:
    """By `iterate`, unless the pipeline cannot be sent to worker processes, or its samples cannot be sent back."""
    pipeline = make().pipeline
    source = pipeline.host.source
    if isinstance(source.sample_spec, ObjectSpec):
        try:
            plain.encode(source.read_sample(0, np.zeros(2, np.uint32) if source.keyed else None)[0])
        except TypeError as error:
            raise NotAllowed(str(error)) from None
    try:
        pipeline.host.backend(pipeline.plan).close()
    except Exception as error:
        raise NotAllowed(f"the pipeline cannot be sent to a worker: {type(error).__name__}: {error}") from None
    yield from iterating(make, key, steps)


def _from_cache(make: Make, key: Any, steps: int) -> Draws:
    """By `iterate`, unless a cache does not hold the batches."""
    with contextlib.closing(iterating(make, key, steps)) as batches:
        try:
            first = next(batches)
        except (ValueError, FileNotFoundError) as error:
            raise NotAllowed(str(error)) from None
        yield first
        yield from batches


def _resuming(make: Make, stops: tuple[int, ...], key: Any, steps: int) -> Draws:
    """By `iterate`, which is ended before some steps and resumed from the position that a run would save."""
    with make() as loader:
        batches = loader.iterate(loader.init_state(key), steps=steps)
        try:
            for step in range(steps):
                if step in stops:
                    saved = batches.get_state() if isinstance(loader.pipeline, Pipeline) else batches.state
                    batches.close()
                    batches = _resumed(loader, saved, key, steps - step)
                yield Drawn(step, *next(batches))
        finally:
            batches.close()


def _resumed(loader: DataLoader, saved: Any, key: Any, left: int) -> Any:
    if isinstance(loader.pipeline, Pipeline):
        batches = loader.iterate(loader.init_state(key), steps=0)
        batches.set_state(json.loads(json.dumps(saved)))
        return batches
    try:
        with tempfile.TemporaryDirectory() as folder, CheckpointStore(folder) as store:
            store.save(0, saved)
            return loader.iterate(store.load(like=saved).tree, steps=left)
    except ImportError as error:
        raise NotAllowed(str(error)) from None


def _seeking(make: Make, key: Any, steps: int) -> Draws:
    """By `iterate`, which starts anew at every step."""
    with make() as loader:
        for step in range(steps):
            with contextlib.closing(loader.iterate(loader.init_state(key, step), steps=1)) as batches:
                yield Drawn(step, *next(batches))


def _divided(pipeline: Pipeline, make_batch: Callable[..., Any], count: int, key: Any, steps: int) -> Draws:
    """By reading the rows of each host one after the other, and joining them."""
    plan, words, size = pipeline.plan, np.asarray(key_words("verify", key)), pipeline.plan.axes[0]
    parts = [pipeline.read_by(rows=tuple(range(*shard_bounds(count, host, size)))).host for host in range(count)]
    planned = PlannedSteps(plan, words, coordinates=pipeline.coordinates)
    with contextlib.ExitStack() as opened:
        readers = [opened.enter_context(contextlib.closing(Reader(part, plan))) for part in parts if part]
        for step in range(steps):
            filled = [reader.rows(words, step) for reader in readers]
            rows = [np.concatenate(leaves) for leaves in zip(*(one.rows for one in filled), strict=True)]
            intact = np.concatenate([part.intact(plan, one) for part, one in zip(parts, filled, strict=True) if part])
            if pipeline.objects is None:
                yield Drawn(step, *make_batch(words, planned.numbers(step), rows, intact))
            else:
                real = np.concatenate([one.request.real for one in filled if one.request is not None])
                yield Drawn(step, rows[0].tolist(), real.reshape(intact.shape) & intact)


def usual_executors(own: Executor | None) -> list[Executor]:
    """Threads and worker processes, with the other fields of the loader's own executor; and none, if it has one."""
    threads = own if isinstance(own, Threads) else Threads(1)
    processes = own if isinstance(own, Processes) else Processes(2)
    tried: list[Executor] = [dataclasses.replace(threads, workers=count, ordered=True) for count in (1, 3)]
    tried.append(dataclasses.replace(processes, workers=2, ordered=True))
    return [one for one in [InGraph(), *tried] if one != (InGraph() if own is None else own)]


class Ways:
    """The loader that everything is compared with, the ways that its pipeline allows, and why not the others.

    The reference hands out every batch, in order, and without a cache.
    """

    def __init__(self, loader: DataLoader, steps: int) -> None:
        self._steps = steps
        self.notes: list[tuple[str, str]] = []  # the check, and the text
        options, pipeline = loader.options, loader.pipeline
        other: dict[str, Any] = {"cache": None}
        self.ways: list[Way] = []
        if options["on_error"] == "skip batch":
            other["on_error"] = "skip item"
        if getattr(options["executor"], "ordered", True) is False:
            other["executor"] = dataclasses.replace(options["executor"], ordered=True)
        self._placement = pipeline.placement if isinstance(pipeline, Pipeline) else None
        if self._placement is not None and not self._placement.is_local:
            other["sharding"] = self._placement = None
            self._leave_out("The mesh", "this process has only a part of it, so it reads whole batches alone.")
        elif len(other) > 1:
            self._add("the loader as it is", functools.partial(loader.replace, cache=None))
        if options["cache"] is not None:
            read_only = dataclasses.replace(options["cache"], mode="read-only")
            make = functools.partial(loader.replace, cache=read_only, on_error="raise")
            self.ways.append(Way("the cache", functools.partial(_from_cache, make), _IN_CACHE))
        self.reference = loader.replace(**other)

    def _add(self, name: str, make: Make) -> None:
        self.ways.append(Way(name, functools.partial(iterating, make)))

    def _leave_out(self, what: str, why: str, check: str = "executors") -> None:
        verb = "are" if what.endswith("s") or " and " in what else "is"
        self.notes.append((check, f"{what} {verb} left out: {why}"))

    def add_calls(self, batches_in_time: float) -> None:
        """The calls that a loader has; a compiled loop has time for about this many batches."""
        make, pipeline, placement = self.reference.replace, self.reference.pipeline, self._placement
        self.ways.append(Way("next_batch", functools.partial(_stepping, make, _next)))
        if isinstance(pipeline, Pipeline) and pipeline.objects is not None:
            self._leave_out("jax.jit and scan_epoch", "Python objects cannot enter a compiled program.")
        elif placement is not None and placement.mesh != placement.sharding.mesh:
            self._leave_out("jax.jit and scan_epoch", "a mesh with explicit axes does not allow them.")
        else:
            self.ways.append(Way("next_batch in jax.jit", functools.partial(_stepping, make, _compiled_next)))
            length = self.reference.steps_per_epoch
            fitting = _SCANNED_BYTES // max(1, nbytes(self.reference.element_spec()))
            if length <= min(self._steps, fitting, batches_in_time):
                self.ways.append(Way("scan_epoch", functools.partial(_scanning, make)))
            else:
                self._leave_out("scan_epoch", f"an epoch of {length:,} batches is too much to make at once.")

    def add_executors(self, executors: Sequence[Executor]) -> None:
        """The executors, and several devices or one."""
        loader, pipeline = self.reference, self.reference.pipeline
        if not isinstance(pipeline, Pipeline):
            self._leave_out("Threads and Processes", "a stream is computed step by step.")
            return
        for executor in executors:
            make = functools.partial(loader.replace, executor=executor)
            if isinstance(executor, InGraph):
                assert pipeline.source is not None
                self._add("no executor" if pipeline.source.arrays is None else "InGraph()", make)
            elif isinstance(executor, Processes):
                name = f"Processes({executor.workers})"
                self.ways.append(Way(name, functools.partial(_from_workers, make), IN_A_WORKER))
            else:
                name = f"Threads({executor.workers})" if isinstance(executor, Threads) else repr(executor)
                self.ways.append(Way(name, functools.partial(iterating, make), _IN_THREADS))
        placed = any(isinstance(one, DevicePutTransform) and one.placement is not None for one in pipeline.stages)
        if self._placement is not None:
            self._add("one device", functools.partial(loader.replace, sharding=None))
        elif pipeline.objects is None and pipeline.plan.batchings and not placed:
            count = math.gcd(jax.local_device_count(), pipeline.plan.batchings[-1].size)
            mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:count]), ("data",))
            if count > 1:
                self._add(f"{count} devices", functools.partial(loader.replace, sharding=mesh))

    def add_resuming(self, words: np.ndarray) -> None:
        """Stopping and resuming, around the end of an epoch and at random steps."""
        make, length, random = self.reference.replace, self.reference.steps_per_epoch, np.random.default_rng(words)
        drawn = [int(random.integers(1, max(2, min(self._steps, within)))) for within in _STOPS_WITHIN]
        stops = tuple(sorted({one for one in (1, length - 1, length, length + 1, *drawn) if 0 < one < self._steps}))
        if not stops:
            self._leave_out("Resuming", "the stream is too short to be stopped and resumed.", "resume")
            return
        through = "" if isinstance(self.reference.pipeline, Pipeline) else " through a checkpoint"
        draw = functools.partial(_resuming, make, stops)
        self.ways.append(Way(f"saved{through} and resumed", draw, _RESUMED, "resume", stops))
        if not through:
            self.ways.append(Way("seeking", functools.partial(_seeking, make), _RESUMED, "resume"))

    def add_hosts(self, pipeline: Pipeline, hosts: Sequence[int]) -> None:
        """The rows of several hosts, read in this process, over no mesh."""
        reading = pipeline.read_by(executor=None, on_error=self.reference.options["on_error"], cache=None)
        assert reading.host is not None
        if not reading.plan.batchings:
            self._leave_out("Hosts", "samples that are not batched have no rows to divide.", "hosts")
            return
        if reading.host.source.whole_batches and reading.objects is not None:
            why = "a collate function that returns objects makes one from the rows of each host."
            self._leave_out("Hosts", why, "hosts")
            return

        @jax.jit
        def make_batch(words: Any, numbers: Any, rows: list[Any], intact: Any) -> Any:
            return reading.planned(words, numbers, rows, intact)

        size = reading.plan.axes[0]
        for count in hosts:
            if size % count:
                self._leave_out(f"{count} hosts", f"{size} rows do not divide by {count}.", "hosts")
                continue
            name = "1 host" if count == 1 else f"{count} hosts"
            self.ways.append(Way(name, functools.partial(_divided, reading, make_batch, count), _DIVIDED, "hosts"))

    def add_drawn_again(self) -> None:
        """The same stream, drawn twice."""
        draw = functools.partial(iterating, self.reference.replace)
        self.ways.append(Way("drawn twice", draw, _DRAWN_AGAIN, "stages"))
