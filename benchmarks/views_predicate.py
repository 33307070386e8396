"""A predicate on a million rows of mapped NumPy files, by two worker processes.

From nothing to the table of the rows that are kept. A bare `multiprocessing.Pool` stands beside it, whose two processes
map the same files and call the same function in parts of 10,000 rows.
"""

import functools
import multiprocessing
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from _case import Options, main
from _measure import Entry, Reading, measured
from _result import Table
from _views import ROWS, data

import millstream as ms

OURS, POOL, PART, WORKERS = "Millstream, select", "multiprocessing.Pool", 10_000, 2

_mapped: dict[str, np.ndarray] = {}  # of a process of the pool


def keep(sample: dict[str, Any]) -> bool:
    return bool(sample["label"] > 2 and sample["x"][0] < 0.5)


def load(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("label", "x")}


def begin(folder: pathlib.Path) -> None:
    _mapped.update(load(folder))


def kept(first: int) -> np.ndarray:
    last = min(first + PART, len(_mapped["label"]))
    return np.array([keep({name: array[row] for name, array in _mapped.items()}) for row in range(first, last)])


def by_pool(folder: pathlib.Path) -> np.ndarray:
    rows = len(load(folder)["label"])
    with multiprocessing.get_context("forkserver").Pool(WORKERS, begin, (folder,)) as pool:
        return np.flatnonzero(np.concatenate(pool.map(kept, range(0, rows, PART), chunksize=1)))


def by_select(folder: pathlib.Path) -> np.ndarray:
    source = ms.NpySource({name: folder / f"{name}.npy" for name in ("label", "x")})
    view = ms.views.select(source, keep, executor=ms.Processes(WORKERS))
    return view.locate(np.arange(len(view)))


def timed(run: Callable[[pathlib.Path], np.ndarray], folder: pathlib.Path) -> Reading:
    """Seconds by the clock; the CPU of the workers of a pool is not to be had."""
    begun = time.perf_counter()
    run(folder)
    return Reading(time.perf_counter() - begun)


def measure(options: Options) -> list[Table]:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for field, array in data(options.size(ROWS, 20_000)).items():
            np.save(folder / f"{field}.npy", array)
        if not np.array_equal(by_select(folder), by_pool(folder)):
            raise AssertionError("they keep different rows")
        entries = [
            Entry(OURS, lambda: functools.partial(timed, by_select, folder), "millstream"),
            Entry(POOL, lambda: functools.partial(timed, by_pool, folder)),
        ]
        table = measured("From nothing to the table", "s", OURS, entries, options.rounds(3))
    table.hold("of the speed of a bare pool", table.ratio(POOL, OURS), at_least=0.85)
    return [table]


if __name__ == "__main__":
    main(measure)
