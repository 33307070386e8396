"""What a loop adds to a step that logs nothing.

Beside a bare `for` over the same compiled step, on a tiny state and with a constant batch.
"""

import itertools

import jax
from _case import Options, main
from _loops import BATCH, ROUNDS, STEPS, ciclo, ours, quiet, start
from _measure import Entry, Run, measured
from _result import Table

BARE, OURS, CICLO = "a bare for", "Millstream, loop", "ciclo, loop"


def bare(steps: int) -> Run:
    def run() -> None:
        state = start()
        for batch in itertools.repeat(BATCH, steps):
            state = quiet(state, batch)
        jax.block_until_ready(state)

    return run


def measure(options: Options) -> list[Table]:
    steps = options.size(STEPS, 50)
    entries = [
        Entry(OURS, lambda: ours(quiet, steps), "millstream", steps, BARE),
        Entry(BARE, lambda: bare(steps), "", steps),
        Entry(CICLO, lambda: ciclo(quiet, steps), "ciclo", steps, BARE),
    ]
    table = measured(f"{steps:,} steps without logs", "µs per step", OURS, entries, options.rounds(ROUNDS))
    table.hold("what ours adds, as a share of what ciclo adds", table.share(OURS, CICLO), at_most=0.1)
    return [table]


if __name__ == "__main__":
    main(measure)
