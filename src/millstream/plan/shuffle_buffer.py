"""A shuffle buffer as an index function: which items it holds at any place of a pass follows from the key alone.

The buffer is filled with the first items of a pass. From then on each place gives out the item of one slot, and the
next item of the pass takes that slot. When there are no more items, each place gives out a slot until none is left; the
last slot then moves to where the hole is. Which slot a place gives out is Threefry of run key, pass and place. So
nothing of a buffer needs saving: its items are found again by their numbers.
"""

from typing import Generic, TypeVar

import numpy as np

from millstream.plan.keys import fold, named_key

_BLOCK = 1 << 12  # places whose random numbers are made at once

T = TypeVar("T")


def _random(words: np.ndarray, epoch: int, places: np.ndarray) -> np.ndarray:
    """A random number of 32 bits for each place of a pass, as uint64."""
    key = fold(np, named_key(words, "millstream shuffle buffer 1"), np.uint32(epoch))
    return fold(np, key, places.astype(np.uint64))[0].astype(np.uint64)


class ShuffleBuffer(Generic[T]):
    """The items in hand, given out in the order of a pass.

    Args:
        words: The run's raw key data, uint32.
        epoch: The number of the pass.
        place: How many items of the pass have been given out.
        items: What is in the slots; append to it while the buffer fills.
    """

    def __init__(self, words: np.ndarray, epoch: int, place: int, items: list[T]) -> None:
        self._words = words
        self._epoch = epoch
        self.place = place
        self.items = items
        self._first = place
        self._block: list[int] = []

    def replace(self, item: T) -> T:
        """Give out a slot's item, and put the next item of the pass there."""
        slot = self._slot()
        given, self.items[slot] = self.items[slot], item
        return given

    def take(self) -> T:
        """Give out a slot's item, when no more come."""
        slot = self._slot()
        given, last = self.items[slot], self.items.pop()
        if slot < len(self.items):
            self.items[slot] = last
        return given

    def _slot(self) -> int:
        at = self.place - self._first
        if at >= len(self._block):
            places = np.arange(self.place, self.place + _BLOCK)
            self._first, self._block, at = self.place, _random(self._words, self._epoch, places).tolist(), 0
        self.place += 1
        return self._block[at] * len(self.items) >> 32


def held_items(words: np.ndarray, epoch: int, size: int, given: int, drawn: int) -> list[int]:
    """The numbers of the items in a buffer's slots, found without the items.

    Args:
        words: The run's raw key data, uint32.
        epoch: The number of the pass.
        size: How many slots there are.
        given: How many items of the pass have been given out.
        drawn: How many have been drawn: `size + given`, or fewer if these were all.
    """
    slots, replaced = min(size, drawn), max(0, drawn - size)
    buffer = ShuffleBuffer(words, epoch, replaced, _held_while_filled(words, epoch, slots, replaced))
    for _ in range(given - replaced):
        buffer.take()
    return buffer.items


def _held_while_filled(words: np.ndarray, epoch: int, slots: int, place: int) -> list[int]:
    """The numbers of the items in a full buffer, at a place up to which every slot given out was taken again.

    Place p put item `slots + p` into its slot, so the last place that gave out a slot says what is there. Looking back
    from the end, all slots are met within about `slots * log(slots)` places, however long the pass is.
    """
    found, stop = np.full(slots, -1), place
    while stop > 0 and found.min() < 0:
        first = max(0, stop - max(_BLOCK, 2 * slots))
        places = np.arange(first, stop)
        chosen = (_random(words, epoch, places) * np.uint64(slots)) >> np.uint64(32)
        latest = np.full(slots, -1)
        np.maximum.at(latest, chosen.astype(np.int64), places + slots)
        found, stop = np.where(found < 0, latest, found), first
    return np.where(found < 0, np.arange(slots), found).tolist()
