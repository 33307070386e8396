"""Some of the samples of a source, or all of them several times."""

from collections.abc import Callable, Sequence

import numpy as np

from millstream.files.plan_folder import Plans, folder_of
from millstream.pipeline.pipeline import most_samples
from millstream.plan.selection import Repeated, listed
from millstream.reading.contracts import IndexedSource, PyTree
from millstream.reading.executor import Executor, require_executor
from millstream.reading.view import View, as_positions, view_of
from millstream.text.errors import function_name, whole_number
from millstream.views._measure import kept_positions, require_source


def select(
    source: IndexedSource,
    chosen: Callable[[PyTree], bool] | Sequence[int] | Sequence[bool] | np.ndarray,
    *,
    executor: Executor | None = None,
    plans: Plans = None,
) -> View:
    """The samples that a predicate keeps, or those at the given indices, in that order.

    A predicate is called once for every sample, when the view is made; afterwards the view is a table of indices. With
    `plans`, the table is kept in a file, and later runs do not call the predicate.

    Example:
        >>> source = ms.ArraySampleSource({"x": np.arange(10)})
        >>> len(ms.views.select(source, lambda sample: sample["x"] % 2 == 0))
        5

    Args:
        source: A source or a view.
        chosen: A function from a sample, as functions on the host get it, to a bool; an array of bools, one per sample;
            or an array of indices, which may repeat.
        executor: Where a predicate runs, such as `ms.Processes(4)`; by default in threads. What takes less than a
            second is done in the calling thread.
        plans: Where the table of a predicate is kept: a folder, or `ms.views.plans(folder)`; by default in memory.
    """
    require_source("select", source)
    require_executor("select", executor)
    folder = folder_of("select", plans)
    if not callable(chosen):
        return view_of(source, *listed(as_positions("select", chosen, len(source)), len(source)))
    kept, digest = kept_positions(f"select({function_name(chosen)})", source, chosen, executor, folder)
    return view_of(source, *listed(kept, len(source), digest))


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
    most = most_samples(source)
    if len(source) * count > most:
        raise ValueError(
            f"repeat: {count:,} times {len(source):,} samples are more than a view of them can have, {most:,}. Repeat "
            "a part of them, or run more epochs."
        )
    return view_of(source, Repeated(len(source), count))
