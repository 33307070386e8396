"""Columns of numbers and text in a CSV file."""

import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from millstream.files.data_files import buffered, open_file
from millstream.plan.ordering import Ordering
from millstream.reading.dtypes import require_dtype
from millstream.reading.host_source import RowSource
from millstream.sources.array import check_reading
from millstream.sources.file_source import OpenedRows
from millstream.text.errors import require_names

_AT_ONCE = 32 << 20


class CsvSource(RowSource):
    r"""The rows of a CSV file with a header line; every chosen column is one field. The file is read once.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "weather.csv")
        ...     _ = path.write_text("day,wind,rain\n1,3.5,0\n2,4.5,1\n")
        ...     source = CsvSource(path, columns=["wind", "rain"], dtype={"wind": np.float32, "rain": np.int32})
        ...     source.read(np.array([1]))
        {'rain': array([1], dtype=int32), 'wind': array([4.5], dtype=float32)}

    Args:
        path: The file, in UTF-8, or its address (`s3://`, `https://`, ...).
        columns: The columns to read; all of them by default.
        dtype: A dtype for every column, or a mapping with one for each chosen column. `str` is text, for a
            `HostMapTransform` to make numbers of.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        columns: Sequence[str] | None = None,
        dtype: DTypeLike | Mapping[str, DTypeLike] = np.float32,
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
    ) -> None:
        check_reading("CsvSource", ordering, prefetch_size)
        super().__init__(OpenedRows("CsvSource", read_csv, (path, columns, dtype)), ordering, prefetch_size)


def read_csv(
    path: str | os.PathLike[str], columns: Sequence[str] | None = None, dtype: Any = np.float32
) -> dict[str, np.ndarray]:
    """The chosen columns of a CSV file as read-only arrays."""
    if columns is not None:
        columns = require_names("CsvSource", "columns", columns)
    file = open_file("CsvSource", path)
    try:
        with io.TextIOWrapper(buffered(file, _AT_ONCE), encoding="utf-8-sig", newline="") as text:
            return _read(file.name, csv.reader(text, strict=True), columns, dtype)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{file.name} cannot be read as CSV in UTF-8: {error}.") from None


def _read(name: str, reader: Any, columns: Sequence[str] | None, dtype: Any) -> dict[str, np.ndarray]:
    header = next((row for row in reader if row), None)
    if header is None:
        raise ValueError(f"CsvSource needs a header line and at least one row. {name} is empty.")
    chosen = list(header if columns is None else columns)
    for column in chosen:
        if header.count(column) != 1:
            raise ValueError(
                f"CsvSource needs each column once in {name}. Column {column!r} is there {header.count(column)} times; "
                f"the header has {header}."
            )
    dtypes = {column: _dtype_of(dtype, column) for column in chosen}
    places = {column: header.index(column) for column in chosen}
    values: dict[str, list[Any]] = {column: [] for column in chosen}
    for line, row in _rows(name, reader, len(header)):
        for column, place in places.items():
            values[column].append(_value(f"{name}, line {line}, column {column!r}", row[place], dtypes[column]))
    if not chosen or not values[chosen[0]]:
        raise ValueError(f"CsvSource needs at least one column and one row. {name} has the columns {header}, no rows.")
    return {column: _array(found, dtypes[column]) for column, found in values.items()}


def _dtype_of(dtype: Any, column: str) -> np.dtype:
    if isinstance(dtype, Mapping) and column not in dtype:
        raise ValueError(f"CsvSource needs a dtype for every column. dtype has none for {column!r}: {dtype}.")
    found = require_dtype("CsvSource", "dtype", dtype[column] if isinstance(dtype, Mapping) else dtype)
    if found.kind not in "iuf" and found != np.dtype(str):
        raise TypeError(
            f"CsvSource reads whole and floating numbers and str. The dtype of column {column!r} is {found}."
        )
    return found


def _rows(name: str, reader: Any, width: int) -> Iterator[tuple[int, list[str]]]:
    for row in reader:
        if row and len(row) != width:
            raise ValueError(f"{name}, line {reader.line_num}: {len(row)} cells, but the header has {width}.")
        if row:
            yield reader.line_num, row


def _value(where: str, cell: str, dtype: np.dtype) -> float | str:
    if dtype.kind == "U":
        return cell
    kind = "a number" if dtype.kind == "f" else "a whole number"
    try:
        value = float(cell) if dtype.kind == "f" else int(cell)
    except ValueError:
        raise ValueError(
            f"{where}: {cell[:40]!r} is not {kind}. Choose other columns, or read text: dtype={{column: str, ...}}."
        ) from None
    if dtype.kind in "iu" and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        raise ValueError(f"{where}: {value} does not fit {dtype}. Give a wider dtype.")
    return value


def _array(values: list[Any], dtype: np.dtype) -> np.ndarray:
    array = np.array(values, object if dtype.kind == "U" else dtype)
    array.flags.writeable = False
    return array
