"""The records of runs that are trained at once, one for each."""

import dataclasses
import pathlib
import time
from typing import Any

import jax

from millstream.callbacks import record
from millstream.experiments._grid import Hyperparameters
from millstream.experiments._sweep_group import split_history, split_rows
from millstream.loops import LoopState, Observer
from millstream.reading.contracts import PyTree

_MANY = 256  # rows that are handed on at once
_SECONDS = 1.0  # or after this time


class RunRecords(Observer):
    """Writes a record of each run, as `ms.record` does of one: rows are split and handed to a writer for each.

    Args:
        folder: Where.
        runs: The hyperparameters of each run, by the name of its folder.
    """

    named_schedules = ("on_train_batch_end",)
    only_real_runs = True
    patience = float("inf")

    def __init__(self, folder: pathlib.Path, runs: dict[str, Hyperparameters]) -> None:
        self._writers = [record(folder / name, overwrite=True, config=config) for name, config in runs.items()]
        self._runs: list[LoopState] = []  # what each writer sees as its loop

    def start(self, loop_state: LoopState) -> None:
        """The loop begins, or resumes."""
        histories = split_history(loop_state.history, len(self._writers))
        states: Any = loop_state.state
        spec = _one(states.states) if len(self._writers) > 1 else states.states
        self._runs = [dataclasses.replace(loop_state, history=history, state=spec) for history in histories]
        self._done = len(loop_state.history)
        self._handed_at = time.monotonic()
        for writer, run in zip(self._writers, self._runs, strict=True):
            writer.start(run)

    def observe(self, loop_state: LoopState, start: int, stop: int) -> None:
        """Hand on rows, now and then."""
        if stop - self._done >= _MANY or time.monotonic() - self._handed_at > _SECONDS:
            self._hand_on(loop_state, loop_state.history.ready_rows(loop_state.elapsed.steps, stop - start))

    def _hand_on(self, loop_state: LoopState, ready: int) -> None:
        self._handed_at = time.monotonic()
        done, self._done = self._done, max(ready, self._done)
        parts = split_rows(loop_state.history, len(self._runs), done, self._done)
        for writer, run, part in zip(self._writers, self._runs, parts, strict=True):
            run.elapsed = loop_state.elapsed
            run.history.append_state(part)
            writer.observe(run, done, self._done)

    def finish(self, loop_state: LoopState) -> None:
        """Write all the rest, but for what a step that failed has left."""
        history = loop_state.history
        self._hand_on(loop_state, history.ready_rows(loop_state.elapsed.steps) if loop_state.failed else len(history))
        for writer, run in zip(self._writers, self._runs, strict=True):
            run.reason, run.failed = loop_state.reason, loop_state.failed
            writer.finish(run)

    def get_state(self) -> dict[str, PyTree]:
        """What the writers have not written yet."""
        return {"writers": [writer.get_state() for writer in self._writers]}

    def set_state(self, state: dict[str, PyTree]) -> None:
        """Continue from what `get_state` gave."""
        for writer, own in zip(self._writers, state["writers"], strict=True):
            writer.set_state(own)


def _one(states: PyTree) -> PyTree:
    """What a run of stacked states has: shapes and dtypes, since that is all that a record shows."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), states)
