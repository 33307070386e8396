"""What a step costs as the data grow, from 10,000 to 5,000,000 rows.

Rows of 16 bytes in memory, shuffled, batch 128, in a Python loop.
"""

import functools

import jax
import numpy as np
from _case import Options, main
from _images import BATCH, consume
from _measure import Entry, Run, measured
from _result import Table

import millstream as ms

FEW, MANY = 10_000, 5_000_000


def iterate(samples: int, steps: int) -> Run:
    rows = np.random.default_rng(0).integers(0, 2**31, (samples, 4), dtype=np.int32)
    loader = ms.DataLoader([ms.ArraySampleSource(rows), ms.BatchTransform(BATCH)])
    state = loader.init_state(jax.random.key(0))
    return lambda: consume(loader.iterate(state, steps=steps))


def measure(options: Options) -> list[Table]:
    steps = options.size(1_000, 20)
    few, many = names = [f"{samples:,} rows" for samples in (FEW, MANY)]
    entries = [
        Entry(name, functools.partial(iterate, samples, steps), "millstream", steps)
        for name, samples in zip(names, (FEW, MANY), strict=True)
    ]
    table = measured(f"{steps:,} steps", "µs per batch", few, entries, options.rounds(7))
    table.hold("times the step cost at 500 times the rows", table.ratio(many, few), at_most=1.3)
    return [table]


if __name__ == "__main__":
    main(measure)
