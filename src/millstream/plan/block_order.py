"""The block shuffle: an order that reads almost in sequence. An index function, in NumPy and traced.

Samples are stored in blocks (row groups, shards, record batches), of any sizes. S is the sequence of all samples with
the blocks in an order of the epoch. Lane l of L has one contiguous stretch of S, and every L-th position of an epoch,
from l on. A lane is divided into windows, whose samples are permuted. So an epoch has every sample once at any size,
any position is found alone, by a search among the blocks, and at any time a lane needs the blocks of one window. Lanes
go from one window to the next at different times, so that they do not need new blocks all at once.

The order is version 1: golden vectors in the tests pin it, and any change to it needs a new version.
"""

import dataclasses
import functools
from types import ModuleType

import numpy as np

from millstream.plan import order
from millstream.plan.keys import Array, Key, fold, named_key
from millstream.plan.ordering import Shuffle
from millstream.plan.selection import count_upto, digest_of, index_dtype

VERSION = 1
_NAME = f"millstream block order {VERSION}"
_MOST_LANES = 64  # every number of hosts up to it that is a power of two divides it
_IN_FLIGHT = 1 << 28  # bytes of samples, if a source keeps no blocks: half of what others keep by default
_BLOCKS_PER_ROW = 4  # that a batch should have in flight for each of its rows, where blocks can be divided
_NONE = 0xFFFFFFFF  # no epoch is above it


@dataclasses.dataclass(frozen=True)
class BlockOrder:
    """Samples in blocks, lanes and windows; the table has where each block begins, and where the last one ends.

    Attributes:
        length: How many samples there are.
        blocks: How many blocks.
        lanes: How many lanes.
        window: How many samples a window of a lane has, at most, but for two more where they are uneven.
        digest: Stands for the contents of the table.
    """

    length: int
    blocks: int
    lanes: int
    window: int
    digest: str
    is_keyed = True

    @property
    def words(self) -> str:
        return (
            f"{self.blocks:,} blocks ({self.digest[:12]}) in {self.lanes:,} lanes with windows of {self.window:,}, "
            f"version {VERSION}"
        )

    def locate(self, xp: ModuleType, table: Array, words: Array, epoch: Array, positions: Array) -> Array:
        if xp is not np:
            return self._locate_in_graph(table, words, epoch, positions)
        narrow = positions.astype(np.uint32 if self.length <= 1 << 31 else np.uint64)  # NumPy divides those much faster
        epochs, found = np.broadcast_to(epoch, positions.shape), np.empty_like(positions)
        distinct = np.unique(epochs)
        for one in distinct:
            rows = epochs == one if len(distinct) > 1 else ...
            found[rows] = self._locate_in_epoch(table, words, one, narrow[rows])
        return found

    def _locate_in_epoch(self, table: np.ndarray, words: Array, epoch: Array, positions: np.ndarray) -> np.ndarray:
        key = fold(np, named_key(words, _NAME), epoch)
        lane, window, first, inside, size = self._place(np, positions)
        moved = order.shuffled(np, inside.astype(np.uint32), self._most, *self._window_keys(key, lane, window), size)
        rows = first + moved.astype(first.dtype)
        block_key = fold(np, key, np.uint32(0))
        begins, shifts = _kept_blocks(_Bounds(self.digest, table), int(block_key[0]), int(block_key[1]))
        return rows.astype(np.int64) + shifts[count_upto(np, begins, rows) - 1]

    def _window_keys(self, key: Key, lane: np.ndarray, window: np.ndarray) -> tuple[Key, np.ndarray | None]:
        """Keys of windows, and which of them each position has; a key for each position if that takes fewer.

        Of 64 steps with 128 rows that are planned at once, 8,192 positions have 64 windows.
        """
        (first_lane, lanes), (first, windows) = ((one.min(), int(one.max() - one.min()) + 1) for one in (lane, window))
        if lanes * windows > lane.size:
            return fold(np, key, self._window_number(lane, window)), None
        every_lane = first_lane + np.arange(lanes, dtype=lane.dtype)[:, None]
        number = self._window_number(every_lane, first + np.arange(windows, dtype=lane.dtype))
        return fold(np, key, number.ravel()), (lane - first_lane) * lane.dtype.type(windows) + window - first

    def _locate_in_graph(self, table: Array, words: Array, epoch: Array, positions: Array) -> Array:
        import jax.numpy as jnp
        from jax import lax

        epoch, name = jnp.broadcast_to(epoch, positions.shape).astype(np.uint32), named_key(words, _NAME)
        lane, window, first, inside, size = self._place(jnp, positions)
        keys = fold(jnp, fold(jnp, name, epoch), self._window_number(lane, window))
        rows = first + order.shuffled(jnp, inside, self._most, keys, ends=size)

        def turn(state: tuple[Array, Array]) -> tuple[Array, Array]:
            # A batch has samples of one epoch, or of two where it is completed from the next one.
            found, left = state
            now = jnp.where(left, epoch, np.uint32(_NONE)).min()
            begins, shifts = _ordered_blocks(jnp, table, fold(jnp, fold(jnp, name, now), np.uint32(0)))
            of_it = left & (epoch == now)
            located = rows + shifts[count_upto(jnp, begins, rows) - 1].astype(rows.dtype)
            return jnp.where(of_it, located, found), left & ~of_it

        start = rows, jnp.ones(positions.shape, bool)
        return lax.while_loop(lambda state: state[1].any(), turn, start)[0]

    @property
    def _shortest_lane(self) -> int:
        return self.length // self.lanes

    @property
    def _windows(self) -> int:
        """How many windows a lane has."""
        short, window = self._shortest_lane, self.window
        return 1 if short <= window else -(-(2 * short + window) // (2 * window))

    @property
    def _most(self) -> int:
        """The most samples that a window has."""
        return self._shortest_lane + 1 if self._windows == 1 else 2 * (self._shortest_lane // self._halves + 1)

    @property
    def _halves(self) -> int:
        """How many halves of windows a lane has: one less than whole windows would."""
        return 2 * self._windows - 1

    def _place(self, xp: ModuleType, positions: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Lane and window of each position, where the window begins in S, the place in it, and how many it has.

        A lane has an odd number of halves, which differ by at most one. Windows begin after one half, three, five, ...,
        and up to a half later, which is different in every lane. So the first and the last one have a half or more, and
        no window has more than two halves.
        """
        number = positions.dtype.type
        place, lane = positions // number(self.lanes), positions % number(self.lanes)
        short, longer_lanes = self._shortest_lane, self.length % self.lanes
        small, longer_halves = divmod(short, self._halves)
        in_longer = (lane < number(longer_lanes)).astype(positions.dtype)
        longer = number(longer_halves) + in_longer  # the first halves of a lane have one sample more than the others
        later = lane * number(small) // number(self.lanes)
        even, edge = place - xp.minimum(place, later), longer * number(small + 1)
        half = xp.where(even < edge, even // number(small + 1), longer + (even - edge) // number(max(small, 1)))
        window = (half + number(1)) // number(2)

        def border(halves: Array) -> Array:
            return halves * number(small) + xp.minimum(halves, longer) + later

        before, after = number(2) * window - number(1), number(2) * window + number(1)
        first = xp.where(window == number(0), number(0), border(before))
        end = xp.where(after == number(self._halves), number(short) + in_longer, border(after))
        start = lane * number(short) + xp.minimum(lane, number(longer_lanes))
        return lane, window, start + first, place - first, end - first

    def _window_number(self, lane: Array, window: Array) -> Array:
        """A number above zero for each window of each lane: zero is the order of the blocks."""
        number = lane.dtype.type
        return lane * number(self._windows) + window + number(1)


@dataclasses.dataclass(frozen=True)
class _Bounds:
    """Where blocks begin and end, known by a digest."""

    digest: str
    table: np.ndarray = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=8)  # epochs: those that steps are planned in, of a few sources
def _kept_blocks(bounds: _Bounds, *key: int) -> tuple[np.ndarray, np.ndarray]:
    return _ordered_blocks(np, bounds.table.astype(np.int64), (np.uint32(key[0]), np.uint32(key[1])))


def _ordered_blocks(xp: ModuleType, table: Array, key: Key) -> tuple[Array, Array]:
    """Where blocks begin in the order of an epoch, and what to add to a place there for the index of its sample."""
    count = len(table) - 1
    blocks = order.shuffled(xp, xp.arange(count, dtype=np.uint32), count, key)
    firsts = table[blocks]
    sizes = table[blocks + np.uint32(1)] - firsts
    begins = xp.cumsum(sizes, dtype=table.dtype) - sizes
    return begins, firsts - begins  # which wraps around where a block comes later than it is stored


@dataclasses.dataclass(frozen=True, eq=False)
class StoredBlocks:
    """The blocks that samples are stored in.

    Attributes:
        sizes: How many samples each has, in order.
        sample_bytes: About how many bytes a sample takes.
        divisible: Whether a part of a block is as quickly read as all of it, for its size.
        kept_bytes: How much of its blocks the source keeps in memory; 0 if that is not known.
    """

    sizes: np.ndarray
    sample_bytes: int
    divisible: bool
    kept_bytes: int = 0


def block_order(shuffle: Shuffle, stored: StoredBlocks, batch_size: int | None) -> tuple[BlockOrder, np.ndarray]:
    """The function and the table of a block shuffle, with what was not given chosen for batches of this size.

    Samples of up to 256 MiB are in flight, or of half of what the source keeps of its blocks, so that none is read
    twice. Where blocks can be divided, they are, so that four of them are in flight for each row of a batch: labels
    that follow the blocks then vary by 1.25 times as much as after a full shuffle.
    """
    sizes = stored.sizes[stored.sizes > 0]
    length, batch = int(sizes.sum()), _MOST_LANES if batch_size is None else batch_size
    budget, most = max(1, (stored.kept_bytes // 2 or _IN_FLIGHT) // stored.sample_bytes), shuffle.block_size
    if most is None and stored.divisible:
        in_flight = budget if shuffle.window is None else shuffle.window * (shuffle.lanes or lanes_for(batch))
        most = max(1, min(in_flight, length) // (_BLOCKS_PER_ROW * batch))
    if most is not None:
        sizes = divided(sizes, most)
    typical = typical_size(sizes)
    # A lane needs up to a block more than its window has.
    fitting = _MOST_LANES if shuffle.window is not None else int(budget // (2 * typical))
    if batch_size is None:  # neighbours are in different lanes, and should be in different blocks, too
        fitting = min(fitting, len(sizes))
    lanes = shuffle.lanes or lanes_for(batch, fitting)
    window = shuffle.window or max(1, round(max(budget / lanes - typical, typical)))
    table = np.append(0, np.cumsum(sizes)).astype(index_dtype(length + 1))
    return BlockOrder(length, len(sizes), lanes, min(window, -(-length // lanes)), digest_of(table)), table


def lanes_for(batch_size: int, most: int = _MOST_LANES) -> int:
    """The number of lanes that the most numbers of hosts divide, which are mostly powers of two, and that fits a batch.

    Example:
        >>> [lanes_for(size) for size in (1024, 96, 1000, 97)]
        [64, 32, 40, 1]
    """
    fitting = [lanes for lanes in range(1, max(1, min(most, _MOST_LANES)) + 1) if batch_size % lanes == 0]
    return max(fitting, key=lambda lanes: (lanes & -lanes, lanes))


def divided(sizes: np.ndarray, most: int) -> np.ndarray:
    """Blocks that are divided into equal parts, as nearly as can be, of at most that many samples.

    Example:
        >>> divided(np.array([10, 3]), 4).tolist()
        [4, 3, 3, 3]
    """
    parts = -(-sizes // most)
    small, longer = np.divmod(sizes, parts)
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    return np.repeat(small, parts) + (number < np.repeat(longer, parts))


def typical_size(sizes: np.ndarray) -> float:
    """The size of the block that a sample is in, on average over samples: what counts where sizes differ."""
    return float(np.square(sizes, dtype=np.float64).sum() / sizes.sum(dtype=np.float64))


@dataclasses.dataclass(frozen=True)
class Mixing:
    """How well a block shuffle mixes.

    Attributes:
        blocks: About how many blocks are in flight: lanes times window by block.
        samples: The samples of all windows in use.
        ratio: Of samples that are stored sorted by label, the variance of the labels in a batch, by that after a full
            shuffle. With B rows in a batch, L lanes and K blocks in flight it is about 1 + (B - L) / K.
    """

    blocks: float
    samples: int
    ratio: float


def mixing(function: BlockOrder, table: np.ndarray, batch_size: int) -> Mixing:
    """What to expect of an order: rows of one lane are in the same block more often than by chance."""
    samples = min(function.lanes * function.window, function.length)
    typical = typical_size(np.diff(table))
    by_window, by_chance = samples / function.lanes / typical, typical / function.length
    # A window begins anywhere in a block, so it has a part of one more than would fit.
    same_block = (by_window - 1 / 3) / by_window**2 if by_window > 1 else 1 - by_window / 3
    others = max(batch_size / function.lanes - 1, 0)
    ratio = 1 + others * max(same_block - by_chance, 0)
    return Mixing(min(samples / typical, 1 / by_chance), samples, ratio)
