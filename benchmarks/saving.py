"""How long a save of 50 MB holds up a loop.

60 arrays that nobody has read yet, beside Orbax's own save. A save is timed as a loop feels it: from the end of the
step's own work to the begin of the next step, with nothing else under way. Both write in the background. CPU is that
of all threads in the meantime.
"""

import functools
import gc
import pathlib
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
from _case import Options, main
from _measure import Entry, Reading, measured
from _result import Table

import millstream as ms

LEAVES, MEGABYTES, SAVES = 60, 50, 11
OURS, ORBAX = "Millstream, checkpoint in a loop", "Orbax, AsyncCheckpointer.save"


@functools.partial(jax.jit, static_argnums=0)
def fresh(count: int, number: jax.Array) -> list[Any]:
    """So many states, with arrays that nobody has read yet: a second look at an array costs less than the first."""
    rows = MEGABYTES * 10**6 // (4 * LEAVES)
    return [[jnp.full(rows, number + i + 100 * j, jnp.float32) for i in range(LEAVES)] for j in range(count)]


class Clock:
    """Seconds since it was started."""

    def start(self) -> None:
        self.begun = time.perf_counter(), time.process_time()

    def read(self) -> Reading:
        return Reading(time.perf_counter() - self.begun[0], time.process_time() - self.begun[1])


def save_in_turn(folder: pathlib.Path, saves: int) -> dict[str, list[Reading]]:
    """A save of each per step; the step runs inside of the loop that is measured."""
    import orbax.checkpoint as ocp

    orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    checkpoint = ms.checkpoint(folder / "ours", keep=1)
    found: dict[str, list[Reading]] = {OURS: [], ORBAX: []}
    left = Clock()

    def step(state: Any, batch: int) -> Any:
        if batch > 0:
            found[OURS].append(left.read())
        checkpoint.wait()
        mine, other = jax.block_until_ready(fresh(2, jnp.float32(batch)))
        gc.collect()
        saving = Clock()
        saving.start()
        orbax.save(folder / "theirs", args=ocp.args.PyTreeSave(other), force=True)
        found[ORBAX].append(saving.read())
        orbax.wait_until_finished()
        gc.collect()
        left.start()
        return mine

    ms.loop(None, range(saves + 1), [(ms.every(1), step), (ms.every(1), checkpoint)])
    orbax.close()
    return found


def measure(options: Options) -> list[Table]:
    rounds = options.rounds(SAVES)
    with tempfile.TemporaryDirectory() as folder:
        found = {name: iter(readings) for name, readings in save_in_turn(pathlib.Path(folder), rounds + 1).items()}
    entries = [
        Entry(OURS, lambda: lambda: next(found[OURS]), "millstream"),
        Entry(ORBAX, lambda: lambda: next(found[ORBAX]), "orbax-checkpoint"),
    ]
    table = measured(f"Held up by a save of {MEGABYTES} MB in {LEAVES} arrays", "ms per save", OURS, entries, rounds)
    table.hold("least of ours, times the least of Orbax's own", table.least_ratio(OURS, ORBAX), at_most=1.5)
    return [table]


if __name__ == "__main__":
    main(measure)
