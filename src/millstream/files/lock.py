"""A lock between processes that ends with the process that holds it, however that dies."""

import contextlib
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator

from millstream.files.safe_path import open_plain

if sys.platform == "win32":
    import msvcrt

    def _try_lock(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _try_lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _silent() -> None:
    pass


@contextlib.contextmanager
def locked(
    path: pathlib.Path, timeout: float, waiting: Callable[[], None] = _silent, *, holder: bytes = b""
) -> Iterator[bool]:
    """Hold the lock in this block; False if the file system has no locks, and others may then be in theirs too.

    Args:
        path: The lock file. It is removed afterwards.
        timeout: Seconds to wait for another holder.
        waiting: Called once if there is one.
        holder: What the lock file says about its holder.
    """
    deadline, process = time.monotonic() + timeout, os.getpid()
    handle, held = _open(path), None
    try:
        while (held := _acquire(handle, path)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"Another process has held {path} for {timeout:g} seconds. Wait for it, or end that process."
                )
            waiting()
            waiting = _silent
            time.sleep(0.05)
            # The last holder may have removed the file that was opened here.
            before, handle = handle, _open(path)
            os.close(before)
        if holder and os.fstat(handle).st_nlink == 1:  # a file with a second name is somebody else's as well
            with contextlib.suppress(OSError):  # a disk may be full, and some systems let no locked file be written
                os.ftruncate(handle, 0)
                os.write(handle, holder)
        yield held
    finally:
        if held is not None and os.getpid() == process:  # a forked copy of the holder leaves the file alone
            with contextlib.suppress(OSError):
                path.unlink()
        os.close(handle)


def _open(path: pathlib.Path) -> int:
    return open_plain(path, os.O_RDWR | os.O_CREAT)


def _acquire(handle: int, path: pathlib.Path) -> bool | None:
    """True if the lock is held, None if another holder has it, False if there are no locks here."""
    try:
        _try_lock(handle)
    except (BlockingIOError, PermissionError):
        return None
    except OSError:
        return False
    try:
        return True if os.path.samestat(os.fstat(handle), path.lstat()) else None
    except FileNotFoundError:
        return None
