"""Proving on a user's own data what every loader promises: draw the batches in all ways, compare, stop and resume."""

import contextlib
import dataclasses
import functools
import json
import math
import random
import tempfile
import textwrap
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from millstream.checkpoints import CheckpointStore
from millstream.errors import VerificationFailed
from millstream.files import plain
from millstream.inspect._compare import Mismatch, compare, compare_batches, on_host, raw_key
from millstream.inspect._explain import calculating, require_loader
from millstream.loader.batch_info import BatchInfo
from millstream.loader.loader import DataLoader
from millstream.pipeline.host_calls import call_and_wait
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.stages import stage_names
from millstream.pipeline.state import key_words
from millstream.plan.planned import PlannedSteps, sample_keys
from millstream.reading import executor as reading
from millstream.reading.contracts import PyTree
from millstream.reading.derived_sources import MappedSource, named_parts
from millstream.reading.executor import InGraph
from millstream.reading.host_source import HostSource, as_host_source
from millstream.reading.memory import nbytes
from millstream.reading.processes import Processes
from millstream.reading.reader import Reader
from millstream.reading.samples import ObjectSpec, SampleSpec
from millstream.reading.threads import Threads
from millstream.sharding import shard_bounds
from millstream.text.bar_line import ProgressLine
from millstream.text.errors import describe_value, listed, require_bool, require_int, require_positive
from millstream.text.html import html_table, html_text
from millstream.text.tables import WIDTH, text_table
from millstream.transforms.device import DevicePutTransform

Result = Literal["ok", "failed", "left out"]
Executor = reading.Executor | InGraph
Draws = Generator["_Drawn", None, None]

_STAGES = 0.3  # of the time, for the stages alone
_SAMPLES = 64  # that are read again
_TOGETHER = 16  # samples that are read in one call
_ALONE = 4  # one of this many samples is read alone
_TIMED = 4  # samples that are read to see how long that takes
_SCAN = 0.1  # of the time, for what a compiled loop reads at once
_SCANNED_BYTES = 64 * 2**20  # what one compiled loop may return at once
_STREAM_SCAN = 1024  # batches of a stream that a compiled loop makes at once
_STOPS_WITHIN = (8, 32, 1 << 31)  # one random stop among this many first steps: there may not be time for all
_LEAST = 2  # batches that are compared even if there is no time
_NAMED = 3  # samples that could not be read and are named

_IN_A_WORKER = (
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
_NOT_THE_SAME_TWICE = (
    "gives different values when the same batch is made again. What Python computes is fixed when a stage is traced: "
    "for random numbers use RandomMapTransform(fn), where fn(value, mask, key) is given a key. A callback must depend "
    "on its arguments alone."
)


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first place where a promise was broken. Printed, it is a few lines.

    Example:
        >>> print(ms.inspect.Difference("resume", "step 3", "batch['x'][0]", "1.5", "2.5", "The stage counts calls."))
        First difference: resume, step 3
          batch['x'][0]: 1.5 expected, 2.5 found
          The stage counts calls.

    Attributes:
        check: The check that found it.
        where: The way or stage that made it, the step, epoch and row, and the index of the sample.
        leaf: Which value of the batch or sample.
        expected: What it should be.
        found: What it is.
        cause: The likely cause, and how to fix it.
    """

    check: str
    where: str
    leaf: str
    expected: str
    found: str
    cause: str

    def __str__(self) -> str:
        what = f"{self.leaf}: {self.expected} expected, {self.found} found"
        lines = [textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ") for text in (what, self.cause)]
        return "\n".join([f"First difference: {self.check}, {self.where}", *lines])


@dataclasses.dataclass(frozen=True)
class VerificationRow:
    """One check of a verification.

    Example:
        >>> [row.check for row in loader.verify(executors=[], hosts=[]).rows]
        ['stages', 'samples', 'executors', 'resume', 'hosts']

    Attributes:
        check: What was checked.
        result: "ok", "failed" or "left out".
        evidence: What was compared, and how much of it; or why nothing was.
        difference: Where it failed first.
        notes: What the check left out, and differences that do not break a promise.
    """

    check: str
    result: Result
    evidence: str
    difference: Difference | None = None
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify`. Printed, it is a table.

    Example:
        >>> verification = loader.verify(executors=[ms.Threads(2)], hosts=[1, 2], raises=False)
        >>> verification.ok
        True

    Attributes:
        rows: One per check.
        seconds: How long it took.
    """

    rows: tuple[VerificationRow, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether all checks passed or were left out."""
        return all(row.result != "failed" for row in self.rows)

    @property
    def difference(self) -> Difference | None:
        """The first difference; None if there is none."""
        return next((row.difference for row in self.rows if row.difference is not None), None)

    def raise_if_failed(self) -> None:
        """Raise `VerificationFailed` if a check failed."""
        if not self.ok:
            raise VerificationFailed(self)

    def __str__(self) -> str:
        rows = [(row.check, row.result, row.evidence) for row in self.rows]
        total = ("all", "ok" if self.ok else "failed", f"in {self.seconds:.1f} s")
        parts = [text_table(["check", "result", "evidence"], rows, total=total, width=WIDTH)]
        notes = [f"  {row.check}: {note}" for row in self.rows for note in row.notes]
        if notes:
            parts.append("\n".join(["Notes", *notes]))
        if self.difference is not None:
            parts.append(str(self.difference))
        return "\n\n".join(parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [(row.check, row.result, "\n".join([row.evidence, *row.notes])) for row in self.rows]
        total = ("all", "ok" if self.ok else "failed", f"in {self.seconds:.1f} s")
        table = html_table(["check", "result", "evidence"], rows, total=total)
        return table + ("" if self.difference is None else html_text(str(self.difference)))


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
    executors = _usual_executors(loader.options["executor"]) if executors is None else executors
    key = jax.random.key(0) if key is None else key
    words = np.asarray(key_words("verify", key))
    begun, run = (
        time.perf_counter(),
        _Verifier(loader, key, words, loader.steps_per_epoch + 2 if steps is None else steps),
    )
    with contextlib.closing(ProgressLine("verify", shown=progress)) as line:
        if isinstance(loader.pipeline, Pipeline):
            rows = _check_indexed(loader, run, executors, hosts, seconds, line)
        else:
            rows = _check_stream(run, seconds, line)
    verification = Verification(tuple(rows), time.perf_counter() - begun)
    if raises:
        verification.raise_if_failed()
    return verification


def _check_arguments(steps: Any, seconds: Any, executors: Any, hosts: Any) -> None:
    if steps is not None:
        require_int("verify", "steps", steps, least=1)
    require_positive("verify", "seconds", seconds, finite=False)
    given = [] if executors is None else listed(executors)
    if given is None or not all(isinstance(executor, InGraph | reading.Executor) for executor in given):
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
    run: "_Verifier",
    executors: Sequence[Executor],
    hosts: Sequence[int],
    seconds: float,
    line: ProgressLine,
) -> list[VerificationRow]:
    """All checks of a pipeline that starts with an indexed source."""
    begun = time.perf_counter()
    pipeline = loader.replace(executor=None, on_error="raise", cache=None, sharding=None).pipeline
    line.say("stages")
    readings, samples = _Readings(pipeline, run.words), _Samples(pipeline, run.words)
    stages = _check_stages(pipeline, run.words, readings, begun + _STAGES * seconds)
    run.add_calls(_SCAN * seconds / (readings.seconds_per_sample() * math.prod(pipeline.plan.axes)))
    run.add_executors(executors)
    run.add_resuming()
    run.add_hosts(pipeline, hosts)
    run.compare(begun + seconds, line, samples.see)
    return [stages, samples.row(run.raised), *(run.row(check) for check in ("executors", "resume", "hosts"))]


def _check_stream(run: "_Verifier", seconds: float, line: ProgressLine) -> list[VerificationRow]:
    """All checks of a stream."""
    run.add("drawn twice", functools.partial(_iterating, run.reference.replace), _DRAWN_AGAIN, "stages")
    run.add_calls(_STREAM_SCAN)
    run.leave_out("Threads and Processes", "a stream is computed step by step.")
    run.add_resuming()
    run.compare(time.perf_counter() + seconds, line, lambda drawn: None)
    if run.raised is not None:
        raise run.raised
    samples = VerificationRow("samples", "left out", "the samples of a stream have no index")
    hosts = VerificationRow("hosts", "left out", "every host computes the whole stream")
    return [run.row("stages"), samples, run.row("executors"), run.row("resume"), hosts]


def _difference(check: str, where: str, mismatch: Mismatch, cause: str) -> Difference:
    return Difference(check, where, mismatch.shown, mismatch.expected, mismatch.found, cause)


def _check_stages(pipeline: Pipeline, words: np.ndarray, readings: "_Readings", deadline: float) -> VerificationRow:
    """Read some samples again and again, and make a batch twice."""
    difference = readings.differ(deadline)
    notes = readings.alike() if difference is None else ()
    count = 0 if pipeline.objects is not None else calculating(pipeline.stages)
    if difference is None and count:
        difference = _program_differs(pipeline, words)
    if difference is not None:
        return VerificationRow("stages", "failed", "not the same twice", difference, notes)
    made = f"; a batch made twice by {count} compiled stage{'s' if count > 1 else ''}" if count else ""
    evidence = f"{readings.done} samples read {', '.join(readings.ways)}{made}: equal bit for bit"
    return VerificationRow("stages", "ok", evidence, None, notes)


_Part = tuple[str, HostSource]  # a source, or a host stage with all that is below it
_Wrong = tuple[str, int, Mismatch]  # how a sample was read, its index, and where it differs


@dataclasses.dataclass(frozen=True)
class _Raised:
    """Stands for a sample that could not be read."""

    error: str


class _Readings:
    """Reads some samples of a pipeline in several ways, and names the innermost stage that gives different values."""

    def __init__(self, pipeline: Pipeline, words: np.ndarray) -> None:
        self._pipeline = pipeline
        self._parts = named_parts(as_host_source(pipeline.source))  # pyright: ignore[reportArgumentType]
        count = min(_SAMPLES, pipeline.plan.samples)
        self._indices = np.random.default_rng(words).choice(pipeline.plan.samples, count, replace=False)
        self._keys = sample_keys(words, np.zeros(count, np.uint32), self._indices)
        self.done = 0
        self.ways = ["again"] if self._parts[-1][1].whole_batches else ["again", "in a different order", "alone"]

    def seconds_per_sample(self) -> float:
        """How long it takes to read a sample, about."""
        some, begun = slice(_TIMED), time.perf_counter()
        _read(self._parts[-1], self._indices[some], self._keys[some])
        return max(time.perf_counter() - begun, 1e-9) / len(self._indices[some])

    def _arrays_differ(self) -> Difference | None:
        """Where the arrays of a source are not what it reads."""
        source, indices = self._pipeline.source, self._indices[:_TOGETHER]
        if self._pipeline.host is not None or source is None:
            return None
        gathered = jax.tree.map(lambda leaf: leaf[indices], self._pipeline.arrays)
        for wrong in compare("samples", on_host(gathered), on_host(source.read(indices))):
            name, index = type(source).__name__, indices[wrong.place[0] if wrong.place else 0]
            where = f"{name}, sample {index:,} of its arrays and as it is read"
            cause = f"{name} must give the same samples by `arrays` and by `read`: compiled programs use either."
            return _difference("stages", where, wrong, cause)
        return None

    def differ(self, deadline: float) -> Difference | None:
        """Read the samples again, in a different order, and alone."""
        if (difference := self._arrays_differ()) is not None:
            return difference
        while self.done < len(self._indices) and not (self.done and time.perf_counter() > deadline):
            some = slice(self.done, self.done + _TOGETHER)
            indices, keys = self._indices[some], self._keys[some]
            difference = self._blame(indices, keys)
            if difference is not None:
                return difference
            self.done += len(indices)
        return None

    def alike(self) -> tuple[str, ...]:
        """A note if all samples are equal."""
        some = slice(min(self.done, _TOGETHER))
        first, *others = _read(self._parts[0], self._indices[some], self._keys[some])
        if not others or any(compare("", first, other) for other in others):
            return ()
        return (f"{some.stop} samples were read, and all are equal: does {self._parts[0][0]} look at the index?",)

    def _blame(self, indices: np.ndarray, keys: np.ndarray) -> Difference | None:
        """The difference at the innermost part that has one; none if the whole has none."""
        outermost = _differs(self._parts[-1], indices, keys)
        if outermost is None:
            return None
        inner = ((part, _differs(part, indices, keys)) for part in self._parts[:-1])
        part, wrong = next(((part, wrong) for part, wrong in inner if wrong), (self._parts[-1], outermost))
        how, index, mismatch = wrong
        key = keys[np.argmax(indices == index)]
        cause = _cause(part, how, _global_generator(part, index, key))
        where = f"{part[0]}, sample {index:,} read {how}"
        return _difference("stages", where, mismatch, cause)


def _cause(part: _Part, how: str, generator: str | None) -> str:
    name, source = part
    gives = f"{name} gives different values for the same sample when it is read {how}"
    if generator is not None:
        fix = "Use" if isinstance(source, MappedSource) else "Add"
        return (
            f"{gives}: it draws from {generator}. {fix} RandomHostMapTransform(fn); fn(sample, rng) draws from the "
            "generator it is given."
        )
    if how == "again":
        return (
            f"{gives}: it depends on something else, such as a counter, the time or a random generator of its own. For "
            "random numbers use RandomHostMapTransform(fn), where fn(sample, rng) is given a generator."
        )
    return f"{gives}: row i of what is read must be sample indices[i], whatever is read before it or beside it."


def _read(part: _Part, indices: np.ndarray, keys: np.ndarray) -> list[Any]:
    """Samples that are read together; or one by one, if one of them cannot be read."""
    name, source = part
    try:
        samples = source.read_keyed(indices, keys if source.keyed else None)
    except Exception as error:
        if len(indices) == 1:
            return [_Raised(type(error).__name__)]
        return [_read(part, indices[row : row + 1], keys[row : row + 1])[0] for row in range(len(indices))]
    spec = source.sample_spec
    return samples if isinstance(spec, ObjectSpec) else _one_by_one(spec, spec.flatten(name, samples))


def _one_by_one(spec: SampleSpec, leaves: list[Any]) -> list[Any]:
    return [spec.unflatten([np.asarray(leaf[row]) for leaf in leaves]) for row in range(len(leaves[0]))]


def _differs(part: _Part, indices: np.ndarray, keys: np.ndarray) -> _Wrong | None:
    """The first sample that differs when it is read again, in a different order, or alone."""
    first = _read(part, indices, keys)
    found = _first_wrong("again", indices, first, enumerate(_read(part, indices, keys)))
    if found is not None or part[1].whole_batches:  # such a batch is made from its samples together, in their order
        return found
    back = np.arange(len(indices))[::-1]
    reversed_ones = zip(back.tolist(), _read(part, indices[back], keys[back]), strict=True)
    some = range(0, len(indices), _ALONE)
    alone = ((row, _read(part, indices[row : row + 1], keys[row : row + 1])[0]) for row in some)
    return _first_wrong("in a different order", indices, first, reversed_ones) or _first_wrong(
        "alone", indices, first, alone
    )


def _first_wrong(how: str, indices: np.ndarray, first: list[Any], rows: Iterable[tuple[int, Any]]) -> _Wrong | None:
    wrong = ((row, mismatch) for row, sample in rows for mismatch in compare("sample", first[row], sample))
    return next(((how, int(indices[row]), mismatch) for row, mismatch in wrong), None)


def _global_generator(part: _Part, index: int, key: np.ndarray) -> str | None:
    """The global random generator that reading a sample draws from, if it does."""
    before = random.getstate(), np.random.get_state(legacy=False)
    _read(part, np.array([index]), key[None])
    if before[0] != random.getstate():
        return "Python's random module"
    changed = compare("", before[1], np.random.get_state(legacy=False))
    return "NumPy's global random generator (np.random)" if changed else None


def _program_differs(pipeline: Pipeline, words: np.ndarray) -> Difference | None:
    """Make the first batch by two programs, and name the first compiled stage that differs."""
    rows = None if pipeline.host is None else _first_rows(pipeline, words)
    whole, name = _made_twice(pipeline, words, rows), "the stages together"
    if whole is None:
        return None
    for count, stage in enumerate(pipeline.stages, 1):
        if not stage.batches and not stage.passive:
            later = tuple(one for one in pipeline.stages[count:] if one.batches)
            part = dataclasses.replace(pipeline, stages=(*pipeline.stages[:count], *later))
            wrong = _made_twice(part, words, rows)
            if wrong is not None:
                whole, name = wrong, stage_names(pipeline.stages)[count - 1]
                break
    return _difference("stages", f"{name}, step 0 made twice", whole, f"{name} {_NOT_THE_SAME_TWICE}")


def _made_twice(pipeline: Pipeline, words: np.ndarray, rows: list[Any] | None) -> Mismatch | None:
    """Where the first batch differs if it is traced, compiled and made again."""
    made, numbers = [], PlannedSteps(pipeline.plan, words, coordinates=pipeline.coordinates).numbers(0)
    for _ in range(2):

        @jax.jit
        def batch(words: Any, numbers: Any, arrays: Any, rows: Any) -> Any:  # a new one, so that it is traced again
            return dataclasses.replace(pipeline, arrays=arrays).planned(words, numbers, rows)

        made.append(on_host(call_and_wait(batch, words, numbers, pipeline.arrays, rows)))
    return next(iter(compare_batches(*made)), None)


def _first_rows(pipeline: Pipeline, words: np.ndarray) -> list[Any]:
    """The samples of the first batch, leaf by leaf; those that cannot be read are zeros."""
    host = pipeline.read_by(executor=None, on_error="skip item", cache=None).host
    assert host is not None
    with contextlib.closing(Reader(host, pipeline.plan)) as reader:
        return [np.array(leaf) for leaf in reader.rows(words, 0).rows]


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

    def see(self, drawn: "_Drawn") -> None:
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
                self._difference = _difference("samples", where, wrong, cause)
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


class _NotAllowed(Exception):
    """A pipeline cannot be run in this way; the text says why."""


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """One batch; without a value, if it is left out."""

    step: int
    value: Any = None
    mask: Any = None
    info: BatchInfo | None = None


@dataclasses.dataclass
class _Way:
    """One way to the batches, the likely cause if they differ, and how far it has come."""

    name: str
    draw: Callable[[Any, int], Draws]  # with a key and a number of steps
    cause: str
    check: str
    stops: tuple[int, ...]  # steps before which it is stopped and resumed
    compared: int = 0
    over: bool = False
    raised: tuple[Exception, _Drawn] | None = None


def _iterating(make: Callable[[], DataLoader], key: Any, steps: int) -> Draws:
    """By `iterate`, in the order of the steps."""
    early: dict[int, _Drawn] = {}  # by step, where an executor hands out whichever batch is read first
    step, loader = 0, make()
    indexed = isinstance(loader.pipeline, Pipeline)
    ordered = not indexed or loader.pipeline.host is None or loader.pipeline.host.ordered
    with loader, contextlib.closing(loader.iterate(loader.init_state(key), steps=steps, with_info=indexed)) as batches:
        for value, mask, *info in batches:
            number = info[0].step if indexed else step
            early[number] = _Drawn(number, value, mask, info[0] if indexed else None)
            while early and (step in early or ordered):
                yield early.pop(step, _Drawn(step))
                step += 1
        for last in range(step, steps):
            yield early.pop(last, _Drawn(last))


def _stepping(
    make: Callable[[], DataLoader], next_batch: Callable[[DataLoader, PyTree], Any], key: Any, steps: int
) -> Draws:
    """By `next_batch`, compiled or not."""
    with contextlib.closing(make()) as loader:
        state = loader.init_state(key)
        for step in range(steps):
            value, state, mask = call_and_wait(next_batch, loader, state)
            yield _Drawn(step, value, mask)


def _next(loader: DataLoader, state: PyTree) -> Any:
    return loader.next_batch(state)


_compiled_next = jax.jit(_next)


def _scanning(make: Callable[[], DataLoader], key: Any, steps: int) -> Draws:
    """By `scan_epoch`, as many whole epochs as there are steps for."""
    with contextlib.closing(make()) as loader:
        state, length = loader.init_state(key), loader.steps_per_epoch
        for first in range(0, steps - length + 1, length):
            state, _, batches = loader.scan_epoch(state, None, _collected)
            batches = jax.tree.map(np.asarray, batches)
            for number in range(length):
                yield _Drawn(first + number, *jax.tree.map(lambda leaf, at=number: leaf[at], batches))


def _collected(carry: None, batch: PyTree, mask: jax.Array) -> tuple[None, Any]:
    return carry, jax.tree.map(raw_key, (batch, mask))


def _from_workers(make: Callable[[], DataLoader], key: Any, steps: int) -> Draws:
    """By `iterate`, unless the pipeline cannot be sent to worker processes, or its samples cannot be sent back."""
    pipeline = make().pipeline
    source = pipeline.host.source
    if isinstance(source.sample_spec, ObjectSpec):
        try:
            plain.encode(source.read_sample(0, np.zeros(2, np.uint32) if source.keyed else None)[0])
        except TypeError as error:
            raise _NotAllowed(str(error)) from None
    try:
        pipeline.host.backend(pipeline.plan).close()
    except Exception as error:
        raise _NotAllowed(f"the pipeline cannot be sent to a worker: {type(error).__name__}: {error}") from None
    yield from _iterating(make, key, steps)


def _from_cache(make: Callable[[], DataLoader], key: Any, steps: int) -> Draws:
    """By `iterate`, unless a cache does not hold the batches."""
    with contextlib.closing(_iterating(make, key, steps)) as batches:
        try:
            first = next(batches)
        except (ValueError, FileNotFoundError) as error:
            raise _NotAllowed(str(error)) from None
        yield first
        yield from batches


def _resuming(make: Callable[[], DataLoader], stops: tuple[int, ...], key: Any, steps: int) -> Draws:
    """By `iterate`, which is ended before some steps and resumed from the position that a run would save."""
    with make() as loader:
        batches = loader.iterate(loader.init_state(key), steps=steps)
        try:
            for step in range(steps):
                if step in stops:
                    saved = batches.get_state() if isinstance(loader.pipeline, Pipeline) else batches.state
                    batches.close()
                    batches = _resumed(loader, saved, key, steps - step)
                yield _Drawn(step, *next(batches))
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
        raise _NotAllowed(str(error)) from None


def _seeking(make: Callable[[], DataLoader], key: Any, steps: int) -> Draws:
    """By `iterate`, which starts again at every step."""
    with make() as loader:
        for step in range(steps):
            with contextlib.closing(loader.iterate(loader.init_state(key, step), steps=1)) as batches:
                yield _Drawn(step, *next(batches))


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
                yield _Drawn(step, *make_batch(words, planned.numbers(step), rows, intact))
            else:
                real = np.concatenate([one.request.real for one in filled if one.request is not None])
                yield _Drawn(step, rows[0].tolist(), real.reshape(intact.shape) & intact)


def _usual_executors(own: Executor | None) -> list[Executor]:
    """Threads and worker processes, with the other fields of the loader's own executor; and none, if it has one."""
    threads = own if isinstance(own, Threads) else Threads(1)
    processes = own if isinstance(own, Processes) else Processes(2)
    tried: list[Executor] = [dataclasses.replace(threads, workers=count, ordered=True) for count in (1, 3)]
    tried.append(dataclasses.replace(processes, workers=2, ordered=True))
    return [one for one in [InGraph(), *tried] if one != (InGraph() if own is None else own)]


class _Verifier:
    """Draws the batches of a loader in all ways side by side, so that few are in memory at a time, and compares them.

    The reference, which all are compared with, hands out every batch, in order, and without a cache.
    """

    def __init__(self, loader: DataLoader, key: Any, words: np.ndarray, steps: int) -> None:
        self.words, self.steps, self._key = words, steps, key
        self.ways: list[_Way] = []
        self.raised: Exception | None = None  # by the reference
        self._notes: list[tuple[str, str]] = []  # the check, and the text
        self._rounded: dict[tuple[str, str], tuple[float, str]] = {}  # by check and leaf: how much, and where
        self._differences: dict[str, Difference] = {}
        options, pipeline = loader.options, loader.pipeline
        indexed = isinstance(pipeline, Pipeline)
        self._rounds = not indexed or calculating(pipeline.stages) > 0  # XLA may round in one program and not in others
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
            self.add_loader("the loader as it is", functools.partial(loader.replace, cache=None))
        if options["cache"] is not None:
            read_only = dataclasses.replace(options["cache"], mode="read-only")
            make = functools.partial(loader.replace, cache=read_only, on_error="raise")
            self.add("the cache", functools.partial(_from_cache, make), _IN_CACHE)
        self.reference = loader.replace(**other)

    def add(
        self,
        name: str,
        draw: Callable[[Any, int], Draws],
        cause: str = _COMPILED,
        check: str = "executors",
        stops: tuple[int, ...] = (),
    ) -> None:
        """One more way to the batches."""
        self.ways.append(_Way(name, draw, cause, check, stops))

    def add_loader(self, name: str, make: Callable[[], DataLoader]) -> None:
        """A different loader of the same batches."""
        self.add(name, functools.partial(_iterating, make))

    def leave_out(self, what: str, why: str, check: str = "executors") -> None:
        """Note what the pipeline does not allow."""
        verb = "are" if what.endswith("s") or " and " in what else "is"
        self._notes.append((check, f"{what} {verb} left out: {why}"))

    def add_calls(self, batches_in_time: float) -> None:
        """The calls that a loader has; a compiled loop has time for about this many batches."""
        make, pipeline, placement = self.reference.replace, self.reference.pipeline, self._placement
        self.add("next_batch", functools.partial(_stepping, make, _next))
        if isinstance(pipeline, Pipeline) and pipeline.objects is not None:
            self.leave_out("jax.jit and scan_epoch", "Python objects cannot enter a compiled program.")
        elif placement is not None and placement.mesh != placement.sharding.mesh:
            self.leave_out("jax.jit and scan_epoch", "a mesh with explicit axes does not allow them.")
        else:
            self.add("next_batch in jax.jit", functools.partial(_stepping, make, _compiled_next))
            length = self.reference.steps_per_epoch
            fitting = _SCANNED_BYTES // max(1, nbytes(self.reference.element_spec()))
            if length <= min(self.steps, fitting, batches_in_time):
                self.add("scan_epoch", functools.partial(_scanning, make))
            else:
                self.leave_out("scan_epoch", f"an epoch of {length:,} batches is too much to make at once.")

    def add_executors(self, executors: Sequence[Executor]) -> None:
        """The executors, and several devices or one."""
        loader, pipeline = self.reference, self.reference.pipeline
        for executor in executors:
            make = functools.partial(loader.replace, executor=executor)
            if isinstance(executor, InGraph):
                assert pipeline.source is not None
                self.add_loader("no executor" if pipeline.source.arrays is None else "InGraph()", make)
            elif isinstance(executor, Processes):
                name = f"Processes({executor.workers})"
                self.add(name, functools.partial(_from_workers, make), _IN_A_WORKER)
            else:
                name = f"Threads({executor.workers})" if isinstance(executor, Threads) else repr(executor)
                self.add(name, functools.partial(_iterating, make), _IN_THREADS)
        placed = any(isinstance(one, DevicePutTransform) and one.placement is not None for one in pipeline.stages)
        if self._placement is not None:
            self.add_loader("one device", functools.partial(loader.replace, sharding=None))
        elif pipeline.objects is None and pipeline.plan.batchings and not placed:
            count = math.gcd(jax.local_device_count(), pipeline.plan.batchings[-1].size)
            mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:count]), ("data",))
            if count > 1:
                self.add_loader(f"{count} devices", functools.partial(loader.replace, sharding=mesh))

    def add_resuming(self) -> None:
        """Stopping and resuming, around the end of an epoch and at random steps."""
        make, length, random = self.reference.replace, self.reference.steps_per_epoch, np.random.default_rng(self.words)
        drawn = [int(random.integers(1, max(2, min(self.steps, within)))) for within in _STOPS_WITHIN]
        stops = tuple(sorted({one for one in (1, length - 1, length, length + 1, *drawn) if 0 < one < self.steps}))
        if not stops:
            self.leave_out("Resuming", "the stream is too short to be stopped and resumed.", "resume")
            return
        through = "" if isinstance(self.reference.pipeline, Pipeline) else " through a checkpoint"
        draw = functools.partial(_resuming, make, stops)
        self.add(f"saved{through} and resumed", draw, _RESUMED, "resume", stops)
        if not through:
            self.add("seeking", functools.partial(_seeking, make), _RESUMED, "resume")

    def add_hosts(self, pipeline: Pipeline, hosts: Sequence[int]) -> None:
        """The rows of several hosts, read in this process, over no mesh."""
        read = pipeline.read_by(executor=None, on_error=self.reference.options["on_error"], cache=None)
        assert read.host is not None
        if not read.plan.batchings:
            self.leave_out("Hosts", "samples that are not batched have no rows to divide.", "hosts")
            return
        if read.host.source.whole_batches and read.objects is not None:
            why = "a collate function that returns objects makes one from the rows of each host."
            self.leave_out("Hosts", why, "hosts")
            return

        @jax.jit
        def make_batch(words: Any, numbers: Any, rows: list[Any], intact: Any) -> Any:
            return read.planned(words, numbers, rows, intact)

        size = read.plan.axes[0]
        for count in hosts:
            if size % count:
                self.leave_out(f"{count} hosts", f"{size} rows do not divide by {count}.", "hosts")
                continue
            name = "1 host" if count == 1 else f"{count} hosts"
            self.add(name, functools.partial(_divided, read, make_batch, count), _DIVIDED, "hosts")

    def compare(self, deadline: float, line: ProgressLine, see: Callable[[_Drawn], None]) -> None:
        """Draw and compare batches, as far as there is time."""
        with contextlib.ExitStack() as opened:
            draws = [_iterating(self.reference.replace, self._key, self.steps)]
            draws += [way.draw(self._key, self.steps) for way in self.ways]
            batches, *others = [opened.enter_context(contextlib.closing(one)) for one in draws]
            for number in range(self.steps):
                if number >= _LEAST and time.perf_counter() > deadline:
                    break
                try:
                    drawn = next(batches)
                except Exception as error:
                    self.raised = error
                    break
                see(drawn)
                expected = on_host((drawn.value, drawn.mask))
                for way, other in zip(self.ways, others, strict=True):
                    if not way.over:
                        self._compare(way, other, drawn, expected)
                left = max(0.0, deadline - time.perf_counter())
                line.show(
                    f"executors, resume, hosts: batch {number + 1:,} of {self.steps:,}, at most {left:.0f} s left"
                )
        for way in self.ways:
            # A compiled loop reads ahead of the loader, and meets a sample that cannot be read before it does.
            if way.raised is not None and type(way.raised[0]) is not type(self.raised):
                error, drawn = way.raised
                self._differ(way, drawn, Mismatch("batch", (), "a batch", describe_value(error)))

    def _compare(self, way: _Way, batches: Draws, drawn: _Drawn, expected: Any) -> None:
        try:
            found = next(batches, None)
        except _NotAllowed as reason:
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

    def _differ(self, way: _Way, drawn: _Drawn, mismatch: Mismatch) -> None:
        way.over = True
        if way.check in self._differences:
            self._notes.append((way.check, f"{way.name}: not the same at step {drawn.step}, either."))
            return
        where = f"{way.name}, {_place(drawn.step, drawn.info, mismatch)}"
        self._differences[way.check] = _difference(way.check, where, mismatch, way.cause)

    def row(self, check: str) -> VerificationRow:
        """The outcome of one check."""
        rounded = [
            f"{leaf} differs by at most {size:.2g} ({name}): rounding of XLA, which contracts x * a + b where it can."
            for (of, leaf), (size, name) in self._rounded.items()
            if of == check
        ]
        notes = (*(text for of, text in self._notes if of == check), *rounded)
        same = [way for way in self.ways if way.compared and way.check == check]
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
