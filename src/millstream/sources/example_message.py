"""`tf.train.Example`, the message that is usually in TFRecord files, read without TensorFlow or protobuf.

An Example has Features, which are pairs of a name and a Feature, which is a list of bytes, of float32 or of int64.
"""

from collections.abc import Iterator

import numpy as np

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # kinds of fields
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_LONGEST = 10  # bytes of a number of 64 bits, seven bits in each

Feature = np.ndarray | list[bytes]


def decode_example(data: bytes) -> dict[str, Feature]:
    r"""The features of an Example by name: int64 and float32 as arrays of one axis, bytes as lists. Or a ValueError.

    Example:
        >>> from millstream.sources.example_message import decode_example
        >>> decode_example(b"\n\x0c\n\n\n\x01n\x12\x05\x1a\x03\n\x01\x07")
        {'n': array([7])}
    """
    found: dict[str, Feature] = {}
    for features in _messages(data, 1):
        for entry in _messages(features, 1):
            name, feature = b"", b""
            for number, kind, value in _fields(entry):
                if number == 1 and kind == _BYTES:
                    name = value
                elif number == 2 and kind == _BYTES:
                    feature += value  # parts of a message follow each other
            found[name.decode()] = _feature(feature)
    return found


def _feature(data: bytes) -> Feature:
    """The values of a Feature; of several lists the last kind counts."""
    which, values = 0, b""
    for number, kind, value in _fields(data):
        if number in (1, 2, 3) and kind == _BYTES:
            which, values = number, values + value if number == which else value
    if which == 1:
        return list(_messages(values, 1))
    if which == 2:
        return np.frombuffer(b"".join(_packed(values, _FIXED32)), "<f4").astype(np.float32)
    return _varints(b"".join(_packed(values, _VARINT)))


def _messages(data: bytes, wanted: int) -> Iterator[bytes]:
    """The values of a field of bytes."""
    for number, kind, value in _fields(data):
        if number == wanted:
            if kind != _BYTES:
                raise ValueError(f"field {number} is of kind {kind}, not of bytes")
            yield value


def _packed(data: bytes, single: int) -> Iterator[bytes]:
    """The numbers in field 1, which are together in some bytes, or single."""
    for number, kind, value in _fields(data):
        if number == 1:
            if kind not in (_BYTES, single) or (single in _FIXED and len(value) % _FIXED[single]):
                raise ValueError(f"numbers are of kind {kind}, in {len(value)} bytes")
            yield value


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """The number, kind and bytes of each field of a message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind, start = tag & 7, at
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind == _BYTES:
            size, start = _varint(data, at)
            at = start + size
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            raise ValueError(f"a field of kind {kind} at byte {at}")
        if at > len(data):
            raise ValueError(f"a field ends at byte {at}, and there are {len(data)}")
        yield tag >> 3, kind, data[start:at]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, seven bits in each byte, and where it ends."""
    value = 0
    for place, byte in enumerate(data[at : at + _LONGEST]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError(f"a number at byte {at} has no end")


def _varints(data: bytes) -> np.ndarray:
    """Numbers one after the other, as int64."""
    found = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(found < 0x80)
    if not len(found):
        return np.zeros(0, np.int64)
    if not len(ends) or ends[-1] != len(found) - 1:
        raise ValueError("the last number has no end")
    starts = np.append(0, ends[:-1] + 1)
    lengths = ends - starts + 1
    if lengths.max() > _LONGEST:
        raise ValueError(f"a number has {lengths.max()} bytes")
    places = np.arange(len(found)) - np.repeat(starts, lengths)
    bits = (found & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.bitwise_or.reduceat(bits, starts).view(np.int64)
