"""What can be called at a step: functions, callbacks of this package, and foreign objects by adapters."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from millstream.loops._history import History
from millstream.loops.elapsed import Elapsed
from millstream.loops.loop_state import LoopState
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_value, function_name
from millstream.text.summaries import never_raising, object_text

Call = Callable[[LoopState], Any]
Foreign = TypeVar("Foreign")

_adapters: dict[type, Callable[[Any], Any]] = {}


class Callback:
    """Something with a memory of its own that is called at some steps of a loop.

    A subclass has `__loop_callback__(loop_state)`, which returns what a function may return: nothing, logs, a state,
    or (logs, state). Methods called like a named schedule, such as `on_epoch_end`, let it be given in `callbacks=`.

    Example:
        >>> class Halve(ms.Callback):
        ...     def __loop_callback__(self, loop_state):
        ...         return loop_state.state / 2
        >>> ms.loop(8.0, range(3), {ms.every(1): Halve()}).state
        1.0

    Attributes:
        only_real_runs: Whether `fast_dev_run` leaves it out, because it leaves something behind.
        monitored: The entry of the logs that it judges a run by; None if there is none. Bars show it right after the
            loss.
    """

    only_real_runs = False
    monitored: str | None = None

    def __loop_callback__(self, loop_state: LoopState) -> PyTree:
        raise NotImplementedError

    def start(self, loop_state: LoopState) -> None:
        """A loop with this callback begins."""

    def finish(self, loop_state: LoopState) -> None:
        """It has ended, however it did: write and close what is open."""

    def get_state(self) -> dict[str, PyTree]:
        """What must be saved for a resumed run to resume exactly: plain values and arrays."""
        return {}

    def set_state(self, state: dict[str, PyTree]) -> None:
        """Continue from what `get_state` gave."""

    @never_raising
    def __repr__(self) -> str:
        return object_text(self)


class Observer(Callback):
    """A callback that looks at what was logged and touches no state: bars, writers, watchers.

    It is called when its step is complete, wherever it stands among the tasks, and sees whole rows. In a fused loop it
    does not cut a run of steps short: it is told of all of them at once.

    Example:
        >>> class Total(ms.Observer):
        ...     total = 0.0
        ...     def observe(self, loop_state, start, stop):
        ...         self.total += sum(row.metrics.loss for row in loop_state.history.rows(start, stop))

    Attributes:
        patience: Seconds that it can wait to be shown a step, and then several at once, although the loop is not fused;
            0 for one that may stop the run, or does anything else that has to happen at a certain step.
        sees_inner_loops: Whether `observe` is called by loops inside its own, such as tests, although it is not among
            their callbacks; `loop_state.parent` tells them apart.
    """

    patience: float = 0.0
    sees_inner_loops = False

    def observe(self, loop_state: LoopState, start: int, stop: int) -> None:
        """Look at the rows of the history from `start` to before `stop`; none if nothing was logged.

        Args:
            loop_state: Of the loop, after the last of these steps.
            start: The first row.
            stop: After the last row.
        """
        raise NotImplementedError

    def __loop_callback__(self, loop_state: LoopState) -> None:
        history = loop_state.history
        committed = len(history) and history.elapsed().steps == loop_state.elapsed.steps
        self.observe(loop_state, len(history) - bool(committed), len(history))

    @functools.cached_property
    def _by_hand(self) -> LoopState:
        return LoopState(None, History(), Elapsed())

    def __call__(self, elapsed: Elapsed, logs: Mapping[str, object] | None = None) -> bool:
        """Use it by hand, once per step.

        Args:
            elapsed: From `ms.loops.elapse`.
            logs: What the step has logged.

        Returns:
            Whether it asks to stop.
        """
        loop_state = self._by_hand
        loop_state.elapsed, start = elapsed, len(loop_state.history)
        if logs:
            loop_state.history.commit(elapsed, logs)
        self.observe(loop_state, start, len(loop_state.history))
        return loop_state.stop_iteration


class Noop(Callback):
    """Does nothing.

    Example:
        >>> ms.loop(0, range(3), {ms.every(1): ms.loops.noop}).state
        0
    """

    def __loop_callback__(self, loop_state: LoopState) -> None:
        return None

    def __call__(self, *_: object) -> None:
        return None

    def __repr__(self) -> str:
        return "noop"


noop = Noop()


def register_adapter(kind: type[Foreign], adapter: Callable[[Foreign], object]) -> None:
    """Let loops accept objects of a foreign class.

    Example:
        >>> class Bell:
        ...     def ring(self):
        ...         print("ding")
        >>> ms.loops.register_adapter(Bell, lambda bell: lambda state: bell.ring())
        >>> _ = ms.loop(0, range(2), {ms.every(2): Bell()})
        ding

    Args:
        kind: The class; subclasses are accepted, too.
        adapter: Makes a callback of such an object.
    """
    if not isinstance(kind, type) or not callable(adapter):
        found = f"{describe_value(kind)} and {describe_value(adapter)}"
        raise TypeError(f"register_adapter needs a class and a function. Got {found}.")
    if kind in _adapters:
        raise ValueError(f"register_adapter has an adapter for {kind.__name__} already.")
    _adapters[kind] = adapter


def adapt(callback: Any) -> Any:
    """A foreign object as a callback, by the adapter of its class; anything else as it is."""
    for kind in type(callback).__mro__:
        if kind in _adapters:
            return _adapters[kind](callback)
    return callback


def bind(caller: str, callback: Any) -> Call:
    """A callback as a function of the loop state; how many arguments it takes is found out here, once.

    Args:
        caller: The caller's name, for errors.
        callback: A `Callback`, a function, a method, a compiled function, or an object with an adapter.
    """
    callback = adapt(callback)
    if hasattr(type(callback), "__loop_callback__"):
        return callback.__loop_callback__
    if not callable(callback):
        raise TypeError(
            f"{caller} needs callbacks: functions of (state, batch, elapsed, loop_state) or of the first few of them, "
            f"or ms.Callback objects. Got {describe_value(callback)}. (ms.loops.register_adapter teaches loops "
            "a foreign class.)"
        )
    return _CALLS[arguments(caller, callback)](callback)


_CALLS: list[Callable[[Any], Call]] = [
    lambda fn: lambda _: fn(),
    lambda fn: lambda loop_state: fn(loop_state.state),
    lambda fn: lambda loop_state: fn(loop_state.state, loop_state.batch),
    lambda fn: lambda loop_state: fn(loop_state.state, loop_state.batch, loop_state.elapsed),
    lambda fn: lambda loop_state: fn(loop_state.state, loop_state.batch, loop_state.elapsed, loop_state),
]


def arguments(caller: str, fn: Any) -> int:
    """How many of the four arguments a function wants: those without a default, or all for `*args`."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        raise TypeError(
            f"{caller} cannot find out what arguments {function_name(fn)} takes. Wrap it: lambda state, batch: ..."
        ) from None
    if any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters):
        return 4
    required = [parameter for parameter in parameters if parameter.default is parameter.empty]
    names = [parameter.name for parameter in required]
    if names[:1] == ["batch"] or "mask" in names:
        raise TypeError(
            f"{caller} calls {function_name(fn)} with the first few of (state, batch, elapsed, loop_state), by "
            f"position. It takes ({', '.join(names)}). Have it take (state, batch); over a DataLoader, batch is the "
            "pair (batch, mask), so begin it with: batch, mask = batch."
        )
    positional = [p for p in required if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [parameter.name for parameter in required if parameter.kind == parameter.KEYWORD_ONLY]
    if named or len(positional) > 4:
        raise TypeError(
            f"{caller} calls {function_name(fn)} with at most four arguments, (state, batch, elapsed, loop_state), by "
            f"position. It needs {', '.join(named or (p.name for p in positional))}. Bind the rest: functools.partial."
        )
    return len(positional)


def is_compiled(callback: Any) -> bool:
    """Whether a callback is a function that JAX has compiled, or a step around one."""
    return hasattr(callback, "traced") or (callable(callback) and hasattr(callback, "lower"))
