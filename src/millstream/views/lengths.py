"""Batches of samples of similar length."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from millstream.files.plan_folder import Plans
from millstream.pipeline.bucketed import BucketedPipeline
from millstream.pipeline.pipeline import MAX_IN_GRAPH
from millstream.pipeline.transform import Transform
from millstream.plan.bucket_plan import bucket_plan
from millstream.plan.selection import listed
from millstream.reading.contracts import IndexedSource
from millstream.reading.executor import Executor, require_executor
from millstream.reading.host_source import as_host_source
from millstream.reading.read_config import ReadConfig
from millstream.reading.view import View, view_of
from millstream.text.errors import describe_value, require_bool, require_choice, require_int, table, whole_number
from millstream.views._measure import Property, lengths_of, require_source

_CANDIDATES = 512  # lengths that are considered where buckets are chosen


def buckets(
    source: IndexedSource,
    by: Property,
    lengths: Sequence[int] | int,
    *,
    batch_size: int | Sequence[int] | None = None,
    tokens_per_batch: int | None = None,
    multiple_of: int = 1,
    too_long: Literal["raise", "cut", "drop"] = "raise",
    drop_last: bool = False,
    executor: Executor | None = None,
    plans: Plans = None,
) -> BucketedPipeline:
    """Batches of samples of similar length: each batch comes from one bucket, and is padded to its length alone.

    A sample is in the first bucket that is long enough for it. Put a `PadTransform` after this, and no
    `BatchTransform`. Which bucket makes which batch is part of the plan, so any step is found alone, and every sample
    comes once in an epoch. A step that is compiled is compiled once for each bucket.

    Example:
        >>> source = ms.DatasetSource([{"ids": list(range(n))} for n in (1, 7, 2, 8, 3, 1)])
        >>> view = ms.views.buckets(source, "ids", (4, 8), batch_size=2)
        >>> loader = ms.DataLoader([view, ms.PadTransform({"ids": 0})])
        >>> loader.steps_per_epoch, [spec["ids"].shape for spec in loader.element_specs()]
        (3, [(2, 4), (2, 8)])

    Args:
        source: A source or a view.
        by: What is long: the name of a field, a function that gives the length of a sample, or an array with a length
            for each.
        lengths: The lengths of the buckets, or how many there are: they are then chosen so that little is padded.
        batch_size: Rows of a batch: a number, or one for each bucket.
        tokens_per_batch: In place of it: as many rows as fit into that many places, rows times length.
        multiple_of: What the rows of `tokens_per_batch` are a multiple of, such as the number of devices.
        too_long: What becomes of samples longer than the last bucket: "raise" refuses them, "cut" puts them into the
            last bucket, for a `PadTransform` that cuts them, and "drop" leaves them out.
        drop_last: Leave out the samples that do not fill a batch at the end of an epoch, in each bucket. By default
            that batch is padded with rows whose mask is False.
        executor: Where lengths are measured, if they have to be.
        plans: Where they are kept: a folder, or `ms.views.plans(folder)`; by default in memory.
    """
    require_source("buckets", source)
    require_executor("buckets", executor)
    require_choice("buckets", "too_long", too_long, ("raise", "cut", "drop"))
    require_bool("buckets", "drop_last", drop_last)
    if isinstance(source, View) and source.selection.is_keyed:
        raise TypeError(f"buckets: {source!r} differs from epoch to epoch. Put its source into buckets.")
    found = lengths_of("buckets", "by", source, by, executor, plans)
    bounds = _bounds(lengths, found)
    sizes = _sizes(bounds, batch_size, tokens_per_batch, multiple_of)
    which = np.searchsorted(bounds, found, side="left")
    _treat_longer(which, found, bounds, too_long)
    counts = np.bincount(which, minlength=len(bounds) + 1)[: len(bounds)]
    used = np.flatnonzero(counts)
    if not len(used):
        raise ValueError(
            f"buckets: no sample has a length of at most {bounds[-1]:,}. The shortest has {found.min():,}."
        )
    if drop_last:
        _require_batches(bounds[used], counts[used], sizes[used])
    order = np.argsort(which, kind="stable")[: counts.sum()]
    view = view_of(source, *listed(order, len(source)))
    plan = bucket_plan(
        tuple(zip(counts[used].tolist(), sizes[used].tolist(), strict=True)),
        source.ordering,
        "drop" if drop_last else "pad",
        view.selection,
    )
    kept = np.minimum(found[order], bounds[which[order]])
    places = sum(
        bucket.steps_per_epoch * bucket.axes[0] * int(length)
        for bucket, length in zip(plan.buckets, bounds[used], strict=True)
    )
    stage = _Bucketing(tuple(bounds[used].tolist()), tuple(sizes[used].tolist()))
    host = ReadConfig(as_host_source(view.source))
    return BucketedPipeline(plan, stage.lengths, float(kept.sum()) / places, view.source, host, (stage,))


@dataclasses.dataclass(frozen=True)
class _Bucketing(Transform):
    """The stage that makes batches of buckets."""

    batches: ClassVar[bool] = True

    lengths: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        return "buckets"

    def __repr__(self) -> str:
        return f"buckets({', '.join(map(str, self.lengths))})" if len(self.lengths) <= 5 else "buckets"


def _bounds(lengths: Any, found: np.ndarray) -> np.ndarray:
    """The lengths of the buckets, rising."""
    if isinstance(lengths, int | np.integer) and not isinstance(lengths, bool):
        require_int("buckets", "lengths", lengths, least=1)
        return _best_bounds(found, int(lengths))
    given = np.asarray(lengths) if isinstance(lengths, Sequence | np.ndarray) else np.array(None)
    if given.ndim != 1 or given.dtype.kind not in "iu" or not len(given) or given.min() < 1:
        raise ValueError(
            "buckets needs lengths to be whole numbers above zero, such as (64, 128, 512), or how many buckets there "
            f"are. Got {describe_value(lengths)}."
        )
    if (np.diff(given) <= 0).any():
        raise ValueError(f"buckets needs lengths that rise. Got {describe_value(lengths)}.")
    return given.astype(np.int64)


def _best_bounds(found: np.ndarray, count: int) -> np.ndarray:
    """The lengths of that many buckets that pad least, out of a few hundred quantiles of what was found."""
    ends, numbers = np.unique(np.maximum(found, 1), return_counts=True)
    upto = np.cumsum(numbers)
    if len(ends) > _CANDIDATES:
        chosen = np.unique(np.searchsorted(upto, np.linspace(0, upto[-1], _CANDIDATES + 1)[1:]))
        ends, upto = ends[chosen], upto[chosen]
    # best[j]: the fewest places for all samples up to the j-th length, with a bucket that ends there.
    best, choices = ends * upto, []
    for _ in range(min(count, len(ends)) - 1):
        # The last bucket reaches from after i to j, and costs its length for each of its samples; i = j adds none.
        costs = best[:, None] + ends * (upto - upto[:, None])
        costs[np.tril_indices(len(ends), -1)] = np.iinfo(np.int64).max
        choices.append(np.argmin(costs, axis=0))
        best = np.min(costs, axis=0)
    bounds = [len(ends) - 1]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return ends[np.unique(bounds)]


def _sizes(bounds: np.ndarray, batch_size: Any, tokens: Any, multiple_of: Any) -> np.ndarray:
    """The rows of a batch of each bucket."""
    whole_number("buckets", "multiple_of", multiple_of, least=1, most=MAX_IN_GRAPH)
    if (batch_size is None) == (tokens is None):
        raise ValueError("buckets needs either batch_size= or tokens_per_batch=.")
    if tokens is not None:
        whole_number("buckets", "tokens_per_batch", tokens, least=1, most=MAX_IN_GRAPH)
        sizes = tokens // bounds // multiple_of * multiple_of
        if not sizes.all():
            raise ValueError(
                f"buckets with tokens_per_batch={tokens:,} has no room for {multiple_of} of length {bounds[-1]:,}. "
                f"Pass at least {multiple_of * int(bounds[-1]):,}."
            )
        return sizes
    if multiple_of != 1:
        raise ValueError("buckets takes multiple_of= with tokens_per_batch= alone: batch_size= says the rows itself.")
    if isinstance(batch_size, Sequence | np.ndarray) and not isinstance(batch_size, str):
        if len(batch_size) != len(bounds):
            raise ValueError(
                f"buckets needs a batch_size for each length. Got {len(batch_size)} for {len(bounds)} lengths."
            )
        each = list(batch_size)
    else:
        each = [batch_size] * len(bounds)
    return np.array([whole_number("buckets", "batch_size", size, least=1, most=MAX_IN_GRAPH) for size in each])


def _treat_longer(which: np.ndarray, found: np.ndarray, bounds: np.ndarray, too_long: str) -> None:
    longer = which == len(bounds)
    if too_long == "cut":
        which[longer] = len(bounds) - 1
    elif too_long == "raise" and longer.any():
        raise ValueError(
            f"buckets: {np.count_nonzero(longer):,} of {len(found):,} samples are longer than the last bucket, "
            f"{bounds[-1]:,}; the longest has {found.max():,}. Add a bucket, or pass too_long='cut', with "
            "PadTransform(..., too_long='cut end'), or too_long='drop'."
        )


def _require_batches(bounds: np.ndarray, counts: np.ndarray, sizes: np.ndarray) -> None:
    small = counts < sizes
    if small.any():
        rows = [
            (f"bucket {length:,}", f"{count:,} samples, batches of {size:,}")
            for length, count, size in zip(bounds[small], counts[small], sizes[small], strict=True)
        ]
        raise ValueError(f"buckets with drop_last=True would drop all samples of:\n{table(rows)}\nLeave drop_last out.")
