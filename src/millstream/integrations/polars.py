"""Polars data frames as sources."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from millstream.integrations._table import (
    FrameTable,
    Row,
    TableSource,
    cells,
    check_options,
    chosen_columns,
    require_rows,
)
from millstream.plan.ordering import Ordering
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_value, needs

if TYPE_CHECKING:
    import polars

# By name: not every version of Polars has all of them, and NumPy has no integers of 128 bits.
_NUMBERS = {"Boolean", "Float16", "Float32", "Float64"} | {
    f"{kind}{bits}" for kind in ("Int", "UInt") for bits in (8, 16, 32, 64)
}


class PolarsSource(TableSource):
    """The rows of a Polars `DataFrame`. Columns are made into arrays once, without a copy where that is possible.

    Numbers and bools stay what they are, an `Enum` becomes the codes of its categories, and `Array` and `List` columns
    of numbers become arrays; text, gaps and the like stay Python's own values. A `HostMapTransform` gets lists of any
    length, and makes them equal.

    Example:
        >>> import polars as pl
        >>> from millstream.integrations.polars import PolarsSource
        >>> frame = pl.DataFrame({"wind": [3.5, 4.5], "rain": [False, True], "town": ["Ulm", "Bonn"]})
        >>> PolarsSource(frame, columns=["wind", "rain"]).read(np.array([1]))
        {'rain': array([ True]), 'wind': array([4.5], dtype=float32)}
        >>> source = PolarsSource(frame, row_fn=lambda row: {"letters": np.int32(len(row["town"]))})
        >>> source.read(np.array([0, 1]))["letters"].tolist()
        [3, 4]

    Args:
        frame: The data frame. Do not change it while a stream runs.
        columns: The columns to read; all of them by default.
        row_fn: Makes a sample of a row, a dict of Python's own values.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
    """

    def __init__(
        self,
        frame: "polars.DataFrame",
        columns: Sequence[str] | None = None,
        *,
        row_fn: Callable[[Row], PyTree] | None = None,
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
    ) -> None:
        caller = "PolarsSource"
        with needs(caller, "polars", "polars"):
            import polars as pl
        if isinstance(frame, pl.LazyFrame):
            raise TypeError(f"{caller} needs a DataFrame. Got a LazyFrame; write frame.collect().")
        if not isinstance(frame, pl.DataFrame):
            raise TypeError(f"{caller} needs a polars DataFrame. Got {describe_value(frame)}.")
        names = chosen_columns(caller, frame.columns, columns)
        check_options(caller, ordering, prefetch_size, row_fn)
        require_rows(caller, frame)
        arrays = {name: _column(frame[name]) for name in names} if row_fn is None else {}
        table = FrameTable(len(frame), arrays, None if row_fn is None else frame.select(names), _rows)
        super().__init__(caller, table, ordering, prefetch_size, row_fn)


def _rows(frame: Any, indices: np.ndarray) -> Sequence[Row]:
    return frame[indices].to_dicts()


class _Irregular(Exception):
    """A column is not numbers of one shape."""


class _SeriesCells:
    """A column that is not an array: rows are Python's own values, and lists of numbers are arrays."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def take(self, indices: np.ndarray, *, axis: int = 0) -> np.ndarray:
        """The values at `indices`, as an array of objects."""
        return cells(map(_cell, self._column[indices]))


def _cell(value: Any) -> Any:
    import polars as pl

    if not isinstance(value, pl.Series):
        return value
    try:
        return _values(value)
    except _Irregular:
        return value.to_list()


def _column(column: Any) -> "np.ndarray | _SeriesCells":
    """A column as an array, without a copy where that is possible, if it is numbers of one shape."""
    try:
        return _values(column)
    except _Irregular:
        return _SeriesCells(column)


def _values(values: Any) -> np.ndarray:
    """A column, or what is inside its lists."""
    import polars as pl

    if values.null_count():
        raise _Irregular
    if isinstance(values.dtype, pl.List | pl.Array):
        size = _size(values)
        inner = _values(values.explode()[: len(values) * size])
        return inner.reshape(len(values), size, *inner.shape[1:])
    if isinstance(values.dtype, pl.Enum):
        return values.to_physical().to_numpy()
    if str(values.dtype) not in _NUMBERS:
        raise _Irregular
    return values.to_numpy()


def _size(values: Any) -> int:
    import polars as pl

    if isinstance(values.dtype, pl.Array):
        return values.dtype.size
    sizes = values.list.len().to_numpy()
    size = int(sizes[0]) if len(sizes) > 0 else 0  # there are none inside empty lists
    if (sizes != size).any():
        raise _Irregular
    return size
