"""A thread that writes rows, so that a loop waits neither for a disk nor for a server."""

import collections
import contextlib
import dataclasses
import queue
import threading
import warnings
from typing import NamedTuple, Protocol

_QUEUED = 64  # lists of rows that may wait for the thread


class Row(NamedTuple):
    """What a step has logged: single numbers by name, and where the run was."""

    step: int
    samples: int
    epochs: int | None
    time: float
    date: float
    values: dict[str, float]


class Sink:
    """Where rows are written to; opened by the loop, and all the rest by the thread.

    Attributes:
        who: Who speaks in errors.
        separator: What stands between collection and entry, where an entry's name alone says too little.
        reserved: Names that entries cannot have.
        patience: Seconds that the end of a run waits for it. It must not hold up a run, then: rows that come too fast
            are left out, oldest first, and its errors are only warned of. None: nothing is left out, the run waits for
            as long as it takes, and an error ends it.
    """

    who: str
    separator = "/"
    reserved: frozenset[str] = frozenset()
    patience: float | None = None

    def open(self, step: int) -> int:
        """Get ready for rows behind a step; returns the step of the newest row that is there already, if it knows."""
        return 0

    def write(self, rows: list[Row]) -> None:
        """Write rows so that they are there if the process is killed."""
        raise NotImplementedError

    def close(self) -> None:
        """No more rows will come."""


class Rows(Protocol):
    """Rows whose numbers have been read, and that the thread puts together."""

    def steps(self) -> list[int]:
        """The step of each."""
        ...

    def made(self) -> list[Row]:
        """The rows; those without a single number are left out."""
        ...


@dataclasses.dataclass(eq=False)
class _Batch:
    rows: Rows | None  # None: no more will come
    done: bool = False

    def steps(self) -> list[int]:
        return [] if self.rows is None else self.rows.steps()


class Background:
    """A thread that hands rows to a sink, in order, from the construction of this object to `close`.

    Args:
        sink: It must be open.
    """

    def __init__(self, sink: Sink) -> None:
        self.failure: BaseException | None = None  # what went wrong and has not been reported yet
        self._sink = sink
        self._queue: queue.Queue[_Batch] = queue.Queue(_QUEUED)
        self._handed: collections.deque[_Batch] = collections.deque()
        self._broken = self._abandoned = self._warned = False
        self._dropped = self._failed = 0  # rows; the one is counted by the loop, the other by the thread
        self._thread = threading.Thread(target=self._work, name=f"millstream {sink.who}", daemon=True)
        self._thread.start()

    def put(self, rows: Rows) -> None:
        """Have rows written."""
        while self._handed and self._handed[0].done:
            self._handed.popleft()
        batch = _Batch(rows)
        self._handed.append(batch)
        self._put(batch)

    def _put(self, batch: _Batch) -> None:
        while self._sink.patience is not None and self._queue.full():
            with contextlib.suppress(queue.Empty):
                oldest = self._queue.get_nowait()
                oldest.done = True
                self._dropped += len(oldest.steps())
        self._queue.put(batch)

    def unwritten(self) -> list[int]:
        """The steps whose rows were put here and are not written yet."""
        return [step for batch in self._handed if not batch.done for step in batch.steps()]

    def report(self) -> None:
        """Raise what went wrong; or warn of it, if it must not end a run."""
        failure, self.failure = self.failure, None
        if failure is None:
            return
        if self._sink.patience is None:
            raise failure
        if not self._warned:
            self._warned = True
            _warn(f"{self._sink.who} could not write some rows; the run goes on. {type(failure).__name__}: {failure}")

    def close(self) -> None:
        """Have all the rest written, and end the thread."""
        self._put(_Batch(None))
        patience = self._sink.patience
        self._thread.join(None if patience is None else min(patience, threading.TIMEOUT_MAX))
        self._abandoned = self._thread.is_alive()
        self.report()
        if self._abandoned:
            _warn(
                f"{self._sink.who} was given {self._sink.patience:g} seconds to write what was left, and did not get "
                f"done: {len(self.unwritten())} rows are missing. A larger timeout= gives it more time."
            )
        if self._dropped or self._failed:
            _warn(
                f"{self._sink.who} left out {self._dropped + self._failed} rows: {self._dropped} came faster than they "
                f"could be written, {self._failed} were refused. every= writes fewer rows."
            )

    def _work(self) -> None:
        while (batch := self._queue.get()).rows is not None and not self._abandoned:
            # After an error nothing is written any more, but rows are still taken: a loop may be waiting for room.
            if not self._broken:
                self._write(batch, batch.rows.made())
        try:
            self._sink.close()
        except BaseException as error:
            self.failure = self.failure or (None if self._broken else error)

    def _write(self, batch: _Batch, rows: list[Row]) -> None:
        try:
            if rows:
                self._sink.write(rows)
            batch.done = True
        except BaseException as error:
            steps = f"{rows[0].step} to {rows[-1].step}"
            error.add_note(f"Raised in the thread of {self._sink.who}, while it wrote the rows of steps {steps}.")
            self.failure = self.failure or error
            if self._sink.patience is None:
                self._broken = True
            else:
                self._failed += len(rows)
                batch.done = True


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)
