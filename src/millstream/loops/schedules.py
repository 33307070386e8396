"""The schedules there are, and the words that make them."""

import datetime
import math
from collections.abc import Mapping
from typing import Any

from millstream.loops.elapsed import Elapsed, require_elapsed
from millstream.loops.period import Period, as_period, named_point, now_and_before, units_given
from millstream.loops.schedule import Schedule, as_schedule
from millstream.text.errors import describe_value


class _Constant(Schedule):
    def __init__(self, value: bool) -> None:
        self.always = value

    def __call__(self, elapsed: Elapsed) -> bool:
        return self.always

    def next_due(self, steps: int, epoch: int | None) -> float | None:
        return steps + 1 if self.always else math.inf

    def __repr__(self) -> str:
        return "always()" if self.always else "never()"


class _Last(Schedule):
    def __call__(self, elapsed: Elapsed) -> bool:
        require_elapsed(self, elapsed)
        return elapsed.final

    def next_due(self, steps: int, epoch: int | None) -> float | None:
        return math.inf  # where a run ends is known to whoever asks

    def __repr__(self) -> str:
        return "last()"


class _Every(Schedule):
    def __init__(self, unit: str, period: float) -> None:
        self.always = unit == "steps" and period == 1
        self._unit = unit
        self._period = period

    def __call__(self, elapsed: Elapsed) -> bool:
        require_elapsed(self, elapsed)
        if self._unit == "steps":
            return elapsed.steps % self._period == 0 and elapsed.steps > 0
        now, before = now_and_before(elapsed, self._unit)
        return now // self._period > before // self._period

    def next_due(self, steps: int, epoch: int | None) -> float | None:
        if self._unit == "steps":
            return (steps // self._period + 1) * self._period
        if self._unit == "epochs" and epoch is not None:
            return (steps // (epoch * self._period) + 1) * epoch * self._period
        return None

    def __repr__(self) -> str:
        return f"every({self._unit}={self._period})"


class _After(Schedule):
    def __init__(self, point: Period) -> None:
        self._point = point

    def __call__(self, elapsed: Elapsed) -> bool:
        return self._point.reached(elapsed)

    def then(self, schedule: Any) -> Schedule:
        """From this point on another schedule, which counts from here."""
        return piecewise(never(), {self._point: schedule})

    __rshift__ = then

    def every(self, steps: int | None = None, **units: Any) -> Schedule:
        """From this point on `every(...)`, counted from here."""
        return self.then(every(steps, **units))

    def __repr__(self) -> str:
        return f"after({repr(self._point)[3:-1]})"


class EpochBegins(Schedule):
    """Due at the first step of every epoch."""

    def __call__(self, elapsed: Elapsed) -> bool:
        return elapsed.starts_epoch

    def next_due(self, steps: int, epoch: int | None) -> float | None:
        return None if epoch is None else -(-steps // epoch) * epoch + 1


class EpochEnds(Schedule):
    """Due at the last step of every epoch, and of the run if `last`."""

    def __init__(self, last: bool = False) -> None:
        self._last = last

    def __call__(self, elapsed: Elapsed) -> bool:
        return elapsed.ends_epoch or (self._last and elapsed.final)

    def next_due(self, steps: int, epoch: int | None) -> float | None:
        return None if epoch is None else (steps // epoch + 1) * epoch


class _First(Schedule):
    def __init__(self, length: Period) -> None:
        self._length = length

    def __call__(self, elapsed: Elapsed) -> bool:
        require_elapsed(self, elapsed)
        return not self._length.reached(elapsed.step_before())

    def __repr__(self) -> str:
        return f"first({repr(self._length)[3:-1]})"


class _Piecewise(Schedule):
    def __init__(self, schedule: Schedule, later: list[tuple[Period, Schedule]]) -> None:
        self._schedule = schedule
        self._later = later

    def __call__(self, elapsed: Elapsed) -> bool:
        due, counted = self._schedule, elapsed
        for point, schedule in self._later:
            if point.reached(elapsed):
                due, counted = schedule, point.since(elapsed)
        return due(counted)

    def __repr__(self) -> str:
        return f"piecewise({self._schedule!r}, {dict(self._later)!r})"


def every(
    steps: int | None = None,
    *,
    samples: int | None = None,
    epochs: int | None = None,
    time: float | datetime.timedelta | None = None,
) -> Schedule:
    """Due whenever another so many steps, samples, epochs or seconds are complete.

    Example:
        >>> [step for step in range(1, 31) if ms.every(10)(ms.Elapsed(steps=step))]
        [10, 20, 30]
    """
    units = units_given("every", {"steps": steps, "samples": samples, "epochs": epochs, "time": time}, least=1)
    if len(units) != 1:
        raise ValueError(
            f"every needs exactly one of steps, samples, epochs and time. Got {units or 'none'}. "
            "Combine several with |: every(100) | every(time=60)."
        )
    return _Every(*next(iter(units.items())))


def at(
    steps: int | None = None,
    *,
    samples: int | None = None,
    epochs: int | None = None,
    time: float | datetime.timedelta | None = None,
    date: datetime.datetime | None = None,
) -> Period:
    """A point of a run: where to stop, or a schedule that is due there, once.

    Example:
        >>> stop = ms.at(epochs=10)
        >>> due = ms.at(100) | ms.at(1000)
    """
    return Period(steps, samples, epochs, time, date)


def once(steps: int | None = None, **units: Any) -> Period:
    """Due at one step only: that which reaches this point. The same as `at`, where that reads better.

    Example:
        >>> ms.once(epochs=1)
        at(epochs=1)
    """
    return named_point("once", steps, **units)


def after(steps: int | None = None, **units: Any) -> _After:
    """Due at every step from this point on; `after(100).every(10)` and `after(100) >> schedule` count from there.

    Example:
        >>> [step for step in range(1, 20) if ms.after(3).every(5)(ms.Elapsed(steps=step))]
        [8, 13, 18]
    """
    return _After(named_point("after", steps, **units))


def first(steps: int | None = None, **units: Any) -> Schedule:
    """Due at the first step, or the first so many steps (samples, epochs, seconds).

    Example:
        >>> [step for step in range(1, 5) if ms.first(2)(ms.Elapsed(steps=step))]
        [1, 2]
    """
    return _First(named_point("first", 1 if steps is None and not units else steps, **units))


def last() -> Schedule:
    """Due at the end of the run, after its last step.

    Example:
        >>> due = ms.every(100) | ms.last()
    """
    return _Last()


def always() -> Schedule:
    """Due at every step.

    Example:
        >>> ms.always()(ms.Elapsed(steps=1))
        True
    """
    return _Constant(True)


def never() -> Schedule:
    """Never due; as `stop`, a run that only its data or a callback ends.

    Example:
        >>> ms.never()(ms.Elapsed(steps=1))
        False
    """
    return _Constant(False)


def piecewise(schedule: Any, later: Mapping[Any, Any]) -> Schedule:
    """One schedule, and others from given points on, each counting from its point.

    Example:
        >>> due = ms.piecewise(ms.every(10), {100: ms.every(50), ms.at(epochs=10): ms.never()})

    Args:
        schedule: Due until the first point.
        later: What is due from which point on; an int is a number of steps. Of the points that are reached the one
            that comes last in this mapping counts.
    """
    if not isinstance(later, Mapping):
        raise TypeError(
            "piecewise needs later as a dict from points to schedules, such as {100: ms.every(50)}. "
            f"Got {describe_value(later)}."
        )
    pieces = [(as_period("piecewise", "a point", point), as_schedule("piecewise", s)) for point, s in later.items()]
    return _Piecewise(as_schedule("piecewise", schedule), pieces)
