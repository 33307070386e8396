"""The folder that shards are made in: what it is for, what is finished, and who works in it."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from millstream.files.atomic import sync_folder, written
from millstream.files.lock import locked
from millstream.files.safe_path import require_trust
from millstream.preparation.index import NAME, FileEntry, Index, Shard, read_index
from millstream.preparation.sample_form import SampleForm
from millstream.preparation.shards import WORK, RangeMaker, ShardMaker, file_entry, file_hash
from millstream.text.bar_line import ProgressLine
from millstream.text.errors import describe_value, differences

_PATIENCE = 600.0  # seconds without progress that end the waiting for another process
_PART = re.compile(r"\.(\d+|index|_lengths)\.(.+)\.[0-9a-f]{32}\.part")
_LOCK = re.compile(r"\.prepare-(\d+)-of-(\d+)\.lock")


class WorkFolder:
    """The folder of one preparation.

    Args:
        caller: The caller's name, for errors.
        path: The folder.
        made_from: What tells the input, the function and the options from others, by name.
    """

    def __init__(self, caller: str, path: pathlib.Path, made_from: dict[str, Any]) -> None:
        self._caller, self.path, self._made_from = caller, path, made_from
        self._work = path / WORK

    def open(self) -> bool:
        """Make the folder, or check that it is for this preparation; whether that is finished."""
        require_trust(self.path, self._caller)
        self.path.mkdir(parents=True, exist_ok=True)
        if self.is_finished:
            self._require_same(read_index(self._caller, self.path)[0].made_from)
            return True
        with locked(self.path / ".prepare-job.lock", _PATIENCE) as alone:
            return self._claim(alone)

    def _claim(self, alone: bool) -> bool:
        """Take the folder for this preparation, unless it belongs to another one; whether that is finished.

        Args:
            alone: Whether no other process can be in this method.
        """
        others = sorted(name for name in os.listdir(self.path) if not name.startswith("."))
        known = _read(self._work / "job.json")  # it is there before any shard is, so it is looked for after these
        if known is not None and alone and self._is_untouched(others) and differences(known, self._made_from):
            shutil.rmtree(self._work)  # the function may have failed at its first sample, and been corrected
            known = None
        if known is not None:
            self._require_same(known)
            return False
        if self.is_finished:  # by another process, just now
            self._require_same(read_index(self._caller, self.path)[0].made_from)
            return True
        if others:
            raise ValueError(
                f"{self._caller} needs a folder of its own. {self.path} has other files in it: "
                f"{describe_value(others)}. Give one that is new or empty."
            )
        self._work.mkdir(exist_ok=True)
        self._store("job.json", self._made_from)
        return False

    def _is_untouched(self, shards: list[str]) -> bool:
        """Whether nothing was made here yet, and no process makes shards: it would hold the lock of its part."""
        busy = any(map(_LOCK.fullmatch, os.listdir(self.path)))
        return not shards and not busy and {*os.listdir(self._work)} <= {"job.json", "form.json"}

    @property
    def is_finished(self) -> bool:
        """Whether the index is there."""
        return (self.path / NAME).exists()

    def _require_same(self, there: dict[str, Any]) -> None:
        changed = differences(there, self._made_from, ("there", "now"))
        if changed:
            raise ValueError(
                f"{self._caller}: {self.path} was prepared from something else:\n{changed}\n"
                "Give a new folder, or remove this one to prepare it again."
            )

    def _store(self, name: str, value: Any) -> None:
        with written(self._work / name, alone=False) as file:
            file.write(json.dumps(value).encode())
        sync_folder(self.path)

    def form(self) -> SampleForm | None:
        """The form of the samples, if it was found before."""
        return SampleForm.from_json(_read(self._work / "form.json"))

    def keep_form(self, form: SampleForm) -> None:
        """Keep the form of the samples, for other parts and later runs."""
        self._store("form.json", form.to_json())

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[bool]:
        """Be the only process that does what has this name; waits as long as another one gets on with it."""
        progress, path = ProgressLine(self._caller), self.path / f".prepare-{name}.lock"
        waiting = lambda: progress.say(f"another process is at work in {self.path}")  # noqa: E731
        with contextlib.ExitStack() as stack:
            try:
                while True:
                    before = self._progress()
                    try:
                        alone = stack.enter_context(locked(path, _PATIENCE, waiting))
                        break
                    except TimeoutError:
                        if self._progress() == before:
                            raise
            finally:
                progress.close()
            yield alone

    def _progress(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(self._work))
        return []

    def clean(self, numbers: Collection[int], part: tuple[int, int]) -> None:
        """Remove what processes left that were ended while they made the shards of a part, which is locked."""
        locks = [found for name in os.listdir(self.path) if (found := _LOCK.fullmatch(name))]
        if any(int(found[2]) != part[1] for found in locks):
            return  # another division may be at work, at these shards, too
        self._remove(lambda word, rest: word.isdecimal() and int(word) in numbers and not rest.startswith("hashes"))

    def _remove(self, chosen: Callable[[str, str], bool]) -> None:
        """Remove files that did not get their names, by the first word of these and the rest."""
        for folder in (self.path, self._work):
            for name in os.listdir(folder) if folder.exists() else ():
                found = _PART.fullmatch(name)
                if found and chosen(found[1], found[2]):
                    (folder / name).unlink(missing_ok=True)

    def missing(self, maker: RangeMaker, numbers: Sequence[int]) -> list[int]:
        """Those of some ranges that are not made, or whose files have other sizes than they were written with."""
        return [number for number in numbers if not self._is_made(maker, number)]

    def _is_made(self, maker: RangeMaker, number: int) -> bool:
        if not isinstance(maker, ShardMaker):
            return maker.path(number).exists()
        record = _read(maker.path(number))
        if record is None:
            return False
        return all(_size(path) == entry["bytes"] for path, entry in self._entries(record))

    def _entries(self, record: dict[str, Any]) -> list[tuple[pathlib.Path, dict[str, Any]]]:
        """The files of a shard and what its record says of them."""
        shards = [(self.path / entry["name"], entry) for entry in record["files"]]
        lengths = record.get("lengths")
        return shards if lengths is None else [*shards, (self._work / lengths["name"], lengths)]

    def damaged(self, maker: ShardMaker) -> list[int]:
        """The shards with files that are not those that were written, and whose records are removed; others are flushed
        to the disk.
        """
        records = [_read(maker.path(number)) for number in range(len(maker))]
        entries = [(number, *pair) for number, record in enumerate(records) for pair in self._entries(record)]
        with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            hashes = pool.map(_flushed_hash, [path for _, path, _ in entries])
            wrong = {
                number for (number, _, entry), found in zip(entries, hashes, strict=True) if found != entry["sha256"]
            }
        for number in wrong:
            maker.path(number).unlink(missing_ok=True)
        return sorted(wrong)

    def finish(self, maker: ShardMaker, kind: str, form: SampleForm) -> None:
        """Write the index of all shards, and remove all that is not part of the result."""
        records = [(number, _read(maker.path(number))) for number in range(len(maker))]
        full = [(number, record) for number, record in records if record["samples"]]
        if not full:
            raise ValueError(f"{self._caller} has kept no sample, and an index needs at least one.")
        shards = tuple(Shard.of(record) for _, record in full)
        firsts = [tuple(map(tuple, record["first"])) for _, record in full]
        fixed = tuple(
            all(record["fixed"][place] for _, record in full) and all(one[place] == firsts[0][place] for one in firsts)
            for place in range(len(form.leaves))
        )
        sync_folder(self.path)
        lengths = self._lengths([np.load(maker.lengths_path(number)) for number, _ in full], form, fixed)
        index = Index(kind, form, firsts[0], fixed, shards, lengths, self._made_from)
        with written(self.path / NAME, alone=False) as file:
            file.write(index.to_json())
        self.discard()

    def _lengths(self, parts: Sequence[np.ndarray], form: SampleForm, fixed: Sequence[bool]) -> dict[str, FileEntry]:
        """The files of the lengths of leaves whose samples differ in length."""
        measured = [(leaf, same) for leaf, same in zip(form.leaves, fixed, strict=True) if leaf.has_length]
        entries = {}
        for place, (leaf, same) in enumerate(measured):
            if not same:
                lengths = np.concatenate([part[place] for part in parts])
                path = self.path / f"_lengths.{place}.npy"  # other readers of folders pass over such a name
                with written(path, alone=False) as file:
                    np.save(file, lengths.astype("<u4") if lengths.max() < 1 << 32 else lengths)
                entries[leaf.name] = FileEntry(**file_entry(path))
        return entries

    def discard(self) -> None:
        """Remove all that is not part of the result."""
        shutil.rmtree(self._work, ignore_errors=True)
        self._remove(lambda word, rest: True)


def _read(path: pathlib.Path) -> Any:
    """What a file of ours says; None if it is not there."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _size(path: pathlib.Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def _flushed_hash(path: pathlib.Path) -> str:
    """The hash of a file that is on the disk; nothing if there is none."""
    try:
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        return file_hash(path)
    except FileNotFoundError:
        return ""
