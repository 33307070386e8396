"""One line on stderr that says how far something is. Nothing at all if nobody is watching."""

import time

from millstream.text.bar_line import BarLine, fitted

_INTERVAL = 0.1


class ProgressLine:
    """What is under way, and how far it is, on a terminal or in a notebook.

    Args:
        name: What is under way.
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
