"""A step on a tiny state with a constant batch, and how loops run it: what a loop costs is nearly all that is left.

Every pass waits for its last state and reads its history. What bars write goes to a terminal that is a string.
"""

import contextlib
import functools
import io
import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from _ciclo import import_ciclo
from _measure import Entry, Run

import millstream as ms

BATCH = {"x": jnp.ones((32, 4))}
STEPS, ROUNDS = 3_000, 7
KERAS_FLOOR = "Keras, its bare train_function"


class Terminal(io.StringIO):
    """A string that bars take for a terminal."""

    def isatty(self) -> bool:
        return True


def start(leaves: int = 0) -> dict[str, Any]:
    return {"x": jnp.zeros(8), "count": jnp.int32(0), "more": [jnp.float32(i) for i in range(leaves)]}


def advance(state: dict[str, Any], batch: Any) -> dict[str, Any]:
    x = state["x"] + jax.tree.leaves(batch)[0].mean()
    return {"x": x, "count": state["count"] + 1, "more": [leaf + 1 for leaf in state["more"]]}


def advance_and_log(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Logs that every loop understands, and the state."""
    state = advance(state, batch)
    return {"metrics": {"loss": state["x"].sum(), "accuracy": state["x"].max()}}, state


quiet, step = jax.jit(advance), jax.jit(advance_and_log)


def bare(step: Any, steps: int, leaves: int = 0) -> Run:
    """A `for` over the step, which gives its logs and the state."""

    def run() -> None:
        state = start(leaves)
        for batch in itertools.repeat(BATCH, steps):
            _, state = step(state, batch)
        jax.block_until_ready(state)

    return run


def ours(step: Any, steps: int, others: Iterable[tuple[Any, Any]] = (), leaves: int = 0, bar: bool = False) -> Run:
    def run() -> None:
        tasks = [(ms.every(1), step), *others, *([(ms.every(1), ms.callbacks.keras_bar())] if bar else [])]
        with contextlib.redirect_stdout(Terminal()):
            state, history, _ = ms.loop(start(leaves), itertools.repeat(BATCH), tasks, stop=steps)
        jax.block_until_ready(state)
        if step is not quiet:
            history.collect("loss", "accuracy")

    return run


def ciclo(step: Any, steps: int, bar: bool = False) -> Run:
    ciclo = import_ciclo()

    def run() -> None:
        with contextlib.redirect_stdout(Terminal()):
            tasks = {ciclo.every(1): [step, *([ciclo.keras_bar(total=steps)] if bar else [])]}
            state, history, _ = ciclo.loop(start(), itertools.repeat(BATCH), tasks, stop=steps)
        jax.block_until_ready(state)
        history.collect("loss", "accuracy")

    return run


def keras_entries(steps: int, verbose: int) -> list[Entry]:
    """Its `fit`, and the compiled function that `fit` calls in a bare `for`."""
    make = functools.cache(lambda: keras_model(advance_and_log, start()))
    fit = f"Keras, fit, verbose {verbose}"
    return [
        Entry(KERAS_FLOOR, lambda: keras_floor(make(), steps), "keras", steps),
        Entry(
            fit, lambda: keras_fit(make(), lambda: itertools.repeat(BATCH), steps, verbose), "keras", steps, KERAS_FLOOR
        ),
    ]


def keras_model(step: Any, state: Any) -> Any:
    """A Keras model whose train step is this one."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    leaves, tree = jax.tree.flatten(state)

    class Model(keras.Model):
        def train_step(self, state: Any, data: Any) -> Any:
            trainable, ours, *others = state
            logs, new = step(jax.tree.unflatten(tree, ours), data[0])
            return logs["metrics"], (trainable, jax.tree.leaves(new), *others)

    model: Any = Model()
    for i, leaf in enumerate(leaves):
        model.add_weight(leaf.shape, "zeros", leaf.dtype, trainable=False, name=f"leaf_{i}")
    model.built = True
    model.compile(optimizer="sgd")
    return model


def keras_floor(model: Any, steps: int) -> Run:
    every = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")

    def run() -> None:
        model.make_train_function()
        state = jax.tree.map(jnp.copy, model._get_jax_state(**dict.fromkeys(every, True)))
        batches = itertools.repeat((BATCH,))
        for _ in range(steps):
            _, state = model.train_function(state, batches)
        jax.block_until_ready(state)

    return run


def keras_fit(model: Any, batches: Callable[[], Iterable[Any]], steps: int, verbose: int) -> Run:
    def run() -> None:
        with contextlib.redirect_stdout(Terminal()):
            model.fit(((batch,) for batch in batches()), steps_per_epoch=steps, verbose=verbose, shuffle=False)
        jax.block_until_ready([weight.value for weight in model.weights])

    return run
