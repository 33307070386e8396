"""The types of what loops are given."""

import datetime
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol

from millstream.loops._dataset import Loader
from millstream.loops.elapsed import Elapsed
from millstream.loops.named import Event
from millstream.loops.schedules import Period, Schedule

Point = int | Period | datetime.timedelta  # an int counts steps
EventName = Literal[
    "on_train_begin",
    "on_epoch_begin",
    "on_train_batch_begin",
    "on_train_step",
    "on_train_batch_end",
    "on_epoch_end",
    "on_train_end",
    "on_reset_step",
    "on_test_begin",
    "on_test_batch_begin",
    "on_test_step",
    "on_test_batch_end",
    "on_test_end",
    "on_predict_begin",
    "on_predict_batch_begin",
    "on_predict_step",
    "on_predict_batch_end",
    "on_predict_end",
    "train_step",
    "test_step",
    "predict_step",
    "reset_step",
]
When = Event | Schedule | Callable[[Elapsed], bool]
Stop = Point | Schedule | Callable[[Elapsed], bool]
Dataset = Loader | Iterable[Any] | Callable[[], Loader | Iterable[Any]]


class TaskTable(Protocol):
    """A dict from schedules to callbacks, which may be of any type that an adapter is registered for."""

    def items(self) -> Iterable[tuple[When, object]]:
        """The schedules and their callbacks."""
        ...


# A dict that is written in the call may have names as text, and a wrong one is found; `TaskTable` is for all others.
Tasks = Mapping[EventName | When, object] | TaskTable | Iterable[tuple[EventName | When, object]]
