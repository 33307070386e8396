"""Windows: several rows of a source as one sample. Which rows these are, in NumPy and traced."""

import dataclasses
from types import ModuleType

import numpy as np

from millstream.plan.keys import Array
from millstream.plan.selection import count_upto, digest_of


@dataclasses.dataclass(frozen=True)
class Window:
    """What a window is, wherever it starts.

    Attributes:
        length: How many rows it has.
        step: How many rows lie between one of them and the next.
        mask_key: The field that says which of its rows are real, if windows may reach over the end of their group.
    """

    length: int
    step: int = 1
    mask_key: str | None = None

    @property
    def span(self) -> int:
        """How many rows of the source it reaches over."""
        return (self.length - 1) * self.step + 1

    def rows(self, xp: ModuleType, starts: Array, ends: Array | None) -> tuple[Array, Array | None]:
        """The rows of windows along a new last axis, and which of them are real; None if all are.

        Args:
            xp: `numpy` or `jax.numpy`.
            starts: The first row of every window.
            ends: The end of every group, sorted, if windows may reach over it. What is not real is then the first row.
        """
        number = starts.dtype.type
        offsets = xp.arange(self.length, dtype=starts.dtype) * number(self.step)
        rows = starts[..., None] + offsets.reshape((1,) * starts.ndim + (-1,))
        if ends is None:
            return rows, None
        end = ends[count_upto(xp, ends, starts)].astype(starts.dtype)
        real = rows < end[..., None]
        return xp.where(real, rows, starts[..., None]), real


@dataclasses.dataclass(frozen=True)
class WindowStarts:
    """The first row of every window: those of a group lie `stride` rows apart.

    The table has a column for every group with windows: the number of its first window, and where that one starts.
    """

    length: int
    digest: str
    stride: int
    name: str = dataclasses.field(compare=False)
    is_keyed = False

    @property
    def words(self) -> str:
        return f"{self.length:,} {self.name}"

    def locate(self, xp: ModuleType, table: Array, words: Array, epoch: Array, positions: Array) -> Array:
        number = positions.dtype.type
        group = count_upto(xp, table[0], positions) - 1
        first, start = (column[group].astype(positions.dtype) for column in (table[0], table[1]))
        return start + (positions - first) * number(self.stride)


def count_windows(window: Window, stride: int, sizes: np.ndarray) -> np.ndarray:
    """How many windows start in groups of these sizes: those that fit, or one at every stride if they are padded."""
    if window.mask_key is not None:
        return -(-sizes // stride)
    return np.where(sizes >= window.span, (sizes - window.span) // stride + 1, 0)


def window_starts(
    window: Window, stride: int, starts: np.ndarray, sizes: np.ndarray, of: str
) -> tuple[WindowStarts, np.ndarray]:
    """The function and the table of the windows of groups, of which at least one has a window.

    Args:
        window: What a window is.
        stride: Rows from the start of a window to that of the next.
        starts: The first row of every group.
        sizes: Its rows.
        of: What the rows are, in words, if they are not those of a whole source.
    """
    counts = count_windows(window, stride, sizes)
    ends, has_some = np.cumsum(counts), counts > 0
    length, rows = int(ends[-1]), int(starts[-1] + sizes[-1])
    wide = max(length, rows) > 1 << 32
    table = np.stack([(ends - counts)[has_some], starts[has_some]]).astype(np.int64 if wide else np.uint32)
    digest = digest_of(np.concatenate([starts, sizes]))
    step = "" if window.step == 1 else f", step {window.step}"
    padded = "" if window.mask_key is None else ", padded"
    name = f"windows of {window.length:,} rows{step}, stride {stride:,}{padded} ({digest[:12]}){of}"
    return WindowStarts(length, digest, stride, name), table
