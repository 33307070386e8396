"""Mixtures: which source, and which of its samples, stands at each position. An index function, in NumPy and traced."""

import dataclasses
import math
from types import ModuleType

import numpy as np

from millstream.plan import order
from millstream.plan.keys import Array, Key, fold, named_key
from millstream.plan.selection import digest_of

_NAME = "millstream mixture 1"
_LEAST_BLOCK, _MOST_BLOCK = 256, 1 << 16  # places of 16 bits, which times a stride still fit 32
_MOST_BLOCKS = 1 << 17  # rows of a table, so that a mixture of eight sources takes 4 MB at most


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Samples of several sources, as many of each as a table of quotas says, block by block.

    The table has a row for the start of every block, and one for the end: how many samples of each source come before.
    In a block, a position has a place: its bits in reverse. The places of a source are an interval, so its samples are
    spread evenly, and parts of a block that are powers of two have their share of it, up to one sample. The number of a
    source's samples so far, over all epochs of the mixture, is the position in its own epochs, each of which has an
    order of its own.

    Attributes:
        length: How many positions an epoch has.
        sources: The length of each source, and whether it is shuffled.
        digest: Stands for the contents of the table.
    """

    length: int
    sources: tuple[tuple[int, bool], ...]
    digest: str
    is_keyed = True
    run_limit = 1 << 32  # positions of a run: a compiled program counts samples in 32 bits

    @property
    def words(self) -> str:
        parts = ", ".join(f"{length:,}{'' if shuffled else ' in sequence'}" for length, shuffled in self.sources)
        return f"{self.length:,} mixed of {parts} ({self.digest[:12]})"

    def locate(self, xp: ModuleType, table: Array, words: Array, epoch: Array, positions: Array) -> Array:
        number, block = positions.dtype.type, block_size(self.length)
        which_block = positions // number(block)
        place = self._place(xp, positions - which_block * number(block), which_block)
        before, after = (table[at].astype(positions.dtype) for at in (which_block, which_block + number(1)))
        ends = xp.cumsum(after - before, axis=-1, dtype=positions.dtype)
        which = (place[..., None] >= ends).sum(-1, dtype=np.int32)

        def of_source(numbers: Array) -> Array:
            return xp.take_along_axis(numbers, which[..., None], axis=-1)[..., 0]

        rank = place - (of_source(ends) - of_source(after - before))
        every = xp.broadcast_to(table[-1].astype(positions.dtype), before.shape)
        count = epoch.astype(positions.dtype) * of_source(every) + of_source(before) + rank
        return (_choose_in_numpy if xp is np else _choose_in_graph)(self.sources, words, which, count)

    def _place(self, xp: ModuleType, inside: Array, which_block: Array) -> Array:
        """The place in its block of every position there."""
        number, size = inside.dtype.type, block_size(self.length)
        full, rest = divmod(self.length, size)
        place = _reversed_bits(inside, size.bit_length() - 1)
        if not rest:
            return place
        # The last block has any size; there a stride near the golden section spreads them, though less evenly.
        return xp.where(which_block == number(full), inside * number(_stride(rest)) % number(rest), place)


def block_size(length: int) -> int:
    """Positions per block of a mixture."""
    size = _LEAST_BLOCK
    while -(-length // size) > _MOST_BLOCKS and size < _MOST_BLOCK:
        size *= 2
    return size


def _reversed_bits(numbers: Array, bits: int) -> Array:
    """Numbers below 2**bits, which are at most 16, with their bits in reverse order."""
    number = numbers.dtype.type
    for shift, mask in ((1, 0x5555), (2, 0x3333), (4, 0x0F0F), (8, 0x00FF)):
        numbers = ((numbers & number(mask)) << number(shift)) | ((numbers >> number(shift)) & number(mask))
    return numbers >> number(16 - bits)


def _stride(size: int) -> int:
    """A number without a common factor with `size`, near its golden section."""
    stride = max(1, round(size * (math.sqrt(5) - 1) / 2))
    while math.gcd(stride, size) > 1:
        stride -= 1
    return stride


def _choose_in_numpy(sources: tuple[tuple[int, bool], ...], words: Array, which: Array, count: Array) -> Array:
    """The position, in the sources one after the other, of sample number `count` of source `which`."""
    found, first = np.empty_like(count), 0
    for source, (length, shuffled) in enumerate(sources):
        chosen = np.nonzero(which == source)
        epochs, own = np.divmod(count[chosen], count.dtype.type(length))
        if shuffled:
            shuffles = np.empty_like(own)
            for epoch in np.unique(epochs):  # of which there are few
                rows = epochs == epoch
                shuffles[rows] = order.shuffled(np, own[rows], length, _key(np, words, source, epoch))
            own = shuffles
        found[chosen] = own + count.dtype.type(first)
        first += length
    return found


def _choose_in_graph(sources: tuple[tuple[int, bool], ...], words: Array, which: Array, count: Array) -> Array:
    """The same, traced."""
    import jax.numpy as jnp

    found, first = count, 0
    for source, (length, shuffled) in enumerate(sources):
        epochs, own = jnp.divmod(count, count.dtype.type(length))
        if shuffled:
            own = order.shuffled(jnp, own, length, _key(jnp, words, source, epochs))
        found = jnp.where(which == source, own + count.dtype.type(first), found)
        first += length
    return found


def _key(xp: ModuleType, words: Array, source: int, epoch: Array) -> Key:
    return fold(xp, named_key(words, f"{_NAME} {source}"), xp.asarray(epoch).astype(np.uint32))


def mixed(weights: np.ndarray, length: int, sources: tuple[tuple[int, bool], ...]) -> tuple[Mixed, np.ndarray]:
    """The function and the table of a mixture.

    Args:
        weights: Of the sources in each block, a row per block that adds up to 1.
        length: How many positions an epoch has.
        sources: The length of each source, and whether it is shuffled.
    """
    return _with_table(rounded(weights, length), length, sources)


def mixed_once(
    weights: np.ndarray, length: int, sources: tuple[tuple[int, bool], ...], most: np.ndarray
) -> tuple[Mixed, np.ndarray]:
    """A mixture in which a source that has given `most` samples drops out, and the others share its weight."""
    ends = np.minimum(np.arange(1, len(weights) + 1) * block_size(length), length)
    table, taken = np.zeros((len(weights) + 1, len(most)), np.int64), np.zeros(len(most), np.int64)
    carried = np.zeros(len(most))  # what rounding still owes each source
    for block, (row, end) in enumerate(zip(weights, ends.tolist(), strict=True)):
        left = end - int(taken.sum())
        while left:
            usable = np.where(taken < most, row, 0.0)
            if not usable.any():
                usable = (taken < most).astype(float)  # only sources whose weight is zero here are left
            wanted = carried + left * usable / usable.sum()
            give = np.minimum(_largest_remainder(np.maximum(wanted, 0.0), left), most - taken)
            carried = np.where(usable > 0, wanted - give, 0.0)
            taken, left = taken + give, left - int(give.sum())
        table[block + 1] = taken
    return _with_table(table, length, sources)


def _with_table(table: np.ndarray, length: int, sources: tuple[tuple[int, bool], ...]) -> tuple[Mixed, np.ndarray]:
    found = np.ascontiguousarray(table, np.uint32)
    return Mixed(length, sources, digest_of(found)), found


def rounded(weights: np.ndarray, length: int) -> np.ndarray:
    """How many samples of each source come before each block, and in all: whole numbers that add up and never fall.

    They are less than one from the exact numbers.
    """
    block = block_size(length)
    sizes = np.full(len(weights), block, np.int64)
    sizes[-1] = length - block * (len(weights) - 1)
    exact = np.cumsum(weights * sizes[:, None], axis=0)
    table = np.zeros((len(weights) + 1, weights.shape[1]), np.int64)
    table[1:] = np.floor(exact + 1e-9)
    missing = np.cumsum(sizes) - table[1:].sum(axis=1)
    ranks = np.argsort(np.argsort(-(exact - table[1:]), axis=1, kind="stable"), axis=1, kind="stable")
    table[1:] += ranks < missing[:, None]
    falls = np.flatnonzero((np.diff(table, axis=0) < 0).any(axis=1))
    return table if not len(falls) else _rounded_one_by_one(exact, np.cumsum(sizes))


def _rounded_one_by_one(exact: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The same for weights so small that a block may have none: what a source has got, it keeps."""
    table = np.zeros((len(exact) + 1, exact.shape[1]), np.int64)
    for block, (wanted, end) in enumerate(zip(exact, ends.tolist(), strict=True)):
        before = table[block]
        table[block + 1] = before + _largest_remainder(np.maximum(wanted - before, 0.0), end - int(before.sum()))
    return table


def _largest_remainder(wanted: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers that add up to `total`, near numbers that nearly do."""
    found = np.floor(wanted + 1e-9).astype(np.int64)
    for _ in range(abs(total - int(found.sum()))):
        step = 1 if found.sum() < total else -1
        owed = step * (wanted - found)
        owed[(wanted == 0) | ((step < 0) & (found == 0))] = -np.inf
        found[np.argmax(owed)] += step
    return found
