"""What a file claims to hold, checked against the bytes that are there before anything is mapped or allocated."""

import math

import numpy as np

from millstream.files.data_files import File, LocalFile
from millstream.sources.file_rows import RangedRows

# Unpacked data may be this many times larger than packed; what is below the free size cannot hurt anybody.
RATIO = 200
FREE_BYTES = 16 << 20


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


def map_rows(
    file: File, dtype: np.dtype, shape: tuple[int, ...], offset: int, *, fortran: bool = False
) -> np.ndarray | RangedRows:
    """The array in a file, read-only: mapped, or read row by row from another machine.

    It is in memory if its numbers have the other byte order here, or its rows do not lie together there.
    """
    if isinstance(file, LocalFile):
        mapped = np.memmap(file.path, dtype, "r", offset, shape, order="F" if fortran else "C").view(np.ndarray)
        return mapped if dtype.isnative else native(mapped)
    rows = RangedRows(file, dtype, shape, offset)
    return native(rows.whole().reshape(shape, order="F")) if fortran else rows


def native(array: np.ndarray) -> np.ndarray:
    """The array read-only and in this machine's byte order."""
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    array.flags.writeable = False
    return array
