"""Calling the tasks of a run: what they return, commit to the history, show to observers, or leave undone."""

import time
import warnings
from typing import Any

import jax
import numpy as np

from millstream.loops._dataset import batch_size
from millstream.loops._run_parts import RunParts
from millstream.loops._tasks import Task
from millstream.loops.column import RealRows
from millstream.loops.elapsed import Elapsed
from millstream.loops.log_entries import Logs, as_logs
from millstream.loops.loop_state import LoopState
from millstream.loops.metrics import with_computed
from millstream.text.errors import describe_value, shortened


def apply_output(loop_state: LoopState, output: Any, callback: str) -> None:
    """Take in what a callback returned: logs, a state, or both.

    Args:
        loop_state: Whose state and logs change.
        output: Anything but None.
        callback: The callback's name, for errors.
    """
    if (
        type(output) is tuple
        and len(output) == 2
        and (isinstance(output[0], Logs) or _is_pair(output, loop_state.state))
    ):
        new, output = output
        if type(new) is dict and _is_first(loop_state.elapsed):
            _refuse_state_as_logs(callback, loop_state.state, new, output)
        if new is not None:
            _add_logs(loop_state, new if type(new) is Logs else as_logs(callback, new))
        if output is not None:
            loop_state.state = output
    elif isinstance(output, Logs):
        _add_logs(loop_state, output)
    elif type(output) in (tuple, dict, list) and type(loop_state.state) not in (type(output), type(None)):
        raise _not_a_state(callback, loop_state.state, output)
    else:
        if _is_first(loop_state.elapsed):
            _refuse_loss(callback, loop_state.state, output)
        loop_state.state = output


def _is_pair(output: tuple[Any, Any], state: Any) -> bool:
    """Whether a tuple without `Logs` is (logs, state), and not a state that is a tuple."""
    if output[0] is not None and type(output[0]) is not dict:
        return False
    if type(state) is not tuple:
        return True
    if output[0] is None:
        return jax.tree.structure(output) != jax.tree.structure(state)
    return jax.tree.structure(output[1]) == jax.tree.structure(state)


def _add_logs(loop_state: LoopState, new: Logs) -> None:
    new = with_computed(new)
    # Logs are taken over as they are, and copied when more come: a callback may hand out the same object every time.
    loop_state.logs = (
        Logs({name: dict(old) for name, old in loop_state.logs.items()}).merge(new) if loop_state.logs else new
    )


def _is_first(elapsed: Elapsed) -> bool:
    """Whether this is the first step, or is traced: what a step returns is looked at closely once."""
    return not isinstance(elapsed.steps, int) or elapsed.steps <= 1


def _not_a_state(callback: str, state: Any, output: Any) -> TypeError:
    return TypeError(
        f"{callback} may return nothing, ms.logs(), a state, or (logs, state). The state is {_kind(state)}, and it "
        f'returned {_kind(output)}. To log a loss, write: return ms.logs().add_metric("loss", loss), state.'
    )


def _refuse_loss(callback: str, state: Any, output: Any) -> None:
    """Refuse what can only be a loss, or a state and a loss: taken for the state, it would replace the model."""
    if state is None or output is state:
        return
    if type(output) is tuple and len(output) == 2:
        before = jax.tree.structure(state)
        wrong = before in map(jax.tree.structure, output) and jax.tree.structure(output) != before
    elif type(output) is dict:
        named = type(state) is dict and len(output) > 0 and not state.keys() & output.keys()
        wrong = named and all(map(_is_one_number, output.values()))
    else:
        wrong = _is_one_number(output) and not _is_one_number(state)
    if wrong:
        raise _not_a_state(callback, state, output)


def _refuse_state_as_logs(callback: str, state: Any, new: dict[str, Any], output: Any) -> None:
    """Refuse (state, loss) where the state is a dict, which would be taken for logs."""
    before = jax.tree.structure(state)
    if jax.tree.structure(new) == before != jax.tree.structure(output):
        raise _not_a_state(callback, state, (new, output))


def _is_one_number(value: Any) -> bool:
    return isinstance(value, int | float) or getattr(value, "shape", None) == ()


def _kind(value: Any) -> str:
    """A value as it is shown in an error; of arrays, only what they are."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    if not any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(value)):
        return describe_value(value)
    if type(value) is tuple and len(value) <= 4:
        return f"({', '.join(map(_kind, value))})"
    return f"a dict of {shortened(list(value))}" if type(value) is dict else type(value).__name__


def warn_of_rows(caller: str, logs: Logs, rows: int) -> None:
    """Warn of losses and metrics with a value per row of the batch: there is no mean, bar or curve of those."""
    for (collection, name), value in logs.entries():
        if rows > 1 and collection in ("losses", "metrics") and getattr(value, "shape", ())[:1] == (rows,):
            warnings.warn(
                f"{caller}: {collection}.{name} has a value for each of the {rows} rows of the batch, so there is no "
                f"mean, bar or curve of it. Log one number, such as jnp.sum({name} * mask) / jnp.sum(mask); for values "
                "per row there is add_output.",
                stacklevel=2,
            )


class TaskCalls:
    """Calls the tasks of a run that are due."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts

    def call(self, tasks: list[Task], *, ending: bool = False, in_step: bool = False, drawn: bool = True) -> bool:
        """Call some tasks that are due; whether an interrupt kept one of them from being done.

        Args:
            tasks: The tasks.
            ending: Whether they are due because the run ends.
            in_step: Whether the others are left out when one of them stops the run.
            drawn: Whether the batch of the step has been drawn: if not, the step will be done again as a whole.
        """
        loop_state = self._parts.loop_state
        for task in tasks:
            self._parts.calling, loop_state.cut_short = task, False
            output = task.call(loop_state)
            if loop_state.cut_short:
                loop_state.reason = self._interruption()
                if drawn:
                    self._leave_unfinished(task, ending=ending)
                return True
            if output is not None:
                apply_output(loop_state, output, task.name)
            if in_step and loop_state.stop_iteration:
                break
        self._parts.calling = None
        return False

    def commit(self) -> None:
        """Keep what the step has logged, of outputs only real rows."""
        loop_state, logs = self._parts.loop_state, self._parts.loop_state.logs
        if logs and loop_state.batch is not None and not len(loop_state.history):
            warn_of_rows(self._parts.caller, logs, batch_size(loop_state.batch))
        if logs.get("outputs") and self._parts.batches is not None:
            logs = _with_real_rows(logs, self._parts.batches.mask)
        if logs:
            loop_state.history.commit(loop_state.elapsed, logs)

    def observe(self, rows: int) -> None:
        """Show observers that are due the newest rows: that many, or only the last one if they are not always due."""
        loop_state, stop, begun = self._parts.loop_state, len(self._parts.loop_state.history), time.perf_counter()
        for task in self._parts.observers:
            if task.schedule is None or task.schedule(loop_state.elapsed):
                self._parts.calling = task
                task.callback.observe(loop_state, stop - (rows if task.schedule is None else min(rows, 1)), stop)
        self._parts.calling = None
        loop_state.waits.callbacks += time.perf_counter() - begun

    def final_tasks(self) -> bool:
        """What is due at the last step because it turned out to be the last; whether an interrupt ended it."""
        loop_state, elapsed = self._parts.loop_state, self._parts.loop_state.elapsed
        if elapsed.final or elapsed.steps == 0 or (self._parts.batches is None and self._parts.saved is None):
            return False
        loop_state.elapsed = elapsed.replace(final=True)
        self._parts.in_step = True  # a run is saved as one that has ended only if all of this is done
        return self._finish_step(
            self._due_at_end(self._parts.tasks), self._due_at_end(self._parts.observers), ending=True
        )

    def _due_at_end(self, tasks: list[Task]) -> list[Task]:
        """The tasks that are due at this step only because it is the last."""
        final = self._parts.loop_state.elapsed.replace(final=True)
        return [
            task
            for task in tasks
            if task.schedule is not None and task.schedule(final) and not task.schedule(final.replace(final=False))
        ]

    def _finish_step(self, tasks: list[Task], observers: list[Task], *, ending: bool) -> bool:
        """Do what is left of a step; whether an interrupt ended it."""
        loop_state = self._parts.loop_state
        loop_state.logs = Logs()
        if self.call(tasks, ending=ending, in_step=not ending):
            return True
        loop_state.unfinished = None
        self.commit()
        for task in observers:
            self._parts.calling = task
            task.call(loop_state)
        self._parts.calling = None
        return False

    def _leave_unfinished(self, task: Task, *, ending: bool) -> None:
        """Keep what the step has logged so far, and remember where to continue with it."""
        loop_state = self._parts.loop_state
        self.commit()
        loop_state.unfinished = (self._parts.tasks.index(task), ending) if task in self._parts.tasks else None

    def finish_saved_step(self, first: int, ending: bool) -> bool:
        """Do what an interrupt had left undone of the step that was saved; whether one has come again."""
        parts = self._parts
        if ending:
            left, observers = self._due_at_end(parts.tasks[first:]), self._due_at_end(parts.observers)
        else:
            elapsed = parts.loop_state.elapsed
            left, observers = due(parts.tasks[first:], elapsed), due(parts.observers, elapsed)
        return self._finish_step(left, observers, ending=ending)

    def data_ended(self) -> bool:
        """The data have ended; whether an interrupt has done that."""
        self._parts.loop_state.reason = "the data ended"
        return self._is_interrupted()

    def check_end(self, elapsed: Elapsed) -> bool | None:
        """Whether an interrupt has ended the steps; None if nothing has."""
        parts, loop_state = self._parts, self._parts.loop_state
        for saver in parts.savers:
            saver.check()
        if loop_state.stop_iteration:
            loop_state.reason = loop_state.reason or "a callback stopped it"
            return False
        if parts.stops is not None and parts.stops(elapsed):
            loop_state.reason = "it reached its stop"
            return False
        if parts.preemption is not None and parts.preemption.reached():
            parts.interrupts.terminate()
        return True if parts.interrupts.asked and self._is_interrupted() else None

    def _is_interrupted(self) -> bool:
        """Whether an interrupt has come, which is then the reason."""
        if not self._parts.interrupts.check():
            return False
        self._parts.loop_state.reason = self._interruption()
        return True

    def _interruption(self) -> str:
        """What has interrupted the run, in a word."""
        return "terminated" if self._parts.interrupts.terminated else "interrupted"


def due(tasks: list[Task], elapsed: Elapsed) -> list[Task]:
    """The tasks that are due at a step."""
    return [task for task in tasks if task.schedule is None or task.schedule(elapsed)]


def _with_real_rows(logs: Logs, mask: np.ndarray | None) -> Logs:
    """Logs whose outputs have only the rows that a mask counts, as far as they have one for each of its rows."""
    if mask is None:
        return logs
    kept = Logs(logs)
    kept["outputs"] = {name: _real_rows(value, mask) for name, value in logs["outputs"].items()}
    return kept


def _real_rows(value: Any, mask: np.ndarray) -> Any:
    if getattr(value, "shape", ())[: mask.ndim] != mask.shape:
        return value
    return RealRows(value, mask) if isinstance(value, jax.Array) else value[mask]
