"""When a callback is due: a pure function of the elapsed, that can be combined with others.

Schedules are compared by identity, so two equal ones are two keys of a dict, and are never changed by being asked.
"""

from collections.abc import Callable
from typing import Any

from millstream.loops.elapsed import Elapsed
from millstream.text.errors import describe_value


class Schedule:
    """Says at each step whether it is due.

    Example:
        >>> schedule = ms.every(10) & ~ms.first(100)
        >>> schedule(ms.Elapsed(steps=110))
        True
    """

    always = False  # whether it is due at every step, so that nobody need ask

    def __call__(self, elapsed: Elapsed) -> bool:
        """Whether it is due at the current step."""
        raise NotImplementedError

    def next_due(self, steps: int, epoch: int | None) -> float | None:
        """The first step behind `steps` at which it is due, inf if none, None if it has to be asked.

        Args:
            steps: Steps so far.
            epoch: Steps of an epoch, if it is given in steps.
        """
        return None

    def __and__(self, other: Any) -> "Schedule":
        ours, theirs = self, as_schedule("&", other)
        return _Function(lambda elapsed: ours(elapsed) and theirs(elapsed), f"({self!r} & {theirs!r})")

    def __or__(self, other: Any) -> "Schedule":
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


def as_schedule(who: str, value: Any) -> Schedule:
    """A schedule, or any function of the elapsed as one."""
    if isinstance(value, Schedule):
        return value
    if not callable(value):
        raise TypeError(
            f"{who} needs a schedule such as every(10), or a function of the elapsed. Got {describe_value(value)}."
        )
    return _Function(value, getattr(value, "__name__", repr(value)))
