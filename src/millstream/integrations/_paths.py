"""Paths that a source is given: one or several, folders and patterns."""

import glob
import os
import pathlib
from collections.abc import Sequence

from millstream.files.data_files import is_remote
from millstream.text.errors import describe_value, listed, require_path

Path = str | os.PathLike[str]
Paths = Path | Sequence[Path]


def listed_paths(who: str, paths: Paths) -> list[Path]:
    """One path or several, as a list.

    Args:
        who: Who speaks in errors.
        paths: What the user gave. A set is refused: it has no order, and samples are numbered by that of the files.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    found = listed(paths)
    if found is None or not all(isinstance(path, str | os.PathLike) for path in found):
        raise TypeError(f"{who} needs a path, or a list of paths. Got {describe_value(paths)}.")
    for path in found:
        require_path(who, "a path, or a list of paths", path)
    return found


def find_files(who: str, paths: Paths, suffixes: Sequence[str]) -> list[Path]:
    """The files that are meant, in an order that depends on their names alone.

    Args:
        who: Who speaks in errors.
        paths: A path, an address, a folder, a pattern such as "data/*.parquet", or several of them.
        suffixes: What names in a folder end with.
    """
    found = [file for path in listed_paths(who, paths) for file in _expanded(who, path, suffixes)]
    if not found:
        raise ValueError(f"{who} needs at least one file. Got an empty list of paths.")
    return found


def _expanded(who: str, path: Path, suffixes: Sequence[str]) -> Sequence[Path]:
    if is_remote(path) or os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        return sorted(glob.glob(os.fspath(path), recursive=True)) or [path]  # which is then said not to be there
    folder = pathlib.Path(path)
    found = [file for file in folder.rglob("*") if file.suffix in suffixes and file.is_file()]
    # Names of files and folders that start with a dot or an underscore belong to the programs that wrote the others.
    own = [file for file in found if not any(part[0] in "._" for part in file.relative_to(folder).parts)]
    if not own:
        raise FileNotFoundError(f"{who} needs files named {' or '.join(suffixes)} in {path}. There are none.")
    return sorted(own)
