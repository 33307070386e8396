"""Documents of lognormal lengths in memory, and how others pack them: Grain, and a loop that copies ready rows.

Each function makes a round of so many batches of 32 rows of 2,048 tokens. A round goes on where the last one has ended.
Every leaf of every batch is a JAX array when it counts, and is waited for: tokens, segments and positions. The
functions import their library themselves, so that this module serves any environment; a worker process that reads
documents imports no JAX.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

DOCUMENTS, LENGTH, BATCH = 300_000, 2048, 32
BINS = 32  # rows that Grain has open at a time


class Documents:
    """Documents of 1 to 2,048 tokens, 420 on average, as slices of one array."""

    def __init__(self, count: int) -> None:
        self.lengths = lengths(count)
        self._ends = np.cumsum(self.lengths)
        self._tokens = np.random.default_rng(1).integers(1, 50_000, int(self._ends[-1]), dtype=np.int32)
        self._tokens.flags.writeable = False

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        end = self._ends[index]
        return {"tokens": self._tokens[end - self.lengths[index] : end]}

    def tokens_of(self, indices: np.ndarray) -> Iterator[np.ndarray]:
        """The tokens of some of them."""
        tokens, begins, ends = self.spans_of(indices)
        return (tokens[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True))

    def spans_of(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tokens of all, and where in them some begin and end."""
        ends = self._ends[indices]
        return self._tokens, ends - self.lengths[indices], ends


@functools.cache
def documents_of(count: int) -> Documents:
    """One set of them for all that a process runs: it takes 500 MB."""
    return Documents(count)


def lengths(count: int) -> np.ndarray:
    return np.clip(np.random.default_rng(0).lognormal(5.6, 1.0, count), 1, LENGTH).astype(np.int64)


def _rounds(make: Any, steps: int) -> Any:
    import jax

    stream = itertools.chain.from_iterable(make() for _ in itertools.count())

    def run() -> None:
        for batch in itertools.islice(stream, steps):
            jax.block_until_ready(batch)

    return run


def _to_jax(batch: Any) -> Any:
    import jax

    return jax.tree.map(jax.numpy.asarray, batch)


def bare_copy(documents: int, steps: int) -> Any:
    """Rows that are ready in memory, taken at random: what packing cannot be faster than."""
    count = max(BATCH, int(lengths(documents).sum()) // LENGTH)
    rng = np.random.default_rng(0)
    rows = {name: rng.integers(0, 9, (count, LENGTH), dtype=np.int32) for name in ("tokens", "segments", "positions")}

    def epoch() -> Any:
        order = rng.permutation(count)
        for first in range(0, count - BATCH + 1, BATCH):
            chosen = order[first : first + BATCH]
            yield _to_jax({name: array[chosen] for name, array in rows.items()})

    return _rounds(epoch, steps)


def grain_rows(documents: Any, best: bool) -> Any:
    """Packed rows, as Grain's documents show it."""
    import grain

    kind = grain.experimental.BestFitPackIterDataset if best else grain.experimental.FirstFitPackIterDataset
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # documents are in memory: threads only cost
    source = grain.MapDataset.source(documents).shuffle(seed=0).to_iter_dataset(options)
    return kind(source, length_struct={"tokens": LENGTH}, num_packing_bins=BINS)


def _grain(documents: int, steps: int, best: bool, workers: int = 0) -> Any:
    import grain

    batches = grain_rows(documents_of(documents), best).batch(BATCH, drop_remainder=True)
    if workers:
        from absl import flags

        flags.FLAGS.mark_as_parsed()  # 0.2.18 asks a flag that nobody has parsed in an ordinary script
        batches = batches.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=workers))
    return _rounds(lambda: map(_to_jax, batches), steps)


def grain_first_fit(documents: int, steps: int) -> Any:
    return _grain(documents, steps, best=False)


def grain_best_fit(documents: int, steps: int) -> Any:
    return _grain(documents, steps, best=True)


def grain_first_fit_processes(documents: int, steps: int) -> Any:
    return _grain(documents, steps, best=False, workers=2)


def grain_best_fit_processes(documents: int, steps: int) -> Any:
    return _grain(documents, steps, best=True, workers=2)
