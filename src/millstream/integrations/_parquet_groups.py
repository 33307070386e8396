"""Row groups of Parquet files."""

from collections.abc import Callable, Sequence
from typing import Any

from millstream.integrations._chunk_cache import ChunkCache
from millstream.integrations._data_file import DataFile, readable
from millstream.integrations._file_chunks import FileChunks
from millstream.reading.role import is_worker

_FOOTERS = 32 << 20  # bytes of them that are kept: of thousands of files, those that are in use


class ParquetGroups(FileChunks):
    """The row groups of files.

    Args:
        files: The files.
        footers: Their metadata.
        columns: The columns to read.
        contents: `contents(numbers, table)` makes of groups what is kept of them.
        limit: Bytes to keep.
        together: Whether groups are decoded by one call where that is possible.
    """

    def __init__(
        self,
        files: Sequence[DataFile],
        footers: Sequence[Any],
        columns: Sequence[str],
        contents: Callable[[list[int], Any], Any],
        limit: int,
        together: bool,
    ) -> None:
        sizes = [[footer.row_group(group).num_rows for group in range(footer.num_row_groups)] for footer in footers]
        self._columns = list(columns)
        super().__init__(files, sizes, contents, limit, together)
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
            footer = read_footer(data)
            self._footers.put(file, footer, footer.serialized_size)
        with readable("Parquet", data), data.opened() as stream:
            reader = pq.ParquetFile(stream, metadata=footer, pre_buffer=data.is_remote, page_checksum_verification=True)
            # The other cores have workers of their own, if this is one.
            table = reader.read_row_groups(numbers, columns=self._columns, use_threads=not is_worker())
            return table.select(self._columns)  # "a" stands for "a.b", too, in pyarrow's reading


def read_footer(file: DataFile) -> Any:
    """The metadata of a file."""
    import pyarrow.parquet as pq

    with readable("Parquet", file), file.opened() as stream:
        return pq.read_metadata(stream)
