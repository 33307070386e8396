"""The first batch of 4 worker processes, from nothing.

Small items, batch 128. The clock starts with nothing but the imports, and stops at the first batch. "Again" is a later
stream of the same program: Millstream's workers are forked from a clean process that stays until the program ends.
"""

import dataclasses

from _case import Options, main
from _libraries import GRAIN_PROCESSES, HYDRAX, PROCESSES, TORCH, TORCH_FORK, Libraries
from _measure import measured
from _result import Table

GRAIN = GRAIN_PROCESSES[0]
AGAIN = dataclasses.replace(PROCESSES, label="Millstream, processes, again")


def measure(options: Options) -> list[Table]:
    with Libraries(options.also) as libraries:
        streams = [PROCESSES, *GRAIN_PROCESSES[:2], HYDRAX, TORCH, TORCH_FORK]
        entries = libraries.entries(streams, work="small", workers=4, how="fresh", steps=1)
        entries += libraries.entries([AGAIN], work="small", workers=4, how="fresh", steps=1, again=True)
        table = measured("The first batch from 4 processes", "s", PROCESSES.label, entries, options.rounds(3))
    seconds = table.steps_of(PROCESSES.label)
    table.hold("seconds, at worst", max(seconds), at_most=2)
    table.hold("times as soon as Grain", table.ratio(GRAIN.label, PROCESSES.label), at_least=3)
    forked = table.ratio(TORCH_FORK.label, PROCESSES.label)
    table.hold("times as soon as torch forked, which JAX warns of", forked, at_least=0.35)
    table.hold("seconds, again", table.median(AGAIN.label), at_most=0.05)
    return [table]


if __name__ == "__main__":
    main(measure)
