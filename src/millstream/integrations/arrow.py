"""Arrow tables, and Arrow IPC files (Feather), as sources."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from millstream.files.paths import Paths, find_files
from millstream.integrations._chunked import ChunkedTable, as_columns, as_it_is, common_schema
from millstream.integrations._file_chunks import DataFile, FileChunks, readable
from millstream.integrations._table import Row, TableSource, check_options, chosen_columns
from millstream.plan.ordering import Ordering
from millstream.reading.contracts import PyTree
from millstream.text.errors import needs, require_int


class _IpcBatches(FileChunks):
    """The record batches of files, which are mapped into memory if they are of this machine."""

    def __init__(
        self,
        files: Sequence[DataFile],
        opened: Sequence["_IpcFile"],
        columns: Sequence[str],
        decode: Callable[[Any], Any],
        limit: int,
    ) -> None:
        self._columns = list(columns)
        super().__init__(files, [file.sizes() for file in opened], decode, limit)

    def _begin(self) -> None:
        super()._begin()
        self._readers: dict[int, _IpcFile] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_readers": None}

    def contents(self, numbers: Sequence[int]) -> Iterator[tuple[list[int], Any]]:
        # A map shows what the file holds now, so it is looked at before and after rows are taken from it.
        files = [self._files[file] for file in {self._places[number][0] for number in numbers}]
        for file in files:
            file.check()
        yield from super().contents(numbers)
        for file in files:
            file.check()

    def _read(self, file: int, numbers: list[int]) -> Any:
        if file not in self._readers:
            self._readers[file] = _IpcFile(self._files[file], self._columns)
        return self._readers[file].batch(numbers[0])

    def _cost(self, file: int, contents: Any) -> int:
        return self._readers[file].own_bytes(contents)


class _IpcFile:
    """An Arrow IPC file, mapped into memory or read from far away."""

    def __init__(self, file: DataFile, columns: Sequence[str] = ()) -> None:
        self._file = file
        with readable("Arrow IPC", file), file.opened(mapped=True) as stream:
            # The map lives as long as somebody uses it; the descriptor is closed at the end of the block.
            self._memory = None if file.is_remote else stream.read_buffer()
            self._stream = stream
            self.schema = self._reader([]).schema
            self.schema.names  # noqa: B018 (which is where damaged names are found out)
            self._batches = self._reader([self.schema.get_field_index(name) for name in columns])

    def _reader(self, fields: list[int]) -> Any:
        """A reader that unpacks these columns and no others; all of them if none is said."""
        import pyarrow as pa

        stream = self._stream if self._memory is None else pa.BufferReader(self._memory)
        return pa.ipc.open_file(stream, options=pa.ipc.IpcReadOptions(included_fields=fields))

    def sizes(self) -> list[int]:
        """How many rows each batch has; the narrowest column tells."""
        widths = [_width(field.type) for field in self.schema]
        reader = self._reader([int(np.argmin(widths))])
        with readable("Arrow IPC", self._file):
            return [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]

    def batch(self, number: int) -> Any:
        """A record batch."""
        with readable("Arrow IPC", self._file):
            batch = self._batches.get_batch(number)
            batch.validate()  # a damaged file could point anywhere
            return batch

    def own_bytes(self, contents: Any) -> int:
        """The bytes of a batch, or of its arrays, that lie somewhere else than in the map."""
        arrays = contents.columns if hasattr(contents, "columns") else contents.values()
        return sum(0 if self._has(array) else array.nbytes for array in arrays)

    def _has(self, array: Any) -> bool:
        if self._memory is None:
            return False
        if hasattr(array, "buffers"):
            places = [buffer.address for buffer in array.buffers() if buffer is not None]
        else:
            places = [array.__array_interface__["data"][0]]
        start = self._memory.address
        return all(start <= place < start + self._memory.size for place in places)


def _width(kind: Any) -> float:
    """The bits of a value; without an end if they differ."""
    try:
        return kind.bit_width
    except ValueError:
        return float("inf")


if TYPE_CHECKING:
    import pyarrow


class ArrowSource(TableSource):
    """The rows of a pyarrow `Table`, or of Arrow IPC files (also known as Feather), which are mapped into memory.

    Columns are used where they lie; only bools, compressed batches and files of other machines are unpacked, and kept
    up to `cache_bytes`. Numbers and bools stay what they are, tensors and lists of numbers become arrays; text, gaps
    and the like stay Python's own values. A `HostMapTransform` gets lists of any length, and makes them equal. A file
    that changes while it is read is refused by name.

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
        row_fn: Makes a sample of a row, a dict of Python's own values.
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
        caller = "ArrowSource"
        with needs(caller, "pyarrow", "parquet"):
            import pyarrow as pa
        check_options(caller, ordering, prefetch_size, row_fn)
        require_int(caller, "cache_bytes", cache_bytes, least=0)
        decode = as_columns if row_fn is None else as_it_is
        if isinstance(data, pa.Table | pa.RecordBatch):
            given: Any = data
            table = given.select(chosen_columns(caller, given.schema.names, columns))
            batches = table.to_batches() if isinstance(table, pa.Table) else [table]
            chunks = _Batches(batches, decode)
        else:
            chunks = _open_files(caller, data, columns, decode, cache_bytes)
        super().__init__(caller, ChunkedTable(chunks), ordering, prefetch_size, row_fn)


def _open_files(
    caller: str, paths: Any, columns: Sequence[str] | None, decode: Callable[[Any], Any], limit: int
) -> _IpcBatches:
    """The record batches of files."""
    files = [DataFile(caller, path) for path in find_files(caller, paths, [".arrow", ".feather", ".ipc"])]
    opened = [_IpcFile(file) for file in files]
    schema = common_schema(caller, [file.name for file in files], [file.schema for file in opened], columns)
    return _IpcBatches(files, opened, schema.names, decode, limit)


class _Batches:
    """Record batches in memory, made into arrays when they are first needed."""

    def __init__(self, batches: Sequence[Any], decode: Callable[[Any], Any]) -> None:
        self._batches = batches
        self.sizes: list[int] = [batch.num_rows for batch in batches]
        self._decode = decode
        self._decoded: dict[int, Any] = {}

    def __getstate__(self) -> tuple[np.ndarray, Any]:
        """The batches as bytes, which worker processes share, and which are none but theirs if the table is a slice."""
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._batches[0].schema) as stream:
            for batch in self._batches:
                stream.write_batch(batch)
        return np.frombuffer(sink.getvalue(), np.uint8), self._decode

    def __setstate__(self, state: tuple[np.ndarray, Any]) -> None:
        import pyarrow as pa

        stream, decode = state
        _Batches.__init__(self, list(pa.ipc.open_stream(pa.py_buffer(stream))), decode)

    def contents(self, numbers: Sequence[int]) -> Iterator[tuple[list[int], Any]]:
        for number in numbers:
            if number not in self._decoded:
                self._decoded[number] = self._decode(self._batches[number])
            yield [number], self._decoded[number]
