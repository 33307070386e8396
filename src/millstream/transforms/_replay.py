"""Where a replay buffer writes and which of its items it reads: the arithmetic, on slot numbers alone.

A slot number equal to the capacity means "nowhere": writes there are dropped.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_LEAST, _MOST = np.float32(1e-6), np.float32(1e30)  # every stored item can be drawn, and sums stay finite


def fifo_slots(valid: jax.Array, write_index: jax.Array, capacity: int) -> jax.Array:
    """The slot of every arriving row: one after the other, in a ring. At most `capacity` rows may arrive."""
    before = jnp.cumsum(valid, dtype=np.int32) - valid.astype(np.int32)
    return jnp.where(valid, (write_index + before) % capacity, capacity)


def reservoir_slots(valid: jax.Array, seen: jax.Array, capacity: int, key: jax.Array) -> jax.Array:
    """The slot of every arriving row by Vitter's algorithm R: after n rows each is stored with chance capacity / n."""
    before = jnp.cumsum(valid, dtype=np.int32) - valid.astype(np.int32)
    number = saturating_add(seen, before)
    drawn = jax.random.randint(key, valid.shape, 0, saturating_add(number, jnp.ones_like(before)), np.uint32)
    slots = jnp.where(number < capacity, number, drawn)
    slots = jnp.where(valid & (slots < capacity), slots.astype(np.int32), capacity)
    # Of two rows for one slot the later one stays: a scatter promises no order.
    rows = np.arange(len(valid))
    replaced = (slots[:, None] == slots[None, :]) & (rows[:, None] < rows[None, :])
    return jnp.where(replaced.any(axis=1), capacity, slots)


def distinct(key: jax.Array, size: int, count: jax.Array) -> jax.Array:
    """A random `size` of the numbers below `count`, no two equal, in random order (Floyd's algorithm)."""
    draw_key, order_key = jax.random.split(key)
    tops = count - size + jnp.arange(size, dtype=np.int32)
    drawn = jax.random.randint(draw_key, (size,), 0, tops + 1)

    def choose(i: jax.Array, chosen: jax.Array) -> jax.Array:
        taken = jnp.any(chosen == drawn[i])
        return chosen.at[i].set(jnp.where(taken, tops[i], drawn[i]))

    chosen = lax.fori_loop(0, size, choose, jnp.full(size, -1, np.int32))
    return jax.random.permutation(order_key, chosen)


def usable(priorities: jax.Array) -> jax.Array:
    """The priorities between 1e-6 and 1e30; NaN counts as the least."""
    return jnp.where(priorities > _LEAST, jnp.minimum(priorities, _MOST), _LEAST)


def by_priority(
    key: jax.Array,
    size: int,
    priorities: jax.Array,
    count: jax.Array,
    priority_exponent: float,
    importance_exponent: float,
) -> tuple[jax.Array, jax.Array]:
    """Slots drawn with probability p = priority ** a / sum, and their weights (count * p) ** -b over the largest."""
    stored = jnp.arange(len(priorities)) < count
    scores = jnp.where(stored, priorities ** np.float32(priority_exponent), np.float32(0))
    edges = jnp.cumsum(scores)
    points = jax.random.uniform(key, (size,)) * edges[-1]
    drawn = jnp.searchsorted(edges, points, side="right").astype(np.int32)
    drawn = jnp.minimum(drawn, count - 1)  # a point may be rounded up to the last edge
    least = jnp.min(scores, initial=np.inf, where=stored)
    return drawn, (scores[drawn] / least) ** np.float32(-importance_exponent)


def fit(rows: jax.Array, size: int, fill: Any = 0) -> jax.Array:
    """The first `size` rows, completed with `fill`."""
    missing = size - len(rows)
    if missing <= 0:
        return rows[:size]
    return jnp.concatenate([rows, jnp.full((missing, *rows.shape[1:]), fill, rows.dtype)])


def saturating_add(number: jax.Array, more: jax.Array) -> jax.Array:
    """A uint32 plus a small int32, staying at the largest uint32."""
    total = number + more.astype(np.uint32)
    return jnp.where(total < number, np.uint32(0xFFFFFFFF), total)
