"""Fetching rows and blanking padding, in the form that suits where the result goes.

Inside a larger program a plain gather is best: XLA fuses it with whatever comes next. A program that makes a batch
and nothing else (`apart`) wants something else on the CPU, measured with JAX 0.10:

- rows copied as flat vectors, two to three times as fast as into shapes such as (28, 28, 1). XLA would merge a plain
  reshape into the gather again; a loop or a branch keeps them apart.
- a small batch copied by a loop. XLA divides a gather among its threads by the size of the whole array, and for a
  small batch of a large array the threads cost more than the copying.
- padding touched only in the batches that have some.

On other platforms a branch would wait for the host, and the plain form is used everywhere.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from millstream.reading.contracts import PyTree

_SMALL_BATCH = 256 * 1024  # bytes


def take(arrays: PyTree, indices: jax.Array, *, apart: bool) -> PyTree:
    """The rows at `indices` of every array."""
    rows = indices.astype(np.int32)
    if not apart:
        return _gather(arrays, rows)
    return lax.platform_dependent(arrays, rows, cpu=_take_flat, default=_gather)


def blank(value: PyTree, keep: jax.Array, *, apart: bool) -> PyTree:
    """Zeros in the rows that are not kept."""
    if not apart:
        return _select(value, keep)
    return lax.platform_dependent(value, keep, cpu=_select_if_any, default=_select)


def _gather(arrays: PyTree, rows: jax.Array) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.at[rows].get(mode="promise_in_bounds"), arrays)


def _take_flat(arrays: PyTree, rows: jax.Array) -> PyTree:
    flat = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], -1), arrays)
    size = sum(rows.size * leaf.shape[1] * leaf.dtype.itemsize for leaf in jax.tree.leaves(flat))
    fetched = (_copy_one_by_one if size <= _SMALL_BATCH else _gather_in_a_branch)(flat, rows.reshape(-1))
    return jax.tree.map(lambda got, leaf: got.reshape(*rows.shape, *leaf.shape[1:]), fetched, arrays)


def _copy_one_by_one(flat: PyTree, rows: jax.Array) -> PyTree:
    return lax.map(
        lambda row: jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, row, keepdims=False), flat), rows
    )


def _gather_in_a_branch(flat: PyTree, rows: jax.Array) -> PyTree:
    nothing = jax.tree.map(lambda leaf: jnp.zeros((*rows.shape, leaf.shape[1]), leaf.dtype), flat)
    return lax.cond(rows[0] >= 0, _gather, lambda *_: nothing, flat, rows)  # always taken, which XLA cannot know


def _select(value: PyTree, keep: jax.Array) -> PyTree:
    def select(leaf: jax.Array) -> jax.Array:
        return jnp.where(keep.reshape(keep.shape + (1,) * (leaf.ndim - keep.ndim)), leaf, jnp.zeros((), leaf.dtype))

    return jax.tree.map(select, value)


def _select_if_any(value: PyTree, keep: jax.Array) -> PyTree:
    return lax.cond(keep.all(), lambda value, _: value, _select, value, keep)
