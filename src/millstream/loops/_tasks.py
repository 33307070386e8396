"""What is to be done when: tasks as users write them, checked and bound once, before a loop begins."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from millstream.loops.callback import Call, Callback, Observer, adapt, bind
from millstream.loops.schedules import Schedule, as_schedule
from millstream.text.errors import describe_value, function_name

Pairs = list[tuple[Any, list[Any]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """One callback and when it is due.

    Attributes:
        schedule: None if it is due at every step.
        call: The callback as a function of the loop state.
        name: What it is called in errors.
        callback: The callback as it was given.
    """

    schedule: Schedule | None
    call: Call
    name: str
    callback: Any

    @property
    def saves(self) -> bool:
        """Whether it saves the run."""
        return bool(getattr(self.callback, "saves", False))

    @property
    def observes(self) -> bool:
        """Whether it only looks at complete rows."""
        return isinstance(self.callback, Observer)


def as_pairs(caller: str, tasks: Any) -> Pairs:
    """Tasks given as a dict or as pairs, as a new list of (schedule, callbacks)."""
    items = tasks.items() if isinstance(tasks, Mapping) else tasks
    try:
        pairs = [(schedule, as_list(callbacks)) for schedule, callbacks in items]
    except (TypeError, ValueError):
        raise TypeError(
            f"{caller} needs tasks as a dict from schedule to callbacks, or a list of such pairs: "
            f"{{ms.every(1): [train_step]}}. Got {describe_value(tasks)}."
        ) from None
    return pairs


def as_list(callbacks: Any) -> list[Any]:
    """One callback or several, as a list."""
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


def bind_all(caller: str, pairs: Pairs) -> list[Task]:
    """Tasks in order, ready to be called."""
    tasks = []
    for schedule, callbacks in pairs:
        if isinstance(schedule, str):
            raise ValueError(f"{caller} does not know the named schedule {schedule!r}; it belongs to another loop.")
        when = as_schedule(caller, schedule)
        tasks += [_bind(caller, None if when.always else when, callback) for callback in callbacks]
    return tasks


def bind_some(caller: str, callbacks: Any) -> list[Task]:
    """Callbacks that are called once, at the start or the end."""
    return [_bind(caller, None, callback) for callback in as_list(callbacks)]


def parts(tasks: Iterable[Task]) -> list[Callback]:
    """The callbacks among some tasks that have a begin and an end, each once."""
    owners = [getattr(task.callback, "__self__", task.callback) for task in tasks]
    return list({id(owner): owner for owner in owners if isinstance(owner, Callback)}.values())


def _bind(caller: str, schedule: Schedule | None, callback: Any) -> Task:
    callback = adapt(callback)
    return Task(schedule, bind(caller, callback), function_name(callback), callback)
