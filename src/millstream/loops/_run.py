"""One run of a loop, from its first batch to whatever ends it."""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from millstream._core.contracts import PyTree
from millstream._core.errors import describe_value
from millstream._core.interrupts import Interrupts, Terminated
from millstream._core.state import LoaderState
from millstream.loops._callback import absorb
from millstream.loops._clock import Clock
from millstream.loops._dataset import Batches, Loader, LoaderBatches, open_batches
from millstream.loops._elapsed import Elapsed
from millstream.loops._history import History
from millstream.loops._in_flight import InFlight
from millstream.loops._logs import Logs
from millstream.loops._loop_state import LoopOutput, LoopState
from millstream.loops._position import contents_of, save_position
from millstream.loops._preemption import Preempted, PreemptionPoint
from millstream.loops._saved_run import SavedRun, load_run, restore_callbacks
from millstream.loops._schedules import Period
from millstream.loops._stop import as_epoch, as_stop
from millstream.loops._tasks import Task, parts

_running = threading.local()  # runs inside of runs, of this thread


class Run:
    """The parts of a run, checked before anything happens; see `loop` for what they are."""

    def __init__(
        self,
        state: Any,
        dataset: Any,
        tasks: list[Task],
        *,
        stop: Any,
        on_start: list[Task],
        on_end: list[Task],
        history: History | None,
        elapsed: Elapsed | None,
        key: Any,
        data_state: PyTree,
        resume: str | os.PathLike[str] | bool | None,
        epoch_duration: Any,
        catch_keyboard_interrupt: bool,
        batch_size_fn: Callable[[Any], int] | None,
        metadata: Any,
        name: str,
    ) -> None:
        self._who = name
        if not isinstance(history, History | None) or not isinstance(elapsed, Elapsed | None):
            raise TypeError(f"{name} needs history and elapsed as an earlier loop returned them.")
        if not (isinstance(dataset, Loader | Iterable) or callable(dataset)):
            raise TypeError(
                f"{name} needs a dataset: a DataLoader, an iterable of batches, or a function that returns one. "
                f"Got {describe_value(dataset)}."
            )
        self._dataset: Any = dataset
        self._tasks = [task for task in tasks if not task.observes]
        # Savers come last: what they save is a step that is complete.
        self._observers = sorted((task for task in tasks if task.observes), key=lambda task: task.saves)
        self._on_start, self._on_end = on_start, on_end
        callbacks = parts([*on_start, *self._tasks, *self._observers, *on_end])
        self._savers: list[Any] = [callback for callback in callbacks if getattr(callback, "saves", False)]
        self._stop = None if stop is None else as_stop(name, stop)
        point = self._stop if isinstance(self._stop, Period) else None
        self._stops = self._stop if point is None else point.reached
        self._last = None if point is None else point.units.get("steps")
        if self._stop is None and isinstance(dataset, Loader):
            raise ValueError(
                f"{name} over a DataLoader goes on for ever, unless told when to stop: stop=ms.at(epochs=3), "
                "stop=1000, or stop=ms.never(), if a callback will stop it."
            )
        self._saved: SavedRun | None = None
        if resume is not None and resume is not False:
            if elapsed is not None or history is not None or data_state is not None:
                raise ValueError(f"{name} takes elapsed, history and data_state from what it resumes. Leave them out.")
            self._saved = self._find(resume, state, key)
        if self._saved is not None:
            state, elapsed, history = self._saved.state, self._saved.elapsed, self._saved.history
            data_state = self._saved.data_state
            restore_callbacks(callbacks, self._saved)
        if epoch_duration is None and isinstance(dataset, Loader):
            epoch_duration = dataset.steps_per_epoch
        self._clock = Clock(elapsed, None if epoch_duration is None else as_epoch(name, epoch_duration))
        self._opening = {"key": key, "data_state": data_state, "batch_size_fn": batch_size_fn}
        self._catches = catch_keyboard_interrupt
        self._interrupts = Interrupts()
        self._preemption: PreemptionPoint | None = None
        self._in_flight = InFlight()
        self._batches: Any = None
        self._rewound: PyTree = None  # the data state before a batch that came in the moment of an interrupt
        self._calling: Task | None = None
        self.loop_state = LoopState(
            state, History() if history is None else history, self._clock.now, metadata=metadata, name=name
        )
        self.loop_state.callbacks = callbacks
        self.loop_state.ends_at = point
        self.loop_state.data_position = self._data_state
        self.loop_state.position = self._position
        if self._saved is not None:
            self._go_on_from(self._saved)

    def _find(self, resume: str | os.PathLike[str] | bool, state: Any, key: Any) -> SavedRun | None:
        """What is to be gone on with, if anything has been saved."""
        if isinstance(resume, bool) and not self._savers:
            raise ValueError(f"{self._who} with resume=True needs an ms.checkpoint whose directory it can look in.")
        directory = self._savers[0].directory if isinstance(resume, bool) else resume
        for saver in self._savers:
            saver.tidy(directory)
        loader = self._dataset if isinstance(self._dataset, Loader) else None
        return load_run(self._who, directory, state, loader, key, None)

    def _go_on_from(self, saved: SavedRun) -> None:
        """Be where the saved run was: perhaps in the middle of a step, perhaps at its end."""
        loop_state = self.loop_state
        loop_state.elapsed, loop_state.unfinished = self._clock.now.replace(final=saved.elapsed.final), saved.unfinished
        if saved.stopped is not None:
            loop_state.stop(saved.stopped)

    def _data_state(self) -> PyTree:
        if self._batches is None:
            return self._opening["data_state"]
        return self._batches.state if self._rewound is None else self._rewound

    def _position(self) -> tuple[dict[str, Any], PyTree]:
        if self._batches is None and self._saved is not None:
            position = self._saved.position
            return position, self._saved.data_state if position["kind"] == "stream" else None
        loader, iterator = (self._dataset if isinstance(self._dataset, Loader) else None), None
        if isinstance(self._batches, Batches):  # whatever state such an iterator shows, a loop cannot make one at it
            iterator = self._batches.iterator
        return save_position(None if iterator is not None else self._data_state(), iterator, loader)

    def run(self) -> LoopOutput:
        """Run to the end and return what came of it."""
        loop_state, interrupted = self.loop_state, False
        stack: list[Run] = _running.__dict__.setdefault("stack", [])
        if stack:
            # What ends the outermost run ends those inside of it, so there is one count of interrupts for all.
            loop_state.parent = stack[-1].loop_state
            self._interrupts, self._preemption = stack[0]._interrupts, stack[0]._preemption
        self._listen(outermost=not stack)
        stack.append(self)
        begun = time.perf_counter()
        try:
            interrupted = self._run_and_end()
        finally:
            stack.pop()
            if loop_state.parent is None:
                self._interrupts.restore()
            else:
                loop_state.parent.waits.evaluation += time.perf_counter() - begun
                loop_state.parent.cut_short = interrupted
        output = self._output(interrupted)
        if self._interrupts.terminated and not stack:
            raise Preempted(output)
        return output

    def _listen(self, *, outermost: bool) -> None:
        """Have Ctrl-C and, where there is something to save with, SIGTERM end the run behind its step."""
        if self._catches and outermost:
            self._interrupts.install()
        if self._savers and self._preemption is None:
            self._preemption = PreemptionPoint.of_several_processes()
            if self._preemption is None:
                self._interrupts.install_termination()

    def _run_and_end(self) -> bool:
        """Run, and end what has begun however it went; whether it was interrupted."""
        loop_state, interrupted, failure = self.loop_state, False, None
        try:
            interrupted = self._begin_and_step()
        except Terminated:
            loop_state.reason, interrupted = "terminated", True
        except KeyboardInterrupt as error:
            loop_state.reason, loop_state.failed, interrupted = "interrupted", self._in_step, True
            failure = None if self._catches else error
        except BaseException as error:
            loop_state.failed, failure = True, error
        if failure is not None:
            self._annotate(failure)
        try:
            self._end()
        except BaseException as error:
            if failure is None:
                self._annotate(error)
                raise
            failure.add_note(f"Ending the loop failed, too: {type(error).__name__}: {error}")
        if failure is not None:
            raise failure
        return interrupted

    def _begin_and_step(self) -> bool:
        """All there is to do; whether an interrupt ended it."""
        self._in_step = True
        if self._savers and isinstance(self._dataset, Loader):
            contents_of(self._dataset)  # samples are read for it: now, and not in a hurry when SIGTERM has come
        for part in self.loop_state.callbacks:
            part.start(self.loop_state)
        if self._call(self._on_start):
            return True
        self._commit()
        if self._finish_saved_step():
            return True
        self._in_step = False
        if self._is_over():
            self.loop_state.reason = self.loop_state.reason or "it was at its end before its first step"
        elif self._steps():
            return True
        return self._final_tasks()

    def _is_over(self) -> bool:
        """Whether there is no step left to be done."""
        if self.loop_state.stop_iteration:
            return True
        if isinstance(self._stop, Period) or self._saved is not None:
            return self._stops is not None and bool(self._stops(self.loop_state.elapsed))
        return False

    def _steps(self) -> bool:
        """All steps; whether an interrupt ended them."""
        loop_state, clock, waits, last = self.loop_state, self._clock, self.loop_state.waits, self._last
        batches = self._batches = self._open() if self._batches is None else self._batches
        tasks, observers, interrupts = self._tasks, self._observers, self._interrupts
        commit, in_flight, perf_counter = loop_state.history.commit, self._in_flight.add, time.perf_counter
        where = _position_of(batches)
        while True:
            begun, before = perf_counter(), where()
            interrupts.waiting = where is not _nowhere
            try:
                if interrupts.terminated:
                    raise Terminated
                loop_state.batch = next(batches)
            except StopIteration:
                loop_state.reason = "the data ended"
                return self._interrupted()  # which may be what has ended them
            except (Terminated, KeyboardInterrupt):
                self._rewound = before  # the batch may be here already, and will not be used
                raise
            finally:
                interrupts.waiting = False
            self._in_step = True
            now = perf_counter()
            waits.data += now - begun
            loop_state.elapsed = elapsed = clock.tick(batches.samples, now)
            elapsed.final = elapsed.steps == last
            in_flight(loop_state.logs, loop_state.state)  # of the step before: what is drawn meanwhile costs no time
            loop_state.logs = Logs()
            for task in tasks:
                if task.schedule is None or task.schedule(elapsed):
                    self._calling = task
                    output = task.call(loop_state)
                    if loop_state.cut_short:
                        return self._leave_unfinished(task, ending=False)
                    if output is not None:
                        absorb(loop_state, output, task.name)
                    if loop_state.stop_iteration:
                        break
            self._calling = None
            logs = loop_state.logs
            if logs:
                commit(elapsed, logs)
            if observers:
                self._observe(1 if logs else 0)
            self._in_step = False
            interrupted = self._ended(elapsed)
            if interrupted is not None:
                return interrupted

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
            self._interrupts.terminated = True
        return True if self._interrupted() else None

    def _interrupted(self) -> bool:
        """Whether an interrupt has come, which is then the reason."""
        if not self._interrupts.check():
            return False
        self.loop_state.reason = "terminated" if self._interrupts.terminated else "interrupted"
        return True

    def _open(self, start: Elapsed | None = None, data_state: PyTree = None) -> Batches | LoaderBatches:
        stop = self._stop if isinstance(self._stop, Period) else None
        opening = self._opening if data_state is None else {**self._opening, "data_state": data_state}
        return open_batches(
            self._who,
            self._dataset,
            start=self._clock.now if start is None else start,
            stop=stop,
            position=None if self._saved is None else self._saved.position,
            **opening,
        )

    def _call(self, tasks: list[Task], *, ending: bool = False, in_step: bool = False) -> bool:
        """Call some tasks that are due; whether an interrupt kept one of them from being done."""
        loop_state = self.loop_state
        for task in tasks:
            self._calling = task
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
        if self.loop_state.logs:
            self.loop_state.history.commit(self.loop_state.elapsed, self.loop_state.logs)

    def _observe(self, rows: int) -> None:
        """Show observers that are due the newest rows: so many, or only the last one if they are not always due."""
        loop_state, stop = self.loop_state, len(self.loop_state.history)
        for task in self._observers:
            if task.schedule is None or task.schedule(loop_state.elapsed):
                self._calling = task
                task.callback.observe(loop_state, stop - (rows if task.schedule is None else min(rows, 1)), stop)
        self._calling = None

    def _final_tasks(self) -> bool:
        """What is due at the last step because it turned out to be the last; whether an interrupt ended it."""
        loop_state, elapsed = self.loop_state, self.loop_state.elapsed
        if elapsed.final or elapsed.steps == 0 or (self._batches is None and self._saved is None):
            return False
        loop_state.elapsed = elapsed.replace(final=True)
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
            task.call(loop_state)
        return False

    def _leave_unfinished(self, task: Task, *, ending: bool) -> bool:
        """Keep what the step has logged so far, and remember where to go on with it."""
        loop_state = self.loop_state
        self._commit()
        loop_state.unfinished = (self._tasks.index(task), ending) if task in self._tasks else None
        loop_state.reason = "terminated" if self._interrupts.terminated else "interrupted"
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
        if self._batches is not None:
            self.loop_state.batch = next(self._batches)

    def _end(self) -> None:
        """Save, call what comes at the end, and let go of everything, whatever of it fails."""
        loop_state = self.loop_state
        with contextlib.ExitStack() as ending:  # which goes from the last to the first
            if self._batches is not None:
                ending.callback(self._batches.close)
            for part in reversed(loop_state.callbacks):
                if part not in self._savers:
                    ending.callback(part.finish, loop_state)
            ending.callback(self._call_on_end)
            for saver in self._savers:
                ending.callback(saver.finish, loop_state)

    def _call_on_end(self) -> None:
        self.loop_state.logs = Logs()
        self._call(self._on_end)
        self._commit()

    def _annotate(self, error: BaseException) -> None:
        """Say where the error comes from, and keep what there is."""
        loop_state = self.loop_state
        where = "" if self._calling is None else f" in {self._calling.name}"
        error.add_note(
            f"Raised{where} at step {loop_state.elapsed.steps} of {self._who}. State, history and elapsed so far are "
            "in the exception's loop_output."
        )
        if not hasattr(error, "loop_output"):
            error.loop_output = self._output(False)  # type: ignore[attr-defined]

    def _output(self, interrupted: bool) -> LoopOutput:
        loop_state = self.loop_state
        output = LoopOutput(loop_state.state, loop_state.history, loop_state.elapsed)
        output.data_state, output.reason, output.interrupted = loop_state.data_state, loop_state.reason, interrupted
        return output


def _nowhere() -> None:
    """Where an iterator is that keeps its state to itself."""


def _position_of(batches: Batches | LoaderBatches) -> Callable[[], PyTree]:
    """What tells where the data are before a batch, so that they can be there again if it does not come to be used."""
    if isinstance(batches, Batches):
        return _nowhere if hasattr(batches.iterator, "get_state") else lambda: None  # which is counted by the steps

    def state() -> PyTree:
        try:
            return batches.state
        except RuntimeError:  # batches have overtaken others
            return None

    return state
