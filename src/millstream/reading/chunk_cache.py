"""Pieces of files that are kept in memory up to a limit."""

import collections
import threading
from collections.abc import Hashable
from typing import Any


class ChunkCache:
    """Values by name; those that were used least recently make room for others. Threads may share it.

    Example:
        >>> from millstream.reading.chunk_cache import ChunkCache
        >>> cache = ChunkCache(100)
        >>> cache.put("a", [1], 60), cache.put("b", [2], 60)
        (None, None)
        >>> cache.get("a"), cache.get("b"), cache.nbytes
        (None, [2], 60)

    Args:
        limit: Bytes to keep. What is larger alone is not kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[Hashable, tuple[Any, int]] = collections.OrderedDict()

    def get(self, name: Hashable) -> Any:
        """A value, or None."""
        with self._lock:
            if name not in self._kept:
                return None
            self._kept.move_to_end(name)
            return self._kept[name][0]

    def put(self, name: Hashable, value: Any, nbytes: int) -> None:
        """Keep a value that takes that many bytes."""
        with self._lock:
            self.nbytes -= self._kept.pop(name, (None, 0))[1]
            if nbytes > self.limit:
                return
            self._kept[name] = (value, nbytes)
            self.nbytes += nbytes
            while self.nbytes > self.limit:
                self.nbytes -= self._kept.popitem(last=False)[1][1]
