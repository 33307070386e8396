"""MNIST and the data sets that look like it, all in IDX files."""

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
from millstream.plan.ordering import Ordering
from millstream.reading.host_source import HostSource
from millstream.sources.array import check_reading
from millstream.sources.file_source import FileSource
from millstream.sources.idx import map_idx
from millstream.sources.npy import NpySource
from millstream.text.errors import require_choice

_SPLITS = {"train": "train", "test": "t10k"}
_KINDS = {"images-idx3-ubyte": "images", "labels-idx1-ubyte": "labels"}  # and what cyreal calls them


def _remote_files(mirrors: list[str], known: dict[str, tuple[int, str]]) -> dict[str, RemoteFile]:
    return {
        name: RemoteFile(f"{name}.gz", tuple(f"{mirror}/{name}.gz" for mirror in mirrors), f"sha256:{digest}", size)
        for name, (size, digest) in known.items()
    }


class _IdxDataset(ArrayDataset):
    """Images and labels in two IDX files for each split."""

    folder: ClassVar[str]
    cyreal_folder: ClassVar[str]
    files: ClassVar[dict[str, RemoteFile]]

    def __init__(self, split: str = "train", cache_dir: CacheDir = None) -> None:
        super().__init__(_read(type(self).__name__, self._paths(split, cache_dir)))

    @classmethod
    def _paths(cls, split: str, cache_dir: CacheDir) -> list[pathlib.Path]:
        """The two files, plain or packed: as they are if somebody has put them there, downloaded if not."""
        require_choice(cls.__name__, "split", split, _SPLITS)
        require_place(cls.__name__, "cache_dir", cache_dir)
        paths = []
        for kind, cyreal in _KINDS.items():
            name = f"{_SPLITS[split]}-{kind}"
            names = (name, f"{name}.gz", f"{split}_{cyreal}.gz")
            remote = cls.files[name]
            paths.append(find_or_fetch(cls.__name__, remote, cache_dir, cls.folder, cls.cyreal_folder, names))
        return paths

    @classmethod
    def make_disk_source(
        cls,
        *,
        split: str = "train",
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
        cache_dir: CacheDir = None,
    ) -> HostSource:
        """A source whose images stay on disk: packed files are unpacked once, then memory-mapped."""
        check_reading(cls.__name__, ordering, prefetch_size)
        paths = cls._paths(split, cache_dir)
        return _disk_source(cls.__name__, paths, cache_folder(cache_dir, cls.folder), ordering, prefetch_size)


class MNISTDataset(_IdxDataset):
    """The MNIST handwritten digits: 60,000 images for training and 10,000 for testing.

    Images are uint8 of shape (28, 28, 1), labels int32 from 0 to 9.

    Example:
        >>> train = ms.datasets.MNISTDataset(split="train")  # doctest: +SKIP
        >>> source = ms.ArraySampleSource(train.as_array_dict())  # doctest: +SKIP

    Args:
        split: "train" or "test".
        cache_dir: Where the files are, or are downloaded to; by default `~/.cache/millstream`.
    """

    folder = "mnist"
    cyreal_folder = "jax_mnist"
    files = _remote_files(
        ["https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"],
        {
            "train-images-idx3-ubyte": (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            "train-labels-idx1-ubyte": (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            "t10k-images-idx3-ubyte": (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            "t10k-labels-idx1-ubyte": (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        },
    )


class FashionMNISTDataset(_IdxDataset):
    """Zalando's articles of clothing, in the shape of MNIST.

    Example:
        >>> train = ms.datasets.FashionMNISTDataset(split="train")  # doctest: +SKIP

    Args:
        split: "train" or "test".
        cache_dir: Where the files are, or are downloaded to; by default `~/.cache/millstream`.
    """

    folder = "fashion_mnist"
    cyreal_folder = "fashion_mnist"
    files = _remote_files(
        [
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        ],
        {
            "train-images-idx3-ubyte": (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            "train-labels-idx1-ubyte": (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            "t10k-images-idx3-ubyte": (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            "t10k-labels-idx1-ubyte": (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        },
    )


class KMNISTDataset(_IdxDataset):
    """Kuzushiji-MNIST, cursive Japanese characters in the shape of MNIST.

    Example:
        >>> train = ms.datasets.KMNISTDataset(split="train")  # doctest: +SKIP

    Args:
        split: "train" or "test".
        cache_dir: Where the files are, or are downloaded to; by default `~/.cache/millstream`.
    """

    folder = "kmnist"
    cyreal_folder = "kmnist"
    files = _remote_files(
        ["https://codh.rois.ac.jp/kmnist/dataset/kmnist", "http://codh.rois.ac.jp/kmnist/dataset/kmnist"],
        {
            "train-images-idx3-ubyte": (18165135, "51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4"),
            "train-labels-idx1-ubyte": (29497, "e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17"),
            "t10k-images-idx3-ubyte": (3041136, "edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5"),
            "t10k-labels-idx1-ubyte": (5120, "20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c"),
        },
    )


class EMNISTDataset(ArrayDataset):
    """Handwritten letters and digits in the shape of MNIST, in five selections.

    Images are as NIST stores them, with rows and columns exchanged: `image.swapaxes(0, 1)` is upright. The labels of
    "letters" count from 1.

    Example:
        >>> letters = ms.datasets.EMNISTDataset(split="train", subset="letters")  # doctest: +SKIP

    Args:
        split: "train" or "test".
        cache_dir: Where the files are, or are downloaded to; by default `~/.cache/millstream`.
        subset: "balanced", "byclass", "bymerge", "digits" or "letters".
    """

    folder: ClassVar[str] = "emnist"
    archive: ClassVar[RemoteFile] = RemoteFile(
        "gzip.zip",
        ("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",),
        "sha256:fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
        561753746,
    )

    def __init__(self, split: str = "train", cache_dir: CacheDir = None, subset: str = "balanced") -> None:
        super().__init__(_read("EMNISTDataset", self._paths(split, cache_dir, subset)))

    @classmethod
    def _paths(cls, split: str, cache_dir: CacheDir, subset: str) -> list[pathlib.Path]:
        require_choice("EMNISTDataset", "split", split, _SPLITS)
        require_place("EMNISTDataset", "cache_dir", cache_dir)
        require_choice("EMNISTDataset", "subset", subset, ("balanced", "byclass", "bymerge", "digits", "letters"))
        names = {f"emnist-{subset}-{split}-{kind}": f"{split}_{cyreal}.gz" for kind, cyreal in _KINDS.items()}
        places = [(name, f"{name}.gz", f"gzip/{name}", f"gzip/{name}.gz", cyreal) for name, cyreal in names.items()]
        folder = f"emnist/{subset}"  # of cyreal, in which each subset has the archive
        paths = [find_file(cache_dir, cls.folder, place, folder) for place in places]
        found = [path for path in paths if path is not None]
        if len(found) == len(names):
            return found
        archives = (cls.archive.name, "emnist_gzip.zip")
        archive = find_or_fetch("EMNISTDataset", cls.archive, cache_dir, cls.folder, folder, archives)
        return extract(archive, [f"gzip/{name}.gz" for name in names], cache_folder(cache_dir, cls.folder))

    @classmethod
    def make_disk_source(
        cls,
        *,
        split: str = "train",
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
        cache_dir: CacheDir = None,
        subset: str = "balanced",
    ) -> HostSource:
        """A source whose images stay on disk: packed files are unpacked once, then memory-mapped."""
        check_reading("EMNISTDataset", ordering, prefetch_size)
        paths = cls._paths(split, cache_dir, subset)
        return _disk_source("EMNISTDataset", paths, cache_folder(cache_dir, cls.folder), ordering, prefetch_size)


def MNISTDiskSource(
    split: str = "train", cache_dir: CacheDir = None, ordering: Ordering = "shuffle", prefetch_size: int = 64
) -> HostSource:
    """MNIST as a source whose images stay on disk; the same as `MNISTDataset.make_disk_source`."""
    return MNISTDataset.make_disk_source(
        split=split, ordering=ordering, prefetch_size=prefetch_size, cache_dir=cache_dir
    )


def _read(caller: str, paths: list[pathlib.Path]) -> dict[str, np.ndarray]:
    images, labels = map(map_idx, paths)
    if images.ndim != 3 or images.dtype != np.uint8 or labels.shape != images.shape[:1]:
        raise ValueError(
            f"{caller} needs images of one byte per pixel, and a label for each. Got:\n"
            f"  {paths[0]}: shape {images.shape}, {images.dtype}\n  {paths[1]}: shape {labels.shape}, {labels.dtype}\n"
            "Remove both files; they are then downloaded again."
        )
    return {"image": images[..., None], "label": labels.astype(np.int32)}


def _disk_source(
    caller: str, paths: list[pathlib.Path], folder: pathlib.Path, ordering: Ordering, prefetch_size: int
) -> HostSource:
    if paths[0].suffix != ".gz":
        return FileSource(_read, (caller, paths), ordering, prefetch_size)
    name = paths[0].name.removesuffix("-images-idx3-ubyte.gz")
    return NpySource(cache_arrays(folder, name, paths, lambda: _read(caller, paths)), ordering, prefetch_size)
