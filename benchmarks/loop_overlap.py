"""Whether a loop lets the device and the host work at the same time.

A step of about 5 ms on the device behind 3 ms of preparation on the host. Both together should take as long as the
longer one alone, with the metrics of every step in the history and on a bar.
"""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from _case import Options, main
from _ciclo import import_ciclo
from _loops import BATCH, Terminal, keras_fit, keras_model
from _measure import Entry, Run, measured
from _result import Table

import millstream as ms

DEVICE_MS, HOST_MS = 5, 3
STEP, PREPARATION = "the step alone", "the preparation alone"
OURS, CICLO, KERAS = "Millstream, keras_bar", "ciclo, keras_bar", "Keras, fit, verbose 1"


def slow_start() -> dict[str, Any]:
    return {"x": jnp.full((256, 256), 0.01)}


def slow_step() -> Any:
    """A step of about 5 ms: a chain of products, as long as this machine needs."""

    def chain(state: Any, batch: Any, links: int) -> Any:
        x = jax.lax.fori_loop(0, links, lambda _, x: jnp.tanh(x @ x), state["x"])
        return {"metrics": {"loss": x.mean() + batch["x"].mean(), "accuracy": x.max()}}, {"x": x}

    compiled = jax.jit(chain)
    jax.block_until_ready(compiled(slow_start(), BATCH, 1))
    seconds = []
    for _ in range(10):
        begun = time.perf_counter()
        jax.block_until_ready(compiled(slow_start(), BATCH, 20))
        seconds.append((time.perf_counter() - begun) / 20)
    return functools.partial(chain, links=max(round(DEVICE_MS * 1e-3 / min(seconds)), 1))


def prepared(steps: int) -> Iterator[Any]:
    for _ in range(steps):
        time.sleep(HOST_MS * 1e-3)
        yield BATCH


def bare(step: Any, batches: Callable[[], Iterable[Any]], wait: bool = False) -> Run:
    def run() -> None:
        state = slow_start()
        for batch in batches():
            logs, state = step(state, batch)
            if wait:
                jax.device_get(logs)
        jax.block_until_ready(state)

    return run


def ours(step: Any, steps: int) -> Run:
    def run() -> None:
        with contextlib.redirect_stdout(Terminal()):
            tasks = {ms.every(1): [step, ms.callbacks.keras_bar(total=steps)]}
            jax.block_until_ready(ms.loop(slow_start(), prepared(steps), tasks).state)

    return run


def ciclo(step: Any, steps: int) -> Run:
    ciclo = import_ciclo()

    def run() -> None:
        with contextlib.redirect_stdout(Terminal()):
            tasks = {ciclo.every(1): [step, ciclo.keras_bar(total=steps)]}
            jax.block_until_ready(ciclo.loop(slow_start(), prepared(steps), tasks)[0])

    return run


def measure(options: Options) -> list[Table]:
    steps, plain = options.size(50, 5), slow_step()
    step, batches = jax.jit(plain), functools.partial(prepared, steps)

    def keras() -> Run:
        return keras_fit(keras_model(plain, slow_start()), batches, steps, verbose=1)

    entries = [
        Entry(OURS, lambda: ours(step, steps), "millstream", steps),
        Entry(STEP, lambda: bare(step, lambda: itertools.repeat(BATCH, steps)), "", steps),
        Entry(PREPARATION, lambda: lambda: list(batches()), "", steps),
        Entry("a bare for, never waiting", lambda: bare(step, batches), "", steps),
        Entry("a bare for, reading every step", lambda: bare(step, batches, wait=True), "", steps),
        Entry(CICLO, lambda: ciclo(step, steps), "ciclo", steps),
        Entry(KERAS, keras, "keras", steps),
    ]
    table = measured(f"{steps} steps", "ms per step", OURS, entries, options.rounds(7))
    longer = max((STEP, PREPARATION), key=lambda name: min(table.steps_of(name)))
    table.hold("least of ours, times the least of the longer alone", table.least_ratio(OURS, longer), at_most=1.05)
    return [table]


if __name__ == "__main__":
    main(measure)
