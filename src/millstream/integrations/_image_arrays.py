"""Arrays of images: NumPy's or JAX's, floats, channels on any axis."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from millstream.reading.dtypes import dtype_of_array
from millstream.text.errors import describe_leaf, describe_value


def is_float(dtype: np.dtype) -> bool:
    """Whether a dtype is of floats. NumPy's own names for kinds of dtypes leave bfloat16 out."""
    return np.can_cast(np.float32, dtype, "same_kind") and np.can_cast(dtype, np.float64, "same_kind")


def namespace(who: str, image: Any, axis: int, channels: Sequence[int]) -> Any:
    """NumPy or `jax.numpy`, whichever the image is of, if it is floats with such a number of channels."""
    if isinstance(image, np.ndarray):
        xp = np
    else:
        import jax

        if not isinstance(image, jax.Array):
            raise TypeError(f"{who} needs a NumPy or JAX array. Got {describe_value(image)}.")
        xp = jax.numpy
    if (dtype := dtype_of_array(image)) is None or not is_float(dtype):
        raise TypeError(
            f"{who} needs floats. Got {describe_leaf(image)}. "
            "Divide pixels by 255, or write them with the coefficients FRACTIONAL."
        )
    if type(axis) is not int:
        raise TypeError(f"{who} needs axis to be an int. Got {describe_value(axis)}.")
    if not -image.ndim <= axis < image.ndim or image.shape[axis] not in channels:
        counts = ", ".join(map(str, channels[:-1])) + f" or {channels[-1]}"
        raise ValueError(
            f"{who} needs {counts} channels on axis {axis}. Got {describe_leaf(image)}. "
            "Say where they are: axis=-1 if they come last, axis=-3 if they are before height and width."
        )
    return xp
