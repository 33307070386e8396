"""Writers of logs: a cursor that follows a history, a thread, and a sink that the thread writes to."""

import atexit
import bisect
import collections
import contextlib
import dataclasses
import functools
import math
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax

from millstream.loops import History
from millstream.loops.callback import Observer
from millstream.loops.column import Column
from millstream.loops.elapsed import Elapsed
from millstream.loops.log_entries import Name
from millstream.loops.loop_state import LoopState, is_nested_in
from millstream.loops.media_log import Kept
from millstream.loops.schedules import as_every
from millstream.reading.contracts import PyTree
from millstream.text.errors import require_int
from millstream.text.summaries import value_text

_MANY = 256  # rows that are handed to the thread at once
_SECONDS = 1.0  # or after this time
_QUEUED = 64  # lists of rows that may wait for the thread
_NUMBERS = (int, float, bool)


class Row(NamedTuple):
    """What a step has logged: single numbers by name, where the run was, and media if they are taken."""

    step: int
    samples: int
    epochs: int | None
    time: float
    date: float
    values: dict[str, float]
    media: Sequence[Kept] = ()


class Sink:
    """Where rows are written to; opened by the loop, and all the rest by the thread.

    Attributes:
        caller: The caller's name, for errors.
        place: The file, folder or run that it writes to; None if it has no name.
        separator: What stands between collection and entry, where an entry's name alone says too little.
        reserved: Names that entries cannot have.
        takes_media: Whether rows come with images and histograms.
        patience: Seconds that the end of a run waits for it. It must not hold up a run, then: rows that come too fast
            are left out, oldest first, and its errors are only warned of. None: nothing is left out, the run waits for
            as long as it takes, and an error ends it.
    """

    caller: str
    place: Any = None
    separator = "/"
    reserved: frozenset[str] = frozenset()
    takes_media = False
    patience: float | None = None

    def begin(self, loop_state: LoopState) -> None:
        """See the run whose rows will be written, before `open`."""

    def watch(self, loop_state: LoopState) -> bool:
        """See the run at a step; returns whether it wants to know which rows have come, by a row without values."""
        return False

    def finish(self, loop_state: LoopState) -> None:
        """See the run at its end, before the last rows are written."""

    def open(self, step: int) -> int:
        """Get ready for rows after a step; returns the step of the newest row that is there already, if it knows."""
        return 0

    def write(self, rows: list[Row]) -> None:
        """Write rows so that they are there if the process is killed."""
        raise NotImplementedError

    def close(self) -> None:
        """No more rows will come."""


@dataclasses.dataclass(frozen=True, eq=False)
class ReadRows:
    """Rows that have been read, still by columns.

    Attributes:
        elapsed: Where the run was at each of them, by row number.
        columns: Name, row numbers and values of each column. There may be values of other rows, too.
        media: The images and histograms of each row that has some.
    """

    elapsed: dict[int, Elapsed]
    columns: list[tuple[str, Sequence[int], list[Any]]]
    media: dict[int, list[Kept]]

    def steps(self) -> list[int]:
        """The step of each."""
        return [elapsed.steps for elapsed in self.elapsed.values()]

    def made(self) -> list[Row]:
        """The rows; those with nothing to write are left out."""
        made = {
            row: Row(e.steps, e.samples, e.epochs, e.time, e.date, {}, self.media.get(row, ()))
            for row, e in self.elapsed.items()
        }
        for name, rows, values in self.columns:
            for row, value in zip(rows, values, strict=False):
                if row in made and type(value) in _NUMBERS:
                    made[row].values[name] = +value  # a bool becomes a number by this
        return [row for row in made.values() if row.values or row.media]


@dataclasses.dataclass(frozen=True, eq=False)
class _Reached:
    """Says that all rows before a step have been handed to the thread, by a row without values."""

    step: int

    def steps(self) -> list[int]:
        return []

    def made(self) -> list[Row]:
        return [Row(self.step, 0, None, 0.0, 0.0, {})]


@dataclasses.dataclass(eq=False)
class _Batch:
    rows: ReadRows | _Reached | None  # None: no more will come
    done: bool = False

    def steps(self) -> list[int]:
        return [] if self.rows is None else self.rows.steps()


class WriterThread:
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
        self._thread = threading.Thread(target=self._work, name=f"millstream {sink.caller}", daemon=True)
        self._thread.start()

    def put(self, rows: ReadRows | _Reached) -> None:
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
            _warn(
                f"{self._sink.caller} could not write some rows; the run continues. {type(failure).__name__}: {failure}"
            )

    def close(self) -> None:
        """Have all the rest written, and end the thread."""
        self._put(_Batch(None))
        patience = self._sink.patience
        self._thread.join(None if patience is None else min(patience, threading.TIMEOUT_MAX))
        self._abandoned = self._thread.is_alive()
        self.report()
        if self._abandoned:
            _warn(
                f"{self._sink.caller} was given {self._sink.patience:g} seconds to write what was left, and did not "
                f"get done: {len(self.unwritten())} rows are missing. A larger timeout= gives it more time."
            )
        if self._dropped or self._failed:
            _warn(
                f"{self._sink.caller} left out {self._dropped + self._failed} rows: {self._dropped} came faster than "
                f"they could be written, {self._failed} were refused. every= writes fewer rows."
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
            error.add_note(f"Raised in the thread of {self._sink.caller}, while it wrote the rows of steps {steps}.")
            self.failure = self.failure or error
            if self._sink.patience is None:
                self._broken = True
            else:
                self._failed += len(rows)
                batch.done = True


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


class RowCursor:
    """Row numbers that are remembered, and read later.

    Args:
        history: Whose rows they are.
        every: Which of them are wanted; None: all.
        name: The name of an entry, from its path and all columns; None if it is not wanted.
        takes_media: Whether images and histograms are wanted, too.
    """

    def __init__(
        self,
        history: History,
        every: Callable[[Elapsed], bool] | None,
        name: Callable[[Name, Mapping[Name, Column]], str | None],
        takes_media: bool = False,
    ) -> None:
        self._history = history
        self._every = every
        self._name = name
        self._names: dict[Name, str | None] = {}
        self._waiting: dict[int, Elapsed | None] = {}  # rows, in order; None: the history knows where it was
        self._next = 0
        self._takes_media = takes_media
        self._next_media = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, start: int, stop: int, elapsed: Elapsed | None = None) -> None:
        """Remember the rows from `start` to before `stop`, but none twice; `elapsed` is that of the last, if known."""
        if stop - start > 1 or start < self._next:
            self._waiting.update(dict.fromkeys(range(max(start, self._next), stop)))
        elif stop > start:
            self._waiting[start] = elapsed
        self._next = max(self._next, stop)

    def add_steps(self, steps: list[int]) -> None:
        """Remember the rows of earlier steps, as far as the history has them."""
        for step in steps:
            row = bisect.bisect_left(range(len(self._history)), step, key=lambda row: self._history.elapsed(row).steps)
            if row < len(self._history) and self._history.elapsed(row).steps == step:
                self.add(row, row + 1)

    def steps(self) -> list[int]:
        """The steps of the remembered rows."""
        return [self._elapsed(row).steps for row in self._waiting]

    def first_step(self) -> int | None:
        """The step of the oldest of them; None if there is none."""
        return next((self._elapsed(row).steps for row in self._waiting), None)

    def _elapsed(self, row: int) -> Elapsed:
        elapsed = self._waiting[row]
        return self._history.elapsed(row) if elapsed is None else elapsed

    def take_ready(self, step: int, together: int = 1) -> ReadRows | None:
        """Those rows that can be read without waiting for a device; for the arguments see `History.ready_rows`."""
        ready = self._history.ready_rows(step, together)
        return self._take([row for row in self._waiting if row < ready], wait=False)

    def take_older(self) -> ReadRows | None:
        """All but those of the newest steps, which have failed if the run has."""
        return self.take_ready(self._history.elapsed().steps) if len(self._history) else None

    def take_all(self) -> ReadRows | None:
        """All of them, the newest as the last of its run."""
        return self._take(list(self._waiting), wait=True)

    def _take(self, rows: list[int], *, wait: bool) -> ReadRows | None:
        if not rows:
            return None
        bound, all_columns, columns = rows[-1] + 1, self._history.columns(), []
        for path, column in all_columns.items():
            first, last = column.position(rows[0]), column.position(bound)
            if first == last:
                continue
            if path not in self._names:
                self._names[path] = self._name(path, all_columns)
            name = self._names[path]
            if name is None:
                continue
            numbers = column.rows[first:last]
            values = column.between(first, last) if wait else column.since(first, settled=bound)
            if len(values) < len(numbers):
                bound = numbers[len(values)]
            columns.append((name, numbers, values))
        taken = {row: self._elapsed(row) for row in rows if row < bound}
        for row in taken:
            del self._waiting[row]
        if self._every is not None:
            newest = len(self._history) - 1 if wait else -1
            taken = {
                row: elapsed
                for row, elapsed in taken.items()
                if self._every(elapsed.replace(final=True) if row == newest else elapsed)
            }
        return ReadRows(taken, columns, self._media_of(taken)) if taken else None

    def _media_of(self, taken: Mapping[int, Elapsed]) -> dict[int, list[Kept]]:
        """The images and histograms of some rows; those of earlier ones are passed over for good."""
        found, log = {}, self._history.media
        if not self._takes_media or log.count == self._next_media:
            return found
        rows = {elapsed.steps: row for row, elapsed in taken.items()}
        newest = max(rows)
        for item in log.since(self._next_media):
            if item.elapsed.steps > newest:
                break
            self._next_media = item.number + 1
            if item.elapsed.steps in rows:
                found.setdefault(rows[item.elapsed.steps], []).append(item)
        return found


def entry_name(
    path: Name, columns: Mapping[Name, Column], *, separator: str = ".", reserved: frozenset[str] = frozenset()
) -> str | None:
    """What a column is called where names have no collections: by its entry alone, unless that is taken.

    It depends only on columns that are no younger, so a name is never taken away again. Outputs have no name, and
    neither has a loss that is logged as a metric, too.

    Args:
        path: Collection and entry.
        columns: All columns.
        separator: Between collection and entry, if both are needed.
        reserved: Names that are taken by something else.
    """
    collection, name = path
    born = columns[path].rows[0]
    rivals = {
        other: column.rows[0]
        for (other, entry), column in columns.items()
        if entry == name and other not in (collection, "outputs") and column.rows[0] <= born
    }
    if collection == "outputs" or (collection == "losses" and "metrics" in rivals):
        return None
    if rivals.get("losses") == born:
        del rivals["losses"]  # the metric has the name; the loss steps back, even if it is another value
    return separator.join(path) if rivals or name in reserved else name


class Writer(Observer):
    """Writes what is logged in the background; made by `csv_logger`, `tensorboard` and the like.

    Written are single numbers, and images and histograms where they can be shown; other arrays are not. An entry is
    called by its name, or by collection and name if the name alone is taken already. A row is written when its step is
    over, so nothing waits for the device: about a second later if the writer is called at every step, else when it is
    called next, and at the end. What a test inside a loop logs per batch is not written; its results are in the rows of
    the loop around it. Only the first of several processes writes.

    Example:
        >>> with ms.callbacks.jsonl_logger("losses.jsonl") as writer:
        ...     stopped = writer(ms.loops.Elapsed(steps=1, samples=32), {"loss": 0.5})
        >>> ms.loops.History.from_jsonl("losses.jsonl").collect("loss")
        [0.5]

    Args:
        sink: Where rows go.
        every: Which rows are written: a schedule, or a number of steps; None: all.
    """

    only_real_runs = True
    patience = math.inf
    named_schedules = ("on_train_batch_end", "on_test_batch_end")

    def __init__(self, sink: Sink, every: Any = None) -> None:
        self.__name__ = sink.caller
        self._sink = sink
        self._every = None if every is None else as_every(sink.caller, "every", every)
        self._owner: LoopState | None = None  # whose rows are written
        self._unwritten: list[int] = []  # steps whose rows an earlier process did not come to write

    def open(self, step: int = 0) -> Self:
        """Begin by hand. Without it, the first call begins a new run.

        Args:
            step: How far the run is that continues: `elapsed.steps`. What was written of later steps is cut.
        """
        require_int(self._sink.caller, "step", step, least=0)
        self.close()
        self._begin(self._by_hand, step)
        return self

    def start(self, loop_state: LoopState) -> None:
        """A loop begins; one inside the loop that is written is left alone."""
        if self._owner is not None and not is_nested_in(loop_state, self._owner):
            self.close()  # what it wrote before was never ended
        if self._owner is None:
            self._begin(loop_state, loop_state.elapsed.steps)

    def _begin(self, loop_state: LoopState, step: int) -> None:
        self._writes = writes_here()
        if self._writes:
            self._sink.begin(loop_state)
            newest = self._sink.open(step)
            names = functools.partial(entry_name, separator=self._sink.separator, reserved=self._sink.reserved)
            self._rows = RowCursor(loop_state.history, self._every, names, self._sink.takes_media)
            self._rows.add_steps([unwritten for unwritten in self._unwritten if newest < unwritten <= step])
            self._thread = WriterThread(self._sink)
            # Rows are written, too, if nobody closes the writer: when it is gone, or at the end of the process, and
            # then before JAX releases its devices, which it does in an earlier registered function.
            self._ending = weakref.finalize(self, _end, self._rows, self._thread)
            self._ending.atexit = False
            atexit.register(self._ending)
            self._handed_at = time.monotonic()
        self._owner, self._unwritten = loop_state, []

    def observe(self, loop_state: LoopState, start: int, stop: int) -> None:
        """Remember the rows from `start` to before `stop`, and now and then hand over those that can be read."""
        if self._owner is not loop_state:
            if self._owner is not None:
                return
            self._begin(loop_state, 0)
        if not self._writes:
            return
        if self._thread.failure is not None:
            self._thread.report()
        rows = self._rows
        rows.add(start, stop, loop_state.elapsed)
        if len(rows) >= _MANY or time.monotonic() - self._handed_at > _SECONDS:
            self._handed_at = time.monotonic()
            ready = rows.take_ready(loop_state.elapsed.steps, stop - start)
            if ready is not None:
                self._thread.put(ready)
        if self._sink.watch(loop_state):
            waiting = rows.first_step()
            self._thread.put(_Reached(loop_state.elapsed.steps + 1 if waiting is None else waiting))

    def finish(self, loop_state: LoopState) -> None:
        """The loop has ended: write all the rest."""
        if loop_state is self._owner:
            if self._writes:
                self._sink.finish(loop_state)
            self.close()

    def close(self) -> None:
        """Write all the rest, and end the thread."""
        if self._owner is not None:
            self._owner = None
            if self._writes:
                atexit.unregister(self._ending)
                self._ending()

    def get_state(self) -> dict[str, PyTree]:
        """The steps whose rows are not written yet; a resumed run writes them, if it has their history."""
        unwritten = [] if self._owner is None or not self._writes else self._thread.unwritten() + self._rows.steps()
        return {"unwritten": unwritten}

    def set_state(self, state: dict[str, PyTree]) -> None:
        """Continue from what `get_state` gave."""
        self._unwritten = [int(step) for step in state["unwritten"]]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{self._sink.caller}({value_text(self._sink.place) if self._sink.place else ''})"


def _end(rows: RowCursor, thread: WriterThread) -> None:
    """Write all rows, and end the thread whatever comes."""
    try:
        for take in (rows.take_older, rows.take_all):
            taken = take()
            if taken is not None:
                thread.put(taken)
    finally:
        thread.close()


def writes_here() -> bool:
    """Whether this process is the one that writes."""
    return jax.process_index() == 0
