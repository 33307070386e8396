"""Pieces of remote files on disk: bounded, shared by all processes of a user, never half of a piece.

Every piece is a file of its own, with a checksum, under a name that is a hash of what it is a piece of. It gets its
name when it is written, so readers need no lock. Writers hold one: they count what is there, and remove what was not
used for the longest time before the limit is passed. The count is on disk before the piece, so a writer that is killed
makes it too high, never too low; the next look at the folder puts it right.
"""

import collections
import contextlib
import functools
import os
import pathlib
import re
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Iterator, Mapping

from millstream.files.atomic import written
from millstream.files.lock import locked
from millstream.files.safe_path import open_plain, plain_reader, require_trust
from millstream.text.errors import require_posix

_MAGIC = b"msblock1"
_HEAD = len(_MAGIC) + 4  # and the CRC-32 of what follows
_FOLDER = re.compile(r"[0-9a-f]{2}")
_NAME = re.compile(r"[0-9a-f]{40}-\d+")
_PART = re.compile(r"\.[0-9a-f]{40}-\d+\.[0-9a-f]{32}\.part")
_PART_SECONDS = 3600.0  # no writer is at one piece for so long
_LOCK_SECONDS = 2.0
_TOUCH_SECONDS = 60.0
_KNOWN = 1 << 16


class FileCache:
    """A folder of pieces.

    Args:
        folder: Where; it is made for this user alone if it is not there.
        limit: The most bytes of all pieces together.
    """

    def __init__(self, folder: pathlib.Path, limit: int) -> None:
        require_posix("The cache of remote files", "download the files first, or use WSL")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_trust(folder, "The cache of remote files", own="cache_folder")
        self.folder = folder
        self.limit = limit
        self._writing = threading.Lock()
        self._unwritten: collections.deque[Mapping[str, bytes]] = collections.deque()  # of threads that wait
        self._wanted: collections.Counter[tuple[str, int]] = collections.Counter()
        self._counting = threading.RLock()  # a finalizer may run while it is held
        self._wanted_bytes = 0
        self._known: dict[str, float] = {}  # whose checksum was right, and when that was last said to the disk

    @property
    def has_room(self) -> bool:
        """Whether all files that this process reads through it fit: if not, they would only drive each other out."""
        return 2 * self._wanted_bytes <= self.limit

    def want(self, file: object, name: str, size: int) -> None:
        """Count a file as one that is read through the cache, as long as it is in use.

        Args:
            file: The object that reads it.
            name: The beginning of the names of its pieces.
            size: Its bytes.
        """
        self._count((name, size), 1)
        weakref.finalize(file, self._count, (name, size), -1).atexit = False

    def _count(self, file: tuple[str, int], change: int) -> None:
        with self._counting:
            was = self._wanted[file] > 0
            self._wanted[file] += change
            self._wanted_bytes += file[1] * ((self._wanted[file] > 0) - was)
            if not self._wanted[file]:
                del self._wanted[file]

    def knows(self, name: str) -> bool:
        """Whether this process has read or written a piece lately."""
        return name in self._known

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes | None:
        """A part of a piece, or all of it; None if the piece is not there or was damaged, and is now gone."""
        path = self._path(name)
        try:
            handle = open_plain(path)
        except OSError:
            return None
        try:
            if name not in self._known and not _is_whole(os.pread(handle, os.fstat(handle).st_size, 0)):
                os.unlink(path)  # left by a power cut
                return None
            size = os.fstat(handle).st_size - _HEAD - start if size is None else size
            data = os.pread(handle, size, _HEAD + start)
        except OSError:
            return None
        finally:
            os.close(handle)
        self._touch(name, path)
        return data if len(data) == size else None

    def write(self, pieces: Mapping[str, bytes]) -> None:
        """Keep these pieces, if they fit at all. A disk that is full or gone is warned about, once.

        What several threads write at the same time, one of them writes for all: the lock and the count take most of
        the time where pieces are small.
        """
        if _sizes(pieces) > self.limit:
            return
        self._unwritten.append(pieces)
        with self._writing:
            due: dict[str, bytes] = {}
            while self._unwritten and (not due or _sizes(due) + _sizes(self._unwritten[0]) <= self.limit // 8):
                due.update(self._unwritten.popleft())
            if due:  # else another thread has written them
                self._write(due)

    def _write(self, pieces: Mapping[str, bytes]) -> None:
        try:
            # A lock that is not to be had is no reason to wait: the bytes are in hand.
            with contextlib.suppress(TimeoutError), locked(self.folder / ".lock", _LOCK_SECONDS):
                self._make_room(_sizes(pieces))
                for name, data in pieces.items():
                    path = pathlib.Path(self._path(name))
                    path.parent.mkdir(mode=0o700, exist_ok=True)
                    with written(path, alone=False, durable=False) as file:
                        file.write(_MAGIC + zlib.crc32(data).to_bytes(4, "little"))
                        file.write(data)
        except OSError as error:
            _warn_once(f"The cache of remote files cannot write to {self.folder}: {error}. Files are read without it.")

    @contextlib.contextmanager
    def alone(self, name: str, seconds: float) -> Iterator[None]:
        """Keep other processes from asking for the same; if one has begun, wait for it, `seconds` at most."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # a disk without locks, or one that is full, costs a request
                stack.enter_context(locked(self.folder / f".asking-{name}", seconds))
            yield

    def _path(self, name: str) -> str:
        return f"{self.folder}/{name[:2]}/{name}"

    def _touch(self, name: str, path: str) -> None:
        now = time.monotonic()
        if now - self._known.get(name, -_TOUCH_SECONDS) < _TOUCH_SECONDS:
            return
        if len(self._known) >= _KNOWN:
            self._known.clear()
        self._known[name] = now
        with contextlib.suppress(OSError):
            os.utime(path)

    def _make_room(self, needed: int) -> None:
        counter = self.folder / ".used"
        try:
            with plain_reader(counter) as file:
                used = int(file.read(64))
        except (OSError, ValueError):
            used = self.limit
        if used + needed > self.limit:
            used = self._remove_oldest(needed)
        with written(counter, alone=False, durable=False) as file:
            file.write(str(used + needed).encode())

    def _remove_oldest(self, needed: int) -> int:
        """Look at all pieces, remove some if there are too many bytes, and say how many are left."""
        found, total = [], 0
        for folder in filter(_FOLDER.fullmatch, os.listdir(self.folder)):
            for entry in os.scandir(self.folder / folder):
                with contextlib.suppress(FileNotFoundError):  # who finds a damaged piece removes it at once
                    stat = entry.stat()
                    if _NAME.fullmatch(entry.name):
                        total += stat.st_size
                        found.append((stat.st_mtime_ns, stat.st_size, entry.path))
                    elif _PART.fullmatch(entry.name) and stat.st_mtime < time.time() - _PART_SECONDS:
                        os.unlink(entry.path)  # of a writer that was killed
        # More than is needed, so that not every piece has everything looked at.
        goal = self.limit - max(needed, self.limit // 8) if total + needed > self.limit else total
        for _, size, path in sorted(found):
            if total <= goal:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
        return total


def _sizes(pieces: Mapping[str, bytes]) -> int:
    return sum(len(data) + _HEAD for data in pieces.values())


def _is_whole(data: bytes) -> bool:
    return data[: len(_MAGIC)] == _MAGIC and data[len(_MAGIC) : _HEAD] == zlib.crc32(data[_HEAD:]).to_bytes(4, "little")


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=5)


_caches: dict[tuple[pathlib.Path, int], FileCache] = {}


def file_cache(folder: pathlib.Path, limit: int) -> FileCache:
    """The cache in a folder, one for all who ask in this process, also if threads ask at the same time."""
    found = _caches.get((folder, limit))
    return _caches.setdefault((folder, limit), FileCache(folder, limit)) if found is None else found
