"""Fetching rows and blanking padding, in the form that suits where the result goes.

Inside a larger program a plain gather is best: XLA fuses it with whatever comes next. A program that makes a batch
and nothing else (`apart`) wants something else on the CPU, measured with JAX 0.10:

- rows copied as flat vectors, two to three times as fast as into shapes such as (28, 28, 1). XLA would merge a plain
  reshape into the gather again; a loop or a branch keeps them apart.
- a small batch of few arrays copied by a loop. XLA divides a gather among its threads by the size of the whole array,
  and for a small batch of a large array the threads cost more than the copying. A turn of a loop over more than 16
  arrays takes several times as long for each of them: 2,900 instead of 710 us for 100 arrays.
- few pieces: XLA runs a program of up to about eight on the caller's thread, and a larger one on its pool. So numbers
  of rows become int32 inside the loop: 48 us of one core for 128 images, where a piece more makes it 80, and 90 of CPU.
- rows of a large array read by NumPy just before (`RowTouch`). The loop waits for one row after the other that is in
  no cache; NumPy has many on their way: 128 images come in 9 us, and the loop then takes 3 instead of 30.
- padding blanked where rows are copied. A branch that leaves whole batches alone copies them: 250 instead of 95 us for
  128 images. Where it is left to a later stage, only the batches that have some are touched.

On other platforms a branch would wait for the host, and the plain form is used everywhere.

Windows of short rows, such as tokens, are slices: 41 instead of 268 us for 256 of 1,024 numbers. Longer rows are
fetched one by one: 162 instead of 255 us for 128 windows of 8 rows of 3 kB.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from millstream.plan.mixture import Numbering
from millstream.plan.selection import Selection
from millstream.plan.windows import Window
from millstream.reading.contracts import PyTree
from millstream.reading.windowed_source import windowed_spec

_SMALL_BATCH, _FEW_ARRAYS = 256 * 1024, 12  # bytes
_UNCACHED = 8 << 20  # bytes of an array of which most rows are in no cache
_SHORT_ROW = 64  # bytes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowedArrays:
    """Arrays whose samples are windows of their rows, named by where they start.

    Attributes:
        arrays: A tree of arrays, or windowed arrays.
        tables: Those of the selection.
        ends: The ends of groups, if windows may reach over them.
        window: What a window is.
        selection: The row of the arrays at each row of the windows.
    """

    arrays: PyTree
    tables: tuple[Any, ...]
    ends: Any
    window: Window = dataclasses.field(metadata={"static": True})
    selection: Selection = dataclasses.field(metadata={"static": True})

    def spec(self) -> PyTree:
        """The shape and dtype of one window."""
        return windowed_spec(self.window, sample_spec(self.arrays))

    def take(self, starts: jax.Array, *, apart: bool) -> PyTree:
        """The windows that start at these rows."""
        rows, real = self.window.rows(jnp, starts, self.ends)
        unkeyed: Any = None
        rows = self.selection.locate(jnp, self.tables, unkeyed, unkeyed, rows)
        together = self.window.step == 1 and real is None and not self.selection.functions
        if not together or isinstance(self.arrays, WindowedArrays):
            value = take(self.arrays, rows, apart=apart)
            return value if real is None else {**_select(value, real), self.window.mask_key: real}

        def fetch(leaf: jax.Array) -> jax.Array:
            is_short = leaf.size // leaf.shape[0] * leaf.dtype.itemsize <= _SHORT_ROW
            return _slices(leaf, starts, self.window.length) if is_short else take(leaf, rows, apart=apart)

        return jax.tree.map(fetch, self.arrays)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NumberedArrays:
    """Arrays of several sources, whose samples have the number of their source in a field.

    Attributes:
        arrays: A tree of arrays, or windowed arrays, whose samples are dicts.
        numbering: Which source, and which row, an index stands for.
        field: The name of the field.
    """

    arrays: PyTree
    numbering: Numbering = dataclasses.field(metadata={"static": True})
    field: str = dataclasses.field(metadata={"static": True})

    def spec(self) -> PyTree:
        """The shape and dtype of one sample."""
        return {**sample_spec(self.arrays), self.field: jax.ShapeDtypeStruct((), np.dtype(np.int32))}

    def take(self, indices: jax.Array, *, apart: bool) -> PyTree:
        """The samples at these indices."""
        numbers, rows = self.numbering.at(jnp, indices)
        return {**take(self.arrays, rows, apart=apart), self.field: numbers}


def sample_spec(arrays: PyTree) -> PyTree:
    """The shape and dtype of one row of some arrays."""
    if isinstance(arrays, WindowedArrays | NumberedArrays):
        return arrays.spec()
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), arrays)


class RowTouch:
    """Reads rows with NumPy and throws them away, so that a program which copies them next finds them in the caches.

    Args:
        arrays: The arrays that the program takes rows of.
        count: How many rows.
    """

    def __init__(self, arrays: PyTree, count: int) -> None:
        self._numbering = arrays.numbering if isinstance(arrays, NumberedArrays) else None
        arrays = arrays.arrays if isinstance(arrays, NumberedArrays) else arrays
        leaves = [] if isinstance(arrays, WindowedArrays) else jax.tree.leaves(arrays)
        cold = [leaf for leaf in leaves if leaf.nbytes >= _UNCACHED] if _is_small(leaves, count) else []
        views = [view for view in map(_memory_of, cold) if view is not None]
        self._arrays = [(view, np.empty((count, *view.shape[1:]), view.dtype)) for view in views]

    def __call__(self, indices: np.ndarray) -> None:
        """Touch the rows at `indices`."""
        if self._arrays and self._numbering is not None:
            indices = self._numbering.rows_at(indices)
        for array, room in self._arrays:
            array.take(indices, 0, room, "clip")  # "raise" would go through a buffer


def _memory_of(leaf: jax.Array) -> np.ndarray | None:
    """The memory of an array as NumPy sees it, if it is the host's."""
    if not isinstance(leaf.dtype, np.dtype) or not leaf.is_fully_addressable or len(leaf.devices()) > 1:
        return None
    if {device.platform for device in leaf.devices()} != {"cpu"}:
        return None
    view = np.asarray(leaf)
    return view if view.ctypes.data == leaf.unsafe_buffer_pointer() else None


def take(arrays: PyTree, indices: jax.Array, *, apart: bool, keep: jax.Array | None = None) -> PyTree:
    """The rows at `indices` of every array.

    Args:
        arrays: The arrays.
        indices: Which rows.
        apart: Whether a program does nothing else.
        keep: Which rows are wanted; the others are zeros. None for all of them.
    """
    if isinstance(arrays, WindowedArrays | NumberedArrays):
        value = arrays.take(indices, apart=apart)
        return value if keep is None else blank(value, keep, apart=apart)
    if not apart:
        return _gather(arrays, indices, keep)
    return lax.platform_dependent(arrays, indices, keep, cpu=_take_flat, default=_gather)


def blank(value: PyTree, keep: jax.Array, *, apart: bool) -> PyTree:
    """Zeros in the rows that are not kept."""
    if not apart:
        return _select(value, keep)
    return lax.platform_dependent(value, keep, cpu=_select_if_any, default=_select)


def _gather(arrays: PyTree, rows: jax.Array, keep: jax.Array | None = None) -> PyTree:
    rows = rows.astype(np.int32)
    value = jax.tree.map(lambda leaf: leaf.at[rows].get(mode="promise_in_bounds"), arrays)
    return value if keep is None else _select(value, keep)


def _slices(leaf: jax.Array, starts: jax.Array, length: int) -> jax.Array:
    """Rows from `start` to before `start + length`, for every start."""
    flat = starts.reshape(-1).astype(np.int32)
    cut = jax.vmap(lambda start: lax.dynamic_slice_in_dim(leaf, start, length))(flat)
    return cut.reshape(*starts.shape, length, *leaf.shape[1:])


def _take_flat(arrays: PyTree, rows: jax.Array, keep: jax.Array | None) -> PyTree:
    flat = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], -1), arrays)
    fetch = _copy_one_by_one if _is_small(jax.tree.leaves(flat), rows.size) else _gather_in_a_branch
    fetched = fetch(flat, rows.reshape(-1), None if keep is None else keep.reshape(-1))
    return jax.tree.map(lambda got, leaf: got.reshape(*rows.shape, *leaf.shape[1:]), fetched, arrays)


def _is_small(leaves: list[jax.Array], count: int) -> bool:
    """Whether that many rows of some arrays are copied by a loop."""
    size = sum(count * math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in leaves)
    return size <= _SMALL_BATCH and len(leaves) <= _FEW_ARRAYS


def _copy_one_by_one(flat: PyTree, rows: jax.Array, keep: jax.Array | None) -> PyTree:
    def copied(row: jax.Array, kept: jax.Array | None) -> PyTree:
        number = row.astype(np.int32)  # before the loop it would be a piece of its own
        value = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, number, keepdims=False), flat)
        return value if kept is None else _select(value, kept)

    return lax.map(lambda one: copied(*one), (rows, keep))


def _gather_in_a_branch(flat: PyTree, rows: jax.Array, keep: jax.Array | None) -> PyTree:
    if keep is not None:
        return lax.cond(keep.all(), lambda flat, rows, _: _gather(flat, rows), _gather, flat, rows, keep)
    nothing = jax.tree.map(lambda leaf: jnp.zeros((*rows.shape, leaf.shape[1]), leaf.dtype), flat)
    return lax.cond(rows[0] >= 0, _gather, lambda *_: nothing, flat, rows)  # always taken, which XLA cannot know


def _select(value: PyTree, keep: jax.Array) -> PyTree:
    def select(leaf: jax.Array) -> jax.Array:
        return jnp.where(keep.reshape(keep.shape + (1,) * (leaf.ndim - keep.ndim)), leaf, jnp.zeros((), leaf.dtype))

    return jax.tree.map(select, value)


def _select_if_any(value: PyTree, keep: jax.Array) -> PyTree:
    return lax.cond(keep.all(), lambda value, _: value, _select, value, keep)
