"""What the modes of Pillow mean: the colors of a picture, apart from its transparency."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

_GRAY = ("1", "L", "LA", "La")
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N")


def split_alpha(image: "Image") -> "tuple[Image | np.ndarray, Image | None]":
    """The colors of a picture and its alpha, if it has any.

    Colors are an image of the mode RGB, CMYK or LAB, or the levels of gray, uint8 or uint16.
    """
    if _has_sixteen_bits(image):
        return _split_sixteen_bits(image)
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of the mode {image.mode} have no known white; convert it to 8 or 16 bits")
    gray, alpha = image.mode in _GRAY, None
    if image.has_transparency_data:
        image = image.convert("LA" if gray else "RGBA")
        alpha = image.getchannel("A")
    if gray:
        return np.asarray(image.convert("L")), alpha
    return image if image.mode in ("RGB", "CMYK", "LAB") else image.convert("RGB"), alpha


def _has_sixteen_bits(image: "Image") -> bool:
    # "I" is 32 bits wide; these two formats put 16 into it, with 65535 for white.
    return image.mode in _SIXTEEN_BITS or (image.mode == "I" and image.format in ("PNG", "PPM"))


def _split_sixteen_bits(image: "Image") -> "tuple[np.ndarray, Image | None]":
    from PIL import Image

    levels = np.asarray(image).astype(np.uint16)
    transparent = image.info.get("transparency")
    if transparent is None:
        return levels, None
    return levels, Image.fromarray(np.where(levels == transparent, 0, 255).astype(np.uint8))


def eight_bits(levels: np.ndarray) -> np.ndarray:
    """Levels of gray as uint8. Pillow would cut 16 bits off at 255."""
    if levels.dtype == np.uint8:
        return levels
    return ((levels.astype(np.uint32) + 128) // 257).astype(np.uint8)
