"""Faults of disks, files, memory and descriptors."""

import errno
import os
import pathlib
import random
import resource
import time
from typing import Any

import millstream as ms
from soak.fault import UNHOOKED, Fault, all_of

FULL = (errno.ENOSPC, errno.EFBIG)


class SlowDisk(Fault):
    """Samples take their time, and so do writing to the disk and naming files."""

    delay = 0.04
    _slow = ("fsync", "replace", "rename", "mkdir")

    def __enter__(self) -> "Fault":
        self.struck, self._quick = 1, {name: getattr(os, name) for name in self._slow}
        for name, function in self._quick.items():
            setattr(os, name, self._slowed(function, random.Random(self.target)))
        return self

    def fix(self) -> None:
        for name, function in self._quick.items():
            setattr(os, name, function)

    def _slowed(self, function: Any, chance: random.Random) -> Any:
        def slow(*arguments: Any, **options: Any) -> Any:
            time.sleep(chance.choice([0.0, 0.0, 0.05]) * chance.random())
            return function(*arguments, **options)

        return slow


class FullDisk(Fault):
    """The disk with the cache, or with the checkpoints, is full from some moment on."""

    warnings = (r"cannot store .* are needed and", r"could not delete")

    @property
    def timed(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.case.way in UNHOOKED

    def strike(self) -> None:
        self.struck = 1
        self.disk.fill(self.chance.choice([0, 5000]))

    def fix(self) -> None:
        self.disk.free()

    def expects(self, error: BaseException) -> bool:
        if self.name == "full disk, cache":
            return self.disk.folder is None and isinstance(
                error, ms.errors.SharedMemoryFull
            )  # a limit is for all files
        text = all_of(error)
        full = any(os.strerror(number) in text for number in FULL) or getattr(error, "errno", None) in FULL
        return full and isinstance(error, Exception)


class FullMemory(Fault):
    """There is no memory to share with workers that are started, until that was told."""

    warnings = (r"batches of this stream are held",)

    def __enter__(self) -> "Fault":
        if self.disk.folder is not None:
            ms.reading.settings.shared_memory_folder = str(self.disk.folder)
        self.strike()
        return self

    def strike(self) -> None:
        self.struck = 1
        self.disk.fill(self.chance.choice([0, 4096, 20_000]))

    def fix(self) -> None:
        self.disk.free()

    def __exit__(self, *_: object) -> None:
        self.fix()
        ms.reading.settings.shared_memory_folder = None

    def expects(self, error: BaseException) -> bool:
        return isinstance(error, ms.errors.SharedMemoryFull) and "shared memory" in str(error)


class ChangedFile(Fault):
    """A file is written to, cut or deleted while it is read."""

    rebuilds = True

    def strike(self) -> None:
        self.struck, (part,) = 1, self.case.parts
        path = self.folder / f"{part.first}-{part.samples}.{part.source}"
        if path.is_dir():
            path = path / "all" / f"{self.index:04}.png"
        self._path, self._content, self._mode = path, path.read_bytes(), part.source
        what = self.chance.choice(["longer", "cut", "gone"])
        if what == "gone":
            return path.unlink()
        other = path.with_name("other")
        other.write_bytes(self._content + b"more" if what == "longer" else self._content[: len(self._content) // 2])
        other.replace(path)

    def fix(self) -> None:
        if self.struck:
            self._path.write_bytes(self._content)

    def expects(self, error: BaseException) -> bool:
        if self.struck and self._mode == "images":  # each is opened by itself, and needs to be good and no more
            return isinstance(error, OSError | ValueError) and str(self._path) in all_of(error)
        return isinstance(error, ms.errors.FileChanged) and str(self._path) in str(error)


class FewDescriptors(Fault):
    """No more files can be opened than a few, until that was told or for some batches."""

    warnings = (r"cannot store .* are needed and", r"could not delete")
    _limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    _since = 0

    def batch(self, count: int) -> None:
        super().batch(count)
        self._since += self._done
        if self._since > 4:
            self.fix()

    def strike(self) -> None:
        self.struck = 1
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + self.chance.randrange(12), self._limits[1]))

    def fix(self) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)

    def expects(self, error: BaseException) -> bool:
        text = all_of(error)
        told = os.strerror(errno.EMFILE) in text or "unable to open database file" in text
        return self.struck > 0 and isinstance(error, OSError) and told


class DamagedCache(Fault):
    """A file of the cache is replaced by a damaged one."""

    warnings = (r"The batch is made and stored again",)

    def strike(self) -> None:
        found = sorted((self.folder / "cache").glob("*.msb"))
        if found:
            self.struck = 1
            damage(self.chance.choice(found), self.chance)


class DamagedCheckpoint(Fault):
    """The newest checkpoint is damaged when the run is taken up again."""

    warnings = (r"is damaged",)

    def batch(self, count: int) -> None:
        """It strikes between two legs of a run."""

    def strike(self) -> None:
        found = sorted((self.folder / "run").glob("[0-9]*"))
        if len(found) > 1:
            self.struck = 1
            files = sorted(path for path in found[-1].rglob("*") if path.is_file() and path.stat().st_size)
            damage(self.chance.choice(files), self.chance)


def damage(path: pathlib.Path, chance: random.Random) -> None:
    """Flip a bit of a file, or cut it."""
    content = bytearray(path.read_bytes())
    if chance.random() < 0.5:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    else:
        del content[chance.randrange(len(content)) :]
    other = path.with_name(f".{path.name}.damaged")
    other.write_bytes(content)
    other.replace(path)
