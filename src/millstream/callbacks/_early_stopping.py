"""Stopping when a value no longer gets better."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from millstream.callbacks._monitor import Monitor, require_logged
from millstream.loops import History
from millstream.loops.callback import Callback
from millstream.loops.elapsed import Elapsed
from millstream.loops.log_entries import as_logs, describe_logged
from millstream.loops.loop_state import LoopState, S
from millstream.loops.schedules import Period, as_period
from millstream.loops.signatures import Point
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_value, require_bool, require_choice
from millstream.text.keywords import answer_keywords

_CALLER = "early_stopping"
_SAVED = ("steps", "samples", "epochs", "time", "date_start")  # of the moments that count


@answer_keywords
class early_stopping(Callback):
    """Stop a loop when a value has not become better for some time.

    Each value is judged once, when the callback is called after it was logged; judging waits for the value, so do it no
    more often than is of use. In `callbacks=` it judges at the end of each epoch, after testing.

    Example:
        >>> def train_step(state, batch):
        ...     return ms.logs().add_metric("loss", max(1.0 - 0.2 * state, 0.5)), state + 1
        >>> stop_early = ms.callbacks.early_stopping("loss", patience=4)
        >>> output = ms.loop(0, range(100), {ms.every(1): [train_step, stop_early]})
        >>> output.elapsed.steps, stop_early.best_elapsed.steps
        (8, 4)

        By hand:

        >>> stop_early = ms.callbacks.early_stopping("loss", patience=1, restore_best_weights=True)
        >>> state = jnp.zeros(2)
        >>> for elapsed, loss in zip([ms.loops.Elapsed(steps=1), ms.loops.Elapsed(steps=2)], [0.5, 0.7]):
        ...     stop, state = stop_early(elapsed, state + 1, {"loss": loss})
        >>> stop, state.tolist()
        (True, [1.0, 1.0])

    Args:
        monitor: The value to watch, as "name" or "collection.name"; that of a test has the test's name at its end, as
            in "loss_test".
        patience: How long to continue without an improvement, counted from the last one: steps, or `at(epochs=3)` and
            the like. Time is not the same on every host, so with several of them use a different unit.
        min_delta: An improvement is a change by more than this.
        mode: Whether "min" or "max" is better.

    Other Args:
        baseline: What the first improvement has to be better than.
        threshold: Stop as soon as the value has come this far, with success.
        restore_best_weights: Keep a copy of the state of the best value, and hand it back when this stops the loop.
            Otherwise the loop returns the state it has, and the best one is in `best`.
        start_from: Values before this point (steps, or `at(...)`) do not count; patience begins there.
        check_finite: Stop at once when the value is not a finite number. Such a value is never an improvement.

    Attributes:
        best_value: The best value so far; None before the first improvement.
        best_elapsed: When that was.
        best: The state of that moment, with `restore_best_weights`.
    """

    only_real_runs = True

    def __init__(
        self,
        monitor: str,
        patience: Point,
        *,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
        baseline: float | None = None,
        threshold: float | None = None,
        restore_best_weights: bool = False,
        start_from: Point | None = None,
        check_finite: bool = False,
    ) -> None:
        require_choice(_CALLER, "mode", mode, ["min", "max"])
        require_bool(_CALLER, "restore_best_weights", restore_best_weights)
        require_bool(_CALLER, "check_finite", check_finite)
        self._monitor = Monitor(_CALLER, monitor)
        self.monitored = monitor
        self._patience = as_period(_CALLER, "patience", patience)
        if not self._patience.units:
            raise ValueError(f"{_CALLER} needs patience in steps, samples, epochs or time. Got {self._patience}.")
        self._start_from = None if start_from is None else as_period(_CALLER, "start_from", start_from)
        self._min_delta = _number("min_delta", min_delta)
        if self._min_delta < 0:
            raise ValueError(f"{_CALLER} needs min_delta of at least 0. Got {describe_value(min_delta)}.")
        self._mode = mode
        self._baseline = None if baseline is None else _number("baseline", baseline)
        self._threshold = None if threshold is None else _number("threshold", threshold)
        self._keeps_best = restore_best_weights
        self._check_finite = check_finite
        self._asked = False
        self._first_epoch = 0
        self._forget()

    def _forget(self) -> None:
        self._monitor.seen = -1
        self._since: Elapsed | None = None  # from when on patience is counted; None: from the beginning of the run
        self.best_value: float | None = None
        self.best_elapsed: Elapsed | None = None
        self.best: PyTree = None

    def start(self, loop_state: LoopState) -> None:
        """A loop begins."""
        self._forget_a_later_run(loop_state.elapsed)
        self._asked = False
        self._first_epoch = loop_state.elapsed.epochs or 0

    def __loop_callback__(self, loop_state: LoopState) -> PyTree:
        # What is tested at the end of an epoch may be logged after this callback, so the epoch does not count yet.
        return self._judge_newest(loop_state, loop_state.elapsed.epochs_before)

    def on_epoch_end(self, state: object, batch: object, elapsed: Elapsed, loop_state: LoopState) -> PyTree:
        """Judge at the end of an epoch, after testing."""
        return self._judge_newest(loop_state, elapsed.epochs)

    def __call__(self, elapsed: Elapsed, state: S, logs: Mapping[str, object] | None) -> tuple[bool, S]:
        """Use it by hand.

        Args:
            elapsed: From `ms.loops.elapse`.
            state: The state after this step.
            logs: What the step has logged; without the monitored value nothing is judged.

        Returns:
            Whether to stop, and the state to continue with.
        """
        self._forget_a_later_run(elapsed)
        loop_state = LoopState(state, History(), elapsed, logs=as_logs(_CALLER, {} if logs is None else logs))
        best = self._judge_newest(loop_state, None)
        return loop_state.stop_iteration, state if best is None else best

    def _forget_a_later_run(self, elapsed: Elapsed) -> None:
        """A run that is at a step before what is remembered is another one."""
        if elapsed.steps < self._monitor.seen:
            self._forget()

    def finish(self, loop_state: LoopState) -> None:
        """Refuse a name that was never logged, so that there was nothing to judge."""
        if self._asked and self._monitor.seen < 0 and self._has_begun(loop_state.elapsed):
            require_logged(_CALLER, [self._monitor.name], loop_state)

    def get_state(self) -> dict[str, PyTree]:
        """What it remembers: numbers, moments as dicts, and the best state."""
        return {
            "seen": self._monitor.seen,
            "since": _as_plain(self._since),
            "best_value": self.best_value,
            "best_elapsed": _as_plain(self.best_elapsed),
            "best": self.best,
        }

    def set_state(self, state: dict[str, PyTree]) -> None:
        """Continue from what `get_state` gave."""
        self._monitor.seen = int(state["seen"])
        self._since = _as_elapsed(state["since"])
        self.best_value = None if state["best_value"] is None else float(state["best_value"])
        self.best_elapsed = _as_elapsed(state["best_elapsed"])
        self.best = state["best"]

    def _judge_newest(self, loop_state: LoopState, epochs: int | None) -> PyTree:
        """Judge a value that has not been judged yet; a state if one is to be restored.

        Args:
            loop_state: Of the loop.
            epochs: Epochs after which the value must have been logged at least once.
        """
        self._asked = True
        new = self._monitor.read(loop_state)
        if new is None:
            expected = self._monitor.seen < 0 and epochs is not None and epochs > self._first_epoch
            if expected and self._has_begun(loop_state.elapsed):
                self._asked = False  # it has been told here
                raise self._unknown(loop_state)
            return None
        value, when = new
        if not self._has_begun(when):
            self._since = when
            return None
        better = self._is_better(value)
        if better:
            self.best_value, self.best_elapsed, self._since = value, when, when
            if self._keeps_best:
                self.best = _copy(loop_state.state)
        if self._has_reached(value):
            loop_state.stop(f"{_CALLER}: {self._monitor.name} is {value:g} and has reached {self._threshold:g}")
            return None  # the state that has reached it, also if another one was better by less than min_delta
        return None if better else self._without_improvement(loop_state, value, when)

    def _without_improvement(self, loop_state: LoopState, value: float, when: Elapsed) -> PyTree:
        name, since = self._monitor.name, self._since
        if since is None:
            since = when.replace(steps=0, samples=0, time=0.0, epochs=None if when.epochs is None else 0)
        if self._check_finite and not math.isfinite(value):
            loop_state.stop(f"{_CALLER}: {name} is {value:g}")
        elif when - since >= self._patience:
            loop_state.stop(f"{_CALLER}: {name} has not improved for {_words(self._patience)}; {self._best_text()}")
        else:
            return None
        return None if self.best is None else _copy(self.best)

    def _has_begun(self, elapsed: Elapsed) -> bool:
        return self._start_from is None or self._start_from.reached(elapsed)

    def _has_reached(self, value: float) -> bool:
        return self._threshold is not None and math.isfinite(value) and self._gain(value, self._threshold) >= 0

    def _is_better(self, value: float) -> bool:
        known = self._baseline if self.best_value is None else self.best_value
        return math.isfinite(value) and (known is None or self._gain(value, known) > self._min_delta)

    def _gain(self, value: float, other: float) -> float:
        """By how much a value is better than another."""
        return other - value if self._mode == "min" else value - other

    def _best_text(self) -> str:
        if self.best_value is None or self.best_elapsed is None:
            return "it never did" if self._baseline is None else f"it was never better than {self._baseline:g}"
        return f"its best was {self.best_value:g} at step {self.best_elapsed.steps}"

    def _unknown(self, loop_state: LoopState) -> ValueError:
        name, paths = self._monitor.name, [path for path, _ in loop_state.accumulated_logs.entries()]
        return ValueError(
            f"{_CALLER} watches {name!r}, which was not logged in a whole epoch. {describe_logged(name, paths)} "
            "Watch one of these, or say from when on it is there: start_from=ms.at(epochs=2)."
        )


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or math.isnan(value):
        raise ValueError(f"{_CALLER} needs {name} to be a number. Got {describe_value(value)}.")
    return float(value)


def _words(length: Period) -> str:
    return " or ".join(f"{value} {'seconds' if unit == 'time' else unit}" for unit, value in length.units.items())


def _copy(tree: PyTree) -> PyTree:
    """The same values in memory that nobody else has: a later step may take the state's own for its results."""
    return jax.tree.map(_copy_leaf, tree)


def _copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        # Where it lies has to stay the same in every word, or the next step would be compiled again.
        return jax.device_put(leaf, leaf.sharding, may_alias=False) if leaf.committed else jnp.copy(leaf)
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _as_plain(elapsed: Elapsed | None) -> dict[str, Any] | None:
    return None if elapsed is None else {name: getattr(elapsed, name) for name in _SAVED}


def _as_elapsed(plain: dict[str, Any] | None) -> Elapsed | None:
    return None if plain is None else Elapsed(**plain)
