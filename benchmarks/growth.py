"""How costs grow: with samples, leaves, stages, workers, metrics, rows of history, shards, and sources of a mixture.

Each cost is measured at four sizes, in turn. What counts is how many times as much the largest size costs as the one
before it, beside how many times as large it is: nothing may grow faster than that. In the chart, the dotted line does.
"""

import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from _case import Options, main
from _images import BATCH, consume
from _measure import Entry, Run, measured
from _result import Table
from loop_many_metrics import logging_step
from loop_many_metrics import ours as loop_with_metrics
from many_leaves import iterate as iterate_leaves
from saving_long_history import SAVES, saving

import millstream as ms

SAMPLES = 10_000
SLACK = 1.25  # of a figure that is as noisy as these


@dataclasses.dataclass(frozen=True)
class Growth:
    """A cost and what it may grow with.

    Attributes:
        what: What there is more and more of.
        cost: What is measured.
        unit: Of the cost.
        sizes: How many there are, from few to many.
        begin: `begin(size, folder, steps)` gives a round.
        steps: How many steps a round has.
        rounds: How many there are.
    """

    what: str
    cost: str
    unit: str
    sizes: tuple[int, ...]
    begin: Callable[[int, pathlib.Path, int], Run]
    steps: int = 1
    rounds: int = 5


def rows_of(samples: int) -> ms.ArraySampleSource:
    return ms.ArraySampleSource({"x": np.arange(4 * samples, dtype=np.float32).reshape(samples, 4)})


def iterated(stages: list[Any], steps: int, **options: Any) -> Run:
    loader = ms.DataLoader(stages, **options)
    state = loader.init_state(jax.random.key(0))
    return lambda: consume(loader.iterate(state, steps=steps))


def samples(size: int, folder: pathlib.Path, steps: int) -> Run:
    return iterated([rows_of(size), ms.BatchTransform(BATCH)], steps)


def leaves(size: int, folder: pathlib.Path, steps: int) -> Run:
    return iterate_leaves(ms.ArraySampleSource, size, steps)


def with_stages(size: int) -> list[Any]:
    """Stages that no compiler has seen before: each round's functions are new ones."""
    maps = [ms.MapTransform(lambda value, mask, add=add: {"x": value["x"] + add}) for add in range(size)]
    return [rows_of(SAMPLES), ms.BatchTransform(BATCH), *maps]


def stages(size: int, folder: pathlib.Path, steps: int) -> Run:
    return iterated(with_stages(size), steps)


def first_batch(size: int, folder: pathlib.Path, steps: int) -> Run:
    return lambda: iterated(with_stages(size), 1)()


def made(index: int) -> dict[str, np.ndarray]:
    return {"x": np.full(4, index, np.float32)}


def workers(size: int, folder: pathlib.Path, steps: int) -> Run:
    spec = {"x": jax.ShapeDtypeStruct((4,), np.float32)}

    def run() -> None:
        source = ms.DiskSampleSource(SAMPLES, made, sample_spec=spec)
        loader = ms.DataLoader([source, ms.BatchTransform(BATCH)], executor=ms.Processes(size))
        with loader.iterate(loader.init_state(jax.random.key(0))) as batches:
            jax.block_until_ready(next(batches))

    return run


def metrics(size: int, folder: pathlib.Path, steps: int) -> Run:
    return loop_with_metrics(logging_step(size), size, steps)


def history_rows(size: int, folder: pathlib.Path, steps: int) -> Run:
    return saving(size, folder / f"history of {size}")


def shards(size: int, folder: pathlib.Path, steps: int) -> Run:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from millstream.integrations.parquet import ParquetSource

    own = folder / f"{size} shards"
    own.mkdir()
    for number in range(size):
        pq.write_table(pa.table({"x": np.arange(number, number + 100)}), own / f"{number:05}.parquet")
    return lambda: ParquetSource(own)


def sources(size: int, folder: pathlib.Path, steps: int) -> Run:
    parts = {f"source {number}": ms.HostArraySource({"x": np.zeros((1_000, 4), np.float32)}) for number in range(size)}
    return iterated([ms.views.mix(parts, dict.fromkeys(parts, 1.0)), ms.BatchTransform(BATCH)], steps)


GROWTHS = [
    Growth("samples", "a batch in memory", "µs per batch", (10_000, 100_000, 1_000_000, 10_000_000), samples, 500),
    Growth("leaves", "a batch in memory", "µs per batch", (1, 10, 100, 1_000), leaves, 50),
    Growth("stages", "a batch in memory", "µs per batch", (1, 4, 16, 64), stages, 300),
    Growth("stages", "to the first batch", "ms", (1, 4, 16, 64), first_batch, rounds=3),
    Growth("workers", "to the first batch", "ms", (1, 2, 4, 8), workers),
    Growth("metrics", "a step of a loop", "µs per step", (1, 10, 100, 1_000), metrics, 100),
    Growth("rows of history", "a save", "ms per save", (100, 1_000, 10_000, 100_000), history_rows, SAVES, 3),
    Growth("shards", "opening them", "ms", (1, 10, 100, 1_000), shards),
    Growth("sources of a mixture", "a batch", "µs per batch", (2, 8, 32, 128), sources, 200),
]


def grown(growth: Growth, folder: pathlib.Path, options: Options) -> Table:
    steps = growth.steps if growth.steps in (1, SAVES) else options.size(growth.steps, 3)
    sizes = growth.sizes[:2] if options.quick else growth.sizes
    names = {size: f"{size:,}" for size in sizes}
    entries = [
        Entry(name, functools.partial(growth.begin, size, folder, steps), "millstream", steps)
        for size, name in names.items()
    ]
    title = f"{growth.cost[0].upper()}{growth.cost[1:]}, by {growth.what}"
    table = measured(title, growth.unit, names[sizes[0]], entries, options.rounds(growth.rounds))
    before, last = sizes[-2:]
    text = f"times as much, for {last // before} times as many {growth.what}"
    table.hold(text, table.ratio(names[last], names[before]), at_most=SLACK * last / before)
    return table


def measure(options: Options) -> list[Table]:
    with tempfile.TemporaryDirectory() as folder:
        return [grown(growth, pathlib.Path(folder), options) for growth in GROWTHS]


if __name__ == "__main__":
    main(measure)
