"""From a list of items to a batch."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from millstream.reading.dtypes import kept
from millstream.text.errors import describe_value, require_callable

T = TypeVar("T")
B = TypeVar("B")


class Batcher(Generic[T, B]):
    """Makes a batch of a list of items, where they are read: in a worker, ahead of the loop.

    Example:
        >>> Batcher(np.stack).batch([np.zeros(3), np.ones(3)]).shape
        (2, 3)

    Args:
        batch_fn: `batch_fn(items) -> batch`. What it returns is what the loop gets. The last list of a pass may be
            shorter.
        device: Where to put the arrays of a batch ahead of the loop: one of `jax.devices()`, or a sharding. By default
            they stay as they are.
    """

    def __init__(self, batch_fn: Callable[[list[T]], B], device: Any = None) -> None:
        require_callable("Batcher", "batch_fn", batch_fn)
        if not isinstance(device, jax.Device | jax.sharding.Sharding | None):
            raise TypeError(
                f"Batcher needs device to be one of jax.devices(), or a sharding. Got {describe_value(device)}."
            )
        self.batch_fn = batch_fn
        self.device = device

    def batch(self, items: list[T]) -> B:
        """The batch of some items."""
        batch = self.batch_fn(items)
        if self.device is None:
            return batch
        arrays = jax.tree.map(lambda leaf: kept(type(self).__name__, leaf), batch)
        return jax.device_put(arrays, self.device)


class ListBatcher(Batcher[T, list[T]]):
    """Batches that are the lists themselves.

    Example:
        >>> ListBatcher().batch([1, 2])
        [1, 2]
    """

    def __init__(self) -> None:
        super().__init__(_as_they_are)


class StackBatcher(Batcher[Any, Any]):
    """Batches of stacked items: dicts, tuples and other trees of arrays or numbers become one tree of NumPy arrays.

    Example:
        >>> StackBatcher().batch([{"x": 1, "y": [0.5, 1.5]}, {"x": 2, "y": [2.5, 3.5]}])
        {'x': array([1, 2]), 'y': [array([0.5, 2.5]), array([1.5, 3.5])]}

    Args:
        device: As for a `Batcher`.
    """

    def __init__(self, device: Any = None) -> None:
        super().__init__(_stacked, device)


def _as_they_are(items: list[T]) -> list[T]:
    return items


def _stacked(items: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *items)
