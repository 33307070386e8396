"""What one index of a block shuffle costs, and how well it mixes.

Ten million samples in blocks of 1,000, batches of 128: steps of a stream in the middle of an epoch, which are planned
many at once, and a step on its own, anywhere. The full shuffle stands beside them. Mixing is measured on samples that
are sorted by label: the chi-square of the labels in a batch of 64, over that of a full shuffle, by the law 1 + B / K
for K blocks in flight.
"""

from typing import Any

import numpy as np
from _case import Options, main
from _measure import Entry, Run, measured
from _result import Table

from millstream.plan.block_order import StoredBlocks
from millstream.plan.ordering import Shuffle
from millstream.plan.plan import Batching, Plan
from millstream.plan.planned import PlannedSteps

SAMPLES, BLOCK, BATCH = 10_000_000, 1_000, 128
WORDS = np.array([5, 6], np.uint32)
BLOCKS, FULL = "block shuffle", "full shuffle"
STREAM, ALONE = "a step of a stream", "a step on its own"


def shuffled(samples: int, batch: int) -> Plan:
    return Plan(samples, "shuffle").batched(Batching(batch, "pad", samples))


def in_blocks(samples: int, block: int, batch: int, **how: Any) -> Plan:
    stored = StoredBlocks(np.full(samples // block, block), 4096, divisible=False)
    return Plan(samples, Shuffle("blocks", **how)).in_blocks(stored).batched(Batching(batch, "pad", samples))


def stream(plan: Plan, steps: int) -> Run:
    def run() -> None:
        planned = PlannedSteps(plan, WORDS)
        first = plan.steps_per_epoch // 2
        for step in range(first, first + steps):
            planned.request(step, keyed=False)

    return run


def alone(plan: Plan, steps: int) -> Run:
    def run() -> None:
        for step in range(steps):
            positions, rows = plan.at(np, WORDS, 7919 * step % plan.steps_per_epoch)
            plan.indices(np, WORDS, rows[-1].epoch, positions)

    return run


def chi_square(plan: Plan, labels: np.ndarray) -> float:
    """Of the labels of a batch, on average over an epoch."""
    positions, rows = plan.at(np, WORDS, np.arange(len(labels) // plan.axes[0]))
    batches = plan.indices(np, WORDS, rows[-1].epoch, positions)
    expected = plan.axes[0] / (labels.max() + 1)
    counts = np.stack([np.bincount(labels[batch], minlength=labels.max() + 1) for batch in batches])
    return float(np.square(counts - expected).sum(axis=1).mean() / expected)


def measure(options: Options) -> list[Table]:
    plans = {BLOCKS: in_blocks(SAMPLES, BLOCK, BATCH), FULL: shuffled(SAMPLES, BATCH)}
    tables = []
    for title, run, steps in ((STREAM, stream, options.size(1024, 64)), (ALONE, alone, options.size(64, 2))):
        entries = [
            Entry(name, lambda p=plan, r=run, n=steps: r(p, n), "millstream", steps) for name, plan in plans.items()
        ]
        tables.append(measured(title, "µs per step", BLOCKS, entries, options.rounds(9)))
    ratio = tables[0].ratio(BLOCKS, FULL, cpu=True)
    tables[0].hold("CPU of a step of a stream, over that of a full shuffle", ratio, at_most=5.0)
    samples = options.size(200_000, 20_000)
    labels = np.repeat(np.arange(100), samples // 100)
    full = chi_square(shuffled(samples, 64), labels)
    for lanes, window in ((4, 800), (8, 800), (8, 1600)):
        in_flight = lanes * window / 100
        found = chi_square(in_blocks(samples, 100, 64, lanes=lanes, window=window), labels) / full
        text = f"labels of sorted data, {in_flight:.0f} blocks in {lanes} lanes: chi-square over a full shuffle's"
        law = 1 + 64 / in_flight
        tables[1].hold(text, found, at_least=0.8 * law if samples > 100_000 else None, at_most=1.2 * law)
    return tables


if __name__ == "__main__":
    main(measure)
