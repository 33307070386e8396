"""Pictures decoded by 2 threads.

JPEG files of 500x375, resized to 224x224 by Pillow, batch 30. Starting is left out. The bare pool is a
`ThreadPoolExecutor` without a loader.
"""

from _case import Options, main
from _libraries import GRAIN_THREADS, THREADS, Libraries, stream
from _measure import measured
from _result import Table
from _work import make_pictures

BARE = stream("a bare thread pool", "bare_threads")


def measure(options: Options) -> list[Table]:
    with Libraries(options.also) as libraries:
        make_pictures(libraries.folder)
        streams = [THREADS, BARE, *GRAIN_THREADS, stream("loadax, threads", "loadax_threads")]
        seconds = 0.1 if options.quick else 0.6
        entries = libraries.entries(streams, work="pictures", workers=2, how="steady", seconds=seconds)
        table = measured("2 threads, steady", "ms per batch", THREADS.label, entries, options.rounds(5))
    speed = table.ratio(BARE.label, THREADS.label)
    table.hold("speed, as a share of a bare thread pool's", speed, at_least=0.9)
    return [table]


if __name__ == "__main__":
    main(measure)
