"""Steps planned on the host, in blocks: planning many at once costs NumPy little more than planning one."""

import dataclasses
import functools
import math
from types import ModuleType

import numpy as np

from millstream.plan.keys import Array, fold, named_key
from millstream.plan.plan import Plan, Rows

# Steps of the first block, and of the longest: 64 steps of 32 rows cost 6.9 us each, 512 of them 1.7 us. More rows
# leave the processor's caches: steps of 1,024 rows cost 35 us each in a block of 2**15 rows, 73 us in one of 2**16.
_FIRST_STEPS, _MOST_STEPS, _MOST_ROWS = 64, 512, 1 << 15


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
    """

    step: int
    indices: np.ndarray
    real: np.ndarray
    keys: np.ndarray | None = None
    epochs: np.ndarray | None = None
    positions: np.ndarray | None = None
    run: bytes = b""
    place: tuple[int, int] = (0, 0)


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
        return parts + [(name, level, axes[:level]) for level in self.keyed for name in ("epoch", "element")]

    @functools.cached_property
    def size(self) -> int:
        """How many numbers a step has."""
        return sum(math.prod(shape) for _, _, shape in self._parts)

    def pack(self, words: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """The numbers of some steps, a row each."""
        rows = self.plan.rows_at(np, words, steps)
        found = {(name, level): getattr(at, name) for level, at in enumerate(rows) for name in _FIELDS}
        last = len(rows) - 1
        if self.indices or last in self.keyed:
            positions = found["element", last] = self.plan.positions(np, words, rows)
            if self.indices:
                found["indices", last] = self.plan.indices(np, words, rows[-1].epoch, positions)
        columns = [found[name, level].reshape(len(steps), -1).astype(np.uint32) for name, level, _ in self._parts]
        return np.concatenate(columns, axis=1)

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
            )
            for level in range(len(axes) + 1)
        ]
        return rows, found.get(("indices", len(axes)))


_FIELDS = ("epoch", "element", "mask")


class PlannedSteps:
    """The steps of one run.

    Args:
        plan: The plan.
        words: The run's raw key data, uint32.
        chosen: The rows of a batch that are read; None for all.
        coordinates: What compiled stages want to know.
    """

    def __init__(
        self,
        plan: Plan,
        words: np.ndarray,
        chosen: tuple[int, ...] | None = None,
        coordinates: Coordinates | None = None,
    ) -> None:
        self._plan = plan
        self._words = words.copy()
        self._run = words.tobytes()
        self._chosen = None if chosen is None else np.array(chosen, np.uint64)
        self._coordinates = coordinates
        self._most_steps = max(1, min(_MOST_STEPS, _MOST_ROWS // math.prod(plan.axes)))
        # A block is replaced whole, so that several threads may ask.
        self._block: _Block | None = None
        self._numbers: tuple[range, np.ndarray] = range(0), np.empty((0, 0))

    def request(self, step: int, keyed: bool) -> Request:
        """What a step asks for, with the keys of its samples if they are wanted."""
        block = self._block
        if block is None or step not in block.steps:
            self._block = block = self._plan_block(step, range(0) if block is None else block.steps)
        at = step - block.steps.start
        epochs, positions = block.epochs[at], block.positions[at]
        keys = sample_keys(self._words, epochs, positions) if keyed else None
        return Request(step, block.indices[at], block.real[at], keys, epochs, positions, self._run, block.places[at])

    def numbers(self, step: int) -> np.ndarray | None:
        """The coordinates of a step, for compiled stages; None if they want none."""
        if self._coordinates is None or not self._coordinates.size:
            return None
        steps, numbers = self._numbers
        if step not in steps:
            steps = self._steps_from(step, steps)
            numbers = self._coordinates.pack(self._words, np.asarray(steps, np.uint64))
            self._numbers = steps, numbers
        return numbers[step - steps.start]

    def _steps_from(self, first: int, before: range) -> range:
        """The steps of a block after another: twice as many where it continues that one."""
        count = max(_FIRST_STEPS, 2 * len(before) if first == before.stop else 0)
        return range(first, first + min(count, self._most_steps))

    def _plan_block(self, first: int, before: range) -> "_Block":
        steps = self._steps_from(first, before)
        positions, rows = self._plan.at(np, self._words, np.asarray(steps, np.uint64), self._chosen)
        indices = self._plan.indices(np, self._words, rows[-1].epoch, positions)
        by_step = (len(steps), -1)
        return _Block(
            steps,
            positions.reshape(by_step),
            indices.reshape(by_step).astype(np.int64),
            rows[-1].mask.reshape(by_step),
            rows[-1].epoch.reshape(by_step),
            list(zip(rows[0].epoch.tolist(), rows[0].element.tolist(), strict=True)),
        )


class RunInUse:
    """The steps of the run that is stepped through; several threads may ask."""

    def __init__(self, plan: Plan, coordinates: Coordinates) -> None:
        self._plan = plan
        self._coordinates = coordinates
        self._run: tuple[bytes, PlannedSteps] | None = None

    def steps(self, words: np.ndarray) -> PlannedSteps:
        """The steps of the run with this key."""
        name, run = words.tobytes(), self._run
        if run is None or run[0] != name:
            self._run = run = name, PlannedSteps(self._plan, words, coordinates=self._coordinates)
        return run[1]


@dataclasses.dataclass
class _Block:
    steps: range
    positions: np.ndarray
    indices: np.ndarray
    real: np.ndarray
    epochs: np.ndarray
    places: list[tuple[int, int]]


def sample_keys(words: np.ndarray, epochs: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The keys of samples read on the host: functions of run key, epoch and position alone."""
    key = fold(np, fold(np, named_key(words, "millstream sample 1"), epochs), positions)
    return np.stack(np.broadcast_arrays(*key), axis=-1)
