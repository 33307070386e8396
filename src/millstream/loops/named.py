"""Named schedules: the moments of a training, test or predict loop."""

import copy
from collections.abc import Iterable
from typing import Any

from millstream.loops._tasks import Pairs, as_pairs
from millstream.loops.callback import Observer, adapt
from millstream.text.errors import describe_value, did_you_mean, function_name


class Event(str):
    """A moment of a training, test or predict loop, such as `ms.on_train_step`. It is equal to its name."""

    __slots__ = ()


on_train_begin = Event("on_train_begin")
on_epoch_begin = Event("on_epoch_begin")
on_train_batch_begin = Event("on_train_batch_begin")
on_train_step = Event("on_train_step")
on_train_batch_end = Event("on_train_batch_end")
on_epoch_end = Event("on_epoch_end")
on_train_end = Event("on_train_end")
on_reset_step = Event("on_reset_step")
on_test_begin = Event("on_test_begin")
on_test_batch_begin = Event("on_test_batch_begin")
on_test_step = Event("on_test_step")
on_test_batch_end = Event("on_test_batch_end")
on_test_end = Event("on_test_end")
on_predict_begin = Event("on_predict_begin")
on_predict_batch_begin = Event("on_predict_batch_begin")
on_predict_step = Event("on_predict_step")
on_predict_batch_end = Event("on_predict_batch_end")
on_predict_end = Event("on_predict_end")

TRAIN = (
    on_train_begin,
    on_epoch_begin,
    on_train_batch_begin,
    on_train_step,
    on_train_batch_end,
    on_epoch_end,
    on_train_end,
)
TEST = (on_reset_step, on_test_begin, on_test_batch_begin, on_test_step, on_test_batch_end, on_test_end)
PREDICT = (on_predict_begin, on_predict_batch_begin, on_predict_step, on_predict_batch_end, on_predict_end)

_SHORT = {"train_step": on_train_step, "test_step": on_test_step, "predict_step": on_predict_step}
_SHORT["reset_step"] = on_reset_step


class NamedTasks:
    """The callbacks of each named schedule of one loop, and all other tasks.

    Args:
        caller: The loop, in errors.
        names: The named schedules that it has.
        state: Whose methods of these names come first.
        tasks: As the user gave them; they are not changed.
        callbacks: Objects that know themselves when they are due.
        watched: The named schedules under which observers among these are registered.
        leave_out: Whether to leave out callbacks that leave something behind.
    """

    def __init__(
        self,
        caller: str,
        names: tuple[str, ...],
        state: Any,
        tasks: Any,
        callbacks: Iterable[Any] | None,
        *,
        watched: tuple[str, ...],
        leave_out: bool = False,
    ) -> None:
        self._caller = caller
        self._names = names
        self._leave_out = leave_out
        self._by_name: dict[str, list[Any]] = {name: [] for name in names}
        self._given: set[str] = set()
        self.others: Pairs = []
        self._add_methods_of(state)
        for schedule, listed in as_pairs(caller, {} if tasks is None else tasks):
            kept = [callback for callback in listed if not self._is_left_out(callback)]
            if isinstance(schedule, str):
                self._by_name[self._full_name(schedule)] += kept
                self._given.add(self._full_name(schedule))
            else:
                self.others.append((schedule, kept))
        for callback in _callback_list(caller, callbacks):
            if not self._is_left_out(callback):
                self._register(adapt(callback), watched)

    def __getitem__(self, name: str) -> list[Any]:
        """The callbacks of a named schedule."""
        return self._by_name[name]

    def is_given(self, name: str) -> bool:
        """Whether the user has named this schedule in the tasks."""
        return name in self._given

    def named_only(self) -> "NamedTasks":
        """These without the tasks under other schedules, for a loop inside this one."""
        only = copy.copy(self)
        only.others = []
        return only

    def _add_methods_of(self, state: Any) -> None:
        for name in [*self._names, *_SHORT]:
            method = getattr(type(state), name, None)  # of the class: the state itself is replaced at every step
            if callable(method) and _SHORT.get(name, name) in self._by_name:
                self._by_name[_SHORT.get(name, name)].append(method)

    def _full_name(self, name: str) -> str:
        full = _SHORT.get(name, name)
        if full not in self._by_name:
            hint = did_you_mean(name, [*self._names, *_SHORT])
            raise ValueError(
                f"{self._caller} has no named schedule {name!r}. It has: {', '.join(self._names)}. {hint}".strip()
            )
        return full

    def _register(self, callback: Any, watched: tuple[str, ...]) -> None:
        """Put a callback under the named schedules that it has methods for."""
        wanted = getattr(callback, "named_schedules", ())
        if isinstance(callback, Observer) and wanted:
            names = [name for name in wanted if name in watched]
            for name in names:
                self._by_name[name].append(callback)
            if names or any(name in (*TRAIN, *TEST, *PREDICT) for name in wanted):
                return
        names = [name for name in [*self._names, *_SHORT] if callable(getattr(callback, name, None))]
        names = [name for name in names if _SHORT.get(name, name) in self._by_name]
        for name in names:
            self._by_name[_SHORT.get(name, name)].append(getattr(callback, name))
        if not names:
            raise TypeError(
                f"{self._caller} cannot tell when {function_name(callback)} in callbacks= is due: it has no method "
                f"called like one of {', '.join(self._names)}. Add one, or put it into tasks under a schedule."
            )

    def _is_left_out(self, callback: Any) -> bool:
        return self._leave_out and getattr(callback, "only_real_runs", False)


def _callback_list(caller: str, callbacks: Iterable[Any] | None) -> list[Any]:
    if callbacks is None:
        return []
    if not isinstance(callbacks, list | tuple):
        raise TypeError(f"{caller} needs callbacks as a list. Got {describe_value(callbacks)}. Write callbacks=[...].")
    return list(callbacks)
