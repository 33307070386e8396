"""Stepping and resetting a Gymnax environment, bare or wrapped."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from millstream._core.contracts import PyTree
from millstream._core.strong_types import strong

_EMITTED = ("terminated", "truncated", "final_observation")  # what gymnax repeats in `info`


class Outcome(NamedTuple):
    """What one action led to.

    Attributes:
        final: The observation it led to, also at the end of an episode.
        obs: What the policy sees next.
        env_state: The environment's state.
        reward: The reward.
        terminated: Whether the episode came to its natural end.
        truncated: Whether it was cut by the time limit instead.
        info: What else the environment tells.
        ended: Whether the episode is over and the environment waits for a reset.
    """

    final: PyTree
    obs: PyTree
    env_state: PyTree
    reward: Any
    terminated: jax.Array
    truncated: jax.Array
    info: dict[str, Any]
    ended: jax.Array


def advance(env: Any, env_params: Any, key: jax.Array, env_state: PyTree, action: Any) -> Outcome:
    """One step of one environment."""
    with _own_promotion():
        if _resets_by_itself(env):
            obs, env_state, reward, terminated, truncated, info = _full_step(env, key, env_state, action, env_params)
            final, waits = info["final_observation"], False
        else:
            final, env_state, reward, terminated, info = env.step_env(key, env_state, action, env_params)
            obs, truncated, waits = final, env.is_truncated(env_state, env_params), True
    terminated, truncated = jnp.asarray(terminated, bool), jnp.asarray(truncated, bool)
    return Outcome(
        final=_strong(final),
        obs=_strong(obs),
        env_state=_strong(env_state),
        reward=_strong(reward),
        terminated=terminated,
        truncated=truncated & ~terminated,
        info=_strong({name: found for name, found in info.items() if name not in _EMITTED}),
        ended=(terminated | truncated) & waits,
    )


def reset(env: Any, env_params: Any, key: jax.Array) -> tuple[PyTree, PyTree]:
    """The state of one environment at the start of an episode, and what it shows."""
    with _own_promotion():
        obs, env_state = env.reset(key, env_params)
    return _strong(env_state), _strong(obs)


def _resets_by_itself(env: Any) -> bool:
    """Whether only `step` can be trusted: a wrapper's, or one that a class wrote for itself.

    Gymnax's own `step` is `step_env` followed by a reset of every environment; those we do only where they are due.
    """
    own = getattr(type(env), "step", None)
    return getattr(own, "__module__", None) != "gymnax.environments.environment"


def _full_step(env: Any, *args: Any) -> Any:
    stepped = env.step(*args)
    if len(stepped) != 6 or "final_observation" not in stepped[5]:
        found = f"{len(stepped)} values" if len(stepped) != 6 else f"an info of {sorted(stepped[5])}"
        raise TypeError(
            "GymnaxSource needs an environment of gymnax 1.0 or later, whose `step` returns (obs, state, reward, "
            f"terminated, truncated, info) with info['final_observation']. {type(env).__name__} returned {found}."
        )
    return stepped


def _strong(tree: PyTree) -> PyTree:
    """The tree with weak types made strong, so that a state has the same types after every step."""
    return jax.tree.map(strong, tree)


@contextlib.contextmanager
def _own_promotion() -> Iterator[None]:
    """An environment's arithmetic is not ours to be strict about."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
