"""The files of a table, opened anew for every reading."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from millstream.files.data_files import FileStream, LocalFile, open_file


class DataFile:
    """A file that pyarrow reads, and that must stay what it is. It is open only while it is read.

    Args:
        who: Who speaks in errors.
        path: Its path or address.
    """

    def __init__(self, who: str, path: str | os.PathLike[str]) -> None:
        self._file = open_file(who, path)
        self.name = self._file.name

    @property
    def is_remote(self) -> bool:
        """Whether it is on another machine."""
        return not isinstance(self._file, LocalFile)

    @contextlib.contextmanager
    def opened(self, *, mapped: bool = False) -> Iterator[Any]:
        """The file, for pyarrow; `FileChanged` if it has become another one before the end of the block.

        Args:
            mapped: Whether a file of this machine is mapped into memory. What is read of it then stays valid.
        """
        import pyarrow as pa

        if not isinstance(self._file, LocalFile):
            yield FileStream(self._file)
            return
        self._file.check()
        path = str(self._file.path)
        try:
            with pa.memory_map(path) if mapped else pa.OSFile(path) as stream:
                yield stream
        finally:
            self._file.check()  # which says more than whatever pyarrow made of a file that has changed

    def check(self) -> None:
        """Refuse to go on if it has changed; for those who read it by a map that they keep."""
        if isinstance(self._file, LocalFile):
            self._file.check()


@contextlib.contextmanager
def readable(kind: str, file: DataFile) -> Iterator[None]:
    """Around what pyarrow does with a file: what it cannot make sense of is said to be damaged.

    Args:
        kind: What the file should be.
        file: The file.
    """
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, UnicodeError, OSError) as error:
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
            raise  # it says more: a file that has changed, a server that does not answer, too many open files
        raise ValueError(
            f"{file.name} is damaged, cut short, or no {kind} file: {error}. Get it again, or write it again."
        ) from None
