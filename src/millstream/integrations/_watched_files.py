"""Files that another library reads: whether they are still what they were when the source was built."""

import os
from collections.abc import Iterable

import numpy as np

from millstream.files.changed import FileChanged
from millstream.text.errors import describe_value

Stamp = tuple[int, int, int] | None


def stamp_of(path: str) -> Stamp:
    """What changes when a file is written to or replaced; None if there is none."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


class WatchedFiles:
    """Some files and what they were like.

    Args:
        who: Who speaks in errors.
        paths: Their names, which are kept absolute, for other processes.
    """

    def __init__(self, who: str, paths: Iterable[str | os.PathLike[str]]) -> None:
        self._who = who
        self._stamps = {name: stamp_of(name) for name in (os.path.abspath(path) for path in paths)}

    def check(self, indices: np.ndarray) -> None:
        """Refuse to go on if any of them has changed.

        Args:
            indices: The samples that are being read, for the error.
        """
        for name, stamp in self._stamps.items():
            if stamp_of(name) != stamp:
                raise changed(self._who, name, indices)


def changed(who: str, path: str, indices: np.ndarray) -> FileChanged:
    """What is raised for a file that is not what it was."""
    return FileChanged(
        f"{who} reads {path}, and the file has changed since the source was built. This was found at "
        f"{described(indices)}. Leave files alone while they are read, and build the source again."
    )


def described(indices: np.ndarray) -> str:
    """Samples in words."""
    return f"sample {indices[0]}" if len(indices) == 1 else f"samples {describe_value(indices.tolist())}"
