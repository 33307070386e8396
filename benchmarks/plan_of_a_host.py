"""What the plan costs one host of 1,024: ten billion samples in batches of 65,536.

One host's part of every batch: indices, mask and the keys of its samples, as the reading asks for it. A step on its own
stands beside a step of a stream, which plans in blocks.
"""

import time
import tracemalloc
from collections.abc import Iterator

import numpy as np
from _case import Options, main
from _measure import Entry, measured
from _result import Table

from millstream.plan.plan import Batching, Plan
from millstream.plan.planned import PlannedSteps

HOSTS, SAMPLES, GLOBAL_BATCH = 1024, 10**10, 65_536
ALONE, STREAM = "a step on its own", "a step of a stream"


def planning(ordering: str, ending: str, options: Options) -> Table:
    plan = Plan(SAMPLES, ordering, (Batching(GLOBAL_BATCH, ending, SAMPLES),))  # pyright: ignore
    share = GLOBAL_BATCH // HOSTS
    rows, words = tuple(range(517 * share, 518 * share)), np.array([5, 6], np.uint32)
    chosen = np.array(rows, np.uint64)
    single, streamed = options.size(40, 2), 256

    def one_by_one() -> None:
        for step in range(single):
            plan.at(np, words, step, chosen)

    def in_blocks() -> None:
        run = PlannedSteps(plan, words, (rows,))
        for step in range(streamed):
            run.request(step, keyed=True)

    entries = [
        Entry(STREAM, lambda: in_blocks, "millstream", streamed),
        Entry(ALONE, lambda: one_by_one, "millstream", single),
    ]
    table = measured(f"{ordering}, {ending}", "ms per step", STREAM, entries, options.rounds(9))
    table.hold("a step on its own, ms", table.median(ALONE), at_most=1.0)
    table.hold("a step of a stream, with the keys of its samples, ms", table.median(STREAM), at_most=1.0)
    begun = time.perf_counter()
    PlannedSteps(plan, words, (rows,)).request(0, keyed=True)
    first = time.perf_counter() - begun
    table.hold("the first step of a stream, which plans 64, ms", first * 1e3, at_most=64.0)
    tracemalloc.start()
    in_blocks()
    table.hold("memory at its peak, MB", tracemalloc.get_traced_memory()[1] / 1e6, at_most=1.0)
    tracemalloc.stop()
    return table


def _ways() -> Iterator[tuple[str, str]]:
    for ordering in ("sequential", "shuffle"):
        for ending in ("pad", "wrap"):
            yield ordering, ending


def measure(options: Options) -> list[Table]:
    return [planning(*way, options) for way in _ways()]


if __name__ == "__main__":
    main(measure)
