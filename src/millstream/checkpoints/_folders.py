"""The folders of a store: a checkpoint's name is given to a folder that is whole, and taken away before it is deleted.

Beside the checkpoints, which are named by their steps, there may be folders that something else would be done with if
the process did not die: `.tmp-*` is being written, `.trash-*` is being deleted, `.old-*` is being replaced.
"""

import contextlib
import os
import pathlib
import re
import shutil
from collections.abc import Callable

from millstream._core.atomic import sync_folder

_STEP = re.compile(r"\d{10,}")
_LEFTOVER = re.compile(r"\.(tmp|trash|old)-(\d+)")


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
    final, replaced = directory / step_name(step), directory / f".old-{step}"
    for inner, _, _ in os.walk(temporary(directory, step), topdown=False):
        sync_folder(pathlib.Path(inner))
    if os.path.lexists(final):
        os.rename(final, replaced)
    try:
        os.rename(temporary(directory, step), final)
        sync_folder(directory)
        check(final)
    except BaseException:
        if os.path.lexists(final):
            withdraw(directory, step)
        if os.path.lexists(replaced):
            os.rename(replaced, final)
        raise
    delete(replaced)


def withdraw(directory: pathlib.Path, step: int) -> None:
    """Take the name from a checkpoint and delete it. If that fails midway, it is no checkpoint anymore."""
    trash = directory / f".trash-{step}"
    with contextlib.suppress(FileNotFoundError):
        os.rename(directory / step_name(step), trash)
    sync_folder(directory)
    delete(trash)


def clear_leftovers(directory: pathlib.Path) -> None:
    """Delete what a run that died left behind, and put back what it was about to replace."""
    names = os.listdir(directory) if directory.exists() else []
    for match in filter(None, map(_LEFTOVER.fullmatch, names)):
        path, kind, step = directory / match[0], match[1], int(match[2])
        final = directory / step_name(step)
        if kind == "old" and not os.path.lexists(final):
            os.rename(path, final)
        else:
            delete(path)


def delete(path: pathlib.Path) -> None:
    """Delete a folder if it is there."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
