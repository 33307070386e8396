"""Ctrl-C and SIGTERM while a stream or a loop runs.

Ctrl-C: stop, then raise, then leave at once. SIGTERM, where somebody can save: stop, and let them save.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_STOPPING = "Stopping after this batch. Press Ctrl-C again to raise KeyboardInterrupt, a third time to leave at once."


class OneThread:
    """A block that a second thread is refused while one is inside, as Python's generators refuse it.

    It is a dict with one entry: `setdefault` is atomic, and an interrupt that comes between it and the block leaves the
    entry to the thread that has made it, which may enter again.

    Args:
        what: What is used, for errors.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._inside: dict[str, int] = {}

    def __enter__(self) -> None:
        own = threading.get_ident()
        if self._inside.setdefault("thread", own) != own:
            raise ValueError(
                f"{self._what} is already executing in another thread, and is for one thread at a time. Give every "
                "thread an iterator of its own, or draw in one thread and hand batches on in a queue."
            )

    def __exit__(self, *error: Any) -> None:
        self._inside.pop("thread", None)


class Terminated(BaseException):
    """SIGTERM has come while a batch was being waited for."""


class Interrupts:
    """Counts interrupts while it is installed.

    The first one lets the stream end after the current batch. The second raises KeyboardInterrupt at the next batch, at
    once if that is being waited for. The third ends the process. Only the main thread can install it; elsewhere it does
    nothing.

    Attributes:
        waiting: Whether somebody waits for a batch.
        terminated: Whether SIGTERM has come.
        asked: Whether any of the two has come.
    """

    def __init__(self, count: int = 0) -> None:
        self._count = count
        self._pressed = False
        self.waiting = False
        self.terminated = False
        self.asked = False

    def following(self) -> "Interrupts":
        """For the loader's next stream: who stopped this one and presses again wants it to raise."""
        return Interrupts(count=int(self._pressed))

    def install(self) -> None:
        """Take over the handling of SIGINT, unless the program handles it in a way of its own."""
        _interrupt.install(self, unless=lambda handler: handler is not signal.default_int_handler)

    def install_termination(self) -> None:
        """Take over the handling of SIGTERM, unless the program ignores it; a handler of its own is called later."""
        _termination.install(self, unless=lambda handler: handler in (signal.SIG_IGN, None))

    def restore(self) -> None:
        """Give the handling of signals back, unless somebody else has taken it meanwhile.

        A SIGTERM that has come is then handed on to the handler that the program has for it, if it has one.
        """
        _interrupt.restore(self)
        theirs = _termination.restore(self)
        if self.terminated and callable(theirs):
            theirs(signal.SIGTERM, None)

    def check(self) -> bool:
        """Whether the stream should end; raises KeyboardInterrupt when it was asked for twice."""
        if self._pressed and self._count >= 2:
            raise KeyboardInterrupt
        return self._pressed or self.terminated

    def terminate(self) -> None:
        """SIGTERM has come, here or to another process of this run."""
        self.terminated = self.asked = True

    def press(self) -> int:
        """An interrupt has come; how many there were."""
        self._pressed = self.asked = True
        self._count += 1
        return self._count


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """A block that Ctrl-C ends at once. What it gives is called now and then, and raises an interrupt that was lost.

    Python reports and forgets what is raised while it collects an object that nobody holds any more.
    """
    pressed = False

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check  # the program, or a stream around this block, handles it in a way of its own
        return
    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield check
    finally:
        if signal.getsignal(signal.SIGINT) is on_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class _Handling:
    """One signal, and who is told of it: streams inside streams, since an interrupt is for all of them."""

    def __init__(self, number: int, handler: Any) -> None:
        self._number = number
        self._handler = handler
        self._before: Any = None
        self.told: list[Interrupts] = []

    def install(self, interrupts: Interrupts, unless: Callable[[Any], bool]) -> None:
        if threading.current_thread() is not threading.main_thread() or interrupts in self.told:
            return
        handler = signal.getsignal(self._number)
        if handler is not self._handler:
            if unless(handler):
                return
            self._before = handler
        self.told.append(interrupts)
        if handler is not self._handler:
            signal.signal(self._number, self._handler)

    def restore(self, interrupts: Interrupts) -> Any:
        """The handler that was there before, if it was given back its place."""
        if interrupts not in self.told:
            return None
        self.told.remove(interrupts)
        if self.told or signal.getsignal(self._number) is not self._handler:
            return None
        signal.signal(self._number, self._before)
        return self._before


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    told = _interrupt.told
    count = max((interrupts.press() for interrupts in told), default=2)
    if count == 1:
        with contextlib.suppress(OSError):
            os.write(2, f"\n{_STOPPING}\n".encode())
    if count >= 3:
        os._exit(130)
    if count == 2 and (not told or any(interrupts.waiting for interrupts in told)):
        raise KeyboardInterrupt


def _on_termination(number: int, frame: FrameType | None) -> None:
    told = _termination.told
    first = not any(interrupts.terminated for interrupts in told)
    for interrupts in told:
        interrupts.terminate()
    # A service manager may send it to the launcher and to its processes: a second one must not end the saving.
    if first and any(interrupts.waiting for interrupts in told):
        raise Terminated  # the step before is complete, and the next batch may be long in coming


_interrupt = _Handling(signal.SIGINT, _on_interrupt)
_termination = _Handling(signal.SIGTERM, _on_termination)
