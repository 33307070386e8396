"""Images inside a mapping: numbers to floats, pixels to vectors."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from millstream._core.contracts import PyTree
from millstream._core.transform import Transform
from millstream.transforms._rename import require_keys


@dataclasses.dataclass(frozen=True)
class NormalizeImageTransform(Transform):
    """Turn the image into floats: `image.astype(dtype) * scale + offset`.

    Example:
        >>> balanced = ms.NormalizeImageTransform(scale=2 / 255, offset=-1.0)  # from -1 to 1
    """

    image_key: str = "image"
    dtype: Any = jnp.float32
    scale: float = 1 / 255
    offset: float = 0.0

    def apply(self, value: PyTree, mask: jax.Array, key: jax.Array | None) -> tuple[PyTree, jax.Array]:
        require_keys("NormalizeImageTransform", value, [self.image_key])
        image = value[self.image_key].astype(self.dtype) * jnp.asarray(self.scale, self.dtype)
        if self.offset != 0:
            image = image + jnp.asarray(self.offset, self.dtype)
        return {**value, self.image_key: image}, mask


@dataclasses.dataclass(frozen=True)
class FlattenImageTransform(Transform):
    """Flatten each image to a vector, before or after the batch.

    Example:
        >>> stage = ms.FlattenImageTransform()  # (28, 28, 1) to (784,), and (128, 28, 28, 1) to (128, 784)
    """

    image_key: str = "image"

    def apply(self, value: PyTree, mask: jax.Array, key: jax.Array | None) -> tuple[PyTree, jax.Array]:
        require_keys("FlattenImageTransform", value, [self.image_key])
        return {**value, self.image_key: value[self.image_key].reshape(*mask.shape, -1)}, mask
