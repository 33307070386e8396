"""The policy inside a stream's state: how it is found, replaced and compared."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from millstream.pipeline.state import strong_or_none
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_leaf, describe_value, differences
from millstream.text.summaries import fields_text, never_raising


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ActingState:
    """The state of a stream that acts: a base for the states of environments.

    Attributes:
        policy_state: What the policy knows: parameters, recurrent carries.
        new_episode: Whether the next observation is the first of an episode; one bool per environment.
        per_env: For every leaf of `policy_state`, whether it is a memory of what an environment has shown; of several
            environments it has one row for each.
    """

    policy_state: PyTree
    new_episode: jax.Array
    per_env: tuple[bool, ...] = dataclasses.field(metadata={"static": True})

    @never_raising
    def __repr__(self) -> str:
        return fields_text(self)


def get_policy_state(state: PyTree) -> PyTree:
    """The policy state inside a loader's or a source's state, such as the recurrent carries of this moment.

    Example:
        >>> state = cartpole.init_state(jax.random.key(0))
        >>> ms.rl.get_policy_state(state).shape
        (4, 2)
    """
    return _acting_state("get_policy_state", state).policy_state


def has_policy(state: PyTree) -> bool:
    """Whether a state is that of a pipeline that starts with an environment."""
    return any(isinstance(node, ActingState) for node in jax.tree.leaves(state, is_leaf=_is_acting))


def memories(state: PyTree) -> list[str]:
    """The names of the leaves of the policy state inside a state that the policy changes by itself."""
    acting = _acting_state("memories", state)
    return [name for (name, _), own in zip(_leaves(acting.policy_state), acting.per_env, strict=True) if own]


def set_policy_state(caller: str, state: PyTree, policy_state: PyTree, new_episode: Any) -> PyTree:
    """The state with another policy, wherever in the pipeline it sits; refuses one of a different shape.

    Args:
        caller: Who is speaking if this fails.
        state: A loader's or a source's state.
        policy_state: The new one. A leaf kept per environment may have a row for each, or one for all of them.
        new_episode: What the policy is told at its next step; None leaves it as it is.
    """
    acting = _acting_state(caller, state)
    flag = acting.new_episode if new_episode is None else _as_flags(caller, new_episode, acting.new_episode.shape)
    fitted = _fit(caller, acting, policy_state)
    changed = dataclasses.replace(acting, policy_state=fitted, new_episode=flag)
    return jax.tree.map(lambda node: changed if isinstance(node, ActingState) else node, state, is_leaf=_is_acting)


def tree_differences(expected: PyTree, found: PyTree) -> str:
    """Where two trees differ in structure, shape or dtype, a line per leaf; empty if they do not."""
    wanted, given = ({name: describe_leaf(leaf) for name, leaf in _leaves(tree)} for tree in (expected, found))
    places = ("expected", "found")
    return differences(wanted, given, places) or differences(_structure(expected), _structure(found), places)


def _structure(tree: PyTree) -> dict[str, str]:
    return {"policy_state": f"a tree of {jax.tree.structure(tree)}"}


def as_arrays(caller: str, policy_state: PyTree, name: str = "policy_state") -> PyTree:
    """The policy state with every leaf an array; refuses leaves that are not, by the name it was given under."""

    def as_array(path: Any, leaf: Any) -> jax.Array:
        array = strong_or_none(leaf)
        if array is None:
            found = f"{name}{jax.tree_util.keystr(path)}: {describe_value(leaf)}"
            raise TypeError(
                f"{caller} needs a policy state made of arrays. Got {found}. "
                "Keep functions and settings outside it, in the policy function itself."
            )
        return array

    return jax.tree.map_with_path(as_array, policy_state)


def _as_flags(caller: str, new_episode: Any, shape: tuple[int, ...]) -> jax.Array:
    try:
        flags = jnp.asarray(new_episode)
    except Exception:
        flags = None
    if flags is None or flags.dtype != bool or flags.shape not in ((), shape):
        each = f", or one for each environment, shape {shape}" if shape else ""
        found = (
            describe_value(new_episode) if flags is None else f"{describe_leaf(flags)}: {describe_value(new_episode)}"
        )
        raise ValueError(f"{caller} needs new_episode to be one bool{each}. Got {found}.")
    return jnp.broadcast_to(flags, shape)


def _fit(caller: str, acting: ActingState, policy_state: PyTree) -> PyTree:
    given = as_arrays(caller, policy_state)
    leaves, structure = jax.tree.flatten(given)
    if structure == jax.tree.structure(acting.policy_state):
        targets = jax.tree.leaves(acting.policy_state)
        for i, (target, per_env) in enumerate(zip(targets, acting.per_env, strict=True)):
            many = per_env and acting.new_episode.ndim > 0
            if many and leaves[i].shape == target.shape[1:] and leaves[i].dtype == target.dtype:
                leaves[i] = jnp.broadcast_to(leaves[i], target.shape)
        given = jax.tree.unflatten(structure, leaves)
    if differing := tree_differences(acting.policy_state, given):
        raise ValueError(
            f"{caller} got a policy state that does not fit this source:\n{differing}\n"
            "Give it the structure, shapes and dtypes of the source's policy_state_template."
        )
    return given


def _acting_state(caller: str, state: PyTree) -> ActingState:
    found = [node for node in jax.tree.leaves(state, is_leaf=_is_acting) if isinstance(node, ActingState)]
    if len(found) != 1:
        raise ValueError(
            f"{caller} needs the state of a pipeline with one acting source, such as GymnaxSource. "
            f"Got {type(state).__name__} with {len(found)} of them."
        )
    return found[0]


def _is_acting(node: Any) -> bool:
    return isinstance(node, ActingState)


def _leaves(tree: PyTree) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield f"policy_state{jax.tree_util.keystr(path)}", leaf
