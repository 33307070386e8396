"""Columns of Arrow as NumPy arrays."""

import contextlib
import functools
from typing import Any

import numpy as np

from millstream.files.arrow_memory import array_of, numbers_of
from millstream.integrations._table import cells
from millstream.reading.host_source import Spans


class Unreadable(Exception):
    """A value that cannot be part of an array.

    Attributes:
        row: Where, counted from the start of the array.
        sizes: For a list of a different length: how long it is, and how long the others are. None for a missing value.
    """

    def __init__(self, row: int, sizes: tuple[int, int] | None = None) -> None:
        super().__init__(row, sizes)
        self.row = row
        self.sizes = sizes


class ArrowCells:
    """A column of Arrow that is not an array: rows are Python's own values, and lists of numbers are arrays.

    Args:
        column: An array of Arrow.
    """

    def __init__(self, column: Any) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, part: slice) -> "ArrowCells":
        return ArrowCells(self._column[part])

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return self._column.nbytes

    def buffers(self) -> list[Any]:
        """The memory it lies in."""
        return self._column.buffers()

    def copy(self) -> "ArrowCells":
        """The same in memory of its own."""
        return ArrowCells(self._column.take(array_of(np.arange(len(self)))))

    def take(self, indices: np.ndarray, *, axis: int = 0) -> np.ndarray:
        """The values at `indices`, as an array of objects."""
        kind = self._column.type
        convert = _number_cell if is_numbers(kind) else _python_cell
        return cells(map(convert, self._column.take(array_of(indices))))

    @functools.cached_property
    def lists(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The numbers in all lists, and where each list begins and the last one ends; None if it is not such lists."""
        from pyarrow import types

        column = self._column
        kind = column.type
        if not (types.is_list(kind) or types.is_large_list(kind)) or not is_numbers(kind) or column.null_count:
            return None
        if types.is_boolean(_inner(kind)):  # which are packed, and would have to be unpacked and kept
            return None
        try:
            return to_numpy(column.values), numbers_of(column.offsets)
        except Unreadable:
            return None


def find_list_spans(column: "np.ndarray | ArrowCells | None", indices: np.ndarray) -> Spans | None:
    """Where the lists at `indices` of a column lie in one array; None if they do not."""
    if isinstance(column, ArrowCells) and column.lists is not None:
        values, offsets = column.lists
        return values, offsets[indices], offsets[indices + 1]
    if isinstance(column, np.ndarray) and column.ndim > 1 and column.flags.c_contiguous:
        size = column.shape[1]  # all lists of a chunk are as long, by chance or by their type
        return column.reshape(-1, *column.shape[2:]), indices * size, (indices + 1) * size
    return None


def _python_cell(scalar: Any) -> Any:
    return scalar.as_py()


def _number_cell(scalar: Any) -> Any:
    """A number, or a list of them, as NumPy has it; a gap, or a list that is not an array, as Python has it."""
    from pyarrow import types

    if scalar.is_valid:
        if _is_list(scalar.type):
            with contextlib.suppress(Unreadable):
                return to_numpy(scalar.values)
        elif types.is_primitive(scalar.type):
            return scalar.type.to_pandas_dtype()(scalar.as_py())
    return scalar.as_py()


def as_column(array: Any) -> np.ndarray | ArrowCells:
    """An Arrow array as a NumPy array if it is numbers of one shape, otherwise as cells."""
    if is_numbers(array.type):
        with contextlib.suppress(Unreadable):
            return to_numpy(array)
    return ArrowCells(array)


def is_numbers(kind: Any) -> bool:
    """Whether an Arrow type is made of numbers, bools, or lists of them."""
    from pyarrow import types

    inner = _inner(kind)
    return types.is_boolean(inner) or types.is_integer(inner) or types.is_floating(inner)


def to_numpy(array: Any) -> np.ndarray:
    """An Arrow array of numbers as a NumPy array, without a copy unless it is of bools; lists become axes.

    Args:
        array: The array, whose type `is_numbers`. What is missing, and a list of a different length, is `Unreadable`.
    """
    return _values(array, per_row=1)


def _values(array: Any, per_row: int) -> np.ndarray:
    """An array, or what is inside its lists, of which a row has that many."""
    import pyarrow as pa

    if array.null_count:
        raise Unreadable(int(np.argmax(numbers_of(array.is_null()))) // per_row)
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        inner = _values(array.storage, per_row).reshape(len(array), *kind.shape)
        axes = kind.permutation
        return inner if axes is None else inner.transpose(0, *(axis + 1 for axis in axes))
    if pa.types.is_dictionary(kind):
        return _values(array.dictionary_decode(), per_row)
    if not _is_list(kind):
        return numbers_of(array)
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
    else:
        sizes = np.diff(numbers_of(array.offsets))
        size = int(sizes[0]) if len(sizes) > 0 else 0  # there are none inside empty lists
        if (sizes != size).any():
            odd = int(np.argmax(sizes != size))
            raise Unreadable(odd // per_row, (int(sizes[odd]), size))
    inner = _values(array.flatten(), per_row * size)
    return inner.reshape(len(array), size, *inner.shape[1:])


def _inner(kind: Any) -> Any:
    """What lists, tensors and dictionaries of numbers are made of; any other type as it is."""
    import pyarrow as pa

    if isinstance(kind, pa.FixedShapeTensorType) or _is_list(kind):
        return _inner(kind.value_type)
    if pa.types.is_dictionary(kind) and pa.types.is_primitive(kind.value_type):
        return _inner(kind.value_type)
    return kind


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
