"""Which files of which tar file are a sample: those that are equal up to the first dot of their name."""

import dataclasses
import re
import tarfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from millstream.files import plain
from millstream.files.data_files import File, at_once, is_remote
from millstream.files.file_index import file_index
from millstream.files.plan_folder import PlanFolder

_BLOCK = tarfile.BLOCKSIZE
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_WITHOUT_DATA = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)
_EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_LONG_LIMIT = 1 << 20  # bytes of a name or of extended headers
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_TAIL = 64 << 10
_NEAR = 4 << 10  # bytes beside a file that are read with it: its header, and small files that are not wanted
_END = bytes(_BLOCK)
_RECORD = re.compile(rb"(\d{1,7}) ([^=\n]+)=")
_MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)


class _Window:
    """A file that is read some bytes at a time, from any position on.

    Args:
        file: The file.
        size: How many bytes at least.
    """

    def __init__(self, file: File, size: int) -> None:
        self._file, self._size = file, size
        self._start, self._data = 0, b""

    @property
    def end(self) -> int:
        """Where what is in memory ends."""
        return self._start + len(self._data)

    def read(self, position: int, size: int) -> bytes:
        """Bytes from a position on, fewer at the end of the file."""
        left = max(self._file.size - position, 0)
        if not self._start <= position <= position + min(size, left) <= self.end:
            data = self._file.read_at(position, min(left, max(size, self._size))) if left else b""
            self._start, self._data = position, data
        start = position - self._start
        return self._data[start : start + size]

    def held_at(self, position: int) -> tuple[bytes, int]:
        """What is in memory around a header, and where that begins there."""
        self.read(position, _BLOCK)
        return self._data, position - self._start


class Member(NamedTuple):
    """A file in the archive.

    Attributes:
        name: Its path, which is a label and leads nowhere.
        start: Where its bytes begin.
        size: How many there are.
    """

    name: str
    start: int
    size: int


def tar_members(caller: str, file: File) -> Iterator[Member]:
    """The regular files in an archive, in order. Folders, links and devices are passed over; damage is refused.

    Args:
        caller: The caller's name, for errors.
        file: The archive: ustar, pax or GNU, not compressed.
    """
    # From afar, a megabyte is as quick as a header; what is larger is jumped over.
    window = _Window(file, 1 << 20 if is_remote(file.name) else 16 << 10)
    _require_plain(caller, file, window)
    name: str | None = None
    fields: dict[str, str] = {}
    position = looked_at = 0
    while True:
        if name is None and not fields and position >= looked_at:
            for member in _plain_members(*window.held_at(position), position, file.size):
                yield member
                position = member.start + _padded(member.size)
            looked_at = window.end
        header = _header(caller, file, window, position)
        if header is None:
            break
        position += _BLOCK
        size = _size(caller, file, header, fields, position)
        if header.type in (tarfile.GNUTYPE_LONGNAME, *_EXTENDED):
            data = _extra(caller, file, window, header, position)
            if header.type == tarfile.GNUTYPE_LONGNAME:
                name = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
            elif header.type != tarfile.XGLTYPE:
                fields = _records(caller, file, data)
        else:
            if header.type == tarfile.GNUTYPE_SPARSE or any(field.startswith("GNU.sparse") for field in fields):
                raise _damaged(caller, file, f"{header.name!r} is stored with holes; write it without --sparse")
            if header.type in _REGULAR:
                yield Member(fields.get("path", header.name if name is None else name), position, size)
            if header.type != tarfile.GNUTYPE_LONGLINK:
                name, fields = None, {}
        position += _padded(size)
    _require_end(caller, file, window, position)


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _plain_members(data: bytes, at: int, position: int, end: int) -> list[Member]:
    """Regular files whose headers are next, as far as these bytes go and all is as programs of today write it.

    What is not is left to `_header`, one by one, which takes ten times as long; so are headers with wrong checksums.

    Args:
        data: Some of an archive.
        at: Where a header begins in them.
        position: Where it begins in the archive.
        end: The size of the archive.
    """
    starts, next_at = [], at
    try:
        while next_at + _BLOCK <= len(data):
            starts.append(next_at)
            next_at += _BLOCK + _padded(int(data[next_at + 124 : next_at + 135], 8))
    except ValueError:  # the end mark has no size
        starts.pop()
    places = np.array(starts, np.int64)
    headers = np.frombuffer(data, np.uint8)[places[:, None] + np.arange(_BLOCK)]
    sizes, sums = _octal(headers[:, 124:135]), _octal(headers[:, 148:154])
    headers[:, 148:156] = 0x20
    begins, is_known = places + (position - at + _BLOCK), (sizes >= 0) & (headers[:, 135] <= 0x20)
    is_known &= (headers[:, 156] == 0x30) & (headers[:, 345] == 0) & (headers.sum(axis=1, dtype=np.int64) == sums)
    is_known &= begins + sizes <= end
    count = len(starts) if is_known.all() else int(np.argmin(is_known))
    names = np.ascontiguousarray(headers[:count, :100]).view("S100").ravel().tolist()
    return list(map(Member, map(_string, names), begins[:count].tolist(), sizes[:count].tolist()))


def _octal(digits: np.ndarray) -> np.ndarray:
    """The numbers that rows of digits in ASCII are; -1 if others are among them."""
    values = digits.astype(np.int64) - 0x30
    numbers = values @ 8 ** np.arange(digits.shape[1])[::-1]
    return np.where(((values >= 0) & (values < 8)).all(axis=1), numbers, -1)


def _require_plain(caller: str, file: File, window: _Window) -> None:
    start = window.read(0, 8)
    for magic, kind in _PACKED.items():
        if start.startswith(magic):
            raise ValueError(
                f"{caller} needs plain tar files, in which any sample can be found at once. {file.name} is packed with "
                f"{kind}: unpack it once (images and the like hardly grow), and give the .tar."
            )


class _Header(NamedTuple):
    name: str
    type: bytes
    size: int


def _header(caller: str, file: File, window: _Window, position: int) -> _Header | None:
    """The next header; None at the end mark."""
    block = window.read(position, _BLOCK)
    if len(block) < _BLOCK:
        raise _damaged(caller, file, f"it ends at byte {position + len(block)} without the mark of an end")
    if block == _END:
        return None
    try:
        # The checksum is of all bytes, with blanks in its own place; some old programs took them as signed.
        found, own = sum(block) - sum(block[148:156]) + 256, _number(block[148:156])
        if own != found and own != found - 256 * sum(byte > 127 for byte in block[:148] + block[156:]):
            raise ValueError("its checksum is wrong")
        name, size = _string(block[:100]), _number(block[124:136])
    except ValueError as error:
        raise _damaged(caller, file, f"there is no header at byte {position} ({error})") from None
    prefix = _string(block[345:500]) if block[257:263] == b"ustar\0" else ""
    kind = block[156:157]
    if kind == tarfile.AREGTYPE and name.endswith("/"):  # as the oldest tar wrote folders
        kind = tarfile.DIRTYPE
    return _Header(f"{prefix}/{name}" if prefix else name, kind, size)


def _string(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _number(field: bytes) -> int:
    """Octal digits; or, after a byte of 128 or 255, two's complement, for sizes from 8 GB on."""
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field[1:], "big") - (0 if field[0] == 0x80 else 256 ** (len(field) - 1))
    return int(field.partition(b"\0")[0].strip() or b"0", 8)


def _size(caller: str, file: File, header: _Header, fields: dict[str, str], start: int) -> int:
    if header.type in _WITHOUT_DATA:
        return 0
    own = header.type in _REGULAR and "size" in fields
    if own and not re.fullmatch(r"\d{1,18}", fields["size"]):
        raise _damaged(caller, file, f"the size of {header.name!r} is {fields['size'][:30]!r}")
    size = int(fields["size"]) if own else header.size
    if size < 0 or start + size > file.size:
        raise _damaged(caller, file, f"{header.name!r} claims {size} bytes, and {file.size - start} are left")
    return size


def _extra(caller: str, file: File, window: _Window, header: _Header, position: int) -> bytes:
    if header.size > _LONG_LIMIT:
        raise _damaged(caller, file, f"a name or extended header has {header.size} bytes; {_LONG_LIMIT} are allowed")
    return window.read(position, header.size)


def _records(caller: str, file: File, data: bytes) -> dict[str, str]:
    """The fields of a pax header: `length name=value` lines, whose length counts all of the line."""
    fields, at = {}, 0
    while at < len(data):
        found = _RECORD.match(data, at)
        end = 0 if found is None else at + int(found[1])
        if found is None or not found.end() < end <= len(data) or data[end - 1 : end] != b"\n":
            raise _damaged(caller, file, "an extended header cannot be read")
        value = data[found.end() : end - 1]
        fields[found[2].decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        at = end
    return fields


def _require_end(caller: str, file: File, window: _Window, position: int) -> None:
    """Nothing but padding follows the end: archives that were appended to others would be passed over in silence."""
    if window.read(position + _BLOCK, _TAIL).strip(b"\0"):
        raise _damaged(caller, file, f"something follows its end at byte {position}; give joined archives one by one")


def _damaged(caller: str, file: File, found: str) -> ValueError:
    return ValueError(f"{caller} cannot read {file.name} as a tar file: {found}. Get or write it again.")


@dataclasses.dataclass(frozen=True)
class SampleIndex:
    """Where every file of every sample lies.

    Attributes:
        extensions: Of the files of a sample.
        shards: The number of each sample's tar file.
        keys: What its files are called, as bytes.
        spans: Start and size of each of its files, (samples, extensions, 2).
    """

    extensions: tuple[str, ...]
    shards: np.ndarray
    keys: np.ndarray
    spans: np.ndarray

    def around(self, indices: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """For each file of some samples, where all of its block lies, or itself where mostly other files lie there.

        Args:
            indices: The samples.
            bounds: The first and the last sample of the block of each.
        """
        _, firsts, which = np.unique(bounds[:, 0], return_index=True, return_inverse=True)
        wide = self._hulls(bounds[firsts])[which.ravel(), None]
        return np.where(wide[..., 1:], wide, self.spans[indices])

    def _hulls(self, blocks: np.ndarray) -> np.ndarray:
        """Where the files of each block begin, and their bytes with what lies between; 0 if others are more.

        Args:
            blocks: The first and the last sample of each.
        """
        counts = blocks[:, 1] - blocks[:, 0] + 1
        begins = np.cumsum(counts) - counts
        spans = self.spans[np.arange(counts.sum()) + np.repeat(blocks[:, 0] - begins, counts)]
        starts = np.minimum.reduceat(spans[..., 0].min(axis=1), begins)
        sizes = np.maximum.reduceat(spans.sum(axis=2).max(axis=1), begins) - starts
        wanted = np.add.reduceat(spans[..., 1].sum(axis=1), begins)
        is_worth_it = sizes <= 2 * wanted + _NEAR * counts * len(self.extensions)
        is_worth_it &= self.shards[blocks[:, 0]] == self.shards[blocks[:, 1]]
        return np.stack([starts, sizes], axis=1) * is_worth_it[:, None]


def index_samples(
    caller: str, shards: list[File], extensions: list[str] | None, folder: PlanFolder | None
) -> SampleIndex:
    """Read the headers of all shards.

    Args:
        caller: The caller's name, for errors.
        shards: The tar files.
        extensions: Which files of a sample are wanted; None for those of the first.
        folder: Where what the headers say is kept; None for nowhere.
    """
    found = at_once(lambda shard: _Shard.read(caller, shard, folder), shards)
    first = next((shard for shard in found if shard.length), None)
    if first is None:
        raise ValueError(f"{caller} needs at least one sample. {shards[0].name} has no files named like 0001.jpg.")
    names = tuple(first.extensions_of(0) if extensions is None else extensions)
    spans = [shard.spans(caller, file, names) for shard, file in zip(found, shards, strict=True)]
    numbers = np.repeat(np.arange(len(shards), dtype=np.int32), [shard.length for shard in found])
    return SampleIndex(names, numbers, np.concatenate([shard.keys() for shard in found]), np.concatenate(spans))


@dataclasses.dataclass(frozen=True)
class _Shard:
    """The samples of a tar file, in order.

    Attributes:
        text: Their keys, one after the other.
        lengths: Of the keys.
        extensions: All that there are.
        samples: The sample that each file belongs to.
        kinds: Which of the extensions each file has.
        places: Start and size of each file.
    """

    text: bytes
    lengths: np.ndarray
    extensions: list[str]
    samples: np.ndarray
    kinds: np.ndarray
    places: np.ndarray

    @classmethod
    def read(cls, caller: str, shard: File, folder: PlanFolder | None) -> "_Shard":
        """What the headers say, or said when they were read before."""
        kept = file_index(caller, shard, "samples", _encoded_samples(caller, shard), folder)
        return cls(*plain.decode(kept.tobytes()))

    @property
    def length(self) -> int:
        """How many samples there are."""
        return len(self.lengths)

    def keys(self) -> np.ndarray:
        """What the files of each sample are called, as bytes."""
        ends = np.cumsum(self.lengths)
        pairs = zip((ends - self.lengths).tolist(), ends.tolist(), strict=True)
        return np.array([self.text[start:end] for start, end in pairs], np.bytes_)

    def extensions_of(self, sample: int) -> list[str]:
        """The extensions of the files of a sample, in order."""
        return [self.extensions[kind] for kind in self.kinds[self.samples == sample].tolist()]

    def spans(self, caller: str, file: File, names: Sequence[str]) -> np.ndarray:
        """Start and size of each sample's files with these extensions, (samples, extensions, 2)."""
        spans = np.full((self.length, len(names), 2), -1, np.int64)
        for column, name in enumerate(names):
            if name in self.extensions:
                own = self.kinds == self.extensions.index(name)
                spans[self.samples[own], column] = self.places[own]
        missing = np.flatnonzero((spans[..., 0] < 0).any(axis=1))
        if len(missing):
            key = bytes(self.keys()[missing[0]]).decode("utf-8", "surrogateescape")
            raise ValueError(
                f"{caller} needs the files {list(names)} in every sample. {key!r} in {file.name} has "
                f"{self.extensions_of(int(missing[0]))}. Choose with extensions=[...], or write the sample again."
            )
        return spans


def _encoded_samples(caller: str, shard: File) -> Iterator[tuple[int, np.ndarray]]:
    """The fields of a `_Shard`, as bytes."""
    keys: dict[bytes, int] = {}
    kinds: dict[str, int] = {}
    files: list[tuple[int, int, int, int]] = []
    last, in_last = "", set[str]()
    for member in tar_members(caller, shard):
        found = _MEMBER.fullmatch(member.name)
        if found is None:
            continue
        key, name = found[1], found[2].lower()
        encoded, is_same = key.encode("utf-8", "surrogateescape"), key == last and bool(keys)
        if (is_same and name in in_last) or (not is_same and encoded in keys):
            raise ValueError(
                f"{caller} needs the files of a sample next to each other, each once. {shard.name} has "
                f"{member.name!r} again, or apart from the others of {key!r}. Write it in the order of names."
            )
        last = key
        if not is_same:
            in_last = set()
        in_last.add(name)
        files.append((keys.setdefault(encoded, len(keys)), kinds.setdefault(name, len(kinds)), *member[1:]))
    numbers = np.array(files, np.int64).reshape(-1, 4)
    lengths = np.array([len(key) for key in keys], np.int64)
    fields = b"".join(keys), lengths, list(kinds), *numbers[:, :2].T.astype(np.int32), numbers[:, 2:].copy()
    yield shard.size, np.frombuffer(plain.encode(fields, caller), np.uint8)
