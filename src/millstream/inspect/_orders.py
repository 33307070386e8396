"""Pictures of the order in which an epoch goes through the samples, beside other orders of the same samples."""

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from millstream.inspect._drawing import Drawing, can_show
from millstream.inspect._explain import require_loader
from millstream.loader.loader import DataLoader
from millstream.pipeline.bucketed import BucketedPipeline
from millstream.pipeline.compose import IndexedPipeline
from millstream.pipeline.phased import PhasedPipeline
from millstream.pipeline.state import key_words
from millstream.plan.block_order import mixing
from millstream.plan.ordering import Ordering, as_shuffle
from millstream.plan.plan import Batching, Plan
from millstream.plan.planned import AnyPlan
from millstream.reading.blocks import stored_blocks
from millstream.reading.contracts import PyTree
from millstream.reading.view import View
from millstream.sharding import shard_bounds
from millstream.text.errors import describe_value, require_int
from millstream.text.html import html_table
from millstream.text.svg import COLORS, Plot, Svg, text_width
from millstream.text.tables import text_table

_CELLS = 60  # of a picture, in both directions
_MOST_SAMPLES = 1 << 22  # of an epoch that are looked at: about a second
_MOST_POINTS = 2000  # that are drawn one by one
_TOGETHER = 1 << 16  # samples that are planned together
_LABELS = 10
_LEVELS = 6  # shades of a cell
_MOST_EPOCHS, _MOST_HOSTS = 12, len(COLORS)
_COLUMNS, _SIDE, _LEFT, _CELL_WIDTH, _CELL_HEIGHT = 3, 180, 52, 248, 296
_SHADES, _ASCII_SHADES = " ░▒▓█", " .:+#"
_TEXT_WIDTH, _TEXT_HEIGHT = 22, 10
_MEANING = "Variation of labels that are stored in sequence, from batch to batch: 1 is that of a full shuffle."
_HEADER = ("order", "samples", "variation", "expected")


@dataclasses.dataclass(frozen=True, eq=False)
class OrderedEpoch:
    """An order of samples: what one of the pictures of `order` shows.

    Example:
        >>> epoch = ms.inspect.order(loader).epochs[0]
        >>> epoch.name, epoch.counts.shape, int(epoch.counts.sum())
        ('epoch 0', (1, 60, 60), 10)

    Attributes:
        name: Which one it is.
        counts: How many samples there are, by host, index in the source and position in the epoch, the last two in 60
            parts each.
        samples: How many samples the epoch has.
        looked_at: How many of them were counted: of very long epochs, some of the batches.
        variation: How much labels that are stored in sequence vary from batch to batch, by how much they do after a
            full shuffle: found with ten labels. None without batches.
        expected: The same as `explain` expects it of a block shuffle; None for other orders.
        points: Position and index of every sample, and its host, where there are few.
    """

    name: str
    counts: np.ndarray
    samples: int
    looked_at: int
    variation: float | None
    expected: float | None
    points: tuple[np.ndarray, np.ndarray, np.ndarray] | None


class EpochOrders(Drawing):
    """The orders of some epochs, and others to compare them with. See `order`.

    Example:
        >>> orders = ms.inspect.order(loader)
        >>> [epoch.name for epoch in orders.epochs + orders.compared]
        ['epoch 0', 'epoch 1', 'epoch 2', 'in sequence', 'full shuffle']
        >>> orders.save("order.svg")

    Attributes:
        epochs: An `OrderedEpoch` for each epoch.
        compared: The same for each of the other orders.
        length: How many samples the source has.
    """

    def __init__(self, epochs: list[OrderedEpoch], compared: list[OrderedEpoch], length: int) -> None:
        self.epochs = epochs
        self.compared = compared
        self.length = length

    @property
    def _lines(self) -> list[list[OrderedEpoch]]:
        """The pictures, row by row."""
        return [
            group[start : start + _COLUMNS]
            for group in (self.epochs, self.compared)
            for start in range(0, len(group), _COLUMNS)
        ]

    def _draw(self) -> Svg:
        hosts = len(self.epochs[0].counts)
        names = ", ".join(epoch.name for epoch in self.epochs + self.compared)
        svg = Svg(
            _COLUMNS * _CELL_WIDTH + 8,
            0,
            "The order of an epoch",
            f"The index of every sample over its position in the epoch: {names}.",
        )
        top = 8.0
        if hosts > 1:
            top = _host_legend(svg, hosts)
        for line in self._lines:
            for column, epoch in enumerate(line):
                _panel(svg, epoch, self.length, column * _CELL_WIDTH + _LEFT, top + 38)
            top += _CELL_HEIGHT
        if any(epoch.variation is not None for epoch in self.epochs):
            svg.text(_LEFT, top + 6, _MEANING, size=11, faint=True, width=_COLUMNS * _CELL_WIDTH - _LEFT)
            top += 18
        svg.height = top + 4
        return svg

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (epoch.name, f"{epoch.samples:,}", *("" if value is None else _ratio(value) for value in figures))
            for epoch in self.epochs + self.compared
            for figures in [(epoch.variation, epoch.expected)]
        ]

    def _tables(self) -> str:
        return html_table(_HEADER, self._rows(), numbers=_HEADER[1:])

    def __repr__(self) -> str:
        shades = _SHADES if can_show(_SHADES) else _ASCII_SHADES
        lines: list[str] = []
        for line in self._lines:
            columns = [_text_panel(epoch, shades) for epoch in line]
            lines += ["  ".join(parts).rstrip() for parts in zip(*columns, strict=True)] + [""]
        lines.append("Across: the position in the epoch. Up: the index of the sample.")
        lines += textwrap.wrap(_MEANING, 80)
        return "\n".join([*lines, "", text_table(_HEADER, self._rows(), numbers=_HEADER[1:])])


def order(
    loader: DataLoader[PyTree, PyTree],
    key: jax.Array | np.ndarray | None = None,
    *,
    epochs: int = 3,
    hosts: int | None = None,
    compare: Sequence[Ordering] = ("sequential", "shuffle"),
) -> EpochOrders:
    """A picture of the order of an epoch: the index of every sample over its position, beside other orders.

    A line is a sequence, an even cloud is a full shuffle, and a block shuffle is a few short steps that overlap. No
    sample is read: the plan is asked. Each picture says how much labels that are stored in sequence vary from batch
    to batch, by how much they do after a full shuffle, and for a block shuffle what `explain` expects of it.

    Example:
        >>> print(repr(ms.inspect.order(loader, compare=())).splitlines()[-1])
        epoch 2       10       0.86

    Args:
        loader: The loader, which stays as it is.
        key: The key of the run; None for `jax.random.key(0)`.
        epochs: How many epochs are shown, from the first one on.
        hosts: How many hosts share the batches, each of which has a color; None for those of the loader.
        compare: Orders of the same samples to show beside them, such as `ms.Shuffle("blocks", block_size=1000)`.
    """
    pipeline = planned_pipeline("order", loader)
    words = np.asarray(key_words("order", jax.random.key(0) if key is None else key))
    require_int("order", "epochs", epochs, least=1, most=_MOST_EPOCHS)
    if hosts is None:
        placement = pipeline.placement
        hosts = 1 if placement is None else len({device.process_index for device in placement.by_rows.device_set})
        hosts = min(hosts, _MOST_HOSTS)
    require_int("order", "hosts", hosts, least=1, most=_MOST_HOSTS)
    if isinstance(compare, str) or not isinstance(compare, Sequence):
        raise TypeError(f"order needs compare to be a list of orderings. Got {describe_value(compare)}.")
    length = len(pipeline.source)
    found = [_epoch(f"epoch {number}", pipeline.plan, words, number, hosts, length) for number in range(epochs)]
    others = [(_order_name(ordering), _other_plan(pipeline, as_shuffle("order", ordering))) for ordering in compare]
    compared = [_epoch(name, plan, words, 0, hosts, length) for name, plan in others]
    return EpochOrders(found, compared, length)


def planned_pipeline(caller: str, loader: Any) -> Any:
    """The pipeline of a loader whose plan says which samples come when, with its source."""
    require_loader(caller, loader)
    pipeline = loader.pipeline
    if isinstance(pipeline, PhasedPipeline):
        raise TypeError(
            f"{caller} needs a loader whose stages stay the same throughout a run. Pass one of loader.phases.values()."
        )
    if not isinstance(pipeline, IndexedPipeline):
        raise TypeError(
            f"{caller} needs a loader that finds its samples by index. This one draws them in order, so that nothing "
            "is planned."
        )
    if pipeline.source is None:
        raise TypeError(f"{caller} needs a loader that was built, not one that came out of jax.jit or jax.tree.map.")
    return pipeline


def _order_name(ordering: Ordering) -> str:
    shuffle = as_shuffle("order", ordering)
    names = {"sequential": "in sequence", "shuffle": "full shuffle", "blocks": "block shuffle"}
    return names.get(shuffle.words.split(",")[0], shuffle.words)


def _other_plan(pipeline: Any, shuffle: Any) -> Plan:
    """A plan of the same samples and batches in a different order."""
    plan, source = pipeline.plan, pipeline.source
    view = None if isinstance(pipeline, BucketedPipeline) else plan.view
    samples = len(source) if view is None else plan.samples
    found = Plan(samples, shuffle, selection=view)
    if shuffle.mode == "blocks":
        found = found.in_blocks(stored_blocks(shuffle, source if view is None else View(source, view, shuffle)))
    size = math.prod(plan.buckets[0].axes)
    return found if size == 1 else found.batched(Batching(size, "pad", samples))


def _epoch(name: str, plan: AnyPlan, words: np.ndarray, number: int, hosts: int, length: int) -> OrderedEpoch:
    """What there is to show of an epoch."""
    steps = plan.steps_per_epoch
    samples = min(plan.samples, steps * max(math.prod(bucket.axes) for bucket in plan.buckets))
    shown = np.arange(0, steps, -(-samples // _MOST_SAMPLES))
    counts = np.zeros((hosts, _CELLS, _CELLS), np.int64)
    points: list[tuple[np.ndarray, ...]] = []
    tables: list[np.ndarray] = []
    for at, indices, real, host in _batches(plan, words, number * steps + shown, hosts):
        places = (at[:, None] - number * steps + (np.arange(indices.shape[1]) + 0.5) / indices.shape[1]) / steps
        kept = places[real], indices[real], np.broadcast_to(host, indices.shape)[real]
        across = np.minimum((kept[0] * _CELLS).astype(np.int64), _CELLS - 1)
        up = kept[1] * _CELLS // length
        np.add.at(counts, (kept[2], up, across), 1)
        tables.append(_labels(indices, real, length))
        if samples <= _MOST_POINTS:
            points.append(kept)
    joined: Any = tuple(map(np.concatenate, zip(*points, strict=True))) if points else None
    blocks = plan.blocks if isinstance(plan, Plan) else None
    batch = math.prod(plan.buckets[0].axes)
    expected = None
    if blocks is not None and isinstance(plan, Plan) and plan.selection is not None:
        bounds: Any = plan.selection.tables[0]
        expected = mixing(blocks, bounds, batch).ratio
    variation = _variation(np.concatenate(tables), samples)
    return OrderedEpoch(name, counts, samples, int(counts.sum()), variation, expected, joined)


def _batches(
    plan: AnyPlan, words: np.ndarray, steps: np.ndarray, hosts: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Some steps at a time: their numbers, the indices of their samples, which of them count, and the host of a row."""
    together = max(1, _TOGETHER // max(math.prod(bucket.axes) for bucket in plan.buckets))
    for start in range(0, len(steps), together):
        some = steps[start : start + together].astype(np.uint64)
        for bucket, which, own in plan.turns(words, some):
            part = plan.buckets[bucket]
            positions, rows = part.at(np, words, own)
            indices = part.indices(np, words, rows[-1].epoch, positions).astype(np.int64)
            by_step = len(own), -1
            real = rows[-1].mask.reshape(by_step)
            yield some[which].astype(np.int64), indices.reshape(by_step), real, _hosts(part.axes, hosts)


def _hosts(axes: tuple[int, ...], hosts: int) -> np.ndarray:
    """The host that reads each row of a batch."""
    outer = axes[0] if axes else 1
    found = np.zeros(outer, np.int64)
    for host in range(hosts):
        found[slice(*shard_bounds(hosts, host, outer))] = host
    return np.repeat(found, math.prod(axes[1:]))


def _labels(indices: np.ndarray, real: np.ndarray, length: int) -> np.ndarray:
    """How many samples of each label a batch has, a row for each, if the source is cut into ten labels in sequence."""
    labels = min(_LABELS, length)
    which = np.arange(len(indices))[:, None] * labels + indices * labels // length
    return np.bincount(which[real], minlength=len(indices) * labels).reshape(len(indices), labels)


def _variation(counts: np.ndarray, samples: int) -> float | None:
    """The chi-square of the labels of a batch, by that after a full shuffle."""
    sizes = counts.sum(axis=1)
    counts, size = counts[sizes == sizes.max()], int(sizes.max())
    shares = counts.sum(axis=0) / counts.sum()
    if size < 2 or size >= samples or np.count_nonzero(shares) < 2:
        return None
    shares, counts = shares[shares > 0], counts[:, shares > 0]
    found = np.mean(np.sum((counts - size * shares) ** 2 / (size * shares), axis=1))
    usual = (len(shares) - 1) * (samples - size) / (samples - 1)
    return float(found / usual)


def _host_legend(svg: Svg, hosts: int) -> float:
    x = 8.0
    for host in range(hosts):
        svg.box(x, 10, 12, 12, COLORS[host], fill=0.9, stroke=0, radius=3)
        svg.text(x + 18, 20, f"host {host}", size=11)
        x += 34 + text_width(f"host {host}", 11)
    return 26.0


def _panel(svg: Svg, epoch: OrderedEpoch, length: int, left: float, top: float) -> None:
    """One order: points or cells, axes, and figures below."""
    plot = Plot(svg, left, top, _SIDE, _SIDE, (0, epoch.samples), (0, length))
    svg.text(left, top - 20, epoch.name, size=13, bold=True, width=_SIDE)
    plot.axes("position in the epoch", "index of the sample", most=3)
    if epoch.points is None:
        _cells(svg, epoch.counts, left, top)
    else:
        _points(plot, epoch)
    below, notes = top + _SIDE + 50, []
    if epoch.variation is not None:
        svg.text(left, below, f"variation {_ratio(epoch.variation)}", size=12, bold=True, width=_SIDE)
    if epoch.expected is not None:
        notes.append(f"{_ratio(epoch.expected)} expected by explain()")
    if epoch.looked_at < epoch.samples:
        notes.append(f"every {-(-epoch.samples // _MOST_SAMPLES)}th batch")
    svg.text(left, below + 15, "; ".join(notes), size=11, faint=True, width=_SIDE + 12)


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def _points(plot: Plot, epoch: OrderedEpoch) -> None:
    assert epoch.points is not None
    places, indices, hosts = epoch.points
    size = 3 if epoch.samples <= 500 else 2
    square = f"h{size}v{size}h-{size}z"
    for host in np.unique(hosts):
        of_it = hosts == host
        dots = [
            f"M{plot.x(place * epoch.samples) - size / 2:.1f},{plot.y(index + 0.5) - size / 2:.1f}{square}"
            for place, index in zip(places[of_it].tolist(), indices[of_it].tolist(), strict=True)
        ]
        plot.svg.area("".join(dots), COLORS[int(host)], opacity=0.9)


def _cells(svg: Svg, counts: np.ndarray, left: float, top: float) -> None:
    """A raster: the color of a cell is that of the host with most of its samples, its shade how many there are."""
    side, total = _SIDE / _CELLS, counts.sum(axis=0)
    levels = -(-total * _LEVELS // max(int(total.max()), 1))
    hosts = np.argmax(counts, axis=0)
    for host, level in itertools.product(range(len(counts)), range(1, _LEVELS + 1)):
        path = []
        for up, row in enumerate((levels == level) & (hosts == host)):
            edges = np.flatnonzero(np.diff(row, prepend=False, append=False))
            y = top + _SIDE - (up + 1) * side
            for first, last in edges.reshape(-1, 2).tolist():
                path.append(
                    f"M{left + first * side:g},{y:g}h{(last - first) * side:g}v{side:g}h-{(last - first) * side:g}z"
                )
        if path:
            svg.area("".join(path), COLORS[host], opacity=0.2 + 0.8 * level / _LEVELS)


def _text_panel(epoch: OrderedEpoch, shades: str) -> list[str]:
    """A picture of letters."""
    up = np.linspace(0, _CELLS, _TEXT_HEIGHT + 1).astype(int)[:-1]
    across = np.linspace(0, _CELLS, _TEXT_WIDTH - 1).astype(int)[:-1]
    total = np.add.reduceat(np.add.reduceat(epoch.counts.sum(axis=0), up, axis=0), across, axis=1)
    levels = -(-total * (len(shades) - 1) // max(int(total.max()), 1))
    rows = ["|" + "".join(shades[level] for level in row) + "|" for row in levels[::-1]]
    return [epoch.name[:_TEXT_WIDTH].ljust(_TEXT_WIDTH), *rows]
