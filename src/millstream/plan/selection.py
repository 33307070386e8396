"""Selections: which sample of a source stands at each position of a view. Index functions, in NumPy and traced.

A selection is a chain of functions from positions to positions; the last one gives the index of a sample. Each one is
a small static value, equal for equal functions, and at most one table, which is an argument of compiled programs.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal, Protocol

import numpy as np

from millstream.plan.keys import Array, Key, fold, named_key

_DRAWS = "millstream weighted draws 1"
IsAbove = Callable[..., Array]  # whether the number of a row is above what is sought
_IN_CACHE = 1 << 15  # entries of a table


class IndexFunction(Protocol):
    """One link of a selection: a frozen, hashable value without its table.

    Attributes:
        length: How many positions it has.
        is_keyed: Whether it depends on the run's key and the epoch.
    """

    @property
    def length(self) -> int: ...

    @property
    def is_keyed(self) -> bool: ...

    @property
    def words(self) -> str:
        """What it does, in a few words that differ for different functions."""
        ...

    def locate(self, xp: ModuleType, table: Array | None, words: Array, epoch: Array, positions: Array) -> Array:
        """The position in what is selected from, for every position.

        Args:
            xp: `numpy` or `jax.numpy`; both give the same numbers.
            table: Its table.
            words: The run's raw key data, uint32.
            epoch: The epoch of every position.
            positions: Unsigned integers below `length`.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Strided:
    """Every `step`-th position from `start` on."""

    start: int
    step: int
    length: int
    is_keyed = False

    @property
    def words(self) -> str:
        stop = self.start + self.step * self.length
        return f"[{self.start}:{stop if stop >= 0 else ''}{'' if self.step == 1 else f':{self.step}'}]"

    def locate(self, xp: ModuleType, table: None, words: Array, epoch: Array, positions: Array) -> Array:
        number = positions.dtype.type
        if self.step >= 0:
            return positions * number(self.step) + number(self.start)
        return number(self.start) - positions * number(-self.step)


@dataclasses.dataclass(frozen=True)
class Repeated:
    """All positions, several times."""

    inner: int
    times: int
    is_keyed = False

    @property
    def length(self) -> int:
        return self.inner * self.times

    @property
    def words(self) -> str:
        return f"{self.times:,} times {self.inner:,}"

    def locate(self, xp: ModuleType, table: None, words: Array, epoch: Array, positions: Array) -> Array:
        return positions % positions.dtype.type(self.inner)


@dataclasses.dataclass(frozen=True)
class Listed:
    """The positions that a table lists; `digest` stands for its contents, `seeds` for divisions it is a part of."""

    length: int
    digest: str
    seeds: tuple[int, ...] = ()
    is_keyed = False

    @property
    def words(self) -> str:
        return f"{self.length:,} chosen ({self.digest[:12]})"

    def locate(self, xp: ModuleType, table: Array | None, words: Array, epoch: Array, positions: Array) -> Array:
        # Without a table, the list before this one says what both say; see `Selection.merged_tables`.
        return positions if table is None else table[positions].astype(positions.dtype)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Positions drawn by weight, anew every epoch: systematic sampling.

    Draw j of an epoch takes the first sample whose cumulated weight, scaled to `length`, exceeds j + u, where u in
    [0, 1) is the epoch's. So a sample with a share of s comes s * length times, rounded up or down, in every epoch.
    These numbers have 32 bits before and 32 after the point, which makes the search exact everywhere.

    The table begins with a guide: the first sample of every stretch of 2**shift draws. A search stays between two
    neighbours of the guide, which are about one sample apart. Then come the low words of the numbers. A stretch of one
    draw needs no high words; where draws are many more than samples, stretches are longer and the high words follow.

    Attributes:
        length: How many draws an epoch has.
        samples: How many samples are drawn from.
        digest: Stands for the contents of the table.
        kind: What the weights are: given for each sample, given where no sample comes twice, or made of classes.
    """

    length: int
    samples: int
    digest: str
    kind: Literal["weighted", "once", "balanced"] = "weighted"
    is_keyed = True

    @property
    def words(self) -> str:
        return f"{self.length:,} drawn by weight ({self.digest[:12]})"

    def locate(self, xp: ModuleType, table: Array, words: Array, epoch: Array, positions: Array) -> Array:
        offset = xp.broadcast_to(_offsets(xp, named_key(words, _DRAWS), epoch), positions.shape)
        return self.first_above(xp, table, positions, offset)

    def first_above(self, xp: ModuleType, table: Array, positions: Array, offset: Array) -> Array:
        """The first sample whose number is above each draw and its offset."""
        shift = _shift(self.length, self.samples)
        low = ((self.length - 1) >> shift) + 2  # where the low words start, which is where the guide ends
        high = low + self.samples

        def is_above(row: Array, offset: Array, *draw: Array) -> Array:
            above = xp.take(table, row + low, mode="clip") > offset  # all are in range; "clip" asks least
            if not draw:
                return above
            whole = xp.take(table, row + high, mode="clip")
            return (whole > draw[0]) | ((whole == draw[0]) & above)

        draws = positions.astype(np.int64 if xp is np else np.uint32)
        stretch = draws >> draws.dtype.type(shift)
        first, last = (xp.take(table, stretch + draws.dtype.type(more), mode="clip") for more in (0, 1))
        bisect = _bisect_in_numpy if xp is np else _bisect_in_graph
        sought = (offset,) if shift == 0 else (offset, draws)
        return bisect(is_above, first, last, sought).astype(positions.dtype)


@dataclasses.dataclass(frozen=True)
class Expanded:
    """Every position as often as a table says, one after the other; the table holds where each one begins."""

    length: int
    digest: str
    is_keyed = False

    @property
    def words(self) -> str:
        return f"{self.length:,} by counts ({self.digest[:12]})"

    def locate(self, xp: ModuleType, table: Array, words: Array, epoch: Array, positions: Array) -> Array:
        return (count_upto(xp, table, positions) - 1).astype(positions.dtype)


@dataclasses.dataclass(frozen=True)
class Named:
    """All positions as they are; `name` says what samples the source makes, so that others are not taken for them."""

    length: int
    name: str
    is_keyed = False

    @property
    def words(self) -> str:
        return self.name

    def locate(self, xp: ModuleType, table: None, words: Array, epoch: Array, positions: Array) -> Array:
        return positions


def count_upto(xp: ModuleType, table: Array, values: Array) -> Array:
    """How many entries of a sorted table are not above each value."""
    values = values.astype(table.dtype)  # NumPy would copy the table to compare it with other numbers
    if xp is not np or len(table) < _IN_CACHE:
        return xp.searchsorted(table, values, side="right")
    # In order, neighbours share cache lines of the table: 41 instead of 76 us for 256 of a million.
    order = np.argsort(values, axis=None)
    found = np.empty(values.size, np.int64)
    found[order] = np.searchsorted(table, values.ravel()[order], side="right")
    return found.reshape(values.shape)


def _shift(length: int, samples: int) -> int:
    """How many low bits of a draw its guide ignores: a guide has at most about twice as many entries as samples."""
    return (length // (2 * samples)).bit_length()


def _offsets(xp: ModuleType, key: Key, epoch: Array) -> Array:
    """The offset of every epoch, 32 bits after the point."""
    if xp is not np:
        return fold(xp, key, epoch)[0]
    # The cipher takes longer than the search, and many rows are of few epochs: mostly one for a whole batch.
    epoch = epoch[tuple(slice(1 if stride == 0 else None) for stride in epoch.strides)]
    first, last = int(epoch.min()), int(epoch.max())
    offsets = fold(np, key, np.arange(first, last + 1, dtype=epoch.dtype))[0]
    return offsets if first == last else offsets[epoch - epoch.dtype.type(first)]


def _bisect_in_numpy(is_above: IsAbove, first: Array, last: Array, sought: tuple[Array, ...]) -> Array:
    """The first row above what is sought, among first..last; only rows that are not yet known are looked at again."""
    found = last.ravel().astype(np.int64)
    unknown = np.flatnonzero(first < last)
    low, high, parts = first.ravel()[unknown].astype(np.int64), found[unknown], [one.ravel()[unknown] for one in sought]
    while len(unknown):
        middle = (low + high) >> 1
        above = is_above(middle, *parts)
        low, high = np.where(above, low, middle + 1), np.where(above, middle, high)
        found[unknown] = high
        left = np.flatnonzero(low < high)
        unknown, low, high, parts = unknown[left], low[left], high[left], [one[left] for one in parts]
    return found.reshape(last.shape)


def _bisect_in_graph(is_above: IsAbove, first: Array, last: Array, sought: tuple[Array, ...]) -> Array:
    """The same, traced."""
    import jax.numpy as jnp
    from jax import lax

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) >> np.uint32(1)
        above, unknown = is_above(middle, *sought), low < high
        return jnp.where(unknown & ~above, middle + np.uint32(1), low), jnp.where(unknown & above, middle, high)

    return lax.while_loop(lambda bounds: (bounds[0] < bounds[1]).any(), halve, (first, last))[1]


@dataclasses.dataclass(frozen=True)
class Selection:
    """A chain of index functions, outermost first, and their tables: arrays, or, of a mixture, a tree of them."""

    functions: tuple[IndexFunction, ...] = ()
    tables: tuple[Array | None, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def is_keyed(self) -> bool:
        """Whether samples at a position depend on the run's key and the epoch."""
        return any(function.is_keyed for function in self.functions)

    @property
    def run_limit(self) -> int | None:
        """How many positions a run may have; None if any number."""
        limits = [limit for one in self.functions if (limit := getattr(one, "run_limit", None)) is not None]
        return min(limits, default=None)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of all divisions that this is a part of."""
        return tuple(seed for function in self.functions if isinstance(function, Listed) for seed in function.seeds)

    @property
    def words(self) -> str:
        """What is selected, in words that differ for different selections."""
        return " of ".join(function.words for function in self.functions)

    @property
    def changes(self) -> list[tuple[int, str]]:
        """After how many samples of a run what is selected changes, and what stands for that; only in mixtures."""
        changes = getattr(self.functions[0], "changes", ()) if self.functions else ()
        return [(change.after, change.digest) for change in changes]

    def after(self, function: IndexFunction, table: Array | None = None) -> "Selection":
        """What a function selects from this selection."""
        return Selection((function, *self.functions), (table, *self.tables))

    def merged_tables(self) -> "tuple[Array | None, ...]":
        """The tables, but of lists of lists one: what the outer list says is looked up in the inner one now."""
        tables = list(self.tables)
        for inner in range(len(tables) - 1, 0, -1):
            outer, under = tables[inner - 1], tables[inner]
            if under is not None and all(isinstance(one, Listed) for one in self.functions[inner - 1 : inner + 1]):
                tables[inner - 1 : inner + 1] = [under[outer], None]
        return tuple(tables)

    def without_digests(self) -> "Selection":
        """The functions as a program that takes their tables needs them: equal for tables of equal length."""
        functions: tuple[Any, ...] = self.functions
        nothing = {"digest": "", "seeds": ()}
        known = [{name: value for name, value in nothing.items() if hasattr(one, name)} for one in functions]
        return Selection(tuple(dataclasses.replace(one, **its) for one, its in zip(functions, known, strict=True)))

    @np.errstate(over="ignore")
    def locate(
        self, xp: ModuleType, tables: Sequence[Array | None], words: Array, epoch: Array, positions: Array
    ) -> Array:
        """The index of the sample at each position; see `IndexFunction.locate`."""
        for function, table in zip(self.functions, tables, strict=True):
            positions = function.locate(xp, table, words, epoch, positions)
        return positions


def index_dtype(inner: int) -> np.dtype:
    """The dtype of a table of positions below `inner`: small numbers take four bytes each."""
    return np.dtype(np.uint32 if inner <= 1 << 32 else np.int64)


def listed(
    indices: np.ndarray, inner: int, digest: str | None = None, seeds: tuple[int, ...] = ()
) -> tuple[Listed, np.ndarray]:
    """The function and the table of chosen positions below `inner`; a hash that is known is not computed again."""
    table = np.ascontiguousarray(indices, index_dtype(inner))
    return Listed(len(table), digest_of(table) if digest is None else digest, seeds), table


def expanded(counts: np.ndarray) -> tuple[Expanded, np.ndarray]:
    """The function and the table of positions that come as often as these counts say, which are not all zero."""
    ends = np.cumsum(counts, dtype=np.int64)
    length = int(ends[-1])
    table = (ends - counts).astype(index_dtype(length))
    return Expanded(length, digest_of(table)), table


def drawn(weights: np.ndarray, length: int, *, once: bool = False) -> tuple[Drawn, np.ndarray]:
    """The function and the table of `length` draws by weight.

    Args:
        weights: Finite, none negative, not all zero.
        length: How many draws.
        once: Whether no sample may come twice. Then no weight may be above its share of one draw, but for rounding.
    """
    numbers = _cumulated(weights, length)
    if once:
        some, kept = np.flatnonzero(weights), np.zeros_like(numbers)
        kept[some] = _at_most_once(numbers[some])
        numbers = np.maximum.accumulate(kept)
    shift = _shift(length, len(weights))
    stretches = np.arange(((length - 1) >> shift) + 2, dtype=np.uint64)
    stretches <<= np.uint64(32 + shift)
    parts = [np.searchsorted(numbers, stretches).astype(np.uint32), numbers.astype(np.uint32)]
    if shift > 0:
        parts.append((numbers >> np.uint64(32)).astype(np.uint32))
    table = np.concatenate(parts)
    return Drawn(length, len(weights), digest_of(table), "once" if once else "weighted"), table


def _cumulated(weights: np.ndarray, length: int) -> np.ndarray:
    """Cumulated weights scaled to `length`, with 32 bits before and 32 after the point."""
    scaled = np.cumsum(weights, dtype=np.float64)  # one by one and in IEEE arithmetic: the same on every machine
    scaled *= length / scaled[-1]
    whole = np.floor(scaled)
    scaled -= whole
    scaled *= 2.0**32
    numbers = whole.astype(np.uint64)
    numbers <<= np.uint64(32)
    numbers += scaled.astype(np.uint64)
    last = np.uint64(length) << np.uint64(32)
    numbers[np.flatnonzero(weights)[-1] :] = last  # every draw has a sample, whatever rounding did
    return np.minimum(numbers, last, out=numbers)


def _at_most_once(numbers: np.ndarray) -> np.ndarray:
    """Cumulated numbers, changed where rounding has put two neighbours more than one draw apart."""
    whole = np.arange(1, len(numbers) + 1, dtype=np.int64) << 32
    last, slack = numbers[-1], numbers.astype(np.int64) - whole  # which must start below one and never rise
    slack = np.minimum.accumulate(np.minimum(slack, 0))
    slack[-1] = last.astype(np.int64) - whole[-1]
    return (np.maximum.accumulate(slack[::-1])[::-1] + whole).astype(np.uint64)


def digest_of(table: np.ndarray) -> str:
    """A hash of a table's contents."""
    return hashlib.sha256(np.ascontiguousarray(table).view(np.uint8).data).hexdigest()
