"""The steps of a run: several together where a compiled step is all that is due, else one."""

import dataclasses
import math
from typing import Any

from millstream.loops._burst import StepBurst, commit_rows, only_step
from millstream.loops._calls import TaskCalls, due
from millstream.loops._dataset import too_short
from millstream.loops._run_parts import RunParts
from millstream.loops._tasks import Task
from millstream.loops.log_entries import Logs, as_logs
from millstream.loops.saved_run import SavedRun
from millstream.loops.schedules import as_schedule
from millstream.pipeline.state import IterableState, LoaderState


class Steps:
    """Does the steps of a run, each a dispatch of its own."""

    def __init__(self, parts: RunParts, calls: TaskCalls) -> None:
        self._parts = parts
        self._calls = calls
        self._all_are_due = all(task.schedule is None for task in parts.tasks)  # at every step, so nobody need ask

    def run(self) -> bool:
        """All steps; whether an interrupt ended them."""
        parts = self._parts
        batches = parts.batches = parts.open() if parts.batches is None else parts.batches
        burst, alone = self._burst(), self._compiled_step()
        next_due: float = 0
        while True:
            if parts.weights is not None and parts.weights.is_new:
                batches = parts.batches = parts.open(data_state=parts.draw_by_new_weights(batches.state))
            # The first step compiles, and shows what is logged: large values are not kept for many steps.
            free = next_due - 1 - parts.clock.now.steps
            together = alone is not None and free > 0 and parts.loop_state.history.plain
            ended = self._some_steps(burst, batches, alone if together else None, free)
            if ended is not None:
                return ended
            if alone is not None and not together:
                next_due = self._next_due() or 0

    def _burst(self) -> StepBurst:
        parts = self._parts
        watching = [task.callback.patience for task in parts.observers if task.schedule is None]
        checks = [saver.check for saver in parts.savers]
        return StepBurst(parts.interrupts, parts.in_flight, checks, min(watching, default=math.inf))

    def _compiled_step(self) -> Task | None:
        """The step that can be done several times with nothing in between; None if each has to be looked at."""
        parts = self._parts
        impatient = any(task.schedule is None and task.callback.patience <= 0 for task in parts.observers)
        if impatient or parts.acting is not None or parts.preemption is not None or self._next_due() is None:
            return None
        return only_step(parts.tasks)

    def _next_due(self) -> float | None:
        """The next step at which more is due than the step itself; None if a schedule cannot tell."""
        parts, epochs = self._parts, self._parts.clock.epochs
        if parts.clock.epoch is not None and epochs is None:
            return None
        schedules: list[Any] = [task.schedule for task in (*parts.tasks, *parts.observers)]
        if parts.stop is not None:
            schedules.append(as_schedule(parts.caller, parts.stop))
        told = [schedule.next_due(parts.clock.now.steps, epochs) for schedule in schedules if schedule is not None]
        return None if None in told else min(told, default=math.inf)

    def _some_steps(self, burst: StepBurst, batches: Any, alone: Task | None, most: float) -> bool | None:
        """Up to `most` steps of a compiled task alone, or one step with all its tasks; see `TaskCalls.ended`."""
        parts, calls, loop_state = self._parts, self._calls, self._parts.loop_state
        if parts.acting is not None:
            batches.set_policy_state(parts.acting.policy_state(loop_state.state, batches.state))
        try:
            burst.run(loop_state, batches, alone, most)
        finally:
            self._keep(burst, alone)
        if burst.has_ended:
            return calls.data_ended()
        if alone is None:
            tasks = parts.tasks if self._all_are_due else due(parts.tasks, loop_state.elapsed)
            if calls.call(tasks, in_step=True):
                return True
            calls.commit()
            if parts.observers:
                calls.observe(1 if loop_state.logs else 0)
            parts.in_step = False
        return calls.check_end(loop_state.elapsed)

    def _keep(self, burst: StepBurst, alone: Task | None) -> None:
        """Count, commit and show the steps of a burst, and be in the step that it has begun and not done."""
        parts, loop_state, clock, complete = self._parts, self._parts.loop_state, self._parts.clock, len(burst.logs)
        loop_state.waits.data += burst.waited
        parts.rewound = burst.rewound
        if complete:
            passed = clock.skip(burst.samples[:complete], burst.times[:complete])
            loop_state.elapsed = clock.now
            loop_state.logs = as_logs(parts.caller, burst.logs[-1] or Logs())
            rows = commit_rows(loop_state.history, passed, burst.logs)
            if parts.observers:
                self._calls.observe(rows)
        parts.in_step = burst.drawn > complete
        if len(burst.samples) > complete:
            parts.calling = alone
            loop_state.elapsed, loop_state.logs = clock.tick(burst.samples[-1], burst.times[-1]), Logs()
            loop_state.elapsed.final = loop_state.elapsed.steps == parts.last

    def draw_again(self, saved: SavedRun) -> None:
        """Have the batch of a saved step again, where the data can give it twice."""
        parts, state, before = self._parts, saved.data_state, saved.elapsed.step_before()
        if isinstance(state, LoaderState) and not isinstance(state, IterableState):
            parts.batches = parts.open(before, dataclasses.replace(state, step=state.step - 1))
        elif saved.position["kind"] == "iterable":
            parts.batches = parts.open(before)
        if parts.batches is None:
            return
        try:
            parts.loop_state.batch = parts.batches.draw()
        except StopIteration:
            raise too_short(parts.caller, saved.elapsed.steps, before.steps) from None

    def note(self) -> str | None:
        """What else to say of an error in the task that is being called."""
        return None
