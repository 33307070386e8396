"""Where steps that are one program are cut, because something is due in between."""

import math
from collections.abc import Callable
from typing import Any

from millstream.loops._tasks import Task
from millstream.loops.callback import is_compiled
from millstream.loops.elapsed import Elapsed


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
    before: list[Task], behind: list[Task], stop: Any, ahead: "Ahead", most: int, epoch: int | None
) -> int:
    """How many steps can be taken at once.

    Args:
        before: Tasks that come before a step: they are done before the first, and none may be due at another one.
        behind: Tasks that come behind a step: they are done behind the last, and none may be due at another one.
        stop: A function of the elapsed that ends the run.
        ahead: How far it is, and the elapsed of coming steps, for schedules that have to be asked.
        most: No more than so many steps.
        epoch: Steps of an epoch, if it is given in steps.
    """
    count, now = most, ahead.now
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
