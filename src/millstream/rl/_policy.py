"""Policies: what one is, which of its state belongs to each environment, and setting it from outside."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from millstream.pipeline import policy
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_value, function_name

PolicyStepFn = Callable[[PyTree, PyTree, jax.Array, jax.Array], tuple[PyTree, PyTree]]


def set_loader_policy_state(
    state: PyTree, policy_state: PyTree, *, new_episode: ArrayLike | Sequence[bool] | None = None
) -> PyTree:
    """The loader's state with another policy state; the environments stay where they are.

    Example:
        >>> state = cartpole.init_state(jax.random.key(0))
        >>> state = ms.rl.set_loader_policy_state(state, jnp.ones((4, 2)))

    Args:
        state: The state of a loader whose pipeline starts with `GymnaxSource`.
        policy_state: The new one, shaped like the source's template. A leaf that is kept per environment may have
            a row for each of them, or be one value for all.
        new_episode: What the policy is told at its next step; None leaves it as it is.
    """
    return policy.set_policy_state("set_loader_policy_state", state, policy_state, new_episode)


def set_source_policy_state(
    state: PyTree, policy_state: PyTree, *, new_episode: ArrayLike | Sequence[bool] | None = None
) -> PyTree:
    """The state of a bare source with another policy state, for whoever steps it without a loader.

    Example:
        >>> state = cartpole.init_state(jax.random.key(0))
        >>> state = ms.rl.set_source_policy_state(state, jnp.ones((4, 2)))

    Args:
        state: The state of a `GymnaxSource`.
        policy_state: As for `set_loader_policy_state`.
        new_episode: As for `set_loader_policy_state`.
    """
    return policy.set_policy_state("set_source_policy_state", state, policy_state, new_episode)


@dataclasses.dataclass(frozen=True)
class Memoryless:
    """A function `policy_fn(obs, params, key) -> action` as a policy whose state is its parameters."""

    policy_fn: Callable[[Any, PyTree, jax.Array], Any]

    def __call__(self, obs: Any, params: PyTree, new_episode: jax.Array, key: jax.Array) -> tuple[Any, PyTree]:
        return self.policy_fn(obs, params, key), params


def act(fn: PolicyStepFn, obs: Any, policy_state: PyTree, new_episode: jax.Array, key: jax.Array) -> tuple[Any, PyTree]:
    """One call of the policy, refusing a state that comes back changed in shape."""
    returned = fn(obs, policy_state, new_episode, key)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            f"GymnaxSource needs policy_step_fn to return (action, policy_state). "
            f"{function_name(fn)} returned {describe_value(returned)}."
        )
    action, after = returned
    after = policy.as_arrays("GymnaxSource", after)
    if differing := policy.tree_differences(policy_state, after):
        raise ValueError(
            f"GymnaxSource needs policy_step_fn to return the policy state in the shape it was given. "
            f"{function_name(fn)} returned a different one:\n{differing}"
        )
    return action, after


def per_env_leaves(step: Callable[..., PyTree], policy_state: PyTree, *env_args: Any) -> tuple[bool, ...]:
    """For every leaf of the policy state, whether environments can come to differ in it.

    A leaf differs between environments if, after some number of steps, it depends on anything that is an
    environment's own. Found by tracing: `step(policy_state, *env_args) -> policy_state` under `vmap`, until no
    further leaf is found.

    Args:
        step: The policy step, for one environment.
        policy_state: One environment's.
        env_args: The rest of the arguments, each leaf with one row per environment.
    """
    leaves, structure = jax.tree.flatten(policy_state)
    varies = [False] * len(leaves)

    def marked(leaves: Sequence[Any], *env_args: Any) -> list[Any]:
        after = jax.tree.leaves(step(jax.tree.unflatten(structure, leaves), *env_args))
        return [_mark_if_mapped(leaf, varies, number) for number, leaf in enumerate(after)]

    while True:
        before = list(varies)
        axes = [0 if flag else None for flag in before]
        rows = len(jax.tree.leaves(env_args)[0])
        stacked = [
            jnp.broadcast_to(leaf, (rows, *leaf.shape)) if flag else leaf
            for leaf, flag in zip(leaves, before, strict=True)
        ]
        jax.eval_shape(jax.vmap(marked, in_axes=(axes, *[0] * len(env_args))), stacked, *env_args)
        if varies == before:
            return tuple(varies)


def _mark_if_mapped(leaf: Any, marks: list[bool], number: int) -> Any:
    """The leaf itself; sets its mark if it is traced under a `vmap` that maps it."""

    @jax.custom_batching.custom_vmap
    def identity(leaf: Any) -> Any:
        return leaf

    @identity.def_vmap
    def _(size: int, in_batched: list[bool], leaf: Any) -> tuple[Any, bool]:
        marks[number] = True
        return leaf, True

    return identity(leaf)
