"""A batch as HTML that stands alone: images in the page, no scripts, in the colors of whatever surrounds it."""

import base64
import html
from typing import TYPE_CHECKING

import numpy as np

from millstream.inspect._cells import PADDING, Cell, ImageCell, Lines, picture_titles
from millstream.text.png import encode_png

if TYPE_CHECKING:
    from millstream.inspect._shown_batch import ShownBatch, ShownRow

HUES = (210, 28, 150, 320, 48, 265, 0, 180)  # of segments, in turn
CURVES = ("#2b8cd6", "#d55e00", "#009e73", "#cc79a7")
GAP = 6  # pixels between the images of a row
_SIDE = 96  # pixels that a small image is brought to
_SOFT = "opacity: 0.65"
_LINE = "1px solid rgba(128, 128, 128, 0.3)"
_WIDTH, _HEIGHT = 180, 40  # of a curve
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>:root {{ color-scheme: light dark; --page: #ffffff; --ink: #1f2328; }}
@media (prefers-color-scheme: dark) {{ :root {{ --page: #14171c; --ink: #e6edf3; }} }}
body {{ margin: 24px; background: var(--page); color: var(--ink); }}</style></head><body>
{body}
</body></html>
"""


def scale_of(pixels: np.ndarray) -> int:
    """How many times as large a small image is shown."""
    return max(1, _SIDE // max(pixels.shape[:2]))


def batch_page(batch: "ShownBatch") -> bytes:
    """A page of its own."""
    return _PAGE.format(title=html.escape(batch.title), body=batch_html(batch)).encode(errors="replace")


def batch_html(batch: "ShownBatch") -> str:
    """The title, the notes, and the rows: cards if there are images, otherwise a table."""
    has_images = any(isinstance(cell, ImageCell) for row in batch.rows for cell in row.cells.values())
    body = _cards(batch) if has_images else _table(batch)
    notes = "".join(f'<div style="{_SOFT}">{html.escape(note)}</div>' for note in batch.notes)
    font = "font: 13px/1.45 system-ui, sans-serif"
    title = f'<div style="font-size: 15px; font-weight: 600">{html.escape(batch.title)}</div>'
    return f'<div style="{font}; max-width: 1100px">{title}{notes}{body}</div>'


def _cards(batch: "ShownBatch") -> str:
    width = max(map(card_width, batch.rows))
    cards = "".join(_card(row, batch.names, width) for row in batch.rows)
    return f'<div style="display: flex; flex-wrap: wrap; gap: 18px 14px; margin-top: 14px">{cards}</div>'


def card_width(row: "ShownRow") -> int:
    """How wide the images of a row are beside each other."""
    pictures = [cell.pixels for cell in row.cells.values() if isinstance(cell, ImageCell)]
    return max(_SIDE, sum(pixels.shape[1] * scale_of(pixels) + GAP for pixels in pictures) - GAP)


def _card(row: "ShownRow", names: tuple[str, ...], width: int) -> str:
    cells = [(name, row.cells[name]) for name in names if name in row.cells]
    pictures = [(name, cell) for name, cell in cells if isinstance(cell, ImageCell)]
    others = [(name, cell) for name, cell in cells if not isinstance(cell, ImageCell)]
    titles = picture_titles([name for name, _ in pictures])
    images = "".join(_figure(title, cell, row.real) for title, (_, cell) in zip(titles, pictures, strict=True))
    head = f'<div style="font-size: 11px; {_SOFT}">{html.escape(row.title) or "&nbsp;"}</div>'
    lines = "".join(
        f'<div style="overflow-wrap: anywhere"><span style="font-size: 11px; {_SOFT}">{html.escape(name)}</span> '
        f'<span style="font-weight: 600">{_cell_html(cell)}</span></div>'
        for name, cell in others
    )
    faded = f'<div style="{"" if row.real else "opacity: 0.35; filter: grayscale(1)"}">'
    note = "" if not row.note else f'<div style="font-size: 11px; font-weight: 600">{html.escape(row.note)}</div>'
    body = f'{head}{faded}<div style="display: flex; gap: {GAP}px">{images}</div>{lines}</div>{note}'
    return f'<div style="width: {width}px">{body}</div>'


def _figure(name: str, cell: ImageCell, real: bool) -> str:
    height, width = (side * scale_of(cell.pixels) for side in cell.pixels.shape[:2])
    data = base64.b64encode(encode_png(cell.pixels)).decode()
    style = f"width: {width}px; height: {height}px; image-rendering: pixelated; display: block; border-radius: 3px"
    style += "" if real else "; outline: 2px dashed rgb(128, 128, 128); outline-offset: -2px"  # black on a dark page
    image = f'<img alt="{html.escape(name or "image")}" src="data:image/png;base64,{data}" style="{style}">'
    words = f'<div style="font-size: 11px; {_SOFT}">{html.escape(name)}</div>' if name else ""
    return f"<div>{image}{words}</div>"


def _table(batch: "ShownBatch") -> str:
    sources = any(row.source for row in batch.rows)
    notes = any(row.note for row in batch.rows)
    head = ["index", *(["source"] if sources else []), *batch.names, *(["note"] if notes else [])]
    lines = ["".join(_td("th", html.escape(name), f"{_SOFT}; font-weight: 500") for name in head)]
    for row in batch.rows:
        cells = [_td("td", "" if row.index is None else f"{row.index:,}", _SOFT)]
        cells += [_td("td", html.escape(row.source))] if sources else []
        for name in batch.names:
            cell = row.cells.get(name)
            faded = "" if row.real else "opacity: 0.35"
            cells.append(_td("td", "" if cell is None else _cell_html(cell), faded))
        cells += [_td("td", html.escape(row.note), "font-size: 11px; font-weight: 600")] if notes else []
        lines.append("".join(cells))
    rows = "".join(f'<tr style="border-bottom: {_LINE}; vertical-align: top">{line}</tr>' for line in lines)
    return f'<table style="border-collapse: collapse; margin-top: 14px">{rows}</table>'


def _td(tag: str, inside: str, style: str = "") -> str:
    return (
        f'<{tag} style="text-align: left; padding: 5px 12px 5px 0; overflow-wrap: anywhere; {style}">{inside}</{tag}>'
    )


def _cell_html(cell: Cell) -> str:
    if isinstance(cell, ImageCell):
        return _figure("", cell, real=True)
    if isinstance(cell, Lines):
        return _curve(cell)
    parts = [_piece(text, segment) for text, segment in cell.pieces]
    more = f' <span style="{_SOFT}">{html.escape(cell.more)}</span>' if cell.more else ""
    return "".join(parts) + more


def _piece(text: str, segment: int | None) -> str:
    inside = html.escape(text)
    if segment is None:
        return f'<span style="white-space: pre-wrap">{inside}</span>'
    if segment == PADDING:
        return f' <span style="opacity: 0.5; font-style: italic">{inside}</span>'
    hue = HUES[(segment - 1) % len(HUES)]
    style = f"background: hsla({hue}, 85%, 55%, 0.25); border-radius: 3px; padding: 1px 3px; white-space: pre-wrap"
    return f'<span style="{style}; box-decoration-break: clone; -webkit-box-decoration-break: clone">{inside}</span> '


def _curve(lines: Lines) -> str:
    span, count = lines.high - lines.low or 1.0, max(lines.values.shape[1] - 1, 1)
    paths = []
    for number, values in enumerate(lines.values.tolist()):
        runs: list[list[str]] = [[]]
        for place, value in enumerate(values):
            if np.isfinite(value):
                y = _HEIGHT - 2 - (value - lines.low) / span * (_HEIGHT - 4)
                runs[-1].append(f"{1 + place / count * (_WIDTH - 2):.1f},{y:.1f}")
            elif runs[-1]:
                runs.append([])
        color = CURVES[number % len(CURVES)]
        paths += [
            f'<polyline points="{" ".join(run)}" fill="none" stroke="{color}" stroke-width="1.5"/>'
            for run in runs
            if run
        ]
    box = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    drawing = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" style="display: block">{"".join(paths)}</svg>'
    return f'{drawing}<span style="font-size: 11px; {_SOFT}">{html.escape(lines.summary)}</span>'
