"""Several steps as one program."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millstream.loops._acting import Acting
from millstream.loops._calls import TaskCalls, apply_output, due, warn_of_rows
from millstream.loops._dataset import Loader, loader_state, past_skips
from millstream.loops._dispatch_limiter import array_of
from millstream.loops._history import History
from millstream.loops._run_parts import RunParts
from millstream.loops._tasks import Task
from millstream.loops.callback import arguments, bind, is_compiled
from millstream.loops.elapsed import INT32_LIMIT, Elapsed
from millstream.loops.log_entries import Logs
from millstream.loops.loop_state import LoopState
from millstream.loops.saved_run import SavedRun
from millstream.loops.schedules import Epochs, Period
from millstream.loops.skips import Skips
from millstream.pipeline.placement import readable
from millstream.pipeline.state import LoaderState
from millstream.pipeline.static_part import is_number
from millstream.plan.phases import EpochLengths
from millstream.text.errors import describe_value, table

_MOST_ROWS = 2**30  # of the batches of a program, if it is unknown how many rows count


class Carry(NamedTuple):
    """What a program hands from step to step: the state, and its timing if a step sees it.

    That is the elapsed, the last step, and after which steps how many batches are left out.
    """

    state: Any
    timing: Any


class Body:
    """Compiled steps, one after the other, as the body of a scan. Equal if the steps are, so programs are found again.

    Args:
        tasks: Whose callbacks are traced.
        epoch: How long an epoch is, as unit and number, or how long each one is.
    """

    def __init__(self, tasks: list[Task], epoch: tuple[str, float] | EpochLengths | None) -> None:
        self._steps = tuple(getattr(task.callback, "traced", task.callback) for task in tasks)
        self._epoch = epoch
        # Carrying the elapsed costs more than most steps, so it is only done for those who can see it.
        self.times = any(
            hasattr(step, "__loop_callback__") or arguments(task.name, step) > 2
            for task, step in zip(tasks, self._steps, strict=True)
        )
        self._calls = [(bind(task.name, step), task.name) for task, step in zip(tasks, self._steps, strict=True)]

    def __hash__(self) -> int:
        return hash((self._steps, self._epoch))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Body) and (self._steps, self._epoch) == (other._steps, other._epoch)

    def __call__(self, carry: Carry, batch: Any, mask: jax.Array) -> tuple[Carry, Logs]:
        state, timing = carry
        elapsed = self._after(timing[0], timing[1], timing[2], mask) if self.times else Elapsed()
        loop_state = LoopState(state, History(), elapsed, (batch, mask))
        for call, name in self._calls:
            before = jax.tree.leaves_with_path(loop_state.state)  # taken now: a module may be changed in place
            output = call(loop_state)
            if output is not None:
                apply_output(loop_state, output, name)
            _refuse_new_numbers(name, before, loop_state.state)
        warn_of_rows("fuse=", loop_state.logs, mask.size)
        return Carry(loop_state.state, (elapsed, *timing[1:]) if self.times else None), loop_state.logs

    def _after(self, before: Elapsed, last: jax.Array, gaps: jax.Array | None, mask: jax.Array) -> Elapsed:
        """How far the run is one step later."""
        count: Any = before.samples
        steps: Any = before.steps + 1
        samples = count + jnp.sum(mask, dtype=jnp.int32).astype(count.dtype)
        elapsed = before.replace(steps=steps, samples=samples, samples_before=count, final=steps == last)
        reached = steps if gaps is None else steps + jnp.sum(jnp.where(gaps[0] <= steps, gaps[1], 0), dtype=steps.dtype)
        if isinstance(self._epoch, EpochLengths):
            epochs: Any = self._epoch.completed_traced(jnp, reached)
        elif self._epoch is None or self._epoch[0] not in ("steps", "samples"):
            return elapsed
        else:
            reached = reached if self._epoch[0] == "steps" else samples
            epochs = (reached // jnp.asarray(self._epoch[1], reached.dtype)).astype(jnp.int32)
        starts = (before.epochs != before.epochs_before) | (before.steps == 0)
        return elapsed.replace(epochs=epochs, epochs_before=before.epochs, starts_epoch=starts)


class _WithMask(NamedTuple):
    """The steps of a body, which also say the mask of each batch."""

    body: Body

    def __call__(self, carry: Any, batch: Any, mask: jax.Array) -> tuple[Any, tuple[Logs, jax.Array]]:
        carry, logs = self.body(carry, batch, mask)
        return carry, (logs, mask)


def _refuse_new_numbers(name: str, before: list[tuple[Any, Any]], after: Any) -> None:
    """Refuse a step that makes a Python number of another, as eqx.filter_jit allows: done once, it would be wrong."""
    changed = [
        (f"state{jax.tree_util.keystr(path)}", f"{describe_value(old)} became {describe_value(new)}")
        for (path, old), new in zip(before, jax.tree.leaves(after), strict=False)
        if is_number(old) and is_number(new) and (type(old), repr(old)) != (type(new), repr(new))
    ]
    if changed:
        raise TypeError(
            f"fuse= runs several steps as one program, which can change arrays and no Python numbers. {name} changed:\n"
            f"{table(changed)}\nKeep in the state what a step changes as an array, such as jnp.asarray(0)."
        )


class FusedData:
    """A loader whose batches are made and used inside programs of several steps.

    Args:
        caller: The caller's name, for errors.
        loader: The loader.
        key: The key of its run.
        data_state: The state to begin with, instead of a key.
        start: How far the run is.
        last: Its last step; infinity if that is not known.
        width: The most steps per program.
        acting: Sets the policy before each batch; None if there is none to set.
        skips: Batches that are left out.

    Attributes:
        state: The loader's state after the last program.
        mask: None: callbacks of such a run see no batch.
        masks: Those of the batches of the last program, if a stage sets them; they are read when it has ended.
    """

    mask = None

    def __init__(
        self,
        caller: str,
        loader: Any,
        key: Any,
        data_state: Any,
        start: Elapsed,
        last: float,
        width: int,
        acting: Acting | None,
        skips: Skips,
    ) -> None:
        if not isinstance(loader, Loader) or not hasattr(loader, "run_steps"):
            raise TypeError(
                f"{caller} can fuse steps only over a DataLoader, whose batches a program can make for itself. "
                f"Got {describe_value(loader)}. Leave fuse out."
            )
        self._caller = f"{caller} with fuse={width}"
        self._loader: Any = loader
        self._before_fn = None if acting is None else acting.before
        self._last = np.int32(last if last < INT32_LIMIT else 0)
        self._width = width
        self._skips = skips
        self._gaps = np.array(skips.gaps, np.int32).T if skips.ranges else None
        state = loader_state(caller, loader, key, data_state, skips.with_left_out(start.steps))
        self._samples_at = self._loader.sample_counter(state)
        # Where the data are: asking the state would wait for the program that makes it.
        self._first = self._batch = int(state.step) if isinstance(state, LoaderState) else 0
        self.masks: np.ndarray | None = None
        self.state = state

    def most(self) -> float:
        """How many steps the next program can have: up to batches that are left out, and within a phase of the data."""
        batch = self._skips.seek(self._batch)
        left = getattr(self._loader, "phase_steps_left", lambda step: math.inf)(batch)
        return min(self._width, self._skips.until_next(batch), left)

    def _next_state(self) -> Any:
        """The state before the next batch that is not left out."""
        is_next = self._skips.seek(self._batch) == self._batch
        return self.state if is_next else past_skips(self._loader, self.state, self._skips)

    def samples(self, count: int) -> list[int]:
        """How many samples each of the next steps has."""
        if self._samples_at is None:
            if self._before_fn is not None:
                raise ValueError(
                    f"{self._caller} cannot count samples ahead: a stage sets the mask, and the policy that makes the "
                    "next batches is not known yet. Give schedules and stop= in steps or epochs, or leave fuse out."
                )
            return self._loader.count_samples(self._next_state(), count, width=self._width)
        first = self._skips.seek(self._batch) - self._first
        return self._samples_at(range(first, first + count))

    def run(self, body: Body, state: Any, now: Elapsed, count: int) -> tuple[Any, Logs, list[int]]:
        """Some steps; the state after them, what they logged (a row for each, and unused ones), and their samples."""
        samples = [_MOST_ROWS] if self._samples_at is None else self.samples(count)
        timing = (_as_carry(now, now.samples + sum(samples)), self._last, self._gaps) if body.times else None
        steps: Any = _WithMask(body) if self._samples_at is None else body
        self.state, (state, _), logs = self._loader.run_steps(
            self._next_state(),
            Carry(state, timing),
            steps,
            count,
            width=self._width,
            before_fn=self._before_fn,
            caller=self._caller,
        )
        self._batch = self._skips.seek(self._batch) + count
        if self._samples_at is None:
            logs, masks = logs
            self.masks = masks = np.asarray(readable(masks))[:count]
            samples = np.count_nonzero(masks.reshape(count, -1), axis=1).tolist()
        return state, logs, samples

    def close(self) -> None:
        """End the reading that programs have begun."""
        self._loader.end_steps()


def _as_carry(now: Elapsed, samples: int) -> Elapsed:
    """An elapsed whose numbers have the types that they keep inside a program, up to that many samples."""
    kind: Any = np.int32 if samples < INT32_LIMIT else np.float32
    epochs, epochs_before = (None if count is None else np.int32(count) for count in (now.epochs, now.epochs_before))
    numbers: list[Any] = [
        np.int32(now.steps),
        kind(now.samples),
        epochs,
        np.float32(now.time),
        np.float32(now.date_start),
        kind(now.samples_before),
        epochs_before,
        np.float32(now.time_before),
        np.bool_(now.starts_epoch),
        np.bool_(False),
    ]
    return Elapsed(*numbers)


def split_tasks(caller: str, tasks: list[Task]) -> tuple[list[Task], list[Task], list[Task]]:
    """Tasks as those before the compiled steps, these steps, and those after them."""
    can = [task.schedule is None and is_compiled(task.callback) for task in tasks]
    if not any(can):
        raise ValueError(
            f"{caller} has nothing to fuse: fuse needs a compiled step (jax.jit, managed.train_step) that is due at "
            "every step."
        )
    first = can.index(True)
    last = next((number for number in range(first, len(can)) if not can[number]), len(can))
    before, steps, after = tasks[:first], tasks[first:last], tasks[last:]
    for task in (*before, *after):
        if task.schedule is None:
            raise ValueError(
                f"{caller} cannot fuse steps around {task.name}, which is due at every step and not compiled. "
                "Give it a rarer schedule, make it an ms.Observer if it only looks at logs, or leave fuse out."
            )
    return before, steps, after


def steps_until_due(
    before: list[Task], after: list[Task], stop: Any, ahead: "Ahead", most: int, epochs: Epochs | None
) -> int:
    """How many steps can be taken at once.

    Args:
        before: Tasks that come before a step: they are done before the first, and none may be due at another one.
        after: Tasks that come after a step: they are done after the last, and none may be due at another one.
        stop: A function of the elapsed that ends the run.
        ahead: How far it is, and the elapsed of coming steps, for schedules that have to be asked.
        most: No more than that many steps.
        epochs: Where epochs end, if they are given in steps.
    """
    count, now = most, ahead.now
    for task in after:
        assert task.schedule is not None
        count = int(min(count, _first_due(task.schedule, now.steps, epochs, ahead, count) - now.steps))
    if stop is not None:
        count = min(count, next((number + 1 for number in range(count) if stop(ahead[number])), count))
    for task in before:
        assert task.schedule is not None
        # What is due at the next step is done before it, so only later ones count.
        later = _first_due(task.schedule, now.steps + 1, epochs, ahead, count)
        count = int(min(count, max(later - now.steps - 1, 1)))
    return count


def _first_due(schedule: Any, steps: int, epochs: Epochs | None, ahead: "Ahead", most: int) -> float:
    """The first step after `steps` at which a schedule is due."""
    told = schedule.next_due(steps, epochs)
    if told is not None:
        # Nobody foretells the end of a run. A schedule that is due now, for whatever reason, is cut there for nothing.
        ends = ahead.last <= ahead.now.steps + most and schedule(ahead.now.replace(final=True))
        return min(told, ahead.last) if ends else told
    for number in range(most):
        elapsed = ahead[number]
        if elapsed.steps > steps and schedule(elapsed):
            return elapsed.steps
    return math.inf


class Ahead:
    """The elapsed of coming steps, made when it is asked for. Their time is now: it cannot be foreseen.

    Args:
        now: How far the run is.
        last: Its last step; infinity if that is not known.
        moments: Makes the elapsed of the next steps.
    """

    def __init__(self, now: Elapsed, last: float, moments: Callable[[], list[Elapsed]]) -> None:
        self.now = now
        self.last = last
        self._moments = moments
        self._made: list[Elapsed] = []

    def __getitem__(self, number: int) -> Elapsed:
        if not self._made:
            self._made = self._moments()
            self._made[-1].final = self._made[-1].steps == self.last
        return self._made[number]


class FusedSteps:
    """Does up to `width` steps of a run per program. Where something is due in between, a program does fewer."""

    def __init__(self, parts: RunParts, calls: TaskCalls, width: int) -> None:
        self._parts = parts
        self._calls = calls
        self._width = width
        self._before, self._compiled, self._after = split_tasks(parts.caller, parts.tasks)
        self._cuts = [*self._after, *(task for task in parts.observers if task.schedule is not None)]
        told = isinstance(parts.stop, Period) and list(parts.stop.units) == ["steps"]
        self._asked = None if told else parts.stops

    def run(self) -> bool:
        """All steps; whether an interrupt ended them."""
        parts, calls = self._parts, self._calls
        loop_state, clock, last = parts.loop_state, parts.clock, math.inf if parts.last is None else parts.last
        data = self._open(parts.data_state, last)
        body = Body(self._compiled, clock.epoch)
        nothing = Body([], clock.epoch)
        while True:
            if parts.weights is not None and parts.weights.is_new:
                data = self._open(parts.draw_by_new_weights(data.state), last)
            now, most = clock.now, int(min(data.most(), last - clock.now.steps))
            ahead = Ahead(now, last, lambda data=data, most=most: clock.ahead(data.samples(most)))
            count = steps_until_due(self._before, self._cuts, self._asked, ahead, most, clock.epochs)
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
            interrupted = calls.check_end(elapsed)
            if interrupted is not None:
                return interrupted

    def _open(self, data_state: Any, last: float) -> FusedData:
        parts = self._parts
        parts.batches = data = FusedData(
            parts.caller,
            parts.dataset,
            parts.key,
            data_state,
            parts.clock.now,
            last,
            self._width,
            parts.acting,
            parts.skips,
        )
        return data

    def _call_before(self, ahead: Ahead) -> bool:
        """What is due before the next step; whether an interrupt ended it."""
        if not self._before or not self._may_be_due(ahead):
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
        told = [schedule.next_due(steps - 1, self._parts.clock.epochs) for schedule in schedules]
        return steps == ahead.last or any(due is None or due <= steps for due in told)

    def draw_again(self, saved: SavedRun) -> None:
        """Nothing: callbacks of such a run see no batch."""

    def note(self) -> str | None:
        """What else to say of an error in the task that is being called."""
        fused = self._parts.calling in self._compiled
        return f"With fuse={self._width}, up to that many steps are one program." if fused else None


def _but(logs: Logs, newer: Logs) -> Logs:
    """Logs without the entries that newer ones have."""
    if not logs:
        return logs
    taken, left = {path for path, _ in newer.entries()}, Logs()
    for path, value in logs.entries():
        if path not in taken:
            left.add_entry(*path, value)
    return left
