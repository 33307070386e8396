"""Charts of the headline's cases, without a ground of their own, in colors that show on light and on dark pages."""

import pathlib
import statistics
from typing import Any

import _headline
import _tables
from _result import Result, Table

OURS, OTHERS, INK, LOST = "#2f81f7", "#9198a1", "#7d8590", "#d29922"
OVERVIEW, FEW, GROWTH = "headline", "readme", "growth"


def charted(results: dict[str, Result]) -> list[str]:
    """The charts that these results have, by name."""
    found = [name for name in _headline.CASES if name in results and results[name].tables]
    few = [FEW] if set(found) & set(_headline.FEW) else []
    grown = [GROWTH] if GROWTH in results and results[GROWTH].tables else []
    return [*([OVERVIEW] if found else []), *few, *grown, *found]


def draw(results: dict[str, Result], folder: pathlib.Path) -> None:
    """Write all charts, and take away those of other results."""
    folder.mkdir(exist_ok=True)
    names = charted(results)
    for path in folder.glob("*.png"):
        if path.stem not in names:
            path.unlink()
    for name in names:
        whole = {OVERVIEW: overview, FEW: few, GROWTH: growth}.get(name)
        figure = whole(results) if whole is not None else contenders(results[name], results[name].tables[0])
        figure.savefig(
            folder / f"{name}.png",
            dpi=75 if name == GROWTH else 100,
            transparent=True,
            bbox_inches="tight",
            metadata={"Software": None},
        )


def overview(results: dict[str, Result]) -> Any:
    """Every peer of every case, by how many times our time it takes."""
    cases = [results[name] for name in reversed(_headline.CASES) if name in results and results[name].tables]
    figure, axes = _axes(9.0, 0.42 * len(cases) + 1.2)
    for line, result in enumerate(cases):
        found = _headline.peers(result.tables[0])
        axes.plot([one.times_ours for one in found], [line] * len(found), "o", color=OTHERS, markersize=6)
        if found:
            best = found[0]
            place: Any = {"textcoords": "offset points", "ha": "right" if best.times_ours < 1 else "left"}
            axes.annotate(best.name, (best.times_ours, line), (0, 6), fontsize=7, color=INK, **place)
    axes.axvline(1, color=OURS, linewidth=2)
    axes.set_xscale("log")
    axes.set_yticks(range(len(cases)), [_cut(result.title) for result in cases])
    axes.set_ylim(-0.7, len(cases) - 0.3)
    axes.set_xlabel("time of other libraries, as a multiple of ours (the line); the fastest is named")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    return figure


def few(results: dict[str, Result]) -> Any:
    """The cases of the README: a bar for each peer, from our time to its own."""
    cases = [results[name] for name in _headline.FEW if name in results and results[name].tables]
    groups = [(result, _headline.peers(result.tables[0])) for result in cases]
    figure, axes = _axes(8.6, sum(0.25 * len(found) + 0.42 for _, found in groups) + 0.7)
    place: Any = {"textcoords": "offset points", "va": "center", "fontsize": 8, "color": INK}
    line = 0.0
    for result, found in groups:
        axes.annotate(result.title.rstrip("."), (1, -line), (5, 0), weight="bold", **place)
        for peer in found:
            line += 1
            width, color = peer.times_ours - 1, OTHERS if peer.times_ours >= 1 else LOST
            axes.barh(-line, width, left=1, color=color, height=0.72)
            text = f"{peer.name}: {_tables.times(peer.times_ours)}"
            axes.annotate(text, (max(1, peer.times_ours), -line), (5, 0), **place)
        line += 1.7
    axes.axvline(1, color=OURS, linewidth=2)
    axes.set_xscale("log")
    axes.set_xlim(0.75, 75)
    axes.set_ylim(-line + 0.9, 0.7)
    axes.set_yticks([])
    axes.set_xlabel(
        "time of other libraries, as a multiple of Millstream's (the line); to the left of it they are faster"
    )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.xaxis.set_minor_formatter(lambda *_: "")
    return figure


def contenders(result: Result, table: Table) -> Any:
    """Medians, with a line from the least to the most; where steps have floors, what the loops add to them."""
    values = {one.name: _headline.value_of(table, one.name) for one in reversed(table.contenders)}
    shown = {name: value for name, value in values.items() if value is not None}
    figure, axes = _axes(7.0, 0.36 * len(shown) + 1.1)
    ours = [name for name in shown if _is_ours(table, name)]
    colors = [OURS if name in ours else OTHERS for name in shown]
    axes.barh(range(len(shown)), list(shown.values()), color=colors, height=0.62)
    for line, (name, value) in enumerate(shown.items()):
        spread = table.steps_of(name) if value == table.median(name) else [value]
        axes.plot([min(spread), max(spread)], [line, line], color=INK, linewidth=1)
        place = {"textcoords": "offset points", "va": "center", "fontsize": 8, "color": INK}
        axes.annotate(_tables.number(value), (max(spread), line), (5, 0), **place)
    axes.margins(x=0.12)
    axes.set_yticks(range(len(shown)), list(shown))
    axes.set_xlabel(f"{table.unit}; less is better")
    axes.set_title(_cut(result.title, 80), color=INK, fontsize=10, loc="left")
    return figure


def growth(results: dict[str, Result]) -> Any:
    """What each cost is at each size, from the least to the most, beside a cost that grows as much as the size."""
    from matplotlib.figure import Figure

    tables, columns = results[GROWTH].tables, 3
    rows = -(-len(tables) // columns)
    figure = Figure((8.0, 1.8 * rows), layout="constrained")
    for place, table in enumerate(tables, 1):
        axes = figure.add_subplot(rows, columns, place)
        sizes = [int(one.name.replace(",", "")) for one in table.contenders]
        costs = [table.steps_of(one.name) for one in table.contenders]
        medians = [statistics.median(values) for values in costs]
        axes.plot(sizes, [medians[0] * size / sizes[0] for size in sizes], ":", color=OTHERS, linewidth=1)
        axes.fill_between(sizes, [*map(min, costs)], [*map(max, costs)], color=OURS, alpha=0.25, linewidth=0)
        axes.plot(sizes, medians, "o-", color=OURS, markersize=4)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylim(0.5 * min(map(min, costs)), 3 * max(map(max, costs)))
        axes.set_title(table.title, color=INK, fontsize=8, loc="left")
        axes.set_ylabel(table.unit)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.set_yticks([])
        for size, median in zip(sizes, medians, strict=True):
            text = _tables.number(median)
            axes.annotate(text, (size, median), (0, 6), textcoords="offset points", ha="center", fontsize=7, color=INK)
        _plain(axes)
    return figure


def _is_ours(table: Table, name: str) -> bool:
    found = table.find(name)
    return found is not None and found.package == "millstream"


def _cut(title: str, width: int = 64) -> str:
    title = title.rstrip(".")
    return title if len(title) <= width else title[: title.rfind(" ", 0, width)].rstrip(",:") + " …"


def _axes(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure((width, height))
    axes = figure.subplots()
    _plain(axes)
    return figure, axes


def _plain(axes: Any) -> None:
    """No more ink than the figures need."""
    axes.tick_params(which="both", colors=INK, labelsize=8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(INK)
        axis.label.set_size(8)
    axes.grid(axis="x", color=OTHERS, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(OTHERS)
