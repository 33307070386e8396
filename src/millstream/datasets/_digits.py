"""Handwritten digits that come with the package, for examples and tests that must run anywhere."""

import functools
from importlib import resources
from typing import Literal

import numpy as np

from millstream._core.errors import describe_value


class DigitsDataset:
    """The UCI optical digits: 1,797 images of 8x8 pixels (attribution in `DIGITS-LICENSE.md`, CC BY 4.0).

    Images are uint8 of shape (8, 8, 1) from 0 to 255, labels int32.

    Example:
        >>> train = ms.datasets.DigitsDataset(split="train")
        >>> len(train), train[0]["image"].shape
        (1438, (8, 8, 1))

    Args:
        split: "train" or "test"; every fifth image is for testing.
    """

    def __init__(self, split: Literal["train", "test"] = "train") -> None:
        if split not in ("train", "test"):
            raise ValueError(f"DigitsDataset needs split 'train' or 'test'. Got {describe_value(split)}.")
        images, labels = _read()
        chosen = (np.arange(len(labels)) % 5 == 4) == (split == "test")
        self._arrays = {"image": images[chosen], "label": labels[chosen]}
        for array in self._arrays.values():
            array.flags.writeable = False

    def __len__(self) -> int:
        return len(self._arrays["label"])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: array[index] for name, array in self._arrays.items()}

    def as_array_dict(self) -> dict[str, np.ndarray]:
        """The whole split as read-only arrays, ready for `ArraySampleSource`."""
        return dict(self._arrays)


@functools.cache
def _read() -> tuple[np.ndarray, np.ndarray]:
    with resources.files("millstream.datasets").joinpath("digits.npz").open("rb") as file:
        stored = np.load(file, allow_pickle=False)
        counts, labels = stored["image"], stored["label"]
    images = (counts.astype(np.uint16) * 255 // 16).astype(np.uint8)
    return images[..., None], labels.astype(np.int32)
