"""CartPole in one compiled scan, 256 environments at once.

Under a random policy, beside one environment, ours and cyreal's. Every transition's observation and reward are used.
cyreal's own source expects the five values that gymnax returned from `step` before 1.0; for it alone the environment
is wrapped to return those. Everything runs on one core: a row of 256 is too short to share between two, and trying to
makes the figures depend on what else the machine does.
"""

import functools
import os
from typing import Any

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before JAX is imported and starts its threads

import gymnax
import jax
import jax.numpy as jnp
from _case import Options, main
from _measure import Entry, Run, measured
from _result import Table

import millstream as ms
from millstream.rl import GymnaxSource

ENVS, STEPS, KEY = 256, 1024, jax.random.key(0)
ENV, PARAMS = gymnax.make("CartPole-v1")
POLICY = {"params": jnp.zeros((4, 2))}

MANY, ONE, CYREAL = f"Millstream, {ENVS} environments", "Millstream, one environment", "cyreal, one environment"


def policy_step(obs: jax.Array, policy_state: Any, new_episode: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
    return jax.random.categorical(key, obs @ policy_state["params"]), policy_state


def use(total: jax.Array, batch: dict[str, jax.Array], mask: jax.Array) -> tuple[jax.Array, None]:
    return total + batch["reward"].sum() + batch["next_state"].sum() + batch["action"].sum(), None


def millstream_scan(num_envs: int) -> Run:
    loader = ms.DataLoader([GymnaxSource(ENV, PARAMS, policy_step, POLICY, STEPS, num_envs)])
    state = loader.init_state(KEY)
    return lambda: jax.block_until_ready(loader.scan_epoch(state, jnp.float32(0), use))


class FiveValues:
    """The environment with the `step` of gymnax before 1.0."""

    def __getattr__(self, name: str) -> Any:
        return getattr(ENV, name)

    def step(self, *args: Any) -> Any:
        obs, state, reward, terminated, truncated, info = ENV.step(*args)
        return obs, state, reward, terminated | truncated, info


def cyreal_scan() -> Run:
    from cyreal.loader import DataLoader
    from cyreal.rl import set_loader_policy_state
    from cyreal.sources import GymnaxSource as Source

    loader = DataLoader([Source(FiveValues(), PARAMS, policy_step, POLICY, STEPS)])
    start = set_loader_policy_state(loader.init_state(KEY), POLICY)
    epoch = jax.jit(lambda state: loader.scan_epoch(state, jnp.float32(0), use))
    return lambda: jax.block_until_ready(epoch(start))


def measure(options: Options) -> list[Table]:
    entries = [
        Entry(MANY, functools.partial(millstream_scan, ENVS), "millstream", STEPS * ENVS),
        Entry(ONE, functools.partial(millstream_scan, 1), "millstream", STEPS),
        Entry(CYREAL, cyreal_scan, "cyreal", STEPS),
    ]
    title = f"{STEPS:,} steps of CartPole in one scan"
    table = measured(title, "ns per transition", MANY, entries, options.rounds(7))
    table.hold("times cyreal's transitions per second", table.ratio(CYREAL, MANY), at_least=20)
    table.hold("times cyreal's time for one environment", table.ratio(ONE, CYREAL), at_most=1)
    return [table]


if __name__ == "__main__":
    main(measure)
