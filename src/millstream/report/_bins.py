"""Curves with fewer points that look the same: of each few points the lowest, the mean and the highest."""

import dataclasses

import numpy as np

_MOST = 600  # a panel is not much wider in dots


@dataclasses.dataclass(frozen=True, eq=False)
class Binned:
    """Points of a curve, each of them standing for one or several.

    Attributes:
        steps: Where each is: the last step it stands for.
        low: The lowest of its values; NaN if none is finite.
        mean: Their mean.
        high: The highest.
        odd: Steps whose values are not finite.
    """

    steps: np.ndarray
    low: np.ndarray
    mean: np.ndarray
    high: np.ndarray
    odd: np.ndarray

    @property
    def is_exact(self) -> bool:
        """Whether each point stands for itself."""
        return self.low is self.high


def binned(steps: np.ndarray, values: np.ndarray) -> Binned:
    """A curve with not too many points."""
    finite = np.isfinite(values)
    odd, known = steps[~finite], np.where(finite, values, np.nan)
    if len(values) <= _MOST:
        return Binned(steps, known, known, known, odd)
    edges = np.linspace(0, len(values), _MOST + 1).astype(np.int64)
    starts, ends = edges[:-1], edges[1:]
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    count = np.add.reduceat(finite.astype(np.int64), starts)
    sums = np.add.reduceat(np.where(finite, values, 0.0), starts)
    low, high = (np.where(count > 0, each, np.nan) for each in (low, high))
    mean = np.where(count > 0, sums / np.maximum(count, 1), np.nan)
    return Binned(steps[ends - 1], low, mean, high, odd)


def summed(values: np.ndarray, most: int) -> np.ndarray:
    """Numbers of neighbouring windows added up, so that not too many are left."""
    if len(values) <= most:
        return values
    return np.add.reduceat(values, np.linspace(0, len(values), most + 1).astype(np.int64)[:-1])


def lasts(values: np.ndarray, most: int) -> np.ndarray:
    """The last number of each of the windows that `summed` adds up."""
    if len(values) <= most:
        return values
    return values[np.linspace(0, len(values), most + 1).astype(np.int64)[1:] - 1]
