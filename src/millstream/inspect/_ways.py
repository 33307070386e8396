"""The ways to the batches of a loader that its pipeline allows, drawn side by side and compared."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from millstream.inspect import _draws
from millstream.inspect._compare import Mismatch, compare_batches, on_host
from millstream.inspect._draws import Drawn, Draws, NotAllowed
from millstream.inspect._explain import calculating
from millstream.inspect._verification import Difference, VerificationRow
from millstream.loader.batch_info import BatchInfo
from millstream.loader.loader import DataLoader
from millstream.pipeline.bucketed import BucketedPipeline
from millstream.pipeline.compose import SeekablePipeline, StagedPipeline
from millstream.pipeline.iterable import IterablePipeline
from millstream.pipeline.phased import PhasedPipeline
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.state import key_words
from millstream.reading import executor as reading
from millstream.reading.executor import InGraph
from millstream.reading.memory import nbytes
from millstream.reading.processes import Processes
from millstream.reading.threads import Threads
from millstream.text.bar_line import ProgressLine
from millstream.text.errors import describe_value
from millstream.transforms.device import DevicePutTransform

Executor = reading.Executor | InGraph

_SCANNED_BYTES = 64 * 2**20  # what one compiled loop may return at once
_STOPS_WITHIN = (8, 32, 1 << 31)  # one random stop among this many first steps: there may not be time for all
_LEAST = 2  # batches that are compared even if there is no time

_IN_A_WORKER = (
    "A worker process has nothing of this program: does reading depend on a global variable, the order of a set, the "
    "current folder or the environment?"
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
_STARTED_AGAIN = (
    "The iterable gives different items when it is started again: seed what is random in it, and let nothing depend on "
    "the time or on an earlier pass."
)


@dataclasses.dataclass
class _Way:
    """One way to the batches, the likely cause if they differ, and how far it has come."""

    name: str
    draws: Draws
    cause: str = _COMPILED
    check: str = "executors"
    stops: tuple[int, ...] = ()  # steps before which it is stopped and resumed
    compared: int = 0
    over: bool = False
    raised: tuple[Exception, Drawn] | None = None


class Ways:
    """Draws the batches of a loader in all ways side by side, so that few are in memory at a time, and compares them.

    The reference, which all are compared with, hands out every batch, in order, and without a cache.
    """

    def __init__(self, loader: DataLoader, key: Any, steps: int) -> None:
        self.words = np.asarray(key_words("verify", key))
        self.raised: Exception | None = None  # by the reference
        self._steps, self._run = steps, (key, steps)
        self._ways: list[_Way] = []
        self._notes: list[tuple[str, str]] = []  # the check, and the text
        self._rounded: dict[tuple[str, str], tuple[float, str]] = {}  # by check and leaf: how much, and where
        self._differences: dict[str, Difference] = {}
        options, pipeline = loader.options, loader.pipeline
        indexed = isinstance(pipeline, SeekablePipeline)
        staged = isinstance(pipeline, StagedPipeline)
        self._rounds = not staged or calculating(pipeline.stages) > 0  # XLA may round in one program and not in others
        self._placement = pipeline.placement if indexed else None
        other: dict[str, Any] = {"cache": None}
        if options["on_error"] == "skip batch":
            other["on_error"] = "skip item"
        if getattr(options["executor"], "ordered", True) is False:
            other["executor"] = dataclasses.replace(options["executor"], ordered=True)
        if self._placement is not None and not self._placement.is_local:
            other["sharding"] = self._placement = None
            self.leave_out("The mesh", "this process has only a part of it, so it reads whole batches alone.")
        elif len(other) > 1:
            self._add("the loader as it is", _draws.iterate(loader.replace(cache=None), *self._run))
        if options["cache"] is not None:
            cached = loader.replace(cache=dataclasses.replace(options["cache"], mode="read-only"), on_error="raise")
            self._add("the cache", _draws.iterate_cached(cached, *self._run), _IN_CACHE)
        self.pipeline = pipeline
        self._reference = loader.replace(**other)

    def _add(self, name: str, draws: Draws, *rest: Any) -> None:
        self._ways.append(_Way(name, draws, *rest))

    def leave_out(self, what: str, why: str, check: str = "executors") -> None:
        """Note what the pipeline does not allow."""
        verb = "are" if what.endswith("s") or " and " in what else "is"
        self._notes.append((check, f"{what} {verb} left out: {why}"))

    def add_second_drawing(self) -> None:
        """A stream once more, in the same way."""
        cause = _STARTED_AGAIN if isinstance(self._reference.pipeline, IterablePipeline) else _DRAWN_AGAIN
        self._add("drawn twice", _draws.iterate(self._reference.replace(), *self._run), cause, "stages")

    def add_calls(self, batches_in_time: float) -> None:
        """The calls that a loader has; a compiled loop has time for about this many batches."""
        loader, placement = self._reference, self._placement
        self._add("next_batch", _draws.step_through(loader.replace(), *self._run))
        if isinstance(loader.pipeline, BucketedPipeline):
            self.leave_out("jax.jit and scan_epoch", "batches of buckets have several shapes.")
            return
        if isinstance(loader.pipeline, PhasedPipeline):
            self.leave_out("jax.jit and scan_epoch", "batches of several phases have several shapes.")
            return
        if isinstance(loader.pipeline, IterablePipeline):
            self.leave_out("jax.jit and scan_epoch", "a compiled program cannot draw from an iterable.")
            return
        if isinstance(loader.pipeline, Pipeline) and loader.pipeline.objects is not None:
            self.leave_out("jax.jit and scan_epoch", "Python objects cannot enter a compiled program.")
            return
        if placement is not None and placement.mesh != placement.sharding.mesh:
            self.leave_out("jax.jit and scan_epoch", "a mesh with explicit axes does not allow them.")
            return
        self._add("next_batch in jax.jit", _draws.step_through(loader.replace(), *self._run, compiled=True))
        length, fitting = loader.steps_per_epoch, _SCANNED_BYTES // max(1, nbytes(loader.element_spec()))
        if length <= min(self._steps, fitting, batches_in_time):
            self._add("scan_epoch", _draws.scan_epochs(loader.replace(), *self._run))
        else:
            self.leave_out("scan_epoch", f"an epoch of {length:,} batches is too much to make at once.")

    def add_executors(self, executors: Sequence[Executor]) -> None:
        """The executors, and several devices or one."""
        loader, pipeline = self._reference, self._reference.pipeline
        for executor in executors:
            other = loader.replace(executor=executor)
            if isinstance(executor, InGraph):
                source = getattr(pipeline, "phases", (pipeline,))[0].source
                name = "no executor" if source.arrays is None else "InGraph()"
                self._add(name, _draws.iterate(other, *self._run))
            elif isinstance(executor, Processes):
                self._add(f"Processes({executor.workers})", _draws.iterate_in_workers(other, *self._run), _IN_A_WORKER)
            else:
                name = f"Threads({executor.workers})" if isinstance(executor, Threads) else repr(executor)
                self._add(name, _draws.iterate(other, *self._run), _IN_THREADS)
        placed = any(isinstance(one, DevicePutTransform) and one.placement is not None for one in pipeline.stages)
        if self._placement is not None:
            self._add("one device", _draws.iterate(loader.replace(sharding=None), *self._run))
        elif pipeline.objects is None and pipeline.plan.buckets[0].batchings and not placed:
            count = math.gcd(jax.local_device_count(), *(plan.batchings[-1].size for plan in pipeline.plan.buckets))
            mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:count]), ("data",))
            if count > 1:
                self._add(f"{count} devices", _draws.iterate(loader.replace(sharding=mesh), *self._run))

    def add_resuming(self) -> None:
        """Stopping and resuming, around the end of an epoch and at random steps."""
        loader, random = self._reference, np.random.default_rng(self.words)
        length = loader.steps_per_epoch
        anywhere = [int(random.integers(1, max(2, min(self._steps, within)))) for within in _STOPS_WITHIN]
        around = () if length is None else (length - 1, length, length + 1)
        stops = tuple(sorted({one for one in (1, *around, *anywhere) if 0 < one < self._steps}))
        if not stops:
            self.leave_out("Resuming", "the stream is too short to be stopped and resumed.", "resume")
            return
        in_order = isinstance(loader.pipeline, IterablePipeline)
        through = "" if isinstance(loader.pipeline, StagedPipeline) else " through a checkpoint"
        draws = _draws.resume_at(loader.replace(), *self._run, stops)
        self._add(f"saved{through} and resumed", draws, _STARTED_AGAIN if in_order else _RESUMED, "resume", stops)
        if isinstance(loader.pipeline, SeekablePipeline):
            self._add("seeking", _draws.seek_each(loader.replace(), *self._run), _RESUMED, "resume")

    def add_hosts(self, pipeline: SeekablePipeline, hosts: Sequence[int]) -> None:
        """The rows of several hosts, read in this process, over no mesh."""
        if isinstance(pipeline, PhasedPipeline):
            self.leave_out("Hosts", "the rows of a phase are divided as those of its loader alone.", "hosts")
            return
        read = pipeline.read_by(executor=None, on_error=self._reference.options["on_error"], cache=None)
        assert read.host is not None
        if not read.plan.buckets[0].batchings:
            self.leave_out("Hosts", "samples that are not batched have no rows to divide.", "hosts")
            return
        if read.host.source.whole_batches and read.objects is not None:
            why = "a collate function that returns objects makes one from the rows of each host."
            self.leave_out("Hosts", why, "hosts")
            return
        make_batch, sizes = [jax.jit(bucket.planned) for bucket in read.buckets], [p.axes[0] for p in read.plan.buckets]
        for count in hosts:
            if odd := [size for size in sizes if size % count]:
                self.leave_out(f"{count} hosts", f"{odd[0]} rows do not divide by {count}.", "hosts")
                continue
            name = "1 host" if count == 1 else f"{count} hosts"
            self._add(name, _draws.join_hosts(read, *self._run, count, make_batch), _DIVIDED, "hosts")

    def compare(self, deadline: float, line: ProgressLine, see: Callable[[Drawn], None]) -> None:
        """Draw and compare batches, as far as there is time."""
        with contextlib.ExitStack() as opened:
            draws = [_draws.iterate(self._reference.replace(), *self._run), *(way.draws for way in self._ways)]
            batches, *_ = [opened.enter_context(contextlib.closing(one)) for one in draws]
            for number in range(self._steps):
                if number >= _LEAST and time.perf_counter() > deadline:
                    break
                try:
                    drawn = next(batches)
                except Exception as error:
                    self.raised = error
                    break
                see(drawn)
                expected = on_host((drawn.value, drawn.mask))
                for way in self._ways:
                    if not way.over:
                        self._compare(way, drawn, expected)
                left = max(0.0, deadline - time.perf_counter())
                line.show(
                    f"executors, resume, hosts: batch {number + 1:,} of {self._steps:,}, at most {left:.0f} s left"
                )
        for way in self._ways:
            # A compiled loop reads ahead of the loader, and meets a sample that cannot be read before it does.
            if way.raised is not None and type(way.raised[0]) is not type(self.raised):
                error, drawn = way.raised
                self._differ(way, drawn, Mismatch("batch", (), "a batch", describe_value(error)))

    def _compare(self, way: _Way, drawn: Drawn, expected: Any) -> None:
        try:
            found = next(way.draws, None)
        except NotAllowed as reason:
            text = f"{way.name} is left out: {' '.join(str(reason).split())}"
            self._notes.append((way.check, text))
            found = None
        except Exception as error:
            way.raised, found = (error, drawn), None
        if found is None:
            way.over = True
            return
        way.compared += 1
        if found.value is None and drawn.info is not None and drawn.info.failed:
            return  # on_error="skip batch" leaves it out, as it should
        for mismatch in compare_batches(expected, on_host((found.value, found.mask))):
            if mismatch.rounding is None or not self._rounds:
                self._differ(way, drawn, mismatch)
                return
            where = way.check, mismatch.leaf
            self._rounded[where] = max(self._rounded.get(where, (0.0, "")), (mismatch.rounding, way.name))

    def _differ(self, way: _Way, drawn: Drawn, mismatch: Mismatch) -> None:
        way.over = True
        if way.check in self._differences:
            self._notes.append((way.check, f"{way.name}: not the same at step {drawn.step}, either."))
            return
        where = f"{way.name}, {_place(drawn.step, drawn.info, mismatch)}"
        self._differences[way.check] = Difference.of(way.check, where, mismatch, way.cause)

    def row(self, check: str) -> VerificationRow:
        """The outcome of one check."""
        rounded = [
            f"{leaf} differs by at most {size:.2g} ({name}): rounding of XLA, which contracts x * a + b where it can."
            for (of, leaf), (size, name) in self._rounded.items()
            if of == check
        ]
        notes = (*(text for of, text in self._notes if of == check), *rounded)
        same = [way for way in self._ways if way.compared and way.check == check]
        if check in self._differences:
            return VerificationRow(check, "failed", "not the same batches", self._differences[check], notes)
        if not same:
            return VerificationRow(check, "left out", "nothing could be compared", None, notes)
        most = max(way.compared for way in same)
        names = ["iterate"] if check == "executors" else []
        for way in same:
            stops = ", ".join(str(step) for step in way.stops if step < way.compared)
            before = f" before steps {stops}" if stops else ""
            names.append(f"{way.name}{before}{'' if way.compared == most else f' ({way.compared:,})'}")
        equal = "equal but for rounding" if rounded else "equal bit for bit"
        return VerificationRow(check, "ok", f"{', '.join(names)}: {most:,} batches, {equal}", None, notes)


def usual_executors(own: Executor | None) -> list[Executor]:
    """Threads and worker processes, with the other fields of the loader's own executor; and none, if it has one."""
    threads = own if isinstance(own, Threads) else Threads(1)
    processes = own if isinstance(own, Processes) else Processes(2)
    tried: list[Executor] = [dataclasses.replace(threads, workers=count, ordered=True) for count in (1, 3)]
    tried.append(dataclasses.replace(processes, workers=2, ordered=True))
    return [one for one in [InGraph(), *tried] if one != (InGraph() if own is None else own)]


def _place(step: int, info: BatchInfo | None, mismatch: Mismatch) -> str:
    """Step, epoch, row and sample of a difference."""
    if info is None:
        return f"step {step}"
    text, axes = f"step {step} (epoch {info.epoch}, batch {info.step_in_epoch})", info.indices.ndim
    row = mismatch.place[:axes]
    if not axes:
        return f"{text}, sample {info.indices.item():,}"
    if len(row) < axes or any(np.array(row) >= info.indices.shape):
        return text
    return f"{text}, row {row[0] if axes == 1 else row}, sample {info.indices[row]:,}"
