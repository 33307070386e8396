"""How two data sets differ: one against the other, leaf by leaf."""

import dataclasses
import html
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from millstream.inspect._cells import printable
from millstream.inspect._statistics import LeafStatistics, Statistics, statistics
from millstream.inspect._tallies import KEPT, NumberSummary
from millstream.loader.loader import DataLoader
from millstream.loader.mixed import MixedLoader
from millstream.reading.contracts import IndexedSource
from millstream.reading.executor import Executor
from millstream.text.html import html_table
from millstream.text.tables import WIDTH, text_table

# A difference is reported if it is larger than what matters (the first row) and than what chance explains. For chance
# the factors leave one in 100,000: in standard deviations of a normal distribution, of Kolmogorov and Smirnov's
# distance, and of a total variation, whose own standard deviation is 0.3 of the noise.
_SHIFT, _DISTANCE, _SHARE = 0.1, 0.05, 0.01
_NORMAL, _KOLMOGOROV, _VARIATION, _CHANCE = 4.5, 2.5, 1.5, 1e-5
_FEW = 20  # samples; of fewer, a standard deviation says too little
_LISTED = 3
_HEADER = ("leaf", "measure", "value", "limit", "result", "what it means")

Data = IndexedSource | DataLoader | MixedLoader | Statistics


@dataclasses.dataclass(frozen=True)
class DriftRow:
    """One measure of how a leaf differs. See `drift`.

    Example:
        >>> one, two = (ms.ArraySampleSource({"x": np.arange(1000) % 7 + n}) for n in (0, 1))
        >>> row = ms.inspect.drift(one, two).rows[0]
        >>> row.leaf, row.measure, row.drifted
        ('x', 'new classes', True)

    Attributes:
        leaf: Its name.
        measure: "structure", "shift", "distance", "classes", "new classes", "outside", "missing", or the same of
            "lengths".
        value: How large the difference is: 0 for none.
        limit: Above it, the difference matters and is larger than chance explains.
        text: What it means.
    """

    leaf: str
    measure: str
    value: float
    limit: float
    text: str

    @property
    def drifted(self) -> bool:
        """Whether the difference is above its limit."""
        return self.value > self.limit

    @property
    def weight(self) -> float:
        """How many times its limit the difference is."""
        return self.value / self.limit if self.limit else math.inf if self.value else 0.0


@dataclasses.dataclass(frozen=True, repr=False)
class Drift:
    """How two data sets differ; printed, a sentence and a table. See `drift`.

    Example:
        >>> source = ms.ArraySampleSource({"x": np.random.default_rng(0).normal(size=1000)})
        >>> print(ms.inspect.drift(source[:500], source[500:]).sentence)
        No leaf differs by more than chance explains: 1 leaf, 500 and 500 samples.

    Attributes:
        rows: All measures, those that matter most first.
        samples: How many samples each of the two has.
    """

    rows: tuple[DriftRow, ...]
    samples: tuple[int, int]

    @property
    def drifted(self) -> tuple[str, ...]:
        """The leaves that differ, those that differ most first."""
        return tuple(dict.fromkeys(row.leaf for row in self.rows if row.drifted))

    @property
    def sentence(self) -> str:
        """The result in a sentence."""
        leaves = len({row.leaf for row in self.rows})
        counts = f"{self.samples[0]:,} and {self.samples[1]:,} samples"
        plural = "leaf" if leaves == 1 else "leaves"
        if not self.drifted:
            return f"No leaf differs by more than chance explains: {leaves:,} {plural}, {counts}."
        most = self.rows[0]
        verb = "differs" if len(self.drifted) == 1 else "differ"
        found = f"{len(self.drifted):,} of {leaves:,} {plural} {verb}, {counts}. "
        return f"{found}{printable(most.leaf)}: {most.text}."

    def _cells(self) -> Iterator[tuple[str, ...]]:
        for row in self.rows:
            result = "differs" if row.drifted else ""
            yield printable(row.leaf), row.measure, f"{row.value:.3g}", f"{row.limit:.3g}", result, row.text

    def __str__(self) -> str:
        numbers = ("value", "limit")
        return f"{self.sentence}\n\n" + text_table(
            _HEADER, self._cells(), numbers=numbers, prose=_HEADER[5:], width=WIDTH
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<div>{html.escape(self.sentence)}</div>" + html_table(
            _HEADER, self._cells(), numbers=("value", "limit")
        )


def drift(
    a: Data,
    b: Data,
    key: jax.Array | np.ndarray | None = None,
    *,
    samples: int | None = None,
    executor: Executor | None = None,
    progress: bool = True,
) -> Drift:
    """Which leaves of two data sets differ, by how much, and whether that is more than chance: b against a.

    - **shift**: the difference of the means, in standard deviations
    - **distance**: the largest difference of the cumulated distributions (Kolmogorov and Smirnov)
    - **classes**: the share of samples that would have to change their class (total variation)
    - **new classes**: the share of the samples of b whose class a does not have
    - **outside**: the share of the numbers of b that are outside the range of a
    - **missing**: the difference of the shares of samples without a value, or of NaN among the numbers
    - **structure**: a leaf that only one of them has, or that has a different dtype or shape

    Numbers of one sample, such as its pixels, may depend on each other. So limits go by the number of samples.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> train = ms.ArraySampleSource({"x": rng.normal(size=2000), "y": rng.integers(0, 3, 2000)})
        >>> test = ms.ArraySampleSource({"x": rng.normal(size=500) + 1, "y": rng.integers(0, 3, 500)})
        >>> drift = ms.inspect.drift(train, test)
        >>> drift.drifted
        ('x',)

    Args:
        a: What is compared with, such as the data of training: a source, a loader, or their `statistics`.
        b: What is compared.
        key: For `statistics`, where they are not given.
        samples: The same.
        executor: The same; sources alone are read by it.
        progress: The same.
    """
    ours, theirs = (
        data if isinstance(data, Statistics) else _statistics(name, data, key, samples, executor, progress)
        for name, data in {"a": a, "b": b}.items()
    )
    rows = [row for name in dict.fromkeys([*ours, *theirs]) for row in _rows(name, ours, theirs)]
    rows.sort(key=lambda row: -row.weight)
    return Drift(tuple(rows), (ours.samples, theirs.samples))


def _statistics(name: str, data: Any, key: Any, samples: Any, executor: Any, progress: bool) -> Statistics:
    try:
        return statistics(data, key, samples=samples, executor=executor, progress=progress)
    except (TypeError, ValueError) as error:
        error.add_note(f"drift was looking at {name}.")
        raise


def _rows(name: str, ours: Statistics, theirs: Statistics) -> Iterator[DriftRow]:
    one, other = ours.leaves.get(name), theirs.leaves.get(name)
    if one is None or other is None:
        yield DriftRow(name, "structure", 1.0, 0.0, f"only {'b' if one is None else 'a'} has it")
        return
    changed = one.what != other.what if _is_fixed(one) or _is_fixed(other) else one.dtypes != other.dtypes
    yield DriftRow(
        name, "structure", float(changed), 0.0, f"{one.what} in a, {other.what} in b" if changed else "the same"
    )
    yield _missing(name, one, other, ours.samples, theirs.samples)
    counts = one.present, other.present
    if one.classes is not None and other.classes is not None:
        yield from _class_rows(name, one.classes, other.classes)
    elif one.numbers is not None and other.numbers is not None:
        yield from _number_rows(name, "", one.numbers, other.numbers, counts, _channels(one, other))
    if one.lengths is not None and other.lengths is not None:
        yield from _number_rows(name, " of lengths", one.lengths, other.lengths, counts, None)


def _is_fixed(leaf: LeafStatistics) -> bool:
    """Whether all samples have one shape."""
    return leaf.shapes is not None and all(low == high for low, high in leaf.shapes)


def _noise(counts: tuple[int, int]) -> float:
    """The standard deviation of a difference of two means, in that of one sample."""
    return math.sqrt(sum(1 / max(1, min(count, KEPT)) for count in counts))


def _missing(name: str, one: LeafStatistics, other: LeafStatistics, n: int, m: int) -> DriftRow:
    shares = [
        max(leaf.missing / max(count, 1), leaf.nan / max(1, leaf.nan + (leaf.numbers.count if leaf.numbers else 0)))
        for leaf, count in ((one, n), (other, m))
    ]
    apart, both = abs(shares[0] - shares[1]), (shares[0] * n + shares[1] * m) / max(n + m, 1)
    limit = max(_SHARE, _NORMAL * math.sqrt(both * (1 - both)) * _noise((n, m)))
    text = f"{shares[0]:.1%} missing in a, {shares[1]:.1%} in b"
    return DriftRow(name, "missing", apart, limit, text)


def _class_rows(name: str, one: dict[Any, int], other: dict[Any, int]) -> Iterator[DriftRow]:
    n, m = sum(one.values()), sum(other.values())
    both = dict.fromkeys([*one, *other])
    gaps = {value: other.get(value, 0) / m - one.get(value, 0) / n for value in both}
    distance = sum(map(abs, gaps.values())) / 2
    noise = math.sqrt(1 / n + 1 / m)
    # The mean of a distance that is chance, or a little more than that: a standard deviation for each class.
    mean = 0.5 * sum(math.sqrt((one.get(value, 0) + other.get(value, 0)) / (n + m)) for value in both) * noise
    most = max(gaps, key=lambda value: abs(gaps[value]))
    shares = f"{one.get(most, 0) / n:.1%} in a, {other.get(most, 0) / m:.1%} in b"
    text = f"{distance:.1%} of the samples would have to change class; most of all {most!r}: {shares}"
    yield DriftRow(name, "classes", distance, max(_DISTANCE, mean + _VARIATION * noise), text)
    new = [value for value in other if value not in one]
    share = sum(other[value] for value in new) / m
    unseen = sum(count == 1 for count in one.values()) / n  # Good and Turing's share of classes that a has not seen
    spread = (unseen + 1 / n) * 2 * (1 / n + 1 / m)
    limit = max(_SHARE, unseen + _NORMAL * math.sqrt(spread) + _NORMAL / n)
    listed = ", ".join(repr(value) for value in new[:_LISTED]) + (", ..." if len(new) > _LISTED else "")
    text = f"{share:.1%} of b are of {len(new):,} classes that a does not have: {listed}" if new else "none"
    yield DriftRow(name, "new classes", share, limit, text)


def _channels(one: LeafStatistics, other: LeafStatistics) -> list[float] | None:
    """How far the means of the channels are apart, in standard deviations."""
    if len(one.channel_mean) != len(other.channel_mean) or not one.channel_mean:
        return None
    parts = zip(one.channel_mean, other.channel_mean, one.channel_std, other.channel_std, strict=True)
    return [_shift(*part) for part in parts]


def _shift(mean: float, other_mean: float, std: float, other_std: float) -> float:
    pooled = math.sqrt((std * std + other_std * other_std) / 2)
    return (
        (other_mean - mean) / pooled
        if pooled > 0
        else 0.0
        if mean == other_mean
        else math.copysign(math.inf, other_mean - mean)
    )


def _number_rows(
    name: str,
    what: str,
    one: NumberSummary,
    other: NumberSummary,
    counts: tuple[int, int],
    channels: list[float] | None,
) -> Iterator[DriftRow]:
    noise = _noise(counts)
    shifts = [_shift(one.mean, other.mean, one.std, other.std), *(channels or [])]
    shift = max(shifts, key=abs)
    text = f"the mean is {one.mean:.4g} in a, {other.mean:.4g} in b, {abs(shift):.2f} standard deviations apart"
    limit = max(_SHIFT, _NORMAL * noise) if min(counts) >= _FEW else math.inf
    yield DriftRow(
        name, f"shift{what}", abs(shift), limit, text if limit < math.inf else f"{text}: too few samples to tell"
    )
    place, distance = _distance(one, other)
    text = f"up to {place:.4g} are {_below(one, place):.1%} of a, {_below(other, place):.1%} of b"
    yield DriftRow(name, f"distance{what}", distance, max(_DISTANCE, _KOLMOGOROV * noise), text)
    out = (other.values < one.minimum) | (other.values > one.maximum)
    share = float(other.weights[out].sum())
    text = f"{share:.1%} of b are outside the range of a, {one.minimum:.4g} to {one.maximum:.4g}"
    yield DriftRow(name, f"outside{what}", share, max(_SHARE, _outside_by_chance(counts)), text)


def _outside_by_chance(counts: tuple[int, int]) -> float:
    """The share of b that may lie outside the range of a: that k do so has the chance (k + 1) q^k at most."""
    n, m = (max(1, min(count, KEPT)) for count in counts)
    share, most = m / (n + m), 1
    while (most + 1) * share**most > _CHANCE and most <= m:
        most += 1
    return (most - 0.5) / m


def _distance(one: NumberSummary, other: NumberSummary) -> tuple[float, float]:
    """Where the cumulated distributions differ most, and by how much."""
    places = np.union1d(one.values, other.values)
    gaps = np.abs(_cumulated(one, places) - _cumulated(other, places))
    most = int(np.argmax(gaps))
    return float(places[most]), float(gaps[most])


def _cumulated(summary: NumberSummary, places: np.ndarray) -> np.ndarray:
    sums = np.concatenate([[0.0], np.cumsum(summary.weights)])
    return sums[np.searchsorted(summary.values, places, side="right")]


def _below(summary: NumberSummary, place: float) -> float:
    return float(_cumulated(summary, np.array([place]))[0])
