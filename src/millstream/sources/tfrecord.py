"""TFRecord files, without TensorFlow: records of bytes with checksums, and the messages that are usually in them."""

import struct
from collections.abc import Iterator
from typing import Literal

import numpy as np

from millstream.files.checksum import crc32c
from millstream.files.data_files import File, open_files
from millstream.files.file_index import file_index
from millstream.files.paths import Paths, find_files
from millstream.files.plan_folder import Plans, folder_of
from millstream.files.unpacked import unpacked
from millstream.plan.ordering import Ordering
from millstream.reading.contracts import PyTree
from millstream.sources.array import check_reading
from millstream.sources.example_message import decode_example
from millstream.sources.record_files import RecordFiles, RecordSource
from millstream.text.errors import require_choice

_CALLER = "TFRecordSource"
_HEAD = struct.Struct("<QI")  # of a record: how many bytes it has, and the checksum of these eight
_TAIL = struct.Struct("<I")  # the checksum of the bytes
_AROUND = _HEAD.size + _TAIL.size
_AHEAD = 64 << 10  # bytes that are read at a time where records are looked for
_TOGETHER = 1 << 14  # records that are found at a time


class TFRecordSource(RecordSource):
    """The records of TFRecord files, in any order. TensorFlow is not needed.

    Files are looked through once, when the source is built; then any record is read by its place. Both of its checksums
    are compared. With the package crc32c this takes next to no time; without it, 10 ms per megabyte.

    Example:
        >>> import struct
        >>> from millstream.files.checksum import crc32c
        >>> def masked(data):
        ...     crc = crc32c(data)
        ...     return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
        >>> with open("words.tfrecord", "wb") as file:
        ...     for word in (b"oats", b"rye"):
        ...         length = struct.pack("<Q", len(word))
        ...         _ = file.write(length + masked(length) + word + masked(word))
        >>> source = ms.sources.TFRecordSource("words.tfrecord")
        >>> len(source), source[1]
        (2, b'rye')

    Args:
        paths: A file, a folder, a pattern such as "train-*.tfrecord", an address, or a list of such. Files packed with
            gzip or zstd are unpacked once, into the folder `plans`.
        parse: "bytes" leaves records as they are, for a function: `source.map(fn)`. "example" reads each as a
            `tf.train.Example`: a dict with an array of int64 or float32, or a list of bytes, for each feature.
        plans: Where the places of records and unpacked files are kept: a folder, or `ms.views.plans(folder)`; by
            default in memory. Packed files need it.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
    """

    def __init__(
        self,
        paths: Paths,
        parse: Literal["bytes", "example"] = "bytes",
        *,
        plans: Plans = None,
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
    ) -> None:
        check_reading(_CALLER, ordering, prefetch_size)
        require_choice(_CALLER, "parse", parse, ("bytes", "example"))
        self._parse = parse
        folder = folder_of(_CALLER, plans)
        files = open_files(_CALLER, find_files(_CALLER, paths, (".tfrecord", ".tfrecords")))
        plain = [file if _is_plain(file) else unpacked(_CALLER, file, folder) for file in files]
        names = [file.name for file in files]
        bounds = [
            file_index(_CALLER, file, "records", _bounds(file, name), folder)
            for file, name in zip(plain, names, strict=True)
        ]
        records = RecordFiles(_CALLER, plain, bounds, names)
        if not len(records):
            raise ValueError(f"{_CALLER} needs at least one record. {names[0]} has none.")
        super().__init__(records, files, ordering, prefetch_size)

    def _sample(self, index: int, record: bytes) -> PyTree:
        data = record[_HEAD.size : -_TAIL.size]
        if not _is_head(record[: _HEAD.size], len(data)) or _masked(data) != _TAIL.unpack(record[-_TAIL.size :])[0]:
            raise ValueError(f"{self._place(index)} does not match its checksum. The file is damaged; get it again.")
        if self._parse == "bytes":
            return data
        try:
            return decode_example(data)
        except ValueError as error:
            raise ValueError(
                f"{self._place(index)} is not a tf.train.Example: {error}. Leave parse= out, and read it yourself."
            ) from None

    def _place(self, index: int) -> str:
        name, number, start = self._records.place(index)
        return f"{name}, record {number}, at byte {start},"


def _masked(data: bytes) -> int:
    """The checksum as the format has it, so that checksums of checksums do not cancel out."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _is_head(head: bytes, length: int | None = None) -> bool:
    """Whether these bytes begin a record, of this length."""
    if len(head) < _HEAD.size:
        return False
    claimed, crc = _HEAD.unpack(head)
    return length in (None, claimed) and _masked(head[:8]) == crc


def _is_plain(file: File) -> bool:
    return _is_head(file.read_at(0, min(_HEAD.size, file.size)))


def _bounds(file: File, name: str) -> Iterator[tuple[int, np.ndarray]]:
    """Where every record begins, and where the last one ends; only their heads are looked at."""
    at, first, data, found = 0, 0, b"", []
    while at < file.size:
        if at + _HEAD.size > first + len(data):
            first, data = at, file.read_at(at, min(_AHEAD, file.size - at))
        head = data[at - first : at - first + _HEAD.size]
        if len(head) == _HEAD.size and not _is_head(head):
            raise _damaged(name, at, "there is no record: its length does not match its checksum")
        length = _HEAD.unpack(head)[0] if len(head) == _HEAD.size else 0
        if at + _AROUND + length > file.size:
            raise _damaged(name, at, f"a record of {length} bytes begins, and {file.size - at} bytes are left")
        found.append(at)
        at += _AROUND + length
        if len(found) == _TOGETHER:
            yield at, np.array(found, np.int64)
            found = []
    yield at, np.array([*found, at], np.int64)


def _damaged(name: str, at: int, found: str) -> ValueError:
    return ValueError(
        f"{_CALLER} cannot read {name}: at byte {at} {found}. The file is not a TFRecord file, is cut short or damaged."
    )
