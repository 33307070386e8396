"""One run of a loop, from its first batch to whatever ends it."""

import contextlib
import threading
import time
from typing import Any

from millstream.errors import Preempted
from millstream.loops._calls import TaskCalls
from millstream.loops._dataset import Loader, contents_of
from millstream.loops._error_notes import error_notes
from millstream.loops._fused import FusedSteps
from millstream.loops._run_parts import LoopOptions, RunParts
from millstream.loops._steps import Steps
from millstream.loops.log_entries import Logs
from millstream.loops.loop_state import LoopOutput
from millstream.loops.preemption import PreemptionPoint
from millstream.loops.schedules import Period
from millstream.reading.interrupts import Terminated

_running = threading.local()  # runs inside runs, of this thread


class Run:
    """A run: begun, stepped through and ended, whatever happens on the way; see `loop` for its parts."""

    def __init__(self, state: Any, dataset: Any, tasks: Any, options: LoopOptions) -> None:
        self._parts = parts = RunParts(state, dataset, tasks, options)
        self._calls = calls = TaskCalls(parts)
        self._steps = Steps(parts, calls) if options.fuse is None else FusedSteps(parts, calls, options.fuse)

    def run(self) -> LoopOutput:
        """Run to the end and return what came of it."""
        parts, loop_state, interrupted = self._parts, self._parts.loop_state, False
        stack: list[RunParts] = _running.__dict__.setdefault("stack", [])
        if stack:
            # What ends the outermost run ends those inside it, so there is one count of interrupts for all.
            loop_state.parent = stack[-1].loop_state
            parts.interrupts, parts.preemption = stack[0].interrupts, stack[0].preemption
            parts.catches = parts.catches and stack[-1].catches
            parts.show_to(stack[-1])
        self._listen(outermost=not stack)
        stack.append(parts)
        begun = time.perf_counter()
        try:
            interrupted = self._run_and_end()
        finally:
            stack.pop()
            if loop_state.parent is None:
                self._parts.interrupts.restore()
            else:
                loop_state.parent.waits.evaluation += time.perf_counter() - begun
                loop_state.parent.cut_short |= interrupted
        output = self._output(interrupted)
        if self._parts.interrupts.terminated and not stack:
            raise Preempted(output)
        return output

    def _listen(self, *, outermost: bool) -> None:
        """Have Ctrl-C and, where there is something to save with, SIGTERM end the run after its step."""
        if self._parts.catches and outermost:
            self._parts.interrupts.install()
        if self._parts.savers and self._parts.preemption is None:
            self._parts.preemption = PreemptionPoint.of_several_processes()
            if self._parts.preemption is None:
                self._parts.interrupts.install_termination()

    def _run_and_end(self) -> bool:
        """Run, and end what has begun however it went; whether it was interrupted."""
        loop_state, interrupted, failure = self._parts.loop_state, False, None
        try:
            interrupted = self._begin_and_step()
        except Terminated:
            loop_state.reason, interrupted = "terminated", True
        except KeyboardInterrupt as error:
            loop_state.reason, loop_state.failed, interrupted = "interrupted", self._parts.in_step, True
            failure = None if self._parts.catches else error
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
        self._parts.in_step = True
        if self._parts.savers and isinstance(self._parts.dataset, Loader):
            contents_of(self._parts.dataset)  # samples are read for it: now, and not in a hurry when SIGTERM has come
        for part in self._parts.loop_state.callbacks:
            part.start(self._parts.loop_state)
        if self._calls.call(self._parts.on_start):
            return True
        self._calls.commit()
        saved = self._parts.saved
        if saved is not None and saved.unfinished is not None:
            self._steps.draw_again(saved)
            if self._calls.finish_saved_step(*saved.unfinished):
                return True
        self._parts.in_step = False
        if self._is_over():
            self._parts.loop_state.reason = self._parts.loop_state.reason or "it was already finished"
        elif self._steps.run():
            return True
        return self._calls.final_tasks()

    def _is_over(self) -> bool:
        """Whether there is no step left to be done."""
        if self._parts.loop_state.stop_iteration:
            return True
        if isinstance(self._parts.stop, Period) or self._parts.saved is not None:
            return self._parts.stops is not None and bool(self._parts.stops(self._parts.loop_state.elapsed))
        return False

    def _end(self) -> None:
        """Save, call what comes at the end, and release everything, whatever of it fails."""
        loop_state = self._parts.loop_state
        with contextlib.ExitStack() as ending:  # which goes from the last to the first
            if self._parts.batches is not None:
                ending.callback(self._parts.batches.close)
            for part in reversed(loop_state.callbacks):
                if part not in self._parts.savers:
                    ending.callback(part.finish, loop_state)
            ending.callback(self._call_on_end)
            for saver in self._parts.savers:
                ending.callback(saver.finish, loop_state)

    def _call_on_end(self) -> None:
        self._parts.loop_state.logs = Logs()
        for (
            task
        ) in self._parts.on_end:  # one after the other: an interrupt of one of them leaves the others to be called
            self._calls.call([task])
        self._calls.commit()

    def _annotate(self, error: BaseException) -> None:
        """Say where the error comes from, and keep what there is."""
        loop_state = self._parts.loop_state
        where = "" if self._parts.calling is None else f" in {self._parts.calling.name}"
        error.add_note(
            f"Raised{where} at step {loop_state.elapsed.steps} of {self._parts.caller}. State, history and elapsed so "
            "far are in the exception's loop_output."
        )
        more = self._steps.note()
        if more is not None:
            error.add_note(more)
        if not hasattr(error, "loop_output"):
            for note in error_notes(error, self._parts):
                error.add_note(note)
            error.loop_output = self._output(False)  # type: ignore[attr-defined]

    def _output(self, interrupted: bool) -> LoopOutput:
        loop_state = self._parts.loop_state
        output = LoopOutput(loop_state.state, loop_state.history, loop_state.elapsed)
        output.reason, output.interrupted = loop_state.reason, interrupted
        with contextlib.suppress(RuntimeError):  # batches have overtaken others: no state leads on from there
            output.data_state = loop_state.data_state
        return output
