"""Packed files as plain ones: unpacked once, into the folder of plan files, where any byte of them can be found."""

import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, Protocol

from millstream.files.data_files import File, LocalFile
from millstream.files.file_index import chunks, file_identity
from millstream.files.plan_folder import PlanFolder, kept_file
from millstream.text.bar_line import ProgressLine
from millstream.text.errors import needs

# Unpacked data may be this many times larger than packed; what is below the free size cannot hurt anybody.
RATIO = 200
FREE_BYTES = 16 << 20
_PIECE = 8 << 10  # packed bytes at a time, of which zstd can make 256 MB at most


class _Unpacker(Protocol):
    """What unpacks one stream of a file."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def _gzip(caller: str) -> tuple[Callable[[], _Unpacker], type[Exception]]:
    return lambda: zlib.decompressobj(wbits=31), zlib.error


def _zstd(caller: str) -> tuple[Callable[[], _Unpacker], type[Exception]]:
    with needs(caller, "zstandard", "zstd"):
        import zstandard
    return lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError


_PACKED: dict[str, tuple[bytes, str, Any]] = {
    "gzip": (b"\x1f\x8b\x08", ".gz", _gzip),
    "zstd": (b"\x28\xb5\x2f\xfd", ".zst", _zstd),
}
_OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ\0": "xz"}


def unpacked(caller: str, file: File, folder: PlanFolder | None) -> File:
    """The file, or, if it is packed with gzip or zstd, a plain copy of it that is kept.

    Args:
        caller: The caller's name, for errors.
        file: The file.
        folder: Where copies are kept.
    """
    kind = _packing(caller, file)
    if kind is None:
        return file
    if folder is None:
        raise ValueError(
            f"{caller} needs plans= for {file.name}, which is packed with {kind}, so that nothing in it can be found "
            "without unpacking all before it. Pass a folder with room for the plain file, such as plans='plans', where "
            "it is unpacked once; or unpack it yourself."
        )
    make, damage = _PACKED[kind][2](caller)

    def write(stream: IO[bytes]) -> None:
        done, progress = 0, ProgressLine(caller)
        try:
            for at, data in _plain(caller, file, kind, make, damage):
                done += len(data)
                require_ratio(f"{caller}: {file.name}", done, file.size)
                stream.write(data)
                progress.show(f"{file.name}, {at / file.size:.0%} unpacked")
        finally:
            progress.close()

    return LocalFile(caller, kept_file(folder, caller, file.stamp[0], file_identity(caller, file, "unpacked"), write))


def _packing(caller: str, file: File) -> str | None:
    """What a file is packed with, by its first bytes."""
    start = file.read_at(0, min(10, file.size))
    other = next((kind for magic, kind in _OTHERS.items() if start.startswith(magic)), None)
    if other == "xz" or (other == "bzip2" and start[4:] == b"1AY&SY"):
        raise ValueError(f"{caller} unpacks gzip and zstd. {file.name} is packed with {other}; unpack it first.")
    for kind, (magic, ending, _) in _PACKED.items():
        if start.startswith(magic):
            return kind
        if file.name.endswith(ending):
            raise ValueError(
                f"{caller}: {file.name} is not packed with {kind}: it starts with {start[:4]!r}. Get it again."
            )
    return None


def _plain(
    caller: str, file: File, kind: str, make: Callable[[], _Unpacker], damage: type[Exception]
) -> Iterator[tuple[int, bytes]]:
    """The bytes of a packed file, each part with the place that was reached there.

    Streams follow each other, and gzip allows for zeros after the last.
    """
    unpacker, begun = make(), False
    for at, data in chunks(file, size=_PIECE):
        try:
            while data := data if begun else data.lstrip(b"\0"):
                begun = True
                yield at, unpacker.decompress(data)
                data = b""
                if unpacker.eof:
                    data = unpacker.unused_data
                    unpacker, begun = make(), False
        except damage as error:
            raise ValueError(
                f"{caller} cannot unpack {file.name}, from byte {at} on: {error}. The file is damaged; get it again."
            ) from None
    if begun:
        raise ValueError(f"{caller} cannot unpack {file.name}: its {kind} stream has no end. It is cut short.")


def require_ratio(name: str, unpacked: int, packed: int) -> None:
    """Refuse data that would unpack to far more than any honest file does."""
    if unpacked > max(FREE_BYTES, RATIO * packed):
        raise ValueError(
            f"{name} would unpack from {packed} to {unpacked} bytes. At most {RATIO} times as much is allowed; "
            "if you trust the file, unpack it yourself."
        )
