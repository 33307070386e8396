"""The part of a download that has arrived."""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator

from millstream.files.safe_path import open_plain


class Unwritable(Exception):
    """The disk refused some bytes. No OSError, to be told apart from those of the connection."""


class Part:
    """A file under a temporary name, which grows from one attempt to the next.

    Args:
        path: Where it is.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    @property
    def size(self) -> int:
        """Bytes that have arrived."""
        return self.path.stat().st_size if self.path.exists() else 0

    def drop(self) -> None:
        """Forget them."""
        self.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def writer(self, start: int) -> Iterator[Callable[[bytes], None]]:
        """A function that writes bytes one after the other, from byte `start` on."""
        with _disk_errors():
            handle = open_plain(self.path, os.O_WRONLY | os.O_CREAT)
        try:
            with _disk_errors():
                os.ftruncate(handle, start)
                os.lseek(handle, start, os.SEEK_SET)

            def write(chunk: bytes) -> None:
                with _disk_errors():
                    while chunk:
                        chunk = chunk[os.write(handle, chunk) :]

            yield write
        finally:
            os.close(handle)


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unwritable(error.strerror) from error
