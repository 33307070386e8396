"""What a file claims to hold, checked against the bytes that are there before anything is mapped or allocated."""

import math
import os
import pathlib

import numpy as np

# Unpacked data may be this many times larger than packed; what is below the free size cannot hurt anybody.
RATIO = 200
FREE_BYTES = 16 << 20


def require_file(who: str, path: str | os.PathLike[str]) -> pathlib.Path:
    """The path, if a plain file is there: a pipe or a device would block or never end."""
    found = pathlib.Path(path)
    if not found.exists():
        raise FileNotFoundError(f"{who} needs a file that is there. {found} does not exist.")
    if not found.is_file():
        raise ValueError(f"{who} needs a plain file. {found} is a folder, a pipe or a device.")
    return found


def require_shape(name: str, dtype: np.dtype, shape: tuple[int, ...], available: int) -> None:
    """Refuse a shape that has no rows or does not fill the available bytes exactly."""
    if not shape or min(shape) < 1 or len(shape) > 32:
        raise ValueError(f"{name} needs at least one row of data, in 1 to 32 axes. Its header says shape {shape}.")
    claimed = math.prod(shape) * dtype.itemsize
    if claimed != available:
        raise ValueError(
            f"{name} does not hold what its header says: shape {shape} of {dtype} needs {claimed} bytes, "
            f"and {available} are there. The file is cut short or damaged; get it again."
        )


def require_ratio(name: str, unpacked: int, packed: int) -> None:
    """Refuse data that would unpack to far more than any honest file does."""
    if unpacked > max(FREE_BYTES, RATIO * packed):
        raise ValueError(
            f"{name} would unpack from {packed} to {unpacked} bytes. At most {RATIO} times as much is allowed; "
            "if you trust the file, unpack it yourself."
        )


def map_rows(path: pathlib.Path, dtype: np.dtype, shape: tuple[int, ...], offset: int, *, fortran: bool) -> np.ndarray:
    """A read-only view of the file's bytes; in memory and in this machine's byte order if the file's is the other."""
    mapped = np.memmap(path, dtype, "r", offset, shape, order="F" if fortran else "C").view(np.ndarray)
    return mapped if dtype.isnative else native(mapped)


def native(array: np.ndarray) -> np.ndarray:
    """The array read-only and in this machine's byte order."""
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    array.flags.writeable = False
    return array
