"""CIFAR-10 and CIFAR-100, from the archives for Python."""

import pathlib
from typing import ClassVar

import numpy as np

from millstream.datasets._archive import extract
from millstream.datasets._cache import (
    ArrayDataset,
    CacheDir,
    cache_arrays,
    cache_folder,
    find_file,
    find_or_fetch,
    require_place,
)
from millstream.datasets._download import RemoteFile
from millstream.datasets._pickle import read_plain_pickle
from millstream.plan.ordering import Ordering
from millstream.sources.array import check_reading
from millstream.sources.npy import NpySource
from millstream.text.errors import require_choice


class _CifarDataset(ArrayDataset):
    """Images of 32 x 32 pixels in pickled batches, which are read without unpickling."""

    folder: ClassVar[str]
    cyreal_folder: ClassVar[str]
    archive: ClassVar[RemoteFile]
    batches: ClassVar[dict[str, list[str]]]
    labels: ClassVar[dict[str, bytes]]

    def __init__(self, split: str = "train", cache_dir: CacheDir = None) -> None:
        super().__init__(self._read(self._paths(split, cache_dir)))

    @classmethod
    def _paths(cls, split: str, cache_dir: CacheDir) -> list[pathlib.Path]:
        """The batches: as they are if somebody has unpacked them there, from the archive if not."""
        require_choice(cls.__name__, "split", split, cls.batches)
        require_place(cls.__name__, "cache_dir", cache_dir)
        paths = [find_file(cache_dir, cls.folder, (batch,), cls.cyreal_folder) for batch in cls.batches[split]]
        found = [path for path in paths if path is not None]
        if len(found) == len(paths):
            return found
        archive = find_or_fetch(cls.__name__, cls.archive, cache_dir, cls.folder, cls.cyreal_folder)
        return extract(archive, cls.batches[split], cache_folder(cache_dir, cls.folder))

    @classmethod
    def _read(cls, paths: list[pathlib.Path]) -> dict[str, np.ndarray]:
        parts = [_read_batch(path, cls.labels) for path in paths]
        return {
            name: np.ascontiguousarray(np.concatenate([part[name] for part in parts]))
            for name in ("image", *cls.labels)
        }

    @classmethod
    def make_disk_source(
        cls,
        *,
        split: str = "train",
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
        cache_dir: CacheDir = None,
    ) -> NpySource:
        """A source whose images stay on disk: they are put in order once, then memory-mapped."""
        check_reading(cls.__name__, ordering, prefetch_size)
        paths = cls._paths(split, cache_dir)
        folder = cache_folder(cache_dir, cls.folder)
        cached = cache_arrays(folder, f"{cls.folder}-{split}", paths, lambda: cls._read(paths))
        return NpySource(cached, ordering, prefetch_size)


class CIFAR10Dataset(_CifarDataset):
    """CIFAR-10: 50,000 images for training and 10,000 for testing, in ten classes.

    Images are uint8 of shape (32, 32, 3), labels int32.

    Example:
        >>> train = ms.datasets.CIFAR10Dataset(split="train")  # doctest: +SKIP
        >>> source = ms.ArraySampleSource(train.as_array_dict())  # doctest: +SKIP

    Args:
        split: "train" or "test".
        cache_dir: Where the files are, or are downloaded to; by default `~/.cache/millstream`.
    """

    folder = "cifar10"
    cyreal_folder = "cyreal_cifar10"
    archive = RemoteFile(
        "cifar-10-python.tar.gz",
        ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
        "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        170498071,
    )
    batches: ClassVar = {
        "train": [f"cifar-10-batches-py/data_batch_{number}" for number in range(1, 6)],
        "test": ["cifar-10-batches-py/test_batch"],
    }
    labels: ClassVar = {"label": b"labels"}


class CIFAR100Dataset(_CifarDataset):
    """CIFAR-100: 50,000 images for training and 10,000 for testing, in 100 classes and 20 groups of classes.

    Images are uint8 of shape (32, 32, 3); `label` is the class and `coarse_label` its group, both int32.

    Example:
        >>> train = ms.datasets.CIFAR100Dataset(split="train")  # doctest: +SKIP

    Args:
        split: "train" or "test".
        cache_dir: Where the files are, or are downloaded to; by default `~/.cache/millstream`.
    """

    folder = "cifar100"
    cyreal_folder = "cifar100"
    archive = RemoteFile(
        "cifar-100-python.tar.gz",
        ("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",),
        "sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        169001437,
    )
    batches: ClassVar = {"train": ["cifar-100-python/train"], "test": ["cifar-100-python/test"]}
    labels: ClassVar = {"label": b"fine_labels", "coarse_label": b"coarse_labels"}


def _read_batch(path: pathlib.Path, labels: dict[str, bytes]) -> dict[str, np.ndarray]:
    batch = read_plain_pickle(str(path), path.read_bytes())
    pixels = batch.get(b"data")
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != 3 * 32 * 32:
        raise ValueError(f"{path} is not a CIFAR batch: it has no array `data` with 3072 bytes a row. Get it again.")
    # Stored as planes of red, green and blue.
    arrays = {"image": pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)}
    for name, key in labels.items():
        numbers = batch.get(key)
        if not isinstance(numbers, list) or len(numbers) != len(pixels) or {type(n) for n in numbers} != {int}:
            raise ValueError(
                f"{path} is not a CIFAR batch: it has no {len(pixels)} numbers `{key.decode()}`. Get it again."
            )
        arrays[name] = np.array(numbers, np.int32)
    return arrays
