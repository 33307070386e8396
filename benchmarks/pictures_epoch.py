"""An epoch of 1,500 pictures, its 2 worker processes started and ended.

JPEG files of 500x375, resized to 224x224 by Pillow, batch 30. The clock starts with nothing but the imports.
"""

from _case import Options, main
from _libraries import GRAIN_PROCESSES, PROCESSES, TORCH, TORCH_FORK, Libraries
from _measure import measured
from _result import Table
from _work import make_pictures


def measure(options: Options) -> list[Table]:
    with Libraries(options.also) as libraries:
        make_pictures(libraries.folder)
        streams = [PROCESSES, TORCH, TORCH_FORK, *GRAIN_PROCESSES[:2]]
        steps = options.size(50, 2)
        question = {"work": "pictures", "workers": 2, "how": "fresh", "steps": steps}
        entries = libraries.entries(streams, warm_up={"steps": 2}, **question)
        table = measured(f"Start, {steps} batches and end", "s", PROCESSES.label, entries, options.rounds(2))
    table.hold("times as fast as torch", table.ratio(TORCH.label, PROCESSES.label), at_least=1.5)
    forked = table.ratio(TORCH_FORK.label, PROCESSES.label)
    table.hold("times as fast as torch forked, which JAX warns of", forked, at_least=1.0)
    return [table]


if __name__ == "__main__":
    main(measure)
