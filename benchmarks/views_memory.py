"""Memory of a view over 100,000,000 samples: what it holds, and what making it takes at most.

The source is a function, which holds nothing. A mask keeps half of the samples, a split has two parts, and weights are
all different.
"""

import functools
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
from _case import Options, main
from _measure import Entry, Reading, measured
from _result import Table

import millstream as ms

SAMPLES = 100_000_000


def nothing(index: int) -> dict[str, np.ndarray]:
    return {"x": np.zeros(4, np.float32)}


# What is given for so many samples, and the view that is made of it.
VIEWS: dict[str, tuple[Callable[[int], Any], Callable[[Any, Any], Any]]] = {
    "select, half of them": (lambda samples: np.arange(samples) % 2 == 0, ms.views.select),
    "split, both parts": (lambda samples: {"train": 0.9, "test": 0.1}, ms.views.split),
    "weighted": (lambda samples: np.arange(1, samples + 1, dtype=np.float32), ms.views.weighted),
}


def traced(given: Callable[[int], Any], view: Callable[[Any, Any], Any], samples: int) -> tuple[float, float]:
    """Megabytes that a view holds, and that making it takes at most."""
    view(ms.DiskSampleSource(1_000, nothing), given(1_000))  # what is imported on the way does not count
    source, argument = ms.DiskSampleSource(samples, nothing), given(samples)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        made = view(source, argument)
        held, most = tracemalloc.get_traced_memory()
        del made
        return (held - before) / 1e6, (most - before) / 1e6
    finally:
        tracemalloc.stop()


def measure(options: Options) -> list[Table]:
    samples = options.size(SAMPLES, 100_000)
    found = {name: traced(*made_of, samples) for name, made_of in VIEWS.items()}
    tables = []
    for number, title in enumerate(("Held", "At most, while it is made")):
        values = {name: both[number] for name, both in found.items()}
        entries = [
            Entry(name, lambda value=value: functools.partial(Reading, value), "millstream")
            for name, value in values.items()
        ]
        tables.append(measured(title, "MB", next(iter(VIEWS)), entries, 1))
    for name in VIEWS:
        megabytes = tables[0].median(name)
        assert megabytes is not None
        tables[0].hold(f"bytes held per sample: {name}", megabytes * 1e6 / samples, at_most=4.01)
    return tables


if __name__ == "__main__":
    main(measure)
