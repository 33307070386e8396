"""Writing a file so that its name never stands for half of it."""

import contextlib
import os
import pathlib
import uuid
from collections.abc import Iterator
from typing import IO

from millstream.files.data_files import is_remote
from millstream.files.urls import shown
from millstream.text.errors import require_path


def require_place(caller: str, path: str | os.PathLike[str]) -> pathlib.Path:
    """The path of a file to write; a folder or an address is refused."""
    found = require_path(caller, "the path of a file", path)
    if is_remote(path):
        raise ValueError(
            f"{caller} writes to this machine alone. Got the address {shown(str(path))}. Give a path, and copy what is "
            "written there."
        )
    if found.is_dir():
        raise IsADirectoryError(f"{caller} needs the path of a file. {found} is a folder.")
    return found


def temporary_path(final: pathlib.Path, *, alone: bool) -> pathlib.Path:
    """Where a file is made before it gets its name.

    Args:
        final: The name it will get.
        alone: Whether this process has a lock on it. The temporary name is then always the same, so that what a
            killed process left behind is found and used or overwritten.
    """
    return final.with_name(f".{final.name}.part" if alone else f".{final.name}.{uuid.uuid4().hex}.part")


def settle(temporary: pathlib.Path, final: pathlib.Path) -> None:
    """Give a finished file its name: after the bytes are on the disk, and before anybody is told."""
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, final)
    sync_folder(final.parent)


def sync_folder(folder: pathlib.Path) -> None:
    """Wait until the names in a folder are on the disk, as far as the system can say so: not every one can open it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def written(final: pathlib.Path, *, alone: bool, durable: bool = True) -> Iterator[IO[bytes]]:
    """A file to write, which gets its name at the end of the block and vanishes if the block fails.

    Args:
        final: Its name.
        alone: Whether this process has a lock on it.
        durable: Whether to wait for the disk. Without that, a power cut may leave the name with half of the file, and
            its readers must be able to tell.
    """
    temporary = temporary_path(final, alone=alone)
    try:
        temporary.unlink(missing_ok=True)  # a link that was put there would lead elsewhere
        with temporary.open("xb") as file:
            yield file
        if durable:
            settle(temporary, final)
        else:
            os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)
