"""Python functions inside compiled programs, and the errors they raise.

JAX reports an error in a callback as its own, with the original as text. A callback made here remembers the exception,
so that the caller of the program can raise it as it was.
"""

import collections
import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax

_raised: collections.deque[BaseException] = collections.deque(maxlen=16)


def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, remembering what it raises."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except BaseException as error:
            _raised.append(error)
            raise

    return call


def call_and_wait(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a compiled function and wait for its results; what a callback raised is raised as it was."""
    _raised.clear()
    try:
        return jax.block_until_ready(function(*arguments))
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # A program that JAX runs while it is called, instead of later, fails with a plain ValueError.
        if not _raised or (isinstance(error, ValueError) and "callback" not in str(error).lower()):
            raise
        first = _raised[0]
        _raised.clear()  # with its traceback it would hold on to all that was in reach where it was raised
        _clear_callers(first)
        raise first from None


def _clear_callers(error: BaseException) -> None:
    """Forget the local variables of whoever called the callback that raised this.

    Among those frames, which an exception leads back to, are JAX's. They hold the executable, which holds the callback
    and so whoever reads; and a circle through an executable is never collected.
    """
    frame = None if error.__traceback__ is None else error.__traceback__.tb_frame.f_back
    with contextlib.suppress(RuntimeError):  # a frame that still runs, as those do that called the program
        while frame is not None:
            frame.clear()
            frame = frame.f_back
