"""Trying ways to read: the same loader with other options, for short turns."""

import contextlib
import dataclasses
import math
import os
import pathlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import numpy as np

from millstream.loader.iterator import BatchIterator
from millstream.reading.in_graph import InGraph
from millstream.reading.processes import Processes
from millstream.reading.threads import Threads

if TYPE_CHECKING:
    from millstream.loader.loader import DataLoader

Executor = InGraph | Threads | Processes | None
Step = Callable[[Any, Any], Any]

SKIPPING = 'A loader with on_error="skip item" goes on without samples that cannot be read.'
_ROUNDS = 3  # of a turn: one alone says little


@dataclasses.dataclass(frozen=True)
class TriedOptions:
    """What came of trying a loader with other options.

    Example:
        >>> tried = loader.tune(seconds=0.5, progress=False).tried[0]
        >>> tried.executor, tried.samples_per_second > 0
        (InGraph(), True)

    Attributes:
        executor: Who reads.
        prefetch: How many batches ahead.
        samples_per_second: Samples that came through the loop; None if it was not tried.
        idle: The share of the loop's time, from 0 to 1, in which it waited for a batch; None without a step.
        cores: How many cores were busy, workers included; None if that is not known.
        note: Why it was not tried, or what else there is to say.
    """

    executor: Executor
    prefetch: int
    samples_per_second: float | None = None
    idle: float | None = None
    cores: float | None = None
    note: str = ""


class Cursor:
    """Where in the run the next turn begins: nobody is handed what another has just brought into the caches.

    Args:
        words: The run's key.
        limit: Steps that can be counted.
    """

    def __init__(self, words: np.ndarray, limit: int) -> None:
        self.words = words
        self.step = 0
        self._limit = limit

    def take(self, steps: int) -> int:
        """The first of so many steps, which are then taken."""
        first = 0 if self.step + steps > self._limit else self.step
        self.step = first + steps
        return first


class _Turn(NamedTuple):
    rate: float
    idle: float
    cores: float | None


class Trial:
    """A loader with some options, kept ready for several turns.

    Args:
        loader: Whose pipeline it is; nothing happens to it.
        executor: Who reads.
        prefetch: How many batches ahead.
        cursor: Where turns begin.
        step: What is done with each batch, if that is known.
    """

    def __init__(
        self, loader: "DataLoader", executor: Executor, prefetch: int, cursor: Cursor, step: Step | None
    ) -> None:
        self.executor = executor
        self.prefetch = prefetch
        # What is in a cache says nothing about reading, and trying things out is no reason to write into it.
        self._loader = loader.replace(executor=executor, prefetch=prefetch, cache=None)
        self._cursor = cursor
        self._step = step
        self._turns: list[_Turn] = []
        self.begun = False  # whether there was a batch
        # Batches that are read side by side end at about the same time, so that only rounds of them can be compared.
        self._round = batches_side_by_side(self._loader)

    def __enter__(self) -> Self:
        self._loader.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._loader.__exit__()

    def turn(self, seconds: float) -> None:
        """Draw batches for about so many seconds; a few rounds of them, if that takes no more than twice as long."""
        rate = (self._best if self._turns else self._drawn(1, seconds)).rate  # the first starts workers, and compiles
        per_round = self._round * math.prod(self._loader._source.plan.axes)
        self._turns.append(self._drawn(max(_ROUNDS, round(seconds * rate / per_round)), seconds))

    def _drawn(self, rounds: int, seconds: float) -> _Turn:
        """So many rounds of batches, from the first reading to the last; fewer if they take twice the time."""
        steps = rounds * self._round
        state = self._loader.init_state(self._cursor.words, step=self._cursor.take(steps))
        cpu, samples, waited = self._cpu_seconds(), 0, 0.0
        batches = self._loader.iterate(state, steps=steps)  # nothing behind them is read, to disturb the next turn
        try:
            begun = time.perf_counter()
            for number in range(steps):
                seconds_waited, drawn = self._draw(batches)
                waited, samples = waited + seconds_waited, samples + drawn
                if number == 0 and self._step is not None and steps > 1:
                    begun, waited, samples = time.perf_counter(), 0.0, 0  # in a long loop one wait more is nothing
                if time.perf_counter() - begun > 2 * seconds and (number + 1) % self._round == 0:
                    break
            elapsed = max(time.perf_counter() - begun, 1e-9)
        finally:
            batches.close()
        worked = self._cpu_seconds()
        cores = None if cpu is None or worked is None else (worked - cpu) / elapsed
        return _Turn(samples / elapsed, waited / elapsed, cores)

    def _draw(self, batches: BatchIterator) -> tuple[float, int]:
        """A batch, and the step with it: the seconds that were waited for the batch, and the samples in it."""
        begun = time.perf_counter()
        try:
            drawn = jax.block_until_ready(next(batches, None))
        except Exception as error:
            error.add_note(SKIPPING)
            raise
        waited = time.perf_counter() - begun
        if drawn is None:  # the last ones were left out, because of samples that raise
            return waited, 0
        self.begun = True
        samples = batches.samples  # before the step, which may take the mask for its own
        if self._step is not None:
            jax.block_until_ready(self._step(*drawn))
        return waited, samples

    def _cpu_seconds(self) -> float | None:
        """What this process and its workers have worked so far; None if nobody can tell."""
        workers = getattr(self._loader._backend, "processes", [])
        with contextlib.suppress(OSError):
            return time.process_time() + sum(map(_worked, workers))
        return None

    @property
    def _best(self) -> _Turn:
        return max(self._turns, key=lambda turn: turn.rate)

    @property
    def rate(self) -> float:
        """Samples per second in its best turn: what else the machine does can only make it slower."""
        return self._best.rate

    def result(self, note: str = "") -> TriedOptions:
        """What has come of it."""
        rate, idle, cores = self._best
        return TriedOptions(self.executor, self.prefetch, rate, None if self._step is None else idle, cores, note)


def batches_side_by_side(loader: "DataLoader") -> int:
    """How many batches are read at the same time; 1 where threads share the rows of a batch."""
    host = loader._host
    if host is None:
        return 1
    whole = isinstance(host.executor, Processes) or host.source.whole_batches or host.source.reads_together
    return getattr(host.executor, "workers", host.source.readers) if whole else 1


def _worked(pid: int) -> float:
    """The seconds that a process has worked, as Linux counts them."""
    # The name of the program stands in brackets and may hold anything, blanks too.
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
