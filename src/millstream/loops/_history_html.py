"""A history in a notebook: one small picture per metric."""

import itertools
from typing import TYPE_CHECKING

from millstream.loops.curves import panels
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
        points = [(curve.label, *(axis.tolist() for axis in curve.thinned(_BINS))) for curve in members]
        pictures.append(f"<div>{html_curves(subject, points)}</div>")
    return html_text("\n".join(words)) + "".join(pictures)
