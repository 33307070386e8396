"""One save in progress: copied while the caller waits, then written, checked and named in a thread of its own."""

import atexit
import contextlib
import dataclasses
import datetime
import errno
import json
import math
import os
import pathlib
import shutil
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import jax

from millstream.checkpoints import _arrays, _peers, folders, manifest
from millstream.checkpoints._errors import storage_failed
from millstream.checkpoints.folders import LinkedFile
from millstream.files.changed import ABSENT, Stamp
from millstream.files.lock import locked
from millstream.files.safe_path import plain_reader
from millstream.text.errors import require_choice, require_int

Metrics = Mapping[str, float | None]
_LOCK_FILE = ".lock"
ARRAYS = "state"
_under_way: "set[PendingSave]" = set()


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept: the latest, the best by a metric, and every n steps one for good.

    Each rule keeps what it keeps; the newest checkpoint is always kept. A metric that is missing or not finite makes
    no checkpoint a best one, and takes nothing from those that are.

    Example:
        >>> from millstream.checkpoints import Retention
        >>> keep = Retention(latest=1, best=1, monitor="loss")
        >>> keep.to_delete({100: {"loss": 0.3}, 200: {"loss": 0.2}, 300: {"loss": 0.4}})
        [100]

    Args:
        latest: How many of the latest are kept; None keeps all.
        best: How many of the best are kept.
        monitor: The metric that says which are best.
        mode: Whether the best has the smallest ("min") or the largest ("max") value.
        every: Checkpoints at multiples of this step are kept for good; None for none.
    """

    latest: int | None = 3
    best: int = 0
    monitor: str | None = None
    mode: Literal["min", "max"] = "min"
    every: int | None = None

    def __post_init__(self) -> None:
        if self.latest is not None:
            require_int("Retention", "latest", self.latest, least=1)
        require_int("Retention", "best", self.best, least=0)
        require_choice("Retention", "mode", self.mode, ("min", "max"))
        if self.every is not None:
            require_int("Retention", "every", self.every, least=1)
        if self.best and self.monitor is None:
            raise ValueError(f"Retention needs the name of a metric to keep the best {self.best}: monitor=.")

    def ranked(self, checkpoints: Mapping[int, Metrics]) -> list[int]:
        """The steps with a finite value of the metric, best first; of equal ones the earlier first."""
        sign = 1 if self.mode == "min" else -1
        values = {step: metrics.get(self.monitor) for step, metrics in checkpoints.items() if self.monitor is not None}
        finite = {step: value for step, value in values.items() if value is not None and math.isfinite(value)}
        return sorted(finite, key=lambda step: (sign * finite[step], step))

    def to_delete(self, checkpoints: Mapping[int, Metrics]) -> list[int]:
        """The steps of the checkpoints that are not kept.

        Args:
            checkpoints: The metrics of each checkpoint, by its step.
        """
        if self.latest is None:
            return []
        steps = sorted(checkpoints)
        kept = {*steps[-self.latest :], *self.ranked(checkpoints)[: self.best]}
        return [step for step in steps if step not in kept and not (self.every is not None and step % self.every == 0)]


class RunLock:
    """Holds a directory for this process, until a `with` is over, or it is forgotten, or the process ends in any way.

    Args:
        caller: The caller's name, for errors.
        directory: The directory.

    Raises:
        RuntimeError: Another run holds it.
    """

    def __init__(self, caller: str, directory: pathlib.Path) -> None:
        stack, path = contextlib.ExitStack(), directory / _LOCK_FILE
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}).encode()
        try:
            # Where a file system has no locks, one run per directory is left to the user.
            stack.enter_context(locked(path, 0.0, holder=holder))
        except TimeoutError:
            raise RuntimeError(
                f"{caller} needs a directory that no other run writes to. {directory} is held by {_holder(path)}. Wait "
                "for that run or end it, give another directory, or open this one with read_only=True."
            ) from None
        self._release = weakref.finalize(self, stack.close)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._release()


def _holder(path: pathlib.Path) -> str:
    try:
        with plain_reader(path) as file:
            found = json.loads(file.read(4096))
        return f"process {found['pid']} on {found['host']}, since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


@dataclasses.dataclass(eq=False)
class PendingSave:
    """A checkpoint on its way to the disk.

    Attributes:
        directory: Of the store.
        step: The step.
        arrays: Arrays by the numbers of their leaves.
        texts: Contents of all other files by their names; over several processes, what this one writes.
        shared: Files that earlier checkpoints have under the same names, and this one shares with them.
        metrics: What the manifest says of them.
        keep: Which checkpoints are kept afterwards.
        lock: Of the directory, which must outlive this.
        error: Why it failed; None as long as it did not.
        left: Folders that could not be deleted, and why.
    """

    directory: pathlib.Path
    step: int
    arrays: Mapping[int, Any]
    texts: Mapping[str, bytes]
    shared: Mapping[str, LinkedFile]
    metrics: Mapping[str, float | None]
    keep: Retention
    lock: RunLock | None
    error: BaseException | None = None
    left: Mapping[pathlib.Path, OSError] = dataclasses.field(default_factory=dict)

    def start(self) -> None:
        """Begin, and return when the arrays are copied."""
        self._number, self._copied, self._over = _peers.next_save(), threading.Event(), threading.Event()
        self._linked: dict[str, tuple[int, str]] = {}
        self._thread = threading.Thread(target=self._work, name=f"checkpoint {self.step}")
        self._thread.start()
        _under_way.add(self)
        self._copied.wait()

    @property
    def is_over(self) -> bool:
        """Whether it has come to an end."""
        return self._over.is_set() or self._thread.ident is None

    def finish(self) -> None:
        """Wait for the end, and raise the error if it is a bad one."""
        if self._thread.ident is not None:  # there may have been no thread to be had
            self._over.wait()  # no join: Python takes a thread for ended whose join Ctrl-C has cut short
            self._thread.join()
        _under_way.discard(self)
        if self.error is not None:
            raise self.error

    def _work(self) -> None:
        try:
            self._run()
        finally:
            self._over.set()

    def _run(self) -> None:
        try:
            before = self._stamp()
            self._attempt(self._write)
            self._copied.set()
            _peers.meet(f"{self._number}-written")
            if _peers.is_first():
                self._attempt(self._commit)
                self._attempt(self._tidy)
            _peers.meet(f"{self._number}-named")
            if self.error is None and self._stamp() in (ABSENT, before):
                self.error = RuntimeError(
                    "Another process could not save its part of a checkpoint. Its error says why."
                )
        except BaseException as error:
            self.error = error
        finally:
            self._copied.set()
            self.arrays, self.texts = {}, {}
        doing = f"the checkpoint of step {self.step} was saved in {self.directory}"
        if isinstance(self.error, OSError):
            failed = storage_failed(f"CheckpointStore.save failed while {doing}", self.error)
            failed.__cause__ = self.error
            self.error = failed
        elif self.error is not None:
            self.error.add_note(f"This happened while {doing}.")

    def _attempt(self, part: Callable[[], None]) -> None:
        """Do a part; the first error is kept, for the other processes must not be left waiting."""
        try:
            part()
        except BaseException as error:
            self.error = error if self.error is None else self.error

    def _write(self) -> None:
        parts = _arrays.copy_parts(self.arrays)
        self._copied.set()
        folder = folders.temporary(self.directory, self.step)
        folder.mkdir(exist_ok=True)  # without its parents: where a disk is gone, another one would be written to
        (folder / ARRAYS).mkdir(exist_ok=True)
        if self.arrays:
            _arrays.write(folder / ARRAYS, parts)
        for name, content in self.texts.items():
            (folder / name).parent.mkdir(exist_ok=True)
            with open(folder / name, "xb") as file:
                file.write(content)
        for name, file in self.shared.items():
            (folder / name).parent.mkdir(exist_ok=True)
            self._share(folder, name, file)
        self._mark(jax.process_index()).touch()

    def _share(self, folder: pathlib.Path, name: str, file: LinkedFile) -> None:
        """Give a file of an earlier checkpoint a second name; where there are no hard links, copy it."""
        source = self.directory / folders.step_name(file.step) / name
        try:
            os.link(source, folder / name, follow_symlinks=False)
            self._linked[name] = (file.size, file.sha256)
        except (OSError, NotImplementedError):
            shutil.copyfile(source, folder / name, follow_symlinks=False)

    def _mark(self, process: int) -> pathlib.Path:
        """A file that says that a process has written its part."""
        return folders.temporary(self.directory, self.step) / f".written-{process}"

    def _commit(self) -> None:
        if self.error is not None:
            return
        folder = folders.temporary(self.directory, self.step)
        missing = [number for number in range(jax.process_count()) if not self._mark(number).exists()]
        if missing:
            raise RuntimeError(f"Process {missing[0]} could not write its part of a checkpoint. Its error says why.")
        for number in range(jax.process_count()):
            self._mark(number).unlink()
        contents = manifest.take_stock(folder, self.step, self.metrics, self._linked)
        with open(folder / manifest.NAME, "xb") as file:
            file.write(contents.encode())
            file.flush()
            os.fsync(file.fileno())
        folders.publish(self.directory, self.step, lambda final: _require_whole(final, self._linked))

    def _tidy(self) -> None:
        """Delete what is not kept. Where that cannot be done, the checkpoint is saved all the same."""
        try:
            if self.error is None:
                for step in self.keep.to_delete(whole_checkpoints(self.directory)):
                    folders.withdraw(self.directory, step)
            self.left = folders.clear_leftovers(self.directory)
        except OSError as error:
            self.left = {self.directory: error}

    def _stamp(self) -> Stamp:
        """The stamp of the manifest, which changes when the checkpoint gets its name."""
        try:
            return Stamp.of(self.directory / folders.step_name(self.step) / manifest.NAME)
        except OSError:
            return ABSENT  # an error here would leave the other processes waiting


def whole_checkpoints(directory: pathlib.Path) -> dict[int, Mapping[str, float | None]]:
    """The metrics of all checkpoints that have a good manifest and all files in their sizes, by their steps."""
    found = {}
    for step in folders.steps_in(directory):
        contents, wrong = manifest.inspect(directory / folders.step_name(step), thorough=False)
        if contents is not None and not wrong:
            found[step] = contents.metrics
    return found


def _require_whole(folder: pathlib.Path, known: Collection[str]) -> None:
    wrong = manifest.damage(folder, thorough=True, known=known)
    if wrong:
        raise OSError(errno.EIO, "What was read back is not what was written:\n  " + "\n  ".join(wrong) + "\n")


def _finish_all() -> None:
    """At the end of a program, finish what nobody has waited for, or say that it is lost."""
    for saving in list(_under_way):
        try:
            saving.finish()
        except BaseException as error:
            print(
                f"CheckpointStore: the program ended while the checkpoint of step {saving.step} was saved in "
                f"{saving.directory}, and it is lost ({error!r}). Close the store at the end of a run.",
                file=sys.stderr,
            )


atexit.register(_finish_all)
