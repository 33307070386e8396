"""The steps of a run: one by one or several together, and those that were left in the middle."""

import dataclasses
import math
import time
from typing import Any

from millstream.loops._burst import Burst, commit_rows, only_step
from millstream.loops._in_flight import array_of
from millstream.loops._outputs import with_real_rows
from millstream.loops._position import too_short
from millstream.loops._returned import absorb
from millstream.loops._run_parts import RunParts
from millstream.loops._tasks import Task
from millstream.loops.elapsed import Elapsed
from millstream.loops.logs import Logs, as_logs
from millstream.loops.saved_run import SavedRun
from millstream.loops.schedule import as_schedule
from millstream.pipeline.state import LoaderState
from millstream.reading.interrupts import Terminated


class RunSteps(RunParts):
    """A run that can do steps, and finish one that an interrupt had cut short."""

    def _steps(self) -> bool:
        """All steps; whether an interrupt ended them."""
        batches = self._batches = self._open() if self._batches is None else self._batches
        burst, due = self._burst(), 0
        while True:
            # The first step compiles, and shows what is logged: large values are not kept for many steps.
            free = due - 1 - self._clock.now.steps
            if burst is not None and free > 0 and self.loop_state.history.plain:
                ended = self._several_steps(burst, batches, free)
            else:
                ended = self._one_step(batches)
                due = 0 if burst is None else self._next_due() or 0
            if ended is not None:
                return ended

    def _burst(self) -> Burst | None:
        """What does several steps together; None if each has to be looked at."""
        task = only_step(self._tasks) if self._acting is None else None
        patience = min((task.callback.patience for task in self._observers if task.schedule is None), default=math.inf)
        if task is None or patience <= 0 or self._preemption is not None or self._next_due() is None:
            return None
        return Burst(task, self._interrupts, self._in_flight, [saver.check for saver in self._savers], patience)

    def _next_due(self) -> float | None:
        """The next step at which more is due than the step itself; None if a schedule cannot tell."""
        steps, epoch = self._clock.now.steps, self._clock.epoch_steps
        if self._clock.epoch is not None and epoch is None:
            return None
        schedules: list[Any] = [task.schedule for task in (*self._tasks, *self._observers)]
        if self._stop is not None:
            schedules.append(as_schedule(self._who, self._stop))
        told = [schedule.next_due(steps, epoch) for schedule in schedules if schedule is not None]
        return None if None in told else min(told, default=math.inf)

    def _several_steps(self, burst: Burst, batches: Any, most: float) -> bool | None:
        """Some steps at which nothing else is due; as `_ended`."""
        try:
            burst.run(self.loop_state, batches, most)
        finally:
            self._keep(burst)
        if burst.has_ended:
            return self._data_ended()
        return self._ended(self.loop_state.elapsed)

    def _keep(self, burst: Burst) -> None:
        """Count, commit and show the steps of a burst, and be in the step that it was in, if it broke off there."""
        loop_state, clock, complete = self.loop_state, self._clock, len(burst.logs)
        loop_state.waits.data += burst.waited
        self._rewound = burst.rewound
        if complete:
            passed = clock.skip(burst.samples[:complete], burst.times[:complete])
            loop_state.elapsed = clock.now
            loop_state.logs = as_logs(self._who, burst.logs[-1] or Logs())
            rows = commit_rows(loop_state.history, passed, burst.logs)
            if self._observers:
                self._observe(rows)
        self._in_step = burst.drawn > complete
        if len(burst.samples) > complete:
            self._calling = burst.task
            loop_state.elapsed, loop_state.logs = clock.tick(burst.samples[-1], burst.times[-1]), Logs()

    def _one_step(self, batches: Any) -> bool | None:
        """One step; as `_ended`."""
        loop_state, interrupts, perf_counter = self.loop_state, self._interrupts, time.perf_counter
        begun, before = perf_counter(), None if batches.where is None else batches.where()
        if self._acting is not None:
            batches.set_policy_state(self._acting.policy_state(loop_state.state, batches.state))
        interrupts.waiting = batches.may_break
        try:
            if interrupts.terminated:
                raise Terminated
            loop_state.batch = batch = batches.draw()
            self._in_step = True
        except StopIteration:
            return self._data_ended()
        except (Terminated, KeyboardInterrupt):
            self._rewound = before  # the batch may be here already, and will not be used
            raise
        finally:
            interrupts.waiting = False
        now = perf_counter()
        samples = batches.size_of(batch)
        loop_state.waits.data += now - begun
        loop_state.elapsed = elapsed = self._clock.tick(samples, now)
        elapsed.final = elapsed.steps == self._last
        # Of the step before: what is drawn meanwhile costs no time.
        self._in_flight.add(array_of(loop_state.logs, loop_state.state))
        loop_state.logs = Logs()
        if self._call([task for task in self._tasks if task.schedule is None or task.schedule(elapsed)], in_step=True):
            return True
        self._commit()
        if self._observers:
            self._observe(1 if loop_state.logs else 0)
        self._in_step = False
        return self._ended(elapsed)

    def _data_ended(self) -> bool:
        """The data have ended; whether an interrupt has done that."""
        self.loop_state.reason = "the data ended"
        return self._interrupted()

    def _ended(self, elapsed: Elapsed) -> bool | None:
        """Whether an interrupt has ended the steps; None if nothing has."""
        loop_state = self.loop_state
        for saver in self._savers:
            saver.check()
        if loop_state.stop_iteration:
            loop_state.reason = loop_state.reason or "a callback stopped it"
            return False
        if self._stops is not None and self._stops(elapsed):
            loop_state.reason = "it came to its stop"
            return False
        if self._preemption is not None and self._preemption.reached():
            self._interrupts.terminate()
        return True if self._interrupted() else None

    def _interrupted(self) -> bool:
        """Whether an interrupt has come, which is then the reason."""
        if not self._interrupts.check():
            return False
        self.loop_state.reason = self._interruption()
        return True

    def _interruption(self) -> str:
        """What has interrupted the run, in a word."""
        return "terminated" if self._interrupts.terminated else "interrupted"

    def _call(self, tasks: list[Task], *, ending: bool = False, in_step: bool = False) -> bool:
        """Call some tasks that are due; whether an interrupt kept one of them from being done."""
        loop_state = self.loop_state
        for task in tasks:
            self._calling, loop_state.cut_short = task, False
            output = task.call(loop_state)
            if loop_state.cut_short:
                return self._leave_unfinished(task, ending=ending)
            if output is not None:
                absorb(loop_state, output, task.name)
            if in_step and loop_state.stop_iteration:
                break
        self._calling = None
        return False

    def _commit(self) -> None:
        loop_state, logs = self.loop_state, self.loop_state.logs
        if logs.get("outputs") and self._batches is not None:
            logs = with_real_rows(logs, self._batches.mask)
        if logs:
            loop_state.history.commit(loop_state.elapsed, logs)

    def _observe(self, rows: int) -> None:
        """Show observers that are due the newest rows: so many, or only the last one if they are not always due."""
        loop_state, stop, begun = self.loop_state, len(self.loop_state.history), time.perf_counter()
        for task in self._observers:
            if task.schedule is None or task.schedule(loop_state.elapsed):
                self._calling = task
                task.callback.observe(loop_state, stop - (rows if task.schedule is None else min(rows, 1)), stop)
        self._calling = None
        loop_state.waits.callbacks += time.perf_counter() - begun

    def _final_tasks(self) -> bool:
        """What is due at the last step because it turned out to be the last; whether an interrupt ended it."""
        loop_state, elapsed = self.loop_state, self.loop_state.elapsed
        if elapsed.final or elapsed.steps == 0 or (self._batches is None and self._saved is None):
            return False
        loop_state.elapsed = elapsed.replace(final=True)
        self._in_step = True  # a run is saved as one that has ended only if all of this is done
        return self._finish_step(self._due_at_end(self._tasks), self._due_at_end(self._observers), ending=True)

    def _due_at_end(self, tasks: list[Task]) -> list[Task]:
        """The tasks that are due at this step only because it is the last."""
        final = self.loop_state.elapsed.replace(final=True)
        return [
            task
            for task in tasks
            if task.schedule is not None and task.schedule(final) and not task.schedule(final.replace(final=False))
        ]

    def _finish_step(self, tasks: list[Task], observers: list[Task], *, ending: bool) -> bool:
        """Do what is left of a step; whether an interrupt ended it."""
        loop_state = self.loop_state
        loop_state.logs = Logs()
        if self._call(tasks, ending=ending, in_step=not ending):
            return True
        loop_state.unfinished = None
        self._commit()
        for task in observers:
            self._calling = task
            task.call(loop_state)
        self._calling = None
        return False

    def _leave_unfinished(self, task: Task, *, ending: bool) -> bool:
        """Keep what the step has logged so far, and remember where to go on with it."""
        loop_state = self.loop_state
        self._commit()
        loop_state.unfinished = (self._tasks.index(task), ending) if task in self._tasks else None
        loop_state.reason = self._interruption()
        return True

    def _finish_saved_step(self) -> bool:
        """Do what an interrupt had left undone of the step that was saved; whether one has come again."""
        saved, loop_state = self._saved, self.loop_state
        if saved is None or saved.unfinished is None:
            return False
        first, ending = saved.unfinished
        self._draw_again(saved)
        if ending:
            left, observers = self._due_at_end(self._tasks[first:]), self._due_at_end(self._observers)
        else:
            left, observers = (
                [task for task in tasks if task.schedule is None or task.schedule(loop_state.elapsed)]
                for tasks in (self._tasks[first:], self._observers)
            )
        return self._finish_step(left, observers, ending=ending)

    def _draw_again(self, saved: SavedRun) -> None:
        """Have the batch of the saved step again, where the data can give it twice."""
        state, before = saved.data_state, saved.elapsed.step_before()
        if isinstance(state, LoaderState):
            self._batches = self._open(before, dataclasses.replace(state, step=state.step - 1))
        elif saved.position["kind"] == "iterable":
            self._batches = self._open(before)
        if self._batches is None:
            return
        try:
            self.loop_state.batch = self._batches.draw()
        except StopIteration:
            raise too_short(self._who, saved.elapsed.steps, before.steps) from None
