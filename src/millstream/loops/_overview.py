"""A table of the arrays in a tree: what a model is made of, and how large it is."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millstream.reading.contracts import PyTree
from millstream.reading.memory import nbytes
from millstream.text.errors import require_bool, require_int
from millstream.text.html import html_table
from millstream.text.tables import line_width, size_text, text_table


@dataclasses.dataclass(frozen=True)
class OverviewRow:
    """One array of a tree, or all that begin with one prefix.

    Example:
        >>> ms.overview({"w": jnp.ones((3, 4))}).rows[0].count
        12

    Attributes:
        path: Where it is.
        arrays: How many arrays; 1 but for prefixes.
        shape: Its shape; None for several arrays.
        dtype: Its dtype; several are listed.
        count: Numbers in it.
        nbytes: Bytes, all devices together, what is replicated counted once.
        mean: Of its numbers; None if that was not asked for, or cannot be known.
        std: Their standard deviation; likewise.
        sharding: How it is split over devices; "" on a single one.
    """

    path: str
    arrays: int
    shape: tuple[int, ...] | None
    dtype: str
    count: int
    nbytes: int
    mean: float | None
    std: float | None
    sharding: str


class Overview:
    """A table of the arrays in a tree; printed, it is text. See `overview`.

    Example:
        >>> table = ms.overview({"w": jnp.ones((3, 4)), "b": jnp.ones(4)})
        >>> table.arrays, table.count, table.nbytes
        (2, 16, 64)

    Attributes:
        rows: One per array, or prefix.
        arrays: How many arrays, all together.
        count: Numbers in them.
        nbytes: Bytes.
    """

    def __init__(self, rows: list[OverviewRow]) -> None:
        self.rows = rows
        self.arrays = sum(row.arrays for row in rows)
        self.count = sum(row.count for row in rows)
        self.nbytes = sum(row.nbytes for row in rows)

    def __repr__(self) -> str:
        return text_table(_HEADER, map(_cells, self.rows), numbers=_NUMBERS, total=self._total(), width=line_width())

    def _repr_html_(self) -> str:
        return html_table(_HEADER, map(_cells, self.rows), numbers=_NUMBERS, total=self._total())

    def _total(self) -> tuple[str, ...]:
        return "total", _arrays(self.arrays), "", f"{self.count:,}", size_text(self.nbytes), "", "", ""


_HEADER = ("path", "shape", "dtype", "count", "bytes", "mean", "std", "sharding")
_NUMBERS = ("count", "bytes", "mean", "std")


def overview(tree: PyTree, *, depth: int | None = None, stats: bool = False) -> Overview:
    """A table of the arrays in a tree: parameters, an optimizer's state, a model, or their shapes.

    Example:
        >>> params = {"dense": {"w": jnp.ones((784, 10)), "b": jnp.zeros(10)}}
        >>> ms.overview(params)
        path     shape      dtype    count    bytes
        ───────────────────────────────────────────
        dense.b  (10,)      float32     10     40 B
        dense.w  (784, 10)  float32  7,840  31.4 kB
        ───────────────────────────────────────────
        total    2 arrays            7,850  31.4 kB

    Args:
        tree: Any pytree; leaves that are not arrays (nor `jax.ShapeDtypeStruct`s) are left out.
        depth: Put together what has that many first parts of its path in common; None for a row per array.
        stats: Whether to read all arrays and show their means and standard deviations.
    """
    if depth is not None:
        require_int("overview", "depth", depth, least=1)
    require_bool("overview", "stats", stats)
    groups: dict[str, list[Any]] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            groups.setdefault(_path(keys[:depth]), []).append(leaf)
    return Overview([_row(path, leaves, stats) for path, leaves in groups.items()])


def _path(keys: tuple[Any, ...]) -> str:
    # Variables of Flax are a level of their own, which says nothing.
    if len(keys) > 1 and keys[-1] == jax.tree_util.GetAttrKey("value"):
        keys = keys[:-1]
    return jax.tree_util.keystr(keys, simple=True, separator=".") or "(the tree itself)"


def _row(path: str, leaves: list[Any], stats: bool) -> OverviewRow:
    mean, std = _mean_and_std(leaves) if stats else (None, None)
    shardings = {_sharding(leaf) for leaf in leaves}
    return OverviewRow(
        path=path,
        arrays=len(leaves),
        shape=tuple(leaves[0].shape) if len(leaves) == 1 else None,
        dtype=", ".join(dict.fromkeys(str(leaf.dtype) for leaf in leaves)),
        count=sum(math.prod(leaf.shape) for leaf in leaves),
        nbytes=nbytes(leaves),
        mean=mean,
        std=std,
        sharding=shardings.pop() if len(shardings) == 1 else "mixed",
    )


def _mean_and_std(leaves: list[Any]) -> tuple[float | None, float | None]:
    """Over all numbers of several arrays; None if one of them is only a shape, has no numbers, or is elsewhere."""
    count, mean, squares = 0, 0.0, 0.0
    for leaf in leaves:
        is_real = jnp.issubdtype(leaf.dtype, jnp.integer) or jnp.issubdtype(leaf.dtype, jnp.floating)
        if isinstance(leaf, jax.ShapeDtypeStruct) or not is_real:
            return None, None
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            return None, None
        values = np.asarray(leaf).astype(np.float64)
        both, apart = count + values.size, (values.mean() if values.size else 0.0) - mean
        # Moments are put together from those of the parts: a difference of two large sums would lose small ones.
        squares += np.square(values - values.mean()).sum() if values.size else 0.0
        squares += apart**2 * count * values.size / max(both, 1)
        count, mean = both, mean + apart * values.size / max(both, 1)
    return (None, None) if count == 0 else (float(mean), float(np.sqrt(squares / count)))


def _sharding(leaf: Any) -> str:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or len(sharding.device_set) == 1:
        return ""
    devices = len(sharding.device_set)
    if sharding.is_fully_replicated:
        return f"replicated over {devices}"
    spec = getattr(sharding, "spec", None)
    return f"{type(sharding).__name__ if spec is None else spec} over {devices}".replace("PartitionSpec", "P")


def _cells(row: OverviewRow) -> tuple[str, ...]:
    shape = _arrays(row.arrays) if row.shape is None else str(row.shape)
    stats = ("" if value is None else f"{value:.3g}" for value in (row.mean, row.std))
    return (row.path, shape, row.dtype, f"{row.count:,}", size_text(row.nbytes), *stats, row.sharding)


def _arrays(count: int) -> str:
    return "1 array" if count == 1 else f"{count:,} arrays"
