"""Saving a run while it runs."""

import os
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax.typing import ArrayLike

from millstream.checkpoints import CheckpointStore, Retention
from millstream.loops._dataset import Loader, save_position
from millstream.loops._history import History
from millstream.loops.callback import Observer
from millstream.loops.elapsed import Elapsed
from millstream.loops.log_entries import EVALUATIONS, describe_logged, require_name
from millstream.loops.loop_state import LoopState, S
from millstream.loops.saved_run import SavedRun, load_run, reached, save_run
from millstream.loops.schedules import as_period
from millstream.loops.signatures import Point
from millstream.loops.skips import Skips
from millstream.reading.contracts import PyTree
from millstream.text.errors import (
    describe_value,
    did_you_mean,
    require_bool,
    require_choice,
    require_int,
    require_path,
    whole_number,
)
from millstream.text.keywords import answer_keywords
from millstream.text.summaries import value_text


@answer_keywords
class checkpoint(Observer):
    """Save a run whenever it is due, and always its final state: in `callbacks=` at the end of every epoch.

    A checkpoint holds all of a run at one moment: the state, how far it is, where it is in its data, the history, and
    what callbacks remember. It is taken when the step is complete, before the next batch is drawn, and written in the
    background. Given `resume=`, a loop resumes from it as if it had never stopped. SIGTERM saves and ends the program
    with status 143.

    Example:
        >>> tasks = {ms.every(1): lambda state: state + 1, ms.every(5): ms.checkpoint("run")}
        >>> ms.loop(jnp.int32(0), loader, tasks, stop=7, key=jax.random.key(0)).elapsed.steps
        7
        >>> model, _, elapsed = ms.loop(jnp.int32(0), loader, tasks, stop=10, key=jax.random.key(0), resume="run")
        >>> int(model), elapsed.steps
        (10, 10)

    Args:
        directory: Where; one run per directory.
        keep: How many of the latest checkpoints are kept; None keeps all.
        best: How many of the best are kept, besides.
        monitor: The entry of the logs that says which are best, such as "loss_test"; one that is not finite, or was not
            logged at the step that is saved, makes none the best.
        mode: Whether the best has the smallest ("min") or the largest ("max") value.
        monitor_from: By when the monitor must have been logged (steps, or `at(...)`); a name that was not is an error.
            None: by the end of the first epoch or of the first test with such results, or at the end of the run.
        keep_every: Checkpoints at multiples of that many steps are kept for good.
        overwrite: Whether a new run replaces what an earlier one has left; otherwise that is set apart, in a folder of
            its own.
    """

    only_real_runs = True
    named_schedules = ("on_epoch_end",)
    saves = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        best: int = 0,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        monitor_from: Point | None = None,
        keep_every: int | None = None,
        overwrite: bool = False,
    ) -> None:
        require_path("checkpoint", "directory to be a path", directory)
        require_bool("checkpoint", "overwrite", overwrite)
        if monitor is not None:
            require_name("checkpoint", monitor, "monitor")
        for name, number in {"keep": keep, "keep_every": keep_every}.items():
            if number is not None:
                require_int("checkpoint", name, number, least=1)
        require_int("checkpoint", "best", best, least=0)
        require_choice("checkpoint", "mode", mode, ["min", "max"])
        if best and monitor is None:
            raise ValueError(f"checkpoint needs monitor, the name of a metric, to keep the best {best}.")
        self.monitored = monitor
        self._keep = Retention(latest=keep, best=best, monitor=monitor, mode=mode, every=keep_every)
        self._monitor_from = None if monitor_from is None else as_period("checkpoint", "monitor_from", monitor_from)
        self.directory = os.path.abspath(os.path.expanduser(directory))
        self._overwrite = overwrite
        self._first_epoch = 0
        self._had_monitor = False  # by hand
        self._store: CheckpointStore | None = None
        self._saved: Any = None  # what the newest checkpoint of this run is of

    def tidy(self, directory: str | os.PathLike[str]) -> None:
        """Put away what a killed run has left half done, if this is its directory; refused while another run has it."""
        if os.path.abspath(os.path.expanduser(directory)) == self.directory and os.path.isdir(self.directory):
            CheckpointStore(self.directory, keep=self._keep).close()

    def start(self, loop_state: LoopState) -> None:
        """Open the directory for this run."""
        steps = loop_state.elapsed.steps
        goes_on = steps > 0 and reached.get(self.directory) == steps
        self._open(steps if goes_on else None)
        self._saved = _moment(loop_state) if goes_on else None
        self._first_epoch = loop_state.elapsed.epochs or 0

    def observe(self, loop_state: LoopState, start: int, stop: int) -> None:
        """Save the run as it is after this step."""
        if self._store is not None:  # among what is called at the end it comes when all is saved
            self._save(loop_state)
            self._require_monitor(loop_state, self._expects_monitor(loop_state))

    def check(self) -> None:
        """Raise what went wrong in the background; nearly free when nothing did."""
        if self._store is not None:
            self._store.check()

    def finish(self, loop_state: LoopState) -> None:
        """Save the final state, unless the run broke off in the middle of a step, and wait until all is on the disk."""
        store, self._store = self._store, None
        if store is None:
            return
        try:
            if not loop_state.failed and loop_state.elapsed.steps > 0 and _moment(loop_state) != self._saved:
                self._store = store
                self._save(loop_state)
        finally:
            self._store = None
            store.close()
        if loop_state.is_complete and loop_state.elapsed.steps > 0:
            self._require_monitor(loop_state, "never logged" if self._monitor_from is None else None)

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]  # by hand it saves a state, not logs
        self,
        elapsed: Elapsed,
        state: PyTree,
        *,
        data_state: PyTree = None,
        history: History | None = None,
        metrics: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Save by hand.

        Args:
            elapsed: From `ms.loops.elapse`.
            state: The state after this step.
            data_state: The state of the loader after this step.
            history: What was logged so far.
            metrics: Numbers by their names, for a monitor.
        """
        if self._store is None:
            earlier = reached.get(self.directory)
            self._open(earlier if earlier is not None and earlier < elapsed.steps else None)
        assert self._store is not None
        name, metrics = self._keep.monitor, {} if metrics is None else metrics
        if name is not None and metrics and name not in metrics:
            raise ValueError(
                f"checkpoint monitors {name!r}, which is not in metrics. {did_you_mean(name, list(metrics))}"
                f"Given: {', '.join(metrics)}."
            )
        self._had_monitor |= name in metrics
        position, data = save_position(data_state, None, None, Skips())
        save_run(
            self._store,
            state=state,
            elapsed=elapsed,
            history=History() if history is None else history,
            position=position,
            data=data,
            callbacks=[],
            unfinished=None,
            stopped=None,
            metrics=metrics,
        )

    def wait(self) -> None:
        """Wait until what was saved is on the disk."""
        if self._store is not None:
            self._store.wait()

    def close(self) -> None:
        """Wait, and let another run have the directory; for use by hand."""
        store, self._store = self._store, None
        if store is None:
            return
        store.close()
        name = self._keep.monitor
        if name is not None and not self._had_monitor and store.steps() and store.best() is None:
            warnings.warn(
                f"checkpoint monitors {name!r}, and no save has had it. Give it: metrics={{{name!r}: ...}}.",
                stacklevel=2,
            )

    def _open(self, after: int | None) -> None:
        """Open the directory to continue after a step of the run that is there, or to begin another one."""
        self._store = store = CheckpointStore(self.directory, keep=self._keep)
        if after is not None:
            store.discard_after(after)  # what cannot be read, or comes after the step that was asked for
        elif self._overwrite:
            store.discard_after(-1)
        elif store.steps():
            where = store.set_apart()
            warnings.warn(
                f"checkpoint: {self.directory} had checkpoints of an earlier run, which are now in {where}. "
                "To resume a run, give its loop resume=; to replace it, give checkpoint overwrite=True.",
                stacklevel=2,
            )

    def _save(self, loop_state: LoopState) -> None:
        assert self._store is not None
        position, data = loop_state.position()
        save_run(
            self._store,
            state=loop_state.state,
            elapsed=loop_state.elapsed,
            history=loop_state.history,
            position=position,
            data=data,
            callbacks=loop_state.callbacks,
            unfinished=loop_state.unfinished,
            stopped=loop_state.reason if loop_state.stop_iteration else None,
            metrics=self._metrics(loop_state),
        )
        self._saved = _moment(loop_state)

    def _metrics(self, loop_state: LoopState) -> dict[str, Any]:
        """The monitored value, if it was logged at this very step: an older one says nothing of this state."""
        name, history = self._keep.monitor, loop_state.history
        column = None if name is None else history.column(name)
        if name is None or column is None or history.elapsed().steps != loop_state.elapsed.steps:
            return {}
        return {name: column.newest()} if column.rows[-1] == len(history) - 1 else {}

    def _expects_monitor(self, loop_state: LoopState) -> str | None:
        """In what the monitored value would have been logged by now, were its name right; None if it may come later."""
        name, elapsed = self._keep.monitor, loop_state.elapsed
        if self._monitor_from is not None:
            return f"not logged up to step {elapsed.steps}" if self._monitor_from.reached(elapsed) else None
        if elapsed.epochs is not None and elapsed.epochs > self._first_epoch:
            return "not logged in a whole epoch"
        ending = next((ending for ending in EVALUATIONS if name is not None and name.endswith(ending)), None)
        if ending is not None and any(entry.endswith(ending) for _, entry in loop_state.history.columns()):
            return "not logged with other results of the test"
        return None

    def _require_monitor(self, loop_state: LoopState, expected: str | None) -> None:
        """Refuse a monitor that would have been logged by now."""
        name, history = self._keep.monitor, loop_state.history
        if name is not None and expected is not None and history.column(name) is None:
            raise ValueError(
                f"checkpoint monitors {name!r}, which was {expected}. {describe_logged(name, history.columns())} "
                "Monitor one of these, or say from when on it is there: monitor_from=ms.at(epochs=2). "
                f"The run is saved in {self.directory}, and can be resumed from there."
            )

    def __repr__(self) -> str:
        return f"checkpoint({value_text(self.directory)})"


def _moment(loop_state: LoopState) -> tuple[Any, ...]:
    """What differs between two moments of a run that are worth a checkpoint each."""
    return loop_state.elapsed.steps, loop_state.elapsed.final, loop_state.unfinished


def restore(
    directory: str | os.PathLike[str],
    state: S,
    loader: Loader[PyTree] | None = None,
    *,
    key: jax.Array | np.ndarray | None = None,
    step: int | None = None,
) -> SavedRun[S]:
    """The run that was saved last in a directory.

    Example:
        >>> checkpoint = ms.checkpoint("by hand")
        >>> for elapsed, batch in ms.loops.elapse(range(3)):
        ...     checkpoint(elapsed, {"w": jnp.full(2, elapsed.steps)})
        >>> checkpoint.close()
        >>> saved = ms.restore("by hand", {"w": jnp.zeros(2, jnp.int32)})
        >>> saved.elapsed.steps, saved.state["w"].tolist()
        (3, [3, 3])

    Args:
        directory: Where it was saved.
        state: A state of the same structure, of arrays or `jax.ShapeDtypeStruct`s; it says on what devices arrays go.
        loader: The loader to continue with, which must be the one of the run; None takes over its state unseen.
        key: The key of the run, to be compared with the one that was saved.
        step: The step of a checkpoint; None takes the newest that is whole.
    """
    require_path("restore", "directory to be a path", directory)
    if loader is not None and not isinstance(loader, Loader):
        raise TypeError(f"restore needs loader to be a DataLoader or the like. Got {describe_value(loader)}.")
    step = None if step is None else whole_number("restore", "step", step, least=0)
    saved = load_run("restore", directory, state, loader, key, step)
    if saved is None:
        raise FileNotFoundError(f"restore found no checkpoint in {os.path.abspath(os.path.expanduser(directory))}.")
    return saved
