"""MosaicML's MDS shards: an index of shards, and in each the places of its samples. Nothing is ever unpickled."""

import functools
import io
import json
import math
import os
import pathlib
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from millstream.files.data_files import File, is_remote, open_file, open_files
from millstream.files.plan_folder import Plans, folder_of
from millstream.files.safe_path import safe_path
from millstream.files.unpacked import unpacked
from millstream.plan.ordering import Ordering
from millstream.reading.contracts import PyTree
from millstream.sources.array import check_reading
from millstream.sources.image_file import Opening
from millstream.sources.record_files import RecordFiles, RecordSource
from millstream.text.errors import (
    describe_value,
    require_callable,
    require_mapping,
    require_names,
    require_path,
)

_CALLER = "MdsSource"
_INDEX_LIMIT = 256 << 20  # bytes of an index.json
_SCALARS = {name: np.dtype(name) for name in ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")}
_SCALARS |= {name: np.dtype(name) for name in ("float16", "float32", "float64")} | {"int": np.dtype("int64")}
_CODES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32"}
_CODES |= {64: "uint64", 65: "int64", 66: "float64"}
_DIGITS = re.compile(r"[+-]?\d{1,4000}")

Decoder = Callable[[bytes], PyTree]


class MdsSource(RecordSource):
    """The samples of MDS shards, as MosaicML Streaming writes them, in any order: a dict with a value for each column.

    Numbers and `ndarray` come as NumPy has them, `jpeg` and `png` as uint8 (height, width, 3), `str`, `bytes` and
    `json` as Python has them. Columns of pickles are refused, because reading them could run code.

    Example:
        >>> import json, pathlib
        >>> samples = [np.int64(n).tobytes() for n in (5, 6)]
        >>> ends = np.cumsum([4 + 12, 8, 8]).astype(np.uint32)  # after a count and three places
        >>> column = {"column_names": ["n"], "column_encodings": ["int"], "column_sizes": [8], "compression": None}
        >>> shard = {**column, "format": "mds", "version": 2, "samples": 2, "zip_data": None}
        >>> shard["raw_data"] = {"basename": "shard.00000.mds", "bytes": 32}
        >>> pathlib.Path("train").mkdir()
        >>> data = np.uint32(2).tobytes() + ends.tobytes() + b"".join(samples)
        >>> _ = pathlib.Path("train", "shard.00000.mds").write_bytes(data)
        >>> _ = pathlib.Path("train", "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
        >>> ms.sources.MdsSource("train").read(np.array([1, 0]))["n"].tolist()
        [6, 5]

    Args:
        folder: Where `index.json` and the shards are: a folder, or its address.
        columns: The columns to read; all of them by default.
        decode: Functions from bytes to a value, by column; they take the place of what the column's encoding says.
        plans: Where shards that are packed with gzip or zstd are unpacked once: a folder, or `ms.views.plans(folder)`.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        columns: Sequence[str] | None = None,
        *,
        decode: Mapping[str, Decoder] | None = None,
        plans: Plans = None,
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
    ) -> None:
        check_reading(_CALLER, ordering, prefetch_size)
        require_path(_CALLER, "folder to be a path", folder)
        kept, own = folder_of(_CALLER, plans), {} if decode is None else decode
        require_mapping(_CALLER, "decode", own, "a dict of functions by column")
        for name, function in own.items():
            require_callable(_CALLER, f"decode[{name!r}]", function)
        names = None if columns is None else require_names(_CALLER, "columns", columns)
        index = open_file(_CALLER, _joined(folder, "index.json"))
        shards = [_Shard(index, number, entry) for number, entry in enumerate(_entries(index))]
        self._layout = _Layout(index, shards, names, own)
        files = open_files(_CALLER, [shard.path(folder) for shard in shards])
        plain = [
            unpacked(_CALLER, file, kept) if shard.packed else file for file, shard in zip(files, shards, strict=True)
        ]
        bounds = [_bounds(file, shard, whole.name) for file, shard, whole in zip(plain, shards, files, strict=True)]
        records = RecordFiles(_CALLER, plain, bounds, [file.name for file in files])
        if not len(records):
            raise ValueError(f"{_CALLER} needs at least one sample. {index.name} has none.")
        super().__init__(records, [index, *files], ordering, prefetch_size)

    def _sample(self, index: int, record: bytes) -> PyTree:
        try:
            return self._layout.decoded(record)
        except _Unreadable as error:
            name, number, start = self._records.place(index)
            raise ValueError(
                f"{name}, sample {number}, at byte {start}, cannot be read: {error}. The file is damaged; get it again."
            ) from None


class _Unreadable(Exception):
    """What is wrong with a sample."""


class _Shard:
    """What the index says of a shard, checked.

    Attributes:
        columns: The name, encoding and size of each column; None for one whose size is in the sample.
        samples: How many there are.
        bytes: The size of the plain file.
        packed: Whether it is packed.
    """

    def __init__(self, index: File, number: int, entry: Any) -> None:
        self._index, self._number = index, number
        match entry:
            case {
                "format": "mds",
                "version": 2,
                "column_names": list(names),
                "column_encodings": list(encodings),
                "column_sizes": list(sizes),
                "compression": str() | None as packing,
                "samples": int(samples),
                "raw_data": {"basename": str(raw), "bytes": int(size)},
                "zip_data": dict() | None as zipped,
            } if len(names) == len(encodings) == len(sizes) > 0:
                pass
            case _:
                raise self._wrong("is not described as an MDS shard of version 2")
        texts = [*names, *encodings]
        if not all(isinstance(text, str) for text in texts) or len(set(names)) < len(names):
            raise self._wrong(f"has the columns {describe_value(names)} of {describe_value(encodings)}")
        if not all(one is None or (type(one) is int and one > 0) for one in sizes):
            raise self._wrong(f"has columns of the sizes {describe_value(sizes)}")
        if packing is not None and packing.partition(":")[0] not in ("gz", "zstd"):
            raise self._wrong(f"is packed with {packing!r}; gz and zstd are known. Unpack it with MosaicML Streaming")
        self.packed = packing is not None and zipped is not None
        name = zipped.get("basename") if self.packed and zipped is not None else raw
        if not isinstance(name, str):
            raise self._wrong(f"has a file named {describe_value(name)}")
        self._name = name
        self.columns = list(zip(names, encodings, sizes, strict=True))
        self.samples, self.bytes = samples, size

    def path(self, folder: str | os.PathLike[str]) -> str:
        """Where its file is; a name that leads out of the folder is refused."""
        # Another machine has no links, so only the name counts there.
        root = pathlib.Path("mds") if is_remote(folder) else pathlib.Path(folder)
        safe_path(root, self._name, self._index.name)
        return _joined(folder, self._name)

    def _wrong(self, found: str) -> ValueError:
        return ValueError(f"{_CALLER} cannot read {self._index.name}: shard {self._number} {found}.")


class _Layout:
    """How the bytes of a sample become its values."""

    def __init__(
        self, index: File, shards: Sequence[_Shard], names: Sequence[str] | None, own: Mapping[str, Decoder]
    ) -> None:
        self._columns = shards[0].columns
        for number, shard in enumerate(shards):
            if shard.columns != self._columns:
                raise ValueError(
                    f"{_CALLER} needs the same columns in every shard. In {index.name}, shard 0 has "
                    f"{describe_value(self._columns)}, and shard {number} {describe_value(shard.columns)}."
                )
        there = [name for name, _, _ in self._columns]
        chosen = there if names is None else names
        for name in chosen:
            if name not in there:
                raise ValueError(f"{_CALLER} finds no column {name!r} in {index.name}. It has {there}.")
        for name in own:
            if name not in chosen:
                raise ValueError(f"{_CALLER} needs decode for columns that are read. Got {name!r}; those are {chosen}.")
        if not chosen:
            raise ValueError(f"{_CALLER} needs at least one column. Got an empty list of columns; there are {there}.")
        self._own = own
        self._decoders = {
            name: _decoder(name, encoding, size)
            for name, encoding, size in self._columns
            if name in chosen and name not in own
        }

    def decoded(self, record: bytes) -> dict[str, Any]:
        """The values of a sample. The sizes of columns come first, where they are not the same in all samples."""
        free = sum(size is None for _, _, size in self._columns)
        if len(record) < 4 * free:
            raise _Unreadable(f"it has {len(record)} bytes")
        sizes = iter(struct.unpack_from(f"<{free}I", record))
        at, sample = 4 * free, {}
        for name, _, size in self._columns:
            end = at + (next(sizes) if size is None else size)
            if end > len(record):
                raise _Unreadable(f"column {name!r} ends at byte {end} of {len(record)}")
            if name in self._own:
                sample[name] = self._own[name](record[at:end])
            elif name in self._decoders:
                try:
                    sample[name] = self._decoders[name](record[at:end])
                except (ValueError, RecursionError) as error:
                    raise _Unreadable(f"column {name!r}: {error}") from None
            at = end
        if at != len(record):
            raise _Unreadable(f"its columns end at byte {at} of {len(record)}")
        return sample


def _joined(folder: str | os.PathLike[str], name: str) -> str:
    place = os.fspath(folder)
    return f"{place}{name}" if place.endswith("/") else f"{place}/{name}"


def _entries(index: File) -> list[Any]:
    """What an index.json says of each shard."""
    if index.size > _INDEX_LIMIT:
        raise ValueError(f"{_CALLER} cannot read {index.name}: it has {index.size} bytes; {_INDEX_LIMIT} are allowed.")
    try:
        found = json.loads(index.read_at(0, index.size))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_CALLER} cannot read {index.name}: it is not JSON ({error}). Get it again.") from None
    shards = found.get("shards") if isinstance(found, dict) and found.get("version") == 2 else None
    if not isinstance(shards, list) or not shards:
        raise ValueError(f"{_CALLER} needs an index of MDS shards, of version 2. {index.name} is not such an index.")
    return shards


def _bounds(file: File, shard: _Shard, name: str) -> np.ndarray:
    """Where the samples of a shard begin, and where the last one ends: numbers of 32 bits, after how many they are."""
    first = 4 * (2 + shard.samples)
    if shard.samples < 0 or file.size != shard.bytes or first > file.size:
        raise _damaged(name, f"{shard.samples} samples in {shard.bytes} bytes are expected, and {file.size} are there")
    head = np.frombuffer(file.read_at(0, first), "<u4")
    bounds = head[1:].astype(np.int64)
    if head[0] != shard.samples or bounds[0] < first or bounds[-1] != file.size or (np.diff(bounds) < 0).any():
        raise _damaged(name, f"the places of its {shard.samples} samples do not rise from {first} to {file.size}")
    return bounds


def _damaged(name: str, found: str) -> ValueError:
    return ValueError(f"{_CALLER} cannot read {name}: {found}. The file is cut short or damaged; get it again.")


def _decoder(name: str, encoding: str, size: int | None) -> Decoder:
    """What makes a value of the bytes of a column."""
    kind, _, rest = encoding.partition(":")
    simple: dict[str, Decoder] = {
        "bytes": bytes,
        "str": bytes.decode,
        "json": json.loads,
        "str_int": _whole_number,
        "str_float": float,
        "jpeg": functools.partial(_pixels, name),
        "png": functools.partial(_pixels, name),
    }
    if kind in _SCALARS and not rest and size == _SCALARS[kind].itemsize:
        return functools.partial(_scalar, _SCALARS[kind].newbyteorder("<"))
    if kind == "ndarray":
        return _array_decoder(name, encoding, rest)
    if kind in simple and (kind == "jpeg" or not rest):
        return simple[kind]
    known = ", ".join([*_SCALARS, "ndarray", *simple])
    why = "Reading pickles could run code. " if kind == "pkl" else ""
    raise ValueError(
        f"{_CALLER} reads columns of {known}. Column {name!r} is {encoding!r}. {why}Say what becomes of its bytes with "
        f"decode={{{name!r}: function}}, or leave it out with columns=[...]."
    )


def _scalar(dtype: np.dtype, data: bytes) -> Any:
    return np.frombuffer(data, dtype).astype(dtype.newbyteorder("="))[0]


def _whole_number(data: bytes) -> int:
    text = data.decode()
    if not _DIGITS.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not a whole number")
    return int(text)


def _pixels(name: str, data: bytes) -> np.ndarray:
    return Opening(_CALLER, mode="RGB").pixels(f"column {name!r}", io.BytesIO(data))


def _array_decoder(name: str, encoding: str, rest: str) -> Decoder:
    """What makes an array of bytes: its dtype and shape are in the encoding, or else before its numbers."""
    dtype, _, shape = rest.partition(":")
    if (dtype and dtype not in _CODES.values()) or not re.fullmatch(r"(\d{1,9}(,\d{1,9})*)?", shape):
        raise ValueError(f"{_CALLER}: column {name!r} is {encoding!r}, which is not an encoding of arrays.")
    fixed = tuple(map(int, shape.split(","))) if shape else None
    return functools.partial(_array, np.dtype(dtype) if dtype else None, fixed)


def _array(dtype: np.dtype | None, shape: tuple[int, ...] | None, data: bytes) -> np.ndarray:
    at = 0
    if dtype is None:
        code = data[0] if data else 0
        if code not in _CODES:
            raise ValueError(f"an array of dtype {code}")
        dtype, at = np.dtype(_CODES[code]), 1
    if shape is None:
        if at >= len(data):
            raise ValueError("an array without a shape")
        axes, width = data[at] >> 2, 1 << (data[at] & 3)
        sizes = data[at + 1 : at + 1 + axes * width]
        if len(sizes) < axes * width:
            raise ValueError("an array whose shape is cut short")
        shape, at = tuple(np.frombuffer(sizes, f"<u{width}").tolist()), at + 1 + axes * width
    if math.prod(shape) * dtype.itemsize != len(data) - at:
        raise ValueError(f"an array of shape {shape} and {dtype} in {len(data) - at} bytes")
    return np.frombuffer(data[at:], dtype.newbyteorder("<")).astype(dtype, copy=False).reshape(shape)
