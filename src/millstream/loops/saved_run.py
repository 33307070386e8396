"""A run as it is saved: state, data, history, elapsed and what callbacks remember, all of one moment."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax

from millstream.checkpoints import Checkpoint, CheckpointStore, DamagedCheckpoint, NoCheckpoint
from millstream.loops._position import Position, loader_state_at, require_position, saved_loader_state
from millstream.loops._remembered import Remembered, put_together, storable, tree_like, unstorable
from millstream.loops.callback import Callback
from millstream.loops.elapsed import FIELDS, Elapsed
from millstream.loops.history import History
from millstream.loops.history_parts import decode_history, encode_history
from millstream.reading.contracts import PyTree

_FORMAT = 2

# The step at which a run of this process was last saved in a directory, or taken up from it: where it goes on there.
reached: dict[str, int] = {}


@dataclasses.dataclass(frozen=True, eq=False)
class SavedRun:
    """A run at the moment it was saved, to go on from.

    Example:
        >>> tasks = {ms.every(1): lambda state: state + 1, ms.every(5): ms.checkpoint("run")}
        >>> _ = ms.loop(jnp.int32(0), range(10), tasks)
        >>> saved = ms.restore("run", jnp.int32(0))
        >>> int(saved.state), saved.elapsed.steps
        (10, 10)

    Attributes:
        state: The state of the loop.
        elapsed: How far it was.
        history: What was logged, outputs left out.
        data_state: The state of the loader; None if the data came from no loader.
        position: Where the run was in its data, in plain values.
        callbacks: What callbacks remembered, by their names.
        unfinished: The first task of the last step that had not been done, and whether it was one of those at the end
            of the run; None if the step was complete.
        stopped: Why a callback had ended the run; None if none had.
        step: The step of the checkpoint.
        metrics: The monitored metrics of that step.
    """

    state: Any
    elapsed: Elapsed
    history: History
    data_state: PyTree
    position: Position
    callbacks: Mapping[str, dict[str, Any]]
    unfinished: tuple[int, bool] | None
    stopped: str | None
    step: int
    metrics: Mapping[str, float | None]


def save_run(
    store: CheckpointStore,
    *,
    state: Any,
    elapsed: Elapsed,
    history: History,
    position: Position,
    data: PyTree,
    callbacks: list[Callback],
    unfinished: tuple[int, bool] | None,
    stopped: str | None,
    metrics: Mapping[str, Any],
) -> None:
    """Save a run; all arguments are of one moment, and may change as soon as this returns."""
    kept = storable(state)
    remembered = Remembered({name: callback.get_state() for name, callback in _named(callbacks).items()}, kept)
    document = {
        "format": _FORMAT,
        "elapsed": {name: getattr(elapsed, name) for name in FIELDS},
        "position": position,
        "callbacks": remembered.document,
        "unfinished": unfinished,
        "stopped": stopped,
    }
    tree = {"state": kept, "data": data, "callbacks": remembered.tree}
    store.wait()  # what it shares with an earlier checkpoint is there then
    files = encode_history(history, store, elapsed.steps) if jax.process_index() == 0 else {}
    store.save(elapsed.steps, tree, document, files, metrics)
    reached[str(store.directory)] = elapsed.steps


def load_run(
    who: str, directory: str | os.PathLike[str], state: Any, loader: Any, key: Any, step: int | None
) -> SavedRun | None:
    """The run that was saved last, or at a step; None if none was.

    Args:
        who: Who speaks in errors.
        directory: Where it was saved.
        state: A state of the same structure, which says where arrays go.
        loader: The loader of the run that will go on; None if it is not known.
        key: The key of that run; None if it is whatever it was.
        step: The step of the checkpoint; None for the newest.
    """
    run: list[_Run] = []

    def like(checkpoint: Checkpoint) -> PyTree:
        run[:] = [_decoded(checkpoint)]
        return run[0].tree_like(who, state, loader)

    with CheckpointStore(directory, read_only=True) as store:
        try:
            found = store.load(step, like=like)
        except NoCheckpoint:
            if step is None:
                return None
            steps = store.steps()
            raise NoCheckpoint(f"{who}: {store.directory} has no checkpoint of step {step}. It has: {steps}.") from None
        except (ValueError, TypeError) as error:
            error.add_note(
                f"{who} goes on only with a state like the one that was saved. What was saved can be had by its paths, "
                "to be put into another state on purpose: from millstream.checkpoints import CheckpointStore; "
                f"CheckpointStore({str(store.directory)!r}, read_only=True).load().tree"
            )
            raise
    (decoded,) = run
    saved = SavedRun(
        unstorable(state, found.tree["state"]),
        decoded.elapsed,
        decoded.history,
        _data_state(who, decoded.position, found.tree["data"], loader, key),
        decoded.position,
        put_together(decoded.callbacks, found.tree["callbacks"], state),
        decoded.unfinished,
        decoded.stopped,
        found.step,
        found.metrics,
    )
    reached[str(store.directory)] = saved.step
    return saved


@dataclasses.dataclass(frozen=True)
class _Run:
    """What a checkpoint holds of a run besides arrays."""

    elapsed: Elapsed
    history: History
    position: Position
    callbacks: Mapping[str, Mapping[str, Any]]
    unfinished: tuple[int, bool] | None
    stopped: str | None

    def tree_like(self, who: str, state: Any, loader: Any) -> PyTree:
        """What the saved tree should be like."""
        data = None
        if self.position["kind"] == "stream":
            if loader is None:
                raise ValueError(f"{who} needs the loader, whose data are a stream with a state of its own: loader=.")
            data = jax.eval_shape(loader.init_state, jax.random.key(0))
        kept = storable(state)
        return {"state": kept, "data": data, "callbacks": tree_like(self.callbacks, kept)}


def _decoded(checkpoint: Checkpoint) -> _Run:
    """What a checkpoint holds of a run; whatever else it is, is damage."""
    try:
        document = checkpoint.document
        if document["format"] != _FORMAT:
            raise ValueError(
                f"it has format {document['format']!r}, and this version reads format {_FORMAT}: "
                "load it with the version that saved it, or start anew in a different directory"
            )
        elapsed = Elapsed(**document["elapsed"])
        if elapsed.steps != checkpoint.step or not _are_numbers(elapsed):
            raise ValueError(f"the run is not at step {checkpoint.step}")
        require_position(document["position"])
        put_together(document["callbacks"], tree_like(document["callbacks"], None), None)
        unfinished, stopped = document["unfinished"], document["stopped"]
        if unfinished is not None and list(map(type, unfinished)) != [int, bool]:
            raise ValueError(f"unfinished is {unfinished!r}")
        if not isinstance(stopped, str | None):
            raise ValueError(f"stopped is {stopped!r}")
        history = decode_history(checkpoint.files)
        return _Run(elapsed, history, document["position"], document["callbacks"], unfinished, stopped)
    except Exception as error:  # it may be forged, or of a version to come
        words = f"{type(error).__name__}: {error}"[:200]
        raise DamagedCheckpoint(f"it is not a run as `ms.checkpoint` saves it ({words})") from error


def _are_numbers(elapsed: Elapsed) -> bool:
    return all(isinstance(getattr(elapsed, name), int | float | None) for name in FIELDS)


def _data_state(who: str, position: Position, data: PyTree, loader: Any, key: Any) -> PyTree:
    if loader is not None and position["kind"] != "stream":
        return loader_state_at(who, position, loader, key)
    if position["kind"] != "loader":
        return data
    return saved_loader_state(position)


def restore_callbacks(callbacks: list[Callback], saved: SavedRun) -> None:
    """Let callbacks go on from what they remembered."""
    for name, callback in _named(callbacks).items():
        if name in saved.callbacks:
            callback.set_state(dict(saved.callbacks[name]))


def _named(callbacks: list[Callback]) -> dict[str, Callback]:
    """Callbacks by class, numbered where there are several of one."""
    named: dict[str, Callback] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        number = sum(name.split(".")[0] == kind for name in named)
        named[kind if not number else f"{kind}.{number}"] = callback
    return named
