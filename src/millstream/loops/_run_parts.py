"""What a run consists of, checked before anything happens."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from millstream.loops._acting import Policy, resolve_policy
from millstream.loops._clock import Clock
from millstream.loops._dataset import (
    Batches,
    Loader,
    LoaderBatches,
    as_dataset,
    epoch_of,
    open_batches,
    save_position,
    skips_of,
)
from millstream.loops._dispatch_limiter import DispatchLimiter
from millstream.loops._history import History
from millstream.loops._tasks import Task, as_pairs, bind_all, bind_some, parts
from millstream.loops._weights import SampleWeights
from millstream.loops.elapsed import Elapsed
from millstream.loops.loop_state import LoopState
from millstream.loops.preemption import PreemptionPoint
from millstream.loops.saved_run import SavedRun, load_run, restore_callbacks
from millstream.loops.schedules import Period, as_epoch, as_stop
from millstream.loops.skips import as_ranges
from millstream.pipeline.state import LoaderState
from millstream.reading.contracts import PyTree
from millstream.reading.interrupts import Interrupts
from millstream.text.errors import describe_value, require_bool, require_int, require_path, require_text


def caller_of(name: str) -> str:
    """The function that a loop of this name is run by, as its user calls it."""
    return f"{name}_loop" if name in ("train", "test", "predict") else name


@dataclasses.dataclass(frozen=True, eq=False)
class LoopOptions:
    """What a loop is told besides its state, data and tasks; see `loop` for what the options are."""

    stop: Any = None
    on_start: Any = None
    on_end: Any = None
    history: History | None = None
    elapsed: Elapsed | None = None
    key: Any = None
    data_state: PyTree = None
    resume: str | os.PathLike[str] | bool | None = None
    skip: Any = None
    epoch_duration: Any = None
    fuse: int | None = None
    catch_keyboard_interrupt: bool = True
    batch_size_fn: Callable[[Any], int] | None = None
    metadata: Any = None
    policy: Policy = None
    name: str = "loop"


class RunParts:
    """The parts of a run, checked before anything happens.

    Attributes:
        tasks: What is done at a step, in order.
        observers: What looks at complete rows, savers last: what they save is a step that is complete.
        savers: Callbacks that save the run.
        saved: The run that this one resumes.
        skips: The batches that it leaves out.
        last: The last step, if the stop is one.
        batches: Where batches come from, once that is open.
        rewound: The data state before a batch that came in the moment of an interrupt.
        calling: The task that is being called.
        in_step: Whether the run is in the middle of a step.
    """

    def __init__(self, state: Any, dataset: Any, tasks: Any, options: LoopOptions) -> None:
        require_text("loop", "name", options.name)
        caller = self.caller = caller_of(options.name)
        bound = bind_all(caller, as_pairs(caller, tasks))
        self.on_start, self.on_end = bind_some(caller, options.on_start), bind_some(caller, options.on_end)
        if options.fuse is not None:
            require_int(caller, "fuse", options.fuse, least=1)
        history, elapsed, data_state = options.history, options.elapsed, options.data_state
        if not isinstance(history, History | None) or not isinstance(elapsed, Elapsed | None):
            found = f"{describe_value(history)} and {describe_value(elapsed)}"
            raise TypeError(f"{caller} needs history and elapsed as an earlier loop returned them. Got {found}.")
        require_bool(caller, "catch_keyboard_interrupt", options.catch_keyboard_interrupt)
        size_fn = options.batch_size_fn
        if size_fn is not None and not callable(size_fn):
            raise TypeError(f"{caller} needs batch_size_fn to be a function. Got {describe_value(size_fn)}.")
        ranges = as_ranges(caller, options.skip)
        dataset = as_dataset(caller, dataset)
        self.dataset: Any = dataset
        self.acting = resolve_policy(caller, options.policy, dataset)
        self.tasks = [task for task in bound if not task.observes]
        self.observers = sorted((task for task in bound if task.observes), key=lambda task: task.saves)
        callbacks = parts([*self.on_start, *self.tasks, *self.observers, *self.on_end])
        self.weights = SampleWeights(dataset) if getattr(dataset, "is_weighted", False) else None
        callbacks += [] if self.weights is None else [self.weights]
        self.savers: list[Any] = [callback for callback in callbacks if getattr(callback, "saves", False)]
        self.stop = None if options.stop is None else as_stop(caller, options.stop)
        point = self.stop if isinstance(self.stop, Period) else None
        self.stops = self.stop if point is None else point.reached
        self.last = None if point is None else point.units.get("steps")
        if self.stop is None and isinstance(dataset, Loader):
            raise ValueError(
                f"{caller} over a DataLoader runs forever, unless told when to stop: stop=ms.at(epochs=3), "
                "stop=1000, or stop=ms.never(), if a callback will stop it."
            )
        self.saved: SavedRun | None = None
        resume = options.resume
        if resume is not None and resume is not False:
            if elapsed is not None or history is not None or data_state is not None:
                raise ValueError(
                    f"{caller} takes elapsed, history and data_state from what it resumes. Leave them out."
                )
            self.saved = self._find(resume, state, options.key)
        if self.saved is not None:
            state, elapsed, history = self.saved.state, self.saved.elapsed, self.saved.history
            restore_callbacks(callbacks, self.saved)
            if self.weights is not None:
                dataset = self.dataset = self.weights.resume(elapsed.steps, self.saved.unfinished is not None)
                at: Any = self.saved.data_state
                self.saved = dataclasses.replace(self.saved, data_state=dataset.init_state(at.key, at.step))
            data_state = self.saved.data_state
        position, steps = None if self.saved is None else self.saved.position, 0 if elapsed is None else elapsed.steps
        self.skips = skips_of(caller, ranges, dataset, position, data_state, steps)
        epoch_duration = options.epoch_duration
        if epoch_duration is None and isinstance(dataset, Loader):
            epoch_duration = epoch_of(dataset)
        epoch = None if epoch_duration is None else as_epoch(caller, epoch_duration)
        self.clock = Clock(elapsed, epoch, self.skips)
        if history is not None:
            history.begin_run(None if elapsed is None else elapsed.steps)
        self.key, self.data_state, self._batch_size_fn = options.key, data_state, size_fn
        self.catches = options.catch_keyboard_interrupt
        self.interrupts = Interrupts()
        self.preemption: PreemptionPoint | None = None
        self.in_flight = DispatchLimiter()
        self.batches: Any = None
        self.rewound: PyTree = None  # the data state before a batch that came in the moment of an interrupt
        self.calling: Task | None = None
        self.in_step = False
        self.loop_state = LoopState(
            state,
            History() if history is None else history,
            self.clock.now,
            metadata=options.metadata,
            name=options.name,
        )
        self.loop_state.callbacks = callbacks
        self.loop_state.dataset, self.loop_state.tasks = dataset, [*self.tasks, *self.observers]
        self.loop_state.stops = self.stop
        self.loop_state.ends_at, self.loop_state.epochs = point, self.clock.epochs
        self.loop_state.sample_weights = self.weights
        self.loop_state.data_position = self._data_state_now
        self.loop_state.position = self._position
        self.loop_state.skips = self.skips
        if self.saved is not None:
            self._go_on_from(self.saved)

    def _find(self, resume: str | os.PathLike[str] | bool, state: Any, key: Any) -> SavedRun | None:
        """The run to resume, if anything has been saved."""
        if not isinstance(resume, bool | str | os.PathLike):
            raise TypeError(
                f"{self.caller} needs resume as a directory, or True for that of its ms.checkpoint. "
                f"Got {describe_value(resume)}."
            )
        if isinstance(resume, bool) and not self.savers:
            raise ValueError(f"{self.caller} with resume=True needs an ms.checkpoint whose directory it can look in.")
        is_path = not isinstance(resume, bool)
        directory = require_path(self.caller, "resume to be a path", resume) if is_path else self.savers[0].directory
        for saver in self.savers:
            saver.tidy(directory)
        loader = self.dataset if isinstance(self.dataset, Loader) else None
        return load_run(self.caller, directory, state, loader, key, None)

    def _go_on_from(self, saved: SavedRun) -> None:
        """Be where the saved run was: perhaps in the middle of a step, perhaps at its end."""
        loop_state = self.loop_state
        loop_state.elapsed, loop_state.unfinished = self.clock.now.replace(final=saved.elapsed.final), saved.unfinished
        if saved.stopped is not None:
            loop_state.stop(saved.stopped)

    def show_to(self, outer: "RunParts") -> None:
        """Have the bars of the run around this one show it, too."""
        callbacks = [task.callback for task in self.observers]
        self.observers += [
            dataclasses.replace(task, schedule=None)
            for task in outer.observers
            if task.callback.sees_inner_loops and task.callback not in callbacks
        ]

    def _data_state_now(self) -> PyTree:
        if self.batches is None:
            return self.data_state
        return self.batches.state if self.rewound is None else self.rewound

    def _position(self) -> tuple[dict[str, Any], PyTree]:
        if self.batches is None and self.saved is not None:
            position = self.saved.position
            more = self.skips.plain() if position["kind"] == "loader" else {}
            return {**position, **more}, self.saved.data_state if position["kind"] == "stream" else None
        loader, iterator = (self.dataset if isinstance(self.dataset, Loader) else None), None
        if isinstance(self.batches, Batches):  # whatever state such an iterator shows, a loop cannot make one at it
            iterator = self.batches.iterator
        state = None if iterator is not None else self._data_state_now()
        if self.weights is not None and state is not None:  # a resumed loop is given the loader that this one was given
            state = self.weights.given.init_state(state.key, state.step)
        return save_position(state, iterator, loader, self.skips)

    def draw_by_new_weights(self, state: LoaderState) -> LoaderState:
        """Draw from a different loader after a state, and the state of that one there."""
        assert self.weights is not None
        self.batches.close()
        self.dataset = self.loop_state.dataset = self.weights.take()
        return self.dataset.init_state(state.key, state.step)

    def open(self, start: Elapsed | None = None, data_state: PyTree = None) -> Batches | LoaderBatches:
        """The batches from where the run is, or from where it was earlier."""
        return open_batches(
            self.caller,
            self.dataset,
            start=self.clock.now if start is None else start,
            stop=self.stop if isinstance(self.stop, Period) else None,
            position=None if self.saved is None else self.saved.position,
            key=self.key,
            data_state=self.data_state if data_state is None else data_state,
            batch_size_fn=self._batch_size_fn,
            skips=self.skips,
        )
