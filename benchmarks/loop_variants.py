"""What a loop adds to a step when there is more to it: callbacks, donated states, many leaves.

Beside a bare `for` over the same compiled step, with a constant batch and two metrics. Five callbacks are due every
1,000 steps; a step that is a Python function logs every 100 steps; a donated state is one that the step may
overwrite; a state of 200 leaves makes the step itself ten times as slow.
"""

from typing import Any

import jax
from _case import Options, main
from _loops import ROUNDS, STEPS, advance_and_log, bare, ours, step
from _measure import Entry, measured
from _result import Table

import millstream as ms

BARE, BARE_DONATED, BARE_LEAVES = "a bare for", "a bare for, donated", "a bare for, 200 leaves"
FIVE, EVERY_100 = "Millstream, five callbacks", "Millstream, logs every 100 steps"
LEAVES = 200

donated = jax.jit(advance_and_log, donate_argnums=0)


def nothing(state: Any) -> None:
    """A callback that costs its call."""


def log_every_100(state: Any, batch: Any, elapsed: ms.loops.Elapsed) -> Any:
    logs, state = step(state, batch)
    return (logs if elapsed.steps % 100 == 0 else None), state


def measure(options: Options) -> list[Table]:
    steps, fewer = options.size(STEPS, 200), options.size(STEPS // 5, 40)
    rare = [(ms.every(1000), nothing) for _ in range(5)]
    entries = [
        Entry(FIVE, lambda: ours(step, steps, rare), "millstream", steps, BARE),
        Entry(EVERY_100, lambda: ours(log_every_100, steps), "millstream", steps, BARE),
        Entry(BARE, lambda: bare(step, steps), "", steps),
        Entry("Millstream, donated", lambda: ours(donated, steps), "millstream", steps, BARE_DONATED),
        Entry(BARE_DONATED, lambda: bare(donated, steps), "", steps),
        Entry("Millstream, 200 leaves", lambda: ours(step, fewer, leaves=LEAVES), "millstream", fewer, BARE_LEAVES),
        Entry(BARE_LEAVES, lambda: bare(step, fewer, LEAVES), "", fewer),
    ]
    table = measured(f"{steps:,} steps", "µs per step", FIVE, entries, options.rounds(ROUNDS))
    table.hold("five callbacks, µs per step over the bare for", table.added(FIVE), at_most=12)
    return [table]


if __name__ == "__main__":
    main(measure)
