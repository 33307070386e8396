"""Stepping and resetting an environment in the form of Gymnax: bare, wrapped or written by hand."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from millstream.pipeline.state import strong
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_value

_REPEATED = ("terminated", "truncated", "final_observation")  # what gymnax 1.0 repeats in `info`


class Outcome(NamedTuple):
    """What one action led to.

    Attributes:
        final: The observation it led to, also at the end of an episode, as far as the environment tells it.
        obs: What the policy sees next.
        env_state: The environment's state.
        reward: The reward.
        terminated: Whether the episode came to its natural end; also any end that the environment does not tell apart.
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
        if _has_step_of_gymnax(env):
            final, env_state, reward, terminated, info = env.step_env(key, env_state, action, env_params)
            # Before 1.0 there was no such method, and `terminated` was True at the time limit, too.
            truncated = env.is_truncated(env_state, env_params) if hasattr(env, "is_truncated") else False
            obs, waits = final, True
        else:
            obs, env_state, reward, terminated, truncated, info = _full_step(env, key, env_state, action, env_params)
            final, waits = info.get("final_observation", obs), "final_observation" not in info
            info = info if waits else {name: found for name, found in info.items() if name not in _REPEATED}
    terminated, truncated = jnp.asarray(terminated, bool), jnp.asarray(truncated, bool)
    return Outcome(
        final=_strong(final),
        obs=_strong(obs),
        env_state=_strong(env_state),
        reward=_strong(reward),
        terminated=terminated,
        truncated=truncated & ~terminated,
        info=_strong(info),
        ended=(terminated | truncated) & waits,
    )


def reset(env: Any, env_params: Any, key: jax.Array) -> tuple[PyTree, PyTree]:
    """The state of one environment at the start of an episode, and what it shows."""
    with _own_promotion():
        obs, env_state = env.reset(key, env_params)
    return _strong(env_state), _strong(obs)


def _has_step_of_gymnax(env: Any) -> bool:
    """Whether `step` is Gymnax's own, and not that of a wrapper or one that a class wrote for itself.

    Gymnax's own is `step_env` followed by a reset of every environment; those we do only where they are due.
    """
    own = getattr(type(env), "step", None)
    return getattr(own, "__module__", None) == "gymnax.environments.environment"


def _full_step(env: Any, *args: Any) -> Any:
    """What `step` returned, as six values; of five, the fourth says that an episode ended, and not how."""
    stepped = env.step(*args)
    if not isinstance(stepped, tuple) or len(stepped) not in (5, 6) or not isinstance(stepped[-1], dict):
        is_long = isinstance(stepped, tuple) and len(stepped) in (5, 6)
        found = f"{describe_value(stepped[-1])} as info" if is_long else _counted(stepped)
        raise TypeError(
            "GymnaxSource needs an environment whose `step` returns (obs, state, reward, terminated, truncated, info) "
            f"or (obs, state, reward, done, info), with info a dict. {type(env).__name__} returned {found}."
        )
    return stepped if len(stepped) == 6 else (*stepped[:4], False, stepped[4])


def _counted(stepped: Any) -> str:
    return f"{len(stepped)} values" if isinstance(stepped, tuple) else describe_value(stepped)


def _strong(tree: PyTree) -> PyTree:
    """The tree with weak types made strong, so that a state has the same types after every step."""
    return jax.tree.map(strong, tree)


@contextlib.contextmanager
def _own_promotion() -> Iterator[None]:
    """An environment's arithmetic is not ours to be strict about."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
