"""The schedules of ciclo."""

import datetime
from collections.abc import Mapping
from typing import Any

import millstream as ms
from millstream.loops.schedules import Period
from millstream.loops.schedules import Schedule as Schedule
from millstream.loops.schedules import after as after
from millstream.loops.schedules import always as always
from millstream.loops.schedules import never as never
from millstream.text.errors import require_int

__all__ = ["Schedule", "after", "always", "at", "every", "never", "piecewise"]


def every(
    steps: int | None = None,
    *,
    samples: int | None = None,
    time: float | datetime.timedelta | None = None,
    steps_offset: int = 0,
) -> Schedule:
    """Due whenever that many more steps, samples or seconds are complete.

    Args:
        steps: Steps.
        samples: Samples.
        time: Seconds, or a timedelta.
        steps_offset: The step that steps are counted from: `every(10, steps_offset=1)` is `after(1).every(10)`.
    """
    require_int("every", "steps_offset", steps_offset, least=0)
    if steps_offset == 0:
        return ms.every(steps, samples=samples, time=time)
    if steps is None:
        units = [name for name, value in {"samples": samples, "time": time}.items() if value is not None]
        raise ValueError(
            f"every counts steps_offset in steps, and {', '.join(units) or 'nothing'} has no steps. Write "
            "after(...).every(...) instead."
        )
    return after(steps_offset).every(steps, samples=samples, time=time)


def at(
    steps: int | None = None,
    *,
    samples: int | None = None,
    time: float | datetime.timedelta | None = None,
    date: datetime.datetime | float | None = None,
) -> Period:
    """A point of a run: where to stop.

    Args:
        steps: Completed steps.
        samples: Samples.
        time: Seconds of the run, or a timedelta.
        date: A timestamp in seconds, or a datetime.
    """
    if isinstance(date, int | float) and not isinstance(date, bool):
        date = datetime.datetime.fromtimestamp(date)
    return ms.at(steps, samples=samples, time=time, date=date)  # pyright: ignore[reportArgumentType]


def piecewise(schedule: Any, period_schedules: Mapping[Any, Any]) -> Schedule:
    """One schedule, and others from given points on, each counting from its point.

    Args:
        schedule: Due until the first point.
        period_schedules: What is due from which point on.
    """
    return ms.loops.piecewise(schedule, period_schedules)
