"""Tables that come in chunks: record batches of Arrow, row groups of Parquet."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from millstream.integrations._arrow_columns import ArrowCells, as_column, find_list_spans
from millstream.integrations._file_chunks import FileChunks, InMemoryColumns, filled
from millstream.integrations._table import Row, chosen_columns, rows_of
from millstream.reading.host_source import FoundSpans
from millstream.text.errors import table


def common_schema(caller: str, names: Sequence[str], schemas: Sequence[Any], columns: Sequence[str] | None) -> Any:
    """The Arrow schema of the chosen columns, which must be the same in all files."""
    import pyarrow as pa

    chosen = chosen_columns(caller, schemas[0].names, columns)
    expected = _types(schemas[0], chosen)
    for name, schema in zip(names[1:], schemas[1:], strict=True):
        found = _types(schema, schema.names if columns is None else chosen)
        if found != expected:
            odd = [column for column in {**expected, **found} if found.get(column) != expected.get(column)]
            odd.sort(key=lambda column: column not in found or column not in expected)  # types that differ come first
            shown = [(repr(column), f"{_told(expected, column)} and {_told(found, column)}") for column in odd]
            raise ValueError(
                f"{caller} needs the same columns in all files. {names[0]} and {name} have:\n{table(shown)}\n"
                "Write them again with one schema, or choose columns that they share with columns=[...]."
            )
    return pa.schema([schemas[0].field(name) for name in chosen])


def _types(schema: Any, columns: Sequence[str]) -> dict[str, list[Any]]:
    """The types of these columns, as far as they are there: one each, unless a name is there several times."""
    types: dict[str, list[Any]] = {}
    wanted = set(columns)
    for field in schema:
        if field.name in wanted:
            types.setdefault(field.name, []).append(field.type)
    return types


def _told(types: dict[str, list[Any]], column: str) -> str:
    return ", ".join(map(str, types.get(column, ["none"])))


class Chunks(Protocol):
    """Where chunks come from.

    Attributes:
        sizes: How many rows each chunk has.
    """

    sizes: list[int]

    def contents(self, numbers: Sequence[int]) -> Iterable[tuple[list[int], Any]]:
        """What is in these chunks, in any order, one or more at a time, with their numbers."""
        ...


def as_columns(table: Any) -> dict[str, np.ndarray | ArrowCells]:
    """What is kept of a table or record batch whose columns become arrays, as far as they can."""
    return {name: as_column(_one_array(table.column(name))) for name in table.column_names}


def as_it_is(table: Any) -> Any:
    """What is kept of a table or record batch for a function on rows."""
    return table


class ChunkedTable:
    """The rows of chunks.

    Args:
        chunks: Where they come from.

    Attributes:
        in_memory: All columns, if they fit into memory.
        blocks: How many rows each chunk has.
    """

    def __init__(self, chunks: Chunks) -> None:
        self.in_memory: InMemoryColumns | None = None
        self.stamps = getattr(chunks, "stamps", ())  # of those in files
        self.blocks = chunks.sizes
        self.cache_bytes = getattr(chunks, "cache_bytes", None)
        self._chunks = chunks
        self._ends = np.cumsum(chunks.sizes, dtype=np.int64)
        self._firsts = self._ends - chunks.sizes

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def looks_ahead(self) -> bool:
        """Whether it makes use of `expect`."""
        return isinstance(self._chunks, FileChunks) and self._chunks.is_remote

    def expect(self, indices: np.ndarray | None) -> None:
        """Prepare for these rows, which will be wanted in this order; None for no more."""
        if not isinstance(self._chunks, FileChunks):
            return
        if indices is None:
            self._chunks.forget()
        elif self.in_memory is not None:
            self.in_memory.expect(indices)
        else:
            self._chunks.expect(np.searchsorted(self._ends, indices, side="right"))

    def take(self, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        """The rows at `indices`, an array for each column."""
        if self.in_memory is not None:
            return self.in_memory.take(indices)
        self._advance(len(indices))
        taken: dict[str, np.ndarray] = {}
        if len(self._ends) == 1:
            for _, columns in self._chunks.contents([0]):
                taken = {name: column.take(indices, axis=0) for name, column in columns.items()}
            return taken
        for rows, inside, columns in self._pieces(indices):
            for name, column in columns.items():
                taken[name] = filled(taken.get(name), len(indices), rows, column.take(inside, axis=0))
        return taken

    def samples(self, indices: np.ndarray) -> Sequence[Row]:
        """The rows at `indices` as functions on the host get them."""
        return rows_of(self.take(indices))

    def find_spans(self, names: Sequence[str], indices: np.ndarray) -> Iterator[FoundSpans | None]:
        """Find where lists of numbers lie, chunk by chunk; see `HostSource.find_spans`."""
        if self.in_memory is not None:
            yield None
            return
        for rows, inside, columns in self._pieces(indices):
            spans = [find_list_spans(columns.get(name), inside) for name in names]
            found = [span for span in spans if span is not None]
            if len(found) < len(names):
                yield None
                return
            yield rows, found
        self._advance(len(np.unique(indices)))

    def rows(self, indices: np.ndarray) -> Sequence[Row]:
        """The rows at `indices`, each as a dict of Python's own values."""
        found: list[Row] = [{}] * len(indices)
        self._advance(len(indices))
        for rows, inside, chunk in self._pieces(indices):
            for row, values in zip(rows.tolist(), chunk.take(inside).to_pylist(), strict=True):
                found[row] = values
        return found

    def _advance(self, rows: int) -> None:
        if isinstance(self._chunks, FileChunks):
            self._chunks.advance(rows)

    def _pieces(self, indices: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, Any]]:
        """What each chunk has to give: which rows of the batch, where they are in the chunk, and its contents."""
        chunk = np.searchsorted(self._ends, indices, side="right")
        order = np.argsort(chunk, kind="stable")
        chunk = chunk[order]
        inside = indices[order] - self._firsts[chunk]
        starts = [0, *(np.flatnonzero(np.diff(chunk)) + 1).tolist(), len(chunk)]
        parts = {int(chunk[first]): slice(first, end) for first, end in itertools.pairwise(starts)}
        for numbers, contents in self._chunks.contents(list(parts)):
            if len(numbers) == 1:
                part = parts[numbers[0]]
                yield order[part], inside[part], contents
                continue
            sizes = [self._chunks.sizes[number] for number in numbers]
            before = itertools.accumulate(sizes[:-1], initial=0)
            rows = [order[parts[number]] for number in numbers]
            behind = [inside[parts[number]] + start for number, start in zip(numbers, before, strict=True)]
            yield np.concatenate(rows), np.concatenate(behind), contents


def _one_array(column: Any) -> Any:
    """A column of a record batch, or of a table, which may be in several pieces."""
    chunks = getattr(column, "chunks", None)
    if chunks is None:
        return column
    return chunks[0] if len(chunks) == 1 else column.combine_chunks()
