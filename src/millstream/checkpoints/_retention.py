"""Which checkpoints are kept."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from millstream.text.errors import require_choice, require_int

Metrics = Mapping[str, float | None]


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept: the latest, the best by a metric, and every so many steps one for good.

    Each rule keeps what it keeps; the newest checkpoint is always kept. A metric that is missing or not finite makes
    no checkpoint a best one, and takes nothing from those that are.

    Example:
        >>> from millstream.checkpoints import Retention
        >>> keep = Retention(latest=1, best=1, monitor="loss")
        >>> keep.doomed({100: {"loss": 0.3}, 200: {"loss": 0.2}, 300: {"loss": 0.4}})
        [100]

    Args:
        latest: How many of the latest are kept; None keeps all.
        best: How many of the best are kept.
        monitor: The metric that says which are best.
        mode: Whether the best has the smallest ("min") or the largest ("max") value.
        every: Checkpoints at multiples of this step are kept for good; None for none.
    """

    latest: int | None = 3
    best: int = 0
    monitor: str | None = None
    mode: Literal["min", "max"] = "min"
    every: int | None = None

    def __post_init__(self) -> None:
        if self.latest is not None:
            require_int("Retention", "latest", self.latest, least=1)
        require_int("Retention", "best", self.best, least=0)
        require_choice("Retention", "mode", self.mode, ("min", "max"))
        if self.every is not None:
            require_int("Retention", "every", self.every, least=1)
        if self.best and self.monitor is None:
            raise ValueError(f"Retention needs the name of a metric to keep the best {self.best}: monitor=.")

    def ranked(self, checkpoints: Mapping[int, Metrics]) -> list[int]:
        """The steps with a finite value of the metric, best first; of equal ones the earlier first."""
        sign = 1 if self.mode == "min" else -1
        values = {step: metrics.get(self.monitor) for step, metrics in checkpoints.items() if self.monitor is not None}
        finite = {step: value for step, value in values.items() if value is not None and math.isfinite(value)}
        return sorted(finite, key=lambda step: (sign * finite[step], step))

    def doomed(self, checkpoints: Mapping[int, Metrics]) -> list[int]:
        """The steps of the checkpoints that are not kept.

        Args:
            checkpoints: The metrics of each checkpoint, by its step.
        """
        if self.latest is None:
            return []
        steps = sorted(checkpoints)
        kept = {*steps[-self.latest :], *self.ranked(checkpoints)[: self.best]}
        return [step for step in steps if step not in kept and not (self.every is not None and step % self.every == 0)]
