"""Frames over a socket pair: a kind, a length and bytes. The other end's death reads as the end of the file."""

import contextlib
import select
import socket
import struct

_HEADER = struct.Struct("<BI")
MAX_FRAME = 1 << 28


class Channel:
    """One end of a socket pair.

    Args:
        sock: The socket; this object owns it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, kind: int, payload: bytes) -> None:
        """Send a frame whole, waiting as long as it takes; BrokenPipeError if nobody is there any more."""
        self._sock.sendall(_HEADER.pack(kind, len(payload)) + payload)

    def receive(self) -> tuple[int, bytes] | None:
        """The next frame, waiting for it; None at the end."""
        while True:
            frame = self._next_frame()
            if frame is not None:
                return frame
            if not self._read_more():
                return None

    def receive_all(self) -> tuple[list[tuple[int, bytes]], bool]:
        """All frames that are there, after the socket was found readable, and whether the other end is gone.

        It raises a ValueError if what came is not a frame.
        """
        there, frames = self._read_more(), []
        while len(self._buffer) >= _HEADER.size and (frame := self._next_frame()) is not None:
            frames.append(frame)
        return frames, not there

    def receive_ready(self) -> list[tuple[int, bytes]]:
        """The frames that are there already, without waiting for one."""
        frames = []
        while (frame := self._next_frame()) is not None or (self._is_readable() and self._read_more()):
            frames += [] if frame is None else [frame]
        return frames

    def _is_readable(self) -> bool:
        watch = select.poll()
        watch.register(self._sock, select.POLLIN)
        return bool(watch.poll(0))

    def close(self) -> None:
        """Hang up, also for forked copies of this process; closing twice does no harm."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _read_more(self) -> bool:
        try:
            data = self._sock.recv(1 << 16)
        except ConnectionError:
            return False
        self._buffer += data
        return bool(data)

    def _next_frame(self) -> tuple[int, bytes] | None:
        if len(self._buffer) < _HEADER.size:
            return None
        kind, length = _HEADER.unpack_from(self._buffer)
        if length > MAX_FRAME:
            raise ValueError(f"a frame of {length:,} bytes came from the other end; at most {MAX_FRAME:,} are allowed")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        return kind, payload
