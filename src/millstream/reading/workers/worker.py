"""The worker process, which reads batches into shared memory. It never loads JAX itself."""

import collections
import ctypes
import faulthandler
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from millstream.files.plain import decode, encode
from millstream.plan.planned import Request
from millstream.reading._settings import become_worker
from millstream.reading.exception_record import record
from millstream.reading.host_source import HostSource
from millstream.reading.reading import Reading, Report
from millstream.reading.workers.channel import MAX_FRAME, Channel
from millstream.reading.workers.messages import (
    DONE,
    FAILED,
    READ,
    READY,
    SETUP,
    TIMED,
    ReadMessage,
    SlotLayout,
    encode_answer,
)
from millstream.reading.workers.payload import unpack
from millstream.reading.workers.process import ProgressCell
from millstream.reading.workers.shared_memory import map_shared

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def main(sock: int, ring: int, data: int, control: int, stacks: int, number: int, parent: int, bound: int) -> None:
    """Work until the other end of the socket is gone.

    Args:
        sock: The socket to the main process.
        ring: The shared memory of the batches.
        data: The shared memory of the source's own arrays.
        control: The shared memory that tells where each worker is.
        stacks: Where the Python stack is written when the main process asks for it.
        number: Which worker this is.
        parent: The process that started it, or forked it.
        bound: Whether the kernel should end it with the thread that started it.
    """
    become_worker()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides what an interrupt means
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    file = open(stacks, "w")
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    for fd in (sock, ring, data, control, stacks):
        os.set_inheritable(fd, False)  # a program that a sample starts must not keep them open
    end_with_parent(bound)
    name_process(f"ms-worker-{number}")
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_end_with, args=(sock, parent), daemon=True).start()
    channel = Channel(socket.socket(fileno=sock))
    progress = ProgressCell(map_shared(control, 0, (number + 1) * ProgressCell.SIZE)[-ProgressCell.SIZE :])
    try:
        worker = _set_up(channel, ring, data, progress)
        waiting: collections.deque[tuple[int, bytes]] = collections.deque()
        while worker is not None and (frame := waiting.popleft() if waiting else channel.receive()) is not None:
            if frame[0] == READ:
                message = ReadMessage.from_bytes(frame[1])
                if worker.looks_ahead:
                    waiting.extend(channel.receive_ready())
                worker.read(message, [ReadMessage.from_bytes(data) for kind, data in waiting if kind == READ])
    except ConnectionError:
        pass
    finally:
        channel.close()


def end_with_parent(bound: int) -> None:
    """Have the kernel end this process with the thread that started it, if that is wanted."""
    if bound and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def name_process(name: str) -> None:
    """What `top` and `ps` show, of which Linux keeps 15 letters."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def _end_with(sock: int, parent: int) -> None:
    """End soon when the main process is gone, whatever this one is at."""
    watch = select.poll()
    watch.register(sock, select.POLLHUP)
    # A fork of the main process may keep the other end of the socket open, so its number is looked at, too.
    while os.getppid() == parent and not any(event & select.POLLHUP for _, event in watch.poll(1000)):
        pass
    time.sleep(0.15)  # an idle worker exits on its own
    os._exit(1)


def _set_up(channel: Channel, ring: int, data: int, progress: ProgressCell) -> "_Worker | None":
    frame = channel.receive()
    if frame is None or frame[0] != SETUP:
        return None
    message = decode(frame[1])
    try:
        source, form, startup, tolerant = unpack(data, message["start"], message["size"])
        os.nice(message["nice"])
        if startup is not None:
            startup()
    except BaseException as error:
        error.add_note(
            "This came from starting a worker process: from its startup function, or from loading the source."
        )
        channel.send(FAILED, encode({"job": -1, "error": record(error)}))
        return None
    channel.send(READY, b"")
    return _Worker(channel, ring, progress, source, form, tolerant)


class _Worker:
    def __init__(
        self,
        channel: Channel,
        ring: int,
        progress: ProgressCell,
        source: HostSource,
        form: SlotLayout,
        tolerant: bool,
    ) -> None:
        self._channel = channel
        self._ring = ring
        self._progress = progress
        self._source = source
        self._form = form
        self._layout = form.layout
        self._tolerant = tolerant
        self._stages: tuple[str, ...] | None = None  # of which the other side knows
        self._chunks: dict[int, np.ndarray] = {}
        self._slots: dict[tuple[int, int], list[np.ndarray]] = {}  # by place and bucket
        self._expected: set[int] = set()  # numbers of batches

    @property
    def looks_ahead(self) -> bool:
        """Whether the source has a use for `expect`."""
        return self._source.looks_ahead

    def _expect(self, message: ReadMessage) -> None:
        """Prepare for a batch: all of its samples at once, if they are on other machines."""
        if self._source.looks_ahead and message.number not in self._expected:
            self._expected.add(message.number)
            request = self._form.request(self._arrays(message), message, self._source.keyed)
            self._source.expect(request.indices[request.real])

    def read(self, message: ReadMessage, coming: Sequence[ReadMessage] = ()) -> None:
        """Read a batch and say what came of it, while the batches after it are prepared."""
        self._progress.begin(message.number)
        begun = time.perf_counter()
        try:
            for due in (message, *coming):
                self._expect(due)
            self._expected.discard(message.number)
            kind, answer = self._answer(message.number, begun, *self._read(message))
        except BaseException as error:
            answer = encode({"job": message.number, "error": record(error), "sample": self._progress.sample})
            kind = FAILED
            if self.looks_ahead:
                self._expected.clear()
                self._source.expect(None)
        self._progress.begin(ProgressCell.NOTHING)
        self._channel.send(kind, answer)

    def _read(self, message: ReadMessage) -> tuple[Request, Report, list[Any]]:
        arrays = self._arrays(message)
        request = self._form.request(arrays, message, self._source.keyed)
        batch = self._form.batch.of(message.bucket)
        out = batch.empty() if batch.objects else arrays[: self._form.n_leaves]
        reading = Reading(self._source, request, out, tolerant=self._tolerant, at=self._progress.at)
        report, size = Report(), 1 if message.singly else batch.rows
        for first in range(0, batch.rows, size):
            report = reading.read(first, first + size)  # which tells of all rows so far
        return request, report, out[0].tolist() if batch.objects else []

    def _arrays(self, message: ReadMessage) -> list[np.ndarray]:
        """The arrays of a slot."""
        slot = message.offset, message.bucket
        if slot not in self._slots:
            if message.chunk_start not in self._chunks:
                self._chunks[message.chunk_start] = map_shared(self._ring, message.chunk_start, message.chunk_size)
            start = message.offset - message.chunk_start
            memory = self._chunks[message.chunk_start][start : start + self._layout.nbytes]
            self._slots[slot] = self._layout.of(message.bucket).flat(memory)
        return self._slots[slot]

    def _answer(
        self, number: int, begun: float, request: Request, report: Report, objects: list[Any]
    ) -> tuple[int, bytes]:
        """What came of a batch. Most answers are times of stages whose names have been told before."""
        stages = tuple(report.times)
        if stages == self._stages and not (report.extras or report.failed or objects):
            return TIMED, struct.pack(f"<{len(stages) + 1}d", time.perf_counter() - begun, *report.times.values())
        data = encode_answer(
            request, report, objects, self._progress.at, job=number, seconds=time.perf_counter() - begun
        )
        if len(data) > MAX_FRAME:
            raise ValueError(
                f"A worker process can send back {MAX_FRAME:,} bytes of plain values with a batch. Got {len(data):,}. "
                "Return arrays of one shape, which travel through shared memory, or use Threads."
            )
        self._stages = stages
        return DONE, data
