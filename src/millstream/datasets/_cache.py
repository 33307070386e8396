"""Where data sets keep their files."""

import hashlib
import os
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from millstream.datasets._download import RemoteFile, fetch
from millstream.files.atomic import written
from millstream.files.changed import Stamp
from millstream.files.lock import locked
from millstream.files.safe_path import require_trust
from millstream.files.user_cache import user_cache
from millstream.text.errors import require_path
from millstream.text.summaries import ArrayType, value_text

_VERSION = 1  # of what is made from the same files; counts up when that changes
_TIMEOUT = 600.0
CacheDir = str | os.PathLike[str] | None


def cache_arrays(
    folder: pathlib.Path, name: str, sources: Sequence[pathlib.Path], make: Callable[[], dict[str, np.ndarray]]
) -> pathlib.Path:
    """The `.npz` file of the arrays that `make` gives, written the first time.

    Args:
        folder: Where the file is kept.
        name: What it is called. Its name also tells which sources it was made from; others are then removed.
        sources: The files it is made from. If one of them changes, the arrays are made again.
        make: Makes the arrays.
    """
    # Without inodes, so that a folder that was restored, or is part of a container image, keeps its cache.
    stamps = ((str(path), Stamp.of(path)) for path in sources)
    facts = [_VERSION, *((path, stamp.size, stamp.mtime_ns) for path, stamp in stamps)]
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    final = folder / f"{name}-{key}.npz"
    if not final.exists():
        with locked(folder / f".{name}.lock", _TIMEOUT) as alone:
            if not final.exists():
                with written(final, alone=alone) as file:
                    np.savez(file, **make())  # pyright: ignore[reportArgumentType]
            for old in folder.glob(f"{name}-{'[0-9a-f]' * len(key)}.npz"):  # and no file of the user's own
                if old != final:
                    old.unlink(missing_ok=True)
    return final


class ArrayDataset:
    """Samples that are the rows of arrays.

    Args:
        arrays: The arrays by name. They are made read-only.
    """

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        for array in arrays.values():
            array.flags.writeable = False
        self._arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: array[index] for name, array in self._arrays.items()}

    def as_array_dict(self) -> dict[str, np.ndarray]:
        """The whole split as read-only arrays, ready for `ArraySampleSource`."""
        return dict(self._arrays)

    def __repr__(self) -> str:
        sample = {name: ArrayType(array.shape[1:], array.dtype) for name, array in self._arrays.items()}
        return f"{type(self).__name__}({len(self):,} samples, {value_text(sample)})"


def require_place(caller: str, name: str, place: CacheDir) -> None:
    """Refuse a folder or file that is neither a path nor None."""
    if place is not None:
        require_path(caller, f"{name} to be a path", place)


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
    caller: str, remote: RemoteFile, cache_dir: CacheDir, name: str, cyreal: str, files: tuple[str, ...] | None = None
) -> pathlib.Path:
    """A file of a data set: as it is if it is there, downloaded if not.

    Args:
        caller: The caller, in errors.
        remote: The file.
        cache_dir: Where the user keeps data sets; None for the usual place.
        name: The folder of the data set.
        cyreal: The folder in `~/.cache` that cyreal downloads it to.
        files: What the file may be called; by default as it is when it is downloaded.
    """
    found = find_file(cache_dir, name, (remote.name,) if files is None else files, cyreal)
    return fetch(caller, remote, cache_folder(cache_dir, name)) if found is None else found


def _place(cache_dir: CacheDir, name: str) -> pathlib.Path:
    base = user_cache() if cache_dir is None else cache_dir
    return pathlib.Path(base).expanduser() / name
