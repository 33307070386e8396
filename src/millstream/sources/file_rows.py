"""Rows of arrays that lie in files and are not mapped: read by position, or one file behind the other."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from millstream.files.data_files import File, LocalFile
from millstream.reading.dtypes import narrowed
from millstream.reading.host_source import take_rows as take_array_rows
from millstream.text.errors import noted


class FileRows(Protocol):
    """What takes the place of an array where there is none; its dtype is in this machine's byte order."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __len__(self) -> int: ...

    def take(self, caller: str, indices: np.ndarray, out: np.ndarray, first: int = 0) -> None:
        """Write the rows at `indices` into `out`, in the dtype that it has; row 0 is sample `first` in errors."""
        ...


@dataclasses.dataclass(frozen=True)
class RangedRows:
    """An array in a file, row after row from an offset, in the dtype that is stored there."""

    file: File
    stored: np.dtype
    shape: tuple[int, ...]
    offset: int

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def dtype(self) -> np.dtype:
        """In this machine's byte order."""
        return self.stored.newbyteorder("=")

    def take(self, caller: str, indices: np.ndarray, out: np.ndarray, first: int = 0) -> None:
        """Write the rows at `indices` into `out`; an error names the sample."""
        row = self.shape[1:]
        size = int(np.prod(row, dtype=np.int64)) * self.stored.itemsize
        numbers, done = indices.tolist(), 0
        try:
            for data in self.file.read_ranges([(self.offset + number * size, size) for number in numbers]):
                values = np.frombuffer(data, self.stored).reshape(row).astype(self.dtype, copy=False)
                out[done] = narrowed(f"{caller}: sample {first + numbers[done]}", values, out.dtype)
                done += 1
        except OSError as error:
            raise noted(error, f"This came from {caller} at sample {first + numbers[done]}.")  # noqa: B904

    def spans(self, indices: np.ndarray) -> Iterator[tuple[File, np.ndarray]]:
        """The file of these rows, and where they lie in it: start and size of each."""
        size = int(np.prod(self.shape[1:], dtype=np.int64)) * self.stored.itemsize
        yield self.file, np.stack([self.offset + indices * size, np.full(len(indices), size)], axis=1)

    def whole(self) -> np.ndarray:
        """All of it, in memory and in the file's own order of bytes."""
        size = int(np.prod(self.shape, dtype=np.int64)) * self.stored.itemsize
        return np.frombuffer(self.file.read_at(self.offset, size), self.stored)


@dataclasses.dataclass(frozen=True)
class ChainedRows:
    """Arrays, mapped or not, one after the other, with rows of one shape and dtype."""

    parts: Sequence[np.ndarray | FileRows]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all of them together."""
        return (len(self), *self.parts[0].shape[1:])

    @property
    def dtype(self) -> np.dtype:
        """Of each of them."""
        return self.parts[0].dtype

    def spans(self, indices: np.ndarray) -> Iterator[tuple[File, np.ndarray]]:
        """Each file of another machine, and where those of these rows lie in it: start and size."""
        begin = 0
        for part in self.parts:
            if isinstance(part, RangedRows):
                yield from part.spans(indices[(indices >= begin) & (indices < begin + len(part))] - begin)
            begin += len(part)

    def take(self, caller: str, indices: np.ndarray, out: np.ndarray, first: int = 0) -> None:
        """Write the rows at `indices` into `out`."""
        begin = 0
        for part in self.parts:
            rows = np.flatnonzero((indices >= begin) & (indices < begin + len(part)))
            if len(rows):
                chosen = np.empty((len(rows), *out.shape[1:]), out.dtype)
                take_rows(caller, part, indices[rows] - begin, chosen, first + begin)
                out[rows] = chosen
            begin += len(part)


def take_rows(caller: str, rows: np.ndarray | FileRows, indices: np.ndarray, out: np.ndarray, first: int = 0) -> None:
    """Write the rows at `indices` into `out`, in the dtype that it has; row 0 is sample `first` in errors."""
    if isinstance(rows, np.ndarray):
        take_array_rows(caller, rows, indices, out)
    else:
        rows.take(caller, indices, out, first)


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
