"""Several samples as one, or one sample as several."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from millstream.files.plan_folder import PlanFolder, Plans, folder_of
from millstream.pipeline.pipeline import MAX_IN_GRAPH
from millstream.pipeline.rows import WindowedArrays
from millstream.plan.ordering import Ordering
from millstream.plan.selection import Named, Selection, expanded
from millstream.plan.windows import Window, count_windows, window_starts
from millstream.reading.contracts import IndexedSource, PyTree
from millstream.reading.derived_sources import FlatMappedSource
from millstream.reading.executor import Executor, require_executor
from millstream.reading.host_source import HostSource
from millstream.reading.measured_source import Count
from millstream.reading.view import View, source_length, source_name, view_of
from millstream.reading.windowed_source import WindowedSource, windowed_spec
from millstream.text.errors import (
    describe_leaf,
    describe_value,
    function_name,
    require_callable,
    require_choice,
    require_text,
    whole_number,
)
from millstream.views._measure import Property, as_array, measure, require_source, values_of

# What tells samples apart: `identities(caller, source, positions)` is a number per sample; None asks for all.
Identities = Callable[[str, IndexedSource, np.ndarray | None], np.ndarray]


def windows(
    source: IndexedSource,
    length: int,
    *,
    stride: int | None = None,
    step: int = 1,
    groups: Property | None = None,
    counts: Sequence[int] | np.ndarray | None = None,
    end: Literal["drop", "pad"] = "drop",
    mask_key: str = "mask",
    executor: Executor | None = None,
    plans: Plans = None,
) -> View:
    """Windows of consecutive rows: sample i is `length` samples of the source, stacked.

    Nothing is copied when the view is made. Only where windows start is planned; their rows are gathered in the
    compiled program, or read by one call per batch. Which rows follow each other is the order of the source, or of the
    view, not its `ordering`, which is that of the windows.

    Example:
        >>> source = ms.ArraySampleSource({"x": np.arange(10)}, ordering="sequential")
        >>> view = ms.views.windows(source, 4, stride=2)
        >>> len(view), view[1]["x"].tolist()
        (4, [2, 3, 4, 5])

    Args:
        source: A source or a view, whose samples are the rows.
        length: How many rows a window has.
        stride: Rows from the start of one window to that of the next; by default windows follow each other without
            overlap. 1 is every window there is.
        step: Rows from one row of a window to the next: 4 takes every fourth.
        groups: What the rows of a window must have in common, such as the episode: the name of a field, a function of a
            sample, or an array with a value per row. Rows of a group must lie side by side.
        counts: In place of `groups`, how many rows each group has, in order.
        end: "drop" leaves out windows that reach over the end of their group. With "pad", a window starts at every
            `stride`-th row of a group, and where it reaches over the end, its rows are zeros.
        mask_key: The name of the field that "pad" adds to samples: a bool per row, False where a row is padding.
        executor: Where samples are looked at, if groups have to be found.
        plans: Where what was found is kept: a folder, or `ms.views.plans(folder)`; by default in memory.
    """
    require_fixed("windows", source, "take windows of its source, and weight those")
    require_executor("windows", executor)
    length = whole_number("windows", "length", length, least=1, most=MAX_IN_GRAPH)
    step = whole_number("windows", "step", step, least=1, most=MAX_IN_GRAPH // length)
    stride = length * step if stride is None else whole_number("windows", "stride", stride, least=1, most=MAX_IN_GRAPH)
    require_choice("windows", "end", end, ("drop", "pad"))
    require_text("windows", "mask_key", mask_key)
    window = Window(length, step, mask_key if end == "pad" else None)
    _require_rows(source, window)
    sizes = _group_sizes(source, groups, counts, executor, folder_of("windows", plans))
    if not count_windows(window, stride, sizes).any():
        of = f"the longest group has {sizes.max():,}" if len(sizes) > 1 else f"there are {sizes.max():,}"
        over = "" if step == 1 else f", {step} apart,"
        raise ValueError(
            f"windows of {length:,} rows{over} need {window.span:,} rows in sequence, and {of}. Make them shorter, or "
            "pass end='pad'."
        )
    starts = np.cumsum(sizes) - sizes
    of = f" of {source.selection.words}" if isinstance(source, View) else ""
    function, table = window_starts(window, stride, starts, sizes, of)
    return View(_Windowed(source, window, stride, starts), Selection().after(function, table), source.ordering)


def flat_map(
    source: IndexedSource,
    counts: Property,
    fn: Callable[[PyTree, int], PyTree] | None = None,
    *,
    executor: Executor | None = None,
    plans: Plans = None,
) -> View:
    """Several samples for each sample of a source: crops of an image, sentences of a document, steps of an episode.

    Example:
        >>> source = ms.DatasetSource([{"x": np.arange(4.0)}, {"x": np.arange(2.0)}], ordering="sequential")
        >>> def pair(sample, number):
        ...     return {"pair": sample["x"][2 * number : 2 * number + 2]}
        >>> view = ms.views.flat_map(source, lambda sample: len(sample["x"]) // 2, pair)
        >>> len(view), view[1]["pair"].tolist()
        (3, [2.0, 3.0])

    Args:
        source: A source or a view.
        counts: How many samples each one becomes, at least 0: an array, the name of a field, or a function of a sample,
            which is called once for each, when the view is made.
        fn: `fn(sample, number)` makes sample `number`, from 0 on, of a sample; a Python or NumPy function that runs
            where samples are read. Without it, samples come as often as `counts` says.
        executor: Where samples are looked at, if counts have to be found.
        plans: Where what was found is kept: a folder, or `ms.views.plans(folder)`; by default in memory.
    """
    require_fixed("flat_map", source, "use flat_map on its source, and weight the result")
    require_executor("flat_map", executor)
    if fn is not None:
        require_callable("flat_map", "fn", fn, "sample, number")
    found = _counts_of(source, counts, executor, folder_of("flat_map", plans))
    if not found.any():
        raise ValueError(f"flat_map makes nothing of the {len(source):,} samples: all counts are zero.")
    function, table = expanded(found)
    if fn is None:
        return view_of(source, function, table)
    base = _FlatMapped(source, fn, table, function.length)
    of = f" of {source.selection.words}" if isinstance(source, View) else ""
    name = Named(function.length, f"{function.words}{of} through {base.name}")
    return View(base, Selection().after(name), source.ordering)


class _Windowed:
    """The windows of a source, named by the row that they start at."""

    def __init__(self, source: IndexedSource, window: Window, stride: int, starts: np.ndarray) -> None:
        self.source = source
        self.ordering: Ordering | str = source.ordering
        self._base = source.source if isinstance(source, View) else source
        self.shown_as, self.shown_length = source_name(self._base), source_length(self._base)
        self._window, self._starts, self._overlap = window, starts, stride < window.span
        self._ends = None if window.mask_key is None else np.append(starts[1:], len(source))

    def __len__(self) -> int:
        return len(self.source) if self._ends is not None else len(self.source) - self._window.span + 1

    def spec(self) -> PyTree:
        """The shape and dtype of one window."""
        return windowed_spec(self._window, self.source.spec())

    def read(self, indices: np.ndarray, out: PyTree | None = None) -> PyTree:
        """The windows that start at these rows, stacked, as NumPy arrays."""
        return self.on_host.read(indices, out)

    @functools.cached_property
    def on_host(self) -> HostSource:
        """The same, read on the host."""
        return WindowedSource(self.source, self._window, self._ends, self.shown_as)

    @functools.cached_property
    def arrays(self) -> PyTree | None:
        """The same, gathered in a program; None if the rows are read on the host."""
        arrays = self._base.arrays
        if arrays is None or len(self._base) > MAX_IN_GRAPH:
            return None
        import jax.numpy as jnp

        selection = self.source.selection if isinstance(self.source, View) else Selection()
        tables = tuple(None if table is None else jnp.asarray(table) for table in selection.tables)
        ends = None if self._ends is None else jnp.asarray(self._ends, np.uint32)
        return WindowedArrays(arrays, tables, ends, self._window, selection.without_digests())

    def identities(self, caller: str, indices: np.ndarray, identities: Identities) -> np.ndarray:
        """Those of the rows that windows start at, or, if windows overlap, that their groups start at."""
        every = identities(caller, self.source, None) if isinstance(self.source, View) else None
        if every is not None and len(np.unique(every)) < len(every):
            raise ValueError(f"{caller} needs windows of rows that come once. Divide the rows, and take windows then.")
        if not self._overlap:
            return identities(caller, self.source, indices)
        if len(self._starts) == 1:
            raise ValueError(
                f"{caller}: these windows overlap, so that parts would have rows in common. Take windows of parts of "
                "the source: slice it, or divide it by group and pass groups=."
            )
        group = np.searchsorted(self._starts, indices, side="right") - 1
        return identities(caller, self.source, self._starts[group])


class _FlatMapped:
    """The samples that a function makes of those of a source."""

    arrays = None

    def __init__(
        self, source: IndexedSource, fn: Callable[[PyTree, int], PyTree], firsts: np.ndarray, length: int
    ) -> None:
        self.source = source
        self.ordering: Ordering | str = source.ordering
        base = source.source if isinstance(source, View) else source
        self.shown_as, self.shown_length = source_name(base), source_length(base)
        self._firsts = firsts
        self.name = f"flat_map({function_name(fn)})"
        self.on_host: HostSource = FlatMappedSource(source, fn, firsts, length, self.name)

    def __len__(self) -> int:
        return len(self.on_host)

    def spec(self) -> PyTree:
        """The shape and dtype of one sample."""
        return self.on_host.spec()

    def read(self, indices: np.ndarray, out: PyTree | None = None) -> PyTree:
        """The samples at `indices`, stacked, as NumPy arrays."""
        return self.on_host.read(indices, out)

    def identities(self, caller: str, indices: np.ndarray, identities: Identities) -> np.ndarray:
        """Those of the samples that they are made of."""
        return identities(caller, self.source, np.searchsorted(self._firsts, indices, side="right") - 1)


def require_fixed(caller: str, source: Any, instead: str) -> None:
    """Refuse what is not a source, and a view that has different samples in every epoch."""
    require_source(caller, source)
    if isinstance(source, View) and source.selection.is_keyed:
        raise TypeError(f"{caller}: {source!r} differs from epoch to epoch. Instead, {instead}.")


def _require_rows(source: IndexedSource, window: Window) -> None:
    """Refuse samples that cannot be stacked, or that a mask cannot be added to."""
    spec = source.spec()
    if spec is None:
        raise TypeError(
            f"windows needs samples that are arrays. Those of {source!r} are Python objects. Stack such samples in "
            "ms.BatchTransform(n, collate=fn), or make arrays of them first."
        )
    if window.mask_key is None:
        return
    if type(spec) is not dict:
        raise TypeError(
            f"windows adds the field {window.mask_key!r} to samples that it pads, so they need to be dicts. Got "
            f"{describe_value(spec)}. Name the array: {{'x': array}}; or pass end='drop'."
        )
    if window.mask_key in spec:
        raise ValueError(
            f"windows would overwrite the field {window.mask_key!r} of the samples. Pass a different mask_key."
        )


def _group_sizes(
    source: IndexedSource, groups: Any, counts: Any, executor: Executor | None, folder: PlanFolder | None
) -> np.ndarray:
    """How many rows each group has, in order; none has no rows."""
    if groups is not None and counts is not None:
        raise ValueError("windows takes groups= or counts=, not both: each says which rows belong together.")
    if counts is not None:
        sizes = _whole_numbers("windows", "a number of rows per group", as_array("windows", "counts", counts))
        if sizes.sum() != len(source):
            raise ValueError(
                f"windows needs counts that add up to the {len(source):,} rows. Got {sizes.sum():,} in {len(sizes):,} "
                "groups."
            )
        return sizes[sizes > 0]
    if groups is None:
        return np.array([len(source)])
    values = values_of("windows", "groups", source, groups, executor, folder)
    starts = np.concatenate([[0], np.flatnonzero(values[1:] != values[:-1]) + 1])
    _, first, group = np.unique(values[starts], return_index=True, return_inverse=True)
    again = np.flatnonzero(first[group] != np.arange(len(starts)))
    if len(again):
        row, before = starts[again[0]], starts[first[group[again[0]]]]
        raise ValueError(
            f"windows needs the rows of a group side by side. Row {row:,} belongs to the group of row {before:,}, with "
            "others between them. Sort the rows: source[np.argsort(groups, kind='stable')]."
        )
    return np.diff(np.append(starts, len(source)))


def _counts_of(source: IndexedSource, counts: Any, executor: Executor | None, folder: PlanFolder | None) -> np.ndarray:
    """How many samples each sample becomes."""
    if isinstance(counts, str) or callable(counts):
        shown = repr(counts) if isinstance(counts, str) else function_name(counts)
        asked = f"flat_map(counts={shown})"
        return measure(asked, source, Count(counts, asked), executor, folder)
    found = as_array("flat_map", "counts", counts)
    if found.shape != (len(source),):
        raise ValueError(
            "flat_map needs counts to be the name of a field, a function of a sample, or an array with a whole number "
            f"for each of the {len(source):,} samples. Got {describe_leaf(found)}."
        )
    return _whole_numbers("flat_map", "a whole number per sample", found)


def _whole_numbers(caller: str, what: str, found: np.ndarray) -> np.ndarray:
    """An array of counts as int64; refuses one of anything else."""
    if found.ndim != 1 or not found.size or found.dtype.kind not in "iu":
        raise TypeError(f"{caller} needs counts to be {what}, as integers. Got {describe_leaf(found)}.")
    if found.min() < 0:
        first = int(np.argmax(found < 0))
        raise ValueError(f"{caller} needs counts of at least 0. Number {first:,} is {found[first]}.")
    return found.astype(np.int64)
