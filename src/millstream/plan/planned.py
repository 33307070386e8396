"""Steps planned on the host, in blocks: planning many at once costs NumPy little more than planning one."""

import dataclasses
import functools
import math
from types import ModuleType

import numpy as np

from millstream.plan.bucket_plan import BucketPlan
from millstream.plan.keys import Array, fold, named_key
from millstream.plan.plan import Plan, Rows, Turn

AnyPlan = Plan | BucketPlan

# Steps of the first block, and of the longest: 64 steps of 32 rows cost 6.9 us each, 512 of them 1.7 us.
_FIRST_STEPS, _MOST_STEPS = 64, 512
_MOST_ROWS = 1 << 15  # more leave the processor's caches: steps of 1,024 rows then cost 70 us instead of 35


@dataclasses.dataclass(slots=True)
class Request:
    """The samples of one batch, as the plan has them.

    Attributes:
        step: The number of the batch in its run.
        indices: Sample indices, one axis.
        real: False for rows that pad.
        keys: Two uint32 words per sample, if the source wants them.
        epochs: The epoch that each sample has its key from.
        positions: What its key depends on besides: its position in the view, which is its index if there is no view.
        run: The key of the run, as bytes.
        place: The epoch that the batch has its samples and keys from, and its number in that epoch.
        bucket: Which of the plan's buckets it is a batch of, and so its shape.
    """

    step: int
    indices: np.ndarray
    real: np.ndarray
    keys: np.ndarray | None = None
    epochs: np.ndarray | None = None
    positions: np.ndarray | None = None
    run: bytes = b""
    place: tuple[int, int] = (0, 0)
    bucket: int = 0


@dataclasses.dataclass(frozen=True)
class Coordinates:
    """What compiled stages want to know of a planned step, and where it stands in one array of numbers.

    Attributes:
        plan: The plan.
        indices: Whether the sample indices are wanted.
        keyed: The levels whose epochs and elements are wanted; 0 is the step, the last one the samples, whose elements
            are their positions here.
    """

    plan: Plan
    indices: bool
    keyed: tuple[int, ...] = ()

    @functools.cached_property
    def _parts(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """A name, a level and a shape for each part of the numbers."""
        axes = self.plan.axes
        last = len(axes)
        parts = [("indices", last, axes)] if self.indices else []
        if any(batching.pads for batching in self.plan.batchings):
            parts += [("mask", level, axes[:level]) for level in range(1, last + 1)]
        names = ("epoch", "element", "high") if self.plan.is_wide else ("epoch", "element")
        return parts + [(name, level, axes[:level]) for level in self.keyed for name in names]

    @functools.cached_property
    def size(self) -> int:
        """How many numbers a step has."""
        return sum(math.prod(shape) for _, _, shape in self._parts)

    def pack(self, words: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """The numbers of some steps, a row each."""
        rows, indices = self.plan.rows_at(np, words, steps), None
        if self.indices or len(rows) - 1 in self.keyed:
            positions = self.plan.positions(np, words, rows)
            rows[-1] = dataclasses.replace(rows[-1], element=positions)
            if self.indices:
                indices = self.plan.indices(np, words, rows[-1].epoch, positions)
        if self.plan.first_batch:
            first = rows[0].element.dtype.type(self.plan.first_batch)
            rows[0] = dataclasses.replace(rows[0], element=rows[0].element + first)
        return self.arrange(len(steps), rows, indices)

    def arrange(self, steps: int, rows: list[Rows], indices: Array = None) -> np.ndarray:
        """The numbers of that many steps, a row each, from the rows of every level."""
        if self.plan.is_wide:
            rows = [dataclasses.replace(level, high=level.element >> np.uint64(32)) for level in rows]
        found = [indices if name == "indices" else getattr(rows[level], name) for name, level, _ in self._parts]
        return np.concatenate([part.reshape(steps, -1).astype(np.uint32) for part in found], axis=1)

    def unpack(self, xp: ModuleType, numbers: Array) -> tuple[list[Rows], Array | None]:
        """The rows of every level, with what is wanted of them, and the indices. It can be traced."""
        found, start = {}, 0
        for name, level, shape in self._parts:
            stop = start + math.prod(shape)
            part = numbers[start:stop].reshape(shape)
            found[name, level] = part.astype(bool) if name == "mask" else part
            start = stop
        axes = self.plan.axes
        rows = [
            Rows(
                found.get(("epoch", level)),
                found.get(("element", level)),
                found[("mask", level)] if ("mask", level) in found else xp.ones(axes[:level], bool),
                found.get(("high", level)),
            )
            for level in range(len(axes) + 1)
        ]
        return rows, found.get(("indices", len(axes)))


class PlannedSteps:
    """The steps of one run.

    Args:
        plan: The plan.
        words: The run's raw key data, uint32.
        chosen: The rows of a batch that are read, for each bucket of the plan; None for all.
        coordinates: What compiled stages want to know, for each bucket of the plan.
    """

    def __init__(
        self,
        plan: AnyPlan,
        words: np.ndarray,
        chosen: tuple[tuple[int, ...], ...] | None = None,
        coordinates: tuple[Coordinates, ...] | None = None,
    ) -> None:
        self._plan = plan
        self._words = words.copy()
        self._run = words.tobytes()
        self._chosen = None if chosen is None else [np.array(rows, np.uint64) for rows in chosen]
        wanted = coordinates is not None and any(one.size for one in coordinates)
        self._coordinates = coordinates if wanted else None
        rows = max(math.prod(bucket.axes) for bucket in plan.buckets)
        self._most_steps = max(1, min(_MOST_STEPS, _MOST_ROWS // rows))
        # Blocks are replaced whole, so that several threads may ask.
        self._block: tuple[range, list[tuple[_Block, int]]] = range(0), []
        self._numbers: tuple[range, list[np.ndarray | None]] = range(0), []

    @property
    def plan(self) -> AnyPlan:
        """The plan."""
        return self._plan

    def again(self) -> "PlannedSteps":
        """The same steps, for a caller who is at other ones."""
        own = PlannedSteps(self._plan, self._words, coordinates=self._coordinates)
        own._chosen = self._chosen
        return own

    def request(self, step: int, keyed: bool) -> Request:
        """What a step asks for, with the keys of its samples if they are wanted."""
        steps, planned = self._block
        if step not in steps:
            steps = self._steps_from(step, steps)
            planned = self._plan_steps(steps)
            self._block = steps, planned
        block, at = planned[step - steps.start]
        epochs, positions = block.epochs[at], block.positions[at]
        keys = sample_keys(self._words, epochs, positions) if keyed else None
        return Request(
            step, block.indices[at], block.real[at], keys, epochs, positions, self._run, block.places[at], block.bucket
        )

    def numbers(self, step: int) -> np.ndarray | None:
        """The coordinates of a step, for compiled stages; None if they want none."""
        if self._coordinates is None:
            return None
        steps, numbers = self._numbers
        if step not in steps:
            steps = self._steps_from(step, steps)
            numbers = self._pack_steps(steps, self._coordinates)
            self._numbers = steps, numbers
        return numbers[step - steps.start]

    def _steps_from(self, first: int, before: range) -> range:
        """The steps of a block after another: twice as many where it continues that one."""
        count = max(_FIRST_STEPS, 2 * len(before) if first == before.stop else 0)
        return range(first, first + min(count, self._most_steps))

    def _turns(self, steps: range) -> list[Turn]:
        return self._plan.turns(self._words, np.asarray(steps, np.uint64))

    def _pack_steps(self, steps: range, coordinates: tuple[Coordinates, ...]) -> list[np.ndarray | None]:
        found: dict[int, np.ndarray] = {}
        for bucket, which, own in self._turns(steps):
            if coordinates[bucket].size:
                found.update(zip(which.tolist(), coordinates[bucket].pack(self._words, own), strict=True))
        return [found.get(at) for at in range(len(steps))]

    def _plan_steps(self, steps: range) -> "list[tuple[_Block, int]]":
        found: dict[int, tuple[_Block, int]] = {}
        for bucket, which, own in self._turns(steps):
            block = self._plan_bucket(bucket, own)
            found.update((place, (block, at)) for at, place in enumerate(which.tolist()))
        return [found[at] for at in range(len(steps))]

    def _plan_bucket(self, bucket: int, steps: np.ndarray) -> "_Block":
        plan, chosen = self._plan.buckets[bucket], None if self._chosen is None else self._chosen[bucket]
        positions, rows = plan.at(np, self._words, steps, chosen)
        indices = plan.indices(np, self._words, rows[-1].epoch, positions)
        by_step = (len(steps), -1)
        batches = rows[0].element + rows[0].element.dtype.type(plan.first_batch)
        return _Block(
            bucket,
            positions.reshape(by_step),
            indices.reshape(by_step).astype(np.int64),
            rows[-1].mask.reshape(by_step),
            rows[-1].epoch.reshape(by_step),
            list(zip(rows[0].epoch.tolist(), batches.tolist(), strict=True)),
        )


@dataclasses.dataclass
class _Block:
    bucket: int
    positions: np.ndarray
    indices: np.ndarray
    real: np.ndarray
    epochs: np.ndarray
    places: list[tuple[int, int]]


def sample_keys(words: np.ndarray, epochs: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The keys of samples read on the host: functions of run key, epoch and position alone."""
    key = fold(np, fold(np, named_key(words, "millstream sample 1"), epochs), positions)
    return np.stack(np.broadcast_arrays(*key), axis=-1)
