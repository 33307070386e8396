"""A history in a notebook: one small picture per metric."""

import itertools
from typing import TYPE_CHECKING

from millstream.loops.curves import Curve, panels
from millstream.text.html import html_curves, html_text

if TYPE_CHECKING:
    from millstream.loops._history import History

_PICTURES = 12
_BINS = 150  # of a curve; a picture is 300 dots wide


def history_html(history: "History") -> str:
    """The history in words, and the curves of its numbers."""
    try:
        curves = panels(history, None, None)
    except ValueError:  # there are no numbers
        curves = {}
    words = [repr(history), *([f"The first {_PICTURES} of {len(curves)}:"] if len(curves) > _PICTURES else [])]
    pictures = []
    for subject, members in itertools.islice(curves.items(), _PICTURES):
        pictures.append(f"<div>{html_curves(subject, list(map(_points, members)))}</div>")
    return html_text("\n".join(words)) + "".join(pictures)


def _points(curve: Curve) -> tuple[str, list[float], list[float]]:
    """Its name, steps and values; the last value is always one of them."""
    steps, values = (axis.tolist() for axis in curve.thinned(_BINS))
    if len(steps) < len(curve.steps):
        steps, values = [*steps, int(curve.steps[-1])], [*values, float(curve.values[-1])]
    return curve.label, steps, values
