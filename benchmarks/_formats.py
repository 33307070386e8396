"""Shuffled batches of 256 rows of what people have already, beside the best that each format's own library does.

The library reads the same number of random rows and makes the same arrays of them: NumPy's, to compare with the reading
of the source alone, and JAX's, to compare with `iterate`.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from _case import Options
from _measure import Entry, measured
from _result import Table

import millstream as ms

ROWS, GROUP, BATCH = 100_000, 5_000, 256
ROUNDS, BAR = 7, 1.3

Columns = dict[str, np.ndarray]
Read = Callable[[np.ndarray], Columns]


def measurements(options: Options) -> Columns:
    """Eight numbers and a label."""
    rows, random = options.size(ROWS, 2 * GROUP), np.random.default_rng(0)
    columns: Columns = {f"x{number}": random.random(rows, np.float32) for number in range(8)}
    return {**columns, "label": random.integers(0, 10, rows, dtype=np.int32)}


def images(options: Options) -> Columns:
    """784 bytes and a label."""
    rows, random = options.size(ROWS, 2 * GROUP), np.random.default_rng(0)
    pixels = random.integers(0, 256, (rows, 784), dtype=np.uint8)
    return {"image": pixels, "label": random.integers(0, 10, rows, dtype=np.int32)}


def compare(
    title: str,
    source: Any,
    package: str,
    read: Read,
    options: Options,
    steps: int = 100,
    version: Callable[[], str] | None = None,
) -> Table:
    """A source beside a package's own reading of rows. The version is told where no metadata tell it."""
    steps = options.size(steps, 4)
    loader = ms.DataLoader([source, ms.BatchTransform(BATCH, drop_last=True)])
    state = loader.init_state(jax.random.key(0))
    random = np.random.default_rng(1)
    orders = [random.permutation(len(source))[:BATCH] for _ in range(steps)]
    for found, expected in zip(*map(_leaves, (source.read(orders[0]), read(orders[0]))), strict=True):
        np.testing.assert_array_equal(found, expected)

    def iterate() -> None:
        for batch in loader.iterate(state, steps=steps):
            jax.block_until_ready(batch)

    def library_for_jax() -> None:
        for order in orders:
            jax.block_until_ready(jax.device_put(read(order)))

    def reading() -> None:
        for order in orders:
            source.read(order)

    def library() -> None:
        for order in orders:
            read(order)

    ours, our_rows = "Millstream, iterate", "Millstream, NumPy arrays"
    theirs, their_rows = f"{package}, to JAX", f"{package}, NumPy arrays"
    entries = [
        Entry(ours, lambda: iterate, "millstream", steps),
        Entry(theirs, lambda: library_for_jax, package, steps, version=version),
        Entry(our_rows, lambda: reading, "millstream", steps),
        Entry(their_rows, lambda: library, package, steps, version=version),
    ]
    table = measured(title, "µs per batch", ours, entries, options.rounds(ROUNDS))
    table.hold(f"as JAX arrays, times {package}", table.ratio(ours, theirs), at_most=BAR)
    table.hold(f"as NumPy arrays, times {package}", table.ratio(our_rows, their_rows), at_most=BAR)
    return table


def _leaves(columns: Columns) -> list[np.ndarray]:
    return [columns[name] for name in sorted(columns)]
