"""Eight small layers and Adam: a step that costs little more than what it takes to start it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _measure import Run

LAYERS, WIDTH, ROWS = 8, 8, 4
BATCH = {"x": jnp.ones((ROWS, WIDTH)), "y": jnp.zeros((ROWS, WIDTH))}
OPTIMIZER = optax.adam(1e-3)


def steps_of(step: Callable[[Any, Any], Any], state: Any, steps: int) -> Run:
    """A pass of some steps, which goes on where the one before has ended."""

    def run() -> None:
        nonlocal state
        for _ in range(steps):
            _, state = step(state, BATCH)
        jax.block_until_ready(jax.tree.leaves(state))

    return run
