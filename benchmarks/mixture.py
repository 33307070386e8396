"""Batches of 256 from four sources, by weight, beside the same batches from one.

A million rows of 64 bytes and a label in memory, all in one source or a quarter in each of four: gathered from arrays
in a Python loop and in one compiled program, and read on the host. Then beside what others have, each in a process of
its own: Grain's `MapDataset.mix`, `interleave_datasets` of datasets, and torch's `WeightedRandomSampler` over a
`ConcatDataset`. Every leaf of every batch is a JAX array when it counts, and is waited for.

At last, the plan of a billion samples from eight sources with a ramp: what making it takes, what it holds, and what a
batch anywhere in it takes when nothing of it was planned before.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from _case import Options, main
from _libraries import Libraries, Stream
from _measure import Entry, Reading, measured
from _result import Table
from _views import BATCH, MIXED, ROWS, data, quarters
from views_beside_peers import millstream_rounds
from views_cost import in_one_program, iterate

import millstream as ms

ONE, FOUR, OURS = "one source", "four sources", "Millstream, mix"
POSITIONS = 1_000_000_000
PEERS = [
    Stream("Grain, mix", "grain_mixed", "grain", "grain"),
    Stream("Grain, mix, rows of a batch at once", "grain_mixed_gathered", "grain", "grain"),
    Stream("datasets, interleave_datasets", "datasets_mixed", "datasets", "datasets"),
    Stream("torch, WeightedRandomSampler", "torch_mixed", "torch", "torch"),
    Stream("torch, WeightedRandomSampler of batches", "torch_mixed_by_batch", "torch", "torch"),
]


def mixture(kind: Callable[[Any], Any], rows: int) -> Any:
    sources = {f"source {number}": kind(part) for number, part in enumerate(quarters(data(rows)))}
    return ms.views.mix(sources, dict(zip(sources, MIXED, strict=True)))


def nothing(index: int) -> dict[str, np.ndarray]:
    return {"x": np.zeros(4, np.float32)}


def long_mixture(positions: int) -> Any:
    sources = {str(number): ms.DiskSampleSource(positions // 10, nothing) for number in range(8)}
    weights = {name: ms.views.ramp(1.0, 1.0 + number, samples=positions) for number, name in enumerate(sources)}
    return ms.views.mix(sources, weights, samples=positions)


def timed(run: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def long_table(positions: int, rounds: int) -> Table:
    view, chance = long_mixture(positions), np.random.default_rng(0)
    (quotas, _), words = view.selection.tables[0], np.array([3, 5], np.uint32)
    loader = ms.DataLoader([view, ms.BatchTransform(BATCH)])
    plan = loader.pipeline.plan

    def seek() -> Reading:
        steps = chance.integers(0, positions // BATCH, 20).tolist()

        def run() -> None:
            for step in steps:
                found, levels = plan.at(np, words, np.array([step]))
                plan.indices(np, words, levels[-1].epoch, found)

        return Reading(timed(run) / len(steps))

    entries = [
        Entry("making it", lambda: lambda: Reading(timed(functools.partial(long_mixture, positions))), "millstream"),
        Entry("planning a batch anywhere", lambda: seek, "millstream"),
    ]
    table = measured("A billion samples from eight sources, with a ramp", "ms", "making it", entries, rounds)
    table.hold("ms to make it", table.median("making it"), at_most=1000)
    table.hold("ms to plan a batch anywhere", table.median("planning a batch anywhere"), at_most=1)
    table.hold("MB held", quotas.nbytes / 1e6, at_most=5)
    return table


def measure(options: Options) -> list[Table]:
    rows, steps, tables = options.size(ROWS, 6_000), options.size(500, 10), []
    ways = {
        "Gathered from arrays, batch by batch": (ms.ArraySampleSource, iterate, 1.3),
        "Gathered from arrays, in one compiled program": (ms.ArraySampleSource, in_one_program, 1.3),
        "Read on the host": (ms.HostArraySource, iterate, 1.25),
    }
    for title, (kind, way, bar) in ways.items():
        makes = {ONE: functools.partial(kind, data(rows)), FOUR: functools.partial(mixture, kind, rows)}
        entries = [
            Entry(name, functools.partial(way, make, steps), "millstream", steps) for name, make in makes.items()
        ]
        table = measured(title, "µs per batch", ONE, entries, options.rounds(9))
        table.hold("times one source", table.ratio(FOUR, ONE), at_most=bar)
        tables.append(table)
    with Libraries(options.also) as libraries:
        count = options.size(40, 4)
        view = functools.partial(mixture, ms.ArraySampleSource, rows)
        entries = [Entry(OURS, functools.partial(millstream_rounds, view, count), "millstream", count)]
        question = {"how": "pass", "module": "_views", "arguments": [rows, count]}
        entries += libraries.entries(PEERS, per_round=count, **question)
        table = measured("Beside others", "µs per batch", OURS, entries, options.rounds(5))
    for peer in PEERS:
        table.hold(f"times as fast as {peer.label}", table.ratio(peer.label, OURS), at_least=5)
    return [*tables, table, long_table(options.size(POSITIONS, 100_000), options.rounds(5))]


if __name__ == "__main__":
    main(measure)
