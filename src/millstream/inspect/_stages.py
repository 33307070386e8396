"""Whether stages are deterministic: the same samples read in several ways, the same batch made by two programs."""

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from millstream.inspect._compare import Mismatch, compare, compare_batches, on_host
from millstream.inspect._verification import Difference
from millstream.inspect._ways import IN_A_WORKER
from millstream.pipeline.host_calls import call_and_wait
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.stages import stage_names
from millstream.pipeline.transform import Transform
from millstream.plan.planned import PlannedSteps, sample_keys
from millstream.reading.derived_sources import MappedSource, named_parts
from millstream.reading.host_source import HostSource, as_host_source
from millstream.reading.processes import Processes
from millstream.reading.reader import Reader
from millstream.reading.reading import Request
from millstream.reading.samples import ObjectSpec, SampleSpec
from millstream.reading.slots import Layout

_NOT_THE_SAME_TWICE = (
    "gives different values when the same batch is made again. What Python computes is fixed when a stage is traced: "
    "for random numbers use RandomMapTransform(fn), where fn(value, mask, key) is given a key. A callback must depend "
    "on its arguments alone."
)
_SAMPLES = 64
_TOGETHER = 16  # samples that are read in one call
_ALONE = 4  # one of this many samples is read alone
_TIMED = 4  # samples that are read to see how long that takes

_Part = tuple[str, HostSource]  # a source, or a host stage with all that is below it
_Wrong = tuple[str, int, Mismatch]  # how a sample was read, its index, and where it differs


@dataclasses.dataclass(frozen=True)
class _Raised:
    """Stands for a sample that could not be read."""

    error: str


class SampleReadings:
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
        return (time.perf_counter() - begun) / len(self._indices[some])

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
            return wrong.as_difference("stages", where, cause)
        return None

    def differ(self, deadline: float) -> Difference | None:
        """Read the samples again, in a different order, and alone."""
        if (difference := self._arrays_differ()) is not None:
            return difference
        while self.done < len(self._indices) and not (self.done and time.perf_counter() > deadline):
            some = slice(self.done, self.done + _TOGETHER)
            indices, keys = self._indices[some], self._keys[some]
            difference = self._blame(lambda part, i=indices, k=keys: _differs(part, i, k))
            if difference is not None:
                return difference
            self.done += len(indices)
        return None

    def differ_in_a_worker(self, executor: Processes) -> Difference | None:
        """Read the samples in a worker process."""
        indices, keys = self._indices[: self.done], self._keys[: self.done]
        difference = self._blame(lambda part: _differs_in_a_worker(part, executor, indices, keys))
        self.ways.append("in a worker process")
        return difference

    def alike(self) -> list[str]:
        """A note if all samples are equal."""
        some = slice(min(self.done, _TOGETHER))
        first, *others = _read(self._parts[0], self._indices[some], self._keys[some])
        if not others or any(compare("", first, other) for other in others):
            return []
        return [f"{some.stop} samples were read, and all are equal: does {self._parts[0][0]} look at the index?"]

    def _blame(self, differs: Callable[[_Part], _Wrong | None]) -> Difference | None:
        """The difference at the innermost part that has one; none if the whole has none."""
        outermost = differs(self._parts[-1])
        if outermost is None:
            return None
        inner = ((part, differs(part)) for part in self._parts[:-1])
        part, wrong = next(((part, wrong) for part, wrong in inner if wrong), (self._parts[-1], outermost))
        how, index, mismatch = wrong
        key = self._keys[np.argmax(self._indices == index)]
        cause = _cause(part, how, _global_generator(part, index, key))
        where = f"{part[0]}, sample {index:,} read {how}"
        return mismatch.as_difference("stages", where, cause)


def _cause(part: _Part, how: str, generator: str | None) -> str:
    name, source = part
    gives = f"{name} gives different values for the same sample when it is read {how}"
    if generator is not None:
        fix = "Use" if isinstance(source, MappedSource) else "Add"
        return (
            f"{gives}: it draws from {generator}. {fix} RandomHostMapTransform(fn); fn(sample, rng) draws from the "
            "generator it is given."
        )
    if how == "in a worker process":
        return f"{gives}. {IN_A_WORKER}"
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


def _differs_in_a_worker(part: _Part, executor: Processes, indices: np.ndarray, keys: np.ndarray) -> _Wrong | None:
    """The first sample that differs in a worker process."""
    source, spec = part[1], part[1].sample_spec
    layout = Layout((len(indices),), spec.shapes, spec.dtypes)
    with contextlib.closing(executor.open(source, layout, 0, tolerant=True)) as pool:
        real = np.ones(len(indices), bool)
        filled = pool.collect(pool.start(Request(0, indices, real, keys if source.keyed else None)))
        samples = filled.rows[0].tolist() if isinstance(spec, ObjectSpec) else _one_by_one(spec, filled.rows)
        for row, error in filled.report.failed.items():
            samples[row] = _Raised(type(error).__name__)
        return _first_wrong("in a worker process", indices, _read(part, indices, keys), enumerate(samples))


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


def calculating(stages: tuple[Transform, ...]) -> int:
    """How many stages change values in a compiled program."""
    return sum(not (stage.batches or stage.passive) for stage in stages)


def program_differs(pipeline: Pipeline, words: np.ndarray) -> Difference | None:
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
    return whole.as_difference("stages", f"{name}, step 0 made twice", f"{name} {_NOT_THE_SAME_TWICE}")


def _made_twice(pipeline: Pipeline, words: np.ndarray, rows: list[Any] | None) -> Mismatch | None:
    """Where the first batch differs if it is traced, compiled and made again."""
    made, numbers = [], PlannedSteps(pipeline.plan, words, coordinates=pipeline.coordinates).numbers(0)
    for _ in range(2):

        @jax.jit
        def batch(words: Any, numbers: Any, arrays: Any, rows: Any) -> Any:  # a new one, so that it is traced anew
            return dataclasses.replace(pipeline, arrays=arrays).planned(words, numbers, rows)

        made.append(on_host(call_and_wait(batch, words, numbers, pipeline.arrays, rows)))
    return next(iter(compare_batches(*made)), None)


def _first_rows(pipeline: Pipeline, words: np.ndarray) -> list[Any]:
    """The samples of the first batch, leaf by leaf; those that cannot be read are zeros."""
    host = pipeline.read_by(executor=None, on_error="skip item", cache=None).host
    assert host is not None
    with contextlib.closing(Reader(host, pipeline.plan)) as reader:
        return [np.array(leaf) for leaf in reader.rows(words, 0).rows]
