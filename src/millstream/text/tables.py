"""Tables as text: columns that line up, cells of several lines, and numbers in words."""

import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence

WIDTH = 120  # of a table in a file or a pipe, and the most in a terminal
_GAP = "  "
_NARROWEST = 16  # a column of sentences is not made narrower than this
_LAST = 28  # nor the last one than this: it stands under its row before that


def line_width() -> int:
    """The characters of a line of a table: those of the terminal, if standard output is one, up to `WIDTH`."""
    try:
        is_terminal = sys.stdout.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        is_terminal = False
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 0)).columns) if is_terminal else WIDTH


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

    Where columns are too wide to stand beside each other, the last one goes under its row if it is prose. Where that
    is not enough, every cell gets a line of its own, with the name of its column.

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
    table = [[row[i].split("\n") for i in used] for row in (header, *body)]
    names = [header[i] for i in used]
    right, is_prose = [name in numbers for name in names], [name in prose for name in names]
    below: list[list[str]] = [[]] * len(table)
    widths = _fitted(table, right, is_prose, width)
    if widths is None and is_prose[-1]:
        below = [[], *(row[-1] for row in table[1:])]
        table, right, is_prose = [row[:-1] for row in table], right[:-1], is_prose[:-1]
        widths = _fitted(table, right, is_prose, width)
    if widths is None:
        assert width is not None
        texts, rule = [names[0], *(_stacked(names, row, used, width) for row in body)], "─" * width
    else:
        texts = [_row_text(row, under, widths, right, width) for row, under in zip(table, below, strict=True)]
        rule = "─" * (_line(widths) if width is None or not any(map(any, below)) else width)
    texts.insert(1, rule)
    if total is not None:
        texts.insert(-1, rule)
    return "\n".join(texts)


def name_table(rows: Iterable[tuple[str, str]], *, width: int | None = None) -> str:
    """Names, and a text beside each; under a name that leaves too little room.

    Example:
        >>> print(name_table([("samples", "10"), ("epoch", "3 batches")]))
        samples  10
        epoch    3 batches

    Args:
        rows: The names and the texts, which may have several lines.
        width: The most characters of a line; longer texts continue in the next one. None for any number.
    """
    pairs = [(name, text.split("\n")) for name, text in rows]
    widest = max((len(line) for _, text in pairs for line in text), default=0)
    room = max(len(_GAP), 0 if width is None else width - len(_GAP) - min(widest, _NARROWEST))
    first = max((len(name) for name, _ in pairs if width is None or len(name) <= room), default=len(_GAP))
    lines = []
    for name, text in pairs:
        cells = text if width is None else _wrapped(text, width - first - len(_GAP))
        if len(name) > first:
            lines += _wrapped([name], width or len(name))
            name = ""
        lines.append(_joined([[name], cells], [first, 0], [False, False]))
    return "\n".join(lines)


def size_text(nbytes: int) -> str:
    """Bytes in words, with three digits.

    Example:
        >>> size_text(31_400)
        '31.4 kB'
    """
    size, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}" if size < 999.5 else f"{size:,.0f} {units[0]}"


def count_text(number: int) -> str:
    """A number of things in words, with three digits if it is large.

    Example:
        >>> count_text(9_999), count_text(1_254_000)
        ('9,999', '1.25M')
    """
    if number < 10_000:
        return f"{number:,}"
    for scale, unit in ((1e3, "k"), (1e6, "M"), (1e9, "B")):
        if number < 999.5 * scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number / 1e12:,.3g}T"


def time_text(seconds: float) -> str:
    """A short time in words, with three digits.

    Example:
        >>> time_text(0.0041), time_text(4100)
        ('4.1 ms', '4,100 s')
    """
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    scale, unit = (1.0, "s") if seconds >= 0.9995 else (1e3, "ms") if seconds >= 0.9995e-3 else (1e6, "us")
    return f"{seconds * scale:.3g} {unit}"


def times_text(factor: float) -> str:
    """How many times as much, with two or three digits.

    Example:
        >>> times_text(1.2345), times_text(1638.4)
        ('1.23x', '1,600x')
    """
    if factor >= 999.5:
        digits = len(f"{factor:.0f}") - 2
        return f"{round(factor, -digits):,.0f}x"
    return f"{factor:.3g}x"


def _line(widths: list[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _fitted(
    table: list[list[list[str]]], right: list[bool], is_prose: list[bool], width: int | None
) -> list[int] | None:
    """The widths of columns that fit into a line: prose gives way first, then other texts. None if they do not."""
    columns = [[cell for row in table for cell in row[place]] for place in range(len(right))]
    widths = [max(map(len, column)) for column in columns]
    if width is None:
        return widths
    least = [
        own if is_number else max(_longest_word(column), min(own, _NARROWEST) if prose else 0)
        for own, column, is_number, prose in zip(widths, columns, right, is_prose, strict=True)
    ]
    if is_prose[-1]:
        least[-1] = max(least[-1], min(widths[-1], _LAST))
    for able in ([i for i, prose in enumerate(is_prose) if prose], range(len(widths))):
        while _line(widths) > width and (wide := [i for i in able if widths[i] > least[i]]):
            widths[max(wide, key=widths.__getitem__)] -= 1
    return widths if _line(widths) <= width else None


def _longest_word(lines: list[str]) -> int:
    """What a column needs so that no word is broken; words that continue a line are indented."""
    words = ((place, word) for line in lines for place, word in enumerate(line.split()))
    return max((len(word) + (len(_GAP) if place else 0) for place, word in words), default=0)


def _row_text(row: list[list[str]], under: list[str], widths: list[int], right: list[bool], width: int | None) -> str:
    """One row, and what stands under it."""
    text = _joined([_wrapped(cell, own) for cell, own in zip(row, widths, strict=True)], widths, right)
    return "\n".join([text, *(_indented(under, width) if width is not None and any(under) else [])])


def _stacked(names: list[str], row: Sequence[str], used: list[int], width: int) -> str:
    """One row as a name and, under it, the other cells that are not empty, each beside the name of its column."""
    first, *others = zip(names, (row[i] for i in used), strict=True)
    pairs = [(name, text) for name, text in others if text]
    cells = name_table(pairs, width=width - len(_GAP)).splitlines() if pairs else []
    return "\n".join([*_wrapped([first[1]], width), *(_GAP + line for line in cells)])


def _indented(lines: list[str], width: int) -> list[str]:
    return [_GAP + line for line in _wrapped(lines, width - len(_GAP))]


def _wrapped(lines: list[str], width: int) -> list[str]:
    """The lines of a cell in the width of its column; what continues is indented."""
    return [
        part
        for line in lines
        for part in (textwrap.wrap(line, max(width, 3), subsequent_indent=_GAP) if len(line) > width else [line])
    ]


def _joined(cells: list[list[str]], widths: list[int], right: list[bool]) -> str:
    """One row as text, with as many lines as its longest cell."""
    lines = []
    for number in range(max(map(len, cells))):
        parts = [cell[number] if number < len(cell) else "" for cell in cells]
        aligned = zip(parts, widths, right, strict=True)
        lines.append(_GAP.join(text.rjust(w) if is_number else text.ljust(w) for text, w, is_number in aligned))
    return "\n".join(line.rstrip() for line in lines)
