"""Watching one entry of the logs: each value once, as a number."""

from typing import Any

import numpy as np

from millstream.loops.elapsed import Elapsed
from millstream.loops.log_entries import describe_logged, find_entry, require_name
from millstream.loops.loop_state import LoopState
from millstream.text.errors import describe_leaf


class Monitor:
    """Reads the values of one entry, none of them twice.

    Args:
        caller: The caller's name, for errors.
        name: The entry, as "name" or "collection.name".

    Attributes:
        seen: The step of the value that was read last; -1 before the first.
    """

    def __init__(self, caller: str, name: str) -> None:
        require_name(caller, name, "monitor")
        self.name = name
        self.seen = -1
        self._caller = caller

    def read(self, loop_state: LoopState) -> tuple[float, Elapsed] | None:
        """The newest value and when it was logged; None if it has been read before, or there is none.

        It waits for a value that is still being computed.
        """
        value, when = self._newest(loop_state)
        if when is None or when.steps <= self.seen:
            return None
        self.seen = when.steps
        return self._number(value), when

    def _newest(self, loop_state: LoopState) -> tuple[Any, Elapsed | None]:
        logs, history = loop_state.logs, loop_state.history
        path = find_entry(self.name, [path for path, _ in logs.entries()])
        if path is not None:
            return logs[path[0]][path[1]], loop_state.elapsed
        column = history.column(self.name)
        if column is None or len(column) == 0:
            return None, None
        return column.newest(), history.elapsed(column.rows[-1])

    def _number(self, value: Any) -> float:
        try:
            return float(np.asarray(value))
        except (TypeError, ValueError):
            raise TypeError(
                f"{self._caller} needs {self.name!r} to be a single number. Got {describe_leaf(value)}. "
                "Log its mean, or another number, and watch that."
            ) from None

    def __repr__(self) -> str:
        return repr(self.name)


def require_logged(caller: str, names: list[str], loop_state: LoopState) -> None:
    """Refuse names that a run has not logged up to its end, unless something else has ended it before."""
    history = loop_state.history
    if not loop_state.is_complete or not loop_state.elapsed.steps:
        return
    for name in names:
        if history.column(name) is None:
            raise ValueError(
                f"{caller}: the monitor {str(name)!r} was never logged. {describe_logged(name, history.columns())} "
                "Watch one of these. The run itself is complete: its output is in the exception's loop_output."
            )
