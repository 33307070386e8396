"""Pictures as SVG that stands alone: no script, no font and no address from elsewhere, readable on light and on dark.

Inside a page a picture takes the page's color for its texts. As a file it has a background, light or dark as its reader
prefers. Texts are measured with the widths of a wide font, so that none is longer than the room it was given.
"""

import html
import math
import unicodedata

from millstream.text.ticks import short_count, ticks

COLORS = ("#2b8cd6", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#8a6fd1")  # seen on white as well as on black
_SANS = "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
_MONO = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_MONO_WIDTH = 0.61  # of a letter, in units of its size
_BOLD = 1.2  # times as wide
_WIDTHS = {
    0.33: " ',.IJijl",
    0.42: "!()-/:;[\\]frt|",
    0.53: '"*_`sz',
    0.64: "?FLPTYacekovxy0123456789",
    0.71: "$ABCEKRSVXZbdghnpqu{}",
    0.83: "&DGHNOQUw",
    0.88: "#+<=>M^~",
    1.01: "%@Wm",
}
_WIDTH_OF = {letter: width for width, letters in _WIDTHS.items() for letter in letters}
_OTHER, _SYMBOL = 1.05, 1.4  # letters of other scripts; emoji, which are wider
_STYLE = (
    ":root{color:#1f2328}.paper{fill:#ffffff}"
    "@media(prefers-color-scheme:dark){:root{color:#e6edf3}.paper{fill:#0d1117}}"
)
_PAGE = (
    ":root{color-scheme:light dark}body{font-family:system-ui,sans-serif;max-width:60rem;margin:1.5rem auto;"
    "padding:0 1rem}table{border-collapse:collapse;margin:.75rem 0;font-size:.85rem}th,td{padding:.2rem .6rem;"
    "vertical-align:top;border-bottom:1px solid #8884}"
)


def text_width(text: str, size: float, *, bold: bool = False, mono: bool = False) -> float:
    """How wide a text is, or less.

    Example:
        >>> text_width("ab", 10, mono=True)
        12.2
    """
    widths = sum(_letter_width(letter, mono) for letter in text)
    return round(widths * size * (_BOLD if bold and not mono else 1), 3)


def _letter_width(letter: str, mono: bool) -> float:
    if letter.isascii():
        return _MONO_WIDTH if mono else _WIDTH_OF.get(letter, _OTHER)
    if unicodedata.combining(letter):
        return 0.0
    return _SYMBOL if unicodedata.category(letter) == "So" else _OTHER


def fitted_text(text: str, width: float, size: float, *, bold: bool = False, mono: bool = False) -> str:
    """A text, or as much of its beginning as fits, with an ellipsis.

    Example:
        >>> fitted_text("ArraySampleSource", 70, 10, mono=True)
        'ArraySamp\u2026'
    """
    if text_width(text, size, bold=bold, mono=mono) <= width:
        return text
    while text and text_width(f"{text}\u2026", size, bold=bold, mono=mono) > width:
        text = text[:-1]
    return f"{text}\u2026"


def wrapped_text(text: str, width: float, size: float, *, mono: bool = False, most: int | None = None) -> list[str]:
    """A text in lines that fit, broken between words, and inside one that is too long alone.

    Args:
        text: One line.
        width: The room there is.
        size: Of the font.
        mono: Whether all letters are equally wide.
        most: Lines there may be; the last one ends with an ellipsis if there are more.
    """
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".lstrip()
        if text_width(longer, size, mono=mono) <= width:
            lines[-1] = longer
            continue
        lines += [] if lines[-1] == "" else [""]
        for letter in word:
            if lines[-1] and text_width(lines[-1] + letter, size, mono=mono) > width:
                lines.append("")
            lines[-1] += letter
    if most is not None and len(lines) > most:
        lines = [*lines[: most - 1], fitted_text(" ".join(lines[most - 1 :]), width, size, mono=mono)]
    return lines


class Svg:
    """A picture that is being drawn.

    Example:
        >>> picture = Svg(100, 40, "A box", "With a word in it.")
        >>> picture.box(5, 5, 90, 30, COLORS[0])
        >>> picture.text(50, 24, "word", anchor="middle")
        >>> picture.inline().startswith("<svg xmlns=")
        True

    Args:
        width: In pixels.
        height: The same; it may be changed while it is drawn.
        title: What it is.
        description: What it shows, for those who do not see it.
    """

    def __init__(self, width: float, height: float, title: str, description: str) -> None:
        self.width = width
        self.height = height
        self.title = title
        self.description = description
        self._parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
        faint: bool = False,
        width: float | None = None,
    ) -> None:
        """A line of text, whose baseline is at `y`; `width` cuts what does not fit."""
        if width is not None:
            text = fitted_text(text, width, size, bold=bold, mono=mono)
        style = f'font-family="{_MONO if mono else _SANS}" font-size="{_number(size)}"'
        style += "" if anchor == "start" else f' text-anchor="{anchor}"'
        style += (' font-weight="bold"' if bold else "") + (' opacity="0.75"' if faint else "")
        place = f'x="{_number(x)}" y="{_number(y)}"'
        self._parts.append(f'<text {place} {style} fill="currentColor">{_escaped(text)}</text>')

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        color: str = "currentColor",
        *,
        fill: float = 0.12,
        stroke: float = 1.0,
        radius: float = 6,
        dashed: bool = False,
        name: str = "",
    ) -> None:
        """A rectangle, filled with a shade of a color; `stroke` is how much of the color its border has."""
        size = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
        border = f' stroke="{color}" stroke-opacity="{_number(stroke)}"' if stroke else ""
        border += ' stroke-dasharray="5 4"' if dashed else ""
        named = f' class="{name}"' if name else ""
        shape = f'rx="{_number(radius)}" fill="{color}" fill-opacity="{_number(fill)}"'
        self._parts.append(f"<rect{named} {size} {shape}{border}/>")

    def line(
        self, path: str, color: str = "currentColor", *, width: float = 1.2, opacity: float = 1.0, dashed: bool = False
    ) -> None:
        """A line along a path."""
        style = f'stroke="{color}" stroke-width="{_number(width)}" stroke-opacity="{_number(opacity)}"'
        style += ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(f'<path d="{path}" fill="none" {style}/>')

    def area(self, path: str, color: str, *, opacity: float = 1.0) -> None:
        """What a path goes around, filled."""
        self._parts.append(f'<path d="{path}" fill="{color}" fill-opacity="{_number(opacity)}"/>')

    def arrow(self, x: float, top: float, bottom: float) -> None:
        """An arrow downwards."""
        self.line(f"M{_number(x)},{_number(top)}V{_number(bottom - 6)}", width=1.4, opacity=0.7)
        self.area(f"M{_number(x - 4.5)},{_number(bottom - 8)}h9l-4.5,8z", "currentColor", opacity=0.7)

    def inline(self) -> str:
        """The picture as a part of a page, whose color its texts take."""
        return self._written(' style="max-width: 100%; height: auto"', "")

    def document(self) -> str:
        """The picture as a file."""
        return self._written("", f'<style>{_STYLE}</style><rect class="paper" width="100%" height="100%"/>') + "\n"

    def page(self, below: str = "") -> str:
        """The picture as a page of HTML, with more HTML below it."""
        head = f'<meta charset="utf-8"><title>{_escaped(self.title)}</title><style>{_PAGE}</style>'
        return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{self.inline()}{below}</body></html>\n'

    def _written(self, style: str, first: str) -> str:
        width, height = _number(math.ceil(self.width)), _number(math.ceil(self.height))
        size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        words = f"<title>{_escaped(self.title)}</title><desc>{_escaped(self.description)}</desc>"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{_escaped(self.title)}"{style}>'
            f"{words}{first}{''.join(self._parts)}</svg>"
        )


class Plot:
    """A part of a picture with two axes.

    Args:
        svg: The picture.
        left: Where the plot begins, without the texts around it.
        top: The same from above.
        width: Of the plot, in pixels.
        height: The same.
        across: The values at its left and its right end.
        up: The values at its lower and its upper end.
    """

    def __init__(
        self,
        svg: Svg,
        left: float,
        top: float,
        width: float,
        height: float,
        across: tuple[float, float],
        up: tuple[float, float],
    ) -> None:
        self.svg, self.left, self.top, self.width, self.height = svg, left, top, width, height
        self._across, self._up = across, up

    def x(self, value: float) -> float:
        """Where a value is, from the left."""
        low, high = self._across
        return self.left + self.width * (value - low) / ((high - low) or 1)

    def y(self, value: float) -> float:
        """Where a value is, from above."""
        low, high = self._up
        return self.top + self.height * (1 - (value - low) / ((high - low) or 1))

    def point(self, across: float, up: float) -> str:
        """A point as paths have it."""
        return f"{_number(self.x(across))},{_number(self.y(up))}"

    def axes(self, across: str, up: str = "", *, percent: bool = False, whole: bool = True, most: int = 5) -> None:
        """Lines and numbers below and on the left, and what they count.

        Args:
            across: What the axis below counts.
            up: The same for the axis on the left, whose text stands above it.
            percent: Whether 1 is written as 100 % on the left.
            whole: Whether what is on the left is counted in whole numbers.
            most: Intervals of the axis below.
        """
        svg, (left, top, width, height) = self.svg, (self.left, self.top, self.width, self.height)
        for value in ticks(*self._up, most=4, whole=whole and not percent):
            y = self.y(value)
            svg.line(f"M{_number(left)},{_number(y)}h{_number(width)}", width=1, opacity=0.12)
            svg.text(left - 6, y + 3.5, f"{100 * value:g} %" if percent else short_count(value), size=10, anchor="end")
        svg.line(f"M{_number(left)},{_number(top)}v{_number(height)}h{_number(width)}", width=1, opacity=0.5)
        for value in ticks(*self._across, most=most, whole=True):
            text, x = short_count(value), self.x(value)
            svg.line(f"M{_number(x)},{_number(top + height)}v4", width=1, opacity=0.5)
            half = text_width(text, 10) / 2
            svg.text(min(x, left + width + 10 - half), top + height + 15, text, size=10, anchor="middle")
        svg.text(left + width / 2, top + height + 30, across, size=11, anchor="middle", faint=True, width=width)
        if up:
            svg.text(left, top - 7, up, size=11, faint=True, width=width)


def joined_points(points: list[str]) -> str:
    """A path through points.

    Example:
        >>> joined_points(["0,0", "1,2"])
        'M0,0L1,2'
    """
    return "M" + "L".join(points)


def _number(value: float) -> str:
    """A number with two digits after the point, at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value else "0"


def _escaped(text: str) -> str:
    """A text as XML takes it, which has no control characters."""
    return html.escape("".join(char if char.isprintable() else "\ufffd" for char in text))
