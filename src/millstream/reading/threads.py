"""Threads of this process that read."""

import dataclasses

from millstream.reading.host_source import HostSource
from millstream.reading.slots import Layout
from millstream.reading.thread_backend import ThreadBackend
from millstream.text.errors import require_bool, require_int, require_positive


@dataclasses.dataclass(frozen=True)
class Threads:
    """Read batches in threads: right for disks, networks and libraries that let go of the interpreter's lock.

    Several threads share the samples of one batch, and its batches are those of every other executor, bit for bit.

    Example:
        >>> source = ms.DiskSampleSource(100, lambda index: {"x": np.float32(index)})
        >>> loader = ms.DataLoader([source, ms.BatchTransform(10)], executor=ms.Threads(4), prefetch=2)

    Args:
        workers: How many threads.
        ordered: False hands out whichever batch is read first. Every sample still comes exactly once, but the position
            in the stream is known at its end only.
        timeout: Seconds without a batch that are an error; None for `ms.settings.stall_seconds`.
    """

    workers: int
    ordered: bool = True
    timeout: float | None = None

    def __post_init__(self) -> None:
        check_executor(self, self.workers, self.ordered, self.timeout)

    def ahead(self, prefetch: int) -> int:
        """Batches under way besides the one that is asked for."""
        return prefetch

    def open(self, source: HostSource, layout: Layout, ahead: int, tolerant: bool) -> ThreadBackend:
        """Threads for one stream."""
        return ThreadBackend(source, layout, self.workers, ahead, tolerant=tolerant, timeout=self.timeout)


def check_executor(executor: object, workers: object, ordered: object, timeout: object) -> None:
    """Refuse what no executor can work with."""
    who = type(executor).__name__
    require_int(who, "workers", workers, least=1)
    require_bool(who, "ordered", ordered)
    if timeout is not None:
        require_positive(who, "timeout", timeout, "a number of seconds", finite=False)
