"""Images inside a mapping: numbers to floats, pixels to vectors."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from millstream.pipeline.transform import Transform
from millstream.reading.contracts import PyTree
from millstream.reading.dtypes import require_dtype
from millstream.text.errors import describe_value, require_number, require_text
from millstream.text.summaries import call_text
from millstream.transforms.rename import require_keys


@dataclasses.dataclass(frozen=True)
class NormalizeImageTransform(Transform):
    """Turn the image into floats: `image * scale + offset`.

    Example:
        >>> balanced = ms.NormalizeImageTransform(scale=2 / 255, offset=-1.0)  # from -1 to 1

    Args:
        image_key: Which value of the sample is the image.
        dtype: A floating-point dtype.
        scale: What one unit of the image becomes; not 0.
        offset: What 0 becomes.
    """

    image_key: str = "image"
    dtype: DTypeLike = jnp.float32
    scale: float = 1 / 255
    offset: float = 0.0

    def __post_init__(self) -> None:
        caller = "NormalizeImageTransform"
        require_text(caller, "image_key", self.image_key)
        if not jnp.issubdtype(require_dtype(caller, "dtype", self.dtype), jnp.floating):
            raise TypeError(f"{caller} needs a floating-point dtype. Got {describe_value(self.dtype)}.")
        for name in ("scale", "offset"):
            require_number(caller, name, getattr(self, name))
        if self.scale == 0:
            raise ValueError(f"{caller} needs a scale other than 0, which would erase the image.")

    def apply(self, value: PyTree, mask: jax.Array, key: jax.Array | None) -> tuple[PyTree, jax.Array]:
        require_keys("NormalizeImageTransform", value, [self.image_key])
        # Added before it is multiplied: XLA contracts `x * a + b` to one rounding in some programs and not in others,
        # and the same batch would differ in its last bit between them. For the same reason half precision comes last.
        wide = self.dtype if jnp.dtype(self.dtype).itemsize > 4 else jnp.float32
        image = value[self.image_key].astype(wide)
        if self.offset != 0:
            image = image + jnp.asarray(self.offset / self.scale, wide)
        image = (image * jnp.asarray(self.scale, wide)).astype(self.dtype)
        return {**value, self.image_key: image}, mask

    def __repr__(self) -> str:
        return call_text(self)


@dataclasses.dataclass(frozen=True)
class FlattenImageTransform(Transform):
    """Flatten each image to a vector, before or after the batch.

    Example:
        >>> stage = ms.FlattenImageTransform()  # (28, 28, 1) to (784,), and (128, 28, 28, 1) to (128, 784)
    """

    image_key: str = "image"

    def __post_init__(self) -> None:
        require_text("FlattenImageTransform", "image_key", self.image_key)

    def apply(self, value: PyTree, mask: jax.Array, key: jax.Array | None) -> tuple[PyTree, jax.Array]:
        require_keys("FlattenImageTransform", value, [self.image_key])
        return {**value, self.image_key: value[self.image_key].reshape(*mask.shape, -1)}, mask

    def __repr__(self) -> str:
        return call_text(self)
