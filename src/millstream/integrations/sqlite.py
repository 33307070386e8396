"""Tables and queries of SQLite databases."""

import array
import math
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from millstream.files.changed import FileStamp
from millstream.integrations._sqlite_rows import Database, KeyedRows, Parameters
from millstream.integrations._table import Row, TableSource, cells, check_options, require_rows, rows_of
from millstream.plan.ordering import Ordering
from millstream.reading.contracts import PyTree
from millstream.reading.samples import first_sample
from millstream.text.errors import describe_value, listed, require_mapping, require_text

_Forms = dict[str, tuple[tuple[int, ...], np.dtype]]  # the shape and dtype of each column
_WORDS = {"f": "numbers", "c": "numbers", "i": "whole numbers", "u": "whole numbers", "b": "0 and 1"}


def _number_column(place: str, values: tuple[Any, ...], indices: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A column of numbers."""
    whole = dtype.kind in "iub"
    try:
        # NumPy would cut 2.5 down to 2, and make numbers of text.
        column = np.frombuffer(array.array("q" if whole else "d", values), np.int64 if whole else np.float64)
    except TypeError:
        right = int if whole else (int, float)
        row = next(row for row, value in enumerate(values) if not isinstance(value, right))
        raise ValueError(
            f"{place} needs {_WORDS[dtype.kind]}. Sample {indices[row]} has {describe_value(values[row])}. Give it "
            "a different dtype, with arrays={name: ((), dtype)}, or CAST it in a query."
        ) from None
    if column.dtype == dtype:
        return column
    if whole:
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        outside = (column < low) | (column > high)
        if outside.any():
            row = int(outside.argmax())
            raise ValueError(f"{place} needs values that fit {dtype}. Sample {indices[row]} has {values[row]}.")
    return column.astype(dtype)


def _blob_column(
    place: str, values: tuple[Any, ...], indices: np.ndarray, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """A column of arrays that are kept as their bytes."""
    size = math.prod(shape) * dtype.itemsize
    if set(map(type, values)) != {bytes} or set(map(len, values)) != {size}:
        row = next(row for row, value in enumerate(values) if not isinstance(value, bytes) or len(value) != size)
        found = f"{len(values[row])} bytes" if isinstance(values[row], bytes) else describe_value(values[row])
        raise ValueError(f"{place} needs {size} bytes, of shape {shape} in {dtype}. Sample {indices[row]} has {found}.")
    column = np.frombuffer(b"".join(values), dtype).reshape(len(values), *shape)
    return column.astype(dtype.newbyteorder("="), copy=False)


class SqliteSource(TableSource):
    """The rows of a table, or of a query, in an SQLite file.

    All rows of a batch are fetched by one statement, by their keys, which are read once. The database is opened for
    reading alone, by every thread and worker process for itself, and must not change while it is read. A
    `HostMapTransform` gets a row as SQLite has it: numbers, text, bytes and None.

    Example:
        >>> import sqlite3
        >>> with sqlite3.connect("iris.db") as db:
        ...     _ = db.execute("CREATE TABLE flowers (id INTEGER PRIMARY KEY, petal REAL, species INTEGER)")
        ...     _ = db.executemany("INSERT INTO flowers VALUES (?, ?, ?)", [(1, 1.5, 0), (2, 4.5, 1), (3, 6.0, 2)])
        >>> db.close()
        >>> source = SqliteSource("iris.db", table="flowers", columns=["petal", "species"])
        >>> source.read(np.array([2, 0]))
        {'petal': array([6. , 1.5], dtype=float32), 'species': array([2, 0], dtype=int32)}
        >>> query = "SELECT id, petal FROM flowers WHERE petal > ?"
        >>> len(SqliteSource("iris.db", query=query, parameters=[2.0], key="id"))
        2

    Args:
        path: The file.
        table: The name of a table or view.
        query: A SELECT statement, instead of a table.
        parameters: Values for the placeholders of the query: a sequence for `?`, a mapping for `:name`.
        key: A column of whole numbers or text that tells rows apart, and whose order is that of the samples. With an
            index on it, batches are fast. A table has its rowid, if nothing is said.
        columns: The columns of a sample; all of them by default.
        arrays: The shape and dtype of columns that hold the bytes of arrays, or numbers of a different dtype than the
            first row's: `{"image": ((28, 28), np.uint8), "price": ((), np.float32)}`.
        row_fn: `row_fn(row) -> sample`, where a row is a dict of what SQLite has: numbers, text, bytes and None.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
        timeout: Seconds to wait for another program that writes to the database.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        table: str | None = None,
        query: str | None = None,
        parameters: Parameters = (),
        key: str | None = None,
        columns: Sequence[str] | None = None,
        arrays: Mapping[str, tuple[tuple[int, ...], Any]] | None = None,
        row_fn: Callable[[Row], PyTree] | None = None,
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
        timeout: float = 5.0,
    ) -> None:
        caller = "SqliteSource"
        check_options(caller, ordering, prefetch_size, row_fn)
        if (table is None) == (query is None):
            raise ValueError("SqliteSource needs table= or query=, one of them.")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
            raise ValueError(f"SqliteSource needs timeout to be seconds, from 0 on. Got {describe_value(timeout)}.")
        if arrays is not None and row_fn is not None:
            raise ValueError("SqliteSource needs arrays= or row_fn=, not both: row_fn makes arrays of its own.")
        for name, text in {"table": table, "query": query, "key": key}.items():
            if text is not None:
                require_text(caller, name, text)
        if arrays is not None:
            require_mapping(caller, "arrays", arrays, "a dict of (shape, dtype) by column")
        bound = _bound(table, parameters)
        database = Database(caller, path, timeout)
        try:
            rows = KeyedRows(caller, database, table, query, bound, key, columns)
        except sqlite3.Error as error:
            raise ValueError(f"SqliteSource cannot read {database.path}: {error}.") from error
        forms = _checked_forms({} if arrays is None else arrays, rows.columns)
        require_rows(caller, rows)
        super().__init__(caller, _SqliteTable(rows, forms), ordering, prefetch_size, row_fn)


class _SqliteTable:
    """The rows of a database.

    Args:
        keyed_rows: The rows.
        forms: The shape and dtype of columns that the user has said.
    """

    def __init__(self, keyed_rows: KeyedRows, forms: _Forms) -> None:
        self.keyed_rows = keyed_rows
        self._said = forms
        # For the arrays of a batch, the first row says what the other columns hold, and the others are held to it.
        self._forms = {**_first_forms(keyed_rows), **forms}

    @property
    def stamps(self) -> list[FileStamp]:
        return self.keyed_rows.stamps

    def __len__(self) -> int:
        return len(self.keyed_rows)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return self._columns(indices, self._forms)

    def samples(self, indices: np.ndarray) -> list[Row]:
        return rows_of(self._columns(indices, self._said))

    def rows(self, indices: np.ndarray) -> list[Row]:
        return [dict(zip(self.keyed_rows.columns, row[1:], strict=True)) for row in self.keyed_rows.fetch(indices)]

    def _columns(self, indices: np.ndarray, forms: _Forms) -> dict[str, np.ndarray]:
        """Arrays where a form is known, otherwise what SQLite has."""
        _, *columns = zip(*self.keyed_rows.fetch(indices), strict=True)
        named = zip(self.keyed_rows.columns, columns, strict=True)
        return {name: self._array(name, v, indices, *forms[name]) if name in forms else cells(v) for name, v in named}

    def _array(
        self, name: str, values: tuple[Any, ...], indices: np.ndarray, shape: tuple[int, ...], dtype: np.dtype
    ) -> np.ndarray:
        place = f"SqliteSource: column {name!r}"
        try:
            if shape == ():
                return _number_column(place, values, indices, dtype)
            return _blob_column(place, values, indices, shape, dtype)
        except ValueError:
            if None not in values:
                raise
            raise ValueError(
                f"SqliteSource needs a value in every row. Column {name!r} has none at sample "
                f"{indices[values.index(None)]}. Choose other rows with a query, or fill the gap in a HostMapTransform "
                "after the source, which gets None."
            ) from None


def _first_forms(rows: KeyedRows) -> _Forms:
    """The forms of the columns that have a number in the first row that can be read."""
    _, [row] = first_sample(lambda index: rows.fetch(np.array([index])), range(len(rows)))
    named = zip(rows.columns, row[1:], strict=True)
    return {name: ((), np.array(value).dtype) for name, value in named if isinstance(value, int | float)}


def _checked_forms(arrays: Mapping[str, tuple[tuple[int, ...], Any]], columns: Sequence[str]) -> _Forms:
    forms = {}
    for name, form in arrays.items():
        try:
            shape, dtype = tuple(form[0]), np.dtype(form[1])
            legal = name in columns and dtype.kind in "biufc" and all(axis >= 1 for axis in shape)
        except (TypeError, IndexError):
            legal, shape, dtype = False, (), np.dtype(bool)
        if not legal:
            raise ValueError(
                "SqliteSource needs arrays to be a (shape, dtype) pair, of numbers, for columns that are there. "
                f"Got {name!r}: {describe_value(form)}; there are {columns}."
            )
        forms[name] = (shape, dtype)
    return forms


def _bound(table: str | None, parameters: Any) -> Parameters:
    """The parameters of a query, which has placeholders for them."""
    found = dict(parameters) if isinstance(parameters, Mapping) else listed(parameters)
    if found is None:
        raise TypeError(
            "SqliteSource needs parameters to be a sequence, for ?, or a mapping, for :name. "
            f"Got {describe_value(parameters)}."
        )
    if table is not None and found:
        raise ValueError("SqliteSource binds parameters to the placeholders of a query. A table has none.")
    return found if isinstance(found, dict) else tuple(found)
