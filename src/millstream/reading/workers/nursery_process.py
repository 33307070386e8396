"""The process that forks workers: it loads what they need, once. It never loads JAX itself, and has one thread."""

import contextlib
import errno
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
from typing import Any

import numpy.ma  # noqa: F401  (which NumPy loads at the first sample that is looked at)

from millstream.reading.workers import worker
from millstream.reading.workers.nursery import ANSWER, LARGEST_REQUEST, READY, REQUEST

_FDS = 8  # socket, ring, data, control and stacks; output, errors and folder


def main(sock: int, parent: int, bound: int) -> None:
    """Fork until the other end of the socket is gone, and in each forked process be a worker.

    Args:
        sock: The socket to the main process.
        parent: The main process.
        bound: Whether the kernel should end it with the thread that started it.
    """
    fds = _serve(socket.socket(fileno=sock), parent, bound)
    if fds is not None:
        worker.main(*fds)


def _serve(channel: socket.socket, parent: int, bound: int) -> tuple[int, ...] | None:
    """Answer requests; in a forked process, what its `main` is called with."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides what an interrupt means
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a program that ignores it never learns how a child has ended
    channel.set_inheritable(False)
    while (unused := os.open(os.devnull, os.O_RDWR)) < 3:  # if one of the first three is closed, no other file gets it
        pass
    os.close(unused)
    worker.end_with_parent(bound)
    worker.name_process("ms-nursery")
    gc.collect()
    gc.freeze()  # what is there now stays: a collection in a worker must not copy its pages
    watch, nursery = select.poll(), os.getpid()
    watch.register(channel, select.POLLIN)
    try:
        channel.send(ANSWER.pack(READY, len(os.listdir("/proc/self/task")), 0))
        # A fork of the main process may keep the other end open, so its number is looked at, too.
        while os.getppid() == parent:
            if not watch.poll(1000):
                continue
            request, fds, _, _ = socket.recv_fds(channel, LARGEST_REQUEST, _FDS)
            if not request:
                return None
            number, pid = REQUEST.unpack_from(request)
            value, error = _reaped(pid) if pid else _forked(fds)
            if not value and not pid and not error:
                channel.close()
                return _become_worker(json.loads(request[REQUEST.size :]), fds, nursery)
            for fd in fds:
                os.close(fd)
            channel.send(ANSWER.pack(number, value, error))
    except ConnectionError:
        pass
    return None


def _forked(fds: list[int]) -> tuple[int, int]:
    """The number of a new process, 0 in the process itself; and what went wrong."""
    if len(fds) < _FDS:
        return 0, errno.EMFILE
    try:
        return os.fork(), 0
    except OSError as error:
        return 0, error.errno or errno.EAGAIN


def _reaped(pid: int) -> tuple[int, int]:
    """How a process has ended that is known to have ended, and what went wrong."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0
    except OSError as error:
        return 0, error.errno or errno.ECHILD


def _become_worker(told: dict[str, Any], fds: list[int], nursery: int) -> tuple[int, ...]:
    """Be as a process that the main process has started itself; what its `main` is called with."""
    *shared, output, errors, folder = fds
    os.setpgid(0, 0)
    os.fchdir(folder)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for fd in (output, errors, folder):
        os.close(fd)
    for name in told["removed"]:
        del os.environ[name]
    os.environ.update(told["variables"])
    for limit, values in told["limits"]:
        with contextlib.suppress(ValueError, OSError):  # raised since, by someone who may
            resource.setrlimit(limit, values)
    with contextlib.suppress(OSError):  # cores that a container has lost
        os.sched_setaffinity(0, told["cores"])
    os.umask(told["umask"])
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # or its siblings would draw the same numbers
    return (*shared, told["number"], nursery, 1)
