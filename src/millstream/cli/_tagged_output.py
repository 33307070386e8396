"""Output of many processes on one terminal: whole lines, each with the number of its process."""

import collections
import time
from typing import BinaryIO

_LONGEST = 1 << 16  # bytes; a longer line is cut, so that memory is bounded
_REDRAW = 1.0  # seconds between two states of a progress bar that are shown
_COLOURS = (36, 33, 32, 35, 34, 31)  # cyan, yellow, green, magenta, blue, red


class TaggedOutput:
    r"""Cuts a stream of bytes into lines and writes each with a tag in front.

    A line that is drawn again and again (with a carriage return, as progress bars are) is written as it stands in the
    end, and once a second until then.

    Example:
        >>> import io
        >>> out = io.BytesIO()
        >>> stdout = TaggedOutput(out, b"[0] ")
        >>> stdout.feed(b"one\ntw")
        >>> stdout.feed(b"o\n10%\r100%")
        >>> stdout.finish()
        >>> out.getvalue()
        b'[0] one\n[0] two\n[0] 100%\n'

    Args:
        out: Where the lines go.
        tag: What is put in front of each.
        last: Takes the lines as well; with a maximum length, it holds the last ones.
    """

    def __init__(self, out: BinaryIO, tag: bytes, last: "collections.deque[bytes] | None" = None) -> None:
        self._out, self._tag = out, tag
        self._last = collections.deque(maxlen=0) if last is None else last
        self._held = b""
        self._redraw_at = time.monotonic() + _REDRAW

    def feed(self, data: bytes) -> None:
        """Take some bytes; whole lines are written at once."""
        *lines, held = (self._held + data).split(b"\n")
        lines = [_as_drawn(line) for line in lines]
        # A carriage return at the very end may be the first half of a line end, so it decides nothing yet.
        *drawn, current = held.rstrip(b"\r").rsplit(b"\r", 1)
        if drawn:
            held = held[len(drawn[0]) + 1 :]
            if _as_drawn(drawn[0]) and time.monotonic() >= self._redraw_at:
                lines.append(_as_drawn(drawn[0]))
                self._redraw_at = time.monotonic() + _REDRAW
        if len(current) >= _LONGEST:
            lines.append(current)
            held = b""
        self._held = held
        self._write(lines)

    def finish(self) -> None:
        """Write what is left of a last line without an end."""
        if self._held:
            self._write([_as_drawn(self._held)])
            self._held = b""

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            self._last.extend(lines)
            self._out.write(b"".join(self._tag + line + b"\n" for line in lines))
            self._out.flush()


def make_tag(number: int, processes: int, *, coloured: bool) -> bytes:
    """`[3] `, as wide as the widest of all.

    Example:
        >>> make_tag(3, 12, coloured=False)
        b'[ 3] '
    """
    tag = f"[{number:>{len(str(processes - 1))}}] "
    return (f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{tag}\x1b[0m" if coloured else tag).encode()


def _as_drawn(line: bytes) -> bytes:
    """What a terminal would show of a line with carriage returns: the text behind the last one."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
