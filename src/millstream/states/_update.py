"""From gradients to the next state: clipping, the optimizer, the average of the parameters, and leaving updates out."""

from typing import Any

import jax
import jax.numpy as jnp

from millstream.reading.contracts import PyTree
from millstream.states._precision import at_least_32_bits


def updated(state: Any, grads: PyTree, otherwise: Any, **extra: Any) -> tuple[Any, dict[str, jax.Array]]:
    """The state after one update, and what there is to log about it.

    Args:
        state: The state.
        grads: Gradients, shaped like its parameters.
        otherwise: The state to stay at, but for its step and its loss scale, if the gradients are not finite and the
            options say that such an update is left out.
        **extra: For the optimizer.
    """
    options, facts = state.options, {}
    clipped = grads if options.clip_norm is None else _clipped(grads, options.clip_norm)
    updates, opt_state = state.tx.update(clipped, state.opt_state, state.params, **extra)
    params = jax.tree.map(_sum, state.params, updates)
    if options.log_norms:
        norms = {"grad_norm": grads, "param_norm": params, "update_norm": updates}
        facts |= {name: global_norm(tree) for name, tree in norms.items()}
    new = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
    if options.ema is not None:
        new = new.replace(ema_params=_average(state.ema_params, params, options.ema))
    if options.skip_nonfinite or state.loss_scale is not None:
        finite = _all_finite(grads)
        new = jax.tree.map(lambda ours, theirs: _chosen(finite, ours, theirs), new, otherwise.replace(step=new.step))
        facts["skipped_updates"] = 1.0 - finite.astype(jnp.float32)
        if state.loss_scale is not None:
            new = new.replace(loss_scale=state.loss_scale.adjusted(finite))
    return new, facts


def global_norm(tree: PyTree) -> jax.Array:
    """The Euclidean norm of all leaves together, at least in 32 bits."""
    squares = [jnp.sum(jnp.square(jnp.abs(at_least_32_bits(leaf)))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares[1:], start=squares[0]))


def _clipped(grads: PyTree, limit: float) -> PyTree:
    norm = global_norm(grads)
    share = jnp.where(norm > limit, limit / norm, 1.0)
    return jax.tree.map(lambda grad: grad * share.astype(grad.dtype), grads)


def _sum(param: jax.Array, update: jax.Array) -> jax.Array:
    dtype = max(param.dtype, update.dtype, key=lambda dtype: dtype.itemsize)
    return (param.astype(dtype) + update.astype(dtype)).astype(param.dtype)


def _average(ema_params: PyTree, params: PyTree, share: float) -> PyTree:
    return jax.tree.map(lambda ema, param: share * ema + (1 - share) * param.astype(ema.dtype), ema_params, params)


def _all_finite(tree: PyTree) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def _chosen(finite: jax.Array, ours: Any, theirs: Any) -> Any:
    return ours if ours is theirs else jnp.where(finite, ours, theirs)
