"""Packing: which pieces of which documents make each row, planned from the lengths of the documents alone.

A plan is one table of whole numbers: how many rows there are, how many tokens they hold (two numbers), the number of
the first piece of every row and one more for the end; then, for all pieces, their documents, where in these they
start, and twice their tokens, plus one where a document ends. That is 12 bytes for a document that stays whole.
"""

import bisect
import collections
import dataclasses
import functools
from collections.abc import Iterator
from typing import Literal

import numpy as np

from millstream.plan import order
from millstream.plan.keys import named_key
from millstream.plan.selection import index_dtype

Rule = Literal["best-fit", "first-fit", "concat"]
TooLong = Literal["split", "cut", "drop"]

_NAME = "millstream pack 1"
_HEADER = 3  # numbers before those of the rows
_WORD = 31  # bits of a number of tokens in each of its two numbers


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The pieces of documents in some rows, row by row.

    Attributes:
        rows: Which of the rows that were asked for each one is in.
        numbers: Its number in its row, from 0 on.
        places: Where in its row it begins.
        documents: The document it is a piece of.
        starts: Where in its document it begins.
        counts: How many tokens it has.
        are_last: Whether its document ends with it.
        lasts: The last piece of every row.
    """

    rows: np.ndarray
    numbers: np.ndarray
    places: np.ndarray
    documents: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    are_last: np.ndarray
    lasts: np.ndarray


class PackedRows:
    """The rows of a plan.

    Args:
        table: The table, which may be mapped.

    Attributes:
        tokens: How many tokens all rows hold.
    """

    def __init__(self, table: np.ndarray) -> None:
        self._length = int(table[0])
        self.tokens = (int(table[1]) << _WORD) + int(table[2])
        ends = _HEADER + self._length + 1
        self._firsts, rest = table[_HEADER:ends], table[ends:]
        self._columns = rest.reshape(3, -1)
        self._documents = self._columns[0]

    def __len__(self) -> int:
        return self._length

    def pieces(self, rows: np.ndarray) -> Pieces:
        """The pieces that these rows are made of."""
        firsts = self._firsts[rows].astype(np.int64)
        sizes = self._firsts[rows + 1] - firsts
        lasts = np.cumsum(sizes) - 1
        begins = lasts - sizes + 1
        row = np.repeat(np.arange(len(rows)), sizes)
        numbers = np.arange(len(row)) - begins[row]
        documents, starts, doubled = self._columns.take(firsts[row] + numbers, axis=1).astype(np.int64)
        counts = doubled >> 1
        before = np.cumsum(counts) - counts
        places = before - before[begins][row]
        return Pieces(row, numbers, places, documents, starts, counts, (doubled & 1).astype(bool), lasts)

    def first_documents(self, rows: np.ndarray) -> np.ndarray:
        """The first document of each of these rows."""
        return self._documents[self._firsts[rows]].astype(np.int64)

    def some_documents(self, count: int) -> list[int]:
        """At most that many documents, each once."""
        return list(dict.fromkeys(self._documents[:count].tolist()))

    @functools.cached_property
    def divides(self) -> bool:
        """Whether some document is in more than one row."""
        return len(np.unique(self._documents)) < len(self._documents)


@dataclasses.dataclass(frozen=True)
class Packing:
    """How documents become rows.

    Attributes:
        length: Tokens of a row.
        rule: "concat" joins documents and cuts every `length` tokens. "first-fit" puts each one into the first row with
            room for it, "best-fit" into the row with the least room, the longest documents first.
        too_long: What becomes of documents longer than a row.
        most: How many pieces a row may have; None for any number.
        block: How many documents are fitted at a time.
        seed: Of the order in which documents are packed; None for their own.
    """

    length: int
    rule: Rule = "best-fit"
    too_long: TooLong = "split"
    most: int | None = None
    block: int = 1 << 20
    seed: int | None = 0

    def table(self, lengths: np.ndarray) -> np.ndarray:
        """The table of a plan for documents of these lengths."""
        firsts, parts, pieces, tokens = [], [], 0, 0
        dtype = index_dtype(max(int(lengths.max()), len(lengths), 2 * self.length + 1) + 1)
        for documents in self._blocks(len(lengths)):
            if self.rule == "concat":
                *found, is_first = _chained(documents, lengths[documents], self.length, tokens)
            else:
                *found, is_first = self._fitted(documents, lengths[documents])
            whose, starts, counts, are_last = found
            firsts.append(np.flatnonzero(is_first) + pieces)
            parts.append([column.astype(dtype) for column in (whose, starts, 2 * counts + are_last)])
            pieces, tokens = pieces + len(whose), tokens + int(counts.sum())
        rows = sum(map(len, firsts))
        if pieces >= 1 << 32:
            dtype = np.dtype(np.int64)
        header = np.array([rows, tokens >> _WORD, tokens & ((1 << _WORD) - 1)], dtype)
        ends = [*firsts, np.array([pieces])]
        columns = [column for number in range(3) for column in (part[number] for part in parts)]
        return np.concatenate([header, *(one.astype(dtype) for one in ends), *columns], dtype=dtype)

    def _blocks(self, documents: int) -> Iterator[np.ndarray]:
        """The documents in the order in which they are packed, some at a time."""
        dtype = np.uint32 if documents <= 1 << 32 else np.uint64
        for first in range(0, documents, self.block):
            numbers = np.arange(first, min(first + self.block, documents), dtype=dtype)
            if self.seed is not None:
                words = np.array([self.seed >> 32, self.seed & 0xFFFF_FFFF], np.uint32)
                numbers = order.shuffled(np, numbers, documents, named_key(words, _NAME))
            yield numbers.astype(np.int64)

    def _fitted(self, documents: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, ...]:
        """Document, start, count and end of every piece, row by row, and whether it is the first of its row."""
        pieces = _pieces(documents, lengths, self.length, self.too_long)
        counts, most = pieces[2], self.length if self.most is None else self.most  # a piece has at least one token
        found = (_best_fit if self.rule == "best-fit" else _first_fit)(counts, self.length, most)
        # Rows come in the order of their first pieces, and pieces in their rows in the order that they had: largest
        # first, as best-fit takes them, all rows would begin with a long document, and long ones come early.
        by_row, sizes = np.argsort(found, kind="stable"), np.bincount(found)
        begins = np.cumsum(sizes) - sizes
        ranked = np.argsort(by_row[begins])
        which = by_row[_ranges(begins[ranked], sizes[ranked])]
        is_first = np.zeros(len(which), bool)
        is_first[np.cumsum(sizes[ranked]) - sizes[ranked]] = True
        return *(column[which] for column in pieces), is_first


def _ranges(begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The numbers from each begin on, as many as its size says, one range after the other."""
    before = np.cumsum(sizes) - sizes
    return np.arange(sizes.sum()) + np.repeat(begins - before, sizes)


def _chained(documents: np.ndarray, lengths: np.ndarray, length: int, before: int) -> tuple[np.ndarray, ...]:
    """As `Packing._fitted`, for documents one after the other that are cut at every multiple of `length`.

    Args:
        documents: Their numbers.
        lengths: Their lengths.
        length: Tokens of a row.
        before: How many tokens come before them.
    """
    ends = before + np.cumsum(lengths)
    begins = ends - lengths
    rows = np.arange(-(-before // length) * length, ends[-1], length)
    cuts = np.union1d(begins[lengths > 0], rows)
    which = np.searchsorted(ends, cuts, side="right")
    starts, counts = cuts - begins[which], np.diff(cuts, append=ends[-1])
    return documents[which], starts, counts, starts + counts == lengths[which], cuts % length == 0


def _pieces(documents: np.ndarray, lengths: np.ndarray, length: int, too_long: TooLong) -> tuple[np.ndarray, ...]:
    """Document, start, count and end of pieces that fit into a row; none for empty documents."""
    kept = lengths
    if too_long == "cut":
        kept = np.minimum(lengths, length)
    elif too_long == "drop":
        kept = np.where(lengths <= length, lengths, 0)
    times = -(-kept // length)
    which = np.repeat(np.arange(len(documents)), times)
    starts = _ranges(np.zeros_like(times), times) * length
    counts = np.minimum(kept[which] - starts, length)
    return documents[which], starts, counts, starts + counts == lengths[which]


def _best_fit(counts: np.ndarray, length: int, most: int) -> np.ndarray:
    """The row of every piece: largest first, each into the row with the least room for it.

    Rows with as much room and as many pieces are kept together, in arrays. Pieces of equal size fill whole arrays of
    them at a time, so that 300,000 documents take about 30,000 steps.
    """
    keys = length - counts
    by_size = np.argsort(keys.astype(np.uint16) if length <= 1 << 16 else keys, kind="stable")  # 16 bits: radix sort
    ordered = counts[by_size]
    begins = np.flatnonzero(np.diff(ordered, prepend=0))
    runs = zip(ordered[begins].tolist(), np.diff(begins, append=len(ordered)).tolist(), strict=True)
    rooms: list[int] = []  # that open rows have, rising
    open_rows: dict[int, collections.deque[tuple[np.ndarray, int]]] = {}  # by room: rows, and how many pieces each has
    placed, total = [np.zeros(0, np.int64)], 0

    def queue_of(room: int) -> collections.deque[tuple[np.ndarray, int]]:
        if room not in open_rows:
            open_rows[room] = collections.deque()
            bisect.insort(rooms, room)
        return open_rows[room]

    def place(rows: np.ndarray, each: int, size: int, room: int, used: int) -> None:
        placed.append(np.repeat(rows, each))
        if room > each * size and used + each < most:
            queue_of(room - each * size).append((rows, used + each))

    for size, left in runs:
        while left:
            at = bisect.bisect_left(rooms, size)
            if at == len(rooms):
                room, used, each = length, 0, min(length // size, most)
                rows = np.arange(total, total - (-left // each))
                total += len(rows)
            else:
                room = rooms[at]
                rows, used = open_rows[room].popleft()
                if not open_rows[room]:
                    del open_rows[room], rooms[at]
                each = min(room // size, most - used)  # after the first of them, the same row has the least room
            full, rest = divmod(left, each)
            if full >= len(rows):
                place(rows, each, size, room, used)
                left -= each * len(rows)
                continue
            if full:
                place(rows[:full], each, size, room, used)
            if rest:
                place(rows[full : full + 1], rest, size, room, used)
            unused = rows[full + (rest > 0) :]
            if len(unused):
                queue_of(room).appendleft((unused, used))
            left = 0
    found = np.empty(len(counts), np.int64)
    found[by_size] = np.concatenate(placed)
    return found


def _first_fit(counts: np.ndarray, length: int, most: int) -> np.ndarray:
    """The row of every piece: each into the first row with room for it, by a tree of the most room that rows have."""
    # Two rows that are not closed hold more than one row together, or the later one would not have been begun.
    rows = min(len(counts), 2 * int(counts.sum()) // length + len(counts) // most + 2)
    width = 1 << max(rows - 1, 0).bit_length()
    tree, used, found = [length] * (2 * width), [0] * width, []
    for count in counts.tolist():
        node = 1
        while node < width:
            node += node
            if tree[node] < count:
                node += 1
        row = node - width
        found.append(row)
        used[row] += 1
        tree[node] = 0 if used[row] == most else tree[node] - count
        while node > 1:
            node >>= 1
            room = max(tree[2 * node], tree[2 * node + 1])
            if tree[node] == room:
                break
            tree[node] = room
    return np.array(found, np.int64)
