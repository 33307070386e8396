"""One process of `millstream launch`, as the launcher sees it."""

import collections
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import IO, BinaryIO

_LONGEST = 1 << 16  # bytes; a longer line is cut, so that memory is bounded
_REDRAW = 1.0  # seconds between two states of a progress bar that are shown
_COLOURS = (36, 33, 32, 35, 34, 31)  # cyan, yellow, green, magenta, blue, red
_CHILD = pathlib.Path(__file__).with_name("_child.py")
_LAST_LINES = 10
_STRAGGLERS = 1.0  # seconds that programs the process has started may continue writing when it has ended


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
    """What a terminal would show of a line with carriage returns: the text after the last one."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Launched:
    """A process that is started, read, sent signals, and in the end removed with all that it has started.

    Args:
        number: Which process it is.
        processes: How many there are.
        command: A script, or `-m` and a module, and their arguments.
        environment: All of its environment.
        log: The file that takes all its output, too.
    """

    def __init__(
        self, number: int, processes: int, command: list[str], environment: dict[str, str], log: BinaryIO | None
    ) -> None:
        self.number = number
        self.code: int | None = None
        self.last_lines: collections.deque[bytes] = collections.deque(maxlen=_LAST_LINES)
        self._processes, self._command, self._environment, self._log = processes, command, environment, log
        self._outputs: dict[IO[bytes], TaggedOutput] = {}
        self._popen: subprocess.Popen[bytes] | None = None
        self._remove_at = float("inf")

    def start(self, report: int, guard: int) -> list[IO[bytes]]:
        """Start the process; returns the pipes to watch."""
        self._popen = popen = subprocess.Popen(
            [sys.executable, str(_CHILD), *map(str, (self.number, report, guard)), *self._command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment,
            pass_fds=(report, guard),
            process_group=0,  # an interrupt from the terminal is for the launcher, which passes it on
        )
        assert popen.stdout is not None and popen.stderr is not None
        for pipe, out in ((popen.stdout, sys.stdout), (popen.stderr, sys.stderr)):
            coloured = out.isatty() and not os.environ.get("NO_COLOR")
            tag = make_tag(self.number, self._processes, coloured=coloured)
            self._outputs[pipe] = TaggedOutput(out.buffer, tag, self.last_lines)
        return [*self._outputs]

    @property
    def pid(self) -> int:
        return -1 if self._popen is None else self._popen.pid

    def read(self, pipe: IO[bytes]) -> bool:
        """Pass on what a pipe holds. False if it has come to its end."""
        data = os.read(pipe.fileno(), 1 << 16)
        if self._log is not None:
            self._log.write(data)
            self._log.flush()
        if data:
            self._outputs[pipe].feed(data)
        else:
            self._outputs.pop(pipe).finish()
        return bool(data)

    def has_just_ended(self) -> bool:
        """Whether the process has ended since this was asked last."""
        if self.code is not None or self._popen is None or self._popen.poll() is None:
            return False
        status = self._popen.returncode
        self.code = status if status >= 0 else 128 - status
        self._remove_at = time.monotonic() + _STRAGGLERS
        return True

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL has ended it."""
        return self._popen is not None and self._popen.returncode == -signal.SIGKILL

    def is_done(self) -> bool:
        """Whether it has ended and all that holds its output has, or has had the time to."""
        return self.code is not None and (not self._outputs or time.monotonic() >= self._remove_at)

    def send(self, number: int) -> None:
        """Send a signal to the process, if it is still there."""
        if self._popen is not None:
            self._popen.send_signal(number)

    def remove(self) -> list[IO[bytes]]:
        """Leave nothing of it behind; returns the pipes that need no more watching."""
        assert self._popen is not None
        self._popen.kill()
        self._popen.wait()
        with contextlib.suppress(OSError):  # nobody is left in its group
            os.killpg(self._popen.pid, signal.SIGKILL)
        pipes = [*self._outputs]
        for output in self._outputs.values():
            output.finish()
        self._outputs.clear()
        return pipes
