"""Rows of a pandas frame as data descriptors."""

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from millstream.text.errors import describe_value

if TYPE_CHECKING:
    import pandas


class RowData(Sequence["pandas.Series"]):
    """The rows of a frame, by position: `rows[3]` is a Series, `rows[10:]` are rows again.

    Nothing is read before it is asked for. Loader processes share the memory of columns of numbers.

    Example:
        >>> import pandas
        >>> from millstream.dialects.hydrax.pandas import RowData
        >>> rows = RowData(pandas.DataFrame({"path": ["a.png", "b.png"], "label": [3, 7]}, index=[10, 20]))
        >>> len(rows), rows[1]["path"], int(rows[-1].label)
        (2, 'b.png', 7)

    Args:
        dataframe: The frame; whatever its index is, rows are counted from 0.
    """

    def __init__(self, dataframe: "pandas.DataFrame") -> None:
        if not hasattr(dataframe, "iloc") or getattr(dataframe, "ndim", 0) != 2:
            raise TypeError(f"RowData needs a pandas DataFrame. Got {describe_value(dataframe)}.")
        self._dataframe = dataframe

    @property
    def dataframe(self) -> "pandas.DataFrame":
        """The frame."""
        return self._dataframe

    def __len__(self) -> int:
        return len(self._dataframe)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return RowData(self._dataframe.iloc[index])
        return self._dataframe.iloc[operator.index(index)]

    def __reduce__(self) -> tuple[Any, ...]:
        # A part of a frame is a view with gaps, whose numbers would be pickled for each process; a copy is shared.
        return RowData, (self._dataframe.copy(),)
