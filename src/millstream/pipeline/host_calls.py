"""Python functions inside compiled programs, and the errors they raise.

JAX reports an error in a callback as its own, with the original as text. A callback made here remembers the exception,
so that whoever runs the program can raise it as it was.
"""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def original_errors() -> Iterator[None]:
    """Raise what a callback raised in place of JAX's report of it. The body must wait for its results."""
    _raised.clear()
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # A program that JAX runs while it is called, instead of later, fails with a plain ValueError.
        if not _raised or (isinstance(error, ValueError) and "callback" not in str(error).lower()):
            raise
        first = _raised[0]
        _raised.clear()  # with its traceback it would hold on to all that was at hand where it was raised
        raise first from None
