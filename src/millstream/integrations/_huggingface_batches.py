"""Iterable datasets of the Hugging Face library, as batches that can resume where they were."""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from millstream.integrations._arrow_columns import Unreadable, is_numbers, to_numpy
from millstream.integrations._table import made_samples
from millstream.reading.contracts import PyTree
from millstream.reading.interrupts import OneThread
from millstream.reading.samples import NotAnArray, SampleSpec, spec_of
from millstream.text.errors import describe_value, needs, require_bool, require_callable, require_int

_CALLER = "HuggingFaceBatches"
# Those of which `datasets` can say where they are. A shuffle buffer loses what is in it, and a map over batches may
# skip one, so these are read again up to where they were.
_EXACT = {
    "ArrowExamplesIterable",
    "CyclingMultiSourcesExamplesIterable",
    "ExamplesIterable",
    "FilteredExamplesIterable",
    "FormattedExamplesIterable",
    "MappedExamplesIterable",
    "RebatchedArrowExamplesIterable",
    "SelectColumnsIterable",
    "SkipExamplesIterable",
    "TakeExamplesIterable",
}


def are_numbers(schema: Any, columns: Sequence[str]) -> bool:
    """Whether these columns are numbers, or lists and arrays of numbers."""
    return all(is_numbers(_storage_type(schema.field(name).type)) for name in columns)


def numbers_table(table: Any, columns: Sequence[str]) -> Any:
    """The columns of a table, with what their arrays are stored as; nothing is copied.

    Args:
        table: A table of `datasets`.
        columns: Those to keep.
    """
    import pyarrow as pa
    from datasets.table import InMemoryTable

    stored = {}
    for name in columns:
        column = table.column(name)
        kind = _storage_type(column.type)
        stored[name] = (
            column if kind == column.type else pa.chunked_array([part.storage for part in column.chunks], kind)
        )
    return InMemoryTable(pa.table(stored))


def _storage_type(kind: Any) -> Any:
    """What an extension array of `datasets` is stored as; any other type as it is."""
    return kind.storage_type if type(kind).__module__.startswith("datasets.") else kind


if TYPE_CHECKING:
    import datasets


class HuggingFaceBatches:
    """The batches of a `datasets.IterableDataset`, which has no order to choose and is read from its beginning.

    Iterating gives (batch, mask), as a loader does; the last batch of an epoch is completed with zeros, which the mask
    tells. The iterator has `get_state` and `set_state`, so that a loop over it can be saved and resumes exactly. Where
    `datasets` itself would lose samples (a shuffle buffer), it draws again what was drawn before.

    Example:
        >>> import datasets
        >>> from millstream.integrations.huggingface import HuggingFaceBatches
        >>> table = datasets.Dataset.from_dict({"label": [1, 2, 3, 4, 5]})
        >>> batches = iter(HuggingFaceBatches(table.to_iterable_dataset(), 2))
        >>> next(batches)[0]["label"].tolist(), (saved := batches.get_state())["batches"]
        ([1, 2], 1)
        >>> batches.set_state(saved)
        >>> [batch["label"].tolist() for batch, mask in batches]
        [[3, 4], [5, 0]]

    Args:
        dataset: The dataset. Every epoch is told its number with `set_epoch`, by which `datasets` shuffles again.
        batch_size: Samples per batch.
        row_fn: `row_fn(row) -> sample`, where a row is a dict of the dataset's own values; for text, images and the
            like. Without it, columns must be numbers or arrays of one shape.
        epochs: How many passes there are; None for no end.
        drop_last: Leave out the last batch of an epoch if it is not full.
    """

    def __init__(
        self,
        dataset: "datasets.IterableDataset",
        batch_size: int,
        *,
        row_fn: Callable[[dict[str, Any]], PyTree] | None = None,
        epochs: int | None = 1,
        drop_last: bool = False,
    ) -> None:
        with needs(_CALLER, "datasets", "huggingface"):
            import datasets
        if not isinstance(dataset, datasets.IterableDataset):
            raise TypeError(f"{_CALLER} needs a datasets.IterableDataset. Got {describe_value(dataset)}.")
        require_int(_CALLER, "batch_size", batch_size, least=1)
        require_bool(_CALLER, "drop_last", drop_last)
        if epochs is not None:
            require_int(_CALLER, "epochs", epochs, least=1)
        if row_fn is not None:
            require_callable(_CALLER, "row_fn", row_fn)
        kind = "numpy" if row_fn is None else None
        if row_fn is None and dataset.features is not None:
            kind = "arrow" if are_numbers(dataset.features.arrow_schema, list(dataset.features)) else kind
        self._arguments = dataset.with_format(kind), batch_size, row_fn, epochs, drop_last

    def __repr__(self) -> str:
        dataset, batch_size, _, epochs, _ = self._arguments
        return f"HuggingFaceBatches({type(dataset).__name__}, {batch_size:,}, epochs={epochs})"

    def __iter__(self) -> "HuggingFaceIterator":
        return HuggingFaceIterator(*self._arguments)


class HuggingFaceIterator(Iterator[tuple[PyTree, np.ndarray]]):
    """One iteration over `HuggingFaceBatches`, with the position in it.

    Attributes:
        samples: How many samples the batch yielded last has, padding not counted.
    """

    def __init__(
        self,
        dataset: "datasets.IterableDataset",
        batch_size: int,
        row_fn: Callable[[dict[str, Any]], PyTree] | None,
        epochs: int | None,
        drop_last: bool,
    ) -> None:
        # A dataset has one position, which iterators must not share.
        self._dataset = copy.deepcopy(dataset)
        self._batch_size = batch_size
        self._row_fn = row_fn
        self._epochs = epochs
        self._drop_last = drop_last
        self._spec: SampleSpec | None = None
        self._can_seek = _can_seek(dataset)
        self._epoch = self._number = self.samples = 0
        self._found: Any = None  # a batch that is not handed out yet, and stays if it cannot be
        self._batches: Iterator[Any] | None = None  # what is left of the epoch; None if it has to be begun
        self._position = self._dataset.state_dict()
        self._one_thread = OneThread(type(self).__name__)

    def __repr__(self) -> str:
        return f"HuggingFaceIterator(epoch {self._epoch}, batch {self._number})"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[PyTree, np.ndarray]:
        with self._one_thread:
            return self._draw_next()

    def _draw_next(self) -> tuple[PyTree, np.ndarray]:
        while self._epochs is None or self._epoch < self._epochs:
            self._found = self._drawn() if self._found is None else self._found
            if self._found is not None:
                batch = self._padded(self._found)
                self._number, self._position, self._found = self._number + 1, self._dataset.state_dict(), None
                return batch, np.arange(self._batch_size) < self.samples
            if self._number == 0:
                raise ValueError(f"{_CALLER} needs a dataset with at least one batch. It has none.")
            self._epoch, self._number, self._batches = self._epoch + 1, 0, None
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        """The position as plain values."""
        place = {"epoch": self._epoch, "batches": self._number, "batch_size": self._batch_size}
        return {**place, "dataset": self._position}

    def set_state(self, saved: dict[str, Any]) -> None:
        """Continue from what `get_state` gave."""
        if saved["batch_size"] != self._batch_size:
            raise ValueError(
                f"{_CALLER} resumes only with batches of the same size. They had {saved['batch_size']} samples when "
                f"the state was saved, and have {self._batch_size} now."
            )
        self._epoch, self._number, self._position = saved["epoch"], saved["batches"], saved["dataset"]
        self._found = self._batches = None
        self._batches = self._begun()

    def _drawn(self) -> Any:
        """The next batch, as `datasets` gives it; None if the epoch is over."""
        batches = self._begun() if self._batches is None else self._batches
        # One that raises is at its end, which would pass for that of the epoch. So it is only kept if it does not.
        self._batches = None
        found = next(batches, None)
        self._batches = batches
        return found

    def _begun(self) -> Iterator[Any]:
        """The epoch from the batch on that is next."""
        self._dataset.set_epoch(self._epoch)
        if self._can_seek:
            self._dataset.load_state_dict(self._position)
        batches = iter(self._dataset.iter(self._batch_size, drop_last_batch=self._drop_last))
        if self._can_seek:
            return batches
        found = sum(1 for _ in itertools.islice(batches, self._number))
        if found < self._number:
            raise ValueError(
                f"{_CALLER} resumes only with the same dataset. {self._number} batches of epoch {self._epoch} were "
                f"drawn when the state was saved, and the dataset has {found} now."
            )
        return batches

    def _padded(self, found: Any) -> PyTree:
        """A batch of full length; `samples` says how much of it is real."""
        first = self._number * self._batch_size
        samples = self._made(first, found)
        if self._spec is None:
            self._spec = self._spec_of(samples[0])
        spec = self._spec
        leaves = zip(spec.shapes, spec.dtypes, strict=True)
        out = [np.zeros((self._batch_size, *shape), dtype) for shape, dtype in leaves]
        for row, sample in enumerate(samples):
            spec.write(_CALLER, out, row, first + row, sample)
        self.samples = len(samples)
        return spec.unflatten(out)

    def _made(self, first: int, found: Any) -> list[PyTree]:
        """The samples of a batch as `datasets` gives it."""
        columns = found if isinstance(found, dict) else _arrays(first, found)
        if not columns:
            raise ValueError(f"{_CALLER} needs at least one column. The dataset has none.")
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        if self._row_fn is None:
            return rows
        return made_samples(_CALLER, "row_fn", self._row_fn, range(first, first + len(rows)), rows)

    def _spec_of(self, sample: PyTree) -> SampleSpec:
        try:
            return spec_of(_CALLER, sample)
        except NotAnArray as error:
            raise TypeError(f"{error} Make arrays of it with row_fn=lambda row: ...") from None


def _arrays(first: int, table: Any) -> dict[str, np.ndarray]:
    """The columns of an Arrow table of numbers."""
    stored, columns = numbers_table(table, table.column_names), {}
    for name in table.column_names:
        try:
            columns[name] = to_numpy(stored.column(name).combine_chunks())
        except Unreadable as error:
            rule, found = "a value in every row", "none"
            if error.sizes is not None:
                rule, found = "lists of one length in a column", f"{error.sizes[0]} values, and not {error.sizes[1]},"
            raise ValueError(
                f"{_CALLER} needs {rule}. Column {name!r} has {found} at sample {first + error.row}. Say what becomes "
                "of such rows with row_fn=lambda row: ..., or leave them out with dataset.filter."
            ) from None
    return columns


def _can_seek(dataset: Any) -> bool:
    """Whether every stage of a dataset can resume exactly; one that is not known cannot."""
    stages: list[Any] = [getattr(dataset, "_ex_iterable", None)]
    for stage in stages:
        if type(stage).__name__ not in _EXACT or (
            getattr(stage, "batched", False) and "Mapped" in type(stage).__name__
        ):
            return False
        stages += [stage.ex_iterable] if hasattr(stage, "ex_iterable") else getattr(stage, "ex_iterables", [])
    return True
