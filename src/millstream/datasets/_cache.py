"""Where data sets keep their files."""

import os
import pathlib
from typing import Any

from millstream.datasets._download import RemoteFile, fetch
from millstream.files.safe_path import require_trust
from millstream.files.user_cache import user_cache
from millstream.sources.array import check_ordering
from millstream.text.errors import require_int, require_path

CacheDir = str | os.PathLike[str] | None


def require_place(who: str, name: str, place: CacheDir) -> None:
    """Refuse a folder or file that is neither a path nor None."""
    if place is not None:
        require_path(who, f"{name} to be a path", place)


def require_reading(who: str, ordering: Any, prefetch_size: Any) -> None:
    """Refuse what a source of the data set would refuse, before a download."""
    check_ordering(who, ordering)
    require_int(who, "prefetch_size", prefetch_size, least=1)


def cache_folder(cache_dir: CacheDir, name: str) -> pathlib.Path:
    """The folder of one data set, made for this user alone if it is not there yet."""
    folder = _place(cache_dir, name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_trust(folder, "The data set cache", own="cache_dir")
    return folder


def find_file(cache_dir: CacheDir, name: str, files: tuple[str, ...], cyreal: str) -> pathlib.Path | None:
    """The first of these files that is in `cache_dir`, in the data set's folder, or where cyreal keeps it.

    Args:
        cache_dir: Where the user keeps data sets; None for the usual place.
        name: The folder of the data set.
        files: What the file may be called.
        cyreal: The folder in `~/.cache` that cyreal downloads it to, which is looked into if `cache_dir` is None.
    """
    folder = _place(cache_dir, name)
    require_trust(folder, "The data set cache", own="cache_dir")
    theirs = pathlib.Path("~/.cache").expanduser() / cyreal
    folders = [folder, theirs] if cache_dir is None else [pathlib.Path(cache_dir).expanduser(), folder]
    paths = (place / file for file in files for place in folders)
    found = next((path for path in paths if path.is_file() or path.is_dir()), None)
    if found is not None and found.is_relative_to(theirs):
        require_trust(theirs, "The data set cache of cyreal", own="cache_dir")
    return found


def find_or_fetch(
    who: str, remote: RemoteFile, cache_dir: CacheDir, name: str, cyreal: str, files: tuple[str, ...] | None = None
) -> pathlib.Path:
    """A file of a data set: as it is if it is there, downloaded if not.

    Args:
        who: The caller, in errors.
        remote: The file.
        cache_dir: Where the user keeps data sets; None for the usual place.
        name: The folder of the data set.
        cyreal: The folder in `~/.cache` that cyreal downloads it to.
        files: What the file may be called; by default as it is when it is downloaded.
    """
    found = find_file(cache_dir, name, (remote.name,) if files is None else files, cyreal)
    return fetch(who, remote, cache_folder(cache_dir, name)) if found is None else found


def _place(cache_dir: CacheDir, name: str) -> pathlib.Path:
    base = user_cache() if cache_dir is None else cache_dir
    return pathlib.Path(base).expanduser() / name
