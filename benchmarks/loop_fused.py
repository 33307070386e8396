"""What a loop adds to a step when many steps are one program.

Beside `loader.run_steps` in a bare `for`. A step on a tiny state and two metrics of every step in the history; 1, 10
and 100 steps per program.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from _case import Options, main
from _loops import ROUNDS, STEPS, advance_and_log, start, step
from _measure import Entry, Run, measured
from _result import Table

import millstream as ms

KEY = jax.random.key(0)
OURS = "Millstream, fuse=100"


def log_in_body(state: Any, batch: Any, mask: jax.Array) -> Any:
    logs, state = advance_and_log(state, (batch, mask))
    return state, logs


def bare_fused(loader: Any, width: int, steps: int) -> Run:
    def run() -> None:
        data, state = loader.init_state(KEY), start()
        for _ in range(steps // width):
            data, state, _ = loader.run_steps(data, state, log_in_body, width, width=width)
        jax.block_until_ready(state)

    return run


def fused(loader: Any, width: int, steps: int) -> Run:
    def run() -> None:
        state, history, _ = ms.loop(start(), loader, {ms.every(1): step}, stop=steps, key=KEY, fuse=width)
        jax.block_until_ready(state)
        history.collect("loss", "accuracy")

    return run


def measure(options: Options) -> list[Table]:
    loader = ms.DataLoader([ms.ArraySampleSource({"x": jnp.ones((1024, 4))}), ms.BatchTransform(32)])
    entries = []
    for width, steps in ((100, 10 * STEPS), (10, 2 * STEPS), (1, STEPS)):
        steps = options.size(steps, 2 * width)
        floor = f"run_steps, {width} per call"
        make = functools.partial(fused, loader, width, steps)
        entries += [
            Entry(f"Millstream, fuse={width}", make, "millstream", steps, floor),
            Entry(floor, functools.partial(bare_fused, loader, width, steps), "millstream", steps),
        ]
    table = measured("Several steps per program", "µs per step", OURS, entries, options.rounds(ROUNDS))
    table.hold("fuse=100, µs per step over run_steps", table.added(OURS), at_most=1)
    return [table]


if __name__ == "__main__":
    main(measure)
