"""Images in folders, one folder per class. Pillow decodes them."""

import functools
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from millstream.files.data_files import local_path
from millstream.plan.ordering import Ordering
from millstream.sources.disk import DiskSampleSource
from millstream.sources.image_file import Opening, require_pillow
from millstream.text.errors import describe_value

_SUFFIXES = {".bmp", ".gif", ".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}


class ImageFolderSource(DiskSampleSource):
    """The images below a folder as `{"image": uint8 (height, width, 3), "label": int32}`.

    Every folder in `root` is a class; labels count them in the order of their names, which `classes` gives.
    Images are opened as `millstream.integrations.images.open_srgb` does it: as sRGB, and upright.

    Example:
        >>> source = ImageFolderSource("flowers/train", size=(64, 64))  # doctest: +SKIP
        >>> source.classes  # doctest: +SKIP
        ('daisy', 'rose', 'tulip')

    Args:
        root: The folder of class folders.
        size: (height, width) to scale every image to. By default they are taken as they are, and must be alike.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many images are read before they are needed.
    """

    classes: tuple[str, ...]

    def __init__(
        self,
        root: str | os.PathLike[str],
        size: tuple[int, int] | None = None,
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
    ) -> None:
        require_pillow("ImageFolderSource")
        is_pair = isinstance(size, tuple | list) and len(size) == 2
        if size is not None and not (is_pair and all(type(side) is int and side > 0 for side in size)):
            raise ValueError(f"ImageFolderSource needs size (height, width). Got {describe_value(size)}.")
        classes, pictures = _list_pictures(local_path("ImageFolderSource", root))
        object.__setattr__(self, "classes", classes)
        super().__init__(len(pictures), _ReadPicture(pictures, size), None, ordering, prefetch_size)


class _ReadPicture:
    """From an index to a sample; a class so that it can be sent to another process."""

    def __init__(self, pictures: Sequence[tuple[pathlib.Path, int]], size: tuple[int, int] | None) -> None:
        self.pictures = pictures
        self.size = size

    def __call__(self, index: int) -> dict[str, Any]:
        path, label = self.pictures[index]
        with path.open("rb") as file:
            return {"image": decode_image(str(path), file, self.size), "label": np.int32(label)}


def _list_pictures(root: pathlib.Path) -> tuple[tuple[str, ...], list[tuple[pathlib.Path, int]]]:
    if not root.is_dir():
        raise FileNotFoundError(f"ImageFolderSource needs a folder of class folders. {root} is none.")
    classes = tuple(sorted(entry.name for entry in root.iterdir() if entry.is_dir()))
    home = root.resolve()
    pictures = []
    for label, name in enumerate(classes):
        for path in sorted((root / name).rglob("*")):
            if path.suffix.lower() not in _SUFFIXES or path.is_dir():
                continue
            if not path.resolve().is_relative_to(home):
                raise ValueError(
                    f"ImageFolderSource reads only what is in {root}. {path} is a link to {path.resolve()}. "
                    "Copy the file, or give the folder that holds both."
                )
            pictures.append((path, label))
    if not pictures:
        raise ValueError(
            f"ImageFolderSource needs images ({', '.join(sorted(_SUFFIXES))}) in folders named after their classes. "
            f"{root} has the folders {list(classes)} and no images in them."
        )
    return classes, pictures


def decode_image(name: str, file: Any, size: tuple[int, int] | None = None) -> np.ndarray:
    """The pixels of an image, as sRGB and upright: uint8, (height, width, 3)."""
    opening = _opening()
    if size is None:
        return opening.pixels(name, file)
    from PIL import Image

    return np.asarray(opening.image(name, file).resize((size[1], size[0]), Image.Resampling.BILINEAR))


@functools.cache
def _opening() -> Opening:
    return Opening("ImageFolderSource", mode="RGB")
