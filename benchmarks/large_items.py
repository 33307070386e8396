"""Batches of 38 MB from 2 worker processes: CPU of the process that trains.

256 items of 150 kB that cost little more than their memory. Starting is left out. What the consumer's own process
spends on a batch is taken from the training. The time by the clock is in the second table.
"""

from _case import Options, main
from _libraries import GRAIN_PROCESSES, PROCESSES, TORCH, Libraries, stream
from _measure import measured
from _result import Table

COPIED = stream("torch, jnp.asarray", "torch_copied")


def measure(options: Options) -> list[Table]:
    with Libraries(options.also) as libraries:
        streams = [PROCESSES, TORCH, COPIED, *GRAIN_PROCESSES[:2]]
        question = {"work": "large", "workers": 2, "how": "steady", "seconds": 0.1 if options.quick else 0.5}
        tables = [
            measured(title, unit, PROCESSES.label, libraries.entries(streams, clock=clock, **question), rounds)
            for title, unit, clock, rounds in (
                ("CPU of the consumer", "ms per batch", "consumer", options.rounds(4)),
                ("By the clock", "ms per batch", "wall", options.rounds(4)),
            )
        ]
    busy = tables[0]
    busy.hold("ms of the consumer's CPU a batch", busy.median(PROCESSES.label), at_most=2)
    for peer in (TORCH, COPIED):
        busy.hold(f"times less of it than {peer.label}", busy.ratio(peer.label, PROCESSES.label), at_least=5)
    return tables


if __name__ == "__main__":
    main(measure)
