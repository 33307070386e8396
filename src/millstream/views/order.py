"""The order as a function of its own."""

from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from millstream.pipeline.state import key_words
from millstream.plan import order
from millstream.text.errors import describe_leaf, whole_number
from millstream.views._measure import as_array

_NAME = "millstream permutation 1"


@overload
def permutation(key: jax.Array, n: int, positions: jax.Array) -> jax.Array: ...
@overload
def permutation(key: jax.Array, n: int, positions: np.ndarray | Sequence[int] | int) -> np.ndarray: ...
def permutation(key: jax.Array, n: int, positions: Any) -> Any:
    """The numbers at some positions of a random permutation of 0 .. n - 1, without making the others.

    NumPy positions give NumPy numbers, JAX positions (also traced ones) JAX numbers: the same.

    Example:
        >>> ms.views.permutation(jax.random.key(0), 10**9, np.arange(3)).shape
        (3,)

    Args:
        key: Which permutation.
        n: How many numbers; more than 2**32 only for NumPy positions.
        positions: Integers from 0 to n - 1, of any shape.
    """
    whole_number("permutation", "n", n, least=1, most=order.MAX_SAMPLES)
    words = key_words("permutation", key)
    traced = isinstance(positions, jax.Array)
    if traced:
        xp = jnp
        whole_number("permutation of JAX positions", "n", n, least=1, most=(1 << 32) - 1)
    else:
        xp, words = np, np.asarray(words)
    given = positions if traced else as_array("permutation", "positions", positions)
    if not jnp.issubdtype(given.dtype, jnp.integer):  # which keys of JAX can be asked, too
        raise TypeError(f"permutation needs positions that are integers. Got {describe_leaf(given)}.")
    if not traced and given.size and not (0 <= int(given.min()) and int(given.max()) < n):
        raise ValueError(
            f"permutation needs positions from 0 to {n - 1:,}. Got {int(given.min())} to {int(given.max())}."
        )
    wide = np.uint64 if n > 1 << 32 else np.uint32
    found = order.shuffled(xp, given.astype(wide), n, order.named_key(words, _NAME))
    return found.astype(np.int64) if not traced else found
