"""Small items from 2 worker processes.

28x28 bytes, batch 128: a loader's own work is nearly all there is. Starting is left out. hydrax has a function that
writes a sample where it belongs; `FillSource` takes the same.
"""

from _case import Options, main
from _libraries import GRAIN_PROCESSES, HYDRAX, PROCESSES, TORCH, Libraries, stream
from _measure import measured
from _result import Table


def measure(options: Options) -> list[Table]:
    with Libraries(options.also) as libraries:
        streams = [PROCESSES, stream("Millstream, FillSource", "millstream_fill"), HYDRAX, TORCH, *GRAIN_PROCESSES]
        seconds = 0.1 if options.quick else 0.5
        entries = libraries.entries(streams, work="small", workers=2, how="steady", seconds=seconds)
        table = measured("2 processes, steady", "ms per batch", PROCESSES.label, entries, options.rounds(4))
    table.hold("times as fast as hydrax", table.ratio(HYDRAX.label, PROCESSES.label), at_least=20)
    return [table]


if __name__ == "__main__":
    main(measure)
