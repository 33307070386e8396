"""Data that share a batch size and the shapes of their arrays."""

import math
import os
import pathlib
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from millstream.reading.dtypes import kept_dtype
from millstream.reading.slots import Layout
from millstream.text.errors import describe_value, require_bool, require_choice, require_int

D = TypeVar("D")

# Shape without the batch, NumPy dtype in the loader, JAX dtype in the batch.
ArraySpec = Mapping[str, tuple[tuple[int, ...], Any, Any]]
_MODES = ("default", "repeat", "reseed", "itemwise", "batchwise")


class ArrayLayout(NamedTuple):
    """An array of a batch.

    Example:
        >>> from millstream.dialects.hydrax import DataGroup
        >>> group = DataGroup(4, range(10), loader_arrays={"x": ((3,), np.uint8, np.float32)})
        >>> group.loader_layouts["x"].shape
        (4, 3)

    Attributes:
        shape: Its shape, with the batch in front.
        numpy_dtype: What the loader writes.
        jax_dtype: What the batch has.
        offset: Its first byte in the memory of a batch.
        elements: How many elements it has.
    """

    shape: tuple[int, ...]
    numpy_dtype: np.dtype
    jax_dtype: np.dtype
    offset: int
    elements: int


Layouts = Mapping[str, ArrayLayout]


class DataGroup(Sequence[D], Generic[D]):
    """Data descriptors that share a batch size and the arrays of a batch.

    Example:
        >>> from millstream.dialects.hydrax import DataGroup
        >>> group = DataGroup(4, ["a.png", "b.png", "c.png"] * 3, loader_arrays={"x": ((8, 8), np.uint8, np.float32)})
        >>> group.batch_count, group[1]  # one of the nine is left over
        (2, 'b.png')

    Args:
        batch_size: Items of a batch; all of them, if there are fewer. What is left over in an epoch is left out.
        data: One descriptor per item: anything with a length and `[index]`, or an iterable, which is read into a list.
        loader_arrays: (shape, NumPy dtype, JAX dtype) by name: what the loader fills for one item. None if all
            batches are in the cache.
        cache_arrays: The same for cached batches, which are stored by `batch.cache(...)`. None stores what the loader
            has filled, by itself.
        cache_location: A folder for cached batches.
        cache_readonly: Store nothing; a folder that is not there is no cache.
        seed: Another seed is a different order, with other seeds for the items.
        shuffle_first: Whether the first epoch is shuffled.
        shuffle_later: What becomes of later ones. "repeat": the same batches. "reseed": the same order, new seeds.
            "itemwise": a new order. "batchwise": the same batches, in a new order. "default": "batchwise" with a cache,
            "itemwise" without one, and "repeat" in validation.
    """

    def __init__(
        self,
        batch_size: int,
        data: Iterable[D],
        *,
        loader_arrays: ArraySpec | None = None,
        cache_arrays: ArraySpec | None = None,
        cache_location: str | os.PathLike[str] | None = None,
        cache_readonly: bool = False,
        seed: int = 0,
        shuffle_first: bool = False,
        shuffle_later: str = "default",
    ) -> None:
        require_int("DataGroup", "batch_size", batch_size, least=1)
        require_int("DataGroup", "seed", seed, least=0)
        require_choice("DataGroup", "shuffle_later", shuffle_later, _MODES)
        require_bool("DataGroup", "cache_readonly", cache_readonly)
        require_bool("DataGroup", "shuffle_first", shuffle_first)
        self.data: Any = _indexable(data)
        self._batch_size = min(batch_size, len(self.data))
        self._loader_layouts = self._layouts("loader_arrays", loader_arrays)
        self._cache_layouts = self._layouts("cache_arrays", cache_arrays)
        self.cache_location = None if cache_location is None else pathlib.Path(cache_location).expanduser()
        self.cache_readonly = cache_readonly or loader_arrays is None
        self.seed = seed
        self.shuffle_first = shuffle_first
        self.shuffle_later = shuffle_later
        self._require_arrays()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]

    @property
    def batch_size(self) -> int:
        """Items of a batch."""
        return self._batch_size

    @property
    def batch_count(self) -> int:
        """Batches of an epoch."""
        return len(self) // self._batch_size

    @property
    def loader_layouts(self) -> Layouts | None:
        """The arrays of a batch as the loader fills it; None if there is no loader."""
        return self._loader_layouts

    @property
    def cache_layouts(self) -> Layouts | None:
        """The arrays of a cached batch; None if there is no cache."""
        if self.cache_location is not None and self._cache_layouts is None:
            return self._loader_layouts
        return self._cache_layouts

    @property
    def loader_size(self) -> int:
        """Bytes of a batch as the loader fills it."""
        return _size(self.loader_layouts)

    @property
    def cache_size(self) -> int:
        """Bytes of a cached batch."""
        return _size(self.cache_layouts)

    @property
    def computes_cache(self) -> bool:
        """Whether cached batches have arrays of their own, which the user computes."""
        return self._cache_layouts is not None and self._loader_layouts is not None

    def mode(self, training: bool) -> Any:
        """How later epochs are shuffled."""
        if self.shuffle_later != "default":
            return self.shuffle_later
        if not training:
            return "repeat"
        return "itemwise" if self.cache_location is None else "batchwise"

    def _layouts(self, what: str, arrays: ArraySpec | None) -> Layouts | None:
        if arrays is None:
            return None
        if not isinstance(arrays, Mapping) or not arrays or not all(isinstance(name, str) for name in arrays):
            raise TypeError(f"DataGroup needs {what} by name, at least one. Got {describe_value(arrays)}.")
        shapes, kept, placed = zip(*(_spec(what, name, spec) for name, spec in arrays.items()), strict=True)
        starts = [start for start, _ in Layout((self._batch_size,), shapes, kept).places]
        layouts = {
            name: ArrayLayout((self._batch_size, *shape), numpy, jax, start, self._batch_size * math.prod(shape))
            for name, shape, numpy, jax, start in zip(arrays, shapes, kept, placed, starts, strict=True)
        }
        return types.MappingProxyType(layouts)

    def _require_arrays(self) -> None:
        if self._cache_layouts is not None and self.cache_location is None:
            raise ValueError("DataGroup needs a cache_location for its cache_arrays.")
        if self._loader_layouts is None and self._cache_layouts is None:
            raise ValueError(
                "DataGroup needs loader_arrays, which the loader fills; or, if every batch is in a cache already, "
                "cache_arrays and a cache_location."
            )


def _indexable(data: Any) -> Any:
    if hasattr(data, "iloc"):
        raise TypeError(
            f"DataGroup needs the rows of a frame, and a {type(data).__name__} is made of columns. "
            "Write RowData(frame), from millstream.dialects.hydrax.pandas."
        )
    listed = not (hasattr(data, "__len__") and hasattr(data, "__getitem__")) or isinstance(data, Mapping)
    if listed and not isinstance(data, Iterable):
        raise TypeError(f"DataGroup needs data with a length and [index], or an iterable. Got {describe_value(data)}.")
    items: Any = list(data) if listed else data
    if len(items) == 0:
        raise ValueError(f"DataGroup needs at least one item. Got {type(data).__name__} of length 0.")
    return items


def _spec(what: str, name: str, spec: Any) -> tuple[tuple[int, ...], np.dtype, np.dtype]:
    try:
        shape, numpy_dtype, jax_dtype = spec
        sizes, kept = tuple(map(int, shape)), np.dtype(numpy_dtype)
        if numpy_dtype is None or jax_dtype is None or min(sizes, default=0) < 0:
            raise ValueError
        return sizes, kept, kept_dtype(np.dtype(jax_dtype))
    except (TypeError, ValueError):
        raise TypeError(
            f"DataGroup needs {what}[{name!r}] to be (shape, numpy dtype, jax dtype), such as "
            f"((28, 28), np.uint8, jnp.float32). Got {describe_value(spec)}."
        ) from None


def _size(layouts: Layouts | None) -> int:
    if layouts is None:
        return 0
    return max(layout.offset + layout.elements * layout.numpy_dtype.itemsize for layout in layouts.values())
