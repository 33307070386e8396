"""How far a run is in the unit of its bar, how fast it goes, and when it will be there."""

import time

from millstream.loops.elapsed import Elapsed
from millstream.loops.schedules import Period

_DAY = 24 * 3600
_PLAIN_INTERVAL, _PLAIN_SHARE = 10.0, 0.05  # between lines in a file: seconds, and a share of the time so far


class BarProgress:
    """Where a run began, where it is, and what follows from that.

    The first step is left out of the speed, because it compiles; so is all that an earlier run did.

    Args:
        total: Where the run will end, in one unit; None if unknown.
        start: How far it was before its first step.
    """

    def __init__(self, total: Period | None, start: Elapsed) -> None:
        ((self.unit, self.total),) = [("steps", None)] if total is None else total.units.items()
        self.begin: float = getattr(start, self.unit)
        self.done = self.begin
        self.steps = 0
        self.seconds = 0.0
        self.start_time = start.time
        self._start = start
        self._first: tuple[float, int, float] | None = None  # seconds, steps, done after the first step seen
        self._moved = 0.0  # seconds when `done` grew last
        self._epoch_start = (0.0, 0, 0.0)  # of the current epoch: seconds, steps, and seconds in tests until then

    def move(self, elapsed: Elapsed) -> None:
        """Take in how far the run is now."""
        self.seconds = _now(elapsed) - self._start.time
        self.steps = elapsed.steps - self._start.steps
        done = getattr(elapsed, self.unit)
        if done != self.done:
            self.done, self._moved = done, self.seconds
        if self._first is None:
            self._first = self.seconds, self.steps, done

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
        of = f"/{self.total}" if self.unit == "epochs" and self.total is not None else ""
        parts = [f"epoch {elapsed.epochs}{of}", f"{done - before} steps", _exact_text(seconds - begun)]
        if before == 0 and self._first is not None and self._first[1] < done:
            begun, before, _ = self._first
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
    def seconds_left(self) -> float | None:
        """Until the total is reached, at this run's speed; None if that is not known yet."""
        if self.total is None or self._first is None or self.done <= self._first[2]:
            return None
        speed = (self.done - self._first[2]) / max(self._moved - self._first[0], 1e-9)
        return max((self.total - self.done) / speed - (self.seconds - self._moved), 0.0)

    @property
    def seconds_per_step(self) -> float | None:
        """How long a step takes; None if there was none."""
        seconds, steps, _ = self._first or (0.0, 0, 0)
        if self.steps > steps:
            return (self.seconds - seconds) / (self.steps - steps)
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
