"""NumPy's own files, memory-mapped: `.npy`, and the members of a `.npz`. Nothing is ever unpickled."""

import ast
import dataclasses
import functools
import io
import math
import os
import re
import zipfile
import zlib
from typing import IO

import numpy as np

from millstream.files.data_files import File, buffered, open_file
from millstream.files.unpacked import require_ratio
from millstream.plan.ordering import Ordering
from millstream.reading.contracts import PyTree
from millstream.reading.host_source import RowSource
from millstream.sources.array import check_reading
from millstream.sources.file_rows import RangedRows, map_rows, native, require_shape
from millstream.sources.file_source import OpenedRows
from millstream.text.errors import describe_value

_MAGIC = b"\x93NUMPY"
_HEADER_LIMIT = 10_000  # NumPy's own; real headers have about 100 bytes
Rows = np.ndarray | RangedRows

_HEADER_READ = 16 << 10  # so much at a time, while headers are looked at
_NUMBERS = re.compile(r"[<>=|](b1|[iu][1248]|f[248]|c8|c16)")


class NpySource(RowSource):
    """The rows of `.npy` or `.npz` files, which stay on disk until a batch needs them.

    Uncompressed arrays are memory-mapped, or, behind an address such as `s3://` or `https://`, read by the row; the
    members of a `.npz` written by `np.savez_compressed` are read once. Files with Python objects are refused, because
    reading them could run code.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.save(pathlib.Path(folder, "x.npy"), np.arange(12.0, dtype=np.float32).reshape(4, 3))
        ...     source = NpySource({"x": pathlib.Path(folder, "x.npy")})
        ...     len(source), source.read(np.array([2]))["x"].tolist()
        (4, [[6.0, 7.0, 8.0]])

    Args:
        paths: A path or address, or several in dictionaries, lists and tuples. A `.npy` becomes an array, a `.npz` a
            dictionary of arrays.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
    """

    divides_blocks = True

    def __init__(self, paths: PyTree, ordering: Ordering = "shuffle", prefetch_size: int = 64) -> None:
        check_reading("NpySource", ordering, prefetch_size)
        super().__init__(OpenedRows("NpySource", _map_tree, (paths,)), ordering, prefetch_size)


@dataclasses.dataclass(frozen=True)
class NpyHeader:
    """What a `.npy` says of its array, and how many bytes it takes to say it."""

    dtype: np.dtype
    shape: tuple[int, ...]
    fortran: bool
    length: int


def _map_tree(paths: PyTree) -> PyTree:
    if isinstance(paths, dict):
        return {name: _map_tree(path) for name, path in paths.items()}
    if isinstance(paths, list | tuple):
        return type(paths)(_map_tree(path) for path in paths)
    if not isinstance(paths, str | os.PathLike):
        raise TypeError(f"NpySource needs paths. Got {describe_value(paths)}.")
    return map_numpy_file(paths)


def map_numpy_file(path: str | os.PathLike[str]) -> Rows | dict[str, Rows]:
    """The array of a `.npy`, or the arrays of a `.npz` by name; read-only."""
    file = open_file("NpySource", path)
    with buffered(file, _HEADER_READ) as stream:
        if stream.peek(4)[:4] == b"PK\x03\x04":
            return _map_npz(file, stream)
        header = read_npy_header(file.name, stream)
    require_shape(file.name, header.dtype, header.shape, file.size - header.length)
    return map_rows(file, header.dtype, header.shape, header.length, fortran=header.fortran)


def read_npy_header(name: str, file: IO[bytes]) -> NpyHeader:
    """The header of a `.npy`, with the file at its beginning; `name` is what errors call it."""
    start = file.read(8)
    if len(start) < 8 or not start.startswith(_MAGIC) or start[6:] not in (b"\1\0", b"\2\0", b"\3\0"):
        raise ValueError(f"{name} is not an .npy file: it starts with {start!r}. Write it with np.save.")
    width = 2 if start[6] == 1 else 4
    size = int.from_bytes(file.read(width), "little")
    if size > _HEADER_LIMIT:
        raise ValueError(f"{name} has a header of {size} bytes; {_HEADER_LIMIT} are allowed. Write it with np.save.")
    text = file.read(size)
    try:
        dtype, shape, fortran = _parse_header(text)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None
    return NpyHeader(dtype, shape, fortran, 8 + width + len(text))


@functools.lru_cache(maxsize=256)  # small arrays of a data set have few headers between them
def _parse_header(text: bytes) -> tuple[np.dtype, tuple[int, ...], bool]:
    try:
        match ast.literal_eval(text.decode("latin1").strip()):
            case {"descr": descr, "fortran_order": bool(fortran), "shape": tuple(shape), **rest} if not rest:
                pass
            case _:
                raise ValueError("it is not a description of one array")
        if not all(type(size) is int for size in shape):
            raise ValueError(f"its shape is {shape}")
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"has a header that cannot be read: {error}. Write it with np.save.") from None
    if not isinstance(descr, str) or not _NUMBERS.fullmatch(descr):
        raise ValueError(
            f"needs numbers or bools. Its header says {str(descr)[:60]!r}. Python objects are never unpickled; "
            "save text, dates and records as numbers, one array per field."
        )
    return np.dtype(descr), shape, fortran


def _map_npz(file: File, stream: IO[bytes]) -> dict[str, Rows]:
    try:
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
            names = [member.filename for member in members]
            if not names or len(set(names)) < len(names) or not all(name.endswith(".npy") for name in names):
                raise ValueError(
                    f"{file.name} is not an .npz file: its members are {names[:5]}. Write it with np.savez."
                )
            return {member.filename[:-4]: _member(file, stream, archive, member) for member in members}
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{file.name} is damaged: {error}. Get it again, or write it with np.savez.") from None


def _member(file: File, stream: IO[bytes], archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Rows:
    name = f"{file.name}[{member.filename[:-4]!r}]"
    if member.header_offset < 0:
        raise ValueError(f"{name} lies outside its file. The file is cut short or damaged; get it again.")
    if member.compress_type != zipfile.ZIP_STORED:
        return _unpacked(name, archive, member)
    # The local header, which may be longer than the one in the directory, says where the bytes start.
    stream.seek(member.header_offset)
    local = stream.read(30)
    start = member.header_offset + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
    if not local.startswith(b"PK\x03\x04") or start + member.file_size > file.size:
        raise ValueError(f"{name} lies outside its file. The file is cut short or damaged; get it again.")
    stream.seek(start)
    header = read_npy_header(name, stream)
    require_shape(name, header.dtype, header.shape, member.file_size - header.length)
    return map_rows(file, header.dtype, header.shape, start + header.length, fortran=header.fortran)


def _unpacked(name: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    require_ratio(name, member.file_size, member.compress_size)
    with archive.open(member) as stream:
        header = read_npy_header(name, stream)
        require_shape(name, header.dtype, header.shape, member.file_size - header.length)
        rows = np.frombuffer(stream.read(member.file_size - header.length), header.dtype)
    require_shape(name, header.dtype, header.shape, rows.nbytes)
    return native(rows.reshape(header.shape, order="F" if header.fortran else "C"))


def decode_npy(name: str, data: bytes) -> np.ndarray:
    """The read-only array of a `.npy` that is in memory; `name` is what errors call it."""
    header = read_npy_header(name, io.BytesIO(data))
    found = len(data) - header.length
    if min(header.shape, default=0) < 0 or math.prod(header.shape) * header.dtype.itemsize != found:
        raise ValueError(
            f"{name} does not hold what its header says: shape {header.shape} of {header.dtype}, and {found} bytes are "
            "there. The file is cut short or damaged; get it again."
        )
    rows = np.frombuffer(data, header.dtype, offset=header.length)
    return native(rows.reshape(header.shape, order="F" if header.fortran else "C"))
