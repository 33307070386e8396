"""Any data set as JAX arrays."""

from typing import Any

import numpy as np

from millstream._core.contracts import PyTree
from millstream._core.dtypes import kept
from millstream._core.errors import describe_value


def dataset_to_jax(dataset: Any, storage_device: Any = "cpu") -> PyTree:
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

    from millstream.transforms import DevicePutTransform

    if hasattr(dataset, "as_array_dict"):
        stacked = dataset.as_array_dict()
    elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and len(dataset) > 0:
        stacked = jax.tree.map(lambda *rows: np.stack(rows), *(dataset[index] for index in range(len(dataset))))
    else:
        raise TypeError(
            "dataset_to_jax needs as_array_dict(), or a length of at least 1 and [index]. "
            f"Got {describe_value(dataset)}."
        )
    arrays = jax.tree.map(lambda leaf: kept("dataset_to_jax", leaf), stacked)
    return jax.device_put(arrays, DevicePutTransform(storage_device).placement)
