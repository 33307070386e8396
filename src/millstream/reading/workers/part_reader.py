"""The reader in a process that is called from elsewhere, such as a Ray actor. It never loads JAX itself."""

import dataclasses
import os
import pickle
import time
from typing import Any

import numpy as np

from millstream.files.plain import encode
from millstream.plan.planned import Request
from millstream.reading._settings import become_worker
from millstream.reading.exception_record import record
from millstream.reading.host_source import HostSource
from millstream.reading.memory import aligned_empty
from millstream.reading.reading import Reading
from millstream.reading.slots import Layout
from millstream.reading.workers.messages import encode_answer

_OWN_COPY = 1 << 20  # bytes: a smaller array is likely one that a function of the user's writes into


@dataclasses.dataclass(frozen=True)
class Sent:
    """What a reader needs to know, once. Its arrays may be sent apart.

    Attributes:
        data: Source, layout, `startup` and whether samples may fail, pickled.
        arrays: The memory of their arrays.
        writable: Whether each could be written to.
    """

    data: bytes
    arrays: list[np.ndarray]
    writable: list[bool]

    def loaded(self) -> Any:
        """The values. Large arrays share the memory of `arrays`, and are read-only where that is."""
        own = [
            array.copy() if writable and array.nbytes < _OWN_COPY else array
            for array, writable in zip(self.arrays, self.writable, strict=True)
        ]
        return pickle.loads(self.data, buffers=own)


class PartReader:
    """Reads parts of batches. It is for one thread at a time.

    Args:
        sent: What to read, and how.
    """

    def __init__(self, sent: Sent) -> None:
        become_worker()
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # if a source loads JAX, the accelerator is not for it
        self._memory = np.empty(0, np.uint8)
        self._sample = -1
        self._error: dict[str, Any] | None = None
        try:
            parts: tuple[HostSource, Layout, Any, bool] = sent.loaded()
            self._source, self._layout, startup, self._tolerant = parts
            if startup is not None:
                startup()
        except Exception as error:
            error.add_note("This came from starting a reader: from its startup function, or from loading the source.")
            self._error = record(error)

    def begin(self) -> tuple[int, dict[str, Any] | None]:
        """The number of its process, and what its start raised."""
        return os.getpid(), self._error

    def read(self, asked: bytes) -> tuple[np.ndarray | None, bytes]:
        """Read some samples.

        Args:
            asked: A `Request` for them, pickled. They need not be a whole batch.

        Returns:
            The memory of `Layout.flat` for that many rows, None for Python objects and after an error, and what came
            of it. The memory is written to again by the next call.
        """
        begun, self._sample = time.perf_counter(), -1
        request: Request = pickle.loads(asked)
        rows = len(request.indices)
        try:
            layout = part_layout(self._layout, request.bucket, rows)
            memory = None if layout.objects else self._room(sum(layout.places[-1]))  # without the rest of a page
            out = layout.empty() if memory is None else layout.flat(memory)
            report = Reading(self._source, request, out, tolerant=self._tolerant, at=self._note).read(0, rows)
            objects = out[0].tolist() if memory is None else []
            seconds = time.perf_counter() - begun
            return memory, encode_answer(request, report, objects, self._note, seconds=seconds)
        except BaseException as error:
            if hasattr(error, "ray_terminate_msg"):  # the node has to go, and Ray ends its actors by a SystemExit
                raise
            return None, encode({"error": record(error), "sample": self._sample})

    def _note(self, row: int, index: int) -> None:
        self._sample = index

    def _room(self, size: int) -> np.ndarray:
        """Memory that stays: new pages for every batch of 38 MB would cost as much as reading it."""
        if self._memory.nbytes < size:
            self._memory = aligned_empty((size,), np.dtype(np.uint8))
        return self._memory[:size]


def part_layout(layout: Layout, bucket: int, rows: int) -> Layout:
    """The memory of some rows of a batch."""
    return dataclasses.replace(layout.of(bucket), axes=(rows,), others=())
