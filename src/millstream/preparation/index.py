"""The `index.json` of prepared data: what is in which file, so that reading needs no look at the files."""

import dataclasses
import json
import os
import pathlib
from typing import Any

from millstream.files.data_files import File, is_remote, open_file
from millstream.files.safe_path import safe_path
from millstream.preparation.sample_form import SampleForm
from millstream.preparation.shard_files import FORMATS

NAME = "index.json"
VERSION = 1
_KIND = "millstream prepared"
_LIMIT = 1 << 30  # bytes of an index.json


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """What an index says of a file.

    Attributes:
        name: In the folder.
        bytes: Its size.
        sha256: Of its contents.
    """

    name: str
    bytes: int
    sha256: str

    @classmethod
    def of(cls, found: Any) -> "FileEntry":
        """An entry that was read."""
        match found:
            case {"name": str(name), "bytes": int(size), "sha256": str(digest)}:
                return cls(name, size, digest)
            case _:
                raise ValueError("a file is not described")


@dataclasses.dataclass(frozen=True)
class Shard:
    """What an index says of a shard.

    Attributes:
        files: Its files.
        blocks: How many samples each of its blocks has.
        start: Where the first block begins in the first file.
        ends: Where each block ends, if it can be read alone.
    """

    files: tuple[FileEntry, ...]
    blocks: tuple[int, ...]
    start: int
    ends: tuple[int, ...]

    @classmethod
    def of(cls, found: Any) -> "Shard":
        """A shard that was read."""
        match found:
            case {"files": list(files), "blocks": list(blocks), "start": int(start), "ends": list(ends)}:
                entries = tuple(map(FileEntry.of, files))
            case _:
                raise ValueError("a shard is not described")
        if not entries or not blocks or not all(type(rows) is int and rows > 0 for rows in blocks):
            raise ValueError("a shard has no samples")
        places = [start, *ends]
        good = all(type(place) is int for place in places) and all(a < b for a, b in zip(places, places[1:]))
        if not good or len(ends) not in (0, len(blocks)) or not 0 <= start <= places[-1] <= entries[0].bytes:
            raise ValueError(f"the blocks of {entries[0].name} are not where they could be")
        return cls(entries, tuple(blocks), start, tuple(ends))


@dataclasses.dataclass(frozen=True)
class Index:
    """What an `index.json` says.

    Attributes:
        kind: The format of the shards.
        form: Of the samples.
        first: The shape of each leaf in the first sample.
        fixed: For each leaf, whether all samples have that shape.
        shards: The shards.
        lengths: The files of the lengths of samples, by the name of the leaf.
        made_from: What tells the input, the function and the options from others.
    """

    kind: str
    form: SampleForm
    first: tuple[tuple[int, ...], ...]
    fixed: tuple[bool, ...]
    shards: tuple[Shard, ...]
    lengths: dict[str, FileEntry]
    made_from: dict[str, Any]

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return sum(sum(shard.blocks) for shard in self.shards)

    @property
    def files(self) -> list[FileEntry]:
        """All files but the index itself."""
        return [entry for shard in self.shards for entry in shard.files] + list(self.lengths.values())

    def to_json(self) -> bytes:
        """As a file has it: a line for each shard."""
        shards = ",\n  ".join(json.dumps(dataclasses.asdict(shard)) for shard in self.shards)
        lengths = {name: dataclasses.asdict(entry) for name, entry in self.lengths.items()}
        facts = {
            "kind": _KIND,
            "version": VERSION,
            "format": self.kind,
            "samples": self.samples,
            "bytes": sum(entry.bytes for entry in self.files),
            **self.form.to_json(),
            "first": self.first,
            "fixed": self.fixed,
            "lengths": lengths,
            "made_from": self.made_from,
        }
        lines = ",\n ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in facts.items())
        return f'{{{lines},\n "shards": [\n  {shards}\n ]}}\n'.encode()


def read_index(caller: str, folder: str | os.PathLike[str]) -> tuple[Index, File]:
    """The index in a folder or at its address, and its file."""
    file = open_file(caller, joined(folder, NAME))
    if file.size > _LIMIT:
        raise ValueError(f"{caller} cannot read {file.name}: it has {file.size} bytes; {_LIMIT} are allowed.")
    try:
        return _parsed(json.loads(file.read_at(0, file.size))), file
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{caller} needs the folder of ms.prepare. {file.name} is not its index: {error}. Prepare the data again, "
            "or get the file again."
        ) from None


def _parsed(found: Any) -> Index:
    match found:
        case {"kind": str(kind), "version": int(version)} if kind == _KIND and version != VERSION:
            raise ValueError(f"it is of version {version}, and this is version {VERSION}")
        case {
            "kind": str(kind),
            "format": str(words),
            "samples": int(samples),
            "first": list(first),
            "fixed": list(fixed),
            "lengths": dict(lengths),
            "made_from": dict(made_from),
            "shards": list(shards),
        } if kind == _KIND and words in FORMATS:
            pass
        case _:
            raise ValueError("it is something else")
    form = SampleForm.from_json(found)
    if form is None or not len(first) == len(fixed) == len(form.leaves):
        raise ValueError("the samples are not described")
    for leaf, shape, same in zip(form.leaves, first, fixed, strict=True):
        axes = leaf.axes if leaf.is_numbers else 0
        if type(same) is not bool or not isinstance(shape, list) or len(shape) != axes:
            raise ValueError(f"the shape of sample{leaf.path} is not described")
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"the shape of sample{leaf.path} is not described")
    index = Index(
        words,
        form,
        tuple(map(tuple, first)),
        tuple(fixed),
        tuple(map(Shard.of, shards)),
        {name: FileEntry.of(entry) for name, entry in lengths.items()},
        made_from,
    )
    if index.samples != samples or not samples:
        raise ValueError(f"its shards have {index.samples} samples, and it says {samples}")
    return index


def joined(folder: str | os.PathLike[str], name: str) -> str:
    """The path or address of a file in a folder; a name that leads out of it is refused."""
    # Another machine has no links, so only the name counts there.
    safe_path(pathlib.Path("prepared") if is_remote(folder) else pathlib.Path(folder), name, f"{folder}/{NAME}")
    place = os.fspath(folder)
    return f"{place}{name}" if place.endswith("/") else f"{place}/{name}"
