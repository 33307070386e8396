"""The numbers that a bar shows, kept up at the cost of those rows that are new."""

import bisect
from collections.abc import Collection

import numpy as np

from millstream.loops.column import Column
from millstream.loops.elapsed import Elapsed
from millstream.loops.history import History
from millstream.loops.logs import EVALUATIONS, Name

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
        epoch = elapsed.epochs_before
        if epoch is not None and self._epoch is not None and epoch > self._epoch:
            # What the epoch before has logged since the last look is shown until this one has something to show.
            self._find_epoch(epoch - 1)
            self._read(self._row_of(epoch), settled)
        self._find_epoch(epoch)
        self._read(len(self._history), settled)
        self.shown = _named({path: self._running[path].value for path in self._columns()})

    def end_epoch(self, epoch: int, stop: int, settled: int) -> dict[str, float] | None:
        """What an epoch has logged, once it is complete; None while a device may still be computing some of it.

        Args:
            epoch: Its number, from 0 on.
            stop: The row after its last one.
            settled: As for `read`.
        """
        self._find_epoch(epoch)
        if not self._read(stop, settled):
            return None
        first_row = self._first_row
        self._epoch, self._first_row = epoch + 1, stop
        running = {path: self._running[path] for path in self._columns()}
        return _named({path: each.value for path, each in running.items() if each.first_row == first_row < stop})

    def _columns(self) -> dict[Name, Column]:
        """What can be shown; a loss that is a metric, too, is shown as that."""
        columns = self._history.columns()
        return {
            (collection, name): column
            for (collection, name), column in columns.items()
            if collection in _SHOWN and not (collection == "losses" and _has_metric(name, columns))
        }

    def _read(self, stop: int, settled: int) -> bool:
        """Take in new rows before `stop`; whether all of them were settled."""
        complete = True
        for path, column in self._columns().items():
            running = self._running.setdefault(path, _Running(self._is_newest(path)))
            complete &= running.read(self._history, column, self._first_row, stop, settled)
        return complete

    def _is_newest(self, path: Name) -> bool:
        collection, name = path
        return collection == "stateful_metrics" or name in self._stateful_metrics or name.endswith(EVALUATIONS)

    def _find_epoch(self, epoch: int | None) -> None:
        """Let the rows of this epoch be those that count."""
        if epoch is None or (self._epoch is not None and epoch <= self._epoch):
            return
        self._epoch, self._first_row = epoch, self._row_of(epoch)

    def _row_of(self, epoch: int) -> int:
        """The first row of an epoch, of those that count."""
        return bisect.bisect_left(range(len(self._history)), epoch, self._first_row, key=self._epoch_of)

    def _epoch_of(self, row: int) -> int:
        epoch = self._history.elapsed(row).epochs_before
        return -1 if epoch is None else epoch


class _Running:
    """One column, as far as it has been read.

    Attributes:
        value: What is shown; None if there is nothing.
        first_row: The first row that counts in it.
    """

    def __init__(self, newest: bool) -> None:
        self.value: float | None = None
        self.first_row = -1
        self._newest = newest
        self._position = 0
        self._sum, self._weight = 0.0, 0

    def read(self, history: History, column: Column, first_row: int, stop: int, settled: int) -> bool:
        """Take in new values of rows before `stop`; whether all of them could be read.

        Values before `first_row` count until one after it can be read.
        """
        wanted = max(column.position(stop) - self._position, 0)
        values = column.since(self._position, settled=settled)[:wanted]
        if not values:
            return not wanted
        rows = column.row_numbers(self._position)[: len(values)]
        complete = len(values) == wanted
        if first_row != self.first_row and rows[-1] >= first_row:
            skipped = int(np.searchsorted(rows, first_row))
            values, rows = values[skipped:], rows[skipped:]
            self.first_row, self._position = first_row, self._position + skipped
            self._sum, self._weight = 0.0, 0
        # The last value is taken in again next time: its step may still log a newer one.
        self._position += len(values) - 1
        if not _NUMBERS.issuperset(map(type, values)):
            return complete
        weights = np.asarray(history.weights(int(rows[0])))[rows - rows[0]]
        with np.errstate(all="ignore"):
            # A step without samples has no mean, so its value, which may be nan, must not enter the sum.
            numbers = np.asarray(values, np.float64)
            parts = np.multiply(numbers, weights, out=np.zeros(len(values)), where=weights > 0)
            self._sum, self._weight = self._sum + float(parts[:-1].sum()), self._weight + int(weights[:-1].sum())
        weight = self._weight + int(weights[-1])
        self.value = values[-1] if self._newest or not weight else (self._sum + float(parts[-1])) / weight
        return complete


def _named(values: dict[Name, float | None]) -> dict[str, float]:
    """Values that are there, each by its entry alone, unless that is taken."""
    named: dict[str, float] = {}
    for path, value in values.items():
        if value is not None:
            named[path[1] if path[1] not in named else ".".join(path)] = value
    return named


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
