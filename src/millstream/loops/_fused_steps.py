"""The steps of a run, several as one program."""

import math

import jax

from millstream.loops._calls import TaskCalls, due
from millstream.loops._fused import Body, FusedData
from millstream.loops._fused_cuts import Ahead, split_tasks, steps_until_due
from millstream.loops._in_flight import array_of
from millstream.loops._run_parts import RunParts
from millstream.loops.logs import Logs
from millstream.loops.period import Period
from millstream.loops.saved_run import SavedRun


class FusedSteps:
    """Does up to `width` steps of a run per program. Where something is due in between, a program does fewer."""

    def __init__(self, parts: RunParts, calls: TaskCalls, width: int) -> None:
        self._parts = parts
        self._calls = calls
        self._width = width
        self._before, self._compiled, self._after = split_tasks(parts.who, parts.tasks)
        self._cuts = [*self._after, *(task for task in parts.observers if task.schedule is not None)]
        told = isinstance(parts.stop, Period) and list(parts.stop.units) == ["steps"]
        self._asked = None if told else parts.stops

    def run(self) -> bool:
        """All steps; whether an interrupt ended them."""
        parts, calls = self._parts, self._calls
        loop_state, clock, last = parts.loop_state, parts.clock, math.inf if parts.last is None else parts.last
        parts.batches = data = FusedData(
            parts.who, parts.dataset, parts.key, parts.data_state, clock.now, last, self._width, parts.acting
        )
        body = Body(self._compiled, clock.epoch)
        nothing = Body([], clock.epoch)
        while True:
            now, most = clock.now, int(min(self._width, last - clock.now.steps))
            ahead = Ahead(now, last, lambda most=most: clock.ahead(data.samples(most)))
            count = steps_until_due(self._before, self._cuts, self._asked, ahead, most, clock.epoch_steps)
            loop_state.batch, loop_state.logs = None, Logs()
            parts.in_step = True
            if self._call_before(ahead):
                return True
            # Whoever stops the run has the rest of the step left out, and what was logged belongs to one step.
            first_logs, stopped = loop_state.logs, loop_state.stop_iteration
            count = 1 if first_logs or stopped else count
            parts.calling = self._compiled[0]
            loop_state.state, logs, samples = data.run(nothing if stopped else body, loop_state.state, now, count)
            parts.calling = None
            passed = clock.skip(samples)
            loop_state.elapsed = elapsed = clock.now
            elapsed.final = elapsed.steps == last
            if logs:
                loop_state.history.commit_block(passed, logs, data.masks)
            loop_state.logs = _but(first_logs, logs)
            if calls.call([] if stopped else due(self._after, elapsed), in_step=True):
                return True
            calls.commit()
            parts.in_flight.add(array_of(logs, loop_state.state))
            calls.observe(len(samples) if logs else 1 if loop_state.logs else 0)
            parts.in_step = False
            interrupted = calls.ended(elapsed)
            if interrupted is not None:
                return interrupted

    def _call_before(self, ahead: Ahead) -> bool:
        """What is due before the next step; whether an interrupt ended it."""
        if not self._may_be_due(ahead):
            return False
        loop_state, state = self._parts.loop_state, self._parts.loop_state.state
        loop_state.elapsed = ahead[0]
        if not self._calls.call(due(self._before, ahead[0]), in_step=True, drawn=False):
            return False
        # Nothing of that step has been drawn, so the run is at the one before, as it was there.
        loop_state.elapsed, loop_state.logs = self._parts.clock.now, Logs()
        loop_state.failed = any(leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array))
        loop_state.state = loop_state.state if loop_state.failed else state
        return True

    def _may_be_due(self, ahead: Ahead) -> bool:
        """Whether something may be due before the next step; if not, nobody has to know its samples."""
        steps = ahead.now.steps + 1
        schedules = [task.schedule for task in self._before if task.schedule is not None]
        told = [schedule.next_due(steps - 1, self._parts.clock.epoch_steps) for schedule in schedules]
        return bool(told) and (steps == ahead.last or any(due is None or due <= steps for due in told))

    def draw_again(self, saved: SavedRun) -> None:
        """Nothing: callbacks of such a run see no batch."""

    def note(self) -> str | None:
        """What else to say of an error in the task that is being called."""
        fused = self._parts.calling in self._compiled
        return f"With fuse={self._width}, up to that many steps are one program." if fused else None


def _but(logs: Logs, newer: Logs) -> Logs:
    """Logs without the entries that newer ones have."""
    taken, left = {path for path, _ in newer.entries()}, Logs()
    for path, value in logs.entries():
        if path not in taken:
            left.add_entry(*path, value)
    return left
