"""Counting numbers in one pass: exact sums of integers, stable moments of floats, and quantiles."""

import dataclasses
import fractions
import functools
import math

import numpy as np

QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
KEPT = 1 << 14  # values that quantiles are made of; they are exact up to this many
_NARROW = 1 << 31  # squares of integers below it are added in parts that cannot overflow


@dataclasses.dataclass(frozen=True, eq=False)
class NumberSummary:
    """The distribution of some numbers. NaN and infinite ones do not count.

    Example:
        >>> source = ms.ArraySampleSource({"x": np.arange(5)})
        >>> summary = ms.inspect.statistics(source)["x"].numbers
        >>> summary.mean, summary.maximum, summary.quantiles[0.5]
        (2.0, 4, 2.0)

    Attributes:
        count: How many there are.
        minimum: The lowest.
        maximum: The highest.
        mean: Their mean; of integers it is exact, and then rounded once.
        std: Their standard deviation, of all of them as they are (divided by n).
        quantiles: By share: 0.01, 0.25, 0.5, 0.75 and 0.99.
        exact: Whether quantiles are exact. If not, they are those of 16,384 of the numbers, chosen at random.
        values: The numbers that quantiles are made of, in rising order.
        weights: How often each of them was counted; they add up to 1.
    """

    count: int
    minimum: float
    maximum: float
    mean: float
    std: float
    quantiles: dict[float, float]
    exact: bool
    values: np.ndarray = dataclasses.field(repr=False)
    weights: np.ndarray = dataclasses.field(repr=False)


class NumberTally:
    """Counts numbers in columns of their own, such as the channels of an image.

    Args:
        seed: Of the choice of values that are kept; with the same one, the same values are.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._turn = seed, 0
        self._whole: list[tuple[int, int, int]] | None = None  # by column: count, sum, sum of squares
        self._real: list[np.ndarray] | None = None  # by column: count, mean, sum of squared deviations
        self._pivot: float | None = None  # the first float: what is added are differences, which have more digits
        self._low: float | None = None
        self._high: float | None = None
        self._small = np.zeros(0, np.int64)  # counts of the values of uint8 and bool
        self._kept: list[np.ndarray] = []
        self._ranks: list[np.ndarray] = []  # the random numbers that those values were chosen by
        self._highest, self._waiting = 1.0, 0  # above this rank nothing is kept; how many were added since
        self._seen = 0
        self.nan = self.infinite = 0

    def add(self, numbers: np.ndarray) -> None:
        """Count an array with a column for each of the columns."""
        if not numbers.size:
            return
        is_whole = numbers.dtype.kind in "biu"
        columns = list(numbers.T)
        if not is_whole:
            wide = numbers.astype(np.float64)
            finite = np.isfinite(wide)
            if not finite.all():
                nan = int(np.isnan(wide).sum())
                self.nan, self.infinite = self.nan + nan, self.infinite + int(finite.size - finite.sum()) - nan
            columns = [column[there] for column, there in zip(wide.T, finite.T, strict=True)]
        flat = np.concatenate([column.ravel() for column in columns])
        if flat.size:
            low, high = flat.min().item(), flat.max().item()
            self._low = low if self._low is None else min(self._low, low)
            self._high = high if self._high is None else max(self._high, high)
        (self._add_whole if is_whole else self._add_real)(columns)
        self._keep(flat)

    def join_columns(self) -> None:
        """Count all columns as one from now on, because they differ from sample to sample."""
        if self._whole is not None:
            self._whole = [_added(self._whole)]
        if self._real is not None:
            self._real = [_joined(self._real)]

    def _add_whole(self, columns: list[np.ndarray]) -> None:
        before = [(0, 0, 0)] * len(columns) if self._whole is None else self._whole
        added = [(len(column), *_sums(column)) for column in columns]
        self._whole = [(a + d, b + e, c + f) for (a, b, c), (d, e, f) in zip(before, added, strict=True)]

    def _add_real(self, columns: list[np.ndarray]) -> None:
        pivot = next((float(column[0]) for column in columns if len(column)), None)
        self._pivot = pivot if self._pivot is None else self._pivot
        if self._pivot is not None:
            columns = [column - self._pivot for column in columns]
        before = [np.zeros(3)] * len(columns) if self._real is None else self._real
        self._real = [_merged(one, _moments(column)) for one, column in zip(before, columns, strict=True)]

    def _keep(self, values: np.ndarray) -> None:
        """Keep the values with the lowest of random numbers: every value has the same chance."""
        if values.dtype.kind == "b" or values.dtype == np.uint8:
            counts = np.bincount(values.astype(np.uint8), minlength=256)
            self._small = counts if not self._small.size else self._small + counts
            return
        ranks = np.random.default_rng((self._seed, self._turn)).random(values.size)
        self._turn, self._seen = self._turn + 1, self._seen + values.size
        chosen = ranks < self._highest
        self._kept.append(values[chosen].astype(np.float64))
        self._ranks.append(ranks[chosen])
        self._waiting += len(self._ranks[-1])
        if self._waiting > KEPT:
            self._choose()

    def _choose(self) -> None:
        """Leave of the values that are kept those that count; not for every few of them, which would take long."""
        kept, ranks = np.concatenate([np.zeros(0), *self._kept]), np.concatenate([np.zeros(0), *self._ranks])
        if len(ranks) > KEPT:
            lowest = np.argpartition(ranks, KEPT - 1)[:KEPT]
            kept, ranks = kept[lowest], ranks[lowest]
            self._highest = float(ranks.max())
        self._kept, self._ranks, self._waiting = [kept], [ranks], 0

    def columns(self) -> list[tuple[float, float]]:
        """The mean and the standard deviation of each column."""
        count = len(self._whole or self._real or ())
        return [_mean_and_std(*_column(self._whole, self._real, place), self._pivot) for place in range(count)]

    def summary(self) -> NumberSummary | None:
        """What was counted, in all columns together; None if there was no finite number."""
        if self._low is None or self._high is None:
            return None
        whole = None if self._whole is None else [_added(self._whole)]
        real = None if self._real is None else [_joined(self._real)]
        exact, moments = _column(whole, real, 0)
        mean, std = _mean_and_std(exact, moments, self._pivot)
        values, weights = self._distribution()
        places = np.cumsum(weights)
        quantiles = {share: _quantile(values, places, share) for share in QUANTILES}
        count = exact[0] + int(moments[0])
        return NumberSummary(
            count, self._low, self._high, mean, std, quantiles, self._seen <= KEPT, values, weights / weights.sum()
        )

    def _distribution(self) -> tuple[np.ndarray, np.ndarray]:
        """Values in rising order, and how many numbers each stands for."""
        self._choose()
        small, kept = np.flatnonzero(self._small), self._kept[0]
        values = np.concatenate([small.astype(np.float64), kept])
        each = self._seen / len(kept) if len(kept) else 0.0
        weights = np.concatenate([self._small[small].astype(np.float64), np.full(len(kept), each)])
        order = np.argsort(values, kind="stable")
        values, first = np.unique(values[order], return_index=True)
        return values, np.add.reduceat(weights[order], first)


def _sums(column: np.ndarray) -> tuple[int, int]:
    """The sum of integers and that of their squares, exactly."""
    if column.dtype.kind == "b":
        total = int(np.count_nonzero(column))
        return total, total
    if not len(column):
        return 0, 0
    if max(abs(int(column.min())), abs(int(column.max()))) >= _NARROW:
        numbers = column.tolist()
        return sum(numbers), sum(number * number for number in numbers)
    wide = column.astype(np.int64)
    high, low = wide >> 16, wide & 0xFFFF
    squares = (int((high * high).sum()) << 32) + (int((high * low).sum()) << 17) + int((low * low).sum())
    return int(wide.sum()), squares


def _added(parts: list[tuple[int, int, int]]) -> tuple[int, int, int]:
    return sum(part[0] for part in parts), sum(part[1] for part in parts), sum(part[2] for part in parts)


def _moments(column: np.ndarray) -> np.ndarray:
    if not len(column):
        return np.zeros(3)
    mean = column.mean()
    deviations = column - mean
    # What rounding has left in the mean is taken out of it, and out of the squares.
    rest = deviations.mean()
    return np.array([len(column), mean + rest, np.square(deviations).sum() - len(column) * rest * rest])


def _merged(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The moments of two sets together, by the update of Chan, Golub and LeVeque."""
    count = one[0] + other[0]
    if not one[0] or not other[0]:
        return other if not one[0] else one
    apart = other[1] - one[1]
    mean = one[1] + apart * (other[0] / count)
    return np.array([count, mean, one[2] + other[2] + apart * apart * (one[0] * other[0] / count)])


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return functools.reduce(_merged, parts, np.zeros(3))


def _column(
    whole: list[tuple[int, int, int]] | None, real: list[np.ndarray] | None, place: int
) -> tuple[tuple[int, int, int], np.ndarray]:
    return (0, 0, 0) if whole is None else whole[place], np.zeros(3) if real is None else real[place]


def _mean_and_std(exact: tuple[int, int, int], moments: np.ndarray, pivot: float | None) -> tuple[float, float]:
    """Of integers and of floats together, of which one part is mostly empty."""
    count, total, squares = exact
    moments = moments + np.array([0.0, pivot or 0.0, 0.0])
    if not count:
        return (float(moments[1]), math.sqrt(max(moments[2] / moments[0], 0.0))) if moments[0] else (math.nan, math.nan)
    mean = fractions.Fraction(total, count)
    spread = fractions.Fraction(count * squares - total * total, count)  # of squared deviations
    if not moments[0]:
        return float(mean), math.sqrt(spread / count)
    count, mean, spread = _merged(np.array([count, float(mean), float(spread)]), moments)
    return float(mean), math.sqrt(max(spread / count, 0.0))


def _quantile(values: np.ndarray, places: np.ndarray, share: float) -> float:
    """The lowest value that at least this share of all is not above."""
    place = np.searchsorted(places, share * places[-1] * (1 - 1e-12))
    return float(values[min(place, len(values) - 1)])
