"""Handwritten digits that come with the package, for examples and tests that must run anywhere."""

import functools
from importlib import resources

import numpy as np

from millstream.datasets._cache import ArrayDataset
from millstream.plan.ordering import Ordering
from millstream.sources.array import check_reading
from millstream.sources.host_array import HostArraySource
from millstream.text.errors import require_choice


class DigitsDataset(ArrayDataset):
    """The UCI optical digits: 1,797 images of 8x8 pixels (attribution in `DIGITS-LICENSE.md`, CC BY 4.0).

    Images are uint8 of shape (8, 8, 1) from 0 to 255, labels int32.

    Example:
        >>> train = ms.datasets.DigitsDataset(split="train")
        >>> len(train), train[0]["image"].shape
        (1438, (8, 8, 1))

    Args:
        split: "train" or "test"; every fifth image is for testing.
    """

    def __init__(self, split: str = "train") -> None:
        require_choice("DigitsDataset", "split", split, ("train", "test"))
        images, labels = _read()
        chosen = (np.arange(len(labels)) % 5 == 4) == (split == "test")
        super().__init__({"image": images[chosen], "label": labels[chosen]})

    @classmethod
    def make_disk_source(
        cls, *, split: str = "train", ordering: Ordering = "shuffle", prefetch_size: int = 64
    ) -> HostArraySource:
        """A source whose images stay on the host."""
        check_reading("DigitsDataset", ordering, prefetch_size)
        return HostArraySource(cls(split).as_array_dict(), ordering, prefetch_size)


@functools.cache
def _read() -> tuple[np.ndarray, np.ndarray]:
    with resources.files("millstream.datasets").joinpath("digits.npz").open("rb") as file:
        stored = np.load(file, allow_pickle=False)
        counts, labels = stored["image"], stored["label"]
    images = (counts.astype(np.uint16) * 255 // 16).astype(np.uint8)
    return images[..., None], labels.astype(np.int32)
