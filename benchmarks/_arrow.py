"""Columns as an Arrow table, and rows of one as NumPy arrays."""

from typing import Any

import numpy as np
import pyarrow as pa
from _formats import Columns


def as_table(columns: Columns) -> Any:
    def column(array: np.ndarray) -> Any:
        return pa.array(array) if array.ndim == 1 else pa.FixedSizeListArray.from_arrays(array.ravel(), array.shape[1])

    return pa.table({name: column(array) for name, array in columns.items()})


def arrays_of(table: Any) -> Columns:
    """NumPy arrays of what pyarrow took."""

    def array(column: Any) -> np.ndarray:
        one = column.combine_chunks()
        if pa.types.is_fixed_size_list(one.type):
            return one.flatten().to_numpy().reshape(len(one), -1)
        return one.to_numpy()

    return {name: array(table.column(name)) for name in table.column_names}
