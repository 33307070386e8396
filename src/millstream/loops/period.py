"""Points of a run, in steps, samples, epochs, seconds or as a date."""

import datetime
import math
from typing import Any

from millstream.loops.elapsed import Elapsed, require_elapsed, seconds
from millstream.loops.schedule import Schedule, as_schedule
from millstream.text.errors import describe_value, require_int


class Period(Schedule):
    """A point of a run, reached as soon as any of its units is. As a schedule it is due once, at that step.

    Example:
        >>> stop = ms.at(epochs=3, time=3600)  # whatever comes first
        >>> stop.reached(ms.Elapsed(steps=100, epochs=3))
        True

    Args:
        steps: Completed steps.
        samples: Samples.
        epochs: Completed epochs.
        time: Seconds of the run, or a timedelta.
        date: A datetime.
    """

    def __init__(
        self,
        steps: int | None = None,
        samples: int | None = None,
        epochs: int | None = None,
        time: float | datetime.timedelta | None = None,
        date: datetime.datetime | None = None,
    ) -> None:
        self._set("at", steps, samples, epochs, time, date)

    def _set(
        self, who: str, steps: Any, samples: Any = None, epochs: Any = None, time: Any = None, date: Any = None
    ) -> None:
        units = units_given(who, {"steps": steps, "samples": samples, "epochs": epochs, "time": time}, least=0)
        if date is not None and not isinstance(date, datetime.datetime):
            raise TypeError(f"{who} needs date to be a datetime.datetime. Got {describe_value(date)}.")
        if not units and date is None:
            forms = ", ".join(f"{who}({unit})" for unit in ("100", "samples=5000", "epochs=3", "time=60"))
            raise ValueError(f"{who} needs a point: {forms} or {who}(date=...). Got none.")
        self._date = date
        self.units: dict[str, float] = units

    def reached(self, elapsed: Elapsed) -> bool:
        """Whether any of its units has been reached."""
        require_elapsed(self, elapsed)
        for unit, value in self.units.items():
            if (elapsed.steps if unit == "steps" else now_and_before(elapsed, unit)[0]) >= value:
                return True
        return self._date is not None and elapsed.date >= self._date.timestamp()

    def __call__(self, elapsed: Elapsed) -> bool:
        return self.reached(elapsed) and not self.reached(elapsed.step_before())

    def since(self, elapsed: Elapsed) -> Elapsed:
        """The elapsed, counted from this point on in the units the point is given in."""
        require_elapsed(self, elapsed)
        changes: dict[str, float] = {}
        for unit, value in self.units.items():
            changes[unit] = now_and_before(elapsed, unit)[0] - value
            if unit != "steps":
                changes[f"{unit}_before"] = max(now_and_before(elapsed, unit)[1] - value, 0)
        return elapsed.replace(**changes)

    def count(self, elapsed: Elapsed) -> int:
        """How often this length fits into what has elapsed; for periods of one unit."""
        require_elapsed(self, elapsed)
        ((unit, value),) = self.units.items()
        return int((elapsed.steps if unit == "steps" else now_and_before(elapsed, unit)[0]) // value)

    def next_due(self, steps: int, epoch: int | None) -> float | None:
        lengths = {"steps": 1, "epochs": epoch}
        told = [(value, lengths.get(unit)) for unit, value in self.units.items()]
        if self._date is not None or any(length is None for _, length in told):
            return None
        point = min(value * length for value, length in told if length is not None)
        return point if point > steps else math.inf

    def __repr__(self) -> str:
        units = [f"{unit}={value}" for unit, value in self.units.items()]
        return f"at({', '.join(units + ([f'date={self._date}'] if self._date is not None else []))})"


def named_point(who: str, steps: Any = None, **units: Any) -> Period:
    """A point whose errors name who asked for it."""
    point = Period.__new__(Period)
    point._set(who, steps, **units)
    return point


def as_period(who: str, name: str, value: Any) -> Period:
    """A point given as a number of steps, a timedelta or a `Period`."""
    if isinstance(value, Period):
        return value
    if isinstance(value, datetime.timedelta):
        return Period(time=value)
    if isinstance(value, int) and not isinstance(value, bool):
        require_int(who, name, value, least=0)
        return Period(value)
    raise TypeError(f"{who} needs {name} as steps or as at(samples=...) and the like. Got {describe_value(value)}.")


def units_given(who: str, given: dict[str, Any], *, least: int) -> dict[str, float]:
    """Those units that are given, checked."""
    units: dict[str, float] = {}
    for unit, value in given.items():
        if value is None:
            continue
        if unit == "time":
            units[unit] = seconds(who, value)
            if least and units[unit] == 0:
                raise ValueError(f"{who} needs time to be more than 0 seconds.")
        else:
            require_int(who, unit, value, least=least)
            units[unit] = value
    return units


def now_and_before(elapsed: Elapsed, unit: str) -> tuple[Any, Any]:
    """What has elapsed in a unit at this step, and at the one before."""
    if unit == "samples":
        return elapsed.samples, elapsed.samples_before
    if unit == "time":
        return elapsed.time, elapsed.time_before
    if unit == "steps":
        return elapsed.steps, elapsed.steps - 1
    if elapsed.epochs is None:
        raise ValueError(
            "A schedule by epochs needs a run that knows how long an epoch is: give the loop epoch_duration, "
            "or a DataLoader, which says it itself."
        )
    return elapsed.epochs, elapsed.epochs_before


def as_stop(who: str, stop: Any, name: str = "stop") -> Period | Schedule:
    """Where to stop: a point, or a function of the elapsed."""
    if callable(stop) and not isinstance(stop, Period):
        return as_schedule(who, stop)
    return as_period(who, name, stop)


def as_epoch(who: str, duration: Any) -> Period:
    """How long an epoch is: one unit, and not that of epochs."""
    epoch = as_period(who, "epoch_duration", duration)
    if len(epoch.units) != 1 or "epochs" in epoch.units or not all(epoch.units.values()):
        raise ValueError(f"{who} needs epoch_duration in steps, or as at(samples=...) or at(time=...). Got {epoch}.")
    return epoch
