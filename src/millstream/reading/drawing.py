"""Drawing the batches of an iterable, in order and from any place on, in a thread that is a few of them ahead."""

import collections
import dataclasses
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from millstream.errors import WorkerStalled
from millstream.plan.planned import Request, sample_keys
from millstream.plan.shuffle_buffer import ShuffleBuffer, held_items
from millstream.reading._settings import settings
from millstream.reading.contracts import PyTree
from millstream.reading.fingerprint import samples_hash
from millstream.reading.iterable import Item, IterableSource, close, own
from millstream.reading.threads import ThreadBackend
from millstream.text.errors import noted

_END = object()  # in place of an item
_MOST_ITEMS = (1 << 32) - 1  # a state counts in 32 bits
_TICK = 0.25  # seconds: a signal that comes just before a wait is seen only after it
_CLOSING_SECONDS = 1.0  # an iterator that waits for something else cannot be ended before it returns


class _Stopped(Exception):
    """The thread is to end."""


class Progress(NamedTuple):
    """How far a run over an iterable is.

    Attributes:
        epoch: Passes that are over.
        given: Samples of this pass that batches have had.
        drawn: Items of this pass that were drawn for them.
        check: A hash of the item drawn last; 0 if there is none.
    """

    epoch: int
    given: int
    drawn: int
    check: int

    @classmethod
    def of(cls, words: Any) -> "Progress":
        """What a state has."""
        epoch, given, drawn, low, high = np.asarray(words).tolist()
        return cls(epoch, given, drawn, high << 32 | low)

    def words(self) -> np.ndarray:
        """As a state has it."""
        check = (self.check & 0xFFFFFFFF, self.check >> 32)
        return np.array([self.epoch, self.given, self.drawn, *check], np.uint32)


BEGINNING = Progress(0, 0, 0, 0)


class _Pass:
    """One pass over an iterable, from any place on.

    Args:
        source: The iterable.
        words: The run's raw key data, uint32.
        start: Where to begin.
    """

    def __init__(self, source: IterableSource, words: np.ndarray, start: Progress) -> None:
        self._source = source
        self._words = words
        self._start = start
        self._iterator: Iterator[PyTree] | None = None
        self._buffer: ShuffleBuffer[Item] = ShuffleBuffer(words, start.epoch, start.given, [])
        self._ended = False
        self._check: int | None = start.check  # of the newest item; None if it is not computed yet
        self._newest: PyTree = None
        self.drawn = start.drawn
        self.seconds = 0.0  # spent in the iterable
        self.stopped = False  # set by a different thread

    def next(self) -> Item | None:
        """The next item in the order of the pass; None if it is over."""
        if self._iterator is None:
            self._begin()
        held, slots = self._buffer.items, self._source.slots
        while not self._ended:
            value = self._draw()
            if value is _END:
                break
            self._newest, self._check = own(value), None
            item = Item.of(self.drawn - 1, self._newest)
            if len(held) == slots:
                return self._buffer.replace(item)
            held.append(item)
        return self._buffer.take() if held else None

    @property
    def is_over(self) -> bool:
        """Whether there are no more items."""
        return self._ended and not self._buffer.items

    def progress(self) -> Progress:
        """How far it is."""
        if self._check is None:
            self._check = _check_of(self._newest)
        return Progress(self._start.epoch, self._buffer.place, self.drawn, self._check)

    def close(self) -> None:
        """End the iterator."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            close(iterator)

    def _begin(self) -> None:
        """Start the iterable, and draw again what was drawn before; of that, only what is in the buffer is kept."""
        start, source = self._start, self._source
        if start.drawn == 0:
            self._iterator, _ = source.begin(start.epoch, 0)
            return
        numbers = held_items(self._words, start.epoch, source.slots, start.given, start.drawn)
        kept = dict.fromkeys(numbers)
        self._iterator, self.drawn = source.begin(start.epoch, min(start.drawn - 1, *numbers))
        value = None
        while self.drawn < start.drawn:
            value = self._draw()
            if value is _END:
                raise self._differs(f"it has {self.drawn:,}")
            if self.drawn - 1 in kept:
                kept[self.drawn - 1] = own(value)
        if start.check and _check_of(value) != start.check:
            raise self._differs("the last of them is a different one")
        if start.drawn < source.slots + start.given and self._draw() is not _END:
            raise self._differs("there are more")
        self._buffer.items.extend(Item.of(number, kept[number]) for number in numbers)

    def _draw(self) -> PyTree:
        """The next item as the iterable gives it."""
        assert self._iterator is not None
        if self.stopped:
            raise _Stopped
        begun = time.perf_counter()
        try:
            value = next(self._iterator, _END)
        except BaseException as error:
            where = f"after {self.drawn:,} items of pass {self._start.epoch}"
            raise noted(error, f"This came from {self._source.name} {where}.")  # noqa: B904
        self.seconds += time.perf_counter() - begun
        if value is _END:
            self._ended = True
        else:
            self.drawn += 1
        self._check_length()
        return value

    def _check_length(self) -> None:
        """Refuse a pass that has more or fewer items than it may."""
        source, epoch, drawn = self._source, self._start.epoch, self.drawn
        length = source.length
        if length is not None and (drawn > length or (self._ended and drawn < length)):
            found = f"ended after {drawn:,}" if self._ended else "has more"
            raise ValueError(
                f"{source.name} has length={length:,}, and pass {epoch} {found}. Give the number of samples in a pass, "
                "or leave length out."
            )
        if drawn > _MOST_ITEMS:
            raise ValueError(
                f"{source.name}: a pass can have at most {_MOST_ITEMS:,} items. End it before that: itertools.islice."
            )

    def _differs(self, found: str) -> ValueError:
        start = self._start
        return ValueError(
            f"{self._source.name} resumes only where its iterable gives the same items again. The state comes after "
            f"{start.drawn:,} items of pass {start.epoch}, and now {found}. Give it the same data, with seeds for "
            "all that is random; or begin again, with loader.init_state(key)."
        )


def _check_of(value: PyTree) -> int:
    """A hash of an item; 0 if it has none."""
    try:
        found = samples_hash(value)
    except Exception:  # the item may be any object, and refuse to become an array in any way
        found = None
    return 0 if found is None else int(found[:16], 16)


class DrawnBatch(NamedTuple):
    """The samples of a batch.

    Attributes:
        items: They, in order; fewer than it has rows at the end of a pass.
        before: Where the run was before it.
        after: Where it is after it.
        seconds: How long the iterable has taken to give them.
    """

    items: list[Item]
    before: Progress
    after: Progress
    seconds: float


class Drawing:
    """A run over an iterable: batch after batch, pass after pass.

    Args:
        source: The iterable.
        words: The run's raw key data, uint32.
        rows: Samples per batch.
        progress: Where to begin.
    """

    def __init__(self, source: IterableSource, words: np.ndarray, rows: int, progress: Progress) -> None:
        self.source = source
        self.words = words
        self.progress = progress
        self._rows = rows
        self._pass = _Pass(source, words, progress)

    def is_at(self, words: np.ndarray, progress: Progress) -> bool:
        """Whether the next batch is that of a place in a run."""
        return self.progress == progress and self.words.tobytes() == words.tobytes()

    @property
    def drawn(self) -> tuple[int, int]:
        """The pass, and how many of its items have been drawn, now."""
        return self.progress.epoch, self._pass.drawn

    def next(self) -> DrawnBatch:
        """The next batch: the last samples of a pass, if it has no more."""
        one, before, items = self._pass, self.progress, []
        seconds = one.seconds
        while len(items) < self._rows and (item := one.next()) is not None:
            items.append(item)
        if not items and before.given == 0:
            raise ValueError(
                f"{self.source.name} needs at least one sample in a pass. Pass {before.epoch} gave none. Does it start "
                "from the beginning every time?"
            )
        if one.is_over:
            one.close()
            self.progress = Progress(before.epoch + 1, 0, 0, 0)
            self._pass = _Pass(self.source, self.words, self.progress)
        else:
            self.progress = one.progress()
        return DrawnBatch(items, before, self.progress, one.seconds - seconds)

    def stop(self) -> None:
        """Have `next`, in a different thread, end at the next item."""
        self._pass.stopped = True

    def close(self) -> None:
        """End the iterator."""
        self._pass.close()


@dataclasses.dataclass
class Ready:
    """A batch that is drawn and being read.

    Attributes:
        job: What the backend calls it; None for the rest of a pass, which is dropped.
        request: Its samples.
        after: Where the run is after it.
        seconds: How long the iterable has taken.
    """

    job: Any
    request: Request | None
    after: Progress
    seconds: float


class Drawer:
    """Draws batches in a thread, and has a backend read them: host stages, and writing into the memory of a batch.

    Args:
        drawing: The run.
        backend: Who reads.
        rows: How many rows a batch has.
        keyed: Whether samples need keys.
        drops: Whether samples that do not fill a batch at the end of a pass are left out.
        ahead: How many batches to draw before they are asked for.
        first: The number of the first batch.
        steps: How many batches; None for those up to the end of the pass.
    """

    def __init__(
        self,
        drawing: Drawing,
        backend: ThreadBackend,
        *,
        rows: int,
        keyed: bool,
        drops: bool,
        ahead: int,
        first: int,
        steps: int | None,
    ) -> None:
        self.drawing = drawing
        self.backend = backend
        self._rows = rows
        self._keyed = keyed
        self._drops = drops
        self._ahead = ahead
        self._first = first
        self._steps = steps
        self._changed = threading.Condition()  # reentrant: a finalizer may stop the thread anywhere
        self._ready: collections.deque[Ready | BaseException] = collections.deque()
        self._asked = self._made = self._taken = 0
        self._made_before = 0  # for the iterator before this one
        self._thread: threading.Thread | None = None
        self._stopped = self._over = False

    def next(self) -> Ready | None:
        """The next batch, once it is drawn; None after the last. It raises what the iterable raised."""
        if self._taken == self._steps:
            return None
        with self._changed:
            self._asked += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="millstream-reader-iterable")
                self._thread.start()
            self._changed.notify_all()
            self._wait()
            if not self._ready:
                return None
            ready = self._ready.popleft()
            self._taken += 1
        if isinstance(ready, BaseException):
            raise ready
        return ready

    def count_ready(self) -> int:
        """Batches that can be handed out without waiting."""
        jobs = [one.job for one in list(self._ready) if isinstance(one, Ready) and one.job is not None]
        return sum(map(self.backend.is_done, jobs))

    @property
    def is_complete(self) -> bool:
        """Whether all batches have been handed out, so that the run is where they end, and can be extended."""
        return self._taken == self._steps and not (self._over or self._stopped)

    def extend(self, steps: int | None) -> None:
        """Draw that many batches more; None for those up to the end of the pass."""
        self._steps, self._made_before = None if steps is None else self._taken + steps, self._made

    def stop(self) -> None:
        """Have the thread end the iterator and itself."""
        with self._changed:
            self._stopped = True
            self.drawing.stop()
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread, unless the iterator keeps it waiting, and everything that was begun."""
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSING_SECONDS)
        for ready in self._ready:
            if isinstance(ready, Ready) and ready.job is not None:
                self.backend.drop(ready.job)
        self._ready.clear()
        self.backend.close()

    def _wait(self) -> None:
        """Wait for a batch: a warning if the iterable gives nothing for long, and an error at the end."""
        seen, begun, limit = self.drawing.drawn, time.monotonic(), settings.stall_seconds
        patience = settings.patience(None)
        while not (self._ready or self._over):
            if seen != self.drawing.drawn:
                seen, begun = self.drawing.drawn, time.monotonic()
            left = patience - (time.monotonic() - begun)
            if left > 0:
                self._changed.wait(min(left, _TICK))
                continue
            name, (epoch, drawn) = self.drawing.source.name, seen
            where = f"for {patience:.0f} s, after {drawn:,} items of pass {epoch}."
            if patience < limit:
                warnings.warn(f"{name} has given nothing {where}", stacklevel=6)
                patience = limit
                continue
            raise WorkerStalled(
                f"{name} has given nothing {where} Is a server not answering? If items take that long, set "
                "ms.reading.settings.stall_seconds."
            )

    def _run(self) -> None:
        """What the thread does; what an iterator opens in it, such as a database, is closed in it, too."""
        try:
            while self._may_draw() and self._draw():
                pass
        except _Stopped:
            pass
        except BaseException as error:
            self._ready.append(error)
        try:
            self.drawing.close()
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _may_draw(self) -> bool:
        """Wait until a batch is wanted; False if none is any more."""
        with self._changed:
            while not self._stopped and (self._made == self._steps or self._made >= self._asked + self._ahead):
                self._changed.wait()
            return not self._stopped

    def _draw(self) -> bool:
        """Draw a batch and have it read; whether there are more."""
        batch = self.drawing.next()
        ends_here = self._steps is None and batch.after.epoch != batch.before.epoch
        if self._drops and len(batch.items) < self._rows:
            if batch.before.given == 0:
                raise ValueError(
                    f"BatchTransform(batch_size={self._rows}, drop_last=True) would drop everything: pass "
                    f"{batch.before.epoch} of {self.drawing.source.name} has only {len(batch.items)} samples. Use a "
                    f"batch_size of at most {len(batch.items)}, or drop_last=False."
                )
            if ends_here and self._made > self._made_before:
                self._ready.append(Ready(None, None, batch.after, batch.seconds))
                return False
            return True
        request = self._request(batch)
        self._made += 1
        self._ready.append(Ready(self.backend.start(request), request, batch.after, batch.seconds))
        with self._changed:
            self._changed.notify_all()
        return not ends_here

    def _request(self, batch: DrawnBatch) -> Request:
        """A batch as those who read it are asked for it."""
        rows, count, epoch = self._rows, len(batch.items), batch.before.epoch
        indices, numbers = np.zeros(rows, object), np.zeros(rows, np.uint64)
        for row, item in enumerate(batch.items):
            indices[row], numbers[row] = item, item
        epochs, words = np.full(rows, epoch, np.uint32), self.drawing.words
        keys = sample_keys(words, epochs, numbers) if self._keyed else None
        place = epoch, batch.before.given // rows
        return Request(
            self._first + self._made, indices, np.arange(rows) < count, keys, epochs, numbers, words.tobytes(), place
        )
