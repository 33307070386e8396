"""The plan of batches that have several shapes: a plan for each shape, and whose turn it is at every step."""

import dataclasses
import functools
from types import ModuleType

import numpy as np

from millstream.plan import order
from millstream.plan.keys import Array
from millstream.plan.ordering import Ordering, Shuffle, as_shuffle
from millstream.plan.plan import STEP_LIMIT, Batching, Plan, Turn
from millstream.plan.selection import Selection


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """Buckets, each a plan of its own for batches of one shape; an epoch goes through all batches of all of them.

    The batches of an epoch are numbered bucket after bucket, and the ordering permutes these numbers. So any step is
    found alone: its number, the bucket it falls into, and the batch of that bucket.

    Example:
        >>> plan = bucket_plan(((6, 4), (3, 2)), "sequential", "pad")
        >>> plan.steps_per_epoch, [turn.bucket for turn in plan.turns(np.zeros(2, np.uint32), np.arange(4))]
        (4, [0, 1])
    """

    buckets: tuple[Plan, ...]
    ordering: Ordering | str

    @property
    def shuffle(self) -> Shuffle:
        """The ordering in full."""
        return as_shuffle("A source", self.ordering)

    @property
    def samples(self) -> int:
        return sum(plan.samples for plan in self.buckets)

    @property
    def selection(self) -> Selection | None:
        """Which of the source's samples there are; the same for all buckets."""
        return self.buckets[0].selection

    @property
    def draws(self) -> bool:
        """Whether which samples an epoch has depends on the run's key and the epoch, not only their order."""
        return self.buckets[0].draws

    @property
    def is_random(self) -> bool:
        """Whether which samples a batch has depends on the run's key."""
        return self.draws or self.shuffle != as_shuffle("buckets", "sequential")

    def steps_left(self, step: int) -> int:
        """Batches left in an epoch before batch number `step` of a run."""
        return self.steps_per_epoch - step % self.steps_per_epoch

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        return sum(plan.steps_per_epoch for plan in self.buckets)

    @property
    def step_limit(self) -> int:
        """Steps a state of this plan can count."""
        return STEP_LIMIT

    def first_indices(self, count: int) -> list[int]:
        """The indices of some samples, at most `count`."""
        return self.buckets[0].first_indices(count)

    def indices(self, xp: ModuleType, words: Array, epoch: Array, positions: Array) -> Array:
        """The index in the source of the sample at each position; see `Plan.indices`."""
        return self.buckets[0].indices(xp, words, epoch, positions)

    def turns(self, words: np.ndarray, steps: np.ndarray) -> list[Turn]:
        """Which bucket makes the batch of each step, and the number of that batch in the bucket's own run."""
        epochs, numbers = np.divmod(steps.astype(np.uint64), np.uint64(self.steps_per_epoch))
        numbers = self._ordered(words, epochs, numbers)
        firsts = np.array([plan.first_batch for plan in self.buckets], np.uint64)
        lengths = np.array([plan.steps_per_epoch for plan in self.buckets], np.uint64)
        found = np.searchsorted(firsts, numbers, side="right") - 1
        own = epochs * lengths[found] + numbers - firsts[found]
        return [Turn(int(one), which := np.flatnonzero(found == one), own[which]) for one in np.unique(found)]

    def real_samples(self, words: np.ndarray, step: int) -> int:
        """How many samples of a step are not padding."""
        return self.real_samples_of(words, range(step, step + 1))[0]

    def real_samples_of(self, words: np.ndarray, steps: range) -> list[int]:
        """How many samples of some steps are not padding."""
        counts = np.empty(len(steps), np.int64)
        for bucket, which, own in self.turns(words, np.arange(steps.start, steps.stop, dtype=np.uint64)):
            plan = self.buckets[bucket]
            counts[which] = [plan.real_samples(words, step) for step in own.tolist()]
        return counts.tolist()

    def _ordered(self, words: np.ndarray, epochs: Array, numbers: Array) -> Array:
        """The numbers of the batches at these places of their epochs."""
        shuffle = self.shuffle
        changes = shuffle.mode in ("itemwise", "batchwise")
        if not changes and not shuffle.first_epoch:
            return numbers
        key = order.batch_order_key(np, words, epochs if changes else np.uint32(0))
        found = order.shuffled(np, numbers, self.steps_per_epoch, key)
        return found if shuffle.first_epoch else np.where(epochs == 0, numbers, found)


def bucket_plan(
    buckets: tuple[tuple[int, int], ...],
    ordering: Ordering | str,
    ending: str,
    selection: Selection | None = None,
) -> BucketPlan:
    """A plan of buckets.

    Args:
        buckets: The number of samples and the batch size of each. Samples are numbered bucket after bucket.
        ordering: Of the batches of an epoch, and of the samples in each bucket.
        ending: What becomes of the last, incomplete batch of each bucket: "pad" or "drop".
        selection: Which sample of the source stands at each position.
    """
    shuffle = as_shuffle("buckets", ordering)
    if shuffle.mode == "blocks":
        raise ValueError(
            f"buckets takes samples of one length from all of the data, so that blocks cannot be read in sequence. Got "
            f'{shuffle}. Use ordering="shuffle".'
        )
    if shuffle.mode == "batchwise":  # their order changes here, so that in their bucket they come as they are
        ordering = Shuffle("repeat", shuffle.first_epoch)
    plans, position, batch = [], 0, 0
    for samples, size in buckets:
        batching = Batching(size, "drop" if ending == "drop" else "pad", samples)
        plans.append(Plan(samples, ordering, (batching,), selection, position, batch))
        position, batch = position + samples, batch + batching.length
    return BucketPlan(tuple(plans), shuffle if shuffle.mode == "batchwise" else ordering)
