"""The one way in which archives are unpacked: only the files that were asked for, and none if any member is unsafe."""

import contextlib
import dataclasses
import gzip
import pathlib
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any, cast

from millstream.files.atomic import settle, temporary_path
from millstream.files.lock import locked
from millstream.files.safe_path import safe_path
from millstream.files.unpacked import FREE_BYTES, RATIO

_TIMEOUT = 600.0
_ADVICE = "Get it again from its publisher."


class UnsafeArchive(ValueError):
    """An archive with members that no honest data set has."""


@dataclasses.dataclass(frozen=True)
class ArchiveLimits:
    """How large an archive may become.

    Args:
        members: The most files and folders.
        size: The most bytes, unpacked.
    """

    members: int = 1000
    size: int = 4 << 30


def extract(
    archive: pathlib.Path, members: Sequence[str], folder: pathlib.Path, limits: ArchiveLimits | None = None
) -> list[pathlib.Path]:
    """Unpack these members of a tar or zip file below `folder`, all or nothing.

    Every member of the archive is looked at, also those that are not asked for. The files appear under their names
    only after the whole archive has been found safe.
    """
    limits = ArchiveLimits() if limits is None else limits
    finals = [safe_path(folder, member, str(archive)) for member in members]
    with locked(folder / f".{archive.name}.lock", _TIMEOUT) as alone:
        if all(final.exists() for final in finals):
            return finals
        scratch = temporary_path(folder / f"{archive.name}.unpacked", alone=alone)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            found = _unpack(archive, set(members), scratch, limits)
            missing = [member for member in members if member not in found]
            if missing:
                raise UnsafeArchive(f"{archive} lacks {missing}. {_ADVICE}")
            for member, final in zip(members, finals, strict=True):
                final.parent.mkdir(parents=True, exist_ok=True)
                settle(found[member], final)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return finals


def _unpack(
    archive: pathlib.Path, members: set[str], scratch: pathlib.Path, limits: ArchiveLimits
) -> dict[str, pathlib.Path]:
    """The members in numbered files, after all of the archive has been read."""
    found: dict[str, pathlib.Path] = {}
    try:
        for path, content in _safe_members(archive, scratch, limits):
            if path in members and content is not None:
                found[path] = scratch / str(len(found))
                with found[path].open("xb") as file:
                    shutil.copyfileobj(content, file, 1 << 20)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, gzip.BadGzipFile, NotImplementedError) as error:
        raise UnsafeArchive(f"{archive} cannot be unpacked: {str(error).rstrip('.')}. {_ADVICE}") from None
    return found


def _safe_members(
    archive: pathlib.Path, root: pathlib.Path, limits: ArchiveLimits
) -> Iterator[tuple[str, IO[bytes] | None]]:
    """The path of every member and its bytes, None for a folder."""
    seen: set[str] = set()
    size = 0
    for path, claimed, content in (_zip if zipfile.is_zipfile(archive) else _tar)(archive, root, limits):
        size += claimed
        if path.casefold() in seen:
            raise UnsafeArchive(f"{archive} has the member {path[:80]!r} twice. {_ADVICE}")
        if len(seen) == limits.members:
            raise UnsafeArchive(f"{archive} has more than {limits.members} members. {_ADVICE}")
        if size > limits.size:
            raise UnsafeArchive(f"{archive} unpacks to {size} bytes; {limits.size} are allowed. {_ADVICE}")
        seen.add(path.casefold())
        yield path, content


def _path(archive: pathlib.Path, root: pathlib.Path, name: str) -> str:
    path = name.removeprefix("./").removesuffix("/")
    safe_path(root, path, str(archive))
    return path


def _tar(
    archive: pathlib.Path, root: pathlib.Path, limits: ArchiveLimits
) -> Iterator[tuple[str, int, IO[bytes] | None]]:
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(archive.open("rb"))
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        stream = stack.enter_context(gzip.open(file)) if packed else file
        limit = min(limits.size, max(FREE_BYTES, RATIO * archive.stat().st_size))
        tar = stack.enter_context(tarfile.open(fileobj=cast(Any, _Capped(stream, limit, archive)), mode="r|"))
        for member in tar:
            if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE) or member.size < 0:
                raise UnsafeArchive(
                    f"{archive} has the member {member.name[:80]!r}, a link, a device or a sparse file. "
                    f"Only plain files and folders are unpacked. {_ADVICE}"
                )
            if member.isdir() and member.name.strip("./") == "":
                continue
            path = _path(archive, root, member.name)
            _second_opinion(archive, member, root)
            yield path, member.size, None if member.isdir() else tar.extractfile(member)


def _second_opinion(archive: pathlib.Path, member: tarfile.TarInfo, root: pathlib.Path) -> None:
    try:
        tarfile.data_filter(member, str(root))
    except tarfile.FilterError as error:
        raise UnsafeArchive(f"{archive}: {error}. {_ADVICE}") from None


def _zip(
    archive: pathlib.Path, root: pathlib.Path, limits: ArchiveLimits
) -> Iterator[tuple[str, int, IO[bytes] | None]]:
    with zipfile.ZipFile(archive) as file:
        for member in file.infolist():
            mode = member.external_attr >> 16
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise UnsafeArchive(
                    f"{archive} has the member {member.filename[:80]!r}, a link or a device. "
                    f"Only plain files and folders are unpacked. {_ADVICE}"
                )
            if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise UnsafeArchive(
                    f"{archive} has the member {member.filename[:80]!r}, encrypted or packed by method "
                    f"{member.compress_type}. Only plain and deflated members are unpacked. {_ADVICE}"
                )
            if member.file_size > max(FREE_BYTES, RATIO * member.compress_size):
                raise UnsafeArchive(
                    f"{archive} has the member {member.filename[:80]!r} that unpacks from {member.compress_size} to "
                    f"{member.file_size} bytes. At most {RATIO} times as much is allowed. {_ADVICE}"
                )
            if member.header_offset < 0:
                raise UnsafeArchive(f"{archive} has members outside its bytes. {_ADVICE}")
            # `filename` ends at a NUL, so the name that was really stored is the one to judge.
            path = _path(archive, root, member.orig_filename)
            with contextlib.ExitStack() as stack:
                content = None if member.is_dir() else stack.enter_context(file.open(member))
                yield path, member.file_size, content


class _Capped:
    """A stream that ends in an error when more comes out of it than should be in there."""

    def __init__(self, stream: Any, limit: int, archive: pathlib.Path) -> None:
        self._stream = stream
        self._left = limit
        self._archive = archive

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise UnsafeArchive(
                f"{self._archive} unpacks to more than {RATIO} times its size, or to more than is allowed. {_ADVICE}"
            )
        return data
