"""The batches of a pipeline that changes at given steps: a feed for each of its phases."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

from millstream.loader._parts import Part
from millstream.loader.feed import Drawn, Feed, check_run, state_at
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
        self._feeds: dict[int, Feed] = {}  # of the phases that were reached; those that are over are closed
        self._kept = False
        self.made_ahead = self.of(0).made_ahead

    def of(self, phase: int) -> Feed:
        """The feed of a phase."""
        feed = self._feeds.get(phase)
        if feed is None:
            feed = self._feeds[phase] = self._feed_of(phase)
            feed.stats = self.stats
        if self._kept:
            feed.keep()
        return feed

    def leave(self, phase: int) -> None:
        """End the threads and worker processes of a phase that is over."""
        self._feeds[phase].close()

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
        for feed in self._feeds.values():
            feed.keep()

    def begin_program(self) -> None:
        """Nothing: the loaders of the phases run the programs."""

    def count_program(self, first: PyTree, steps: int, after: PyTree) -> None:
        """Nothing: the loaders of the phases count theirs."""

    def settle(self) -> None:
        """Count what is drawn but not counted yet; it may wait for the first step of a program."""
        for feed in self._feeds.values():
            feed.settle()

    def samples_by_source(self) -> dict[str, int]:
        """How many samples of each source of a mixture all steps have that are counted."""
        found: collections.Counter[str] = collections.Counter()
        for feed in self._feeds.values():
            found.update(feed.samples_by_source())
        return dict(found)

    def end_programs(self) -> None:
        """End what compiled programs have begun to read, unless it is kept."""
        for feed in self._feeds.values():
            feed.end_programs()

    def close(self) -> None:
        """End threads and worker processes that no iterator uses."""
        self._kept = False
        for feed in self._feeds.values():
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
        self._feed = feed
        self._state = state
        self._with_info = with_info
        first = int(state.step)
        split = feed.pipeline.plan.split(range(first, first + steps))
        self._parts = [(phase, self._part(phase, own)) for phase, own in split]

    def _part(self, phase: int, own: range) -> Part:
        feed, begun = self._feed, self._feed.pipeline.state_in(phase, self._state, own.start)
        return Part("", lambda: feed.of(phase).cursor(begun, len(own), self._with_info), begun, len(own))

    def draw(self, state: PyTree) -> Drawn:
        """The next batch, and the state after it; None as long as batches have overtaken others."""
        phase, part = self._parts[0]
        if not part.left:
            self.pause()
            self._feed.leave(phase)
            self._parts.pop(0)
            phase, part = self._parts[0]
        value, after, real = part.draw()
        start = self._feed.pipeline.starts[phase]
        if value is not None and self._with_info:
            *rest, info = value
            value = (*rest, self._placed(info, start + info.step))
        return value, None if after is None else state_at(self._state, start + int(after.step)), real

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
        for _, part in self._parts[:1]:
            part.pause()
