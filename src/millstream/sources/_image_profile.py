"""The colors of an image as sRGB, by the ICC profile it carries. LittleCMS does it, through Pillow."""

import functools
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

_GRAY = ("1", "L", "LA", "La")
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N")
Intent = Literal["perceptual", "relative", "saturation", "absolute"]
INTENTS = ("perceptual", "relative", "saturation", "absolute")  # in the order of the ICC's numbers
_SPACES = {"RGB": "RGB ", "CMYK": "CMYK", "LAB": "Lab "}
# LittleCMS computes colors from a table that it makes beforehand. For inks a small one is close enough, and a large
# one takes a second to make. For Lab and gray any is too coarse: up to 35 of 255 levels off, up to 10 in dark grays.
_TABLES = {"RGB": "HIGHRESPRECALC", "CMYK": "NONE", "LAB": "NOOPTIMIZE", "L": "NOOPTIMIZE", "I;16": "NOOPTIMIZE"}


def split_alpha(image: "Image") -> "tuple[Image | np.ndarray, Image | None]":
    """The colors of an image and its alpha, if it has any.

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


if TYPE_CHECKING:
    from PIL.Image import Image


class BadProfile(ValueError):
    """A profile that cannot be used, and why."""


def to_srgb(image: "Image", intent: Intent, black_point: bool, complain: Callable[[str], None]) -> "Image":
    """A decoded image as RGB or RGBA; `complain` is told of a profile that cannot be used and is left out."""
    profile = image.info.get("icc_profile")
    colors, alpha = split_alpha(image)
    try:
        picture = _untagged(colors) if profile is None else _by_profile(colors, profile, intent, black_point)
    except BadProfile as error:
        complain(str(error))
        picture = _untagged(colors)
    if alpha is not None:
        picture.putalpha(alpha)
    return picture


def is_srgb(profile: bytes | None, intent: Intent, black_point: bool) -> bool:
    """Whether pixels of RGB images with this profile can be taken as they are."""
    try:
        return profile is None or (
            _space(profile) == "RGB " and _transform(profile, "RGB", intent, black_point) is None
        )
    except BadProfile:
        return False


def _untagged(colors: "Image | np.ndarray") -> "Image":
    """Colors without a profile: RGB and gray are sRGB, Lab is the ICC's, and of CMYK nobody knows the inks."""
    from PIL import Image

    if isinstance(colors, np.ndarray):
        return Image.fromarray(eight_bits(colors)).convert("RGB")
    if colors.mode == "LAB":
        return _applied(colors, _transform(None, "LAB", "relative", False))
    return colors.convert("RGB")


def _by_profile(colors: "Image | np.ndarray", profile: bytes, intent: Intent, black_point: bool) -> "Image":
    from PIL import Image

    space = _space(profile)
    if isinstance(colors, np.ndarray):
        if space == "GRAY":
            table = _gray_table(profile, colors.dtype, intent, black_point)
            return Image.fromarray(table[colors])
        colors = _untagged(colors)  # gray images with the RGB profile of a camera or a screen are common
    if space != _SPACES[colors.mode]:
        raise BadProfile(f"is for {space.strip()} colors, and the pixels are {colors.mode}")
    transform = _transform(profile, colors.mode, intent, black_point)
    return colors.copy() if transform is None else _applied(colors, transform)


@functools.lru_cache(maxsize=32)
def _transform(profile: bytes | None, mode: str, intent: Intent, black_point: bool) -> Any:
    """From a profile, or the ICC's Lab, to sRGB; None if that is where the colors are already. Threads share it."""
    transform = _build(profile, mode, intent, black_point)
    return None if mode == "RGB" and _keeps_colors(transform) else transform


def _keeps_colors(transform: Any) -> bool:
    """Whether no color changes by more than rounding does: then the profile is sRGB, whatever it is called."""
    from PIL import Image

    grays = np.repeat(np.arange(256)[:, None], 3, axis=1)
    lattice = np.stack(np.meshgrid(*[np.arange(0, 256, 17)] * 3), axis=-1).reshape(-1, 3)
    colors = np.concatenate([grays, lattice])[None].astype(np.uint8)
    found = np.asarray(_applied(Image.fromarray(colors), transform))
    return bool(np.abs(found.astype(int) - colors).max() <= 1)


@functools.lru_cache(maxsize=32)
def _gray_table(profile: bytes, dtype: np.dtype, intent: Intent, black_point: bool) -> np.ndarray:
    """The sRGB colors of all levels of gray."""
    from PIL import Image

    ramp = Image.fromarray(np.arange(np.iinfo(dtype).max + 1, dtype=dtype)[None])
    return np.asarray(_applied(ramp, _build(profile, ramp.mode, intent, black_point)))[0]


def _build(profile: bytes | None, mode: str, intent: Intent, black_point: bool) -> Any:
    from PIL import ImageCms

    source = ImageCms.createProfile("LAB") if profile is None else _parsed(profile)
    flags = ImageCms.Flags[_TABLES[mode]]
    if black_point:
        flags |= ImageCms.Flags.BLACKPOINTCOMPENSATION
    number = ImageCms.Intent(INTENTS.index(intent))
    try:
        return ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB", number, flags)
    except ImageCms.PyCMSError as error:
        raise BadProfile(f"is broken: {error}") from None


def _applied(image: "Image", transform: Any) -> "Image":
    from PIL import ImageCms

    applied = ImageCms.applyTransform(image, transform)
    assert applied is not None  # only in place is there nothing to return
    return applied


def _space(profile: bytes) -> str:
    return _parsed(profile).profile.xcolor_space


def _parsed(profile: bytes) -> Any:
    from PIL import ImageCms

    try:
        return ImageCms.ImageCmsProfile(io.BytesIO(profile))
    except OSError as error:
        raise BadProfile(f"is broken: {error}") from None
