"""Opening an image: which formats, how large, whole or not, and in which colors."""

import contextlib
import dataclasses
import functools
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np

from millstream.files.data_files import buffered, open_file
from millstream.sources._image_profile import INTENTS, Intent, is_srgb, to_srgb
from millstream.text.errors import describe_value, listed, needs, require_bool, require_choice, require_int

if TYPE_CHECKING:
    from PIL.Image import Image

Mode = Literal["RGB", "RGBA", "RGBa", "L", "LA"]
BadProfilePolicy = Literal["warn", "ignore", "raise"]
ImageFile = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO

# Formats whose decoders read pixels and nothing else: Pillow's EPS reader, for one, would start a program.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
PIXEL_LIMIT = 1 << 26

_ORIENTATION = 0x0112  # the EXIF tag
# What turns an image upright, by the value of the tag; 1 is upright.
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


def open_srgb(
    file: ImageFile,
    *,
    mode: Mode | None = None,
    intent: Intent = "relative",
    black_point: bool = True,
    bad_profile: BadProfilePolicy = "warn",
    upright: bool = True,
    max_pixels: int | None = PIXEL_LIMIT,
    formats: Sequence[str] = FORMATS,
) -> "Image":
    """Open an image with Pillow, as sRGB: converted from the ICC profile it carries, upright, and whole.

    Example:
        >>> from PIL import Image
        >>> from millstream.integrations.images import open_srgb
        >>> Image.new("L", (4, 3), 128).save("gray.png")
        >>> image = open_srgb("gray.png")
        >>> image.mode, image.size, image.getpixel((0, 0))
        ('RGB', (4, 3), (128, 128, 128))

    An image without a profile is taken as sRGB; if it is CMYK, as the complement of red, green and blue, and if it is
    Lab, as the ICC's (D50). The pixels of an image that is sRGB already are not changed, and neither is alpha ever.
    16 bits become 8. The image that is returned has no metadata, so that saving it cannot bring an old profile back.

    A file that is cut short, damaged or no image is a ValueError with its name.

    Args:
        file: A path or an address, the bytes of a file, or a binary file, which is read from its beginning and not
            closed.
        mode: "RGB", "RGBA", "RGBa" (multiplied by alpha), "L" or "LA". By default RGBA for images that have
            transparency and RGB for all others. A mode without alpha drops it: nothing is drawn behind the image.
        intent: What to do with colors outside sRGB: "relative" clips them, "perceptual" and "saturation" move all
            colors if the profile has tables for that, and "absolute" keeps the color of the paper.
        black_point: Whether black stays black when the profile's is lighter.
        bad_profile: A profile that is broken, or for other colors than the image's, is left out with a warning
            ("warn") or without one ("ignore"), or the image is refused ("raise").
        upright: Whether to turn an image as its EXIF orientation says.
        max_pixels: The most pixels (width times height) that are decoded. Pillow's own limit,
            `PIL.Image.MAX_IMAGE_PIXELS`, holds besides, and alone if this is None.
        formats: Which of Pillow's formats may be read.
    """
    opening = Opening("open_srgb", mode, intent, black_point, bad_profile, upright, max_pixels, formats)
    with _stream("open_srgb", file) as (name, stream):
        return opening.image(name, stream)


def read_srgb(
    file: ImageFile,
    *,
    mode: Mode | None = None,
    intent: Intent = "relative",
    black_point: bool = True,
    bad_profile: BadProfilePolicy = "warn",
    upright: bool = True,
    max_pixels: int | None = PIXEL_LIMIT,
    formats: Sequence[str] = FORMATS,
) -> np.ndarray:
    """The pixels of the image that `open_srgb` opens, given the same, as uint8 (height, width, channels), read-only.

    JPEG files that need no change of color or orientation are decoded by simplejpeg, if it is installed: the same
    pixels, faster.

    Example:
        >>> from PIL import Image
        >>> from millstream.integrations.images import read_srgb
        >>> Image.new("RGB", (4, 3), (255, 0, 0)).save("red.jpg")
        >>> read_srgb("red.jpg").shape
        (3, 4, 3)
    """
    opening = Opening("read_srgb", mode, intent, black_point, bad_profile, upright, max_pixels, formats)
    with _stream("read_srgb", file) as (name, stream):
        return opening.pixels(name, stream)


@dataclasses.dataclass(frozen=True)
class Opening:
    """How images are opened: the options of `open_srgb`, checked once."""

    caller: str
    mode: Mode | None = None
    intent: Intent = "relative"
    black_point: bool = True
    bad_profile: BadProfilePolicy = "warn"
    upright: bool = True
    max_pixels: int | None = PIXEL_LIMIT
    formats: Sequence[str] = FORMATS

    def __post_init__(self) -> None:
        require_pillow(self.caller)
        if self.mode is not None:
            require_choice(self.caller, "mode", self.mode, ("RGB", "RGBA", "RGBa", "L", "LA"))
        for name in ("black_point", "upright"):
            require_bool(self.caller, name, getattr(self, name))
        require_choice(self.caller, "intent", self.intent, INTENTS)
        require_choice(self.caller, "bad_profile", self.bad_profile, ("warn", "ignore", "raise"))
        if self.max_pixels is not None:
            require_int(self.caller, "max_pixels", self.max_pixels, least=1)
        if self.formats is not FORMATS:
            _require_formats(self.caller, self.formats)

    def image(self, name: str, stream: BinaryIO) -> "Image":
        """The image in a stream; `name` is what errors call it."""
        return self._finished(name, self._begun(name, stream))

    def pixels(self, name: str, stream: BinaryIO) -> np.ndarray:
        """Its pixels, (height, width, channels)."""
        image = self._begun(name, stream)
        found = self._fast_jpeg(image, stream)
        if found is None:
            found = np.asarray(self._finished(name, image))
        found.flags.writeable = False  # as Pillow's are, so that it does not matter who has decoded them
        return found[..., None] if found.ndim == 2 else found

    def _begun(self, name: str, stream: BinaryIO) -> "Image":
        """The image before any pixel is decoded."""
        from PIL import Image

        with _named(name, self.formats):
            image = Image.open(stream, formats=list(self.formats))
        if self.max_pixels is not None and image.width * image.height > self.max_pixels:
            raise ValueError(
                f"{name} cannot be read as an image: {image.width} x {image.height} pixels are more than the "
                f"{self.max_pixels} that are allowed. Remove it, or raise max_pixels if you trust it."
            )
        return image

    def _finished(self, name: str, image: "Image") -> "Image":
        with _named(name, self.formats):
            image.load()
            picture = to_srgb(image, self.intent, self.black_point, lambda reason: self._complain(name, reason))
            if self.upright:
                picture = _turned(picture, _turn(image))
            if self.mode is not None and picture.mode != self.mode:
                # Only RGBA can be multiplied by its alpha.
                picture = (picture.convert("RGBA") if self.mode == "RGBa" else picture).convert(self.mode)
            picture.info.clear()
        return picture

    def _complain(self, name: str, reason: str) -> None:
        if self.bad_profile == "raise":
            raise ValueError(f"its ICC profile {reason}")
        if self.bad_profile == "warn":
            text = f"{name}: the ICC profile of this image {reason}. Its colors are taken as if it had none."
            warnings.warn(text, stacklevel=2)

    def _fast_jpeg(self, image: "Image", stream: BinaryIO) -> np.ndarray | None:
        """The pixels by simplejpeg, if it can decode them and nothing is left to be done with them."""
        wanted = "L" if self.mode == "L" else "RGB"
        if (
            image.format not in ("JPEG", "MPO")
            or image.mode not in ("L", wanted)
            or self.mode not in (None, wanted)
            or not is_srgb(image.info.get("icc_profile"), self.intent, self.black_point)
            or (self.upright and _turn(image) is not None)
            or (simplejpeg := _simplejpeg()) is None
        ):
            return None
        stream.seek(0)
        try:
            pixels = simplejpeg.decode_jpeg(stream.read(), "GRAY" if wanted == "L" else "RGB")
        except ValueError:
            return None  # it refuses what it could fix, which Pillow does, so that both give the same
        return pixels if pixels.shape[:2] == (image.height, image.width) else None


def require_pillow(caller: str) -> None:
    """Say how to install Pillow if it is not there."""
    with needs(caller, "Pillow", "images"):
        import PIL.Image  # noqa: F401


def _require_formats(caller: str, formats: Any) -> None:
    from PIL import Image

    Image.init()
    names = listed(formats)
    if not names or not all(isinstance(name, str) and name.upper() in Image.OPEN for name in names):
        known = ", ".join(sorted(Image.OPEN))
        raise ValueError(f"{caller} needs formats that Pillow can read ({known}). Got {describe_value(formats)}.")


@contextlib.contextmanager
def _stream(caller: str, file: Any) -> Iterator[tuple[str, BinaryIO]]:
    """The name of a file and a stream of its bytes that can be sought in."""
    if isinstance(file, bytes | bytearray | memoryview):
        yield f"{caller}: a file of {len(file)} bytes", io.BytesIO(file)
    elif isinstance(file, str | os.PathLike):
        opened = open_file(caller, file)
        with contextlib.closing(opened):
            yield opened.name, buffered(opened)
    elif hasattr(file, "read"):
        sought = hasattr(file, "seek") and (not hasattr(file, "seekable") or file.seekable())
        yield str(getattr(file, "name", describe_value(file))), file if sought else io.BytesIO(file.read())
    else:
        raise TypeError(f"{caller} needs a path, bytes, or a binary file. Got {describe_value(file)}.")


@contextlib.contextmanager
def _named(name: str, formats: Sequence[str]) -> Iterator[None]:
    """Around all that Pillow does with a file, whose decoders raise errors of many kinds."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except Exception as error:
        # Pillow's own errors are plain OSErrors; others come from the disk or the network, and not from the image.
        if isinstance(error, OSError) and (
            error.errno is not None or type(error) not in (OSError, UnidentifiedImageError)
        ):
            raise
        reason, fix = str(error).rstrip("."), "Remove it or get it again"
        if isinstance(error, UnidentifiedImageError):
            reason = f"it is damaged or none of {', '.join(formats)}"
        if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
            fix = "Remove it, or raise PIL.Image.MAX_IMAGE_PIXELS if you trust it"
        raise ValueError(f"{name} cannot be read as an image: {reason}. {fix}.") from error


def _turn(image: "Image") -> str | None:
    """What turns an image upright, if anything does."""
    try:
        return _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:
        return None  # damaged metadata say nothing about the pixels


def _turned(picture: "Image", turn: str | None) -> "Image":
    from PIL import Image

    return picture if turn is None else picture.transpose(Image.Transpose[turn])


@functools.cache
def _simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg
