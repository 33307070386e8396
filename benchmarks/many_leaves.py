"""Batches of samples with 100 and 1,000 leaves, beside a plain compiled gather of the same tree.

10,000 samples in memory whose leaves are four floats each, batch 128, shuffled: gathered from arrays by our program,
and read on the host. The plain gather takes ready-made rows of indices and knows neither order nor mask.
"""

import functools

import jax
import numpy as np
from _case import Options, main
from _images import BATCH, consume
from _measure import Entry, Run, measured
from _result import Table

import millstream as ms

SAMPLES = 10_000
GATHERED, READ, PLAIN = "Millstream, gathered in the program", "Millstream, read on the host", "a plain compiled gather"


def tree(leaves: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {f"leaf {number:04}": random.random((SAMPLES, 4), np.float32) for number in range(leaves)}


def iterate(kind: type[ms.ArraySampleSource] | type[ms.HostArraySource], leaves: int, steps: int) -> Run:
    loader = ms.DataLoader([kind(tree(leaves)), ms.BatchTransform(BATCH, drop_last=True)])
    state = loader.init_state(jax.random.key(0))
    return lambda: consume(loader.iterate(state, steps=steps))


def plain(leaves: int, steps: int) -> Run:
    arrays = jax.device_put(tree(leaves))
    rows = np.random.default_rng(1).integers(0, SAMPLES, (steps, BATCH), dtype=np.int32)
    gather = jax.jit(lambda arrays, rows: jax.tree.map(lambda array: array[rows], arrays))
    return lambda: consume(gather(arrays, some) for some in rows)


def measure(options: Options) -> list[Table]:
    tables = []
    for leaves in (100, 1_000):
        steps = options.size(20_000 // leaves, 2)
        entries = [
            Entry(GATHERED, functools.partial(iterate, ms.ArraySampleSource, leaves, steps), "millstream", steps),
            Entry(READ, functools.partial(iterate, ms.HostArraySource, leaves, steps), "millstream", steps),
            Entry(PLAIN, functools.partial(plain, leaves, steps), "", steps),
        ]
        table = measured(f"{leaves:,} leaves", "µs per batch", GATHERED, entries, options.rounds(7))
        for name in (GATHERED, READ):
            text = f"{leaves:,} leaves, {name.split(', ')[1]}: times a plain gather"
            table.hold(text, table.ratio(name, PLAIN), at_most=1.8)
        tables.append(table)
    return tables


if __name__ == "__main__":
    main(measure)
