"""What a checkpoint that is not due costs the steps between two saves.

The same loop with and without a checkpoint under `every(10**9)`, from the first batch to the last: neither opening nor
the final save counts. CPU is that of the thread that calls the steps.
"""

import itertools
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from _case import Options, main
from _measure import Entry, Reading, Run, measured
from _result import Table

import millstream as ms

NEVER = 10**9
PLAIN, OURS = "Millstream, loop", "Millstream, loop with a checkpoint"


@jax.jit
def step(state: Any, batch: Any) -> Any:
    return {"metrics": {"loss": state.sum(), "accuracy": state.max()}}, state + batch


def timed(steps: int, readings: list[Reading]) -> Iterator[Any]:
    """Batches that know how long a loop took from the first to the last."""
    begun = time.perf_counter(), time.thread_time()
    yield from itertools.repeat(jnp.ones(8), steps)
    readings.append(Reading(time.perf_counter() - begun[0], time.thread_time() - begun[1]))


def looping(steps: int, folder: pathlib.Path | None) -> Run:
    numbers = itertools.count()

    def run() -> Reading:
        tasks: list[Any] = [(ms.every(1), step)]
        if folder is not None:
            tasks.append((ms.every(NEVER), ms.checkpoint(folder / f"{next(numbers)}")))
        readings: list[Reading] = []
        ms.loop(jnp.zeros(8), timed(steps, readings), tasks)
        return readings[0]

    return run


def measure(options: Options) -> list[Table]:
    steps = options.size(500, 50)
    with tempfile.TemporaryDirectory() as folder:
        entries = [
            Entry(OURS, lambda: looping(steps, pathlib.Path(folder)), "millstream", steps, PLAIN),
            Entry(PLAIN, lambda: looping(steps, None), "millstream", steps),
        ]
        table = measured(f"{steps} steps", "µs per step", OURS, entries, options.rounds(40))
    table.hold("µs more per step, by the clock", table.added(OURS), at_most=1)
    table.hold("µs more per step, of CPU", table.added(OURS, cpu=True), at_most=1)
    return [table]


if __name__ == "__main__":
    main(measure)
