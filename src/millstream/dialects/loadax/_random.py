"""Datasets in a random order, and random samples of them: functions of a key, so the same on every host."""

from typing import Any, Protocol, TypeVar, runtime_checkable

from millstream.dialects.loadax._dataset import Items, View, drawn, key_words, shuffled
from millstream.text.errors import require_int

T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class Shuffleable(Protocol):
    """A dataset that can be shuffled. Every `Dataset` is one.

    Example:
        >>> from millstream.dialects.loadax import RangeDataset
        >>> isinstance(RangeDataset(0, 10), Shuffleable)
        True
    """

    def shuffle(self, key: Any) -> Any:
        """The items in the order of a key."""
        ...


class ShuffledDataset(View[T_co]):
    """The items of a dataset in a random order, each once. The order costs four bytes per item.

    Every pass has the same order. For a new one in every epoch, give the number of the epoch as the key.

    Example:
        >>> list(ShuffledDataset(range(6), key=1))
        [4, 3, 5, 1, 0, 2]

    Args:
        dataset: The dataset.
        key: A seed, or a key of JAX. The order depends on it and on the number of items, and on nothing else.
    """

    def __init__(self, dataset: Items[T_co], key: Any = 0) -> None:
        words = key_words("ShuffledDataset", key)
        super().__init__(dataset, lambda: shuffled(len(dataset), words))


class SampledDataset(View[T_co]):
    """Some items of a dataset, none of them twice, in a random order.

    Example:
        >>> list(SampledDataset(range(6), 3, key=1))
        [4, 3, 5]

    Args:
        dataset: The dataset.
        sample_size: How many items, at most as many as there are.
        key: A seed, or a key of JAX. They are the first items of a `ShuffledDataset` with it.
    """

    def __init__(self, dataset: Items[T_co], sample_size: int, key: Any = 0) -> None:
        words = key_words("SampledDataset", key)
        require_int("SampledDataset", "sample_size", sample_size, least=0)
        super().__init__(dataset, lambda: shuffled(len(dataset), words, sample_size))
        if sample_size > len(dataset):
            raise ValueError(
                f"SampledDataset cannot take {sample_size} of {len(dataset)} items without taking some twice. "
                "Take fewer, or use SampledDatasetWithReplacement."
            )


SampledDatasetWithoutReplacement = SampledDataset


class SampledDatasetWithReplacement(View[T_co]):
    """Items of a dataset, each drawn from all of them; reading one again gives the same item.

    Example:
        >>> list(SampledDatasetWithReplacement(range(3), 6, key=1))
        [0, 2, 0, 2, 1, 0]

    Args:
        dataset: The dataset.
        sample_size: How many items, also more than there are.
        key: A seed, or a key of JAX.
    """

    def __init__(self, dataset: Items[T_co], sample_size: int, key: Any = 0) -> None:
        words = key_words("SampledDatasetWithReplacement", key)
        require_int("SampledDatasetWithReplacement", "sample_size", sample_size, least=0)
        super().__init__(dataset, lambda: drawn(len(dataset), words, sample_size))
        if sample_size and not len(dataset):
            raise ValueError("SampledDatasetWithReplacement needs a dataset with items. Got one of length 0.")
