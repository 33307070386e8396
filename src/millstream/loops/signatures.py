"""The types of what loops are given."""

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol, TypeVar

from millstream.loops._dataset import Loader
from millstream.loops.elapsed import Elapsed
from millstream.loops.named import Event
from millstream.loops.schedules import Period, Schedule
from millstream.reading.contracts import T

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
Every = int | Schedule | Callable[[Elapsed], bool]  # an int counts steps
Dataset = Loader[T] | Iterable[T] | Callable[[], Loader[T] | Iterable[T]]


class TaskTable(Protocol):
    """A dict from schedules to callbacks, which may be of any type that an adapter is registered for."""

    def items(self) -> Iterable[tuple[When, object]]:
        """The schedules and their callbacks."""
        ...


Table = TypeVar("Table", bound=TaskTable)

# A dict that is written in the call may have names as text, and a wrong one is found; `Table` is for all others. It is
# a variable because mypy, given two types that a dict fits, takes neither to find the type of that dict.
Tasks = Mapping[EventName | When, object] | Table | Sequence[tuple[EventName | When, object]]
