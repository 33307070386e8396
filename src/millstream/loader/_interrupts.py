"""Ctrl-C inside a `with loader.iterate(...)` block: stop, then raise, then leave at once."""

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

_STOPPING = "Stopping after this batch. Press Ctrl-C again to raise KeyboardInterrupt, a third time to leave at once."

_installed: list["Interrupts"] = []  # streams inside of streams: an interrupt is for all of them
_before: Any = None


class Interrupts:
    """Counts interrupts while it is installed.

    The first one lets the stream end after the current batch. The second raises KeyboardInterrupt at the next batch, at
    once if that is being waited for. The third ends the process. Only the main thread can install it; elsewhere it does
    nothing.

    Attributes:
        waiting: Whether somebody waits for a batch.
    """

    def __init__(self, count: int = 0) -> None:
        self._count = count
        self._pressed = False
        self.waiting = False

    def following(self) -> "Interrupts":
        """For the loader's next stream: who stopped this one and presses again wants it to raise."""
        return Interrupts(count=int(self._pressed))

    def install(self) -> None:
        """Take over the handling of SIGINT, unless the program handles it in a way of its own."""
        global _before
        if threading.current_thread() is not threading.main_thread() or self in _installed:
            return
        handler = signal.getsignal(signal.SIGINT)
        if handler is not signal.default_int_handler and handler is not _handle:
            return
        _installed.append(self)
        if handler is not _handle:
            _before = handler
            signal.signal(signal.SIGINT, _handle)

    def restore(self) -> None:
        """Give the handling of SIGINT back, unless somebody else has taken it meanwhile."""
        if self in _installed:
            _installed.remove(self)
            if not _installed and signal.getsignal(signal.SIGINT) is _handle:
                signal.signal(signal.SIGINT, _before)

    def check(self) -> bool:
        """Whether the stream should end; raises KeyboardInterrupt when it was asked for twice."""
        if self._pressed and self._count >= 2:
            raise KeyboardInterrupt
        return self._pressed

    def press(self) -> int:
        """An interrupt has come; how many there were."""
        self._pressed = True
        self._count += 1
        return self._count


def _handle(number: int, frame: FrameType | None) -> None:
    count = max((interrupts.press() for interrupts in _installed), default=2)
    if count == 1:
        with contextlib.suppress(OSError):
            os.write(2, f"\n{_STOPPING}\n".encode())
    if count >= 3:
        os._exit(130)
    if count == 2 and (not _installed or any(interrupts.waiting for interrupts in _installed)):
        raise KeyboardInterrupt
