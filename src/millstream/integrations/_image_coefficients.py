"""How pixels become numbers for a model, and back: a scale and an offset per channel."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from millstream.integrations._image_arrays import namespace
from millstream.text.errors import describe_value, require_positive

Array = TypeVar("Array")  # a NumPy or a JAX array


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """`number = pixel * scale + offset`, for pixels from 0 to 255.

    `FRACTIONAL` is 0 to 1, `balanced()` is -1 to 1, `IMAGENET` and `standardized(mean, std)` are around 0.

    Example:
        >>> from millstream.integrations.images import FRACTIONAL, Coefficients, balanced
        >>> warm = Coefficients(scale=(1 / 255, 1 / 255, 1 / 510), offset=0.0)
        >>> balanced()
        Coefficients(scale=0.00784313725490196, offset=-1.0, alpha=(0.00392156862745098, 0.0))

    Args:
        scale: One number for all colors, or one for each.
        offset: One number for all colors, or one for each.
        alpha: Scale and offset of alpha, the last of two or four channels. By default it is 0 to 1.
    """

    scale: float | tuple[float, ...]
    offset: float | tuple[float, ...]
    alpha: tuple[float, float] = (1 / 255, 0.0)

    def __post_init__(self) -> None:
        for name in ("scale", "offset", "alpha"):
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
        if not isinstance(self.alpha, tuple) or len(self.alpha) != 2:
            raise ValueError(f"Coefficients needs alpha (scale, offset). Got {describe_value(self.alpha)}.")
        if 0.0 in (*np.ravel(self.scale), self.alpha[0]):
            raise ValueError(f"Coefficients needs scales other than 0, which would lose the picture. Got {self}.")

    def per_channel(self, who: str, channels: int) -> tuple[np.ndarray, np.ndarray]:
        """Scales and offsets of so many channels."""
        colors = channels - (channels in (2, 4))
        rows = []
        for name, last in (("scale", self.alpha[0]), ("offset", self.alpha[1])):
            given = np.ravel(getattr(self, name))
            if len(given) not in (1, colors):
                raise ValueError(
                    f"{who} needs one {name} for all colors or one for each. Got {len(given)} in {self}, and an image "
                    f"of {channels} channels, {colors} of them colors. Alpha is given by itself: alpha=(scale, offset)."
                )
            rows.append(np.append(np.broadcast_to(given, colors), [last] * (channels - colors)))
        return rows[0], rows[1]


def require_coefficients(who: str, name: str, value: Any) -> None:
    """Refuse anything but coefficients."""
    if not isinstance(value, Coefficients):
        raise TypeError(f"{who} needs {name} to be Coefficients, such as FRACTIONAL. Got {describe_value(value)}.")


def balanced(scale: float = 1.0) -> Coefficients:
    """From `-scale` to `scale`; alpha from 0 to 1.

    Example:
        >>> from millstream.integrations.images import balanced
        >>> balanced(2.0).offset
        -2.0
    """
    require_positive("balanced", "scale", scale)
    return Coefficients(scale / 127.5, -scale)


def standardized(mean: Sequence[float], std: Sequence[float]) -> Coefficients:
    """From the mean and the standard deviation of fractional (0 to 1) pixels, per color; alpha from 0 to 1.

    Example:
        >>> from millstream.integrations.images import standardized
        >>> cifar10 = standardized(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
    """
    try:
        means, deviations = (np.ravel(np.asarray(given, np.float64)) for given in (mean, std))
        is_right = means.shape == deviations.shape and np.isfinite([*means, *deviations]).all()
    except Exception:
        means, deviations, is_right = np.zeros(0), np.zeros(0), False
    if not is_right or not np.all(deviations > 0):
        raise ValueError(
            f"standardized needs a mean and a positive std for each color. Got {describe_value(mean)} and "
            f"{describe_value(std)}."
        )
    return Coefficients(tuple(1 / (255 * deviations)), tuple(-means / deviations))


def rescale(image: Array, old: Coefficients, new: Coefficients, *, axis: int = -1) -> Array:
    """Go from numbers by some coefficients to numbers by others, without rounding to pixels between.

    Example:
        >>> from millstream.integrations.images import FRACTIONAL, balanced, rescale
        >>> rescale(np.array([0.0, 0.5, 1.0]), FRACTIONAL, balanced())
        array([-1.,  0.,  1.])

    Args:
        image: A NumPy or JAX array of floats, with any axes besides that of the one to four channels.
        old: The coefficients that the image was written with.
        new: Those that it shall have.
        axis: Where the channels are.
    """
    given: Any = image
    xp = namespace("rescale", given, axis, (1, 2, 3, 4))
    shape = [1] * given.ndim
    shape[axis] = channels = given.shape[axis]
    require_coefficients("rescale", "old", old)
    require_coefficients("rescale", "new", new)
    scale, offset = old.per_channel("rescale", channels)
    new_scale, new_offset = new.per_channel("rescale", channels)
    factor = new_scale / scale
    terms = (factor, new_offset - offset * factor)
    by, plus = (xp.asarray(term.reshape(shape), given.dtype) for term in terms)
    return given * by + plus


def _numbers(name: str, value: object) -> float | tuple[float, ...]:
    """A float or a tuple of them, so that equal coefficients are equal and can be hashed."""
    try:
        found = np.asarray(value, np.float64)
        if found.ndim > 1 or found.size == 0 or not all(map(math.isfinite, found.ravel())):
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"Coefficients needs {name} of finite numbers. Got {describe_value(value)}.") from None
    return float(found) if found.ndim == 0 else tuple(map(float, found))


FRACTIONAL = Coefficients(1 / 255, 0.0)
IMAGENET = standardized(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
