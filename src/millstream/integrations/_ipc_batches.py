"""Record batches of Arrow IPC files."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from millstream.integrations._data_file import DataFile, readable
from millstream.integrations._file_chunks import FileChunks


class IpcBatches(FileChunks):
    """The record batches of files, which are mapped into memory if they are of this machine.

    Args:
        files: The files.
        opened: Each of them, opened.
        columns: The columns to read.
        contents: `contents([number], batch)` makes of a batch what is kept of it.
        limit: Bytes to keep of what cannot be used where it is mapped, because it is compressed or far away.
    """

    def __init__(
        self,
        files: Sequence[DataFile],
        opened: Sequence["IpcFile"],
        columns: Sequence[str],
        contents: Callable[[list[int], Any], Any],
        limit: int,
    ) -> None:
        self._columns = list(columns)
        super().__init__(files, [file.sizes() for file in opened], contents, limit)

    def _begin(self) -> None:
        super()._begin()
        self._readers: dict[int, IpcFile] = {}

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
            self._readers[file] = IpcFile(self._files[file], self._columns)
        return self._readers[file].batch(numbers[0])

    def _cost(self, file: int, contents: Any) -> int:
        return self._readers[file].own_bytes(contents)


class IpcFile:
    """An Arrow IPC file, mapped into memory or read from far away.

    Args:
        file: The file.
        columns: The columns to read; nothing for all.
    """

    def __init__(self, file: DataFile, columns: Sequence[str] = ()) -> None:
        self._file = file
        with readable("Arrow IPC", file), file.opened(mapped=True) as stream:
            # The map lives as long as somebody uses it; the descriptor is let go of at the end of the block.
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
