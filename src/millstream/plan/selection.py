"""Selections: which sample of a source stands at each position of a view. Index functions, in NumPy and traced.

A selection is a chain of functions from positions to positions; the last one gives the index of a sample. Each one is
a small static value, equal for equal functions, and at most one table, which is an argument of compiled programs.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

import numpy as np

from millstream.plan.keys import Array, fold, named_key

_DRAWS = "millstream weighted draws 1"


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
            table: Its table, as `graph_table` has it if it is traced.
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
    """The positions that a table lists; `digest` stands for its contents."""

    length: int
    digest: str
    is_keyed = False

    @property
    def words(self) -> str:
        return f"{self.length:,} chosen ({self.digest[:12]})"

    def locate(self, xp: ModuleType, table: Array, words: Array, epoch: Array, positions: Array) -> Array:
        return table[positions].astype(positions.dtype)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Positions drawn by weight, anew every epoch: systematic sampling.

    Draw j of an epoch takes the first sample whose cumulated weight, scaled to `length`, exceeds j + u, where u in
    [0, 1) is the epoch's. So a sample with a share of s comes s * length times, rounded up or down, in every epoch. The
    table holds these numbers with 32 bits before and 32 after the point, which makes the search exact everywhere.
    """

    length: int
    digest: str
    is_keyed = True

    @property
    def words(self) -> str:
        return f"{self.length:,} drawn by weight ({self.digest[:12]})"

    def locate(self, xp: ModuleType, table: Array, words: Array, epoch: Array, positions: Array) -> Array:
        offset = xp.broadcast_to(fold(xp, named_key(words, _DRAWS), epoch)[0], positions.shape)
        if xp is np:
            wanted = ((positions.astype(np.uint64) << np.uint64(32)) | offset.astype(np.uint64)).ravel()
            # In order, neighbours share cache lines of the table: 41 instead of 76 us for 256 of a million.
            order = np.argsort(wanted)
            found = np.empty(positions.size, positions.dtype)
            found[order] = np.searchsorted(table, wanted[order], side="right")
            return found.reshape(positions.shape)
        return _first_above(table, positions.astype(np.uint32), offset).astype(positions.dtype)


def graph_table(table: np.ndarray | None) -> np.ndarray | None:
    """A table as a compiled program takes it: 64-bit numbers as pairs of 32-bit ones, high word first."""
    if table is None or table.dtype != np.uint64:
        return table
    return np.stack([(table >> np.uint64(32)).astype(np.uint32), table.astype(np.uint32)], axis=1)


def _first_above(table: Array, high: Array, low: Array) -> Array:
    """The first row of a sorted table of pairs above each pair (high, low), by bisection."""
    import jax.numpy as jnp
    from jax import lax

    rows = table.shape[0]

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        first, last = bounds  # the row is among first..last
        middle = (first + last) // 2
        found = table[middle]
        above = (found[..., 0] > high) | ((found[..., 0] == high) & (found[..., 1] > low))
        return jnp.where(above, first, jnp.minimum(middle + 1, last)), jnp.where(above, middle, last)

    start = jnp.zeros(high.shape, np.int32), jnp.full(high.shape, rows - 1, np.int32)
    return lax.fori_loop(0, rows.bit_length(), halve, start)[1]


@dataclasses.dataclass(frozen=True)
class Selection:
    """A chain of index functions, outermost first, and their tables."""

    functions: tuple[IndexFunction, ...] = ()
    tables: tuple[np.ndarray | None, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def is_keyed(self) -> bool:
        """Whether samples at a position depend on the run's key and the epoch."""
        return any(function.is_keyed for function in self.functions)

    @property
    def words(self) -> str:
        """What is selected, in words that differ for different selections."""
        return " of ".join(function.words for function in self.functions)

    def after(self, function: IndexFunction, table: np.ndarray | None = None) -> "Selection":
        """What a function selects from this selection."""
        return Selection((function, *self.functions), (table, *self.tables))

    def graph_tables(self) -> tuple[np.ndarray | None, ...]:
        """The tables as compiled programs take them."""
        return tuple(map(graph_table, self.tables))

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


def listed(indices: np.ndarray, inner: int, digest: str | None = None) -> tuple[Listed, np.ndarray]:
    """The function and the table of chosen positions below `inner`; a hash that is known is not computed again."""
    table = np.ascontiguousarray(indices, index_dtype(inner))
    return Listed(len(table), digest_of(table) if digest is None else digest), table


def drawn(weights: np.ndarray, length: int) -> tuple[Drawn, np.ndarray]:
    """The function and the table of `length` draws by weight: finite weights, none negative, not all zero."""
    shares = np.cumsum(weights, dtype=np.float64)  # one by one and in IEEE arithmetic: the same on every machine
    scaled = shares * (length / shares[-1])
    whole = np.floor(scaled)
    table = (whole.astype(np.uint64) << np.uint64(32)) + ((scaled - whole) * 2.0**32).astype(np.uint64)
    last = np.uint64(length) << np.uint64(32)
    table[np.flatnonzero(weights)[-1] :] = last  # every draw has a sample, whatever rounding did
    table = np.minimum(table, last)
    return Drawn(length, digest_of(table)), table


def digest_of(table: np.ndarray) -> str:
    """A hash of a table's contents."""
    return hashlib.sha256(np.ascontiguousarray(table).view(np.uint8).data).hexdigest()
