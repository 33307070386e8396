"""Stages are deterministic: the same samples read in several ways, the same batch made by two programs."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from millstream.loader._verification.compare import compare, on_host
from millstream.loader._verification.draws import iterating
from millstream.loader._verification.pace import Pace
from millstream.loader._verification.reading import IN_A_WORKER, Level, OtherReading, drawn_globally, levels_of
from millstream.loader._verification.result import Difference, VerificationRow
from millstream.loader._verification.stream import compare_batches
from millstream.loader._verification.tracing import calculating, differs_when_called, differs_when_traced
from millstream.pipeline.pipeline import Pipeline
from millstream.plan.planned import sample_keys
from millstream.reading.derived_sources import MappedSource
from millstream.reading.processes import Processes

if TYPE_CHECKING:
    from millstream.loader.loader import DataLoader

_CHECK = "stages"
_SAMPLES = 64
_TOGETHER = 16  # samples that are read in one go
_DRAWN = 4  # values of a stream


def check_stages(pipeline: Pipeline, words: np.ndarray, executor: Processes | None, pace: Pace) -> VerificationRow:
    """Read some samples again and again, and make a batch twice.

    Args:
        pipeline: The pipeline, over no mesh.
        words: The run's key.
        executor: Worker processes to read in; None to leave that out.
        pace: How much time there is.
    """
    count = min(_SAMPLES, pipeline.plan.samples)
    indices = np.random.default_rng(words).choice(pipeline.plan.samples, count, replace=False)
    reading = _Reading(levels_of(pipeline.source), indices, sample_keys(words, np.zeros(count, np.uint32), indices))
    difference = _other_arrays(pipeline, indices[:_TOGETHER]) or reading.again(pace)
    notes, ways = reading.alike() if difference is None else [], ["again", *reading.other_ways]
    if difference is None and executor is not None:
        with contextlib.suppress(Exception):  # why there can be no workers is for the check of the executors to say
            difference = reading.in_a_worker(executor)
            ways.append("in a worker process")
    stages = [] if pipeline.objects is not None else calculating(pipeline.stages)
    if difference is None and stages:
        difference = _run_again(pipeline, words)
    if difference is not None:
        return VerificationRow(_CHECK, "failed", "not the same twice", difference, tuple(notes))
    anew = f"; {len(stages)} compiled stage{'s' if len(stages) > 1 else ''} traced again" if stages else ""
    return VerificationRow(
        _CHECK, "ok", f"{reading.done} samples read {', '.join(ways)}{anew}: equal bit for bit", None, tuple(notes)
    )


def _other_arrays(pipeline: Pipeline, indices: np.ndarray) -> Difference | None:
    """Where the arrays of a source are not what it reads."""
    if pipeline.host is not None or pipeline.source is None:
        return None
    name, gathered = type(pipeline.source).__name__, jax.tree.map(lambda leaf: leaf[indices], pipeline.arrays)
    for wrong in compare("samples", on_host(gathered), on_host(pipeline.source.read(indices))):
        where = (
            f"{name}, sample {indices[wrong.place[0]] if wrong.place else indices[0]:,} of its arrays and as it is read"
        )
        cause = (
            f"{name} must give the same samples by `arrays` and by `read`: compiled programs use the one or the other."
        )
        return Difference(_CHECK, where, wrong.shown, wrong.expected, wrong.found, cause)
    return None


class _Reading:
    """Reads some samples in several ways, as the outermost level gives them; if they differ, level by level.

    Args:
        levels: A source and its host stages, innermost first.
        indices: Which samples.
        keys: The key of each.
    """

    def __init__(self, levels: list[Level], indices: np.ndarray, keys: np.ndarray) -> None:
        self._levels, self._indices, self._keys = levels, indices, keys
        self.done = 0

    @property
    def other_ways(self) -> list[str]:
        """How else `again` reads. A batch that a function makes of its samples is made of all, in their order."""
        return [] if self._levels[-1].source.whole_batches else ["in another order", "alone"]

    def again(self, pace: Pace) -> Difference | None:
        """Read them again, in another order, and alone."""
        while self.done < len(self._indices) and not (self.done and pace.is_over):
            part = slice(self.done, self.done + _TOGETHER)
            indices, keys = self._indices[part], self._keys[part]
            difference = self._blame(lambda level, i=indices, k=keys: level.differs(i, k))
            if difference is not None:
                return difference
            self.done += len(indices)
            pace.show("sample", self.done, len(self._indices))
        return None

    def in_a_worker(self, executor: Processes) -> Difference | None:
        """Read them in a worker process."""
        indices, keys = self._indices[: self.done], self._keys[: self.done]
        return self._blame(lambda level: level.differs_in_a_worker(executor, indices, keys))

    def alike(self) -> list[str]:
        """That all samples are one and the same, if they are."""
        some = slice(min(self.done, _TOGETHER))
        first, *others = self._levels[0].read(self._indices[some], self._keys[some])
        if not others or any(compare("", first, other) for other in others):
            return []
        return [f"{some.stop} samples were read, and all are equal: does {self._levels[0].name} look at the index?"]

    def _blame(self, differs: Callable[[Level], OtherReading | None]) -> Difference | None:
        """The difference at the innermost level that has one."""
        *inner, outermost = self._levels
        wrong = differs(outermost)
        if wrong is None:
            return None
        for level in inner:
            deeper = differs(level)
            if deeper is not None:
                return self._told(level, deeper)
        return self._told(outermost, wrong)

    def _told(self, level: Level, wrong: OtherReading) -> Difference:
        where = f"{level.name}, sample {wrong.index:,} read {wrong.how}"
        key = self._keys[np.argmax(self._indices == wrong.index)]
        cause, mismatch = _cause(level, wrong, drawn_globally(level, wrong.index, key)), wrong.mismatch
        return Difference(_CHECK, where, mismatch.shown, mismatch.expected, mismatch.found, cause)


def _cause(level: Level, wrong: OtherReading, generator: str | None) -> str:
    gives = f"{level.name} gives other values for the same sample when it is read {wrong.how}"
    if generator is not None:
        is_stage = isinstance(level.source, MappedSource)
        mend = "Use RandomHostMapTransform(fn)" if is_stage else "Put a RandomHostMapTransform(fn) behind it"
        return f"{gives}: it draws from {generator}. {mend}; fn(sample, rng) draws from the generator it is given."
    if wrong.how == "in a worker process":
        return f"{gives}. {IN_A_WORKER}"
    if wrong.how == "again":
        return (
            f"{gives}: it depends on something else, such as a counter, the time or a random generator of its own. For "
            "random numbers use RandomHostMapTransform(fn), where fn(sample, rng) is given a generator."
        )
    return f"{gives}: row i of what is read must be sample indices[i], whatever is read before it or beside it."


def _run_again(pipeline: Pipeline, words: np.ndarray) -> Difference | None:
    """Trace the compiled stages again, and call those on the host again."""
    found, how = differs_when_traced(pipeline, words), "traced twice"
    cause = (
        "{} becomes another program when it is traced again: what Python computes is fixed when a program is compiled. "
        "For random numbers use RandomMapTransform(fn), where fn(value, mask, key) is given a key."
    )
    if found is None:
        found, how = differs_when_called(pipeline, words), "step 0 made twice"
        cause = (
            "{} gives other values when it is called again with the same batch. Make it depend on its arguments alone."
        )
    if found is None:
        return None
    name, wrong = found
    return Difference(_CHECK, f"{name}, {how}", wrong.shown, wrong.expected, wrong.found, cause.format(name))


def check_stream(loader: "DataLoader", key: Any) -> VerificationRow:
    """Draw the first values of a stream twice, with the same key."""
    count = min(_DRAWN, loader.steps_per_epoch)
    with (
        contextlib.closing(iterating(loader.replace, key, count)) as first,
        contextlib.closing(iterating(loader.replace, key, count)) as second,
    ):
        for one, other in zip(first, second, strict=True):
            for wrong in compare_batches(on_host((one.value, one.mask)), on_host((other.value, other.mask))):
                cause = "The stream gives other values for the same key: keep all that changes in its state."
                where = f"step {one.step} drawn twice"
                difference = Difference(_CHECK, where, wrong.shown, wrong.expected, wrong.found, cause)
                return VerificationRow(_CHECK, "failed", "not the same twice", difference)
    return VerificationRow(_CHECK, "ok", f"the first {count} values of a stream drawn twice: equal bit for bit")
