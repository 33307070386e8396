"""A chart as HTML that needs no script.

Lines and areas are drawn in an SVG that is stretched to its box. Dots and texts are not, so they keep their shape and
size on any screen: they are placed by percentages.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from millstream.report._chart import Axis, Chart, Series, some_of

COLORS, _DASHES = 10, 4  # that the page has for curves
_FEW = 60  # points that are drawn one by one
_CROSS = "\N{MULTIPLICATION SIGN}"


def chart_html(chart: Chart, number: int, runs: Sequence[str]) -> str:
    """The chart; `number` tells it from the others of the page, which is about these runs."""
    heading = f"chart-{number}"
    cut = f'<span class="cut"{"" if chart.is_cut else " hidden"}>start cut off</span>'
    caption = f'<span class="caption">{escape(chart.caption)} {cut}</span>'
    names = "chart" + (" stacked" if chart.stacked else "") + (" epochs" if chart.epochs else "")
    drawn = "".join(_blocks(chart) if chart.stacked else _curves(chart))
    return (
        f'<figure class="{names}" data-chart="{number}" tabindex="0" role="group" aria-labelledby="{heading}">'
        f'<figcaption><h3 id="{heading}">{escape(chart.title)}</h3>{caption}</figcaption>'
        f'<ul class="legend">{"".join(_legend(chart, runs))}</ul><div class="plot">'
        f'<svg class="y-axis" aria-hidden="true">{"".join(_y_texts(chart.y))}</svg><div class="area">'
        f'<svg class="curves" viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(_spoken(chart, runs))}"><g class="grid">{"".join(_grid(chart.y))}</g>'
        f'<g class="lines">{drawn}</g></svg>'
        f'<svg class="marks" aria-hidden="true">{"".join(_marks(chart))}</svg>'
        '<output class="readout" aria-live="polite"></output></div>'
        f'<svg class="x-axis" aria-hidden="true">{"".join(_x_texts(chart))}</svg></div>'
        f'<div class="notes">{"".join(_odd_notes(chart, runs))}</div></figure>'
    )


def curve_class(chart: Chart, series: Series) -> str:
    """The color of a curve: uses of time have others than runs."""
    return f"u{series.color}" if chart.stacked else f"c{series.color % COLORS}"


def line(x: np.ndarray, y: np.ndarray) -> str:
    """A line through points, 0 to 1 from the lower left; where one is not finite there is a gap.

    Example:
        >>> line(np.array([0.0, 0.5, 1.0]), np.array([0.0, 1.0, np.nan]))
        'M0,1000L500,0'
    """
    parts, pen = [], "M"
    for across, down in zip((1000 * x).tolist(), (1000 * (1 - y)).tolist(), strict=True):
        if math.isfinite(down):
            parts.append(f"{pen}{_short(across)},{_short(down)}")
            pen = "L"
        else:
            pen = "M"
    return "".join(parts)


def _colored(chart: Chart) -> Iterator[tuple[str, Series]]:
    for series in chart.series:
        yield f"{curve_class(chart, series)} s{series.dash % _DASHES}", series


def _legend(chart: Chart, runs: Sequence[str]) -> Iterator[str]:
    """Each curve with its newest value; with several runs what is common to theirs, in no color."""
    for label in chart.labels:
        color, series = next(each for each in _colored(chart) if each[1].label == label)
        is_shared = len(runs) > 1 and not chart.of_one_run
        last = "" if is_shared else f" <b>{escape(series.last)}</b>"
        color = f"s{series.dash % _DASHES}" if is_shared else color
        yield f'<li><span class="swatch {color}"></span>{escape(label)}{last}</li>'


def _named(series: Series, runs: Sequence[str]) -> str:
    return series.label if len(runs) == 1 else f"{runs[series.run]}: {series.label}"


def _spoken(chart: Chart, runs: Sequence[str]) -> str:
    """The chart in a sentence."""
    last = ", ".join(f"{_named(series, runs)} {series.last}" for series in chart.series if series.last)
    return f"{chart.title} over {'steps' if chart.over == 'step' else 'time'}. Newest values: {last or 'none'}."


def _y_texts(axis: Axis) -> Iterator[str]:
    for value, text in axis.ticks:
        yield f'<text x="100%" dx="-6" y="{_percent(1 - _place(axis, value))}" dy=".32em">{escape(text)}</text>'


def _x_texts(chart: Chart) -> Iterator[str]:
    for value, text in chart.x.ticks:
        place = _place(chart.x, value)
        anchor = "start" if place < 0.04 else "end" if place > 0.96 else "middle"
        yield f'<text x="{_percent(place)}" y="14" text-anchor="{anchor}">{escape(text)}</text>'
    yield f'<text class="name" x="50%" y="29" text-anchor="middle">{chart.over}</text>'


def _grid(axis: Axis) -> Iterator[str]:
    for value, _ in axis.ticks:
        yield f'<path d="M0,{_short(1000 * (1 - _place(axis, value)))}H1000"/>'


def _curves(chart: Chart) -> Iterator[str]:
    for color, series in _colored(chart):
        points, wide = series.points, " wide" if series.smooth is None else ""
        x = chart.x.place(points.steps)
        if chart.over == "time":
            raw = line(_stairs(chart, points.steps), np.repeat(chart.y.place(points.mean), 2))
        elif points.is_exact:
            raw = line(x, chart.y.place(points.mean))
        else:
            raw = line(np.repeat(x, 2), chart.y.place(np.stack([points.low, points.high], 1).reshape(-1)))
        smooth = "" if series.smooth is None else line(x, chart.y.place(series.smooth))
        yield f'<path class="raw {color}{wide}" d="{raw}"/><path class="smooth {color}" d="{smooth}"/>'


def _blocks(chart: Chart) -> Iterator[str]:
    """Areas, one upon the other."""
    x = _stairs(chart, chart.series[0].points.steps)
    floor = np.zeros(len(x))
    for color, series in _colored(chart):
        top = floor + np.repeat(series.points.mean, 2)
        edge = line(np.concatenate([x, x[::-1]]), chart.y.place(np.concatenate([top, floor[::-1]])))
        floor = top
        yield f'<path class="block {color}" d="{edge}Z"/>'


def _stairs(chart: Chart, ends: np.ndarray) -> np.ndarray:
    """Where windows begin and end, by turns."""
    return np.repeat(chart.x.place(np.concatenate([[chart.x.low], ends])), 2)[1:-1]


def _marks(chart: Chart) -> Iterator[str]:
    for step, text in chart.epochs:
        place = _place(chart.x, step)
        at, anchor = _percent(place), "end" if place > 0.96 else "middle"
        yield f'<line class="epoch" x1="{at}" x2="{at}" y1="0" y2="100%"/>'
        yield f'<text class="epoch" x="{at}" y="-5" text-anchor="{anchor}">{escape(text)}</text>'
    for color, series in _colored(chart):
        points = series.points
        if chart.over == "step" and len(points.steps) <= _FEW:
            for step, value in zip(points.steps.tolist(), points.mean.tolist(), strict=True):
                yield _dot(chart, step, value, f"dot {color}", 2.5)
        if series.best is not None:
            yield _dot(chart, *series.best, f"best {color}", 5)
        for step in some_of(points.odd).tolist():
            at = _percent(_place(chart.x, step))
            yield f'<text class="odd {color}" x="{at}" y="99%" text-anchor="middle">{_CROSS}</text>'


def _dot(chart: Chart, step: float, value: float, names: str, radius: float) -> str:
    height = _place(chart.y, value)
    if not 0 <= height <= 1:  # nor if it is not finite
        return ""
    place = f'cx="{_percent(_place(chart.x, step))}" cy="{_percent(1 - height)}"'
    return f'<circle class="{names}" {place} r="{radius}"/>'


def _odd_notes(chart: Chart, runs: Sequence[str]) -> Iterator[str]:
    for series in chart.series:
        odd = series.points.odd
        if len(odd):
            note = f"{_named(series, runs)}: {len(odd):,} not finite, first at step {odd[0]:,}"
            yield f'<p class="alarm">{escape(note)}</p>'


def _place(axis: Axis, value: float) -> float:
    return float(axis.place(np.array(value)))


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _percent(place: float) -> str:
    return f"{100 * place:.2f}%"
