"""Tables and curves for notebooks: HTML that stands alone, without scripts, in the colors of whatever surrounds it."""

import functools
import html
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

_COLORS = ("#2b8cd6", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # seen on white as well as on black
_WIDTH, _HEIGHT = 300, 90  # of the lines of a curve, in pixels
_LEFT, _TOP, _BOTTOM = 56, 20, 18  # room for the texts around it


def html_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Collection[str] = (),
    total: Sequence[str] | None = None,
) -> str:
    """What `text_table` writes as text. A column without a text in it is left out.

    Example:
        >>> html_table(["a", "b"], [["<x>", ""]]).removeprefix('<table><tr><th style="text-align: left">a</th></tr>')
        '<tr><td style="text-align: left">&lt;x&gt;</td></tr></table>'

    Args:
        header: The names of the columns.
        rows: Cells, which may have several lines.
        numbers: Columns of numbers, which end where their column ends.
        total: A last row.
    """
    body = [*rows] if total is None else [*rows, total]
    used = [i for i in range(len(header)) if any(row[i] for row in body)]
    sides = ["right" if header[i] in numbers else "left" for i in used]
    lines = [_row("th", [header[i] for i in used], sides)]
    lines += [_row("td", [row[i] for i in used], sides) for row in body[: len(body) - (total is not None)]]
    lines += [] if total is None else [_row("th", [total[i] for i in used], sides)]
    return f"<table>{''.join(lines)}</table>"


def html_names(rows: Iterable[tuple[str, str]]) -> str:
    """What `name_table` writes as text.

    Example:
        >>> html_names([("samples", "10")])
        '<table><tr><th style="text-align: left">samples</th><td style="text-align: left">10</td></tr></table>'
    """
    lines = [f"<tr>{_cell('th', name, 'left')}{_cell('td', text, 'left')}</tr>" for name, text in rows]
    return f"<table>{''.join(lines)}</table>"


def never_raising(page: Callable[[Any], str]) -> Callable[[Any], str]:
    """A `_repr_html_` that is the `repr` if it fails: what users have written may be part of it."""

    @functools.wraps(page)
    def text(value: Any) -> str:
        try:
            return page(value)
        except Exception:
            return html_text(repr(value))

    return text


def html_text(text: str) -> str:
    """A text with its lines and spaces as they are."""
    return f"<pre>{html.escape(text)}</pre>"


def html_curves(
    title: str,
    curves: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    *,
    x_text: Callable[[float], str] | None = None,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """A small picture of curves that share their axes. Points that are not finite are gaps.

    Args:
        title: Stands above it.
        curves: Name, steps and values of each.
        x_text: How a place on the axis below is called; by default it is a step.
        marks: Places on that axis with a line through them, and what each is called.
    """
    points = [
        (x, y) for _, xs, ys in curves for x, y in zip(xs, ys, strict=True) if math.isfinite(x) and math.isfinite(y)
    ]
    if not points:
        return html_text(f"{title}: no finite value")
    (left, right), (low, high) = (min(x for x, _ in points), max(x for x, _ in points)), _limits([y for _, y in points])

    def place(x: float, y: float) -> str:
        across = 0.5 if right == left else (x - left) / (right - left)
        return f"{_LEFT + across * _WIDTH:.1f},{_TOP + (1 - (y - low) / (high - low)) * _HEIGHT:.1f}"

    parts = [_label(_LEFT, _TOP - 8, title, "start", weight="bold")]
    parts += [_label(_LEFT - 6, _TOP + 8, f"{high:.3g}"), _label(_LEFT - 6, _TOP + _HEIGHT, f"{low:.3g}")]
    ends = (f"{left:g}", f"step {right:g}") if x_text is None else (x_text(left), x_text(right))
    parts += [
        _label(_LEFT, _TOP + _HEIGHT + 14, ends[0], "start"),
        _label(_LEFT + _WIDTH, _TOP + _HEIGHT + 14, ends[1]),
    ]
    for x, text in marks:
        at = place(x, high).split(",")[0]
        line = f'd="M{at},{_TOP} v{_HEIGHT}" stroke="currentColor" stroke-opacity="0.6" stroke-dasharray="4 3"'
        parts += [f"<path {line}/>", _label(float(at), _TOP + _HEIGHT + 14, text, "middle")]
    parts.append(
        f'<path d="M{_LEFT},{_TOP} v{_HEIGHT} h{_WIDTH}" fill="none" stroke="currentColor" stroke-opacity="0.35"/>'
    )
    for number, (name, xs, ys) in enumerate(curves):
        color = _COLORS[number % len(_COLORS)]
        for run in _finite_runs(xs, ys):
            drawn = [place(x, y) for x, y in run]
            shape = f'<polyline points="{" ".join(drawn)}" fill="none" stroke="{color}" stroke-width="1.5"/>'
            cx, cy = drawn[0].split(",")
            parts.append(f'<circle cx="{cx}" cy="{cy}" r="2" fill="{color}"/>' if len(drawn) == 1 else shape)
        value = next((y for y in reversed(ys) if math.isfinite(y)), math.nan)
        text = f"{name} {value:.4g}" if len(curves) > 1 else f"{value:.4g}"
        parts.append(_label(_LEFT + _WIDTH + 8, _TOP + 10 + 14 * number, text, "start", color))
    width, height = _LEFT + _WIDTH + 150, _TOP + _HEIGHT + _BOTTOM
    box = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" style="overflow: visible">{"".join(parts)}</svg>'


def _row(tag: str, cells: Iterable[str], sides: Iterable[str]) -> str:
    return f"<tr>{''.join(_cell(tag, cell, side) for cell, side in zip(cells, sides, strict=True))}</tr>"


def _cell(tag: str, text: str, side: str) -> str:
    return f'<{tag} style="text-align: {side}">{html.escape(text).replace(chr(10), "<br>")}</{tag}>'


def _label(x: float, y: float, text: str, anchor: str = "end", color: str = "currentColor", weight: str = "") -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    style = f'font-family="sans-serif" font-size="11" text-anchor="{anchor}" fill="{color}"{bold}'
    return f'<text x="{x}" y="{y}" {style}>{html.escape(text)}</text>'


def _limits(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2)


def _finite_runs(xs: Sequence[float], ys: Sequence[float]) -> list[list[tuple[float, float]]]:
    """The points between gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(xs, ys, strict=True):
        if math.isfinite(x) and math.isfinite(y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]
