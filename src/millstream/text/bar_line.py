"""One line of text that is written over and over, where whoever reads it can show that."""

import os
import shutil
import sys
import time
import unicodedata
from typing import Any, Literal

_INTERVAL = 0.1
_ERASE = "\x1b[K"  # to the end of the line


class ProgressLine:
    """What is in progress, and how far it is, on a terminal or in a notebook.

    Args:
        name: What is in progress.
        shown: False shows nothing.
    """

    def __init__(self, name: str, *, shown: bool = True) -> None:
        self._name = name
        self._line = BarLine("stderr")
        self._watched = shown and self._line.rewrites
        self._next = 0.0

    def show(self, text: str) -> None:
        """Replace the line, at most ten times a second."""
        if self._watched and time.monotonic() >= self._next:
            self._next = time.monotonic() + _INTERVAL
            self.say(text)

    def say(self, text: str) -> None:
        """Replace the line."""
        if self._watched:
            self._line.write(fitted([f"{self._name}: {text}"], self._line.width))

    def close(self) -> None:
        """Clear the line."""
        if self._watched:
            self._line.write("")


class BarLine:
    """The last line of standard output, as it is at the time of writing.

    On a terminal and in a notebook a new text takes the place of the old one; anywhere else (a file, a pipe) it is a
    new line.

    Args:
        name: "stdout", or "stderr" for the last line of that.
    """

    def __init__(self, name: Literal["stdout", "stderr"] = "stdout") -> None:
        self._name = name
        self._cells = 0  # of the text that is there
        self._gone = False

    @property
    def _stream(self) -> Any:
        return getattr(sys, self._name)

    @property
    def rewrites(self) -> bool:
        """Whether texts take each other's place."""
        return rewrites(self._stream)

    @property
    def width(self) -> int | None:
        """How many cells a text may have; None for any number."""
        return max(shutil.get_terminal_size().columns - 1, 1) if self.rewrites else None

    def write(self, text: str, *, end: bool = False) -> None:
        """Show a text.

        Args:
            text: What to show, without a line break.
            end: Whether the next text is to have a line of its own.
        """
        if self.rewrites:
            cells = _cells(text)
            rest = _ERASE if _erases(self._stream) else " " * max(self._cells - cells, 0)
            self._cells = 0 if end else cells
            self._put(f"\r{text}{rest}" + ("\n" if end else ""))
        else:
            self._put(f"{text}\n")

    def _put(self, text: str) -> None:
        self._gone = self._gone or not put(self._stream, text)


def put(stream: Any, text: str) -> bool:
    """Write to a stream what it can take of a text; whether it is still there."""
    if stream is None:
        return False
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()
    except (OSError, ValueError):
        return False  # a terminal that was closed must not end a run of days
    return True


def rewrites(stream: Any) -> bool:
    """Whether a line of a stream can be written over."""
    return _is_terminal(stream) or _is_notebook(stream)


def fitted(parts: list[str], width: int | None) -> str:
    """Some texts in one line; the last ones are left out if they do not fit.

    Example:
        >>> fitted(["80/100", "loss: 1.5371", "accuracy: 0.6148"], 30)
        '80/100 - loss: 1.5371 - ...'
    """
    text = " - ".join(parts)
    if width is None:
        return text
    for count in range(len(parts) - 1, 0, -1):
        if _cells(text) <= width:
            break
        text = " - ".join([*parts[:count], "..."])
    while _cells(text) > width:
        text = text[:-1]
    return text


def _is_terminal(stream: Any) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # not quite a file, or a closed one
        return False


def _is_notebook(stream: Any) -> bool:
    return any(kind.__module__.startswith("ipykernel.") for kind in type(stream).__mro__)


def _erases(stream: Any) -> bool:
    return _is_terminal(stream) and os.environ.get("TERM") != "dumb"


def _cells(text: str) -> int:
    """How wide a text is on a terminal, where some characters take two cells and some none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )
