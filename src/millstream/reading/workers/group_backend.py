"""Reading by a group of workers, driven by the caller that waits for a batch: no thread, no queue between them.

A sample is a function of its index and its key, so what a dead worker had begun is simply asked for again: nothing is
lost and nothing comes twice.
"""

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

import numpy as np

from millstream.errors import WorkerStalled
from millstream.plan.planned import Request
from millstream.reading._settings import settings
from millstream.reading.reading import ReadBatch, Report

_TICK = 0.25  # seconds after which a wait looks around


class GroupJob(Protocol):
    """A batch that workers read.

    Attributes:
        request: What is asked for.
        report: What came of its rows.
        seconds: How long it took, all workers together.
        error: Why it has failed.
    """

    request: Request
    report: Report
    seconds: float
    error: BaseException | None

    @property
    def done(self) -> bool:
        """Whether it is read, or has failed."""
        ...


J = TypeVar("J", bound=GroupJob)


class Group(Protocol[J]):
    """Workers, and the batches they have. It is for one thread at a time.

    Attributes:
        ended: Whether it has ended.
        reason: Why it has ended, or will have.
        restarts: Workers that have died.
        news: What a user should be warned of.
    """

    ended: bool
    reason: BaseException
    restarts: int
    news: list[str]

    @property
    def pids(self) -> list[int]:
        """The process numbers of the workers."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory that batches are read into."""
        ...

    def add(self, request: Request) -> J:
        """Have a batch read. Of a group that has ended, it has failed."""
        ...

    def rows(self, job: J) -> list[np.ndarray]:
        """The leaves of a batch that is read."""
        ...

    def drop(self, job: J) -> None:
        """Forget about a batch."""
        ...

    def poll(self, seconds: float) -> bool:
        """Receive what workers have sent, waiting for it at most that long; whether there was anything."""
        ...

    def end(self, reason: BaseException) -> None:
        """End the workers. Batches that are not read yet have failed."""
        ...

    def describe(self) -> str:
        """Where each worker is, a line for each."""
        ...

    def stacks(self) -> str:
        """Where in the code the workers are; empty if they cannot be asked."""
        ...


class GroupBackend(Generic[J]):
    """A backend that is a group of workers.

    Args:
        group: The workers, which end with the backend.
        executor: The name of the executor, for errors.
        source: The name of the source, for errors.
        timeout: Seconds without a batch that are an error; None for those of the settings.
        shares_disk: Whether the workers find on their disk what this process keeps on its own.

    Attributes:
        shares_disk: Whether they do.
    """

    lazy = False

    def __init__(
        self, group: Group[J], executor: str, source: str, timeout: float | None, *, shares_disk: bool = False
    ) -> None:
        self.shares_disk = shares_disk
        self._group = group
        self._executor = executor
        self._source = source
        self._timeout = timeout
        self._lock = threading.RLock()
        self._process_id = os.getpid()

    @property
    def closed(self) -> bool:
        """Whether it has ended, or belongs to the process that this one was forked from."""
        return self._group.ended or os.getpid() != self._process_id

    @property
    def nbytes(self) -> int:
        """Memory that batches are read into."""
        return self._group.nbytes

    @property
    def processes(self) -> list[int]:
        """The process numbers of the workers, each on its own machine."""
        return self._group.pids

    def start(self, request: Request) -> J:
        """Have a batch read in the background."""
        with self._exclusive() as group:
            group.poll(0.0)  # there may be news
            return group.add(request)  # if the group has ended, collecting this batch says so

    prepare = start

    def collect(self, job: J) -> ReadBatch:
        """The batch, once it is read; it raises what reading raised."""
        try:
            with self._exclusive() as group:
                if not job.done:
                    self._wait_until(lambda: job.done)
                if job.error is not None:
                    raise job.error
                rows = group.rows(job)
        except BaseException:
            self.drop(job)
            raise
        finally:  # nothing is half done now, so that a warning may be an error
            while self._group.news:
                warnings.warn(self._group.news.pop(), stacklevel=2)
        restarts, self._group.restarts = self._group.restarts, 0
        return ReadBatch(rows, job.report, job.seconds, int(np.count_nonzero(job.request.real)), restarts)

    def is_done(self, job: J) -> bool:
        """Whether a batch can be collected without waiting, as far as is known."""
        return job.done

    def first_of(self, jobs: list[J]) -> J:
        """Whichever of these batches is read first."""
        with self._exclusive():
            self._wait_until(lambda: any(job.done for job in jobs))
            return next(job for job in jobs if job.done)

    def drop(self, job: J) -> None:
        """Forget about a batch; its memory is free once no worker writes into it."""
        if not self.closed:
            with self._exclusive() as group:
                group.drop(job)

    def close(self) -> None:
        """End the workers; closing twice does no harm. Batches that were handed out stay valid."""
        group = self._group
        group.ended = True  # a thread that waits sees it and releases the lock
        with self._lock if os.getpid() == self._process_id else contextlib.nullcontext():
            group.end(group.reason)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[Group[J]]:
        """A block for one thread at a time. If an interrupt cuts it short, nothing is relied on any more."""
        if os.getpid() != self._process_id:
            raise RuntimeError(
                "This stream's workers belong to the process that started them, and this one was forked from it. "
                "Call loader.iterate(...) here, in the new process."
            )
        with self._lock:
            try:
                yield self._group
            except Exception:
                raise
            except BaseException:
                self.close()
                raise

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Poll workers until something is done: a warning if no batch comes for long, and an error at the end."""
        group, limit, patience = self._group, settings.limit(self._timeout), settings.patience(self._timeout)
        silence, warned = 0.0, patience >= limit
        while not done():
            if silence >= limit and not group.ended:
                group.end(WorkerStalled(self._stall_text(limit)))
            if group.ended:
                raise group.reason
            if silence >= patience and not warned:
                warned = True
                warnings.warn(f"No batch for {silence:.0f} s.\n{group.describe()}", stacklevel=3)
            begun = time.monotonic()
            if group.poll(min(_TICK, limit - silence)):
                silence = 0.0
            else:  # if this process was stopped meanwhile, that was not the workers' fault
                silence += min(time.monotonic() - begun, 2 * _TICK)

    def _stall_text(self, limit: float) -> str:
        text = (
            f"{self._source}: no batch for {limit:.3g} s.\n{self._group.describe()}\n"
            f"Is a disk or a server not answering? If this is how long a batch takes, give {self._executor} a longer "
            f"timeout, or set ms.reading.settings.stall_seconds.\n{self._group.stacks()}"
        )
        return text.rstrip()
