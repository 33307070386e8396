"""Arrays whose dtype does not depend on what they meet."""

from typing import Any

import jax
import jax.numpy as jnp


def strong_or_none(leaf: Any) -> jax.Array | None:
    """What `strong` makes of a leaf; None if JAX has no array for it, such as for text or an int of more bits."""
    is_number = isinstance(leaf, bool | int | float | complex) or (hasattr(leaf, "dtype") and hasattr(leaf, "ndim"))
    try:
        return strong(leaf) if is_number else None
    except (TypeError, ValueError, OverflowError):
        return None


def strong(leaf: Any) -> jax.Array:
    """An array or a number as an array of a dtype of its own: a state with a weak one would compile a step twice."""
    array = jnp.asarray(leaf)
    return jax.lax.convert_element_type(array, array.dtype) if getattr(array, "weak_type", False) else array
