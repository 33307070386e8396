"""IDX, the format of MNIST and its kin: a magic number, the shape, then the numbers, big end first."""

import gzip
import math
import os
import zlib
from collections.abc import Mapping
from typing import IO, cast

import numpy as np

from millstream.files.data_files import File, buffered, open_file
from millstream.files.unpacked import require_ratio
from millstream.plan.ordering import Ordering
from millstream.reading.host_source import RowSource
from millstream.sources.array import check_reading
from millstream.sources.file_rows import RangedRows, map_rows, native, require_shape
from millstream.sources.file_source import OpenedRows
from millstream.text.errors import describe_value

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


class IdxSource(RowSource):
    """The rows of IDX files, which stay on disk until a batch needs them.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "labels-idx1-ubyte")
        ...     _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]))
        ...     IdxSource({"label": path}).read(np.array([2, 0]))["label"].tolist()
        [9, 7]

    Args:
        paths: Names and paths: `{"image": "train-images-idx3-ubyte", "label": "train-labels-idx1-ubyte.gz"}`. A
            `.gz` is unpacked into memory. Addresses (`s3://`, `https://`, ...) are read by the row.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
    """

    def __init__(
        self,
        paths: Mapping[str, str | os.PathLike[str]],
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
    ) -> None:
        if not isinstance(paths, Mapping):
            raise TypeError(f"IdxSource needs a mapping of names to paths. Got {describe_value(paths)}.")
        check_reading("IdxSource", ordering, prefetch_size)
        super().__init__(OpenedRows("IdxSource", _map_all, (dict(paths),)), ordering, prefetch_size)


def _map_all(paths: dict[str, str | os.PathLike[str]]) -> dict[str, np.ndarray | RangedRows]:
    return {name: _open_idx(path) for name, path in paths.items()}


def map_idx(path: str | os.PathLike[str]) -> np.ndarray:
    """The read-only array of an IDX file of this machine: mapped; in memory if packed, or of the other byte order."""
    rows = _open_idx(path)
    assert isinstance(rows, np.ndarray)
    return rows


def _open_idx(path: str | os.PathLike[str]) -> np.ndarray | RangedRows:
    file = open_file("IdxSource", path)
    if file.name.endswith(".gz"):
        return _unpacked(file)
    with buffered(file, 1 << 10) as stream:
        dtype, shape, length = _read_header(file.name, stream)
    require_shape(file.name, dtype, shape, file.size - length)
    return map_rows(file, dtype, shape, length)


def _read_header(name: str, file: IO[bytes]) -> tuple[np.dtype, tuple[int, ...], int]:
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _TYPES:
        raise ValueError(f"{name} is not an IDX file: it starts with {magic!r}. Get it again.")
    sizes = file.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise ValueError(f"{name} ends in the middle of its header. Get it again.")
    shape = tuple(int.from_bytes(sizes[at : at + 4], "big") for at in range(0, len(sizes), 4))
    return np.dtype(_TYPES[magic[2]]), shape, 4 + len(sizes)


def _unpacked(file: File) -> np.ndarray:
    name = file.name
    try:
        with buffered(file) as packed, gzip.open(packed) as stream:
            dtype, shape, _ = _read_header(name, cast(IO[bytes], stream))
            size = math.prod(shape) * dtype.itemsize
            require_ratio(name, size, file.size)
            rows = stream.read(size)
            require_shape(name, dtype, shape, len(rows) + len(stream.read(1)))
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{name} is damaged: {error}. Get it again.") from None
    return native(np.frombuffer(rows, dtype).reshape(shape))
