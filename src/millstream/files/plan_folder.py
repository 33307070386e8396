"""Where plan files are kept, how they are found again, and how several processes make one together."""

import contextlib
import contextvars
import dataclasses
import functools
import os
import pathlib
import re
import time
import warnings
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import IO, Any

import numpy as np

from millstream.files.atomic import settle, temporary_path, written
from millstream.files.changed import Stamp
from millstream.files.lock import locked
from millstream.files.plan_file import DamagedPlan, PlanWriter, open_plan
from millstream.files.safe_path import require_trust
from millstream.text.bar_line import ProgressLine
from millstream.text.errors import describe_value, require_path, require_positive

_TEMPORARY = re.compile(r"\.(.+\.(?:plan|unpacked))(?:\.values)?(?:\.[0-9a-f]{32})?\.part")
_OLD = 7 * 86_400.0  # seconds after which no one will continue what a killed process has begun


@dataclasses.dataclass(frozen=True)
class PlanFolder:
    """A folder of plan files, made by `ms.views.plans`.

    Example:
        >>> folder = ms.views.plans("plans")
        >>> folder.directory.name
        'plans'

    Attributes:
        directory: The folder.
        version: What stands for all that cannot be seen of functions and sources.
        timeout: Seconds without progress that end the waiting for a different process.
    """

    directory: pathlib.Path
    version: str | None = None
    timeout: float = 600.0

    def __enter__(self) -> "PlanFolder":
        _folders.set((*_folders.get(), self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _folders.set(_folders.get()[:-1])


class Building:
    """A plan that is being made, under the lock of its file.

    Args:
        final: The name of its file.
        of: The hash of what it is made from.
        alone: Whether the lock is held; if the file system has none, others may be making it, too.
    """

    def __init__(self, final: pathlib.Path, of: bytes, alone: bool) -> None:
        self._final = final
        self._of = of
        self._part = temporary_path(final, alone=alone)
        self._values = temporary_path(final.with_name(f"{final.name}.values"), alone=alone)

    def writer(self, dtype: np.dtype, rows: int) -> PlanWriter:
        """The file of the plan itself; what a killed process has written of it is continued."""
        return PlanWriter(self._part, self._of, dtype, rows)

    def values(self, dtype: np.dtype, rows: int) -> PlanWriter:
        """A file beside it for what the plan is made from; continued likewise, and removed when the plan is made."""
        return PlanWriter(self._values, self._of, dtype, rows)

    def store(self, dtype: np.dtype, rows: int, chunks: Iterable[np.ndarray]) -> None:
        """Write the whole plan, from its beginning."""
        self._part.unlink(missing_ok=True)
        with self.writer(dtype, rows) as writer:
            for chunk in chunks:
                writer.write(chunk)
            writer.finish()

    def run(self, build: Callable[["Building"], None]) -> None:
        """Make the plan. After an error nothing is left; after an interrupt, what can be continued."""
        try:
            build(self)
            settle(self._part, self._final)
            self._values.unlink(missing_ok=True)
        except Exception:
            self._part.unlink(missing_ok=True)
            self._values.unlink(missing_ok=True)
            raise


_folders: contextvars.ContextVar[tuple[PlanFolder, ...]] = contextvars.ContextVar("millstream_plans", default=())


def plans(directory: str | os.PathLike[str], *, version: str | None = None, timeout: float = 600.0) -> PlanFolder:
    """A folder where views keep what they found in the samples, so that later runs and other processes need not look.

    Give it to a view as `plans=`, or make the views in a `with` block. A plan file is found again by what it was made
    from: the samples, the arguments of the view, and the code of its function with the values that it uses.

    Example:
        >>> source = ms.ArraySampleSource({"x": np.arange(10)})
        >>> with ms.views.plans("plans"):
        ...     evens = ms.views.select(source, lambda sample: sample["x"] % 2 == 0)
        >>> len(evens)
        5

    Args:
        directory: The folder. It is made for this user alone if it is not there.
        version: Stands for what cannot be seen: a model that a function uses, a source whose samples cannot be hashed.
            Change it when they change. Code and values that can be seen count as well.
        timeout: Seconds to wait for a different process that is making the same plan and gets no further.
    """
    folder = _directory("plans", "directory", directory)
    if version is not None and not isinstance(version, str):
        raise TypeError(f"plans needs version to be a text such as '2'. Got {describe_value(version)}.")
    require_positive("plans", "timeout", timeout, "a number of seconds")
    return PlanFolder(folder, version, timeout)


def _directory(caller: str, name: str, given: str | os.PathLike[str]) -> pathlib.Path:
    folder = require_path(caller, f"{name} to be the path of a folder", given).expanduser()
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{caller} needs {name} to be a folder. {folder} is a file.")
    return folder.absolute()


# What views take as `plans=`.
Plans = PlanFolder | str | os.PathLike[str] | None


def folder_of(caller: str, given: Any) -> PlanFolder | None:
    """The folder that a view was given, or that of the `with` block it is made in; None if there is neither."""
    if given is None:
        return next(iter(_folders.get()[-1:]), None)
    if isinstance(given, PlanFolder):
        return given
    if isinstance(given, str | os.PathLike):
        return PlanFolder(_directory(caller, "plans", given))
    raise TypeError(
        f"{caller} needs plans to be a folder, such as ms.views.plans('data/plans'). Got {describe_value(given)}."
    )


def find_plan(folder: PlanFolder, name: str, of: bytes) -> tuple[np.ndarray, str] | None:
    """The array of a plan, mapped, and its SHA-256; None if it is not there, or damaged.

    Args:
        folder: Where it is kept.
        name: What the plan is, in a word or two.
        of: The hash of what it is made from.
    """
    with contextlib.suppress(FileNotFoundError, DamagedPlan):
        return open_plan(_path(folder, name, of), of)
    return None


def kept_array(
    folder: PlanFolder, caller: str, name: str, of: bytes, build: Callable[[Building], None]
) -> tuple[np.ndarray, str]:
    """The array of a plan, mapped, and its SHA-256. If it is not there it is made, by one process at a time.

    Args:
        folder: Where it is kept.
        caller: The caller's name, for errors.
        name: What the plan is, in a word or two.
        of: The hash of what it is made from.
        build: Makes the array.
    """
    final = _path(folder, name, of)
    try:
        require_trust(folder.directory, caller)
        found = find_plan(folder, name, of)
        if found is not None:
            return found
        folder.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            building = Building(final, of, _lock(stack, caller, final, folder.timeout))
            found = _sound(caller, final, of)
            if found is None:
                _remove_old(folder.directory)
                building.run(build)
                found = open_plan(final, of)
    except OSError as error:
        if error.filename is not None and str(error.filename).startswith(str(folder.directory)):
            error.add_note(f"This came from the plan file of {caller}. Give plans= a folder that can be written to.")
        raise
    return found


def kept_file(
    folder: PlanFolder, caller: str, name: str, of: bytes, write: Callable[[IO[bytes]], None]
) -> pathlib.Path:
    """A file that is kept beside plans. If it is not there, or was written to, it is made, by one process at a time.

    Args:
        folder: Where it is kept.
        caller: The caller's name, for errors.
        name: What it is, in a word or two.
        of: The hash of what it is made from.
        write: Writes it.
    """
    final = _path(folder, name, of, "unpacked")
    require_trust(folder.directory, caller)
    if _is_kept(folder, name, of, final):
        return final
    folder.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        alone = _lock(stack, caller, final, folder.timeout)
        if not _is_kept(folder, name, of, final):
            _remove_old(folder.directory)
            _path(folder, name, of).unlink(missing_ok=True)  # it is of a file that was written to since
            with written(final, alone=alone) as stream:
                write(stream)
                stream.flush()
                modified = int(time.time()) * 10**9  # in whole seconds, which every copying program keeps
                os.utime(stream.fileno(), ns=(modified, modified))
            found = np.array([final.stat().st_size, modified])
            kept_array(folder, caller, name, of, lambda making: making.store(found.dtype, len(found), [found]))
    return final


def _is_kept(folder: PlanFolder, name: str, of: bytes, final: pathlib.Path) -> bool:
    """Whether a file is there and as it was made."""
    kept, there = find_plan(folder, name, of), Stamp.of(final)
    return kept is not None and kept[0].tolist() == [there.size, there.mtime_ns]


def _path(folder: PlanFolder, name: str, of: bytes, kind: str = "plan") -> pathlib.Path:
    word = re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")[:60]
    return folder.directory / f"{word}-{of.hex()[:16]}.{kind}"


def _sound(caller: str, final: pathlib.Path, of: bytes) -> tuple[np.ndarray, str] | None:
    """What is there under the lock; a damaged file is told of, because it is about to be replaced."""
    try:
        return open_plan(final, of)
    except FileNotFoundError:
        return None
    except DamagedPlan as error:
        warnings.warn(f"{caller}: {error} It is made again.", RuntimeWarning, stacklevel=5)
        return None


def _lock(stack: contextlib.ExitStack, caller: str, final: pathlib.Path, timeout: float) -> bool:
    """Wait for the lock as long as its holder gets on."""
    progress = ProgressLine(caller)
    waiting = functools.partial(progress.say, f"a different process is making {final}")
    try:
        while True:
            before = _progress(final)
            try:
                return stack.enter_context(locked(_lock_of(final), timeout, waiting))
            except TimeoutError as error:
                if _progress(final) != before:
                    continue
                error.add_note(f"It makes the plan file of {caller}, and has written nothing in that time.")
                raise
    finally:
        progress.close()


def _lock_of(final: pathlib.Path) -> pathlib.Path:
    return final.with_name(f".{final.name}.lock")


def _progress(final: pathlib.Path) -> tuple[Stamp, ...]:
    """What changes while a process makes a plan."""
    names = final, final.with_name(f"{final.name}.values")
    return tuple(Stamp.of(temporary_path(name, alone=True)) for name in names)


def _remove_old(folder: pathlib.Path) -> None:
    """Remove what processes left that were killed long ago."""
    for path in list(folder.iterdir()):
        found = _TEMPORARY.fullmatch(path.name)
        with contextlib.suppress(OSError):
            if found and time.time() - path.stat().st_mtime > _OLD:
                with locked(_lock_of(folder / found[1]), 0.0):
                    path.unlink(missing_ok=True)
