"""What a loop adds to a step, two metrics kept and on a progress bar.

Beside a bare `for` over the same compiled step, on a tiny state and with a constant batch. The bar is that of Keras,
or one like it, on a terminal that is a string.
"""

from _case import Options, main
from _loops import ROUNDS, STEPS, bare, ciclo, keras_entries, ours, step
from _measure import Entry, measured
from _result import Table

BARE, OURS, CICLO = "a bare for", "Millstream, keras_bar", "ciclo, keras_bar"


def measure(options: Options) -> list[Table]:
    steps = options.size(STEPS, 50)
    keras = keras_entries(steps, verbose=1)
    entries = [
        Entry(OURS, lambda: ours(step, steps, bar=True), "millstream", steps, BARE),
        Entry(BARE, lambda: bare(step, steps), "", steps),
        Entry(CICLO, lambda: ciclo(step, steps, bar=True), "ciclo", steps, BARE),
        *keras,
    ]
    table = measured(f"{steps:,} steps with a bar", "µs per step", OURS, entries, options.rounds(ROUNDS))
    table.hold("µs per step over the bare for", table.added(OURS), at_most=15)
    for peer in (CICLO, keras[-1].name):
        table.hold(f"what ours adds, as a share of {peer}", table.share(OURS, peer), at_most=0.1)
    return [table]


if __name__ == "__main__":
    main(measure)
