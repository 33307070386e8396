"""The plan: which samples are in batch number `step`. A pure function of the run's key and the step.

A plan is nested: a step is an element of the outermost batching, whose rows are elements of the next one, down to
the samples of an epoch. `Rows` are the coordinates of one such level, with one array axis per batching above it.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np

from millstream.plan import order
from millstream.plan.block_order import BlockOrder, StoredBlocks, block_order, lanes_for
from millstream.plan.keys import Array, Key
from millstream.plan.ordering import Ordering, Shuffle, as_shuffle
from millstream.plan.selection import Selection

Ending = Literal["pad", "drop", "wrap"]

STEP_LIMIT = (1 << 32) - 1  # a state counts its steps in 32 bits


@dataclasses.dataclass(frozen=True)
class Rows:
    """Where each row of one level comes from.

    Attributes:
        epoch: The epoch each row belongs to and has its keys from; 0 in every epoch if batches recur.
        element: Its number within that epoch, 0 for padding.
        mask: False for padding.
        high: The upper 32 bits of `element`, where a compiled program needs more than 32.
    """

    epoch: Array
    element: Array
    mask: Array
    high: Array = None


class Start(NamedTuple):
    """Where a plan takes up a run that another one began.

    Attributes:
        epoch: The epoch it begins in.
        batch: How many batches of that epoch came before.
        sample: How many of its samples they had.
    """

    epoch: int = 0
    batch: int = 0
    sample: int = 0

    @property
    def words(self) -> str:
        return f"epoch {self.epoch:,} after {self.batch:,} batches and {self.sample:,} samples"


_BEGINNING = Start()
_AT_ONCE = 512  # steps that are planned together to be counted


@dataclasses.dataclass(frozen=True)
class Batching:
    """One level of batching: `size` of the `inner` elements of an epoch at a time, from where a run begins.

    Elements at positions whose remainder by `lanes` is equal are next to each other in a batch.
    """

    size: int
    ending: Ending
    inner: int
    start: Start = _BEGINNING
    lanes: int = 1

    @property
    def length(self) -> int:
        """Batches per epoch."""
        return self.inner // self.size if self.ending == "drop" else -(-self.inner // self.size)

    @property
    def first_length(self) -> int:
        """Batches that are left of the epoch it begins in."""
        left = self.inner - self.start.sample
        return left // self.size if self.ending == "drop" else -(-left // self.size)

    @property
    def pads(self) -> bool:
        """Whether the last batch of an epoch has rows that are not samples."""
        return self.ending == "pad" and any(left % self.size for left in (self.inner, self.inner - self.start.sample))

    @property
    def _drift(self) -> int:
        """Rows that a batch completed from the next epoch takes from it."""
        return self.size * self.length - self.inner if self.ending == "wrap" else 0

    @property
    def step_limit(self) -> int:
        """The first step whose rows would not fit 32-bit arithmetic."""
        limit = STEP_LIMIT - (self.length if self.start != _BEGINNING else 0)
        if not self._drift:
            return limit
        return min(limit, (STEP_LIMIT - self.inner - 2 * self.size) // self._drift * self.length)

    def after(self, steps: int) -> Start:
        """Where a run is after that many batches from the start."""
        start, later = self.start, steps - self.first_length
        epoch, batch = start.epoch, start.batch + steps
        sample = start.sample + steps * self.size
        if later >= 0:
            epoch, batch = start.epoch + 1 + later // self.length, later % self.length
        if self.ending != "wrap":
            return Start(epoch, batch, sample if later < 0 else batch * self.size)
        # Each epoch has begun in the batch before, so that samples may be epochs ahead of batches.
        reached = start.epoch + sample // self.inner
        return Start(reached, batch if reached == epoch else 0, sample % self.inner)

    def step_of(self, sample: int) -> int:
        """The first step, from the start on, that has this sample of the run or a later one; 0 if all have."""
        start, epoch, place = self.start, sample // self.inner, sample % self.inner
        if self.ending == "wrap":
            return max(0, (sample - start.epoch * self.inner - start.sample) // self.size)
        if epoch <= start.epoch:
            return max(0, (place - start.sample) // self.size) if epoch == start.epoch else 0
        before = self.first_length + (epoch - start.epoch - 1) * self.length
        return before + min(place // self.size, self.length)

    def elements(self, xp: ModuleType, step: Array) -> tuple[Array, Array]:
        """The epoch of each step, and its number there."""
        number, start = step.dtype.type, self.start
        length = number(self.length)
        if start == _BEGINNING:
            return step // length, step % length
        early = self.length - self.first_length  # as if the epoch had begun with that many batches of this size
        epoch, element = (step + number(early)) // length, (step + number(early)) % length
        element = element + xp.where(epoch == 0, _wrapped(number, start.batch - early), number(0))
        return epoch + number(start.epoch), element

    def rows(self, xp: ModuleType, batch: Rows, chosen: np.ndarray | None = None) -> Rows:
        """The rows of a batch, or only the chosen ones, along a new last axis."""
        number = batch.element.dtype.type
        inner = number(self.inner)
        epoch, element = batch.epoch[..., None], batch.element[..., None]
        row = xp.arange(self.size, dtype=inner.dtype) if chosen is None else xp.asarray(chosen).astype(inner.dtype)
        if self.lanes > 1:
            each = number(self.size // self.lanes)
            row = row % each * number(self.lanes) + row // each
        row = row.reshape((1,) * batch.element.ndim + (-1,))
        position = element * number(self.size) + row + self._shift(xp, epoch)
        mask = batch.mask[..., None]
        if self.ending == "wrap":
            epoch, position = epoch + position // inner, position % inner
        elif self.pads:
            mask = mask & (position < inner)
            position = xp.where(mask, position, number(0))
        return Rows(*xp.broadcast_arrays(epoch, position, mask))

    def _shift(self, xp: ModuleType, epoch: Array) -> Array:
        """How many samples later than the rows of its batches before it an epoch stands."""
        number, start = epoch.dtype.type, self.start
        if start == _BEGINNING:
            return epoch * number(self._drift)  # every epoch ends that many rows into the next one
        first = _wrapped(number, start.sample - start.batch * self.size)
        taken = start.sample + self.first_length * self.size - self.inner if self.ending == "wrap" else 0
        since = epoch - number(start.epoch)
        later = number(taken) + (since - number(1)) * number(self._drift)
        return xp.where(since == 0, first, later)


def _wrapped(number: Any, value: int) -> Any:
    """An int, which may be negative, as an unsigned number that adds as it would."""
    return number(value % (1 << 8 * np.dtype(number).itemsize))


class Turn(NamedTuple):
    """The steps, of those asked for, whose batches one bucket makes.

    Attributes:
        bucket: Which one.
        which: The places of the steps among those asked for.
        steps: The bucket's own numbers of these steps.
    """

    bucket: int
    which: np.ndarray
    steps: np.ndarray


@dataclasses.dataclass(frozen=True)
class Plan:
    """Samples, their ordering, how they are batched (innermost first), and which of a source's samples they are.

    The samples of an epoch are positions, which the ordering permutes; the selection says which sample of the source
    stands at each. Without one, a position is the index of a sample. Of a plan that is a bucket, `first_position` and
    `first_batch` count what the buckets before it have, so that positions and batches are numbered across all of them.
    A block shuffle leaves positions in sequence, and is the first function of the selection; as long as `stored` says
    which blocks there are, the size of batches, which it depends on, is not known.

    Example:
        >>> plan = Plan(10, "shuffle", (Batching(4, "pad", 10),))
        >>> positions, rows = plan.at(np, np.array([0, 7], np.uint32), 2)  # the third batch of the run with this key
        >>> int(rows[-1].mask.sum())
        2
    """

    samples: int
    ordering: Ordering | str
    batchings: tuple[Batching, ...] = ()
    selection: Selection | None = None
    first_position: int = 0
    first_batch: int = 0
    stored: StoredBlocks | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        crossing = [batching.size for batching in self.batchings if batching.ending == "wrap"]
        if self.shuffle.recurs and crossing:
            raise ValueError(
                f"{self.shuffle} brings the same batches back every epoch; a batch that is completed from the next "
                f"epoch never comes back. Got BatchTransform({crossing[0]}, pad_last_batch=False). "
                "Use pad_last_batch=True or drop_last=True."
            )

    @property
    def shuffle(self) -> Shuffle:
        """The ordering in full."""
        return as_shuffle("A source", self.ordering)

    @property
    def blocks(self) -> BlockOrder | None:
        """The order of a block shuffle."""
        functions = () if self.selection is None else self.selection.functions
        return functions[0] if functions and isinstance(functions[0], BlockOrder) else None

    @property
    def view(self) -> Selection | None:
        """Which of the source's samples there are, without the order of a block shuffle; None for all as they are."""
        if self.blocks is None or self.selection is None:
            return self.selection
        rest = self.selection.functions[1:]
        return Selection(rest, self.selection.tables[1:]) if rest else None

    def block_bounds(self) -> np.ndarray | None:
        """The first and the last sample in the source of each block of a block shuffle, rising, (blocks, 2).

        None if there are none, or if a view takes them apart, so that mostly other samples lie between those of one.
        """
        if self.blocks is None or self.selection is None or self.draws:
            return None
        table, words = np.asarray(self.selection.tables[0]).astype(np.uint64), np.zeros(2, np.uint32)
        bounds = np.stack([table[:-1], table[1:] - np.uint64(1)], axis=1)
        in_sequence = dataclasses.replace(self, selection=self.view)
        found = in_sequence.indices(np, words, np.zeros(bounds.shape, np.uint32), bounds).astype(np.int64)
        sizes, spread = np.diff(table).astype(np.int64), found[:, 1] - found[:, 0] + 1
        is_dense = ((sizes <= spread) & (spread <= 2 * sizes)).all()
        return found if is_dense and (found[1:, 0] > found[:-1, 1]).all() else None

    @property
    def order_words(self) -> str:
        """What the order is, in words that differ for different orders."""
        return self.shuffle.words if self.blocks is None else f"{self.shuffle.words}: {self.blocks.words}"

    def in_blocks(self, stored: StoredBlocks) -> "Plan":
        """This plan, which is a block shuffle, over the blocks that its samples are stored in."""
        return dataclasses.replace(self, stored=stored)._ordered(stored, None)

    def ordered_for(self, batch_size: int) -> "Plan":
        """This plan with an order that is made for batches of this size, and multiples of it."""
        return self if self.stored is None else dataclasses.replace(self, stored=None)._ordered(self.stored, batch_size)

    def _ordered(self, stored: StoredBlocks, batch_size: int | None) -> "Plan":
        view = Selection() if self.view is None else self.view
        return dataclasses.replace(self, selection=view.after(*block_order(self.shuffle, stored, batch_size)))

    def batched(self, batching: Batching) -> "Plan":
        """This plan with one more level of batching."""
        if self.batchings:
            return dataclasses.replace(self, batchings=(*self.batchings, batching))
        plan = self.ordered_for(batching.size)
        if plan.blocks is not None:
            lanes = plan.blocks.lanes
            if batching.size % lanes:
                raise ValueError(
                    f"{self.shuffle} needs batches whose size is a multiple of lanes, which are {lanes:,}: each lane "
                    f"gives equally many rows to a batch. Got BatchTransform({batching.size:,}). Use "
                    f"lanes={lanes_for(batching.size):,}, or leave lanes out."
                )
            batching = dataclasses.replace(batching, lanes=lanes)
        return dataclasses.replace(plan, batchings=(batching,))

    @property
    def draws(self) -> bool:
        """Whether which samples an epoch has depends on the run's key and the epoch, not only their order."""
        return self.view is not None and self.view.is_keyed

    @property
    def is_random(self) -> bool:
        """Whether which samples a batch has depends on the run's key."""
        return self.draws or self.shuffle != as_shuffle("A source", "sequential")

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of a batch before those of a sample, outermost first."""
        return tuple(batching.size for batching in reversed(self.batchings))

    @property
    def is_wide(self) -> bool:
        """Whether positions need 64 bits: on the host they have them, and a compiled program is told them."""
        return self.samples > (1 << 31)

    @property
    def buckets(self) -> "tuple[Plan, ...]":
        """The plans of the shapes that batches have: this one alone."""
        return (self,)

    def turns(self, words: np.ndarray, steps: np.ndarray) -> "list[Turn]":
        """Which of the buckets makes the batch of each step."""
        return [Turn(0, np.arange(len(steps)), steps)]

    @property
    def steps_per_epoch(self) -> int:
        return self.batchings[-1].length if self.batchings else self.samples

    def steps_left(self, step: int) -> int:
        """Batches left in an epoch before batch number `step` of a run."""
        return self.steps_per_epoch - step % self.steps_per_epoch

    @property
    def step_limit(self) -> int:
        """Steps a state of this plan can count."""
        # An outer batching multiplies steps; the innermost level is where numbers are largest.
        limit, scale = STEP_LIMIT, 1
        for batching in () if self.is_wide else reversed(self.batchings):
            limit = min(limit, batching.step_limit // scale)
            scale *= batching.size
        most = None if self.selection is None else self.selection.run_limit
        return limit if most is None else min(limit, most // scale)

    def real_samples(self, words: np.ndarray, step: int) -> int:
        """How many samples of a step are not padding."""
        if self._full_and_last is None:
            return int(self.rows_at(np, words, np.asarray(step))[-1].mask.sum())
        full, last = self._full_and_last
        if (step + 1 - self._first_length) % self._length:
            return full
        return self._first_last if step < self._first_length else last

    def real_samples_of(self, words: np.ndarray, steps: range) -> list[int]:
        """How many samples of some steps are not padding."""
        if self._full_and_last is None:
            return [
                count
                for first in range(0, len(steps), _AT_ONCE)
                for count in self._counted(words, steps[first : first + _AT_ONCE])
            ]
        full, last = self._full_and_last
        counts = [full] * len(steps)
        for number in range((self._first_length - steps.start - 1) % self._length, len(steps), self._length):
            counts[number] = last
        if self._first_length - 1 in steps:
            counts[self._first_length - 1 - steps.start] = self._first_last
        return counts

    def _counted(self, words: np.ndarray, steps: range) -> list[int]:
        """The same by planning the steps, all at once."""
        mask = self.rows_at(np, words, np.asarray(steps))[-1].mask
        return np.count_nonzero(mask.reshape(len(steps), -1), axis=1).tolist()

    @functools.cached_property
    def _length(self) -> int:
        return self.steps_per_epoch

    @functools.cached_property
    def _first_length(self) -> int:
        return self.batchings[-1].first_length if self.batchings else self.samples

    @functools.cached_property
    def _first_last(self) -> int:
        """Samples of the last batch of the epoch that the plan begins in, where `_full_and_last` holds."""
        if not any(batching.pads for batching in self.batchings):
            return math.prod(self.axes)
        (batching,) = self.batchings
        return batching.inner - batching.start.sample - batching.size * (batching.first_length - 1)

    @functools.cached_property
    def _full_and_last(self) -> tuple[int, int] | None:
        """Samples of most steps and of the last of an epoch; None if it is not that simple."""
        full = math.prod(self.axes)
        if not any(batching.pads for batching in self.batchings):
            return full, full
        if len(self.batchings) != 1 or self.shuffle.mode == "batchwise":
            return None
        (batching,) = self.batchings
        return full, batching.inner - batching.size * (batching.length - 1)

    @np.errstate(over="ignore")
    def at(
        self, xp: ModuleType, words: Array, step: Array, chosen: np.ndarray | None = None
    ) -> tuple[Array, list[Rows]]:
        """The positions of a step's samples, and the rows of every level from the step itself (first) to the samples.

        Args:
            xp: `numpy` or `jax.numpy`; both give the same numbers. NumPy also takes sizes past 2**32.
            words: The run's raw key data, uint32.
            step: One step, or an array of steps whose axes then lead every result.
            chosen: The rows of the (outermost) batch that are wanted; None for all. Others cost nothing.
        """
        rows = self.rows_at(xp, words, step, chosen)
        return self.positions(xp, words, rows), rows

    @np.errstate(over="ignore")
    def rows_at(self, xp: ModuleType, words: Array, step: Array, chosen: np.ndarray | None = None) -> list[Rows]:
        """The rows of every level; as `at`, without what costs most, the order."""
        step = xp.asarray(step).astype(np.uint64 if self.is_wide else np.uint32)
        rows = [self._element(xp, words, step)]
        for batching in reversed(self.batchings):
            rows.append(batching.rows(xp, rows[-1], chosen))
            chosen = None
        return rows

    def _element(self, xp: ModuleType, words: Array, step: Array) -> Rows:
        """The element of the outermost batching that a step is."""
        if self.batchings:
            epoch, element = self.batchings[-1].elements(xp, step)
        else:
            length = step.dtype.type(self.samples)
            epoch, element = step // length, step % length
        if self.shuffle.mode == "batchwise":
            key = order.batch_order_key(xp, words, epoch)
            element = self._shuffled(xp, element, self.steps_per_epoch, key, epoch)
        if self.shuffle.recurs:
            epoch = xp.zeros_like(epoch)
        return Rows(epoch, element, xp.ones(step.shape, bool))

    @np.errstate(over="ignore")
    def positions(self, xp: ModuleType, words: Array, rows: list[Rows]) -> Array:
        """The position of the sample at each row of the innermost level, from what `rows_at` gave."""
        samples = rows[-1]
        if self.shuffle.mode == "blocks":
            found = samples.element
        elif self.shuffle.mode == "itemwise":
            # A batch lies in one epoch unless it wraps, and then its rows need a key each.
            wraps = any(batching.ending == "wrap" for batching in self.batchings)
            epoch = samples.epoch if wraps else _keep_axes(rows[0].epoch, samples)
            found = self._shuffled(xp, samples.element, self.samples, order.epoch_key(xp, words, epoch), epoch)
        elif not self.shuffle.first_epoch:
            found = samples.element
        else:
            found = order.shuffled(xp, samples.element, self.samples, order.epoch_key(xp, words, np.uint32(0)))
        return found + found.dtype.type(self.first_position) if self.first_position else found

    def indices(
        self,
        xp: ModuleType,
        words: Array,
        epoch: Array,
        positions: Array,
        tables: Sequence[Array | None] | None = None,
    ) -> Array:
        """The index in the source of the sample at each position.

        Args:
            xp: `numpy` or `jax.numpy`.
            words: The run's raw key data, uint32.
            epoch: The epoch of every position.
            positions: From `positions`.
            tables: The tables of the selection, if they are arguments of a program.
        """
        if self.selection is None:
            return positions
        if xp is np:
            positions = positions.astype(np.uint64)  # a view of few samples may reach far into a source of many
        return self.selection.locate(xp, self.selection.tables if tables is None else tables, words, epoch, positions)

    def taking_over(self, before: "Plan", steps: int) -> "Plan":
        """This plan, beginning where another one is after that many steps.

        It continues in the middle of the epoch, if it goes through the samples in the same way. If not, it begins an
        epoch of its own; plans whose batches come back count their epochs from 0.
        """
        if not (self.can_start and before.can_start):
            return self
        (own,), (other,) = self.batchings, before.batchings
        start = other.after(steps)
        if (self.way, own.ending) != (before.way, other.ending):
            start = Start(start.epoch + (start.batch > 0))
        return dataclasses.replace(self, batchings=(dataclasses.replace(own, start=start),))

    @property
    def way(self) -> tuple[int, Shuffle, BlockOrder | None]:
        """What is equal for plans that go through the samples of an epoch in the same way."""
        return self.samples, self.shuffle, self.blocks

    @property
    def can_start(self) -> bool:
        """Whether this plan can begin anywhere in an epoch."""
        whole = self.first_position == self.first_batch == 0
        return whole and len(self.batchings) == 1 and self.shuffle.mode != "batchwise" and not self.shuffle.recurs

    def first_indices(self, count: int) -> list[int]:
        """The indices of the first samples of an epoch in sequence, at most `count`; each one once."""
        positions = self.first_position + np.arange(min(count, self.samples), dtype=np.uint64)
        words, epoch = np.zeros(2, np.uint32), np.zeros(len(positions), np.uint32)
        in_sequence = dataclasses.replace(self, selection=self.view)
        return list(dict.fromkeys(in_sequence.indices(np, words, epoch, positions).tolist()))

    def _shuffled(self, xp: ModuleType, positions: Array, n: int, key: Key, epoch: Array) -> Array:
        """The positions in the order of `key`, but in sequence in an epoch 0 that is not to be shuffled."""
        shuffled = order.shuffled(xp, positions, n, key)
        return shuffled if self.shuffle.first_epoch else xp.where(epoch == epoch.dtype.type(0), positions, shuffled)


def _keep_axes(epoch: Array, rows: Rows) -> Array:
    return epoch.reshape(epoch.shape + (1,) * (rows.element.ndim - epoch.ndim))
