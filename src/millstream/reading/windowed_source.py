"""Windows of the rows of a source, read on the host: all rows of a batch by one call. It loads no JAX."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from millstream.plan.keys import fold
from millstream.plan.windows import Window
from millstream.reading.contracts import IndexedSource, PyTree
from millstream.reading.host_source import HostSource, as_host_source, read_like
from millstream.reading.samples import spec_of


class WindowedSource(HostSource):
    """The windows of a source, named by the row that they start at.

    Args:
        inner: The source, or a view.
        window: What a window is.
        ends: The ends of groups, if windows may reach over them.
        name: The caller, for errors.
    """

    def __init__(self, inner: IndexedSource, window: Window, ends: np.ndarray | None, name: str) -> None:
        self._inner = host = as_host_source(inner)
        self._window, self._ends, self._name = window, ends, name
        self._length = len(host) if ends is not None else len(host) - window.span + 1
        rows = host.sample_spec
        self.sample_spec = spec_of(name, windowed_spec(window, rows.tree()))
        numbers: Any = rows.unflatten(list(range(len(rows.shapes))))  # pyright: ignore[reportAttributeAccessIssue]
        if ends is not None:
            numbers = {**numbers, window.mask_key: len(rows.shapes)}
        self._places = np.argsort(self.sample_spec.flatten(name, numbers)).tolist()  # of the leaves, then of the mask
        self.ordering = host.ordering
        self.reads_together = host.reads_together
        read_like(self, [host])

    def __len__(self) -> int:
        return self._length

    @property
    def array_rows(self) -> Any:
        """What the rows lie in; None if they do not lie in arrays."""
        return getattr(self._inner, "array_rows", None)

    def expect(self, indices: np.ndarray | None) -> None:
        if indices is None:
            return self._inner.expect(None)
        if self._ends is None and self._window.step == 1:
            return self._inner.expect_runs(indices, self._window.length)
        rows, real = self._window.rows(np, indices, self._ends)
        self._inner.expect(rows.ravel() if real is None else rows[real])

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> None:
        leaves = [out[place] for place in self._places]
        row_keys = None if keys is None else _row_keys(keys, self._window.length)
        # Memory that lies apart cannot be seen as rows.
        together = all(leaf.flags.c_contiguous for leaf in leaves)
        if together and self._ends is None and self._window.step == 1:
            return self._inner.read_runs(indices, leaves, row_keys)
        rows, real = self._window.rows(np, indices, self._ends)
        if real is not None:
            leaves.pop()[...] = real
        if together and (real is None or real.all()):
            flat = [leaf.reshape(-1, *leaf.shape[2:]) for leaf in leaves]
            self._inner.read_rows(rows.ravel(), flat, row_keys)
            return
        chosen = np.ones(rows.shape, bool) if real is None else real
        found = self._inner.sample_spec.empty(int(chosen.sum()))
        self._inner.read_rows(rows[chosen], found, None if row_keys is None else row_keys[chosen.ravel()])
        for leaf, read in zip(leaves, found, strict=True):
            leaf[~chosen] = 0
            leaf[chosen] = read


def windowed_spec(window: Window, row: PyTree) -> PyTree:
    """The shape and dtype of a window of rows, as a tree."""
    import jax

    spec = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((window.length, *leaf.shape), leaf.dtype), row)
    if window.mask_key is None:
        return spec
    return {**spec, window.mask_key: jax.ShapeDtypeStruct((window.length,), np.dtype(bool))}


def _row_keys(keys: np.ndarray, length: int) -> np.ndarray:
    """A key for every row of windows that have these keys."""
    pair = fold(np, (keys[:, :1], keys[:, 1:]), np.arange(length, dtype=np.uint32)[None])
    return np.stack(pair, axis=-1).reshape(-1, 2)
