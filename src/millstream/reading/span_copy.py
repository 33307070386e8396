"""Pieces of documents, copied into packed rows from the arrays that they are slices of. It loads no JAX."""

import dataclasses
import functools
import math

import numpy as np

from millstream.plan.packing import Pieces
from millstream.reading._settings import is_worker
from millstream.reading.dtypes import can_become, narrowed
from millstream.reading.host_source import Spans


@dataclasses.dataclass(frozen=True)
class WantedPieces:
    """The pieces of some rows, and what their documents must be like.

    Attributes:
        pieces: The pieces.
        counts: How many values of its document each one has, without the end that is added to it.
        sizes: How many places each one takes, up to the next one or the end of its row.
        least: How long its document is, or at least.
        most: The same, or at most.
    """

    pieces: Pieces
    counts: np.ndarray
    sizes: np.ndarray
    least: np.ndarray
    most: np.ndarray

    def differ(self, lengths: np.ndarray) -> np.ndarray:
        """Whether the documents of all pieces, which have these lengths, have other ones than planned."""
        return (lengths < self.least) | (lengths > self.most)

    @functools.cached_property
    def listed(self) -> list[tuple[int, ...]]:
        """Row, place, start, count, least and most of each piece."""
        pieces = self.pieces
        columns = (pieces.rows, pieces.places, pieces.starts, self.counts, self.least, self.most)
        return list(zip(*(column.tolist() for column in columns), strict=True))


_SHORT = 32  # tokens of a piece, on average


class SpanCopy:
    """Copies pieces of documents from arrays of one kind into a leaf of whole rows.

    The bytes of those of one array are joined, unless they are few: 45 µs for 210 pieces of 310 tokens, where slices
    take 120. That holds the GIL, which others may want while a disk is waited for. So pieces of mapped files are
    gathered by their numbers, mostly without it, in 115 µs, except in worker processes, where nothing else wants it.
    Those of several arrays are slices: an array has few of them.

    Args:
        name: The leaf, for errors.
        target: The leaf, (rows, length, ...).
        wanted: The pieces.
    """

    def __init__(self, name: str, target: np.ndarray, wanted: WantedPieces) -> None:
        self._name, self._target, self._wanted = name, target, wanted
        self._copied: np.ndarray | None = None  # the target, or the same in the dtype of the arrays

    def copy(self, which: np.ndarray | slice, spans: Spans) -> bool:
        """Copy some pieces, or all, if a slice is given; False if their documents are not what was planned.

        Where all are copied at once, places that belong to none of them may have anything.
        """
        array, target = spans[0], self._target
        if self._copied is None and can_become(array.dtype, target.dtype):
            self._copied = target if array.dtype == target.dtype else np.zeros(target.shape, array.dtype)
        copied = self._copied
        if copied is None or array.dtype != copied.dtype or array.shape[1:] != copied.shape[2:] or not len(array):
            return False
        return self._copy_all(copied, spans) if isinstance(which, slice) else self._copy_slices(copied, which, spans)

    def _copy_all(self, copied: np.ndarray, spans: Spans) -> bool:
        (array, begins, ends), wanted = spans, self._wanted
        if wanted.differ(ends - begins).any():
            return False
        starts, shape = begins + wanted.pieces.starts, copied.shape[:2]
        is_long = len(starts) * _SHORT <= math.prod(shape)
        if is_long and (is_worker() or _is_owned(array)) and _join(copied, array, starts, wanted.sizes):
            return True
        tokens = np.repeat(starts - wanted.pieces.places, wanted.sizes).reshape(shape)
        tokens += np.arange(shape[1])
        np.take(array, tokens, axis=0, out=copied, mode="clip")  # "raise" would go through a buffer
        return True

    def _copy_slices(self, copied: np.ndarray, which: np.ndarray, spans: Spans) -> bool:
        (array, begins, ends), listed = spans, self._wanted.listed
        for at, begin, end in zip(which.tolist(), begins.tolist(), ends.tolist(), strict=True):
            row, place, start, count, least, most = listed[at]
            if not least <= end - begin <= most:
                return False
            copied[row, place : place + count] = array[begin + start : begin + start + count]
        return True

    def finish(self) -> bool:
        """Convert what was copied to the dtype of the batch; False if it does not fit."""
        if self._copied is not None and self._copied is not self._target:
            try:
                self._target[...] = narrowed(self._name, self._copied, self._target.dtype)
            except ValueError:
                return False
        return True


def _is_owned(array: np.ndarray) -> bool:
    """Whether an array lies in memory that NumPy has allocated, and not in a file that somebody has mapped."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.base is None


def _join(out: np.ndarray, array: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> bool:
    """Fill an array with pieces of another one, in their order; False if the other one does not have them all."""
    if not (out.flags.c_contiguous and array.flags.c_contiguous):
        return False
    size = array.dtype.itemsize * math.prod(array.shape[1:])
    data, begins = np.asarray(array).reshape(-1).view(np.uint8).data, starts * size
    found = b"".join([data[a:b] for a, b in zip(begins.tolist(), (begins + sizes * size).tolist(), strict=True)])
    if len(found) != out.nbytes:
        return False
    out.reshape(-1).view(np.uint8)[:] = np.frombuffer(found, np.uint8)
    return True
