"""The pixels of images in rows of batches, and back in images."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from millstream.integrations._image_arrays import is_float
from millstream.integrations._image_coefficients import Coefficients, require_coefficients
from millstream.reading.dtypes import holds_numbers
from millstream.text.errors import describe_leaf, describe_value, needs

if TYPE_CHECKING:
    from PIL.Image import Image

_MODES = {1: ("L",), 2: ("LA",), 3: ("RGB",), 4: ("RGBA", "RGBa")}
_BLOCK = 1 << 16  # so many numbers at a time stay in a processor's cache


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
    who = "write_hwc"
    pixels, target = _pixels(who, image), _target(who, array, channels=-1)
    _require_fit(who, image, pixels, array, target, "(height, width, channels)", coefficients)
    if coefficients is None:
        np.copyto(target, pixels)
    else:
        # Whole lines of coefficients: with one per channel, NumPy would go through the pixels three by three.
        scale, offset = (np.tile(one, (pixels.shape[1], 1)) for one in coefficients.per_channel(who, pixels.shape[2]))
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
    who = "write_chw"
    pixels, target = _pixels(who, image), _target(who, array, channels=0)
    _require_fit(who, image, pixels, array, target, "(channels, height, width)", coefficients)
    if coefficients is None:
        np.copyto(target, pixels)
    else:
        scale, offset = (one[:, None] for one in coefficients.per_channel(who, pixels.shape[2]))
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
    who = "to_pillow"
    with needs(who, "Pillow", "images"):
        from PIL import Image
    numbers = _as_numbers(who, array)
    if numbers.ndim not in (2, 3) or type(axis) is not int or axis not in (-3, -1, 0, 2):
        raise ValueError(
            f"{who} needs one image, with its channels first (axis=0) or last (axis=-1). "
            f"Got axis={describe_value(axis)} and {describe_leaf(numbers)}. Images of a batch are given one by one."
        )
    numbers = numbers[..., None] if numbers.ndim == 2 else np.moveaxis(numbers, axis, -1)
    modes = _MODES.get(numbers.shape[2], ())
    if not modes or not (mode is None or (isinstance(mode, str) and mode in modes)):
        raise ValueError(
            f"{who} needs 1 (L), 2 (LA), 3 (RGB) or 4 (RGBA, RGBa) channels on axis {axis}. "
            f"Got mode={describe_value(mode)} and {describe_leaf(array)}. Channels that come first need axis=0."
        )
    if coefficients is not None:
        require_coefficients(who, "coefficients", coefficients)
    pixels = _rounded(who, numbers, coefficients)
    return Image.frombytes(modes[0] if mode is None else mode, (pixels.shape[1], pixels.shape[0]), pixels.tobytes())


def _as_numbers(who: str, image: Any) -> np.ndarray:
    try:
        numbers = np.asarray(image)
    except Exception:
        numbers = None
    if numbers is None or not holds_numbers(numbers.dtype):
        raise TypeError(f"{who} needs an image or an array of numbers. Got {describe_value(image)}.")
    return numbers


def _pixels(who: str, image: Any) -> np.ndarray:
    mode = getattr(image, "mode", None)
    if isinstance(mode, str) and not any(mode in modes for modes in _MODES.values()):
        raise ValueError(
            f"{who} needs an image of the mode RGB, RGBA, RGBa, L or LA. Got {mode}. "
            "Open it with open_srgb, or convert it: image.convert('RGB')."
        )
    pixels = _as_numbers(who, image)
    if pixels.ndim not in (2, 3) or pixels.dtype.kind not in "uif":
        raise ValueError(f"{who} needs an image, (height, width, channels) of numbers. Got {describe_leaf(pixels)}.")
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _target(who: str, array: Any, channels: int) -> np.ndarray:
    """The array as (height, width, channels): a view."""
    if not isinstance(array, np.ndarray) or array.ndim not in (2, 3) or not array.flags.writeable:
        kind = " that is read-only" if isinstance(array, np.ndarray) and not array.flags.writeable else ""
        raise ValueError(
            f"{who} needs a NumPy array of one image that can be written to. Got {type(array).__name__}, "
            f"{describe_leaf(array)}{kind}."
        )
    return array[..., None] if array.ndim == 2 else np.moveaxis(array, channels, -1)


def _require_fit(
    who: str,
    image: Any,
    pixels: np.ndarray,
    array: np.ndarray,
    target: np.ndarray,
    layout: str,
    coefficients: Coefficients | None,
) -> None:
    if coefficients is not None:
        require_coefficients(who, "coefficients", coefficients)
    if pixels.shape != target.shape:
        height, width, channels = pixels.shape
        mode = getattr(image, "mode", None)
        raise ValueError(
            f"{who} needs an array {layout} that fits the image. Got an image of height {height}, width {width} and "
            f"{channels} channels{'' if mode is None else f' ({mode})'}, and an array of {describe_leaf(array)}. "
            "Resize or convert the image, or give the part of the array that it goes into."
        )
    if coefficients is None and not np.can_cast(pixels.dtype, array.dtype, "safe"):
        raise TypeError(f"{who} needs an array that can hold {pixels.dtype}. Got {describe_leaf(array)}.")
    if coefficients is not None and not is_float(array.dtype):
        raise TypeError(
            f"{who} needs an array of floats to write with coefficients. Got {describe_leaf(array)}. "
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


def _rounded(who: str, numbers: np.ndarray, coefficients: Coefficients | None) -> np.ndarray:
    if coefficients is None and numbers.dtype == np.uint8:
        return numbers
    if coefficients is not None and numbers.dtype.kind in "biu":
        raise TypeError(
            f"{who} needs floats to undo coefficients. Got {describe_leaf(numbers)}. "
            "If these are pixels from 0 to 255, leave the coefficients out."
        )
    values = numbers.astype(np.float64 if numbers.dtype == np.float64 else np.float32)
    if coefficients is not None:
        scale, offset = coefficients.per_channel(who, numbers.shape[2])
        values -= offset.astype(values.dtype)
        values /= scale.astype(values.dtype)
    if np.isnan(values).any():
        raise ValueError(f"{who} needs numbers. {int(np.isnan(values).sum())} of {values.size} are NaN.")
    return np.clip(np.rint(values, out=values), 0, 255, out=values).astype(np.uint8)
