"""What all bars share: when they look, when they are silent, and how they are used by hand."""

import bisect
import math
import warnings
from collections.abc import Collection, Mapping, Set
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from millstream.callbacks.bar_layout import counts_text, epoch_line
from millstream.callbacks.bar_progress import BarProgress
from millstream.loops import History
from millstream.loops.callback import Observer
from millstream.loops.column import Column
from millstream.loops.elapsed import Elapsed
from millstream.loops.log_entries import EVALUATIONS, Name, describe_logged
from millstream.loops.loop_state import LoopState, is_nested_in
from millstream.loops.schedules import Period, as_period
from millstream.text.errors import require_names

_SHOWN = ("metrics", "stateful_metrics", "losses")
_NUMBERS = frozenset({bool, int, float})
_NO_LOSS = 2
_INNER = {"test": "testing", "predict": "predicting"}  # what loops inside a run do, by their names
_ALL_EPOCHS = 1000  # that get a line each; after more than that, every thousandth part of them


class BarValues:
    """Means of this epoch's metrics, weighted by samples, and the newest value of what is a mean already.

    Args:
        history: Where the rows come from.
        first_row: The first that counts.
        stateful_metrics: Names of metrics whose newest value is shown, too.
        monitored: Names of entries that come right after the loss, as "name" or "collection.name".

    Attributes:
        shown: The values by their names: the loss, what is monitored, others of the training, results of tests.
    """

    def __init__(
        self, history: History, first_row: int, stateful_metrics: Collection[str], monitored: Collection[str] = ()
    ) -> None:
        self.shown: dict[str, float] = {}
        self._history = history
        self._first_row = first_row
        self._stateful_metrics = stateful_metrics
        self._monitored = monitored
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
        self.shown = self._named({path: self._running[path].value for path in self._columns()})

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
        return self._named({path: each.value for path, each in running.items() if each.first_row == first_row < stop})

    @property
    def are_ready(self) -> bool:
        """Whether all that has been logged can be read without waiting for a device."""
        return all(column.is_ready for column in self._columns().values())

    def _named(self, values: dict[Name, float | None]) -> dict[str, float]:
        """Values that are there, the most important first, each by its entry alone, unless that is taken."""
        found = {path: value for path, value in values.items() if value is not None}
        trained = [path for path in found if not path[1].endswith(EVALUATIONS)]
        loss = min(trained, key=lambda path: _how_like_a_loss(path[1]), default=None)
        if loss is not None and _how_like_a_loss(loss[1]) == _NO_LOSS:
            loss = None

        def rank(path: Name) -> tuple[int, int]:
            if path == loss:
                return 0, 0
            if path[1] in self._monitored or ".".join(path) in self._monitored:
                return 1, 0
            return (2, 0) if path in trained else (3, _how_like_a_loss(path[1]))

        named: dict[str, float] = {}
        for path in sorted(found, key=rank):
            named[path[1] if path[1] not in named else ".".join(path)] = found[path]
        return named

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


def _how_like_a_loss(name: str) -> int:
    """0 for the loss, or that of a test; 1 for anything called so; `_NO_LOSS` for the rest."""
    words = name.split("_")
    if words[0] == "loss" and (len(words) == 1 or name.endswith(EVALUATIONS)):
        return 0
    return 1 if "loss" in name else _NO_LOSS


def _has_metric(name: str, columns: Collection[Name]) -> bool:
    return ("metrics", name) in columns or ("stateful_metrics", name) in columns


class Face(Protocol):
    """How a bar looks; anything that can show how far a run is."""

    def open(self, progress: BarProgress) -> None:
        """A run begins."""
        ...

    @property
    def keeps_lines(self) -> bool:
        """Whether what was drawn stays, as in a file or a pipe, so that each drawing is a new line."""
        ...

    @property
    def width(self) -> int | None:
        """Cells that a line that stays may have; None for any number."""
        ...

    def interval(self, progress: BarProgress) -> float:
        """Seconds from one drawing to the next."""
        ...

    def write_line(self, text: str) -> None:
        """Write a line that stays."""
        ...

    def draw(self, progress: BarProgress, values: dict[str, float]) -> None:
        """Show how far the run is, and some values."""
        ...

    def close(self, progress: BarProgress, values: dict[str, float]) -> None:
        """The run has ended: show that, and leave a line of its own to whatever is written next."""
        ...


class Bar(Observer):
    """Watches a run and has a face drawn now and then; most steps cost it one comparison.

    Args:
        caller: What it is called, in errors.
        total: Where the run will end: steps, or `at(...)` in one unit; None: where the loop stops, if it says so.
        face: What is drawn.
        stateful_metrics: Names of metrics whose newest value is shown, and no mean.
        disabled: Whether to show nothing at all.
    """

    named_schedules = ("on_train_batch_end", "on_test_batch_end", "on_predict_batch_end")
    sees_inner_loops = True

    def __init__(
        self, caller: str, total: Any, face: Face, *, stateful_metrics: Collection[str], disabled: bool = False
    ) -> None:
        self._caller = caller
        self._total = None if total is None else as_period(caller, "total", total)
        if self._total is not None and len(self._total.units) != 1:
            raise ValueError(
                f"{caller} needs total in one unit: 1000 steps, or at(epochs=3) and the like. Got {total!r}."
            )
        names = stateful_metrics if not isinstance(stateful_metrics, Set) else list(stateful_metrics)
        self._face = face
        self._stateful_metrics = frozenset(require_names(caller, "stateful_metrics", names))
        self._unseen = set(self._stateful_metrics)  # by no run so far
        self._disabled = disabled
        self._watched: LoopState | None = None
        self._seen: Elapsed | None = None
        self._due = self._drawn = 0.0  # the elapsed time from which on it looks again; seconds when it drew last

    @property
    def patience(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As long as it waits between two drawings, it need not be shown anything."""
        return math.inf if self._watched is None else self._face.interval(self._progress)

    def start(self, loop_state: LoopState) -> None:
        """A loop begins; a bar that tests inside training have to themselves is not shown."""
        inner = loop_state.parent is not None and loop_state.name in _INNER
        if not inner and not is_nested_in(loop_state, self._watched):
            resumed = loop_state.elapsed.steps > 0
            self._begin(loop_state, loop_state.elapsed, 0 if resumed else len(loop_state.history))
            if self._watched is loop_state and not self._face.keeps_lines:
                self._face.draw(self._progress, {})  # the first step compiles, which may take long

    def _begin(self, loop_state: LoopState, start: Elapsed, first_row: int) -> None:
        if self._disabled or _is_other_process():
            return
        if self._total is not None and "epochs" in self._total.units and start.epochs is None:
            raise ValueError(
                f"{self._caller} is to count epochs, and this run does not know how long one is. "
                "Give the loop epoch_duration or a DataLoader, or the bar a total in steps."
            )
        self.finish()  # a run by hand that nobody has ended
        monitored = {callback.monitored for callback in loop_state.callbacks if callback.monitored is not None}
        self._progress = BarProgress(self._end_of(loop_state), start, loop_state.epochs)
        self._values = BarValues(loop_state.history, first_row, self._stateful_metrics, monitored)
        self._due, self._drawn = -math.inf, 0.0
        self._inner: tuple[LoopState, BarProgress] | None = None  # the loop inside that was seen last
        self._inner_due = 0.0  # the elapsed time of that loop from which on it looks again
        self._face.open(self._progress)
        # How many are over; None if they get no lines. An epoch is not over if its test has been left undone.
        complete = start.epochs if loop_state.unfinished is None else start.epochs_before
        self._epochs = None if loop_state.name in _INNER else complete
        self._ended: list[_EndedEpoch] = []
        self._line_of = 0
        self._watched, self._seen = loop_state, None  # only now: a face that is not open cannot be closed

    def _end_of(self, loop_state: LoopState) -> Period | None:
        """Where the run will end: where the user says, or else where the loop stops, if that is one unit."""
        return _single_unit(loop_state.ends_at) if self._total is None else self._total

    def observe(self, loop_state: LoopState, start: int, stop: int) -> None:
        """Draw, if that is due; else this does as good as nothing."""
        if loop_state is self._watched:
            self._seen = elapsed = loop_state.elapsed
            if self._epochs is not None and (self._ended or elapsed.epochs != self._epochs):
                self._end_epochs(elapsed)
                ready = loop_state.history.ready_rows(elapsed.steps, stop - start)
                # After a test nothing is in flight, and a job may be killed before the next steps are over.
                self._write_epochs(elapsed, len(loop_state.history) if self._values.are_ready else ready)
            if elapsed.time >= self._due and not self._ended:
                self._look(elapsed, loop_state.history.ready_rows(elapsed.steps, stop - start))
        elif self._watched is not None and loop_state.parent is self._watched:
            self._observe_inner(loop_state, self._watched)

    def _observe_inner(self, inner: LoopState, outer: LoopState) -> None:
        """Draw how far a loop inside this one is, such as a test, if that is due."""
        if self._inner is None or self._inner[0] is not inner:
            label = f"{self._label(outer.elapsed)} {_INNER.get(inner.name, 'inner loop')}".lstrip()
            start = inner.elapsed.step_before()
            self._inner = inner, BarProgress(_single_unit(inner.ends_at), start, within=label)
            self._inner_due = 0.0
        if inner.elapsed.time >= self._inner_due:
            self._inner[1].move(inner.elapsed)
            self._progress.move(outer.elapsed, outer.waits.evaluation)
            wait = self._face.interval(self._progress)
            if self._progress.seconds - self._drawn >= wait:
                self._drawn = self._progress.seconds
                self._values.read(outer.elapsed, outer.history.ready_rows(outer.elapsed.steps))
                self._face.draw(self._inner[1], self._values.shown)
            self._inner_due = inner.elapsed.time + wait - (self._progress.seconds - self._drawn)

    def _label(self, elapsed: Elapsed) -> str:
        """Where the run is, in the words of its bar."""
        self._progress.move(elapsed)
        return self._progress.label or counts_text(self._progress)

    def _end_epochs(self, elapsed: Elapsed) -> None:
        """Remember the epochs that have ended since the last look: each of them gets a line, where lines stay."""
        assert self._watched is not None
        history, testing, now = self._watched.history, self._watched.waits.evaluation, elapsed.epochs
        if self._epochs is None or now is None:
            return
        self._progress.move(elapsed, testing)
        for number in range(self._epochs + 1, now + 1):
            end, row, seconds = elapsed, len(history) - 1, self._progress.seconds
            if number < now or not elapsed.ends_epoch:  # it ended among several steps that were done together
                row = bisect.bisect_left(range(len(history)), number, key=lambda row: history.elapsed(row).epochs or 0)
                if row < len(history):
                    end = history.elapsed(row)
                    seconds = end.time - self._progress.start_time
            figures = self._progress.end_epoch(end.replace(epochs=number), seconds, testing)
            self._ended.append(_EndedEpoch(number, min(row + 1, len(history)), figures))
        self._epochs = now

    def _write_epochs(self, elapsed: Elapsed, settled: int) -> None:
        """Write the lines of ended epochs whose values are settled."""
        while self._ended:
            epoch = self._ended[0]
            values = self._values.end_epoch(epoch.number - 1, epoch.stop, settled)
            if values is None:
                return
            del self._ended[0]
            if epoch.number <= _ALL_EPOCHS or epoch.number - self._line_of >= epoch.number / _ALL_EPOCHS:
                self._face.write_line(epoch_line(epoch.figures, values, self._face.width))
                self._line_of = epoch.number
            self._drawn = self._progress.seconds
            self._due = elapsed.time + self._face.interval(self._progress)

    def _look(self, elapsed: Elapsed, settled: int) -> None:
        assert self._watched is not None
        progress = self._progress
        progress.move(elapsed, self._watched.waits.evaluation)
        wait = self._face.interval(progress)
        if progress.seconds - self._drawn >= wait:
            self._drawn = progress.seconds
            self._values.read(elapsed, settled)
            self._face.draw(progress, self._values.shown)
        self._due = elapsed.time + wait - (progress.seconds - self._drawn)

    def finish(self, loop_state: LoopState | None = None) -> None:
        """Show the end; by hand this is only needed if the run ends before its total.

        Args:
            loop_state: Of the loop that has ended.
        """
        watched = self._watched
        if watched is None or (loop_state is not None and loop_state is not watched):
            return
        # A loop that fails gives no reason, and its last step is not complete.
        elapsed = watched.elapsed if watched.reason else self._seen
        try:
            if elapsed is not None:
                self._progress.move(elapsed, watched.waits.evaluation)
                if watched.unfinished is None:
                    self._end_epochs(elapsed)
                self._write_epochs(elapsed, len(watched.history))
                self._values.read(elapsed, len(watched.history))
        finally:
            self._watched = None
            self._progress.close()
            self._face.close(self._progress, self._values.shown)
        self._require_stateful_metrics(watched)

    def _require_stateful_metrics(self, watched: LoopState) -> None:
        """Warn of names that no run with this bar has logged."""
        paths = watched.history.columns()
        self._unseen -= {name for path in paths for name in (path[1], ".".join(path))}
        if self._unseen and watched.is_complete and paths:
            name = min(self._unseen)
            self._unseen.clear()
            warnings.warn(
                f"{self._caller}: {name!r} of stateful_metrics was never logged. {describe_logged(name, paths)}",
                stacklevel=2,
            )

    def __call__(self, elapsed: Elapsed, logs: Mapping[str, object] | None = None) -> bool:
        """Use it by hand, once per step; at its total it is finished.

        Args:
            elapsed: From `ms.loops.elapse`.
            logs: What the step has logged.

        Returns:
            False: it never asks to stop.
        """
        by_hand = self._by_hand
        if not 0 < by_hand.elapsed.steps <= elapsed.steps:  # a new run
            by_hand.history, before = History(), elapsed.time_before
            self._begin(by_hand, Elapsed(elapsed.steps - 1, elapsed.samples_before, elapsed.epochs_before, before), 0)
        if self._watched is by_hand:
            super().__call__(elapsed, logs)
            if elapsed.final or (self._total is not None and elapsed >= self._total):
                self.finish()
        return False

    def __repr__(self) -> str:
        return f"{self._caller}({'' if self._total is None else f'total={self._total}'})"


class _EndedEpoch(NamedTuple):
    number: int  # from 1 on
    stop: int  # the row after its last one
    figures: list[str]


def _single_unit(point: Period | None) -> Period | None:
    """A point, if it is given in one unit that can be counted."""
    return point if point is not None and len(point.units) == 1 else None


def _is_other_process() -> bool:
    # Asking for the process index makes JAX claim its devices, which a run of one process need not want.
    return jax.distributed.is_initialized() and jax.process_index() != 0
