"""The schedules there are, and the words that make them."""

import dataclasses
import datetime
import math
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, Unpack

from millstream.loops.elapsed import Elapsed, require_elapsed, seconds
from millstream.loops.skips import Skips
from millstream.plan.phases import EpochLengths
from millstream.text.errors import describe_value, require_int
from millstream.text.keywords import answer_keywords


@dataclasses.dataclass(frozen=True)
class Epochs:
    """Where the epochs of a run end, if they are given in steps: where those of its data do.

    Attributes:
        length: Batches of an epoch, or of each one, those that the run leaves out included.
        skips: Which it leaves out.
    """

    length: int | EpochLengths
    skips: Skips = dataclasses.field(default_factory=Skips)

    def count(self, steps: int) -> int:
        """How many are complete after that many steps."""
        batches = self.skips.with_left_out(steps)
        return batches // self.length if isinstance(self.length, int) else self.length.completed(batches)

    def count_each(self, steps: range) -> list[int]:
        """The same for several numbers of steps."""
        if self.skips.ranges or not isinstance(self.length, int):
            return [self.count(step) for step in steps]
        return [step // self.length for step in steps]

    def end(self, number: int) -> int:
        """The first step after which that many are complete."""
        return self.skips.steps_to(number * self.length if isinstance(self.length, int) else self.length.end(number))


class Schedule:
    """Says at each step whether it is due.

    Example:
        >>> schedule = ms.every(10) & ~ms.loops.first(100)
        >>> schedule(ms.loops.Elapsed(steps=110))
        True
    """

    always = False  # whether it is due at every step, so that nobody need ask

    def __call__(self, elapsed: Elapsed) -> bool:
        """Whether it is due at the current step."""
        raise NotImplementedError

    def next_due(self, steps: int, epochs: Epochs | None) -> float | None:
        """The first step after `steps` at which it is due, inf if none, None if it has to be asked.

        Args:
            steps: Steps so far.
            epochs: Where epochs end, if they are given in steps: `epochs.count(steps)` are complete after some steps,
                and `epochs.end(3)` is the step that completes the third.
        """
        return None

    def __and__(self, other: "Due") -> "Schedule":
        ours, theirs = self, as_schedule("&", other)
        return _Function(lambda elapsed: ours(elapsed) and theirs(elapsed), f"({self!r} & {theirs!r})")

    def __or__(self, other: "Due") -> "Schedule":
        ours, theirs = self, as_schedule("|", other)
        return _Function(lambda elapsed: ours(elapsed) or theirs(elapsed), f"({self!r} | {theirs!r})")

    def __invert__(self) -> "Schedule":
        return _Function(lambda elapsed: not self(elapsed), f"~{self!r}")

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r} is neither true nor false; ask it with an elapsed, and combine with &, | and ~.")


class _Function(Schedule):
    """Any function of the elapsed."""

    def __init__(self, fn: Callable[[Elapsed], Any], text: str) -> None:
        self._fn = fn
        self._text = text

    def __call__(self, elapsed: Elapsed) -> bool:
        return bool(self._fn(elapsed))

    def __repr__(self) -> str:
        return self._text


def as_schedule(caller: str, value: Any) -> Schedule:
    """A schedule, or any function of the elapsed as one."""
    if isinstance(value, Schedule):
        return value
    if not callable(value):
        raise TypeError(
            f"{caller} needs a schedule such as every(10), or a function of the elapsed. Got {describe_value(value)}."
        )
    return _Function(value, getattr(value, "__name__", repr(value)))


class Period(Schedule):
    """A point of a run, reached as soon as any of its units is. As a schedule it is due once, at that step.

    Example:
        >>> stop = ms.at(epochs=3, time=3600)  # whatever comes first
        >>> stop.reached(ms.loops.Elapsed(steps=100, epochs=3))
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
        self, caller: str, steps: Any, samples: Any = None, epochs: Any = None, time: Any = None, date: Any = None
    ) -> None:
        units = _units_given(caller, {"steps": steps, "samples": samples, "epochs": epochs, "time": time}, least=0)
        if date is not None and not isinstance(date, datetime.datetime):
            raise TypeError(f"{caller} needs date to be a datetime.datetime. Got {describe_value(date)}.")
        if not units and date is None:
            forms = ", ".join(f"{caller}({unit})" for unit in ("100", "samples=5000", "epochs=3", "time=60"))
            raise ValueError(f"{caller} needs a point: {forms} or {caller}(date=...). Got none.")
        self._date = date
        self.units: dict[str, float] = units

    def reached(self, elapsed: Elapsed) -> bool:
        """Whether any of its units has been reached."""
        if type(elapsed) is not Elapsed:  # every step asks for its stop here, and a call less is a microsecond less
            require_elapsed(self, elapsed)
        for unit, value in self.units.items():
            if (elapsed.steps if unit == "steps" else _now_and_before(elapsed, unit)[0]) >= value:
                return True
        return self._date is not None and elapsed.date >= self._date.timestamp()

    def __call__(self, elapsed: Elapsed) -> bool:
        return self.reached(elapsed) and not self.reached(elapsed.step_before())

    def since(self, elapsed: Elapsed) -> Elapsed:
        """The elapsed, counted from this point on in the units the point is given in."""
        require_elapsed(self, elapsed)
        changes: dict[str, float] = {}
        for unit, value in self.units.items():
            changes[unit] = _now_and_before(elapsed, unit)[0] - value
            if unit != "steps":
                changes[f"{unit}_before"] = max(_now_and_before(elapsed, unit)[1] - value, 0)
        return elapsed.replace(**changes)

    def count(self, elapsed: Elapsed) -> int:
        """How often this length fits into what has elapsed; for periods of one unit."""
        require_elapsed(self, elapsed)
        ((unit, value),) = self.units.items()
        return int((elapsed.steps if unit == "steps" else _now_and_before(elapsed, unit)[0]) // value)

    def next_due(self, steps: int, epochs: Epochs | None) -> float | None:
        points: list[float] = []
        for unit, value in self.units.items():
            if unit == "steps":
                points.append(value)
            elif unit == "epochs" and epochs is not None:
                points.append(epochs.end(int(value)))
            else:
                return None
        if self._date is not None:
            return None
        point = min(points)
        return point if point > steps else math.inf

    def __repr__(self) -> str:
        units = [f"{unit}={value}" for unit, value in self.units.items()]
        return f"at({', '.join(units + ([f'date={self._date}'] if self._date is not None else []))})"


def _named_point(caller: str, steps: Any = None, **units: Any) -> Period:
    """A point whose errors name who asked for it."""
    point = Period.__new__(Period)
    point._set(caller, steps, **units)
    return point


def as_period(caller: str, name: str, value: Any) -> Period:
    """A point given as a number of steps, a timedelta or a `Period`."""
    if isinstance(value, Period):
        return value
    if isinstance(value, datetime.timedelta):
        return Period(time=value)
    if isinstance(value, int) and not isinstance(value, bool):
        require_int(caller, name, value, least=0)
        return Period(value)
    raise TypeError(
        f"{caller} needs {name} as steps or as at(samples=...) and the like: {name}=1000, or "
        f"{name}=ms.at(samples=50_000). Got {describe_value(value)}."
    )


def _units_given(caller: str, given: dict[str, Any], *, least: int) -> dict[str, float]:
    """Those units that are given, checked."""
    units: dict[str, float] = {}
    for unit, value in given.items():
        if value is None:
            continue
        if unit == "time":
            units[unit] = seconds(caller, value)
            if least and units[unit] == 0:
                raise ValueError(f"{caller} needs time to be more than 0 seconds.")
        else:
            require_int(caller, unit, value, least=least)
            units[unit] = value
    return units


def _now_and_before(elapsed: Elapsed, unit: str) -> tuple[Any, Any]:
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
            "or a DataLoader, which says it itself (over an IterableSource, if that has length=)."
        )
    return elapsed.epochs, elapsed.epochs_before


def as_every(caller: str, name: str, value: Any) -> Schedule:
    """A schedule, any function of the elapsed, or a number of steps."""
    if not isinstance(value, int):
        return as_schedule(caller, value)
    require_int(caller, name, value, least=1)
    return every(value)


def as_stop(caller: str, stop: Any, name: str = "stop") -> Period | Schedule:
    """Where to stop: a point, or a function of the elapsed."""
    if callable(stop) and not isinstance(stop, Period):
        return as_schedule(caller, stop)
    return as_period(caller, name, stop)


def as_epoch(caller: str, duration: Any) -> Period | EpochLengths:
    """How long an epoch is: one unit, and not that of epochs; or how long each one is."""
    if isinstance(duration, EpochLengths):
        return duration
    epoch = as_period(caller, "epoch_duration", duration)
    if len(epoch.units) != 1 or "epochs" in epoch.units or not all(epoch.units.values()):
        raise ValueError(f"{caller} needs epoch_duration in steps, or as at(samples=...) or at(time=...). Got {epoch}.")
    return epoch


class _Constant(Schedule):
    def __init__(self, value: bool) -> None:
        self.always = value

    def __call__(self, elapsed: Elapsed) -> bool:
        return self.always

    def next_due(self, steps: int, epochs: Epochs | None) -> float | None:
        return steps + 1 if self.always else math.inf

    def __repr__(self) -> str:
        return "always()" if self.always else "never()"


class _Last(Schedule):
    def __call__(self, elapsed: Elapsed) -> bool:
        require_elapsed(self, elapsed)
        return elapsed.final

    def next_due(self, steps: int, epochs: Epochs | None) -> float | None:
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
        now, before = _now_and_before(elapsed, self._unit)
        return now // self._period > before // self._period

    def next_due(self, steps: int, epochs: Epochs | None) -> float | None:
        if self._unit == "steps":
            return (steps // self._period + 1) * self._period
        if self._unit == "epochs" and epochs is not None:
            period = int(self._period)
            return epochs.end((epochs.count(steps) // period + 1) * period)
        return None

    def __repr__(self) -> str:
        return f"every({self._unit}={self._period})"


class Units(TypedDict, total=False):
    """What a length can be given in, besides steps."""

    samples: int | None
    epochs: int | None
    time: float | datetime.timedelta | None


class PointUnits(Units, total=False):
    """What a point can be given in, besides steps."""

    date: datetime.datetime | None


Due = Schedule | Callable[[Elapsed], bool]


class _After(Schedule):
    def __init__(self, point: Period) -> None:
        self._point = point

    def __call__(self, elapsed: Elapsed) -> bool:
        return self._point.reached(elapsed)

    def then(self, schedule: "Due") -> Schedule:
        """From this point on another schedule, which counts from here."""
        return piecewise(never(), {self._point: schedule})

    __rshift__ = then

    def every(self, steps: int | None = None, **units: Unpack[Units]) -> Schedule:
        """From this point on `every(...)`, counted from here."""
        return self.then(every(steps, **units))

    def __repr__(self) -> str:
        return f"after({repr(self._point)[3:-1]})"


class EpochBegins(Schedule):
    """Due at the first step of every epoch."""

    def __call__(self, elapsed: Elapsed) -> bool:
        return elapsed.starts_epoch

    def next_due(self, steps: int, epochs: Epochs | None) -> float | None:
        if epochs is None:
            return None
        complete = epochs.count(steps)
        return (steps if steps in (0, epochs.end(complete)) else epochs.end(complete + 1)) + 1


class EpochEnds(Schedule):
    """Due at the last step of every epoch."""

    def __call__(self, elapsed: Elapsed) -> bool:
        return elapsed.ends_epoch

    def next_due(self, steps: int, epochs: Epochs | None) -> float | None:
        return None if epochs is None else epochs.end(epochs.count(steps) + 1)


class OrFinal(Schedule):
    """Due when another schedule is, and at the last step of the run.

    Args:
        schedule: The other one.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def __call__(self, elapsed: Elapsed) -> bool:
        return self.schedule(elapsed) or elapsed.final

    def next_due(self, steps: int, epochs: Epochs | None) -> float | None:
        return self.schedule.next_due(steps, epochs)

    def __repr__(self) -> str:
        return repr(self.schedule)


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


@answer_keywords
def every(
    steps: int | None = None,
    *,
    samples: int | None = None,
    epochs: int | None = None,
    time: float | datetime.timedelta | None = None,
) -> Schedule:
    """Due whenever another n steps, samples, epochs or seconds are complete.

    Example:
        >>> [step for step in range(1, 31) if ms.every(10)(ms.loops.Elapsed(steps=step))]
        [10, 20, 30]
    """
    units = _units_given("every", {"steps": steps, "samples": samples, "epochs": epochs, "time": time}, least=1)
    if len(units) != 1:
        raise ValueError(
            f"every needs exactly one of steps, samples, epochs and time. Got {units or 'none'}. "
            "Combine several with |: every(100) | every(time=60)."
        )
    return _Every(*next(iter(units.items())))


@answer_keywords
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


def once(steps: int | None = None, **units: Unpack[PointUnits]) -> Period:
    """Due at one step only: that which reaches this point. The same as `at`, where that reads better.

    Example:
        >>> ms.loops.once(epochs=1)
        at(epochs=1)
    """
    return _named_point("once", steps, **units)


def after(steps: int | None = None, **units: Unpack[PointUnits]) -> _After:
    """Due at every step from this point on; `after(100).every(10)` and `after(100) >> schedule` count from there.

    Example:
        >>> [step for step in range(1, 20) if ms.after(3).every(5)(ms.loops.Elapsed(steps=step))]
        [8, 13, 18]
    """
    return _After(_named_point("after", steps, **units))


def first(steps: int | None = None, **units: Unpack[PointUnits]) -> Schedule:
    """Due at the first step, or the first n steps (samples, epochs, seconds).

    Example:
        >>> [step for step in range(1, 5) if ms.loops.first(2)(ms.loops.Elapsed(steps=step))]
        [1, 2]
    """
    return _First(_named_point("first", 1 if steps is None and not units else steps, **units))


def last() -> Schedule:
    """Due at the end of the run, after its last step.

    Example:
        >>> due = ms.every(100) | ms.loops.last()
    """
    return _Last()


def always() -> Schedule:
    """Due at every step.

    Example:
        >>> ms.loops.always()(ms.loops.Elapsed(steps=1))
        True
    """
    return _Constant(True)


def never() -> Schedule:
    """Never due; as `stop`, a run that only its data or a callback ends.

    Example:
        >>> ms.never()(ms.loops.Elapsed(steps=1))
        False
    """
    return _Constant(False)


def piecewise(schedule: Due, later: Mapping[int | Period | datetime.timedelta, Due]) -> Schedule:
    """One schedule, and others from given points on, each counting from its point.

    Example:
        >>> due = ms.loops.piecewise(ms.every(10), {100: ms.every(50), ms.at(epochs=10): ms.never()})

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
