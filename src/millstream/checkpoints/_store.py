"""A directory of checkpoints: what is in it is whole, and what is saved is on the disk before it has a name."""

import dataclasses
import itertools
import math
import os
import pathlib
import re
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.typing import ArrayLike

from millstream.checkpoints import _arrays, _document, _leaves, _peers, folders, manifest
from millstream.checkpoints._errors import storage_errors
from millstream.checkpoints._saving import ARRAYS, PendingSave, Retention, RunLock, whole_checkpoints
from millstream.checkpoints.folders import LinkedFile
from millstream.errors import DamagedCheckpoint, NoCheckpoint, StorageFailed
from millstream.files.safe_path import plain_reader, require_trust
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_value, require_bool, require_mapping, require_path, whole_number
from millstream.text.summaries import value_text

_CALLER = "CheckpointStore"
_RUN, _TREE, _FILES = "run.json", "tree.json", "files"
_ATTEMPTS = 100  # to load what another run replaces in the meantime
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_said: set[pathlib.Path] = set()


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """What was saved: unpacks into tree, document and files.

    Example:
        >>> from millstream.checkpoints import CheckpointStore
        >>> with CheckpointStore("first run") as store:
        ...     store.save(3, {"w": jnp.ones(2)}, {"epoch": 1})
        ...     tree, document, files = store.load(like={"w": jnp.zeros(2)})
        >>> document
        {'epoch': 1}

    Attributes:
        tree: The tree.
        document: The document.
        files: Contents of the further files by their names.
        step: The step it was saved at.
        metrics: The metrics it was saved with; None for those that were not finite.
    """

    tree: PyTree
    document: PyTree
    files: Mapping[str, bytes]
    step: int
    metrics: Mapping[str, float | None]

    def __iter__(self) -> Iterator[PyTree]:
        return iter((self.tree, self.document, self.files))


class CheckpointStore:
    """Whole, verified checkpoints of a run in a directory.

    A checkpoint is a folder named by its step. It gets that name when all of it is on the disk, and carries the SHA-256
    of every file, which is compared when it is loaded. Saving continues in the background. If that fails, the next call
    raises the error, and older checkpoints are untouched. What the file system refuses is a `StorageFailed`.

    Over several processes each of them makes the same calls in the same order, in a directory that all of them see.
    Process 0 writes the document, gives names, and deletes.

    Example:
        >>> from millstream.checkpoints import CheckpointStore, Retention
        >>> with CheckpointStore("run", keep=Retention(latest=2, best=1, monitor="loss")) as store:
        ...     for step, loss in [(10, 0.2), (20, 0.5), (30, 0.4), (40, 0.3)]:
        ...         store.save(step, {"w": jnp.full(3, loss)}, {"step": step}, metrics={"loss": loss})
        ...     store.wait()
        ...     store.steps(), store.latest(), store.best()
        ([10, 30, 40], 40, 10)

    Args:
        directory: Where the checkpoints are. It is made if it is not there.

    Other Args:
        keep: Which checkpoints are kept.
        read_only: Whether to load only. Nothing in the directory is changed then, and another run may be writing to it.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, keep: Retention | None = None, read_only: bool = False
    ) -> None:
        require_path(_CALLER, "directory to be a path", directory)
        self.directory = pathlib.Path(os.path.abspath(os.path.expanduser(directory)))
        self.keep = Retention() if keep is None else keep
        self.read_only = read_only
        if not isinstance(self.keep, Retention):
            raise TypeError(f"{_CALLER} needs keep to be a Retention. Got {describe_value(keep)}.")
        require_bool(_CALLER, "read_only", read_only)
        self._saving: PendingSave | None = None
        self._lock: RunLock | None = None
        self._is_open = not read_only
        require_trust(self.directory, _CALLER, "directory")
        if not read_only:
            _peers.on_process_zero(self._take)

    def _take(self) -> None:
        with storage_errors(f"{_CALLER} cannot use {self.directory}"):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(_CALLER, self.directory)
            self._tidy()

    def _tidy(self) -> None:
        _warn_of_leftovers(folders.clear_leftovers(self.directory))

    # Saving

    def save(
        self,
        step: int,
        tree: PyTree,
        document: PyTree = None,
        files: Mapping[str, bytes | LinkedFile] | None = None,
        metrics: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Save a checkpoint: return when all is copied, and write it in the background.

        A save that is still in progress is waited for first. A checkpoint of the same step is replaced.

        Args:
            step: The step. It names the checkpoint.
            tree: Arrays of JAX, on any devices, or of NumPy, typed PRNG keys, Python numbers and text, in any pytree.
                Its buffers may be changed or donated as soon as this returns.
            document: Plain values and small arrays, in dicts, lists and tuples.
            files: Further files, as bytes by their names, or as files that `has_files` has found in an earlier
                checkpoint. Over several processes, each writes those that it gives, under names that differ.
            metrics: Numbers by their names, for `keep` and `best`.
        """
        self._require_open("save")
        step = whole_number(f"{_CALLER}.save", "step", step, least=0)
        leaves = _leaves.leaves_of(f"{_CALLER}.save", tree)
        given = {f"{_FILES}/{name}": content for name, content in _checked_files(files).items()}
        texts = {name: content for name, content in given.items() if isinstance(content, bytes)}
        shared = {name: content for name, content in given.items() if isinstance(content, LinkedFile)}
        if _peers.is_first():
            texts[_RUN] = _document.encode(f"{_CALLER}.save", document)
            texts[_TREE] = _leaves.encode([leaf for leaf, _ in leaves.values()])
        checked = _checked_metrics(metrics)
        self.wait()
        arrays = {
            number: _arrays.to_store(value) for number, (leaf, value) in enumerate(leaves.values()) if leaf.is_stored
        }
        self._saving = PendingSave(self.directory, step, arrays, texts, shared, checked, self.keep, self._lock)
        self._saving.start()

    def has_files(self, step: int, files: Mapping[str, tuple[int, str]]) -> bool:
        """Whether there is a whole checkpoint of this step with these files: by name, size and SHA-256, unread."""
        step = whole_number(f"{_CALLER}.has_files", "step", step, least=0)
        require_mapping(f"{_CALLER}.has_files", "files", files, "a dict of (size, SHA-256) by their names")
        with storage_errors(f"{_CALLER} cannot read {self.directory}"):
            contents, wrong = manifest.inspect(self._folder(step), thorough=False)
        return (
            not wrong
            and contents is not None
            and files.items()
            <= {name.removeprefix(f"{_FILES}/"): facts for name, facts in contents.files.items()}.items()
        )

    def check(self) -> None:
        """Raise the error of a save that has failed in the background, once. Cheap enough for every step of a loop."""
        if self._saving is not None and self._saving.error is not None:
            self.wait()

    def wait(self) -> None:
        """Wait until the save in progress is done, and raise its error if it has failed."""
        saving = self._saving
        if saving is not None:
            try:
                saving.finish()
            finally:
                self._saving = None if saving.is_over else saving
                _warn_of_leftovers(saving.left)

    def close(self) -> None:
        """Wait for the save in progress, and let another run have the directory."""
        try:
            self.wait()
        finally:
            self._is_open = False
            if self._lock is not None:
                with self._lock, storage_errors(f"{_CALLER} cannot tidy up {self.directory}"):
                    self._tidy()
                self._lock = None

    def __enter__(self) -> "CheckpointStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self, method: str) -> None:
        if not self._is_open:
            status = "read_only" if self.read_only else "closed"
            raise RuntimeError(
                f"{_CALLER}.{method} needs a store that is open for writing. This one is {status}. "
                f"Open the directory again: {_CALLER}({str(self.directory)!r})."
            )

    # Making room for another run

    def discard_after(self, step: int) -> None:
        """Delete all checkpoints after a step, for a run that resumes from there on a way of its own.

        Args:
            step: The last step that is kept; -1 keeps none.
        """
        self._require_open("discard_after")
        self.wait()
        last = whole_number(f"{_CALLER}.discard_after", "step", step, least=-1)
        _peers.on_process_zero(lambda: self._discard_after(last))

    def _discard_after(self, step: int) -> None:
        with storage_errors(f"{_CALLER}.discard_after cannot change {self.directory}"):
            for later in reversed(folders.steps_in(self.directory)):
                if later > step:
                    folders.withdraw(self.directory, later)
            self._tidy()

    def set_apart(self) -> pathlib.Path:
        """Move all checkpoints into a folder of their own, out of the way of a new run; where that is."""
        self._require_open("set_apart")
        self.wait()
        return pathlib.Path(_peers.on_process_zero(lambda: str(self._set_apart())))

    def _set_apart(self) -> pathlib.Path:
        with storage_errors(f"{_CALLER}.set_apart cannot change {self.directory}"):
            numbers = (number for number in itertools.count(1) if not (self.directory / f"earlier-{number}").exists())
            apart = self.directory / f"earlier-{next(numbers)}"
            apart.mkdir()
            for step in folders.steps_in(self.directory):
                name = folders.step_name(step)
                os.rename(self.directory / name, apart / name)
        return apart

    # Loading

    def steps(self) -> list[int]:
        """The steps of the whole checkpoints, in order: those with all files in their sizes. `load` compares hashes."""
        return list(self._whole())

    def latest(self) -> int | None:
        """The step of the newest whole checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step of the best whole checkpoint by the metric of `keep`; None if none has it."""
        if self.keep.monitor is None:
            raise ValueError(f"{_CALLER}.best needs a metric: keep=Retention(monitor=...).")
        return next(iter(self.keep.ranked(self._whole())), None)

    def _whole(self) -> dict[int, Mapping[str, float | None]]:
        with storage_errors(f"{_CALLER} cannot read {self.directory}"):
            return whole_checkpoints(self.directory)

    def load(self, step: int | None = None, *, like: PyTree = None) -> Checkpoint:
        """Load a checkpoint, after its files were compared with their hashes.

        Args:
            step: Of which step. None takes the newest that is whole, and warns of newer ones that are damaged.
            like: A tree like the one that was saved, of arrays or `jax.ShapeDtypeStruct`s. It says what the result is:
                its classes, NumPy or JAX, and the devices. A leaf that is on no device in particular stays so. None
                gives a dict of what was saved, as NumPy arrays, by their paths. Or a function that makes such a tree of
                the checkpoint, whose own tree is None then, or None if it is to stay so; it may raise
                `DamagedCheckpoint`.

        Raises:
            DamagedCheckpoint: The checkpoint of that step is damaged; or all are, and the message lists them.
            NoCheckpoint: There is no such checkpoint.
            StorageFailed: The directory cannot be read.
            ValueError: `like` has a different structure, different shapes or dtypes than what was saved, or dtypes
                that JAX does not keep.
        """
        self.wait()
        wanted = None if step is None else whole_number(f"{_CALLER}.load", "step", step, least=0)
        damaged: dict[int, str] = {}
        loaded = self._load(wanted, like, damaged)
        for other, wrong in damaged.items() if _peers.is_first() else ():
            text = f"{self._words_on(other, wrong)}\nCheckpoint {loaded.step} is used instead."
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return loaded

    def _load(self, step: int | None, like: PyTree, damaged: dict[int, str]) -> Checkpoint:
        """Load the checkpoint of a step, or the newest that is not damaged; what is wrong with others is added."""
        for _ in range(_ATTEMPTS):
            found, stamp = _peers.on_process_zero(lambda: self._find(step, damaged))
            if found is None:
                continue
            loaded, error = self._try_to_read(found, like)
            if self._has_changed(found, stamp):
                continue
            if _peers.any_of(isinstance(error, DamagedCheckpoint)):
                damaged[found] = "a different process could not read it" if error is None else str(error)
            elif _peers.any_of(error is not None):
                raise (
                    RuntimeError("Another process could not load its part. Its error says why.")
                    if error is None
                    else error
                )
            elif loaded is not None:
                return loaded
        raise StorageFailed(
            f"{_CALLER}.load: a run deletes the checkpoints in {self.directory} faster than they can be read: "
            f"{_ATTEMPTS} attempts failed. Let that run keep more of them."
        )

    def _find(self, step: int | None, damaged: dict[int, str]) -> tuple[int | None, list[int]]:
        """The step of a checkpoint whose files are whole, and what tells whether it is still the same one.

        Args:
            step: The one that is asked for; None for the newest.
            damaged: What is known to be wrong with others; more is added.

        Returns:
            None in place of the step if another run has changed something in the meantime.
        """
        with storage_errors(f"{_CALLER}.load cannot read {self.directory}"):
            steps = folders.steps_in(self.directory)
            if step is not None and step not in steps:
                raise NoCheckpoint(
                    f"{_CALLER}.load: {self.directory} has no checkpoint of step {step}. It has: {steps}."
                )
            for candidate in reversed(steps) if step is None else [step]:
                stamp = self._stamp(candidate)
                if candidate not in damaged:
                    wrong = manifest.damage(self._folder(candidate), thorough=True)
                    if not wrong:
                        return candidate, stamp
                    if self._has_changed(candidate, stamp) or not stamp:
                        return None, stamp
                    damaged[candidate] = "\n  ".join(wrong)
        if not steps:
            raise NoCheckpoint(f"{_CALLER}.load: {self.directory} has no checkpoint. Is it the right directory?")
        told = [self._words_on(candidate, wrong) for candidate, wrong in damaged.items()]
        raise DamagedCheckpoint("\n".join(told) + "\nLoad a different step, or start again in a different directory.")

    def _try_to_read(self, step: int, like: PyTree) -> tuple[Checkpoint | None, Exception | None]:
        """The checkpoint of a step, or why it cannot be read: no process may leave the others waiting."""
        try:
            return self._read(step, like), None
        except Exception as error:
            return None, error

    def _read(self, step: int, like: PyTree) -> Checkpoint:
        """Read the checkpoint of a step, whose files are whole."""
        folder = self._folder(step)
        with storage_errors(f"{_CALLER}.load cannot read checkpoint {step} in {self.directory}"):
            with manifest.making_sense_of(_TREE):
                saved = _leaves.decode(_read_file(folder / _TREE))
            with manifest.making_sense_of(_RUN):
                document = _document.decode(_read_file(folder / _RUN))
            with manifest.making_sense_of(ARRAYS):
                arrays = _arrays.ArrayFiles(folder / ARRAYS, saved.values())
            inner = folder / _FILES
            files = {path.name: _read_file(path) for path in sorted(inner.iterdir())} if inner.exists() else {}
            found = Checkpoint(None, document, files, step, manifest.read_manifest(folder).metrics)
        if isinstance(like, types.FunctionType):
            like = like(found)
            if like is None:  # the document and the files are all that is wanted
                return found
        with storage_errors(f"{_CALLER}.load cannot read checkpoint {step} in {self.directory}"):
            return dataclasses.replace(found, tree=self._read_tree(step, arrays, saved, like))

    def _read_tree(
        self, step: int, arrays: _arrays.ArrayFiles, saved: dict[str, _leaves.SavedLeaf], like: PyTree
    ) -> PyTree:
        caller = f"{_CALLER}.load"
        if like is None:
            templates = {path: _arrays.template(leaf) for path, leaf in saved.items()}
            return _arrays.read(caller, arrays, saved.values(), templates)
        now = _leaves.leaves_of(caller, like)
        where = f"checkpoint {step} in {self.directory}"
        _leaves.require_same(caller, where, saved, {path: leaf for path, (leaf, _) in now.items()})
        values = _arrays.read(caller, arrays, saved.values(), {path: value for path, (_, value) in now.items()})
        return jax.tree.unflatten(jax.tree.structure(like), [values[path] for path in now])

    def _folder(self, step: int) -> pathlib.Path:
        return self.directory / folders.step_name(step)

    def _words_on(self, step: int, wrong: str) -> str:
        return f"Checkpoint {step} in {self.directory} is damaged:\n  {wrong}"

    def _stamp(self, step: int) -> list[int]:
        """Changes when another run deletes or replaces a checkpoint."""
        try:
            found = os.lstat(self._folder(step))
        except OSError:
            return []
        return [found.st_ino, found.st_mtime_ns]

    def _has_changed(self, step: int, stamp: list[int]) -> bool:
        # Several processes that load together are those that write, and have to do the same.
        return jax.process_count() == 1 and self._stamp(step) != stamp

    def __repr__(self) -> str:
        return f"CheckpointStore({value_text(self.directory)})"


def _warn_of_leftovers(left: Mapping[pathlib.Path, OSError]) -> None:
    """Warn once of each folder that could not be deleted."""
    for path, error in left.items():
        if path not in _said:
            _said.add(path)
            warnings.warn(
                f"{_CALLER} could not delete what is not needed anymore in {path}: {error.strerror or error}. It takes "
                "up room and does no harm. Deleting it is tried again at every save.",
                RuntimeWarning,
                stacklevel=3,
            )


def _read_file(path: pathlib.Path) -> bytes:
    with plain_reader(path) as file:
        return file.read()


def _checked_files(files: Mapping[str, bytes | LinkedFile] | None) -> dict[str, bytes | LinkedFile]:
    checked, files = {}, {} if files is None else files
    require_mapping(f"{_CALLER}.save", "files", files, "a dict of bytes by their names")
    for name, content in files.items():
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or not isinstance(content, bytes | LinkedFile):
            raise ValueError(
                f"{_CALLER}.save needs files as bytes under names of letters, digits, '.', '_' and '-'. "
                f"Got {name!r}: {describe_value(content)}."
            )
        checked[name] = content
    return checked


def _checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float | None]:
    checked, metrics = {}, {} if metrics is None else metrics
    require_mapping(f"{_CALLER}.save", "metrics", metrics, "a dict of numbers by their names")
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"{_CALLER}.save needs metrics that are numbers. Got {name}: {describe_value(value)}."
            ) from None
        checked[str(name)] = number if math.isfinite(number) else None
    return checked
