"""One line on the terminal that says how far a download is. Nothing at all if nobody is watching."""

import sys
import time


class ProgressLine:
    """How much of a file has arrived, at most ten times a second, on a terminal's stderr.

    Args:
        name: The file.
        total: Its size, if it is known.
    """

    def __init__(self, name: str, total: int | None) -> None:
        self._name = name
        self._total = total
        self._watched = sys.stderr.isatty()
        self._next = 0.0

    def show(self, done: int) -> None:
        """Show how many bytes are there."""
        if self._watched and time.monotonic() >= self._next:
            self._next = time.monotonic() + 0.1
            share = f" of {self._total / 1e6:.1f}" if self._total else ""
            self.say(f"{done / 1e6:.1f}{share} MB")

    def say(self, text: str) -> None:
        """Replace the line."""
        if self._watched:
            print(f"\r\x1b[K{self._name}: {text}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Clear the line."""
        if self._watched:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
