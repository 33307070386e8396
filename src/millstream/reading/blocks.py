"""The blocks that the samples of a source are stored in: row groups, record batches, chunks, shards."""

from typing import Any

import numpy as np

from millstream.plan.block_order import StoredBlocks
from millstream.plan.ordering import Shuffle
from millstream.plan.selection import Strided
from millstream.reading.contracts import IndexedSource
from millstream.reading.memory import nbytes
from millstream.reading.view import View, source_name
from millstream.text.errors import describe_leaf, describe_value

_TOGETHER = 1 << 20  # positions of a view that are looked at together
_UNKNOWN_BYTES = 4096  # of a sample that is a Python object, and not from files


def block_sizes(source: IndexedSource) -> np.ndarray | None:
    """How many samples each block of a source has, in order; of a view, how many of a block stand next to each other.

    None if the source does not say it, or if which samples there are depends on the epoch.
    """
    if isinstance(source, View):
        below = None if source.selection.is_keyed else block_sizes(source.source)
        return None if below is None else _sizes_in_view(source, np.cumsum(below))
    given: Any = getattr(source, "blocks", None)
    if given is None:
        return None
    name, sizes = type(source).__name__, np.asarray(given)
    if sizes.ndim != 1 or sizes.dtype.kind not in "iu" or (sizes < 0).any():
        found = describe_leaf(given) if isinstance(given, np.ndarray) else describe_value(given)
        raise ValueError(f"{name}.blocks needs to be the number of samples of each block, in order. Got {found}.")
    if int(sizes.sum()) != len(source):
        raise ValueError(
            f"{name}.blocks needs to add up to the {len(source):,} samples of the source. Got {len(sizes):,} blocks "
            f"with {int(sizes.sum()):,} samples."
        )
    return sizes.astype(np.int64)


def stored_blocks(shuffle: Shuffle, source: IndexedSource) -> StoredBlocks:
    """What a block shuffle of a source needs to know; refuses one whose blocks are not known."""
    sizes = block_sizes(source)
    if sizes is None and shuffle.block_size is None:
        name = repr(source) if isinstance(source, View) else source_name(source)
        raise ValueError(
            f"{shuffle} needs to know the blocks that samples are stored in. {name} does not say them. "
            'Pass block_size=..., how many samples to read in sequence; or, for data in memory, use ordering="shuffle".'
        )
    if sizes is None:
        sizes = np.array([len(source)])
    base: Any = source.source if isinstance(source, View) else source
    kept = getattr(base, "cache_bytes", None) or 0
    return StoredBlocks(sizes, _sample_bytes(base), bool(getattr(base, "divides_blocks", False)), kept)


def _sizes_in_view(view: View, ends: np.ndarray) -> np.ndarray:
    """How many samples of a view come from one block, and then from the next; blocks end at `ends`."""
    functions = view.selection.functions
    if all(isinstance(one, Strided) and one.step == 1 for one in functions):
        start = int(view.locate(np.zeros(1, np.int64))[0])
        return np.diff(np.clip(np.append(0, ends), start, start + len(view)))
    firsts, before = [], -1
    for start in range(0, len(view), _TOGETHER):
        indices = view.locate(np.arange(start, min(start + _TOGETHER, len(view))))
        blocks = np.searchsorted(ends, indices, side="right")
        firsts.append(start + np.flatnonzero(np.diff(blocks, prepend=before)))
        before = int(blocks[-1])
    return np.diff(np.append(np.concatenate(firsts), len(view)))


def _sample_bytes(source: Any) -> int:
    """About how many bytes a sample takes: those of its arrays, or else of its files."""
    found = nbytes(source.spec())
    files = sum(size for _, size, _ in getattr(source, "stamps", ()))
    return found or files // len(source) or _UNKNOWN_BYTES
