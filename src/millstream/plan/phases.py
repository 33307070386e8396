"""Plans that take over from one another at given steps of a run."""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np

from millstream.plan.bucket_plan import BucketPlan
from millstream.plan.keys import Array
from millstream.plan.plan import STEP_LIMIT, Plan


class EpochSpan(NamedTuple):
    """Steps whose epochs all have one length, but for the first, which may have begun before.

    Attributes:
        first: The first of the steps.
        completed: Epochs that are complete before it.
        first_length: Steps until the first epoch ends.
        length: Steps of each one after it.
    """

    first: int
    completed: int
    first_length: int
    length: int


@dataclasses.dataclass(frozen=True)
class EpochLengths:
    """How long each epoch of a run is, where that changes.

    Example:
        >>> epochs = EpochLengths((EpochSpan(0, 0, 4, 4), EpochSpan(6, 1, 1, 2)))
        >>> [epochs.completed(steps) for steps in range(10)], epochs.steps_of(5)
        ([0, 0, 0, 0, 1, 1, 1, 2, 2, 3], range(4, 7))
    """

    spans: tuple[EpochSpan, ...]

    def completed(self, steps: int) -> int:
        """How many epochs are complete after that many steps."""
        first, completed, first_length, length = self.spans[
            bisect.bisect_right(self.spans, steps, key=lambda span: span.first) - 1
        ]
        later = steps - first - first_length
        return completed if later < 0 else completed + 1 + later // length

    def completed_traced(self, xp: ModuleType, steps: Array) -> Array:
        """The same of an array, which may be traced."""
        spans = np.array(self.spans, np.int64).astype(np.int32)
        which = xp.searchsorted(spans[:, 0], steps, side="right") - 1
        first, completed, first_length, length = xp.asarray(spans)[which].T
        later = steps - first - first_length
        return xp.where(later < 0, completed, completed + 1 + later // length)

    def end(self, number: int) -> int:
        """The first step after which that many epochs are complete."""
        return bisect.bisect_left(range(STEP_LIMIT), number, key=self.completed)

    def steps_of(self, step: int) -> range:
        """All steps of the epoch that a step belongs to."""
        epoch = self.completed(step)
        return range(self.end(epoch), self.end(epoch + 1))


@dataclasses.dataclass(frozen=True)
class PhasedPlan:
    """Several plans, each from one step of the run to where the next one takes over.

    Example:
        >>> from millstream.plan.plan import Batching, Plan
        >>> plan = phased_plan([Plan(10, "shuffle", (Batching(size, "pad", 10),)) for size in (2, 4)], (0, 3))
        >>> plan.phase_at(4), plan.real_samples_of(np.zeros(2, np.uint32), range(6))
        ((1, 1), [2, 2, 2, 4, 4, 4])

    Attributes:
        phases: The plans.
        starts: The step at which each begins; the first one is 0.
    """

    phases: tuple[Plan | BucketPlan, ...]
    starts: tuple[int, ...]

    def phase_at(self, step: int) -> tuple[int, int]:
        """Which phase a step belongs to, and its number there."""
        number = bisect.bisect_right(self.starts, step) - 1
        return number, step - self.starts[number]

    def phase_steps_left(self, step: int) -> float:
        """How many steps of a step's phase are left, itself included; infinity if no other phase comes after it."""
        return next((start - step for start in self.starts if start > step), math.inf)

    def split(self, steps: range) -> list[tuple[int, range]]:
        """Some steps in order, as a phase and its own numbers of its steps, for each phase that has any."""
        ends = (*self.starts[1:], max(steps.stop, self.starts[-1]))
        found = []
        for number, (first, end) in enumerate(zip(self.starts, ends, strict=True)):
            own = range(max(steps.start, first) - first, min(steps.stop, end) - first)
            if own:
                found.append((number, own))
        return found

    @property
    def samples(self) -> int | None:
        """Samples of an epoch, if each phase takes those that the one before it has left; None if one does not."""
        plans = [plan for plan in self.phases if isinstance(plan, Plan) and plan.can_start]
        same = {(plan.way, plan.batchings[0].ending) for plan in plans}
        return plans[0].samples if len(plans) == len(self.phases) and len(same) == 1 else None

    @functools.cached_property
    def epochs(self) -> EpochLengths:
        """How long each epoch is."""
        spans: list[EpochSpan] = []
        for plan, first in zip(self.phases, self.starts, strict=True):
            if isinstance(plan, Plan) and plan.can_start:
                (batching,) = plan.batchings
                spans.append(EpochSpan(first, batching.start.epoch, batching.first_length, batching.length))
                continue
            before = EpochLengths(tuple(spans or [EpochSpan(0, 0, 1, 1)]))
            taken_up = before.steps_of(first).start == first  # or else the epoch that was begun is not
            completed = before.completed(first) + (not taken_up)
            spans.append(EpochSpan(first, completed, plan.steps_per_epoch, plan.steps_per_epoch))
        return EpochLengths(tuple(spans))

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """Steps of the first epoch."""
        return len(self.epochs.steps_of(0))

    def steps_left(self, step: int) -> int:
        """Batches left in an epoch before batch number `step` of a run."""
        return self.epochs.steps_of(step).stop - step

    @property
    def buckets(self) -> tuple[Plan, ...]:
        """The plans of all shapes that batches have."""
        return tuple(bucket for plan in self.phases for bucket in plan.buckets)

    @property
    def step_limit(self) -> int:
        """Steps a state of this plan can count."""
        return min(STEP_LIMIT, self.starts[-1] + self.phases[-1].step_limit)

    def real_samples_of(self, words: np.ndarray, steps: range) -> list[int]:
        """How many samples of some steps are not padding."""
        counts = (self.phases[phase].real_samples_of(words, own) for phase, own in self.split(steps))
        return list(itertools.chain.from_iterable(counts))


def phased_plan(plans: Sequence[Plan | BucketPlan], starts: tuple[int, ...]) -> PhasedPlan:
    """Plans that continue where the one before them ends, as far as they can."""
    phases, begun = [plans[0]], starts[0]
    for plan, start in zip(plans[1:], starts[1:], strict=True):
        before = phases[-1]
        if isinstance(plan, Plan) and isinstance(before, Plan):
            plan = plan.taking_over(before, start - begun)
        phases.append(plan)
        begun = start
    return PhasedPlan(tuple(phases), starts)
