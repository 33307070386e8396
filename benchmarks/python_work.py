"""Python that holds the interpreter's lock, in 2 worker processes beside one thread.

About 1 ms of Python per sample, batch 30. Starting is left out. The bare loop has no loader and no worker.
"""

from _case import Options, main
from _libraries import GRAIN_PROCESSES, PROCESSES, TORCH, Libraries, stream
from _measure import measured
from _result import Table

LOOP = stream("a bare loop, one thread", "bare_loop")


def measure(options: Options) -> list[Table]:
    with Libraries(options.also) as libraries:
        streams = [PROCESSES, LOOP, stream("a bare process pool", "bare_processes"), TORCH, *GRAIN_PROCESSES[:2]]
        seconds = 0.1 if options.quick else 0.6
        entries = libraries.entries(streams, work="python", workers=2, how="steady", seconds=seconds)
        table = measured("2 processes, steady", "ms per batch", PROCESSES.label, entries, options.rounds(5))
    table.hold("times as fast as one thread", table.ratio(LOOP.label, PROCESSES.label), at_least=1.7)
    return [table]


if __name__ == "__main__":
    main(measure)
