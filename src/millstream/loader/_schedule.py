"""When validation comes: arithmetic on the steps of a stream."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple


class Slot(NamedTuple):
    """One item of a stream.

    Attributes:
        training: Whether it is a training batch; if not, it is one of a validation pass.
        batch: How many training batches come before it.
        step_after: The step of the stream that comes after it. Within a pass, that is the pass.
    """

    training: bool
    batch: int
    step_after: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The steps of a stream: training batches, and validation passes, each of which is one step.

    Example:
        >>> slots = Schedule(interval=2, length=3).slots(0)
        >>> ["train" if next(slots).training else "validate" for _ in range(6)]
        ['train', 'train', 'validate', 'validate', 'validate', 'train']

    Attributes:
        interval: Training batches between two passes.
        length: Batches of a pass.
    """

    interval: int
    length: int

    def before(self, step: int) -> tuple[int, int]:
        """Validation passes and training batches that come before a step."""
        passes, place = divmod(step, self.interval + 1)
        return passes, passes * self.interval + place

    def step_of(self, batch: int) -> int:
        """The step of a training batch."""
        return batch + batch // self.interval

    def count(self, step: int, end: int) -> int:
        """Items from a step to training batch number `end`, with the pass that is due before that one."""
        passes, batch = self.before(step)
        return max(0, end - batch) + max(0, end // self.interval - passes) * self.length

    def slots(self, step: int) -> Iterator[Slot]:
        """The items from a step on, without end."""
        while True:
            passes, batch = self.before(step)
            if batch < (passes + 1) * self.interval:
                yield Slot(True, batch, step + 1)
            else:
                yield from [Slot(False, batch, step)] * (self.length - 1)
                yield Slot(False, batch, step + 1)
            step += 1
