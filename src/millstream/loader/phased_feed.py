"""The batches of a pipeline that changes at given steps: a feed for each of its phases."""

import dataclasses
from collections.abc import Callable
from typing import Any

from millstream.loader.feed import Cursor, Drawn, Feed, check_run, state_at
from millstream.pipeline.phased import PhasedPipeline
from millstream.pipeline.state import LoaderState
from millstream.reading.contracts import PyTree
from millstream.reading.stats import LoaderStats


class PhasedFeed:
    """Makes batches by the feed of the phase that a step belongs to.

    Args:
        pipeline: The pipeline.
        feed_of: The feed of each phase; called when its first batch is asked for.

    Attributes:
        stats: Counts and times of all phases.
        made_ahead: As many batches as the first phase makes ahead.
        pipeline: The pipeline.
    """

    def __init__(self, pipeline: PhasedPipeline, feed_of: Callable[[int], Feed]) -> None:
        self.stats = LoaderStats()
        self.pipeline = pipeline
        self._feed_of = feed_of
        self._open: dict[int, Feed] = {}
        self._kept = False
        self.made_ahead = self.of(0).made_ahead

    def of(self, phase: int) -> Feed:
        """The feed of a phase."""
        if phase not in self._open:
            feed = self._open[phase] = self._feed_of(phase)
            feed.stats = self.stats
            if self._kept:
                feed.keep()
        return self._open[phase]

    def leave(self, phase: int) -> None:
        """End the threads and worker processes of a phase that is over."""
        self._open.pop(phase).close()

    def next(self, state: LoaderState) -> tuple[PyTree, LoaderState, Any]:
        """The batch of a state, the state after it, and the mask."""
        step = int(state.step)
        phase, own = self.pipeline.plan.phase_at(step)
        value, _, mask = self.of(phase).next(self.pipeline.state_in(phase, state, own))
        return value, state_at(state, step + 1), mask

    def cursor(self, state: LoaderState, steps: int, with_info: bool) -> "PhasedCursor":
        """Draws batches from a state on."""
        return PhasedCursor(self, state, steps, with_info)

    def keep(self) -> None:
        """Leave threads and worker processes running until `close`, or until their phase is over."""
        self._kept = True
        for feed in self._open.values():
            feed.keep()

    def begin_programs(self, steps: int) -> None:
        """Nothing: the loaders of the phases run the programs."""

    def end_programs(self) -> None:
        """End what compiled programs have begun to read, unless it is kept."""
        for feed in self._open.values():
            feed.end_programs()

    def close(self) -> None:
        """End threads and worker processes that no iterator uses."""
        self._kept = False
        for feed in self._open.values():
            feed.close()


class PhasedCursor:
    """Draws the batches of one run, phase after phase.

    Args:
        feed: The feed.
        state: Where to start.
        steps: How many batches will be drawn.
        with_info: Whether each batch comes with what is known about it.
    """

    def __init__(self, feed: PhasedFeed, state: LoaderState, steps: int, with_info: bool) -> None:
        first = int(state.step)
        self._feed = feed
        self._state = state
        self._with_info = with_info
        self._parts = feed.pipeline.plan.split(range(first, first + steps))
        self._left = len(self._parts[0][1]) if self._parts else 0  # batches of the phase to be drawn
        self._cursor: Cursor | None = None
        self._own_state: Any = None  # of the phase

    def draw(self, state: PyTree) -> Drawn:
        """The next batch, and the state after it; None as long as batches have overtaken others."""
        if not self._left:
            self._next_phase()
        phase, own = self._parts[0]
        if self._cursor is None:
            self._own_state = self._feed.pipeline.state_in(phase, self._state, own.start)
            self._cursor = self._feed.of(phase).cursor(self._own_state, len(own), self._with_info)
        drawn = self._cursor.draw(self._own_state)
        assert drawn is not None  # phases have a length
        value, self._own_state, real = drawn
        self._left -= 1
        start = self._feed.pipeline.starts[phase]
        if value is not None and self._with_info:
            *rest, info = value
            value = (*rest, self._placed(info, start + info.step))
        after = self._own_state
        return value, None if after is None else state_at(self._state, start + int(after.step)), real

    def _next_phase(self) -> None:
        phase, _ = self._parts.pop(0)
        self.pause()
        self._cursor = None
        self._feed.leave(phase)
        self._left = len(self._parts[0][1])

    def _placed(self, info: Any, step: int) -> Any:
        """What is known of a batch, with its numbers in the whole run."""
        epochs = self._feed.pipeline.plan.epochs
        place = {"step": step, "epoch": epochs.completed(step), "step_in_epoch": step - epochs.steps_of(step).start}
        return dataclasses.replace(info, **place)

    def move(self, state: LoaderState, steps: int) -> "PhasedCursor":
        """A cursor at a different state."""
        check_run("set_state", self._feed.pipeline, state, steps)
        return PhasedCursor(self._feed, state, steps, self._with_info)

    def pause(self) -> None:
        """End the reading; drawing another batch begins it again."""
        if self._cursor is not None:
            self._cursor.pause()
