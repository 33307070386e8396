"""What an attention layer needs to know about packed rows. Pure functions, for the step that is compiled."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from millstream.text.errors import describe_leaf, require_bool


def segment_mask(segments: jax.Array | np.ndarray, *, causal: bool = True) -> jax.Array:
    """Which tokens of a packed row each token may attend to: those of its own segment, up to itself.

    The result has a row per query and a column per key: `(batch, length, length)` for segments of `(batch, length)`.
    Flax wants an axis for the heads, `mask=ms.transforms.segment_mask(segments)[:, None]`; Equinox, whose layers see
    one row under `vmap`, takes it as it is. Padding attends to padding, so that no row of a softmax is empty.

    Example:
        >>> ms.transforms.segment_mask(jnp.array([1, 1, 2, 0])).astype(int)
        Array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [0, 0, 1, 0],
               [0, 0, 0, 1]], dtype=int32)

    Args:
        segments: The number of the segment that each token belongs to, along the last axis: `batch["segments"]` of rows
            from `ms.views.pack`.
        causal: Whether tokens attend to none after them.
    """
    require_bool("segment_mask", "causal", causal)
    found = _segments("segment_mask", segments)
    same = found[..., :, None] == found[..., None, :]
    query, key = (lax.broadcasted_iota(jnp.int32, same.shape, same.ndim - axis) for axis in (2, 1))
    return same & (query >= key) if causal else same


def segment_positions(segments: jax.Array | np.ndarray) -> jax.Array:
    """The place of each token in its segment, from 0 on, and 0 in the padding.

    It is the leaf that `ms.views.pack(positions="positions")` adds. Where rows are large, it takes less time to compute
    it in the step than to read it.

    Example:
        >>> ms.transforms.segment_positions(jnp.array([1, 1, 1, 2, 2, 0]))
        Array([0, 1, 2, 0, 1, 0], dtype=int32)

    Args:
        segments: As in `segment_mask`.
    """
    found = _segments("segment_positions", segments)
    axis = found.ndim - 1
    places = lax.broadcasted_iota(jnp.int32, found.shape, axis)
    before = jnp.concatenate([found[..., :1], found[..., :-1]], axis=-1)
    starts = lax.cummax(jnp.where(found != before, places, 0), axis=axis)
    return jnp.where(found == 0, 0, places - starts)


def _segments(caller: str, given: Any) -> jax.Array:
    """Segments as an array of JAX; refuses what does not number them."""
    is_array = hasattr(given, "dtype") and hasattr(given, "ndim")
    if not is_array or not jnp.issubdtype(given.dtype, jnp.integer) or not given.ndim:
        raise TypeError(
            f"{caller} needs segments to be whole numbers with an axis of tokens, such as batch['segments']. "
            f"Got {describe_leaf(given)}."
        )
    return jnp.asarray(given)
