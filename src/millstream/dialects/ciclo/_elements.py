"""Callbacks that can be unpacked into tasks: `{**callback}` is `{every(1): [callback]}`."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec

from millstream.loops.callback import Callback, register_adapter
from millstream.loops.schedule import Schedule
from millstream.loops.schedules import every

P = ParamSpec("P")


class LoopElement:
    """Something that can be unpacked into the tasks of a loop, where it is due at every step."""

    def keys(self) -> list[Schedule]:
        """The one schedule it is under."""
        return [every(1)]

    def __getitem__(self, schedule: Schedule) -> list[Any]:
        return [self]

    def __iter__(self) -> Iterator[Schedule]:
        return iter(self.keys())  # without it, Python would ask for items 0, 1, 2 and so on, for ever


class LoopCallbackBase(LoopElement, Callback):
    """A callback of your own: it has `__loop_callback__(loop_state)`, which returns (logs, state)."""


class WrappedCallback(LoopElement):
    """A callback of Millstream, or a function, that can be unpacked. In a loop it is what it wraps.

    Args:
        callback: What it wraps; its attributes are found here, too.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback

    def __getattr__(self, name: str) -> Any:
        if name == "_callback":  # asked for while a copy is made, before it is there
            raise AttributeError(name)
        return getattr(self._callback, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Use it by hand."""
        return self._callback(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self._callback)

    def unwrap(self) -> Any:
        """What it wraps."""
        return self._callback


register_adapter(WrappedCallback, WrappedCallback.unwrap)


def callback(f: Callable[..., Any]) -> WrappedCallback:
    """A function that can be unpacked into tasks: `{**ciclo.callback(f)}`."""
    return WrappedCallback(f)


def wrapping(make: Callable[P, Any]) -> Callable[P, Any]:
    """A function that makes callbacks, as one that makes such as can be unpacked."""

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> WrappedCallback:
        return WrappedCallback(make(*args, **kwargs))

    return made


def inject(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function that can be given more arguments than it takes: it gets the first of them."""
    count = len(positional(f))

    @functools.wraps(f)
    def injected(*args: Any) -> Any:
        return f(*args[:count])

    return injected


def positional(f: Callable[..., Any]) -> list[str]:
    """The names of the arguments that a function takes by position."""
    parameters = inspect.signature(f).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
