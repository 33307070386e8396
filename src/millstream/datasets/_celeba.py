"""CelebA: faces with forty attributes each."""

import os
import pathlib
import threading
import zipfile
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from millstream.datasets._cache import CacheDir, find_file, find_or_fetch, require_place
from millstream.datasets._download import RemoteFile
from millstream.files.safe_path import safe_path
from millstream.plan.ordering import Ordering
from millstream.sources.array import check_reading
from millstream.sources.disk import DiskSampleSource
from millstream.sources.image_folder import decode_image, require_pillow
from millstream.text.errors import require_bool, require_choice

_SPLITS = {"train": "0", "valid": "1", "test": "2"}
_PICTURES = "img_align_celeba"
_PICTURE_LIMIT = 16 << 20


def _drive(name: str, number: str, size: int, digest: str) -> RemoteFile:
    urls = (f"https://drive.usercontent.google.com/download?id={number}&export=download&confirm=t",)
    return RemoteFile(name, urls, f"sha256:{digest}", size)


class CelebADataset:
    """CelebA: 202,599 aligned faces of 218 x 178 pixels, for research that is not commercial.

    A sample is `{"image": uint8 (218, 178, 3), "attributes": int32 (40,)}`. Images are decoded when they are asked
    for, from the folder `img_align_celeba` or straight from the archive `img_align_celeba.zip`.

    Example:
        >>> faces = ms.datasets.CelebADataset(split="valid", data_dir="celeba")  # doctest: +SKIP
        >>> faces.attribute_names[31]  # doctest: +SKIP
        'Smiling'

    Args:
        split: "train", "valid" or "test".
        cache_dir: Where the files are, or are downloaded to; by default `~/.cache/millstream`.
        data_dir: A folder that already has all files. Nothing is then downloaded.
        include_attributes: Whether samples have attributes; each is 0 or 1.
    """

    files: ClassVar[dict[str, RemoteFile]] = {
        file.name: file
        for file in (
            _drive(
                "img_align_celeba.zip",
                "0B7EVK8r0v71pZjFTYXZWM3FlRnM",
                1443490838,
                "46fb89443c578308acf364d7d379fe1b9efb793042c0af734b6112e4fd3a8c74",
            ),
            _drive(
                "list_attr_celeba.txt",
                "0B7EVK8r0v71pblRyaVFSWGxPY0U",
                26721026,
                "f0e5da289d5ccf75ffe8811132694922b60f2af59256ed362afa03fefba324d0",
            ),
            _drive(
                "list_eval_partition.txt",
                "0B7EVK8r0v71pY0NSMzRuSXJEVkk",
                2836386,
                "fc955bcb3ef8fbdf7d5640d9a8693a8431b5f2ee291a5c1449a1549e7e073fe7",
            ),
        )
    }

    attribute_names: tuple[str, ...] = ()

    def __init__(
        self,
        split: str = "train",
        cache_dir: CacheDir = None,
        data_dir: str | os.PathLike[str] | None = None,
        include_attributes: bool = True,
    ) -> None:
        require_pillow("CelebADataset")
        require_choice("CelebADataset", "split", split, _SPLITS)
        require_bool("CelebADataset", "include_attributes", include_attributes)
        require_place("CelebADataset", "cache_dir", cache_dir)
        require_place("CelebADataset", "data_dir", data_dir)
        names = _read_partition(_find("list_eval_partition.txt", cache_dir, data_dir), _SPLITS[split])
        self._attributes = None
        if include_attributes:
            path = _find("list_attr_celeba.txt", cache_dir, data_dir)
            self.attribute_names, self._attributes = _read_attributes(path, names)
        self._pictures = _Pictures(_find_pictures(cache_dir, data_dir), names)

    def __len__(self) -> int:
        return len(self._pictures.names)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        sample = {"image": self._pictures.read(index)}
        if self._attributes is not None:
            sample["attributes"] = self._attributes[index]
        return sample

    def as_array_dict(self) -> dict[str, np.ndarray]:
        """The whole split as read-only arrays. All of "train" takes 19 GB; `make_disk_source` takes none."""
        arrays = {"image": np.stack([self._pictures.read(index) for index in range(len(self))])}
        arrays["image"].flags.writeable = False
        return arrays if self._attributes is None else {**arrays, "attributes": self._attributes}

    @classmethod
    def make_disk_source(
        cls,
        *,
        split: str = "train",
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
        cache_dir: CacheDir = None,
        data_dir: str | os.PathLike[str] | None = None,
        include_attributes: bool = True,
    ) -> DiskSampleSource:
        """A source that decodes the images of a batch when it is due."""
        check_reading("CelebADataset", ordering, prefetch_size)
        dataset = cls(split, cache_dir, data_dir, include_attributes)
        return DiskSampleSource(len(dataset), dataset.__getitem__, None, ordering, prefetch_size)

    def __repr__(self) -> str:
        return f"CelebADataset({len(self):,} images{'' if self._attributes is None else ' with attributes'})"


class _Pictures:
    """Images by number, from a folder or an archive. A copy in another process opens the archive again."""

    def __init__(self, place: pathlib.Path, names: list[str]) -> None:
        self.place = place
        self.names = names
        self._lock = threading.Lock()
        self._archive: zipfile.ZipFile | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Pictures, (self.place, self.names)

    def __del__(self) -> None:
        if self._archive is not None:
            self._archive.close()

    def read(self, index: int) -> np.ndarray:
        name = self.names[index]
        where = f"{self.place}, {name}"
        if self.place.is_dir():
            with (self.place / name).open("rb") as file:
                return decode_image(where, file)
        try:
            archive = self._opened()
            member = archive.getinfo(f"{_PICTURES}/{name}")
            if member.file_size > _PICTURE_LIMIT:
                raise ValueError(f"{where} has {member.file_size} bytes; {_PICTURE_LIMIT} are allowed. Get it again.")
            with archive.open(member) as file:
                return decode_image(where, file)
        except (KeyError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise ValueError(f"{where} cannot be read: {error}. Get the archive again.") from None

    def _opened(self) -> zipfile.ZipFile:
        with self._lock:
            if self._archive is None:
                self._archive = zipfile.ZipFile(self.place)
            return self._archive


def _find(name: str, cache_dir: CacheDir, data_dir: str | os.PathLike[str] | None) -> pathlib.Path:
    if data_dir is None:
        return find_or_fetch("CelebADataset", CelebADataset.files[name], cache_dir, "celeba", "cyreal_celeba")
    path = pathlib.Path(data_dir) / name
    if not path.exists():
        raise FileNotFoundError(f"CelebADataset needs {name} in data_dir. {path} does not exist.")
    return path


def _find_pictures(cache_dir: CacheDir, data_dir: str | os.PathLike[str] | None) -> pathlib.Path:
    if data_dir is not None and (folder := pathlib.Path(data_dir) / _PICTURES).is_dir():
        return folder
    unpacked = find_file(cache_dir, "celeba", (_PICTURES,), "cyreal_celeba") if data_dir is None else None
    return _find(f"{_PICTURES}.zip", cache_dir, data_dir) if unpacked is None else unpacked


def _read_partition(path: pathlib.Path, number: str) -> list[str]:
    names = []
    for line, words in _lines(path):
        if line == 1 and len(words) == 1 and words[0].isdecimal():
            continue  # how many images there are, as in the list of attributes
        if len(words) != 2 or words[1] not in _SPLITS.values():
            raise ValueError(f"{path}, line {line}: needs a file name and 0, 1 or 2. Got {words[:3]}.")
        if words[1] == number:
            names.append(_safe_name(path, line, words[0]))
    if not names:
        raise ValueError(f"{path} has no images of this split, number {number}. Get it again.")
    return names


def _read_attributes(path: pathlib.Path, names: list[str]) -> tuple[tuple[str, ...], np.ndarray]:
    lines = _lines(path)
    next(lines, None)  # how many images there are
    titles = next(lines, (0, []))[1]
    rows = {}
    for line, words in lines:
        if len(words) != len(titles) + 1 or not {"-1", "1"}.issuperset(words[1:]):
            raise ValueError(f"{path}, line {line}: needs a file name and {len(titles)} times -1 or 1.")
        rows[_safe_name(path, line, words[0])] = [word == "1" for word in words[1:]]
    missing = [name for name in names if name not in rows]
    if missing or not titles:
        raise ValueError(f"{path} has no attributes for {missing[:3]}. Get it again.")
    attributes = np.array([rows[name] for name in names], np.int32)
    attributes.flags.writeable = False
    return tuple(titles), attributes


def _lines(path: pathlib.Path) -> Iterator[tuple[int, list[str]]]:
    with path.open(encoding="ascii", errors="replace") as file:
        for line, text in enumerate(file, 1):
            if words := text.split():
                yield line, words


def _safe_name(path: pathlib.Path, line: int, name: str) -> str:
    safe_path(path.parent, name, f"{path}, line {line}")
    return name
