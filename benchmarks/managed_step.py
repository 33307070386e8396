"""What a managed step costs beside the same step written by hand.

Eight small layers and Adam, so that a step is what it costs to start it. Short passes, of which some meet with a quiet
moment. CPU is that of the thread that calls the step.
"""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _case import Options, main
from _layers import LAYERS, OPTIMIZER, WIDTH, steps_of
from _measure import Entry, Run, measured
from _result import Table

import millstream as ms


def layers(key: jax.Array) -> list[jax.Array]:
    return [jax.random.normal(one, (WIDTH, WIDTH)) / WIDTH**0.5 for one in jax.random.split(key, LAYERS)]


def loss_of(params: list[jax.Array], batch: Any) -> jax.Array:
    x = batch["x"]
    for weights in params:
        x = jax.nn.tanh(x @ weights)
    return jnp.mean((x - batch["y"]) ** 2)


def step_by_hand(state: Any, batch: Any) -> Any:
    params, opt_state, step = state
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return {"losses": {"loss": loss}}, (optax.apply_updates(params, updates), opt_state, step + 1)


@ms.managed.train_step
def managed_step(state: Any, batch: Any) -> Any:
    return ms.logs().add_loss("loss", loss_of(state.params, batch))


def by_hand(strategy: str, steps: int) -> Run:
    params = layers(jax.random.key(0))
    step = jax.jit(step_by_hand, donate_argnums=(0,) if strategy == "jit_donate" else ())
    return steps_of(step, (params, OPTIMIZER.init(params), jnp.int32(0)), steps)


def managed(strategy: Any, steps: int) -> Run:
    state = ms.managed.ManagedState.create(layers(jax.random.key(0)), OPTIMIZER, strategy=strategy)
    return steps_of(managed_step, state, steps)


def compare(strategy: str, options: Options) -> Table:
    steps, ours, hand = options.size(40, 5), f"Millstream, {strategy}", f"by hand, {strategy}"
    entries = [
        Entry(ours, functools.partial(managed, strategy, steps), "millstream", steps, hand),
        Entry(hand, functools.partial(by_hand, strategy, steps), "", steps),
    ]
    table = measured(strategy, "µs per step", ours, entries, options.rounds(150), cpu_clock=time.thread_time)
    table.hold("µs more than by hand, by the clock", table.added(ours), at_most=10)
    table.hold("µs more than by hand, of CPU", table.added(ours, cpu=True), at_most=10)
    return table


def measure(options: Options) -> list[Table]:
    return [compare(strategy, options) for strategy in ("jit", "jit_donate")]


if __name__ == "__main__":
    main(measure)
