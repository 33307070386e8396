"""A dataset and its batcher as a source of the engine."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from millstream.dialects.loadax._batcher import Batcher
from millstream.dialects.loadax._items import Items, items_of
from millstream.reading.host_source import HostSource
from millstream.reading.samples import ObjectSpec
from millstream.text.errors import describe_value, noted


class BatchSource(HostSource):
    """Reads the items of a batch together, and hands them to the batcher. What comes out may be any object.

    Args:
        dataset: The dataset.
        batcher: The batcher.
    """

    whole_batches = True
    ordering = "sequential"
    sample_spec = ObjectSpec("what a Batcher returns")

    def __init__(self, dataset: Items[Any], batcher: Batcher[Any, Any]) -> None:
        self._dataset = dataset
        self._batcher = batcher

    def __len__(self) -> int:
        return len(self._dataset)

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> None:
        numbers = indices.tolist()
        try:
            items = items_of(self._dataset, numbers)
        except Exception as error:
            raise noted(error, f"{type(self._dataset).__name__} was asked for items {describe_value(numbers)}.")  # noqa: B904
        try:
            out[0][0] = self._batcher.batch(items)
        except Exception as error:
            name = type(self._batcher).__name__
            raise noted(error, f"This came from {name}.batch, given items {describe_value(numbers)}.")  # noqa: B904
