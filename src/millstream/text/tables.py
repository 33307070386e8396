"""Tables as text: columns that line up, cells of several lines, and sizes in words."""

import textwrap
from collections.abc import Collection, Iterable, Sequence

WIDTH = 120  # of a table that is printed
_GAP = "  "
_NARROWEST = 16  # a column of texts is not made narrower than this


def text_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Collection[str] = (),
    prose: Collection[str] = (),
    total: Sequence[str] | None = None,
    width: int | None = None,
) -> str:
    """Rows of cells under a header. A column without a text in it is left out.

    Example:
        >>> print(text_table(["leaf", "bytes"], [["x", "8"], ["y", "1,024"]], numbers=["bytes"]))
        leaf  bytes
        ───────────
        x         8
        y     1,024

    Args:
        header: The names of the columns.
        rows: Cells, which may have several lines.
        numbers: Columns of numbers, which end where their column ends; words begin where it begins.
        prose: Columns of sentences, which are the first to give way where there is too little room.
        total: A last row, under a line of its own.
        width: The most characters of a line; longer texts continue in the next one. None for any number.
    """
    body = [*rows] if total is None else [*rows, total]
    used = [i for i in range(len(header)) if any(row[i] for row in body)]
    lines = [[row[i].split("\n") for i in used] for row in (header, *body)]
    widths = [max(len(text) for row in lines for text in row[place]) for place in range(len(used))]
    right = [header[i] in numbers for i in used]
    if width is not None:
        widths = _narrowed(widths, [header[i] in prose for i in used], width)
        widths = _narrowed(widths, [not is_number for is_number in right], width)
    texts = [_joined([_wrapped(cell, w) for cell, w in zip(row, widths, strict=True)], widths, right) for row in lines]
    rule = "─" * (sum(widths) + len(_GAP) * (len(widths) - 1))
    texts.insert(1, rule)
    if total is not None:
        texts.insert(-1, rule)
    return "\n".join(texts)


def name_table(rows: Iterable[tuple[str, str]], *, width: int | None = None) -> str:
    """Names, and a text beside each.

    Example:
        >>> print(name_table([("samples", "10"), ("epoch", "3 batches")]))
        samples  10
        epoch    3 batches

    Args:
        rows: The names and the texts.
        width: The most characters of a line; longer texts continue in the next one. None for any number.
    """
    pairs = list(rows)
    first = max((len(name) for name, _ in pairs), default=0)
    rest = None if width is None else max(_NARROWEST, width - first - len(_GAP))
    columns = [[[name], [text] if rest is None else _wrapped([text], rest)] for name, text in pairs]
    return "\n".join(_joined(cells, [first, 0], [False, False]) for cells in columns)


def size_text(nbytes: int) -> str:
    """Bytes in words, with three digits.

    Example:
        >>> size_text(31_400)
        '31.4 kB'
    """
    size, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


def time_text(seconds: float) -> str:
    """A short time in words, with three digits.

    Example:
        >>> time_text(0.0041)
        '4.1 ms'
    """
    scale, unit = (1.0, "s") if seconds >= 0.9995 else (1e3, "ms") if seconds >= 0.9995e-3 else (1e6, "us")
    return f"{seconds * scale:.3g} {unit}"


def _narrowed(widths: list[int], may_give_way: list[bool], width: int) -> list[int]:
    """The widths of columns that fit into a line, or nearly: the widest of those that may give way do."""
    widths = list(widths)
    while sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        able = [i for i, may in enumerate(may_give_way) if may and widths[i] > _NARROWEST]
        if not able:
            break
        widths[max(able, key=widths.__getitem__)] -= 1
    return widths


def _wrapped(lines: list[str], width: int) -> list[str]:
    """The lines of a cell in the width of its column; what continues is indented."""
    return [
        part
        for line in lines
        for part in (textwrap.wrap(line, width, subsequent_indent="  ") if len(line) > width else [line])
    ]


def _joined(cells: list[list[str]], widths: list[int], right: list[bool]) -> str:
    """One row as text, with as many lines as its longest cell."""
    lines = []
    for number in range(max(map(len, cells))):
        parts = [cell[number] if number < len(cell) else "" for cell in cells]
        aligned = zip(parts, widths, right, strict=True)
        lines.append(_GAP.join(text.rjust(w) if is_number else text.ljust(w) for text, w, is_number in aligned))
    return "\n".join(line.rstrip() for line in lines)
