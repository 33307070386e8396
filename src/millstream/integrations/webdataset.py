"""Tar files of samples, as WebDataset writes them, read in any order. Nothing but the standard library is needed."""

import functools
import io
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from millstream.files.data_files import File, expect, forget, is_remote, open_files
from millstream.files.paths import Path, Paths, is_listed, list_remote, listed_paths
from millstream.files.plan_folder import Plans, folder_of
from millstream.integrations._tar_samples import index_samples
from millstream.plan.ordering import Ordering
from millstream.reading.contracts import PyTree
from millstream.reading.host_source import Beside, SampleReader
from millstream.reading.samples import first_sample, spec_or_objects
from millstream.reading.stats import add_time
from millstream.sources.array import check_ordering
from millstream.sources.image_file import Opening
from millstream.sources.npy import decode_npy
from millstream.sources.record_files import by_file
from millstream.text.errors import (
    describe_value,
    function_name,
    noted,
    require_callable,
    require_mapping,
    require_names,
    require_prefetch,
    require_readers,
)

_PICTURES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm", "pgm", "tif", "tiff")

_Decoder = Callable[[str, bytes], Any]  # from the name for errors and the bytes
_CALLER = "WebDatasetSource"
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_SHARD_LIMIT = 100_000


def _find_decoders(
    caller: str, extensions: Sequence[str], given: Mapping[str, Callable[[bytes], Any]]
) -> dict[str, _Decoder]:
    """A decoder for each extension."""
    for name in given:
        if name not in extensions:
            raise ValueError(
                f"{caller} needs decode for extensions that are read. Got {name!r}; those are {list(extensions)}. "
                "Give the whole extension, or leave it out."
            )
    chosen: dict[str, _Decoder] = {}
    for name in extensions:
        last = name.rpartition(".")[2]
        if name in given:
            chosen[name] = functools.partial(_by_user, given[name])
        elif last in _PICTURES:
            chosen[name] = functools.partial(_picture, Opening(caller, mode="RGB"))
        elif last in _KNOWN:
            chosen[name] = _KNOWN[last]
        else:
            raise ValueError(
                f"{caller} knows {', '.join([*_KNOWN, *_PICTURES])}. The samples have {list(extensions)}; say "
                f"what becomes of {name!r} with decode={{{name!r}: function}}, or leave it out with extensions=[...]."
            )
    return chosen


def _by_user(function: Callable[[bytes], Any], name: str, data: bytes) -> Any:
    return function(data)


def _picture(opening: Opening, name: str, data: bytes) -> np.ndarray:
    return opening.pixels(name, io.BytesIO(data))


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not text in UTF-8: {error}.") from None


def _integer(name: str, data: bytes) -> np.ndarray:
    text = _text(name, data).strip()
    if not re.fullmatch(r"[+-]?\d{1,18}", text):
        raise ValueError(f"{name} is not a whole number: {text[:40]!r}.")
    return np.asarray(int(text), np.int64)


def _json(name: str, data: bytes) -> Any:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}.") from None
    return _arrays(value)


def _arrays(value: Any) -> Any:
    """Lists of numbers as arrays, in dictionaries or not; all else as it is."""
    if isinstance(value, dict):
        return {name: _arrays(inner) for name, inner in value.items()}
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return value
    return array if array.dtype.kind in "bif" else value


_KNOWN: dict[str, _Decoder] = {
    "npy": decode_npy,
    "json": _json,
    "cls": _integer,
    "id": _integer,
    "index": _integer,
    "txt": _text,
}


class WebDatasetSource(SampleReader):
    """The samples of tar files: files whose names are equal up to the first dot are one sample.

    The headers are read once, when the source is built; then any sample is read by its place. Nothing is unpacked to
    disk, so names are labels that lead nowhere. Folders, links, devices and files without extension are passed over.

    Example:
        >>> import io, tarfile
        >>> with tarfile.open("train-0.tar", "w") as tar:
        ...     for number in range(3):
        ...         for name, data in {"x.json": b"[1.5, 2.5]", "cls": b"%d" % number}.items():
        ...             info = tarfile.TarInfo(f"{number:06}.{name}")
        ...             info.size = len(data)
        ...             tar.addfile(info, io.BytesIO(data))
        >>> from millstream.integrations.webdataset import WebDatasetSource
        >>> source = WebDatasetSource("train-{0..0}.tar")
        >>> source.read(np.array([2]))["cls"].tolist(), source.keys[2]
        ([2], '000002')

    Known extensions: `npy` and `json` as arrays, `cls`, `id` and `index` as integers, `txt` as text, images (`jpg`,
    `png`, ...) as uint8 (height, width, 3). The last part counts, so `left.png` is an image.

    Args:
        shards: A path or address, with `{000..099}` in it for many, or a list of such; of a store also a folder, which
            ends with a slash, or a pattern such as "s3://bucket/train-*.tar". They must not be compressed.
        extensions: Which files of a sample are read; every sample must have them. By default those of the first one.
        decode: Functions from bytes to a value, by the whole extension (`left.png`); they go before the known ones.
        sample_fn: `sample_fn(key, files)` makes a sample of the bytes of its files by extension; nothing is decoded
            before. It is called from several threads.
        plans: Where what the headers say is kept, so that later runs need not read them: a folder, or
            `ms.views.plans(folder)`; by default in memory, and of shards on other machines in the cache on disk.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
        readers: How many threads read, if the loader has no executor; by default 4, and 16 from afar.
    """

    whole_samples = True
    divides_blocks = True

    def __init__(
        self,
        shards: Paths,
        extensions: Sequence[str] | None = None,
        *,
        decode: Mapping[str, Callable[[bytes], Any]] | None = None,
        sample_fn: Callable[[str, dict[str, bytes]], PyTree] | None = None,
        plans: Plans = None,
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
        readers: int | None = None,
    ) -> None:
        check_ordering(_CALLER, ordering)
        paths = _expanded(shards)
        readers = (16 if any(map(is_remote, paths)) else 4) if readers is None else readers
        require_prefetch(_CALLER, prefetch_size)
        require_readers(_CALLER, "readers", readers)
        if extensions is not None and not (extensions := require_names(_CALLER, "extensions", extensions)):
            raise ValueError(f"{_CALLER} needs at least one of extensions. Got an empty list.")
        if sample_fn is not None:
            require_callable(_CALLER, "sample_fn", sample_fn)
        if decode is not None:
            require_mapping(_CALLER, "decode", decode, "a dict of functions by extension")
        own = _own_decoders({} if decode is None else decode, sample_fn)
        self._shards = open_files(_CALLER, paths)
        self.stamps = [shard.stamp for shard in self._shards]
        names = None if extensions is None else [_extension(name) for name in extensions]
        self._index = index_samples(_CALLER, self._shards, names, folder_of(_CALLER, plans))
        self.blocks = np.bincount(self._index.shards, minlength=len(self._shards))
        forget(self._shards)
        if any(map(is_remote, paths)):
            self.looks_ahead, self.reads_samples, self.calls_users = True, False, True
        self._sample_fn = sample_fn
        self._decoders = {} if sample_fn is not None else _find_decoders(_CALLER, self._index.extensions, own)
        self.ordering: Ordering = ordering
        self.prefetch_size = prefetch_size
        self.readers = readers
        self.first_sample, sample = first_sample(self._sample, range(len(self)))
        self.sample_spec = spec_or_objects(_CALLER, sample)

    def __len__(self) -> int:
        return len(self._index.shards)

    @property
    def extensions(self) -> tuple[str, ...]:
        """Which files of a sample are read."""
        return self._index.extensions

    @functools.cached_property
    def keys(self) -> Sequence[str]:
        """The name of each sample: what its files are called before the first dot."""
        return [key.decode("utf-8", "surrogateescape") for key in self._index.keys.tolist()]

    def read_row(self, index: int, out: Sequence[np.ndarray], row: int, key: np.ndarray | None) -> None:
        self.sample_spec.write(_CALLER, out, row, index, self._sample(index))

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> Beside:
        if self.reads_samples:
            return super().read_rows(indices, out, keys)
        data = self._read_files(indices)  # what comes from afar is asked for by shard
        for row, index in enumerate(indices.tolist()):
            self.sample_spec.write(_CALLER, out, row, index, self._made(index, data[row]))
        return None

    def expect(self, indices: np.ndarray | None) -> None:
        if indices is None:
            return forget(self._shards)
        self._expect(indices, None)

    def expect_blocks(self, indices: np.ndarray, bounds: np.ndarray) -> None:
        self._expect(indices, self._index.around(indices, bounds).reshape(-1, 2))

    def _expect(self, indices: np.ndarray, around: np.ndarray | None) -> None:
        index = self._index
        numbers = np.repeat(index.shards[indices], len(index.extensions))
        expect(self._shards, numbers, index.spans[indices].reshape(-1, 2), around)

    def _sample(self, index: int) -> PyTree:
        return self._made(index, self._read_files(np.array([index]))[0])

    def _read_files(self, indices: np.ndarray) -> list[list[bytes]]:
        """The bytes of the files of some samples, in the order of the extensions."""
        shards, spans = self._index.shards[indices], self._index.spans[indices].tolist()
        found: list[list[bytes]] = [[] for _ in spans]
        begun = time.perf_counter()
        for number, rows in by_file(shards):
            wanted = [(row, (start, size)) for row in rows.tolist() for start, size in spans[row]]
            row = wanted[0][0]
            try:
                data = self._shards[number].read_ranges([span for _, span in wanted])
                for row, _ in wanted:
                    found[row].append(next(data))
            except Exception as error:
                raise self._noted(error, int(indices[row]))  # noqa: B904
        add_time("read", begun)
        return found

    def _made(self, index: int, data: list[bytes]) -> PyTree:
        """A sample of the bytes of its files."""
        files = dict(zip(self._index.extensions, data, strict=True))
        try:
            if self._sample_fn is not None:
                return self._sample_fn(self._key(index), files)
            where = f"{self._shard(index).name}, {self._key(index)}"
            return {name: self._decoders[name](f"{where}.{name}", data) for name, data in files.items()}
        except Exception as error:
            raise self._noted(error, index)  # noqa: B904 (`from` would take away the error's own cause)

    def _noted(self, error: BaseException, index: int) -> BaseException:
        by = "" if self._sample_fn is None else f" and its sample_fn {function_name(self._sample_fn)}"
        note = f"This came from {_CALLER}{by} at sample {index}, {self._key(index)!r} in {self._shard(index).name}."
        return noted(error, note)

    def _shard(self, index: int) -> File:
        return self._shards[self._index.shards[index]]

    def _key(self, index: int) -> str:
        return self._index.keys[index].decode("utf-8", "surrogateescape")


def _own_decoders(decode: Mapping[str, Callable[[bytes], Any]], sample_fn: Any) -> dict[str, Callable[[bytes], Any]]:
    """The user's decoders by extension."""
    if decode and sample_fn is not None:
        raise ValueError(f"{_CALLER} needs decode= or sample_fn=, not both: sample_fn is given bytes.")
    for name, function in decode.items():
        require_callable(_CALLER, f"decode[{name!r}]", function)
    return {_extension(name): function for name, function in decode.items()}


def _extension(name: Any) -> str:
    """An extension as samples have it: in small letters, without the first dot."""
    if not isinstance(name, str):
        raise TypeError(f"{_CALLER} needs extensions that are text. Got {describe_value(name)}.")
    return name.lower().removeprefix(".")


def _expanded(shards: Paths) -> list[Path]:
    paths: list[Path] = []
    for path in listed_paths(_CALLER, shards):
        for shard in _unfolded(path) if isinstance(path, str) else [path]:
            paths += list_remote(_CALLER, str(shard), [".tar"]) if is_listed(shard) else [shard]
            if len(paths) > _SHARD_LIMIT:
                raise ValueError(f"{_CALLER} takes {_SHARD_LIMIT} tar files at most. {path!r} names more.")
    if not paths:
        raise ValueError(f"{_CALLER} needs at least one tar file. Got {describe_value(shards)}.")
    return paths


def _unfolded(path: str) -> Iterator[str]:
    """`a-{08..10}.tar` as `a-08.tar`, `a-09.tar`, `a-10.tar`; one by one, as several ranges may have no end."""
    found = _BRACES.search(path)
    if found is None:
        yield path
        return
    first, last = int(found[1]), int(found[2])
    if first > last:
        raise ValueError(f"{_CALLER} needs a rising range in braces. Got {found[0]} in {path!r}.")
    width = len(found[1]) if found[1].startswith("0") else 1
    for number in range(first, last + 1):
        yield from _unfolded(f"{path[: found.start()]}{number:0{width}}{path[found.end() :]}")
