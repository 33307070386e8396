"""Which files of which tar file are a sample: those that are equal up to the first dot of their name."""

import concurrent.futures
import dataclasses
import re
from collections.abc import Iterator

import numpy as np

from millstream.files.data_files import File
from millstream.integrations._tar_headers import Member, tar_members

_MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
_AT_ONCE = 8  # shards whose headers are read at the same time


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


def index_samples(who: str, shards: list[File], extensions: list[str] | None) -> SampleIndex:
    """Read the headers of all shards.

    Args:
        who: Who speaks in errors.
        shards: The tar files.
        extensions: Which files of a sample are wanted; None for those of the first.
    """
    with concurrent.futures.ThreadPoolExecutor(min(_AT_ONCE, len(shards))) as pool:
        found = list(pool.map(lambda shard: list(_samples(who, shard)), shards))
    if not any(found):
        raise ValueError(f"{who} needs at least one sample. {shards[0].name} has no files named like 0001.jpg.")
    first = next(samples for samples in found if samples)[0][1]
    names = tuple(first if extensions is None else extensions)
    keys, numbers, spans = [], [], []
    for number, (shard, samples) in enumerate(zip(shards, found, strict=True)):
        for key, files in samples:
            missing = [name for name in names if name not in files]
            if missing:
                raise ValueError(
                    f"{who} needs the files {list(names)} in every sample. {key!r} in {shard.name} has "
                    f"{list(files)}. Choose with extensions=[...], or write the sample again."
                )
            keys.append(key.encode("utf-8", "surrogateescape"))
            numbers.append(number)
            spans.append([(files[name].start, files[name].size) for name in names])
    return SampleIndex(names, np.array(numbers, np.int32), np.array(keys), np.array(spans, np.int64))


def _samples(who: str, shard: File) -> Iterator[tuple[str, dict[str, Member]]]:
    """Keys and files of the samples of a tar file, in order."""
    seen: set[str] = set()
    key, files = "", {}
    for member in tar_members(who, shard):
        found = _MEMBER.fullmatch(member.name)
        if found is None:
            continue
        if found[1] != key and files:
            yield key, files
            files = {}
        key, name = found[1], found[2].lower()
        if name in files or (not files and key in seen):
            raise ValueError(
                f"{who} needs the files of a sample next to each other, each once. {shard.name} has "
                f"{member.name!r} again, or apart from the others of {key!r}. Write it in the order of names."
            )
        seen.add(key)
        files[name] = member
    if files:
        yield key, files
