"""The feed of samples that can only be drawn in order."""

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from millstream.loader._finish import Finish, count_in_transit
from millstream.loader._program import Program
from millstream.pipeline.iterable import IterablePipeline
from millstream.pipeline.placement import readable
from millstream.pipeline.state import IterableState
from millstream.plan.plan import STEP_LIMIT, Rows
from millstream.plan.planned import Request
from millstream.reading.contracts import PyTree
from millstream.reading.drawing import Drawer, Drawing, Progress
from millstream.reading.reader import count_batch
from millstream.reading.reading import ReadBatch
from millstream.reading.stats import LoaderStats
from millstream.reading.threads import ThreadBackend

if TYPE_CHECKING:
    from millstream.loader.feed import Drawn


class IterableFeed:
    """Draws the samples of an iterable in a thread, has threads run host stages, and finishes batches.

    Args:
        pipeline: The pipeline.
        program: The same, for compiled programs.
        masked: Whether a stage sets the mask.
        device: A device or sharding for the batches; None leaves it to JAX.
        prefetch: How many batches are drawn ahead.
    """

    def __init__(self, pipeline: IterablePipeline, program: Program, masked: bool, device: Any, prefetch: int) -> None:
        host = pipeline.body.host
        assert host is not None
        self.stats = LoaderStats()
        self.made_ahead = count_in_transit(program, masked, device)
        self.pipeline = pipeline
        self.masked = masked
        self._host = host
        self._layout = host.layout(pipeline.plan)
        self._finish = Finish(pipeline.body, program, device)
        self._coordinates = pipeline.body.coordinates
        self._prefetch = prefetch
        self._stepping: IterableCursor | None = None  # of `next`
        self._kept = False
        self._parked: Drawer | None = None  # of an iterator that has come to its end, for one that continues there
        self._forget: weakref.finalize | None = None

    def next(self, state: IterableState) -> tuple[PyTree, IterableState, Any]:
        """The batch of a state, the state after it, and the mask. It is fast for the state that came last."""
        cursor = self._stepping
        if cursor is None or not _is_same(cursor.state, state):
            self._end_stepping()
            cursor = self._stepping = IterableCursor(self, state, STEP_LIMIT)
        try:
            drawn = cursor.draw(state)
        except BaseException:
            self._end_stepping()  # nothing is left running, and the same batch may be asked for again
            raise
        assert drawn is not None
        (value, mask), state, _ = drawn
        self.stats.batches += 1
        return value, state, mask

    def cursor(self, state: IterableState, steps: int | None, with_info: bool) -> "IterableCursor":
        """Draws `steps` batches from a state on; None for those up to the end of the pass."""
        if with_info:
            raise TypeError("iterate has no info on the batches of an IterableSource. Keep to with_info=False.")
        return IterableCursor(self, state, steps)

    def open(self, state: IterableState, steps: int | None) -> Drawer:
        """Draws from a state on, in a thread."""
        host, source, words = self._host, self.pipeline.iterable, np.asarray(state.key)
        rows, progress = self._layout.rows, Progress.of(state.progress)
        parked = self._parked
        if parked is not None and parked.drawing.is_at(words, progress):
            self._take_parked()
            parked.extend(steps)
            return parked
        return Drawer(
            Drawing(source, words, rows, progress),
            ThreadBackend(host.source, self._layout, host.source.readers, self._prefetch),
            rows=rows,
            keyed=host.source.keyed,
            drops=self.pipeline.drops,
            ahead=self._prefetch,
            first=int(state.step),
            steps=steps,
        )

    def leave(self, drawer: Drawer) -> None:
        """An iterator needs its thread no more; the next one that continues there may."""
        if not (self._kept and drawer.is_complete):
            return drawer.close()
        parked = self._take_parked()
        if parked is not None:
            parked.close()
        self._parked, self._forget = drawer, weakref.finalize(self, drawer.stop)

    def _take_parked(self) -> Drawer | None:
        parked, self._parked = self._parked, None
        if self._forget is not None:
            self._forget.detach()
        return parked

    def make(self, words: np.ndarray, filled: ReadBatch) -> tuple[PyTree, Any]:
        """The batch that was read, and its mask."""
        count_batch(self.stats, filled)
        assert filled.request is not None
        return self._finish(words, self._numbers(filled.request), filled)

    def _numbers(self, request: Request) -> np.ndarray | None:
        """What compiled stages want to know of a batch."""
        if not self._coordinates.size:
            return None
        (epoch, number), one = request.place, np.ones((), bool)
        samples = Rows(request.epochs, request.positions, request.real)
        batched = bool(self.pipeline.plan.batchings)
        rows = [Rows(np.asarray(epoch), np.asarray(number), one), samples] if batched else [samples]
        return self._coordinates.arrange(1, rows)[0]

    def keep(self) -> None:
        """Leave the thread of an iterator that has come to its end running until `close`."""
        self._kept = True

    def begin_program(self) -> None:
        """Compiled programs do not get here."""
        self.pipeline.refuse_program("A compiled program")

    def count_program(self, first: PyTree, steps: int, after: PyTree) -> None:
        """Compiled programs do not get here."""

    def settle(self) -> None:
        """Everything is counted when it is drawn."""

    def samples_by_source(self) -> dict[str, int]:
        """An iterable is one source."""
        return {}

    def end_programs(self) -> None:
        """Compiled programs have drawn nothing."""

    def close(self) -> None:
        """End what `next` has begun, and a thread that is kept."""
        self._kept = False
        self._end_stepping()
        parked = self._take_parked()
        if parked is not None:
            parked.close()

    def _end_stepping(self) -> None:
        cursor, self._stepping = self._stepping, None
        if cursor is not None:
            cursor.pause()


class IterableCursor:
    """Draws the batches of one run from an `IterableFeed`.

    Args:
        feed: The feed.
        state: Where to start.
        steps: How many batches will be drawn; None for those up to the end of the pass.

    Attributes:
        state: The state after the batch drawn last.
    """

    def __init__(self, feed: IterableFeed, state: IterableState, steps: int | None) -> None:
        self._feed = feed
        self._words = np.asarray(state.key)
        self.state = state
        self._left = steps
        self._is_over = False
        self._drawer: Drawer | None = None
        self._stop: weakref.finalize | None = None

    def draw(self, state: IterableState) -> "Drawn | None":
        """The next batch, and the state after it; None at the end of the pass."""
        if self._is_over:
            return None
        feed = self._feed
        if self._drawer is None:
            self._drawer = feed.open(self.state, self._left)
            self._stop = weakref.finalize(self, self._drawer.stop)
        drawer = self._drawer
        feed.stats.ready += drawer.count_ready()
        ready = drawer.next()
        if ready is None:
            self._is_over = True
            return None
        if ready.request is None:  # what is left of the pass is dropped, and the next one begins
            self._is_over = True
            self._advance(0, ready.after)
            return None, self.state, 0
        filled = drawer.backend.collect(ready.job)
        filled.request = ready.request
        filled.report.times["the iterable"] = ready.seconds
        value, mask = feed.make(self._words, filled)
        self._advance(1, ready.after)
        if self._left is not None:
            self._left -= 1
        return (value, mask), self.state, readable(mask) if feed.masked else filled.samples

    def _advance(self, steps: int, after: Progress) -> None:
        before = self.state
        step, progress = np.asarray(int(before.step) + steps, np.uint32), after.words()
        self.state = IterableState(before.key, step, before.origin, progress)  # pyright: ignore[reportArgumentType]

    def move(self, state: IterableState, steps: int | None) -> "IterableCursor":
        """A cursor at a different state."""
        self._feed.pipeline.check_state("set_state", state)
        return IterableCursor(self._feed, state, steps)

    def pause(self) -> None:
        """End the thread and the iterator; drawing another batch begins them again."""
        drawer, self._drawer = self._drawer, None
        if drawer is None:
            return
        if self._stop is not None:
            self._stop.detach()
        self._feed.leave(drawer)


def _is_same(one: IterableState, other: IterableState) -> bool:
    """Whether two states are at the same place of the same run."""
    return int(one.step) == int(other.step) and all(
        np.array_equal(np.asarray(mine), np.asarray(theirs))
        for mine, theirs in ((one.key, other.key), (one.progress, other.progress))
    )
