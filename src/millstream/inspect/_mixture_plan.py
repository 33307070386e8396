"""A picture of a mixture's plan: the share of every source over the steps, its passes, and single batches."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from millstream.inspect._drawing import Drawing, can_show
from millstream.inspect._orders import planned_pipeline
from millstream.loader.loader import DataLoader
from millstream.plan.mixture import Mixed
from millstream.plan.ordering import as_shuffle
from millstream.plan.plan import Plan
from millstream.reading.contracts import PyTree
from millstream.text.errors import whole_number
from millstream.text.html import html_table
from millstream.text.svg import COLORS, Plot, Svg, joined_points
from millstream.text.tables import text_table

_BINS = 200  # of steps
_BATCHES = 48  # that are shown one by one
_NAMED = 9  # sources beside a plot
_STARTS = 1000  # passes of a source whose first step is found
_SHOWN_STARTS = 5
_WIDTH, _LEFT, _PLOT = 760, 56, 500
_HEADER = ("source", "samples", "share", "from", "to", "drawn", "passes", "starts over in step")
_NUMBERS = _HEADER[1:-1]
_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=*#%@"
_TEXT_BINS = 24


class MixturePlan(Drawing):
    """What a mixture draws from its sources over some steps. See `mixture`.

    Example:
        >>> web, code = (ms.ArraySampleSource({"x": np.full(n, n)}) for n in (900, 100))
        >>> view = ms.views.mix({"web": web, "code": code}, {"web": 3, "code": 1})
        >>> plan = ms.inspect.mixture(ms.DataLoader([view, ms.BatchTransform(100)]))
        >>> plan.names, plan.drawn[-1].tolist(), plan.starts["code"]
        (('web', 'code'), [750, 250], [4, 8])
        >>> plan.save("mixture.svg")

    Attributes:
        names: The names of the sources.
        lengths: How many samples each has.
        steps: Steps at which the samples so far were counted: all of them, or 200 at equal distances.
        drawn: How many samples of each source come before each of these steps; those that `drop_last` leaves out at the
            end of an epoch are among them.
        batches: How many samples of each source the first batches have, a row for each.
        starts: The steps in which each source starts over, by name: those of its second, third, ... pass, at most
            1,000.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        lengths: np.ndarray,
        steps: np.ndarray,
        drawn: np.ndarray,
        batches: np.ndarray,
        starts: dict[str, list[int]],
    ) -> None:
        self.names = names
        self.lengths = lengths
        self.steps = steps
        self.drawn = drawn
        self.batches = batches
        self.starts = starts

    @property
    def shares(self) -> np.ndarray:
        """The share of each source from each of the steps to the next."""
        taken = np.diff(self.drawn, axis=0)
        return taken / np.maximum(taken.sum(axis=1, keepdims=True), 1)

    @property
    def passes(self) -> np.ndarray:
        """How often each source was passed through before each of the steps."""
        return self.drawn / self.lengths

    def _rows(self) -> list[tuple[str, ...]]:
        shares, drawn = self.shares, self.drawn[-1] - self.drawn[0]
        whole = drawn / max(int(drawn.sum()), 1)
        return [
            (
                name,
                f"{int(self.lengths[at]):,}",
                *(f"{100 * share:.1f} %" for share in (whole[at], shares[0, at], shares[-1, at])),
                f"{int(drawn[at]):,}",
                f"{self.passes[-1, at]:.2f}",
                _steps_text(self.starts[name], _restarts(int(self.drawn[-1, at]), int(self.lengths[at]))),
            )
            for at, name in enumerate(self.names)
        ]

    def _tables(self) -> str:
        return html_table(_HEADER, self._rows(), numbers=_NUMBERS)

    def __repr__(self) -> str:
        letters = _BARS if can_show(_BARS) else _ASCII_BARS
        which = np.linspace(0, len(self.shares) - 1, min(_TEXT_BINS, len(self.shares))).round().astype(int)
        wide = min(max(map(len, self.names)), 24)
        lines = [f"Shares from step {self.steps[0]:,} to {self.steps[-1]:,}"]
        for at, name in enumerate(self.names):
            levels = np.ceil(self.shares[which, at] * len(letters)).astype(int)
            drawn = "".join(letters[level - 1] if level else " " for level in levels)
            lines.append(f"{name[:wide].ljust(wide)}  {drawn}  {100 * self.shares[-1, at]:.1f} %")
        table = text_table(_HEADER, self._rows(), numbers=_NUMBERS, prose=("source", _HEADER[-1]), width=80)
        return "\n".join([*lines, "", table])

    def _draw(self) -> Svg:
        each = ", ".join(f"{row[0]} {row[2]}" for row in self._rows()[:_NAMED])
        svg = Svg(_WIDTH, 0, "The plan of a mixture", f"The shares of the sources over the steps: {each}.")
        y = self._draw_shares(svg, 32)
        y = self._draw_passes(svg, y + 84)
        svg.height = self._draw_batches(svg, y + 84) + 44
        return svg

    def _draw_shares(self, svg: Svg, top: float) -> float:
        height, first, last = 150, int(self.steps[0]), int(self.steps[-1])
        plot = Plot(svg, _LEFT, top, _PLOT, height, (first, last), (0, 1))
        shares = self.shares
        edges, floor = np.repeat(self.steps, 2)[1:-1], np.zeros(2 * len(shares))
        for at in range(len(self.names)):
            ceiling = floor + np.repeat(shares[:, at], 2)
            up = [plot.point(x, y) for x, y in zip(edges.tolist(), ceiling.tolist(), strict=True)]
            down = [plot.point(x, y) for x, y in zip(edges[::-1].tolist(), floor[::-1].tolist(), strict=True)]
            svg.area(f"{joined_points([*up, *down])}z", _color(at), opacity=_opacity(at))
            floor = ceiling
        plot.axes("step", percent=True)
        _heading(svg, top, "Share of each source")
        self._legend(svg, top, [f"{100 * share:.1f} % at the end" for share in shares[-1].tolist()])
        return top + height

    def _draw_passes(self, svg: Svg, top: float) -> float:
        height, first, last = 150, int(self.steps[0]), int(self.steps[-1])
        passes = self.passes
        plot = Plot(svg, _LEFT, top, _PLOT, height, (first, last), (0, max(float(passes.max()), 1.0)))
        plot.axes("step", whole=False)
        _heading(svg, top, "Passes over each source; a dot where it starts over")
        for at, name in enumerate(self.names):
            line = zip(self.steps.tolist(), passes[:, at].tolist(), strict=True)
            svg.line(joined_points([plot.point(x, y) for x, y in line]), _color(at), width=2, opacity=_opacity(at))
            dots = [
                f"M{plot.x(step) - 3:.1f},{plot.y(number + 1):.1f}a3,3 0 1,0 6,0a3,3 0 1,0 -6,0z"
                for number, step in enumerate(self.starts[name][:60])
            ]
            if dots:
                svg.area("".join(dots), _color(at), opacity=_opacity(at))
        self._legend(svg, top, [f"{count:.2f} passes" for count in passes[-1].tolist()])
        return top + height

    def _draw_batches(self, svg: Svg, top: float) -> float:
        height, count = 120, len(self.batches)
        most = int(self.batches.sum(axis=1).max())
        plot = Plot(svg, _LEFT, top, _PLOT, height, (0, count), (0, most))
        room = 1 if count > 24 else 2
        for step, batch in enumerate(self.batches.tolist()):
            floor = 0
            for at, samples in enumerate(batch):
                left, right, high = plot.x(step) + room, plot.x(step + 1), plot.y(floor + samples)
                floor += samples
                if samples:
                    low = plot.y(floor - samples)
                    path = f"M{left:.1f},{high:.1f}H{right:.1f}V{low:.1f}H{left:.1f}z"
                    svg.area(path, _color(at), opacity=_opacity(at))
        plot.axes("step")
        _heading(svg, top, f"Samples of the first {count:,} batches")
        self._legend(svg, top, [f"{count} in step 0" for count in self.batches[0].tolist()])
        return top + height

    def _legend(self, svg: Svg, top: float, texts: list[str]) -> None:
        left, room = _LEFT + _PLOT + 18, _WIDTH - _LEFT - _PLOT - 18 - 18
        for at, (name, text) in enumerate(zip(self.names[:_NAMED], texts, strict=False)):
            y = top + 10 + 16 * at
            svg.box(left, y - 9, 10, 10, _color(at), fill=_opacity(at), stroke=0, radius=2)
            svg.text(left + 16, y, f"{name} {text}", size=11, width=room)
        if len(self.names) > _NAMED:
            svg.text(left + 16, top + 10 + 16 * _NAMED, f"and {len(self.names) - _NAMED} more", size=11, faint=True)


def mixture(loader: DataLoader[PyTree, PyTree], *, steps: int | None = None) -> MixturePlan:
    """A picture of a mixture's plan: the share of every source, how often it starts over, and single batches.

    No sample is read: the plan is asked, which is the same for every key. Ramps, schedules and `ms.views.reweight`
    show as they are.

    Example:
        >>> web, code = (ms.ArraySampleSource({"x": np.full(n, n)}) for n in (900, 100))
        >>> view = ms.views.mix({"web": web, "code": code}, {"web": 3, "code": 1})
        >>> plan = ms.inspect.mixture(ms.DataLoader([view, ms.BatchTransform(100)]), steps=5)
        >>> plan.batches.tolist()
        [[75, 25], [75, 25], [75, 25], [75, 25], [75, 25]]

    Args:
        loader: A loader over what `ms.views.mix` gave, which stays as it is.
        steps: How many steps of the run are shown; None for an epoch, and past every change of weights.
    """
    plan = planned_pipeline("mixture", loader).plan
    limit = plan.step_limit
    view = plan.view if isinstance(plan, Plan) else plan.selection
    function = None if view is None else view.functions[0]
    if (
        view is None
        or not isinstance(plan, Plan)
        or not isinstance(function, Mixed)
        or plan.shuffle != as_shuffle("mixture", "sequential")
    ):
        raise TypeError(
            "mixture needs a loader over what ms.views.mix gave. This one has "
            + ("no mixture" if view is None else view.words)
            + ". Mix last, after views of single sources."
        )
    if steps is None:
        changes = [change.after for change in function.changes]
        last = int(_first_step(lambda at: _samples_before(plan, at), np.array([max(changes, default=0)]) - 1, limit)[0])
        shown_steps = min(limit, max(plan.steps_per_epoch, last + last // 4))
    else:
        shown_steps = whole_number("mixture", "steps", steps, least=1, most=limit)
    table: Any = view.tables[0]

    def drawn_before(at: np.ndarray) -> np.ndarray:
        return function.counts(table, _samples_before(plan, at))

    shown = np.unique(np.linspace(0, shown_steps, min(shown_steps, _BINS) + 1).round().astype(np.int64))
    firsts = _samples_before(plan, np.arange(min(shown_steps, _BATCHES)))
    sizes = plan.real_samples_of(np.zeros(2, np.uint32), range(len(firsts)))
    batches = function.counts(table, firsts + sizes) - function.counts(table, firsts)
    drawn, starts = drawn_before(shown), {}
    for at, part in enumerate(function.parts):
        passed = part.length * np.arange(1, min(_restarts(int(drawn[-1, at]), part.length), _STARTS) + 1)
        found = _first_step(lambda steps, at=at: drawn_before(steps)[:, at], passed, shown_steps)
        starts[part.name] = (found - 1).tolist()
    lengths = np.array([part.length for part in function.parts])
    return MixturePlan(tuple(part.name for part in function.parts), lengths, shown, drawn, batches, starts)


def _samples_before(plan: Plan, steps: np.ndarray) -> np.ndarray:
    """How many samples of the run the steps before each step have, or have left out at the end of an epoch."""
    size = math.prod(plan.axes)
    if any(batching.ending == "wrap" for batching in plan.batchings):
        return steps * size
    epochs, elements = np.divmod(steps, plan.steps_per_epoch)
    return epochs * plan.samples + np.minimum(elements * size, plan.samples)


def _restarts(drawn: int, length: int) -> int:
    """How often a source starts over within that many samples."""
    return max(drawn - 1, 0) // length


def _first_step(count: Callable[[np.ndarray], np.ndarray], above: np.ndarray, last: int) -> np.ndarray:
    """The first step at which a number that rises with the steps is above each of some values; `last` if none is."""
    low, high = np.zeros(len(above), np.int64), np.full(len(above), last)
    while (low < high).any():
        middle = (low + high) // 2
        is_above = count(middle) > above
        low, high = np.where(is_above, low, np.minimum(middle + 1, high)), np.where(is_above, middle, high)
    return low


def _steps_text(steps: list[int], count: int) -> str:
    text = ", ".join(f"{step:,}" for step in steps[:_SHOWN_STARTS])
    return text + (f" and {count - _SHOWN_STARTS:,} more" if count > _SHOWN_STARTS else "")


def _heading(svg: Svg, top: float, text: str) -> None:
    svg.text(_LEFT, top - 13, text, size=13, bold=True, width=_PLOT)


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _opacity(number: int) -> float:
    """A weaker shade for every turn through the colors."""
    return 0.85 / (1 + number // len(COLORS))
