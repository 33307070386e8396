"""Loaders as parts of a larger stream."""

from collections.abc import Callable
from typing import Any

import numpy as np

from millstream.loader.feed import Drawn, Real
from millstream.loader.iterator import BatchIterator, Item
from millstream.loader.loader import DataLoader
from millstream.pipeline.compose import SeekablePipeline
from millstream.pipeline.phased import PhasedPipeline
from millstream.pipeline.state import LoaderState
from millstream.reading.contracts import B
from millstream.reading.interrupts import Interrupts
from millstream.reading.stats import LoaderStats
from millstream.text.errors import describe_value


class SubStream:
    """The batches of one loader, asked for one by one. The loader reads ahead from the first to the last.

    Args:
        name: What the loader is called in the stream.
        batches: Its batches, in order.
        first: The number of the first one.
    """

    def __init__(self, name: str, batches: BatchIterator[Any, LoaderState, Any], first: int) -> None:
        self.name = name
        self._batches = batches
        self._asked = first
        self.real: Real = 0  # which rows of the batch that came last count
        self._early: tuple[int, Any] | None = None  # a batch that others, which were left out, should have come before

    def next(self) -> Any:
        """What the iterator yields for the next number, or None if that batch is left out because of an error."""
        if self._early is None:
            self._early = self._draw()  # if this raises, the same number is asked for again
        number, self._asked = self._asked, self._asked + 1
        if self._early is None or self._early[0] != number:
            return None
        (_, value), self._early = self._early, None
        self.real = self._batches.real
        return value

    def _draw(self) -> tuple[int, Any] | None:
        try:
            value = next(self._batches, None)
        except Exception as error:
            error.add_note(f"This came from the loader {self.name!r}.")
            raise
        if value is None:
            return None
        # A state on the device would have to be waited for, and nothing is left out there.
        step = self._batches.state.step
        return (int(step) - 1 if isinstance(step, np.ndarray) else self._asked), value

    def pause(self) -> None:
        """End the reading; asking for another batch begins it again."""
        self._batches.pause()

    def close(self) -> None:
        """End the reading, and release what was made ahead."""
        self._early = None
        self._batches.close()


class JoinedCursor:
    """Draws from several loaders, which read ahead themselves.

    Args:
        parts: The loaders.
        draw: From the state of the whole to what is handed out and the state after it.
        move: From a state and a number of steps to a different such cursor; None if it cannot be moved.
    """

    def __init__(
        self,
        parts: list[SubStream],
        draw: Callable[[Any], Drawn],
        move: Callable[[Any, int], "JoinedCursor"] | None = None,
    ) -> None:
        self.parts = parts
        self._draw = draw
        self._move = move

    def draw(self, state: Any) -> Drawn:
        """What comes next, and the state after it."""
        return self._draw(state)

    def move(self, state: Any, steps: int) -> "JoinedCursor":
        """A cursor at a different state."""
        if self._move is None:
            raise TypeError("set_state cannot move a StreamIterator. Make one at the state: iterate(state).")
        return self._move(state, steps)

    def pause(self) -> None:
        """End the reading of all loaders; drawing another batch begins it again."""
        for part in self.parts:
            part.pause()


class JoinedIterator(BatchIterator[B, LoaderState, Item]):
    """Yields what is drawn from several loaders.

    Args:
        cursor: Draws.
        state: Where to begin.
        steps: How many times to draw.
        interrupts: What Ctrl-C does.
    """

    _cursor: JoinedCursor

    def __init__(self, cursor: JoinedCursor, state: LoaderState, steps: int, interrupts: Interrupts) -> None:
        super().__init__(cursor, state, steps, LoaderStats(), interrupts)

    def close(self) -> None:
        """End the iteration and release batches made ahead; `state` stays valid."""
        super().close()
        for part in self._cursor.parts:
            part.close()


def require_indexed(caller: str, name: str, loader: Any) -> DataLoader:
    """Refuse a loader that cannot be started at any step, or does not keep to the order of its steps."""
    if not isinstance(loader, DataLoader):
        raise TypeError(f"{caller} needs {name} to be a DataLoader. Got {describe_value(loader)}.")
    if not isinstance(loader.pipeline, SeekablePipeline):
        raise TypeError(
            f"{caller} needs {name} to start with an indexed source, which can be read from any step on. "
            f"Got {type(loader.pipeline).__name__}, a stream, which has to be drawn in order."
        )
    if isinstance(loader.pipeline, PhasedPipeline):
        raise TypeError(
            f"{caller} needs {name} to have epochs of one length, and the batches of this one change at step "
            f"{loader.pipeline.starts[1]:,}. Give the phases to loops by themselves."
        )
    if loader.pipeline.host is not None and not loader.pipeline.host.ordered:
        raise ValueError(
            f"{caller} needs {name} to keep its batches in order, or no step to resume from would be known. "
            "Leave ordered=False out of its executor."
        )
    return loader


def step_limit(loader: DataLoader) -> int:
    """Steps that a state of this loader can count."""
    return loader.pipeline.plan.step_limit


def crosses_epochs(loader: DataLoader) -> bool:
    """Whether batches are completed from the next epoch, which then lacks those samples."""
    plans = loader.pipeline.plan.buckets
    batchings = [batching for plan in plans for batching in plan.batchings]
    return any(batching.ending == "wrap" and batching.inner % batching.size for batching in batchings)
