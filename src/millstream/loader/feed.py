"""Feeds: the services that make the batches of a loader, one per loader. A feed is where a pipeline runs.

A feed opens a cursor for every iterator. A cursor draws the batches of one run, in order.
"""

import math
from typing import Any, Protocol

import jax
import numpy as np

from millstream.loader._finish import Finish, as_placed, count_in_transit
from millstream.loader._program import Program, gathering, next_batch
from millstream.loader.agreement import require_agreement
from millstream.loader.batch_info import describe_batch
from millstream.loader.iterable_feed import IterableFeed
from millstream.loader.source_counts import SourceCounts
from millstream.pipeline.compose import IndexedPipeline, SeekablePipeline
from millstream.pipeline.iterable import IterablePipeline
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.placement import readable
from millstream.pipeline.rows import RowTouch
from millstream.pipeline.state import LoaderState, check_origin, check_position
from millstream.pipeline.static_part import split
from millstream.plan.planned import PlannedSteps
from millstream.reading.contracts import PyTree
from millstream.reading.reader import ReadAhead, reader_of
from millstream.reading.reading import ReadBatch, Report
from millstream.reading.stats import LoaderStats

# How many samples a batch has, if these are its first rows; if not, its mask, read on demand.
Real = int | np.ndarray | jax.Array

# What is handed out, or None for a batch that is left out; the state after it; which of its rows count.
Drawn = tuple[Any, PyTree, Real]


class Cursor(Protocol):
    """Draws batches for one iterator."""

    def draw(self, state: PyTree) -> Drawn | None:
        """The batch of a state, which is the one after the last; None if the data end before the steps do."""
        ...

    def move(self, state: PyTree, steps: Any) -> "Cursor":
        """A cursor that draws `steps` batches from a different state."""
        ...

    def pause(self) -> None:
        """End the reading; drawing another batch begins it again."""
        ...


class Feed(Protocol):
    """Makes the batches of a loader.

    Attributes:
        stats: Counts and times of everything it has made.
        made_ahead: How many batches an iterator draws before they are asked for.
    """

    stats: LoaderStats
    made_ahead: int

    def next(self, state: PyTree) -> tuple[PyTree, PyTree, Any]:
        """The batch of a state, the state after it, and the mask."""
        ...

    def cursor(self, state: PyTree, steps: Any, with_info: bool) -> Cursor:
        """Draws `steps` batches from a state on; None, where the length of a pass is unknown, for the rest of it."""
        ...

    def keep(self) -> None:
        """Leave threads and worker processes running until `close`."""
        ...

    def begin_program(self) -> None:
        """A compiled program is about to draw batches."""
        ...

    def count_program(self, first: PyTree, steps: int, after: PyTree) -> None:
        """A compiled program draws `steps` batches from one state to another; it may still be at it."""
        ...

    def settle(self) -> None:
        """Count what is drawn but not counted yet; it may wait for the first step of a program."""
        ...

    def samples_by_source(self) -> dict[str, int]:
        """How many samples of each source of a mixture all steps have that are counted."""
        ...

    def end_programs(self) -> None:
        """End what compiled programs have begun to read, unless it is kept."""
        ...

    def close(self) -> None:
        """End threads and worker processes that no iterator uses."""
        ...


class _Unread:
    """A feed that has nothing to end."""

    stats: LoaderStats

    def begin_program(self) -> None:
        """Nothing has to be made ready."""

    def count_program(self, first: PyTree, steps: int, after: PyTree) -> None:
        """Count the batches that a program makes."""
        self.stats.batches += steps

    def settle(self) -> None:
        """Everything is counted when it is drawn."""

    def samples_by_source(self) -> dict[str, int]:
        """A stream has no sources."""
        return {}

    def keep(self) -> None:
        """There is nothing to leave running."""

    def end_programs(self) -> None:
        """Programs read nothing."""

    def close(self) -> None:
        """There is nothing to end."""


class StreamFeed(_Unread):
    """Makes the values of a stream, one after the other.

    Args:
        program: The stream.
        masked: Whether a stage sets the mask.
        device: A device or sharding for the values; None leaves it to JAX.
    """

    made_ahead = 0  # a stream may depend on what the caller does with its values

    def __init__(self, program: Program, masked: bool, device: Any) -> None:
        self.stats = LoaderStats()
        self._program = program
        self._masked = masked
        self._device = device

    def next(self, state: PyTree) -> tuple[PyTree, PyTree, Any]:
        """The value of a state, the state after it, and the mask."""
        self.stats.batches += 1
        return self._make_next(state)

    def _make_next(self, state: PyTree) -> tuple[PyTree, PyTree, Any]:
        value, state, mask = self._program.run(next_batch, self._program.static, self._program.arrays, state)
        value, mask = as_placed((value, mask), self._device)
        return value, state, mask

    def cursor(self, state: PyTree, steps: int, with_info: bool) -> "StreamFeed":
        """The feed itself: where a stream is, its state knows."""
        if with_info:
            raise TypeError("iterate has no info on the values of a stream. Keep to with_info=False.")
        return self

    def draw(self, state: PyTree) -> Drawn:
        """The value of a state, and the state after it."""
        value, state, mask = self._make_next(state)
        return (value, mask), state, readable(mask) if self._masked else mask.size

    def move(self, state: PyTree, steps: int) -> "StreamFeed":
        """Streams have no plain positions."""
        raise TypeError("set_state has plain values only for indexed sources. Make an iterator: iterate(state).")

    def pause(self) -> None:
        """Nothing is read."""


class _RunInUse:
    """The steps of the run that is stepped through; several threads may ask."""

    def __init__(self, pipeline: IndexedPipeline) -> None:
        self._pipeline = pipeline
        self._run: tuple[bytes, PlannedSteps] | None = None

    def steps(self, words: np.ndarray) -> PlannedSteps:
        """The steps of the run with this key."""
        name, run = words.tobytes(), self._run
        if run is None or run[0] != name:
            self._run = run = name, self._pipeline.planned_steps(words)
        return run[1]


class GraphFeed(_Unread):
    """Gathers batches of arrays in a compiled program, which is told the indices: the plan is made on the host.

    Args:
        pipeline: The pipeline.
        program: The same, for compiled programs.
        masked: Whether a stage sets the mask.
        device: A device or sharding for the batches; None leaves it to JAX.
        prefetch: How many batches to make ahead.
    """

    def __init__(self, pipeline: Pipeline, program: Program, masked: bool, device: Any, prefetch: int) -> None:
        self.stats = LoaderStats()
        self.made_ahead = 0 if program.effects else prefetch
        self.pipeline = pipeline
        self.masked = masked
        static, self._arrays = split(pipeline.planned_on_host())
        self._gathered = program.runner(gathering(static))
        self._device = device
        self._placement = pipeline.placement
        self._is_keyed = pipeline.is_keyed
        self._rows = math.prod(pipeline.plan.axes)
        far_apart = pipeline.plan.is_random and self._placement is None
        self._touch = RowTouch(pipeline.arrays, self._rows) if far_apart else None
        self._in_use = _RunInUse(pipeline)  # of `next`
        self.sources = SourceCounts(pipeline.plan, of_programs=True)

    def next(self, state: LoaderState) -> tuple[PyTree, LoaderState, Any]:
        """The batch of a state, the state after it, and the mask."""
        words, step = np.asarray(state.key), int(state.step)
        value, mask = self.make(words, state.key, self._in_use.steps(words).numbers(step))
        self.stats.batches += 1
        self.stats.samples += self.pipeline.plan.real_samples(words, step)
        if self.sources.is_mixture:
            self.sources.add(step)
        return value, state_at(state, step + 1), mask

    def make(self, words: np.ndarray, key: Any, numbers: np.ndarray | None) -> tuple[PyTree, Any]:
        """The batch with these coordinates, and its mask.

        Args:
            words: The run's raw key data.
            key: The same, where the state has it.
            numbers: The coordinates.
        """
        placement = self._placement
        if not self._is_keyed:
            key = None
        elif placement is not None:
            key = words
        if self._touch is not None and numbers is not None:
            self._touch(numbers[: self._rows])
        made = self._gathered(self._arrays, key, numbers)
        if placement is not None:
            return jax.tree.map(placement.hand_over, made) if placement.hands_over else made
        return made if self._device is None else as_placed(made, self._device)

    def count_program(self, first: LoaderState, steps: int, after: LoaderState) -> None:
        """Count the batches that a program makes; their samples later, since its first step may still be computed."""
        super().count_program(first, steps, after)
        self.stats.samples += self.sources.add_program(first, steps, after)

    def settle(self) -> None:
        """Count what is drawn but not counted yet; it may wait for the first step of a program."""
        self.stats.samples += self.sources.settle()

    def samples_by_source(self) -> dict[str, int]:
        """How many samples of each source of a mixture all steps have that are counted."""
        return self.sources.by_name()

    def cursor(self, state: LoaderState, steps: int, with_info: bool) -> "GraphCursor":
        """Draws batches from a state on."""
        return GraphCursor(self, state, with_info)


class GraphCursor:
    """Draws the batches of one run from a `GraphFeed`.

    Args:
        feed: The feed.
        state: Where to start.
        with_info: Whether each batch comes with what is known about it.
    """

    def __init__(self, feed: GraphFeed, state: LoaderState, with_info: bool) -> None:
        self._feed = feed
        self._words = np.asarray(state.key)
        self._steps = feed.pipeline.planned_steps(self._words)
        self._with_info = with_info

    def draw(self, state: LoaderState) -> Drawn:
        """The batch of a state, and the state after it."""
        feed, words, step = self._feed, self._words, int(state.step)
        value, mask = feed.make(words, state.key, self._steps.numbers(step))
        if feed.sources.is_mixture:
            feed.sources.add(step)
        after = state_at(state, step + 1)
        planned = feed.pipeline.plan.real_samples(words, step)
        feed.stats.samples += planned
        real = readable(mask) if feed.masked else planned
        if not self._with_info:
            return (value, mask), after, real
        info = describe_batch(feed.pipeline, self._steps.request(step, keyed=False), Report())
        return (value, mask, info), after, real

    def move(self, state: LoaderState, steps: int) -> "GraphCursor":
        """A cursor at a different state."""
        check_run("set_state", self._feed.pipeline, state, steps)
        return GraphCursor(self._feed, state, self._with_info)

    def pause(self) -> None:
        """Nothing is read."""


class HostFeed:
    """Reads samples on the host, and finishes them: compiled stages, and their way to the devices.

    Args:
        pipeline: The pipeline.
        program: The same, for compiled programs.
        masked: Whether a stage sets the mask.
        device: A device or sharding for the batches; None leaves it to JAX.
    """

    def __init__(self, pipeline: IndexedPipeline, program: Program, masked: bool, device: Any) -> None:
        assert pipeline.host is not None
        self.stats = LoaderStats()
        self.made_ahead = count_in_transit(program, masked, device)
        self.pipeline = pipeline
        self.host = pipeline.host
        self.reader = reader_of(pipeline.host, pipeline.plan)
        self.reader.stats = self.stats
        self._finishes = [Finish(bucket, program, device) for bucket in pipeline.buckets]
        self._in_use = _RunInUse(pipeline)  # of `next`
        rows, plans = self.host.rows, pipeline.plan.buckets
        self.reads_all = rows is None or [len(own) for own in rows] == [plan.axes[0] for plan in plans]
        self.sources = SourceCounts(pipeline.plan)
        # Other processes may skip samples of which this one knows nothing; the mask, which all of them have, says it.
        shared = pipeline.placement is not None and not pipeline.placement.is_local
        self.reads_mask = masked or (shared and self.host.tolerant)

    def next(self, state: LoaderState) -> tuple[PyTree, LoaderState, Any]:
        """The batch of a state, the state after it, and the mask."""
        words, step = np.asarray(state.key), int(state.step)
        self.reader.stats = self.stats
        filled = self.reader.rows(words, step)
        value, mask = self.finish_of(filled)(words, self._in_use.steps(words).numbers(step), filled)
        if self.sources.is_mixture:
            self.sources.add(step)
        return value, state_at(state, step + 1), mask

    def finish_of(self, filled: ReadBatch) -> Finish:
        """What makes a batch of such rows."""
        assert filled.request is not None
        return self._finishes[filled.request.bucket]

    def cursor(self, state: LoaderState, steps: int, with_info: bool) -> "HostCursor":
        """Draws batches from a state on."""
        return HostCursor(self, state, steps, with_info)

    def keep(self) -> None:
        """Leave threads and worker processes running until `close`."""
        self.reader.keep()

    def begin_program(self) -> None:
        """Count the batches that a program has read as this loader's."""
        self.reader.stats = self.stats

    def count_program(self, first: LoaderState, steps: int, after: LoaderState) -> None:
        """Count the samples of each source that a program draws."""
        self.sources.add_program(first, steps, after)

    def settle(self) -> None:
        """Count what is drawn but not counted yet; it may wait for the first step of a program."""
        self.sources.settle()

    def samples_by_source(self) -> dict[str, int]:
        """How many samples of each source of a mixture all steps have that are counted."""
        return self.sources.by_name()

    def end_programs(self) -> None:
        """End what compiled programs have begun to read, unless it is kept."""
        self.reader.end_runs()

    def close(self) -> None:
        """End threads and worker processes that no iterator uses."""
        self.reader.close()


class HostCursor:
    """Draws the batches of one run from a `HostFeed`.

    Args:
        feed: The feed.
        state: Where to start.
        steps: How many batches will be drawn.
        with_info: Whether each batch comes with what is known about it.
    """

    def __init__(self, feed: HostFeed, state: LoaderState, steps: int, with_info: bool) -> None:
        self._feed = feed
        self._words = np.asarray(state.key)
        self._key = state.key if feed.pipeline.placement is None else self._words
        self._state = state
        self._with_info = with_info
        self._ordered = feed.host.ordered
        self._left = range(int(state.step), int(state.step) + steps)
        self._overtaken: list[int] = []  # steps after the first of `_left` that have come before it
        self._ahead: ReadAhead | None = None

    def draw(self, state: PyTree) -> Drawn:
        """The next batch, and the state after it; None as long as batches have overtaken others."""
        feed, ahead = self._feed, self._ahead
        if ahead is None:
            steps = feed.pipeline.planned_steps(self._words)
            ahead = self._ahead = feed.reader.read_ahead(steps, feed.stats, self._left.stop)
        if self._ordered:
            step = self._left.start
            filled = ahead.rows(step)
        else:
            step, filled = ahead.any_rows(self._open_steps())
        if filled.report.failed and feed.host.on_error == "skip batch":
            feed.stats.dropped += 1
            return None, self._after(step), 0
        if feed.sources.is_mixture:
            feed.sources.add(step)
        value, mask = feed.finish_of(filled)(self._key, ahead.steps.numbers(step), filled)
        real = self._real(step, filled, mask)
        if not self._with_info:
            return (value, mask), self._after(step), real
        assert filled.request is not None
        return (value, mask, describe_batch(feed.pipeline, filled.request, filled.report)), self._after(step), real

    def _real(self, step: int, filled: ReadBatch, mask: Any) -> Real:
        """Which rows count, as `Drawn` has it."""
        if self._feed.reads_mask:
            return readable(mask)
        if filled.report.failed:
            return self._feed.finish_of(filled).mask(filled)
        if self._feed.reads_all:
            return filled.samples
        return self._feed.pipeline.plan.real_samples(self._words, step)

    def _open_steps(self) -> list[int]:
        return [step for step in self._left[: 2 * len(self._overtaken) + 64] if step not in self._overtaken]

    def _after(self, step: int) -> LoaderState | None:
        if step != self._left.start:
            self._overtaken.append(step)
            return None
        self._left = self._left[1:]
        while self._left and self._left[0] in self._overtaken:
            self._overtaken.remove(self._left[0])
            self._left = self._left[1:]
        if self._overtaken:
            return None
        return state_at(self._state, self._left.start)

    def move(self, state: LoaderState, steps: int) -> "HostCursor":
        """A cursor at a different state."""
        check_run("set_state", self._feed.pipeline, state, steps)
        return HostCursor(self._feed, state, steps, self._with_info)

    def pause(self) -> None:
        """End the reading; drawing another batch begins it again."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


def state_at(state: LoaderState, step: int) -> LoaderState:
    """The state of the same run before batch number `step`; nothing waits for a device to count it."""
    return LoaderState(state.key, np.asarray(step, np.uint32), state.origin)  # pyright: ignore[reportArgumentType]


def check_run(caller: str, pipeline: SeekablePipeline, state: Any, steps: int) -> None:
    """Refuse a state that these steps cannot start from, and processes that are about to read different batches."""
    origin, limit = pipeline.origin, pipeline.plan.step_limit
    check_origin(caller, state, origin)
    first = check_position(caller, state, limit)
    if first + steps > limit:
        raise ValueError(f"{caller} can reach step {limit:,}, not {first + steps:,}. Start a run with another key.")
    placement = pipeline.placement
    if placement is None or placement.is_local:
        return
    key, sharding = np.asarray(state.key).tobytes().hex(), placement.sharding
    run = (("key", key), ("step", str(first)), ("steps", str(steps)))
    require_agreement(caller, (*origin, *run, ("mesh", str(sharding.mesh.shape)), ("spec", placement.shardings.words)))


def feed_of(source: Any, program: Program, masked: bool, device: Any, prefetch: int) -> Feed:
    """The feed of a composed source."""
    if isinstance(source, IterablePipeline):
        return IterableFeed(source, program, masked, device, prefetch)
    if not isinstance(source, IndexedPipeline):
        return StreamFeed(program, masked, device)
    if isinstance(source, Pipeline) and source.host is None:
        return GraphFeed(source, program, masked, device, prefetch)
    return HostFeed(source, program, masked, device)
