"""Results as Markdown that reads well in a terminal, too."""

import statistics
from collections.abc import Iterable, Sequence

from _result import Bar, Contender, Table


def number(value: float) -> str:
    """Three digits that count, and no more than a table needs."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 else f"{value:.2g}"


def times(value: float | None) -> str:
    return "" if value is None else f"{number(value)}x"


def grid(header: Sequence[str], rows: Iterable[Sequence[str]], sides: str = "") -> str:
    """A table with cells of one width per column.

    Args:
        header: The first line.
        rows: The others.
        sides: "l" or "r" for every column; numbers stand on the right of all but the first unless this says otherwise.
    """
    lines, sides = [list(header), *map(list, rows)], sides or "l" + "r" * (len(header) - 1)
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(header))]
    marks = ["-" * width if side == "l" else "-" * (width - 1) + ":" for width, side in zip(widths, sides, strict=True)]

    def drawn(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if side == "l" else cell.rjust(width)
            for cell, width, side in zip(cells, widths, sides, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    return "\n".join(map(drawn, [lines[0], marks, *lines[1:]]))


def markdown(table: Table) -> str:
    """One table with its bars, and who is missing from it."""
    parts = [f"**{table.title}**", _contenders(table)]
    if table.bars:
        parts.append(bars(table.bars))
    notes = [f"Skipped: {name} ({reason})." for name, reason in table.skipped.items()]
    notes += [
        f"Compiled while it was measured: {one.name} ({one.compiled})." for one in table.contenders if one.compiled
    ]
    return "\n\n".join(parts + ["  \n".join(notes)] * bool(notes))


def _contenders(table: Table) -> str:
    floors = any(one.floor for one in table.contenders)
    cpu = any(one.cpu for one in table.contenders)
    header = ["", "version", table.unit, "least", "most", *["CPU"] * cpu]
    header += ["over its bare step", "CPU over it"] if floors else []
    header += ["of ours", *["CPU of ours"] * cpu]
    return grid(header, (_row(table, one, floors, cpu) for one in table.contenders))


def _row(table: Table, one: Contender, floors: bool, cpu: bool) -> list[str]:
    values, busy = table.steps_of(one.name), table.steps_of(one.name, cpu=True)
    cells = [f"**{one.name}**" if one.name == table.ours else one.name, one.version]
    cells += map(number, (statistics.median(values), min(values), max(values)))
    cells += [number(statistics.median(busy)) if busy else ""] * cpu
    if floors:
        added = (table.added(one.name), table.added(one.name, cpu=True))
        cells += ["" if value is None else number(value) for value in added]
    cells.append(times(table.times_ours(one.name)))
    return cells + [times(table.times_ours(one.name, cpu=True))] * cpu


def bars(all_bars: Iterable[Bar]) -> str:
    """Figures beside their bars."""
    rows = [(bar.text, *found_and_asked(bar), "met" if bar.met else "**missed**") for bar in all_bars]
    return grid(("target", "found", "asked", ""), rows)


def found_and_asked(bar: Bar) -> tuple[str, str]:
    limit = f"at most {bar.at_most:g}" if bar.at_least is None else f"at least {bar.at_least:g}"
    return number(bar.value), limit
