"""Plain values as bytes: what a worker process may send back besides a batch.

The bytes may come from a worker that has parsed hostile data. So there is no pickle: reading them builds values of a
few known types and can do nothing else.

Every value is a tag of one byte, a length of eight bytes and a payload: of a leaf, that many bytes; of a container,
that many values.
"""

import datetime
import math
import pathlib
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from millstream.text.errors import describe_leaf

_DEPTH = 100
_HEAD = struct.Struct("<cQ")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")
_DTYPE = re.compile(r"[<>|][biufcSUMmV]\d+(\[\d*[A-Za-z]+\])?")


def encode(value: Any, caller: str = "a worker process", otherwise: str = "") -> bytes:
    """A plain value as bytes, which `decode` turns back into an equal one of the same types.

    Plain are None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, date, datetime (with no
    time zone or a fixed offset), NumPy scalars, NumPy arrays of numbers or text, and paths, which come back as
    `pathlib.Path`. Subclasses are not: they would come back as something else.

    Example:
        >>> from millstream.files.plain import decode, encode
        >>> decode(encode({"caption": "two dogs", "box": (3, 4.5)}))
        {'caption': 'two dogs', 'box': (3, 4.5)}

    Args:
        value: What to send.
        caller: The caller's name, for errors.
        otherwise: What else there is to do, in errors.
    """
    out, path = bytearray(), []
    try:
        _write(value, out, path, [])
    except _Refused as refused:
        raise TypeError(
            f"{caller} can send back arrays and plain values (numbers, text, bytes, lists, dicts, paths). "
            f"Got {_place(path)}: {refused}. Turn it into one of these{otherwise}."
        ) from None
    return bytes(out)


def decode(data: bytes | memoryview) -> Any:
    """The value `encode` was given. Any other bytes are a ValueError, or some plain value; they can do nothing else.

    Example:
        >>> from millstream.files.plain import decode, encode
        >>> decode(encode([None, 2**70, b"raw"]))
        [None, 1180591620717411303424, b'raw']
    """
    data = bytes(data)
    try:
        value, end = _read(data, 0, 0)
    except Exception as error:  # an unhashable key, a dtype that does not exist, a date in month 13, ...
        raise ValueError(f"decode needs bytes that encode made. These are damaged: {error!r}.") from error
    if end != len(data):
        raise ValueError(f"decode needs bytes that encode made. These have {len(data) - end} bytes too many.")
    return value


class _Refused(Exception):
    """Something is not plain; its text says what."""


class _Inside(str):
    """A place inside a value that no index leads to."""


_KEY, _ITEM = _Inside(" (a key of it)"), _Inside(" (an item of it)")


def _place(path: list[Any]) -> str:
    shown = path if len(path) < 20 else [*path[:10], _Inside(" ... "), *path[-5:]]
    return "result" + "".join(step if type(step) is _Inside else f"[{step!r}]" for step in shown)


def _write(value: Any, out: bytearray, path: list[Any], above: list[int]) -> None:
    """Append `value` to `out`. If it is refused, `path` is left leading to the culprit."""
    kind = type(value)
    leaf = _LEAVES.get(kind)
    if leaf is not None:
        tag, pack, _ = leaf
        payload = pack(value)
        out += _HEAD.pack(tag, len(payload))
        out += payload
        return
    if id(value) in above:
        raise _Refused(f"a {kind.__name__} that contains itself")
    if len(above) == _DEPTH:
        raise _Refused(f"values nested more than {_DEPTH} deep")
    above.append(id(value))
    if kind is dict:
        _write_dict(value, out, path, above)
    elif kind in _SEQUENCES:
        _write_items(value, _SEQUENCES[kind], out, path, above)
    elif kind in (np.ndarray, np.memmap) or isinstance(value, np.generic):
        out += _HEAD.pack(b"g" if isinstance(value, np.generic) else b"a", 0)
        _write((_dtype_name(value), value.shape, value.tobytes()), out, path, above)
    else:
        raise _Refused(describe_leaf(value))
    above.pop()


def _write_dict(value: dict[Any, Any], out: bytearray, path: list[Any], above: list[int]) -> None:
    out += _HEAD.pack(b"d", len(value))
    path.append(_KEY)
    for key, item in value.items():
        path[-1] = _KEY
        _write(key, out, path, above)
        path[-1] = key
        _write(item, out, path, above)
    path.pop()


def _write_items(value: Any, tag: bytes, out: bytearray, path: list[Any], above: list[int]) -> None:
    out += _HEAD.pack(tag, len(value))
    indexed = tag in b"lt"
    path.append(_ITEM)
    for index, item in enumerate(value):
        if indexed:
            path[-1] = index
        _write(item, out, path, above)
    path.pop()


def _read(data: bytes, start: int, depth: int) -> tuple[Any, int]:
    """The value that starts at `start`, and where it ends."""
    tag, length = _HEAD.unpack_from(data, start)
    start += _HEAD.size
    unpack = _READ_LEAF.get(tag)
    if unpack is not None:
        end = start + length
        if end > len(data):
            raise ValueError("they end too early")
        return unpack(data[start:end]), end
    if depth == _DEPTH:
        raise ValueError("they are nested too deeply")
    if tag in b"ag":
        parts, end = _read(data, start, depth + 1)
        array = _array(*parts)
        return (array if tag == b"a" else array[()]), end
    make, items = _READ_ITEMS[tag], []
    for _ in range(length * 2 if tag == b"d" else length):
        item, start = _read(data, start, depth + 1)
        items.append(item)
    return make(items), start


def _dtype_name(value: np.ndarray | np.generic) -> str:
    """The name of a dtype, from which `_dtype` makes the same one; without fields, objects or another package."""
    dtype = value.dtype
    exact = type(value) is dtype.type or not isinstance(value, np.generic)
    if not exact or dtype.isbuiltin == 2 or dtype.names is not None or not _DTYPE.fullmatch(dtype.str):
        raise _Refused(describe_leaf(value))
    return dtype.str


def _dtype(name: Any) -> np.dtype:
    if not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise ValueError(f"no plain dtype: {name!r}")
    return np.dtype(name)


def _shape(shape: Any) -> tuple[int, ...]:
    if type(shape) is not tuple or any(type(size) is not int for size in shape):  # a text times a size can be huge
        raise ValueError("no shape")
    return shape


def _array(name: Any, shape: Any, raw: Any) -> np.ndarray:
    dtype, shape = _dtype(name), _shape(shape)
    if type(raw) is not bytes or math.prod(shape) * dtype.itemsize != len(raw):
        raise ValueError("the contents of an array are not as long as its shape says")
    return np.ndarray(shape, dtype, buffer=bytearray(raw))  # a bytearray, so that the array can be written to


def _pack_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(payload: bytes) -> str:
    return payload.decode("utf-8", "surrogatepass")


def _pack_datetime(value: datetime.datetime) -> bytes:
    if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
        raise _Refused(describe_leaf(value))
    return f"{value.fold}{value.isoformat()}".encode()


def _datetime(payload: bytes) -> datetime.datetime:
    return datetime.datetime.fromisoformat(payload[1:].decode()).replace(fold=int(payload[:1]))


def _pack_path(value: pathlib.PurePath) -> bytes:
    return _pack_text(str(value))


_LEAVES: dict[type, tuple[bytes, Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    type(None): (b"N", lambda value: b"", lambda payload: None),
    bool: (b"B", lambda value: b"1" if value else b"", bool),
    int: (
        b"I",
        lambda value: value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True),
        lambda payload: int.from_bytes(payload, "little", signed=True),
    ),
    float: (b"F", _FLOAT.pack, lambda payload: _FLOAT.unpack(payload)[0]),
    complex: (
        b"C",
        lambda value: _COMPLEX.pack(value.real, value.imag),
        lambda payload: complex(*_COMPLEX.unpack(payload)),
    ),
    str: (b"S", _pack_text, _text),
    bytes: (b"Y", lambda value: value, lambda payload: payload),
    type(pathlib.Path()): (b"P", _pack_path, lambda payload: pathlib.Path(_text(payload))),
    type(pathlib.PurePath()): (b"P", _pack_path, lambda payload: pathlib.Path(_text(payload))),
    datetime.date: (
        b"D",
        lambda value: value.isoformat().encode(),
        lambda payload: datetime.date.fromisoformat(payload.decode()),
    ),
    datetime.datetime: (b"T", _pack_datetime, _datetime),
    np.str_: (b"s", _pack_text, lambda payload: np.str_(_text(payload))),  # an array would drop zeros at the end
    np.bytes_: (b"y", bytes, np.bytes_),
}
_READ_LEAF = {tag: unpack for tag, _, unpack in _LEAVES.values()}
_SEQUENCES: dict[type, bytes] = {list: b"l", tuple: b"t", set: b"e", frozenset: b"f"}
_READ_ITEMS: dict[bytes, Callable[[list[Any]], Any]] = {
    b"l": lambda items: items,
    b"t": tuple,
    b"e": set,
    b"f": frozenset,
    b"d": lambda items: dict(zip(items[::2], items[1::2], strict=True)),
}
