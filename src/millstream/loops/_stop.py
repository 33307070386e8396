"""When a run stops, and how long its epochs are."""

from typing import Any

from millstream.loops.period import Period, as_period
from millstream.loops.schedule import Schedule, as_schedule


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
