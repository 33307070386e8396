"""The transforms of cyreal: those that differ in a name, and all others as they are."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import millstream as ms
from millstream.dialects._declared_spec import BatchTransform as BatchTransform
from millstream.dialects._declared_spec import MapTransform as MapTransform
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_leaf, require_int
from millstream.transforms.device import DevicePutTransform as DevicePutTransform
from millstream.transforms.host import HostCallbackTransform as HostCallbackTransform
from millstream.transforms.rename import RenameTransform as RenameTransform
from millstream.transforms.rename import require_keys
from millstream.transforms.time_series import TimeSeriesBatchTransform as TimeSeriesBatchTransform


@dataclasses.dataclass(frozen=True)
class FlattenTransform(ms.Transform):
    """Make one axis of all axes of a value from `start_index` on.

    Example:
        >>> from millstream.dialects.cyreal.transforms import FlattenTransform
        >>> loader = ms.DataLoader([ms.ArraySampleSource({"x": np.zeros((9, 2, 3))}), FlattenTransform("x", 0)])
        >>> loader.element_spec()["x"].shape
        (6,)

    Args:
        data_key: Which value.
        start_index: The first axis that is flattened; before a `BatchTransform` those of a sample are counted, after
            it those of the batch.
    """

    data_key: str
    start_index: int = 1

    def __post_init__(self) -> None:
        require_int("FlattenTransform", "start_index", self.start_index, least=0)

    def apply(self, value: PyTree, mask: jax.Array, key: jax.Array | None) -> tuple[PyTree, jax.Array]:
        require_keys("FlattenTransform", value, [self.data_key])
        array = value[self.data_key]
        if self.start_index >= array.ndim:
            raise ValueError(
                f"FlattenTransform needs an axis {self.start_index} to start at. Got {self.data_key!r}: "
                f"{describe_leaf(array)}. Choose a smaller start_index."
            )
        return {**value, self.data_key: array.reshape(*array.shape[: self.start_index], -1)}, mask


def NormalizeImageTransform(
    data_key: str = "image", dtype: Any = jnp.float32, scale: float = 1 / 255, offset: float = 0.0
) -> ms.NormalizeImageTransform:
    """`millstream.NormalizeImageTransform`, whose `image_key` is called `data_key` here.

    Example:
        >>> from millstream.dialects.cyreal.transforms import NormalizeImageTransform
        >>> stage = NormalizeImageTransform(data_key="pixels")

    Args:
        data_key: Which value of the sample is the image.
        dtype: A floating-point dtype.
        scale: What one unit of the image becomes.
        offset: What 0 becomes.
    """
    return ms.NormalizeImageTransform(data_key, dtype, scale, offset)


def BufferTransform(
    capacity: int, prefill: int, sample_size: int = 1, mode: str = "sequential", write_mode: Any = "fifo"
) -> ms.BufferTransform:
    """`millstream.BufferTransform`, whose mode "uniform" is called "shuffled" here.

    Example:
        >>> from millstream.dialects.cyreal.transforms import BufferTransform
        >>> replay = BufferTransform(capacity=128, prefill=16, sample_size=16, mode="shuffled", write_mode="reservoir")

    Args:
        capacity: Values the buffer holds.
        prefill: Stored values it takes before samples are drawn.
        sample_size: Values per step.
        mode: "sequential" or "shuffled", or any mode of `millstream.BufferTransform`.
        write_mode: "fifo" or "reservoir".
    """
    known: Any = "uniform" if mode == "shuffled" else mode
    return ms.BufferTransform(capacity, prefill, sample_size, known, write_mode)
