"""Arrow tables, and Arrow IPC files (Feather), as sources."""

import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from millstream.files import plain
from millstream.files.data_files import at_once, forget, read_at_once
from millstream.files.file_index import find_index, keep_index
from millstream.files.paths import Paths, find_files
from millstream.files.plan_folder import PlanFolder, folder_of
from millstream.integrations._chunked import ChunkedTable, as_columns, as_it_is, common_schema
from millstream.integrations._file_chunks import DataFile, FileChunks, Span, open_data_files, readable
from millstream.integrations._table import Row, TableSource, check_options, chosen_columns
from millstream.plan.ordering import Ordering
from millstream.reading.contracts import PyTree
from millstream.text.errors import needs, require_int


class _IpcBatches(FileChunks):
    """The record batches of files, which are mapped into memory if they are of this machine."""

    def __init__(
        self,
        files: Sequence[DataFile],
        opened: Sequence["_IpcFile | _RemoteIpcFile"],
        columns: Sequence[str],
        decode: Callable[[Any], Any],
        limit: int,
    ) -> None:
        self._columns = list(columns)
        self._remote = {number: file for number, file in enumerate(opened) if isinstance(file, _RemoteIpcFile)}
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

    def _spans(self, file: int, number: int) -> list[Span]:
        remote = self._remote[file]
        return [remote.blocks[number]] if remote.is_plain and remote.schema.names == self._columns else []

    def _read(self, file: int, numbers: list[int]) -> Any:
        for _, data in self._held(file, numbers):
            return self._remote[file].batch(data)
        if file not in self._readers:
            self._readers[file] = _IpcFile(self._files[file], self._columns)
        return self._readers[file].batch(numbers[0])

    def _cost(self, file: int, contents: Any) -> int:
        reader = self._readers.get(file)
        return super()._cost(file, contents) if reader is None else reader.own_bytes(contents)


class _RemoteIpcFile:
    """What the footer of an Arrow IPC file of another machine says: its schema, and where its record batches are.

    Args:
        file: The file.
        found: What `_find_batches` has found in it.

    Attributes:
        blocks: Start and size of each record batch.
        is_plain: Whether a batch can be read without others, which hold dictionaries.
    """

    def __init__(self, file: DataFile, found: np.ndarray) -> None:
        import pyarrow as pa

        self._name = file.name
        footer, self._sizes = plain.decode(found.tobytes())
        with readable("Arrow IPC", file):
            self.schema = pa.ipc.open_file(pa.BufferReader(_MAGIC + bytes(2) + footer)).schema
        self.blocks = [(start, head + body) for start, head, body in _blocks(footer, _BATCHES)]
        self.is_plain = not _blocks(footer, _DICTIONARIES)

    def sizes(self) -> list[int]:
        """How many rows each batch has."""
        return self._sizes.tolist()

    def batch(self, data: bytes) -> Any:
        """The record batch of a block."""
        import pyarrow as pa

        try:
            batch = pa.ipc.read_record_batch(pa.py_buffer(data), self.schema)
            batch.validate(full=True)  # a damaged file could point anywhere
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self._name} is damaged: {error}. Get it again, or write it again.") from None
        return batch


# The footer and the heads of messages are FlatBuffers: tables, which begin with the way back to a list of where their
# fields are. https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format
_MAGIC = b"ARROW1"
_TAIL = 64 << 10  # bytes at the end that hold most footers
_DICTIONARIES, _BATCHES = 2, 3  # fields of a footer
_HEADER_TYPE, _HEADER, _LENGTH = 1, 2, 0  # fields of a message, and of a record batch in it
_RECORD_BATCH = 3  # a type of message


def _find_batches(caller: str, files: Sequence[DataFile], folder: PlanFolder | None) -> list[np.ndarray]:
    """The end of each file from its footer on, and how many rows each batch has, in two rounds of requests for all."""
    found = [find_index(caller, file.file, "batches", folder) for file in files]
    new = [number for number, kept in enumerate(found) if kept is None]
    footers = at_once(lambda number: _footer(files[number]), new)
    heads = [
        (files[number].file, _in_footer(files[number], footer)) for number, footer in zip(new, footers, strict=True)
    ]
    encoded = [
        _encoded_sizes(caller, files[number], footer, data)
        for number, footer, data in zip(new, footers, read_at_once(heads), strict=True)
    ]
    keep = lambda pair: keep_index(caller, files[pair[0]].file, "batches", pair[1], folder)  # noqa: E731
    found_now = dict(zip(new, at_once(keep, list(zip(new, encoded, strict=True))), strict=True))
    return [found_now[number] if kept is None else kept for number, kept in enumerate(found)]


def _footer(file: DataFile) -> bytes:
    """The end of a file, from its footer on."""
    import pyarrow as pa

    source = file.file
    tail = source.tail or source.read_at(max(source.size - _TAIL, 0), min(source.size, _TAIL))
    size = int.from_bytes(tail[-10:-6], "little", signed=True) + 10
    if tail[-6:] != _MAGIC or not 10 < size <= source.size:
        raise ValueError(f"{file.name} is damaged, cut short, or no Arrow IPC file. Get it again, or write it again.")
    footer = tail[-size:] if size <= len(tail) else source.read_at(source.size - size, size - len(tail)) + tail
    with readable("Arrow IPC", file):
        pa.ipc.open_file(pa.BufferReader(_MAGIC + bytes(2) + footer))  # refuses a footer that points outside
    return footer


def _in_footer(file: DataFile, footer: bytes) -> list[Span]:
    """Where the heads of the batches of a file are."""
    with _undamaged(file):
        return [(start, head) for start, head, _ in _blocks(footer, _BATCHES)]


def _encoded_sizes(caller: str, file: DataFile, footer: bytes, heads: Sequence[bytes]) -> np.ndarray:
    with _undamaged(file):
        sizes = np.array([_rows(head) for head in heads], np.int64)
    return np.frombuffer(plain.encode((footer, sizes), caller), np.uint8)


@contextlib.contextmanager
def _undamaged(file: DataFile) -> Iterator[None]:
    try:
        yield
    except (struct.error, IndexError) as error:
        raise ValueError(f"{file.name} is damaged: {error}. Get it again, or write it again.") from None


def _blocks(footer: bytes, field: int) -> list[tuple[int, int, int]]:
    """Start, size of the head and size of the body of each block that a footer lists."""
    place = _field(footer, _at("<I", footer, 0), field)
    if not place:
        return []
    vector = place + _at("<I", footer, place)
    count = _at("<I", footer, vector)
    return [struct.unpack_from("<qi4xq", footer, vector + 4 + 24 * number) for number in range(count)]


def _rows(head: bytes) -> int:
    """How many rows the record batch has whose message begins like this."""
    table = 8 if head[:4] == b"\xff\xff\xff\xff" else 4  # files of old have no mark before the length
    table += _at("<I", head, table)
    kind, header = _field(head, table, _HEADER_TYPE), _field(head, table, _HEADER)
    if not kind or not header or head[kind] != _RECORD_BATCH:
        raise IndexError("there is no record batch where its footer says")
    length = _field(head, header + _at("<I", head, header), _LENGTH)
    return _at("<q", head, length) if length else 0


def _field(data: bytes, table: int, number: int) -> int:
    """Where a field of a table is; 0 if it has none."""
    fields = table - _at("<i", data, table)
    offset = _at("<H", data, fields + 4 + 2 * number) if 4 + 2 * number < _at("<H", data, fields) else 0
    return table + offset if offset else 0


def _at(form: str, data: bytes, place: int) -> int:
    if place < 0:
        raise IndexError("a position is before the beginning")
    return struct.unpack_from(form, data, place)[0]


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
            batch.validate(full=True)  # a damaged file could point anywhere
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
    files = open_data_files(caller, find_files(caller, paths, [".arrow", ".feather", ".ipc"]))
    folder, is_far = folder_of(caller, None), any(file.is_remote for file in files)
    found = iter(_find_batches(caller, [file for file in files if file.is_remote], folder)) if is_far else iter(())
    opened = [_RemoteIpcFile(file, next(found)) if file.is_remote else _IpcFile(file) for file in files]
    forget([file.file for file in files])
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
