"""What a `Dataloader` hands out."""

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from millstream.dialects.hydrax._data_group import DataGroup, Layouts
from millstream.dialects.hydrax._group_loader import SEED_BITS
from millstream.text.errors import describe_leaf, describe_value, table

if TYPE_CHECKING:
    import jax

    from millstream.loader.batch_info import BatchInfo

D = TypeVar("D")


class Batch(Generic[D]):
    """A batch of a `Dataloader`: arrays, additional data, and where they come from. It is made by the loader.

    Example:
        >>> from millstream.dialects.hydrax import DataGroup, Dataloader
        >>> def load(word, arrays, seed):
        ...     arrays["length"][...] = len(word)
        ...     return {"word": word}
        >>> group = DataGroup(2, ["oat", "barley"], loader_arrays={"length": ((), np.int32, jnp.int32)})
        >>> with Dataloader(load, group, end_at=("epoch", 1)) as dataloader:
        ...     for batch in dataloader:
        ...         print(batch.arrays["length"], batch.additional["word"], batch.data[1], batch.indices)
        [3 6] ['oat', 'barley'] barley [0, 1]
    """

    is_training = False
    is_validation = False

    def __init__(
        self,
        group: DataGroup[D],
        info: "BatchInfo",
        arrays: Mapping[str, Any],
        additional: Mapping[str, list[Any]],
        uncached: bool,
        store: Callable[..., None],
    ) -> None:
        self._group = group
        self._info = info
        self._arrays = types.MappingProxyType(dict(arrays))
        self._additional = types.MappingProxyType(dict(additional))
        self._uncached = uncached
        self._store = store

    @property
    def group(self) -> DataGroup[D]:
        """The group it comes from."""
        return self._group

    @property
    def group_index(self) -> int:
        """Its number among the batches of the group; batches that come back have the same one every time."""
        return self._info.place[1]

    @property
    def indices(self) -> list[int]:
        """The indices of its items in the group."""
        return self._info.indices.tolist()

    @property
    def data(self) -> Sequence[D]:
        """The descriptors of its items."""
        return Descriptors(self._group, self.indices)

    def get_data(self, index: int) -> D:
        """The descriptor of one item."""
        return self.data[index]

    @property
    def layouts(self) -> Layouts:
        """What its arrays look like."""
        layouts = self._group.loader_layouts if self._uncached else self._group.cache_layouts
        assert layouts is not None
        return layouts

    @property
    def arrays(self) -> Mapping[str, "jax.Array"]:
        """Its arrays by name, with a row per item."""
        return self._arrays

    def get_array(self, name: str) -> "jax.Array":
        """One of its arrays."""
        return self._arrays[name]

    @property
    def additional(self) -> Mapping[str, list[Any]]:
        """What the loader returned, by name: a list with a value per item, None where it returned none."""
        return self._additional

    def get_additional(self, key: str, index: int | None = None, *, default: Any = None) -> Any:
        """What the loader returned under a name, for all items or one; `default` where it returned nothing."""
        values = self._additional.get(key)
        if values is None or index is None:
            return default if values is None else values
        return default if values[index] is None else values[index]

    @property
    def uncached(self) -> bool:
        """Whether its arrays are the loader's, and `cache` can be given others."""
        return self._uncached

    def cache(
        self,
        arrays: Mapping[str, "jax.Array"],
        additional: Mapping[str, list[Any]] | None = None,
        *,
        persist: bool = True,
    ) -> None:
        """Put arrays computed from this batch in its place, and into the cache.

        Args:
            arrays: As the group's `cache_layouts` say.
            additional: Lists with a value per item, of plain values; None keeps the batch's own.
            persist: False stores nothing. Neither does a group with `cache_readonly`.
        """
        if not self._group.computes_cache:
            raise RuntimeError("batch.cache needs a DataGroup with loader_arrays and cache_arrays.")
        if not self._uncached:
            raise RuntimeError("batch.cache was called already, or the batch came from the cache. See batch.uncached.")
        additional = self._additional if additional is None else additional
        assert self._group.cache_layouts is not None
        require_layouts("batch.cache", arrays, self._group.cache_layouts)
        size = self._group.batch_size
        uneven = {name: len(values) for name, values in additional.items() if len(values) != size}
        if uneven:
            raise ValueError(f"batch.cache needs additional lists of {size} values, one per item. Got {uneven}.")
        # They are stored later, when the caller may have written something else into its own.
        own = {name: array.copy() if isinstance(array, np.ndarray) else array for name, array in arrays.items()}
        self._arrays = types.MappingProxyType(own)
        self._additional = types.MappingProxyType({name: list(values) for name, values in additional.items()})
        self._uncached = False
        if persist:
            self._store(self._info, self._arrays, self._additional)


class TrainingBatch(Batch[D]):
    """A batch to train on: `isinstance(batch, TrainingBatch)`, or `batch.is_training`.

    Example:
        >>> from millstream.dialects.hydrax import TrainingBatch
        >>> TrainingBatch.is_training
        True
    """

    is_training = True

    @property
    def epoch(self) -> int:
        """The epoch it belongs to."""
        return self._info.epoch

    @property
    def epoch_batch(self) -> int:
        """Its number in the epoch."""
        return self._info.step_in_epoch

    @property
    def batch_num(self) -> int:
        """Its number in the run, validation not counted."""
        return self._info.step

    @property
    def seed(self) -> int:
        """A seed for whatever is random about this batch."""
        return self.seeds[0]

    @property
    def seeds(self) -> list[int]:
        """The seeds that the loader was given for its items."""
        return (self._info.seeds & SEED_BITS).tolist()


class ValidationBatch(Batch[D]):
    """A batch of a validation pass: `isinstance(batch, ValidationBatch)`, or `batch.is_validation`.

    Example:
        >>> from millstream.dialects.hydrax import ValidationBatch
        >>> ValidationBatch.is_validation
        True
    """

    is_validation = True

    def __init__(self, *arguments: Any, skipped_passes: int, skipped_batches: int) -> None:
        super().__init__(*arguments)
        self._skipped_passes = skipped_passes  # those before `start_at`
        self._skipped_batches = skipped_batches

    @property
    def validation_epoch(self) -> int:
        """Which pass it belongs to; the first of this `Dataloader` is 0."""
        return self._info.epoch - self._skipped_passes

    @property
    def validation_epoch_batch(self) -> int:
        """Its number in the pass."""
        return self._info.step_in_epoch

    @property
    def validation_batch_num(self) -> int:
        """Its number among all validation batches of this `Dataloader`."""
        return self._info.step - self._skipped_batches


class Descriptors(Sequence[D]):
    """The descriptors of some items of a group, looked up when they are asked for.

    Args:
        group: The group.
        indices: Which items.
    """

    def __init__(self, group: DataGroup[D], indices: list[int]) -> None:
        self._group = group
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Descriptors(self._group, self._indices[index])
        return self._group[self._indices[index]]

    def __iter__(self) -> Iterator[D]:
        return (self._group[index] for index in self._indices)


def require_layouts(caller: str, arrays: Any, layouts: Layouts) -> None:
    """Refuse arrays that are not as the layouts say."""
    if not isinstance(arrays, Mapping) or set(arrays) != set(layouts):
        names = list(arrays) if isinstance(arrays, Mapping) else describe_value(arrays)
        raise ValueError(f"{caller} needs the arrays {list(layouts)}. Got {names}.")
    wrong = [
        (f"arrays[{name!r}]", f"shape {layout.shape}, {layout.jax_dtype} declared, {describe_leaf(arrays[name])} here")
        for name, layout in layouts.items()
        if getattr(arrays[name], "shape", None) != layout.shape or arrays[name].dtype != layout.jax_dtype
    ]
    if wrong:
        raise ValueError(f"{caller} needs arrays as they are declared in the DataGroup.\n{table(wrong)}")
