"""Where data sets keep their files."""

import os
import pathlib
import stat


def cache_folder(cache_dir: str | os.PathLike[str] | None, name: str) -> pathlib.Path:
    """The folder of one data set, made for this user alone if it is not there yet."""
    folder = _place(cache_dir, name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_trust(folder)
    return folder


def find_file(cache_dir: str | os.PathLike[str] | None, name: str, files: tuple[str, ...]) -> pathlib.Path | None:
    """The first of these files that the user or an earlier run has put in `cache_dir` or in the data set's folder."""
    folder = _place(cache_dir, name)
    _require_trust(folder)
    folders = [folder] if cache_dir is None else [pathlib.Path(cache_dir).expanduser(), folder]
    paths = (place / file for file in files for place in folders)
    return next((path for path in paths if path.exists()), None)


def _place(cache_dir: str | os.PathLike[str] | None, name: str) -> pathlib.Path:
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "millstream") if cache_dir is None else cache_dir
    return pathlib.Path(base).expanduser() / name


def _require_trust(folder: pathlib.Path) -> None:
    if not hasattr(os, "getuid") or not folder.exists():
        return
    found = folder.stat()
    if found.st_mode & stat.S_IWOTH and found.st_uid != os.getuid():
        raise PermissionError(
            f"{folder} belongs to another user and anybody may write to it, so its files cannot be trusted. "
            "Give a cache_dir of your own."
        )
