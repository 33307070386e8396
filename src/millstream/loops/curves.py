"""The curves of a history, as an image shows them: which belong together, smoothed, thinned, and their best points."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from millstream.loops.column import Column
from millstream.loops.log_entries import Name, describe_logged, require_name

if TYPE_CHECKING:
    from millstream.loops._history import History

_FEW = 60  # points that are drawn one by one
_BINS = 1500  # no panel has more dots from left to right
_SMOOTH = 1 / 50
_LOSSES = ("loss", "error", "perplexity", "mse", "mae", "nll", "bpc", "divergence")
_SCORES = ("acc", "score", "f1", "auc", "precision", "recall", "reward", "return", "iou", "dice", "bleu", "r2")


@dataclasses.dataclass
class Curve:
    """One entry over steps.

    Attributes:
        label: What it is called.
        steps: Of its points.
        values: Of its points; not all need be finite.
        smooth: The values averaged over their neighbours; None if it has few points, which are drawn one by one.
    """

    label: str
    steps: np.ndarray
    values: np.ndarray
    smooth: np.ndarray | None

    @property
    def finite(self) -> np.ndarray:
        """Which values are numbers."""
        return np.isfinite(self.values)

    def best(self) -> tuple[float, float] | None:
        """The step and value of its best point; of the smoothed curve, where points are noisy."""
        values = self.values if self.smooth is None else self.smooth
        known = np.flatnonzero(np.isfinite(values))
        sign = _direction(self.label)
        if sign == 0 or len(known) < 2:
            return None
        best = known[np.argmax(sign * values[known])]
        return float(self.steps[best]), float(values[best])

    def last(self) -> float:
        """The newest finite value, of the smoothed curve if there is one; NaN if there is none."""
        values = self.values if self.smooth is None else self.smooth
        known = values[np.isfinite(values)]
        return float(known[-1]) if len(known) else float("nan")

    def thinned(self, bins: int = _BINS) -> tuple[np.ndarray, np.ndarray]:
        """Its points, or if there are too many the lowest and the highest of each few, which look the same."""
        if len(self.values) <= 4 * bins:
            return self.steps, np.where(self.finite, self.values, np.nan)
        edges = np.linspace(0, len(self.values), bins + 1).astype(np.int64)[:-1]
        low = np.minimum.reduceat(np.where(self.finite, self.values, np.inf), edges)
        high = np.maximum.reduceat(np.where(self.finite, self.values, -np.inf), edges)
        values = np.stack([low, high], 1).reshape(-1)
        return np.repeat(self.steps[edges], 2), np.where(np.isfinite(values), values, np.nan)


def panels(history: "History", names: list[str] | None, smooth: float | None) -> dict[str, list[Curve]]:
    """The curves of each panel, by the name of the entry it is about."""
    columns = _choose_columns(history, names)
    entries = {name for _, name in columns}
    labels = _labels(list(columns))
    steps = np.array(history.units()["steps"])
    made: dict[str, list[Curve]] = {}
    for path, column in columns.items():
        values = column.floats()
        curve = Curve(labels[path], steps[column.row_numbers()], values, _smooth(values, smooth))
        made.setdefault(_subject(path[1], entries), []).append(curve)
    # What is said of a metric itself comes first, and its evaluations after it, whatever was logged first.
    return {subject: sorted(curves, key=lambda curve: curve.label != subject) for subject, curves in made.items()}


def is_loss(name: str) -> bool:
    """Whether small values of an entry are good ones, by its name."""
    return _direction(name) < 0


def _choose_columns(history: "History", names: list[str] | None) -> dict[Name, Column]:
    columns = history.columns()
    if names is None:
        found = {path: column for path, column in columns.items() if _has_numbers(column)}
        # A loss that is also logged as a metric is one value under two names.
        others = {name for collection, name in found if collection != "losses"}
        found = {path: column for path, column in found.items() if path[0] != "losses" or path[1] not in others}
        if not found:
            raise ValueError("History.plot needs numbers. Nothing was logged, or only arrays and text.")
        return found
    if not names:
        raise ValueError("History.plot needs at least one name. Got []; leave names out for all entries.")
    by_column = {id(column): path for path, column in columns.items()}
    chosen = {}
    for name in names:
        require_name("History.plot", name)
        column = history.column(name)
        if column is None:
            raise ValueError(f"History.plot: {name!r} was never logged. {describe_logged(name, columns)}")
        if not _has_numbers(column):
            raise ValueError(
                f"History.plot needs names of entries that are numbers. {name!r} is not one. "
                f"There are: {', '.join('.'.join(path) for path, each in columns.items() if _has_numbers(each))}."
            )
        chosen[by_column[id(column)]] = column
    return chosen


def _has_numbers(column: Column) -> bool:
    if not column.single:
        return False
    return any(isinstance(value, int | float) for value in column.since(0)) if len(column) else False


def _labels(paths: list[Name]) -> dict[Name, str]:
    names = [name for _, name in paths]
    return {path: path[1] if names.count(path[1]) == 1 else ".".join(path) for path in paths}


def _subject(name: str, names: set[str]) -> str:
    """What an entry is about: `loss` for `loss_test`, if there is a `loss`; else the entry itself."""
    parts = name.split("_")
    shorter = ["_".join(parts[:count]) for count in range(1, len(parts))]
    return next((base for base in shorter if base in names), name)


def _smooth(values: np.ndarray, share: float | None) -> np.ndarray | None:
    """The mean of each value and its neighbours, those that are finite."""
    if len(values) <= _FEW or share == 0:
        return None
    half = max(int(len(values) * (_SMOOTH if share is None else share) / 2), 2)
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    middle = np.arange(len(values))
    low, high = np.maximum(middle - half, 0), np.minimum(middle + half + 1, len(values))
    number = counts[high] - counts[low]
    means = (sums[high] - sums[low]) / np.maximum(number, 1)
    return np.where((number > 0) & finite, means, np.nan)


def _direction(name: str) -> int:
    """1 if large values are good, -1 if small ones are, 0 if the name does not say."""
    parts = name.lower().replace(".", "_").split("_")
    if any(part.endswith(word) for part in parts for word in _LOSSES):
        return -1
    return 1 if any(part.startswith(word) or part.endswith(word) for part in parts for word in _SCORES) else 0
