"""Gymnax environments as a stream of transitions."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from millstream.pipeline.policy import ActingState, as_arrays, set_policy_state
from millstream.pipeline.state import key_words
from millstream.plan.keys import fold, name_words, named_key, threefry2x32
from millstream.reading.contracts import PyTree
from millstream.rl._env import Outcome, advance, reset
from millstream.rl._policy import Memoryless, PolicyStepFn, act, per_env_leaves
from millstream.text.errors import describe_value, require_callable, require_int
from millstream.text.summaries import call_text, never_raising

_MOST_STEPS = 2**30 - 1  # four keys per step, numbered in 32 bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class GymnaxSourceState(ActingState):
    """Where the environments and the policy are.

    Example:
        >>> state = cartpole.init_state(jax.random.key(0))
        >>> int(state.step), state.obs.shape
        (0, (4,))

    Attributes:
        env_state: The environments' own states.
        obs: What the policy sees next.
        key: Two words of key for each environment, uint32.
        step: Values given in this epoch, uint32.
        epoch: Epochs completed, uint32.
    """

    env_state: PyTree
    obs: PyTree
    key: jax.Array
    step: jax.Array
    epoch: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class GymnaxSource:
    """Transitions of a policy in a Gymnax environment, or in many copies of it that step together.

    A value is a dict of `state`, `action`, `reward`, `next_state`, `done`, `truncated` and `info`. `next_state` is
    what the action led to, also where an episode ends. `done` marks the last transition of an episode; `truncated`
    says that it was cut short, by the environment's time limit or by the end of the epoch, and did not terminate:
    the value of `next_state` still counts there. Every epoch starts new episodes.

    An environment has `reset(key, params) -> (obs, state)` and `step(key, state, action, params)`, which returns (obs,
    state, reward, terminated, truncated, info). Wherever an episode ends, it is reset here, unless its step did that
    itself and says so: with `info["final_observation"]`, which is `next_state` then. A step that resets without saying
    so has the first observation of the next episode as `next_state`. A step may also return five values, (obs, state,
    reward, done, info), as before Gymnax 1.0. It does not tell how an episode ended, so every `done` counts as
    terminated, and `truncated` marks only the end of an epoch.

    Example:
        >>> env, env_params = gymnax.make("CartPole-v1")
        >>> def policy_step(obs, policy_state, new_episode, key):
        ...     carry = jnp.where(new_episode, 0.0, 0.9 * policy_state["carry"]) + obs  # a memory of its own
        ...     return jax.random.categorical(key, carry @ policy_state["params"]), {**policy_state, "carry": carry}
        >>> template = {"params": jnp.zeros((4, 2)), "carry": jnp.zeros(4)}
        >>> source = ms.rl.GymnaxSource(env, env_params, policy_step, template, num_envs=256)
        >>> loader = ms.DataLoader([source, ms.BatchTransform(128)])  # 128 steps of 256 environments

    The policy is written for one environment. With `num_envs > 1` values have a leading axis of environments, and
    so has every leaf of the policy state that can come to differ between them, because it depends on an
    observation, on `new_episode` or on `key`: a recurrent carry. All other leaves, such as parameters, are held once.

    Args:
        env: A Gymnax environment, bare or wrapped, or one that is written by hand in its form.
        env_params: Its parameters.
        policy_step_fn: `policy_step_fn(obs, policy_state, new_episode, key) -> (action, policy_state)`.
        policy_state_template: One environment's policy state, of arrays; also the policy until another is set.
        steps_per_epoch: Steps of every environment in an epoch.
        num_envs: Environments that step together. Each does what a single one would do from its part of the state.
        policy_fn: In place of `policy_step_fn`, for a policy without memory: `policy_fn(obs, params, key) -> action`.
        policy_params: In place of the template, with `policy_fn`.
    """

    env: Any
    env_params: PyTree
    policy_step_fn: PolicyStepFn | None = None
    policy_state_template: PyTree = None
    steps_per_epoch: int = 1024
    num_envs: int = 1
    _: dataclasses.KW_ONLY
    policy_fn: Callable[[PyTree, PyTree, jax.Array], PyTree] | None = None
    policy_params: PyTree = None

    def __post_init__(self) -> None:
        for method in ("reset", "step"):
            if isinstance(self.env, type) or not callable(getattr(self.env, method, None)):
                raise TypeError(
                    f"GymnaxSource needs an environment with `reset` and `step`, such as "
                    f"gymnax.make('CartPole-v1')[0]. Got {describe_value(self.env)}."
                )
        if (self.policy_step_fn is None) == (self.policy_fn is None):
            raise ValueError("GymnaxSource needs one policy: give policy_step_fn or policy_fn, and not both.")
        if self.policy_fn is None and self.policy_params is not None:
            raise ValueError("GymnaxSource takes policy_params with policy_fn; policy_step_fn has a template.")
        if self.policy_fn is not None and self.policy_state_template is not None:
            raise ValueError("GymnaxSource takes a policy_state_template with policy_step_fn; policy_fn has params.")
        memoryless = self.policy_fn is not None
        name = "policy_fn" if memoryless else "policy_step_fn"
        require_callable("GymnaxSource", name, getattr(self, name))
        as_arrays("GymnaxSource", self._template, "policy_params" if memoryless else "policy_state_template")
        for name in ("policy_state_template", "policy_params"):  # their owner may put other arrays into a dict of them
            object.__setattr__(self, name, jax.tree.map(lambda leaf: leaf, getattr(self, name)))
        require_int("GymnaxSource", "steps_per_epoch", self.steps_per_epoch, least=1)
        if self.steps_per_epoch > _MOST_STEPS:
            raise ValueError(
                f"GymnaxSource needs steps_per_epoch of at most {_MOST_STEPS:,}. Got {self.steps_per_epoch:,}."
            )
        require_int("GymnaxSource", "num_envs", self.num_envs, least=1)

    @never_raising
    def __repr__(self) -> str:
        return call_text(self)

    @property
    def _policy(self) -> PolicyStepFn:
        if self.policy_fn is not None:
            return Memoryless(self.policy_fn)
        assert self.policy_step_fn is not None
        return self.policy_step_fn

    @property
    def _template(self) -> PyTree:
        return self.policy_state_template if self.policy_fn is None else self.policy_params

    def init_state(self, key: jax.Array) -> GymnaxSourceState:
        """The state before the first step, with the template as its policy."""
        return _initial_state(self, key_words("init_state", key))

    def set_policy_state(
        self, state: GymnaxSourceState, policy_state: PyTree, *, new_episode: ArrayLike | Sequence[bool] | None = None
    ) -> GymnaxSourceState:
        """This source's state with another policy state."""
        return set_policy_state("GymnaxSource.set_policy_state", state, policy_state, new_episode)

    def element_spec(self) -> PyTree:
        """The shape and dtype of a transition, derived by tracing."""
        state = jax.eval_shape(self.init_state, jax.random.key(0))
        return jax.eval_shape(lambda state: self.next(state)[0], state)

    def next(self, state: GymnaxSourceState) -> tuple[PyTree, jax.Array, GymnaxSourceState]:
        """One step of every environment."""
        leaves, structure = jax.tree.flatten(state.policy_state)

        def step(leaves: list[Any], *rest: Any) -> tuple[Any, list[Any], Outcome]:
            action, policy_state, outcome = self._step_one(jax.tree.unflatten(structure, leaves), *rest)
            return action, jax.tree.leaves(policy_state), outcome

        if self.num_envs > 1:
            axes = [0 if flag else None for flag in state.per_env]
            step = jax.vmap(step, in_axes=(axes, 0, 0, 0, 0, 0), out_axes=(0, axes, 0))
        keys = _key(state, _POLICY), _key(state, _STEP)
        action, leaves, outcome = step(leaves, state.obs, state.new_episode, state.env_state, *keys)

        last = state.step + np.uint32(1) == np.uint32(self.steps_per_epoch)
        value = {
            "state": state.obs,
            "action": action,
            "reward": outcome.reward,
            "next_state": outcome.final,
            "done": outcome.terminated | outcome.truncated | last,
            "truncated": outcome.truncated | (last & ~outcome.terminated),
            "info": outcome.info,
        }
        env_state, obs = self._reset_where(outcome.ended | last, state, outcome)
        after = dataclasses.replace(
            state,
            policy_state=jax.tree.unflatten(structure, leaves),
            new_episode=value["done"],
            env_state=env_state,
            obs=obs,
            step=jnp.where(last, np.uint32(0), state.step + np.uint32(1)),
            epoch=state.epoch + last.astype(np.uint32),
        )
        return value, jnp.ones_like(value["done"]), after

    def _step_one(
        self,
        policy_state: PyTree,
        obs: PyTree,
        new_episode: jax.Array,
        env_state: PyTree,
        policy_key: jax.Array,
        env_key: jax.Array,
    ) -> tuple[Any, PyTree, Outcome]:
        action, policy_state = act(self._policy, obs, policy_state, new_episode, policy_key)
        return action, policy_state, advance(self.env, self.env_params, env_key, env_state, action)

    def _reset_where(self, due: jax.Array, state: GymnaxSourceState, outcome: Outcome) -> tuple[PyTree, PyTree]:
        """The environments' states and observations, after a reset where it is due."""
        stepped = (outcome.env_state, outcome.obs)

        def choose() -> tuple[PyTree, PyTree]:
            def select(fresh: jax.Array, old: jax.Array) -> jax.Array:
                return jnp.where(jnp.expand_dims(due, range(due.ndim, old.ndim)), fresh.astype(old.dtype), old)

            return jax.tree.map(select, self._reset(_key(state, _RESET)), stepped)

        # Of many environments one is nearly always due, and XLA runs the branches of a condition on one core.
        return choose() if self.num_envs > 1 else lax.cond(due, choose, lambda: stepped)

    def _reset(self, keys: jax.Array) -> tuple[PyTree, PyTree]:
        one = functools.partial(reset, self.env, self.env_params)
        return (jax.vmap(one) if self.num_envs > 1 else one)(keys)


# What a key is for: three for every step of every environment, and one for the first reset.
_POLICY, _STEP, _RESET, _START = range(4)
_STEPS = name_words("millstream GymnaxSource step 1")


def _key(state: GymnaxSourceState, use: int) -> jax.Array:
    """The typed keys of this step, one per environment: its own words, and those of the step, combined by xor.

    The step's words are a bijection of (epoch, step, use), so an environment never gets the same key twice; they are
    the same for all environments, so the cipher runs once per step and not once per environment.
    """
    left, right = threefry2x32(_STEPS, (state.epoch, state.step * np.uint32(4) + np.uint32(use)))
    words = jnp.stack([state.key[..., 0] ^ left, state.key[..., 1] ^ right], axis=-1)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


# Unflattening goes around the checks of the constructor: they would see traced values.
_STATIC = ("env", "policy_step_fn", "steps_per_epoch", "num_envs", "policy_fn")
_DATA = ("env_params", "policy_state_template", "policy_params")


def _unflatten(static: tuple[Any, ...], data: tuple[Any, ...]) -> GymnaxSource:
    source = object.__new__(GymnaxSource)
    source.__dict__.update(zip(_STATIC + _DATA, (*static, *data), strict=True))
    return source


jax.tree_util.register_pytree_node(
    GymnaxSource,
    lambda source: (tuple(getattr(source, name) for name in _DATA), tuple(getattr(source, name) for name in _STATIC)),
    _unflatten,
)


@jax.jit
def _initial_state(source: GymnaxSource, words: jax.Array) -> GymnaxSourceState:
    envs, own = source.num_envs, named_key(words, "millstream GymnaxSource 1")
    if envs > 1:
        own = fold(jnp, own, jnp.arange(envs, dtype=np.uint32))
    state = GymnaxSourceState(
        policy_state=as_arrays("GymnaxSource", source._template),
        new_episode=jnp.ones(() if envs == 1 else (envs,), bool),
        per_env=(False,) * len(jax.tree.leaves(source._template)),
        env_state=None,
        obs=None,
        key=jnp.stack(own, axis=-1),
        step=jnp.zeros((), np.uint32),
        epoch=jnp.zeros((), np.uint32),
    )
    env_state, obs = source._reset(_key(state, _START))
    return _spread_policy(source, dataclasses.replace(state, env_state=env_state, obs=obs))


def _spread_policy(source: GymnaxSource, state: GymnaxSourceState) -> GymnaxSourceState:
    """The state with a row per environment in those leaves of the policy state that need it."""

    def step(policy_state: PyTree, obs: PyTree, new_episode: jax.Array, key: jax.Array) -> PyTree:
        return act(source._policy, obs, policy_state, new_episode, key)[1]

    of_envs, many = (state.obs, state.new_episode, _key(state, _POLICY)), source.num_envs > 1
    rows = of_envs if many else jax.tree.map(lambda leaf: leaf[None], of_envs)
    per_env = per_env_leaves(step, state.policy_state, *rows)
    leaves, structure = jax.tree.flatten(state.policy_state)
    leaves = [
        jnp.broadcast_to(leaf, (source.num_envs, *leaf.shape)) if flag and many else leaf
        for leaf, flag in zip(leaves, per_env, strict=True)
    ]
    return dataclasses.replace(state, policy_state=jax.tree.unflatten(structure, leaves), per_env=per_env)
