"""Memory shared with worker processes by an inherited file descriptor: it has no name, so nothing is left behind."""

import errno
import io
import mmap
import os
import tempfile
from typing import cast

import numpy as np

from millstream.errors import SharedMemoryFull
from millstream.reading._settings import settings

_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)


class SharedFile:
    """A nameless file in memory that can grow. Arrays over it stay valid after it is closed.

    Args:
        what: What it is for, in errors.
        advice: How to need less of it.
    """

    def __init__(self, what: str, advice: str) -> None:
        self._what = what
        self._advice = advice
        self._file = _nameless_file()
        self.size = 0

    @property
    def fd(self) -> int:
        """Its descriptor."""
        return self._file.fileno()

    def grow(self, size: int) -> np.ndarray:
        """That many more bytes, as an array. They are reserved here: a page that is missing later would be a SIGBUS."""
        try:
            os.truncate(self.fd, self.size + size)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fd, self.size, size)
            memory = mmap.mmap(self.fd, size, offset=self.size)
        except OSError as error:
            os.truncate(self.fd, self.size)
            if error.errno not in _NO_ROOM:
                raise
            raise SharedMemoryFull(
                error.errno,
                f"{self._what} needs {_megabytes(self.size + size)} of shared memory, and there is not that much "
                f"({os.strerror(error.errno or 0)}; {self._free()}). {self._advice}",
            ) from None
        self.size += size
        return np.frombuffer(memory, np.uint8)

    def close(self) -> None:
        """Close the file; closing twice does no harm."""
        self._file.close()

    def _free(self) -> str:
        room = os.fstatvfs(self.fd)
        if room.f_blocks:
            return f"{_megabytes(room.f_bavail * room.f_frsize)} are free"
        return "the limit is one of this process, such as ulimit -f, or of its container"


def map_shared(fd: int, offset: int, size: int) -> np.ndarray:
    """A piece of a shared file, in the process that inherited it."""
    return np.frombuffer(mmap.mmap(fd, size, offset=offset), np.uint8)


def map_private(fd: int, size: int) -> np.ndarray:
    """The beginning of a shared file, in the process that inherited it; what it writes there, it alone sees.

    Where the kernel sets memory aside for all that might be written, and has not enough, nothing can be written.
    """
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        memory = mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:
        memory = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    return np.frombuffer(memory, np.uint8)


def _nameless_file() -> io.FileIO:
    if settings.shared_memory_folder is None and hasattr(os, "memfd_create"):
        return io.FileIO(os.memfd_create("millstream", os.MFD_CLOEXEC), "r+")
    return cast(io.FileIO, tempfile.TemporaryFile(buffering=0, dir=settings.shared_memory_folder))


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
