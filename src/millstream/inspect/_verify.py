"""Proving on a user's own data what every loader promises: draw the batches in all ways, compare, stop and resume."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from millstream.inspect._compare import Mismatch, compare, compare_batches, on_host
from millstream.inspect._explain import require_loader
from millstream.inspect._stages import SampleReadings, calculating, program_differs
from millstream.inspect._verification import Difference, Verification, VerificationRow
from millstream.inspect._ways import Drawn, Draws, Executor, NotAllowed, Way, Ways, iterating, usual_executors
from millstream.loader.info import BatchInfo
from millstream.loader.loader import DataLoader
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.state import key_words
from millstream.reading.executor import Executor as OpenExecutor
from millstream.reading.executor import InGraph
from millstream.reading.host_source import as_host_source
from millstream.reading.processes import Processes
from millstream.text.bar_line import ProgressLine
from millstream.text.errors import describe_value, listed, require_bool, require_int, require_positive

_STAGES = 0.3  # of the time, for the stages alone
_SCAN = 0.1  # of the time, for what a compiled loop reads at once
_STREAM_SCAN = 1024  # batches of a stream that a compiled loop makes at once
_LEAST = 2  # batches that are compared even if there is no time
_NAMED = 3  # samples that could not be read and are named


def verify(
    loader: DataLoader,
    key: Any = None,
    *,
    steps: int | None = None,
    seconds: float = 60.0,
    executors: Sequence[Executor] | None = None,
    hosts: Sequence[int] = (1, 2, 4),
    progress: bool = True,
    raises: bool = True,
) -> Verification:
    """Prove on your own data what a loader promises, and name the first difference if there is one.

    Stages are deterministic; no sample comes twice in an epoch, or is missing; every executor and every number of hosts
    gives the same stream; a stream that is saved and resumed continues as if it had not stopped. Your functions are
    called more often than in a run. The loader stays as it is.

    Example:
        >>> print(ms.inspect.verify(loader, executors=[ms.Threads(2)], hosts=[1, 2]).rows[4].evidence)
        1 host, 2 hosts: 5 batches, equal bit for bit

    Args:
        loader: The loader.
        key: The key of the run to look at; None for `jax.random.key(0)`.
        steps: How many batches to read, at most; None for an epoch and two more.
        seconds: About how long to take, at most. Each check does a little even if there is no time.
        executors: What to compare with this loader; by default no executor, one thread, three threads and two
            worker processes.
        hosts: Numbers of hosts to divide batches by.
        progress: Whether to show progress on stderr, if that is a terminal or a notebook.
        raises: Whether a difference raises `VerificationFailed`, as a test wants it; if not, the table has it.
    """
    require_loader("verify", loader, built=True)
    for name, value in {"progress": progress, "raises": raises}.items():
        require_bool("verify", name, value)
    _check_arguments(steps, seconds, executors, hosts)
    executors = usual_executors(loader.options["executor"]) if executors is None else executors
    key = jax.random.key(0) if key is None else key
    words = np.asarray(key_words("verify", key))
    steps = loader.steps_per_epoch + 2 if steps is None else steps
    begun, line, ways = time.perf_counter(), ProgressLine("verify", shown=progress), Ways(loader, steps)
    try:
        if isinstance(loader.pipeline, Pipeline):
            rows = _check_indexed(loader, ways, key, words, steps, executors, hosts, seconds, line)
        else:
            rows = _check_stream(ways, key, words, steps, seconds, line)
        verification = Verification(tuple(rows), time.perf_counter() - begun)
    finally:
        line.close()
    if raises:
        verification.raise_if_failed()
    return verification


def _check_arguments(steps: Any, seconds: Any, executors: Any, hosts: Any) -> None:
    if steps is not None:
        require_int("verify", "steps", steps, least=1)
    require_positive("verify", "seconds", seconds, finite=False)
    given = [] if executors is None else listed(executors)
    if given is None or not all(isinstance(executor, InGraph | OpenExecutor) for executor in given):
        raise TypeError(
            "verify needs executors to be a list of Threads(4), Processes(4) and the like. "
            f"Got {describe_value(executors)}."
        )
    counts = listed(hosts)
    if counts is None:
        raise TypeError(f"verify needs hosts to be a list of numbers. Got {describe_value(hosts)}.")
    for count in counts:
        require_int("verify", "every number of hosts", count, least=1)


def _check_indexed(
    loader: DataLoader,
    ways: Ways,
    key: Any,
    words: np.ndarray,
    steps: int,
    executors: Sequence[Executor],
    hosts: Sequence[int],
    seconds: float,
    line: ProgressLine,
) -> list[VerificationRow]:
    """All checks of a pipeline that starts with an indexed source."""
    begun = time.perf_counter()
    pipeline = loader.replace(executor=None, on_error="raise", cache=None, sharding=None).pipeline
    line.say("stages")
    readings, samples = SampleReadings(pipeline, words), _Samples(pipeline, words)
    worker = next((one for one in [loader.options["executor"], *executors] if isinstance(one, Processes)), None)
    stages = _check_stages(pipeline, words, readings, worker, begun + _STAGES * seconds)
    batch_seconds = readings.seconds_per_sample() * math.prod(pipeline.plan.axes)
    ways.add_calls(_SCAN * seconds / max(batch_seconds, 1e-9))
    ways.add_executors(executors)
    ways.add_resuming(words)
    ways.add_hosts(pipeline, hosts)
    streams = _Streams(ways, rounds=calculating(pipeline.stages) > 0)
    streams.run(key, steps, begun + seconds, line, samples.see)
    rows = [streams.row(check) for check in ("executors", "resume", "hosts")]
    return [stages, samples.row(streams.raised), *rows]


def _check_stream(
    ways: Ways, key: Any, words: np.ndarray, steps: int, seconds: float, line: ProgressLine
) -> list[VerificationRow]:
    """All checks of a stream."""
    ways.add_drawn_again()
    ways.add_calls(_STREAM_SCAN)
    ways.add_executors([])
    ways.add_resuming(words)
    streams = _Streams(ways, rounds=True)
    streams.run(key, steps, time.perf_counter() + seconds, line, lambda drawn: None)
    if streams.raised is not None:
        raise streams.raised
    samples = VerificationRow("samples", "left out", "the samples of a stream have no index")
    hosts = VerificationRow("hosts", "left out", "every host computes the whole stream")
    return [streams.row("stages"), samples, streams.row("executors"), streams.row("resume"), hosts]


def _check_stages(
    pipeline: Pipeline, words: np.ndarray, readings: SampleReadings, worker: Processes | None, deadline: float
) -> VerificationRow:
    """Read some samples again and again, and make a batch twice."""
    difference = readings.differ(deadline)
    notes = tuple(readings.alike()) if difference is None else ()
    if difference is None and worker is not None:
        with contextlib.suppress(Exception):  # the check of the executors says why there can be no workers
            difference = readings.differ_in_a_worker(dataclasses.replace(worker, workers=1, ordered=True))
    count = 0 if pipeline.objects is not None else calculating(pipeline.stages)
    if difference is None and count:
        difference = program_differs(pipeline, words)
    if difference is not None:
        return VerificationRow("stages", "failed", "not the same twice", difference, notes)
    made = f"; a batch made twice by {count} compiled stage{'s' if count > 1 else ''}" if count else ""
    evidence = f"{readings.done} samples read {', '.join(readings.ways)}{made}: equal bit for bit"
    return VerificationRow("stages", "ok", evidence, None, notes)


@dataclasses.dataclass
class _Beside:
    """One of the other ways, while it is compared."""

    way: Way
    batches: Draws
    compared: int = 0
    over: bool = False
    raised: tuple[Exception, Drawn] | None = None


class _Streams:
    """Draws the batches of a loader and compares the other ways with them, so that few are in memory at a time."""

    def __init__(self, ways: Ways, rounds: bool) -> None:
        self._ways, self._rounds = ways, rounds  # XLA may round in one program and not in a different one
        self._notes = list(ways.notes)
        self._rounded: dict[tuple[str, str], tuple[float, str]] = {}  # by check and leaf: how much, and where
        self._beside: list[_Beside] = []
        self._differences: dict[str, Difference] = {}
        self.raised: Exception | None = None  # by the loader itself

    def run(self, key: Any, steps: int, deadline: float, line: ProgressLine, see: Callable[[Drawn], None]) -> None:
        """Draw and compare batches, as far as there is time."""
        with contextlib.ExitStack() as opened:
            draws = iterating(self._ways.reference.replace, key, steps)
            batches = opened.enter_context(contextlib.closing(draws))
            for way in self._ways.ways:
                draws = opened.enter_context(contextlib.closing(way.draw(key, steps)))
                self._beside.append(_Beside(way, draws))
            for number in range(steps):
                if number >= _LEAST and time.perf_counter() > deadline:
                    break
                try:
                    drawn = next(batches)
                except Exception as error:
                    self.raised = error
                    break
                see(drawn)
                expected = on_host((drawn.value, drawn.mask))
                for beside in self._beside:
                    if not beside.over:
                        self._compare(beside, drawn, expected)
                left = max(0.0, deadline - time.perf_counter())
                line.show(f"executors, resume, hosts: batch {number + 1:,} of {steps:,}, at most {left:.0f} s left")
        for beside in self._beside:
            # A compiled loop reads ahead of the loader, and meets a sample that cannot be read before it does.
            if beside.raised is not None and type(beside.raised[0]) is not type(self.raised):
                error, drawn = beside.raised
                self._differ(beside, drawn, Mismatch("batch", (), "a batch", describe_value(error)))

    def _compare(self, beside: _Beside, drawn: Drawn, expected: Any) -> None:
        try:
            found = next(beside.batches, None)
        except NotAllowed as reason:
            text = f"{beside.way.name} is left out: {' '.join(str(reason).split())}"
            self._notes.append((beside.way.check, text))
            found = None
        except Exception as error:
            beside.raised, found = (error, drawn), None
        if found is None:
            beside.over = True
            return
        beside.compared += 1
        if found.value is None and drawn.info is not None and drawn.info.failed:
            return  # on_error="skip batch" leaves it out, as it should
        for mismatch in compare_batches(expected, on_host((found.value, found.mask))):
            if mismatch.rounding is None or not self._rounds:
                self._differ(beside, drawn, mismatch)
                return
            where = beside.way.check, mismatch.leaf
            self._rounded[where] = max(self._rounded.get(where, (0.0, "")), (mismatch.rounding, beside.way.name))

    def _differ(self, beside: _Beside, drawn: Drawn, mismatch: Mismatch) -> None:
        way, beside.over = beside.way, True
        if way.check in self._differences:
            self._notes.append((way.check, f"{way.name}: not the same at step {drawn.step}, either."))
            return
        where = f"{way.name}, {_place(drawn.step, drawn.info, mismatch)}"
        self._differences[way.check] = mismatch.as_difference(way.check, where, way.cause)

    def row(self, check: str) -> VerificationRow:
        """The outcome of one check."""
        rounded = [
            f"{leaf} differs by at most {size:.2g} ({name}): rounding of XLA, which contracts x * a + b where it can."
            for (of, leaf), (size, name) in self._rounded.items()
            if of == check
        ]
        notes = (*(text for of, text in self._notes if of == check), *rounded)
        same = [beside for beside in self._beside if beside.compared and beside.way.check == check]
        if check in self._differences:
            return VerificationRow(check, "failed", "not the same batches", self._differences[check], notes)
        if not same:
            return VerificationRow(check, "left out", "nothing could be compared", None, notes)
        most = max(beside.compared for beside in same)
        names = ["iterate"] if check == "executors" else []
        for beside in same:
            stops = ", ".join(str(step) for step in beside.way.stops if step < beside.compared)
            before = f" before steps {stops}" if stops else ""
            names.append(f"{beside.way.name}{before}{'' if beside.compared == most else f' ({beside.compared:,})'}")
        equal = "equal but for rounding" if rounded else "equal bit for bit"
        return VerificationRow(check, "ok", f"{', '.join(names)}: {most:,} batches, {equal}", None, notes)


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


class _Samples:
    """Counts the samples of the batches that are read, and compares masks with the plan."""

    def __init__(self, pipeline: Pipeline, words: np.ndarray) -> None:
        self._pipeline, self._words = pipeline, words
        self._seen: dict[int, np.ndarray] = {}  # which samples have come, by epoch
        self._failed: dict[int, BaseException] = {}
        self._batches = self._samples = 0
        # A user's stage may change the mask on purpose; ours only repeat it, which changes its shape.
        self._keeps_masks = all(type(stage).__module__.startswith("millstream.") for stage in pipeline.stages)
        self._difference: Difference | None = None

    def see(self, drawn: Drawn) -> None:
        """Count a batch."""
        info, plan = drawn.info, self._pipeline.plan
        assert info is not None
        real = np.asarray(info.indices >= 0)
        if any(batching.ending == "wrap" for batching in plan.batchings):  # its samples may be of two epochs
            epochs = np.broadcast_to(plan.rows_at(np, self._words, np.asarray(info.step))[-1].epoch, real.shape)[real]
        else:
            epochs = np.full(int(real.sum()), info.epoch)
        self._failed |= {int(info.indices.reshape(-1)[row]): error for row, error in info.failed.items()}
        self._batches, self._samples = self._batches + 1, self._samples + len(epochs)
        expected, mask = real.copy(), on_host(drawn.mask)
        expected.reshape(-1)[list(info.failed)] = False
        if self._difference is None and self._keeps_masks and mask.shape == expected.shape:
            for wrong in compare("mask", expected, mask):
                where = f"step {info.step} (epoch {info.epoch}, batch {info.step_in_epoch})"
                cause = "The mask must be True in rows that are samples and False in rows that are padding."
                self._difference = wrong.as_difference("samples", where, cause)
        for index, epoch in zip(info.indices[real].tolist(), epochs.tolist(), strict=True):
            seen = self._seen.setdefault(epoch, np.zeros(plan.samples, bool))
            if seen[index]:
                self._miscounted(epoch, index, "twice")
            seen[index] = True

    def _miscounted(self, epoch: int, index: int, times: str) -> None:
        cause = "Every sample belongs to an epoch once. This is a fault of the plan; please report it."
        difference = Difference("samples", f"epoch {epoch}", f"sample {index:,}", "once", times, cause)
        self._difference = self._difference or difference

    def row(self, raised: Exception | None) -> VerificationRow:
        """The check of the samples, after reading that may have raised."""
        plan, once = self._pipeline.plan, ""
        if self._batches >= plan.steps_per_epoch:
            came = int(np.count_nonzero(self._seen[0]))
            dropped = any(batching.ending == "drop" for batching in plan.batchings)
            once = f"{came:,} samples, each once in an epoch; "
            if came < plan.samples:
                once = f"{came:,} of {plan.samples:,} samples (the rest is dropped), each once in an epoch; "
                if not dropped:
                    self._miscounted(0, int(np.argmin(self._seen[0])), "never")
        if raised is not None:
            self._difference = self._difference or _unreadable(self._pipeline, self._words, self._batches, raised)
        notes = ()
        if self._failed:
            named = [f"{index:,} ({describe_value(error)})" for index, error in list(self._failed.items())[:_NAMED]]
            others = f" and {len(self._failed) - _NAMED:,} others" if len(self._failed) > _NAMED else ""
            notes = (f"Samples that cannot be read and are skipped: {', '.join(named)}{others}.",)
        if self._difference is not None:
            evidence = f"{self._batches:,} batches read, with a difference"
            return VerificationRow("samples", "failed", evidence, self._difference, notes)
        evidence = f"{once}{self._samples:,} read in {self._batches:,} batches, none twice, masks as planned"
        return VerificationRow("samples", "ok", evidence, None, notes)


def _unreadable(pipeline: Pipeline, words: np.ndarray, step: int, raised: Exception) -> Difference:
    """The sample of a step that raises when it is read, found by reading one after the other."""
    indices, rows = pipeline.plan.at(np, words, np.asarray(step))
    assert pipeline.source is not None
    source, where = as_host_source(pipeline.source), f"step {step}"
    cause = "A stage has raised it. The stream cannot continue from here."
    for index in indices[rows[-1].mask].tolist():
        try:
            source.read_sample(index, np.zeros(2, np.uint32) if source.keyed else None)
        except Exception:
            where = f"step {step}, sample {index:,}"
            cause = 'Fix the sample, or skip it: on_error="skip item" masks such samples, and verify lists them all.'
            break
    return Difference("samples", where, "the batch", "arrays", describe_value(raised), cause)
