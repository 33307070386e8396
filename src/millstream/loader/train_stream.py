"""Training batches and validation passes in one stream."""

import dataclasses
import functools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple

import jax
import numpy as np

from millstream.loader._part_checks import crosses_epochs, require_indexed, step_limit
from millstream.loader._parts import JoinedCursor, Part
from millstream.loader.batch_info import BatchInfo
from millstream.loader.feed import Drawn, state_at
from millstream.loader.iterator import BatchIterator
from millstream.loader.loader import DataLoader
from millstream.loader.mixed import MixedLoader
from millstream.pipeline.state import LoaderState, Origin, check_origin, check_position, key_words, step_array
from millstream.plan.keys import named_key
from millstream.plan.plan import STEP_LIMIT
from millstream.reading.contracts import B
from millstream.reading.interrupts import Interrupts
from millstream.reading.stats import LoaderStats
from millstream.text.errors import describe_value, require_bool, require_int
from millstream.text.summaries import fields_text, never_raising

Period = tuple[Literal["epoch", "batch"], int]


class _Slot(NamedTuple):
    """One item of a stream.

    Attributes:
        training: Whether it is a training batch; if not, it is one of a validation pass.
        batch: How many training batches come before it.
        step_after: The step of the stream that comes after it. Within a pass, that is the pass.
    """

    training: bool
    batch: int
    step_after: int


@dataclasses.dataclass(frozen=True)
class PassSchedule:
    """The steps of a stream: training batches, and validation passes, each of which is one step.

    Example:
        >>> slots = PassSchedule(interval=2, length=3).slots(0)
        >>> ["train" if next(slots).training else "validate" for _ in range(6)]
        ['train', 'train', 'validate', 'validate', 'validate', 'train']

    Attributes:
        interval: Training batches between two passes.
        length: Batches of a pass.
    """

    interval: int
    length: int

    def before(self, step: int) -> tuple[int, int]:
        """Validation passes and training batches that come before a step."""
        passes, place = divmod(step, self.interval + 1)
        return passes, passes * self.interval + place

    def step_of(self, batch: int) -> int:
        """The step of a training batch."""
        return batch + batch // self.interval

    def count(self, step: int, end: int) -> int:
        """Items from a step to training batch number `end`, with the pass that is due before that one."""
        passes, batch = self.before(step)
        return max(0, end - batch) + max(0, end // self.interval - passes) * self.length

    def slots(self, step: int) -> Iterator[_Slot]:
        """The items from a step on, without end."""
        while True:
            passes, batch = self.before(step)
            if batch < (passes + 1) * self.interval:
                yield _Slot(True, batch, step + 1)
            else:
                yield from [_Slot(False, batch, step)] * (self.length - 1)
                yield _Slot(False, batch, step + 1)
            step += 1


@dataclasses.dataclass(frozen=True)
class StreamItem(Generic[B]):
    """A batch of a `TrainStream`, for training or for validation.

    Example:
        >>> stream = ms.loader.TrainStream(loader)
        >>> item = next(stream.iterate(stream.init_state(jax.random.key(0))))
        >>> item.training, item.step, item.batch["x"].shape
        (True, 0, (4,))

    Attributes:
        training: Whether to train on it; False for validation.
        step: The number of the training batch; for validation, how many training batches came before it.
        batch: The batch.
        mask: False where a row is padding.
        info: What else is known about it, with `with_info=True`.
    """

    training: bool
    step: int
    batch: B
    mask: jax.Array
    info: BatchInfo | None = None

    @never_raising
    def __repr__(self) -> str:
        return fields_text(self)


class StreamIterator(BatchIterator[B, LoaderState, StreamItem[B]]):
    """Yields the items of a `TrainStream`, and ends, is interrupted and gives its state like every `BatchIterator`.

    Example:
        >>> stream = ms.loader.TrainStream(loader)
        >>> with stream.iterate(stream.init_state(jax.random.key(0)), end_at=("epoch", 2)) as items:
        ...     items.first_batch, items.last_batch, len(list(items))
        (0, 5, 6)

    Attributes:
        first_batch: The number of its first training batch.
        last_batch: The number of its last one; None if it is endless.
    """

    def __init__(
        self,
        parts: list[Part],
        schedule: PassSchedule,
        state: LoaderState,
        end: int | None,
        limit: int,
        interrupts: Interrupts,
        ahead: int,
    ) -> None:
        step = int(state.step)
        count = sys.maxsize if end is None else schedule.count(step, end)
        cursor = JoinedCursor(parts, _Draw(parts, schedule.slots(step), limit))
        super().__init__(cursor, state, count, LoaderStats(), interrupts, ahead=ahead)
        self.first_batch = schedule.before(step)[1]
        self.last_batch = None if end is None else end - 1

    def __len__(self) -> int:
        """Items this iterator was made for, from first to last."""
        if self.last_batch is None:
            raise TypeError("An endless TrainStream has no length. Give iterate an end_at.")
        return super().__len__()


class _Draw:
    """Draws the items of a stream, slot by slot."""

    def __init__(self, parts: list[Part], slots: Iterator[_Slot], limit: int) -> None:
        self._parts = parts
        self._slots = slots
        self._slot = next(slots)
        self._limit = limit

    def __call__(self, state: LoaderState) -> Drawn:
        slot = self._slot
        if slot.training and slot.batch >= self._limit:
            raise ValueError(f"iterate can reach {self._limit:,} training batches. Start a run with another key.")
        value, _, real = self._parts[0 if slot.training else 1].draw()
        self._slot = next(self._slots)  # only now: what raised is asked for again
        item = None if value is None else StreamItem(slot.training, slot.batch, *value)
        return item, state_at(state, slot.step_after), real


if TYPE_CHECKING:
    from millstream.inspect import Explanation


class TrainStream(Generic[B]):
    """Training batches, and after every n of them a validation pass: complete, and every time.

    The training batches are those of the training loader with the same key. Both loaders read ahead all the while, also
    across the changes, and keep their threads and worker processes until the stream ends.

    A state is a key and a step, where a whole validation pass is one step. So a stream that is resumed continues with
    the next training batch, and a pass that was in progress is run again from its beginning.

    Example:
        >>> held_out = ms.ArraySampleSource({"x": np.arange(5.0)}, ordering="sequential")
        >>> validation = ms.DataLoader([held_out, ms.BatchTransform(4)])
        >>> stream = ms.loader.TrainStream(loader, validation=validation, every=("epoch", 1))
        >>> state = stream.init_state(jax.random.key(0))
        >>> for item in stream.iterate(state, end_at=("epoch", 2)):
        ...     print("train" if item.training else "validate", item.step)
        train 0
        train 1
        train 2
        validate 3
        validate 3
        train 3
        train 4
        train 5
        validate 6
        validate 6

    Args:
        train: A `DataLoader` or a `MixedLoader`.
        validation: Another one, or None. Each pass is an epoch of it, so the ordering of its source says what is the
            same every time: the samples of each batch with "sequential", and also what random stages make of them with
            `Shuffle("repeat")`.
        every: ("epoch", n) or ("batch", n): after how many training epochs or batches the passes come.
    """

    def __init__(
        self,
        train: DataLoader[B] | MixedLoader[B],
        *,
        validation: DataLoader[B] | MixedLoader[B] | None = None,
        every: Period = ("epoch", 1),
    ) -> None:
        self._train = _require_loader("train", train)
        self._validation = None if validation is None else _require_loader("validation", validation)
        interval = self._batches("every", every, least=1)
        if self._validation is None:
            self._schedule = PassSchedule(STEP_LIMIT + 1, 0)  # a pass is never due
        else:
            _require_complete_passes(self._validation)
            self._schedule = PassSchedule(interval, self._validation.steps_per_epoch)
        self._limit = self._countable_batches()
        self._origin = self._words()
        self._interrupts = Interrupts()

    @property
    def batches_per_epoch(self) -> int:
        """Training batches in an epoch."""
        return self._train.steps_per_epoch

    @property
    def batches_per_validation(self) -> int:
        """Batches in a validation pass."""
        return self._schedule.length

    def explain(self) -> "Explanation":
        """The pipelines for training and validation as one table, and the plan; see `DataLoader.explain`."""
        from millstream.inspect import Explanation

        parts = {"train": self._train.explain()}
        if self._validation is None:
            return Explanation.joined(parts, {"validation": "none"})
        passes = f"{self._schedule.length:,} batches after every {self._schedule.interval:,} of training"
        return Explanation.joined(parts | {"validation": self._validation.explain()}, {"validation": passes})

    def init_state(self, key: jax.Array | np.ndarray, start_at: tuple[int, int] = (0, 0)) -> LoaderState:
        """The state of a run before its first batch, or before any other.

        Args:
            key: `jax.random.key(seed)`; a different key is a different run.
            start_at: (epoch, batch): an epoch, and the number of a training batch counted from its beginning, which may
                lie in a later epoch. Validation that is due before it is not run.
        """
        words = key_words("init_state", key)
        if not isinstance(start_at, tuple | list) or len(start_at) != 2:
            raise ValueError(f"init_state needs start_at=(epoch, batch). Got {describe_value(start_at)}.")
        for name, number in zip(("epoch", "batch"), start_at, strict=True):
            require_int("init_state", f"the {name} of start_at", number, least=0)
        batch = start_at[0] * self.batches_per_epoch + start_at[1]
        self._require_reachable("init_state", batch + 1)
        return LoaderState(words, step_array(self._schedule.step_of(batch)), self._origin)

    def iterate(
        self, state: LoaderState, *, end_at: Period | None = None, with_info: bool = False
    ) -> StreamIterator[B]:
        """An iterator over `StreamItem`s, with the state to resume from as its `.state`.

        Args:
            state: Where to start; it is not changed, so iterating from it again gives the same items.
            end_at: ("epoch", n) or ("batch", n), counted from the beginning of the run: that many epochs or batches of
                training, and the validation that is due after them. None for an endless stream.
            with_info: Give each item its `info`.
        """
        check_origin("iterate", state, self._origin)
        check_position("iterate", state, STEP_LIMIT)
        require_bool("iterate", "with_info", with_info)
        end = None if end_at is None else self._batches("end_at", end_at, least=0)
        if end is not None:
            self._require_reachable("iterate", end)
        self._interrupts = self._interrupts.following()
        parts = self._parts(state, self._limit if end is None else end, with_info)
        loaders = [self._train] if self._validation is None else [self._train, self._validation]
        ahead = min(loader.made_ahead for loader in loaders)
        return StreamIterator(parts, self._schedule, state, end, self._limit, self._interrupts, ahead)

    def _batches(self, name: str, period: Any, *, least: int) -> int:
        """That many epochs or batches, in training batches."""
        if not isinstance(period, tuple | list) or len(period) != 2 or period[0] not in ("epoch", "batch"):
            raise ValueError(
                f'TrainStream needs {name} to be ("epoch", n) or ("batch", n). Got {describe_value(period)}.'
            )
        require_int("TrainStream", f"the number of {name}", period[1], least=least)
        return period[1] * self.batches_per_epoch if period[0] == "epoch" else period[1]

    def _require_reachable(self, caller: str, batches: int) -> None:
        if batches > self._limit:
            raise ValueError(f"{caller} can reach {self._limit:,} training batches, not {batches:,}. Use another key.")

    def _countable_batches(self) -> int:
        """Training batches that the states of this stream and of its loaders can count."""
        limit = min(_limit(self._train), self._schedule.before(STEP_LIMIT)[1])
        if self._validation is None:
            return limit
        passes = _limit(self._validation) // self._schedule.length
        return min(limit, (passes + 1) * self._schedule.interval - 1)

    def _words(self) -> Origin:
        words = [(f"train: {what}", text) for what, text in _origin_of(self._train)]
        if self._validation is not None:
            words.append(("validation after", f"{self._schedule.interval:,} batches"))
            words += [(f"validation: {what}", text) for what, text in _origin_of(self._validation)]
        return tuple(words)

    def _parts(self, state: LoaderState, end: int, with_info: bool) -> list[Part]:
        """The batches for training and for validation, up to training batch number `end`."""
        words, schedule = np.asarray(state.key), self._schedule
        passes, first = schedule.before(int(state.step))
        train = _part("train", self._train, words, range(first, end), with_info)
        if self._validation is None:
            return [train]
        numbers = range(passes * schedule.length, end // schedule.interval * schedule.length)
        words = np.stack(named_key(words, "millstream validation 1"))
        return [train, _part("validation", self._validation, words, numbers, with_info)]

    def __repr__(self) -> str:
        passes = f", {self.batches_per_validation:,} for validation after every {self._schedule.interval:,}"
        shown = passes if self.batches_per_validation else ""
        return f"TrainStream({self.batches_per_epoch:,} batches per epoch{shown})"


def _part(name: str, loader: DataLoader | MixedLoader, words: np.ndarray, numbers: range, with_info: bool) -> Part:
    state = loader.init_state(words, step=numbers.start)
    opened = functools.partial(loader.open_cursor, "iterate", state, len(numbers), with_info)
    return Part(name, opened, state, len(numbers))


def _require_loader(name: str, loader: Any) -> DataLoader | MixedLoader:
    return loader if isinstance(loader, MixedLoader) else require_indexed("TrainStream", name, loader)


def _origin_of(loader: DataLoader | MixedLoader) -> Origin:
    return loader._origin if isinstance(loader, MixedLoader) else loader.pipeline.origin


def _limit(loader: DataLoader | MixedLoader) -> int:
    return loader._step_limit if isinstance(loader, MixedLoader) else step_limit(loader)


def _require_complete_passes(validation: DataLoader | MixedLoader) -> None:
    if isinstance(validation, MixedLoader) and not validation._every_batch_once:
        raise ValueError("TrainStream needs validation to come once per pass. Leave weights out of its MixedLoader.")
    loaders = list(validation._loaders.values()) if isinstance(validation, MixedLoader) else [validation]
    if any(map(crosses_epochs, loaders)):
        raise ValueError(
            "TrainStream needs every validation pass to be complete, but the last batch of a pass would be completed "
            "from the next one, which then lacks those samples. Use BatchTransform(..., pad_last_batch=True)."
        )
