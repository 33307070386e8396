"""Names that come from data and shall become paths, and folders that others can write to."""

import os
import pathlib
import re
import stat


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


def require_trust(folder: pathlib.Path, who: str, own: str = "folder") -> None:
    """Refuse a folder that another user owns and anybody may write to.

    Args:
        folder: The folder, which need not be there.
        who: Who speaks in errors.
        own: What the user should give instead.
    """
    if not hasattr(os, "getuid") or not folder.exists():
        return
    found = folder.stat()
    if found.st_mode & stat.S_IWOTH and found.st_uid != os.getuid():
        raise PermissionError(
            f"{who}: {folder} belongs to another user and anybody may write to it, so its files cannot be trusted. "
            f"Give a {own} of your own."
        )
