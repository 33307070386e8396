"""Statistics of a data set, in one pass."""

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from millstream.inspect._cells import as_leaf, named_leaves, object_rows, printable
from millstream.inspect._compare import on_host
from millstream.inspect._tallies import NumberSummary, NumberTally
from millstream.loader.loader import DataLoader
from millstream.loader.mixed import MixedLoader
from millstream.pipeline.state import key_words
from millstream.plan.plan import Batching, Plan
from millstream.plan.planned import PlannedSteps
from millstream.reading.contracts import IndexedSource
from millstream.reading.derived_sources import UnshapedSource
from millstream.reading.executor import Executor, InGraph, require_executor
from millstream.reading.host_source import as_host_source
from millstream.reading.read_config import ReadConfig
from millstream.reading.reader import Reader
from millstream.reading.samples import ObjectSpec
from millstream.reading.stats import LoaderStats
from millstream.reading.view import View
from millstream.text.bar_line import ProgressLine
from millstream.text.errors import describe_value, require_bool, whole_number
from millstream.text.html import html_table
from millstream.text.summaries import array_text
from millstream.text.tables import WIDTH, text_table

_CHUNK_BYTES, _CHUNK_ROWS, _CHUNK_OBJECTS = 1 << 22, 8192, 64
_MOST_CLASSES, _FEW_CLASSES, _SHARE_OF_CLASSES = 1000, 10, 0.2
_LISTED, _LONGEST_CLASS = 4, 24  # classes in a table, and letters of a class
_BARS = " ▁▂▃▄▅▆▇█"
_BINS = 12
_HEADER = ("leaf", "what", "missing", "mean", "std", "min", "median", "max", "spread", "more")


@dataclasses.dataclass(frozen=True, eq=False)
class LeafStatistics:
    """What is known of one leaf of the samples. See `statistics`.

    Example:
        >>> source = ms.ArraySampleSource({"y": np.array([0, 1, 1, 2] * 5)})
        >>> leaf = ms.inspect.statistics(source)["y"]
        >>> leaf.classes, leaf.numbers.mean
        ({1: 10, 0: 5, 2: 5}, 1.0)

    Attributes:
        name: Its name: the path of keys, with dots between.
        dtypes: Its dtypes, or "str" and the like.
        shapes: The lowest and the highest length of each axis, as pairs; None if the number of axes differs, or if it
            is not an array.
        present: In how many samples it is there.
        missing: In how many it is None, or not there at all.
        nan: How many of its numbers are NaN.
        infinite: How many are infinite.
        numbers: The distribution of its numbers; None if it has none.
        lengths: That of its lengths, if it is text or if its first axis differs from sample to sample.
        classes: How often each value comes, the most frequent first, if it is a single number or text with few
            different values: at most 1,000, and at most a fifth of the samples.
        channel_mean: The mean of each channel of images; otherwise empty.
        channel_std: The standard deviation of each.
    """

    name: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...] | None
    present: int
    missing: int
    nan: int
    infinite: int
    numbers: NumberSummary | None
    lengths: NumberSummary | None
    classes: dict[int | bool | str | bytes, int] | None
    channel_mean: tuple[float, ...]
    channel_std: tuple[float, ...]

    @property
    def normalization(self) -> dict[str, float]:
        """Arguments of `NormalizeImageTransform` that bring the mean to 0 and the standard deviation to 1.

        Example:
            >>> leaf = ms.inspect.statistics(ms.ArraySampleSource({"image": np.array([[[0]], [[4]]])}))["image"]
            >>> leaf.normalization
            {'scale': 0.5, 'offset': -1.0}
            >>> stage = ms.NormalizeImageTransform("image", **leaf.normalization)
        """
        if self.numbers is None or not self.numbers.std > 0:
            raise ValueError(f"normalization needs numbers that differ. Those of {self.name!r} do not.")
        return {"scale": 1 / self.numbers.std, "offset": -self.numbers.mean / self.numbers.std}

    @property
    def what(self) -> str:
        """Dtype and shape in a few words."""
        if self.shapes is None:
            return ", ".join(self.dtypes)
        axes = [str(low) if low == high else f"{low}..{high}" for low, high in self.shapes]
        return ", ".join(f"{array_text((), dtype)[:-2]}[{','.join(axes)}]" for dtype in self.dtypes)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Statistics(Mapping[str, LeafStatistics]):
    """Statistics of a data set by leaf; printed, a table. See `statistics`.

    Example:
        >>> statistics = ms.inspect.statistics(ms.ArraySampleSource({"x": np.arange(4.0)}))
        >>> list(statistics), statistics.samples, statistics.complete
        (['x'], 4, True)

    Attributes:
        leaves: By name.
        samples: How many samples were looked at.
        total: How many there are; None if that is not known.
        complete: Whether all were looked at.
    """

    leaves: dict[str, LeafStatistics]
    samples: int
    total: int | None
    complete: bool

    def __getitem__(self, name: str) -> LeafStatistics:
        return self.leaves[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    @property
    def _title(self) -> str:
        if self.complete:
            return f"{self.samples:,} samples, all of them"
        if self.total is None:
            return f"the first {self.samples:,} samples: all figures are those of these"
        return f"{self.samples:,} of {self.total:,} samples, chosen at random: all figures are those of the choice"

    @property
    def _notes(self) -> list[str]:
        notes = []
        if any(leaf.numbers is not None and not leaf.numbers.exact for leaf in self.leaves.values()):
            notes.append("Medians and spreads with ~ are those of 16,384 values; all else is counted in full.")
        return notes

    def __str__(self) -> str:
        table = text_table(
            _HEADER, map(_cells, self.leaves.values()), numbers=_HEADER[2:8], prose=["more"], width=WIDTH
        )
        return "\n".join([self._title, "", table, *(["", *self._notes] if self._notes else [])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        table = html_table(_HEADER, map(_cells, self.leaves.values()), numbers=_HEADER[2:8])
        return f"<div>{self._title}</div>{table}" + "".join(f"<div>{note}</div>" for note in self._notes)


def statistics(
    data: IndexedSource | DataLoader | MixedLoader,
    key: jax.Array | np.ndarray | None = None,
    *,
    samples: int | None = None,
    executor: Executor | InGraph | None = None,
    progress: bool = True,
) -> Statistics:
    """What a data set is made of, in one pass: shapes, ranges, means, missing values, classes and lengths.

    Of a source, samples are looked at as it gives them; of a loader, as they leave the pipeline in the first epoch of a
    run, without rows that do not count. Counts, ranges, means and standard deviations are of all samples: sums of
    integers are exact, and those of floats are merged so that rounding does not grow. The result is the same, bit for
    bit, with every executor.

    Example:
        >>> digits = ms.ArraySampleSource(ms.datasets.DigitsDataset("train").as_array_dict())
        >>> statistics = ms.inspect.statistics(digits)
        >>> print(statistics)
        1,438 samples, all of them
        <BLANKLINE>
        leaf   what       mean   std  min  median  max  spread        more
        ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
        image  u8[8,8,1]  77.8    96    0      15  255  █▁▂▁▁▂▁▁▂▁▁▃
        label  i32[]      4.39  2.87    0       4    9                10 classes: 1: 161, 5: 154, 0: 151, 6: 150, ...
        >>> stage = ms.NormalizeImageTransform(**statistics["image"].normalization)

    Args:
        data: A source, a view or a loader.
        key: Of the run, where samples are chosen or changed at random; `jax.random.key(0)` by default.
        samples: How many to look at, if not all: that many of a source, chosen by the key, or the first of a loader.
        executor: Where a source is read, such as `ms.Threads(8)` or `ms.Processes(4)`. A loader has its own.
        progress: Whether to show progress on stderr, if that is a terminal or a notebook.
    """
    is_loader = isinstance(data, DataLoader | MixedLoader)
    if isinstance(data, type) or not (is_loader or isinstance(data, IndexedSource)):
        raise TypeError(
            "statistics needs a source, such as ms.ArraySampleSource(data), a view, or a loader. "
            f"Got {describe_value(data)}."
        )
    if not isinstance(executor, InGraph):
        require_executor("statistics", executor)
    if is_loader and executor is not None:
        raise ValueError("statistics reads a loader with its own executor. Write loader.replace(executor=...).")
    samples = None if samples is None else whole_number("statistics", "samples", samples, least=1)
    require_bool("statistics", "progress", progress)
    key = jax.random.key(0) if key is None else key
    words = np.asarray(key_words("statistics", key))
    tally, begun = _Tally(int(words[-1])), time.monotonic()
    total = None if is_loader else len(data)
    wanted = min(math.inf if samples is None else samples, math.inf if total is None else total)
    chunks = _loader_chunks(data, key) if is_loader else _source_chunks(data, words, int(wanted), executor)
    with contextlib.closing(ProgressLine("statistics", shown=progress)) as line, contextlib.closing(chunks):
        for chunk, count in chunks:
            tally.add(chunk, int(min(count, wanted - tally.samples)))
            of = f" of {int(wanted):,}" if wanted < math.inf else ""
            line.show(
                f"{tally.samples:,}{of} samples, {tally.samples / (time.monotonic() - begun + 1e-9):,.0f} per second"
            )
            if tally.samples >= wanted:
                break
        else:
            total = tally.samples
    return Statistics(tally.finish(), tally.samples, total, tally.samples == total)


_Chunk = dict[str, Any]  # by name: an array with a row per sample, or a list with an entry per sample


def _source_chunks(
    source: IndexedSource, words: np.ndarray, wanted: int, executor: Any
) -> Generator[tuple[_Chunk, int], None, None]:
    """The samples of a source, some at a time, always the same ones together."""
    base, selection = (source.source, source.selection) if isinstance(source, View) else (source, None)
    host, length = as_host_source(base), len(source)
    host = UnshapedSource(host) if host.whole_samples or isinstance(host.sample_spec, ObjectSpec) else host
    spec, size = host.sample_spec, _CHUNK_OBJECTS
    if not isinstance(spec, ObjectSpec):
        nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
        size = max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // max(nbytes, 1)))
    order = "sequential" if wanted == length else "shuffle"
    plan = Plan(length, order, selection=selection).batched(Batching(size, "pad", length))
    config = ReadConfig(host, None if isinstance(executor, InGraph) else executor)
    reader, steps = Reader(config, plan), -(-wanted // size)
    ahead = reader.read_ahead(PlannedSteps(plan, words), LoaderStats(), steps)
    with contextlib.closing(reader), contextlib.closing(ahead) as batches:
        for step in range(steps):
            filled = batches.rows(step)
            assert filled.request is not None
            real = int(np.count_nonzero(filled.request.real))
            if isinstance(spec, ObjectSpec):
                yield _columns([named_leaves(sample) for sample in filled.rows[0][:real].tolist()]), real
            else:
                yield named_leaves(spec.unflatten([leaf[:real] for leaf in filled.rows])), real


def _loader_chunks(loader: Any, key: Any) -> Generator[tuple[_Chunk, int], None, None]:
    """The real rows of the batches of an epoch."""
    with contextlib.closing(loader.iterate(loader.init_state(key))) as batches:
        for batch, mask in batches:
            chosen = np.asarray(mask)
            if (objects := object_rows(batch, chosen)) is not None:
                rows = [named_leaves(sample) for sample, is_real in zip(objects, chosen, strict=True) if is_real]
                yield _columns(rows), len(rows)
                continue
            leaves = named_leaves(on_host(batch)).items()
            whole = [name for name, leaf in leaves if np.shape(leaf)[: chosen.ndim] != chosen.shape]
            if whole:
                raise ValueError(
                    f"statistics needs a row for each sample in every leaf of a batch, {chosen.shape}. {whole[0]!r} "
                    "has none. Look at the source instead, or leave out the stage that makes it."
                )
            yield {name: leaf[chosen] for name, leaf in leaves}, int(chosen.sum())


def _columns(rows: list[dict[str, Any]]) -> _Chunk:
    """Samples of any shape, by leaf: stacked where all are alike, otherwise as a list."""
    names = dict.fromkeys(name for row in rows for name in row)
    found: _Chunk = {}
    for name in names:
        column = [as_leaf(row.get(name)) for row in rows]
        alike = {(leaf.shape, leaf.dtype) if isinstance(leaf, np.ndarray) else None for leaf in column}
        found[name] = np.stack(column) if len(alike) == 1 and None not in alike else column
    return found


class _Tally:
    """Counts all leaves."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._leaves: dict[str, _LeafTally] = {}
        self.samples = 0

    def add(self, chunk: _Chunk, count: int) -> None:
        """Count the first samples of a chunk."""
        for name, column in chunk.items():
            self._leaves.setdefault(name, _LeafTally(self._seed)).add(column[:count])
        self.samples += count

    def finish(self) -> dict[str, LeafStatistics]:
        """What was counted, by leaf."""
        return {name: tally.finish(name, self.samples) for name, tally in self._leaves.items()}


class _LeafTally:
    """Counts one leaf."""

    def __init__(self, seed: int) -> None:
        self._numbers, self._lengths = NumberTally(seed), NumberTally(seed)
        self._dtypes: dict[str, None] = {}
        self._low: tuple[int, ...] | None = None
        self._high: tuple[int, ...] | None = None
        self._is_array = True
        self._classes: collections.Counter[Any] | None = collections.Counter()
        self._channels: int | None = None
        self._present = 0
        self._is_text = False

    def add(self, column: Any) -> None:
        """Count some samples: an array with a row for each, or a list."""
        if isinstance(column, np.ndarray):
            if len(column):
                self._add_array(column)
            return
        alike: dict[Any, list[np.ndarray]] = {}
        for leaf in column:
            if isinstance(leaf, np.ndarray):
                alike.setdefault((leaf.shape, str(leaf.dtype)), []).append(leaf)
            elif leaf is not None:
                self._add_object(leaf)
        for leaves in alike.values():
            self._add_array(np.stack(leaves))

    def _add_array(self, rows: np.ndarray) -> None:
        shape = rows.shape[1:]
        self._present += len(rows)
        self._dtypes.setdefault(str(rows.dtype))
        if self._low is None or self._high is None:
            self._low = self._high = shape
        elif len(self._low) != len(shape):
            self._is_array = False
        else:
            self._low, self._high = tuple(map(min, self._low, shape)), tuple(map(max, self._high, shape))
        if shape:
            self._lengths.add(np.full((len(rows), 1), shape[0], np.int64))
            self._classes = None
        elif rows.dtype.kind in "biu":
            self._count(zip(*(part.tolist() for part in np.unique(rows, return_counts=True)), strict=True))
        else:
            self._classes = None
        if rows.dtype.kind in "biuf" or "float" in rows.dtype.name:
            channels = shape[-1] if len(shape) == 3 and shape[-1] in (1, 3, 4) else 1
            if self._channels not in (None, 1, channels):
                self._numbers.join_columns()
            self._channels = channels if self._channels in (None, channels) else 1
            self._numbers.add(rows.reshape(-1, self._channels))

    def _add_object(self, leaf: Any) -> None:
        self._present += 1
        self._is_array = False
        self._dtypes.setdefault(type(leaf).__name__)
        if isinstance(leaf, str | bytes):
            self._is_text = True
            self._lengths.add(np.array([[len(leaf)]]))
            self._count([(leaf, 1)])
        else:
            self._classes = None

    def _count(self, pairs: Any) -> None:
        if self._classes is not None:
            for value, times in pairs:
                self._classes[value] += times
            if len(self._classes) > _MOST_CLASSES:
                self._classes = None

    def finish(self, name: str, samples: int) -> LeafStatistics:
        """What was counted."""
        shapes = None
        if self._is_array and self._low is not None and self._high is not None:
            shapes = tuple(zip(self._low, self._high, strict=True))
        numbers, lengths, classes = self._numbers.summary(), self._lengths.summary(), None
        is_ragged = lengths is not None and (self._is_text or lengths.minimum < lengths.maximum)
        few = max(_FEW_CLASSES, _SHARE_OF_CLASSES * self._present)
        if self._classes and len(self._classes) <= few:
            classes = dict(sorted(self._classes.items(), key=lambda pair: (-pair[1], str(pair[0]))))
        columns = self._numbers.columns() if shapes is not None and len(shapes) == 3 else []
        return LeafStatistics(
            name,
            tuple(self._dtypes),
            shapes,
            self._present,
            samples - self._present,
            self._numbers.nan,
            self._numbers.infinite,
            numbers,
            lengths if is_ragged else None,
            classes,
            tuple(mean for mean, _ in columns),
            tuple(std for _, std in columns),
        )


def _cells(leaf: LeafStatistics) -> tuple[str, ...]:
    """A row of the table."""
    numbers, more = leaf.numbers, []
    missing = [f"{leaf.missing:,} none" if leaf.missing else "", f"{leaf.nan:,} NaN" if leaf.nan else ""]
    missing += [f"{leaf.infinite:,} infinite" if leaf.infinite else ""]
    if leaf.classes is not None:
        listed = [f"{_class_text(value)}: {count:,}" for value, count in list(leaf.classes.items())[:_LISTED]]
        rest = ", ..." if len(leaf.classes) > _LISTED else ""
        more.append(f"{len(leaf.classes):,} classes: {', '.join(listed)}{rest}")
    if leaf.lengths is not None:
        low, high = leaf.lengths.minimum, leaf.lengths.maximum
        more.append(
            f"lengths {low:,} to {high:,}, mean {leaf.lengths.mean:,.4g}, median {leaf.lengths.quantiles[0.5]:,.4g}"
        )
    if len(leaf.channel_mean) > 1:
        means, stds = (", ".join(f"{value:.4g}" for value in part) for part in (leaf.channel_mean, leaf.channel_std))
        more.append(f"channels: mean {means}; std {stds}")
    figures = ["", "", "", "", "", ""]
    if numbers is not None:
        about = "" if numbers.exact else "~"
        median = f"{about}{numbers.quantiles[0.5]:.3g}"
        figures = [
            f"{numbers.mean:.3g}",
            f"{numbers.std:.3g}",
            _number(numbers.minimum),
            median,
            _number(numbers.maximum),
        ]
        figures.append("" if leaf.classes is not None else about + _bars(numbers))
    return printable(leaf.name), leaf.what, "\n".join(filter(None, missing)), *figures, "\n".join(more)


def _class_text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_CLASS else f"{text[: _LONGEST_CLASS - 3]}..."


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) and abs(value) < 10**7 else f"{value:.3g}"


def _bars(numbers: NumberSummary) -> str:
    """A histogram between the 1 % and the 99 % quantile, in blocks of eight heights."""
    low, high = numbers.quantiles[0.01], numbers.quantiles[0.99]
    if not high > low:
        return ""
    counts, _ = np.histogram(np.clip(numbers.values, low, high), _BINS, (low, high), weights=numbers.weights)
    return "".join(_BARS[0 if count == 0 else 1 + round(7 * count / counts.max())] for count in counts)
