"""Files that must stay what they are while they are read, and how a change is noticed and reported."""

import os
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from millstream.errors import FileChanged
from millstream.text.errors import describe_value


class Stamp(NamedTuple):
    """What changes when a file is written to or replaced.

    The inode tells a file from one of the same size that replaced it within a tick of the file system's clock.
    """

    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, file: str | os.PathLike[str] | int) -> "Stamp":
        """The stamp of a path or an open descriptor; `ABSENT` if there is no such file."""
        try:
            found = os.stat(file)
        except (FileNotFoundError, NotADirectoryError):  # other failures say what they are
            return ABSENT
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


ABSENT = Stamp(0, 0, 0)


# A file's name, its size, and its time or version: other values for other contents, as far as is known without reading.
FileStamp = tuple[str, int, int | str]


def file_stamp(path: str | os.PathLike[str]) -> FileStamp:
    """The stamp of a file as others may keep it: without inode and folder, which a copy elsewhere does not share."""
    found = Stamp.of(path)
    return os.path.basename(path), found.size, found.mtime_ns


class WatchedFiles:
    """The stamps of files that another library reads; paths are kept absolute, for other processes."""

    def __init__(self, caller: str, paths: Iterable[str | os.PathLike[str]]) -> None:
        self._caller = caller
        self._stamps = {path: Stamp.of(path) for path in [os.path.abspath(path) for path in paths]}

    @property
    def stamps(self) -> tuple[FileStamp, ...]:
        """The stamps of the files, for others to keep."""
        return tuple(map(file_stamp, self._stamps))

    def check(self, indices: np.ndarray) -> None:
        """Raise `FileChanged` if any file has changed, with the samples that are being read."""
        for path, stamp in self._stamps.items():
            if Stamp.of(path) != stamp:
                raise file_changed(self._caller, path, f"noticed at {describe_samples(indices)}")


def file_changed(caller: str, name: str, detail: str = "", kind: str = "file") -> FileChanged:
    """The error for a file that is not what it was."""
    return FileChanged(
        f"{caller} reads {name}, and the {kind} has changed since it was opened{': ' if detail else ''}{detail}. "
        "Leave it alone while it is read, and build the source again."
    )


def file_unreadable(caller: str, name: str, indices: np.ndarray, error: Exception) -> FileChanged:
    """The error for a file whose reader failed at some samples."""
    return FileChanged(
        f"{caller} cannot read {name}, at {describe_samples(indices)}: {error}. The file has changed or is damaged; "
        "get it again, and build the source again."
    )


def describe_samples(indices: np.ndarray) -> str:
    """Name one sample or several."""
    return f"sample {indices[0]}" if len(indices) == 1 else f"samples {describe_value(indices.tolist())}"
