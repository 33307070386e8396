"""The contract of executors: who reads batches, and what they are asked."""

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from millstream.plan.planned import Request
from millstream.reading.contracts import PyTree
from millstream.reading.host_source import HostSource
from millstream.reading.reading import ReadBatch
from millstream.reading.slots import Layout
from millstream.text.errors import describe_value


@dataclasses.dataclass(frozen=True)
class InGraph:
    """Make batches inside the compiled program, from arrays that live on the device.

    Example:
        >>> loader = ms.DataLoader(stages, executor=ms.InGraph())  # the default
    """


# What a backend calls a batch that it reads.
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Job = TypeVar("Job", default=PyTree)
else:
    from typing import TypeVar

    Job = TypeVar("Job")


class Backend(Protocol[Job]):
    """Reads batches for all streams of a loader: threads, worker processes, or anything else.

    A job is whatever `start` returns. It has the `request` that it was started with.

    Attributes:
        lazy: Whether a batch that takes no time is better read when it is collected.
    """

    lazy: bool

    @property
    def closed(self) -> bool:
        """Whether it has ended, by `close` or by an error."""
        ...

    def prepare(self, request: Request) -> Job:
        """A batch that is read when it is collected. Backends that are not lazy start it."""
        ...

    def start(self, request: Request) -> Job:
        """Have a batch read in the background."""
        ...

    def collect(self, job: Job) -> ReadBatch:
        """Wait for a batch, and raise what reading it raised."""
        ...

    def is_done(self, job: Job) -> bool:
        """Whether a batch can be collected without waiting, as far as is known."""
        ...

    def first_of(self, jobs: list[Job]) -> Job:
        """Wait for any of these batches."""
        ...

    def drop(self, job: Job) -> None:
        """Forget a batch."""
        ...

    def close(self) -> None:
        """End everything that was begun; closing twice does no harm."""
        ...


@runtime_checkable
class Executor(Protocol):
    """Where batches are read: a value that opens backends."""

    @property
    def ordered(self) -> bool:
        """Whether batches come in the order of the plan."""
        ...

    def ahead(self, prefetch: int) -> int:
        """Batches in flight besides the one that is asked for."""
        ...

    def open(self, source: HostSource, layout: Layout, ahead: int, tolerant: bool) -> Backend:
        """A backend for one loader.

        Args:
            source: What to read.
            layout: The memory of a batch.
            ahead: Batches in flight besides the one that is asked for.
            tolerant: Whether a sample that raises becomes a failed row of its batch's report.
        """
        ...


def require_executor(caller: str, executor: Any) -> None:
    """Refuse what does not read samples."""
    if isinstance(executor, type) or not isinstance(executor, Executor | None):
        raise TypeError(
            f"{caller} needs executor to be one such as ms.Threads(4) or ms.Processes(4). "
            f"Got {describe_value(executor)}."
        )
