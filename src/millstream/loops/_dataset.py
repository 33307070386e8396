"""What a loop draws its batches from: any iterable, or a loader, whose state is then the loop's to keep."""

import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from millstream.loops.elapsed import Elapsed
from millstream.loops.schedules import Period
from millstream.loops.skips import Ranges, Skips
from millstream.pipeline.state import (
    IterableState,
    LoaderState,
    check_position,
    plain_state,
    state_from_plain,
    until_step,
)
from millstream.plan.phases import EpochLengths
from millstream.plan.plan import STEP_LIMIT
from millstream.reading.contracts import IndexedSource, PyTree, Stream, T
from millstream.text.errors import describe_value, differences, function_name, raised_in

Position = dict[str, PyTree]  # plain values; what it is of is under "kind"
_ON_PURPOSE = (
    "To continue with other data on purpose, take the rest and start the loop with it: "
    "saved = ms.restore(directory, state); loop(saved.state, ..., elapsed=saved.elapsed, history=saved.history)."
)
_WORDS = {
    "loader": "a DataLoader",
    "stream": "a stream",
    "iterator": "an iterator with a state",
    "iterable": "an iterable",
}
_MANY = 2**16  # batches asked for at once, if an epoch has no more and nobody knows how many it will be
_HOPELESS = 100  # batches in a row that cannot be read, if an epoch has no more


def save_position(state: PyTree, iterator: Any, loader: Any, skips: Skips) -> tuple[Position, PyTree]:
    """A position in the data as plain values, and what of it are arrays.

    Args:
        state: The state of a loader, or None.
        iterator: What the batches come from, if it is not a loader.
        loader: The loader, for what it can say of itself.
        skips: Its batches that the run leaves out.
    """
    if isinstance(state, LoaderState):
        contents = [list(pair) for pair in contents_of(loader)]
        return {"kind": "loader", **plain_state(state), "contents": contents, **skips.plain()}, None
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
        words = [*np.ravel(position["key"]).tolist(), position["step"], *position.get("progress", ())]
        if any(type(word) is not int or not 0 <= word < 1 << 32 for word in words):
            raise ValueError(f"the key, the step and the progress of the loader are {words}")
        for what, said in (*position["origin"], *position["contents"]):
            if not isinstance(what, str) or not isinstance(said, str):
                raise ValueError("what the loader says of itself is not text")
        Skips.at_position(position)


def contents_of(loader: Any) -> tuple[tuple[str, str], ...]:
    """What the samples of a loader are, in words, as far as it can say."""
    contents = getattr(loader, "contents", None)
    return () if contents is None else contents()


def saved_loader_state(position: Position) -> LoaderState:
    """The state of a loader as it was saved, whatever loader there is now."""
    return jax.tree.map(jnp.asarray, state_from_plain(position))


def loader_state_at(caller: str, position: Position, loader: Any, key: Any) -> LoaderState:
    """The state of a loader at a saved position; refused if it is another loader, or another run of it."""
    if position["kind"] != "loader":
        raise ValueError(f"{caller} {_saved_of(position)}, and now there is a DataLoader. {_ON_PURPOSE}")
    words = jnp.asarray(position["key"], jnp.uint32)
    state = loader.init_state(words if key is None else key)
    if not isinstance(state, LoaderState):
        raise ValueError(f"{caller} {_saved_of(position)}, and now there is a stream. {_ON_PURPOSE}")
    if differing := data_differences(position, loader, state):
        raise ValueError(
            f"{caller} resumes only with the same data in the same order. They differ in\n{differing}\n{_ON_PURPOSE}"
        )
    in_order = isinstance(state, IterableState)
    return saved_loader_state(position) if in_order else loader.init_state(words, position["step"])


def data_differences(position: Position, loader: Any, state: LoaderState) -> str:
    """A line for each thing in which a loader, or the key of its state, differs from a saved position."""
    # A run that was saved by hand may not have said what its samples are, and one that cannot be read says nothing.
    # What a pipeline does from a later step on may be changed.
    step = position["step"]
    saved = until_step(position["contents"], step)
    found = until_step(contents_of(loader), step) if saved else {}
    known = [what for what in saved if what in found]
    origin, saved_origin = until_step(state.origin, step), until_step(position["origin"], step)
    now = {**origin, **{what: found[what] for what in known}, "key": np.asarray(state.key).tolist()}
    then = {**saved_origin, **{what: saved[what] for what in known}, "key": position["key"]}
    return differences(then, now)


def seek(caller: str, position: Position, dataset: Iterable[Any], steps: int) -> Any:
    """An iterator over a dataset, brought to a saved position."""
    iterator: Any = iter(dataset)
    if position["kind"] == "iterator":
        if not hasattr(iterator, "set_state"):
            raise ValueError(
                f"{caller} {_saved_of(position)}, and that of {describe_value(dataset)} has no set_state to resume "
                f"from it. {_ON_PURPOSE}"
            )
        iterator.set_state(position["state"])
    elif position["kind"] == "iterable":
        if steps:
            warnings.warn(
                f"{caller}: {type(dataset).__name__} cannot be started in the middle, so {steps:,} batches are drawn "
                "and thrown away. A DataLoader, or an iterator with get_state and set_state, continues at once.",
                stacklevel=2,
            )
        for number in range(steps):
            try:
                next(iterator)
            except StopIteration:
                raise too_short(caller, steps, number) from None
    else:
        raise ValueError(f"{caller} {_saved_of(position)}, and now there is an iterable. {_ON_PURPOSE}")
    return iterator


def too_short(caller: str, steps: int, batches: int) -> ValueError:
    """What is raised where data end before the step that a run was at."""
    return ValueError(
        f"{caller} is at step {steps:,}, and the data end after {batches:,} batches. Give it the data it "
        "was saved with."
    )


def _saved_of(position: Position) -> str:
    return f"resumes only with the same data. What was saved is a position in {_WORDS[position['kind']]}"


@runtime_checkable
class Loader(Protocol[T]):
    """Batches as a function of key and step, such as `ms.DataLoader`."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches in one epoch; None if only the data know."""
        ...

    def init_state(self, key: jax.Array, step: int = 0) -> PyTree:
        """The state before batch number `step`."""
        ...

    def iterate(self, state: PyTree, *, steps: int | None = None) -> Iterator[T]:
        """An iterator over (batch, mask), with `state`, `samples`, `real` and `close`."""
        ...


def epoch_of(loader: Any) -> int | EpochLengths | None:
    """How many steps an epoch of a loader has, or how many each one has; None if only the data know."""
    return getattr(loader, "epoch_lengths", None) or loader.steps_per_epoch


class Batches:
    """The batches of an iterable.

    Attributes:
        iterator: What they come from.
        draw: Gives the next batch, or raises StopIteration.
        size_of: How many samples the batch has that was drawn last, given that batch.
        may_break: Whether an interrupt may break the drawing off: not if that could leave an iterator with a state of
            its own between two states.
        where: Nothing: where an iterable is, is counted by the steps.
    """

    where = None

    def __init__(self, dataset: Iterable[Any], batch_size_fn: Callable[[Any], int] | None) -> None:
        self.iterator: Any = iter(dataset)
        self.draw: Callable[[], Any] = self.iterator.__next__
        self.size_of: Callable[[Any], int] = batch_size if batch_size_fn is None else _checked_size_fn(batch_size_fn)
        if batch_size_fn is None and hasattr(self.iterator, "samples"):
            self.size_of = lambda _: self.iterator.samples
        self.may_break = not hasattr(self.iterator, "get_state")

    @property
    def mask(self) -> np.ndarray | None:
        """Which rows of the batch that was drawn last count; None if they are the first ones."""
        return _mask_of(self.iterator)

    @property
    def state(self) -> PyTree:
        """The state of a loader's iterator; None for other iterables."""
        return getattr(self.iterator, "state", None)

    def set_policy_state(self, policy_state: PyTree) -> None:
        """Have the next batch made by this policy."""
        self.iterator.set_policy_state(policy_state)

    def close(self) -> None:
        """End the reading; data that the loop did not open are the caller's to close."""


class LoaderBatches:
    """The batches of a loader from a state on, epoch after epoch; see `Batches`."""

    may_break = True

    def __init__(self, caller: str, loader: Any, state: PyTree, steps: int | None, skips: Skips) -> None:
        self._caller = caller
        self._loader = loader
        self._left = steps
        self._skips = skips
        self._in_vain = 0  # batches that were asked for since one has come
        self._iterator = self._open(state)

    def _open(self, state: PyTree) -> Any:
        steps = self._left
        if steps is None:  # what is drawn in order would be drawn again, if it was opened again in the middle of a pass
            in_order = isinstance(state, IterableState)
            steps = sys.maxsize if in_order else max(self._loader.steps_per_epoch, _MANY)
        if self._skips.ranges:  # nothing that is left out is read ahead: the iterator ends before it
            state = past_skips(self._loader, state, self._skips)
            steps = int(min(steps, self._skips.until_next(int(state.step))))
        self._in_vain += steps
        return self._loader.iterate(state, steps=steps)

    def draw(self) -> Any:
        """The next batch."""
        while True:
            try:
                batch = next(self._iterator)
            except StopIteration:
                if self._left == 0:
                    raise
                self._open_again()
                continue
            self._in_vain = 0
            if self._left is not None:
                self._left -= 1
            return batch

    def _open_again(self) -> None:
        """Continue after the last batch; those that were not handed out, for whatever reason, are made up for."""
        if self._in_vain >= max(self._loader.steps_per_epoch or 0, _HOPELESS):
            raise RuntimeError(
                f"{self._caller} needs batches that can be read. The loader has skipped the last {self._in_vain:,}. "
                'on_error="raise" shows their errors, on_error="skip item" keeps their good rows.'
            )
        self._iterator = self._open(self._iterator.state)

    def size_of(self, batch: Any) -> int:
        """How many samples the batch has that was drawn last: the rows that its mask counts."""
        return self._iterator.samples

    @property
    def mask(self) -> np.ndarray | None:
        """Which rows of the batch that was drawn last count; None if they are the first ones."""
        return _mask_of(self._iterator)

    def where(self) -> PyTree:
        """The state, to be there again if the next batch does not come to be used; None if unknown."""
        try:
            return self._iterator.state
        except RuntimeError:  # batches have overtaken others
            return None

    @property
    def state(self) -> PyTree:
        """The state of the loader after the batch that came last."""
        return self._iterator.state

    def set_policy_state(self, policy_state: PyTree) -> None:
        """Have the next batch made by this policy."""
        self._iterator.set_policy_state(policy_state)

    def close(self) -> None:
        """End the reading."""
        self._iterator.close()


def _mask_of(iterator: Any) -> np.ndarray | None:
    real = getattr(iterator, "real", 0)
    return None if isinstance(real, int) else np.asarray(real)


def as_dataset(caller: str, given: Any) -> Any:
    """A loader or an iterable, as it was given or as a function returns it."""
    dataset = given() if callable(given) and not isinstance(given, Iterable | Loader) else given
    if not isinstance(dataset, Iterable | Loader) or getattr(dataset, "shape", None) == ():
        raise TypeError(
            f"{caller} needs a dataset: a DataLoader, an iterable of batches, or a function that returns one. "
            f"Got {describe_value(dataset)}{'' if dataset is given else ' from the function'}.{_loader_advice(dataset)}"
        )
    if isinstance(dataset, Mapping):
        raise TypeError(
            f"{caller} needs a dataset: a DataLoader, an iterable of batches, or a function that returns one. Got a "
            f"{type(dataset).__name__}, which is iterated for its keys. Make batches of the arrays in it: "
            "ms.DataLoader([ms.ArraySampleSource(data), ms.BatchTransform(32)])."
        )
    return dataset


def _loader_advice(dataset: Any) -> str:
    is_source = isinstance(dataset, IndexedSource | Stream)
    return " Make batches of a source: ms.DataLoader([source, ms.BatchTransform(32)])." if is_source else ""


def open_batches(
    caller: str,
    dataset: Any,
    *,
    start: Elapsed,
    stop: Period | None,
    key: Any,
    data_state: PyTree,
    batch_size_fn: Callable[[Any], int] | None,
    position: dict[str, Any] | None = None,
    skips: Skips | None = None,
) -> Batches | LoaderBatches:
    """The batches that come after `start`.

    Args:
        caller: The caller's name, for errors.
        dataset: A loader or an iterable.
        start: How far the run is.
        stop: Where it ends, if that is known.
        key: The key of a loader's run.
        data_state: The state of a loader to begin with, instead of the key.
        batch_size_fn: How many samples a batch has, if its shape does not say it.
        position: Where in an iterable to begin, as it was saved; None to start from the beginning.
        skips: Batches of a loader that are left out.
    """
    if isinstance(dataset, Loader):
        last = None if stop is None else stop.units.get("steps")
        steps = None if last is None else max(int(last) - start.steps, 0)
        skips = Skips() if skips is None else skips
        state = loader_state(caller, dataset, key, data_state, skips.with_left_out(start.steps))
        return LoaderBatches(caller, dataset, state, steps, skips)
    if position is not None:
        return Batches(seek(caller, position, dataset, start.steps), batch_size_fn)
    if data_state is not None:
        raise ValueError(f"{caller} can use data_state only with a DataLoader; {describe_value(dataset)} has no state.")
    return Batches(dataset, batch_size_fn)


def loader_state(caller: str, loader: Any, key: Any, data_state: PyTree, step: int) -> PyTree:
    """The state that a loader's run begins or resumes with."""
    if data_state is not None:
        return data_state
    if key is None:
        if getattr(loader, "is_random", True):
            raise ValueError(
                f"{caller} over a DataLoader that shuffles or is random needs key=jax.random.key(seed), which fixes "
                "its batches, or data_state=, to resume from."
            )
        key = jax.random.key(0)  # any will do
    return loader.init_state(key, step) if step else loader.init_state(key)


def past_skips(loader: Any, state: LoaderState, skips: Skips) -> LoaderState:
    """The state of a loader before the next batch that is not left out."""
    batch = int(state.step)
    sought = skips.seek(batch)
    return state if sought == batch else loader.init_state(state.key, sought)


def skips_of(
    caller: str, ranges: Ranges, dataset: Any, position: Position | None, data_state: PyTree, steps: int
) -> Skips:
    """What a run leaves out of its data; ranges that lie where it has already been are refused.

    Args:
        caller: The caller's name, for errors.
        ranges: Batches to leave out, as the user gives them.
        dataset: A loader or an iterable.
        position: Where the run that is resumed was; None if none is.
        data_state: The state of a loader to begin with; None to begin with its key.
        steps: How far the run is.
    """
    if ranges:
        _require_any_step(caller, dataset)
        dataset.init_state(jax.random.key(0), ranges[-1][1])  # is refused now rather than there, if it is too far
    if position is not None:
        before = Skips.at_position(position)
        skips, batch = before.joined(ranges), position.get("step", 0)
    else:
        before = skips = Skips().joined(ranges)
        is_indexed = isinstance(data_state, LoaderState) and not isinstance(data_state, IterableState)
        batch = check_position(caller, data_state, STEP_LIMIT) if is_indexed else skips.with_left_out(steps)
        if skips.count_kept(batch) != steps:  # these data were not begun with at the run's beginning
            before = Skips(begun=(int(steps), batch))
            skips = before.joined(ranges)
    for first, last in ranges:
        if before.joined(((first, last),)).count_kept(batch) != before.count_kept(batch):
            step = steps - before.count_kept(batch) + before.count_kept(first)
            raise ValueError(
                f"{caller} cannot leave out batches that come before where the data are: at batch {batch:,} after "
                f"{steps:,} steps. Got ({first}, {last}) in skip. "
                + (
                    f"Begin with a data_state at batch {first:,} or before it."
                    if position is None
                    else f"Resume from a checkpoint of step {step:,} or earlier; this deletes the later ones: "
                    f"with ms.checkpoints.CheckpointStore(directory) as store: store.discard_after({step})."
                )
            )
    return skips


def _require_any_step(caller: str, dataset: Any) -> None:
    """Refuse to leave out batches of what has to be drawn in order."""
    if isinstance(dataset, Loader):
        state = dataset.init_state(jax.random.key(0))
        if isinstance(state, LoaderState) and not isinstance(state, IterableState):
            return
        found = "an IterableSource" if isinstance(state, LoaderState) else "a stream"
    else:
        found = describe_value(dataset)
    raise TypeError(
        f"{caller} can leave out batches only of a loader that starts at any step: a DataLoader over an indexed "
        f"source. The batches of {found} have to be drawn in order. Leave skip out."
    )


def one_pass(caller: str, loader: Any, key: Any, data_state: PyTree, step: int) -> Iterator[Any]:
    """The batches of one pass over a loader that does not know how many they are; they end by themselves."""
    return loader.iterate(loader_state(caller, loader, key, data_state, step))


def _checked_size_fn(batch_size_fn: Callable[[Any], int]) -> Callable[[Any], int]:
    """A user's function that must give a number of rows."""

    def size_of(batch: Any) -> int:
        with raised_in("batch_size_fn"):
            size = batch_size_fn(batch)
        try:
            count = operator.index(size)
        except TypeError:
            count = -1
        if count < 0:
            raise TypeError(
                "batch_size_fn must return how many samples a batch has, an int of at least 0: len(batch['label']). "
                f"{function_name(batch_size_fn)} returned {describe_value(size)}."
            )
        return count

    return size_of


def batch_size(batch: Any) -> int:
    """How many samples a batch has: the longest first axis; 1 if it has none."""
    kind, size = type(batch), 0
    # The usual batch is flat; it is not worth a call of JAX, which has to be fetched from memory at every step.
    for part in batch.values() if kind is dict else batch if kind is tuple or kind is list else (batch,):
        if not _IS_ARRAY[type(part)]:
            shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(batch)]
            return max((shape[0] for shape in shapes if shape), default=0) or 1
        shape = getattr(part, "aval", part).shape  # what an array of JAX calls `shape` asks its aval, slowly
        if shape and shape[0] > size:
            size = shape[0]
    return size or 1


class _ArrayTypes(dict[type, bool]):
    """Whether a type is one of arrays. Asking whether it is one of JAX is slow, so each is asked about once."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = answer = issubclass(kind, np.ndarray | jax.Array)
        return answer


_IS_ARRAY = _ArrayTypes()
