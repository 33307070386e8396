"""What loader processes call. Nothing here loads JAX."""

import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from millstream.reading.dtypes import narrowed

SEED_BITS = np.uint64(0xFFFFFFFF)  # seeds fit everything that takes one, such as `np.random.seed`


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
