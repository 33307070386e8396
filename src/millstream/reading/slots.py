"""Memory that batches are read into and handed out from, used again as soon as nothing holds it.

JAX uses aligned NumPy memory without a copy, and releases it some time after the last array over it is gone. So a
slot that has been handed out is a loan, which the arrays over it keep alive; when the loan dies, the slot is free.
Nothing ever waits for that: where no slot is free there will be one more, or, past the limit of memory, a copy.
"""

import collections
import dataclasses
import functools
import gc
import math
import mmap
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from millstream.errors import SharedMemoryFull
from millstream.reading.memory import ALIGNMENT, aligned_empty
from millstream.text.tables import size_text

_SEARCH_SECONDS = 5.0  # between two searches of all memory for batches that nobody can reach any more
_SPARE = 3  # slots besides those read ahead: one asked for, one in use, one that JAX has not released yet


def slots_for(ahead: int) -> int:
    """How many slots a stream begins with that has that many batches in flight besides the one asked for."""
    return ahead + _SPARE


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the leaves of a batch lie in a slot.

    Args:
        axes: The axes of a batch before those of a sample.
        shapes: The shape of each leaf of a sample.
        dtypes: Its dtype.
        others: The layouts of the second bucket and those after it, where a plan has several. Ask `of`.
    """

    axes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    others: tuple["Layout", ...] = ()

    def of(self, bucket: int) -> "Layout":
        """The layout of a batch of this bucket: `layout.of(request.bucket)`."""
        return self.others[bucket - 1] if bucket else self

    @functools.cached_property
    def rows(self) -> int:
        """Samples in a batch."""
        return math.prod(self.axes)

    @property
    def objects(self) -> bool:
        """Whether the leaves are Python objects, which have no place in plain memory."""
        return any(dtype.hasobject for dtype in self.dtypes)

    def empty(self) -> list[np.ndarray]:
        """New arrays for a batch, with one axis of samples in front."""
        return [np.empty((self.rows, *shape), dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]

    def with_axes(self, leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Such arrays with the axes of a batch in front."""
        return [leaf.reshape((*self.axes, *leaf.shape[1:])) for leaf in leaves]

    @functools.cached_property
    def places(self) -> list[tuple[int, int]]:
        """The first byte and the number of bytes of each leaf; every leaf is aligned for JAX."""
        start, places = 0, []
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            size = self.rows * math.prod(shape) * dtype.itemsize
            places.append((start, size))
            start += -(-size // ALIGNMENT) * ALIGNMENT
        return places

    @functools.cached_property
    def views(self) -> list[tuple[tuple[int, ...], np.dtype, int]]:
        """The shape of each leaf, with the axes of a batch in front, its dtype and its first byte."""
        starts = [start for start, _ in self.places]
        shapes = [(*self.axes, *shape) for shape in self.shapes]
        return list(zip(shapes, self.dtypes, starts, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of a slot, in whole pages, so that no two slots share one; any batch of the stream fits into it."""
        start, size = self.places[-1]
        own = -(-max(1, start + size) // mmap.PAGESIZE) * mmap.PAGESIZE
        return max([own, *(other.nbytes for other in self.others)])

    def flat(self, memory: np.ndarray) -> list[np.ndarray]:
        """The leaves in a slot's memory, with one axis of samples in front."""
        return [
            memory[start : start + size].view(dtype).reshape(self.rows, *shape)
            for (start, size), shape, dtype in zip(self.places, self.shapes, self.dtypes, strict=True)
        ]


class Slot:
    """The memory of one batch.

    Attributes:
        offset: Its place in all the memory of its `Slots`.
        chunk: Offset and size of the chunk of memory it lies in.
        memory: Its bytes.
        interface: Where these are, for NumPy.
    """

    def __init__(self, layout: Layout, offset: int, chunk: tuple[int, int], memory: np.ndarray) -> None:
        self.offset = offset
        self.chunk = chunk
        self.memory = memory
        self.interface = memory.__array_interface__
        self._layout = layout
        self._leaves: dict[int, list[np.ndarray]] = {}  # by bucket

    def leaves(self, bucket: int) -> list[np.ndarray]:
        """Its arrays for a batch of this bucket, with one axis of samples in front."""
        if bucket not in self._leaves:
            self._leaves[bucket] = self._layout.of(bucket).flat(self.memory)
        return self._leaves[bucket]


class Slots:
    """A ring of slots that grows when it has to.

    Args:
        layout: Of one batch.
        count: Slots to begin with.
        allocate: Gives that many bytes of aligned memory, zeroed or not.
        n_leaves: How many of the leaves are handed out; None for all.
        limit: Bytes at most; None for no limit.
        on_limit: Called once, with the number of batches that are held, when the limit is reached.
    """

    def __init__(
        self,
        layout: Layout,
        count: int,
        allocate: Callable[[int], np.ndarray] | None = None,
        n_leaves: int | None = None,
        limit: int | None = None,
        on_limit: Callable[[int], None] | None = None,
    ) -> None:
        self.layout = layout
        self._allocate = allocate or (lambda size: aligned_empty((size,), np.dtype(np.uint8)))
        self._n_leaves = n_leaves
        self._limit = limit
        self._on_limit = on_limit
        self._free: collections.deque[Slot] = collections.deque()  # its operations are atomic: no lock
        self._loans: weakref.WeakSet[_Loan] = weakref.WeakSet()
        self._next_search = 0.0
        self.count = 0
        try:
            self._grow(count)
        except MemoryError:
            raise MemoryError(
                f"Reading ahead needs memory for {count:,} batches of {size_text(layout.nbytes)} each, which there is "
                "not. Pass a smaller prefetch= to the DataLoader, or prefetch_size= to the source."
            ) from None

    @property
    def n_held(self) -> int:
        """Batches that have been handed out and are still held."""
        return len(self._loans)

    @property
    def nbytes(self) -> int:
        """All the memory there is."""
        return self.count * self.layout.nbytes

    def take(self) -> Slot:
        """A slot to read into."""
        if not self._free:
            gc.collect(0)  # JAX releases memory now
        if not self._free:
            self._grow(max(1, self.count // 2))
        return self._free.popleft()

    def take_for(self, user: object) -> tuple[Slot, "weakref.finalize[..., object]"]:
        """A slot to read into, and what makes it free: this happens by itself when its user is forgotten."""
        slot = self.take()
        free = weakref.finalize(user, self.give_back, slot)
        free.atexit = False
        return slot, free

    def give_back(self, slot: Slot) -> None:
        """Make a slot free that was not handed out. Any thread may call this."""
        self._free.append(slot)

    def lend(self, slot: Slot, bucket: int) -> list[np.ndarray]:
        """The arrays of a slot, which is free again when the last of them, and of JAX's arrays over them, is gone."""
        layout = self.layout.of(bucket)
        if not self._has_another():
            copies = [leaf.copy() for leaf in slot.leaves(bucket)[: self._n_leaves]]
            self.give_back(slot)
            return layout.with_axes(copies)
        loan = _Loan(slot, self._free)
        self._loans.add(loan)
        memory = np.asarray(loan)
        return [np.ndarray(shape, dtype, memory, start) for shape, dtype, start in layout.views[: self._n_leaves]]

    def _has_another(self) -> bool:
        """Whether there is another slot to read into, or can be."""
        if self._limit is None or self._free:
            return True
        gc.collect(0)
        if self._free or self._try_to_grow():
            return True
        if time.monotonic() >= self._next_search:  # it takes long, so not for every batch
            gc.collect()
            self._next_search = time.monotonic() + _SEARCH_SECONDS
        if not self._free and self._on_limit is not None:
            told, self._on_limit = self._on_limit, None
            told(self.n_held)
        return bool(self._free)

    def _try_to_grow(self) -> bool:
        """Make more slots, if the limit and the machine allow it."""
        assert self._limit is not None
        room = (self._limit - self.nbytes) // self.layout.nbytes
        if room < 1:
            return False
        try:
            self._grow(min(room, max(1, self.count // 2)))
        except SharedMemoryFull:
            self._limit = self.nbytes
            return False
        return True

    def _grow(self, count: int) -> None:
        size = self.layout.nbytes
        memory, start = self._allocate(count * size), self.nbytes
        for number in range(count):
            part = memory[number * size : (number + 1) * size]
            self._free.append(Slot(self.layout, start + number * size, (start, count * size), part))
        self.count += count


class _Loan:
    """A slot that is handed out: arrays of NumPy and JAX over its memory hold on to this object.

    It is made for every batch, so it has no finalizer, which takes as long as all the rest of it.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_free", "_slot")

    def __init__(self, slot: Slot, free: "collections.deque[Slot]") -> None:
        self._slot, self._free = slot, free
        self.__array_interface__ = slot.interface

    def __del__(self) -> None:
        self._free.append(self._slot)
