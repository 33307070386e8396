"""A record of a run: what it is, what it logs and what its time goes to, for `millstream report`."""

import dataclasses
import os
import time
from collections.abc import Mapping
from typing import Any

from millstream.callbacks._background import Row
from millstream.callbacks._compile_time import compile_seconds
from millstream.callbacks._run_description import describe_run
from millstream.callbacks._writer import Writer, writes_here
from millstream.callbacks.record_file import Line, RecordFile
from millstream.loops.elapsed import Elapsed
from millstream.loops.loop_state import LoopState
from millstream.text.errors import describe_value

_FINEST, _COARSEST = 0.1, 10.0  # seconds over which the use of time is measured
_WINDOWS = 200  # as many as that in a run that is not very short or long


@dataclasses.dataclass(frozen=True, eq=False)
class _Handed:
    """Tells the thread that all rows before a step have been handed to it, those left out that nobody wants."""

    step: int

    def steps(self) -> list[int]:
        return []

    def made(self) -> list[Row]:
        return [Line(self.step, 0, None, 0.0, 0.0, {})]


class Recorder(Writer):
    """Writes a record of a run; made by `record`, which says what the arguments are."""

    def __init__(self, directory: Any, every: Any, overwrite: bool, loaders: Mapping[str, Any] | None) -> None:
        if not isinstance(loaders, Mapping | None):
            raise TypeError(f"record needs loaders as a dict from names to loaders. Got {describe_value(loaders)}.")
        self._file = RecordFile(directory, overwrite)
        self._loaders = {} if loaders is None else loaders
        super().__init__(self._file, every)

    def _begin(self, loop_state: LoopState, step: int) -> None:
        if writes_here():
            self._file.description = describe_run(loop_state, self._loaders)
        super()._begin(loop_state, step)
        self._last = self._counts(loop_state)
        self._due = 0.0  # the first window is that in which programs are compiled and workers start

    def observe(self, loop_state: LoopState, start: int, stop: int) -> None:
        """As all writers do, and see now and then what the time was used for."""
        super().observe(loop_state, start, stop)
        if loop_state is self._owner and self._writes and time.perf_counter() >= self._due:
            self._measure(loop_state)

    def finish(self, loop_state: LoopState) -> None:
        """The loop has ended: write all the rest, and why."""
        if loop_state is self._owner and self._writes:
            self._measure(loop_state)
            reason = "it broke off with an error" if loop_state.failed else loop_state.reason
            self._add(loop_state.elapsed, {"ended": reason})
        super().finish(loop_state)

    def _measure(self, loop_state: LoopState) -> None:
        """Write what the time since the last measurement was used for."""
        now, last, elapsed = self._counts(loop_state), self._last, loop_state.elapsed
        self._last = now
        self._due = now["seconds"] + min(max(elapsed.time / _WINDOWS, _FINEST), _COARSEST)
        self._add(elapsed, {"spent": {name: round(now[name] - last[name], 6) for name in now}})

    def _counts(self, loop_state: LoopState) -> dict[str, float]:
        """What has been counted so far; a loop by hand does not say what it waits for."""
        elapsed = loop_state.elapsed
        counts = {"seconds": time.perf_counter(), "steps": elapsed.steps, "samples": elapsed.samples}
        waits = {} if loop_state is self._by_hand else dataclasses.asdict(loop_state.waits)
        return {**counts, "compiling": compile_seconds(), **waits}

    def _add(self, elapsed: Elapsed, content: Any) -> None:
        line = Line(elapsed.steps, elapsed.samples, elapsed.epochs, elapsed.time, elapsed.date, content)
        self._file.lines.append(line)
        waiting = self._rows.first_step()
        # Rows would take their lines along, but there may not be any for long.
        self._background.put(_Handed(elapsed.steps + 1 if waiting is None else waiting))


def record(
    directory: str | os.PathLike[str],
    *,
    every: Any = None,
    overwrite: bool = False,
    loaders: Mapping[str, Any] | None = None,
) -> Recorder:
    """Write down a run while it goes on, so that `millstream report` can show it: also one that was killed.

    Example:
        >>> def train_step(state, batch):
        ...     return ms.logs().add_metric("loss", 0.5), state + 1
        >>> _ = ms.loop(0, range(3), {ms.every(1): [train_step, ms.record("run")]})
        >>> from millstream.report.page import write_report
        >>> write_report("run").name
        'report.html'

    In `record.jsonl` stand versions and devices, the arrays of the state, the stages of the loader, what is done when;
    then what was logged, and what the time was used for: waiting for data, tests, compiling, and the steps. Rows are
    written as by `jsonl_logger`, in the background and by the first process only. A resumed run goes on with the file,
    and what is done again stands there once. The folder may be that of `ms.checkpoint`.

    Args:
        directory: The folder; one run per folder.

    Other Args:
        every: Which rows to write, as for `csv_logger`. Times are measured in any case.
        overwrite: Whether a new run replaces the record of another, which is set apart otherwise.
        loaders: Further loaders whose stages are shown, by name, such as `{"test": test_loader}`. That of the loop is
            known.
    """
    return Recorder(directory, every, overwrite, loaders)
