"""Several steps as one program, cut where something is due in between."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millstream._core.errors import describe_value
from millstream.loops._callback import absorb, arguments, bind, is_compiled
from millstream.loops._dataset import Loader, loader_state
from millstream.loops._elapsed import Elapsed
from millstream.loops._history import History
from millstream.loops._logs import Logs
from millstream.loops._loop_state import LoopState
from millstream.loops._tasks import Task


class Body:
    """Compiled steps, one after the other, as the body of a scan. Equal if the steps are, so programs are found again.

    Args:
        tasks: Whose callbacks are traced.
        epoch: How long an epoch is, as unit and number.
    """

    def __init__(self, tasks: list[Task], epoch: tuple[str, float] | None) -> None:
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

    def __call__(self, carry: tuple[Any, Elapsed], batch: Any, mask: jax.Array) -> tuple[tuple[Any, Elapsed], Logs]:
        state, before = carry
        if not self.times:
            return self._run(state, Elapsed(), batch, mask)
        samples = before.samples + jnp.sum(mask, dtype=jnp.int32)
        elapsed = before.replace(steps=before.steps + 1, samples=samples, samples_before=before.samples)
        if self._epoch is not None and self._epoch[0] in ("steps", "samples"):
            epochs = getattr(elapsed, self._epoch[0]) // jnp.int32(self._epoch[1])
            starts = (before.epochs != before.epochs_before) | (before.steps == 0)
            elapsed = elapsed.replace(epochs=epochs, epochs_before=before.epochs, starts_epoch=starts)
        return self._run(state, elapsed, batch, mask)

    def _run(self, state: Any, elapsed: Elapsed, batch: Any, mask: jax.Array) -> tuple[tuple[Any, Any], Logs]:
        loop_state = LoopState(state, History(), elapsed, (batch, mask))
        for call, name in self._calls:
            output = call(loop_state)
            if output is not None:
                absorb(loop_state, output, name)
        return (loop_state.state, elapsed if self.times else None), loop_state.logs


class FusedData:
    """A loader whose batches are made and used inside of programs of several steps.

    Args:
        who: Who speaks in errors.
        loader: The loader.
        key: The key of its run.
        data_state: The state to begin with, instead of a key.
        start: How far the run is.
        width: The most steps per program.
    """

    def __init__(self, who: str, loader: Any, key: Any, data_state: Any, start: Elapsed, width: int) -> None:
        if not isinstance(loader, Loader) or not hasattr(loader, "run_steps"):
            raise TypeError(
                f"{who} can fuse steps only over a DataLoader, whose batches a program can make for itself. "
                f"Got {describe_value(loader)}. Leave fuse out."
            )
        self._loader: Any = loader
        self._width = width
        state = loader_state(who, loader, key, data_state, start.steps)
        self._samples_at = self._loader.sample_counter(state)
        self._drawn = 0
        self.state = state

    def samples(self, count: int) -> list[int]:
        """How many samples each of the next steps has."""
        return self._samples_at(range(self._drawn, self._drawn + count))

    def run(self, body: Body, state: Any, now: Elapsed, count: int) -> tuple[Any, Logs]:
        """So many steps; the state after them, and what they logged, one row per step in front of unused ones."""
        carry = (state, _as_carry(now) if body.times else None)
        self.state, (state, _), logs = self._loader.run_steps(self.state, carry, body, count, width=self._width)
        self._drawn += count
        return state, logs

    def close(self) -> None:
        """End the reading that programs have begun."""
        self._loader.end_steps()


def _as_carry(now: Elapsed) -> Elapsed:
    """An elapsed whose numbers have the types that they keep inside of a program."""
    epochs, epochs_before = (None if count is None else np.int32(count) for count in (now.epochs, now.epochs_before))
    numbers: list[Any] = [
        np.int32(now.steps),
        np.int32(now.samples),
        epochs,
        np.float32(now.time),
        np.float32(now.date_start),
        np.int32(now.samples_before),
        epochs_before,
        np.float32(now.time_before),
        np.bool_(now.starts_epoch),
        np.bool_(False),
    ]
    return Elapsed(*numbers)


def split_tasks(who: str, tasks: list[Task]) -> tuple[list[Task], list[Task], list[Task]]:
    """Tasks as those before the compiled steps, these steps, and those behind them."""
    can = [task.schedule is None and is_compiled(task.callback) for task in tasks]
    if not any(can):
        raise ValueError(
            f"{who} has nothing to fuse: fuse needs a compiled step (jax.jit, managed.train_step) that is due at every "
            "step."
        )
    first = can.index(True)
    last = next((number for number in range(first, len(can)) if not can[number]), len(can))
    before, steps, behind = tasks[:first], tasks[first:last], tasks[last:]
    for task in (*before, *behind):
        if task.schedule is None:
            raise ValueError(
                f"{who} cannot fuse steps around {task.name}, which is due at every step and is no compiled function. "
                "Give it a rarer schedule, make it an ms.Observer if it only looks at logs, or leave fuse out."
            )
    return before, steps, behind


def steps_until_due(
    before: list[Task], behind: list[Task], stop: Any, now: Elapsed, ahead: "Ahead", most: int, epoch: int | None
) -> int:
    """How many steps can be taken at once.

    Args:
        before: Tasks that come before a step: they are done before the first, and none may be due at another one.
        behind: Tasks that come behind a step: they are done behind the last, and none may be due at another one.
        stop: A function of the elapsed that ends the run.
        now: How far it is.
        ahead: The elapsed of coming steps, for schedules that have to be asked.
        most: No more than so many steps.
        epoch: Steps of an epoch, if it is given in steps.
    """
    count = most
    for task in behind:
        assert task.schedule is not None
        count = int(min(count, _first_due(task.schedule, now.steps, epoch, ahead, count) - now.steps))
    if stop is not None:
        count = min(count, next((number + 1 for number in range(count) if stop(ahead[number])), count))
    for task in before:
        assert task.schedule is not None
        # What is due at the next step is done before it, so only later ones count.
        later = _first_due(task.schedule, now.steps + 1, epoch, ahead, count)
        count = int(min(count, max(later - now.steps - 1, 1)))
    return count


def _first_due(schedule: Any, steps: int, epoch: int | None, ahead: "Ahead", most: int) -> float:
    """The first step behind `steps` at which a schedule is due."""
    told = schedule.next_due(steps, epoch)
    if told is not None:
        return told
    for number in range(most):
        elapsed = ahead[number]
        if elapsed.steps > steps and schedule(elapsed):
            return elapsed.steps
    return math.inf


class Ahead:
    """The elapsed of coming steps, made when it is asked for. Their time is now: it cannot be foreseen.

    Args:
        moments: Makes the elapsed of the next so many steps.
        most: How many that could be.
    """

    def __init__(self, moments: Any, most: int) -> None:
        self._moments = moments
        self._most = most
        self._made: list[Elapsed] | None = None

    def __getitem__(self, number: int) -> Elapsed:
        if self._made is None:
            self._made = self._moments(self._most)
        assert self._made is not None
        return self._made[number]
