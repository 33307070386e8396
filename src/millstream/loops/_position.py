"""Where a run is in its data, as something that can be saved, and the way back there."""

import warnings
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from millstream.pipeline.state import LoaderState
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_value

Position = dict[str, Any]  # plain values; what it is of is under "kind"


def save_position(state: PyTree, iterator: Any, loader: Any) -> tuple[Position, PyTree]:
    """A position in the data as plain values, and what of it are arrays.

    Args:
        state: The state of a loader, or None.
        iterator: What the batches come from, if it is no loader.
        loader: The loader, for what it can say of itself.
    """
    if isinstance(state, LoaderState):
        position: Position = {"kind": "loader", "key": np.asarray(state.key).tolist(), "step": int(state.step)}
        return {**position, "origin": _pairs(state.origin), "contents": _pairs(contents_of(loader))}, None
    if state is not None:
        return {"kind": "stream"}, state
    if hasattr(iterator, "get_state") and hasattr(iterator, "set_state"):
        return {"kind": "iterator", "state": iterator.get_state()}, None
    return {"kind": "iterable"}, None


def require_position(position: Any) -> None:
    """Refuse, with any error, what `save_position` cannot have made."""
    if position["kind"] not in _WORDS:
        raise ValueError(f"there is no position in {position['kind']!r}")
    if position["kind"] == "iterator":
        position["state"]
    if position["kind"] == "loader":
        words = [*np.ravel(position["key"]).tolist(), position["step"]]
        if any(type(word) is not int or not 0 <= word < 1 << 32 for word in words):
            raise ValueError(f"the key and the step of the loader are {words}")
        for what, said in (*position["origin"], *position["contents"]):
            if not isinstance(what, str) or not isinstance(said, str):
                raise ValueError("what the loader says of itself is not text")


def contents_of(loader: Any) -> tuple[tuple[str, str], ...]:
    """What the samples of a loader are, in words, as far as it can say."""
    contents = getattr(loader, "contents", None)
    return () if contents is None else contents()


def _pairs(words: Iterable[tuple[str, str]]) -> list[list[str]]:
    return [list(pair) for pair in words]


def saved_loader_state(position: Position) -> LoaderState:
    """The state of a loader as it was saved, whatever loader there is now."""
    origin = tuple((what, words) for what, words in position["origin"])
    return LoaderState(jnp.asarray(position["key"], jnp.uint32), jnp.asarray(position["step"], jnp.uint32), origin)


def loader_state_at(who: str, position: Position, loader: Any, key: Any) -> LoaderState:
    """The state of a loader at a saved position; refused if it is another loader, or another run of it."""
    if position["kind"] != "loader":
        raise ValueError(f"{who} {_saved_of(position)}, and now there is a DataLoader. {_ON_PURPOSE}")
    words = jnp.asarray(position["key"], jnp.uint32)
    state = loader.init_state(words if key is None else key)
    if not isinstance(state, LoaderState):
        raise ValueError(f"{who} {_saved_of(position)}, and now there is a stream. {_ON_PURPOSE}")
    # A run that was saved by hand may not have said what its samples are, and one that cannot be read says nothing.
    saved = dict(position["contents"])
    found = dict(contents_of(loader)) if saved else {}
    known = [what for what in saved if what in found]
    now = {**dict(state.origin), **{what: found[what] for what in known}, "key": np.asarray(state.key).tolist()}
    then = {**dict(position["origin"]), **{what: saved[what] for what in known}, "key": position["key"]}
    differing = [what for what in dict.fromkeys([*now, *then]) if now.get(what) != then.get(what)]
    if differing:
        lines = [f"  {what}: {then.get(what, 'none')} saved, {now.get(what, 'none')} now" for what in differing]
        raise ValueError(
            f"{who} goes on only with the same data in the same order. They differ in\n"
            + "\n".join(lines)
            + "\n"
            + _ON_PURPOSE
        )
    return loader.init_state(words, position["step"])


def seek(who: str, position: Position, dataset: Iterable[Any], steps: int) -> Any:
    """An iterator over a dataset, brought to a saved position."""
    iterator: Any = iter(dataset)
    if position["kind"] == "iterator":
        if not hasattr(iterator, "set_state"):
            raise ValueError(
                f"{who} {_saved_of(position)}, and that of {describe_value(dataset)} has no set_state to go on from "
                f"it. {_ON_PURPOSE}"
            )
        iterator.set_state(position["state"])
    elif position["kind"] == "iterable":
        if steps:
            warnings.warn(
                f"{who}: {type(dataset).__name__} cannot be started in the middle, so {steps:,} batches are drawn and "
                "thrown away. A DataLoader, or an iterator with get_state and set_state, goes on at once.",
                stacklevel=2,
            )
        for number in range(steps):
            try:
                next(iterator)
            except StopIteration:
                raise too_short(who, steps, number) from None
    else:
        raise ValueError(f"{who} {_saved_of(position)}, and now there is an iterable. {_ON_PURPOSE}")
    return iterator


def too_short(who: str, steps: int, batches: int) -> ValueError:
    """What is raised where data end before the step that a run was at."""
    return ValueError(
        f"{who} is at step {steps:,}, and the data end after {batches:,} batches. Give it the data it was saved with."
    )


def _saved_of(position: Position) -> str:
    return f"goes on only with the same data. What was saved is a position in {_WORDS[position['kind']]}"


_ON_PURPOSE = (
    "To go on with other data on purpose, take the rest and start the loop with it: "
    "saved = ms.restore(directory, state); loop(saved.state, ..., elapsed=saved.elapsed, history=saved.history)."
)
_WORDS = {
    "loader": "a DataLoader",
    "stream": "a stream",
    "iterator": "an iterator with a state",
    "iterable": "an iterable",
}
