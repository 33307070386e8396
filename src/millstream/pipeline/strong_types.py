"""Arrays whose dtype does not depend on what they meet."""

from typing import Any

import jax
import jax.numpy as jnp


def strong(leaf: Any) -> jax.Array:
    """An array or a number as an array of a dtype of its own: a state with a weak one would compile a step twice."""
    array = jnp.asarray(leaf)
    return jax.lax.convert_element_type(array, array.dtype) if getattr(array, "weak_type", False) else array
