"""A directory of checkpoints: what is in it is whole, and what is saved is on the disk before it has a name."""

import itertools
import math
import os
import pathlib
import re
import types
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from millstream._core.contracts import PyTree
from millstream._core.errors import describe_value, require_int
from millstream._core.safe_path import require_trust
from millstream.checkpoints import _arrays, _document, _folders, _leaves, _manifest, _peers
from millstream.checkpoints._checkpoint import Checkpoint
from millstream.checkpoints._manifest import DamagedCheckpoint
from millstream.checkpoints._retention import Retention
from millstream.checkpoints._run_lock import RunLock
from millstream.checkpoints._saving import ARRAYS, Saving, whole_checkpoints

_WHO = "CheckpointStore"
_RUN, _TREE, _FILES = "run.json", "tree.json", "files"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class CheckpointStore:
    """Whole, verified checkpoints of a run in a directory.

    A checkpoint is a folder named by its step. It gets that name when all of it is on the disk, and carries the SHA-256
    of every file, which is compared when it is loaded. Saving goes on in the background. If that fails, the next call
    raises the error, and older checkpoints are untouched.

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
        self.directory = pathlib.Path(os.path.abspath(os.path.expanduser(directory)))
        self.keep = Retention() if keep is None else keep
        self.read_only = read_only
        if not isinstance(self.keep, Retention):
            raise TypeError(f"{_WHO} needs keep to be a Retention. Got {describe_value(keep)}.")
        self._saving: Saving | None = None
        self._lock: RunLock | None = None
        self._writer: _arrays.ArrayWriter | None = None
        _arrays.orbax(_WHO)
        require_trust(self.directory, _WHO, "directory")
        if not read_only:
            _peers.by_first(self._take)
            self._writer = _arrays.ArrayWriter(_WHO)

    def _take(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(_WHO, self.directory)
        _folders.clear_leftovers(self.directory)

    # Saving

    def save(
        self,
        step: int,
        tree: PyTree,
        document: Any = None,
        files: Mapping[str, bytes] | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a checkpoint: return when all is copied, and write it in the background.

        A save that is still under way is waited for first. A checkpoint of the same step is replaced.

        Args:
            step: The step. It names the checkpoint.
            tree: Arrays of JAX, on any devices, or of NumPy, typed PRNG keys, Python numbers and text, in any pytree.
                Its buffers may be changed or donated as soon as this returns.
            document: Plain values and small arrays, in dicts, lists and tuples.
            files: Further files, as bytes by their names. Over several processes, each writes those that it gives,
                under names that differ.
            metrics: Numbers by their names, for `keep` and `best`.
        """
        writer = self._require_writer("save")
        require_int(f"{_WHO}.save", "step", step, least=0)
        leaves = _leaves.leaves_of(f"{_WHO}.save", tree)
        texts = {f"{_FILES}/{name}": content for name, content in _checked_files(files).items()}
        if _peers.is_first():
            texts[_RUN] = _document.encode(f"{_WHO}.save", document)
            texts[_TREE] = _leaves.encode([leaf for leaf, _ in leaves.values()])
        checked = _checked_metrics(metrics)
        self.wait()
        arrays = {
            str(number): _arrays.to_store(value)
            for number, (leaf, value) in enumerate(leaves.values())
            if leaf.is_stored
        }
        self._saving = Saving(self.directory, step, arrays, texts, checked, self.keep, writer, self._lock)
        self._saving.start()

    def check(self) -> None:
        """Raise the error of a save that has failed in the background, once. Cheap enough for every step of a loop."""
        if self._saving is not None and self._saving.error is not None:
            self.wait()

    def wait(self) -> None:
        """Wait until the save under way is done, and raise its error if it has failed."""
        saving = self._saving
        if saving is not None:
            try:
                saving.finish()
            finally:
                self._saving = None if saving.is_over else saving

    def close(self) -> None:
        """Wait for the save under way, and let another run have the directory."""
        try:
            self.wait()
        finally:
            self._writer = None
            if self._lock is not None:
                with self._lock:
                    _folders.clear_leftovers(self.directory)
                self._lock = None

    def __enter__(self) -> "CheckpointStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()

    def _require_writer(self, method: str) -> _arrays.ArrayWriter:
        if self._writer is None:
            status = "read_only" if self.read_only else "closed"
            raise RuntimeError(
                f"{_WHO}.{method} needs a store that is open for writing. This one is {status}. "
                f"Open the directory again: {_WHO}({str(self.directory)!r})."
            )
        return self._writer

    # Making room for another run

    def discard_after(self, step: int) -> None:
        """Delete all checkpoints after a step, for a run that goes on from there on a way of its own.

        Args:
            step: The last step that is kept.
        """
        self._require_writer("discard_after")
        self.wait()
        _peers.by_first(lambda: self._discard_after(step))

    def _discard_after(self, step: int) -> None:
        for later in reversed(_folders.steps_in(self.directory)):
            if later > step:
                _folders.withdraw(self.directory, later)

    def set_apart(self) -> pathlib.Path:
        """Move all checkpoints into a folder of their own, out of the way of a new run; where that is."""
        self._require_writer("set_apart")
        self.wait()
        return pathlib.Path(_peers.by_first(lambda: str(self._set_apart())))

    def _set_apart(self) -> pathlib.Path:
        numbers = (number for number in itertools.count(1) if not (self.directory / f"earlier-{number}").exists())
        apart = self.directory / f"earlier-{next(numbers)}"
        apart.mkdir()
        for step in _folders.steps_in(self.directory):
            name = _folders.step_name(step)
            os.rename(self.directory / name, apart / name)
        return apart

    # Loading

    def steps(self) -> list[int]:
        """The steps of the whole checkpoints, in order: those with all files in their sizes. `load` compares hashes."""
        return list(whole_checkpoints(self.directory))

    def latest(self) -> int | None:
        """The step of the newest whole checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step of the best whole checkpoint by the metric of `keep`; None if none has it."""
        if self.keep.monitor is None:
            raise ValueError(f"{_WHO}.best needs a metric: keep=Retention(monitor=...).")
        return next(iter(self.keep.ranked(whole_checkpoints(self.directory))), None)

    def load(self, step: int | None = None, *, like: PyTree = None) -> Checkpoint:
        """Load a checkpoint, after its files were compared with their hashes.

        Args:
            step: Of which step. None takes the newest that is whole, and warns of newer ones that are damaged.
            like: A tree like the one that was saved, of arrays or `jax.ShapeDtypeStruct`s. It says what the result is:
                its classes, NumPy or JAX, and the devices. A leaf that is on no device in particular stays so. None
                gives a dict of what was saved, as NumPy arrays, by their paths. Or a function that makes such a tree of
                the document.

        Raises:
            DamagedCheckpoint: The checkpoint of that step is damaged; or all are, and the message lists them.
            FileNotFoundError: There is no such checkpoint.
            ValueError: `like` has another structure, other shapes or other dtypes than what was saved.
        """
        self.wait()
        found = _peers.by_first(lambda: self._find(step))
        folder = self.directory / _folders.step_name(found)
        saved = _leaves.decode((folder / _TREE).read_bytes())
        document = _document.decode((folder / _RUN).read_bytes())
        like = like(document) if isinstance(like, types.FunctionType) else like
        tree = self._load_tree(found, folder / ARRAYS, saved, like)
        inner = folder / _FILES
        files = {path.name: path.read_bytes() for path in sorted(inner.iterdir())} if inner.exists() else {}
        return Checkpoint(tree, document, files, found, _manifest.read_manifest(folder).metrics)

    def _load_tree(self, step: int, folder: pathlib.Path, saved: dict[str, _leaves.Leaf], like: PyTree) -> PyTree:
        who = f"{_WHO}.load"
        if like is None:
            return _arrays.read(who, folder, saved, {path: _arrays.template(leaf) for path, leaf in saved.items()})
        now = _leaves.leaves_of(who, like)
        where = f"checkpoint {step} in {self.directory}"
        _leaves.require_same(who, where, saved, {path: leaf for path, (leaf, _) in now.items()})
        values = _arrays.read(who, folder, saved, {path: value for path, (_, value) in now.items()})
        return jax.tree.unflatten(jax.tree.structure(like), [values[path] for path in now])

    def _find(self, step: int | None) -> int:
        """The step of a checkpoint that is whole: the one that is asked for, or the newest."""
        steps = _folders.steps_in(self.directory)
        if step is not None and step not in steps:
            raise FileNotFoundError(f"{_WHO}.load: {self.directory} has no checkpoint of step {step}. It has: {steps}.")
        told = []
        for candidate in reversed(steps) if step is None else [step]:
            wrong = _manifest.damage(self.directory / _folders.step_name(candidate), thorough=True)
            if not wrong:
                for text in told:
                    warnings.warn(f"{text}\nCheckpoint {candidate} is used instead.", RuntimeWarning, stacklevel=5)
                return candidate
            told.append(f"Checkpoint {candidate} in {self.directory} is damaged:\n  " + "\n  ".join(wrong))
        if not told:
            raise FileNotFoundError(f"{_WHO}.load: {self.directory} has no checkpoint. Is it the right directory?")
        raise DamagedCheckpoint("\n".join(told) + "\nLoad another step, or start anew in another directory.")


def _checked_files(files: Mapping[str, bytes] | None) -> dict[str, bytes]:
    checked = {}
    for name, content in ({} if files is None else files).items():
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or not isinstance(content, bytes):
            raise ValueError(
                f"{_WHO}.save needs files as bytes under names of letters, digits, '.', '_' and '-'. "
                f"Got {name!r}: {describe_value(content)}."
            )
        checked[name] = content
    return checked


def _checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float | None]:
    checked = {}
    for name, value in ({} if metrics is None else metrics).items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"{_WHO}.save needs metrics that are numbers. Got {name}: {describe_value(value)}."
            ) from None
        checked[str(name)] = number if math.isfinite(number) else None
    return checked
