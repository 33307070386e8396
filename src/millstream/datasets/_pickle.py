"""CIFAR's pickles, read without `pickle`: a machine for the few instructions those files have.

The files are a dictionary of strings, lists of numbers and one array of bytes. The published ones were written by
Python 2 with protocol 2; what Python 3 writes with protocols 2 to 4 is read too. Nothing here looks up a name, imports
a module or calls what a file says.
"""

import math
import pickletools
from typing import Any

import numpy as np


class UnsafePickle(ValueError):
    """A pickle that is more than a dictionary of plain data."""


# The names that NumPy arrays are stored under, old and new. They are compared, never looked up.
_RECONSTRUCT = {"numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"}
_ENCODE = "_codecs encode"  # how Python 3 stores bytes in protocol 2: as text, and how to encode it
_NAMES = {*_RECONSTRUCT, "numpy ndarray", "numpy dtype", _ENCODE}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_NUMBERS = {"BININT", "BININT1", "BININT2"}
_STRINGS = {"SHORT_BINSTRING", "BINSTRING"}
_UNCHANGED = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"}
_IGNORED = {"PROTO", "FRAME"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Name(str):
    """The name of a class or function, as data."""


class _Array:
    """An array that the file has yet to fill."""

    value: np.ndarray | None = None


class _Dtype:
    """The type of a byte, the only one these files have."""


_MARK = object()


def read_plain_pickle(name: str, data: bytes) -> dict[bytes, Any]:
    """The dictionary in a CIFAR batch: bytes, lists of ints, and uint8 arrays."""
    try:
        value = _run(data)
        if not isinstance(value, dict):
            raise UnsafePickle(f"it holds a {type(value).__name__}, not a dictionary")
        return {key: item.value if isinstance(item, _Array) else item for key, item in value.items()}
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise UnsafePickle(
            f"{name} is not a CIFAR batch: {error}. It was not run. Get it again from its publisher."
        ) from None


def _run(data: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, argument, position in pickletools.genops(data):
        name = opcode.name
        if name == "STOP":
            (value,) = stack
            return value
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _NUMBERS or name in _UNCHANGED:
            stack.append(argument)
        elif name in _STRINGS:
            stack.append(str(argument).encode("latin1"))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[int(argument or 0)] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[int(argument or 0)])
        elif name == "GLOBAL" and argument in _NAMES:
            stack.append(_Name(argument))
        elif name == "STACK_GLOBAL" and " ".join(stack[-2:]) in _NAMES:
            stack.append(_Name(" ".join(_take(stack, 2))))
        elif name == "MARK":
            stack.append(_MARK)
        elif name not in _IGNORED:
            _collect(stack, name, f"instruction {name} {str(argument or '')[:60]!r} at byte {position} is not allowed")
    raise UnsafePickle("it has no end")


def _collect(stack: list[Any], name: str, refusal: str) -> None:
    """The instructions that put things together."""
    if name in ("EMPTY_DICT", "EMPTY_LIST"):
        stack.append({} if name == "EMPTY_DICT" else [])
    elif name in _TUPLES:
        stack.append(_take(stack, _TUPLES[name]))
    elif name == "TUPLE":
        stack.append(_take_marked(stack))
    elif name in ("APPEND", "APPENDS"):
        items = _take(stack, 1) if name == "APPEND" else _take_marked(stack)
        _expect(stack[-1], list).extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        items = _take(stack, 2) if name == "SETITEM" else _take_marked(stack)
        if any(type(key) not in (bytes, str) for key in items[::2]):
            raise UnsafePickle("it has a dictionary whose keys are not strings")
        keys = [key.encode() if type(key) is str else key for key in items[::2]]
        _expect(stack[-1], dict).update(zip(keys, items[1::2], strict=True))
    elif name == "REDUCE":
        function, arguments = _take(stack, 2)
        stack.append(_empty(function, arguments))
    elif name == "BUILD":
        (state,) = _take(stack, 1)
        _fill(stack[-1], state)
    else:
        raise UnsafePickle(refusal)


def _take(stack: list[Any], count: int) -> tuple[Any, ...]:
    items = tuple(stack[-count:])
    if len(items) < count or any(item is _MARK for item in items):
        raise UnsafePickle("it takes more than there is")
    del stack[-count:]
    return items


def _take_marked(stack: list[Any]) -> tuple[Any, ...]:
    for start in range(len(stack) - 1, -1, -1):
        if stack[start] is _MARK:
            items = tuple(stack[start + 1 :])
            del stack[start:]
            return items
    raise UnsafePickle("it takes more than there is")


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise UnsafePickle(f"it uses a {type(value).__name__} as a {kind.__name__}")
    return value


def _empty(function: Any, arguments: Any) -> _Array | _Dtype | bytes:
    if not isinstance(function, _Name):
        raise UnsafePickle(f"it calls a {type(function).__name__}")
    if function == _ENCODE and len(arguments) == 2 and type(arguments[0]) is str and arguments[1] == "latin1":
        return arguments[0].encode("latin1")
    if function in _RECONSTRUCT and arguments == ("numpy ndarray", (0,), b"b"):
        return _Array()
    if function == "numpy dtype" and arguments[:1] in ((b"u1",), ("u1",)):
        return _Dtype()
    raise UnsafePickle(f"it makes something else than an array of bytes with {function}")


def _fill(target: Any, state: Any) -> None:
    if isinstance(target, _Dtype):
        return
    if not isinstance(target, _Array) or type(state) is not tuple or len(state) != 5:
        raise UnsafePickle(f"it fills in a {type(target).__name__}")
    _, shape, dtype, fortran, raw = state
    if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes):
        raise UnsafePickle("it has an array that is not made of bytes")
    if type(shape) is not tuple or not all(type(size) is int and size >= 0 for size in shape):
        raise UnsafePickle("it has an array without a shape")
    if len(shape) > 32 or math.prod(shape) != len(raw):
        raise UnsafePickle(f"it has an array of shape {shape[:8]} with {len(raw)} bytes")
    target.value = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran is True else "C")
