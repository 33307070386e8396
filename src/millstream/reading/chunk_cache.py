"""A cache of chunks up to a limit of bytes, which may know what comes."""

import collections
import math
import threading
from collections.abc import Hashable, Iterable
from typing import Any


class ChunkCache:
    """Values by name. Threads may share it.

    The one that is needed furthest in the future makes room for others, as far as it is known what comes; otherwise the
    one that was used least recently.

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
        self._uses: dict[Hashable, collections.deque[int]] = {}
        self._said = self._done = 0

    def __contains__(self, name: Hashable) -> bool:
        return name in self._kept

    def expect(self, names: Iterable[Hashable]) -> None:
        """Say of which value each of the coming uses will be, in order."""
        with self._lock:
            for name in names:
                self._uses.setdefault(name, collections.deque()).append(self._said)
                self._said += 1

    def advance(self, uses: int) -> None:
        """Some of the uses that were expected are over."""
        self._done += uses

    def forget_uses(self) -> None:
        """Expect nothing."""
        with self._lock:
            self._uses = {}
            self._said = self._done = 0

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
                self.nbytes -= self._kept.pop(self._least_useful())[1]

    def _least_useful(self) -> Hashable:
        return max(self._kept, key=self._next_use) if self._uses else next(iter(self._kept))

    def _next_use(self, name: Hashable) -> float:
        uses = self._uses.get(name)
        while uses and uses[0] < self._done:
            uses.popleft()
        return uses[0] if uses else math.inf  # of several, the one that was used least recently comes first
