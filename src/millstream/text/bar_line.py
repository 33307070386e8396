"""One line of text that is written over and over, where whoever reads it can show that."""

import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

_INTERVAL = 0.1
_ERASE = "\x1b[K"  # to the end of the line
_NOTEBOOK_CELLS = 100
_MORE = "..."  # where values are left out
_LEAST_NAME = 6  # cells of a name that has been cut


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
            self._line.write(clipped(f"{self._name}: {text}", self._line.width))

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
        self._output = NotebookOutput()

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
        if is_notebook(self._stream):
            return _NOTEBOOK_CELLS
        return max(shutil.get_terminal_size().columns - 1, 1) if self.rewrites else None

    def write(self, text: str, *, end: bool = False) -> None:
        """Show a text.

        Args:
            text: What to show, without a line break.
            end: Whether the next text is to have a line of its own.
        """
        if is_notebook(self._stream):
            # Where a stream is saved as it came, what was written over would be saved, too.
            self._output.show(text)
            self._output = NotebookOutput() if end else self._output
        elif self.rewrites:
            cells = cells_of(text)
            rest = _ERASE if _erases(self._stream) else " " * max(self._cells - cells, 0)
            self._cells = 0 if end else cells
            put(self._stream, f"\r{text}{rest}" + ("\n" if end else ""))
        else:
            put(self._stream, f"{text}\n")

    def leave(self, text: str) -> None:
        """Write a line that stays beside the one that is written over."""
        if is_notebook(self._stream):
            put(self._stream, f"{text}\n")
        else:
            self.write(text, end=True)


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
    return _is_terminal(stream) or is_notebook(stream)


class NotebookOutput:
    """One output of a notebook's cell, which is replaced again and again; what it shows last is saved."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, value: object) -> None:
        """Replace it: a text, or anything that a notebook can show."""
        from IPython.display import display

        shown, raw = ({"text/plain": value}, True) if isinstance(value, str) else (value, False)
        if self._handle is None:
            self._handle = display(shown, raw=raw, display_id=True)
        else:
            self._handle.update(shown, raw=raw)


Values = Sequence[tuple[str, str]]  # names and numbers


class Form(NamedTuple):
    """One way to write a line of texts, a bar and values; of several the longest that fits is taken.

    Attributes:
        cells: Of the texts, with what stands between them and the values.
        joint: Between two values.
        between: Between the name of a value and its number.
        least: Cells of the smallest bar; 0 without a bar.
        spare: Whether it is only taken where not even the first value fits into another one.
    """

    cells: int
    joint: str = " - "
    between: str = ": "
    least: int = 0
    spare: bool = False

    def text(self, values: Values, more: bool = False) -> str:
        """The values in one text, and whether there are more of them."""
        texts = [f"{name}{self.between}{number}" for name, number in values]
        return self.joint.join([*texts, _MORE] if more else texts)

    def takes(self, text: str, width: int) -> bool:
        """Whether a line with such a text of values fits."""
        return self.cells + self.least + cells_of(text) <= width


class Fit(NamedTuple):
    """How a line is written: by which form, with a bar of how many cells, and with which text of values."""

    form: int
    bar: int
    values: str


def fit(forms: Sequence[Form], values: Values, width: int | None, bar: int) -> Fit:
    """Choose how to write a line: the bar shrinks and vanishes, and texts shorten, before a value is left out.

    Example:
        >>> forms = [Form(cells=24, least=5), Form(cells=22), Form(cells=12, joint=" ", between=" ")]
        >>> values = [("loss", "0.1291"), ("accuracy", "0.9640")]
        >>> fit(forms, values, 80, bar=20).bar, fit(forms, values, 60, bar=20).bar
        (20, 5)
        >>> fit(forms, values, 30, bar=20)
        Fit(form=2, bar=0, values='loss 0.1291 ...')

    Args:
        forms: From the longest to the shortest.
        values: What is to be shown, the most important first.
        width: Cells of the line; None for any number.
        bar: Cells that the bar has where there is room.
    """
    if width is None:
        return Fit(0, bar if forms[0].least else 0, forms[0].text(values))
    kept, left_out = list(values), False
    if not any(form.takes(form.text(values), width) for form in forms if not form.spare):
        kept, left_out = _chosen(forms, values, width), True
    for spare, more in ((False, left_out), (False, False), (True, left_out), (True, False)):
        for number, form in enumerate(forms):
            text = form.text(kept, more)
            if form.spare == spare and form.takes(text, width):
                return Fit(number, min(bar, width - form.cells - cells_of(text)) if form.least else 0, text)
    return Fit(len(forms) - 1, 0, forms[-1].text(kept))


def _chosen(forms: Sequence[Form], values: Values, width: int) -> list[tuple[str, str]]:
    """Those values that fit, of which the first one always does, even if its name must be cut."""
    last = max(number for number, form in enumerate(forms) if not form.spare)
    form = next((form for form in forms[last:] if form.takes(form.text(values[:1]), width)), None)
    if form is None:
        name, number = values[0]
        rooms = [width - form.cells - cells_of(f"..{form.between}{number}") for form in forms[last:]]
        return [(clipped(name, room) + "..", number) for room in rooms if room >= _LEAST_NAME][:1]
    kept: list[tuple[str, str]] = []
    for value in values:
        if form.takes(form.text([*kept, value]), width):
            kept.append(value)
    return kept


def clipped(text: str, width: int | None) -> str:
    """As much of the beginning of a text as fits into that many cells; None for any number."""
    while width is not None and cells_of(text) > width:
        text = text[:-1]
    return text


def _is_terminal(stream: Any) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # not quite a file, or a closed one
        return False


def is_notebook(stream: Any) -> bool:
    """Whether what is written to a stream appears in a notebook."""
    return any(kind.__module__.startswith("ipykernel.") for kind in type(stream).__mro__)


def _erases(stream: Any) -> bool:
    return _is_terminal(stream) and os.environ.get("TERM") != "dumb"


def cells_of(text: str) -> int:
    """How wide a text is on a terminal, where some characters take two cells and some none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )
