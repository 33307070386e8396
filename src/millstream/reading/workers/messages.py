"""What the main process and its workers say to each other."""

import dataclasses
import struct
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from millstream.files.plain import encode
from millstream.plan.planned import Request
from millstream.reading.exception_record import rebuild, record
from millstream.reading.reading import Report
from millstream.reading.slots import Layout

# To a worker.
SETUP, READ = 1, 2
# From a worker.
READY, DONE, FAILED, TIMED = 11, 12, 13, 14


@dataclasses.dataclass(frozen=True)
class ReadMessage:
    """Read a batch into a slot. What to read stands in the slot itself, so a message is always small.

    Attributes:
        number: The job's number, which comes back with the answer.
        chunk_start: Where the chunk of shared memory begins that holds the slot.
        chunk_size: Its size.
        offset: The slot's place in the shared memory.
        step: The number of the batch.
        bucket: Which of the layouts it has.
        singly: Whether to read row by row, to find out which one it is that ends a worker.
    """

    FORM: ClassVar[struct.Struct] = struct.Struct("<QQQQQQ?")

    number: int
    chunk_start: int
    chunk_size: int
    offset: int
    step: int
    bucket: int
    singly: bool

    def to_bytes(self) -> bytes:
        place = self.chunk_start, self.chunk_size, self.offset
        return self.FORM.pack(self.number, *place, self.step, self.bucket, self.singly)

    @classmethod
    def from_bytes(cls, data: bytes) -> "ReadMessage":
        return cls(*cls.FORM.unpack(data))


@dataclasses.dataclass(frozen=True)
class SlotLayout:
    """A slot as both sides see it: the leaves of the batch, and behind them the request.

    Attributes:
        batch: The layout of the batch. Of Python objects, which travel as messages, nothing is in the slot.
    """

    batch: Layout

    @property
    def layout(self) -> Layout:
        """Of all that is in a slot."""
        asked = (((), np.dtype(np.int64)), ((), np.dtype(bool)), ((2,), np.dtype(np.uint32)))
        leaves = [] if self.batch.objects else list(zip(self.batch.shapes, self.batch.dtypes, strict=True))
        shapes, dtypes = zip(*leaves, *asked, strict=True)
        others = tuple(SlotLayout(other).layout for other in self.batch.others)
        return Layout(self.batch.axes, shapes, dtypes, others)

    @property
    def n_leaves(self) -> int:
        """How many of the arrays of a slot are the batch."""
        return 0 if self.batch.objects else len(self.batch.shapes)

    def write(self, arrays: list[np.ndarray], request: Request) -> None:
        """Put a request into a slot."""
        indices, real, keys = arrays[-3:]
        indices[:], real[:] = request.indices, request.real
        if request.keys is not None:
            keys[:] = request.keys

    def request(self, arrays: list[np.ndarray], message: ReadMessage, keyed: bool) -> Request:
        """The request in a slot."""
        indices, real, keys = arrays[-3:]
        return Request(message.step, indices, real, keys if keyed else None, bucket=message.bucket)


def encode_answer(
    request: Request,
    report: Report,
    objects: list[Any],
    at: Callable[[int, int], None],
    **more: float,
) -> bytes:
    """What came of a request, as plain values.

    Args:
        request: What was asked for.
        report: What came of its rows.
        objects: The samples, if they are Python objects.
        at: Told the sample that cannot be sent, before the error.
        more: What else to say.
    """
    failed = {row: record(error) for row, error in report.failed.items()}
    answer = {"times": report.times, "extras": report.extras, "failed": failed, "objects": objects, **more}
    try:
        return encode(answer, "A worker process")
    except TypeError:
        for row, index in enumerate(request.indices.tolist()):
            at(row, index)  # for the error to name the sample
            value = objects[row] if objects else report.extras.get(row)
            encode(value, f"Sample {index}, read by a worker process,", ", or use Threads")
        raise


def report_of(answer: dict[str, Any]) -> Report:
    """The report in an answer."""
    failed: dict[int, BaseException] = {row: rebuild(error) for row, error in answer["failed"].items()}
    return Report(failed, answer["extras"], answer["times"])
