"""A run as it is saved: state, data, history, elapsed and what callbacks remember, all of one moment."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Generic

import jax
import jax.numpy as jnp
import numpy as np

from millstream.checkpoints import Checkpoint, CheckpointStore
from millstream.errors import DamagedCheckpoint, NoCheckpoint
from millstream.files import plain
from millstream.loops._dataset import (
    Position,
    data_differences,
    loader_state_at,
    require_position,
    saved_loader_state,
)
from millstream.loops._history import History
from millstream.loops.callback import Callback
from millstream.loops.elapsed import FIELDS, Elapsed
from millstream.loops.history_parts import decode_history, encode_history
from millstream.loops.loop_state import S, run_rows, state_text
from millstream.loops.skips import Skips
from millstream.pipeline.state import IterableState, LoaderState
from millstream.reading.contracts import PyTree
from millstream.text import html
from millstream.text.errors import describe_value

_CONTAINERS: dict[str, type] = {"list": list, "tuple": tuple}
_FORMAT = 3
# The step at which a run of this process was last saved in a directory, or taken up from it: where it continues there.
reached: dict[str, int] = {}


class _CallbackStates:
    """What all callbacks remember, taken apart.

    Args:
        states: What `get_state` of each callback gave, by the callback's name.
        like: The state of the run. A tree like it, such as the best one so far, may be of any classes.

    Attributes:
        document: What describes it, in plain values.
        tree: The arrays of each callback's entries.
    """

    def __init__(self, states: Mapping[str, Mapping[str, Any]], like: PyTree) -> None:
        self.document: dict[str, dict[str, Any]] = {}
        self.tree: dict[str, dict[str, PyTree]] = {}
        for name, entries in states.items():
            self.document[name] = {}
            for key, value in entries.items():
                arrays: list[Any] = []
                if _is_plain(value):
                    outline = ["plain", value]
                elif _is_like(value, like):
                    outline, arrays = ["state"], _storable(value)
                else:
                    outline = _outline(f"{name}.get_state()[{key!r}]", value, arrays)
                self.document[name][key] = outline
                if outline[0] != "plain":
                    self.tree.setdefault(name, {})[key] = arrays


def _tree_like(document: Mapping[str, Mapping[str, Any]], like: PyTree) -> PyTree:
    """What the saved tree of a document looks like."""
    found: dict[str, dict[str, PyTree]] = {}
    for name, entries in document.items():
        for key, outline in entries.items():
            if outline[0] != "plain":
                found.setdefault(name, {})[key] = like if outline[0] == "state" else list(_templates(outline))
    return found


def _put_together(
    document: Mapping[str, Mapping[str, Any]], tree: Mapping[str, Mapping[str, PyTree]], like: PyTree
) -> dict[str, dict[str, Any]]:
    """What the callbacks had remembered, by their names.

    Args:
        document: As it was saved.
        tree: As it was saved.
        like: A state of the run, for what of a tree like it cannot be saved.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, entries in document.items():
        found[name] = {}
        for key, outline in entries.items():
            if outline[0] == "state":
                found[name][key] = _unstorable(like, tree[name][key])
            else:
                found[name][key] = _value(outline, iter([] if outline[0] == "plain" else tree[name][key]))
    return found


def _storable(tree: PyTree) -> PyTree:
    """A tree without the leaves that are not data, such as functions."""
    return jax.tree.map(lambda leaf: leaf if _is_data(leaf) else None, tree)


def _unstorable(like: PyTree, tree: PyTree) -> PyTree:
    """A tree with those leaves again, from one like it."""
    leaves, structure = jax.tree.flatten(like)
    loaded = iter(jax.tree.leaves(tree))
    return jax.tree.unflatten(structure, [next(loaded) if _is_data(leaf) else leaf for leaf in leaves])


def _is_data(leaf: Any) -> bool:
    kinds = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | bool | int | float | complex | str
    return isinstance(leaf, kinds)


def _is_plain(value: Any) -> bool:
    try:
        plain.encode(value)
    except TypeError:
        return False
    return True


def _is_like(value: Any, like: PyTree) -> bool:
    try:
        return _specs(_storable(value)) == _specs(like)
    except ValueError:  # a dict whose keys have no order is not a tree
        return False


def _specs(tree: PyTree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(getattr(leaf, "shape", None), str(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves]


def _outline(place: str, value: Any, arrays: list[Any]) -> list[Any]:
    """A value in words, its arrays collected."""
    if _is_plain(value):
        return ["plain", value]
    if isinstance(value, jax.Array | np.ndarray):
        arrays.append(value)
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        kind = str(jax.random.key_impl(value)) if is_key else value.dtype.name  # pyright: ignore
        return ["key" if is_key else type(value).__name__, list(value.shape), kind]
    for name, container in _CONTAINERS.items():
        if type(value) is container:
            return [name, [_outline(f"{place}[{at}]", item, arrays) for at, item in enumerate(value)]]
    if type(value) is dict:
        return ["dict", [[key, _outline(f"{place}[{key!r}]", item, arrays)] for key, item in value.items()]]
    raise TypeError(
        "checkpoint keeps of what a callback remembers plain values, arrays, dicts, lists and tuples of them, and "
        f"trees like the state of the loop. Got {place}: {describe_value(value)}. Return its parts from get_state, and "
        "put them together again in set_state."
    )


def _items(outline: list[Any]) -> list[list[Any]]:
    return [item for _, item in outline[1]] if outline[0] == "dict" else outline[1]


def _templates(outline: list[Any]) -> Any:
    """What the arrays of an outline look like, in order."""
    kind = outline[0]
    if kind in ("dict", *_CONTAINERS):
        for item in _items(outline):
            yield from _templates(item)
    elif kind == "key":
        dtype = jax.eval_shape(lambda: jax.random.key(0, impl=outline[2])).dtype
        yield jax.ShapeDtypeStruct(tuple(outline[1]), dtype)
    elif kind == "ndarray":
        yield np.zeros(tuple(outline[1]), jnp.dtype(outline[2]))
    elif kind != "plain":
        yield jax.ShapeDtypeStruct(tuple(outline[1]), jnp.dtype(outline[2]))


def _value(outline: list[Any], arrays: Any) -> Any:
    """The value that an outline is of."""
    kind = outline[0]
    if kind == "plain":
        return outline[1]
    if kind == "dict":
        return {key: _value(item, arrays) for key, item in outline[1]}
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](_value(item, arrays) for item in outline[1])
    return next(arrays)


@dataclasses.dataclass(frozen=True, eq=False)
class SavedRun(Generic[S]):
    """A run at the moment it was saved, to resume from.

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

    state: S
    elapsed: Elapsed
    history: History
    data_state: PyTree
    position: Position
    callbacks: Mapping[str, dict[str, PyTree]]
    unfinished: tuple[int, bool] | None
    stopped: str | None
    step: int
    metrics: Mapping[str, float | None]

    @property
    def skip(self) -> list[tuple[int, int]]:
        """The batches that it leaves out, as ranges; see `skip` of `loop`."""
        return list(Skips.at_position(self.position).ranges)

    def __repr__(self) -> str:
        skip = f", skip={self.skip}" if self.skip else ""
        return f"SavedRun(step {self.step:,}, {state_text(self.state)}, {self.history}, {self.elapsed}{skip})"

    @html.never_raising
    def _repr_html_(self) -> str:
        return html.html_names(run_rows(self.state, self.elapsed)) + self.history._repr_html_()


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
    kept = _storable(state)
    remembered = _CallbackStates({name: callback.get_state() for name, callback in _by_name(callbacks).items()}, kept)
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
    caller: str, directory: str | os.PathLike[str], state: Any, loader: Any, key: Any, step: int | None
) -> SavedRun | None:
    """The run that was saved last, or at a step; None if none was.

    Args:
        caller: The caller's name, for errors.
        directory: Where it was saved.
        state: A state of the same structure, which says where arrays go.
        loader: The loader of the run that will continue; None if it is not known.
        key: The key of that run; None if it is whatever it was.
        step: The step of the checkpoint; None for the newest.
    """
    run: list[_SavedDocument] = []

    def like(checkpoint: Checkpoint) -> PyTree:
        run[:] = [_decode_run(checkpoint)]
        return run[0].tree_like(caller, state, loader)

    with CheckpointStore(directory, read_only=True) as store:
        try:
            found = store.load(step, like=like)
        except NoCheckpoint:
            if step is None:
                return None
            steps = store.steps()
            raise NoCheckpoint(
                f"{caller}: {store.directory} has no checkpoint of step {step}. It has: {steps}."
            ) from None
        except (ValueError, TypeError) as error:
            error.add_note(
                f"{caller} resumes only with a state like the one that was saved. What was saved can be had by its "
                "paths, to be put into another state on purpose: from millstream.checkpoints import CheckpointStore; "
                f"CheckpointStore({str(store.directory)!r}, read_only=True).load().tree"
            )
            raise
    (decoded,) = run
    saved = SavedRun(
        _unstorable(state, found.tree["state"]),
        decoded.elapsed,
        decoded.history,
        _data_state(caller, decoded.position, found.tree["data"], loader, key),
        decoded.position,
        _put_together(decoded.callbacks, found.tree["callbacks"], state),
        decoded.unfinished,
        decoded.stopped,
        found.step,
        found.metrics,
    )
    reached[str(store.directory)] = saved.step
    return saved


def saved_batch(caller: str, directory: str | os.PathLike[str], loader: Any, step: int) -> LoaderState:
    """The state of a loader before the batch that a step of a saved run had, or will have.

    Args:
        caller: The caller's name, for errors.
        directory: Where the run was saved.
        loader: The loader of the run.
        step: The step, counted from 1 on.
    """
    run: list[_SavedDocument] = []
    with CheckpointStore(directory, read_only=True) as store:
        try:
            store.load(like=lambda checkpoint: run.append(_decode_run(checkpoint)))
        except NoCheckpoint:
            raise NoCheckpoint(f"{caller} found no checkpoint in {store.directory}.") from None
    position, steps = run[-1].position, run[-1].elapsed.steps
    state = loader.init_state(jnp.asarray(position["key"], jnp.uint32)) if position["kind"] == "loader" else None
    if not isinstance(state, LoaderState) or isinstance(state, IterableState) or "progress" in position:
        raise ValueError(
            f"{caller} needs a run over a loader that starts at any step: a DataLoader over an indexed source. The "
            f"data of the run in {store.directory}, or of the loader that was given, have to be drawn in order."
        )
    if differing := data_differences(position, loader, state):
        raise ValueError(f"{caller} needs the loader of the run in {store.directory}. They differ in\n{differing}")
    skips = Skips.at_position(position)
    first, batch = skips.begun
    if step <= first:
        raise ValueError(
            f"{caller} knows the batches of the run in {store.directory} from step {first + 1:,} on: until then it "
            f"went through other data. Got step {step:,}."
        )
    if skips.count_kept(position["step"]) - skips.count_kept(batch) != steps - first:
        raise ValueError(
            f"{caller} cannot tell which batch step {step:,} had: the run in {store.directory} is at batch "
            f"{position['step']:,} after {steps:,} steps, so it was without batches that could not be read."
        )
    weights = {name: entry[1] for name, entry in run[-1].callbacks.get("SampleWeights", {}).items()}
    if weights and (weights["changes"] > 1 or step > weights["since"]):
        raise ValueError(
            f"{caller} cannot make the batch of step {step:,}: the run in {store.directory} changed the weights of its "
            f"samples, last at step {weights['since']:,}. With the weights of that time, batch number "
            f"{skips.batch_of(step):,} of loader.with_weights(weights) is the one."
        )
    return loader.init_state(state.key, skips.batch_of(step))


@dataclasses.dataclass(frozen=True)
class _SavedDocument:
    """What a checkpoint holds of a run besides arrays."""

    elapsed: Elapsed
    history: History
    position: Position
    callbacks: Mapping[str, Mapping[str, Any]]
    unfinished: tuple[int, bool] | None
    stopped: str | None

    def tree_like(self, caller: str, state: Any, loader: Any) -> PyTree:
        """What the saved tree should be like."""
        data = None
        if self.position["kind"] == "stream":
            if loader is None:
                raise ValueError(
                    f"{caller} needs the loader, whose data are a stream with a state of its own: loader=."
                )
            data = jax.eval_shape(loader.init_state, jax.random.key(0))
        kept = _storable(state)
        return {"state": kept, "data": data, "callbacks": _tree_like(self.callbacks, kept)}


def _decode_run(checkpoint: Checkpoint) -> _SavedDocument:
    """What a checkpoint holds of a run; whatever else it is, is damage."""
    try:
        document = checkpoint.document
        if document["format"] != _FORMAT:
            raise ValueError(
                f"it has format {document['format']!r}, and this version reads format {_FORMAT}: "
                "load it with the version that saved it, or start again in a different directory"
            )
        elapsed = Elapsed(**document["elapsed"])
        if elapsed.steps != checkpoint.step or not _are_numbers(elapsed):
            raise ValueError(f"the run is not at step {checkpoint.step}")
        require_position(document["position"])
        _put_together(document["callbacks"], _tree_like(document["callbacks"], None), None)
        unfinished, stopped = document["unfinished"], document["stopped"]
        if unfinished is not None and list(map(type, unfinished)) != [int, bool]:
            raise ValueError(f"unfinished is {unfinished!r}")
        if not isinstance(stopped, str | None):
            raise ValueError(f"stopped is {stopped!r}")
        history = decode_history(checkpoint.files)
        return _SavedDocument(elapsed, history, document["position"], document["callbacks"], unfinished, stopped)
    except Exception as error:  # it may be forged, or of a version to come
        words = f"{type(error).__name__}: {error}"[:200]
        raise DamagedCheckpoint(f"it is not a run as `ms.checkpoint` saves it ({words})") from error


def _are_numbers(elapsed: Elapsed) -> bool:
    return all(isinstance(getattr(elapsed, name), int | float | None) for name in FIELDS)


def _data_state(caller: str, position: Position, data: PyTree, loader: Any, key: Any) -> PyTree:
    if loader is not None and position["kind"] != "stream":
        return loader_state_at(caller, position, loader, key)
    if position["kind"] != "loader":
        return data
    return saved_loader_state(position)


def restore_callbacks(callbacks: list[Callback], saved: SavedRun) -> None:
    """Let callbacks resume from what they remembered."""
    for name, callback in _by_name(callbacks).items():
        if name in saved.callbacks:
            callback.set_state(dict(saved.callbacks[name]))


def _by_name(callbacks: list[Callback]) -> dict[str, Callback]:
    """Callbacks by class, numbered where there are several of one."""
    named: dict[str, Callback] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        number = sum(name.split(".")[0] == kind for name in named)
        named[kind if not number else f"{kind}.{number}"] = callback
    return named
