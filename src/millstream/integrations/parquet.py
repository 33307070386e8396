"""Parquet files as sources."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from millstream.integrations._chunked import ChunkedSource
from millstream.integrations._data_file import DataFile
from millstream.integrations._file_chunks import KeptColumns
from millstream.integrations._parquet_groups import ParquetGroups, read_footer
from millstream.integrations._paths import Paths, find_files
from millstream.integrations._table import Row
from millstream.integrations._table_files import common_schema
from millstream.plan.ordering import Ordering
from millstream.reading.contracts import PyTree
from millstream.text.errors import needs, require_int


class ParquetSource(ChunkedSource):
    """The rows of Parquet files, in any order, without ever holding the files in memory.

    Rows are found by row group. Of a group, the chosen columns are decoded when one of its rows is wanted, and kept for
    other batches up to `cache_bytes`. Rows that are shuffled over more data than that have most of their groups decoded
    for every batch: raise the limit, write smaller groups, or shuffle batches instead of rows with
    `ordering=ms.Shuffle("batchwise", first_epoch=False)`.

    Numbers and bools stay what they are; lists of numbers, which must all have one length, become arrays. A missing
    value is refused by name, and so is a file that is damaged or changes while it is read.

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
        row_fn: Makes a sample of a row, a dict of Python's own values; for text, dates, missing values, and lists of
            any length.
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
        who = "ParquetSource"
        with needs(who, "pyarrow", "parquet"):
            import pyarrow.parquet  # noqa: F401
        super().__init__(who, ordering, prefetch_size, row_fn)
        require_int(who, "cache_bytes", cache_bytes, least=0)
        files = [DataFile(who, path) for path in find_files(who, paths, [".parquet", ".pq"])]
        footers = [read_footer(file) for file in files]
        names = [file.name for file in files]
        schema = common_schema(who, names, [footer.schema.to_arrow_schema() for footer in footers], columns)
        groups = ParquetGroups(files, footers, schema.names, self._contents, cache_bytes, together=row_fn is None)
        self._kept: KeptColumns | None = None
        self._settle_on(schema, groups)
        if row_fn is None and groups.row_bytes * len(self) <= cache_bytes:
            groups.keep_nothing()
            self._kept = KeptColumns(groups)

    def take(self, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        return super().take(indices) if self._kept is None else self._kept.take(indices)
