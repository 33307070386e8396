"""Pandas data frames as sources, and their rows as a sequence."""

import copy
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import numpy as np

from millstream.integrations._table import (
    Cells,
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
from millstream.reading.dtypes import holds_numbers
from millstream.text.errors import describe_value, needs

if TYPE_CHECKING:
    import pandas


class PandasSource(TableSource):
    """The rows of a pandas `DataFrame`. Columns are made into arrays once, without a copy where that is possible.

    Numbers and bools stay what they are, a categorical column becomes its codes, and cells that are lists or arrays of
    numbers become arrays; all other cells stay what they are, for a `HostMapTransform` to make numbers of. What is
    missing is None; NaN in a column of floating numbers is a number. The index is not part of a sample:
    `frame.reset_index()` makes it a column.

    Example:
        >>> import pandas as pd
        >>> from millstream.integrations.pandas import PandasSource
        >>> frame = pd.DataFrame({"wind": [3.5, 4.5], "rain": [False, True], "town": ["Ulm", "Bonn"]})
        >>> PandasSource(frame, columns=["wind", "rain"]).read(np.array([1]))
        {'rain': array([ True]), 'wind': array([4.5], dtype=float32)}
        >>> source = PandasSource(frame, row_fn=lambda row: {"letters": np.int32(len(row["town"]))})
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
        frame: "pandas.DataFrame",
        columns: Sequence[str] | None = None,
        *,
        row_fn: Callable[[Row], PyTree] | None = None,
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
    ) -> None:
        caller = "PandasSource"
        names = chosen_columns(caller, _require_frame(caller, frame), columns)
        check_options(caller, ordering, prefetch_size, row_fn)
        require_rows(caller, frame)
        arrays = {name: _column(frame[name]) for name in names} if row_fn is None else {}
        table = FrameTable(len(frame), arrays, None if row_fn is None else frame[names], _rows)
        super().__init__(caller, table, ordering, prefetch_size, row_fn)


def _rows(frame: Any, indices: np.ndarray) -> Sequence[Row]:
    return frame.iloc[indices].to_dict("records")


def _column(column: Any) -> np.ndarray | Cells:
    """A column as an array, without a copy where that is possible; of objects, unless it is numbers of one shape."""
    import pandas as pd

    dtype = column.dtype
    if isinstance(dtype, np.dtype) and dtype.kind in "biufc":
        return column.to_numpy()
    if isinstance(dtype, pd.ArrowDtype):
        from millstream.integrations._arrow_columns import as_column

        return as_column(column.array.__arrow_array__().combine_chunks())
    if isinstance(dtype, np.dtype) and dtype.kind == "O":
        stacked = _stacked(column)
        return _ObjectCells(column.to_numpy()) if stacked is None else stacked
    if not column.isna().any():
        if isinstance(dtype, pd.CategoricalDtype):
            return column.cat.codes.to_numpy()
        plain = getattr(dtype, "numpy_dtype", np.dtype(object))  # of pandas' own nullable columns
        if plain.kind in "biuf":
            return column.to_numpy(dtype=plain)
    return column.astype(object).where(column.notna(), None).to_numpy()


class _ObjectCells:
    """A column of objects that are not arrays of one shape: lists of numbers are arrays, the rest is what it is."""

    def __init__(self, column: np.ndarray) -> None:
        self._column = column

    def take(self, indices: np.ndarray, *, axis: int = 0) -> np.ndarray:
        """The values at `indices`, as an array of objects."""
        return cells(map(_cell, self._column[indices]))


def _cell(value: Any) -> Any:
    if not isinstance(value, np.ndarray | list | tuple):
        return value
    dense = _dense(value)
    return dense if holds_numbers(dense.dtype) else value


def _stacked(column: Any) -> np.ndarray | None:
    """Cells that are arrays or lists, as one array; None if that is not possible."""
    stacked: list[np.ndarray] = []
    for cell in column:
        if not isinstance(cell, np.ndarray | list | tuple):
            return None
        stacked.append(_dense(cell))
        if stacked[-1].shape != stacked[0].shape or not holds_numbers(stacked[-1].dtype):
            return None
    return np.stack(stacked)


class PandasRows(Sequence[Row]):
    """The rows of a pandas `DataFrame` as a sequence of dicts, for sources that want items.

    Unlike `frame.iloc[row]`, a row keeps the type of every column. To worker processes its columns are sent once, as
    memory that all of them share where they are numbers or Arrow's text.

    Example:
        >>> import pandas as pd
        >>> from millstream.integrations.pandas import PandasRows
        >>> rows = PandasRows(pd.DataFrame({"path": ["a.png", "b.png"], "label": [3, 7]}))
        >>> rows[1]["path"], int(rows[1]["label"]), len(rows[1:])
        ('b.png', 7, 1)
        >>> def fill(row, arrays, rng):
        ...     arrays["label"][...] = row["label"]
        ...     return {"path": row["path"]}
        >>> source = ms.sources.FillSource(rows, fill, {"label": ((), np.int32)})

    Args:
        frame: The data frame. Do not change it while a stream runs.
        columns: The columns of a row; all of them by default.
    """

    def __init__(self, frame: "pandas.DataFrame", columns: Sequence[str] | None = None) -> None:
        names = chosen_columns("PandasRows", _require_frame("PandasRows", frame), columns)
        self._length = len(frame)
        self._columns = {name: _cells(frame[name]) for name in names}

    def __repr__(self) -> str:
        return f"PandasRows({self._length:,} rows of {', '.join(map(str, self._columns))})"

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: SupportsIndex) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> "PandasRows": ...
    def __getitem__(self, index: SupportsIndex | slice) -> "Row | PandasRows":
        if isinstance(index, slice):
            part = copy.copy(self)
            part._length = len(range(self._length)[index])
            part._columns = {name: column[index] for name, column in self._columns.items()}
            return part
        row = range(self._length)[operator.index(index)]  # which refuses what is out of range
        return {name: column[row] for name, column in self._columns.items()}


def _dense(cell: Any) -> np.ndarray:
    """A list or an array, or one of others, as an array of numbers; of something else if that is not possible."""
    if isinstance(cell, list | tuple) or getattr(cell, "dtype", None) == np.dtype(object):
        inner = [_dense(part) for part in cell]
        if len({part.shape for part in inner}) == 1:
            return np.stack(inner)
    try:
        return np.asarray(cell)
    except ValueError:
        return np.asarray(cell, dtype=object)


def _cells(column: Any) -> Any:
    """A column as whatever gives single cells fastest."""
    return column.to_numpy() if isinstance(column.dtype, np.dtype) else column.array


def _require_frame(caller: str, frame: Any) -> list[Any]:
    """The columns of what must be a data frame."""
    with needs(caller, "pandas", "pandas"):
        import pandas as pd
    if not isinstance(frame, pd.DataFrame):
        raise TypeError(f"{caller} needs a pandas DataFrame. Got {describe_value(frame)}.")
    return list(frame.columns)
