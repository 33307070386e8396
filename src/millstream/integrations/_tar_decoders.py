"""What becomes of the files of a sample, by their extension."""

import functools
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from millstream.sources.image_file import Opening
from millstream.sources.npy import decode_npy

_PICTURES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm", "pgm", "tif", "tiff")

Decoder = Callable[[str, bytes], Any]  # from the name for errors and the bytes


def decoders(who: str, extensions: Sequence[str], given: Mapping[str, Callable[[bytes], Any]]) -> dict[str, Decoder]:
    """A decoder for each extension.

    Args:
        who: Who speaks in errors.
        extensions: Of which the last part counts.
        given: The user's own, which go before the known ones.
    """
    for name in given:
        if name not in extensions:
            raise ValueError(
                f"{who} needs decode for extensions that are read. Got {name!r}; those are {list(extensions)}. "
                "Give the whole extension, or leave it out."
            )
    chosen: dict[str, Decoder] = {}
    for name in extensions:
        last = name.rpartition(".")[2]
        if name in given:
            chosen[name] = functools.partial(_by_user, given[name])
        elif last in _PICTURES:
            chosen[name] = functools.partial(_picture, Opening(who, mode="RGB"))
        elif last in _KNOWN:
            chosen[name] = _KNOWN[last]
        else:
            raise ValueError(
                f"{who} knows {', '.join([*_KNOWN, *_PICTURES])}. The samples have {list(extensions)}; say "
                f"what becomes of {name!r} with decode={{{name!r}: function}}, or leave it out with extensions=[...]."
            )
    return chosen


def _by_user(function: Callable[[bytes], Any], name: str, data: bytes) -> Any:
    return function(data)


def _picture(opening: Opening, name: str, data: bytes) -> np.ndarray:
    return opening.pixels(name, io.BytesIO(data))


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is no text in UTF-8: {error}.") from None


def _integer(name: str, data: bytes) -> np.ndarray:
    text = _text(name, data).strip()
    if not re.fullmatch(r"[+-]?\d{1,18}", text):
        raise ValueError(f"{name} is no whole number: {text[:40]!r}.")
    return np.asarray(int(text), np.int64)


def _json(name: str, data: bytes) -> Any:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON: {error}.") from None
    return _arrays(value)


def _arrays(value: Any) -> Any:
    """Lists of numbers as arrays, in dictionaries or not; all else as it is."""
    if isinstance(value, dict):
        return {name: _arrays(inner) for name, inner in value.items()}
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return value
    return array if array.dtype.kind in "bif" else value


_KNOWN: dict[str, Decoder] = {
    "npy": decode_npy,
    "json": _json,
    "cls": _integer,
    "id": _integer,
    "index": _integer,
    "txt": _text,
}
