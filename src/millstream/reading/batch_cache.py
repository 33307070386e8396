"""A folder of batches, one file each, and a manifest that says what they are batches of."""

import contextlib
import dataclasses
import hashlib
import pathlib
import re
import shutil
import time
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from millstream.files.atomic import written
from millstream.files.changed import Stamp
from millstream.files.lock import locked
from millstream.files.plain import decode, encode
from millstream.files.safe_path import require_trust
from millstream.reading.batch_file import BatchFormat, DamagedBatch, Sections
from millstream.reading.cache_contents import MANIFEST, CacheContents, require_manifest
from millstream.text.errors import describe_leaf, table

Mode = Literal["read-write", "read-only", "cache-only"]
_TIMEOUT = 60.0
# A name with 32 digits is that of a process without locks.
_TEMPORARY = re.compile(r"\.((?:e\d+-b\d+\.msb|manifest\.json)(\.[0-9a-f]{32})?)\.(?:part|lock)")
_OLD = 86_400.0  # seconds after which a temporary file that no lock protects is nobody's


@dataclasses.dataclass(frozen=True)
class Entry:
    """A batch from the cache.

    Attributes:
        leaves: Its arrays, read-only, in the file's own memory and aligned for JAX.
        ok: Which rows were read without an error; None if all were.
        additional: The plain values of its rows; None if there are none.
    """

    leaves: list[np.ndarray]
    ok: np.ndarray | None
    additional: list[Any] | None


def open_cache(caller: str, path: pathlib.Path, mode: Mode, contents: CacheContents) -> "OpenCache":
    """Open the cache in a folder, or begin one, if it is a cache of `contents`.

    Args:
        caller: The caller's name, for errors.
        path: The folder.
        mode: What may be done with it. Unless it is "read-write", nothing in the folder is changed.
        contents: What the cache has to be of.
    """
    require_trust(path, caller)
    if mode == "read-write":
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_leftovers(path)
        if not (path / MANIFEST).exists():
            _begin(caller, path, contents)
    contents.require_same(caller, path, require_manifest(caller, path, mode))
    identity = hashlib.sha256(contents.manifest()).hexdigest()[:32]
    names, shapes, dtypes = contents.names, contents.shapes, contents.dtypes
    return OpenCache(caller, path, mode, BatchFormat(identity, names, shapes, dtypes, contents.mask_shape))


@dataclasses.dataclass
class OpenCache:
    """A cache whose contents are known to be the right ones. Threads and processes may share it; nothing is held open.

    Attributes:
        caller: The caller's name, for errors.
        path: The folder.
        mode: What may be done with it.
        format: What its files look like.
    """

    caller: str
    path: pathlib.Path
    mode: Mode
    format: BatchFormat
    _verified: set[Stamp] = dataclasses.field(default_factory=set)
    _storing: bool = True
    _warned: bool = False

    def read(self, epoch: int, number: int) -> Entry | None:
        """A batch by its epoch and its number in it; None if it is not there and has to be made.

        The checksum of a file is compared when the file is first read; that it is as long as it should be, each time.
        """
        path = self._file(epoch, number)
        try:
            found = self.format.unpack(path, epoch, number, self._verified)
            additional = _decode_extras(path, found.additional)
        except FileNotFoundError:
            if self.mode != "cache-only":
                return None
            raise FileNotFoundError(
                f'{self.caller} with mode="cache-only" needs every batch in the cache. Batch {number} of epoch {epoch} '
                f'is not in {self.path}; fill the cache to the end with mode="read-write".'
            ) from None
        except DamagedBatch as error:
            if self.mode != "read-write":
                error.args = (f'{self.caller}: {error} Delete it and fill the cache again with mode="read-write".',)
                raise
            self._warn_of_damage(error)
            return None
        return Entry(found.leaves, found.ok, additional)

    def write(
        self,
        epoch: int,
        number: int,
        leaves: Sequence[np.ndarray],
        ok: np.ndarray | None = None,
        additional: list[Any] | None = None,
    ) -> None:
        """Store a batch, if the mode allows it and nobody else is storing the same one."""
        if self.mode != "read-write" or not self._storing:
            return
        self._require_shapes(epoch, number, leaves, ok)
        encoded = b"" if additional is None else encode(additional, self.caller)
        pieces, size = self.format.pack(epoch, number, Sections(list(leaves), ok, encoded))
        path = self._file(epoch, number)
        try:
            with locked(_lock_of(path.name, self.path), 0.0) as alone:
                # Waiting for the disk takes several times as long, and the checksum finds what a power cut has torn.
                with written(path, alone=alone, durable=False) as file:
                    for piece in pieces:
                        file.write(piece)
        except TimeoutError:
            return
        except OSError as error:
            self._storing = False
            self._warn_of_disk(error, path, size)

    def _file(self, epoch: int, number: int) -> pathlib.Path:
        return self.path / f"e{epoch}-b{number:05d}.msb"

    def _require_shapes(self, epoch: int, number: int, leaves: Sequence[np.ndarray], ok: np.ndarray | None) -> None:
        expected = [*zip(self.format.names, self.format.shapes, self.format.dtypes, leaves, strict=True)]
        if ok is not None:
            expected.append((" (which rows are good)", self.format.mask_shape, np.dtype(bool), ok))
        wrong = [
            (f"leaf{name}", f"shape {shape}, {dtype} in the cache, {describe_leaf(leaf)} here")
            for name, shape, dtype, leaf in expected
            if leaf.shape != shape or leaf.dtype != dtype
        ]
        if wrong:
            raise ValueError(
                f"{self.caller} keeps batches of one shape and dtype. Batch {number} of epoch {epoch} differs:\n"
                f"{table(wrong)}\nGive every batch the same ones, or use another folder for it."
            )

    def _warn_of_damage(self, error: DamagedBatch) -> None:
        if not self._warned:
            self._warned = True
            text = "The batch is made and stored again, and so are others like it, without a further word."
            warnings.warn(f"{self.caller}: {error} {text}", RuntimeWarning, stacklevel=3)

    def _warn_of_disk(self, error: OSError, path: pathlib.Path, size: int) -> None:
        try:
            free = f"{shutil.disk_usage(self.path).free} are free"
        except OSError:
            free = "the folder is gone"
        warnings.warn(
            f"{self.caller} cannot store {path}: {error.strerror}. {size} bytes are needed and {free}. The run "
            "continues without storing; fix that, and the next run stores the missing batches.",
            RuntimeWarning,
            stacklevel=3,
        )


def _decode_extras(path: pathlib.Path, encoded: bytes) -> list[Any] | None:
    try:
        return decode(encoded) if encoded else None
    except ValueError as error:
        raise DamagedBatch(f"{path} is damaged: {error}") from error


def _begin(caller: str, path: pathlib.Path, contents: CacheContents) -> None:
    """Write the manifest, unless another process comes first."""
    with locked(_lock_of(MANIFEST, path), _TIMEOUT) as alone:
        if not (path / MANIFEST).exists():
            _require_empty(caller, path)
            with written(path / MANIFEST, alone=alone) as file:
                file.write(contents.manifest())


def _require_empty(caller: str, path: pathlib.Path) -> None:
    others = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    if others:
        raise ValueError(
            f"{caller} needs a folder of its own. {path} has no {MANIFEST} and {len(others)} other files, such as "
            f"{others[0]!r}. Give it a new folder, or empty this one."
        )


def _lock_of(name: str, folder: pathlib.Path) -> pathlib.Path:
    return folder / f".{name}.lock"


def _remove_leftovers(folder: pathlib.Path) -> None:
    """Remove what killed processes left behind: a lock that can be had is nobody's, and so is the file behind it."""
    found = (_TEMPORARY.fullmatch(entry.name) for entry in folder.iterdir())
    for name, unlocked in {match.group(1, 2) for match in found if match}:
        part = folder / f".{name}.part"
        with contextlib.suppress(OSError), locked(_lock_of(name, folder), 0.0) as alone:
            if (alone and not unlocked) or time.time() - part.stat().st_mtime > _OLD:
                part.unlink(missing_ok=True)
