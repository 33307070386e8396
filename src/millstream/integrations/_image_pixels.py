"""The pixels of images in rows of batches, and back in images."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from millstream.reading.dtypes import dtype_of_array, holds_numbers
from millstream.text.errors import describe_leaf, describe_value, needs, require_positive

Array = TypeVar("Array")  # a NumPy or a JAX array
_MODES = {1: ("L",), 2: ("LA",), 3: ("RGB",), 4: ("RGBA", "RGBa")}
_BLOCK = 1 << 16  # that many numbers at a time stay in a processor's cache


def is_float(dtype: np.dtype) -> bool:
    """Whether a dtype is of floats. NumPy's own names for kinds of dtypes leave bfloat16 out."""
    return np.can_cast(np.float32, dtype, "same_kind") and np.can_cast(dtype, np.float64, "same_kind")


def namespace(caller: str, image: Any, axis: int, channels: Sequence[int]) -> Any:
    """NumPy or `jax.numpy`, whichever the image is of, if it is floats with such a number of channels."""
    if isinstance(image, np.ndarray):
        xp = np
    else:
        import jax

        if not isinstance(image, jax.Array):
            raise TypeError(f"{caller} needs a NumPy or JAX array. Got {describe_value(image)}.")
        xp = jax.numpy
    if (dtype := dtype_of_array(image)) is None or not is_float(dtype):
        raise TypeError(
            f"{caller} needs floats. Got {describe_leaf(image)}. "
            "Divide pixels by 255, or write them with the coefficients FRACTIONAL."
        )
    if type(axis) is not int:
        raise TypeError(f"{caller} needs axis to be an int. Got {describe_value(axis)}.")
    if not -image.ndim <= axis < image.ndim or image.shape[axis] not in channels:
        counts = ", ".join(map(str, channels[:-1])) + f" or {channels[-1]}"
        raise ValueError(
            f"{caller} needs {counts} channels on axis {axis}. Got {describe_leaf(image)}. "
            "Say where they are: axis=-1 if they come last, axis=-3 if they are before height and width."
        )
    return xp


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
            raise ValueError(f"Coefficients needs scales other than 0, which would lose the image. Got {self}.")

    def per_channel(self, caller: str, channels: int) -> tuple[np.ndarray, np.ndarray]:
        """Scales and offsets of that many channels."""
        colors = channels - (channels in (2, 4))
        rows = []
        for name, last in (("scale", self.alpha[0]), ("offset", self.alpha[1])):
            given = np.ravel(getattr(self, name))
            if len(given) not in (1, colors):
                raise ValueError(
                    f"{caller} needs one {name} for all colors or one for each. Got {len(given)} in {self}, and an "
                    f"image of {channels} channels, {colors} of them colors. Alpha is given by itself: "
                    "alpha=(scale, offset)."
                )
            rows.append(np.append(np.broadcast_to(given, colors), [last] * (channels - colors)))
        return rows[0], rows[1]


def require_coefficients(caller: str, name: str, value: Any) -> None:
    """Refuse anything but coefficients."""
    if not isinstance(value, Coefficients):
        raise TypeError(f"{caller} needs {name} to be Coefficients, such as FRACTIONAL. Got {describe_value(value)}.")


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


if TYPE_CHECKING:
    from PIL.Image import Image


def write_hwc(image: Any, array: np.ndarray, coefficients: Coefficients | None = None) -> None:
    """Write the pixels of an image into an array of (height, width, channels).

    Example:
        >>> from PIL import Image
        >>> from millstream.integrations.images import FRACTIONAL, write_hwc
        >>> row = np.empty((2, 4, 3), np.float32)
        >>> write_hwc(Image.new("RGB", (4, 2), (255, 0, 51)), row, FRACTIONAL)
        >>> row[0, 0]
        array([1. , 0. , 0.2], dtype=float32)

    Args:
        image: A Pillow image of the mode RGB, RGBA, RGBa, L or LA, or an array of (height, width, channels), or of
            (height, width) if it is gray.
        array: Where to write: the row of a batch, for example one of the arrays that `FillSource` gives.
        coefficients: What to make of the pixels, if `array` holds floats. Without any they are written as they are.
    """
    caller = "write_hwc"
    pixels, target = _pixels(caller, image), _target(caller, array, channels=-1)
    _require_fit(caller, image, pixels, array, target, "(height, width, channels)", coefficients)
    if coefficients is None:
        np.copyto(target, pixels)
    else:
        # Whole lines of coefficients: with one per channel, NumPy would go through the pixels three by three.
        scale, offset = (
            np.tile(one, (pixels.shape[1], 1)) for one in coefficients.per_channel(caller, pixels.shape[2])
        )
        _write(pixels, target, scale, offset)


def write_chw(image: Any, array: np.ndarray, coefficients: Coefficients | None = None) -> None:
    """Write the pixels of an image into an array of (channels, height, width).

    Example:
        >>> from PIL import Image
        >>> from millstream.integrations.images import balanced, write_chw
        >>> row = np.empty((3, 2, 4), np.float32)
        >>> write_chw(Image.new("RGB", (4, 2), (255, 0, 51)), row, balanced())
        >>> row[:, 0, 0]
        array([ 1. , -1. , -0.6], dtype=float32)

    Args:
        image: As for `write_hwc`: arrays have their channels last here, too.
        array: Where to write.
        coefficients: What to make of the pixels, if `array` holds floats. Without any they are written as they are.
    """
    caller = "write_chw"
    pixels, target = _pixels(caller, image), _target(caller, array, channels=0)
    _require_fit(caller, image, pixels, array, target, "(channels, height, width)", coefficients)
    if coefficients is None:
        np.copyto(target, pixels)
    else:
        scale, offset = (one[:, None] for one in coefficients.per_channel(caller, pixels.shape[2]))
        _write(pixels.transpose(0, 2, 1), target.transpose(0, 2, 1), scale, offset)


def to_pillow(
    array: Any, coefficients: Coefficients | None = None, *, axis: int = -1, mode: str | None = None
) -> "Image":
    """Make a Pillow image of an array: what `write_hwc` and `write_chw` did, undone.

    Numbers are rounded to the nearest pixel value, and cut off at 0 and 255.

    Example:
        >>> from millstream.integrations.images import FRACTIONAL, to_pillow
        >>> image = to_pillow(np.full((3, 2, 4), 0.5), FRACTIONAL, axis=0)
        >>> image.mode, image.size, image.getpixel((0, 0))
        ('RGB', (4, 2), (128, 128, 128))

    Args:
        array: A NumPy or JAX array of one image; two axes are (height, width) of a gray one. It is not changed.
        coefficients: Those that the pixels were written with. Without any the numbers are pixels, from 0 to 255.
        axis: Where the channels are: -1 for (height, width, channels), 0 for (channels, height, width).
        mode: "RGBa" if the colors of four channels are multiplied by alpha; other modes follow from the channels.
    """
    caller = "to_pillow"
    with needs(caller, "Pillow", "images"):
        from PIL import Image
    numbers = _as_numbers(caller, array)
    if numbers.ndim not in (2, 3) or type(axis) is not int or axis not in (-3, -1, 0, 2):
        raise ValueError(
            f"{caller} needs one image, with its channels first (axis=0) or last (axis=-1). "
            f"Got axis={describe_value(axis)} and {describe_leaf(numbers)}. Images of a batch are given one by one."
        )
    numbers = numbers[..., None] if numbers.ndim == 2 else np.moveaxis(numbers, axis, -1)
    modes = _MODES.get(numbers.shape[2], ())
    if not modes or not (mode is None or (isinstance(mode, str) and mode in modes)):
        raise ValueError(
            f"{caller} needs 1 (L), 2 (LA), 3 (RGB) or 4 (RGBA, RGBa) channels on axis {axis}. "
            f"Got mode={describe_value(mode)} and {describe_leaf(array)}. Channels that come first need axis=0."
        )
    if coefficients is not None:
        require_coefficients(caller, "coefficients", coefficients)
    pixels = _rounded(caller, numbers, coefficients)
    return Image.frombytes(modes[0] if mode is None else mode, (pixels.shape[1], pixels.shape[0]), pixels.tobytes())


def _as_numbers(caller: str, image: Any) -> np.ndarray:
    try:
        numbers = np.asarray(image)
    except Exception:
        numbers = None
    if numbers is None or not holds_numbers(numbers.dtype):
        raise TypeError(f"{caller} needs an image or an array of numbers. Got {describe_value(image)}.")
    return numbers


def _pixels(caller: str, image: Any) -> np.ndarray:
    mode = getattr(image, "mode", None)
    if isinstance(mode, str) and not any(mode in modes for modes in _MODES.values()):
        raise ValueError(
            f"{caller} needs an image of the mode RGB, RGBA, RGBa, L or LA. Got {mode}. "
            "Open it with open_srgb, or convert it: image.convert('RGB')."
        )
    pixels = _as_numbers(caller, image)
    if pixels.ndim not in (2, 3) or pixels.dtype.kind not in "uif":
        raise ValueError(f"{caller} needs an image, (height, width, channels) of numbers. Got {describe_leaf(pixels)}.")
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _target(caller: str, array: Any, channels: int) -> np.ndarray:
    """The array as (height, width, channels): a view."""
    if not isinstance(array, np.ndarray) or array.ndim not in (2, 3) or not array.flags.writeable:
        kind = " that is read-only" if isinstance(array, np.ndarray) and not array.flags.writeable else ""
        raise ValueError(
            f"{caller} needs a NumPy array of one image that can be written to. Got {type(array).__name__}, "
            f"{describe_leaf(array)}{kind}."
        )
    return array[..., None] if array.ndim == 2 else np.moveaxis(array, channels, -1)


def _require_fit(
    caller: str,
    image: Any,
    pixels: np.ndarray,
    array: np.ndarray,
    target: np.ndarray,
    layout: str,
    coefficients: Coefficients | None,
) -> None:
    if coefficients is not None:
        require_coefficients(caller, "coefficients", coefficients)
    if pixels.shape != target.shape:
        height, width, channels = pixels.shape
        mode = getattr(image, "mode", None)
        raise ValueError(
            f"{caller} needs an array {layout} that fits the image. Got an image of height {height}, width {width} and "
            f"{channels} channels{'' if mode is None else f' ({mode})'}, and an array of {describe_leaf(array)}. "
            "Resize or convert the image, or give the part of the array that it goes into."
        )
    if coefficients is None and not np.can_cast(pixels.dtype, array.dtype, "safe"):
        raise TypeError(f"{caller} needs an array that can hold {pixels.dtype}. Got {describe_leaf(array)}.")
    if coefficients is not None and not is_float(array.dtype):
        raise TypeError(
            f"{caller} needs an array of floats to write with coefficients. Got {describe_leaf(array)}. "
            "Without coefficients, pixels are written as they are."
        )


def _write(pixels: np.ndarray, target: np.ndarray, scale: np.ndarray, offset: np.ndarray) -> None:
    """Write lines of pixels, some at a time, so that nothing of the size of the image is made on the way."""
    exact = np.float64 if target.dtype == np.float64 else np.float32
    # Divided by 255, pixels are rounded once; times 1 / 255, twice.
    divisor, offset = (1 / scale).astype(exact), offset.astype(exact)
    lines = max(1, _BLOCK // max(1, math.prod(pixels.shape[1:])))
    memory = np.empty((min(lines, len(pixels)), *pixels.shape[1:]), exact)
    for start in range(0, len(pixels), lines):
        block = memory[: len(pixels) - start]
        np.copyto(block, pixels[start : start + lines], casting="same_kind")
        np.divide(block, divisor, out=block)
        np.add(block, offset, out=target[start : start + lines], casting="same_kind")


def _rounded(caller: str, numbers: np.ndarray, coefficients: Coefficients | None) -> np.ndarray:
    if coefficients is None and numbers.dtype == np.uint8:
        return numbers
    if coefficients is not None and numbers.dtype.kind in "biu":
        raise TypeError(
            f"{caller} needs floats to undo coefficients. Got {describe_leaf(numbers)}. "
            "If these are pixels from 0 to 255, leave the coefficients out."
        )
    values = numbers.astype(np.float64 if numbers.dtype == np.float64 else np.float32)
    if coefficients is not None:
        scale, offset = coefficients.per_channel(caller, numbers.shape[2])
        values -= offset.astype(values.dtype)
        values /= scale.astype(values.dtype)
    if np.isnan(values).any():
        raise ValueError(f"{caller} needs numbers. {int(np.isnan(values).sum())} of {values.size} are NaN.")
    return np.clip(np.rint(values, out=values), 0, 255, out=values).astype(np.uint8)
