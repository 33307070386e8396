"""Worker processes that read."""

import dataclasses
import os
from collections.abc import Callable
from typing import ClassVar

from millstream.files.plain import encode
from millstream.reading.derived_sources import named_parts
from millstream.reading.host_source import HostSource
from millstream.reading.slots import Layout, slots_for
from millstream.reading.threads import check_executor
from millstream.reading.workers.group_backend import GroupBackend
from millstream.reading.workers.messages import SETUP, SlotLayout
from millstream.reading.workers.nursery import get_ready
from millstream.reading.workers.payload import pack, pickling
from millstream.reading.workers.process import ProgressCell, WorkerProcess
from millstream.reading.workers.worker_group import Job, WorkerGroup
from millstream.text.errors import require_callable, require_int, require_posix
from millstream.text.summaries import call_text


@dataclasses.dataclass(frozen=True)
class Processes:
    """Read batches in worker processes: right for Python code that keeps the GIL.

    Each worker is a new process, which loads no JAX and needs no `if __name__ == "__main__"` in your script.
    Functions reach it by cloudpickle, so lambdas and functions of a notebook work; arrays of the source are shared.
    Batches are written into shared memory, which JAX uses without a copy, and which is used again when nothing holds it
    any more. A worker that dies is replaced, and the batch it was reading is read again.

    Example:
        >>> executor = ms.Processes(4, nice=5, timeout=60.0)

    Args:
        workers: How many processes. Each works at a batch of its own, so that many more than `prefetch` are in flight.
        ordered: False hands out whichever batch is read first. Every sample still comes exactly once, but the position
            in the stream is known at its end only.
        startup: A function called once in each worker, before it reads.
        nice: How much less than the main process the workers press for a core, from 0 to 19.
        timeout: Seconds without a batch that are an error; None for `ms.reading.settings.stall_seconds`.
        memory_limit: Bytes of shared memory for batches, at most. If you hold on to so many that it is reached, further
            ones are copied out of it, and a warning says who holds them. None for a quarter of the machine's memory.
    """

    workers: int
    ordered: bool = True
    startup: Callable[[], object] | None = None
    nice: int = 0
    timeout: float | None = None
    memory_limit: int | None = None
    reader_names: ClassVar[tuple[str, str]] = ("worker process", "worker processes")

    def __post_init__(self) -> None:
        check_executor(self, self.workers, self.ordered, self.timeout)
        require_posix("Processes", f"use Threads({self.workers}), or WSL")
        if self.startup is not None:
            require_callable("Processes", "startup", self.startup)
        require_int("Processes", "nice", self.nice, least=0)
        if self.memory_limit is not None:
            require_int("Processes", "memory_limit", self.memory_limit, least=1)

    def ahead(self, prefetch: int) -> int:
        """Batches in flight besides the one that is asked for."""
        return prefetch + self.workers - 1

    def open(self, source: HostSource, layout: Layout, ahead: int, tolerant: bool) -> GroupBackend[Job]:
        """Worker processes for one stream."""
        get_ready(type(part).__module__ for _, part in named_parts(source))
        limit = self.memory_limit
        if limit is None:
            limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
        form = SlotLayout(layout)
        group = WorkerGroup(form, tolerant=tolerant, whole_batches=source.whole_batches)
        try:
            group.open_ring(slots_for(ahead), limit)
            self._start_workers(group, source, form, tolerant)
        except BaseException:
            group.end(group.reason)
            raise
        return GroupBackend(group, "Processes", type(source).__name__, self.timeout, shares_disk=True)

    def _start_workers(self, group: WorkerGroup, source: HostSource, form: SlotLayout, tolerant: bool) -> None:
        """Share what workers must know, and start them."""
        data = group.share_memory("The source's own arrays", "Keep them in files, with NpySource or np.memmap.")
        control = group.share_memory("The control page", "Take fewer workers.")
        with pickling("Processes", source, self.startup):
            start, size = pack((source, form, self.startup, tolerant), data)
        setup = encode({"start": start, "size": size, "nice": self.nice})
        memory = control.grow(self.workers * ProgressCell.SIZE)
        ring, data, control = (file.fd for file in group.files)
        for number in range(self.workers):
            progress = ProgressCell(memory[number * ProgressCell.SIZE : (number + 1) * ProgressCell.SIZE])
            group.start_worker(WorkerProcess(number, progress, (ring, data, control), (SETUP, setup)))

    def __repr__(self) -> str:
        return call_text(self)
