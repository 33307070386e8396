"""Fetching rows and blanking padding, in the form that suits where the result goes.

Inside a larger program a plain gather is best: XLA fuses it with whatever comes next. A program that makes a batch
and nothing else (`apart`) wants the opposite on the CPU: rows copied as flat vectors, two to three times as fast as
into shapes such as (28, 28, 1), and padding touched only in the batches that have some. A branch keeps XLA from
merging the steps again. On other platforms a branch would wait for the host, and the plain form is used everywhere.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from millstream._core.contracts import PyTree


def take(arrays: PyTree, indices: jax.Array, *, apart: bool) -> PyTree:
    """The rows at `indices` of every array."""
    rows = indices.astype(np.int32)
    if not apart:
        return _gather(arrays, rows)
    return lax.platform_dependent(arrays, rows, cpu=_gather_flat, default=_gather)


def blank(value: PyTree, keep: jax.Array, *, apart: bool) -> PyTree:
    """Zeros in the rows that are not kept."""
    if not apart:
        return _select(value, keep)
    return lax.platform_dependent(value, keep, cpu=_select_if_any, default=_select)


def _gather(arrays: PyTree, rows: jax.Array) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.at[rows].get(mode="promise_in_bounds"), arrays)


def _gather_flat(arrays: PyTree, rows: jax.Array) -> PyTree:
    flat = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], -1), arrays)
    empty = jax.tree.map(lambda leaf: jnp.zeros((*rows.shape, *leaf.shape[1:]), leaf.dtype), flat)
    fetched = lax.cond((rows >= 0).all(), _gather, lambda *_: empty, flat, rows)
    return jax.tree.map(lambda got, leaf: got.reshape(*rows.shape, *leaf.shape[1:]), fetched, arrays)


def _select(value: PyTree, keep: jax.Array) -> PyTree:
    def select(leaf: jax.Array) -> jax.Array:
        return jnp.where(keep.reshape(keep.shape + (1,) * (leaf.ndim - keep.ndim)), leaf, jnp.zeros((), leaf.dtype))

    return jax.tree.map(select, value)


def _select_if_any(value: PyTree, keep: jax.Array) -> PyTree:
    return lax.cond(keep.all(), lambda value, _: value, _select, value, keep)
