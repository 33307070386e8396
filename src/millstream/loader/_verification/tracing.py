"""Tracing compiled stages again, and calling the host again: a stage that gives another result is named."""

import contextlib
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from millstream.loader._verification.compare import Mismatch, compare, on_host
from millstream.loader._verification.stream import compare_batches
from millstream.pipeline.host_calls import original_errors
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.stages import stage_names
from millstream.pipeline.transform import Transform
from millstream.reading.stats import LoaderStats

_ADDRESS = re.compile(r"0x[0-9a-f]+")  # of objects that are made anew by every trace


def calculating(stages: tuple[Transform, ...]) -> list[str]:
    """The names of the stages that change values in a compiled program."""
    named = zip(stage_names(stages), stages, strict=True)
    return [name for name, stage in named if not (stage.batches or stage.passive)]


def differs_when_traced(pipeline: Pipeline, words: np.ndarray) -> tuple[str, Mismatch] | None:
    """The first stage that becomes another program when it is traced again, and where that differs. Nothing is run."""
    return _first(pipeline, lambda part: _differs_traced(part, words))


def differs_when_called(pipeline: Pipeline, words: np.ndarray) -> tuple[str, Mismatch] | None:
    """The first stage that calls the host and gives another batch when it is called again, and where that differs."""
    if "callback" not in str(_traced(pipeline, words)):
        return None
    rows = None if pipeline.host is None else _read(pipeline, words)
    return _first(pipeline, lambda part: _differs_called(part, words, rows))


def _first(pipeline: Pipeline, differs: Callable[[Pipeline], Mismatch | None]) -> tuple[str, Mismatch] | None:
    """The first stage up to which a pipeline differs."""
    # The order takes longer to trace and to compile than all the rest, and is not what is looked at.
    pipeline = dataclasses.replace(pipeline, plan=dataclasses.replace(pipeline.plan, ordering="sequential"))
    whole, names = differs(pipeline), stage_names(pipeline.stages)
    if whole is None:
        return None
    for count, stage in enumerate(pipeline.stages, 1):
        if not stage.batches and not stage.passive:
            later = tuple(one for one in pipeline.stages[count:] if one.batches)
            wrong = differs(dataclasses.replace(pipeline, stages=(*pipeline.stages[:count], *later)))
            if wrong is not None:
                return names[count - 1], wrong
    return "the stages together", whole


def _traced(pipeline: Pipeline, words: np.ndarray) -> Any:
    def batch(words: Any, step: Any, arrays: Any, rows: Any) -> Any:  # a new function, so that it is traced anew
        return dataclasses.replace(pipeline, arrays=arrays).at(words, step, rows=rows)

    rows = None if pipeline.host is None else pipeline.row_specs()
    return jax.make_jaxpr(batch)(words, np.uint32(0), pipeline.arrays, rows)


def _differs_traced(pipeline: Pipeline, words: np.ndarray) -> Mismatch | None:
    first, second = _traced(pipeline, words), _traced(pipeline, words)
    wrong = compare("a constant", on_host(first.consts), on_host(second.consts))
    if wrong:
        return wrong[0]
    ours, theirs = (_ADDRESS.sub("", str(traced)).splitlines() for traced in (first, second))
    lines = [(one.strip(), other.strip()) for one, other in zip(ours, theirs, strict=False) if one != other]
    return Mismatch("the program", (), *lines[0]) if lines else None


def _differs_called(pipeline: Pipeline, words: np.ndarray, rows: list[Any] | None) -> Mismatch | None:
    @jax.jit
    def batch(words: Any, arrays: Any, rows: Any) -> Any:
        return dataclasses.replace(pipeline, arrays=arrays).at(words, np.uint32(0), rows=rows)

    with original_errors():
        first, second = (on_host(jax.block_until_ready(batch(words, pipeline.arrays, rows))) for _ in range(2))
    return next(iter(compare_batches(first, second)), None)


def _read(pipeline: Pipeline, words: np.ndarray) -> list[Any]:
    """The samples of the first batch, leaf by leaf; those that cannot be read are zeros."""
    host = pipeline.read_by(executor=None, on_error="skip item", cache=None).host
    assert host is not None
    with contextlib.closing(host.open(pipeline.plan, LoaderStats())) as reader:
        return [np.array(leaf) for leaf in reader.rows(words, 0).rows]
