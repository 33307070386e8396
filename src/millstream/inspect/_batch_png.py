"""A batch as an image, drawn with Pillow."""

import colorsys
import io
from typing import TYPE_CHECKING, Any

import numpy as np

from millstream.inspect._batch_html import CURVES, GAP, HUES, card_width, scale_of
from millstream.inspect._cells import PADDING, Cell, ImageCell, Lines, picture_titles, printable
from millstream.text.errors import needs

if TYPE_CHECKING:
    from millstream.inspect._shown_batch import ShownBatch, ShownRow

_PAGE, _INK, _SOFT, _FAINT = (255, 255, 255), (31, 35, 40), (110, 118, 129), (175, 180, 186)
_WIDTH, _MARGIN, _BETWEEN = 1100, 24, 14  # pixels
_LINE, _CURVE_WIDTH, _CURVE_HEIGHT = 18, 180, 40
_FADED = 0.35  # how much is left of rows that do not count


def batch_png(batch: "ShownBatch") -> bytes:
    """The bytes of a PNG file."""
    with needs("save", "Pillow", "images"):
        from PIL import Image, ImageDraw, ImageFont
    canvas = _Canvas(Image, ImageDraw, ImageFont)
    canvas.words(_MARGIN, batch.title, size=18)
    canvas.y += 26
    for note in batch.notes:
        canvas.y += canvas.wrapped(_MARGIN, [(note, None)], _WIDTH - 2 * _MARGIN, color=_SOFT)
    canvas.y += 12
    has_images = any(isinstance(cell, ImageCell) for row in batch.rows for cell in row.cells.values())
    (_draw_cards if has_images else _draw_rows)(canvas, batch)
    return canvas.png()


class _Canvas:
    """A page that grows downwards as it is drawn on."""

    def __init__(self, image: Any, draw: Any, font: Any) -> None:
        self._image, self._fonts = image, {size: font.load_default(size) for size in (12, 13, 18)}
        self._page = image.new("RGB", (_WIDTH, 400), _PAGE)
        self._make = draw.Draw
        self._draw = draw.Draw(self._page)
        self.y: float = _MARGIN
        self._lowest, self._widest = _MARGIN, 0

    def _reach(self, right: float, bottom: float) -> None:
        self._lowest, self._widest = max(self._lowest, int(bottom)), max(self._widest, int(right))
        if bottom > self._page.height:
            taller = self._image.new("RGB", (_WIDTH, 2 * int(bottom)), _PAGE)
            taller.paste(self._page)
            self._page, self._draw = taller, self._make(taller)

    def width_of(self, text: str, size: int = 13) -> float:
        """Pixels of a line of text."""
        return self._fonts[size].getlength(text)

    def words(
        self, x: float, text: str, *, dy: float = 0, size: int = 13, color: Any = _INK, behind: Any = None
    ) -> float:
        """Write a line of text; its width."""
        text = printable(text)
        width = self.width_of(text, size)
        self._reach(x + width, self.y + dy + _LINE)
        if behind is not None:
            self._draw.rounded_rectangle((x - 2, self.y + dy, x + width + 2, self.y + dy + _LINE - 2), 3, fill=behind)
        self._draw.text((x, self.y + dy), text, font=self._fonts[size], fill=color)
        return width

    def wrapped(
        self, x: float, pieces: list[tuple[str, Any]], width: float, *, dy: float = 0, color: Any = _INK
    ) -> float:
        """Write pieces of text, each with its background color, in lines; their height."""
        place, down = x, dy
        for text, behind in pieces:
            words = text.split()
            for number, word in enumerate(words):
                gap = " " if number < len(words) - 1 else ""
                while word:
                    if place > x and place + self.width_of(word) > x + width:
                        place, down = x, down + _LINE
                    fits = len(word)
                    while fits > 1 and self.width_of(word[:fits]) > width:
                        fits -= 1
                    place += self.words(place, word[:fits] + gap, dy=down, color=color, behind=behind)
                    word = word[fits:]
            place += 8 if words else 0
        return down - dy + _LINE

    def picture(self, x: float, pixels: np.ndarray, *, real: bool, dy: float = 0) -> tuple[int, int]:
        """Paste an image; its width and height."""
        pixels = np.repeat(pixels[..., None], 3, axis=2) if pixels.ndim == 2 else pixels
        shown = pixels[..., :3].astype(np.float64)
        if pixels.shape[2] == 4:
            opacity = pixels[..., 3:] / 255
            shown = shown * opacity + 255 * (1 - opacity)
        if not real:
            shown = 255 - (255 - shown.mean(axis=2, keepdims=True).repeat(3, axis=2)) * _FADED
        scale = scale_of(pixels)
        large = shown.round().astype(np.uint8).repeat(scale, axis=0).repeat(scale, axis=1)
        self._reach(x + large.shape[1], self.y + dy + large.shape[0])
        self._page.paste(self._image.fromarray(large), (int(x), int(self.y + dy)))
        return large.shape[1], large.shape[0]

    def curves(self, x: float, lines: Lines, *, dy: float = 0) -> float:
        """Draw curves, and what they are in words; their height."""
        span, count = lines.high - lines.low or 1.0, max(lines.values.shape[1] - 1, 1)
        self._reach(x + _CURVE_WIDTH, self.y + dy + _CURVE_HEIGHT)
        for number, values in enumerate(lines.values.tolist()):
            points = [
                (x + place / count * _CURVE_WIDTH, self.y + dy + _CURVE_HEIGHT * (1 - (value - lines.low) / span))
                for place, value in enumerate(values)
                if np.isfinite(value)
            ]
            if len(points) > 1:
                self._draw.line(points, fill=CURVES[number % len(CURVES)], width=2)
        self.words(x, lines.summary, dy=dy + _CURVE_HEIGHT, size=12, color=_SOFT)
        return _CURVE_HEIGHT + _LINE

    def rule(self, width: float) -> None:
        """A line across the page."""
        self._draw.line((_MARGIN, self.y - 4, _MARGIN + width, self.y - 4), fill=(225, 228, 232))

    def png(self) -> bytes:
        """The page, as far as it is drawn on."""
        file = io.BytesIO()
        self._page.crop((0, 0, min(_WIDTH, self._widest + _MARGIN), self._lowest + _MARGIN)).save(file, "PNG")
        return file.getvalue()


def _draw_cards(canvas: _Canvas, batch: "ShownBatch") -> None:
    x, tallest = float(_MARGIN), 0.0
    width = max(map(card_width, batch.rows))
    for row in batch.rows:
        if x > _MARGIN and x + width > _WIDTH - _MARGIN:
            x, canvas.y, tallest = float(_MARGIN), canvas.y + tallest + _BETWEEN, 0.0
        tallest = max(tallest, _draw_card(canvas, x, width, row, batch.names))
        x += width + _BETWEEN
    canvas.y += tallest


def _draw_card(canvas: _Canvas, x: float, width: int, row: "ShownRow", names: tuple[str, ...]) -> float:
    ink = _INK if row.real else _FAINT
    canvas.words(x, row.title, size=12, color=_SOFT)
    down, place, tallest = float(_LINE), x, 0
    pictures = [(name, row.cells[name]) for name in names if isinstance(row.cells.get(name), ImageCell)]
    titles = picture_titles([name for name, _ in pictures])
    for title, (_, cell) in zip(titles, pictures, strict=True):
        assert isinstance(cell, ImageCell)
        across, high = canvas.picture(place, cell.pixels, real=row.real, dy=down)
        if title:
            canvas.words(place, title, dy=down + high + 2, size=12, color=_SOFT)
            high += _LINE
        place, tallest = place + across + GAP, max(tallest, high)
    down += tallest + 2
    for name in names:
        cell = row.cells.get(name)
        if cell is None or isinstance(cell, ImageCell):
            continue
        if isinstance(cell, Lines):
            down += canvas.curves(x, cell, dy=down)
        else:
            beside = canvas.words(x, f"{name} ", dy=down, size=12, color=_SOFT if row.real else _FAINT)
            begin = beside if beside < 0.6 * width else 0
            down += 0 if begin else _LINE
            down += canvas.wrapped(x + begin, _pieces(cell), width - begin, dy=down, color=ink)
    if row.note:
        down += canvas.wrapped(x, [(row.note, None)], width, dy=down, color=_SOFT)
    return down


def _draw_rows(canvas: _Canvas, batch: "ShownBatch") -> None:
    width = _WIDTH - 2 * _MARGIN
    for row in batch.rows:
        canvas.rule(width)
        head = "   ".join(part for part in (row.title, row.note) if part)
        canvas.words(_MARGIN, head, size=12, color=_SOFT)
        canvas.y += _LINE
        for name in batch.names:
            cell = row.cells.get(name)
            if isinstance(cell, Lines):
                canvas.words(_MARGIN, name, size=12, color=_SOFT)
                canvas.y += canvas.curves(_MARGIN + 120, cell)
            elif cell is not None and not isinstance(cell, ImageCell):
                canvas.words(_MARGIN, name[:18], size=12, color=_SOFT)
                ink = _INK if row.real else _FAINT
                canvas.y += canvas.wrapped(_MARGIN + 120, _pieces(cell), width - 120, color=ink)
        canvas.y += 10


def _pieces(cell: Cell) -> list[tuple[str, Any]]:
    """Text and its background color."""
    assert not isinstance(cell, ImageCell | Lines)
    shown = [(text, None if segment in (None, PADDING) else _color(segment)) for text, segment in cell.pieces]
    return [*shown, (cell.more, None)]


def _color(segment: int) -> tuple[int, int, int]:
    red, green, blue = colorsys.hls_to_rgb(HUES[(segment - 1) % len(HUES)] / 360, 0.88, 0.85)
    return round(255 * red), round(255 * green), round(255 * blue)
