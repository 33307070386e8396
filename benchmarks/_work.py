"""The samples that every loader's workers make. It needs NumPy and Pillow, and so do the workers."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping

import numpy as np

PICTURES = 300


@dataclasses.dataclass(frozen=True)
class Work:
    """Samples by number, without end, and how many of them make a batch."""

    batch: int
    sample: Callable[[int], dict[str, np.ndarray]]


def work(name: str, folder: str) -> Work:
    return {
        "pictures": Work(30, functools.partial(picture, folder)),
        "python": Work(30, python),
        "large": Work(256, large),
        "small": Work(128, small),
    }[name]


def make_pictures(folder: str) -> None:
    """JPEG files of 500x375: smooth random colours with a little noise, about as hard to decode as photographs."""
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(PICTURES):
        coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), np.int16)
        noisy = np.clip(smooth + random.integers(-12, 13, smooth.shape), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(pathlib.Path(folder, f"{number}.jpg"), quality=90)


def picture(folder: str, index: int) -> dict[str, np.ndarray]:
    """Decode one file and resize it."""
    from PIL import Image

    with Image.open(f"{folder}/{index % PICTURES}.jpg") as file:
        return {"image": np.asarray(file.convert("RGB").resize((224, 224)))}


def python(index: int) -> dict[str, np.ndarray]:
    """About a millisecond of Python that holds the interpreter's lock."""
    total = index
    for turn in range(8_000):
        total = (total * 31 + turn) & 0xFFFF
    return {"x": np.asarray(total, np.int32)}


def large(index: int) -> dict[str, np.ndarray]:
    """An item of 150 kB that costs little more than its memory; a batch has 38 MB."""
    return {"image": np.full((224, 224, 3), index & 0xFF, np.uint8)}


def small(index: int) -> dict[str, np.ndarray]:
    return {"image": _SMALL[index & 0xFF]}


def fill_small(index: int, arrays: Mapping[str, np.ndarray], _: object) -> None:
    """The same written into a given place."""
    arrays["image"][...] = _SMALL[index & 0xFF]


_SMALL = np.random.default_rng(0).integers(0, 256, (256, 28, 28), dtype=np.uint8)
