"""Files that are read in pieces: opened by name, here or in another process, and refused if they have changed since."""

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import io
import os
import pathlib
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from millstream.errors import FileChanged
from millstream.files.changed import FileStamp, Stamp, file_changed
from millstream.files.urls import shown
from millstream.text.errors import require_path, require_posix

_AT_ONCE = 128  # files of other machines that are opened at a time: 1,000 of them at 30 ms take a quarter of a second
_GAP = 64 << 10  # bytes between two wanted pieces that are rather thrown away than asked around
_TOGETHER = 8 << 20  # bytes that are asked for together
_NEAR, _RUN = 4 << 10, 1 << 20  # the same of a file of this machine
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_GONE = (FileNotFoundError, NotADirectoryError)  # other failures, such as too many open files, say what they are


@runtime_checkable
class File(Protocol):
    """A file of which any piece can be read, from several threads at once. A copy in another process opens it again.

    Attributes:
        name: As the user wrote it, for errors, without secrets.
        size: In bytes.
        tail: Its last bytes, if they came with its opening.
    """

    name: str
    size: int

    @property
    def tail(self) -> bytes: ...

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

    def kept(self, name: str) -> bytes | None:
        """What was found in it before and kept; None if nothing was, or if looking again is as quick."""
        ...

    def keep(self, name: str, data: bytes) -> None:
        """Keep what was found in it for later runs, if looking again would take longer."""
        ...


class LocalFile:
    """A file of this machine, open only while it is read, so that there can be thousands.

    A copy in another process has the stamp that the file must still have.
    """

    tail = b""

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
            for run in _runs(ranges):
                begin, end = run[0][0], sum(run[-1])
                data = self._read(handle, begin, end - begin)
                if len(run) == 1:
                    yield data
                else:
                    yield from (data[start - begin : start - begin + size] for start, size in run)
        finally:
            os.close(handle)

    def _read(self, handle: int, start: int, size: int) -> bytes:
        data = os.pread(handle, size, start)
        while len(data) < size and (more := os.pread(handle, size - len(data), start + len(data))):
            data += more  # the kernel gives 2 GB at most
        self._require(handle)  # after it, too: what is written in between is noticed
        if len(data) != size:
            raise self._changed()
        return data

    def check(self) -> None:
        """Raise `FileChanged` if the file has changed; for code that reads it by other means."""
        self._require(self._text)

    def close(self) -> None:
        pass  # it is open while it is read, and no longer

    def kept(self, name: str) -> bytes | None:
        return None

    def keep(self, name: str, data: bytes) -> None:
        pass  # who wants it kept has a folder for it

    def _require(self, file: str | int) -> None:
        if Stamp.of(file) != self._stamp:
            raise self._changed()

    def _changed(self) -> FileChanged:
        return file_changed(self._caller, self.name)


def _runs(ranges: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Ranges that follow each other in a file, together: reading 64 lines of 1.5 kB at once takes a fifth."""
    run: list[tuple[int, int]] = []
    for start, size in ranges:
        if run and not (0 <= start - sum(run[-1]) <= _NEAR and start + size - run[0][0] <= _RUN):
            yield run
            run = []
        run.append((start, size))
    if run:
        yield run


def require_file(caller: str, path: str | os.PathLike[str]) -> pathlib.Path:
    """The path, if a plain file is there: a pipe or a device would block or never end."""
    found = require_path(caller, "a path", path)
    if not found.exists():
        raise FileNotFoundError(f"{caller}: {found} does not exist.")
    if not found.is_file():
        raise ValueError(f"{caller} needs a plain file. {found} is a folder, a pipe or a device.")
    return found


class FileStream(io.RawIOBase):
    """A file as Python's own kind of file, for libraries that want one.

    Args:
        file: The file.
        held: Parts of it that are in memory, each with its position.
    """

    def __init__(self, file: File, held: Sequence[tuple[int, bytes]] = ()) -> None:
        self._source = file
        self._held = held
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
        position, self._position = self._position, self._position + size
        for start, data in self._held:
            if start <= position and position + size <= start + len(data):
                return data[position - start : position - start + size]
        return self._source.read_at(position, size) if size else b""


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
    return open_files(caller, [path])[0]


def open_files(caller: str, paths: Sequence[str | os.PathLike[str]], *, tail: bool = False) -> list[File]:
    """Files by their paths or addresses; those of other machines many at a time.

    Args:
        caller: The caller's name, for errors.
        paths: Where they are.
        tail: Whether their ends are read next, not their beginnings.
    """
    opening = _opening.get()
    known = [None if opening is None else next(opening.known, None) for _ in paths]
    new = [path for path, file in zip(paths, known, strict=True) if file is None]
    opened = iter(at_once(lambda path: _open(caller, path, tail), new, any(map(is_remote, new))))
    files = [next(opened) if file is None else file for file in known]
    if opening is not None:
        opening.files.extend(files)
    return files


def at_once(call: Callable[[_Item], _Result], items: Sequence[_Item], is_far: bool = True) -> list[_Result]:
    """What a function returns for each item, in order; if it waits for other machines, many of them at a time."""
    if not is_far or len(items) < 2:
        return [call(item) for item in items]
    with concurrent.futures.ThreadPoolExecutor(min(_AT_ONCE, len(items)), "millstream-open") as pool:
        try:
            return list(pool.map(call, items))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def read_at_once(wanted: Sequence[tuple[File, Sequence[tuple[int, int]]]]) -> list[list[bytes]]:
    """The bytes of spans of many files, all of them asked for at once; neighbours together."""
    runs: list[tuple[int, int, int]] = []  # file, start and end
    for number, (_, spans) in enumerate(wanted):
        for start, size in sorted(spans):
            if runs and runs[-1][0] == number and start - runs[-1][2] <= _GAP and start - runs[-1][1] <= _TOGETHER:
                runs[-1] = (number, runs[-1][1], max(runs[-1][2], start + size))
            else:
                runs.append((number, start, start + size))
    answers = at_once(lambda run: wanted[run[0]][0].read_at(run[1], run[2] - run[1]), runs)
    of_file: dict[int, list[tuple[int, bytes]]] = {}
    for (number, start, _), data in zip(runs, answers, strict=True):
        of_file.setdefault(number, []).append((start, data))
    return [[_cut(of_file[number], *span) for span in spans] for number, (_, spans) in enumerate(wanted)]


def _cut(runs: list[tuple[int, bytes]], start: int, size: int) -> bytes:
    first, data = next((first, data) for first, data in reversed(runs) if first <= start)
    return data[start - first : start - first + size]


_staging: contextvars.ContextVar[bool] = contextvars.ContextVar("millstream_staging", default=False)


@contextlib.contextmanager
def staging() -> Iterator[None]:
    """A block in which what is expected will be read by other processes: it is fetched to disk, or not at all."""
    token = _staging.set(True)
    try:
        yield
    finally:
        _staging.reset(token)


def is_staging() -> bool:
    """Whether other processes will read what is expected."""
    return _staging.get()


def expect(files: Sequence[File], numbers: np.ndarray, spans: np.ndarray, around: np.ndarray | None = None) -> None:
    """Say which spans will be read next, in order: those of other machines are fetched ahead, many at a time.

    Args:
        files: Some files.
        numbers: Which of them each span is in.
        spans: Start and size of each, (spans, 2).
        around: For each, the span of the same file around it that will be read soon, and is fetched as one.
    """
    remote = [number for number in np.unique(numbers).tolist() if not isinstance(files[number], LocalFile)]
    chosen = np.isin(numbers, remote) & (spans[:, 1] > 0)
    if chosen.any():
        from millstream.files.remote_file import expect_remote

        around = spans if around is None else around
        far: Any = files
        expect_remote(far, numbers[chosen], spans[chosen], around[chosen], in_memory=not is_staging())


def forget(files: Sequence[File]) -> None:
    """Expect nothing more, and hold nothing of the files in memory."""
    remote: list[Any] = [file for file in files if not isinstance(file, LocalFile)]
    if remote:
        from millstream.files.remote_file import forget_remote

        forget_remote(remote)


def _open(caller: str, path: str | os.PathLike[str], tail: bool) -> File:
    if is_remote(path):
        from millstream.files.remote_file import open_remote

        return open_remote(caller, path, tail=tail)  # pyright: ignore[reportArgumentType]
    if isinstance(path, str) and path.startswith("file://"):
        path = urllib.parse.unquote(urllib.parse.urlsplit(path).path)
    require_posix(caller, "read the files with a DiskSampleSource, or use WSL")
    return LocalFile(caller, path)
