"""The items of a training stream, and the iterator that yields them."""

import dataclasses
import sys
from collections.abc import Iterator

import jax

from millstream.loader._part import JoinedCursor, JoinedIterator, Part
from millstream.loader._schedule import Schedule, Slot
from millstream.loader.feed import Drawn, state_at
from millstream.loader.info import BatchInfo
from millstream.pipeline.state import LoaderState
from millstream.reading.contracts import PyTree
from millstream.reading.interrupts import Interrupts


@dataclasses.dataclass(frozen=True)
class StreamItem:
    """A batch of a `TrainStream`, for training or for validation.

    Example:
        >>> stream = ms.TrainStream(loader)
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
    batch: PyTree
    mask: jax.Array
    info: BatchInfo | None = None


class StreamIterator(JoinedIterator):
    """Yields the items of a `TrainStream`, and ends, is interrupted and gives its state like every `BatchIterator`.

    Example:
        >>> stream = ms.TrainStream(loader)
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
        schedule: Schedule,
        state: LoaderState,
        end: int | None,
        limit: int,
        interrupts: Interrupts,
    ) -> None:
        step = int(state.step)
        count = sys.maxsize if end is None else schedule.count(step, end)
        super().__init__(JoinedCursor(parts, _Draw(parts, schedule.slots(step), limit)), state, count, interrupts)
        self.first_batch = schedule.before(step)[1]
        self.last_batch = None if end is None else end - 1

    def __len__(self) -> int:
        """Items this iterator was made for, from first to last."""
        if self.last_batch is None:
            raise TypeError("An endless TrainStream has no length. Give iterate an end_at.")
        return super().__len__()


class _Draw:
    """Draws the items of a stream, slot by slot."""

    def __init__(self, parts: list[Part], slots: Iterator[Slot], limit: int) -> None:
        self._parts = parts
        self._slots = slots
        self._slot = next(slots)
        self._limit = limit

    def __call__(self, state: LoaderState) -> Drawn:
        slot = self._slot
        if slot.training and slot.batch >= self._limit:
            raise ValueError(f"iterate can reach {self._limit:,} training batches. Start a run with another key.")
        part = self._parts[0 if slot.training else 1]
        value = part.next()
        self._slot = next(self._slots)  # only now: what raised is asked for again
        item = None if value is None else StreamItem(slot.training, slot.batch, *value)
        return item, state_at(state, slot.step_after), part.real
