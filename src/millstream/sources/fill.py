"""Samples that a function writes into the memory of the batch, item by item."""

import gc
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from millstream.files.plain import decode, encode
from millstream.plan.ordering import Ordering
from millstream.reading.contracts import Items, PyTree, T
from millstream.reading.derived_sources import generator
from millstream.reading.host_source import SampleReader
from millstream.reading.samples import SampleSpec, spec_of
from millstream.reading.stats import add_time
from millstream.sources.array import check_ordering
from millstream.text.errors import (
    describe_leaf,
    describe_value,
    function_name,
    noted,
    require_bool,
    require_callable,
    require_items,
    require_prefetch,
    require_readers,
)

_STALE = 0xA5  # repeated, it is no NaN, whose arithmetic would warn


class FillSource(SampleReader):
    """Items that a function turns into samples by writing them where the batch lies: no array is made on the way.

    Example:
        >>> def fill(word, arrays, rng):
        ...     arrays["letters"][: len(word)] = np.frombuffer(word.encode(), np.uint8)
        ...     arrays["length"][...] = len(word)
        ...     return {"word": word}
        >>> spec = {"letters": ((8,), np.uint8), "length": ((), np.int32)}
        >>> source = ms.sources.FillSource(["oat", "rye", "barley"], fill, spec)
        >>> loader = ms.DataLoader([source, ms.BatchTransform(2)], executor=ms.Threads(2))

    `arrays` are views of memory that is used again for other batches: write into them (`arrays["length"][...] = 3`) and
    keep none of them. They are zeros when `fill` is called, and NumPy casts what is written into them.

    Args:
        items: Any sequence with a length and `[index]`: paths, rows of a table, arrays.
        fill: `fill(item, arrays, rng)` writes one item into `arrays`, a tree of arrays as in the spec. It may return a
            dict of plain values (captions, paths, small arrays), which are the `additional` of the batch's `BatchInfo`.
            It is called from several threads.
        spec: The shapes and dtypes of a sample, as a pytree of `jax.ShapeDtypeStruct` or of (shape, dtype) pairs.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
        readers: How many threads read, if the loader has no executor.
        seeded: Whether `rng` is a `numpy.random.Generator`, which depends on the run's key, the epoch and the sample
            alone. False makes it None, as validation wants it.
        debug: Call `fill` twice per sample, and warn if it leaves elements unwritten or keeps a view; in a
            worker process, on stderr.
    """

    def __init__(
        self,
        items: Items[T],
        fill: Callable[[T, PyTree, Any], dict[str, PyTree] | None],
        spec: PyTree,
        *,
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
        readers: int = 4,
        seeded: bool = True,
        debug: bool = False,
    ) -> None:
        caller = "FillSource"
        require_items(caller, "items", items)
        require_callable(caller, "fill", fill)
        check_ordering(caller, ordering)
        require_prefetch(caller, prefetch_size)
        require_readers(caller, "readers", readers)
        for name, flag in {"seeded": seeded, "debug": debug}.items():
            require_bool(caller, name, flag)
        self._items = items
        self._fill = fill
        self._caller = f"{caller}({function_name(fill)})"
        self._debug = debug
        self._warned: set[str] = set()
        self.sample_spec: SampleSpec = _given_spec(caller, spec)  # pyright: ignore[reportIncompatibleVariableOverride]
        self.ordering: Ordering = ordering
        self.prefetch_size = prefetch_size
        self.readers = readers
        self.keyed = seeded

    def __len__(self) -> int:
        return len(self._items)

    def item(self, index: int) -> Any:
        """An item as it was given."""
        try:
            return self._items[index]
        except Exception as error:
            note = f"This came from items[{index}] of {self._caller}."
            raise noted(error, note)  # noqa: B904 (`from` would take away the error's own cause)

    def read_row(
        self, index: int, out: Sequence[np.ndarray], row: int, key: np.ndarray | None
    ) -> dict[str, PyTree] | None:
        if self._debug:
            return self._read_twice(index, out, row, key)
        leaves = [leaf[row, ...] for leaf in out]  # with the dots, a scalar is an array that can be written to as well
        for leaf in leaves:
            leaf[...] = 0  # where a batch before this one has left its values
        return self._filled(index, leaves, key)

    def _filled(self, index: int, leaves: list[np.ndarray], key: np.ndarray | None) -> dict[str, Any] | None:
        """Fill the arrays with an item; what is returned is the same in every executor, and no view of them."""
        item, arrays = self.item(index), self.sample_spec.unflatten(leaves)
        rng = None if key is None else generator(key, "FillSource")
        try:
            begun = time.perf_counter()
            returned = self._fill(item, arrays, rng)
            add_time("fill", begun)
        except Exception as error:
            note = f"This came from {self._caller} at sample {index}, item {describe_value(item)}."
            raise noted(error, note)  # noqa: B904 (`from` would take away the error's own cause)
        self._require_same_arrays(index, arrays, leaves)
        return None if returned is None else self._plain(index, returned)

    def _require_same_arrays(self, index: int, arrays: PyTree, leaves: list[np.ndarray]) -> None:
        after = self.sample_spec.flatten(f"{self._caller}: what fill made of arrays at sample {index}", arrays)
        for name, found, leaf in zip(self.sample_spec.names, after, leaves, strict=True):
            if found is not leaf:
                raise TypeError(
                    f"{self._caller} needs fill to write into the arrays it is given. At sample {index} it put another "
                    f"value in the place of arrays{name}: {describe_leaf(found)}. Write arrays{name}[...] = value."
                )

    def _plain(self, index: int, returned: Any) -> dict[str, Any]:
        if type(returned) is not dict or not all(type(name) is str for name in returned):
            raise TypeError(
                f"{self._caller} needs fill to return None or a dict from names to plain values. "
                f"Got {describe_value(returned)} at sample {index}. Write arrays into `arrays`, and name the rest."
            )
        return decode(encode(returned, f"{self._caller}: at sample {index}, fill"))

    def _read_twice(
        self, index: int, out: Sequence[np.ndarray], row: int, key: np.ndarray | None
    ) -> dict[str, PyTree] | None:
        """Fill two rows of different contents: what fill does not write tells them apart."""
        leaves, others = self._memory(0), self._memory(_STALE)
        returned = self._filled(index, leaves, key)
        before = _references(others)
        self._filled(index, others, key)
        if _references(others) != before:
            gc.collect()  # or it is held by a cycle that nobody holds
        after = _references(others)
        for number, name in enumerate(self.sample_spec.names):
            left, size = _untouched(leaves[number], others[number]), leaves[number].size
            if after[number] > before[number]:
                self._warn(
                    f"{self._caller}: fill keeps a view of arrays{name}",
                    f"after sample {index}. Its memory is used again for another batch, whose values the view will "
                    "then show. Keep a copy: np.copy.",
                )
            if left:
                self._warn(
                    f"{self._caller}: fill leaves elements of arrays{name} unwritten",
                    f"({left} of {size} at sample {index}). They are zeros. Write all of them; zeros too, if zeros are "
                    "meant.",
                )
            out[number][row] = leaves[number]
        return returned

    def _memory(self, byte: int) -> list[np.ndarray]:
        leaves = zip(self.sample_spec.shapes, self.sample_spec.dtypes, strict=True)
        memory = [np.empty(shape, dtype) for shape, dtype in leaves]
        for leaf in memory:
            _bytes_of(leaf)[:] = byte
        return memory

    def _warn(self, rule: str, found: str) -> None:
        if rule not in self._warned:
            self._warned.add(rule)
            warnings.warn(f"{rule} {found}", stacklevel=2)


def _references(arrays: list[np.ndarray]) -> list[int]:
    """How many objects hold each array; NumPy's views of views hold the array itself."""
    return [sys.getrefcount(array) for array in arrays]


def _untouched(zeros: np.ndarray, stale: np.ndarray) -> int:
    """How many elements still have the bytes that both arrays began with."""
    size = zeros.dtype.itemsize
    same = (_bytes_of(zeros) == 0) & (_bytes_of(stale) == _STALE)
    return int(same.reshape(-1, size).all(axis=1).sum())


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _given_spec(caller: str, spec: PyTree) -> SampleSpec:
    import jax

    def described(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        try:
            shape, dtype = leaf if _is_pair(leaf) else (leaf.shape, leaf.dtype)
            return jax.ShapeDtypeStruct(tuple(map(int, shape)), np.dtype(dtype))
        except Exception:
            raise TypeError(
                f"{caller} needs spec to be a tree of jax.ShapeDtypeStruct or of (shape, dtype) pairs. "
                f"Got spec{jax.tree_util.keystr(path)}: {describe_value(leaf)}."
            ) from None

    return spec_of(caller, jax.tree_util.tree_map_with_path(described, spec, is_leaf=_is_pair))


def _is_pair(node: Any) -> bool:
    if type(node) is not tuple or len(node) != 2 or not isinstance(node[0], tuple | list):
        return False
    sizes = all(isinstance(size, int | np.integer) and size >= 0 for size in node[0])
    return sizes and not isinstance(node[1], tuple | list | dict | None)
