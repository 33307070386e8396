"""The images and histograms that a history keeps."""

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from millstream.loops._clock import StepSpan
from millstream.loops.elapsed import Elapsed
from millstream.loops.log_entries import Name
from millstream.loops.media import BINS, CHANNELS, IMAGES, MEDIA
from millstream.text.errors import describe_leaf

_ALL_OF_FIRST, _GROWTH = 32, 1.05  # values of an entry that are kept: so many, then one each time steps grow by 5 %
_MOST_BYTES = 64 << 20  # that a history holds

V = TypeVar("V", bound=Any)


class Kept(NamedTuple):
    """An image or a histogram that was logged.

    Attributes:
        number: Of all that were kept in this history, from 0 on.
        path: Its collection, `images` or `histograms`, and its name.
        elapsed: How far the run was.
        array: What was logged: images or a packed histogram; of a fused program, those of several steps.
        row: Which of several it is; None if the array is this one alone.
    """

    number: int
    path: Name
    elapsed: Elapsed
    array: Any
    row: int | None

    def read(self) -> np.ndarray:
        """The value, on the host."""
        try:
            host = np.asarray(self.array)
        except RuntimeError:
            if self.array.is_deleted():
                raise RuntimeError(
                    f"The logged value {'.'.join(self.path)} was donated to a later step before it was read. "
                    "Log a copy of it: jnp.copy(...) inside the step."
                ) from None
            raise
        return host if self.row is None else host[self.row]

    @property
    def nbytes(self) -> int:
        """How many bytes it is; of several in one array, its share."""
        return self.array.nbytes if self.row is None else self.array.nbytes // max(len(self.array), 1)


class MediaLog:
    """The images and histograms of a history: of each entry some, and only so many bytes of them.

    Of each entry the first 32 are kept, and then one each time the steps have grown by 5 %, so that their number grows
    with the logarithm of the steps. If they are too many bytes, the oldest are forgotten; writers have them by then.
    """

    def __init__(self) -> None:
        self.count = 0  # of all that were ever kept
        self.newest_step: int | None = None  # at which one was logged, kept or not
        self._items: list[Kept] = []
        self._nbytes = 0
        self._last: dict[Name, tuple[int, int]] = {}  # how many were kept of an entry, and the step of the last

    def take(self, passed: StepSpan, entries: Iterable[tuple[Name, V]], *, stacked: bool) -> list[tuple[Name, V]]:
        """Offer the images and histograms among what several steps have logged; what is neither is returned.

        Args:
            passed: These steps.
            entries: The values of each entry, one for each step.
            stacked: Whether the values of an entry are one array.
        """
        media, others = [], []
        for entry in entries:
            (media if entry[0][0] in MEDIA else others).append(entry)
        if media:
            for row, elapsed in enumerate(passed.moments()):
                for path, values in media:
                    self.add(path, elapsed, values if stacked else values[row], row if stacked else None)
        return others

    def add(self, path: Name, elapsed: Elapsed, array: Any, row: int | None = None) -> None:
        """Offer a value."""
        self.newest_step = step = elapsed.steps
        kept, last = self._last.get(path, (0, 0))
        if kept >= _ALL_OF_FIRST and step < last * _GROWTH:
            return
        _require_value(path, array, row)
        if isinstance(array, np.ndarray):
            array = array.copy()  # its owner may write into it
        elif row is None:
            array.copy_to_host_async()
        item = Kept(self.count, path, elapsed, array, row)
        self._last[path] = kept + 1, step
        self.count += 1
        self._items.append(item)
        self._nbytes += item.nbytes
        if self._nbytes > _MOST_BYTES:
            self._forget()

    def _forget(self) -> None:
        """Forget the oldest, but for the first of each entry, which is what a test shows of its batches."""
        first = {item.path: item.number for item in reversed(self._items)}
        spared = {*first.values(), self.count - 1}
        for item in [item for item in self._items if item.number not in spared]:
            if self._nbytes <= _MOST_BYTES:
                return
            self._items.remove(item)
            self._nbytes -= item.nbytes

    def since(self, number: int) -> list[Kept]:
        """Those that are still there, from a number on."""
        return [item for item in self._items if item.number >= number]


def _require_value(path: Name, array: Any, row: int | None) -> None:
    """Refuse what was put into such a collection by hand and is neither images nor a packed histogram."""
    axes = getattr(array, "ndim", -1) - (row is not None)
    good = isinstance(array, jax.Array | np.ndarray) and (
        axes == 4 and array.dtype == np.uint8 and array.shape[-1] in CHANNELS
        if path[0] == IMAGES
        else axes == 2 and array.shape[-2:] == (2, BINS + 1)
    )
    if not good:
        method = "add_image" if path[0] == IMAGES else "add_histogram"
        raise TypeError(f"Logs: {path[0]} are what {method} makes. {'.'.join(path)} is {describe_leaf(array)}.")
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        raise ValueError(
            f"The logged value {'.'.join(path)} ({describe_leaf(array)}) lies in several processes. "
            "Log what every process has."
        )
