"""How far a run is: steps, samples, epochs and time."""

import datetime
from typing import Any

import jax
import numpy as np

from millstream.text.errors import describe_value

FIELDS = (
    "steps",
    "samples",
    "epochs",
    "time",
    "date_start",
    "samples_before",
    "epochs_before",
    "time_before",
    "starts_epoch",
    "final",
)
INT32_LIMIT = 2**31


class Elapsed:
    """How far a run is, the current step included. A value: nothing is assigned after construction.

    Every field is a plain number on the host, so asking costs nothing. What the step before had reached is kept too,
    which makes every schedule a pure function of the elapsed: `every(samples=1000)` is due when this step has passed a
    multiple of 1,000 that the one before had not.

    Example:
        >>> elapsed = ms.loops.Elapsed(steps=3, samples=96)
        >>> elapsed >= ms.at(samples=96)
        True

    Attributes:
        steps: Completed steps, the current one included.
        samples: Samples they had: the rows that their masks count.
        epochs: Completed epochs; None if the run knows no epochs.
        time: Seconds that the run has taken; it continues when a run is resumed, and does not count the time between.
        date_start: When the run would have started, had it never been stopped, as a timestamp: `date` is now.
        samples_before: Samples before the current step.
        epochs_before: Epochs completed before it.
        time_before: Seconds at the end of the step before it.
        starts_epoch: Whether the current step is the first of an epoch.
        final: Whether this is known to be the last step of the run.
    """

    __slots__ = FIELDS

    def __init__(
        self,
        steps: int = 0,
        samples: int = 0,
        epochs: int | None = None,
        time: float = 0.0,
        date_start: float = 0.0,
        samples_before: int = 0,
        epochs_before: int | None = None,
        time_before: float = 0.0,
        starts_epoch: bool = False,
        final: bool = False,
    ) -> None:
        self.steps = steps
        self.samples = samples
        self.epochs = epochs
        self.time = time
        self.date_start = date_start
        self.samples_before = samples_before
        self.epochs_before = epochs_before
        self.time_before = time_before
        self.starts_epoch = starts_epoch
        self.final = final

    @property
    def date(self) -> float:
        """When this step began, as a timestamp."""
        return self.date_start + self.time

    @property
    def step_samples(self) -> int:
        """Samples of the current step."""
        return self.samples - self.samples_before

    @property
    def ends_epoch(self) -> bool:
        """Whether the current step is the last of an epoch."""
        return self.epochs != self.epochs_before

    def step_before(self) -> "Elapsed":
        """How far the run was one step before."""
        return Elapsed(self.steps - 1, self.samples_before, self.epochs_before, self.time_before, self.date_start)

    def replace(self, **changes: float | None) -> "Elapsed":
        """The same with other fields."""
        fields: Any = {name: changes.get(name, getattr(self, name)) for name in FIELDS}
        return Elapsed(**fields)

    def __sub__(self, other: "Elapsed") -> "Elapsed":
        """What lies between two moments of one run, in every unit."""
        if not isinstance(other, Elapsed):
            return NotImplemented
        epochs = None if self.epochs is None or other.epochs is None else self.epochs - other.epochs
        return Elapsed(
            self.steps - other.steps, self.samples - other.samples, epochs, self.time - other.time, other.date
        )

    def __ge__(self, period: Any) -> bool:
        """Whether a period (or a number of steps) has been reached, in any of its units."""
        if isinstance(period, int):
            return self.steps >= period
        return period.reached(self) if hasattr(period, "reached") else NotImplemented

    def __lt__(self, period: Any) -> bool:
        reached = self.__ge__(period)
        return reached if reached is NotImplemented else not reached

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Elapsed) and all(getattr(self, name) == getattr(other, name) for name in FIELDS)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        epochs = "" if self.epochs is None else f", epochs={self.epochs}"
        return f"Elapsed(steps={self.steps}, samples={self.samples}{epochs}, time={self.time:.3f})"


def _leaves(elapsed: Elapsed) -> tuple[tuple[Any, ...], None]:
    # A number that does not fit 32 bits would be refused by a compiled step that takes the elapsed.
    return tuple(map(_as_leaf, (getattr(elapsed, name) for name in FIELDS))), None


def _as_leaf(value: Any) -> Any:
    return np.float32(value) if type(value) is int and value >= INT32_LIMIT else value


jax.tree_util.register_pytree_node(Elapsed, _leaves, lambda _, leaves: Elapsed(*leaves))


def require_elapsed(caller: object, value: object) -> None:
    """Refuse anything that cannot tell how far a run is, such as a number of steps.

    Args:
        caller: The schedule that was asked.
        value: What it was asked with.
    """
    if not isinstance(value, Elapsed):
        raise TypeError(
            f"{caller!r} needs an elapsed, as loops and ms.loops.elapse give it. Got {describe_value(value)}. "
            "Of a number of steps make one: ms.loops.Elapsed(steps=100)."
        )


def seconds(caller: str, value: Any) -> float:
    """A length of time, given in seconds or as a timedelta, in seconds."""
    number = value.total_seconds() if isinstance(value, datetime.timedelta) else value
    if isinstance(number, bool) or not isinstance(number, int | float | np.integer | np.floating) or not number >= 0:
        raise ValueError(
            f"{caller} needs time in seconds, or a datetime.timedelta, of at least 0. Got {describe_value(value)}."
        )
    return float(number)
