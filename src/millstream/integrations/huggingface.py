"""Datasets of the Hugging Face library `datasets`: those that can be read in any order, and those that cannot."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from millstream.files.changed import WatchedFiles
from millstream.integrations._arrow_columns import as_column
from millstream.integrations._huggingface_batches import HuggingFaceBatches as HuggingFaceBatches
from millstream.integrations._huggingface_batches import are_numbers, numbers_table
from millstream.integrations._table import Row, TableSource, cells, check_options, chosen_columns, rows_of
from millstream.plan.ordering import Ordering
from millstream.reading.contracts import PyTree
from millstream.reading.dtypes import holds_numbers
from millstream.text.errors import describe_value, needs

if TYPE_CHECKING:
    import datasets

_CALLER = "HuggingFaceSource"


class HuggingFaceSource(TableSource):
    """The rows of a `datasets.Dataset`.

    Columns of numbers, and of lists or arrays of numbers, are taken from its Arrow table as they are, with the dtypes
    that its features have. All else goes through the dataset's own formatting: text is text, images are decoded, and
    what `with_transform` has set is called, where samples are read: in a thread or a worker process. A
    `HostMapTransform` gets all of it as it is, lists of any length and images of any size, and makes arrays of it.

    Example:
        >>> import datasets
        >>> from millstream.integrations.huggingface import HuggingFaceSource
        >>> table = datasets.Dataset.from_dict({"text": ["oats", "rye"], "label": [3, 5]})
        >>> HuggingFaceSource(table, columns=["label"]).read(np.array([1, 0]))
        {'label': array([5, 3], dtype=int32)}
        >>> HuggingFaceSource(table).map(lambda row: {"letters": len(row["text"])}).read(np.array([0, 1]))
        {'letters': array([4, 3], dtype=int32)}

    Args:
        dataset: The dataset, in memory or on disk. Its files must not change while it is read.
        columns: The columns to read; by default those of its format, or all that its transform gives.
        row_fn: `row_fn(row) -> sample`, where a row is what the dataset has at one index, as its format says.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
    """

    def __init__(
        self,
        dataset: "datasets.Dataset",
        columns: Sequence[str] | None = None,
        *,
        row_fn: Callable[[Row], PyTree] | None = None,
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
    ) -> None:
        check_options(_CALLER, ordering, prefetch_size, row_fn)
        _require_dataset(dataset)
        super().__init__(_CALLER, _DatasetTable(dataset, columns, row_fn is None), ordering, prefetch_size, row_fn)


class _DatasetTable:
    """The rows of a dataset: of its Arrow table where they are numbers, otherwise as the dataset formats them.

    Attributes:
        blocks: How many rows each of its record batches has; None if it lists rows of a table in another order.
    """

    divides_blocks = True  # they are mapped

    def __init__(self, dataset: Any, columns: Sequence[str] | None, as_arrays: bool) -> None:
        self._dataset = dataset
        self._custom = dataset.format["type"] == "custom"
        # What a transform gives is known when it is called.
        self._columns = columns if self._custom else chosen_columns(_CALLER, dataset.format["columns"], columns)
        self._as_arrays = as_arrays
        self._files = WatchedFiles(_CALLER, (file["filename"] for file in dataset.cache_files))
        self.stamps = self._files.stamps
        is_in_order = dataset._indices is None and dataset.data.num_columns > 0
        self.blocks = [len(chunk) for chunk in dataset.data.column(0).chunks] if is_in_order else None
        self._open()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_formatted", "_table", "_mapping")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        self._files.check(indices)
        columns = {**self._gather(indices), **self._format(indices)}
        self._files.check(indices)
        return columns if self._custom else {name: columns[name] for name in self._columns or ()}

    def samples(self, indices: np.ndarray) -> list[Row]:
        return rows_of(self.take(indices))

    def rows(self, indices: np.ndarray) -> list[Row]:
        self._files.check(indices)
        rows = rows_of(self._choose(self._formatted[indices.tolist()]))
        self._files.check(indices)
        return rows

    def _open(self) -> None:
        """Make what reading needs, here or in another process."""
        dataset, names = self._dataset, list(self._columns or ())
        self._formatted: Any = dataset
        self._table = self._mapping = None
        if self._custom:
            return
        kind, kwargs = dataset.format["type"], dataset.format["format_kwargs"]
        # The tables of other formats have no rows of Python's own values.
        kind, kwargs = (None, {}) if kind in ("arrow", "pandas", "polars") else (kind, kwargs)
        if self._as_arrays and not (kind == "numpy" and kwargs):
            numbers = [name for name in names if are_numbers(dataset.data.schema, [name])]
            names = [name for name in names if name not in numbers]
            self._table = numbers_table(dataset.data, numbers) if numbers else None
            self._mapping = None if dataset._indices is None else dataset._indices.column(0).to_numpy()
        self._formatted = dataset.with_format(kind, names, **kwargs) if names else None

    def _gather(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Columns of numbers, from the Arrow table."""
        if self._table is None:
            return {}
        places = indices if self._mapping is None else self._mapping[indices].astype(np.int64)
        table, every = self._table.fast_gather(places), np.arange(len(indices))
        columns = {name: as_column(table.column(name).combine_chunks()) for name in table.column_names}
        return {
            name: column if isinstance(column, np.ndarray) else column.take(every) for name, column in columns.items()
        }

    def _format(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Columns as the dataset decodes or transforms them."""
        if self._formatted is None:
            return {}
        found = self._choose(self._formatted[indices.tolist()])
        return {name: _as_cells(column) for name, column in found.items()}

    def _choose(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        if not self._custom:
            return dict(batch)
        return {name: batch[name] for name in chosen_columns(_CALLER, list(batch), self._columns)}


def _as_cells(column: Any) -> np.ndarray:
    """A column that a dataset has formatted: an array, if it is numbers of one shape, or cells."""
    if isinstance(column, np.ndarray):
        if holds_numbers(column.dtype):
            return column
        column = column.tolist() if column.dtype.kind in "US" else column
    return cells(column)


def _require_dataset(dataset: Any) -> None:
    with needs(_CALLER, "datasets", "huggingface"):
        import datasets
    if isinstance(dataset, datasets.Dataset):
        return
    fix = ""
    if isinstance(dataset, datasets.DatasetDict):
        fix = f" Choose one of its parts: {', '.join(f'dataset[{part!r}]' for part in dataset)}."
    elif isinstance(dataset, datasets.IterableDataset):
        fix = " One that is only iterable has no order to choose; see HuggingFaceBatches."
    raise TypeError(f"{_CALLER} needs a datasets.Dataset. Got {describe_value(dataset)}.{fix}")
