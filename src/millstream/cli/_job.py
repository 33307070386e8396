"""All processes of `millstream launch`, from their start to their end."""

import contextlib
import functools
import math
import os
import pathlib
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from millstream.cli._launched import Launched

_GUARD = pathlib.Path(__file__).with_name("_guard.py")
TIMED_OUT = 124  # as the command `timeout` returns


class LaunchJob:
    """Processes that run together and end together.

    When one fails, the others are sent SIGTERM and, after a grace period, SIGKILL. A signal to the launcher is passed
    on; when the first process has ended after it, the others have the grace period to do the same. A second signal
    kills them at once.

    Args:
        processes: What to run.
        grace: Seconds between asking processes to end and killing them.
        timeout: Seconds after which the job is ended.
    """

    def __init__(self, processes: Sequence[Launched], grace: float, timeout: float) -> None:
        self.first_failed: tuple[Launched, int] | None = None
        self.received: int | None = None
        self.timed_out = False
        self._processes, self._grace = list(processes), grace
        self._left: list[Launched] = []
        self._timeout_at = time.monotonic() + timeout
        self._kill_at = math.inf
        self._signals: list[int] = []
        self._reports: list[tuple[int, int]] = []
        self._killed = False
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Start all and wait for all; the code of the first that failed, or 0."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._selector)
            guard = stack.enter_context(_guarded())
            stack.enter_context(self._receiving_signals())
            report, reported = os.pipe()
            for fd in (report, reported):
                stack.callback(os.close, fd)
            self._watch(report, lambda: self._take_reports(report))
            for process in self._processes:
                pipes = process.start(reported, guard)
                self._left.append(process)
                stack.callback(self._remove, process, guard)  # one by one: what fails for one is done for the others
                for pipe in pipes:
                    self._watch(pipe, functools.partial(self._read, process, pipe))
            while self._left:
                self._step(guard)
        return self._code()

    def _step(self, guard: int) -> None:
        """Wait for something to happen, and do what follows from it."""
        until = min(self._timeout_at, self._kill_at) - time.monotonic()
        ending = any(process.code is not None for process in self._left)
        for key, _ in self._selector.select(min(max(until, 0.0), 0.05 if ending else 1.0)):
            key.data()
        while self._signals:
            self._pass_on(self._signals.pop(0))
        for process in self._left:
            if process.has_just_ended():
                self._note_end(process)
        # After the ends: when one is killed, what the others report is that they cannot reach it any more.
        while self._reports:
            number, code = self._reports.pop(0)
            self._note_failure(self._processes[number], code)
        for process in [process for process in self._left if process.is_done()]:
            self._remove(process, guard)
        if time.monotonic() >= self._timeout_at and not self.timed_out:
            self.timed_out, self._timeout_at = True, math.inf
            self._send(signal.SIGTERM)
            self._hurry()
        if time.monotonic() >= self._kill_at:
            self._send(signal.SIGKILL)
            self._kill_at = math.inf

    def _note_end(self, process: Launched) -> None:
        assert process.code is not None
        if process.code != 0:
            self._note_failure(process, process.code)
        elif self.received is not None:
            self._hurry()

    def _note_failure(self, process: Launched, code: int) -> None:
        """A failure ends the others. One that follows from a signal or from the timeout is not a failure of its own."""
        if self.received is None and self.first_failed is None and not self.timed_out:
            self.first_failed = (process, code)
            self._send(signal.SIGTERM, but=process)
        elif self.first_failed is not None and process.was_killed and not self._killed:
            # Not by us, so this came first: a process loses its connections before it counts as ended.
            self.first_failed = (process, code)
        self._hurry()

    def _hurry(self) -> None:
        self._kill_at = min(self._kill_at, time.monotonic() + self._grace)

    def _pass_on(self, number: int) -> None:
        if self.received is None:
            self.received = number
            self._send(number)
        else:
            self._send(signal.SIGKILL)

    def _send(self, number: int, but: Launched | None = None) -> None:
        self._killed = self._killed or number == signal.SIGKILL
        for process in self._left:
            if process is not but:
                process.send(number)

    def _take_reports(self, report: int) -> None:
        for line in os.read(report, 1 << 16).splitlines():
            number, code = map(int, line.split())
            self._reports.append((number, code))

    def _watch(self, pipe: Any, callback: Callable[[], object]) -> None:
        self._selector.register(pipe, selectors.EVENT_READ, callback)

    def _read(self, process: Launched, pipe: IO[bytes]) -> None:
        if not process.read(pipe):
            self._selector.unregister(pipe)
            pipe.close()

    def _remove(self, process: Launched, guard: int) -> None:
        """Leave nothing of a process behind, unless that is done already."""
        if process not in self._left:
            return
        for pipe in process.remove():
            self._selector.unregister(pipe)
            pipe.close()
        self._left.remove(process)
        with contextlib.suppress(OSError):  # somebody has killed the guard
            os.write(guard, b"-%d\n" % process.pid)

    @contextlib.contextmanager
    def _receiving_signals(self) -> Iterator[None]:
        """Have signals noted and wake the loop, ends of processes too."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self._watch(ours, lambda: ours.recv(1 << 12))
        # What whoever started the launcher has it ignore stays ignored: `nohup` says so of the end of the terminal.
        passed_on = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        heard = [number for number in passed_on if signal.getsignal(number) is not signal.SIG_IGN]
        handlers = {number: signal.signal(number, self._note_signal) for number in (*heard, signal.SIGCHLD)}
        wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        with ours, theirs:
            try:
                yield
            finally:
                signal.set_wakeup_fd(wakeup)
                for number, handler in handlers.items():
                    signal.signal(number, handler)

    def _note_signal(self, number: int, frame: object) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(number)

    def _code(self) -> int:
        if self.first_failed is not None:
            return self.first_failed[1]
        if self.timed_out:
            return TIMED_OUT
        ended_well = all(process.code == 0 for process in self._processes)
        return 0 if self.received is None or ended_well else 128 + self.received


@contextlib.contextmanager
def _guarded() -> Iterator[int]:
    """A guard that kills what is left if this process is killed; gives the pipe that names processes to it."""
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_GUARD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what ends the launcher must not end its guard
    )
    assert guard.stdin is not None
    try:
        yield guard.stdin.fileno()
    finally:
        guard.kill()
        with contextlib.suppress(OSError):
            guard.stdin.close()
        guard.wait()
