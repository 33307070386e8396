"""Functions of a state and a batch as steps, which run as the state's strategy says."""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from millstream.loops.elapsed import Elapsed
from millstream.loops.log_entries import Logs, as_logs
from millstream.pipeline.state import strong
from millstream.reading.contracts import PyTree
from millstream.reading.dtypes import to_jax_dtype
from millstream.states._managed_state import ManagedState, updated
from millstream.states._precision import cast
from millstream.states.gradients import Call, gradients
from millstream.states.strategies import Strategy, Traced
from millstream.text.errors import describe_value, function_name, require_no_lost_default

Body = Callable[[str, Call, PyTree, PyTree], tuple[Logs, PyTree]]


M = TypeVar("M", bound=ManagedState)

_not_numpy: set[type] = set()  # types of leaves that have come and are not arrays of NumPy: each is asked about once


class ManagedStep:
    """A step made by `managed.train_step` or `managed.step`. Call it with (state, batch) or (state, batch, elapsed).

    It never waits: logs stay on the device until someone reads them. As an attribute of a state class it is a method.

    Example:
        >>> import optax
        >>> state = ms.managed.ManagedState.create({"w": jnp.zeros(3)}, optax.sgd(0.1))
        >>> count = ms.managed.step(lambda state, batch: {"rows": len(batch)})
        >>> logs, state = count(state, np.zeros((4, 3)))
        >>> int(logs.metrics.rows)
        4

    Attributes:
        traced: The step as a pure function (state, batch, elapsed) -> (logs, state) for use inside a larger program:
            uncompiled, and placing nothing.
    """

    def __init__(self, caller: str, fn: Callable[..., PyTree], body: Body, *, keeps: bool) -> None:
        self._keeps = keeps  # whether the state it is given stays usable
        self._takes_elapsed = _takes_elapsed(caller, fn)
        self._runs: dict[Strategy, Traced] = {}
        self._latest: tuple[Strategy | None, Any] = None, None  # that of the step before, and how it runs
        self.traced = _traced(fn, body, takes_elapsed=self._takes_elapsed)
        functools.update_wrapper(self, fn)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({function_name(self.traced)})"

    def __call__(self, state: M, batch: PyTree, elapsed: Elapsed | None = None) -> tuple[Logs, M]:
        """Do one step.

        Args:
            state: A `ManagedState`.
            batch: Any pytree of arrays.
            elapsed: How far the run is, for functions that take it.

        Returns:
            Logs, and the next state.
        """
        # Between two dispatches a call of Python costs a microsecond, so a state and a batch like those before are
        # recognised without one. Hashing the strategy and a generator over the leaves took 2.9 us, this takes 1.4.
        strategy, run = self._latest
        if strategy is None or getattr(state, "strategy", None) is not strategy:
            run = self._run_of(state)
        if not _not_numpy.issuperset(map(type, jax.tree_util.default_registry.flatten(batch)[0])):
            batch = self._as_jax(batch)
        return run(state, batch, elapsed if self._takes_elapsed else None)  # its numbers would be arguments, too

    def _as_jax(self, batch: PyTree) -> PyTree:
        """A batch whose arrays of NumPy have dtypes that JAX keeps."""
        leaves = jax.tree.leaves(batch)
        _not_numpy.update(type(leaf) for leaf in leaves if not isinstance(leaf, np.ndarray))
        if _not_numpy.issuperset(map(type, leaves)):
            return batch
        return jax.tree.map(lambda leaf: to_jax_dtype(function_name(self), leaf), batch)

    def _run_of(self, state: Any) -> Traced:
        """How a step runs from a state."""
        try:
            run = self._runs[state.strategy]
        except (KeyError, AttributeError):
            run = self._compile(state)
        self._latest = state.strategy, run
        return run

    def _compile(self, state: Any) -> Traced:
        if not isinstance(state, ManagedState):
            raise TypeError(
                f"{function_name(self)} is a managed step and needs a ManagedState, "
                f"made with ManagedState.create(params, tx). Got {describe_value(state)}."
            )
        strategy: Any = state.strategy
        if self._keeps and strategy.donate:
            strategy = dataclasses.replace(strategy, donate=False)
        run = self._runs[state.strategy] = strategy.compile(self.traced)
        return run

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


def train_step(fn: Callable[..., PyTree]) -> ManagedStep:
    """Make a train step of a function that logs its losses: their sum is minimised.

    The function takes (state, batch) or (state, batch, elapsed) and returns logs with at least one loss, or (logs,
    state). The losses are differentiated by `state.params` and the gradients applied, as the state was asked to. Other
    fields of the returned state are kept; its parameters must be those it came with.

    Example:
        >>> import optax
        >>> @ms.managed.train_step
        ... def train_step(state, batch):
        ...     loss = jnp.mean((batch["x"] @ state.params["w"] - batch["y"]) ** 2)
        ...     return ms.logs().add_loss("loss", loss)
        >>> state = ms.managed.ManagedState.create({"w": jnp.zeros(3)}, optax.sgd(0.1))
        >>> logs, state = train_step(state, {"x": np.ones((4, 3), np.float32), "y": np.ones(4, np.float32)})
        >>> float(logs.losses.loss)
        1.0

    Args:
        fn: The function; pure and traceable.
    """
    return ManagedStep("managed.train_step", fn, _train, keeps=False)


def step(fn: Callable[..., PyTree]) -> ManagedStep:
    """Make a step of a function that minimises nothing, such as an evaluation: it runs as the state's strategy says.

    The function takes (state, batch) or (state, batch, elapsed) and returns logs, or (logs, state). The state it is
    given stays usable under every strategy: a run is tested in between, and continues.

    Example:
        >>> import optax
        >>> @ms.managed.step
        ... def test_step(state, batch):
        ...     return ms.logs().add_metric("prediction", jnp.mean(batch @ state.params["w"]))
        >>> state = ms.managed.ManagedState.create({"w": jnp.ones(3)}, optax.sgd(0.1))
        >>> logs, state = test_step(state, np.ones((4, 3), np.float32))
        >>> float(logs.metrics.prediction)
        3.0

    Args:
        fn: The function; pure and traceable.
    """
    return ManagedStep("managed.step", fn, _step, keeps=True)


def _takes_elapsed(caller: str, fn: Any) -> bool:
    if not callable(fn):
        raise TypeError(
            f"{caller} decorates a function of (state, batch) or (state, batch, elapsed). Got {describe_value(fn)}."
        )
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:
        raise TypeError(
            f"{caller} cannot tell what arguments fn={describe_value(fn)} has. Wrap it in a function."
        ) from None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    others = [p for p in parameters if p not in positional and p.default is p.empty]
    if len(positional) not in (2, 3) or others:
        raise TypeError(
            f"{caller} decorates a function of (state, batch) or (state, batch, elapsed). {function_name(fn)} takes "
            f"{inspect.signature(fn)}. Bind other arguments with functools.partial, or keep them in the state."
        )
    require_no_lost_default(caller, "fn", inspect.signature(fn), "state, batch, elapsed")
    return len(positional) == 3


def _traced(fn: Callable[..., Any], body: Body, *, takes_elapsed: bool) -> Traced:
    caller = function_name(fn)

    def traced(state: Any, batch: PyTree, elapsed: Any = None) -> tuple[Logs, Any]:
        rest = (elapsed,) if takes_elapsed and elapsed is not None else ()

        def call(state: Any, batch: PyTree) -> tuple[Logs, Any]:
            return _outputs(caller, state, fn(state, batch, *rest))

        logs, new = body(
            caller, _in_precision(caller, call) if state.options.precision is not None else call, state, batch
        )
        return logs, state.strategy.constrain(jax.tree.map(strong, new))

    def with_elapsed(state: Any, batch: PyTree, elapsed: Any) -> tuple[Logs, Any]:
        return traced(state, batch, elapsed)  # a fused loop hands over what a function cannot do without

    required = [p for p in inspect.signature(fn).parameters.values() if p.default is p.empty]
    declared = with_elapsed if len(required) == 3 else traced
    declared.__name__ = declared.__qualname__ = caller
    return declared


def _outputs(caller: str, state: Any, output: Any) -> tuple[Logs, Any]:
    """What a function returned as (logs, state), the logs copied."""
    logs, new = output if type(output) is tuple and len(output) == 2 else (output, None)
    new = state if new is None else new
    if not isinstance(new, ManagedState):
        raise TypeError(
            f"{caller} must return logs, or (logs, state). In place of the state it gave {describe_value(new)}."
        )
    if logs is None:
        return Logs(), new
    return Logs({name: dict(entries) for name, entries in as_logs(caller, logs).items()}), new


def _in_precision(caller: str, call: Call) -> Call:
    """The function on parameters and a batch in the dtype to compute in; its state has its own parameters again."""

    def mixed(state: Any, batch: PyTree) -> tuple[Logs, Any]:
        precision = state.options.precision
        narrow = state.replace(params=cast(state.params, precision.compute))
        logs, new = call(narrow, cast(batch, precision.compute))
        _check_params_kept(caller, narrow, new, "in mixed precision, where they are rounded copies")
        return cast(logs, precision.output), new.replace(params=state.params)

    return mixed


def _check_params_kept(caller: str, given: Any, returned: Any, why: str) -> None:
    before, after = jax.tree.leaves(given.params), jax.tree.leaves(returned.params)
    if len(before) != len(after) or any(old is not new for old, new in zip(before, after, strict=True)):
        raise ValueError(f"{caller} must return the state with the parameters it was given, {why}. It changed them.")


def _train(caller: str, call: Call, state: Any, batch: PyTree) -> tuple[Logs, Any]:
    def keeping(state: Any, batch: PyTree) -> tuple[Logs, Any]:
        logs, new = call(state, batch)
        _check_params_kept(caller, state, new, "because a train_step changes them by their gradients")
        return logs, new

    accumulate = state.options.accumulate
    compute = gradients if accumulate is None else accumulate.gradients
    grads, logs, new = compute(caller, keeping, state, batch)
    if state.loss_scale is not None:
        scale = state.loss_scale.scale
        grads = jax.tree.map(lambda grad: grad / scale.astype(grad.dtype), grads)
        logs.add_stateful_metric("loss_scale", scale)
    new, facts = updated(new, grads, otherwise=state)
    if "learning_rate" in facts:
        logs.add_stateful_metric("learning_rate", facts.pop("learning_rate"))
    return logs.add_metrics(facts) if facts else logs, new


def _step(caller: str, call: Call, state: Any, batch: PyTree) -> tuple[Logs, Any]:
    return call(state, batch)
