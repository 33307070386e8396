"""One worker process, as the main process sees it."""

import collections
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from millstream.reading.workers.channel import Channel
from millstream.reading.workers.nursery import KILL_SECONDS, Forked, start_worker
from millstream.reading.workers.shared_memory import SharedFile

_GRACE = 0.2  # seconds that a worker with nothing to do has to leave
_ANSWER = 0.5  # seconds that workers have to tell where they are
# Signals that a process brings about itself; what others end it with may hit any process.
# Looked up by name, because Windows, where no worker is started, lacks some of them.
_OWN_SIGNALS = tuple(
    getattr(signal, name, None) for name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP")
)


class ProgressCell:
    """Kept in memory that both sides see: told without a message, readable after its death.

    Args:
        memory: `SIZE` bytes of shared memory.
    """

    SIZE = 64
    NOTHING = -1

    def __init__(self, memory: np.ndarray) -> None:
        self._words = memoryview(memory).cast("q")  # type: ignore[arg-type]  # faster than NumPy for single numbers

    def begin(self, job: int) -> None:
        """It has begun a job, or none (`NOTHING`)."""
        self._words[0], self._words[1], self._words[2] = job, self.NOTHING, self.NOTHING

    def at(self, row: int, index: int) -> None:
        """It is about to read this sample for this row."""
        self._words[1] = row
        self._words[2] = index

    @property
    def job(self) -> int:
        return self._words[0]

    @property
    def row(self) -> int:
        return self._words[1]

    @property
    def sample(self) -> int:
        return self._words[2]


class WorkerProcess:
    """A process that is started, talked to and, when it dies, started again.

    Args:
        number: Which worker it is.
        progress: Where it tells what it is at.
        fds: The shared memory it inherits: ring, data and control.
        setup: The first frame it is sent.

    Attributes:
        jobs: What it has been asked to read.
        ready: Whether it has started.
        stages: The stages that it has told the names of.
        was_killed: Whether a signal from outside has ended the last process.
        fruitless: Processes in a row that have ended before they could read a batch, by whether they were killed.
    """

    def __init__(
        self, number: int, progress: ProgressCell, fds: tuple[int, int, int], setup: tuple[int, bytes]
    ) -> None:
        self.number = number
        self.progress = progress
        self.jobs: collections.deque[Any] = collections.deque()
        self.ready = False
        self.stages: tuple[str, ...] = ()
        self.was_killed = False
        self.fruitless: collections.Counter[bool] = collections.Counter()
        self.channel: Channel
        self._rested_at: float | None = None
        self._fds = fds
        self._setup = setup
        self._process: Forked | subprocess.Popen[bytes] | None = None
        self._stacks = SharedFile("Python stacks", "")
        self._stacks_read = 0

    @property
    def pid(self) -> int:
        return -1 if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process. Nothing of this one is copied into it."""
        self.ready = False
        self._rested_at = None
        self.progress.begin(ProgressCell.NOTHING)
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        try:
            with theirs:
                self._process = start_worker([theirs.fileno(), *self._fds, self._stacks.fd], self.number)
        except BaseException:  # such as too many open files; nobody hangs up on a process that never was
            self.channel.close()
            raise
        self.send(*self._setup)

    def send(self, kind: int, payload: bytes) -> None:
        """Send a small frame. If nobody is there any more, that is found when its answer is waited for."""
        with contextlib.suppress(ConnectionError):
            self.channel.send(kind, payload)

    @property
    def rests(self) -> bool:
        """Whether it has no process until it has rested."""
        return self._rested_at is not None

    def rest(self, seconds: float) -> None:
        """Wait this long before the next process is started."""
        self._rested_at = time.monotonic() + seconds

    def has_rested(self) -> bool:
        """Whether it has waited long enough for its next process."""
        return self._rested_at is not None and time.monotonic() >= self._rested_at

    def has_ended(self) -> bool:
        """Whether the process is no more, also if a process it has forked still has its socket."""
        return self._process is not None and self._process.poll() is not None

    def bury(self) -> str:
        """Make sure that a process is dead which is of no use any more, and say how it died."""
        assert self._process is not None
        self.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        code = self._kill()
        self.was_killed = code is not None and code < 0 and -code not in _OWN_SIGNALS
        if code is None:
            return "does not answer"
        return f"ended with exit code {code}" if code >= 0 else f"was killed by {_signal_name(-code)}"

    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False

    def ask_for_stack(self) -> None:
        """Have the process write down where it is; it is made to continue if it was stopped."""
        assert self._process is not None
        for number in (signal.SIGUSR1, signal.SIGCONT):
            self._process.send_signal(number)

    def stack(self, deadline: float = 0.0) -> str:
        """What the process has written about where it is since this was asked last, waiting until then at most."""
        text = self._new_stack()
        while time.monotonic() < deadline:
            time.sleep(0.02)
            before, text = text, self._new_stack()
            if text and text == before:
                break
        self._stacks_read += len(text.encode())
        return text

    def hang_up(self) -> None:
        """Tell the process to end: at once if it is busy, by itself otherwise."""
        if self._process is not None:
            if self.jobs or not self.ready:
                self._process.kill()
            self.channel.close()

    def wait_for_end(self, deadline: float) -> None:
        """Wait for the end of the process, and bring it about if it does not come in time."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, deadline - time.monotonic()))
            self._kill()
        self._stacks.close()

    def _kill(self) -> int | None:
        """End the process if it has not ended; how it did, or None if not even that has ended it yet."""
        assert self._process is not None
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)
        return self._process.returncode

    def _new_stack(self) -> str:
        return os.pread(self._stacks.fd, 1 << 16, self._stacks_read).decode(errors="replace")


def end_all(workers: Iterable[WorkerProcess], files: Iterable[SharedFile], process_id: int) -> None:
    """End all workers and close all files; in a forked copy of the process, only the files.

    It can be called again, so that what an interrupt has cut short is done in the end.
    """
    if os.getpid() == process_id:
        for worker in workers:
            worker.hang_up()
        deadline = time.monotonic() + _GRACE
        for worker in workers:
            worker.wait_for_end(deadline)
    for file in files:
        file.close()


def describe_workers(workers: Iterable[WorkerProcess]) -> str:
    """What each worker is at, a line for each."""
    lines = []
    for worker in workers:
        sample = worker.progress.sample
        doing = "has nothing to do" if worker.ready else "is starting"
        if worker.jobs and worker.ready:
            doing = f"is at sample {sample}" if sample >= 0 else "has a batch to read and has not begun"
        stopped = " (stopped by a signal)" if worker.is_stopped() else ""
        lines.append(f"  worker {worker.number} (pid {worker.pid}) {doing}{stopped}")
    return "\n".join(lines)


def stacks_of_busy(workers: Iterable[WorkerProcess]) -> str:
    """The Python stacks of all workers that have something to do."""
    busy = [worker for worker in workers if worker.jobs or not worker.ready]
    for worker in busy:
        worker.ask_for_stack()
    deadline = time.monotonic() + _ANSWER
    texts = [(worker.number, worker.stack(deadline) or "  (it gave no answer)\n") for worker in busy]
    return "\n".join(f"Worker {number} is here:\n{text}" for number, text in texts)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
