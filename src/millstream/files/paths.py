"""Paths as users give them: one or several, folders, patterns, addresses."""

import glob
import os
import pathlib
import re
from collections.abc import Sequence

from millstream.files.data_files import is_remote
from millstream.text.errors import describe_value, listed, require_path

Path = str | os.PathLike[str]
Paths = Path | Sequence[Path]


def listed_paths(caller: str, paths: Paths) -> list[Path]:
    """One path or several, as a list. A set is refused: samples are numbered in the order of the files."""
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    found = listed(paths)
    if found is None or not all(isinstance(path, str | os.PathLike) for path in found):
        raise TypeError(f"{caller} needs a path, or a list of paths. Got {describe_value(paths)}.")
    for path in found:
        require_path(caller, "a path, or a list of paths", path)
    return found


def find_files(caller: str, paths: Paths, suffixes: Sequence[str]) -> list[Path]:
    """The files of paths, addresses, folders or patterns, in an order that depends on their names alone."""
    found = [file for path in listed_paths(caller, paths) for file in _expanded(caller, path, suffixes)]
    if not found:
        raise ValueError(f"{caller} needs at least one file. Got an empty list of paths.")
    return found


def is_listed(path: Path) -> bool:
    """Whether a path is the address of many files: of a folder, or a pattern. Only * makes one, names may have a ?."""
    return isinstance(path, str) and is_remote(path) and ("*" in path or path.endswith("/"))


def list_remote(caller: str, path: str, suffixes: Sequence[str]) -> Sequence[Path]:
    """The files of a folder or pattern on another machine, in the order of their names."""
    from millstream.files.remote_file import list_addresses

    beginning = path.partition("*")[0]
    found = sorted(list_addresses(caller, beginning))
    if beginning == path:
        own = [url for url in found if url.endswith(tuple(suffixes)) and not _is_hidden(url[len(path) :])]
    else:
        pattern = re.compile("".join(_PATTERNS.get(part, re.escape(part)) for part in re.split(r"(\*+/?)", path)))
        own = [url for url in found if pattern.fullmatch(url)]
    if not own:
        what = f"named {' or '.join(suffixes)} in" if beginning == path else "that fit"
        raise FileNotFoundError(f"{caller} needs files {what} {path}. There are none among the {len(found)} there.")
    return own


_PATTERNS = {"*": "[^/]*", "*/": "[^/]*/", "**": ".*", "**/": "(?:.*/)?"}


def _is_hidden(path: str) -> bool:
    """Whether a name of a file or folder starts with a dot or an underscore: they belong to the programs that wrote."""
    return any(part[:1] in ("", ".", "_") for part in path.split("/"))


def _expanded(caller: str, path: Path, suffixes: Sequence[str]) -> Sequence[Path]:
    if isinstance(path, str) and is_listed(path):
        return list_remote(caller, path, suffixes)
    if is_remote(path) or os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        return sorted(glob.glob(os.fspath(path), recursive=True)) or [path]  # which is then said not to be there
    folder = pathlib.Path(path)
    found = [file for file in folder.rglob("*") if file.name.endswith(tuple(suffixes)) and file.is_file()]
    # Names of files and folders that start with a dot or an underscore belong to the programs that wrote the others.
    own = [file for file in found if not any(part[0] in "._" for part in file.relative_to(folder).parts)]
    if not own:
        raise FileNotFoundError(f"{caller} needs files named {' or '.join(suffixes)} in {path}. There are none.")
    return sorted(own)
