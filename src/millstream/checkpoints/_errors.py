"""What the file system says about checkpoints, with what was tried and what can be done."""

import contextlib
import errno
from collections.abc import Iterator

from millstream.errors import NoCheckpoint, StorageFailed

_FIXES = {
    "Close files, or raise the limit (ulimit -n).": (errno.EMFILE, errno.ENFILE),
    "Make room, or give a directory on a different disk.": (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    "Give a directory that this user may read and write.": (errno.EACCES, errno.EPERM, errno.EROFS),
}
_OTHER_FIX = "Check the disk, or give a different directory."


@contextlib.contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Raise what the file system says in this block as `StorageFailed`.

    Args:
        doing: What was tried, and where.
    """
    try:
        yield
    except (StorageFailed, NoCheckpoint):
        raise
    except OSError as error:
        raise storage_failed(doing, error) from error


def storage_failed(doing: str, error: OSError) -> StorageFailed:
    """An error of the file system, with what was tried and what can be done."""
    where = f" ({error.filename})" if isinstance(error.filename, str) else ""
    fix = next((words for words, numbers in _FIXES.items() if error.errno in numbers), _OTHER_FIX)
    words = f"{doing}: {error.strerror or error}{where}. Checkpoints that were there before are untouched. {fix}"
    return StorageFailed(words) if error.errno is None else StorageFailed(error.errno, words)
