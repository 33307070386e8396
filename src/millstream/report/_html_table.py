"""Tables on the page."""

from collections.abc import Iterable, Sequence
from html import escape


class Strong(str):
    """A text that stands out in its table."""


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[str] = ()) -> str:
    """A table in a box that scrolls by itself, if it is wider than the page; empty columns are left out."""
    body = [*rows]
    used = [i for i in range(len(header)) if any(row[i] for row in body)]
    names = ['class="number"' if header[i] in numbers else "" for i in range(len(header))]
    top = "".join(f"<th scope=col {names[i]}>{escape(header[i])}</th>" for i in used)
    lines = "".join("<tr>" + "".join(f"<td {names[i]}>{_cell(row[i])}</td>" for i in used) + "</tr>" for row in body)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="table">'
        f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _cell(text: str) -> str:
    shown = escape(text).replace("\n", "<br>")
    return f"<b>{shown}</b>" if isinstance(text, Strong) else shown
