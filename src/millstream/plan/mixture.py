"""Mixtures: which source, and which of its samples, stands at each position. An index function, in NumPy and traced."""

import bisect
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from millstream.plan import order
from millstream.plan.block_order import BlockOrder
from millstream.plan.keys import Array, Key, fold, named_key
from millstream.plan.selection import Selection, digest_of

_NAME = "millstream mixture 1"
_LEAST_BLOCK, _MOST_BLOCK = 256, 1 << 15  # a place times a slope, in two parts, fits 32 bits
_MOST_BLOCKS = 1 << 15  # so that 10**9 positions of eight sources take less than 3 MB
_ONE, _HALF = 1 << 16, 1 << 15  # a sample, and half of one, in numbers with 16 bits after the point
_FEW = 16  # epochs of a source that are shuffled one by one: a key for every row costs as much as ten orders
_SMALL = 2048  # positions whose sources are shuffled together
_NONE = 0xFFFFFFFF  # stands for no epoch: a source of two samples has at most 2**31 of them in a run

# Sources are divided in two again and again: a number, or the column of a division and what is on both sides of it.
Tree = int | tuple[int, "Tree", "Tree"]
Table = tuple[Array, tuple[tuple[Any, ...], ...]]  # of quotas, and those of every source's own selection


@dataclasses.dataclass(frozen=True)
class Part:
    """A source of a mixture.

    Attributes:
        name: What it is called.
        length: How many positions one of its own epochs has.
        shuffled: Whether each of them has an order of its own.
        first: The index that its samples begin at, where all sources are one.
        selection: Which of its samples stand at the positions of an epoch, if it is a view; without tables.
    """

    name: str
    length: int
    shuffled: bool
    first: int = 0
    selection: Selection = dataclasses.field(default_factory=Selection)

    @property
    def words(self) -> str:
        """What it is, in words that differ for different sources."""
        what = self.selection.words or f"{self.length:,}"
        in_sequence = not self.shuffled and not any(isinstance(one, BlockOrder) for one in self.selection.functions)
        return f"{self.name}: {what}{' in sequence' if in_sequence else ''}"


@dataclasses.dataclass(frozen=True)
class Change:
    """Different quotas from some sample of a run on.

    Attributes:
        after: How many samples of the run come before.
        digest: Stands for the quotas.
        offsets: What to add to the number that they give to a sample of each source, modulo 2**32, so that every source
            continues where it was.
    """

    after: int
    digest: str
    offsets: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Samples of several sources, in the proportions that a table of quotas says.

    Half of the sources share the positions with the other half, each half divides its own in the same way, and so on. A
    division follows the exact share of its left half as a line, rounded to whole samples: the table has, for the start
    of every block and the end of an epoch, how many samples of the left half come before, by how much the line is above
    that number, and its slope. So each division adds at most half a sample to what a source is away from exact, at any
    position, as long as shares stay. Where they jump it may be more, which blocks in which both have a share make
    up for. How many samples of a source have come, over all epochs of the mixture, is the position in its own epochs,
    each of which has its own order.

    Attributes:
        length: How many positions an epoch has.
        parts: The sources.
        digest: Stands for the quotas.
        changes: What replaced them later in the run; tables lie one after the other.
    """

    length: int
    parts: tuple[Part, ...]
    digest: str
    changes: tuple[Change, ...] = ()
    is_keyed = True
    run_limit = 1 << 32  # positions of a run: a compiled program counts samples in 32 bits

    @property
    def words(self) -> str:
        parts = "; ".join(part.words for part in self.parts)
        return f"{self.length:,} mixed of {parts} ({self.digest[:12]})"

    def locate(self, xp: ModuleType, table: Array, words: Array, epoch: Array, positions: Array) -> Array:
        if xp is not np:
            keys = fold(xp, named_key(words, _NAME), xp.arange(len(self.parts), dtype=np.uint32))
            return self._locate_in_graph(table, keys, epoch, positions)
        keys = _keys_of_parts(words.tobytes(), len(self.parts))
        found = np.empty(positions.size, positions.dtype)
        groups = []
        for number, rows, count in self._counted(table[0], epoch, positions):
            length = self.parts[number].length
            count = count if length < 1 << 32 else count.astype(np.uint64)
            groups.append((number, rows, *np.divmod(count, count.dtype.type(length))))
        for (number, rows, epochs, _), own in zip(groups, self._shuffled(keys, groups), strict=True):
            part, own = self.parts[number], own.astype(positions.dtype)
            if part.selection.functions:
                words = np.array([keys[0][number], keys[1][number]])
                own = part.selection.locate(np, table[1][number], words, epochs, own)
            found[rows] = own + positions.dtype.type(part.first)
        return found.reshape(positions.shape)

    def _shuffled(self, keys: Key, groups: list[tuple[int, Array, Array, Array]]) -> list[Array]:
        """The samples at positions of the sources' own epochs, in NumPy."""
        lengths = [self.parts[number].length for number, *_ in groups]
        shuffled = np.array([self.parts[number].shuffled for number, *_ in groups])
        sizes = [len(own) for *_, own in groups]
        if sum(sizes) > _SMALL or max(lengths) > 1 << 31 or any(np.ptp(epochs) for _, _, epochs, _ in groups):
            return [
                _shuffled_in_numpy(own, length, (keys[0][number], keys[1][number]), epochs) if is_shuffled else own
                for (number, _, epochs, own), length, is_shuffled in zip(groups, lengths, shuffled, strict=True)
            ]
        # One network for a batch that is planned alone: most of its time would be calls.
        numbers, which = [number for number, *_ in groups], np.repeat(np.arange(len(groups)), sizes)
        key = fold(np, (keys[0][numbers], keys[1][numbers]), np.array([epochs[0] for _, _, epochs, _ in groups]))
        own = np.concatenate([own for *_, own in groups])
        moved = order.shuffled_in_domains(np, own, which, lengths, key, shuffled[which])
        return np.split(moved, np.cumsum(sizes)[:-1])

    def numbers(self, table: Table, epoch: Array, positions: np.ndarray) -> np.ndarray:
        """The number of the source at each position."""
        found = np.empty(positions.size, np.int32)
        for number, rows, _ in self._counted(table[0], epoch, positions):
            found[rows] = number
        return found.reshape(positions.shape)

    def counts(self, table: Table, samples: np.ndarray) -> np.ndarray:
        """How many samples of each source come before sample number n of a run, for each n, along a new last axis."""
        samples = np.asarray(samples, np.int64)
        epoch, positions = samples // self.length, (samples % self.length).astype(np.uint32)
        changed, row, place = self._enter(epoch.astype(np.uint32), positions)
        wholes, found = self._wholes(table[0]), np.empty((*samples.shape, len(self.parts)), np.int64)

        def descend(tree: Tree, place: Array, before: Array) -> None:
            if isinstance(tree, int):
                found[..., tree] = epoch * wholes[changed, tree] + before + place + self._offsets[changed, tree]
                return
            column, left, right = tree
            first, slope, above = (table[0][row, column, field] for field in range(3))
            taken = _taken(place, slope, above)
            descend(left, taken, first)
            descend(right, place - taken, before - first)

        descend(self._tree, place, positions - place)
        return found % self.run_limit

    def sets_of_quotas(self, table: Table) -> "list[tuple[int, Mixed, Table]]":
        """Each set of quotas as a mixture of its own, and after how many samples of a run it counts."""
        alone, rows = dataclasses.replace(self, changes=()), self._rows
        starts = [0, *(change.after for change in self.changes)]
        return [(start, alone, (table[0][k * rows : (k + 1) * rows], ())) for k, start in enumerate(starts)]

    @property
    def _tree(self) -> Tree:
        return _halved(0, len(self.parts))

    @functools.cached_property
    def _offsets(self) -> np.ndarray:
        nothing = (0,) * len(self.parts)
        return np.array([nothing, *(change.offsets for change in self.changes)], np.uint32)

    def _enter(self, epoch: Array, positions: Array) -> tuple[Array, Array, Array]:
        """How often quotas have changed before each position, the row of its block, and its place there."""
        size = np.uint32(block_size(self.length))
        block = positions // size
        place = positions - block * size
        if not self.changes:
            return np.uint32(0), block, place
        run = epoch * np.uint32(self.length) + positions
        changed = sum((run >= np.uint32(change.after)).astype(np.uint32) for change in self.changes)
        return changed, changed * np.uint32(self._rows) + block, place

    @property
    def _rows(self) -> int:
        """Rows of the table of one set of quotas."""
        return -(-self.length // block_size(self.length)) + 1

    def _counted(self, quotas: np.ndarray, epoch: Array, positions: np.ndarray) -> Iterator[tuple[int, Array, Array]]:
        """Of each source: where it stands among the positions, and how many of its samples come before each."""
        epoch = np.broadcast_to(epoch, positions.shape).ravel().astype(np.uint32)
        flat = positions.ravel().astype(np.uint32)
        if not len(flat):
            return
        changed, row, place = self._enter(epoch, flat)
        wholes, lowest = self._wholes(quotas), row.min()
        near = np.ascontiguousarray(quotas[lowest : int(row.max()) + 1].T)  # few rows, and then one column at a time
        row -= lowest

        def descend(
            tree: Tree, rows: Array, row: Array, place: Array, before: Array
        ) -> Iterator[tuple[int, Array, Array]]:
            if isinstance(tree, int):
                then = changed if np.ndim(changed) == 0 else changed[rows]
                count = before + place
                count += epoch.take(rows, mode="clip") * wholes[then, tree] + self._offsets[then, tree]
                yield tree, rows, count
                return
            column, left, right = tree
            first, slope, above = (field[column].take(row, mode="clip") for field in near)  # "clip" asks least
            taken = _taken(place, slope, above)
            is_left = _taken(place + np.uint32(1), slope, above) > taken
            before, place = before - first, place - taken
            for side, chosen, parts in (
                (left, is_left, (rows, row, taken, first)),
                (right, ~is_left, (rows, row, place, before)),
            ):
                some = chosen.nonzero()[0]
                if len(some):
                    yield from descend(side, *(part.take(some, mode="clip") for part in parts))

        yield from descend(self._tree, np.arange(len(flat)), row, place, flat - place)

    def _wholes(self, quotas: np.ndarray) -> np.ndarray:
        """How many samples of each source an epoch has, a row for each set of quotas."""
        lasts = quotas[self._rows - 1 :: self._rows, :, 0]
        found = np.empty((len(lasts), len(self.parts)), np.uint32)

        def descend(tree: Tree, whole: Array) -> None:
            if isinstance(tree, int):
                found[:, tree] = whole
                return
            column, left, right = tree
            descend(left, lasts[:, column])
            descend(right, whole - lasts[:, column])

        descend(self._tree, np.full(len(lasts), self.length, np.uint32))
        return found

    def _locate_in_graph(self, table: Table, keys: Key, epoch: Array, positions: Array) -> Array:
        import jax.numpy as jnp

        quotas, epoch = table[0], jnp.broadcast_to(epoch, positions.shape)
        changed, row, place = self._enter(epoch, positions)
        last = (changed + np.uint32(1)) * np.uint32(self._rows) - np.uint32(1)
        near = quotas.reshape(len(quotas), -1)[row.reshape(-1)]  # one lookup for all that a position needs of its block

        def descend(tree: Tree, place: Array, before: Array, whole: Array) -> tuple[Array, Array]:
            if isinstance(tree, int):
                offset = jnp.asarray(self._offsets[:, tree])[changed] if self.changes else np.uint32(0)
                return np.int32(tree), epoch * whole + before + place + offset
            column, left, right = tree
            first, slope, above = (near[:, 3 * column + field].reshape(place.shape) for field in range(3))
            taken = _taken(place, slope, above)
            is_left = _taken(place + np.uint32(1), slope, above) > taken
            of_left = quotas[last, column, 0]
            ones = descend(left, taken, first, of_left)
            others = descend(right, place - taken, before - first, whole - of_left)
            return jnp.where(is_left, ones[0], others[0]), jnp.where(is_left, ones[1], others[1])

        which, count = descend(self._tree, place, positions - place, np.uint32(self.length))
        return _choose_in_graph(self.parts, table[1], keys, jnp.broadcast_to(which, positions.shape), count)


@dataclasses.dataclass(frozen=True)
class Numbering:
    """Sources one after the other: which of them an index belongs to, and which row below it is.

    Attributes:
        firsts: The first index of each.
        rows: The row that this index stands for; sources may have rows in common.
    """

    firsts: tuple[int, ...]
    rows: tuple[int, ...]

    def at(self, xp: ModuleType, indices: Array) -> tuple[Array, Array]:
        """The number of the source at each index, and the row."""
        number = sum(
            ((indices >= first).astype(np.int32) for first in self.firsts[1:]), xp.zeros(indices.shape, np.int32)
        )
        firsts, rows = (xp.asarray(np.array(part, indices.dtype)) for part in (self.firsts, self.rows))
        return number, indices - firsts[number] + rows[number]

    def rows_at(self, indices: np.ndarray) -> np.ndarray:
        """The rows at some indices, on the host."""
        if self.rows == self.firsts:
            return indices
        number = np.searchsorted(self.firsts, indices, "right") - 1
        return indices + np.subtract(self.rows, self.firsts)[number]

    def of(self, index: int) -> tuple[int, int]:
        """The same for one index."""
        number = bisect.bisect_right(self.firsts, index) - 1
        return number, index - self.firsts[number] + self.rows[number]


def sources_at(
    selection: Selection, words: Array, epoch: Array, positions: np.ndarray
) -> tuple[tuple[str, ...], np.ndarray] | None:
    """The names of the sources of a mixture, and the number of the one at each position; None without a mixture."""
    for function, table in zip(selection.functions, selection.tables, strict=True):
        if isinstance(function, Mixed):
            assert table is not None
            return tuple(part.name for part in function.parts), function.numbers(table, epoch, positions)
        positions = function.locate(np, table, words, epoch, positions)
    return None


def block_size(length: int) -> int:
    """Positions per block of a mixture."""
    size = _LEAST_BLOCK
    while -(-length // size) > _MOST_BLOCKS and size < _MOST_BLOCK:
        size *= 2
    return size


@functools.cache
def _halved(first: int, last: int) -> Tree:
    """The sources from `first` to before `last`, divided in two again and again."""
    if last - first == 1:
        return first
    middle = (first + last) // 2
    return middle - 1, _halved(first, middle), _halved(middle, last)


@functools.lru_cache(maxsize=64)
def _keys_of_parts(words: bytes, parts: int) -> Key:
    """The keys of the sources of a mixture in the run whose raw key data these are."""
    return fold(np, named_key(np.frombuffer(words, np.uint32), _NAME), np.arange(parts, dtype=np.uint32))


def _taken(place: Array, slope: Array, above: Array) -> Array:
    """How many places before each one are on the left of a division, whose line rises from `above` by `slope`."""
    high, low = slope >> np.uint32(15), slope & np.uint32((1 << 15) - 1)
    return (place * high + (place * low >> np.uint32(15)) + above) >> np.uint32(16)


def _shuffled_in_numpy(own: Array, length: int, key: Key, epochs: Array) -> Array:
    """The samples at these positions of a source's own epochs."""
    wide = own if length <= 1 << 31 else own.astype(np.uint64)
    first, last = int(epochs.min()), int(epochs.max())
    if last - first >= _FEW:
        return order.shuffled(np, wide, length, fold(np, key, epochs))
    found = np.empty_like(wide)
    for epoch in range(first, last + 1):
        rows = epochs == epoch
        found[rows] = order.shuffled(np, wide[rows], length, fold(np, key, np.uint32(epoch)))
    return found


def _choose_in_graph(
    parts: tuple[Part, ...], tables: Sequence[Sequence[Array]], keys: Key, which: Array, count: Array
) -> Array:
    """The index of sample number `count` of source `which`, traced."""
    import jax.numpy as jnp

    epochs, own = count, count
    for number, part in enumerate(parts):
        found = jnp.divmod(count, np.uint32(part.length))
        epochs, own = (jnp.where(which == number, new, old) for new, old in zip(found, (epochs, own), strict=True))
    firsts = _first_epochs(len(parts), which, epochs, jnp.ones(which.shape, bool))
    if any(part.shuffled for part in parts):
        own = _shuffled_in_graph(parts, keys, which, epochs, own)
    found = own
    for number, part in enumerate(parts):
        mine, its = which == number, own
        if part.selection.functions:
            # Rows of other sources get what any row of this one may have, so that they cost nothing.
            words = jnp.stack([keys[0][number], keys[1][number]])
            epochs_of_it = jnp.where(mine, epochs, firsts[number])
            its = jnp.where(mine, own, np.uint32(0))
            its = part.selection.locate(jnp, tables[number], words, epochs_of_it, its)
        found = jnp.where(mine, its + np.uint32(part.first), found)
    return found


def _first_epochs(parts: int, which: Array, epochs: Array, left: Array) -> Array:
    """The first epoch of each source among the rows that are left."""
    import jax.numpy as jnp

    numbers = np.arange(parts, dtype=np.int32).reshape(-1, *[1] * which.ndim)
    among = jnp.where((which[None] == numbers) & left[None], epochs[None], np.uint32(_NONE))
    return among.reshape(parts, -1).min(axis=1)


def _shuffled_in_graph(parts: tuple[Part, ...], keys: Key, which: Array, epochs: Array, own: Array) -> Array:
    """The samples at these positions of the sources' own epochs, traced.

    A batch has samples of one epoch of a source, seldom of two, unless the source is small. So keys are made for one
    epoch of each at a time, and again for those that are left.
    """
    import jax.numpy as jnp
    from jax import lax

    lengths = [part.length for part in parts]
    to_shuffle = np.array([part.shuffled and part.length > 1 for part in parts])

    def turn(state: tuple[Array, Array]) -> tuple[Array, Array]:
        found, left = state
        firsts = _first_epochs(len(parts), which, epochs, left)
        now = left & (epochs == firsts[which])
        found = order.shuffled_in_domains(jnp, found, which, lengths, fold(jnp, keys, firsts), now)
        return found, left & ~now

    start = own, jnp.asarray(to_shuffle)[which]
    return lax.while_loop(lambda state: state[1].any(), turn, start)[0]


def mixed(
    shares: np.ndarray, length: int, parts: Sequence[Part], tables: Sequence[tuple[Any, ...]] | None = None
) -> tuple[Mixed, Table]:
    """The function and the table of a mixture.

    Args:
        shares: Of the sources in each block, a row per block that adds up to 1.
        length: How many positions an epoch has.
        parts: The sources.
        tables: Those of their selections.
    """
    return _with_quotas(shares * np.diff(_ends(length))[:, None], length, parts, tables)


def mixed_once(
    shares: np.ndarray,
    length: int,
    parts: Sequence[Part],
    most: np.ndarray,
    tables: Sequence[tuple[Any, ...]] | None = None,
) -> tuple[Mixed, Table]:
    """A mixture in which a source that has given `most` samples drops out, and the others share its weight."""
    exact, taken = np.zeros_like(shares), np.zeros(len(most), np.int64)
    carried = np.zeros(len(most))  # what rounding still owes each source
    for block, (row, left) in enumerate(zip(shares, np.diff(_ends(length)).tolist(), strict=True)):
        while left:
            usable = np.where(taken < most, row, 0.0)
            if not usable.any():
                usable = (taken < most).astype(float)  # only sources whose weight is zero here are left
            wanted = carried + left * usable / usable.sum()
            give = np.minimum(_largest_remainder(np.maximum(wanted, 0.0), left), most - taken)
            carried = np.where(usable > 0, wanted - give, 0.0)
            taken, left = taken + give, left - int(give.sum())
            exact[block] += give
    return _with_quotas(exact, length, parts, tables)


def reweighted(function: Mixed, table: Table, shares: np.ndarray, after: int) -> tuple[Mixed, Table]:
    """The same mixture with other shares from some sample of a run on: every source continues where it was."""
    new, (quotas, _) = mixed(shares, function.length, function.parts)
    samples = np.array(after)
    offsets = (function.counts(table, samples) - new.counts((quotas, ()), samples)) % Mixed.run_limit
    changes = (*function.changes, Change(after, new.digest, tuple(offsets.tolist())))
    return dataclasses.replace(function, changes=changes), (np.concatenate([table[0], quotas]), table[1])


def _ends(length: int) -> np.ndarray:
    """Where blocks begin, and where the last one ends."""
    return np.append(np.arange(0, length, block_size(length)), length)


def _with_quotas(
    exact: np.ndarray, length: int, parts: Sequence[Part], tables: Sequence[tuple[Any, ...]] | None
) -> tuple[Mixed, Table]:
    """The mixture whose sources have, as nearly as can be, these numbers of samples in every block."""
    quotas = np.zeros((len(exact) + 1, len(parts) - 1, 3), np.uint32)

    def descend(tree: Tree, counts: np.ndarray) -> None:
        if not isinstance(tree, int):
            column, left, right = tree
            line = _line(counts, exact[:, _numbers(tree)].sum(axis=1), exact[:, _numbers(left)].sum(axis=1))
            rises, sizes = np.diff(line), np.maximum(np.diff(counts), 1)
            quotas[:, column, 0] = line >> 16
            quotas[:-1, column, 1] = -(-(rises << 15) // sizes)  # rounded up, a block ends where the next one begins
            quotas[:, column, 2] = line & (_ONE - 1)
            descend(left, line >> 16)
            descend(right, counts - (line >> 16))

    descend(_halved(0, len(parts)), _ends(length))
    its = tuple(() for _ in parts) if tables is None else tuple(map(tuple, tables))
    return Mixed(length, tuple(parts), digest_of(quotas)), (quotas, its)


def _line(counts: np.ndarray, both: np.ndarray, left: np.ndarray) -> np.ndarray:
    """How many samples of the left half come before every block, and half of one, with 16 bits after the point.

    Args:
        counts: How many of both halves come before, as whole numbers.
        both: How many of both halves every block should have.
        left: And how many of the left half.
    """
    share = np.divide(left, both, out=np.zeros_like(both), where=both > 0)
    around = (np.append(share[:1], share) + np.append(share, share[-1:])) / 2  # of the blocks that meet
    exact, exact_of_both = (np.append(0.0, np.cumsum(one)) for one in (left, both))
    # What both are above their exact number is shared as samples are there, and then corrected.
    wanted = np.rint((exact + (counts - exact_of_both) * around) * _ONE).astype(np.int64) + _HALF
    sizes = np.diff(counts) * _ONE
    least = np.where(share < 1.0, 0, sizes).tolist()  # nothing goes to a half whose share is zero
    most = np.where(share > 0.0, sizes, 0).tolist()
    found, now = [_HALF], _HALF
    for target, low, high in zip(wanted[1:].tolist(), least, most, strict=True):
        now = min(max(target, now + low), now + high)
        found.append(now)
    return np.array(found, np.int64)


def _numbers(tree: Tree) -> list[int]:
    return [tree] if isinstance(tree, int) else [*_numbers(tree[1]), *_numbers(tree[2])]


def _largest_remainder(wanted: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers that add up to `total`, near numbers that nearly do."""
    found = np.floor(wanted + 1e-9).astype(np.int64)
    for _ in range(abs(total - int(found.sum()))):
        step = 1 if found.sum() < total else -1
        owed = step * (wanted - found)
        owed[(wanted == 0) | ((step < 0) & (found == 0))] = -np.inf
        found[np.argmax(owed)] += step
    return found
