"""How far a run is in the unit of its bar, how fast it goes, and when it will be there."""

import time

from millstream.loops.elapsed import Elapsed
from millstream.loops.schedules import Epochs, Period

_DAY = 24 * 3600
_PLAIN_INTERVAL, _PLAIN_SHARE = 10.0, 0.05  # between lines in a file: seconds, and a share of the time so far


class BarProgress:
    """Where a run began, where it is, and what follows from that.

    A run that ends at an epoch, and knows where epochs end, is shown epoch by epoch: its bar is that of the steps of
    the current one. The first step is left out of the speed, because it compiles; so is all that an earlier run did.

    Args:
        total: Where the run will end, in one unit; None if unknown.
        start: How far it was before its first step.
        epochs: Where its epochs end; None if unknown.
        within: What the run is a part of, such as a test of an epoch.

    Attributes:
        label: What the bar is of, such as an epoch; empty for that of the run.
        unit: What `done` and `total` count.
        done: How much of it is done.
        total: How much there is; None if unknown.
        measure: What `speed` counts: the unit of the run, or steps where its epochs are shown one by one.
        steps: Steps of the run.
        seconds: That it has taken.
        start_time: The elapsed time at its begin.
    """

    def __init__(
        self, total: Period | None, start: Elapsed, epochs: Epochs | None = None, *, within: str | None = None
    ) -> None:
        ((self.unit, self.total),) = [("steps", None)] if total is None else total.units.items()
        by_epochs = epochs is not None and within is None and (total is None or self.unit == "epochs")
        self._epochs = epochs if by_epochs else None
        self._last_epoch = self.total if self.unit == "epochs" else None
        self.measure, self._goal = self.unit, self.total  # how much there is of that
        if self._epochs is not None:
            self.unit = self.measure = "steps"
            self._goal = None if self._last_epoch is None else self._epochs.end(int(self._last_epoch))
        self.label = "" if within is None else within
        self.done: float = 0
        self.steps = 0
        self.seconds = 0.0
        self.start_time = start.time
        self._start = self._now = start
        self._position: float = getattr(start, self.measure)
        self._begin = self._position
        self._first: tuple[float, int, float, float] | None = None  # seconds, steps, position, tests after one step
        self._moved = 0.0  # seconds when the position changed last
        self._tests = (0.0, 0.0)  # seconds in tests, and the position at which that changed last
        self._epoch_start = (0.0, 0, 0.0)  # of the current epoch: seconds, steps, and seconds in tests until then
        self._count(start)

    def move(self, elapsed: Elapsed, testing: float = 0.0) -> None:
        """Take in how far the run is now.

        Args:
            elapsed: That of the run.
            testing: Seconds that it has spent in tests.
        """
        self._now = elapsed
        self.seconds = _now(elapsed) - self._start.time
        self.steps = elapsed.steps - self._start.steps
        position = getattr(elapsed, self.measure)
        if position != self._position or testing != self._tests[0]:
            self._position, self._moved = position, self.seconds
        if testing != self._tests[0]:
            self._tests = testing, position
        if self._first is None:
            self._first = self.seconds, self.steps, position, testing
        self._count(elapsed)

    def _count(self, elapsed: Elapsed) -> None:
        """Say how much is done: of the run, or of the epoch of its last step."""
        if self._epochs is None:
            self.done = getattr(elapsed, self.unit)
            return
        complete = elapsed.epochs_before or 0
        first, stop = self._epochs.end(complete), self._epochs.end(complete + 1)
        self.label = f"epoch {complete + 1}{self._of_epochs}"
        self.done, self.total = elapsed.steps - first, stop - first

    def close(self) -> None:
        """The run has ended: what is done of it is shown, or of the epoch that it has ended in."""
        if self._epochs is None or (self._last_epoch is not None and self.done != self.total):
            return
        self._epochs, self.label = None, ""
        self.unit = "steps" if self._last_epoch is None else "epochs"
        self.done, self.total = getattr(self._now, self.unit), self._last_epoch

    @property
    def _of_epochs(self) -> str:
        return "" if self._last_epoch is None else f"/{self._last_epoch}"

    @property
    def plain_interval(self) -> float:
        """Seconds between two lines where these stay: ten, or more when the run is long."""
        return max(_PLAIN_INTERVAL, _PLAIN_SHARE * self.seconds)

    def end_epoch(self, elapsed: Elapsed, seconds: float, testing: float) -> list[str]:
        """An epoch in figures: its number, steps, time, and the time of a step without compiling and tests.

        Args:
            elapsed: At its last step.
            seconds: Of the run, up to its end.
            testing: Seconds of the run in tests, up to its end.
        """
        (begun, before, tested), done = self._epoch_start, elapsed.steps - self._start.steps
        self._epoch_start = seconds, done, testing
        number = str(elapsed.epochs).rjust(len(self._of_epochs) - 1)  # so that lines stand below each other
        parts = [f"epoch {number}{self._of_epochs}", f"{done - before} steps", _exact_text(seconds - begun)]
        if before == 0 and self._first is not None and self._first[1] < done:
            begun, before, *_ = self._first
        spent = seconds - begun - (testing - tested)
        if done > before and spent > 0:  # epochs that were one program together have no times of their own
            parts.append(step_time_text(spent / (done - before)))
        return parts

    @property
    def share(self) -> float | None:
        """How much of the total is done, from 0 to 1; None without a total."""
        if self.total is None:
            return None
        return min(self.done / self.total, 1.0) if self.total else 1.0

    @property
    def speed(self) -> float | None:
        """What is done of the run in a second, tests left out; None if that is not known yet."""
        if self._first is None or self._position <= self._first[2]:
            return None
        seconds, _, position, testing = self._first
        return (self._position - position) / max(self._moved - seconds - (self._tests[0] - testing), 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """Until the run ends, at its speed and with as many tests as so far; None if that is not known yet.

        Where nobody knows when the run ends, it is until its epoch does.
        """
        speed = self.speed
        if speed is None or self.total is None:
            return None
        since = self.seconds - self._moved
        if self._goal is None:
            return max((self.total - self.done) / speed - since, 0.0)
        left = (self._goal - self._position) / speed - since
        tested, position = self._tests
        if tested and position > self._begin:
            left += tested / (position - self._begin) * (self._goal - position)
        return max(left, 0.0)

    @property
    def seconds_per_step(self) -> float | None:
        """How long a step takes, tests left out; None if there was none."""
        seconds, steps, _, testing = self._first or (0.0, 0, 0.0, 0.0)
        if self.steps > steps:
            return (self.seconds - seconds - (self._tests[0] - testing)) / (self.steps - steps)
        return self.seconds / self.steps if self.steps else None


def _now(elapsed: Elapsed) -> float:
    """Seconds of the run until now: an elapsed says when its step began, and its date how long ago that was."""
    if not elapsed.date_start:
        return elapsed.time
    return elapsed.time + max(time.time() - elapsed.date, 0.0)


def duration_text(seconds: float) -> str:
    """A length of time: 42s, 3:07, 2:05:09, 3d 14:05.

    Example:
        >>> duration_text(187)
        '3:07'
    """
    whole = round(seconds)
    minutes, hours, days = whole // 60 % 60, whole // 3600 % 24, whole // _DAY
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{minutes}:{whole % 60:02d}"
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if whole < _DAY else f"{days}d {hours}:{minutes:02d}"


def _exact_text(seconds: float) -> str:
    return f"{seconds:.1f}s" if seconds < 60 else duration_text(seconds)


def step_time_text(seconds: float) -> str:
    """How long a step takes: 1.2s/step, 34ms/step, 120us/step.

    Example:
        >>> step_time_text(0.034)
        '34ms/step'
    """
    scale, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    value = seconds * scale
    return f"{value:.{0 if value >= 10 else 1}f}{unit}/step"
