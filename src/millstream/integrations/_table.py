"""What all tables have in common: rows by number, columns as arrays."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol

import numpy as np

from millstream.plan.ordering import Ordering
from millstream.reading.contracts import PyTree
from millstream.reading.dtypes import can_become, narrowed
from millstream.reading.host_source import FoundSpans, HostSource
from millstream.reading.samples import SampleSpec, first_sample, spec_or_objects
from millstream.reading.stats import add_time
from millstream.sources.array import check_reading
from millstream.text.errors import (
    describe_value,
    function_name,
    listed,
    noted,
    require_callable,
)

Row = dict[str, Any]


def made_samples(
    caller: str, argument: str, fn: Callable[[Any], PyTree], indices: Iterable[int], items: Iterable[Any]
) -> list[PyTree]:
    """Apply `fn`, the `argument` of a source, to each item; an error says at which sample it was."""
    samples = []
    for index, item in zip(indices, items, strict=True):
        try:
            samples.append(fn(item))
        except Exception as error:
            note = f"This came from {function_name(fn)}, the {argument} of {caller}, at sample {index}."
            raise noted(error, note)  # noqa: B904 (`from` would take away the error's own cause)
    return samples


class Table(Protocol):
    """A table whose rows are read by their numbers."""

    def __len__(self) -> int: ...

    def take(self, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        """The rows at `indices`, an array for each column: of objects, unless all are numbers of one shape."""
        ...

    def samples(self, indices: np.ndarray) -> Sequence[Row]:
        """The rows at `indices` as functions on the host get them."""
        ...

    def rows(self, indices: np.ndarray) -> Sequence[Row]:
        """The rows at `indices`, each as a dict of Python's own values, for `row_fn`."""
        ...


class Cells(Protocol):
    """A column of values that are not numbers of one shape: text, lists of any length, gaps, any objects."""

    def take(self, indices: Any, /, *, axis: int) -> np.ndarray:
        """An array of objects."""
        ...


def cells(values: Iterable[Any]) -> np.ndarray:
    """Values as an array of objects, whatever they are."""
    listed_values = list(values)
    found = np.empty(len(listed_values), object)
    for row, value in enumerate(listed_values):
        found[row] = value  # one by one: NumPy would make one array of arrays
    return found


def rows_of(columns: Mapping[str, Iterable[Any]]) -> list[Row]:
    """Columns as rows."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@dataclasses.dataclass(frozen=True)
class FrameTable:
    """A table in memory. One of the two goes to worker processes: columns, whose arrays they share, or the frame."""

    length: int
    columns: Mapping[str, np.ndarray | Cells]
    frame: Any
    rows_of: Callable[[Any, np.ndarray], Sequence[Row]]

    def __len__(self) -> int:
        return self.length

    def take(self, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        """The rows at `indices`, an array for each column."""
        return {name: column.take(indices, axis=0) for name, column in self.columns.items()}

    def samples(self, indices: np.ndarray) -> Sequence[Row]:
        """The rows at `indices` as functions on the host get them."""
        return rows_of(self.take(indices))

    def rows(self, indices: np.ndarray) -> Sequence[Row]:
        """The rows at `indices`, each as a dict of Python's own values."""
        return self.rows_of(self.frame, indices)


def check_options(caller: str, ordering: Ordering, prefetch_size: int, row_fn: Callable[[Row], PyTree] | None) -> None:
    """Refuse wrong options before a table is opened."""
    check_reading(caller, ordering, prefetch_size)
    if row_fn is not None:
        require_callable(caller, "row_fn", row_fn)


def require_rows(caller: str, table: Sized) -> None:
    """Refuse a table without rows."""
    if len(table) == 0:
        raise ValueError(f"{caller} needs at least one row. There is none.")


class TableSource(HostSource):
    """The rows of a table.

    A sample is a dict with a number or an array for each column, and text, lists of any length, gaps and other objects
    as they are; or whatever `row_fn` makes of a row.
    """

    reads_together = True  # one request for all rows of a batch
    whole_samples = True

    def __init__(
        self,
        caller: str,
        table: Table,
        ordering: Ordering,
        prefetch_size: int,
        row_fn: Callable[[Row], PyTree] | None,
    ) -> None:
        require_rows(caller, table)
        self._caller, self._table, self._row_fn = caller, table, row_fn
        self.calls_users = row_fn is not None
        self.stamps = getattr(table, "stamps", ())  # of those in files
        self.blocks = getattr(table, "blocks", None)  # of those that are stored in some
        self.divides_blocks = getattr(table, "divides_blocks", False)
        self.cache_bytes = getattr(table, "cache_bytes", None)
        self.looks_ahead = getattr(table, "looks_ahead", False)
        self.ordering: Ordering = ordering
        self.prefetch_size = prefetch_size
        self.first_sample, [sample] = first_sample(lambda index: self._samples(np.array([index])), range(len(table)))
        if row_fn is None and not sample:
            raise ValueError(f"{caller} needs at least one column. There is none.")
        self.sample_spec = spec_or_objects(caller, sample)

    def __len__(self) -> int:
        return len(self._table)

    def expect(self, indices: np.ndarray | None) -> None:
        if self.looks_ahead:
            self._table.expect(indices)  # pyright: ignore[reportAttributeAccessIssue]

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> None:
        if len(indices) == 0:
            return
        if self._row_fn is not None or out[0].dtype.hasobject:
            return self._write(indices, out, self._samples(indices))
        begun = time.perf_counter()
        columns = self._table.take(indices)
        add_time("read", begun)
        spec = self.sample_spec
        assert isinstance(spec, SampleSpec)
        leaves = [columns.get(name) for name in spec.fields]
        if len(leaves) != len(columns) or not all(map(_fits, leaves, out)):
            return self._write(indices, out, rows_of(columns))  # which says what is wrong with which sample
        for name, leaf, target in zip(spec.names, leaves, out, strict=True):
            target[...] = narrowed(f"{self._caller}{name}", leaf, target.dtype)  # pyright: ignore[reportArgumentType]

    def find_spans(self, names: Sequence[str], indices: np.ndarray) -> Iterator[FoundSpans | None]:
        if self._row_fn is None and hasattr(self._table, "find_spans"):
            return self._table.find_spans(names, indices)  # pyright: ignore[reportAttributeAccessIssue]
        return super().find_spans(names, indices)

    def _write(self, indices: np.ndarray, out: Sequence[np.ndarray], samples: Sequence[PyTree]) -> None:
        for row, (index, sample) in enumerate(zip(indices.tolist(), samples, strict=True)):
            self.sample_spec.write(self._caller, out, row, index, sample)

    def _samples(self, indices: np.ndarray) -> Sequence[PyTree]:
        if self._row_fn is None:
            return self._table.samples(indices)
        return made_samples(self._caller, "row_fn", self._row_fn, indices.tolist(), self._table.rows(indices))


def _fits(column: np.ndarray | None, target: np.ndarray) -> bool:
    return column is not None and column.shape == target.shape and can_become(column.dtype, target.dtype)


def chunk_sizes(length: int, rows: int) -> np.ndarray:
    """How many rows each chunk of an array has, whose chunks have `rows` each, but for the last.

    Example:
        >>> from millstream.integrations._table import chunk_sizes
        >>> chunk_sizes(10, 4).tolist()
        [4, 4, 2]
    """
    return np.diff(np.append(np.arange(0, length, rows), length))


def chosen_columns(caller: str, available: Sequence[Any], columns: Sequence[str] | None) -> list[str]:
    """The names of the columns to read: all, or those that are asked for, each of which must be there once."""
    chosen = list(available) if columns is None else listed(columns)
    if chosen is None:
        hint = f"; write [{columns!r}]" if isinstance(columns, str) else ""
        raise TypeError(f"{caller} needs a list of columns. Got {describe_value(columns)}{hint}.")
    if not chosen:
        raise ValueError(f"{caller} needs at least one column. There is none.")
    for name in chosen:
        if not isinstance(name, str):
            raise TypeError(f"{caller} needs columns with text as names. Got {describe_value(name)}; rename it.")
        found = list(available).count(name)
        if found != 1 or chosen.count(name) != 1:
            raise ValueError(
                f"{caller} needs each column once. Column {name!r} is there {found} times and asked for "
                f"{chosen.count(name)} times; the table has {describe_value(list(available))}."
            )
    return chosen
