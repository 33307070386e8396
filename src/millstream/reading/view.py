"""Views: some samples of a source, in some order, as a source. A view reads nothing itself: it is part of the plan."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from millstream.plan.keys import Array
from millstream.plan.ordering import Ordering
from millstream.plan.selection import IndexFunction, Selection, Strided, listed
from millstream.reading.contracts import IndexedSource, PyTree
from millstream.text import html
from millstream.text.errors import describe_leaf, describe_value, require_bool, require_callable, require_int
from millstream.text.summaries import leaf_texts

if TYPE_CHECKING:
    from millstream.reading.derived_sources import MappedSource

# Which samples: a slice, indices, or a bool per sample.
Chosen = slice | Sequence[int] | Sequence[bool] | np.ndarray


class Subscriptable:
    """What every source has: `source[index]`, a sample, `source[10:20]`, a view, and `source.map(fn)`."""

    @overload
    def __getitem__(self, index: int | np.integer) -> PyTree: ...
    @overload
    def __getitem__(self, index: Chosen) -> "View": ...
    def __getitem__(self, index: Any) -> Any:
        return subscript(self, index)  # pyright: ignore[reportArgumentType]

    def shown_spec(self) -> PyTree:
        """The shape and dtype of one sample; None if a sample would have to be read to know it."""
        return self.spec()  # pyright: ignore[reportAttributeAccessIssue]

    @html.never_raising
    def _repr_html_(self) -> str:
        return source_html(self)  # pyright: ignore[reportArgumentType]

    @overload
    def map(self: "View", fn: Callable[..., PyTree], *, random: bool = False, readers: int = 4) -> "View": ...
    @overload
    def map(self, fn: Callable[..., PyTree], *, random: bool = False, readers: int = 4) -> "MappedSource": ...
    def map(self, fn: Callable[..., PyTree], *, random: bool = False, readers: int = 4) -> Any:
        """The source whose samples are `fn(sample)`, called on the host where samples are read, when they are needed.

        It is what a `HostMapTransform(fn)` after the source makes, as a source: views, `ms.views.zip` and further maps
        work on it. A map of a view is a view.

        Example:
            >>> words = ms.DatasetSource(["oat", "rye", "barley"], ordering="sequential")
            >>> letters = words.map(lambda word: {"letters": len(word)})
            >>> letters[2], len(letters[:2])
            ({'letters': 6}, 2)

        Args:
            fn: `fn(sample) -> sample`, a Python function; `fn(sample, rng)` if it is random.
            random: Whether it takes a `numpy.random.Generator`, as in `RandomHostMapTransform`.
            readers: How many threads read and call it, if the loader has no executor.
        """
        from millstream.reading.derived_sources import mapped

        require_bool("map", "random", random)
        require_callable("map", "fn", fn, "sample, rng" if random else "sample")
        require_int("map", "readers", readers, least=1)
        return mapped(self, fn, random, readers)  # pyright: ignore[reportArgumentType]


class View(Subscriptable):
    """The samples of a source that a selection names. Made by `ms.views`, or by a slice such as `source[:1000]`.

    Example:
        >>> source = ms.ArraySampleSource({"x": np.arange(10)}, ordering="sequential")
        >>> view = source[2:8][::-1]
        >>> len(view), view.read(np.array([0, 5]))["x"].tolist()
        (6, [7, 2])

    Args:
        source: Where the samples come from; never a view.
        selection: Which of them there are.
        ordering: "shuffle", "sequential" or a `Shuffle`.
    """

    ordering: Ordering | str
    arrays: None = None

    def __init__(self, source: IndexedSource, selection: Selection, ordering: Ordering | str) -> None:
        self.source = source
        self.selection = selection
        self.ordering = ordering

    def __len__(self) -> int:
        return self.selection.functions[0].length

    def __repr__(self) -> str:
        changes = "".join(f", changed after {after:,} samples" for after, _ in self.selection.changes)
        return f"View({len(self):,} samples: {self.selection.words}{changes} of {source_name(self.source)})"

    def spec(self) -> PyTree:
        """The shape and dtype of one sample."""
        return self.source.spec()

    def read(self, indices: np.ndarray, out: PyTree | None = None) -> PyTree:
        """The samples at these positions of the view, stacked, as NumPy arrays; into `out` if it is given."""
        return self.source.read(self.locate(np.asarray(indices)), out)

    def locate(self, positions: np.ndarray) -> np.ndarray:
        """The indices in `source` of the samples at these positions."""
        if self.selection.is_keyed:
            raise TypeError(
                f"{self!r}: which samples these are depends on the key of a run and on the epoch, so that only a "
                "loader can read them. Slice, split, concatenate and zip the source first, and weight the result."
            )
        if positions.size and not (0 <= int(positions.min()) and int(positions.max()) < len(self)):
            raise IndexError(
                f"{self!r} has positions from 0 to {len(self) - 1:,}. Got {int(positions.min()):,} to "
                f"{int(positions.max()):,}."
            )
        words, epoch = np.zeros(2, np.uint32), np.zeros(positions.shape, np.uint32)
        located = self.selection.locate(np, self.selection.tables, words, epoch, positions.astype(np.uint64))
        return located.astype(np.int64)


def source_html(source: Any) -> str:
    """A source or view as a small table for notebooks: what it is, how many samples it has, and what one is."""
    base, is_view = (source.source, True) if isinstance(source, View) else (source, False)
    name = repr(base) if " -> " in repr(base) else source_name(base)
    rows = [("view", f"{source.selection.words} of {name}") if is_view else ("source", name)]
    known = base.shown_spec() if isinstance(base, Subscriptable) else base.spec()
    leaves = [(path or "sample", text) for path, text in leaf_texts(known)]
    return html.html_names([*rows, ("samples", f"{len(source):,}"), *leaves])


def source_name(source: IndexedSource) -> str:
    """What a source is called; windows have the name of the source whose rows they are."""
    return getattr(source, "shown_as", type(source).__name__)


def source_length(source: IndexedSource) -> int:
    """How many samples a source has; for windows, how many rows they are made of."""
    return getattr(source, "shown_length", len(source))


def view_of(
    source: IndexedSource, function: IndexFunction, table: Array | None = None, ordering: Ordering | None = None
) -> View:
    """What a function selects from a source or a view."""
    base, selection = (source.source, source.selection) if isinstance(source, View) else (source, Selection())
    return View(base, selection.after(function, table), source.ordering if ordering is None else ordering)


def subscript(source: IndexedSource, index: Any) -> Any:
    """`source[index]`: a sample for a number; a view for a slice, a list of indices or a mask."""
    name, length = type(source).__name__, len(source)
    if isinstance(index, slice):
        start, stop, step = index.indices(length)
        chosen = range(start, stop, step)
        if not chosen:
            raise ValueError(f"{name}[{_shown(index)}] is empty: there are {length:,} samples.")
        return view_of(source, Strided(start, step, len(chosen)))
    if isinstance(index, int | np.integer) and not isinstance(index, bool):
        if not -length <= int(index) < length:
            raise IndexError(f"{name}[{index}]: there are {length:,} samples.")
        return _one(source, int(index) % length)
    return view_of(source, *listed(as_positions(name, index, length), length))


def as_positions(caller: str, chosen: Any, length: int) -> np.ndarray:
    """Indices or a mask as positions below `length`; refuses what is out of range, empty, or neither."""
    try:
        array = np.array(chosen)  # a copy: changing what was given must not change a running stream
    except Exception:  # keys of JAX, lists of different lengths
        array = np.array(None)
    if array.shape == (0,):
        array = array.astype(np.int64)  # an empty list has no integers that would make it one of indices
    if array.ndim != 1 or array.dtype.kind not in "biu":
        found = describe_leaf(chosen) if isinstance(chosen, np.ndarray) else describe_value(chosen)
        raise TypeError(f"{caller} takes a slice, an index, a list of indices or a mask of bools. Got {found}.")
    if array.dtype.kind == "b":
        if len(array) != length:
            raise ValueError(f"{caller} has {length:,} samples, and the mask {len(array):,} bools. It needs one each.")
        array = np.flatnonzero(array)
    if not len(array):
        raise ValueError(f"{caller}: nothing is selected. A view needs at least one sample.")
    low, high = int(array.min()), int(array.max())
    if low < -length or high >= length:
        raise IndexError(f"{caller} has {length:,} samples, and no sample {low if low < -length else high:,}.")
    return array if low >= 0 else np.where(array < 0, array.astype(np.int64) + length, array)


def _one(source: Any, index: int) -> PyTree:
    """A sample as functions on the host get it; what is random gets the same numbers every time."""
    if isinstance(source, View):
        source, index = source.source, int(source.locate(np.array([index]))[0])
    if hasattr(source, "read_sample"):
        return source.read_sample(index, np.zeros(2, np.uint32) if source.keyed else None)[0]
    import jax

    return jax.tree.map(lambda leaf: leaf[0], source.read(np.array([index])))


def _shown(index: slice) -> str:
    parts = [index.start, index.stop] if index.step is None else [index.start, index.stop, index.step]
    return ":".join("" if part is None else str(part) for part in parts)
