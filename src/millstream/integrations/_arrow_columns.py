"""Columns of Arrow as NumPy arrays."""

from typing import Any

import numpy as np

from millstream.integrations._table import missing_value, not_numbers, other_length


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

    def at(self, caller: str, column: str, index: int) -> ValueError:
        """What a user is told of it, once it is known which sample it is."""
        if self.sizes is None:
            return missing_value(caller, column, index)
        return other_length(caller, column, index, *self.sizes)


def is_numbers(kind: Any) -> bool:
    """Whether an Arrow type is made of numbers, bools, or lists of them."""
    from pyarrow import types

    inner = _inner(kind)
    return types.is_boolean(inner) or types.is_integer(inner) or types.is_floating(inner)


def require_numbers(caller: str, name: str, kind: Any) -> None:
    """Refuse a column that is not made of numbers, bools, or lists of them.

    Args:
        caller: The caller's name, for errors.
        name: The column.
        kind: Its Arrow type.
    """
    from pyarrow import types

    if is_numbers(kind):
        return
    inner, advice = _inner(kind), ""
    if types.is_dictionary(inner):
        advice = " Its codes need not mean the same in all parts of a table; store them as a column of whole numbers."
    elif types.is_temporal(inner):
        advice = " Cast dates and times to whole numbers of a unit that you choose."
    elif types.is_decimal(inner):
        advice = " Cast it to float64."
    raise not_numbers(caller, name, kind, advice)


def to_numpy(array: Any, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """An Arrow array of numbers as a NumPy array, without a copy unless it is of bools; lists become axes.

    Args:
        array: The array, whose type `require_numbers` has let pass.
        shape: What a row must have; None for that of the first row.
    """
    return _values(array, shape, per_row=1)


def _values(array: Any, shape: tuple[int, ...] | None, per_row: int) -> np.ndarray:
    """An array, or what is inside its lists, of which a row has that many."""
    import pyarrow as pa

    if array.null_count:
        raise Unreadable(int(np.argmax(array.is_null().to_numpy(zero_copy_only=False))) // per_row)
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        inner = _values(array.storage, None, per_row).reshape(len(array), *kind.shape)
        axes = kind.permutation
        return inner if axes is None else inner.transpose(0, *(axis + 1 for axis in axes))
    if pa.types.is_dictionary(kind):
        return _values(array.dictionary_decode(), shape, per_row)
    if not _is_list(kind):
        return array.to_numpy(zero_copy_only=not pa.types.is_boolean(kind))
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
    else:
        sizes = np.diff(array.offsets.to_numpy())
        first = int(sizes[0]) if len(sizes) > 0 else 0  # there are none inside empty lists
        size = first if shape is None else shape[0]
        if (sizes != size).any():
            odd = int(np.argmax(sizes != size))
            raise Unreadable(odd // per_row, (int(sizes[odd]), size))
    inner = _values(array.flatten(), None if shape is None else shape[1:], per_row * size)
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
