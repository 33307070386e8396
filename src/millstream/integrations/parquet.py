"""Parquet files as sources."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from millstream.files.data_files import at_once, forget
from millstream.files.file_index import file_index
from millstream.files.paths import Paths, find_files
from millstream.files.plan_folder import PlanFolder, folder_of
from millstream.integrations._chunked import ChunkedTable, as_columns, as_it_is, common_schema
from millstream.integrations._file_chunks import (
    DataFile,
    FileChunks,
    InMemoryColumns,
    Span,
    open_data_files,
    readable,
)
from millstream.integrations._table import Row, TableSource, check_options
from millstream.plan.ordering import Ordering
from millstream.reading import is_worker
from millstream.reading.chunk_cache import ChunkCache
from millstream.reading.contracts import PyTree
from millstream.text.errors import needs, require_int

_MAGIC = b"PAR1"
_TAIL = 64 << 10  # bytes at the end that hold most footers
_GAP = 8 << 10  # bytes between two columns that are read with them
_FOOTERS = 32 << 20  # bytes of them that are kept: of thousands of files, those that are in use


class _ParquetGroups(FileChunks):
    """The row groups of files."""

    def __init__(
        self,
        files: Sequence[DataFile],
        footers: Sequence[Any],
        columns: Sequence[str],
        decode: Callable[[Any], Any],
        limit: int,
        together: bool,
    ) -> None:
        sizes = [[footer.row_group(group).num_rows for group in range(footer.num_row_groups)] for footer in footers]
        self._columns = list(columns)
        super().__init__(files, sizes, decode, limit, together)
        for file, footer in enumerate(footers):
            self._footers.put(file, footer, footer.serialized_size)

    def _begin(self) -> None:
        super()._begin()
        self._footers = ChunkCache(_FOOTERS)

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process would ask other machines for them again.
        footers = {file: self._footers.get(file) for file, data in enumerate(self._files) if data.is_remote}
        return {**super().__getstate__(), "_footers": footers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for file, footer in state["_footers"].items():
            if footer is not None:
                self._footers.put(file, footer, footer.serialized_size)

    def _spans(self, file: int, number: int) -> list[Span]:
        footer = self._footers.get(file)
        return [] if footer is None else _column_spans(footer.row_group(number), self._columns)

    def _read(self, file: int, numbers: list[int]) -> Any:
        import pyarrow.parquet as pq

        data = self._files[file]
        footer = self._footers.get(file)
        if footer is None:
            footer = _read_footer(data)
            self._footers.put(file, footer, footer.serialized_size)
        held = self._held(file, numbers)
        with readable("Parquet", data), data.opened(held=held) as stream:
            pre_buffer = data.is_remote and not held
            reader = pq.ParquetFile(stream, metadata=footer, pre_buffer=pre_buffer, page_checksum_verification=True)
            # The other cores have workers of their own, if this is one.
            table = reader.read_row_groups(numbers, columns=self._columns, use_threads=not is_worker())
            return table.select(self._columns)  # "a" stands for "a.b", too, in pyarrow's reading


def _column_spans(group: Any, columns: Sequence[str]) -> list[Span]:
    """Where the chosen columns of a row group lie, neighbours together."""
    wanted, spans = set(columns), []
    for number in range(group.num_columns):
        column = group.column(number)
        if column.path_in_schema.partition(".")[0] in wanted or column.path_in_schema in wanted:
            pages = [column.data_page_offset, column.dictionary_page_offset]
            spans.append((min(page for page in pages if page), column.total_compressed_size))
    together: list[Span] = []
    for start, size in sorted(spans):
        if together and start - sum(together[-1]) <= _GAP:
            first = together.pop()[0]
            together.append((first, start + size - first))
        else:
            together.append((start, size))
    return together


def _read_footer(file: DataFile) -> Any:
    """The metadata of a file."""
    import pyarrow.parquet as pq

    with readable("Parquet", file), file.opened() as stream:
        return pq.read_metadata(stream)


def _kept_footer(caller: str, file: DataFile, folder: PlanFolder | None) -> Any:
    """The metadata of a file, which is kept if the file was listed with many others and is not asked for anything."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.is_remote or file.file.tail:
        return _read_footer(file)
    kept = file_index(caller, file.file, "footer", _footer_bytes(file), folder)
    with readable("Parquet", file):
        return pq.read_metadata(pa.BufferReader(_MAGIC + kept.tobytes()))


def _footer_bytes(file: DataFile) -> Iterator[tuple[int, np.ndarray]]:
    source = file.file
    tail = source.read_at(max(source.size - _TAIL, 0), min(source.size, _TAIL))
    size = int.from_bytes(tail[-8:-4], "little") + 8
    if tail[-4:] != _MAGIC or size > source.size:
        raise ValueError(f"{file.name} is damaged, cut short, or no Parquet file. Get it again, or write it again.")
    footer = tail[-size:] if size <= len(tail) else source.read_at(source.size - size, size - len(tail)) + tail
    yield source.size, np.frombuffer(footer, np.uint8)


class ParquetSource(TableSource):
    """The rows of Parquet files, in any order, without ever holding the files in memory.

    Rows are found by row group. Of a group, the chosen columns are decoded when one of its rows is wanted, and kept for
    other batches up to `cache_bytes`. Rows that are shuffled over more data than that have most of their groups decoded
    for every batch: raise the limit, write smaller groups, or read groups almost in sequence with
    `ordering=ms.Shuffle("blocks")`.

    Numbers and bools stay what they are, lists of numbers become arrays; text, gaps and the like stay Python's own
    values. A `HostMapTransform` gets lists of any length, and makes them equal. A file that is damaged or changes while
    it is read is refused by name.

    Example:
        >>> import pyarrow as pa, pyarrow.parquet as pq
        >>> from millstream.integrations.parquet import ParquetSource
        >>> table = pa.table({"wind": [3.5, 4.5, 5.5], "rain": [False, True, True], "town": ["Ulm", "Bonn", "Kiel"]})
        >>> pq.write_table(table, "weather.parquet", row_group_size=2)
        >>> source = ParquetSource("weather.parquet", columns=["wind", "rain"])
        >>> source.read(np.array([2, 0]))
        {'rain': array([ True, False]), 'wind': array([5.5, 3.5], dtype=float32)}
        >>> towns = ParquetSource("*.parquet", row_fn=lambda row: {"letters": np.int32(len(row["town"]))})
        >>> towns.read(np.array([0, 1]))["letters"].tolist()
        [3, 4]

    Args:
        paths: A path, an address (`s3://`, `gs://`, `https://`), a folder, a pattern such as "data/*.parquet", or a
            list of them. Files of a folder or a pattern come in the order of their names; only the columns inside the
            files count, not the names of folders.
        columns: The columns to read; all of them by default.
        row_fn: Makes a sample of a row, a dict of Python's own values.
        cache_bytes: How much decoded data to keep, in each process. A group that is larger is decoded for every batch.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | None = None,
        *,
        row_fn: Callable[[Row], PyTree] | None = None,
        cache_bytes: int = 512 << 20,
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
    ) -> None:
        caller = "ParquetSource"
        with needs(caller, "pyarrow", "parquet"):
            import pyarrow.parquet  # noqa: F401
        check_options(caller, ordering, prefetch_size, row_fn)
        require_int(caller, "cache_bytes", cache_bytes, least=0)
        files = open_data_files(caller, find_files(caller, paths, [".parquet", ".pq"]))
        folder, is_far = folder_of(caller, None), any(file.is_remote for file in files)
        footers = at_once(lambda file: _kept_footer(caller, file, folder), files, is_far)
        forget([file.file for file in files])
        names = [file.name for file in files]
        schema = common_schema(caller, names, [footer.schema.to_arrow_schema() for footer in footers], columns)
        decode = as_columns if row_fn is None else as_it_is
        groups = _ParquetGroups(files, footers, schema.names, decode, cache_bytes, together=row_fn is None)
        table = ChunkedTable(groups)
        super().__init__(caller, table, ordering, prefetch_size, row_fn)
        if row_fn is None and groups.regular and groups.row_bytes * len(table) <= cache_bytes:
            table.in_memory = InMemoryColumns(groups)
