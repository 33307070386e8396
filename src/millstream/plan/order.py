"""The order: a keyed bijection on [0, n), evaluated at any position alone.

A Feistel network over a grid Z_a x Z_b that is nearly square and barely larger than n, plus cycle walking. So a walk
is rare at every n, while a power-of-two domain would make half of all positions walk just above a power of two, and a
vector walks until its last lane has arrived. The network works on the two uint32 halves of a position.

The order is version 1: golden vectors in the tests pin it, and any change to it needs a new version.
"""

import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np

from millstream.plan.keys import Array, Key, fold, named_key, threefry2x32, traced_once

VERSION = 1
MAX_SAMPLES = 1 << 60
Network = Callable[[Array, Array], Array]
_WRITTEN_OUT = 8  # rounds; 24 in a loop compile in 0.42 s instead of 0.57, and take 0.8 us a step instead of 0.5
_NAME = f"millstream order {VERSION}"
_BATCHES = f"millstream batch order {VERSION}"


def epoch_key(xp: ModuleType, words: Array, epoch: Array) -> Key:
    """The key of one epoch's order; `epoch` may be an array."""
    return fold(xp, named_key(words, _NAME), epoch)


def batch_order_key(xp: ModuleType, words: Array, epoch: Array) -> Key:
    """The key of the order in which one epoch brings batches that are the same in every epoch."""
    return fold(xp, named_key(words, _BATCHES), epoch)


@np.errstate(over="ignore")
def shuffled(
    xp: ModuleType, positions: Array, n: int, key: Key, which: Array | None = None, ends: Array | None = None
) -> Array:
    """The sample index at each position of the epoch that `key` belongs to.

    Args:
        xp: `numpy` or `jax.numpy`; both give the same numbers.
        positions: Unsigned integers below `n`, of any shape. uint64 (NumPy only) is needed past 2**32.
        n: Number of samples, static.
        key: From `epoch_key` or `batch_order_key`; its arrays broadcast against `positions`.
        which: Which of several keys, along one axis, each position has.
        ends: A length for each position, at most `n`; positions below it are permuted among themselves.
    """
    found = _shuffled if xp is np else traced_once(_shuffled, static=(0, 2))
    return found(xp, positions, n, key, which, ends)


def _shuffled(xp: ModuleType, positions: Array, n: int, key: Key, which: Array | None, ends: Array | None) -> Array:
    rows, columns = _grid(n)
    width = positions.dtype.type(columns)

    def two_rounds(number: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        left, right, round_keys = state
        left = _add_modulo(xp, left, _scramble(right ^ round_keys[..., 2 * number]), rows)
        right = _add_modulo(xp, right, _scramble(left ^ round_keys[..., 2 * number + 1]), columns)
        return left, right, round_keys

    def network(positions: Array, round_keys: Array) -> Array:
        state = (positions // width).astype(np.uint32), (positions % width).astype(np.uint32), round_keys
        if xp is np or _rounds(n) <= _WRITTEN_OUT:
            for number in range(_rounds(n) // 2):
                state = two_rounds(number, state)
        else:
            from jax import lax

            state = lax.fori_loop(0, _rounds(n) // 2, two_rounds, state)
        return state[0].astype(positions.dtype) * width + state[1].astype(positions.dtype)

    round_keys = _round_keys(xp, key, _rounds(n))
    if which is None:
        positions = xp.broadcast_to(positions, xp.broadcast_shapes(positions.shape, key[0].shape))
    else:
        round_keys = round_keys[which]
    end = ends if ends is not None else n if xp is np else positions.dtype.type(n)
    return (_walk_in_numpy if xp is np else _walk_in_graph)(network, positions, round_keys, end)


@np.errstate(over="ignore")
def shuffled_in_domains(
    xp: ModuleType, positions: Array, which: Array, lengths: Sequence[int], keys: Key, moving: Array
) -> Array:
    """The same for positions of several domains at once: one network, whose moduli are those of each position.

    Args:
        xp: `numpy` or `jax.numpy`; both give the same numbers.
        positions: Positions, uint32, each below the length of its domain.
        which: The number of the domain of each.
        lengths: Those of the domains, at most 2**31.
        keys: Those of the domains, along one axis.
        moving: Whether a position is wanted; others stay.
    """
    most, least = max(map(_rounds, lengths)), min(map(_rounds, lengths))
    round_keys = _round_keys(xp, keys, most)
    if least < most:
        fewer = xp.concatenate([_round_keys(xp, keys, least), round_keys[:, least:]], axis=1)
        has_fewer = np.array([[_rounds(n) < most] for n in lengths])
        round_keys = xp.where(has_fewer, fewer, round_keys)

    def of_domain(numbers: Sequence[int]) -> Array:
        return xp.asarray(np.array(numbers, np.uint32))[which]

    grids = [_grid(n) for n in lengths]
    rows, columns, ends = (of_domain(part) for part in (*zip(*grids, strict=True), lengths))
    row_magic, column_magic = (of_domain([_magic(one) for one in part]) for part in zip(*grids, strict=True))
    pairs = of_domain([_rounds(n) // 2 for n in lengths])

    def quotient(words: Array, divisors: Array, magic: Array) -> Array:
        if xp is np:
            return words // divisors
        found = _product_above(words, magic)  # at most one too small
        return found + (words - found * divisors >= divisors).astype(np.uint32)

    def add_modulo(value: Array, word: Array, divisors: Array, magic: Array) -> Array:
        rest = word - (word // divisors if xp is np else _product_above(word, magic)) * divisors
        if xp is not np:
            rest = xp.minimum(rest, rest - divisors)
        total = value + rest
        return xp.minimum(total, total - divisors)

    def two_rounds(number: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        left, right, round_keys = state
        moved = add_modulo(left, _scramble(right ^ round_keys[:, 2 * number][which]), rows, row_magic)
        added = add_modulo(right, _scramble(moved ^ round_keys[:, 2 * number + 1][which]), columns, column_magic)
        if least == most:
            return moved, added, round_keys
        more = number < pairs.astype(np.int32)
        return xp.where(more, moved, left), xp.where(more, added, right), round_keys

    def walk(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        positions, walking, round_keys = state
        left = quotient(positions, columns, column_magic)
        state = left, positions - left * columns, round_keys
        if xp is np:
            for number in range(most // 2):
                state = two_rounds(number, state)
        else:
            from jax import lax

            state = lax.fori_loop(0, most // 2, two_rounds, state)
        positions = xp.where(walking, state[0] * columns + state[1], positions)
        return positions, walking & (positions >= ends), round_keys

    # Carried by the loop, round keys are made once in a program, and not again for every position.
    state = positions, moving, round_keys
    if xp is np:
        while state[1].any():
            state = walk(state)
        return state[0]
    from jax import lax

    return lax.while_loop(lambda state: state[1].any(), walk, state)[0]


def _magic(divisor: int) -> int:
    """2**32 divided by a number, rounded down, in 32 bits."""
    return min((1 << 32) // divisor, (1 << 32) - 1)


def _product_above(words: Array, magic: Array) -> Array:
    """The upper 32 bits of products, by those of 16-bit halves: processors divide few numbers at a time."""
    half, low = np.uint32(16), np.uint32(0xFFFF)
    upper, lower, magic_upper, magic_lower = words >> half, words & low, magic >> half, magic & low
    first, second = upper * magic_lower, lower * magic_upper
    carried = (first & low) + (second & low) + (lower * magic_lower >> half)
    return upper * magic_upper + (first >> half) + (second >> half) + (carried >> half)


def _walk_in_numpy(network: Network, positions: Array, round_keys: Array, end: Array) -> Array:
    positions = np.asarray(network(positions, round_keys))  # of one position, NumPy makes a scalar
    outside = positions >= end
    while outside.any():
        keys = np.broadcast_to(round_keys, (*positions.shape, round_keys.shape[-1]))[outside]
        positions[outside] = network(positions[outside], keys)
        outside = positions >= end
    return positions


def _walk_in_graph(network: Network, positions: Array, round_keys: Array, end: Array) -> Array:
    import jax.numpy as jnp
    from jax import lax

    def walk(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        positions, walking, round_keys = state
        positions = jnp.where(walking, network(positions, round_keys), positions)
        return positions, positions >= end, round_keys

    # The loop also keeps XLA from computing the round keys again in every lane: they are carried, not fused.
    start = positions, jnp.ones(positions.shape, bool), round_keys
    return lax.while_loop(lambda state: state[1].any(), walk, start)[0]


@functools.cache
def _grid(n: int) -> tuple[int, int]:
    """The smallest grid of at least n cells with up to a fifth fewer rows than a square; the squarest of several."""
    most = math.isqrt(n - 1) + 1
    rows = np.arange(most, most - min(most // 5, 4096) - 1, -1, dtype=np.uint64)
    columns = (np.uint64(n - 1) + rows) // rows
    best = int(rows[np.argmin(rows * columns)])
    return best, -(-n // best)


def _rounds(n: int) -> int:
    # A small grid mixes little per round: at n = 6 the pairs of positions are visibly uneven up to 16 rounds.
    return 24 if n < 1024 else 8


def _round_keys(xp: ModuleType, key: Key, rounds: int) -> Array:
    counter = xp.arange(rounds // 2, dtype=np.uint32).reshape((1,) * key[0].ndim + (-1,))
    words = threefry2x32((key[0][..., None], key[1][..., None]), (counter, xp.zeros_like(counter)))
    return xp.concatenate(words, axis=-1)


def _scramble(word: Array) -> Array:
    """MurmurHash3's 32-bit finaliser: every input bit reaches every output bit."""
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return word ^ (word >> np.uint32(16))


def _add_modulo(xp: ModuleType, value: Array, word: Array, modulus: int) -> Array:
    m = np.uint32(modulus)
    total = value + (word - word // m * m)  # NumPy divides by a number four times as fast as it takes the remainder
    return xp.minimum(total, total - m)  # below m, the difference wraps around and is the larger
