"""hydrax's names for images: files opened as sRGB, pixels in arrays of a loader and back, and Oklab, in place."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from millstream.integrations import images
from millstream.text.errors import describe_value, needs, require_int

if TYPE_CHECKING:
    from PIL.Image import Image

CONVERT_PERCEPTUAL = "perceptual"
CONVERT_RELATIVE = "relative"
_ALPHA = (1 / 255, 0.0)


class Coefs:
    """How pixels from 0 to 255 become numbers: `pixel / divide - subtract`, for all channels or for each.

    There are `Coefs.FRACTIONAL` (0 to 1), `Coefs.balanced()` (-1 to 1), `Coefs.IMAGENET_SRGB` and
    `Coefs.IMAGENET_SRGB_ALPHA`.

    Example:
        >>> from millstream.dialects.hydrax.image import Coefs
        >>> Coefs.balanced(2.0)[np.float32]
        array([63.75,  2.  ], dtype=float32)

    Args:
        coefs: (divide, subtract), each a number or one per channel. Alpha, the last of two or four, is 0 to 1 if it is
            not among them.
    """

    FRACTIONAL: "Coefs"
    IMAGENET_SRGB: "Coefs"
    IMAGENET_SRGB_ALPHA: "Coefs"

    def __init__(self, coefs: Any) -> None:
        array = _checked(coefs)
        array.flags.writeable = False
        self._array = array
        divide, subtract = array
        alpha = _ALPHA
        if array.ndim == 2 and array.shape[1] in (2, 4):
            alpha = (1 / float(divide[-1]), -float(subtract[-1]))
            divide, subtract = divide[:-1], subtract[:-1]
        scale, offset = tuple(1 / np.atleast_1d(divide)), tuple(-np.atleast_1d(subtract))
        self.coefficients = images.Coefficients(scale, offset, alpha)

    def __getitem__(self, dtype: Any) -> np.ndarray:
        """The array in a dtype."""
        return self._array.astype(dtype)

    @staticmethod
    def balanced(scale: float = 1.0, *, alpha: bool = False) -> "Coefs":
        """From `-scale` to `scale`, and alpha from 0 to 1."""
        if scale == 0:
            raise ValueError("Coefs.balanced needs a scale other than 0, which would lose the image. Got 0.")
        divide = 127.5 / scale
        return Coefs([[divide] * 3 + [255.0], [scale] * 3 + [0.0]]) if alpha else Coefs((divide, scale))


def _checked(coefs: Any) -> np.ndarray:
    try:
        array = np.array(coefs, np.float64)
    except (TypeError, ValueError):  # no numbers, or not as many of the one as of the other
        array = np.empty(0)
    if array.shape not in ((2,), (2, 1), (2, 2), (2, 3), (2, 4)):
        raise ValueError(
            f"Coefs needs (divide, subtract), each a number or one per channel. Got {describe_value(coefs)}."
        )
    if not np.isfinite(array).all() or not array[0].all():
        raise ValueError(f"Coefs needs finite numbers, and none that is 0 to divide by. Got {describe_value(coefs)}.")
    return array


_MEANS, _DEVIATIONS = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])

Coefs.FRACTIONAL = Coefs((255.0, 0.0))
Coefs.IMAGENET_SRGB = Coefs((255 * _DEVIATIONS, _MEANS / _DEVIATIONS))
Coefs.IMAGENET_SRGB_ALPHA = Coefs(([*(255 * _DEVIATIONS), 255.0], [*(_MEANS / _DEVIATIONS), 0.0]))


def open_srgb(
    fp: Any, *, mode: Any = "RGB", convert: Any = CONVERT_RELATIVE, formats: Sequence[str] | None = None
) -> "Image":
    """Open an image as sRGB, converted from the ICC profile it carries. It is turned as the file has it.

    Example:
        >>> from PIL import Image
        >>> from millstream.dialects.hydrax.image import open_srgb
        >>> Image.new("L", (4, 3), 128).save("gray.png")
        >>> open_srgb("gray.png").mode
        'RGB'

    Args:
        fp: A path, or a binary file.
        mode: Pillow's mode of the image.
        convert: `CONVERT_RELATIVE` clips colors that sRGB lacks, `CONVERT_PERCEPTUAL` moves all of them.
        formats: Which of Pillow's formats may be read; None for those that `millstream.integrations.images` reads.
    """
    options: dict[str, Any] = {} if formats is None else {"formats": formats}
    return images.open_srgb(fp, mode=mode, intent=convert, upright=False, max_pixels=None, **options)


def set_max_image_pixels(threshold: int | None) -> None:
    """Refuse images of more pixels in this process, and warn of those of more than half as many; None refuses none.

    Example:
        >>> from PIL import Image
        >>> from millstream.dialects.hydrax.image import set_max_image_pixels
        >>> before = Image.MAX_IMAGE_PIXELS
        >>> set_max_image_pixels(10_000)
        >>> Image.MAX_IMAGE_PIXELS = before
    """
    with needs("set_max_image_pixels", "Pillow", "images"):
        from PIL import Image
    if threshold is not None:
        require_int("set_max_image_pixels", "threshold", threshold, least=2)
    Image.MAX_IMAGE_PIXELS = None if threshold is None else threshold // 2  # Pillow refuses twice as many


def write_hwc(image: Any, array: np.ndarray, coefs: Coefs | None = None) -> None:
    """Write an image into an array of (height, width, channels).

    Example:
        >>> from millstream.dialects.hydrax.image import Coefs, write_hwc
        >>> array = np.empty((1, 2, 3), np.float32)
        >>> write_hwc(np.full((1, 2, 3), 51, np.uint8), array, Coefs.FRACTIONAL)
        >>> float(array[0, 0, 0])
        0.20000000298023224

    Args:
        image: A Pillow image, or an array of (height, width, channels).
        array: Where to write.
        coefs: What to make of the pixels; None writes them as they are.
    """
    images.write_hwc(image, array, None if coefs is None else coefs.coefficients)


def write_chw(image: Any, array: np.ndarray, coefs: Coefs | None = None) -> None:
    """Write an image into an array of (channels, height, width).

    Example:
        >>> from millstream.dialects.hydrax.image import Coefs, write_chw
        >>> array = np.empty((3, 1, 2), np.float32)
        >>> write_chw(np.full((1, 2, 3), 255, np.uint8), array, Coefs.balanced())
        >>> array[:, 0, 0]
        array([1., 1., 1.], dtype=float32)

    Args:
        image: A Pillow image, or an array of (height, width, channels).
        array: Where to write.
        coefs: What to make of the pixels; None writes them as they are.
    """
    images.write_chw(image, array, None if coefs is None else coefs.coefficients)


def from_srgb_hwc(image: Any, coefs: Coefs, *, mode: str | None = None, copy: bool = False) -> "Image":
    """A Pillow image of an array that was written with these coefficients.

    Example:
        >>> from millstream.dialects.hydrax.image import Coefs, from_srgb_hwc
        >>> from_srgb_hwc(np.full((1, 2, 3), 0.5), Coefs.FRACTIONAL).getpixel((0, 0))
        (128, 128, 128)

    Args:
        image: The array, (height, width, channels).
        coefs: Those it was written with.
        mode: Pillow's mode; None for what the channels are.
        copy: Not needed any more: the array is not changed in either case.
    """
    return images.to_pillow(image, coefs.coefficients, mode=mode)


def convert_srgb_to_oklab_frac_hwc(image: np.ndarray) -> None:
    """From sRGB, 0 to 1, to Oklab, in place: (..., height, width, channels). Alpha is not changed."""
    image[...] = images.srgb_to_oklab(image)


def convert_srgb_to_oklab_frac_chw(image: np.ndarray) -> None:
    """From sRGB, 0 to 1, to Oklab, in place: (..., channels, height, width). Alpha is not changed."""
    image[...] = images.srgb_to_oklab(image, axis=-3)


def convert_oklab_to_srgb_frac_hwc(image: np.ndarray) -> None:
    """From Oklab to sRGB, 0 to 1, in place: (..., height, width, channels). Alpha is not changed."""
    image[...] = images.oklab_to_srgb(image)


def convert_oklab_to_srgb_frac_chw(image: np.ndarray) -> None:
    """From Oklab to sRGB, 0 to 1, in place: (..., channels, height, width). Alpha is not changed."""
    image[...] = images.oklab_to_srgb(image, axis=-3)


def convert_frac_to_balanced_hwc(image: np.ndarray, scale: float = 1.0) -> None:
    """From 0 to 1 to `-scale` to `scale`, in place: (..., height, width, channels). Alpha is not changed."""
    image[...] = images.rescale(image, images.FRACTIONAL, images.balanced(scale))


def convert_frac_to_balanced_chw(image: np.ndarray, scale: float = 1.0) -> None:
    """From 0 to 1 to `-scale` to `scale`, in place: (..., channels, height, width). Alpha is not changed."""
    image[...] = images.rescale(image, images.FRACTIONAL, images.balanced(scale), axis=-3)


def convert_balanced_to_frac_hwc(image: np.ndarray, scale: float = 1.0) -> None:
    """From `-scale` to `scale` to 0 to 1, in place: (..., height, width, channels). Alpha is not changed."""
    image[...] = images.rescale(image, images.balanced(scale), images.FRACTIONAL)


def convert_balanced_to_frac_chw(image: np.ndarray, scale: float = 1.0) -> None:
    """From `-scale` to `scale` to 0 to 1, in place: (..., channels, height, width). Alpha is not changed."""
    image[...] = images.rescale(image, images.balanced(scale), images.FRACTIONAL, axis=-3)
