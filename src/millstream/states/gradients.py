"""From the losses that a step logs to the gradients of the parameters."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from millstream.loops.log_entries import Logs
from millstream.pipeline.convolutions import with_fast_convolutions
from millstream.reading.contracts import PyTree
from millstream.sharding.global_batch import common_rows
from millstream.states._batch_layout import is_masked
from millstream.states._precision import at_least_32_bits
from millstream.text.errors import describe_leaf, require_callable, require_int, table

Call = Callable[[PyTree, PyTree], tuple[Logs, PyTree]]  # (state, batch) -> (logs, state)


def gradients(caller: str, call: Call, state: Any, batch: PyTree) -> tuple[PyTree, Logs, Any]:
    """The gradients of all losses together, what was logged, and the state that the function returned.

    With a loss scale they are those of the scaled losses.
    """

    def loss(params: PyTree) -> tuple[jax.Array, tuple[Logs, Any]]:
        logs, new = call(state.replace(params=params), batch)
        total = total_loss(caller, logs)
        if state.loss_scale is not None:
            total = total * state.loss_scale.scale.astype(total.dtype)
        return total, (logs, new.replace(params=None))

    grads, (logs, new) = jax.grad(loss, has_aux=True)(state.params)
    return grads, logs, new.replace(params=state.params)


def total_loss(caller: str, logs: Logs) -> jax.Array:
    """The sum of all losses in the logs, at least in 32 bits."""
    losses = logs.get("losses")
    if not losses:
        logged = ", ".join(logs) or "nothing"
        raise ValueError(
            f"{caller} needs at least one loss in the logs it returns, to minimise: logs.add_loss('loss', loss). "
            f"It logged: {logged}. A step that minimises nothing is a managed.step."
        )
    wrong = [(f"losses.{name}", describe_leaf(loss)) for name, loss in losses.items() if not _is_loss(loss)]
    if wrong:
        raise ValueError(
            f"{caller} needs every loss to be one finite float: the mean over the rows of the batch. "
            f"Got:\n{table(wrong)}"
        )
    values = [at_least_32_bits(jnp.asarray(loss)) for loss in losses.values()]
    return sum(values[1:], start=values[0])


def _is_loss(loss: Any) -> bool:
    if isinstance(loss, int | float):
        return math.isfinite(loss)
    return hasattr(loss, "dtype") and jnp.shape(loss) == () and jnp.issubdtype(loss.dtype, jnp.floating)


@dataclasses.dataclass(frozen=True)
class Accumulate:
    """Compute the gradients of a batch in several parts, and update once.

    The rule: a loss is a mean, over what `weight` counts. Then the weighted mean over the parts is the loss of the
    whole batch, and so are its gradients. By default it counts rows: the real ones, if the batch is a pair (batch,
    mask) as loaders give it, with a mask of bools; all of them otherwise. A loss that is a mean over something else,
    such as the tokens of texts of unequal length, says so by `weight`; so does one on pairs of data and labels that are
    bools but no mask (`weight=lambda part: 1`).

    Losses and metrics are logged as weighted means, outputs with their rows in the order of the batch, anything else
    as the last part logged it. Each part sees the state that the one before returned, and a key of its own.

    Example:
        >>> per_token = ms.managed.Accumulate(4, weight=lambda batch: batch["is_token"].sum())

    Args:
        microbatches: How many parts, n; the number of rows must divide by it. Part i has the rows i, i + n, i + 2n
            and so on, so that every device has rows of every part.
        weight: What a part counts for, as a function of the part; a number that is not negative.
    """

    microbatches: int
    weight: Callable[[PyTree], ArrayLike] | None = None

    def __post_init__(self) -> None:
        require_int("Accumulate", "microbatches", self.microbatches, least=1)
        if self.weight is not None:
            require_callable("Accumulate", "weight", self.weight)

    def gradients(self, caller: str, call: Call, state: PyTree, batch: PyTree) -> tuple[PyTree, Logs, PyTree]:
        """What `gradients` of the whole batch gives, computed in parts."""
        params, rows = state.params, common_rows(caller, batch)
        if rows % self.microbatches:
            raise ValueError(
                f"{caller} needs a batch whose rows divide into {self.microbatches} microbatches. Got {rows} rows."
            )
        weigh = _real_rows if self.weight is None else self.weight

        def part(carry: Any, given: Any) -> Any:
            state, sums = carry
            number, rows = given
            grads, logs, new = gradients(caller, _with_key_of(number, call), state.replace(params=params), rows)
            weight = jnp.asarray(weigh(rows)).astype(jnp.float32)
            sums = jax.tree.map(lambda total, grad: total + _weighted(grad, weight), sums, grads)
            return (new.replace(params=None), sums), (logs, weight)

        zeros = jax.tree.map(lambda leaf: at_least_32_bits(jnp.zeros_like(leaf)), params)
        parts = (jnp.arange(self.microbatches), jax.tree.map(self._split, batch))
        (new, sums), (logs, weights) = jax.lax.scan(
            with_fast_convolutions(part), (state.replace(params=None), zeros), parts
        )
        total = jnp.sum(weights)
        total = jnp.where(total > 0, total, 1.0)
        grads = jax.tree.map(lambda leaf, like: (leaf / total.astype(leaf.dtype)).astype(like.dtype), sums, params)
        return grads, _joined(logs, weights / total), new.replace(params=params)

    def _split(self, leaf: jax.Array) -> jax.Array:
        return jnp.swapaxes(jnp.reshape(leaf, (-1, self.microbatches, *leaf.shape[1:])), 0, 1)


def _with_key_of(number: jax.Array, call: Call) -> Call:
    """The same function on a state whose key is that of a part; the state it returns has its old key again."""

    def with_key(state: Any, batch: PyTree) -> tuple[Logs, Any]:
        if state.key is None:
            return call(state, batch)
        key = jax.random.fold_in(state.key, number)
        logs, new = call(state.replace(key=key), batch)
        return logs, new.replace(key=state.key) if new.key is key else new

    return with_key


def _real_rows(batch: PyTree) -> Any:
    return jnp.sum(batch[1]) if is_masked(batch) else 1


def _weighted(value: jax.Array, weight: jax.Array) -> jax.Array:
    """A value times a weight. That of a part without real rows may be 0 / 0, and counts for nothing."""
    value = at_least_32_bits(value)
    return jnp.where(weight > 0, value * weight.astype(value.dtype), jnp.zeros_like(value))


def _joined(logs: Logs, shares: jax.Array) -> Logs:
    """One row of logs from those of all parts, which have an axis more."""

    def mean(values: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(_weighted)(values, shares), axis=0)

    def in_order(values: jax.Array) -> jax.Array:
        return jnp.reshape(jnp.swapaxes(values, 0, 1), (-1, *values.shape[2:])) if values.ndim > 1 else values[-1]

    joined = Logs()
    for collection, entries in logs.items():
        join = {"losses": mean, "metrics": mean, "outputs": in_order}.get(collection, lambda values: values[-1])
        joined.add_entries(collection, jax.tree.map(join, dict(entries)))
    return joined
