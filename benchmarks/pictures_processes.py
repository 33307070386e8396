"""Pictures decoded by 2 worker processes.

JPEG files of 500x375, resized to 224x224 by Pillow, batch 30. Starting is left out. The bare pool is a
`ProcessPoolExecutor` without a loader: how much two processes are worth on this machine.
"""

from _case import Options, main
from _libraries import GRAIN_PROCESSES, PROCESSES, TORCH, Libraries, stream
from _measure import measured
from _result import Table
from _work import make_pictures


def measure(options: Options) -> list[Table]:
    with Libraries(options.also) as libraries:
        make_pictures(libraries.folder)
        streams = [PROCESSES, TORCH, *GRAIN_PROCESSES, stream("a bare process pool", "bare_processes")]
        seconds = 0.1 if options.quick else 0.6
        entries = libraries.entries(streams, work="pictures", workers=2, how="steady", seconds=seconds)
        table = measured("2 processes, steady", "ms per batch", PROCESSES.label, entries, options.rounds(5))
    table.hold("times as fast as torch", table.ratio(TORCH.label, PROCESSES.label), at_least=1.0)
    return [table]


if __name__ == "__main__":
    main(measure)
