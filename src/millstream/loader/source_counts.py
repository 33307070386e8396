"""How many samples of each source of a mixture a loader has drawn: found from the plan, many steps at a time."""

import collections
import dataclasses
from typing import Any

import numpy as np

from millstream.pipeline.compose import SeekablePipeline
from millstream.pipeline.phased import PhasedPipeline
from millstream.pipeline.state import LoaderState, is_traced
from millstream.plan.mixture import Mixed
from millstream.plan.plan import Plan
from millstream.plan.planned import AnyPlan

_CHAINS = 8  # of running programs before the first step of one is looked at: it may still be computed


@dataclasses.dataclass
class _Chain:
    """Programs of which each began where the one before it ended."""

    first: LoaderState
    after: LoaderState
    steps: int


class SourceCounts:
    """Counts steps as they are drawn, and their samples by source, many steps at a time.

    Args:
        plan: Whose steps are drawn. Sources are counted only if its samples are a mixture, in batches of one level.
        of_programs: Whether all samples that programs draw are counted here: nothing is read for them that counts them.

    Attributes:
        is_mixture: Whether samples are counted by source, so that steps have to be added.
    """

    def __init__(self, plan: AnyPlan, *, of_programs: bool = False) -> None:
        functions = () if plan.selection is None else plan.selection.functions
        self._counts: np.ndarray | None = None
        if isinstance(plan, Plan) and functions and isinstance(functions[0], Mixed) and len(plan.batchings) <= 1:
            assert plan.selection is not None
            self._mixture = functions[0]
            self._table: Any = plan.selection.tables[0]
            self._counts = np.zeros(len(self._mixture.parts), np.int64)
        self.is_mixture = self._counts is not None
        self._plan = plan
        self._of_programs = of_programs
        self._first = self._stop = 0
        self._chains: collections.deque[_Chain] = collections.deque()

    def add(self, step: int) -> None:
        """A step is drawn."""
        if step != self._stop:
            self._count_drawn()
            self._first = step
        self._stop = step + 1

    def add_program(self, first: LoaderState, steps: int, after: LoaderState) -> int:
        """A compiled program draws `steps` steps from one state to another, which may both still be computed.

        Nothing waits for them while each program begins where the last one ended.

        Returns:
            How many samples programs have drawn that began long ago and are counted now.
        """
        if self._chains and self._chains[-1].after is first:
            self._chains[-1].after = after
            self._chains[-1].steps += steps
            return 0
        if (self._of_programs or self._counts is not None) and not is_traced(first):
            self._chains.append(_Chain(first, after, steps))
        return self._count_programs(_CHAINS)

    def settle(self) -> int:
        """Count all that is drawn; it may wait for the first step of a program.

        Returns:
            How many samples programs have drawn that are counted now.
        """
        self._count_drawn()
        return self._count_programs(0)

    def by_name(self) -> dict[str, int]:
        """The samples of each source in all steps that are counted; nothing if the samples are not a mixture."""
        return {} if self._counts is None else dict(zip(self.names, self._counts.tolist(), strict=True))

    def _count_programs(self, most_left: int) -> int:
        samples = 0
        while len(self._chains) > most_left:
            chain = self._chains.popleft()
            first = int(chain.first.step)
            steps = range(first, first + chain.steps)
            self._count(steps)
            if self._of_programs:
                samples += sum(self._plan.real_samples_of(np.asarray(chain.first.key), steps))
        return samples

    def _count_drawn(self) -> None:
        self._count(range(self._first, self._stop))
        self._first = self._stop

    def _count(self, steps: range) -> None:
        if self._counts is not None and steps:
            self._counts += self.in_steps(steps)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sources; none if the samples are not a mixture."""
        return () if self._counts is None else tuple(part.name for part in self._mixture.parts)

    def in_steps(self, steps: range) -> np.ndarray:
        """How many samples of each source some steps have."""
        assert isinstance(self._plan, Plan)
        ends = np.array(_sample_ranges(self._plan, steps), np.int64).T
        first, last = self._mixture.counts(self._table, ends)
        return (last - first).sum(axis=0)


def planned_sources(pipeline: SeekablePipeline, steps: list[range]) -> tuple[tuple[str, ...], np.ndarray] | None:
    """The names of the sources of a mixture, and how many samples of each every range of steps has.

    None if the samples are not a mixture, or not the same one throughout the run.
    """
    phases = pipeline.phases if isinstance(pipeline, PhasedPipeline) else (pipeline,)
    counts = [SourceCounts(phase.plan) for phase in phases]
    if len({one.names for one in counts}) > 1 or not counts[0].names:
        return None
    found = np.zeros((len(steps), len(counts[0].names)), np.int64)
    for row, some in zip(found, steps, strict=True):
        split = pipeline.plan.split(some) if isinstance(pipeline, PhasedPipeline) else [(0, some)]
        for phase, own in split:
            row += counts[phase].in_steps(own)
    return counts[0].names, found


def _sample_ranges(plan: Plan, steps: range) -> list[tuple[int, int]]:
    """The samples of some steps, numbered over all epochs of a run: the first, and the one after the last."""
    if not plan.batchings:
        return [(steps.start, steps.stop)]
    (batching,), step, found = plan.batchings, steps.start, []
    if batching.ending == "wrap":
        first = batching.start.epoch * plan.samples + batching.start.sample
        return [(first + steps.start * batching.size, first + steps.stop * batching.size)]
    while step < steps.stop:  # an epoch at a time: the last of its samples may be dropped
        epoch, batch, sample = batching.after(step)
        left = batching.first_length - step if step < batching.first_length else batching.length - batch
        count = min(left, steps.stop - step)
        first, stop = sample, min(sample + count * batching.size, plan.samples)
        found.append((epoch * plan.samples + first, epoch * plan.samples + stop))
        step += count
    return found
