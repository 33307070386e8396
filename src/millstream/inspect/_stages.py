"""Whether stages are deterministic: the same samples read in several ways, the same batch made by two programs."""

import contextlib
import dataclasses
import random
import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millstream.inspect._compare import Mismatch, compare, compare_batches, on_host
from millstream.inspect._explain import calculating
from millstream.inspect._verification import Difference, VerificationRow
from millstream.pipeline.compose import IndexedPipeline
from millstream.pipeline.host_calls import call_and_wait
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.rows import take
from millstream.pipeline.stages import stage_names
from millstream.plan.planned import sample_keys
from millstream.reading.derived_sources import MappedSource, named_parts
from millstream.reading.host_source import HostSource, as_host_source
from millstream.reading.reader import Reader
from millstream.reading.samples import ObjectSpec

_SAMPLES = 64  # that are read again
_TOGETHER = 16  # samples that are read in one call
_ALONE = 4  # one of this many samples is read alone
_WAYS = ("again", "in a different order", "alone")

_NOT_THE_SAME_TWICE = (
    "gives different values when the same batch is made again. What Python computes is fixed when a stage is traced: "
    "for random numbers use RandomMapTransform(fn), where fn(value, mask, key) is given a key. A callback must depend "
    "on its arguments alone."
)

_Part = tuple[str, HostSource]  # a source, or a host stage with all that is below it
_Wrong = tuple[str, int, Mismatch]  # how a sample was read, its index, and where it differs


def check_stages(pipeline: IndexedPipeline, words: np.ndarray, deadline: float) -> tuple[VerificationRow, float]:
    """Read some samples again and again, and make a batch twice; also how many seconds a sample takes, about."""
    assert pipeline.source is not None
    parts, count = named_parts(as_host_source(pipeline.source)), min(_SAMPLES, pipeline.plan.samples)
    positions, epochs = (
        np.random.default_rng(words).choice(pipeline.plan.samples, count, replace=False),
        np.zeros(count, np.uint32),
    )
    keys = sample_keys(words, epochs, positions)
    indices = pipeline.plan.indices(np, words, epochs, positions).astype(np.int64)
    done, begun, difference = 0, time.perf_counter(), _arrays_differ(pipeline, indices[:_TOGETHER])
    while difference is None and done < count and not (done and time.perf_counter() > deadline):
        some = slice(done, done + _TOGETHER)
        difference = _samples_differ(parts, indices[some], keys[some])
        done += len(indices[some])
    seconds = (time.perf_counter() - begun) / (len(_WAYS) * max(1, done))
    notes = _all_alike(parts[0], indices[:done], keys) if difference is None else ()
    compiled = 0 if pipeline.objects is not None else calculating(pipeline.stages)
    if difference is None and compiled:
        difference = _programs_differ(pipeline.buckets[-1], words)
    if difference is not None:
        return VerificationRow("stages", "failed", "not the same twice", difference, notes), seconds
    made = f"; a batch made twice by {compiled} compiled stage{'s' if compiled > 1 else ''}" if compiled else ""
    ways = ", ".join(_WAYS[:1] if parts[-1][1].whole_batches else _WAYS)
    evidence = f"{done} samples read {ways}{made}: equal bit for bit"
    return VerificationRow("stages", "ok", evidence, None, notes), seconds


def _arrays_differ(pipeline: IndexedPipeline, indices: np.ndarray) -> Difference | None:
    """Where the arrays of a source are not what it reads."""
    source = pipeline.source
    if not isinstance(pipeline, Pipeline) or pipeline.host is not None or source is None:
        return None
    gathered = take(pipeline.arrays, jnp.asarray(indices, np.uint32), apart=False)
    for wrong in compare("samples", on_host(gathered), on_host(source.read(indices))):
        name, index = type(source).__name__, indices[wrong.place[0] if wrong.place else 0]
        where = f"{name}, sample {index:,} of its arrays and as it is read"
        cause = f"{name} must give the same samples by `arrays` and by `read`: compiled programs use either."
        return Difference.of("stages", where, wrong, cause)
    return None


def _samples_differ(parts: list[_Part], indices: np.ndarray, keys: np.ndarray) -> Difference | None:
    """The difference at the innermost part that has one; none if the whole has none."""
    outermost = _first_wrong(parts[-1], indices, keys)
    if outermost is None:
        return None
    inner = ((part, wrong) for part in parts[:-1] if (wrong := _first_wrong(part, indices, keys)) is not None)
    part, (how, index, mismatch) = next(inner, (parts[-1], outermost))
    cause = _cause(part, how, _global_generator(part, index, keys[np.argmax(indices == index)]))
    return Difference.of("stages", f"{part[0]}, sample {index:,} read {how}", mismatch, cause)


def _first_wrong(part: _Part, indices: np.ndarray, keys: np.ndarray) -> _Wrong | None:
    """The first sample that differs when it is read again, in a different order, or alone."""
    first = _read(part, indices, keys)

    def differing(how: str, rows: Iterable[tuple[int, Any]]) -> Iterable[_Wrong]:
        for row, sample in rows:
            yield from ((how, int(indices[row]), mismatch) for mismatch in compare("sample", first[row], sample))

    def readings() -> Iterable[_Wrong]:
        yield from differing(_WAYS[0], enumerate(_read(part, indices, keys)))
        if part[1].whole_batches:  # such a batch is made from its samples together, in their order
            return
        back = np.arange(len(indices))[::-1]
        yield from differing(_WAYS[1], zip(back.tolist(), _read(part, indices[back], keys[back]), strict=True))
        for row in range(0, len(indices), _ALONE):
            yield from differing(_WAYS[2], [(row, _read(part, indices[row : row + 1], keys[row : row + 1])[0])])

    return next(iter(readings()), None)


def _read(part: _Part, indices: np.ndarray, keys: np.ndarray) -> list[Any]:
    """Samples that are read together; or one by one, if one of them cannot be read."""
    source = part[1]
    try:
        samples = source.read_keyed(indices, keys if source.keyed else None)
    except Exception as error:
        if len(indices) == 1:
            return [f"raises {type(error).__name__}"]
        return [_read(part, indices[row : row + 1], keys[row : row + 1])[0] for row in range(len(indices))]
    if isinstance(source.sample_spec, ObjectSpec):
        return samples
    return [jax.tree.map(lambda leaf, row=row: np.asarray(leaf[row]), samples) for row in range(len(indices))]


def _all_alike(part: _Part, indices: np.ndarray, keys: np.ndarray) -> tuple[str, ...]:
    """A note if all samples are equal."""
    some = slice(min(len(indices), _TOGETHER))
    first, *others = _read(part, indices[some], keys[some])
    if not others or any(compare("", first, other) for other in others):
        return ()
    return (f"{some.stop} samples were read, and all are equal: does {part[0]} look at the index?",)


def _cause(part: _Part, how: str, generator: str | None) -> str:
    name, source = part
    gives = f"{name} gives different values for the same sample when it is read {how}"
    if generator is not None:
        fix = "Use" if isinstance(source, MappedSource) else "Add"
        return (
            f"{gives}: it draws from {generator}. {fix} RandomHostMapTransform(fn); fn(sample, rng) draws from the "
            "generator it is given."
        )
    if how == _WAYS[0]:
        return (
            f"{gives}: it depends on something else, such as a counter, the time or a random generator of its own. For "
            "random numbers use RandomHostMapTransform(fn), where fn(sample, rng) is given a generator."
        )
    return f"{gives}: row i of what is read must be sample indices[i], whatever is read before it or beside it."


def _global_generator(part: _Part, index: int, key: np.ndarray) -> str | None:
    """The global random generator that reading a sample draws from, if it does."""
    before = random.getstate(), np.random.get_state(legacy=False)
    _read(part, np.array([index]), key[None])
    if before[0] != random.getstate():
        return "Python's random module"
    changed = compare("", before[1], np.random.get_state(legacy=False))
    return "NumPy's global random generator (np.random)" if changed else None


def _programs_differ(pipeline: Pipeline, words: np.ndarray) -> Difference | None:
    """Make the first batch by two programs, and name the first compiled stage that differs."""
    rows = None if pipeline.host is None else _first_rows(pipeline, words)
    wrong, name = _make_twice(pipeline, words, rows), "the stages together"
    if wrong is None:
        return None
    for count, stage in enumerate(pipeline.stages, 1):
        if not stage.batches and not stage.passive:
            later = tuple(one for one in pipeline.stages[count:] if one.batches)
            part = dataclasses.replace(pipeline, stages=(*pipeline.stages[:count], *later))
            if (first := _make_twice(part, words, rows)) is not None:
                wrong, name = first, stage_names(pipeline.stages)[count - 1]
                break
    return Difference.of("stages", f"{name}, step 0 made twice", wrong, f"{name} {_NOT_THE_SAME_TWICE}")


def _make_twice(pipeline: Pipeline, words: np.ndarray, rows: list[Any] | None) -> Mismatch | None:
    """Where the first batch differs if it is traced, compiled and made again."""
    batches, numbers = [], pipeline.planned_steps(words).numbers(0)
    for _ in range(2):

        @jax.jit
        def batch(words: Any, numbers: Any, arrays: Any, rows: Any) -> Any:  # a new one, so that it is traced again
            return dataclasses.replace(pipeline, arrays=arrays).planned(words, numbers, rows)

        batches.append(on_host(call_and_wait(batch, words, numbers, pipeline.arrays, rows)))
    return next(iter(compare_batches(*batches)), None)


def _first_rows(pipeline: Pipeline, words: np.ndarray) -> list[Any]:
    """The samples of the first batch, leaf by leaf; those that cannot be read are zeros."""
    host = pipeline.read_by(executor=None, on_error="skip item", cache=None).host
    assert host is not None
    with contextlib.closing(Reader(host, pipeline.plan)) as reader:
        return [np.array(leaf) for leaf in reader.rows(words, 0).rows]
