"""A plan file: one array on disk, written as it is found and mapped when it is whole.

The first page has a record: what the array was made from, its dtype and length, how much of it is there, and checksums.
The array follows. While a file is made it has a temporary name, and two places in its page for the record, which are
written in turn: one of them is good whenever the process dies, and says from where on to continue.
"""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import re
import struct
import time
import zlib
from collections.abc import Iterator
from types import TracebackType
from typing import IO

import numpy as np

from millstream.files.safe_path import open_plain, plain_reader

VERSION = 1
_MAGIC = b"\x89MSPLAN\n"
_PAGE = 4096
_PLACES = (0, _PAGE // 2)
_RECORD = struct.Struct("<8sII32s8sQQI32sq")
_CHECKED = 12  # the first byte that the checksum of a record covers
_DTYPE = re.compile(rb"[<|][biuf][1248]\0{5}")
_INTERVAL = 1.0  # seconds between two records: what a killed process loses at most
_CHUNK = 1 << 20
_SMALL = 16 << 20  # bytes that are read at every opening, which takes 5 ms


class DamagedPlan(ValueError):
    """A file that does not hold the plan it is named after."""


@dataclasses.dataclass(frozen=True)
class _Record:
    """What a file says about itself.

    Attributes:
        of: The hash of what the array is made from.
        dtype: Of the array.
        rows: Its length.
        done: How many of its rows are written.
        crc: The CRC-32 of these rows.
        digest: The SHA-256 of the whole array, by which views compare their tables; zeros until it is whole.
        modified: When the whole file was written, in nanoseconds. Its time on disk is set to this, so that a file that
            was written to since is recognised without reading it.
    """

    of: bytes
    dtype: np.dtype
    rows: int
    done: int
    crc: int
    digest: bytes = bytes(32)
    modified: int = 0

    def pack(self) -> bytes:
        dtype = self.dtype.str.encode()
        fields = self.of, dtype, self.rows, self.done, self.crc, self.digest, self.modified
        packed = _RECORD.pack(_MAGIC, 0, VERSION, *fields)
        return packed[: _CHECKED - 4] + zlib.crc32(packed[_CHECKED:]).to_bytes(4, "little") + packed[_CHECKED:]

    @classmethod
    def unpack(cls, page: bytes) -> "_Record | None":
        """The record at the beginning of some bytes, if there is one."""
        if len(page) < _RECORD.size:
            return None
        magic, crc, version, of, dtype, *rest = _RECORD.unpack_from(page)
        good = magic == _MAGIC and version == VERSION and crc == zlib.crc32(page[_CHECKED : _RECORD.size])
        return cls(of, np.dtype(dtype.rstrip(b"\0").decode()), *rest) if good and _DTYPE.fullmatch(dtype) else None


def open_plan(path: pathlib.Path, of: bytes) -> tuple[np.ndarray, str]:
    """The array of a whole file, mapped and read-only, and its SHA-256.

    A small file is read and compared with its checksum, a large one only if it was written to after it was made.

    Args:
        path: The file. `FileNotFoundError` if it is not there, `DamagedPlan` if it is not whole, or something else.
        of: The hash of what the array has to be made from.
    """
    with plain_reader(path) as file:
        page, found = file.read(_PAGE), os.fstat(file.fileno())
        record = _Record.unpack(page)
        if record is None:
            raise DamagedPlan(f"{path} is not a plan file of this version, or its beginning is damaged.")
        if record.of != of:
            raise DamagedPlan(f"{path} is a plan file of something else.")
        size = _PAGE + record.rows * record.dtype.itemsize
        if found.st_size != size or record.done != record.rows or page[_RECORD.size :].strip(b"\0"):
            raise DamagedPlan(f"{path} is damaged: it has {found.st_size} bytes, and should have {size}.")
        if size <= _SMALL or found.st_mtime_ns != record.modified:
            crc = _crc_of(file, size - _PAGE)
            if crc != record.crc:
                raise DamagedPlan(f"{path} is damaged: its checksum is {crc}, and should be {record.crc}.")
    array = np.memmap(path, record.dtype, "r", _PAGE, (record.rows,))
    return array, record.digest.hex()


class PlanWriter:
    """A plan file while it is made. Rows are appended; a file that another process left is continued.

    Args:
        path: Its temporary name.
        of: The hash of what the array is made from.
        dtype: Of the array.
        rows: Its length.

    Attributes:
        done: How many rows are written.
    """

    def __init__(self, path: pathlib.Path, of: bytes, dtype: np.dtype, rows: int) -> None:
        self.path = path
        self._file = open(open_plain(path, os.O_RDWR | os.O_CREAT), "rb+")
        self._record = _Record(of, dtype.newbyteorder("<"), rows, 0, 0)
        found = self._found()
        self.done, self._crc = found.done, found.crc
        self._file.truncate(_PAGE + self.done * dtype.itemsize)
        self._file.seek(0, os.SEEK_END)
        self._place, self._next = 0, time.monotonic() + _INTERVAL
        self._save()

    def __enter__(self) -> "PlanWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            return self._file.close()
        with contextlib.suppress(OSError):  # of a full disk, which `error` tells of
            if not issubclass(kind, Exception):  # an interrupt: it can be continued from here
                self._save()
        with contextlib.suppress(OSError):
            self._file.close()

    def write(self, values: np.ndarray) -> None:
        """Append rows."""
        data = np.ascontiguousarray(values, self._record.dtype).view(np.uint8).data
        with self._naming():
            self._file.write(data)
        self._crc = zlib.crc32(data, self._crc)
        self.done += len(values)
        if time.monotonic() >= self._next:
            self._save()
            self._next = time.monotonic() + _INTERVAL

    def array(self) -> np.ndarray:
        """The rows so far, mapped."""
        self._file.flush()
        return np.memmap(self.path, self._record.dtype, "r", _PAGE, (self.done,))

    def finish(self) -> None:
        """Make it a whole file, to which only its name is missing."""
        assert self.done == self._record.rows
        self._file.seek(_PAGE)
        digest = hashlib.file_digest(self._file, "sha256").digest()
        # In whole seconds, which every file system and every copying program keeps.
        modified = int(time.time()) * 10**9
        whole = dataclasses.replace(self._record, done=self.done, crc=self._crc, digest=digest, modified=modified)
        self._file.seek(0)
        self._file.write(whole.pack().ljust(_PAGE, b"\0"))
        self._file.flush()
        os.utime(self.path, ns=(modified, modified))

    def _save(self) -> None:
        """Note durably how far it is: first the rows, then the record."""
        record = dataclasses.replace(self._record, done=self.done, crc=self._crc)
        with self._naming():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.seek(_PLACES[self._place])
            self._file.write(record.pack())
            self._file.flush()
            self._file.seek(0, os.SEEK_END)
        self._place = 1 - self._place

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Around writing: a full disk does not say which file it is."""
        try:
            yield
        except OSError as error:
            error.filename = str(self.path)
            raise

    def _found(self) -> _Record:
        """How far a process came with the same array that was killed before its end; otherwise the file is emptied."""
        page, own = self._file.read(_PAGE), self._record
        records = [record for place in _PLACES if (record := _Record.unpack(page[place:])) is not None]
        for record in sorted(records, key=lambda record: -record.done):
            same = (record.of, record.dtype, record.rows) == (own.of, own.dtype, own.rows)
            size = record.done * record.dtype.itemsize
            if same and record.done <= record.rows and _crc_of(self._file, size) == record.crc:
                return record
        self._file.truncate(0)
        return own


def _crc_of(file: IO[bytes], size: int) -> int | None:
    """The CRC-32 of the first bytes of the array; None if there are not that many."""
    file.seek(_PAGE)
    crc = 0
    while size:
        data = file.read(min(size, _CHUNK))
        if not data:
            return None
        crc, size = zlib.crc32(data, crc), size - len(data)
    return crc
