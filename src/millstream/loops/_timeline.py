"""When the rows of a history were logged: steps, samples, epochs and times, by columns."""

import array
import bisect
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from millstream.loops._clock import StepSpan
from millstream.loops.column import pack_numbers, unpack_numbers
from millstream.loops.elapsed import Elapsed

_NO_EPOCHS = -1
_AT_ONCE = 1024


class Timeline:
    """The elapsed of each row.

    Attributes:
        length: How many rows there are.
    """

    def __init__(self) -> None:
        self.length = 0
        self._pending: list[Elapsed | StepSpan] = []  # of the newest rows: taken apart together, which is cheaper
        self._steps, self._samples, self._epochs, self._weights = (array.array("q") for _ in range(4))
        self._times = array.array("d")
        self._numbers: dict[str, array.array[Any]] = {
            "steps": self._steps,
            "samples": self._samples,
            "weights": self._weights,
            "epochs": self._epochs,
            "times": self._times,
        }
        self._starts: list[tuple[int, float]] = []  # a resumed run has another `date_start`: from which row on
        self._date_start = math.nan

    def append(self, elapsed: Elapsed) -> None:
        """One more row."""
        self._pending.append(elapsed)
        self.length += 1
        if self.length - len(self._steps) >= _AT_ONCE:  # written out here and below: every step with a callback is here
            self._settle()

    def extend(self, passed: StepSpan) -> None:
        """More rows, of several steps."""
        self._pending.append(passed)
        self.length += len(passed.steps)
        if self.length - len(self._steps) >= _AT_ONCE:
            self._settle()

    def _settle(self) -> None:
        """Take pending rows apart."""
        pending, self._pending = self._pending, []
        for now in pending:
            if now.date_start != self._date_start:
                self._begin(len(self._steps), now.date_start)
            if isinstance(now, StepSpan):
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

    def weights(self, start: int = 0) -> Sequence[int]:
        """How many samples the step of each row had, from a row on."""
        self._settle()
        return self._weights[start:]

    def units(self) -> dict[str, list[Any]]:
        """Steps, samples, epochs (None where unknown), time and date (a timestamp) of every row."""
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
        state = {name: pack_numbers(np.array(numbers[start:stop])) for name, numbers in self._numbers.items()}
        first, last = (bisect.bisect(self._starts, (row, math.inf)) for row in (start, stop - 1))
        # Of the dates before `start` the last one still counts.
        return {**state, "starts": [[max(row, start), date] for row, date in self._starts[max(first - 1, 0) : last]]}

    def append_state(self, state: dict[str, Any]) -> None:
        """More rows, as `to_state` gave them."""
        self._settle()
        count = len(state["times"])
        for row, date_start in state["starts"]:
            if date_start != self._date_start:
                self._begin(row, date_start)
        for name, numbers in self._numbers.items():
            numbers.frombytes(unpack_numbers(state[name], count, name).astype(numbers.typecode).tobytes())
        self.length += count
