"""Any data set as JAX arrays."""

from typing import Any, Protocol

import numpy as np

from millstream.reading.contracts import Items, PyTree
from millstream.reading.dtypes import to_jax_dtype
from millstream.text.errors import describe_value, noted, require_items


class _Arrays(Protocol):
    def as_array_dict(self) -> PyTree: ...


def dataset_to_jax(dataset: Items | _Arrays, storage_device: object = "cpu") -> PyTree:
    """All samples of a data set, stacked, as JAX arrays on one device.

    Example:
        >>> arrays = ms.datasets.dataset_to_jax(ms.datasets.DigitsDataset("test"))
        >>> arrays["image"].shape
        (359, 8, 8, 1)

    Args:
        dataset: An object with `as_array_dict()`, or with a length and `[index]`.
        storage_device: A `jax.Device`, a name such as "cpu" or "gpu:1", or None for JAX's default device.
    """
    import jax

    from millstream.transforms.device import DevicePutTransform

    caller = "dataset_to_jax"
    if not hasattr(dataset, "as_array_dict"):
        require_items(caller, "as_array_dict(), or a dataset", dataset)
    try:
        given: Any = dataset
        stacked = given.as_array_dict() if hasattr(dataset, "as_array_dict") else _stacked(given)
        arrays = jax.tree.map(lambda leaf: to_jax_dtype(caller, leaf), stacked)
        return jax.device_put(arrays, DevicePutTransform(storage_device).placement)
    except Exception as error:
        given = f"{describe_value(dataset)} and storage_device={describe_value(storage_device)}"
        raise noted(error, f"Raised in {caller}, which was given {given}.")  # noqa: B904


def _stacked(dataset: Any) -> PyTree:
    import jax

    return jax.tree.map(lambda *rows: np.stack(rows), *(dataset[index] for index in range(len(dataset))))
