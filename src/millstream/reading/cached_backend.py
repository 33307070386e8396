"""Reading through a cache on disk: what is there is mapped, what is not is read and then stored."""

import collections
import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from millstream.plan.planned import AnyPlan, Request
from millstream.reading.batch_cache import Entry, Mode, OpenCache, open_cache
from millstream.reading.cache_contents import CacheContents
from millstream.reading.executor import Backend
from millstream.reading.reading import ReadBatch, Report
from millstream.reading.samples import ObjectSpec, SampleSpec
from millstream.reading.slots import Layout

_STORING = 4  # batches that may wait to be stored before reading waits for the disk


@dataclasses.dataclass(frozen=True)
class CacheOf:
    """A cache, and what it is of.

    Attributes:
        folder: Where it is.
        mode: What may be done with it.
        origin: The pipeline, in words.
    """

    folder: pathlib.Path
    mode: Mode
    origin: tuple[tuple[str, str], ...]

    def of_rows(self, rows: tuple[int, ...], size: int) -> "CacheOf":
        """The cache of a process that reads only some rows of each batch: a folder of its own in the common one."""
        digest = hashlib.sha256(np.array([size, *rows], np.int64).tobytes()).hexdigest()[:16]
        words = f"{len(rows)} of {size}, from {rows[0]} to {rows[-1]} ({digest})"
        return CacheOf(self.folder / f"rows-{digest}", self.mode, (*self.origin, ("rows", words)))

    def of_phase(self, start: int, origin: tuple[tuple[str, str], ...]) -> "CacheOf":
        """The cache of a pipeline that takes over at a step: a folder of its own in the common one."""
        return CacheOf(self.folder / f"from-step-{start}" if start else self.folder, self.mode, origin)

    def open(self, spec: SampleSpec | ObjectSpec, layout: Layout, run: bytes) -> OpenCache:
        """The cache of one run; refused if it is of another."""
        if isinstance(spec, ObjectSpec):
            raise TypeError(
                f"BatchCache keeps arrays, and these samples are Python objects ({spec.found}). Turn them into arrays "
                "with a HostMapTransform after the source."
            )
        if layout.others:
            raise TypeError(
                f"BatchCache keeps batches of one shape, and buckets make {1 + len(layout.others)}. Leave it out."
            )
        shapes = tuple((*layout.axes, *shape) for shape in layout.shapes)
        description = {**dict(self.origin), "key": np.frombuffer(run, np.uint32).astype(">u4").tobytes().hex()}
        contents = CacheContents(description, spec.names, shapes, layout.dtypes, layout.axes)
        return open_cache("BatchCache", self.folder, self.mode, contents)


def end_pool(pool: ThreadPoolExecutor, futures: Collection[Future[None]]) -> None:
    """Wait for what a pool still does, and end it.

    `shutdown` alone joins its threads, and Python takes a thread for ended whose join Ctrl-C has cut short. The process
    would then end while that thread is writing.
    """
    try:
        wait(futures)
        pool.shutdown()
    finally:
        pool.shutdown(wait=False)


@dataclasses.dataclass
class _CachedJob:
    request: Request
    entry: Entry | None
    inner: Any = None


class CachedBackend:
    """A backend that asks another one only for what is not in the cache.

    Args:
        open_inner: Gives the one that reads; not called before something has to be read.
        open_cache: Gives the cache of a run.
        plan: Whose batches are kept.
        keyed: Whether what is read depends on the keys of samples, and so on the epoch.
    """

    lazy = False

    def __init__(
        self,
        open_inner: Callable[[], Backend],
        open_cache: Callable[[bytes], OpenCache],
        plan: AnyPlan,
        keyed: bool,
    ) -> None:
        self._open_inner = open_inner
        self._open_cache = open_cache
        wraps = any(batching.ending == "wrap" for bucket in plan.buckets for batching in bucket.batchings)
        same_order = plan.shuffle.mode == "reseed" and not wraps
        self._recurs = same_order and not keyed and not plan.draws
        self._inner: Backend | None = None
        self._caches: dict[bytes, OpenCache] = {}
        self._writer: ThreadPoolExecutor | None = None
        self._storing: collections.deque[Future[None]] = collections.deque()
        self.closed = False

    def start(self, request: Request) -> _CachedJob:
        """Find a batch, or have it read."""
        entry = self._cache(request).read(*self._place(request))
        return _CachedJob(request, entry, None if entry is not None else self._reader.start(request))

    prepare = start

    def collect(self, job: _CachedJob) -> ReadBatch:
        """The batch; one that was read is stored in the background."""
        if job.entry is not None:
            extras = {row: extra for row, extra in enumerate(job.entry.additional or []) if extra is not None}
            return ReadBatch(
                job.entry.leaves, Report(extras=extras), 0.0, int(np.count_nonzero(job.request.real)), cached=True
            )
        filled = self._reader.collect(job.inner)
        if not filled.report.failed:  # what failed today may be there tomorrow
            self._store(job.request, filled)
        return filled

    def is_done(self, job: _CachedJob) -> bool:
        """Whether a batch can be collected without waiting, as far as is known."""
        return job.entry is not None or self._reader.is_done(job.inner)

    def first_of(self, jobs: list[_CachedJob]) -> _CachedJob:
        """Whichever of these batches is there first."""
        for job in jobs:
            if job.entry is not None:
                return job
        first = self._reader.first_of([job.inner for job in jobs])
        return next(job for job in jobs if job.inner is first)

    def drop(self, job: _CachedJob) -> None:
        """Forget about a batch."""
        if job.inner is not None:
            self._reader.drop(job.inner)

    def close(self) -> None:
        """Store what is left to be stored, and end the reading; closing twice does no harm."""
        self.closed = True
        try:
            if self._writer is not None:
                end_pool(self._writer, self._storing)
        finally:  # also if Ctrl-C ends the waiting
            if self._inner is not None:
                self._inner.close()
        while self._storing:
            self._storing.popleft().result()

    @property
    def _reader(self) -> Backend:
        if self._inner is None or (self._inner.closed and not self.closed):  # an error may have ended it
            self._inner = self._open_inner()
        return self._inner

    def _cache(self, request: Request) -> OpenCache:
        if request.run not in self._caches:
            self._caches[request.run] = self._open_cache(request.run)
        return self._caches[request.run]

    def _place(self, request: Request) -> tuple[int, int]:
        epoch, number = request.place
        return (0 if self._recurs else epoch), number

    def _store(self, request: Request, filled: ReadBatch) -> None:
        cache, extras = self._cache(request), filled.report.extras
        if cache.mode != "read-write":
            return
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, "millstream-cache")
        additional = [extras.get(row) for row in range(len(request.real))] if extras else None
        if len(self._storing) == _STORING:
            self._storing.popleft().result()
        self._storing.append(self._writer.submit(cache.write, *self._place(request), filled.rows, None, additional))
