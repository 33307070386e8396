"""A checkpoint of 10 MB in 3,000 arrays, until all of it is on the disk.

Arrays that nobody has read yet, beside Orbax's own save of the same tree. CPU is that of all threads.
"""

import functools
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
from _case import Options, main
from _measure import Entry, Reading, Run, measured
from _result import Table
from saving import Clock

import millstream as ms

LEAVES, MEGABYTES = 3_000, 10
OURS, ORBAX = "Millstream, checkpoint", "Orbax, PyTreeCheckpointer.save"


@functools.partial(jax.jit, static_argnums=0)
def fresh(leaves: int, number: jax.Array) -> list[jax.Array]:
    return [jnp.full(MEGABYTES * 10**6 // (4 * LEAVES), number + leaf, jnp.float32) for leaf in range(leaves)]


def timed(save: Any, leaves: int) -> Run:
    """A round that saves a new tree, whose making does not count."""
    numbers = iter(range(1, 1_000))

    def run() -> Reading:
        number = next(numbers)
        tree, clock = jax.block_until_ready(fresh(leaves, jnp.float32(number))), Clock()
        clock.start()
        save(number, tree)
        return clock.read()

    return run


def ours(folder: pathlib.Path, leaves: int) -> Run:
    checkpoint, history = ms.checkpoint(folder, keep=1), ms.loops.history()

    def save(number: int, tree: Any) -> None:
        checkpoint(ms.loops.Elapsed(number, number, 0, float(number)), tree, history=history)
        checkpoint.wait()

    return timed(save, leaves)


def orbax(folder: pathlib.Path, leaves: int) -> Run:
    import orbax.checkpoint as ocp

    saver = ocp.PyTreeCheckpointer()
    return timed(lambda number, tree: saver.save(folder, tree, force=True), leaves)


def measure(options: Options) -> list[Table]:
    leaves = options.size(LEAVES, 30)
    with tempfile.TemporaryDirectory() as base:
        folder = pathlib.Path(base)
        entries = [
            Entry(OURS, lambda: ours(folder / "ours", leaves), "millstream"),
            Entry(ORBAX, lambda: orbax(folder / "theirs", leaves), "orbax-checkpoint"),
        ]
        table = measured(f"A save of {leaves:,} arrays", "s per save", OURS, entries, options.rounds(7))
        saved = ms.restore(folder / "ours", fresh(leaves, jnp.float32(0))).state
        assert float(saved[-1][0]) == options.rounds(7) + leaves  # the last round's, after one to warm up
    table.hold("seconds per save", table.median(OURS), at_most=0.4)
    return [table]


if __name__ == "__main__":
    main(measure)
