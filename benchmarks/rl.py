"""CartPole under a random policy: 256 environments inside one scan, and one, beside cyreal's single environment.

Every transition's observation and reward are used. cyreal's own `GymnaxSource` expects the five values that gymnax
returned from `step` before 1.0; for it alone the environment is wrapped to return those. Everything runs on one core:
a row of 256 is too short to share between two, and trying to makes the figures depend on what else the machine does.
Run with `make bench`.
"""

import os
import time
from collections.abc import Callable
from typing import Any

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before JAX is imported and starts its threads

import gymnax
import jax
import jax.numpy as jnp
from _measure import interleaved, print_machine, print_table, ratio, verdict

import millstream as ms
from millstream.rl import GymnaxSource

ENVS, STEPS, ROUNDS, KEY = 256, 1024, 7, jax.random.key(0)
ENV, PARAMS = gymnax.make("CartPole-v1")
POLICY = {"params": jnp.zeros((4, 2))}

MANY, ONE, PEER = f"millstream, {ENVS} environments", "millstream, one environment", "cyreal, one environment"


def policy_step(obs: jax.Array, policy_state: Any, new_episode: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
    return jax.random.categorical(key, obs @ policy_state["params"]), policy_state


def use(total: jax.Array, batch: dict[str, jax.Array], mask: jax.Array) -> tuple[jax.Array, None]:
    return total + batch["reward"].sum() + batch["next_state"].sum() + batch["action"].sum(), None


def millstream_case(num_envs: int) -> Callable[[], None]:
    loader = ms.DataLoader([GymnaxSource(ENV, PARAMS, policy_step, POLICY, STEPS, num_envs)])
    state = loader.init_state(KEY)
    return lambda: jax.block_until_ready(loader.scan_epoch(state, jnp.float32(0), use)) and None


class FiveValues:
    """The environment with the `step` of gymnax before 1.0."""

    def __getattr__(self, name: str) -> Any:
        return getattr(ENV, name)

    def step(self, *args: Any) -> Any:
        obs, state, reward, terminated, truncated, info = ENV.step(*args)
        return obs, state, reward, terminated | truncated, info


def cyreal_case() -> Callable[[], None]:
    from cyreal.loader import DataLoader
    from cyreal.rl import set_loader_policy_state
    from cyreal.sources import GymnaxSource as Source

    loader = DataLoader([Source(FiveValues(), PARAMS, policy_step, POLICY, STEPS)])
    start = set_loader_policy_state(loader.init_state(KEY), POLICY)
    epoch = jax.jit(lambda state: loader.scan_epoch(state, jnp.float32(0), use))
    return lambda: jax.block_until_ready(epoch(start)) and None


def main() -> None:
    begun = time.perf_counter()
    print_machine(["jax", "gymnax", "millstream", "cyreal"])
    cases = {MANY: millstream_case(ENVS), ONE: millstream_case(1)}
    try:
        cases[PEER] = cyreal_case()
    except ImportError as error:
        print(f"skipped {PEER}: {error}")
    wall, cpu = interleaved(cases, ROUNDS)
    print_table(f"{STEPS} steps of CartPole in one scan", wall, cpu, scale=1e6 / STEPS, unit="us per step", base=MANY)
    for name, seconds in wall.items():
        transitions = STEPS * (ENVS if name == MANY else 1)
        print(f"  {name}: {transitions / sorted(seconds)[len(seconds) // 2]:,.0f} transitions per second")
    if PEER in wall:
        times = ENVS * ratio(wall, PEER, MANY)
        verdict("times cyreal's transitions per second", times, at_least=20)
        verdict("times cyreal's time for one environment", ratio(wall, ONE, PEER), at_most=1)
    print(f"\nmeasured in {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
