"""What `import millstream` adds to a program that has imported JAX, in a fresh process.

Peers stand beside it, imported after JAX in the same way. `millstream` loads its parts when they are first used, so the
figure that counts is that of its loader and its datasets.
"""

import functools
import importlib.util

from _case import Options, main
from _fresh import fresh
from _measure import Entry, Missing, Run, measured
from _result import Table

LAZY, OURS = "import millstream", "import millstream.loader, millstream.datasets"
PEERS = {
    "torch.utils.data": "torch",
    "grain": "grain",
    "jax_dataloader": "jax-dataloader",
    "cyreal.loader": "cyreal",
    "loadax": "loadax",
    "hydrax": "hydrax",
}
SCRIPT = """
import time, jax, jax.numpy
begun, begun_cpu = time.perf_counter(), time.process_time()
{statement}
print(time.perf_counter() - begun, time.process_time() - begun_cpu)
"""


def imported(statement: str) -> Run:
    package = statement.removeprefix("import ").split(".")[0].split(",")[0]
    if importlib.util.find_spec(package) is None:
        raise Missing(f"{package} is not installed")
    return fresh(SCRIPT.format(statement=statement))


def measure(options: Options) -> list[Table]:
    statements = {LAZY: "millstream", OURS: "millstream"} | {f"import {name}": who for name, who in PEERS.items()}
    entries = [Entry(text, functools.partial(imported, text), who) for text, who in statements.items()]
    table = measured("Importing after JAX", "s", OURS, entries, options.rounds(3))
    for name in (LAZY, OURS):
        table.hold(f"seconds of {name}", table.median(name), at_most=0.15)
    return [table]


if __name__ == "__main__":
    main(measure)
