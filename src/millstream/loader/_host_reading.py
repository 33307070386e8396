"""Iterating over samples that are read on the host."""

from collections.abc import Callable
from typing import Any

import numpy as np

from millstream.loader._delivery import Delivery
from millstream.loader.info import describe_batch
from millstream.loader.iterator import Drawn, Real
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.placement import readable
from millstream.pipeline.state import LoaderState
from millstream.reading.contracts import PyTree
from millstream.reading.read_ahead import ReadAhead
from millstream.reading.reading import Filled
from millstream.reading.stats import LoaderStats


class HostReading:
    """Draws the batches of a run. Steps are counted here, so nothing waits for the device to tell.

    Args:
        pipeline: The pipeline.
        open_reader: Gives what reads its samples; called again after a pause.
        delivery: What makes batches of them.
        stats: Where to count.
        state: Where to begin.
        steps: How many batches will be drawn.
        with_info: Whether each comes with what is known about it.
        masked: Whether a stage sets the mask.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        open_reader: Callable[[], ReadAhead],
        delivery: Delivery,
        stats: LoaderStats,
        state: LoaderState,
        steps: int,
        with_info: bool,
        masked: bool,
    ) -> None:
        assert pipeline.host is not None
        self._pipeline = pipeline
        self._host = pipeline.host
        self._open_reader = open_reader
        self._reader: ReadAhead | None = None
        self._delivery = delivery
        self._stats = stats
        self._state = state
        self._words = np.asarray(state.key)
        self._key = state.key if pipeline.placement is None else self._words
        self._left = range(int(state.step), int(state.step) + steps)
        self._overtaken: list[int] = []  # steps behind the first of `_left` that have come before it
        self._with_info = with_info
        # Other processes may skip samples of which this one knows nothing; the mask, which all of them have, says it.
        shared = pipeline.placement is not None and not pipeline.placement.is_local
        self._reads_mask = masked or (shared and self._host.tolerant)

    def draw(self, state: PyTree) -> Drawn:
        """The next batch, and the state after it; None as long as batches have overtaken others."""
        if self._reader is None:
            self._reader = self._open_reader()
        if self._host.ordered:
            step = self._left[0]
            filled = self._reader.rows(self._words, step)
        else:
            open_steps = [step for step in self._left[: 2 * len(self._overtaken) + 64] if step not in self._overtaken]
            step, filled = self._reader.any_rows(self._words, open_steps)
        after = self._after(step)
        if filled.report.failed and self._host.on_error == "skip batch":
            self._stats.dropped += 1
            return None, after, 0
        value, mask = self._delivery.deliver(self._key, filled)
        real = self._real(step, filled, mask)
        if not self._with_info:
            return (value, mask), after, real
        assert filled.request is not None
        return (value, mask, describe_batch(self._pipeline, filled.request, filled.report)), after, real

    def _real(self, step: int, filled: Filled, mask: Any) -> Real:
        """Which rows count, as `Drawn` has it."""
        if self._reads_mask:
            return readable(mask)
        if filled.report.failed:
            return self._delivery.mask(filled)
        return self._pipeline.plan.real_samples(self._words, step)

    def _after(self, step: int) -> LoaderState | None:
        self._overtaken.append(step)
        while self._left and self._left[0] in self._overtaken:
            self._overtaken.remove(self._left[0])
            self._left = self._left[1:]
        if self._overtaken:
            return None
        return LoaderState(self._state.key, np.asarray(self._left.start, np.uint32), self._state.origin)  # pyright: ignore

    def pause(self) -> None:
        """End the reading; drawing another batch begins it again."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
