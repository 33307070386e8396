"""Arrays that are computed from batches, such as the outputs of an encoder, in the place of those batches."""

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from millstream.dialects.hydrax._data_group import DataGroup
from millstream.files.safe_path import open_plain, plain_reader
from millstream.reading.batch_cache import Mode, OpenCache, open_cache
from millstream.reading.cache_contents import CacheContents
from millstream.reading.cached_backend import end_pool

if TYPE_CHECKING:
    from millstream.loader.batch_info import BatchInfo

FOLDER = "computed"
_STORED = ".stored"


class ComputedCache:
    """What `batch.cache` has stored of a group.

    Batches that come back every epoch need not be loaded again: a byte per item tells the loader processes so. It is
    set when the batch is whole on disk.

    Args:
        group: The group.
        training: Whether its batches are for training.
    """

    def __init__(self, group: DataGroup[Any], training: bool) -> None:
        assert group.cache_location is not None and group.cache_layouts is not None
        self._layouts = group.cache_layouts
        self._folder = group.cache_location / FOLDER
        self._mode: Mode = "read-write"
        if group.cache_readonly:
            self._mode = "read-only" if group.loader_layouts is not None else "cache-only"
        self._cache: OpenCache | None = None
        self.stored: np.ndarray | None = None
        if self._mode == "read-only" and not self._folder.exists():
            return
        self._cache = open_cache("DataGroup", self._folder, self._mode, _contents(group, training))
        if group.loader_layouts is not None and group.mode(training) in ("repeat", "batchwise"):
            self.stored = self._flags(len(group))

    def read(self, info: "BatchInfo") -> tuple[dict[str, np.ndarray], dict[str, list[Any]]] | None:
        """The arrays and the additional data stored for a batch; None if it is as the loader has filled it."""
        if self._cache is None or (self.stored is not None and not self.stored[info.indices].any()):
            return None
        entry = self._cache.read(*info.place)
        if entry is not None:
            additional = entry.additional[0] if entry.additional else {}
            return dict(zip(self._layouts, entry.leaves, strict=True)), additional
        if self.stored is None:
            return None
        raise FileNotFoundError(
            f"DataGroup: batch {info.place[1]} was stored in {self._folder}, and is there no more, or is damaged. "
            f"Empty the folder, {_STORED} too, and fill the cache again."
        )

    def write(self, info: "BatchInfo", arrays: Mapping[str, Any], additional: Mapping[str, list[Any]]) -> None:
        """Store a batch, unless the cache is read-only."""
        if self._cache is None or self._mode != "read-write":
            return
        leaves = [np.asarray(arrays[name]).astype(layout.numpy_dtype) for name, layout in self._layouts.items()]
        self._cache.write(*info.place, leaves, None, [dict(additional)])
        # Storing gives way to another process and to a full disk, so that only what can be read counts.
        if self.stored is not None and self._cache.read(*info.place) is not None:
            self.stored[info.indices] = 1

    def _flags(self, items: int) -> np.ndarray:
        path = self._folder / _STORED
        if self._mode == "read-write":
            with open(open_plain(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
                file.truncate(items)
                return np.memmap(file, np.uint8, "r+", shape=(items,))
        try:
            with plain_reader(path, follow=True) as file:
                return np.memmap(file, np.uint8, "r", shape=(items,))
        except FileNotFoundError:
            return np.zeros(items, np.uint8)


class Cachers:
    """Threads that store batches.

    Args:
        count: How many. None are needed if nothing is stored.
    """

    def __init__(self, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, "millstream-cacher") if count else None
        self._most = 2 * count  # batches that wait to be stored before the caller waits for the disk
        self._pending: list[Future[None]] = []

    def store(self, cache: ComputedCache, info: "BatchInfo", arrays: Any, additional: Any) -> None:
        """Have a batch stored in the background; what an earlier one raised is raised here."""
        if self._threads is None:
            return
        while len(self._pending) >= self._most:
            self._pending.pop(0).result()
        self._pending.append(self._threads.submit(cache.write, info, arrays, additional))

    def close(self) -> None:
        """Wait until all is stored."""
        if self._threads is not None:
            end_pool(self._threads, self._pending)
        while self._pending:
            self._pending.pop().result()


def _contents(group: DataGroup[Any], training: bool) -> CacheContents:
    assert group.cache_layouts is not None
    description = {
        "items": f"{len(group):,}",
        "batch size": str(group.batch_size),
        "seed": str(group.seed),
        "first epoch": "shuffled" if group.shuffle_first else "in sequence",
        "later epochs": group.mode(training),
        "batches for": "training" if training else "validation",
    }
    names, shapes, dtypes = zip(
        *((f"[{n!r}]", a.shape, a.numpy_dtype) for n, a in group.cache_layouts.items()), strict=True
    )
    return CacheContents(description, names, shapes, dtypes)
