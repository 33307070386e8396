"""The document of a checkpoint: JSON that also holds arrays, tuples and other plain values.

What JSON does not know is a dict with a single key that starts with a dollar sign.
"""

import base64
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millstream.files import plain
from millstream.reading.dtypes import check_array, dtype_name, holds_numbers, named_dtype
from millstream.text.errors import describe_leaf

_ARRAY, _DICT, _PLAIN, _TUPLE = "$array", "$dict", "$plain", "$tuple"


def encode(caller: str, document: Any) -> bytes:
    """A document as JSON text.

    Example:
        >>> from millstream.checkpoints._document import decode, encode
        >>> decode(encode("CheckpointStore", {"epoch": 3, "best": np.float32(0.5), "shape": (2, 3)}))
        {'epoch': 3, 'best': np.float32(0.5), 'shape': (2, 3)}

    Args:
        caller: The caller's name, for errors.
        document: Dicts, lists, tuples, plain values, and arrays, which come back as NumPy arrays.
    """
    return json.dumps(_pack(caller, document, "document"), indent=1, allow_nan=False).encode() + b"\n"


def decode(data: bytes) -> Any:
    """The document that `encode` was given. Any other bytes raise some error, or are some plain values."""
    return _unpack(json.loads(data))


def _pack(caller: str, value: Any, place: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind in (list, tuple):
        packed = [_pack(caller, item, f"{place}[{number}]") for number, item in enumerate(value)]
        return packed if kind is list else {_TUPLE: packed}
    if kind is dict:
        pairs = {key: _pack(caller, item, f"{place}[{key!r}]") for key, item in value.items()}
        if all(type(key) is str and not key.startswith("$") for key in pairs):
            return pairs
        return {_DICT: [[_pack(caller, key, f"a key of {place}"), item] for key, item in pairs.items()]}
    check_array(f"{caller}: {place}", value)
    if isinstance(value, np.ndarray | jax.Array) and _is_plain(value.dtype):
        array = np.asarray(value)
        return {_ARRAY: [dtype_name(array.dtype), list(array.shape), base64.b64encode(array.tobytes()).decode()]}
    try:
        return {_PLAIN: base64.b64encode(plain.encode(value)).decode()}
    except TypeError:
        raise TypeError(
            f"{caller} keeps a document of plain values (numbers, text, bytes, lists, tuples, dicts) and arrays. "
            f"Got {place}: {describe_leaf(value)}. Turn it into one of these, or give it as a part of the tree."
        ) from None


def _is_plain(dtype: Any) -> bool:
    return not jnp.issubdtype(dtype, jax.dtypes.extended) and holds_numbers(np.dtype(dtype))


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    for tag, content in value.items():
        if tag in _UNPACK:
            return _UNPACK[tag](content)
    return {key: _unpack(item) for key, item in value.items()}


def _array(content: Any) -> np.ndarray:
    name, shape, data = content
    # A bytearray, so that the array can be written to.
    return np.frombuffer(bytearray(base64.b64decode(data)), named_dtype(name)).reshape(shape)


_UNPACK = {
    _ARRAY: _array,
    _DICT: lambda content: {_unpack(key): _unpack(item) for key, item in content},
    _PLAIN: lambda content: plain.decode(base64.b64decode(content)),
    _TUPLE: lambda content: tuple(_unpack(item) for item in content),
}
