"""Documents packed into rows of 2,048 tokens, in batches of 32.

300,000 documents of lognormal lengths in memory, 420 tokens on average, which are slices of one array. Grain gets them
one by one; Millstream's source also says where they lie (`find_spans`), as `TokenFileSource` does. Every batch has
tokens, segments and positions as JAX arrays, and is waited for. Millstream's rows are planned before, which is measured
by itself. Grain packs while
it reads, into 32 open rows; its rows hold about 2 % fewer tokens. The bare loop copies rows that were packed before.
"""

import functools
import itertools
import pathlib
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from _case import Options, main
from _documents import BATCH, DOCUMENTS, LENGTH, Documents, grain_rows, lengths
from _libraries import Libraries, Stream
from _measure import Entry, Reading, Run, measured
from _result import Table

import millstream as ms
from millstream.plan.packing import PackedRows, Packing

MANY = 10_000_000
THREADS, PROCESSES, BARE = "Millstream, 2 threads", "Millstream, 2 processes", "ready rows, copied"
PEERS = [
    Stream("Grain, first-fit", "grain_first_fit", "grain", "grain"),
    Stream("Grain, best-fit", "grain_best_fit", "grain", "grain"),
    Stream("Grain, first-fit, 2 processes", "grain_first_fit_processes", "grain", "grain"),
    Stream("Grain, best-fit, 2 processes", "grain_best_fit_processes", "grain", "grain"),
]


class Tokens(ms.sources.HostSource):
    """Slices of one array, by their ends, as `TokenFileSource` has them, and as a user with such an array writes it."""

    ordering = "shuffle"
    whole_samples = True
    sample_spec = ms.sources.spec_of("Tokens", {"tokens": np.zeros(1, np.int32)})

    def __init__(self, documents: Documents) -> None:
        self._documents, self.lengths = documents, documents.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def read_rows(self, indices: np.ndarray, out: Any, keys: np.ndarray | None = None) -> None:
        for row, tokens in enumerate(self._documents.tokens_of(indices)):
            out[0][row] = {"tokens": tokens}

    def find_spans(self, names: Any, indices: np.ndarray) -> Any:
        yield slice(None), [self._documents.spans_of(indices)]


class Known(ms.sources.HostSource):
    """Documents of which only the lengths are there, and a few tokens to look at."""

    ordering = "shuffle"
    whole_samples = True
    sample_spec = ms.sources.spec_of("Known", {"tokens": np.zeros(1, np.int32)})

    def __init__(self, count: int) -> None:
        self.lengths = lengths(count)

    def __len__(self) -> int:
        return len(self.lengths)

    def read_rows(self, indices: np.ndarray, out: Any, keys: np.ndarray | None = None) -> None:
        for row, index in enumerate(indices.tolist()):
            out[0][row] = {"tokens": np.zeros(self.lengths[index], np.int32)}


def our_rounds(documents: Documents, executor: Any, steps: int) -> Run:
    view = ms.views.pack(Tokens(documents), LENGTH, loss_mask=None)
    loader = ms.DataLoader([view, ms.BatchTransform(BATCH, drop_last=True)], executor=executor)
    stream = (batch for _ in itertools.count() for batch, _ in loader.iterate(loader.init_state(jax.random.key(0))))

    def run() -> None:
        for batch in itertools.islice(stream, steps):
            jax.block_until_ready(batch)

    return run


def reading(options: Options) -> Table:
    count, steps = options.size(DOCUMENTS, 3_000), options.size(240, 3)
    documents = Documents(count)
    with Libraries(options.also) as libraries:
        executors = {THREADS: ms.Threads(2), PROCESSES: ms.Processes(2)}
        entries = [
            Entry(name, functools.partial(our_rounds, documents, executor, steps), "millstream", steps * BATCH)
            for name, executor in executors.items()
        ]
        question = {"how": "pass", "module": "_documents", "arguments": [count, steps]}
        streams = [Stream(BARE, "bare_copy", "", "bare"), *PEERS]
        entries += libraries.entries(streams, per_round=steps * BATCH, **question)
        table = measured("Rows as JAX arrays", "µs per row", THREADS, entries, options.rounds(5))
    best = min((peer.label for peer in PEERS if table.median(peer.label)), key=_median(table), default=PEERS[0].label)
    for ours, least in ((THREADS, 8), (PROCESSES, 15)):
        table.hold(f"{ours}: times as fast as {best}", table.ratio(best, ours), at_least=least)
        table.hold(f"{ours}: share of a loop that copies ready rows", table.ratio(BARE, ours), at_least=0.6)
    our_rows = PackedRows(Packing(LENGTH).table(documents.lengths))
    table.hold("fill of the rows", our_rows.tokens / (len(our_rows) * LENGTH), at_least=0.998)
    table.hold("fill of Grain's, best-fit", _fill_of_grain(documents, options.size(2_000, 50)), at_most=1)
    return table


def _median(table: Table) -> Callable[[str], float]:
    return lambda name: table.median(name) or float("inf")


def _fill_of_grain(documents: Documents, rows: int) -> float | None:
    try:
        found = itertools.islice(iter(grain_rows(documents, best=True)), rows)
        return float(np.mean([np.mean(row["tokens_segment_ids"] > 0) for row in found]))
    except ImportError:
        return None


def planning(options: Options) -> Table:
    few, many = lengths(options.size(DOCUMENTS, 3_000)), lengths(options.size(MANY, 30_000))

    def seconds(given: np.ndarray, rule: Any) -> Reading:
        begun = time.perf_counter()
        Packing(LENGTH, rule).table(given)
        return Reading(time.perf_counter() - begun)

    ways: dict[str, tuple[np.ndarray, Any]] = {
        "best-fit, 300,000 documents": (few, "best-fit"),
        "first-fit, 300,000 documents": (few, "first-fit"),
        "concat, 300,000 documents": (few, "concat"),
        "best-fit, 10,000,000 documents": (many, "best-fit"),
    }
    entries = [
        Entry(name, lambda way=way: functools.partial(seconds, *way), "millstream") for name, way in ways.items()
    ]
    table = measured("Plans", "s", next(iter(ways)), entries, options.rounds(3))
    table.hold("seconds for 10,000,000 documents", table.median("best-fit, 10,000,000 documents"), at_most=20)
    tracemalloc.start()
    found = Packing(LENGTH).table(many)
    most = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    table.hold("MB that making it takes at most, with the lengths", most + many.nbytes / 1e6, at_most=1000)
    table.hold("bytes per document", found.nbytes / len(many), at_most=13.5)
    with tempfile.TemporaryDirectory() as folder:
        source = Known(len(many))
        ms.views.pack(source, LENGTH, plans=pathlib.Path(folder))
        begun = time.perf_counter()
        ms.views.pack(source, LENGTH, plans=pathlib.Path(folder))
        table.hold("milliseconds to open it again", 1e3 * (time.perf_counter() - begun), at_most=20)
    return table


def measure(options: Options) -> list[Table]:
    return [reading(options), planning(options)]


if __name__ == "__main__":
    main(measure)
