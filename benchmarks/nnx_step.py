"""A step of an nnx model: with `create_nnx_state`, by `nnx.jit`, and by hand over flat leaves.

Eight small layers and Adam, so that a step is what it costs to start it.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _case import Options, main
from _layers import BATCH, LAYERS, OPTIMIZER, WIDTH, steps_of
from _measure import Entry, Run, measured
from _result import Table
from flax import nnx

import millstream as ms

OURS, NNX, BY_HAND = "Millstream, create_nnx_state", "nnx.jit", "jax.jit over flat leaves, by hand"


class Model(nnx.Module):
    """A stack of layers."""

    def __init__(self, rngs: Any) -> None:
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = jax.nn.tanh(layer(x))
        return x


def squared(preds: Any, target: Any) -> Any:
    return jnp.mean((preds - target) ** 2, axis=-1)


def by_nnx_jit(steps: int) -> Run:
    @nnx.jit
    def step(pair: Any, batch: Any) -> Any:
        model, optimizer = pair
        loss, gradients = nnx.value_and_grad(lambda model: squared(model(batch["x"]), batch["y"]).mean())(model)
        optimizer.update(model, gradients)
        return loss

    model = Model(nnx.Rngs(0))
    pair = model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    def run() -> None:
        for _ in range(steps):
            step(pair, BATCH)
        jax.block_until_ready(jax.tree.leaves(nnx.state(pair)))

    return run


def by_hand(steps: int) -> Run:
    graph, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)
    leaves, tree = jax.tree.flatten(params)

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        leaves, opt_state = state

        def loss_fn(leaves: Any) -> Any:
            model = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
            return squared(model(batch["x"]), batch["y"]).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(leaves)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, leaves)
        return loss, (optax.apply_updates(leaves, updates), opt_state)

    return steps_of(step, (leaves, OPTIMIZER.init(leaves)), steps)


def by_state(steps: int) -> Run:
    state = ms.create_nnx_state(Model(nnx.Rngs(0)), OPTIMIZER, losses={"loss": squared})
    return steps_of(lambda state, batch: state.train_step(batch), state, steps)


def measure(options: Options) -> list[Table]:
    steps = options.size(40, 5)
    entries = [
        Entry(OURS, lambda: by_state(steps), "millstream", steps),
        Entry(NNX, lambda: by_nnx_jit(steps), "flax", steps),
        Entry(BY_HAND, lambda: by_hand(steps), "", steps),
    ]
    title = f"{LAYERS} nnx layers and Adam"
    table = measured(title, "µs per step", OURS, entries, options.rounds(50), cpu_clock=time.thread_time)
    table.hold("least of ours, times the least by hand", table.least_ratio(OURS, BY_HAND), at_most=2)
    return [table]


if __name__ == "__main__":
    main(measure)
