"""Files that are read in pieces: opened by name, here or in another process, and refused if they have changed since."""

import contextlib
import contextvars
import dataclasses
import io
import os
import pathlib
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from millstream.errors import FileChanged
from millstream.files.changed import FileStamp, Stamp, file_changed
from millstream.files.urls import shown
from millstream.text.errors import require_path, require_posix

_GONE = (FileNotFoundError, NotADirectoryError)  # other failures, such as too many open files, say what they are


@runtime_checkable
class File(Protocol):
    """A file of which any piece can be read, from several threads at once. A copy in another process opens it again.

    Attributes:
        name: As the user wrote it, for errors, without secrets.
        size: In bytes.
    """

    name: str
    size: int

    @property
    def stamp(self) -> FileStamp:
        """Its name, size, and time or version."""
        ...

    def read_at(self, start: int, size: int) -> bytes:
        """Exactly that many bytes from a position on; `FileChanged` if they are not there any more."""
        ...

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """As `read_at` for each (start, size), in this order; what is far away is asked for together."""
        ...

    def close(self) -> None:
        """Close it; reading again opens it again."""
        ...


class LocalFile:
    """A file of this machine, open only while it is read, so that there can be thousands.

    A copy in another process has the stamp that the file must still have.
    """

    def __init__(self, caller: str, path: str | os.PathLike[str], stamp: Stamp | None = None) -> None:
        found = require_file(caller, path) if stamp is None else pathlib.Path(path)
        self.name, self._caller = str(path), caller
        self.path = found.absolute()
        self._text = os.fspath(self.path)
        self._stamp = Stamp.of(self._text) if stamp is None else stamp
        self.size = self._stamp.size
        if stamp is not None:
            self.check()

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalFile, (self._caller, self._text, self._stamp)

    @property
    def stamp(self) -> FileStamp:
        return self.path.name, self.size, self._stamp.mtime_ns

    def read_at(self, start: int, size: int) -> bytes:
        return next(self.read_ranges([(start, size)]))

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        try:
            handle = os.open(self._text, os.O_RDONLY)
        except _GONE:
            raise self._changed() from None
        try:
            self._require(handle)
            for start, size in ranges:
                data = os.pread(handle, size, start)
                while len(data) < size and (more := os.pread(handle, size - len(data), start + len(data))):
                    data += more  # the kernel gives 2 GB at most
                self._require(handle)  # after it, too: what is written in between is noticed
                if len(data) != size:
                    raise self._changed()
                yield data
        finally:
            os.close(handle)

    def check(self) -> None:
        """Raise `FileChanged` if the file has changed; for code that reads it by other means."""
        self._require(self._text)

    def close(self) -> None:
        pass  # it is open while it is read, and no longer

    def _require(self, file: str | int) -> None:
        if Stamp.of(file) != self._stamp:
            raise self._changed()

    def _changed(self) -> FileChanged:
        return file_changed(self._caller, self.name)


def require_file(caller: str, path: str | os.PathLike[str]) -> pathlib.Path:
    """The path, if a plain file is there: a pipe or a device would block or never end."""
    found = require_path(caller, "a path", path)
    if not found.exists():
        raise FileNotFoundError(f"{caller} needs a file that is there. {found} does not exist.")
    if not found.is_file():
        raise ValueError(f"{caller} needs a plain file. {found} is a folder, a pipe or a device.")
    return found


class FileStream(io.RawIOBase):
    """A file as Python's own kind of file, for libraries that want one."""

    def __init__(self, file: File) -> None:
        self._source = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._source.size}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self._read(len(view))
        view[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        return self._read(self._source.size)  # Python's own would ask for a few kilobytes at a time

    def _read(self, size: int) -> bytes:
        size = max(min(size, self._source.size - self._position), 0)
        data = self._source.read_at(self._position, size) if size else b""
        self._position += size
        return data


def buffered(file: File, size: int = 1 << 20) -> io.BufferedReader:
    """A file as Python's own kind of file, read that many bytes at a time."""
    return io.BufferedReader(FileStream(file), size)


def is_remote(path: object) -> bool:
    """Whether a path is the address of something on another machine."""
    return isinstance(path, str) and "://" in path and not path.startswith("file://")


def local_path(caller: str, path: str | os.PathLike[str]) -> pathlib.Path:
    """A path, for code that reads from this machine alone: an address is refused as one, not as a missing file."""
    found = require_path(caller, "a path", path)
    if is_remote(path):
        raise ValueError(
            f"{caller} reads from this machine alone. Got the address {shown(str(path))}. Copy what is there, and give "
            "the path of the copy."
        )
    return found


@dataclasses.dataclass
class _Opening:
    """Files that are opened in a block, or were, elsewhere, and are taken again."""

    files: list[File]
    known: Iterator[File]


_opening: contextvars.ContextVar[_Opening | None] = contextvars.ContextVar("millstream_opening", default=None)


@contextlib.contextmanager
def recorded(known: Sequence[File] = ()) -> Iterator[list[File]]:
    """The files that are opened in this block, in order.

    Args:
        known: What they are, from another process that has opened the same, with their versions and rights.
    """
    opening = _Opening([], iter(known))
    token = _opening.set(opening)
    try:
        yield opening.files
    finally:
        _opening.reset(token)


def open_file(caller: str, path: str | os.PathLike[str]) -> File:
    """A file by its path, or by an address such as `s3://`, `gs://` or `https://`."""
    opening = _opening.get()
    if opening is None:
        return _open(caller, path)
    known = next(opening.known, None)
    opening.files.append(_open(caller, path) if known is None else known)
    return opening.files[-1]


def _open(caller: str, path: str | os.PathLike[str]) -> File:
    if is_remote(path):
        from millstream.files.remote_file import open_remote

        return open_remote(caller, str(path))
    if isinstance(path, str) and path.startswith("file://"):
        path = urllib.parse.unquote(urllib.parse.urlsplit(path).path)
    require_posix(caller, "read the files with a DiskSampleSource, or use WSL")
    return LocalFile(caller, path)
