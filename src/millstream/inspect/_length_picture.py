"""A picture of how long samples are, of what buckets pad, and of how full packed rows are."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from millstream.files.plan_folder import Plans
from millstream.inspect._drawing import Drawing, can_show
from millstream.inspect._orders import planned_pipeline
from millstream.loader.loader import DataLoader
from millstream.pipeline.bucketed import BucketedPipeline
from millstream.pipeline.pipeline import MAX_IN_GRAPH
from millstream.plan.packing import PackedRows, Packing
from millstream.reading.contracts import IndexedSource, PyTree
from millstream.reading.derived_sources import named_parts
from millstream.reading.executor import Executor
from millstream.reading.packed_source import PackedSource
from millstream.reading.view import View, source_name
from millstream.text.errors import whole_number
from millstream.text.html import html_names, html_table
from millstream.text.svg import COLORS, Plot, Svg, text_width
from millstream.text.tables import name_table, text_table
from millstream.views.lengths import Property, lengths_of, require_source
from millstream.views.lengths import buckets as make_buckets

_BINS = 60
_FILL_BINS = 20
_SHOWN_BUCKETS = 16
_TOGETHER = 1 << 20  # rows whose pieces are looked at together
_CLIPPED = 99.5  # the percentile of lengths that a picture reaches to, where few are much longer
_WIDTH, _LEFT, _PLOT = 760, 60, 672
_HEADER = ("bucket", "samples", "share", "padding")
_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=*#%@"


@dataclasses.dataclass(frozen=True)
class BucketPadding:
    """A bucket, and what it pads.

    Example:
        >>> source = ms.DatasetSource([{"ids": list(range(n))} for n in (1, 7, 2, 8, 3, 1)])
        >>> [bucket.padding for bucket in ms.inspect.lengths(source, "ids", buckets=(4, 8)).buckets]
        [0.5625, 0.0625]

    Attributes:
        length: What its samples are padded to.
        samples: How many there are.
        tokens: How much they hold, without padding.
        places: How many places their batches have, rows that are not samples included.
    """

    length: int
    samples: int
    tokens: int
    places: int

    @property
    def padding(self) -> float:
        """The share of places that are padding."""
        return 1 - self.tokens / self.places


class LengthDistribution(Drawing):
    """How long samples are, and what becomes of that in buckets or packed rows. See `lengths`.

    Example:
        >>> source = ms.DatasetSource([{"ids": list(range(n))} for n in (1, 7, 2, 8, 3, 1)])
        >>> found = ms.inspect.lengths(source, "ids", buckets=(4, 8), pack=8)
        >>> found.lengths.tolist(), round(found.padding, 3), found.rows, round(found.fill, 3)
        ([1, 7, 2, 8, 3, 1], 0.312, 3, 0.917)
        >>> found.save("lengths.svg")

    Attributes:
        lengths: The length of every sample; of packed rows, of every segment.
        buckets: A `BucketPadding` for each bucket; none without them.
        fills: The share of each packed row that is filled; None without packing.
        row_length: How many tokens a packed row has room for.
        segments: How many documents, or pieces of them, all packed rows have.
        are_segments: Whether the lengths are those of segments.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        buckets: Sequence[BucketPadding] = (),
        fills: np.ndarray | None = None,
        row_length: int = 0,
        segments: int = 0,
        are_segments: bool = False,
    ) -> None:
        self.lengths = lengths
        self.buckets = list(buckets)
        self.fills = fills
        self.row_length = row_length
        self.segments = segments
        self.are_segments = are_segments

    @property
    def padding(self) -> float:
        """The share of padding: in the buckets, or, without them, if all samples were padded to the longest."""
        if not self.buckets:
            return self._padding_of_all
        return 1 - sum(one.tokens for one in self.buckets) / sum(one.places for one in self.buckets)

    @property
    def _padding_of_all(self) -> float:
        """The share of padding if all samples were padded to the longest."""
        longest = int(self.lengths.max())
        return 1 - float(self.lengths.mean()) / longest if longest else 0.0

    @property
    def rows(self) -> int:
        """How many packed rows there are."""
        return 0 if self.fills is None else len(self.fills)

    @property
    def fill(self) -> float | None:
        """The share of all packed rows that is filled."""
        return None if self.fills is None else float(self.fills.mean())

    def _facts(self) -> list[tuple[str, str]]:
        quantiles = np.percentile(self.lengths, [0, 50, 95, 100]).round().astype(np.int64).tolist()
        names = ("shortest", "median", "95 % are at most", "longest")
        facts = [(self._kind, f"{len(self.lengths):,}")]
        facts += [(name, f"{value:,}") for name, value in zip(names, quantiles, strict=True)]
        facts += [("mean", f"{self.lengths.mean():,.1f}")]
        facts += [] if self.are_segments else [("padded to the longest", f"{100 * self._padding_of_all:.1f} % padding")]
        if self.buckets:
            facts.append(("in buckets", f"{100 * self.padding:.1f} % padding"))
        if self.fill is not None:
            each = self.segments / self.rows
            facts.append(("packed", f"{100 * self.fill:.1f} % full: {self._rows_text()}, {each:.1f} segments in each"))
        return facts

    @property
    def _kind(self) -> str:
        return "segments" if self.are_segments else "samples"

    def _rows_text(self) -> str:
        return f"{self.rows:,} rows of {self.row_length:,}"

    def _rows(self) -> list[tuple[str, ...]]:
        total = max(sum(one.samples for one in self.buckets), 1)
        return [
            (f"{one.length:,}", f"{one.samples:,}", f"{100 * one.samples / total:.1f} %", f"{100 * one.padding:.1f} %")
            for one in self.buckets
        ]

    def _total(self) -> tuple[str, ...]:
        samples = sum(one.samples for one in self.buckets)
        return ("all", f"{samples:,}", "100.0 %", f"{100 * self.padding:.1f} %")

    def _tables(self) -> str:
        table = html_table(_HEADER, self._rows(), numbers=_HEADER, total=self._total()) if self.buckets else ""
        return html_names(self._facts()) + table

    def __repr__(self) -> str:
        letters = _BARS if can_show(_BARS) else _ASCII_BARS
        counts, edges, _ = self._histogram()
        levels = np.ceil(counts * len(letters) / counts.max()).astype(int)
        drawn = "".join(letters[level - 1] if level else " " for level in levels)
        lines = [drawn.rstrip(), f"from 0 to {edges[-1]:,}", "", name_table(self._facts(), width=80)]
        if self.buckets:
            lines += ["", text_table(_HEADER, self._rows(), numbers=_HEADER, total=self._total(), width=80)]
        return "\n".join(lines)

    def _histogram(self) -> tuple[np.ndarray, np.ndarray, int]:
        """How many samples there are of the lengths from each edge to before the next, and how many are longer."""
        longest = int(self.lengths.max())
        end = max(int(np.percentile(self.lengths, _CLIPPED)), *(one.length for one in self.buckets), 1)
        end = max(end, longest) if longest <= 1.25 * end else end
        wide = -(-(end + 1) // _BINS)
        edges = np.arange(0, end + 1 + wide, wide)
        counts, _ = np.histogram(self.lengths, edges)
        return counts, edges, int(np.count_nonzero(self.lengths >= edges[-1]))

    def _draw(self) -> Svg:
        words = "; ".join(f"{name} {text}" for name, text in self._facts())
        svg = Svg(_WIDTH, 0, "How long samples are", f"{words}.")
        y = self._draw_histogram(svg, 48)
        if self.buckets:
            y = self._draw_buckets(svg, y + 62)
        if self.fills is not None:
            y = self._draw_fill(svg, y + (62 if not self.buckets else 34)) + 38
        svg.height = y + (52 if not self.buckets and self.fills is None else 12)
        return svg

    def _draw_histogram(self, svg: Svg, top: float) -> float:
        counts, edges, longer = self._histogram()
        height = 190
        plot = Plot(svg, _LEFT, top, _PLOT, height, (0, int(edges[-1])), (0, int(counts.max())))
        before = 0
        for number, one in enumerate(self.buckets):
            left, right = plot.x(min(before, int(edges[-1]))), plot.x(min(one.length, int(edges[-1])))
            svg.box(
                left, top, right - left, height, "currentColor", fill=0.07 if number % 2 else 0.02, stroke=0, radius=0
            )
            before = one.length
        bars = []
        for count, first, last in zip(counts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            if count:
                left, right = plot.x(first) + 0.5, plot.x(last) - 0.5
                bars.append(f"M{left:.1f},{plot.y(count):.1f}H{right:.1f}V{plot.y(0):.1f}H{left:.1f}z")
        svg.area("".join(bars), COLORS[0], opacity=0.85)
        plot.axes("length" + (f"; {longer:,} are longer" if longer else ""), "")
        svg.text(_LEFT, 18, f"{len(self.lengths):,} {self._kind} by length", size=13, bold=True)
        reached = -1e9
        for one in self.buckets:
            x, text = plot.x(min(one.length, int(edges[-1]))), f"{one.length:,}"
            svg.line(f"M{x:.1f},{top - 4:.1f}V{top + height:.1f}", COLORS[1], width=1.4, dashed=True)
            half = text_width(text, 10) / 2
            if x - half > reached + 4:
                svg.text(x, top - 9, text, size=10, anchor="middle")
                reached = x + half
        return top + height

    def _draw_buckets(self, svg: Svg, top: float) -> float:
        """A bar for each bucket: what is filled, and what is padding."""
        svg.text(_LEFT, top, "Buckets", size=13, bold=True)
        for x, color, fill, name in (
            (_LEFT + 90, COLORS[0], 0.85, "filled"),
            (_LEFT + 150, COLORS[1], 0.25, "padding"),
        ):
            svg.box(x, top - 9, 10, 10, color, fill=fill, stroke=0, radius=2)
            svg.text(x + 15, top, name, size=11)
        shown = [(f"to {one.length:,}", one.samples, one.padding) for one in self.buckets[:_SHOWN_BUCKETS]]
        if len(self.buckets) > _SHOWN_BUCKETS:
            shown.append((f"and {len(self.buckets) - _SHOWN_BUCKETS} more", 0, float("nan")))
        shown.append(("all", sum(one.samples for one in self.buckets), self.padding))
        y = top + 14
        name_width, text_room = 90, 210
        whole = _PLOT - name_width - text_room
        for name, samples, padding in shown:
            svg.text(_LEFT, y + 11, name, size=11, bold=name == "all", width=name_width - 6)
            left = _LEFT + name_width
            if samples:
                svg.box(left, y + 1, whole, 13, COLORS[1], fill=0.25, stroke=0, radius=2)
                svg.box(left, y + 1, whole * (1 - padding), 13, COLORS[0], fill=0.85, stroke=0, radius=2)
                svg.text(
                    left + whole + 10, y + 11, f"{100 * padding:.1f} % padding, {samples:,} samples", size=11, width=200
                )
            y += 19
        return y

    def _draw_fill(self, svg: Svg, top: float) -> float:
        assert self.fills is not None and self.fill is not None
        svg.text(_LEFT, top, f"Packed: {100 * self.fill:.1f} % full, {self._rows_text()}", size=13, bold=True)
        counts, edges = np.histogram(np.minimum(self.fills, 1.0), _FILL_BINS, (0, 1))
        height = 110
        plot = Plot(svg, _LEFT, top + 28, _PLOT, height, (0, 100), (0, int(counts.max())))
        bars = []
        for count, first, last in zip(counts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            if count:
                left, right = plot.x(100 * first) + 0.5, plot.x(100 * last) - 0.5
                bars.append(f"M{left:.1f},{plot.y(count):.1f}H{right:.1f}V{plot.y(0):.1f}H{left:.1f}z")
        svg.area("".join(bars), COLORS[2], opacity=0.85)
        plot.axes("per cent of a row that is filled", "rows")
        return top + 28 + height


def lengths(
    source: IndexedSource | DataLoader[PyTree, PyTree],
    by: Property | None = None,
    *,
    buckets: Sequence[int] | int | None = None,
    pack: int | None = None,
    executor: Executor | None = None,
    plans: Plans = None,
) -> LengthDistribution:
    """A picture of how long samples are: a histogram, with the padding of buckets and the fill of packed rows.

    Of a loader with `ms.views.buckets`, the buckets are its own, and their padding is exact for an epoch; of what
    `ms.views.pack` gave, the segments and rows are those of its plan. Of other sources, buckets and packing are tried
    out. A source that has `lengths`, and an array of them, need no sample to be read.

    Example:
        >>> source = ms.DatasetSource([{"ids": list(range(n))} for n in (1, 7, 2, 8, 3, 1)])
        >>> print(repr(ms.inspect.lengths(source, "ids", buckets=(4, 8))).splitlines()[-1].strip())
        all        6  100.0 %   31.2 %

    Args:
        source: A source, a view, or a loader.
        by: What is long: the name of a field, a function that gives the length of a sample, or an array with a length
            for each. None if the source has one `lengths`, or is packed.
        buckets: Lengths of buckets to try, or how many there are, which are then chosen so that little is padded.
        pack: Tokens of a row to pack samples into.
        executor: Where samples are looked at, if they have to be.
        plans: Where what was found is kept: a folder, or `ms.views.plans(folder)`; by default in memory.
    """
    pipeline = planned_pipeline("lengths", source) if isinstance(source, DataLoader) else None
    samples: Any = source if pipeline is None else _samples_of(pipeline)
    require_source("lengths", samples)
    base = samples.source if isinstance(samples, View) else samples
    packed = base if isinstance(base, PackedSource) else getattr(base, "on_host", None)
    if isinstance(packed, PackedSource) and by is None:
        _refuse_trials("packed rows are there already", buckets, pack)
        return _of_rows(*packed.plan)
    found = lengths_of("lengths", "by", samples, _named(base) if by is None else by, executor, plans)
    if isinstance(pipeline, BucketedPipeline):
        _refuse_trials("this loader has buckets", buckets, pack)
        return LengthDistribution(found, _of_buckets(pipeline, found))
    tried: list[BucketPadding] = []
    if buckets is not None:
        try:
            tried = _of_buckets(make_buckets(samples, found, buckets, batch_size=1, too_long="cut"), found)
        except (TypeError, ValueError) as error:
            raise type(error)(f"lengths(buckets=...): {error}") from None
    if pack is None:
        return LengthDistribution(found, tried)
    size = whole_number("lengths", "pack", pack, least=1, most=MAX_IN_GRAPH)
    rows = _of_rows(PackedRows(Packing(size).table(found)), size)
    return LengthDistribution(found, tried, rows.fills, size, rows.segments)


def _samples_of(pipeline: Any) -> IndexedSource:
    """The samples that a loader reads, before its functions see them."""
    base = pipeline.source if pipeline.host is None else named_parts(pipeline.host.source)[0][1]
    plan = pipeline.plan
    view = plan.selection if isinstance(pipeline, BucketedPipeline) else plan.view
    return base if view is None else View(base, view, "sequential")


def _named(source: Any) -> str:
    """The field whose lengths a source knows."""
    known = getattr(source, "lengths", None)
    if known is None or (isinstance(known, Mapping) and len(known) != 1):
        fields = "" if known is None else f" It has lengths of {', '.join(map(repr, known))}."
        raise TypeError(
            f"lengths needs by, what is long: the name of a field such as by='tokens', a function of a sample, or an "
            f"array. {source_name(source)} does not say it.{fields}"
        )
    return next(iter(known)) if isinstance(known, Mapping) else "lengths"


def _refuse_trials(why: str, buckets: Any, pack: Any) -> None:
    if buckets is not None or pack is not None:
        name = "buckets" if buckets is not None else "pack"
        raise ValueError(f"lengths takes {name}= to try it on a source, and {why}. Pass the source.")


def _of_buckets(pipeline: BucketedPipeline, found: np.ndarray) -> list[BucketPadding]:
    """The buckets that samples of these lengths are in; longer ones are cut."""
    edges = np.array(pipeline.lengths)
    which = np.minimum(np.searchsorted(edges, found), len(edges) - 1)
    tokens = np.bincount(which, np.minimum(found, edges[which]), len(edges)).astype(np.int64)
    return [
        BucketPadding(length, plan.samples, int(held), plan.steps_per_epoch * plan.axes[0] * length)
        for length, plan, held in zip(pipeline.lengths, pipeline.plan.buckets, tokens.tolist(), strict=True)
    ]


def _of_rows(rows: PackedRows, length: int) -> LengthDistribution:
    """The segments of packed rows, and how full those are."""
    counts, fills = [], []
    for start in range(0, len(rows), _TOGETHER):
        pieces = rows.pieces(np.arange(start, min(start + _TOGETHER, len(rows))))
        counts.append(pieces.counts)
        fills.append(np.bincount(pieces.rows, pieces.counts) / length)
    segments = np.concatenate(counts)
    return LengthDistribution(segments, (), np.concatenate(fills), length, len(segments), are_segments=True)
