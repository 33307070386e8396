"""Some of the samples of a source, or all of them several times."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from millstream.pipeline.pipeline import MAX_IN_GRAPH
from millstream.plan.selection import Repeated, listed
from millstream.reading.contracts import IndexedSource, PyTree
from millstream.reading.executor import Executor
from millstream.reading.view import View, as_positions, view_of
from millstream.text.errors import describe_value, function_name, whole_number
from millstream.views._measure import measure, require_executor, require_source


def select(
    source: IndexedSource,
    chosen: Callable[[PyTree], bool] | Sequence[int] | Sequence[bool] | np.ndarray,
    *,
    executor: Executor | None = None,
) -> View:
    """The samples that a predicate keeps, or those at the given indices, in that order.

    A predicate is called once for every sample, when the view is made; afterwards the view is a table of indices.

    Example:
        >>> source = ms.ArraySampleSource({"x": np.arange(10)})
        >>> len(ms.views.select(source, lambda sample: sample["x"] % 2 == 0))
        5

    Args:
        source: A source or a view.
        chosen: A function from a sample, as functions on the host get it, to a bool; an array of bools, one per sample;
            or an array of indices, which may repeat.
        executor: Where a predicate runs, such as `ms.Processes(4)`; by default in threads.
    """
    require_source("select", source)
    require_executor("select", executor)
    if not callable(chosen):
        return view_of(source, *listed(as_positions("select", chosen, len(source)), len(source)))
    name = f"select({function_name(chosen)})"
    kept = np.flatnonzero(measure(name, source, _Predicate(chosen, name), executor))
    if not len(kept):
        raise ValueError(f"{name} kept none of the {len(source):,} samples. A view needs at least one.")
    return view_of(source, *listed(kept, len(source)))


def repeat(source: IndexedSource, times: int) -> View:
    """All samples `times` times in every epoch. Random stages treat each repetition differently.

    Example:
        >>> len(ms.views.repeat(ms.ArraySampleSource({"x": np.arange(10)}), 3))
        30

    Args:
        source: A source or a view.
        times: How many times.
    """
    require_source("repeat", source)
    count = whole_number("repeat", "times", times, least=1)
    if len(source) * count > MAX_IN_GRAPH:
        raise ValueError(
            f"repeat: {count:,} times {len(source):,} samples are more than a view can have, {MAX_IN_GRAPH:,}. Repeat "
            "a part of them, or run more epochs."
        )
    return view_of(source, Repeated(len(source), count))


@dataclasses.dataclass(frozen=True)
class _Predicate:
    """A user's predicate, whose answer must be a bool."""

    fn: Callable[[PyTree], Any]
    name: str

    def __call__(self, sample: PyTree) -> np.bool_:
        kept = self.fn(sample)
        if isinstance(kept, bool | np.bool_):
            return np.bool_(kept)
        array = np.asarray(kept)
        if array.shape != () or array.dtype != bool:
            raise TypeError(f"{self.name} must return True or False. Got {describe_value(kept)}.")
        return np.bool_(array)
