"""One zarr array in a folder: what it is, its rows, and whether its files are what they were."""

import itertools
import json
import os
import pathlib
from typing import Any

import numpy as np

from millstream.files.changed import FileChanged
from millstream.integrations._watched_files import changed, described

_MISSING = (-1, -1)


class ZarrArray:
    """An array that is read by its rows, here or, as a copy, in another process.

    Args:
        who: Who speaks in errors.
        path: The folder of the array.
        cache_bytes: How much of it may be kept in memory, unpacked.
    """

    def __init__(self, who: str, path: str | os.PathLike[str], cache_bytes: int) -> None:
        self._who = who
        self._cache_bytes = cache_bytes
        self.path = pathlib.Path(path).absolute()
        self._document = next(name for name in ("zarr.json", ".zarray") if (self.path / name).is_file())
        self._stamp = _stamp(self.path / self._document)
        self._store: Any = None
        store = self._opened()
        self.shape: tuple[int, ...] = tuple(store.shape)
        self.dtype: np.dtype = store.dtype.numpy_dtype
        self._chunk = tuple(store.chunk_layout.write_chunk.shape)  # what is in a file: a chunk or a shard of chunks
        self._prefix, self._separator = self._key_form()
        # A chunk without a file is one of zeros, so a file that goes away would not be missed otherwise.
        grid = [-(-size // step) for size, step in zip(self.shape, self._chunk, strict=True)]
        self._stamps = np.array(
            [_stamp(self._file(place)) for place in itertools.product(*map(range, grid))], np.int64
        ).reshape(*grid, 2)

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
        """Refuse to go on if a file that these rows come from has changed."""
        if _stamp(self.path / self._document) != self._stamp:
            raise changed(self._who, str(self.path / self._document), indices)
        chunks = indices // self._chunk[0]
        rest = list(np.ndindex(*self._stamps.shape[1:-1]))
        for number in np.unique(chunks).tolist():
            for place in rest:
                if _stamp(self._file((number, *place))) != tuple(self._stamps[number, *place]):
                    raise changed(self._who, self._file((number, *place)), indices[chunks == number])

    def _unreadable(self, indices: np.ndarray, error: Exception) -> FileChanged:
        for index in indices:
            try:
                self._opened()[index].read().result()
            except ValueError as its_own:
                indices, error = np.array([index]), its_own
                break
        return FileChanged(
            f"{self._who} cannot read {self.path}, at {described(indices)}: {error}. The file has changed or is "
            "damaged; get it again, and build the source again."
        )


def _stamp(path: str | os.PathLike[str]) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return _MISSING
    return found.st_size, found.st_mtime_ns
