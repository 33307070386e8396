"""Images in folders, one folder per class. Pillow decodes them."""

import functools
import hashlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from millstream.files.changed import FileStamp
from millstream.files.data_files import local_path
from millstream.plan.ordering import Ordering
from millstream.reading.host_source import SampleReader
from millstream.reading.samples import first_sample, spec_or_objects
from millstream.reading.stats import timed
from millstream.sources.array import check_reading
from millstream.sources.image_file import Opening, require_pillow
from millstream.text.errors import describe_value, noted

_SUFFIXES = {".bmp", ".gif", ".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
_READERS = 4  # threads, if the loader has no executor


class ImageFolderSource(SampleReader):
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

    whole_samples = True

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
        check_reading("ImageFolderSource", ordering, prefetch_size)
        self.classes, self._images = _list_images(local_path("ImageFolderSource", root))
        self._size = size
        self.ordering: Ordering = ordering
        self.prefetch_size, self.readers = prefetch_size, _READERS
        self.first_sample, sample = first_sample(self._sample, range(len(self)))
        self.sample_spec = spec_or_objects("ImageFolderSource", sample)

    def __len__(self) -> int:
        return len(self._images)

    @property
    def stamps(self) -> list[FileStamp]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The names of all images as one stamp: a million files take seconds to look at."""
        names = "\n".join(f"{label} {path.name}" for path, label in self._images)
        return [("images", len(self), hashlib.sha256(names.encode("utf-8", "surrogateescape")).hexdigest())]

    def read_row(self, index: int, out: Sequence[np.ndarray], row: int, key: np.ndarray | None) -> None:
        self.sample_spec.write("ImageFolderSource", out, row, index, self._sample(index))

    def _sample(self, index: int) -> dict[str, Any]:
        path, label = self._images[index]
        try:
            with timed("image"), path.open("rb") as file:
                return {"image": decode_image(str(path), file, self._size), "label": np.int32(label)}
        except Exception as error:
            raise noted(error, f"This came from ImageFolderSource at sample {index}, {path}.")  # noqa: B904


def _list_images(root: pathlib.Path) -> tuple[tuple[str, ...], list[tuple[pathlib.Path, int]]]:
    if not root.is_dir():
        raise FileNotFoundError(f"ImageFolderSource needs a folder of class folders. {root} is none.")
    classes = tuple(sorted(entry.name for entry in root.iterdir() if entry.is_dir()))
    home = root.resolve()
    images = []
    for label, name in enumerate(classes):
        for path in sorted((root / name).rglob("*")):
            if path.suffix.lower() not in _SUFFIXES or path.is_dir():
                continue
            if not path.resolve().is_relative_to(home):
                raise ValueError(
                    f"ImageFolderSource reads only what is in {root}. {path} is a link to {path.resolve()}. "
                    "Copy the file, or give the folder that holds both."
                )
            images.append((path, label))
    if not images:
        raise ValueError(
            f"ImageFolderSource needs images ({', '.join(sorted(_SUFFIXES))}) in folders named after their classes. "
            f"{root} has the folders {list(classes)} and no images in them."
        )
    return classes, images


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
