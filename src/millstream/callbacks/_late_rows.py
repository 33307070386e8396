"""Rows of a history for whoever can wait for them: read when their steps are over, many at a time."""

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millstream.callbacks._background import Row
from millstream.loops.column import IN_FLIGHT, Column
from millstream.loops.elapsed import Elapsed
from millstream.loops.history import History
from millstream.loops.logs import Name

_NUMBERS = (int, float, bool)


@dataclasses.dataclass(frozen=True, eq=False)
class ReadRows:
    """Rows that have been read, still by columns.

    Attributes:
        elapsed: Where the run was at each of them, by row number.
        columns: Name, row numbers and values of each column. There may be values of other rows, too.
    """

    elapsed: dict[int, Elapsed]
    columns: list[tuple[str, Sequence[int], list[Any]]]

    def steps(self) -> list[int]:
        """The step of each."""
        return [elapsed.steps for elapsed in self.elapsed.values()]

    def made(self) -> list[Row]:
        """The rows; those without a single number are left out."""
        made = {row: Row(e.steps, e.samples, e.epochs, e.time, e.date, {}) for row, e in self.elapsed.items()}
        for name, rows, values in self.columns:
            for row, value in zip(rows, values, strict=False):
                if row in made and type(value) in _NUMBERS:
                    made[row].values[name] = +value  # a bool becomes a number by this
        return [row for row in made.values() if row.values]


class LateRows:
    """Row numbers that are remembered, and read later.

    Args:
        history: Whose rows they are.
        every: Which of them are wanted; None: all.
        name: The name of an entry, from its path and all columns; None if it is not wanted.
    """

    def __init__(
        self,
        history: History,
        every: Callable[[Elapsed], bool] | None,
        name: Callable[[Name, Mapping[Name, Column]], str | None],
    ) -> None:
        self._history = history
        self._every = every
        self._name = name
        self._names: dict[Name, str | None] = {}
        self._waiting: dict[int, Elapsed | None] = {}  # rows, in order; None: the history knows where it was
        self._next = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, start: int, stop: int, elapsed: Elapsed | None = None) -> None:
        """Remember the rows from `start` to before `stop`, but none twice; `elapsed` is that of the last, if known."""
        if stop - start > 1 or start < self._next:
            self._waiting.update(dict.fromkeys(range(max(start, self._next), stop)))
        elif stop > start:
            self._waiting[start] = elapsed
        self._next = max(self._next, stop)

    def add_steps(self, steps: list[int]) -> None:
        """Remember the rows of earlier steps, as far as the history has them."""
        for step in steps:
            row = bisect.bisect_left(range(len(self._history)), step, key=lambda row: self._history.elapsed(row).steps)
            if row < len(self._history) and self._history.elapsed(row).steps == step:
                self.add(row, row + 1)

    def steps(self) -> list[int]:
        """The steps of the remembered rows."""
        return [self._elapsed(row).steps for row in self._waiting]

    def first_step(self) -> int | None:
        """The step of the oldest of them; None if there is none."""
        return next((self._elapsed(row).steps for row in self._waiting), None)

    def _elapsed(self, row: int) -> Elapsed:
        elapsed = self._waiting[row]
        return self._history.elapsed(row) if elapsed is None else elapsed

    def take_ready(self, start: int, stop: int, step: int) -> ReadRows | None:
        """Those rows that can be read without waiting for a device.

        Args:
            start: The first row of the steps that were begun last, all at once.
            stop: Behind the last of them.
            step: Where the run is.
        """
        over = step - IN_FLIGHT * max(stop - start, 1)
        rows = list(self._waiting)
        while rows and (rows[-1] >= start or self._elapsed(rows[-1]).steps > over):
            rows.pop()
        return self._take(rows, wait=False)

    def take_older(self) -> ReadRows | None:
        """All but those of the newest steps, which have failed if the run has."""
        rows = len(self._history)
        return self.take_ready(rows, rows, self._history.elapsed().steps) if rows else None

    def take_all(self) -> ReadRows | None:
        """All of them, the newest as the last of its run."""
        return self._take(list(self._waiting), wait=True)

    def _take(self, rows: list[int], *, wait: bool) -> ReadRows | None:
        if not rows:
            return None
        bound, all_columns, columns = rows[-1] + 1, self._history.columns(), []
        for path, column in all_columns.items():
            first, last = column.position(rows[0]), column.position(bound)
            if first == last:
                continue
            if path not in self._names:
                self._names[path] = self._name(path, all_columns)
            name = self._names[path]
            if name is None:
                continue
            numbers = column.rows[first:last]
            values = column.between(first, last) if wait else column.since(first, settled=bound)
            if len(values) < len(numbers):
                bound = numbers[len(values)]
            columns.append((name, numbers, values))
        taken = {row: self._elapsed(row) for row in rows if row < bound}
        for row in taken:
            del self._waiting[row]
        if self._every is not None:
            newest = len(self._history) - 1 if wait else -1
            taken = {
                row: elapsed
                for row, elapsed in taken.items()
                if self._every(elapsed.replace(final=True) if row == newest else elapsed)
            }
        return ReadRows(taken, columns) if taken else None


def entry_name(
    path: Name, columns: Mapping[Name, Column], *, separator: str = ".", reserved: frozenset[str] = frozenset()
) -> str | None:
    """What a column is called where names have no collections: by its entry alone, unless that is taken.

    It depends only on columns that are no younger, so a name is never taken away again. Outputs have no name, and
    neither has a loss that is logged as a metric, too.

    Args:
        path: Collection and entry.
        columns: All columns.
        separator: Between collection and entry, if both are needed.
        reserved: Names that are taken by something else.
    """
    collection, name = path
    born = columns[path].rows[0]
    rivals = {
        other: column.rows[0]
        for (other, entry), column in columns.items()
        if entry == name and other not in (collection, "outputs") and column.rows[0] <= born
    }
    if collection == "outputs" or (collection == "losses" and "metrics" in rivals):
        return None
    if rivals.get("losses") == born:
        del rivals["losses"]  # the metric has the name; the loss steps back, even if it is another value
    return separator.join(path) if rivals or name in reserved else name
