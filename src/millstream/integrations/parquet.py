"""Parquet files as sources."""

from collections.abc import Callable, Sequence
from typing import Any

from millstream.files.paths import Paths, find_files
from millstream.integrations._chunked import ChunkedTable, as_columns, as_it_is, common_schema
from millstream.integrations._file_chunks import DataFile, FileChunks, InMemoryColumns, readable
from millstream.integrations._table import Row, TableSource, check_options
from millstream.plan.ordering import Ordering
from millstream.reading import is_worker
from millstream.reading.chunk_cache import ChunkCache
from millstream.reading.contracts import PyTree
from millstream.text.errors import needs, require_int

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
        return {**super().__getstate__(), "_footers": None}

    def _read(self, file: int, numbers: list[int]) -> Any:
        import pyarrow.parquet as pq

        data = self._files[file]
        footer = self._footers.get(file)
        if footer is None:
            footer = _read_footer(data)
            self._footers.put(file, footer, footer.serialized_size)
        with readable("Parquet", data), data.opened() as stream:
            reader = pq.ParquetFile(stream, metadata=footer, pre_buffer=data.is_remote, page_checksum_verification=True)
            # The other cores have workers of their own, if this is one.
            table = reader.read_row_groups(numbers, columns=self._columns, use_threads=not is_worker())
            return table.select(self._columns)  # "a" stands for "a.b", too, in pyarrow's reading


def _read_footer(file: DataFile) -> Any:
    """The metadata of a file."""
    import pyarrow.parquet as pq

    with readable("Parquet", file), file.opened() as stream:
        return pq.read_metadata(stream)


class ParquetSource(TableSource):
    """The rows of Parquet files, in any order, without ever holding the files in memory.

    Rows are found by row group. Of a group, the chosen columns are decoded when one of its rows is wanted, and kept for
    other batches up to `cache_bytes`. Rows that are shuffled over more data than that have most of their groups decoded
    for every batch: raise the limit, write smaller groups, or shuffle batches instead of rows with
    `ordering=ms.Shuffle("batchwise", first_epoch=False)`.

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
        files = [DataFile(caller, path) for path in find_files(caller, paths, [".parquet", ".pq"])]
        footers = [_read_footer(file) for file in files]
        names = [file.name for file in files]
        schema = common_schema(caller, names, [footer.schema.to_arrow_schema() for footer in footers], columns)
        decode = as_columns if row_fn is None else as_it_is
        groups = _ParquetGroups(files, footers, schema.names, decode, cache_bytes, together=row_fn is None)
        table = ChunkedTable(groups)
        super().__init__(caller, table, ordering, prefetch_size, row_fn)
        if row_fn is None and groups.regular and groups.row_bytes * len(table) <= cache_bytes:
            groups.keep_nothing()
            table.in_memory = InMemoryColumns(groups)
