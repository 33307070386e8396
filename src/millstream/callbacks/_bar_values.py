"""The numbers that a bar shows, kept up at the cost of those rows that are new."""

import bisect
from collections.abc import Collection

import numpy as np

from millstream.loops._column import Column
from millstream.loops._elapsed import Elapsed
from millstream.loops._history import History
from millstream.loops._logs import EVALUATIONS, Name

_SHOWN = ("metrics", "stateful_metrics", "losses")
_NUMBERS = frozenset({bool, int, float})


class BarValues:
    """Means of this epoch's metrics, weighted by samples, and the newest value of what is a mean already.

    Args:
        history: Where the rows come from.
        first_row: The first that counts.
        stateful_metrics: Names of metrics whose newest value is shown, too.
    """

    def __init__(self, history: History, first_row: int, stateful_metrics: Collection[str]) -> None:
        self.shown: dict[str, float] = {}
        self._history = history
        self._first_row = first_row
        self._stateful_metrics = stateful_metrics
        self._epoch: int | None = None
        self._running: dict[Name, _Running] = {}

    def read(self, elapsed: Elapsed, settled: int) -> None:
        """Take in new rows.

        Args:
            elapsed: How far the run is.
            settled: How many rows belong to steps that are over; what a device may still be computing is left out.
        """
        self._find_epoch(elapsed.epochs_before)
        columns, shown = self._history.columns(), {}
        for path, column in columns.items():
            collection, name = path
            if collection not in _SHOWN or (collection == "losses" and _has_metric(name, columns)):
                continue
            running = self._running.setdefault(path, _Running(self._is_newest(path)))
            # A column whose newest value is settled, such as that of a test, has nothing to wait for.
            running.read(self._history, column, self._first_row, ready=column.rows[-1] >= settled)
            if running.value is not None:
                shown[name if name not in shown else ".".join(path)] = running.value
        self.shown = shown

    def _is_newest(self, path: Name) -> bool:
        collection, name = path
        return collection == "stateful_metrics" or name in self._stateful_metrics or name.endswith(EVALUATIONS)

    def _find_epoch(self, epoch: int | None) -> None:
        """Let the rows of this epoch be those that count."""
        if epoch is None or epoch == self._epoch:
            return
        self._epoch = epoch
        rows = range(len(self._history))
        self._first_row = bisect.bisect_left(rows, epoch, self._first_row, key=self._epoch_of)

    def _epoch_of(self, row: int) -> int:
        epoch = self._history.elapsed(row).epochs_before
        return -1 if epoch is None else epoch


class _Running:
    """One column, as far as it has been read."""

    def __init__(self, newest: bool) -> None:
        self.value: float | None = None
        self._newest = newest
        self._first_row = -1
        self._position = 0
        self._sum, self._weight = 0.0, 0

    def read(self, history: History, column: Column, first_row: int, *, ready: bool) -> None:
        """Take in new values; those before `first_row` count until there is one behind it."""
        if first_row != self._first_row and column.rows[-1] >= first_row:
            self._first_row, self._position = first_row, column.position(first_row)
            self._sum, self._weight = 0.0, 0
        values = column.since(self._position, ready=ready)
        if not values:
            return
        rows = column.row_numbers(self._position)[: len(values)]
        # The last value is taken in again next time: its step may still log a newer one.
        self._position += len(values) - 1
        if not _NUMBERS.issuperset(map(type, values)):
            return
        weights = np.asarray(history.weights(int(rows[0])))[rows - rows[0]]
        with np.errstate(all="ignore"):
            # A step without samples has no mean, so its value, which may be nan, must not enter the sum.
            numbers = np.asarray(values, np.float64)
            parts = np.multiply(numbers, weights, out=np.zeros(len(values)), where=weights > 0)
            self._sum, self._weight = self._sum + float(parts[:-1].sum()), self._weight + int(weights[:-1].sum())
        weight = self._weight + int(weights[-1])
        self.value = values[-1] if self._newest or not weight else (self._sum + float(parts[-1])) / weight


def _has_metric(name: str, columns: Collection[Name]) -> bool:
    return ("metrics", name) in columns or ("stateful_metrics", name) in columns


def number_text(value: float) -> str:
    """A value as bars show it.

    Example:
        >>> number_text(0.61479), number_text(3e-5), number_text(7)
        ('0.6148', '3.0000e-05', '7')
    """
    if isinstance(value, int):
        return str(value)
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.4e}"
