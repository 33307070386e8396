"""Reading rows before they are asked for: the plan says what comes next."""

import math
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone

import numpy as np

from millstream._core.host_source import HostSource
from millstream._core.memory import aligned_empty
from millstream._core.plan import Plan
from millstream._core.readers import Readers

STALL_SECONDS = 120.0  # how long a batch may take before it is an error
_SLOW_SECONDS = 0.0003  # a batch that is read faster than this is read at once: handing it to a thread takes longer
_PLANNED_STEPS = 64  # planning many steps at once costs NumPy little more than planning one
_RUNS = 16  # runs whose read-ahead is kept, for several runs that step in turn


class ReadAhead:
    """The rows of any step of any run, and the reading of the steps behind it.

    Asking for steps in order is fast. Any other step is read when it is asked for: what is read ahead never changes
    what is returned.

    Args:
        source: What to read.
        plan: The plan whose steps are asked for.
        stop: The first step that will not be asked for, if that is known; nothing behind it is read.
    """

    def __init__(self, source: HostSource, plan: Plan, stop: int | None = None) -> None:
        self._source = source
        self._plan = plan
        self._stop = plan.step_limit if stop is None else stop
        self._readers = Readers(source.readers)
        self._lock = threading.Lock()
        self._slow = False
        self._runs: dict[bytes, _Run] = {}
        self._ahead = -(-source.prefetch_size // math.prod(batching.size for batching in plan.batchings))

    def rows(self, words: np.ndarray, step: int) -> list[np.ndarray]:
        """One array per leaf, with the axes of the plan in front; rows that pad are zeros."""
        with self._lock:
            run = self._run(words)
            end = min(step + self._ahead + 1, self._stop)
            if self._slow:
                self._start(run, range(step, end))
            batch = run.pending.pop(step, None)
            if batch is None:
                batch = _Batch(self._source, *run.planned(step))
        rows = batch.rows()
        with self._lock:
            was_slow, self._slow = self._slow, batch.seconds > _SLOW_SECONDS
            if self._slow and not was_slow:
                self._start(run, range(step + 1, end))
        return rows

    def _start(self, run: "_Run", steps: range) -> None:
        """Have these steps read by the threads, and forget about all others."""
        run.pending = {number: batch for number, batch in run.pending.items() if number in steps}
        for number in steps:
            if number not in run.pending:
                run.pending[number] = _Batch(self._source, *run.planned(number))
                run.pending[number].start(self._readers)

    def _run(self, words: np.ndarray) -> "_Run":
        name = words.tobytes()
        run = self._runs.pop(name, None)
        if run is None:
            run = _Run(self._plan, words)
        self._runs[name] = run  # the run used last comes last
        if len(self._runs) > _RUNS:
            del self._runs[next(iter(self._runs))]
        return run

    def close(self) -> None:
        """End the reading threads."""
        self._readers.close()


class _Run:
    """One key's steps: planned in blocks, and the batches that are being read."""

    def __init__(self, plan: Plan, words: np.ndarray) -> None:
        self.pending: dict[int, _Batch] = {}
        self._plan = plan
        self._words = words.copy()
        self._first = 0
        self._indices = self._mask = np.empty(0)

    def planned(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= step - self._first < len(self._indices):
            self._first = step
            indices, rows = self._plan.at(np, self._words, step + np.arange(_PLANNED_STEPS, dtype=np.uint64))
            self._indices, self._mask = indices, rows[-1].mask
        return self._indices[step - self._first], self._mask[step - self._first]


class _Batch:
    """The arrays of one batch, and the reading that fills them."""

    def __init__(self, source: HostSource, indices: np.ndarray, mask: np.ndarray) -> None:
        self._source = source
        self._out = [
            aligned_empty((*mask.shape, *shape), dtype)
            for shape, dtype in zip(source.sample_spec.shapes, source.sample_spec.dtypes, strict=True)
        ]
        self._rows = [leaf.reshape(mask.size, *leaf.shape[mask.ndim :]) for leaf in self._out]
        self._indices = indices.reshape(-1)
        self._real = mask.reshape(-1)
        self._parts: list[tuple[int, Future[None]]] = []
        self.seconds = 0.0  # spent reading

    def start(self, readers: Readers) -> None:
        """Have it filled by readers, several of them at different rows."""
        size, count = len(self._indices), self._source.readers
        # Small parts keep all readers busy to the end; a source that reads whole batches has one reader and one part.
        part = size if count == 1 else max(1, size // (4 * count))
        for first in range(0, size, part):
            self._parts.append((first, readers.submit(self._read_part, first, first + part)))

    def rows(self) -> list[np.ndarray]:
        """The arrays, when the readers have filled them; filled here and now if none was asked to."""
        if not self._parts:
            self._read_part(0, len(self._indices))
        deadline = time.monotonic() + STALL_SECONDS
        for first, future in self._parts:
            try:
                future.result(max(0.0, deadline - time.monotonic()))
            except NotDone:
                if future.done():
                    raise  # the source's own TimeoutError
                raise TimeoutError(
                    f"{type(self._source).__name__} has been reading for {STALL_SECONDS:.0f} s without an end, at or "
                    f"behind sample {int(self._indices[first])}. Is a disk or a server not answering?"
                ) from None
        return self._out

    def _read_part(self, first: int, end: int) -> None:
        begun = time.perf_counter()
        self._fill(first, end)
        self.seconds += time.perf_counter() - begun

    def _fill(self, first: int, end: int) -> None:
        indices, real, rows = self._indices[first:end], self._real[first:end], [leaf[first:end] for leaf in self._rows]
        if real.all():
            return self._source.read_rows(indices, rows)
        chosen = [np.empty((int(real.sum()), *leaf.shape[1:]), leaf.dtype) for leaf in rows]
        if real.any():
            self._source.read_rows(indices[real], chosen)
        for leaf, read in zip(rows, chosen, strict=True):
            leaf[real], leaf[~real] = read, None if leaf.dtype.hasobject else 0
