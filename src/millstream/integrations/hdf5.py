"""Datasets of HDF5 files."""

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from millstream.files.changed import FileStamp, WatchedFiles, file_unreadable
from millstream.files.data_files import LocalFile, local_path
from millstream.files.paths import Paths, find_files
from millstream.integrations._table import (
    Row,
    TableSource,
    cells,
    check_options,
    chosen_columns,
    chunk_sizes,
    rows_of,
)
from millstream.plan.ordering import Ordering
from millstream.reading.contracts import PyTree
from millstream.reading.dtypes import holds_numbers
from millstream.sources.file_rows import map_rows
from millstream.text.errors import describe_leaf, needs, require_int, table

_CALLER = "Hdf5Source"
_TEXT = "text"
_FAULTS = (OSError, RuntimeError, ValueError, KeyError, TypeError)  # by which h5py says that a file is damaged


class Hdf5Source(TableSource):
    """The rows of datasets in HDF5 files; a row is what is at one place of the first axis.

    Datasets that are stored in one piece are mapped into memory, so that threads read them side by side. Those in
    chunks are read by the chunk, by one thread of a process at a time, as HDF5 asks for; unpacked chunks are kept up to
    a limit. Every process opens files for itself.

    Example:
        >>> import h5py
        >>> from millstream.integrations.hdf5 import Hdf5Source
        >>> with h5py.File("digits.h5", "w") as file:
        ...     file["image"] = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
        ...     file["meta/label"] = np.array([5, 0, 4])
        >>> source = Hdf5Source("digits.h5")
        >>> source.read(np.array([2]))["meta/label"].tolist(), source.spec()["image"].shape
        ([4], (2, 2))

    Args:
        paths: A file, a folder, a pattern, or a list of such, with the same datasets in each. They must not change
            while they are read.
        columns: The datasets to read, by their paths in the file; all of them by default.
        row_fn: `row_fn(row) -> sample` makes a pytree of arrays of a row, which is a dict.
        cache_bytes: How much of each dataset in chunks may be kept in memory, unpacked, by this process and each
            worker.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | None = None,
        *,
        row_fn: Callable[[Row], PyTree] | None = None,
        cache_bytes: int = 64 << 20,
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
    ) -> None:
        with needs(_CALLER, "h5py", "hdf5"):
            import h5py  # noqa: F401
        check_options(_CALLER, ordering, prefetch_size, row_fn)
        require_int(_CALLER, "cache_bytes", cache_bytes, least=0)
        found = [local_path(_CALLER, path) for path in find_files(_CALLER, paths, (".h5", ".hdf5"))]
        names = [os.fspath(LocalFile(_CALLER, path).path) for path in found]
        super().__init__(_CALLER, _Hdf5Table(names, columns, cache_bytes), ordering, prefetch_size, row_fn)


class _Hdf5Table:
    """The rows of files, one file after the other."""

    def __init__(self, paths: Sequence[str], columns: Sequence[str] | None, cache_bytes: int) -> None:
        self._watched = WatchedFiles(_CALLER, paths)
        self._files = [_Hdf5File(path, cache_bytes) for path in paths]
        self.cache_bytes = cache_bytes
        self._columns = chosen_columns(_CALLER, self._files[0].names(), columns)
        for file in self._files:
            file.choose(self._columns)
        self._require_alike()
        self._ends = np.cumsum([file.length for file in self._files], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def stamps(self) -> Sequence[FileStamp]:
        """Of the files."""
        return self._watched.stamps

    @property
    def blocks(self) -> np.ndarray:
        """How many rows each chunk of each file has; a file whose datasets have no chunks is one."""
        return np.concatenate([chunk_sizes(file.length, file.chunk_rows() or file.length) for file in self._files])

    @property
    def divides_blocks(self) -> bool:
        """Whether no dataset has chunks."""
        return not any(file.chunk_rows() for file in self._files)

    def take(self, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        """The rows at `indices`, an array for each column."""
        self._watched.check(indices)  # before it, too: to read what was cut off a mapped file would end the process
        parts = list(self._parts(indices))
        self._watched.check(indices)
        if len(parts) == 1:
            return parts[0][1]
        columns = {}
        for name in self._columns:
            joined = np.concatenate([part[name] for _, part in parts])
            columns[name] = np.empty_like(joined)
            columns[name][np.concatenate([rows for rows, _ in parts])] = joined
        return columns

    def samples(self, indices: np.ndarray) -> Sequence[Row]:
        """The rows at `indices` as functions on the host get them."""
        return rows_of(self.take(indices))

    def rows(self, indices: np.ndarray) -> Sequence[Row]:
        """The rows at `indices` as dicts of Python's own values."""
        return rows_of({name: cells(column.tolist()) for name, column in self.take(indices).items()})

    def _parts(self, indices: np.ndarray) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """For each file, which of the rows are in it, and these."""
        numbers = np.searchsorted(self._ends, indices, side="right")
        for number in np.unique(numbers).tolist():
            rows, file = np.flatnonzero(numbers == number), self._files[number]
            yield rows, file.take(indices[rows], indices[rows] - (int(self._ends[number]) - file.length))

    def _require_alike(self) -> None:
        first = self._files[0]
        for file in self._files[1:]:
            if file.kinds != first.kinds:
                found = table(
                    (f"{one.path}[{name!r}]", f"{kind} {shape}")
                    for one in (first, file)
                    for name, (kind, shape) in one.kinds.items()
                )
                raise ValueError(
                    f"{_CALLER} needs the same datasets, with rows of one shape and dtype, in every file. Got:\n"
                    f"{found}\nChoose those that all have with columns=[...], or build one source for each."
                )


class _Hdf5File:
    """Some datasets of a file. A copy in another process opens it again.

    Attributes:
        path: Where it is.
        length: The rows of each dataset.
        kinds: What is in the rows of each, and their shape.
    """

    def __init__(self, path: str, cache_bytes: int) -> None:
        self.path, self._cache_bytes = path, cache_bytes
        self._local = LocalFile(_CALLER, path)
        self.length = 0
        self.kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_opened", "_lock", "_mapped")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def _forget(self) -> None:
        self._opened: Any = None  # the process that has opened it, and the file
        self._mapped: dict[str, np.ndarray | None] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """The paths of all datasets with rows."""
        import h5py

        file, found = self._file(), list[str]()

        def visit(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset) and item.shape:
                found.append(name)

        try:
            file.visititems(visit)
        except _FAULTS as error:
            raise self._damaged(error) from None
        return found

    def choose(self, columns: Sequence[str]) -> None:
        """Look at these datasets, which must be there and have as many rows."""
        file, lengths = self._file(), {}
        for name in columns:
            try:
                dataset = self._dataset(name) if name in file else None
                shape, kind = ((), None) if dataset is None else (tuple(dataset.shape), _kind(dataset))
            except _FAULTS as error:
                raise self._damaged(error) from None
            if dataset is None:
                raise ValueError(f"{_CALLER} needs the same datasets in every file. {self.path} has no {name!r}.")
            if kind is None:
                raise ValueError(
                    f"{_CALLER} reads numbers, text and lists of numbers. {self.path}[{name!r}] is {dataset.dtype}. "
                    "Choose others with columns=[...]."
                )
            self.kinds[name], lengths[name] = (kind, shape[1:]), shape[:1]
        if len(set(lengths.values())) > 1 or set(lengths.values()) & {(), (0,)}:
            found = table((f"{self.path}[{name!r}]", describe_leaf(self._dataset(name))) for name in columns)
            raise ValueError(
                f"{_CALLER} needs datasets with the same, non-zero number of rows. Got:\n{found}\n"
                "Choose some of them with columns=[...]."
            )
        self.length = next(iter(lengths.values()))[0]

    def chunk_rows(self) -> int:
        """How many rows a chunk has, the largest of all datasets; 0 if none has chunks."""
        chunks = [self._dataset(name).chunks for name in self.kinds]
        return max(0 if chunk is None else int(chunk[0]) for chunk in chunks)

    def take(self, indices: np.ndarray, local: np.ndarray) -> dict[str, np.ndarray]:
        """The rows at `local`, an array for each dataset; in errors they are those at `indices`."""
        try:
            return {name: self._take(name, local) for name in self.kinds}
        except _FAULTS as error:
            raise file_unreadable(_CALLER, self.path, indices, error) from None

    def _take(self, name: str, local: np.ndarray) -> np.ndarray:
        mapped = self._map(name)
        if mapped is not None:
            return mapped[local]
        dataset, (kind, shape) = self._dataset(name), self.kinds[name]
        numbers = local // (1 if dataset.chunks is None else int(dataset.chunks[0]))
        if kind == _TEXT:
            dataset = dataset.asstr()
        found = None
        for number in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == number)
            first, end = int(local[rows].min()), int(local[rows].max()) + 1
            chunk = dataset[first:end]
            if found is None:
                found = np.empty((len(local), *shape), chunk.dtype)
            found[rows] = chunk[local[rows] - first]
        assert found is not None
        return found

    def _map(self, name: str) -> np.ndarray | None:
        """A dataset of numbers that lies in the file in one piece, mapped; None for others."""
        if name not in self._mapped:
            dataset = self._dataset(name)
            offset = self._offset(dataset)
            rows = None if offset is None else map_rows(self._local, dataset.dtype, tuple(dataset.shape), offset)
            self._mapped[name] = rows if isinstance(rows, np.ndarray) else None
        return self._mapped[name]

    def _offset(self, dataset: Any) -> int | None:
        """Where the numbers of a dataset begin, if they lie in the file in one piece, as NumPy has them."""
        import h5py

        numbers = dataset.dtype.kind in "iufb" and dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype))
        if not numbers or dataset.external or dataset.is_virtual:
            return None
        offset, size = dataset.id.get_offset(), math.prod(dataset.shape) * dataset.dtype.itemsize
        # What was never written has no place, but in a file with a user block HDF5 names one.
        there = offset is not None and dataset.id.get_storage_size() == size and offset + size <= self._local.size
        return offset if there else None

    def _dataset(self, name: str) -> Any:
        import h5py

        dataset = self._file()[name]
        if not isinstance(dataset, h5py.Dataset):
            raise ValueError(f"{name!r} is not a dataset")
        return dataset

    def _file(self) -> Any:
        """The file, opened by this process: a fork must not share what HDF5 knows of it."""
        import h5py

        with self._lock:
            if self._opened is None or self._opened[0] != os.getpid():
                try:
                    file = h5py.File(self.path, "r", rdcc_nbytes=self._cache_bytes)
                except _FAULTS as error:
                    raise self._damaged(error) from None
                self._opened = os.getpid(), file
        return self._opened[1]

    def _damaged(self, error: Exception) -> ValueError:
        text = str(error).partition("\n")[0]
        return ValueError(
            f"{_CALLER} cannot read {self.path} as HDF5: {text}. It is another kind of file, cut short or damaged."
        )


def _kind(dataset: Any) -> str | None:
    """What is in a dataset: numbers of a dtype, text, or lists of numbers of any length; None for anything else."""
    import h5py

    if h5py.check_string_dtype(dataset.dtype) is not None:
        return _TEXT
    inner = h5py.check_vlen_dtype(dataset.dtype)
    if inner is not None:
        return f"lists of {inner}" if holds_numbers(np.dtype(inner)) else None
    return str(dataset.dtype) if holds_numbers(dataset.dtype) else None
