"""Samples as often as their weights say."""

import numpy as np
from numpy.typing import ArrayLike

from millstream.files.plan_folder import Plans, folder_of
from millstream.plan.selection import Drawn, digest_of, drawn, index_dtype, listed
from millstream.plan.weights import drawn_by
from millstream.reading.contracts import IndexedSource
from millstream.reading.executor import Executor, require_executor
from millstream.reading.view import View, view_of
from millstream.text.errors import require_bool, whole_number
from millstream.views._measure import Property, as_array, kept_tables, require_source, values_of

_MOST = (1 << 31) - 1
_ROWS = 500_000_000  # the table of that many has less than 2**31 entries, which is as far as a program can index


def weighted(
    source: IndexedSource, weights: ArrayLike, *, samples: int | None = None, replacement: bool = True
) -> View:
    """Samples drawn in proportion to their weights, anew every epoch.

    The draw is systematic: a sample whose share of an epoch is 2.3 comes twice or three times, never more or less.

    Example:
        >>> source = ms.ArraySampleSource({"x": np.arange(4)})
        >>> len(ms.views.weighted(source, [1, 1, 2, 0], samples=8))
        8

    Args:
        source: A source or a view.
        weights: A number per sample: finite, not negative, not all zero.
        samples: How many samples an epoch has; by default as many as the source.
        replacement: False for samples that come at most once in an epoch. Shares are then limited to 1.
    """
    _require_source("weighted", source)
    found = as_array("weighted", "weights", weights)
    require_bool("weighted", "replacement", replacement)
    count = len(source) if samples is None else whole_number("weighted", "samples", samples, least=1, most=_MOST)
    return view_of(source, *drawn_by("weighted", found, len(source), count, once=not replacement))


def balanced(
    source: IndexedSource,
    labels: Property,
    *,
    samples: int | None = None,
    executor: Executor | None = None,
    plans: Plans = None,
) -> View:
    """Samples of all classes equally often, drawn anew every epoch.

    Every class has its share of an epoch, rounded up or down, and so has every sample of a class. An epoch in sequence
    goes through one class after the other.

    Example:
        >>> source = ms.ArraySampleSource({"x": np.arange(6), "label": np.array([0, 0, 0, 0, 0, 1])})
        >>> loader = ms.DataLoader([ms.views.balanced(source, "label"), ms.BatchTransform(6)])
        >>> batch, mask = next(loader.iterate(loader.init_state(jax.random.key(0))))
        >>> sorted(batch["label"].tolist())
        [0, 0, 0, 1, 1, 1]

    Args:
        source: A source or a view.
        labels: The name of a field, a function of a sample, or an array with a label per sample.
        samples: How many samples an epoch has; by default as many as the source.
        executor: Where samples are looked at, if they have to be.
        plans: Where what was found is kept: a folder, or `ms.views.plans(folder)`; by default in memory.
    """
    _require_source("balanced", source)
    require_executor("balanced", executor)
    folder = folder_of("balanced", plans)
    count = len(source) if samples is None else whole_number("balanced", "samples", samples, least=1, most=_MOST)

    def make_tables() -> list[np.ndarray]:
        classes = values_of("balanced", "labels", source, labels, executor, folder)
        _, which, counts = np.unique(classes, return_inverse=True, return_counts=True)
        # The draw is exact for whatever stands together. Classes in turns could all but vanish from an epoch: every
        # fourth of samples with four classes in turns is always of the same one.
        by_class = np.argsort(which, kind="stable")
        return [by_class.astype(index_dtype(len(source))), drawn(1.0 / counts[which[by_class]], count)[1]]

    if folder is None:
        by_class, draws = ((table, digest_of(table)) for table in make_tables())
    else:
        names = [f"{count}-order", f"{count}-draws"]
        by_class, draws = kept_tables("balanced", source, folder, [labels, count], names, make_tables)
    in_order = view_of(source, *listed(by_class[0], len(source), by_class[1]))
    return view_of(in_order, Drawn(count, len(source), draws[1], "balanced"), draws[0])


def _require_source(caller: str, source: IndexedSource) -> None:
    require_source(caller, source)
    if len(source) > _ROWS:
        raise ValueError(
            f"{caller} draws from at most {_ROWS:,} samples. Got {len(source):,}. Select those with a weight first."
        )
