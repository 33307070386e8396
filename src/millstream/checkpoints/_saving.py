"""One save under way: copied while the caller waits, then written, checked and named in a thread of its own."""

import atexit
import dataclasses
import errno
import os
import pathlib
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from millstream.checkpoints import _arrays, _peers, folders, manifest
from millstream.checkpoints._errors import storage_failed
from millstream.checkpoints._retention import Retention
from millstream.checkpoints._run_lock import RunLock
from millstream.checkpoints.sharing import SharedFile

ARRAYS = "state"

_under_way: "set[Saving]" = set()


@dataclasses.dataclass(eq=False)
class Saving:
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
    shared: Mapping[str, SharedFile]
    metrics: Mapping[str, float | None]
    keep: Retention
    lock: RunLock | None
    error: BaseException | None = None
    left: Mapping[pathlib.Path, OSError] = dataclasses.field(default_factory=dict)

    def start(self) -> None:
        """Begin, and return when the arrays are copied."""
        self._number, self._copied = _peers.next_save(), threading.Event()
        self._linked: dict[str, tuple[int, str]] = {}
        self._thread = threading.Thread(target=self._run, name=f"checkpoint {self.step}")
        self._thread.start()
        _under_way.add(self)
        self._copied.wait()

    @property
    def is_over(self) -> bool:
        """Whether it has come to an end."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the end, and raise the error if it is a bad one."""
        if self._thread.ident is not None:  # there may have been no thread to be had
            self._thread.join()
        _under_way.discard(self)
        if self.error is not None:
            raise self.error

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
            if self.error is None and self._stamp() in (None, before):
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
        parts = _arrays.copied(self.arrays)
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

    def _share(self, folder: pathlib.Path, name: str, file: SharedFile) -> None:
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
            file.write(contents.encoded())
            file.flush()
            os.fsync(file.fileno())
        folders.publish(self.directory, self.step, lambda final: _require_whole(final, self._linked))

    def _tidy(self) -> None:
        """Delete what is not kept. Where that cannot be done, the checkpoint is saved all the same."""
        try:
            if self.error is None:
                for step in self.keep.doomed(whole_checkpoints(self.directory)):
                    folders.withdraw(self.directory, step)
            self.left = folders.clear_leftovers(self.directory)
        except OSError as error:
            self.left = {self.directory: error}

    def _stamp(self) -> tuple[int, int] | None:
        """Changes when the checkpoint gets its name; None before."""
        try:
            found = os.stat(self.directory / folders.step_name(self.step) / manifest.NAME)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns


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
