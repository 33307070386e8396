"""What a loop adds to a step, two metrics of every step kept.

Beside a bare `for` over the same compiled step, on a tiny state and with a constant batch. The history is read at the
end. Keras stands beside its own compiled function in a bare `for`.
"""

import itertools

import jax
from _case import Options, main
from _loops import BATCH, ROUNDS, STEPS, bare, ciclo, keras_entries, ours, start, step
from _measure import Entry, Run, measured
from _result import Table

BARE, BY_HAND, OURS, CICLO = "a bare for", "metrics kept by hand", "Millstream, loop", "ciclo, loop"


def by_hand(steps: int) -> Run:
    """What one writes to have the same history."""

    def run() -> None:
        state, kept = start(), []
        for batch in itertools.repeat(BATCH, steps):
            logs, state = step(state, batch)
            kept.append(logs)
        jax.device_get(kept)

    return run


def measure(options: Options) -> list[Table]:
    steps = options.size(STEPS, 50)
    keras = keras_entries(steps, verbose=0)
    entries = [
        Entry(OURS, lambda: ours(step, steps), "millstream", steps, BARE),
        Entry(BARE, lambda: bare(step, steps), "", steps),
        Entry(BY_HAND, lambda: by_hand(steps), "", steps, BARE),
        Entry(CICLO, lambda: ciclo(step, steps), "ciclo", steps, BARE),
        *keras,
    ]
    table = measured(f"{steps:,} steps, two metrics kept", "µs per step", OURS, entries, options.rounds(ROUNDS))
    table.hold("µs per step over the bare for", table.added(OURS), at_most=10)
    for peer in (CICLO, keras[-1].name):
        table.hold(f"what ours adds, as a share of {peer}", table.share(OURS, peer), at_most=0.1)
    return [table]


if __name__ == "__main__":
    main(measure)
