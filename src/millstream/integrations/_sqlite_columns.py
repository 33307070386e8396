"""The values of a column as an array. SQLite lets every row hold what it likes, so every value is looked at."""

import array
import math
from typing import Any

import numpy as np

from millstream.text.errors import describe_value

_WORDS = {"f": "numbers", "c": "numbers", "i": "whole numbers", "u": "whole numbers", "b": "0 and 1"}


def first_column(place: str, value: Any) -> np.ndarray:
    """A column of one value, whose dtype the rest of it will have.

    Args:
        place: Whose column it is, for errors.
        value: That of the first row.
    """
    if isinstance(value, bytes):
        raise TypeError(
            f"{place} has bytes, {len(value)} of them in sample 0. Say what they are, with "
            "arrays={name: (shape, dtype)}, or make an array of them with row_fn=lambda row: ..."
        )
    if isinstance(value, str):
        raise TypeError(
            f"{place} has text, {describe_value(value)} in sample 0. Choose other columns with columns=[...], or make "
            "numbers of it with row_fn=lambda row: ..."
        )
    return np.array([value])


def number_column(place: str, values: tuple[Any, ...], indices: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A column of numbers.

    Args:
        place: Whose column it is, for errors.
        values: As SQLite has them.
        indices: Of which samples they are.
        dtype: What is expected.
    """
    whole = dtype.kind in "iub"
    try:
        # NumPy would cut 2.5 down to 2, and make numbers of text.
        column = np.frombuffer(array.array("q" if whole else "d", values), np.int64 if whole else np.float64)
    except TypeError:
        right = int if whole else (int, float)
        row = next(row for row, value in enumerate(values) if not isinstance(value, right))
        raise ValueError(
            f"{place} needs {_WORDS[dtype.kind]}. Sample {indices[row]} has {describe_value(values[row])}. Give it "
            "another dtype, with arrays={name: ((), dtype)}, or CAST it in a query."
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


def blob_column(
    place: str, values: tuple[Any, ...], indices: np.ndarray, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """A column of arrays that are kept as their bytes.

    Args:
        place: Whose column it is, for errors.
        values: As SQLite has them.
        indices: Of which samples they are.
        shape: Of one of them.
        dtype: Of their numbers.
    """
    size = math.prod(shape) * dtype.itemsize
    if set(map(type, values)) != {bytes} or set(map(len, values)) != {size}:
        row = next(row for row, value in enumerate(values) if not isinstance(value, bytes) or len(value) != size)
        found = f"{len(values[row])} bytes" if isinstance(values[row], bytes) else describe_value(values[row])
        raise ValueError(f"{place} needs {size} bytes, of shape {shape} in {dtype}. Sample {indices[row]} has {found}.")
    column = np.frombuffer(b"".join(values), dtype).reshape(len(values), *shape)
    return column.astype(dtype.newbyteorder("="), copy=False)
