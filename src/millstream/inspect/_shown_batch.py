"""A batch to look at: in a notebook, in a terminal, and as a file."""

import dataclasses
import os
import shutil
import sys

import numpy as np

from millstream.files.atomic import require_place, written
from millstream.inspect._batch_html import batch_html, batch_page
from millstream.inspect._batch_png import batch_png
from millstream.inspect._cells import Cell, ImageCell, Lines, printable
from millstream.text.summaries import never_raising
from millstream.text.tables import WIDTH, text_table

_SPARK = " ▁▂▃▄▅▆▇█"
_SPARK_WIDTH, _ART_WIDTH = 16, 24  # cells of a terminal
_LONGEST = 240  # characters of a cell


@dataclasses.dataclass(frozen=True)
class ShownRow:
    """One row of a batch, as it is shown.

    Example:
        >>> row = ms.inspect.show(loader, jax.random.key(0), step=2).rows[-1]
        >>> row.index, row.real, row.note
        (None, False, 'padding')

    Attributes:
        index: The index of its sample in the source; None if that is not known, or if the row is padding.
        source: The name of its source, in a mixture; otherwise "".
        real: Whether the mask says that it counts.
        note: Why it does not count, or "".
        cells: What is shown of each leaf, by its name.
    """

    index: int | None
    source: str
    real: bool
    note: str
    cells: dict[str, Cell]

    @property
    def title(self) -> str:
        """Its index and where it is from."""
        number = "" if self.index is None else f"#{self.index:,}"
        return " ".join(part for part in (number, self.source) if part)


@dataclasses.dataclass(frozen=True, repr=False)
class ShownBatch:
    """The batch of a step, to look at. See `show`.

    The last line of a cell in a notebook shows it as a picture. In a terminal it prints as a table, with images in
    color where `COLORTERM` says that the terminal has them.

    Example:
        >>> batch = ms.inspect.show(loader, jax.random.key(0), step=2)
        >>> batch.save("batch.html")
        >>> batch.title
        'step 2, epoch 0, batch 3 of 3'

    Attributes:
        title: The step and its place in the run.
        notes: What else is to be known: how many rows there are, and how images are shown.
        names: The leaves that are shown.
        rows: The rows that are shown.
    """

    title: str
    notes: tuple[str, ...]
    names: tuple[str, ...]
    rows: tuple[ShownRow, ...]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file: a page that stands alone, or an image.

        Example:
            >>> ms.inspect.show(loader, jax.random.key(0)).save("batch.png")

        Args:
            path: It ends in ".html" or ".png". Images are drawn with Pillow, of the extra "images".
        """
        place = require_place("save", path)
        kinds = {".html": batch_page, ".png": batch_png}
        if place.suffix.lower() not in kinds:
            raise ValueError(f'save writes files that end in ".html" or ".png". Got {str(place)!r}.')
        data = kinds[place.suffix.lower()](self)
        with written(place, alone=False) as file:
            file.write(data)

    def _repr_html_(self) -> str:
        return batch_html(self)

    def __str__(self) -> str:
        names = [printable(name) for name in self.names]
        header = ["row", "index", "source", *names, "note"]
        rows = [
            [
                str(number),
                "" if row.index is None else f"{row.index:,}",
                printable(row.source),
                *(_cell_text(row.cells.get(name)) for name in self.names),
                printable(row.note),
            ]
            for number, row in enumerate(self.rows)
        ]
        table = text_table(header, rows, numbers=["row", "index"], prose=names, width=WIDTH)
        return "\n".join([*map(printable, (self.title, *self.notes)), "", table])

    @never_raising
    def __repr__(self) -> str:
        art = _art(self) if _has_colors() else ""
        return f"{art}{self}"


def _cell_text(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if isinstance(cell, ImageCell):
        return cell.summary
    if isinstance(cell, Lines):
        return f"{_spark(cell)} {cell.summary}"
    text = printable(cell.text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _spark(lines: Lines) -> str:
    """The first curve, as blocks of eight heights."""
    values = lines.values[0]
    places = np.linspace(0, len(values) - 1, min(_SPARK_WIDTH, len(values))).astype(int)
    span = lines.high - lines.low or 1.0
    scaled = np.where(np.isfinite(values[places]), (values[places] - lines.low) / span, -1.0)
    return "".join(" " if height < 0 else _SPARK[1 + round(height * 7)] for height in np.clip(scaled, -1, 1))


def _has_colors() -> bool:
    stream = sys.stdout
    is_terminal = getattr(stream, "isatty", lambda: False)()
    return is_terminal and os.environ.get("COLORTERM") in ("truecolor", "24bit") and "NO_COLOR" not in os.environ


def _art(batch: ShownBatch) -> str:
    """The first image of every row in half blocks, as many as fit beside each other; nothing if there are none."""
    pictures = [
        (
            printable(row.title),
            next((cell for cell in reversed(row.cells.values()) if isinstance(cell, ImageCell)), None),
        )
        for row in batch.rows
    ]
    blocks = [(title, _blocks(cell)) for title, cell in pictures if cell is not None]
    if not blocks:
        return ""
    width = max(len(lines[0]) for _, lines in blocks)
    across = max(1, shutil.get_terminal_size().columns // (width + 2))
    text = []
    for first in range(0, len(blocks), across):
        some = blocks[first : first + across]
        text.append("  ".join(title[:width].ljust(width) for title, _ in some).rstrip())
        for number in range(max(len(lines) for _, lines in some)):
            parts = [lines[number] if number < len(lines) else [] for _, lines in some]
            text.append("  ".join("".join(part) + "\x1b[0m" + " " * (width - len(part)) for part in parts))
    return "\n".join([*text, "", ""])


def _blocks(picture: ImageCell) -> list[list[str]]:
    """An image as lines of colored half blocks, each two pixels high."""
    pixels = picture.pixels
    pixels = np.repeat(pixels[..., None], 3, axis=2) if pixels.ndim == 2 else pixels[..., :3]
    height, width = pixels.shape[:2]
    columns = min(width, _ART_WIDTH)
    rows = max(2, 2 * round(height * columns / width / 2))
    small = pixels[np.arange(rows) * height // rows][:, np.arange(columns) * width // columns].tolist()
    return [
        [f"\x1b[38;2;{a};{b};{c};48;2;{d};{e};{f}m▀" for (a, b, c), (d, e, f) in zip(upper, lower, strict=True)]
        for upper, lower in zip(small[::2], small[1::2], strict=True)
    ]
