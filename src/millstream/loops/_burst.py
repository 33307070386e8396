"""Steps one after the other with nothing between them: what is to be done about each is put off until some are done.

Between two dispatches a call of Python costs a microsecond, because the dispatch has emptied the caches; done for many
steps together, the same bookkeeping costs a tenth. So where a compiled step is all that is due, only what cannot wait
is done at once: drawing, the clock, the step, keeping no more than two in flight, and interrupts.
"""

import time
from collections.abc import Callable
from typing import Any

from millstream.loops._calls import apply_output
from millstream.loops._clock import StepSpan
from millstream.loops._dataset import Batches, LoaderBatches, batch_size
from millstream.loops._dispatch_limiter import DispatchLimiter, array_of
from millstream.loops._history import History
from millstream.loops._tasks import Task
from millstream.loops.callback import arguments, is_compiled
from millstream.loops.log_entries import Logs, Name, as_logs
from millstream.loops.loop_state import LoopState
from millstream.loops.metrics import with_computed
from millstream.reading.contracts import PyTree
from millstream.reading.interrupts import Interrupts, Terminated

_MOST_STEPS = 64  # as many values as a column reads at once
_MOST_SECONDS = 0.02  # nobody sees that a bar is so late
_SMALL = 1 << 14  # bytes of a batch
_CHANGEABLE = (dict, list)
_LOGS = (dict, Logs)
_NOWHERE = object()  # a key that nothing has


class StepBurst:
    """Draws batches, calls a compiled step with each, and keeps what must be known of them.

    Args:
        interrupts: What may end it after any step.
        in_flight: Keeps the host from running far ahead.
        checks: Called after every step: has something in the background failed?
        patience: Seconds after which it ends.

    Attributes:
        times: When each step began.
        drawn: Batches of these steps, the last of which may not have been used.
        samples: Samples of each step that has begun.
        logs: What each complete step has logged; None for nothing.
        has_ended: Whether the data have ended.
        waited: Seconds spent drawing.
        rewound: The data state before a batch that came in the moment of an interrupt, if one did.
    """

    def __init__(
        self, interrupts: Interrupts, in_flight: DispatchLimiter, checks: list[Callable[[], None]], patience: float
    ) -> None:
        self._interrupts = interrupts
        self._in_flight = in_flight
        self._checks = checks
        self._patience = min(patience, _MOST_SECONDS)
        self.times: list[float] = []
        self.drawn = 0
        self.samples: list[int] = []
        self.logs: list[Any] = []
        self.has_ended = False
        self.waited = 0.0
        self.rewound: PyTree = None

    def run(self, loop_state: LoopState, batches: Batches | LoaderBatches, task: Task | None, most: float) -> None:
        """Some steps. What is kept of them is right whatever is raised, and wherever.

        Args:
            loop_state: Whose state the steps change.
            batches: Where batches come from.
            task: Whose callback is the step; see `only_step`. None: draw the batch of one step, and leave it at that.
            most: At most that many steps.
        """
        times: list[float] = []
        kept: list[Any] = []
        sizes: list[Any] = []
        self.times, self.logs = times, kept
        interrupts, checks, perf_counter = self._interrupts, self._checks, time.perf_counter
        step: Any = None if task is None else task.callback
        draw, size_of, where, may_break = batches.draw, batches.size_of, batches.where, batches.may_break
        state, batch, older = loop_state.state, loop_state.batch, self._in_flight.older
        array: Any = array_of(loop_state.logs, state)
        form, has_logs, path = None, False, ()
        if task is not None:
            loop_state.state = None  # a state that is held twice is in memory twice
        counts_later = task is not None and size_of is batch_size and _is_small(batch)
        drawn, waited, until = 0, 0.0, perf_counter() + self._patience
        try:
            for _ in range(int(min(most, _MOST_STEPS)) if task is not None else 1):
                asked, before = perf_counter(), None if where is None else where()
                interrupts.waiting = may_break
                try:
                    if interrupts.terminated:
                        raise Terminated
                    batch = draw()
                except StopIteration:
                    self.has_ended = True
                    break
                except (Terminated, KeyboardInterrupt):
                    self.rewound = before  # the batch may be here already, and will not be used
                    raise
                finally:
                    interrupts.waiting = False
                drawn += 1
                now = perf_counter()
                waited += now - asked
                times.append(now)
                if counts_later:  # of a copy, if whoever made the batch can put other arrays into it
                    sizes.append(batch.copy() if type(batch) in _CHANGEABLE else batch)
                else:
                    sizes.append(size_of(batch))
                if array is not None:
                    if older is not None and (has_logs or not older.is_deleted()) and not older.is_ready():
                        older.block_until_ready()
                    older = array
                if task is None:
                    return
                output: Any = step(state, batch)
                if type(output) is not form:  # asked for once, since a compiled step says the same things every time
                    form = type(output)
                    has_logs, path = _form_of(output, state)
                try:
                    logs, new = output if has_logs else (None, output)
                    array = logs if has_logs else new
                    for name in path:
                        array = array[name]
                    state = state if new is None else new
                except (LookupError, TypeError, ValueError):
                    form, (logs, state) = None, self._apply_output(loop_state, state, output, task.name)
                    array = array_of(logs, state)
                kept.append(logs)
                for check in checks:
                    check()
                if interrupts.asked or now > until:
                    break
        finally:
            if task is not None:
                loop_state.state = state
            loop_state.batch, self._in_flight.older = batch, older
            self.drawn, self.waited = drawn, waited
            self.samples = [*map(size_of, sizes)] if counts_later else sizes

    def _apply_output(self, loop_state: LoopState, state: Any, output: Any, name: str) -> tuple[Logs, Any]:
        """Logs and state after a step that returned something else than most."""
        loop_state.state, loop_state.logs = state, Logs()
        if output is not None:
            apply_output(loop_state, output, name)
        return loop_state.logs, loop_state.state


def _is_small(batch: PyTree) -> bool:
    """Whether a batch is flat and small: many may then be held at once, to count their samples together later."""
    arrays = [*batch.values()] if type(batch) is dict else batch if type(batch) in (tuple, list) else [batch]
    return sum(getattr(array, "nbytes", _SMALL + 1) for array in arrays) <= _SMALL


def _form_of(output: Any, state: Any) -> tuple[bool, tuple[Any, ...]]:
    """Whether a step returned (logs, state), or else a state; and the way to some array in the first of them."""
    has_logs = type(output) is tuple and len(output) == 2 and type(output[0]) in _LOGS and type(state) is not tuple
    if not has_logs and (type(output) is not type(state) or type(output) in (tuple, Logs)):
        return False, (_NOWHERE,)
    found, path = output[0] if has_logs else output, []
    while isinstance(found, dict) and found:
        path.append(next(iter(found)))
        found = found[path[-1]]
    return has_logs, tuple(path) if hasattr(found, "is_ready") else (_NOWHERE,)


def only_step(tasks: list[Task]) -> Task | None:
    """The compiled step of (state, batch) that is all there is to do at most steps; None if there is more.

    Functions that are not compiled may look at anything, at the history of this run for one, so it has to be there.
    """
    always = [task for task in tasks if task.schedule is None]
    if len(always) != 1 or not is_compiled(always[0].callback):
        return None
    return always[0] if arguments(always[0].name, always[0].callback) == 2 else None


def commit_rows(history: History, passed: StepSpan, rows: list[Any]) -> int:
    """Keep what several steps have logged, None for nothing; how many rows that are."""
    if not any(rows):  # or an elapsed would be made of each step for nothing, 0.8 us each
        return 0
    columns = _columns(rows)
    if columns is not None:
        history.commit_columns(passed, columns)
        return len(rows)
    before = len(history)
    for elapsed, logs in zip(passed.moments(), rows, strict=True):
        if logs:
            history.commit(elapsed, with_computed(as_logs("The step", logs)))
    return len(history) - before


def _columns(rows: list[Any]) -> dict[Name, list[Any]] | None:
    """The values of each entry together, if all rows have the same entries, and all of them numbers or arrays."""
    if not all(rows):
        return None
    shown = as_logs("The step", rows[0])
    if with_computed(shown) is not shown:
        return None
    columns = {}
    try:
        for collection in shown:
            entries = [row[collection] for row in rows] if isinstance(rows[0].get(collection), dict) else rows
            if len({*map(len, entries)}) > 1:
                return None
            for name in shown[collection]:
                columns[collection, name] = [entry[name] for entry in entries]
    except (KeyError, TypeError):
        return None
    return columns if len({*map(len, rows)}) == 1 else None
