"""A step that is tried with other settings, as a pure function."""

import inspect
from collections.abc import Callable
from typing import Any

import jax

from millstream.loops import Logs
from millstream.loops.log_entries import as_logs
from millstream.managed import ManagedState
from millstream.text.errors import describe_value, function_name


class TrialStep:
    """A step as a pure function of a state, a batch, what is tried, and the elapsed.

    Args:
        caller: The caller's name, for errors.
        step: A managed step, or a function of (state, batch), or of these and what is tried.
        third: What its third argument is called, for errors.
        optimizer: Makes the optimizer of a managed state of what is tried.

    Attributes:
        takes_third: Whether the step itself is given what is tried.
        takes_elapsed: Whether it is given the elapsed.
    """

    def __init__(self, caller: str, step: Any, third: str, optimizer: Callable[..., Any] | None = None) -> None:
        self._caller = caller
        self._traced = getattr(step, "traced", None)
        required = _required(caller, step if self._traced is None else self._traced, third)
        self.takes_third = self._traced is None and required == 3
        self.takes_elapsed = self._traced is not None and required == 3
        self._step = step
        self._optimizer = optimizer
        self.__name__ = function_name(step)

    def __call__(self, state: Any, batch: Any, tried: Any, elapsed: Any) -> tuple[Logs, Any]:
        """What the step logs, and the next state."""
        if self._optimizer is not None:
            _require_managed(self._caller, state)
            logs, new = self._call(state.replace(tx=self._optimizer(tried)), batch, tried, elapsed)
            return logs, new.replace(tx=state.tx)
        return self._call(state, batch, tried, elapsed)

    def _call(self, state: Any, batch: Any, tried: Any, elapsed: Any) -> tuple[Logs, Any]:
        if self._traced is not None:
            output = self._traced(state, batch, elapsed) if self.takes_elapsed else self._traced(state, batch)
        else:
            output = self._step(state, batch, tried) if self.takes_third else self._step(state, batch)
        if isinstance(output, Logs):
            return output, state
        if type(output) is not tuple or len(output) != 2:
            raise TypeError(
                f"{self._caller} needs {self.__name__} to return (logs, state), such as "
                f"ms.logs().add_loss('loss', loss), state. It returned {describe_value(output)}."
            )
        return as_logs(self._caller, output[0]), output[1]


def compiled_step(traced: Callable[..., Any], name: str) -> Any:
    """A pure function as a step of a loop: compiled, and as it is where steps are fused, whose states may hold more."""
    traced.__name__ = traced.__qualname__ = name
    compiled: Any = jax.jit(traced)
    compiled.traced = traced
    return compiled


def _required(caller: str, step: Any, third: str) -> int:
    """How many arguments a step insists on: 2 or 3."""
    try:
        parameters = inspect.signature(step).parameters.values() if callable(step) else ()
    except ValueError:
        parameters = ()
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) not in (2, 3):
        raise TypeError(
            f"{caller} needs a step: a managed.train_step, or a function of (state, batch, {third}) or (state, batch) "
            f"that returns (logs, state). Got {describe_value(step)}."
        )
    return len(required)


def _require_managed(caller: str, state: Any) -> None:
    if not isinstance(state, ManagedState):
        raise TypeError(
            f"{caller} can use optimizer= only with a managed state, whose steps update by it. Got "
            f"{describe_value(state)}. A step of your own has it: make the optimizer in the step."
        )
