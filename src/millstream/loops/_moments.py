"""When the rows of a history were logged: steps, samples, epochs and times, by columns."""

import array
import bisect
import math
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from millstream.loops._clock import Passed
from millstream.loops.column import Column, Run
from millstream.loops.elapsed import Elapsed
from millstream.loops.logs import Name
from millstream.text.errors import describe_value

_WORDS = {1: np.uint8, 2: np.uint16}
_ARRAYS = ("steps", "samples", "weights", "epochs", "times")
_NO_EPOCHS = -1
_AT_ONCE = 1024


def column_state(path: Name, column: Column, start: int, stop: int, *, arrays: bool) -> dict[str, Any] | None:
    """What a column has from row `start` to before `stop`; None if that is nothing.

    Args:
        path: Its collection and name.
        column: The column.
        start: The first row.
        stop: The row after the last.
        arrays: Whether to keep values that are arrays with axes.
    """
    first, last = column.position(start), column.position(stop)
    if first == last:
        return None
    rows, kept, place = column.row_numbers(first, last), [], 0
    for run in column.runs(first, last):
        if arrays or isinstance(run, list) or run.ndim == 1:
            kept.append((rows[place : place + len(run)], run))
        place += len(run)
    if not kept:
        return None
    numbers = np.concatenate([numbers for numbers, _ in kept])
    runs = [_run_state(path, run) for _, run in kept]
    return {"collection": path[0], "name": path[1], "rows": packed(numbers), "values": runs}


def columns_of(states: list[dict[str, Any]], start: int, stop: int) -> Iterator[tuple[Name, np.ndarray, list[Run]]]:
    """The path, rows and values of columns, which must lie between the two rows."""
    for state in states:
        runs = [_run_of(run) for run in state["values"]]
        rows = unpacked(state["rows"], sum(map(len, runs)), f"rows of {state['name']}")
        if not len(rows) or rows[0] < start or rows[-1] >= stop or np.any(np.diff(rows) <= 0):
            raise ValueError(
                f"History.from_state: {state['name']} has values of other rows than {start} to {stop - 1}."
            )
        yield (state["collection"], state["name"]), rows, runs


def packed(numbers: np.ndarray) -> Any:
    """Whole numbers as the first and the one after the last, if none is left out; else as they are."""
    if len(numbers) and np.all(np.diff(numbers) == 1):
        return int(numbers[0]), int(numbers[-1]) + 1
    return numbers


def unpacked(numbers: Any, count: int, what: str) -> np.ndarray:
    """The numbers that `packed` was given, if there are `count` of them."""
    found = numbers[1] - numbers[0] if isinstance(numbers, tuple) else len(numbers)
    if found != count:
        raise ValueError(f"History.from_state needs {count} {what}. Got {found}.")
    return np.arange(*numbers) if isinstance(numbers, tuple) else np.asarray(numbers)


def _run_state(path: Name, run: Run) -> dict[str, Any]:
    if isinstance(run, list):
        for value in run:
            if not isinstance(value, bool | int | float | complex | str | bytes | None):
                raise TypeError(
                    f"History.to_state keeps numbers, text and arrays of numbers. {'.'.join(path)} was logged as "
                    f"{describe_value(value)}. Log what of it is a number, or text."
                )
        return {"objects": list(run)}
    # Files know nothing of bfloat16 and its kin, so their bits travel as whole numbers.
    if run.dtype.isbuiltin == 2:
        return {"dtype": run.dtype.name, "array": run.view(_WORDS[run.dtype.itemsize])}
    return {"dtype": run.dtype.str, "array": run}


def _run_of(state: dict[str, Any]) -> Run:
    if "objects" in state:
        return list(state["objects"])
    array, dtype = np.asarray(state["array"]), np.dtype(state["dtype"])
    return array if array.dtype == dtype else array.view(dtype)


class Moments:
    """The elapsed of each row.

    Attributes:
        length: How many rows there are.
    """

    def __init__(self) -> None:
        self.length = 0
        self._pending: list[Elapsed | Passed] = []  # of the newest rows: taken apart together, which is cheaper
        self._steps, self._samples, self._epochs, self._weights = (array.array("q") for _ in range(4))
        self._times = array.array("d")
        self._starts: list[tuple[int, float]] = []  # a resumed run has another `date_start`: from which row on
        self._date_start = math.nan

    def append(self, elapsed: Elapsed) -> None:
        """One more row."""
        self._pending.append(elapsed)
        self._added(1)

    def extend(self, passed: Passed) -> None:
        """More rows, of several steps."""
        self._pending.append(passed)
        self._added(len(passed.steps))

    def _added(self, rows: int) -> None:
        self.length += rows
        if self.length - len(self._steps) >= _AT_ONCE:
            self._settle()

    def _settle(self) -> None:
        """Take pending rows apart."""
        pending, self._pending = self._pending, []
        for now in pending:
            if now.date_start != self._date_start:
                self._begin(len(self._steps), now.date_start)
            if isinstance(now, Passed):
                count, samples = len(now.steps), now.samples
                self._steps.extend(now.steps)
                self._samples.extend(samples)
                self._weights.extend(map(operator.sub, samples, [now.samples_before, *samples]))
                self._epochs.extend([_NO_EPOCHS] * count if now.epochs is None else now.epochs)
                self._times.extend(now.times)
            else:
                self._steps.append(now.steps)
                self._samples.append(now.samples)
                self._weights.append(now.step_samples)
                self._epochs.append(_NO_EPOCHS if now.epochs is None else now.epochs)
                self._times.append(now.time)

    def _begin(self, row: int, date_start: float) -> None:
        self._starts.append((row, date_start))
        self._date_start = date_start

    def elapsed(self, row: int) -> Elapsed:
        """How far the run was at a row."""
        self._settle()
        before = max(row - 1, 0)
        return Elapsed(
            self._steps[row],
            self._samples[row],
            self._epochs_at(row),
            self._times[row],
            self._starts[bisect.bisect(self._starts, (row, math.inf)) - 1][1],
            self._samples[row] - self._weights[row],
            self._epochs_at(before),
            self._times[before] if row else 0.0,
        )

    def _epochs_at(self, row: int) -> int | None:
        return None if self._epochs[row] == _NO_EPOCHS else self._epochs[row]

    def weights(self, start: int = 0) -> "array.array[int]":
        """How many samples the step of each row had, from a row on."""
        self._settle()
        return self._weights[start:]

    def units(self) -> dict[str, list[Any]]:
        """Steps, samples, epochs (None where nobody knew), time and date (a timestamp) of every row."""
        self._settle()
        dates: list[float] = []
        for i, (first, start) in enumerate(self._starts):
            stop = self._starts[i + 1][0] if i + 1 < len(self._starts) else self.length
            dates += (np.asarray(self._times)[first:stop] + start).tolist()
        return {
            "steps": self._steps.tolist(),
            "samples": self._samples.tolist(),
            "epochs": [None if epochs == _NO_EPOCHS else epochs for epochs in self._epochs],
            "time": self._times.tolist(),
            "date": dates,
        }

    def to_state(self, start: int, stop: int) -> dict[str, Any]:
        """The rows from `start` to before `stop`, exactly, as arrays."""
        self._settle()
        state: dict[str, Any] = {name: np.array(getattr(self, f"_{name}")[start:stop]) for name in _ARRAYS}
        state["steps"] = packed(state["steps"])
        first, last = (bisect.bisect(self._starts, (row, math.inf)) for row in (start, stop - 1))
        # Of the dates before `start` the last one still counts.
        return {**state, "starts": [[max(row, start), date] for row, date in self._starts[max(first - 1, 0) : last]]}

    def append_state(self, state: dict[str, Any]) -> None:
        """More rows, as `to_state` gave them."""
        self._settle()
        count = len(state["times"])
        self.length += count
        for row, date_start in state["starts"]:
            if date_start != self._date_start:
                self._begin(row, date_start)
        for name in _ARRAYS:
            mine: array.array[Any] = getattr(self, f"_{name}")
            mine.frombytes(unpacked(state[name], count, name).astype(mine.typecode).tobytes())
