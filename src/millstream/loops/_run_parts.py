"""What a run consists of, checked before anything happens."""

import os
from collections.abc import Callable
from typing import Any

from millstream.loops._acting import Policy, acting
from millstream.loops._clock import Clock
from millstream.loops._dataset import Batches, Loader, LoaderBatches, as_dataset, open_batches
from millstream.loops._in_flight import InFlight
from millstream.loops._position import save_position
from millstream.loops._stop import as_epoch, as_stop
from millstream.loops._tasks import Task, parts
from millstream.loops.elapsed import Elapsed
from millstream.loops.history import History
from millstream.loops.loop_state import LoopState
from millstream.loops.period import Period
from millstream.loops.preemption import PreemptionPoint
from millstream.loops.saved_run import SavedRun, load_run, restore_callbacks
from millstream.reading.contracts import PyTree
from millstream.reading.interrupts import Interrupts
from millstream.text.errors import describe_value, require_bool, require_path


def caller_of(name: str) -> str:
    """The function that a loop of this name is run by, as its user calls it."""
    return f"{name}_loop" if name in ("train", "test", "predict") else name


class RunParts:
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
        policy: Policy,
        name: str,
    ) -> None:
        who = self._who = caller_of(name)
        if not isinstance(history, History | None) or not isinstance(elapsed, Elapsed | None):
            found = f"{describe_value(history)} and {describe_value(elapsed)}"
            raise TypeError(f"{who} needs history and elapsed as an earlier loop returned them. Got {found}.")
        require_bool(who, "catch_keyboard_interrupt", catch_keyboard_interrupt)
        if batch_size_fn is not None and not callable(batch_size_fn):
            raise TypeError(f"{who} needs batch_size_fn to be a function. Got {describe_value(batch_size_fn)}.")
        dataset = as_dataset(who, dataset)
        self._dataset: Any = dataset
        self._acting = acting(who, policy, dataset)
        self._tasks = [task for task in tasks if not task.observes]
        # Savers come last: what they save is a step that is complete.
        self._observers = sorted((task for task in tasks if task.observes), key=lambda task: task.saves)
        self._on_start, self._on_end = on_start, on_end
        callbacks = parts([*on_start, *self._tasks, *self._observers, *on_end])
        self._savers: list[Any] = [callback for callback in callbacks if getattr(callback, "saves", False)]
        self._stop = None if stop is None else as_stop(who, stop)
        point = self._stop if isinstance(self._stop, Period) else None
        self._stops = self._stop if point is None else point.reached
        self._last = None if point is None else point.units.get("steps")
        if self._stop is None and isinstance(dataset, Loader):
            raise ValueError(
                f"{who} over a DataLoader goes on for ever, unless told when to stop: stop=ms.at(epochs=3), "
                "stop=1000, or stop=ms.never(), if a callback will stop it."
            )
        self._saved: SavedRun | None = None
        if resume is not None and resume is not False:
            if elapsed is not None or history is not None or data_state is not None:
                raise ValueError(f"{who} takes elapsed, history and data_state from what it resumes. Leave them out.")
            self._saved = self._find(resume, state, key)
        if self._saved is not None:
            state, elapsed, history = self._saved.state, self._saved.elapsed, self._saved.history
            data_state = self._saved.data_state
            restore_callbacks(callbacks, self._saved)
        if epoch_duration is None and isinstance(dataset, Loader):
            epoch_duration = dataset.steps_per_epoch
        self._clock = Clock(elapsed, None if epoch_duration is None else as_epoch(who, epoch_duration))
        if history is not None:
            history.begin_run(None if elapsed is None else elapsed.steps)
        self._opening = {"key": key, "data_state": data_state, "batch_size_fn": batch_size_fn}
        self._catches = catch_keyboard_interrupt
        self._interrupts = Interrupts()
        self._preemption: PreemptionPoint | None = None
        self._in_flight = InFlight()
        self._batches: Any = None
        self._rewound: PyTree = None  # the data state before a batch that came in the moment of an interrupt
        self._calling: Task | None = None
        self._in_step = False
        self.loop_state = LoopState(
            state, History() if history is None else history, self._clock.now, metadata=metadata, name=name
        )
        self.loop_state.callbacks = callbacks
        self.loop_state.dataset, self.loop_state.tasks = dataset, [*self._tasks, *self._observers]
        self.loop_state.stops = self._stop
        self.loop_state.ends_at = point
        self.loop_state.data_position = self._data_state
        self.loop_state.position = self._position
        if self._saved is not None:
            self._go_on_from(self._saved)

    def _find(self, resume: str | os.PathLike[str] | bool, state: Any, key: Any) -> SavedRun | None:
        """What is to be gone on with, if anything has been saved."""
        if not isinstance(resume, bool | str | os.PathLike):
            raise TypeError(
                f"{self._who} needs resume as a directory, or True for that of its ms.checkpoint. "
                f"Got {describe_value(resume)}."
            )
        if isinstance(resume, bool) and not self._savers:
            raise ValueError(f"{self._who} with resume=True needs an ms.checkpoint whose directory it can look in.")
        is_path = not isinstance(resume, bool)
        directory = require_path(self._who, "resume to be a path", resume) if is_path else self._savers[0].directory
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
