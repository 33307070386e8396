"""The manifest of a checkpoint: size and SHA-256 of each of its files, and of itself.

Names in a manifest are compared with those of the files that are there. They never become paths, so a hostile one can
lead nowhere.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from millstream.checkpoints.folders import step_name
from millstream.errors import DamagedCheckpoint
from millstream.files.safe_path import NotPlainFile, plain_reader

NAME = "manifest.json"
_FORMAT, _VERSION = "millstream checkpoint", 2
_LONGEST = 256 << 20
# What reading says of a damaged or missing file. Anything else, such as too many open files, is not damage.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, getattr(errno, "EUCLEAN", errno.EIO))


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint is made of.

    Attributes:
        step: The step it was saved at.
        metrics: The metrics it was saved with; None for those that were not finite.
        files: Size and SHA-256 of each file, by its name in the folder.
    """

    step: int
    metrics: Mapping[str, float | None]
    files: Mapping[str, tuple[int, str]]

    def encode(self) -> bytes:
        """As JSON; the last entry is the SHA-256 of all before it."""
        files = {name: {"size": size, "sha256": digest} for name, (size, digest) in sorted(self.files.items())}
        facts = {"format": _FORMAT, "version": _VERSION, "step": self.step, "metrics": self.metrics, "files": files}
        body = json.dumps(facts, indent=1, allow_nan=False).removesuffix("\n}").encode() + b",\n"
        return body + _seal(body)


def _seal(body: bytes) -> bytes:
    return f' "sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


@contextlib.contextmanager
def making_sense_of(name: str) -> Iterator[None]:
    """Around reading a file of a checkpoint: whatever is wrong with its contents is damage.

    Args:
        name: Of the file.
    """
    try:
        yield
    except (DamagedCheckpoint, MemoryError):
        raise
    except OSError as error:
        raise DamagedCheckpoint(f"{name}: {_unreadable(error)}") from error
    except Exception as error:  # a seal can be right and the contents forged, or of a version to come
        words = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise DamagedCheckpoint(f"{name}: its contents make no sense ({words[:200]})") from error


def _unreadable(error: OSError) -> str:
    """Why a file cannot be read, if that is damage; any other error is raised."""
    if isinstance(error, NotPlainFile):
        return "not a plain file"
    if error.errno not in _DAMAGE:
        raise error
    return "missing" if error.errno == errno.ENOENT else f"cannot be read ({error.strerror})"


def read_manifest(folder: pathlib.Path) -> Manifest:
    """The manifest of the checkpoint in a folder.

    Raises:
        DamagedCheckpoint: It is missing or not as it was written; the message is one line without the folder.
    """
    with making_sense_of(NAME):
        with plain_reader(folder / NAME) as file:
            data = file.read(_LONGEST)
        length = len(_seal(b""))
        if data[-length:] != _seal(data[:-length]):
            raise DamagedCheckpoint(f"{NAME}: its contents differ from the SHA-256 in its last line")
        facts = json.loads(data)
        if (facts["format"], facts["version"]) != (_FORMAT, _VERSION):
            raise DamagedCheckpoint(f"{NAME}: of {facts['format']!r} in version {facts['version']}, not {_VERSION}")
        files = {name: (facts["size"], facts["sha256"]) for name, facts in facts["files"].items()}
        return _sensible(Manifest(facts["step"], facts["metrics"], files))


def _sensible(manifest: Manifest) -> Manifest:
    """The manifest, if `encoded` can have written it."""
    sizes = [size for size, _ in manifest.files.values()]
    if any(type(number) is not int or number < 0 for number in (manifest.step, *sizes)):
        raise ValueError("a step or a size is not a whole number")
    if not all(value is None or type(value) in (int, float) for value in manifest.metrics.values()):
        raise ValueError("a metric is not a number")
    return manifest


def take_stock(
    folder: pathlib.Path,
    step: int,
    metrics: Mapping[str, float | None],
    known: Mapping[str, tuple[int, str]] | None = None,
) -> Manifest:
    """A manifest of all files in a folder, each of which is on the disk afterwards.

    Args:
        folder: The folder.
        step: The step of the checkpoint.
        metrics: The metrics of the checkpoint.
        known: Size and SHA-256 of files that are on the disk already, and are not read again.
    """
    files = {} if known is None else dict(known)
    for name, path in _files_in(folder).items():
        if name in files:
            continue
        with plain_reader(path) as file:
            files[name] = (os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())
            os.fsync(file.fileno())
    return Manifest(step, metrics, files)


def damage(folder: pathlib.Path, *, thorough: bool, known: Collection[str] = ()) -> list[str]:
    """What is wrong with a checkpoint, a line for each file; nothing for a whole one. See `inspect`."""
    return inspect(folder, thorough=thorough, known=known)[1]


def inspect(folder: pathlib.Path, *, thorough: bool, known: Collection[str] = ()) -> tuple[Manifest | None, list[str]]:
    """The manifest of a checkpoint, if it can be read, and what is wrong with it, a line for each file.

    Args:
        folder: Of the checkpoint.
        thorough: Whether to read all files and compare their hashes. Without that, that they are there and have the
            right sizes.
        known: Names of files that are not read even then, because an earlier checkpoint shares them.
    """
    try:
        manifest = read_manifest(_no_link(folder))
        with making_sense_of(folder.name):
            found = _files_in(folder)
            del found[NAME]
    except DamagedCheckpoint as error:
        return None, [str(error)]
    expected, lines = manifest.files, []
    if folder.name != step_name(manifest.step):
        lines.append(f"{NAME}: of step {manifest.step}, in a folder named {folder.name}")
    lines += [f"{name}: missing" for name in sorted(expected.keys() - found.keys())]
    lines += [f"{name}: extra, the manifest does not name it" for name in sorted(found.keys() - expected.keys())]
    for name in sorted(expected.keys() & found.keys()):
        wrong = _difference(found[name], *expected[name], thorough=thorough and name not in known)
        if wrong:
            lines.append(f"{name}: {wrong}")
    return manifest, lines


def _difference(path: pathlib.Path, size: int, digest: str, *, thorough: bool) -> str:
    try:
        with plain_reader(path) as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                return f"{found} bytes, the manifest says {size}"
            seen = hashlib.file_digest(file, "sha256").hexdigest() if thorough else digest
    except OSError as error:
        return _unreadable(error)
    return "" if seen == digest else f"SHA-256 {seen}, the manifest says {digest}"


def _files_in(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Everything in a folder that is not a folder, by its name with `/`. Links are not followed."""
    found: dict[str, pathlib.Path] = {}
    for base, folders, names in os.walk(folder, onerror=_raise):
        linked = [name for name in folders if os.path.islink(os.path.join(base, name))]
        for name in (*names, *linked):
            path = pathlib.Path(base, name)
            found[path.relative_to(folder).as_posix()] = path
    return found


def _no_link(path: pathlib.Path) -> pathlib.Path:
    if path.is_symlink():
        raise DamagedCheckpoint(f"{path.name}: a symbolic link")
    return path


def _raise(error: Any) -> None:
    raise error
