"""A data group as a loader."""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import millstream as ms
from millstream.dialects.hydrax._computed_cache import FOLDER, ComputedCache
from millstream.dialects.hydrax._data_group import DataGroup, Layouts
from millstream.reading.dtypes import kept_dtype, narrowed

SEED_BITS = np.uint64(0xFFFFFFFF)  # seeds fit everything that takes one, such as `np.random.seed`
_LOADED = "loaded"  # the folder of batches as the loader has filled them
_NO_ARRAYS = {"nothing": ((), np.bool_)}


class LoaderFunction:
    """A hydrax loader as `FillSource` calls it.

    Args:
        func: `func(descriptor, arrays, seed)`.
        wide: NumPy dtypes by name, of arrays that JAX keeps in fewer bits: the loader gets them as they were declared.
    """

    def __init__(self, func: Callable[[Any, Any, int | None], dict[str, Any] | None], wide: Mapping[str, Any]) -> None:
        self.func = func
        self._wide = dict(wide)

    def __call__(self, item: Any, arrays: dict[str, np.ndarray], rng: np.random.Generator | None) -> Any:
        declared = {name: np.zeros(arrays[name].shape, dtype) for name, dtype in self._wide.items()}
        returned = self.func(item, types.MappingProxyType({**arrays, **declared}), _seed(rng))
        for name, array in declared.items():
            arrays[name][...] = narrowed(f"arrays[{name!r}]", array, arrays[name].dtype)
        return returned


class UnlessStored:
    """A loader that is not called for items whose batch is stored already.

    Args:
        func: A `LoaderFunction`.
        stored: Not zero for such items; memory that the main process writes to.
    """

    def __init__(self, func: LoaderFunction, stored: np.ndarray) -> None:
        self.func = func
        self._stored = stored

    def __call__(self, numbered: tuple[int, Any], arrays: Any, rng: Any) -> Any:
        number, item = numbered
        return None if self._stored[number] else self.func(item, arrays, rng)


class Numbered:
    """Items with their numbers.

    Args:
        items: Anything with a length and `[index]`.
    """

    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self._items[index]


def nothing(item: Any, arrays: Any, rng: Any) -> None:
    """The loader of a group that has none: every batch is in the cache."""


def _seed(rng: np.random.Generator | None) -> int | None:
    """The low half of the sample's key, which is also that of `BatchInfo.seeds`: it is where the generator's begins."""
    if rng is None:
        return None
    return int(rng.bit_generator.state["state"]["key"][0] & SEED_BITS)  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True)
class Reading:
    """How the items of all groups are read.

    Attributes:
        loader_func: Fills the arrays of an item.
        executor: The loader processes; None if there are none.
        prefetch: Batches ready or in flight besides the one that is handed out.
        on_error: What a loader that raises does.
        debug: Whether loaders are watched.
        placed: Whether the user places batches on devices.
    """

    loader_func: Callable[..., Any]
    executor: "ms.Processes | None"
    prefetch: int
    on_error: Any
    debug: bool
    placed: bool


class GroupLoader:
    """The batches of a group, for training or for validation.

    Args:
        group: The group.
        reading: How its items are read.
        training: Which of the two.
    """

    def __init__(self, group: DataGroup[Any], reading: Reading, *, training: bool) -> None:
        self.group = group
        self.computed: ComputedCache | None = None
        if group.computes_cache or (group.loader_layouts is None and self._is_computed()):
            self.computed = ComputedCache(group, training)
        layouts = group.cache_layouts if group.loader_layouts is None else group.loader_layouts
        assert layouts is not None
        read = self.computed is None or group.loader_layouts is not None
        source = ms.sources.FillSource(
            *self._items_and_fill(reading, layouts),
            {name: (layout.shape[1:], layout.numpy_dtype) for name, layout in layouts.items()} if read else _NO_ARRAYS,
            ordering=ms.Shuffle(group.mode(training), first_epoch=group.shuffle_first),
            seeded=training,
            debug=reading.debug,
        )
        self.loader = ms.DataLoader(
            [
                source,
                ms.BatchTransform(group.batch_size, drop_last=True),
                *(_placement(reading, layouts) if read else []),
            ],
            executor=reading.executor if group.loader_layouts is not None else ms.Threads(1),
            prefetch=reading.prefetch,
            on_error=reading.on_error,
            cache=self._batch_cache(),
        )

    def _items_and_fill(self, reading: Reading, layouts: Layouts) -> tuple[Any, Callable[..., Any]]:
        group = self.group
        if group.loader_layouts is None:
            return range(len(group)), nothing
        wide = {name: a.numpy_dtype for name, a in layouts.items() if kept_dtype(a.numpy_dtype) != a.numpy_dtype}
        fill = LoaderFunction(reading.loader_func, wide)
        if self.computed is None or self.computed.stored is None:
            return group.data, fill
        return Numbered(group.data), UnlessStored(fill, self.computed.stored)

    def _batch_cache(self) -> "ms.BatchCache | None":
        """The cache of batches as the loader fills them, if that is what is cached."""
        group = self.group
        if group.cache_location is None or self.computed is not None:
            return None
        folder = group.cache_location / _LOADED
        if group.loader_layouts is None:
            return ms.BatchCache(folder, mode="cache-only")
        if group.cache_readonly:
            return ms.BatchCache(folder, mode="read-only") if folder.exists() else None
        return ms.BatchCache(folder)

    def _is_computed(self) -> bool:
        """Which of the two kinds a cache is that there is no loader for."""
        location = self.group.cache_location
        assert location is not None
        if not (location / FOLDER).exists() and not (location / _LOADED).exists():
            raise FileNotFoundError(
                f"DataGroup without loader_arrays needs every batch in its cache, and {location} has none. Fill one "
                "first, with a DataGroup that has loader_arrays and the same cache_location."
            )
        return (location / FOLDER).exists()


@dataclasses.dataclass(frozen=True)
class AsDeclared:
    """Gives arrays of a batch the dtypes they were declared with.

    Attributes:
        dtypes: By name.
    """

    dtypes: tuple[tuple[str, np.dtype], ...]

    def __call__(self, batch: Any, mask: Any) -> Any:
        return {**batch, **{name: batch[name].astype(dtype) for name, dtype in self.dtypes}}


def _placement(reading: Reading, layouts: Layouts) -> list[Any]:
    """The stages after the batch."""
    import jax

    if reading.placed:  # the user gets the batch in the memory of the host
        return [] if jax.default_backend() == "cpu" else [ms.DevicePutTransform("cpu")]
    dtypes = [(name, a.jax_dtype) for name, a in layouts.items() if kept_dtype(a.numpy_dtype) != a.jax_dtype]
    return [ms.MapTransform(AsDeclared(tuple(dtypes)))] if dtypes else []
