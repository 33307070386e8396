"""From the losses that a step logs to the gradients of the parameters."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from millstream.loops.logs import Logs
from millstream.reading.contracts import PyTree
from millstream.states._precision import at_least_32_bits
from millstream.text.errors import describe_leaf, table

Call = Callable[[Any, PyTree], tuple[Logs, Any]]  # (state, batch) -> (logs, state)


def gradients(who: str, call: Call, state: Any, batch: PyTree) -> tuple[PyTree, Logs, Any]:
    """The gradients of all losses together, what was logged, and the state that the function returned.

    With a loss scale they are those of the scaled losses.
    """

    def loss(params: PyTree) -> tuple[jax.Array, tuple[Logs, Any]]:
        logs, new = call(state.replace(params=params), batch)
        total = total_loss(who, logs)
        if state.loss_scale is not None:
            total = total * state.loss_scale.scale.astype(total.dtype)
        return total, (logs, new.replace(params=None))

    grads, (logs, new) = jax.grad(loss, has_aux=True)(state.params)
    return grads, logs, new.replace(params=state.params)


def total_loss(who: str, logs: Logs) -> jax.Array:
    """The sum of all losses in the logs, at least in 32 bits."""
    losses = logs.get("losses")
    if not losses:
        logged = ", ".join(logs) or "nothing"
        raise ValueError(
            f"{who} needs at least one loss in the logs it returns, to minimise: logs.add_loss('loss', loss). "
            f"It logged: {logged}. A step that minimises nothing is a managed.step."
        )
    wrong = [(f"losses.{name}", describe_leaf(loss)) for name, loss in losses.items() if not _is_loss(loss)]
    if wrong:
        raise ValueError(
            f"{who} needs every loss to be one finite float: the mean over the rows of the batch. Got:\n{table(wrong)}"
        )
    values = [at_least_32_bits(jnp.asarray(loss)) for loss in losses.values()]
    return sum(values[1:], start=values[0])


def _is_loss(loss: Any) -> bool:
    if isinstance(loss, int | float):
        return math.isfinite(loss)
    return hasattr(loss, "dtype") and jnp.shape(loss) == () and jnp.issubdtype(loss.dtype, jnp.floating)
