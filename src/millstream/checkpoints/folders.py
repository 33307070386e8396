"""The folders of a store: a checkpoint's name is given to a folder that is whole, and taken away before it is deleted.

Beside the checkpoints, which are named by their steps, there may be folders that something else would be done with if
the process did not die: `.tmp-*` is being written, `.trash-*` is being deleted, `.old-*` is being replaced.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import re
from collections.abc import Callable

from millstream.files.atomic import sync_folder

_STEP = re.compile(r"\d{10,}")
_LEFTOVER = re.compile(r"\.(tmp|trash|old)-(\d+)(?:-\d+)?")


@dataclasses.dataclass(frozen=True)
class LinkedFile:
    """A file that a checkpoint has already, for a new one to have under the same name without writing it again.

    Both are names of one file: deleting one checkpoint leaves the other whole, and damage to the file damages both.

    Attributes:
        step: The step of the checkpoint that has it.
        size: Its size in bytes.
        sha256: Its SHA-256.
    """

    step: int
    size: int
    sha256: str


def step_name(step: int) -> str:
    """The name of the folder of a checkpoint."""
    return f"{step:010d}"


def steps_in(directory: pathlib.Path) -> list[int]:
    """The steps of all checkpoints in a directory, whole or not, in order."""
    try:
        names = [name for name in os.listdir(directory) if _STEP.fullmatch(name) and name == step_name(int(name))]
    except FileNotFoundError:
        return []
    return sorted(map(int, names))


def temporary(directory: pathlib.Path, step: int) -> pathlib.Path:
    """Where a checkpoint is written."""
    return directory / f".tmp-{step}"


def publish(directory: pathlib.Path, step: int, check: Callable[[pathlib.Path], None]) -> None:
    """Give the folder that was written its name, in place of a checkpoint of the same step if there is one.

    Args:
        directory: Of the store.
        step: Of the checkpoint.
        check: Raises if the checkpoint is not whole. What was there before is then put back.
    """
    final, replaced = directory / step_name(step), _free(directory, "old", step)
    for inner, _, _ in os.walk(temporary(directory, step), topdown=False):
        sync_folder(pathlib.Path(inner))
    if os.path.lexists(final):
        os.rename(final, replaced)
    try:
        os.rename(temporary(directory, step), final)
        sync_folder(directory)
        check(final)
    except BaseException:
        withdraw(directory, step)
        if os.path.lexists(replaced):
            os.rename(replaced, final)
        raise


def withdraw(directory: pathlib.Path, step: int) -> None:
    """Take the name from a checkpoint, if there is one. `clear_leftovers` deletes it."""
    if os.path.lexists(directory / step_name(step)):
        os.rename(directory / step_name(step), _free(directory, "trash", step))
        sync_folder(directory)


def _free(directory: pathlib.Path, kind: str, step: int) -> pathlib.Path:
    """A name that nothing has, such as what could not be deleted."""
    paths = itertools.chain([f".{kind}-{step}"], (f".{kind}-{step}-{number}" for number in itertools.count(1)))
    return next(directory / name for name in paths if not os.path.lexists(directory / name))


def clear_leftovers(directory: pathlib.Path) -> dict[pathlib.Path, OSError]:
    """Delete what is not needed anymore, and put back what a run that died was about to replace.

    Returns:
        What could not be deleted, and why: somebody may have a file of it open, or has made it immutable. It is in
        nobody's way, and the next call tries again.
    """
    left: dict[pathlib.Path, OSError] = {}
    names = sorted(os.listdir(directory)) if directory.exists() else []
    for match in filter(None, map(_LEFTOVER.fullmatch, names)):
        path, kind, step = directory / match[0], match[1], int(match[2])
        final = directory / step_name(step)
        if kind == "old" and not os.path.lexists(final):
            os.rename(path, final)
            continue
        if kind != "trash":  # its name is needed when the same step is saved again
            trash = _free(directory, "trash", step)
            with contextlib.suppress(OSError):
                os.rename(path, trash)
                path = trash
        try:
            _delete(path)
        except OSError as error:
            left[path] = error
    return left


def _delete(path: pathlib.Path) -> None:
    """Delete a file or a folder with one descriptor at a time; `shutil.rmtree` needs one more for each level."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        for name in os.listdir(path):
            _delete(path / name)
        path.rmdir()
