"""Some rows of a batch for one thread, and how long they are waited for."""

import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

import numpy as np

from millstream.reading.faults import WorkerStalled
from millstream.reading.host_source import HostSource
from millstream.reading.reading import Reading, Report, Request
from millstream.reading.settings import settings
from millstream.text.errors import ends_silently, noted


class Part:
    """Some rows of a batch, for one thread.

    Args:
        source: What to read.
        request: The batch.
        out: One array per leaf, for the whole batch.
        tolerant: Whether samples that raise become failed rows.
        rows: The first of its rows, and the one behind the last.

    Attributes:
        seconds: How long it took.
        future: What came of it.
    """

    def __init__(
        self, source: HostSource, request: Request, out: Sequence[np.ndarray], tolerant: bool, rows: tuple[int, int]
    ) -> None:
        self._reading = Reading(source, request, out, tolerant=tolerant, at=self._note)
        self._rows = rows
        self._thread: int | None = None
        self._sample: int | None = None
        self.seconds = 0.0
        self.future: Future[Report] = Future()

    def run(self) -> None:
        """Read the rows, unless that was cancelled."""
        if not self.future.set_running_or_notify_cancel():
            return
        self._thread = threading.get_ident()
        begun = time.perf_counter()
        try:
            report = self._reading.read(*self._rows)
        except BaseException as error:
            self.seconds = time.perf_counter() - begun
            self.future.set_exception(
                noted(error, "This came from a reading thread.") if ends_silently(type(error)) else error
            )
        else:
            self.seconds = time.perf_counter() - begun
            self.future.set_result(report)

    def cancel(self) -> None:
        """Have it end before it was begun. No thread may come to it any more."""
        self.future.cancel()
        self.future.set_running_or_notify_cancel()  # or whoever waits for it would not be told

    def _note(self, row: int, index: int) -> None:
        self._sample = index

    def whereabouts(self) -> str:
        """Which sample it is at, in a sentence."""
        if self._sample is None:
            return "The readers have not come to it yet: they are at batches behind it."
        return f"It is at sample {self._sample}."

    def stack(self) -> str:
        """Where in the code its thread is; empty if no thread is at it."""
        frame = None if self._thread is None else sys._current_frames().get(self._thread)
        if frame is None:
            return ""
        return "The reading thread is here:\n" + "".join(traceback.format_stack(frame)[-8:])


class Patience:
    """How long one batch is waited for, from now on: a warning on the way, and an error at the end.

    Args:
        who: Whose batch it is, in the texts.
        timeout: Seconds a batch may take; None for those of the settings.
    """

    def __init__(self, who: str, timeout: float | None) -> None:
        self._who = who
        self._begun = time.monotonic()
        self._limit = settings.limit(timeout)
        self._warning = min(settings.warn_seconds, self._limit)
        self._warned = self._warning >= self._limit

    def wait_for_any(self, parts: Sequence[Part]) -> None:
        """Wait until one of some parts has come to its end."""
        if self._wait(parts, self._warning):
            return
        if not self._warned:
            self._warned = True
            text = f"{self._who} has been at a batch for {self._warning:.0f} s. {parts[0].whereabouts()}"
            warnings.warn(text, stacklevel=4)
        if not self._wait(parts, self._limit):
            raise WorkerStalled(
                f"{self._who} has been reading for {self._limit:.0f} s without an end. {parts[0].whereabouts()}\n"
                "Is a disk or a server not answering? If this is how long a batch takes, give the executor a longer "
                f"timeout, or set ms.settings.stall_seconds.\n{parts[0].stack()}"
            )

    def _wait(self, parts: Sequence[Part], seconds: float) -> bool:
        left = max(0.0, self._begun + seconds - time.monotonic())
        return bool(wait([part.future for part in parts], left, FIRST_COMPLETED).done)
