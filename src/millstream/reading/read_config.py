"""The part of a pipeline that runs on the host: what is read, by whom, how far ahead, and what becomes of errors."""

import dataclasses
import math

import numpy as np

from millstream.plan.planned import AnyPlan
from millstream.reading.cached_backend import CachedBackend, CacheOf
from millstream.reading.executor import Backend, Executor
from millstream.reading.host_source import HostSource
from millstream.reading.reading import OnError, ReadBatch
from millstream.reading.slots import Layout
from millstream.reading.threads import ThreadBackend


@dataclasses.dataclass(frozen=True)
class ReadConfig:
    """How the samples of a pipeline are read.

    Attributes:
        source: What is read.
        executor: Who reads; None for threads as the source wishes.
        prefetch: How many batches an executor reads ahead.
        on_error: What a sample that raises does to its row or its batch.
        cache: Where batches are kept on disk, if anywhere.
        rows: The rows of a global batch that this process reads, for each bucket of the plan; None for all.
    """

    source: HostSource
    executor: Executor | None = None
    prefetch: int = 2
    on_error: OnError = "raise"
    cache: CacheOf | None = None
    rows: tuple[tuple[int, ...], ...] | None = None

    @property
    def tolerant(self) -> bool:
        """Whether the stream continues when a sample cannot be read; its mask then depends on the reading."""
        return self.on_error != "raise"

    @property
    def ordered(self) -> bool:
        """Whether batches come in the order of the plan."""
        return self.executor is None or self.executor.ordered

    def layout(self, plan: AnyPlan) -> Layout:
        """The memory of a batch."""
        layouts = []
        for number, (bucket, spec) in enumerate(zip(plan.buckets, self.source.bucket_specs, strict=True)):
            axes = bucket.axes if self.rows is None else (len(self.rows[number]), *bucket.axes[1:])
            layouts.append(Layout(axes, spec.shapes, spec.dtypes))
        return dataclasses.replace(layouts[0], others=tuple(layouts[1:]))

    def of_bucket(self, number: int) -> "ReadConfig":
        """How the batches of one bucket are read."""
        rows = None if self.rows is None else (self.rows[number],)
        return dataclasses.replace(self, source=self.source.of_bucket(number), rows=rows)

    def ahead(self, plan: AnyPlan) -> int:
        """Batches in flight besides the one that is asked for."""
        if self.executor is not None:
            return self.executor.ahead(self.prefetch)
        return -(-self.source.prefetch_size // self.layout(plan).rows)

    def backend(self, plan: AnyPlan) -> Backend:
        """Who reads, or finds what was read before."""
        if self.cache is None:
            return self._reader(plan)
        cache, spec, layout = self.cache, self.source.sample_spec, self.layout(plan)
        return CachedBackend(
            lambda: self._reader(plan), lambda run: cache.open(spec, layout, run), plan, self.source.keyed
        )

    def _reader(self, plan: AnyPlan) -> Backend:
        layout, ahead = self.layout(plan), self.ahead(plan)
        if self.executor is not None:
            return self.executor.open(self.source, layout, ahead, self.tolerant)
        # A function of the user's may take any time, so it is always called by threads, which can be told to be late.
        source = self.source
        lazy = not (source.reads_samples or source.whole_batches or source.calls_users)
        return ThreadBackend(source, layout, source.readers, ahead, tolerant=self.tolerant, lazy=lazy)

    def intact(self, filled: ReadBatch, axes: tuple[int, ...]) -> np.ndarray:
        """Which rows of a batch with these axes could be read."""
        intact = np.ones(math.prod(axes), bool)
        if filled.report.failed:
            intact[slice(None) if self.on_error == "skip batch" else list(filled.report.failed)] = False
        return intact.reshape(axes)
