"""A slow function per sample beside a busy device: both together should take as long as the longer one.

1 ms of waiting per sample with 4 readers and 10 ms of computing per step, batch 32: each alone, together in a Python
loop, and together in one compiled program.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _case import Options, main
from _measure import Entry, measured
from _result import Table

import millstream as ms

TOGETHER, ONE_PROGRAM = "together, in a Python loop", "together, in one program"
READING, COMPUTING = "reading alone", "computing alone"
KEY = jax.random.key(0)


def slow_sample(index: int) -> dict[str, Any]:
    time.sleep(0.001)
    return {"x": np.float32(index)}


@jax.jit
def busy(seed: jax.Array, turns: int) -> jax.Array:
    """Keep one core busy, as a device would be that leaves the host alone."""
    return jax.lax.fori_loop(0, turns, lambda _, x: jnp.sin(x) + 1.0, seed)


def turns_for(seconds: float) -> int:
    """How many turns take this long here and now."""
    turns = 100_000
    jax.block_until_ready(busy(jnp.float32(0), turns))
    begun = time.perf_counter()
    jax.block_until_ready(busy(jnp.float32(0), turns))
    return max(1, int(turns * seconds / (time.perf_counter() - begun)))


def measure(options: Options) -> list[Table]:
    steps = options.size(50, 4)
    source = ms.DiskSampleSource(100_000, slow_sample, prefetch_size=128, readers=4)
    loader = ms.DataLoader([source, ms.BatchTransform(32)])
    state, turns = loader.init_state(KEY), turns_for(0.010)

    @jax.jit
    def many_steps(loader: ms.DataLoader, state: Any, turns: int) -> jax.Array:
        def body(carry: Any, _: None) -> Any:
            state, total = carry
            batch, state = loader.next_batch(state)[:2]
            return (state, total + busy(batch["x"].sum(), turns)), None

        return jax.lax.scan(body, (state, jnp.float32(0)), None, length=steps)[0][1]

    def reading() -> None:
        for batch in loader.iterate(state, steps=steps):
            jax.block_until_ready(batch)

    def computing() -> None:
        for _ in range(steps):
            jax.block_until_ready(busy(jnp.float32(0), turns))

    def together() -> None:
        for batch, _ in loader.iterate(state, steps=steps):
            jax.block_until_ready(busy(batch["x"].sum(), turns))

    def one_program() -> None:
        jax.block_until_ready(many_steps(loader, state, turns))

    runs = {TOGETHER: together, ONE_PROGRAM: one_program, READING: reading, COMPUTING: computing}
    entries = [
        Entry(name, lambda run=run: run, "" if run is computing else "millstream", steps) for name, run in runs.items()
    ]
    table = measured("1 ms per sample, 10 ms per step", "ms per step", TOGETHER, entries, options.rounds(5))
    longer = max((READING, COMPUTING), key=lambda name: table.median(name) or 0.0)
    for name in (TOGETHER, ONE_PROGRAM):
        table.hold(f"{name}, times the longer of the two", table.ratio(name, longer), at_most=1.2)
    return [table]


if __name__ == "__main__":
    main(measure)
