"""The process that workers are forked from: an interpreter that has loaded what all of them need, and nothing else.

Four workers are there in the time of one interpreter, and share its memory. It never loads JAX and has one thread, so
that forking it is safe. There is one for all streams of a program, from the first of them to the end of the program.
"""

import contextlib
import errno
import functools
import itertools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

# A request has a number and the process that is to be reaped, or 0, and then what a forked process needs to know.
REQUEST = struct.Struct("<qi")
LARGEST_REQUEST = 1 << 18
# An answer has the number of its request, a process number or an exit code, and what went wrong (an errno).
ANSWER = struct.Struct("<qii")
READY = 0  # the number of the first answer, which needs no request: the nursery has loaded, and has that many threads

_BOOT = (
    "import sys, json, importlib; sys.path[:], modules = json.loads(sys.argv[1]); "
    "from millstream.reading.workers.{module} import main; [*map(importlib.import_module, modules)]; "
    "main(*map(int, sys.argv[2:]))"
)
# One reader per core is enough: libraries that would start a thread per core in each worker are told not to.
# What a sample needs is freed and needed again for the next one: memory is kept, not given back page by page.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 28),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
}
# What the system, Python and NumPy look at when they are loaded. All other variables reach a worker as they are then.
_READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "GLIBC_", "MALLOC_", "OMP_", "OPENBLAS_", "MKL_", "NPY_")
_TRIES = 3  # nurseries in a row that may end before they have forked a worker
_LOADING = 300.0  # seconds that loading may take: the disk may be far away
_ANSWER = 10.0  # seconds that an answer may take
KILL_SECONDS = 1.0  # that a killed process may take; one that a disk does not release takes longer, without us


class Forked:
    """A process that the nursery has forked, with what is used of `subprocess.Popen`. It ends when it is forgotten.

    Args:
        nursery: Its parent.
        pid: Its number.

    Attributes:
        pid: Its number.
        returncode: How it has ended, as far as is known.
    """

    def __init__(self, nursery: "Nursery", pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery
        self._process_id = os.getpid()
        self._fd = -1
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise _gone() from None
        except OSError:  # too many open files
            os.kill(pid, signal.SIGKILL)
            self.returncode = nursery.reap(pid)
            raise

    def poll(self) -> int | None:
        """How it has ended; None if it has not."""
        if self.returncode is None and _readable(self._fd, 0.0):
            self.returncode = self._nursery.reap(self.pid)
            os.close(self._fd)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """How it has ended, waiting for that."""
        if self.returncode is None:
            _readable(self._fd, timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        if self._fd < 0 or self.returncode is not None:
            return
        if os.getpid() != self._process_id:  # a fork of the process whose worker it is
            return os.close(self._fd)
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(KILL_SECONDS)


class Nursery:
    """The process that forks, as the main process sees it. It may be used by many threads.

    Args:
        modules: What to load besides.

    Attributes:
        end: Ends it, and its workers with it; `end.alive` says whether that is still to come.
    """

    def __init__(self, modules: Iterable[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = worker_environment()
        try:
            with theirs, _interrupts_wait():  # there must be no process that nobody knows of
                process = boot("nursery_process", [theirs.fileno()], [], modules)
                self.end = weakref.finalize(self, _end, ours, process, os.getpid())
                self._process = process
        except OSError:
            ours.close()
            raise
        ours.settimeout(_ANSWER)
        self._socket = ours
        self._numbers = itertools.count(READY + 1)
        self._answers: dict[int, tuple[int, int]] = {}
        # One thread at a time. In it, the garbage collector may forget a worker, and ask to have it reaped.
        self._lock = threading.RLock()

    @property
    def is_there(self) -> bool:
        """Whether it can still be asked. If it was killed, this reaps it."""
        return self.end.alive and self._process.poll() is None

    def wait_until_ready(self) -> bool:
        """Wait until it has loaded what workers need; whether it can fork. An interrupt ends it: it has no worker yet.

        It cannot if something that comes with every interpreter here, such as a profiler, has started a thread: a lock
        that the thread holds is never released in a forked process.
        """
        with self._lock:
            try:
                threads, _ = self._answer(READY, _LOADING)
            except BaseException:
                self.end()
                raise
        return threads == 1

    def fork(self, fds: Iterable[int], number: int) -> Forked:
        """A new worker.

        Args:
            fds: The files that it inherits.
            number: Which worker it is.
        """
        with _interrupts_wait():  # a process that its caller does not get is forgotten, and ends
            task = json.dumps({"number": number, **_inherited(self._environment)}).encode()
            with _inherited_files() as inherited:
                pid, error = self._ask(0, task, [*fds, *inherited])
            if error:
                raise OSError(error, f"A worker process cannot be started: {os.strerror(error)}.")
            return Forked(self, pid)

    def reap(self, pid: int) -> int:
        """How a worker that has ended did so."""
        with contextlib.suppress(OSError), _interrupts_wait():
            code, error = self._ask(pid)
            if not error:
                return code
        return -signal.SIGKILL  # which is how the kernel ends the workers of a dead nursery

    def _ask(self, pid: int, task: bytes = b"", fds: Iterable[int] = ()) -> tuple[int, int]:
        """Ask for something, and wait for the answer."""
        with self._lock:
            try:
                number = next(self._numbers)
                if self.end.alive:
                    socket.send_fds(self._socket, [REQUEST.pack(number, pid) + task], [*fds])
                return self._answer(number, _ANSWER)
            except BaseException:  # it is of no use if nobody hears what it answers
                self.end()
                raise

    def _answer(self, number: int, seconds: float) -> tuple[int, int]:
        """The answer to a request, waiting for it."""
        deadline = time.monotonic() + seconds
        while number not in self._answers:
            if not self.end.alive:
                raise _gone()
            if not _readable(self._socket.fileno(), deadline - time.monotonic()):
                raise TimeoutError(errno.ETIMEDOUT, f"The process that forks workers was silent for {seconds:.0f} s.")
            data = self._socket.recv(ANSWER.size)
            if not data:
                raise _gone()
            answered, value, error = ANSWER.unpack(data)
            self._answers[answered] = value, error
        return self._answers[number] if number == READY else self._answers.pop(number)


def boot(module: str, fds: list[int], numbers: list[int], modules: Iterable[str] = ()) -> subprocess.Popen[bytes]:
    """Start a new interpreter that runs `main` of one of the modules here.

    Args:
        module: The module's name.
        fds: The files that it inherits, whose numbers come first.
        numbers: What else `main` is called with, before the number of this process and whether it ends with it.
        modules: What it loads before.
    """
    # The kernel ends a bound process with the thread that started it, so only the main thread binds it.
    bound = int(threading.current_thread() is threading.main_thread())
    arguments = [json.dumps([[*map(str, sys.path)], [*modules]]), *map(str, [*fds, *numbers, os.getpid(), bound])]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _BOOT.format(module=module), *arguments],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        env=worker_environment(),
        process_group=0,  # an interrupt from the terminal is for the main process alone
    )


@functools.cache
def can_fork() -> bool:
    """Whether the system lets a process wait for others than its children."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except AttributeError:  # not Linux
        return False
    except OSError as error:  # an old Linux, or a sandbox; but with too many open files it could
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return True


def get_ready(modules: Iterable[str] = ()) -> None:
    """Start loading what workers need; there is other work until the first of them is asked for.

    Args:
        modules: What the workers will need besides; those of this package are loaded once for all if it is early.
    """
    if can_fork():
        _nursery(sorted({name for name in modules if name.startswith("millstream.")}))


def start_worker(fds: list[int], number: int) -> Forked | subprocess.Popen[bytes]:
    """A new worker: forked, or where that cannot be, an interpreter of its own.

    Args:
        fds: The files that it inherits.
        number: Which worker it is.
    """
    if not can_fork():
        return boot("worker", fds, [number])
    for _ in range(_TRIES):
        with contextlib.suppress(ConnectionError, TimeoutError):  # it was killed, or is held up
            nursery = _nursery()
            return nursery.fork(fds, number) if nursery.wait_until_ready() else boot("worker", fds, [number])
    raise ConnectionResetError(
        errno.ECONNRESET,
        f"The process that forks workers has ended {_TRIES} times in a row before there was one. If it could not be "
        "loaded, its error stands above. Out of memory? The kernel's log (dmesg) says so.",
    )


_current: tuple[object, Nursery] | None = None
_current_lock = threading.Lock()


def _nursery(modules: Iterable[str] = ()) -> Nursery:
    """The nursery of this process. If the process has changed in a way that forked ones do not see, it is a new one."""
    global _current
    likeness = (
        sys.executable,
        tuple(map(str, sys.path)),
        tuple(item for item in os.environ.items() if item[0].startswith(_READ_AT_START)),
        (os.getresuid(), os.getresgid(), os.getgroups()),
        os.getpriority(os.PRIO_PROCESS, 0),
    )
    with _current_lock:
        if _current is None or not _current[1].is_there or _current[0] != likeness:
            _current = likeness, Nursery(modules)
        return _current[1]  # an older one ends with its last worker


def _forget() -> None:
    """In a forked copy of this process: the nursery is the other one's."""
    global _current, _current_lock
    _current, _current_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _end(ours: socket.socket, process: subprocess.Popen[bytes], process_id: int) -> None:
    """End a nursery, and its workers with it; in a forked copy of the process, only close its socket."""
    ours.close()
    if os.getpid() == process_id:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_SECONDS)


def _gone() -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, "The process that forks workers has ended.")


def worker_environment() -> dict[str, str]:
    """The variables that a worker has if it is started now."""
    return {**_ENVIRONMENT, **os.environ}


def _inherited(environment: dict[str, str]) -> dict[str, Any]:
    """What a process would inherit from this one, besides files.

    Args:
        environment: The variables that it has already.
    """
    import resource  # which Windows lacks, where no worker is started

    now = worker_environment()
    limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "variables": dict(now.items() - environment.items()),
        "removed": [*(environment.keys() - now.keys())],
        "limits": [(limit, resource.getrlimit(limit)) for limit in limits],
        "cores": [*os.sched_getaffinity(0)],
        "umask": _umask(),
    }


@contextlib.contextmanager
def _inherited_files() -> Iterator[list[int]]:
    """The files that a process would inherit: its output, its errors, and its folder."""
    with contextlib.ExitStack() as stack:
        fds = [1, 2]
        for place, fd in enumerate(fds):
            if not _is_open(fd):
                fds[place] = os.open(os.devnull, os.O_WRONLY)
                stack.callback(os.close, fds[place])
        fds.append(os.open(".", os.O_PATH))
        stack.callback(os.close, fds[-1])
        yield fds


def _umask() -> int:
    """What new files may not be, which `os.umask` tells only after it has changed it, for all threads."""
    with open("/proc/self/status") as file:
        return next((int(line.split()[1], 8) for line in file if line.startswith("Umask:")), 0o22)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _readable(fd: int, seconds: float) -> bool:
    watch = select.poll()
    watch.register(fd, select.POLLIN)
    return bool(watch.poll(max(0.0, 1000 * seconds)))


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """A block that is not cut in two by Ctrl-C, which takes effect after it. Nor is a process that it starts."""
    handler, caught = signal.getsignal(signal.SIGINT), []
    handled_here = threading.current_thread() is threading.main_thread() and callable(handler)
    if handled_here:
        signal.signal(signal.SIGINT, lambda *arguments: caught.append(arguments))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # which a process that is started inherits
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if handled_here:
            signal.signal(signal.SIGINT, handler)
        for arguments in caught:
            handler(*arguments)  # pyright: ignore[reportCallIssue, reportOptionalCall]
