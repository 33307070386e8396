"""What a save costs a run with a long history, beside one with a short history.

Both log a hundred more rows of three metrics and save, again and again, until all is on the disk. The state is four
bytes, so the history is what a save is about. CPU is that of all threads.
"""

import itertools
import pathlib
import tempfile
import time

import numpy as np
from _case import Options, main
from _measure import Entry, Reading, Run, measured
from _result import Table

import millstream as ms

NEW, SHORT_ROWS = 100, 1_000
SAVES = 16


def saving(rows: int, folder: pathlib.Path) -> Run:
    history, steps = ms.loops.history(), itertools.count(1)
    checkpoint = ms.checkpoint(folder)

    def log(count: int) -> ms.loops.Elapsed:
        elapsed = ms.loops.Elapsed()
        for step in itertools.islice(steps, count):
            elapsed = ms.loops.Elapsed(step, 8 * step, 0, float(step), samples_before=8 * step - 8)
            history.commit(elapsed, {"loss": 1 / step, "accuracy": 0.5, "norm": 2.0})
        return elapsed

    def save(elapsed: ms.loops.Elapsed) -> None:
        checkpoint(elapsed, np.int32(elapsed.steps), history=history)
        checkpoint.wait()

    save(log(rows))
    save(log(NEW))  # the first two write everything

    def run() -> Reading:
        seconds = cpu = 0.0
        for _ in range(SAVES):
            elapsed, begun = log(NEW), (time.perf_counter(), time.process_time())
            save(elapsed)
            seconds, cpu = seconds + time.perf_counter() - begun[0], cpu + time.process_time() - begun[1]
        return Reading(seconds, cpu)

    return run


def measure(options: Options) -> list[Table]:
    rows = options.size(1_000_000, 10_000)
    short, long = (f"Millstream, {count:,} rows of history" for count in (SHORT_ROWS, rows))
    with tempfile.TemporaryDirectory() as base:
        folder = pathlib.Path(base)
        entries = [
            Entry(long, lambda: saving(rows, folder / "long"), "millstream", SAVES),
            Entry(short, lambda: saving(SHORT_ROWS, folder / "short"), "millstream", SAVES),
        ]
        table = measured(f"A save of {NEW} new rows", "ms per save", long, entries, options.rounds(15))
    table.hold("times as long as with a short history", table.ratio(long, short), at_most=1.3)
    return [table]


if __name__ == "__main__":
    main(measure)
