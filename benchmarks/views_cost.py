"""What a view costs a batch: a million rows in memory, batch 256.

The same rows chosen by `select`, `split`, `concat` and `weighted`, beside the plain source: gathered from arrays in a
Python loop and in one compiled program, and read on the host. Rows of 64 bytes and a label, shuffled.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _case import Options, main
from _measure import Entry, Run, measured
from _result import Table
from _views import BATCH, ROWS, chosen, data, weights

import millstream as ms

PLAIN = "the plain source"
VIEWS: dict[str, Callable[[Any, dict[str, np.ndarray]], Any]] = {
    PLAIN: lambda source, arrays: source,
    "a slice": lambda source, arrays: source[len(source) // 10 : 9 * len(source) // 10],
    "select": lambda source, arrays: ms.views.select(source, chosen(arrays)),
    "split, the larger part": lambda source, arrays: ms.views.split(source, {"train": 0.9, "test": 0.1})[0],
    "concat of both parts": lambda source, arrays: ms.views.concat(*ms.views.split(source, {"a": 0.5, "b": 0.5})),
    "weighted": lambda source, arrays: ms.views.weighted(source, weights(arrays)),
    "weighted, of a split": lambda source, arrays: ms.views.balanced(
        ms.views.split(source, {"train": 0.9, "test": 0.1})[0], "label"
    ),
}


def add(total: jax.Array, batch: dict[str, jax.Array], mask: jax.Array) -> tuple[jax.Array, None]:
    return total + jnp.sum(batch["x"] * mask[:, None]), None


def iterate(make: Callable[[], Any], steps: int) -> Run:
    loader = ms.DataLoader([make(), ms.BatchTransform(BATCH, drop_last=True)])
    state = loader.init_state(jax.random.key(0))

    def run() -> None:
        for batch, _ in loader.iterate(state, steps=steps):
            jax.block_until_ready(batch)

    return run


def in_one_program(make: Callable[[], Any], steps: int) -> Run:
    loader = ms.DataLoader([make(), ms.BatchTransform(BATCH, drop_last=True)])
    state, start = loader.init_state(jax.random.key(0)), jnp.float32(0)
    return lambda: jax.block_until_ready(loader.run_steps(state, start, add, steps, width=steps)[1])


def measure(options: Options) -> list[Table]:
    rows, steps = options.size(ROWS, 4_000), options.size(500, 10)
    arrays = data(rows)
    ways = {
        "Gathered from arrays, batch by batch": (ms.ArraySampleSource(arrays), iterate),
        "Gathered from arrays, in one compiled program": (ms.ArraySampleSource(arrays), in_one_program),
        "Read on the host": (ms.HostArraySource(arrays), iterate),
    }
    tables = []
    for title, (source, way) in ways.items():
        entries = [
            Entry(name, functools.partial(way, functools.partial(view, source, arrays), steps), "millstream", steps)
            for name, view in VIEWS.items()
        ]
        table = measured(title, "µs per batch", PLAIN, entries, options.rounds(9))
        for name in VIEWS:
            if name != PLAIN:
                table.hold(f"times the plain source: {name}", table.ratio(name, PLAIN), at_most=1.25)
        tables.append(table)
    return tables


if __name__ == "__main__":
    main(measure)
