"""Samples in memory: a tree of arrays whose first axis counts them."""

import dataclasses
import functools
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from millstream.plan.ordering import Ordering, as_shuffle
from millstream.reading.contracts import PyTree
from millstream.reading.dtypes import check_array, holds_numbers, to_jax_dtype
from millstream.reading.view import Subscriptable
from millstream.text.errors import describe_leaf, describe_value, require_prefetch, table
from millstream.text.keywords import answer_keywords
from millstream.text.summaries import ArrayType, never_raising, value_text
from millstream.text.wrapping import table_source

_FEW = 8  # leaves that are all shown in an error
_MANY_FIELDS = 16  # more than samples usually have

if TYPE_CHECKING:
    import jax


@answer_keywords
@dataclasses.dataclass(frozen=True, eq=False)
class ArraySampleSource(Subscriptable):
    """The rows of a tree of arrays.

    Writable NumPy arrays are copied once, so that changing them later cannot change a running stream; read-only and
    JAX arrays are used as they are. Unless `jax_enable_x64` is set, 64-bit numbers become 32-bit ones, and integers
    that do not fit are refused.

    Example:
        >>> source = ms.ArraySampleSource({"image": np.zeros((100, 8, 8), np.uint8), "label": np.arange(100)})
        >>> len(source), source.spec()["image"].shape
        (100, (8, 8))

    Args:
        data: A pytree of NumPy or JAX arrays with the same number of rows.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
    """

    data: PyTree
    ordering: Ordering = "shuffle"

    def __post_init__(self) -> None:
        if hasattr(self.ordering, "shape"):
            raise TypeError(
                "ArraySampleSource takes its arrays as one tree. Got a second array where the ordering goes. "
                'Write ArraySampleSource({"x": x, "y": y}).'
            )
        check_ordering("ArraySampleSource", self.ordering)
        check_rows("ArraySampleSource", self.data)
        object.__setattr__(self, "data", _tree().map(functools.partial(to_jax_dtype, "ArraySampleSource"), self.data))

    def __len__(self) -> int:
        return len(_tree().leaves(self.data)[0])

    def spec(self) -> PyTree:
        """The shape and dtype of one sample."""
        import jax

        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), self.data)

    def read(self, indices: np.ndarray, out: PyTree | None = None) -> PyTree:
        """The rows at `indices` as NumPy arrays, into `out` if it is given."""

        def take(leaf: Any, out: np.ndarray | None = None) -> np.ndarray:
            # With an `out`, NumPy's default mode "raise" goes through a buffer; the plan's indices are always in range.
            return np.take(np.asarray(leaf), indices, axis=0, out=out, mode="raise" if out is None else "clip")

        return _tree().map(take, self.data) if out is None else _tree().map(take, self.data, out)

    @functools.cached_property
    def arrays(self) -> PyTree:
        """The data as JAX arrays, placed once."""
        import jax

        return jax.tree.map(_place, self.data)

    @never_raising
    def __repr__(self) -> str:
        rows = _tree().map(lambda leaf: ArrayType(leaf.shape[1:], leaf.dtype), self.data)
        return f"ArraySampleSource({len(self):,} samples, {value_text(rows)})"


def _tree() -> Any:
    import jax

    return jax.tree


def check_ordering(caller: str, ordering: Any) -> None:
    """Refuse an ordering that is not known."""
    as_shuffle(caller, ordering)


def check_reading(caller: str, ordering: Any, prefetch_size: Any) -> None:
    """Refuse an ordering or a prefetch_size that no source takes."""
    check_ordering(caller, ordering)
    require_prefetch(caller, prefetch_size)


def check_rows(caller: str, data: PyTree, *, in_files: bool = False) -> None:
    """Refuse a tree that is not made of arrays of numbers with the same, non-zero number of rows.

    Args:
        caller: The caller's name, for errors.
        data: The tree.
        in_files: Whether a leaf may stand for rows of a file: anything with a shape and a dtype.
    """
    import jax

    paths = jax.tree_util.tree_leaves_with_path(data)
    leaves = [(f"data{jax.tree_util.keystr(path)}", leaf) for path, leaf in paths]
    if not leaves:
        raise ValueError(f"{caller} needs at least one array. Got an empty tree.")
    for (name, leaf), (path, _) in zip(leaves, paths, strict=True):
        stands_for_rows = in_files and hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        if not stands_for_rows and not isinstance(leaf, np.ndarray | np.generic | jax.Array):
            if advice := _sample_list_advice(caller, data):
                raise TypeError(advice)
            raise TypeError(
                f"{caller} needs arrays. Got {name}: {describe_value(leaf)}. {_array_advice(data, path, leaf)}"
            )
        check_array(f"{caller}: {name}", leaf)
        if isinstance(leaf, np.ndarray) and not holds_numbers(leaf.dtype):
            raise TypeError(
                f"{caller} needs numbers or bools. Got {name}: {describe_leaf(leaf)}. "
                "Encode text, dates and objects as numbers, one array per field."
            )
    if {leaf.shape[:1] for _, leaf in leaves} != {leaves[0][1].shape[:1]} or leaves[0][1].shape[:1] in ((), (0,)):
        if advice := _sample_list_advice(caller, data):
            raise ValueError(advice)
        by_rows = {leaf.shape[:1]: (name, leaf) for name, leaf in reversed(leaves)}  # one of each, if they are many
        shown = leaves if len(leaves) <= _FEW else [*reversed(by_rows.values())]
        raise ValueError(
            f"{caller} needs leaves with the same, non-zero number of rows. Got:\n"
            f"{table((name, describe_leaf(leaf)) for name, leaf in shown)}\n"
            "Slice or pad them to one length before building the source."
        )
    if type(data) is list and len(data) > max(_MANY_FIELDS, len(leaves[0][1])):
        warnings.warn(
            f"{caller}: a list of {len(data):,} arrays is {len(data):,} fields of {len(leaves[0][1]):,} samples. If "
            "each of them is a sample, stack them: np.stack(data).",
            stacklevel=5,
        )


def _array_advice(data: PyTree, path: tuple[Any, ...], leaf: Any) -> str:
    """What to write in place of a leaf that is not an array."""
    import jax

    if line := table_source(leaf):
        return line
    lists = [number for number, key in enumerate(path) if isinstance(key, jax.tree_util.SequenceKey)]
    if not lists or not all(isinstance(key, jax.tree_util.DictKey) for key in path[: lists[0]]):
        name = f"data{jax.tree_util.keystr(path)}"
        return f"Write {name}.to_numpy()." if hasattr(leaf, "to_numpy") else f"Write np.asarray({name})."
    column, found = f"data{jax.tree_util.keystr(path[: lists[0]])}", data
    for key in path[: lists[0]]:
        found = found[key.key]
    try:
        np.asarray(found)
    except ValueError:
        return (
            f"Lists are trees here, and the items of {column} differ in length. Pad them to one length, and stack "
            "them with np.asarray."
        )
    return f"Lists and tuples are trees here: write np.asarray({column}), one array for all rows."


def _sample_list_advice(caller: str, data: PyTree) -> str | None:
    """What to write in place of a list of samples; None if the data are not one."""
    if not isinstance(data, list | tuple) or len(data) < 2 or not isinstance(data[0], dict | list | tuple):
        return None
    kind = type(data[0])
    if any(type(item) is not kind or len(item) != len(data[0]) for item in data):
        return None
    return (
        f"{caller} needs one array per field, with one row per sample. Got a {type(data).__name__} of {len(data):,} "
        f"samples ({kind.__name__}s). Write ms.DatasetSource(data), or stack them: "
        "jax.tree.map(lambda *rows: np.stack(rows), *data)."
    )


def _place(leaf: Any) -> "jax.Array":
    import jax

    if isinstance(leaf, jax.Array):
        return leaf
    with jax.ensure_compile_time_eval():  # a loader may be built where a program is traced
        placed = jax.device_put(leaf)
        if not (isinstance(leaf, np.ndarray) and leaf.flags.writeable):
            return placed
        # Where the device is the host, JAX uses memory as it is if that happens to be aligned. Then NumPy copies it: a
        # program that does would take 10 ms to compile, for every shape.
        [device] = placed.block_until_ready().devices()
        is_shared = device.platform == "cpu" and placed.unsafe_buffer_pointer() == leaf.ctypes.data
        return jax.device_put(leaf.copy()) if is_shared else placed
