"""A run whose steps are done several at a time."""

import math
from typing import Any

from millstream._core.errors import require_int
from millstream.loops._fused import Ahead, Body, FusedData, split_tasks, steps_until_due
from millstream.loops._in_flight import array_of
from millstream.loops._logs import Logs
from millstream.loops._period import Period
from millstream.loops._run import Run
from millstream.loops._saved_run import SavedRun
from millstream.loops._tasks import Task


class FusedRun(Run):
    """A run with up to `fuse` steps per program. Where something is due in between, a program does fewer."""

    def __init__(self, state: Any, dataset: Any, tasks: list[Task], *, fuse: int, name: str, **options: Any) -> None:
        require_int(name, "fuse", fuse, least=1)
        super().__init__(state, dataset, tasks, name=name, **options)
        self._width = fuse
        self._before, self._compiled, self._behind = split_tasks(name, self._tasks)
        self._cuts = [*self._behind, *(task for task in self._observers if task.schedule is not None)]
        told = isinstance(self._stop, Period) and list(self._stop.units) == ["steps"]
        self._asked = None if told else self._stops

    def _steps(self) -> bool:
        loop_state, clock, last = self.loop_state, self._clock, math.inf if self._last is None else self._last
        key, data_state = self._opening["key"], self._opening["data_state"]
        self._batches = data = FusedData(self._who, self._dataset, key, data_state, clock.now, self._width)
        body = Body(self._compiled, clock.epoch)
        while True:
            now, most = clock.now, int(min(self._width, last - clock.now.steps))
            ahead = Ahead(lambda most: clock.ahead(data.samples(most)), most)
            count = steps_until_due(self._before, self._cuts, self._asked, now, ahead, most, clock.epoch_steps)
            loop_state.batch, loop_state.logs = None, Logs()
            self._in_step = True
            if self._call_before(ahead):
                return True
            first_logs = loop_state.logs
            samples = data.samples(1 if first_logs else count)
            self._calling = self._compiled[0]
            loop_state.state, logs = data.run(body, loop_state.state, now, len(samples))
            self._calling = None
            passed = clock.skip(samples)
            loop_state.elapsed = elapsed = clock.now
            elapsed.final = elapsed.steps == last
            if logs:
                loop_state.history.commit_block(passed, logs)
            loop_state.logs = first_logs
            due = [task for task in self._behind if task.schedule is not None and task.schedule(elapsed)]
            if self._call(due, in_step=True):
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
        if not self._before:
            return False
        self.loop_state.elapsed = ahead[0]
        due = [task for task in self._before if task.schedule is not None and task.schedule(ahead[0])]
        return self._call(due, in_step=True)

    def _leave_unfinished(self, task: Task, *, ending: bool) -> bool:
        if task in self._before and not ending:  # nothing of that step has been drawn, so the run is at the one before
            self.loop_state.elapsed, self.loop_state.logs = self._clock.now, Logs()
            self.loop_state.reason = "terminated" if self._interrupts.terminated else "interrupted"
            return True
        return super()._leave_unfinished(task, ending=ending)

    def _draw_again(self, saved: SavedRun) -> None:
        """Nothing: callbacks of such a run see no batch."""
