"""Steps of the managed API: functions of a state and a batch that run as the state's strategy says."""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax

from millstream import managed
from millstream.dialects.ciclo._loops import LoopElement, inject, positional
from millstream.loops.log_entries import Logs
from millstream.managed import Strategy, get_strategy
from millstream.pipeline.state import strong
from millstream.reading.contracts import PyTree
from millstream.states.gradients import total_loss
from millstream.states.strategies import Traced
from millstream.text.errors import describe_value, function_name

Call = Callable[[Any, PyTree, Any], tuple[Logs, Any]]  # (state, batch, elapsed) -> (logs, state)


class ManagedStep(LoopElement):
    """A step made by `managed.train_step` or `managed.step`. Call it with (state), (state, batch) or all three.

    It can be unpacked into tasks, and is a method if it is in a state class.

    Args:
        fn: The user's function, of the first of (state, batch, elapsed).
        ours: What makes a step for a state that is one of Millstream's own, such as a `FlaxState`.
        body: What makes the step's function for all other states, such as `managed.ManagedState`.
        strategy: How it runs if the state does not say it.
        keeps: Whether the state that it is given stays usable.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        ours: Callable[[Callable[..., Any]], managed.ManagedStep],
        body: Callable[[str, Call], Call],
        *,
        strategy: str | Strategy,
        keeps: bool,
    ) -> None:
        _require_arguments(fn)
        caller, self._takes_elapsed = function_name(fn), len(positional(fn)) > 2
        call = _standard(caller, fn)
        self._strategy = get_strategy(strategy)
        self._keeps = keeps
        self._ours = ours(_as_declared(caller, call, self._takes_elapsed))
        self._body = body(caller, call)
        self._runs: dict[Strategy, Traced] = {}
        self.traced = _as_declared(caller, self._trace, self._takes_elapsed)
        functools.update_wrapper(self, fn)

    def __call__(self, state: Any, batch: PyTree = None, elapsed: Any = None) -> tuple[Logs, Any]:
        """Do one step.

        Args:
            state: A `ManagedState`, or another one with `params`, `replace` and `apply_gradients`.
            batch: Any pytree of arrays.
            elapsed: How far the run is, for functions that take it.

        Returns:
            Logs, and the next state.
        """
        if isinstance(state, managed.ManagedState):
            return self._ours(state, batch, elapsed)
        strategy = getattr(state, "strategy", self._strategy)
        if strategy not in self._runs:
            run: Any = strategy
            run = dataclasses.replace(run, donate=False) if self._keeps and run.donate else run
            self._runs[strategy] = run.compile(_as_declared(function_name(self), self._trace, takes_elapsed=True))
        return self._runs[strategy](state, batch, elapsed if self._takes_elapsed else None)

    def _trace(self, state: Any, batch: PyTree, elapsed: Any) -> tuple[Logs, Any]:
        if isinstance(state, managed.ManagedState):
            return self._ours.traced(state, batch, elapsed)
        logs, new = self._body(state, batch, elapsed)
        return logs, getattr(state, "strategy", self._strategy).constrain(jax.tree.map(strong, new))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


def train_step(step_fn: Callable[..., Any], strategy: str | Strategy = "jit") -> ManagedStep:
    """Make a train step of a function that logs its losses: their sum is minimised.

    Args:
        step_fn: A function of the first of (state, batch, elapsed). It returns logs with at least one loss, or (logs,
            state). Stateful metrics of clu are merged into the fields of the state that have their names.
        strategy: How it runs if the state does not say it.
    """
    return ManagedStep(step_fn, managed.train_step, _train, strategy=strategy, keeps=False)


def step(step_fn: Callable[..., Any], strategy: str | Strategy = "jit") -> ManagedStep:
    """Make a step of a function that minimises nothing, such as an evaluation.

    Args:
        step_fn: A function of the first of (state, batch, elapsed). It returns nothing, logs, a state, or (logs,
            state). Stateful metrics of clu are merged into the fields of the state that have their names.
        strategy: How it runs if the state does not say it.
    """
    return ManagedStep(step_fn, managed.step, lambda _, call: call, strategy=strategy, keeps=True)


def _require_arguments(fn: Any) -> None:
    if not callable(fn):
        raise TypeError(f"A managed step is a function of the first of (state, batch, elapsed). Got {fn!r}.")
    try:
        inspect.signature(fn).bind(*positional(fn)[:3])
    except TypeError:
        raise TypeError(
            f"A managed step is a function of the first of (state, batch, elapsed). {function_name(fn)} takes "
            f"{inspect.signature(fn)}. Bind other arguments with functools.partial, or keep them in the state."
        ) from None


def _train(caller: str, call: Call) -> Call:
    def train(state: Any, batch: PyTree, elapsed: Any) -> tuple[Logs, Any]:
        def loss(params: PyTree) -> tuple[jax.Array, tuple[Logs, Any]]:
            logs, new = call(state.replace(params=params), batch, elapsed)
            return total_loss(caller, logs), (logs, new)

        grads, (logs, new) = jax.grad(loss, has_aux=True)(state.params)
        return logs, new.apply_gradients(grads=grads)

    return train


def _standard(caller: str, fn: Callable[..., Any]) -> Call:
    """A user's function as one that takes all arguments and returns (logs, state)."""
    call = inject(fn)

    def standard(state: Any, batch: PyTree, elapsed: Any) -> tuple[Logs, Any]:
        output = call(state, batch, elapsed)
        logs, new = output if type(output) is tuple and len(output) == 2 else (None, output)
        if isinstance(new, Logs):
            logs, new = new, None
        new = state if new is None else new
        if type(new) is not type(state):
            raise TypeError(
                f"{caller} may return nothing, ciclo.logs(), a state, or (logs, state). The state is a "
                f"{type(state).__name__}, and it returned {describe_value(new)}."
            )
        return _merged(Logs().merge(logs), new)

    return standard


def _merged(logs: Logs, state: Any) -> tuple[Logs, Any]:
    """Metrics of a batch merged into those that the state has under their names, and the values of these logged."""
    for name, metric in list(logs.get("stateful_metrics", {}).items()):
        if hasattr(metric, "merge") and hasattr(metric, "compute"):
            total = getattr(state, name).merge(metric)
            state, value = state.replace(**{name: total}), total.compute()
            del logs["stateful_metrics"][name]
            logs.add_stateful_metrics(value if isinstance(value, Mapping) else {name: value})
    return logs, state


def _as_declared(caller: str, call: Call, takes_elapsed: bool) -> Callable[..., tuple[Logs, Any]]:
    """A function of (state, batch), and of the elapsed only if the user's is: handing that over takes time."""

    def with_elapsed(state: Any, batch: PyTree, elapsed: Any) -> tuple[Logs, Any]:
        return call(state, batch, elapsed)

    def without(state: Any, batch: PyTree) -> tuple[Logs, Any]:
        return call(state, batch, None)

    declared = with_elapsed if takes_elapsed else without
    declared.__name__ = declared.__qualname__ = caller
    return declared
