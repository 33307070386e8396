"""Zarr arrays, of format 2 and 3, read through TensorStore."""

import itertools
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from millstream.errors import FileChanged
from millstream.files.changed import FileStamp, Stamp, describe_samples, file_changed, file_stamp, file_unreadable
from millstream.files.data_files import local_path
from millstream.integrations._table import chosen_columns, chunk_sizes
from millstream.plan.ordering import Ordering
from millstream.reading.host_source import HostSource
from millstream.reading.samples import SampleSpec, spec_of
from millstream.reading.stats import timed
from millstream.sources.array import check_reading
from millstream.text.errors import describe_leaf, needs, require_int, table

_STAMP = np.dtype([("inode", np.uint64), ("size", np.int64), ("mtime_ns", np.int64)])


class _ZarrArray:
    """The array in a folder, read by its rows, here or, as a copy, in another process."""

    def __init__(self, caller: str, path: str | os.PathLike[str], cache_bytes: int) -> None:
        self._caller = caller
        self._cache_bytes = cache_bytes
        self.path = pathlib.Path(path).absolute()
        self._document = next(name for name in ("zarr.json", ".zarray") if (self.path / name).is_file())
        self._stamp = Stamp.of(self.path / self._document)
        self._store: Any = None
        store = self._opened()
        self.shape: tuple[int, ...] = tuple(store.shape)
        self.dtype: np.dtype = store.dtype.numpy_dtype
        self._chunk = tuple(store.chunk_layout.write_chunk.shape)  # what is in a file: a chunk or a shard of chunks
        self._prefix, self._separator = self._key_form()
        # A chunk without a file is one of zeros, so a file that goes away would not be missed otherwise.
        grid = [-(-size // step) for size, step in zip(self.shape, self._chunk, strict=True)]
        places = itertools.product(*map(range, grid))
        self._stamps = np.array([Stamp.of(self._file(place)) for place in places], _STAMP).reshape(grid)

    @property
    def chunk_rows(self) -> int:
        """How many rows are in a file: of a chunk, or a shard of chunks."""
        return self._chunk[0]

    @property
    def stamps(self) -> list[FileStamp]:
        """The stamps of its files; those of its chunks under the name of the array."""
        chunks = [(self.path.name, int(one["size"]), int(one["mtime_ns"])) for one in self._stamps.ravel()]
        return [file_stamp(self.path / self._document), *chunks]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_store": None}

    def begin(self, indices: np.ndarray) -> Any:
        """Have the rows at `indices` read; what is returned is for `end`."""
        return self._opened()[indices].read()

    def end(self, indices: np.ndarray, reading: Any) -> np.ndarray:
        """The rows, or `FileChanged`."""
        try:
            rows = reading.result()
        except ValueError as error:
            raise self._unreadable(indices, error) from None
        self._check(indices)
        return rows

    def _opened(self) -> Any:
        if self._store is None:
            import tensorstore

            driver = "zarr3" if self._document == "zarr.json" else "zarr"
            place = {"driver": "file", "path": f"{self.path}/"}
            # Changes are looked for in `_check`.
            fixed = {"recheck_cached_data": False, "recheck_cached_metadata": False}
            context = tensorstore.Context({"cache_pool": {"total_bytes_limit": self._cache_bytes}})
            self._store = tensorstore.open(
                {"driver": driver, "kvstore": place, **fixed}, context=context, read=True, open=True
            ).result()
        return self._store

    def _key_form(self) -> tuple[str, str]:
        """How the files of chunks are called: what they begin with, and what stands between their numbers."""
        document = json.loads((self.path / self._document).read_text())
        if self._document == ".zarray":
            return "", document.get("dimension_separator", ".")
        encoding = document["chunk_key_encoding"]
        default = encoding["name"] == "default"
        separator = encoding.get("configuration", {}).get("separator", "/" if default else ".")
        return f"c{separator}" if default else "", separator

    def _file(self, place: tuple[int, ...]) -> str:
        return f"{self.path}/{self._prefix}{self._separator.join(map(str, place))}"

    def _check(self, indices: np.ndarray) -> None:
        """Raise `FileChanged` if a file that these rows come from has changed."""
        if Stamp.of(self.path / self._document) != self._stamp:
            raise self._changed(str(self.path / self._document), indices)
        chunks = indices // self._chunk[0]
        rest = list(np.ndindex(*self._stamps.shape[1:]))
        for number in np.unique(chunks).tolist():
            for place in rest:
                if Stamp.of(self._file((number, *place))) != self._stamps[number, *place].item():
                    raise self._changed(self._file((number, *place)), indices[chunks == number])

    def _changed(self, file: str, indices: np.ndarray) -> FileChanged:
        return file_changed(self._caller, file, f"noticed at {describe_samples(indices)}")

    def _unreadable(self, indices: np.ndarray, error: Exception) -> FileChanged:
        for index in indices:
            try:
                self._opened()[index].read().result()
            except ValueError as its_own:
                indices, error = np.array([index]), its_own
                break
        return file_unreadable(self._caller, str(self.path), indices, error)


class ZarrSource(HostSource):
    """The rows of a zarr array, or of all arrays in a zarr group; a row is what is at one place of the first axis.

    A batch is read at once, every chunk of it once, and unpacked chunks are kept in memory up to a limit. A chunk
    that spans many rows is unpacked for each of them that a shuffled batch wants, unless it is still kept.

    Example:
        >>> import tensorstore
        >>> from millstream.integrations.zarr import ZarrSource
        >>> place = {"driver": "file", "path": "digits.zarr/image/"}
        >>> store = tensorstore.open(
        ...     {"driver": "zarr3", "kvstore": place}, create=True, dtype="uint8", shape=[100, 8, 8]
        ... ).result()
        >>> store[:] = np.arange(100, dtype=np.uint8)[:, None, None]
        >>> source = ZarrSource("digits.zarr/image")
        >>> source.read(np.array([70, 3])).shape
        (2, 8, 8)

    Args:
        path: The folder of an array, whose rows are then the samples, or of a group of arrays with equally many rows,
            whose samples are dicts. Their files must not change while they are read.
        columns: The arrays of a group to read; all of them by default.
        cache_bytes: How much of each array may be kept in memory, unpacked, by this process and each worker.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        columns: Sequence[str] | None = None,
        *,
        cache_bytes: int = 64 << 20,
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
    ) -> None:
        self._caller = "ZarrSource"
        with needs(self._caller, "tensorstore", "zarr"):
            import tensorstore  # noqa: F401
        check_reading(self._caller, ordering, prefetch_size)
        require_int(self._caller, "cache_bytes", cache_bytes, least=0)
        folder = local_path(self._caller, path)
        kind = _kind(folder)
        if kind is None:
            raise ValueError(
                f"{self._caller} needs the folder of a zarr array or group, of format 2 or 3. {folder} has no "
                "zarr.json, .zarray or .zgroup."
            )
        if kind == "array" and columns is not None:
            raise ValueError(f"{self._caller} chooses columns of a group. {folder} is a single array.")
        members = {"": folder} if kind == "array" else self._members(folder, columns)
        self._arrays = {name: self._array(inner, cache_bytes) for name, inner in members.items()}
        self.cache_bytes = cache_bytes
        self._require_rows()
        self.stamps = [stamp for array in self._arrays.values() for stamp in array.stamps]
        self.blocks = chunk_sizes(len(self), max(array.chunk_rows for array in self._arrays.values()))
        self.ordering: Ordering = ordering
        self.prefetch_size = prefetch_size
        row = {name: np.empty(array.shape[1:], array.dtype) for name, array in self._arrays.items()}
        self.sample_spec: SampleSpec = spec_of(  # pyright: ignore[reportIncompatibleVariableOverride]
            self._caller, row[""] if kind == "array" else row
        )

    def __len__(self) -> int:
        return next(iter(self._arrays.values())).shape[0]

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> None:
        with timed("read"):
            readings = {name: array.begin(indices) for name, array in self._arrays.items()}
            rows = {name: self._arrays[name].end(indices, reading) for name, reading in readings.items()}
        self.sample_spec.write_rows(self._caller, out, rows.get("", rows))

    def _members(self, folder: pathlib.Path, columns: Sequence[str] | None) -> dict[str, pathlib.Path]:
        """The arrays of a group that were asked for."""
        found = sorted(inner.name for inner in folder.iterdir() if _kind(inner) == "array")
        if not found:
            raise ValueError(f"{self._caller} needs a group with arrays in it. {folder} has none.")
        return {name: folder / name for name in chosen_columns(self._caller, found, columns)}

    def _array(self, folder: pathlib.Path, cache_bytes: int) -> _ZarrArray:
        try:
            return _ZarrArray(self._caller, folder, cache_bytes)
        except ValueError as error:  # as TensorStore calls all that it cannot do
            raise ValueError(f"{self._caller} cannot read {folder}: {error}") from None

    def _require_rows(self) -> None:
        lengths = {array.shape[:1] for array in self._arrays.values()}
        if len(lengths) > 1 or lengths & {(), (0,)}:
            found = table((str(array.path), describe_leaf(array)) for array in self._arrays.values())
            raise ValueError(
                f"{self._caller} needs arrays with the same, non-zero number of rows. Got:\n{found}\n"
                "Choose some of them with columns=[...]."
            )


def _kind(folder: pathlib.Path) -> str | None:
    """Whether a folder is an array or a group."""
    if (folder / ".zarray").is_file():
        return "array"
    if (folder / ".zgroup").is_file():
        return "group"
    try:
        document: Any = json.loads((folder / "zarr.json").read_text())
        return document["node_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
