"""Several loaders as one."""

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, overload

import jax
import numpy as np
from jax.typing import ArrayLike

from millstream.loader._answers import answer_habits
from millstream.loader._part_checks import require_indexed, step_limit
from millstream.loader._parts import JoinedCursor, Part
from millstream.loader.batch_info import BatchInfo
from millstream.loader.feed import Drawn, state_at
from millstream.loader.iterator import BatchIterator
from millstream.loader.loader import DataLoader
from millstream.pipeline.state import (
    LoaderState,
    Origin,
    check_origin,
    check_position,
    checked_step,
    key_words,
    step_array,
)
from millstream.plan.keys import named_key
from millstream.plan.plan import STEP_LIMIT
from millstream.reading.contracts import B
from millstream.reading.interrupts import Interrupts
from millstream.reading.stats import LoaderStats
from millstream.text.errors import describe_value, require_bool, require_int

_LONGEST_ROUND = 1_000_000


class WeightedOrder:
    """Which loader gives the batch of a step: a function of the step alone.

    At every step each loader has given its share of the batches so far, rounded down or up. The order repeats after
    `period` steps.

    Example:
        >>> turns = WeightedOrder([3, 1, 2])
        >>> [turns.at(step) for step in range(6)], turns.before(8)
        ([0, 2, 0, 1, 2, 0], [4, 1, 3])

    Args:
        weights: How many batches of each loader come together in one period; brought to lowest terms.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        divisor = math.gcd(*weights)
        self.weights = tuple(weight // divisor for weight in weights)
        self.period = sum(self.weights)

    def at(self, step: int) -> int:
        """The loader whose turn it is."""
        return int(self._order[step % self.period])

    def before(self, step: int) -> list[int]:
        """How many batches each loader has given before this step."""
        periods, place = divmod(step, self.period)
        given = np.bincount(self._order[:place], minlength=len(self.weights))
        return [periods * weight + int(count) for weight, count in zip(self.weights, given, strict=True)]

    @functools.cached_property
    def _order(self) -> np.ndarray:
        # Every batch of a loader has a window of steps: outside it, the loader would be a whole batch away from its
        # share. Among the windows that are open, the one that closes first comes first. As the shares add up to one
        # batch per step, every batch gets a step in its window.
        # Of windows that close together, the rarer loader's comes first, or it would always be the last of a round.
        opens = [0] * len(self.weights)
        closes = [(self._end_of(loader, 0), weight, loader) for loader, weight in enumerate(self.weights)]
        given = [0] * len(self.weights)
        order = np.empty(self.period, np.int32)
        for step in range(self.period):
            _, weight, loader = min(close for close in closes if opens[close[2]] <= step)
            order[step] = loader
            given[loader] += 1
            opens[loader] = given[loader] * self.period // weight
            closes[loader] = self._end_of(loader, given[loader]), weight, loader
        return order

    def _end_of(self, loader: int, batch: int) -> int:
        return -(-(batch + 1) * self.period // self.weights[loader])


class SequentialOrder:
    """Which loader gives the batch of a step, if they come one after the other.

    Example:
        >>> turns = SequentialOrder([3, 1, 2])
        >>> [turns.at(step) for step in range(6)], turns.before(8)
        ([0, 0, 0, 1, 2, 2], [5, 1, 2])

    Args:
        lengths: How many batches each loader gives before it is the next one's turn.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.weights = tuple(lengths)
        self.period = sum(lengths)
        self._ends = np.cumsum(lengths)

    def at(self, step: int) -> int:
        """The loader whose turn it is."""
        return int(np.searchsorted(self._ends, step % self.period, side="right"))

    def before(self, step: int) -> list[int]:
        """How many batches each loader has given before this step."""
        periods, place = divmod(step, self.period)
        given = np.clip(place - self._ends + self.weights, 0, self.weights)
        return (periods * np.array(self.weights) + given).tolist()


if TYPE_CHECKING:
    from millstream.inspect import Explanation


@answer_habits
class MixedLoader(Generic[B]):
    """Several loaders as one, whose batches come in turn: an epoch is one complete pass over every loader.

    The mix is the same throughout an epoch: at every step each loader has given its share of the batches so far,
    rounded down or up. Whose turn it is depends on the step alone, so a state is a key and a step, as for a
    `DataLoader`, and any step can be started at. Every loader has a key of its own, made from the run's key and its
    name.

    Example:
        >>> def loader_of(first, samples):
        ...     source = ms.ArraySampleSource({"x": first + np.arange(samples)}, ordering="sequential")
        ...     return ms.DataLoader([source, ms.BatchTransform(2)])
        >>> mixed = ms.loader.MixedLoader({"small": loader_of(0, 4), "large": loader_of(100, 8)})
        >>> state = mixed.init_state(jax.random.key(0))
        >>> for batch, mask, info in mixed.iterate(state, with_info=True):
        ...     print(info.group, batch["x"])
        large [100 101]
        small [0 1]
        large [102 103]
        large [104 105]
        small [2 3]
        large [106 107]

    Args:
        loaders: `DataLoader`s by name, or a list, whose names are then "0", "1" and so on. Their batches may differ in
            structure; `with_info=True` tells which is which.
        weights: Whole numbers in the same form, such as `{"small": 3, "large": 1}`: in these proportions batches are
            drawn. Every loader then goes through its own epochs, one after the other, and these stay complete. An epoch
            of the mix is the fewest rounds of 3 + 1 steps in which every loader gives all of its batches at least once.
        interleave: False has the loaders come one after the other, in each epoch.
    """

    def __init__(
        self,
        loaders: Mapping[str, DataLoader[B]] | Sequence[DataLoader[B]],
        *,
        weights: Mapping[str, int] | Sequence[int] | None = None,
        interleave: bool = True,
    ) -> None:
        if not isinstance(interleave, bool):
            raise TypeError(f"MixedLoader needs interleave to be a bool. Got {describe_value(interleave)}.")
        if weights is not None and not interleave:
            raise ValueError(
                "MixedLoader can have weights only for loaders that are interleaved. Leave one of them out."
            )
        self._loaders = {
            name: require_indexed("MixedLoader", f"loaders[{name!r}]", loader)
            for name, loader in _by_name("loaders", loaders).items()
        }
        lengths = [loader.steps_per_epoch for loader in self._loaders.values()]
        if weights is not None:
            self._turns = WeightedOrder(_weights(weights, list(self._loaders)))
        else:
            self._turns = WeightedOrder(lengths) if interleave else SequentialOrder(lengths)
        passes = [-(-length // weight) for length, weight in zip(lengths, self._turns.weights, strict=True)]
        self._steps_per_epoch = self._turns.period * max(passes)
        self._every_batch_once = self._steps_per_epoch == sum(lengths)
        rounds = map(operator.floordiv, map(step_limit, self._loaders.values()), self._turns.weights)
        self._step_limit = min(STEP_LIMIT, min(rounds) * self._turns.period)
        self._origin = _origin(self._loaders, self._turns)
        self._interrupts = Interrupts()

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch, of all loaders together."""
        return self._steps_per_epoch

    @property
    def loaders(self) -> dict[str, DataLoader[B]]:
        """The loaders, by name."""
        return dict(self._loaders)

    def contents(self) -> tuple[tuple[str, str], ...]:
        """What the samples of every loader are, as a fingerprint that changes when they do."""
        return tuple(
            (f"{what} of {name!r}", words)
            for name, loader in self._loaders.items()
            for what, words in loader.contents()
        )

    def explain(self) -> "Explanation":
        """The pipelines of all loaders as one table, and the plan; see `DataLoader.explain`."""
        from millstream.inspect import Explanation

        plan = {"epoch": f"{self.steps_per_epoch:,} batches", "mix": dict(self._origin)["mix"]}
        return Explanation.joined({name: loader.explain() for name, loader in self._loaders.items()}, plan)

    def init_state(self, key: jax.Array | np.ndarray, step: int | ArrayLike = 0) -> LoaderState:
        """The state of a run before its first batch, or before batch number `step`.

        Args:
            key: `jax.random.key(seed)`; a different key is a different run.
            step: Where to start; any step costs the same.
        """
        words = key_words("init_state", key)
        step = checked_step("init_state", step, self._step_limit - 1)
        return LoaderState(words, step_array(step), self._origin)

    @overload
    def iterate(
        self, state: LoaderState, *, steps: int | None = None, with_info: Literal[False] = False
    ) -> BatchIterator[B]: ...
    @overload
    def iterate(
        self, state: LoaderState, *, steps: int | None = None, with_info: Literal[True]
    ) -> BatchIterator[B, LoaderState, tuple[B, jax.Array, BatchInfo]]: ...
    @overload
    def iterate(
        self, state: LoaderState, *, steps: int | None = None, with_info: bool
    ) -> BatchIterator[B, LoaderState, tuple[B, jax.Array] | tuple[B, jax.Array, BatchInfo]]: ...
    def iterate(
        self, state: LoaderState, *, steps: int | None = None, with_info: bool = False
    ) -> BatchIterator[B, LoaderState, Any]:
        """An iterator over (batch, mask), with the state to resume from as its `.state`.

        Args:
            state: Where to start; it is not changed, so iterating from it again gives the same batches.
            steps: How many batches; they may run through several epochs. By default those left in the state's epoch.
            with_info: Yield (batch, mask, info), where `info` is a `BatchInfo`. Its `group` is the name of the loader,
                its steps and its epoch are those of the mix; indices, items and seeds are the loader's.
        """
        check_origin("iterate", state, self._origin)
        first = check_position("iterate", state, self._step_limit)
        require_bool("iterate", "with_info", with_info)
        if steps is None:
            steps = self.steps_per_epoch - first % self.steps_per_epoch
        require_int("iterate", "steps", steps, least=0)
        cursor = self.open_cursor("iterate", state, steps, with_info)
        self._interrupts = self._interrupts.following()
        return BatchIterator(cursor, state, steps, LoaderStats(), self._interrupts, ahead=self.made_ahead)

    @property
    def made_ahead(self) -> int:
        """How many batches an iterator draws before they are asked for: no more than any of the loaders allows."""
        return min(loader.made_ahead for loader in self._loaders.values())

    def open_cursor(self, caller: str, state: LoaderState, steps: int, with_info: bool) -> JoinedCursor:
        """What draws `steps` batches from a state on."""
        check_origin(caller, state, self._origin)
        first = check_position(caller, state, self._step_limit)
        if first + steps > self._step_limit:
            raise ValueError(
                f"{caller} can reach step {self._step_limit:,}, not {first + steps:,}. Start a run with another key."
            )
        parts = self._parts(caller, np.asarray(state.key), first, steps, with_info)
        draw = functools.partial(self._draw, parts, with_info)
        return JoinedCursor(parts, draw, lambda state, steps: self.open_cursor("set_state", state, steps, with_info))

    def _draw(self, parts: list[Part], with_info: bool, state: LoaderState) -> Drawn:
        """The next batch, and the state after it."""
        step = int(state.step)
        part = parts[self._turns.at(step)]
        value, _, real = part.draw()
        if value is not None and with_info:
            batch, mask, info = value
            epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
            place = {"step": step, "epoch": epoch, "step_in_epoch": step_in_epoch}
            value = batch, mask, dataclasses.replace(info, **place, group=part.name)
        return value, state_at(state, step + 1), real

    def _parts(self, caller: str, words: np.ndarray, first: int, steps: int, with_info: bool) -> list[Part]:
        parts = []
        ranges = zip(self._turns.before(first), self._turns.before(first + steps), strict=True)
        for (name, loader), (begin, end) in zip(self._loaders.items(), ranges, strict=True):
            state = loader.init_state(np.stack(named_key(words, f"millstream mix 1 {name}")), step=begin)
            opened = functools.partial(loader.open_cursor, caller, state, end - begin, with_info)
            parts.append(Part(name, opened, state, end - begin))
        return parts

    def __enter__(self) -> Self:
        """Keep worker processes and threads of all loaders from one stream to the next, until the block is left."""
        for loader in self._loaders.values():
            loader.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        with contextlib.ExitStack() as entered:
            for loader in self._loaders.values():
                entered.push(loader.__exit__)

    def __repr__(self) -> str:
        return f"MixedLoader({dict(self._origin)['mix']}, {self.steps_per_epoch:,} steps per epoch)"


def _origin(loaders: dict[str, DataLoader], turns: WeightedOrder | SequentialOrder) -> Origin:
    mixed = ", " if isinstance(turns, WeightedOrder) else ", then "
    shares = mixed.join(f"{weight} of {name!r}" for name, weight in zip(loaders, turns.weights, strict=True))
    parts = [(f"{name}: {what}", words) for name, loader in loaders.items() for what, words in loader.pipeline.origin]
    return (("mix", shares), *parts)


def _by_name(what: str, values: Any) -> dict[str, Any]:
    if isinstance(values, Mapping):
        named = dict(values)
    elif isinstance(values, Sequence) and not isinstance(values, str):
        named = {str(number): value for number, value in enumerate(values)}
    else:
        raise TypeError(f"MixedLoader needs {what} by name, in a dict, or in a list. Got {describe_value(values)}.")
    if not named or not all(isinstance(name, str) for name in named):
        raise ValueError(f"MixedLoader needs {what}, at least one, whose names are strings. Got {list(named)}.")
    return named


def _weights(weights: Any, names: list[str]) -> list[int]:
    named = _by_name("weights", weights)
    if set(named) != set(names):
        raise ValueError(f"MixedLoader needs a weight for every loader. Got {list(named)} for {names}.")
    for name, weight in named.items():
        if isinstance(weight, float):
            raise TypeError(
                "MixedLoader needs weights to be whole numbers; for 0.7 and 0.3 write 7 and 3. "
                f"Got {weight} for {name!r}."
            )
        require_int("MixedLoader", f"weights[{name!r}]", weight, least=1)
    period = WeightedOrder(list(named.values())).period
    if period > _LONGEST_ROUND:
        raise ValueError(
            f"MixedLoader needs weights that add up to at most {_LONGEST_ROUND:,} in lowest terms. Got {period:,}. "
            "Round them."
        )
    return [named[name] for name in names]
