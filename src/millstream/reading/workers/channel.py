"""Frames over a socket pair: a kind, a length and bytes. The other end's death reads as the end of the file."""

import collections
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
        self._frames: collections.deque[tuple[int, bytes]] = collections.deque()  # received, and not asked for yet

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, kind: int, payload: bytes) -> None:
        """Send a frame whole, waiting as long as it takes; BrokenPipeError if nobody is there any more."""
        self._sock.sendall(_HEADER.pack(kind, len(payload)) + payload)

    def receive(self) -> tuple[int, bytes] | None:
        """The next frame, waiting for it; None at the end."""
        while not self._frames:
            if not self._read_more():
                return None
        return self._frames.popleft()

    def receive_all(self) -> tuple[list[tuple[int, bytes]], bool]:
        """All frames that are there, after the socket was found readable, and whether the other end is gone.

        It raises a ValueError if what came is not a frame.
        """
        there = self._read_more()
        frames = [*self._frames]
        self._frames.clear()
        return frames, not there

    def receive_ready(self) -> list[tuple[int, bytes]]:
        """The frames that are there already, without waiting for one."""
        while self._is_readable() and self._read_more():
            pass
        frames = [*self._frames]
        self._frames.clear()
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
        """Take in what has come, waiting for it; whether the other end is there."""
        try:
            data = self._sock.recv(1 << 16)
        except ConnectionError:
            return False
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(buffer)
            if length > MAX_FRAME:
                raise ValueError(
                    f"a frame of {length:,} bytes came from the other end; at most {MAX_FRAME:,} are allowed"
                )
            end = _HEADER.size + length
            if len(buffer) < end:
                break
            self._frames.append((kind, bytes(buffer[_HEADER.size : end])))
            del buffer[:end]
        return bool(data)
