"""Arrow tables, and Arrow IPC files (Feather), as sources."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from millstream.integrations._chunked import ChunkedSource
from millstream.integrations._data_file import DataFile
from millstream.integrations._ipc_batches import IpcBatches, IpcFile
from millstream.integrations._paths import Paths, find_files
from millstream.integrations._table import Row, chosen_columns
from millstream.integrations._table_files import common_schema
from millstream.plan.ordering import Ordering
from millstream.reading.contracts import PyTree
from millstream.text.errors import needs, require_int

if TYPE_CHECKING:
    import pyarrow


class ArrowSource(ChunkedSource):
    """The rows of a pyarrow `Table`, or of Arrow IPC files (also known as Feather), which are mapped into memory.

    Columns are used where they lie; only bools, compressed batches and files of other machines are unpacked, and kept
    up to `cache_bytes`. Numbers and bools stay what they are; tensors and lists of numbers, which must all have one
    length, become arrays. A missing value is refused by name, and so is a file that changes while it is read.

    Example:
        >>> import pyarrow as pa, pyarrow.feather
        >>> from millstream.integrations.arrow import ArrowSource
        >>> table = pa.table({"wind": [3.5, 4.5, 5.5], "town": ["Ulm", "Bonn", "Kiel"]})
        >>> ArrowSource(table, columns=["wind"]).read(np.array([2, 0]))
        {'wind': array([5.5, 3.5], dtype=float32)}
        >>> pyarrow.feather.write_feather(table, "weather.arrow", compression="uncompressed")
        >>> source = ArrowSource("weather.arrow", row_fn=lambda row: {"letters": np.int32(len(row["town"]))})
        >>> source.read(np.array([0, 1]))["letters"].tolist()
        [3, 4]

    Args:
        data: A `Table` or `RecordBatch`; or a path, an address, a folder, a pattern such as "data/*.arrow", or a list
            of them. Files of a folder or a pattern come in the order of their names.
        columns: The columns to read; all of them by default.
        row_fn: Makes a sample of a row, a dict of Python's own values; for text, dates, missing values, and lists of
            any length.
        cache_bytes: How much unpacked data to keep, in each process.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
    """

    def __init__(
        self,
        data: "pyarrow.Table | pyarrow.RecordBatch | Paths",
        columns: Sequence[str] | None = None,
        *,
        row_fn: Callable[[Row], PyTree] | None = None,
        cache_bytes: int = 512 << 20,
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
    ) -> None:
        who = "ArrowSource"
        with needs(who, "pyarrow", "parquet"):
            import pyarrow as pa
        super().__init__(who, ordering, prefetch_size, row_fn)
        require_int(who, "cache_bytes", cache_bytes, least=0)
        if isinstance(data, pa.Table | pa.RecordBatch):
            given: Any = data
            table = given.select(chosen_columns(who, given.schema.names, columns))
            batches = table.to_batches() if isinstance(table, pa.Table) else [table]
            self._settle_on(table.schema, _Batches(batches, self._contents))
            return
        files = [DataFile(who, path) for path in find_files(who, data, [".arrow", ".feather", ".ipc"])]
        opened = [IpcFile(file) for file in files]
        schema = common_schema(who, [file.name for file in files], [file.schema for file in opened], columns)
        self._settle_on(schema, IpcBatches(files, opened, schema.names, self._contents, cache_bytes))


class _Batches:
    """Record batches in memory, made into arrays when they are first needed.

    Args:
        batches: The batches.
        contents: `contents([number], batch)` makes of a batch what is kept of it.
    """

    def __init__(self, batches: Sequence[Any], contents: Callable[[list[int], Any], Any]) -> None:
        self._batches = batches
        self.sizes: list[int] = [batch.num_rows for batch in batches]
        self._make_contents = contents
        self._made: dict[int, Any] = {}

    def __getstate__(self) -> tuple[np.ndarray, Any]:
        """The batches as bytes, which worker processes share, and which are none but theirs if the table is a slice."""
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._batches[0].schema) as stream:
            for batch in self._batches:
                stream.write_batch(batch)
        return np.frombuffer(sink.getvalue(), np.uint8), self._make_contents

    def __setstate__(self, state: tuple[np.ndarray, Any]) -> None:
        import pyarrow as pa

        stream, contents = state
        _Batches.__init__(self, list(pa.ipc.open_stream(pa.py_buffer(stream))), contents)

    def contents(self, numbers: Sequence[int]) -> Iterator[tuple[list[int], Any]]:
        for number in numbers:
            if number not in self._made:
                self._made[number] = self._make_contents([number], self._batches[number])
            yield [number], self._made[number]
