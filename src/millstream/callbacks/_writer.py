"""Writers of logs: observers that remember rows, read them late, and leave the writing to a thread."""

import atexit
import functools
import math
import time
import weakref
from typing import Any, Self

import jax

from millstream.callbacks._background import Background, Sink
from millstream.callbacks._late_rows import LateRows, entry_name
from millstream.loops.callback import Observer
from millstream.loops.loop_state import LoopState, is_inside
from millstream.loops.schedules import Schedule, as_schedule
from millstream.loops.schedules import every as every_so_many
from millstream.text.errors import require_int

_MANY = 256  # rows that are handed to the thread at once
_SECONDS = 1.0  # or after this time


class Writer(Observer):
    """Writes what is logged in the background; made by `csv_logger`, `tensorboard` and the like.

    Written are single numbers; outputs and other arrays are not. An entry is called by its name, or by collection and
    name if the name alone is taken already. A row is written when its step is over, so nothing waits for the device:
    about a second later if the writer is called at every step, else when it is called next, and at the end. What a test
    inside of a loop logs per batch is not written; its results are in the rows of the loop around it. Only the first of
    several processes writes.

    Example:
        >>> with ms.jsonl_logger("losses.jsonl") as writer:
        ...     stopped = writer(ms.Elapsed(steps=1, samples=32), {"loss": 0.5})
        >>> ms.History.from_jsonl("losses.jsonl").collect("loss")
        [0.5]

    Args:
        sink: Where rows go.
        every: Which rows are written: a schedule, or a number of steps; None: all.
    """

    only_real_runs = True
    patience = math.inf
    named_schedules = ("on_train_batch_end", "on_test_batch_end")

    def __init__(self, sink: Sink, every: Any = None) -> None:
        self.__name__ = sink.who
        self._sink = sink
        self._every = None if every is None else _as_every(sink.who, every)
        self._owner: LoopState | None = None  # whose rows are written
        self._unwritten: list[int] = []  # steps whose rows an earlier process did not come to write

    def open(self, step: int = 0) -> Self:
        """Begin by hand. Without it, the first call begins a new run.

        Args:
            step: How far the run is that goes on: `elapsed.steps`. What was written of later steps is cut.
        """
        require_int(self._sink.who, "step", step, least=0)
        self.close()
        self._begin(self._by_hand, step)
        return self

    def start(self, loop_state: LoopState) -> None:
        """A loop begins; one inside of the loop that is written is left alone."""
        if self._owner is not None and not is_inside(loop_state, self._owner):
            self.close()  # what it wrote before was never ended
        if self._owner is None:
            self._begin(loop_state, loop_state.elapsed.steps)

    def _begin(self, loop_state: LoopState, step: int) -> None:
        self._writes = writes_here()
        if self._writes:
            newest = self._sink.open(step)
            names = functools.partial(entry_name, separator=self._sink.separator, reserved=self._sink.reserved)
            self._rows = LateRows(loop_state.history, self._every, names)
            self._rows.add_steps([unwritten for unwritten in self._unwritten if newest < unwritten <= step])
            self._background = Background(self._sink)
            # Rows are written, too, if nobody closes the writer: when it is gone, or at the end of the process, and
            # then before JAX lets go of its devices, which it does in an earlier registered function.
            self._ending = weakref.finalize(self, _end, self._rows, self._background)
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
        if self._background.failure is not None:
            self._background.report()
        rows = self._rows
        rows.add(start, stop, loop_state.elapsed)
        if len(rows) >= _MANY or time.monotonic() - self._handed_at > _SECONDS:
            self._handed_at = time.monotonic()
            ready = rows.take_ready(start, stop, loop_state.elapsed.steps)
            if ready is not None:
                self._background.put(ready)

    def finish(self, loop_state: LoopState) -> None:
        """The loop has ended: write all the rest."""
        if loop_state is self._owner:
            self.close()

    def close(self) -> None:
        """Write all the rest, and end the thread."""
        if self._owner is not None:
            self._owner = None
            if self._writes:
                atexit.unregister(self._ending)
                self._ending()

    def get_state(self) -> dict[str, Any]:
        """The steps whose rows are not written yet; a resumed run writes them, if it has their history."""
        unwritten = [] if self._owner is None or not self._writes else self._background.unwritten() + self._rows.steps()
        return {"unwritten": unwritten}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from what `get_state` gave."""
        self._unwritten = [int(step) for step in state["unwritten"]]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(rows: LateRows, background: Background) -> None:
    """Write all rows, and end the thread whatever comes."""
    try:
        for take in (rows.take_older, rows.take_all):
            taken = take()
            if taken is not None:
                background.put(taken)
    finally:
        background.close()


def writes_here() -> bool:
    """Whether this process is the one that writes."""
    return jax.process_index() == 0


def _as_every(who: str, every: Any) -> Schedule:
    if not isinstance(every, int):
        return as_schedule(who, every)
    require_int(who, "every", every, least=1)
    return every_so_many(every)
