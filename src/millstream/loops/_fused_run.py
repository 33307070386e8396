"""A run whose steps are done several at a time."""

import math
from typing import Any

import jax

from millstream.loops._fused import Body, FusedData
from millstream.loops._fused_cuts import Ahead, split_tasks, steps_until_due
from millstream.loops._in_flight import array_of
from millstream.loops._run import Run
from millstream.loops._run_parts import caller_of
from millstream.loops._tasks import Task
from millstream.loops.elapsed import Elapsed
from millstream.loops.logs import Logs
from millstream.loops.period import Period
from millstream.loops.saved_run import SavedRun
from millstream.text.errors import require_int


class FusedRun(Run):
    """A run with up to `fuse` steps per program. Where something is due in between, a program does fewer."""

    def __init__(self, state: Any, dataset: Any, tasks: list[Task], *, fuse: int, name: str, **options: Any) -> None:
        require_int(caller_of(name), "fuse", fuse, least=1)
        super().__init__(state, dataset, tasks, name=name, **options)
        self._width = fuse
        self._before, self._compiled, self._behind = split_tasks(self._who, self._tasks)
        self._cuts = [*self._behind, *(task for task in self._observers if task.schedule is not None)]
        told = isinstance(self._stop, Period) and list(self._stop.units) == ["steps"]
        self._asked = None if told else self._stops

    def _steps(self) -> bool:
        loop_state, clock, last = self.loop_state, self._clock, math.inf if self._last is None else self._last
        key, data_state = self._opening["key"], self._opening["data_state"]
        self._batches = data = FusedData(
            self._who, self._dataset, key, data_state, clock.now, last, self._width, self._acting
        )
        body = Body(self._compiled, clock.epoch)
        nothing = Body([], clock.epoch)
        while True:
            now, most = clock.now, int(min(self._width, last - clock.now.steps))
            ahead = Ahead(now, last, lambda most=most: clock.ahead(data.samples(most)))
            count = steps_until_due(self._before, self._cuts, self._asked, ahead, most, clock.epoch_steps)
            loop_state.batch, loop_state.logs = None, Logs()
            self._in_step = True
            if self._call_before(ahead):
                return True
            # Whoever stops the run has the rest of the step left out, and what was logged belongs to one step.
            first_logs, stopped = loop_state.logs, loop_state.stop_iteration
            count = 1 if first_logs or stopped else count
            self._calling = self._compiled[0]
            loop_state.state, logs, samples = data.run(nothing if stopped else body, loop_state.state, now, count)
            self._calling = None
            passed = clock.skip(samples)
            loop_state.elapsed = elapsed = clock.now
            elapsed.final = elapsed.steps == last
            if logs:
                loop_state.history.commit_block(passed, logs, data.masks)
            loop_state.logs = _but(first_logs, logs)
            if self._call([] if stopped else _due(self._behind, elapsed), in_step=True):
                return True
            self._commit()
            self._in_flight.add(array_of(logs, loop_state.state))
            self._observe(len(samples) if logs else 1 if loop_state.logs else 0)
            self._in_step = False
            interrupted = self._ended(elapsed)
            if interrupted is not None:
                return interrupted

    def _call_before(self, ahead: Ahead) -> bool:
        """What is due before the next step; whether an interrupt ended it."""
        if not self._may_be_due(ahead):
            return False
        loop_state, state = self.loop_state, self.loop_state.state
        loop_state.elapsed = ahead[0]
        if not self._call(_due(self._before, ahead[0]), in_step=True):
            return False
        # Nothing of that step has been drawn, so the run is at the one before, as it was there.
        loop_state.elapsed, loop_state.logs = self._clock.now, Logs()
        loop_state.failed = any(leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array))
        loop_state.state = loop_state.state if loop_state.failed else state
        return True

    def _may_be_due(self, ahead: Ahead) -> bool:
        """Whether something may be due before the next step; if not, nobody has to know its samples."""
        steps = ahead.now.steps + 1
        schedules = [task.schedule for task in self._before if task.schedule is not None]
        told = [schedule.next_due(steps - 1, self._clock.epoch_steps) for schedule in schedules]
        return bool(told) and (steps == ahead.last or any(due is None or due <= steps for due in told))

    def _leave_unfinished(self, task: Task, *, ending: bool) -> bool:
        if task in self._before and not ending:
            self.loop_state.reason = self._interruption()
            return True
        return super()._leave_unfinished(task, ending=ending)

    def _annotate(self, error: BaseException) -> None:
        super()._annotate(error)
        if self._calling in self._compiled:
            error.add_note(f"With fuse={self._width}, up to that many steps are one program.")

    def _draw_again(self, saved: SavedRun) -> None:
        """Nothing: callbacks of such a run see no batch."""


def _due(tasks: list[Task], elapsed: Elapsed) -> list[Task]:
    return [task for task in tasks if task.schedule is not None and task.schedule(elapsed)]


def _but(logs: Logs, newer: Logs) -> Logs:
    """Logs without the entries that newer ones have."""
    taken, left = {path for path, _ in newer.entries()}, Logs()
    for path, value in logs.entries():
        if path not in taken:
            left.add_entry(*path, value)
    return left
