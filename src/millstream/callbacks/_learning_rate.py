"""Logging the learning rate."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from millstream.loops.callback import Callback
from millstream.loops.elapsed import Elapsed
from millstream.loops.learning_rates import injected, read_rate, used_rate
from millstream.loops.log_entries import Logs
from millstream.loops.loop_state import LoopState
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_value, function_name, require_text

_CALLER = "log_learning_rate"
_AT_ONCE = 256  # steps whose rate is computed together

_copy = jax.jit(jnp.copy)


class log_learning_rate(Callback):
    """Log the learning rate that a step was taken with, as a stateful metric.

    In `callbacks=` it does so at every step. By hand: `logs.updates = log_learning_rate(...)(elapsed, state)`.

    Example:
        >>> rate = ms.callbacks.log_learning_rate(lambda step: 0.1 * 0.5**step)
        >>> _, history, _ = ms.loop(0, range(3), {ms.every(1): rate})
        >>> history.collect("learning_rate")
        [0.1, 0.05, 0.025]

    Args:
        source: A function of the number of updates before this one, such as an optax schedule. None: it is looked up in
            the state: where `optax.inject_hyperparams` keeps it, or, in a state with `tx` and `opt_state` such as a
            managed one, as the number or schedule that its optimizer was given as `learning_rate`. A managed state
            with `log_learning_rate=True` logs it by itself, also in fused loops.
        name: What it is logged as.
        within: If the state has several learning rates: a part of the path of the one that is meant.
    """

    def __init__(
        self,
        source: Callable[[int], ArrayLike] | None = None,
        *,
        name: str = "learning_rate",
        within: str | None = None,
    ) -> None:
        if source is not None and not callable(source):
            raise TypeError(
                f"{_CALLER} needs a schedule, which is a function of the step, or nothing, to find the rate in the "
                f"state. Got {describe_value(source)}."
            )
        if source is not None and within is not None:
            raise ValueError(f"{_CALLER} can use within only to look into the state, not with a schedule.")
        require_text(_CALLER, "name", name)
        if within is not None:
            require_text(_CALLER, "within", within)
        self._name = name
        self._schedule = None if source is None else _on_host(source)
        self._within = within
        self._read: Callable[[Any], Any] | None = None  # from a state like those of this loop

    def start(self, loop_state: LoopState) -> None:
        """A loop begins, perhaps with a different kind of state."""
        self._read = None

    def __loop_callback__(self, loop_state: LoopState) -> Logs:
        return self(loop_state.elapsed, loop_state.state)

    def on_train_batch_end(self, state: object, batch: object, elapsed: Elapsed, loop_state: LoopState) -> Logs:
        """Log it after every step."""
        return self(elapsed, state)

    def __call__(self, elapsed: Elapsed, state: PyTree = None) -> Logs:
        """Use it by hand.

        Args:
            elapsed: From `ms.loops.elapse`, after the update.
            state: After the update; not needed with a schedule.

        Returns:
            Logs with the learning rate.
        """
        rate = self._from_state(state) if self._schedule is None else self._schedule(elapsed.steps - 1)
        return Logs().add_stateful_metric(self._name, rate)

    def _from_state(self, state: Any) -> Any:
        if self._read is None:
            self._read = _find(state, self._within)
        rate = self._read(state)
        # The next step may take the state's memory for its results, before anybody has read the logs.
        return _copy(rate) if isinstance(rate, jax.Array) else rate


def _on_host(schedule: Callable[[int], Any]) -> Callable[[int], float]:
    """A schedule as a function that costs the host next to nothing.

    One that computes with JAX takes about 100 us for a number, so many numbers are computed at once, by one program on
    the CPU that no training step is in the way of.
    """
    if not isinstance(schedule(0), jax.Array):
        return lambda step: float(schedule(step))
    compiled = jax.jit(jax.vmap(schedule))
    rates: dict[int, list[float]] = {}

    def rate(step: int) -> float:
        block, number = divmod(step, _AT_ONCE)
        if block not in rates:
            rates.clear()
            steps = np.arange(block * _AT_ONCE, (block + 1) * _AT_ONCE, dtype=np.int32)
            rates[block] = np.asarray(compiled(jax.device_put(steps, _host_device()))).tolist()
        return rates[block][number]

    try:
        rate(0)
    except jax.errors.JAXTypeError as error:
        error.add_note(
            f"{_CALLER} needs a schedule that either can be compiled, or returns plain numbers. "
            f"{function_name(schedule)} returns an array and cannot be compiled."
        )
        raise
    return rate


def _host_device() -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX was told to use a different platform only
        return jax.local_devices()[0]


def _find(state: Any, within: str | None) -> Callable[[Any], Any]:
    """What reads the learning rate of a state."""
    paths = injected(state)
    chosen = [path for path in paths if within is None or within in jax.tree_util.keystr(path)]
    if len(chosen) == 1:
        return lambda state: read_rate(state, chosen[0])
    if not paths and within is None and hasattr(state, "tx") and hasattr(state, "opt_state"):
        rate = jax.jit(used_rate(_CALLER, state.tx, state.opt_state).of_last)
        return lambda state: rate(state.opt_state)
    if not paths:
        raise ValueError(
            f"{_CALLER} without a source finds no learning rate in the state. Build the optimizer with "
            "optax.inject_hyperparams(optax.adam)(learning_rate=...), which keeps it there, or give the schedule: "
            "ms.callbacks.log_learning_rate(schedule)."
        )
    places = "".join(f"\n  {jax.tree_util.keystr(path)}" for path in paths)
    rule = "several learning rates" if within is None else f"{len(chosen)} learning rates within {within!r}"
    raise ValueError(
        f"{_CALLER} finds {rule} in the state. There are:{places}\n"
        "Use one for each, with a name: ms.callbacks.log_learning_rate(within=<a part of its path>, name=...)."
    )
