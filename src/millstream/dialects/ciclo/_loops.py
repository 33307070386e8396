"""Loops whose `batch_size_fn` gets the shapes of a batch, and logs that begin with something."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax

import millstream as ms
from millstream.loops.callback import Callback, register_adapter
from millstream.loops.elapsed import Elapsed
from millstream.loops.log_entries import Logs
from millstream.loops.schedules import Schedule, every

P = ParamSpec("P")
R = TypeVar("R")
Shapes = list[tuple[int, ...]]


class LoopElement:
    """Something that can be unpacked into the tasks of a loop, where it is due at every step."""

    def keys(self) -> list[Schedule]:
        """The one schedule it is under."""
        return [every(1)]

    def __getitem__(self, schedule: Schedule) -> list[Any]:
        return [self]

    def __iter__(self) -> Iterator[Schedule]:
        return iter(self.keys())  # without it, Python would ask for items 0, 1, 2 and so on, forever


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


def _by_shapes(batch_size_fn: Callable[[Shapes], int]) -> Callable[[Any], int]:
    """How many samples a batch has, by the shapes of its leaves; one without axes counts as one row."""

    def size_of(batch: Any) -> int:
        shapes: Shapes = [tuple(getattr(leaf, "shape", ())) or (1,) for leaf in jax.tree.leaves(batch)]
        return batch_size_fn(shapes) if shapes else 1

    return size_of


def _counting_by_shapes(loop: Callable[P, R]) -> Callable[P, R]:
    """A loop whose `batch_size_fn` gets the shapes."""

    @functools.wraps(loop)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs.get("batch_size_fn") is not None:
            kwargs["batch_size_fn"] = _by_shapes(kwargs["batch_size_fn"])  # pyright: ignore[reportArgumentType]
        return loop(*args, **kwargs)

    return run


loop = _counting_by_shapes(ms.loop)
train_loop = _counting_by_shapes(ms.train_loop)
test_loop = _counting_by_shapes(ms.test_loop)
predict_loop = _counting_by_shapes(ms.predict_loop)


def elapse(
    dataset: Any,
    initial: Elapsed | None = None,
    stop: Any = None,
    batch_size_fn: Callable[[Shapes], int] | None = None,
    **options: Any,
) -> Iterator[tuple[Elapsed, Any]]:
    """Go through batches by hand: (elapsed, batch), one after the other.

    Args:
        dataset: An iterable of batches.
        initial: How far an earlier run had come.
        stop: When to end: a number of steps, or `at(...)`. None: with the data.
        batch_size_fn: How many samples a batch has, by the shapes of its arrays. By default, the longest first axis.
        **options: What `ms.loops.elapse` takes besides.
    """
    size_of = None if batch_size_fn is None else _by_shapes(batch_size_fn)
    return ms.loops.elapse(dataset, initial=initial, stop=stop, batch_size_fn=size_of, **options)


def logs(*args: Any, **kwargs: Any) -> Logs:
    """Logs, empty or with collections to begin with: `logs({"metrics": {"loss": 0.5}})`."""
    return Logs().merge(dict(*args, **kwargs))
