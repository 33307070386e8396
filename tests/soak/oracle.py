"""What the stream of a case must be, in plain NumPy and lists: batch by batch, bit for bit.

Only the order of an epoch and the keys of samples are asked of the library, in NumPy. Batching, endings, nesting, maps,
buffers and turns are said here once more, in the simplest way.
"""

import dataclasses
import functools
import hashlib
from typing import Any

import numpy as np

from millstream.loader.mixed import WeightedOrder
from millstream.plan import order
from millstream.plan.block_order import StoredBlocks, block_order
from millstream.plan.keys import fold, name_words, named_key
from soak import trouble
from soak.cases import Case, Part

# The epoch that a sample has its keys from, its number, and the position that its keys depend on; None for padding.
Row = tuple[int, int, int] | None


@dataclasses.dataclass(frozen=True)
class Expected:
    """A batch as it must be.

    Attributes:
        leaves: Its arrays by name.
        mask: Which of its rows are real.
    """

    leaves: dict[str, np.ndarray]
    mask: np.ndarray

    @property
    def samples(self) -> list[int]:
        """The samples in it, as they call themselves."""
        return self.leaves["index"][self.mask].tolist()

    def without(self, targets: set[int]) -> "Expected":
        """The batch if these samples could not be read."""
        lost = self.mask & np.isin(self.leaves["index"], list(targets))
        leaves = {name: _blank(leaf, lost) for name, leaf in self.leaves.items()}
        return Expected(leaves, self.mask & ~lost)

    def masked(self, blank: bool) -> "Expected":
        """The batch without any real row."""
        leaves = {name: np.zeros_like(leaf) for name, leaf in self.leaves.items()} if blank else self.leaves
        return Expected(leaves, np.zeros_like(self.mask))

    @property
    def digest(self) -> str:
        """What is the same only for the same bits."""
        return digest(self.leaves, self.mask)

    @property
    def word(self) -> int:
        """As the digest, of 32 bits, as a training step computes it."""
        return int(word(np, self.leaves, self.mask))


def digest(leaves: dict[str, np.ndarray], mask: np.ndarray) -> str:
    """A hash of a batch: names, dtypes, shapes and bits."""
    found = hashlib.sha256()
    for name, leaf in [*sorted(leaves.items()), ("mask", mask)]:
        found.update(f"{name} {leaf.dtype} {leaf.shape} ".encode() + leaf.tobytes())
    return found.hexdigest()[:32]


@np.errstate(over="ignore")
def word(xp: Any, leaves: Any, mask: Any) -> Any:
    """A sum over all bits of a batch, each with a weight of its own, in NumPy and in JAX."""
    total = xp.zeros((), np.uint32)
    for leaf in [*(leaves[name] for name in sorted(leaves)), mask]:
        bits = leaf.astype(np.uint32) if leaf.dtype == bool else leaf.view(np.uint32)
        weights = xp.arange(1, 2 * leaf.size, 2, dtype=np.uint32) * np.uint32(2654435761)
        total = total * np.uint32(31) + xp.sum(bits.reshape(-1) * weights, dtype=np.uint32)
    return total


def _blank(leaf: np.ndarray, rows: np.ndarray) -> np.ndarray:
    leaf = leaf.copy()
    leaf[rows] = 0
    return leaf


class Epochs:
    """The samples of a part, epoch by epoch, as lists of rows.

    Args:
        part: The pipeline.
        words: The key of its run.
    """

    def __init__(self, part: Part, words: np.ndarray) -> None:
        self._part = part
        self._words = words
        self.length = part.samples
        if part.ordering.mode == "blocks":
            stored = StoredBlocks(np.array([self.length]), 1, False)
            self._blocks, self._bounds = block_order(part.ordering, stored, None)

    @functools.cache  # noqa: B019 (it lives as long as its case)
    def at(self, epoch: int) -> list[Row]:
        """The rows of one epoch, each sample once."""
        shuffle = self._part.ordering
        if shuffle.mode == "blocks":
            positions = np.arange(self.length, dtype=np.uint64)
            found = self._blocks.locate(np, self._bounds, self._words, np.uint32(epoch), positions).tolist()
            assert sorted(found) == list(range(self.length)), f"no permutation: {found}"
            return [(epoch, index, position) for position, index in enumerate(found)]
        keys_of = 0 if shuffle.recurs else epoch
        ordered_by = epoch if shuffle.mode == "itemwise" else 0
        if ordered_by == 0 and not shuffle.first_epoch:
            return [(keys_of, index, index) for index in range(self.length)]
        key = order.epoch_key(np, self._words, np.uint32(ordered_by))
        return [(keys_of, index, index) for index in permutation(self.length, key)]

    @property
    def padding(self) -> Any:
        return None


class Batches:
    """The batches of an epoch, as lists of what is batched.

    Args:
        inner: What is batched.
        size: How many are a batch.
        ending: What becomes of the last ones of an epoch.
        lanes: How many lanes take turns in what is batched; each has rows of its own in a batch.
    """

    def __init__(self, inner: Any, size: int, ending: str, lanes: int = 1) -> None:
        self._inner = inner
        self._lanes = lanes
        self._size = size
        self._ending = ending
        self.length = inner.length // size if ending == "drop" else -(-inner.length // size)

    @functools.cache  # noqa: B019
    def at(self, epoch: int) -> list[Any]:
        """The batches of one epoch."""
        if self._ending == "wrap":  # batches are cut from all epochs, one after the other
            first = epoch * self.length * self._size
            places = [divmod(place, self._inner.length) for place in range(first, first + self.length * self._size)]
            elements = [self._inner.at(inner)[place] for inner, place in places]
        else:
            elements = list(self._inner.at(epoch))
            elements += [self._inner.padding] * (self.length * self._size - len(elements))
        batches = [elements[number * self._size : (number + 1) * self._size] for number in range(self.length)]
        return [[row for lane in range(self._lanes) for row in batch[lane :: self._lanes]] for batch in batches]

    @property
    def padding(self) -> Any:
        return [self._inner.padding] * self._size


def permutation(length: int, key: Any) -> list[int]:
    """The library's order of that many things, which must be one."""
    found = order.shuffled(np, np.arange(length, dtype=np.uint32), length, key).tolist()
    assert sorted(found) == list(range(length)), f"no permutation: {found}"
    return found


class PartStream:
    """The batches of a part by their steps."""

    def __init__(self, part: Part, words: np.ndarray, batched: bool = True) -> None:
        self._part = part
        self._words = words
        self._outermost: Any = Epochs(part, words)
        lanes = part.ordering.lanes or 1
        for size, ending in part.batches if batched else ():
            self._outermost, lanes = Batches(self._outermost, size, ending, lanes), 1
        self.steps_per_epoch = self._outermost.length

    def at(self, step: int) -> Expected:
        """The batch of a step."""
        epoch, number = divmod(step, self.steps_per_epoch)
        shuffle = self._part.ordering
        if shuffle.recurs:
            if shuffle.mode == "batchwise" and (epoch > 0 or shuffle.first_epoch):
                key = order.batch_order_key(np, self._words, np.uint32(epoch))
                number = permutation(self.steps_per_epoch, key)[number]
            epoch = 0
        return self._stacked(self._outermost.at(epoch)[number])

    def _stacked(self, rows: Any) -> Expected:
        if not isinstance(rows, list):
            leaves = {"index": np.int32(0), "x": np.zeros(trouble.WIDTH, np.float32)}
            leaves = leaves if rows is None else self._sample(*rows)
            return Expected({name: np.asarray(leaf) for name, leaf in leaves.items()}, np.asarray(rows is not None))
        inner = [self._stacked(row) for row in rows]
        leaves = {name: np.stack([batch.leaves[name] for batch in inner]) for name in inner[0].leaves}
        return Expected(leaves, np.stack([batch.mask for batch in inner]))

    @np.errstate(over="ignore")
    def _sample(self, epoch: int, index: int, position: int) -> dict[str, Any]:
        part, value = self._part, trouble.sample(self._part.first + index)
        if part.host_map == "doubled":
            value = trouble.doubled(value)
        elif part.host_map == "shaken":
            key = [*self._key("millstream sample 1", epoch, position), *name_words("RandomHostMapTransform(shaken)")]
            philox = np.random.Philox(key=np.array(key, np.uint32).view(np.uint64))
            value = trouble.shaken(value, np.random.Generator(philox))
        if part.device_map in ("before", "after"):
            value["x"] = value["x"] * np.float32(2)
        elif part.device_map == "random":
            word = self._key("millstream stage 1 RandomMapTransform(jitter)", epoch, position)[0]
            value["x"] = value["x"] + np.float32(word >> np.uint32(8)) * np.float32(2**-24)
        return value

    def _key(self, name: str, epoch: int, position: int) -> tuple[np.uint32, np.uint32]:
        return fold(np, fold(np, named_key(self._words, name), np.uint32(epoch)), np.uint32(position))


class Buffered:
    """A stream through a buffer that is written and read in sequence."""

    def __init__(self, inner: PartStream, capacity: int, prefill: int, rows: int) -> None:
        self._inner, self._prefill, self._rows = inner, prefill, rows
        self._stored: list[Expected | None] = [None] * capacity
        self._drawn: list[Expected] = []
        self._count = self._write = self._read = 0
        self.steps_per_epoch = inner.steps_per_epoch

    def at(self, step: int) -> Expected:
        """The batch of a step; all before it are drawn first."""
        while len(self._drawn) <= step:
            self._drawn.append(self._next(self._inner.at(len(self._drawn))))
        return self._drawn[step]

    def _next(self, value: Expected) -> Expected:
        ready, capacity = self._count >= self._prefill, len(self._stored)
        self._stored[self._write] = value
        self._write, self._count = (self._write + 1) % capacity, min(self._count + 1, capacity)
        if not ready:
            return _stack([value, *[value.without({*value.samples})] * (self._rows - 1)])
        places = [(self._read + row) % self._count for row in range(self._rows)]
        self._read = (places[-1] + 1) % self._count
        return _stack([stored for stored in (self._stored[place] for place in places) if stored is not None])


def _stack(rows: list[Expected]) -> Expected:
    leaves = {name: np.stack([row.leaves[name] for row in rows]) for name in rows[0].leaves}
    return Expected(leaves, np.stack([row.mask for row in rows]))


class Mixed:
    """The batches of several parts; an epoch brings each of them once."""

    def __init__(self, parts: list[PartStream], interleaved: bool) -> None:
        self._parts = parts
        lengths = [part.steps_per_epoch for part in parts]
        self.steps_per_epoch = sum(lengths)
        turns = WeightedOrder(lengths)
        periods = self.steps_per_epoch // turns.period
        whose = [turns.at(step) for step in range(turns.period)] * periods
        if not interleaved:
            whose = [number for number, length in enumerate(lengths) for _ in range(length)]
        assert [whose.count(number) for number in range(len(parts))] == lengths
        self._whose = whose

    def at(self, step: int) -> Expected:
        """The batch of a step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        number = self._whose[place]
        part = self._parts[number]
        return part.at(epoch * part.steps_per_epoch + self._whose[:place].count(number))


def stream_of(case: Case, words: np.ndarray) -> Any:
    """What the loader of a case must give: `at(step)` and `steps_per_epoch`."""
    first, *others = case.parts
    if case.buffered:
        return Buffered(PartStream(first, words, batched=False), 8, 6, first.batches[0][0])
    if not others:
        return PartStream(first, words)
    keys = [np.stack(named_key(words, f"millstream mix 1 {number}")) for number in range(len(case.parts))]
    return Mixed([PartStream(part, key) for part, key in zip(case.parts, keys, strict=True)], case.interleaved)
