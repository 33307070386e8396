"""Tensors in safetensors files as columns: mapped, or read by the row from afar. No other package is needed."""

import json
import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from millstream.files.data_files import File, open_files
from millstream.files.paths import Path, Paths, listed_paths
from millstream.plan.ordering import Ordering
from millstream.reading.host_source import RowSource
from millstream.sources.array import check_reading
from millstream.sources.file_rows import ChainedRows, RangedRows, map_rows
from millstream.sources.file_source import OpenedRows
from millstream.text.errors import describe_value, require_names, table

_CALLER = "SafetensorsSource"
_HEADER_LIMIT = 100_000_000  # the format's own
_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
    "C64": np.complex64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}

Rows = np.ndarray | RangedRows
Tensor = tuple[np.dtype, tuple[int, ...], int]


class SafetensorsSource(RowSource):
    """The rows of the tensors in safetensors files, which stay on disk until a batch needs them.

    Tensors are columns: they must have the same first axis, which counts the samples. Several files follow each other.

    Example:
        >>> import json
        >>> header = {"x": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}}
        >>> text = json.dumps(header).encode()
        >>> with open("rows.safetensors", "wb") as file:
        ...     _ = file.write(len(text).to_bytes(8, "little") + text + np.arange(6, dtype=np.float32).tobytes())
        >>> from millstream.integrations.safetensors import SafetensorsSource
        >>> SafetensorsSource("rows.safetensors").read(np.array([2, 0]))["x"].tolist()
        [[4.0, 5.0], [0.0, 1.0]]

    Args:
        paths: A path or address, or a list of such, with the same tensors in each.
        tensors: Which tensors are read; all by default.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
    """

    def __init__(
        self,
        paths: Paths,
        tensors: Sequence[str] | None = None,
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
    ) -> None:
        given = listed_paths(_CALLER, paths)
        if not given:
            raise TypeError(f"{_CALLER} needs a path, or a list of at least one. Got {describe_value(paths)}.")
        names = None if tensors is None else require_names(_CALLER, "tensors", tensors)
        if names == []:
            raise ValueError(f"{_CALLER} needs at least one tensor. Got an empty list of tensors.")
        check_reading(_CALLER, ordering, prefetch_size)
        super().__init__(OpenedRows(_CALLER, _open_all, (given, names)), ordering, prefetch_size)


def _open_all(paths: list[Path], names: list[str] | None) -> dict[str, Rows | ChainedRows]:
    opened = [_columns(file, names) for file in open_files(_CALLER, paths)]
    if len(opened) == 1:
        return dict(opened[0])
    first = {name: (rows.shape[1:], rows.dtype) for name, rows in opened[0].items()}
    for path, columns in zip(paths, opened, strict=True):
        found = {name: (rows.shape[1:], rows.dtype) for name, rows in columns.items()}
        if found != first:
            raise ValueError(
                f"{_CALLER} needs the same tensors, with rows of one shape and dtype, in every file. Got:\n"
                f"  {paths[0]}: {_told(first)}\n  {path}: {_told(found)}\n"
                "Choose those that all have with tensors=[...], or build one source for each."
            )
    return {name: ChainedRows([columns[name] for columns in opened]) for name in opened[0]}


def _told(columns: dict[str, tuple[tuple[int, ...], np.dtype]]) -> str:
    return ", ".join(f"{name} {row} {dtype}" for name, (row, dtype) in columns.items())


def _columns(file: File, names: list[str] | None) -> dict[str, Rows]:
    offset, tensors = _read_header(file)
    chosen = list(tensors) if names is None else names
    for name in chosen:
        if name not in tensors:
            raise ValueError(f"{_CALLER} finds no tensor {name!r} in {file.name}. It has {sorted(tensors)[:20]}.")
    shapes = {name: tensors[name][1] for name in chosen}
    if len({shape[:1] for shape in shapes.values()}) != 1 or not all(map(min, map(_or_zero, shapes.values()))):
        raise ValueError(
            f"{_CALLER} needs tensors with the same, non-zero first axis, which counts the samples. {file.name} has:\n"
            f"{table((name, f'shape {shape}') for name, shape in shapes.items())}\n"
            "Choose those that belong together with tensors=[...]."
        )
    return {name: map_rows(file, *tensors[name][:2], offset + tensors[name][2]) for name in chosen}


def _or_zero(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape or (0,)


def _read_header(file: File) -> tuple[int, dict[str, Tensor]]:
    """Where the data begin, and each tensor's dtype, shape and place in them, checked against the size of the file."""
    size = int.from_bytes(file.read_at(0, 8), "little") if file.size >= 8 else 0
    if not 2 <= size <= min(_HEADER_LIMIT, file.size - 8):
        raise _damaged(file, f"its header claims {size} bytes, of a file of {file.size}")
    try:
        header = json.loads(file.read_at(8, size), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise _damaged(file, "its header is not a dictionary")
    header.pop("__metadata__", None)
    tensors, places = {}, []
    for name, entry in header.items():
        dtype, shape, start, end = _entry(file, name, entry)
        tensors[name] = (dtype, shape, start)
        places.append((start, end, name))
    at = 0
    for start, end, name in sorted(places):
        if start != at:
            raise _damaged(file, f"tensor {name!r} begins at {start}, where {at} is the end of the one before it")
        at = end
    if at != file.size - 8 - size:
        raise _damaged(file, f"its tensors have {at} bytes, and {file.size - 8 - size} are there")
    if not tensors:
        raise _damaged(file, "it has no tensors")
    return 8 + size, tensors


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _entry(file: File, name: str, entry: Any) -> tuple[np.dtype, tuple[int, ...], int, int]:
    match entry:
        case {"dtype": str(kind), "shape": list(shape), "data_offsets": [start, end], **rest} if not rest:
            numbers = [*shape, start, end]
        case _:
            raise _damaged(file, f"tensor {name!r} is described by {describe_value(entry)}")
    if kind not in _DTYPES:
        raise _damaged(file, f"tensor {name!r} has the dtype {kind[:20]!r}; known are {', '.join(_DTYPES)}")
    if not all(type(number) is int and number >= 0 for number in numbers) or len(shape) > 32:
        raise _damaged(file, f"tensor {name!r} has the shape {describe_value(shape)} at {start} to {end}")
    dtype = np.dtype(_DTYPES[kind])
    if math.prod(shape) * dtype.itemsize != end - start:
        needed = math.prod(shape) * dtype.itemsize
        raise _damaged(file, f"tensor {name!r}, {tuple(shape)} of {dtype}, needs {needed} bytes, and has {end - start}")
    # Files have the little end first, on every machine.
    little = dtype if dtype.itemsize == 1 or dtype.kind == "V" else dtype.newbyteorder("<")
    return little, tuple(shape), start, end


def _damaged(file: File, found: str) -> ValueError:
    return ValueError(f"{_CALLER} cannot read {file.name}: {found}. The file is cut short or damaged; get it again.")
