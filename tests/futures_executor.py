"""An executor that is not part of the package: batches are read by a pool of `concurrent.futures`."""

import concurrent.futures
import dataclasses
import time
from typing import Any

from millstream.reading import Backend, Layout, ReadBatch, Reading, Request


@dataclasses.dataclass(frozen=True)
class Futures:
    """Reads every batch in one thread of a pool."""

    workers: int
    ordered: bool = True

    def ahead(self, prefetch: int) -> int:
        return max(prefetch, self.workers)

    def open(self, source: Any, layout: Layout, ahead: int, tolerant: bool) -> Backend:
        return FuturesBackend(source, layout, self.workers, tolerant)


@dataclasses.dataclass
class Job:
    request: Request
    future: concurrent.futures.Future[ReadBatch]


class FuturesBackend:
    lazy = False

    def __init__(self, source: Any, layout: Layout, workers: int, tolerant: bool) -> None:
        self.closed = False
        self._source, self._layout, self._tolerant = source, layout, tolerant
        self._pool = concurrent.futures.ThreadPoolExecutor(workers)

    def start(self, request: Request) -> Job:
        return Job(request, self._pool.submit(self._read, request))

    prepare = start

    def _read(self, request: Request) -> ReadBatch:
        layout = self._layout.of(request.bucket)
        begun, leaves = time.perf_counter(), layout.empty()
        report = Reading(self._source, request, leaves, tolerant=self._tolerant).read(0, layout.rows)
        seconds, samples = time.perf_counter() - begun, int(request.real.sum())
        return ReadBatch(layout.with_axes(leaves), report, seconds, samples)

    def collect(self, job: Job) -> ReadBatch:
        return job.future.result()

    def is_done(self, job: Job) -> bool:
        return job.future.done()

    def first_of(self, jobs: list[Job]) -> Job:
        concurrent.futures.wait([job.future for job in jobs], return_when="FIRST_COMPLETED")
        return next(job for job in jobs if job.future.done())

    def drop(self, job: Job) -> None:
        job.future.cancel()

    def close(self) -> None:
        self.closed = True
        self._pool.shutdown(cancel_futures=True)
