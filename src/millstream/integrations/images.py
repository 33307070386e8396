"""Images: files opened as sRGB, pixels written into rows of batches, images made of arrays, and Oklab."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from millstream.integrations._image_pixels import FRACTIONAL as FRACTIONAL
from millstream.integrations._image_pixels import IMAGENET as IMAGENET
from millstream.integrations._image_pixels import Coefficients as Coefficients
from millstream.integrations._image_pixels import balanced as balanced
from millstream.integrations._image_pixels import namespace
from millstream.integrations._image_pixels import rescale as rescale
from millstream.integrations._image_pixels import standardized as standardized
from millstream.integrations._image_pixels import to_pillow as to_pillow
from millstream.integrations._image_pixels import write_chw as write_chw
from millstream.integrations._image_pixels import write_hwc as write_hwc
from millstream.sources.image_file import open_srgb as open_srgb
from millstream.sources.image_file import read_srgb as read_srgb

Array = TypeVar("Array")  # a NumPy or a JAX array
_Step = Callable[[Any, Any, int], Any]  # by an array namespace, of colors whose channels are on this axis

# sRGB is IEC 61966-2-1, continued below 0 by symmetry. Oklab is Björn Ottosson's ("A perceptual color space for image
# processing", 2020), with the matrices of CSS Color 4, which have 64 bits and take white to (1, 0, 0).
_XYZ_TO_LMS = np.array(
    [
        [0.8190224379967030, 0.3619062600528904, -0.1288737815209879],
        [0.0329836539323885, 0.9292868615863434, 0.0361446663506424],
        [0.0481771893596242, 0.2642395317527308, 0.6335478284694309],
    ]
)
_ROOTS_TO_OKLAB = np.array(
    [
        [0.2104542683093140, 0.7936177747023054, -0.0040720430116193],
        [1.9779985324311684, -2.4285922420485799, 0.4505937096174110],
        [0.0259040424655478, 0.7827717124575296, -0.8086757549230774],
    ]
)
_OKLAB_TO_ROOTS = np.linalg.inv(_ROOTS_TO_OKLAB)


def _rgb_to_xyz() -> np.ndarray:
    """From linear sRGB to CIE XYZ: what makes its primaries add up to its white (D65)."""
    points = np.array([(0.64, 0.33), (0.30, 0.60), (0.15, 0.06), (0.3127, 0.3290)])
    x, y = points.T
    red, green, blue, white = np.stack([x / y, np.ones(4), (1 - x - y) / y], axis=1)
    primaries = np.stack([red, green, blue], axis=1)
    return primaries * np.linalg.solve(primaries, white)


_LINEAR_TO_LMS = _XYZ_TO_LMS @ _rgb_to_xyz()
_LMS_TO_LINEAR = np.linalg.inv(_LINEAR_TO_LMS)


def srgb_to_linear(image: Array, *, axis: int = -1) -> Array:
    """From sRGB (0 to 1) to light: numbers that add up as light does.

    Example:
        >>> from millstream.integrations.images import srgb_to_linear
        >>> srgb_to_linear(np.array([0.0, 0.5, 1.0])).round(4)
        array([0.   , 0.214, 1.   ])

    Args:
        image: A NumPy or JAX array of floats, with any axes besides that of the three channels. If there is a fourth
            it is alpha, which is kept as it is.
        axis: Where the channels are.
    """
    return _converted("srgb_to_linear", image, axis, _linear)


def linear_to_srgb(image: Array, *, axis: int = -1) -> Array:
    """From light to sRGB (0 to 1): the inverse of `srgb_to_linear`.

    Example:
        >>> from millstream.integrations.images import linear_to_srgb
        >>> linear_to_srgb(np.array([0.0, 0.214, 1.0])).round(4)
        array([0. , 0.5, 1. ])

    Args:
        image: As for `srgb_to_linear`.
        axis: Where the channels are.
    """
    return _converted("linear_to_srgb", image, axis, _nonlinear)


def srgb_to_oklab(image: Array, *, axis: int = -1) -> Array:
    """From sRGB (0 to 1) to Oklab, where distances are what people see: (lightness, green to red, blue to yellow).

    Works in NumPy and in `jax.jit`, `jax.grad` and `jax.vmap`. At black, where the slope of the cube root is infinite,
    its gradient is taken as 1.

    Example:
        >>> from millstream.integrations.images import srgb_to_oklab
        >>> srgb_to_oklab(np.array([1.0, 0.0, 0.0])).round(4)
        array([0.628 , 0.2249, 0.1258])

    Args:
        image: As for `srgb_to_linear`.
        axis: Where the channels are: -1 for (..., height, width, channels), -3 for (..., channels, height, width).
    """
    return _converted("srgb_to_oklab", image, axis, _linear, _oklab)


def oklab_to_srgb(image: Array, *, axis: int = -1) -> Array:
    """From Oklab to sRGB. Colors that sRGB does not have are below 0 or above 1; clip them to show them.

    Example:
        >>> from millstream.integrations.images import oklab_to_srgb
        >>> abs(oklab_to_srgb(np.array([1.0, 0.0, 0.0]))).round(4)
        array([1., 1., 1.])

    Args:
        image: As for `srgb_to_linear`.
        axis: Where the channels are.
    """
    return _converted("oklab_to_srgb", image, axis, _from_oklab, _nonlinear)


def linear_to_oklab(image: Array, *, axis: int = -1) -> Array:
    """From linear sRGB to Oklab.

    Example:
        >>> from millstream.integrations.images import linear_to_oklab
        >>> linear_to_oklab(np.array([0.0, 1.0, 0.0])).round(4)
        array([ 0.8664, -0.2339,  0.1795])

    Args:
        image: As for `srgb_to_linear`.
        axis: Where the channels are.
    """
    return _converted("linear_to_oklab", image, axis, _oklab)


def oklab_to_linear(image: Array, *, axis: int = -1) -> Array:
    """From Oklab to linear sRGB.

    Example:
        >>> from millstream.integrations.images import oklab_to_linear
        >>> oklab_to_linear(np.array([0.5, 0.0, 0.0])).round(4)
        array([0.125, 0.125, 0.125])

    Args:
        image: As for `srgb_to_linear`.
        axis: Where the channels are.
    """
    return _converted("oklab_to_linear", image, axis, _from_oklab)


def _converted(caller: str, image: Any, axis: int, *steps: _Step) -> Any:
    xp = namespace(caller, image, axis, (3, 4))
    place = axis % image.ndim
    before = (slice(None),) * place
    # Halves are computed with in float32: their own arithmetic has too few bits for powers.
    exact = image.astype(np.float32) if image.dtype.itemsize < 4 else image
    colors = exact[(*before, slice(3))]
    for step in steps:
        colors = step(xp, colors, place)
    return xp.concatenate([colors, exact[(*before, slice(3, None))]], axis=place).astype(image.dtype)


def _linear(xp: Any, colors: Any, place: int) -> Any:
    return _bent(xp, colors, 0.04045, 1 / 12.92, lambda size: ((size + 0.055) / 1.055) ** 2.4)


def _nonlinear(xp: Any, colors: Any, place: int) -> Any:
    return _bent(xp, colors, 0.0031308, 12.92, lambda size: 1.055 * size ** (1 / 2.4) - 0.055)


def _bent(xp: Any, colors: Any, end: float, slope: float, curve: Callable[[Any], Any]) -> Any:
    """A line up to `end` and a curve from there, mirrored below 0."""
    size = xp.abs(colors)
    # The curve is only asked where it is taken: elsewhere its gradient might be no number.
    bent = curve(xp.where(size > end, size, xp.ones_like(size)))
    return xp.where(size > end, xp.where(colors < 0, -bent, bent), colors * slope)


def _oklab(xp: Any, colors: Any, place: int) -> Any:
    lms = _product(xp, _LINEAR_TO_LMS, colors, place)
    zero = lms == 0
    roots = xp.where(zero, lms, xp.cbrt(xp.where(zero, xp.ones_like(lms), lms)))
    return _product(xp, _ROOTS_TO_OKLAB, roots, place)


def _from_oklab(xp: Any, colors: Any, place: int) -> Any:
    roots = _product(xp, _OKLAB_TO_ROOTS, colors, place)
    return _product(xp, _LMS_TO_LINEAR, roots * roots * roots, place)


def _product(xp: Any, matrix: np.ndarray, colors: Any, place: int) -> Any:
    """A matrix times colors, term by term: accelerators multiply matrices with fewer bits."""
    first, second, third = (colors[(*(slice(None),) * place, number)] for number in range(3))
    return xp.stack([first * float(a) + second * float(b) + third * float(c) for a, b, c in matrix], axis=place)
