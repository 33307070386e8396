"""Names that come from data and shall become paths, and folders that others can write to."""

import errno
import os
import pathlib
import re
import stat
from io import BufferedReader

# A pipe does not block; Windows would otherwise translate line ends.
_CAREFUL = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
_ODD = (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR)  # what opening a link, a pipe or a folder may say


class UnsafePath(ValueError):
    """A name that could lead out of the folder it belongs to."""


def safe_path(root: pathlib.Path, name: str, where: str) -> pathlib.Path:
    """`root / name`, if that stays in `root` on every system.

    Args:
        root: The folder to stay in.
        name: A relative path with `/`, from an archive or a list.
        where: What to say the name was found in.
    """
    parts = name.removesuffix("/").split("/")
    if (
        name.startswith("/")
        or any(part in ("", ".", "..") or part.endswith((" ", ".")) for part in parts)
        or re.search(r'[\x00-\x1f\\:*?"<>|]', name)
        or not (root / name).resolve().is_relative_to(root.resolve())
    ):
        raise UnsafePath(
            f"{where} names the file {name[:80]!r}. A name must be a plain relative path that stays in its folder; "
            "get the data from its publisher."
        )
    return root / name


def require_trust(folder: pathlib.Path, caller: str, own: str = "folder") -> None:
    """Refuse a folder that another user owns and anybody may write to.

    Args:
        folder: The folder, which need not be there.
        caller: The caller's name, for errors.
        own: What the user should give instead.
    """
    if not hasattr(os, "getuid") or not folder.exists():
        return
    found = folder.stat()
    if found.st_mode & stat.S_IWOTH and found.st_uid != os.getuid():
        raise PermissionError(
            f"{caller}: {folder} belongs to another user and anybody may write to it, so its files cannot be trusted. "
            f"Give a {own} of your own."
        )


class NotPlainFile(OSError):
    """Something else than a plain file has the name of a file of ours."""


def open_plain(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o600, *, follow: bool = False
) -> int:
    """Open a file that we have named, in a folder that others may have written to; its descriptor.

    A link, a pipe, a folder or a device in its place is refused: it would lead elsewhere, or never answer.

    Args:
        path: Where it is.
        flags: As `os.open` has them, but for `O_TRUNC`: what is there is looked at first.
        mode: The rights of a file that is made.
        follow: Whether a link to a plain file is good as well, because it is only read.
    """
    careful = _CAREFUL if follow else _CAREFUL | _NO_LINKS
    try:
        handle = os.open(path, flags | careful, mode)
    except OSError as error:
        raise _not_plain(path) if error.errno in _ODD else error from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _not_plain(path)
    return handle


def plain_reader(path: str | os.PathLike[str], *, follow: bool = False) -> BufferedReader:
    """A file that we have named, to read; see `open_plain`."""
    return open(open_plain(path, follow=follow), "rb")


def _not_plain(path: str | os.PathLike[str]) -> NotPlainFile:
    words = "Not a plain file, but a link, a pipe, a folder or a device. Delete it, or give a different folder"
    return NotPlainFile(errno.EINVAL, words, os.fspath(path))
