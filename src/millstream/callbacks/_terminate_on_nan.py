"""Ending a run whose numbers are no longer numbers."""

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from millstream.callbacks._monitor import require_logged
from millstream.loops import History
from millstream.loops.callback import Observer
from millstream.loops.log_entries import Name, find_entry, require_name
from millstream.loops.loop_state import LoopState
from millstream.text.errors import describe_value, require_choice

_CALLER = "terminate_on_nan"
_COLLECTIONS = ("losses", "metrics", "stateful_metrics")
_ROWS_BETWEEN_LOOKS = 64


class _Found(NamedTuple):
    row: int
    path: Name
    value: Any


class terminate_on_nan(Observer):
    """End a run when something it logs is NaN or infinite, and say at which step that began.

    No step waits for it: it looks at many steps at once, when their values have been computed anyway, so the run may go
    on for about 64 steps more. What is left at the end of a run is looked at then; by hand, call `finish()` there.

    Example:
        >>> def train_step(state, batch):
        ...     return ms.logs().add_loss("loss", 1.0 if state < 5 else float("nan")), state + 1
        >>> try:
        ...     ms.loop(0, range(10), {ms.every(1): [train_step, ms.callbacks.terminate_on_nan()]})
        ... except FloatingPointError as error:
        ...     print(str(error).split(". ")[0])
        terminate_on_nan found losses.loss to be nan at step 6

    Args:
        monitor: What to look at, "name" or "collection.name", or several. None: all losses and metrics.
        action: "raise" a FloatingPointError, or "stop" the loop, which then returns what it has.
    """

    patience = math.inf
    named_schedules = ("on_train_batch_end",)

    def __init__(
        self, monitor: str | Iterable[str] | None = None, *, action: Literal["raise", "stop"] = "raise"
    ) -> None:
        require_choice(_CALLER, "action", action, ["raise", "stop"])
        self._names = None if monitor is None else _names_in(monitor)
        self._raises = action == "raise"
        self._looked_at = 0  # rows
        self._positions: dict[Name, int] = {}  # in each column: after the last value that was looked at
        self._has_reported = False

    def start(self, loop_state: LoopState) -> None:
        """A loop begins; what an earlier one has logged is not looked at."""
        columns = loop_state.history.columns()
        self._positions = {path: len(column) for path, column in columns.items()}
        self._looked_at = len(loop_state.history)
        self._has_reported = False

    def observe(self, loop_state: LoopState, start: int, stop: int) -> None:
        """Look at what has been computed, once in a while."""
        if stop - self._looked_at >= _ROWS_BETWEEN_LOOKS:
            self._looked_at = stop
            self._look(loop_state, loop_state.history.ready_rows(loop_state.elapsed.steps, stop - start))

    def finish(self, loop_state: LoopState | None = None) -> None:
        """Look at what is left; by hand this is called after the last step.

        Args:
            loop_state: Of the loop that has ended.
        """
        loop_state = self._by_hand if loop_state is None else loop_state
        self._look(loop_state)
        require_logged(_CALLER, self._names or [], loop_state)

    def _look(self, loop_state: LoopState, ready: int | None = None) -> None:
        """Look at what is new, and report the first value that is not finite; None: wait for rows in flight."""
        if self._has_reported:
            return
        history = loop_state.history
        found = self._find(history, ready)
        if not found:
            return
        self._has_reported = True
        # The run ends, so waiting does no harm; another entry may have been the first, in a row that was left out.
        first = min([*found, *self._find(history, None)], key=lambda one: one.row)
        text = _report(history, first, loop_state.skips.batch_of(history.elapsed(first.row).steps))
        if self._raises:
            raise FloatingPointError(text)
        loop_state.stop(text)

    def _find(self, history: History, ready: int | None) -> list[_Found]:
        """The first bad value of each entry among those that are new."""
        found, columns = [], history.columns()
        for path in self._watched(list(columns)):
            column, position = columns[path], self._positions.get(path, 0)
            values = column.since(position, settled=ready)
            self._positions[path] = position + len(values)
            bad = _first_bad(values)
            if bad is not None:
                found.append(_Found(column.rows[position + bad], path, values[bad]))
        return found

    def _watched(self, paths: list[Name]) -> list[Name]:
        if self._names is None:
            return [path for path in paths if path[0] in _COLLECTIONS]
        return [path for path in (find_entry(name, paths) for name in self._names) if path is not None]


def _names_in(monitor: Any) -> list[str]:
    """One name or several, as a list."""
    names: list[Any] = [monitor]
    if isinstance(monitor, Iterable) and not isinstance(monitor, str) and getattr(monitor, "shape", None) != ():
        names = list(monitor)
    if not names:
        raise ValueError(
            f"{_CALLER} needs a name in monitor, or None for all losses and metrics. Got {describe_value(monitor)}."
        )
    for name in names:
        require_name(_CALLER, name, "monitor")
    return names


def _first_bad(values: list[Any]) -> int | None:
    """The position of the first value that is not finite."""
    if all(type(value) is float for value in values):
        bad = np.flatnonzero(~np.isfinite(np.asarray(values, np.float64)))
        return int(bad[0]) if len(bad) else None
    return next((number for number, value in enumerate(values) if not _is_finite(value)), None)


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    array = np.asarray(value)
    return not jnp.issubdtype(array.dtype, jnp.inexact) or bool(np.isfinite(array).all())


def _report(history: History, first: _Found, batch: int) -> str:
    elapsed = history.elapsed(first.row)
    epochs = "" if elapsed.epochs is None else f" ({elapsed.epochs} epochs complete)"
    value = f"{first.value:g}" if isinstance(first.value, float) else "partly not finite"
    return (
        f"{_CALLER} found {'.'.join(first.path)} to be {value} at step {elapsed.steps}{epochs}. Until then all it "
        f"watches was finite. With a DataLoader, loader.next_batch(loader.init_state(key, step={batch})) "
        'gives the batch of that step again, and jax.config.update("jax_debug_nans", True) finds the operation.'
    )
