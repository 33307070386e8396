"""One batch as a file: a header that the reader can foretell, then arrays that JAX can use where they are.

A file is a prefix, a JSON header and the sections, each of them padded with zeros to a multiple of 64 bytes. Prefix and
header follow from what the reader knows already (which cache, which batch, which arrays) and from two sizes, so that
they are compared and never believed: nothing in a file decides what is allocated or which bytes are mapped.
"""

import dataclasses
import functools
import json
import math
import mmap
import pathlib
import struct
import weakref
import zlib
from io import BufferedReader
from typing import IO

import numpy as np

from millstream.files.changed import Stamp
from millstream.files.safe_path import NotPlainFile, plain_reader
from millstream.reading.memory import ALIGNMENT, aligned_empty

_MAGIC = b"\x89MSBATCH"
_VERSION = 1
_PREFIX = struct.Struct("<8sIIQQ")  # magic, CRC-32 of all that follows it, version, bytes of the mask, of additional
_CRC_END = 12
# A mapping holds an open file; who keeps more batches than this gets copies instead of running out of them.
_MOST_MAPPED = 256
_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class DamagedBatch(ValueError):
    """A file of a cache that does not hold the batch it is named after."""


@dataclasses.dataclass(frozen=True)
class Sections:
    """What a batch file holds, as bytes or as arrays of the file.

    Attributes:
        leaves: The arrays of the batch.
        ok: Which rows were read without an error; None if all were.
        additional: Encoded plain values; empty if there are none.
    """

    leaves: list[np.ndarray]
    ok: np.ndarray | None
    additional: bytes


@dataclasses.dataclass(frozen=True)
class BatchFormat:
    """What all files of one cache have in common.

    Attributes:
        identity: The name of the cache, so that a file of another one is recognised.
        names: What the leaves are called.
        shapes: The shapes of the leaves, rows included.
        dtypes: Their dtypes.
        mask_shape: The shape of `ok`.
    """

    identity: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    mask_shape: tuple[int, ...]

    def pack(self, epoch: int, number: int, sections: Sections) -> tuple[list[memoryview | bytes], int]:
        """The file of a batch, in pieces to be written one after the other, and its size."""
        ok = b"" if sections.ok is None else _bytes_of(sections.ok)
        contents = [*map(_bytes_of, sections.leaves), ok, sections.additional]
        header, _, total = self._layout(epoch, number, len(ok), len(sections.additional))
        start = _PREFIX.pack(_MAGIC, 0, _VERSION, len(ok), len(sections.additional)) + header
        pieces = [piece for content in contents for piece in (content, b"\0" * _padding(len(content)))]
        crc = zlib.crc32(start[_CRC_END:])
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
        return [start[: _CRC_END - 4] + crc.to_bytes(4, "little") + start[_CRC_END:], *pieces], total

    def unpack(self, path: pathlib.Path, epoch: int, number: int, verified: set[Stamp]) -> Sections:
        """The batch in a file, mapped.

        Args:
            path: The file.
            epoch: The epoch it has to be of.
            number: The number in the epoch it has to be of.
            verified: Files whose checksum was right before; this one is added.
        """
        with _open_batch(path) as file:
            stamp = Stamp.of(file.fileno())
            offsets, sizes = self._require_header(file, stamp.size, path, epoch, number)
            content = _content(file, stamp.size)
        if stamp not in verified:
            found = zlib.crc32(content[_CRC_END:].data)
            claimed = int.from_bytes(content[_CRC_END - 4 : _CRC_END].tobytes(), "little")
            if found != claimed:
                raise DamagedBatch(f"{path} is damaged: its checksum is {found:08x} and should be {claimed:08x}.")
            verified.add(stamp)
        leaves = [
            np.ndarray(shape, dtype, content, offset)
            for shape, dtype, offset in zip(self.shapes, self.dtypes, offsets, strict=False)
        ]
        ok = np.ndarray(self.mask_shape, np.bool_, content, offsets[-2]) if sizes[0] else None
        return Sections(leaves, ok, content[offsets[-1] : offsets[-1] + sizes[1]].tobytes())

    def _require_header(
        self, file: IO[bytes], size: int, path: pathlib.Path, epoch: int, number: int
    ) -> tuple[list[int], tuple[int, int]]:
        """Where the sections of a file begin and the two sizes that may vary, if the file is what its name says."""
        prefix = file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size or not prefix.startswith(_MAGIC):
            raise DamagedBatch(f"{path} is not a batch file, or its beginning is lost ({size} bytes).")
        _, _, version, ok_size, additional_size = _PREFIX.unpack(prefix)
        if version != _VERSION:
            raise DamagedBatch(f"{path} has format version {version}, and this Millstream reads version {_VERSION}.")
        header, offsets, total = self._layout(epoch, number, ok_size, additional_size)
        if size != total or ok_size not in (0, math.prod(self.mask_shape)):
            raise DamagedBatch(
                f"{path} holds {size} bytes, and its header asks for {total}. It is cut short or damaged."
            )
        if file.read(len(header)) != header:
            raise DamagedBatch(
                f"{path} has a header that is not that of batch {number} of epoch {epoch} of this cache."
            )
        return offsets, (ok_size, additional_size)

    def _layout(self, epoch: int, number: int, ok_size: int, additional_size: int) -> tuple[bytes, list[int], int]:
        """The header, where each section begins in the file, and how long the file is."""
        sections, starts = _sections(self, ok_size, additional_size)
        batch = json.dumps({"cache": self.identity, "epoch": epoch, "number": number})
        header = f'{batch[:-1]}, "sections": {sections}}}\n'.encode()
        header += b"\0" * _padding(_PREFIX.size + len(header))
        first = _PREFIX.size + len(header)
        return header, [first + start for start in starts[:-1]], first + starts[-1]


@functools.lru_cache(maxsize=16)
def _sections(layout: BatchFormat, ok_size: int, additional_size: int) -> tuple[str, list[int]]:
    """The sections as the header describes them; and where they begin, and the last one ends, after the header."""
    names = [*layout.names, "ok", "additional"]
    shapes = [*layout.shapes, layout.mask_shape, (additional_size,)]
    dtypes = [*layout.dtypes, np.dtype(bool), np.dtype(np.uint8)]
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    sizes[-2] = ok_size
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size + _padding(size))
    described = [
        {"name": name, "shape": shape, "dtype": dtype.name, "offset": start, "size": size}
        for name, shape, dtype, start, size in zip(names, shapes, dtypes, starts, sizes, strict=False)
    ]
    return json.dumps(described), starts


def _open_batch(path: pathlib.Path) -> BufferedReader:
    try:
        return plain_reader(path, follow=True)
    except NotPlainFile:
        raise DamagedBatch(f"{path} is a folder, a pipe or a device, and no batch file.") from None


def _padding(size: int) -> int:
    return -size % ALIGNMENT


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _content(file: IO[bytes], size: int) -> np.ndarray:
    """The bytes of a file, read-only: mapped, or in memory if very many are mapped already."""
    if len(_mapped) >= _MOST_MAPPED:
        content = aligned_empty((size,), np.dtype(np.uint8))
        file.seek(0)
        file.readinto(content)  # pyright: ignore[reportAttributeAccessIssue]
        content.flags.writeable = False
        return content
    mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_WILLNEED"):  # so that the disk is read while other batches are used
        mapping.madvise(mmap.MADV_WILLNEED)
    _mapped.add(mapping)
    return np.frombuffer(mapping, np.uint8)
