"""What a step costs as the data grow: from 10,000 to 5,000,000 rows in memory, and from 10^6 to 10^12 read on the host.

Rows of 16 bytes, shuffled, batch 128, in a Python loop. Those on the host are made of their indices.
"""

import functools
from collections.abc import Callable

import jax
import numpy as np
from _case import Options, main
from _images import BATCH, consume
from _measure import Entry, Run, measured
from _result import Table

import millstream as ms

FEW, MANY = 10_000, 5_000_000
MILLION, BILLIONS = 10**6, 10**12


class Made:
    """Rows that nobody stores."""

    arrays = None
    ordering = "shuffle"

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def spec(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((4,), np.int32)

    def read(self, indices: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        return np.repeat(indices.astype(np.int32)[:, None], 4, axis=1)


def iterate(samples: int, steps: int) -> Run:
    rows = np.random.default_rng(0).integers(0, 2**31, (samples, 4), dtype=np.int32)
    loader = ms.DataLoader([ms.ArraySampleSource(rows), ms.BatchTransform(BATCH)])
    state = loader.init_state(jax.random.key(0))
    return lambda: consume(loader.iterate(state, steps=steps))


def read(samples: int, steps: int) -> Run:
    loader = ms.DataLoader([Made(samples), ms.BatchTransform(BATCH)])
    state = loader.init_state(jax.random.key(0))
    return lambda: consume(loader.iterate(state, steps=steps))


def measure(options: Options) -> list[Table]:
    steps = options.size(1_000, 20)
    return [
        grown("in memory", iterate, (FEW, MANY), steps, options),
        grown("read on the host", read, (MILLION, BILLIONS), steps, options),
    ]


def grown(name: str, start: Callable[[int, int], Run], sizes: tuple[int, int], steps: int, options: Options) -> Table:
    few, many = names = [f"{samples:,} rows" for samples in sizes]
    entries = [
        Entry(name, functools.partial(start, samples, steps), "millstream", steps)
        for name, samples in zip(names, sizes, strict=True)
    ]
    table = measured(f"{name}, {steps:,} steps", "µs per batch", few, entries, options.rounds(7))
    times = sizes[1] // sizes[0]
    table.hold(f"times the step cost at {times:,} times the rows, {name}", table.ratio(many, few), at_most=1.3)
    return table


if __name__ == "__main__":
    main(measure)
