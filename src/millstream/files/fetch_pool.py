"""Pieces of remote files that are read soon: fetched concurrently in the order of their use, in bounded memory.

The plan knows which samples come next, so a source can say which bytes it will read. They wait here for one of a few
threads, and then in memory for their readers. What does not fit makes room by its next use: the piece that is needed
furthest in the future goes first, and is fetched again before it is needed. A reader never waits for a piece that no
thread has begun with: it fetches that piece itself.
"""

import bisect
import collections
import concurrent.futures
import dataclasses
import heapq
import os
import threading
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import numpy as np

_PIECE = 2 << 20  # bytes of neighbours that are asked for together: more would make the first of them wait
_PIECES = 16  # there is always room for that many: fewer large ones would push each other out
_GAP = 4 << 10  # bytes between two wanted spans that are always asked for with them: headers, and small neighbours
_WASTE = 1  # how often longer gaps must fit into what is wanted around them; what is wanted later may lie there
_OVERDUE = 1 << 14  # uses after which one that should have come is not waited for: samples may be read once for two
_LOOKED_AT = 4  # pieces that a span is looked for in
_IDLE_SECONDS = 5.0  # after which a thread ends

Span = tuple[int, int]  # start and size
# Spans that are expected inside one that is fetched for all of them: the number of the file, start and size of what is
# fetched, and the first and last place among sorted spans. Numbers alone, which garbage collection passes over: there
# are thousands at a time, and JAX leaves it much to look through.
_Group = tuple[int, int, int, int, int]


class Fetchable(Protocol):
    """A file whose spans can be fetched.

    Attributes:
        expected: The pieces in which each expected span lies, in the order of their uses. They belong to the pool.
    """

    expected: "dict[Span, tuple[Piece, ...]]"

    def fetch(self, span: Span) -> bytes:
        """The bytes of a span, by one or more requests."""
        ...


@dataclasses.dataclass(eq=False, slots=True)
class Piece:
    """Neighbours that are fetched together.

    Attributes:
        file: Where they are.
        span: All of them.
        uses: The numbers of their coming uses, rising.
        kept: Whether it stays in memory for its readers; if not, fetching it has put it on disk.
        answer: Its bytes, once a thread has begun to fetch them.
    """

    file: Fetchable
    span: Span
    uses: collections.deque[int]
    kept: bool = True
    answer: concurrent.futures.Future[bytes] | None = None


class FetchPool:
    """All pieces that this process fetches ahead of need.

    Args:
        limit: The most bytes of pieces in memory or on their way. A reader that needs a piece at once may exceed it by
            that piece.

    Attributes:
        nbytes: Bytes in memory or on their way.
        most_bytes: The most there were.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = self.most_bytes = 0
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int, Piece]] = []  # a heap, by the next use
        self._held: set[Piece] = set()
        self._pieces: dict[Fetchable, list[Piece]] = {}  # that have uses, by where they start
        self._uses = 0  # that were expected so far
        self._last_taken = 0
        self._threads = 0

    def expect(
        self,
        files: Sequence[Fetchable],
        numbers: np.ndarray,
        spans: np.ndarray,
        around: np.ndarray,
        connections: int,
        kept: bool = True,
    ) -> None:
        """Fetch spans, which will be read in this order, as soon as there is room.

        Args:
            files: Some files.
            numbers: Which of them each span is in.
            spans: Start and size of each, (spans, 2).
            around: The span around each that is fetched in its place: what is expected there later then comes with it.
            connections: How many threads may fetch.
            kept: Whether their bytes wait in memory until each was taken.
        """
        order, firsts = group_spans(numbers, around)
        heads, bounds = order[firsts], [*firsts.tolist(), len(order)]
        groups = zip(numbers[heads].tolist(), *around[heads].T.tolist(), bounds, bounds[1:], strict=False)
        read = list(zip(*spans[order].T.tolist(), strict=True))
        with self._changed:
            uses = (order + self._uses).tolist()
            self._uses += len(order)
            left = []
            for group in groups:
                number, _, _, first, end = group
                file = files[number]
                if file not in self._pieces or not self._found_in_piece(file, uses[first:end], read[first:end]):
                    left.append(group)
            for run in _runs(left, min(_PIECE, self.limit // _PIECES)):
                self._add(files[run[0][0]], run, uses, read, kept)
            for _ in range(min(connections, len(self._waiting)) - self._threads):
                self._threads += 1
                threading.Thread(target=self._run, daemon=True, name="millstream-fetch").start()
            self._changed.notify_all()

    def take(self, file: Fetchable, span: Span) -> bytes | None:
        """The bytes of a span that was expected, once for each time; None if it was not."""
        with self._changed:
            if (data := self._taken(file, span)) is not None or span not in file.expected:
                return data
            piece = _forget_first(file, span)
            answer, is_mine = piece.answer, piece.answer is None
            if answer is None:
                answer = self._begin(piece)
        if is_mine:
            self._fetch(piece, answer)
        try:
            return _cut(piece, answer.result(), span)
        except BaseException as error:
            if is_mine:
                raise
            if not isinstance(error, Exception):  # which was meant for the thread that fetched it
                return None
            raise type(error)(*error.args) from None  # notes on where it was needed are each reader's own
        finally:
            with self._changed:
                self._end_use(piece)

    def take_here(self, file: Fetchable, spans: Sequence[Span]) -> list[bytes | None]:
        """As `take`, for those of some spans whose bytes are here; None for the others, which it leaves as they are."""
        with self._changed:
            return [self._taken(file, span) for span in spans]

    def forget(self, files: Collection[Fetchable]) -> None:
        """Fetch nothing more of some files, and hold nothing of them."""
        with self._changed:
            gone = set(files)
            for file in gone:
                file.expected.clear()
                self._pieces.pop(file, None)
            for piece in [piece for _, _, piece in self._waiting if piece.file in gone]:
                piece.uses.clear()
            self._waiting = [entry for entry in self._waiting if entry[2].uses]
            heapq.heapify(self._waiting)
            for piece in [piece for piece in self._held if piece.file in gone]:
                piece.uses.clear()
                self._release(piece)

    def _add(self, file: Fetchable, run: list[_Group], uses: list[int], read: list[Span], kept: bool) -> None:
        """Have neighbours fetched as one piece."""
        start = run[0][1]
        size = max(first + length for _, first, length, _, _ in run) - start
        numbers = sorted(number for *_, first, end in run for number in uses[first:end])
        piece = Piece(file, (start, size), collections.deque(numbers), kept)
        if kept:
            _note(piece, [span for *_, first, end in run for span in read[first:end]])
            bisect.insort(self._pieces.setdefault(file, []), piece, key=_start)
        self._wait(piece)

    def _found_in_piece(self, file: Fetchable, uses: list[int], spans: list[Span]) -> bool:
        """Whether spans lie in a piece that is to be read anyway, and are now uses of it."""
        start, end, pieces = min(spans)[0], max(map(sum, spans)), self._pieces[file]
        place = bisect.bisect_right(pieces, start, key=_start)
        for piece in reversed(pieces[max(place - _LOOKED_AT, 0) : place]):
            if end <= sum(piece.span):
                piece.uses.extend(uses)
                _note(piece, spans)
                return True
        return False

    def _taken(self, file: Fetchable, span: Span) -> bytes | None:
        """The bytes of a span that was expected, if they are here."""
        pieces = file.expected.get(span)
        if pieces is None or not _is_here(pieces[0]):
            return None
        answer = pieces[0].answer
        if answer is None or answer.exception() is not None:
            return None
        piece = _forget_first(file, span)
        self._end_use(piece)
        return _cut(piece, answer.result(), span)

    def _end_use(self, piece: Piece) -> None:
        """Count that a span of a piece was taken."""
        if piece.uses:
            self._last_taken = max(self._last_taken, piece.uses.popleft())
        if not piece.uses:
            self._release(piece)
            self._end(piece)
        while self.nbytes > self.limit and self._evict(-1):
            pass

    def _end(self, piece: Piece) -> None:
        """Forget a piece that has no uses left."""
        pieces = self._pieces.get(piece.file, [])
        if piece in pieces:
            pieces.remove(piece)
        if not pieces:
            self._pieces.pop(piece.file, None)

    def _wait(self, piece: Piece) -> None:
        heapq.heappush(self._waiting, (piece.uses[0], id(piece), piece))

    def _run(self) -> None:
        """What a thread does until there has been nothing to fetch for a while."""
        while True:
            with self._changed:
                while (piece := self._next()) is None:
                    if not self._changed.wait(_IDLE_SECONDS) and not self._waiting:
                        self._threads -= 1
                        return
                answer = self._begin(piece)
            self._fetch(piece, answer)
            del piece, answer  # a waiting thread holds on to nothing

    def _next(self) -> Piece | None:
        """The piece that is needed first, if there is room for it."""
        while self._waiting:
            use, _, piece = self._waiting[0]
            if piece.answer is not None or not piece.uses:  # a reader has taken it over
                heapq.heappop(self._waiting)
            elif not self._held or self.nbytes + piece.span[1] <= self.limit:
                heapq.heappop(self._waiting)
                return piece
            elif not self._evict(use):
                return None
        return None

    def _evict(self, use: int) -> bool:
        """Give up a piece whose uses never came, or the one that is needed last, if that is after a use."""
        here = [piece for piece in self._held if _is_here(piece)]
        for piece in here:
            if piece.uses[-1] < self._last_taken - _OVERDUE:
                self._release(piece)
                piece.answer = None  # who reads it after all fetches it
                return True
        last = max(here, key=lambda piece: piece.uses[0], default=None)
        if last is None or last.uses[0] <= use:
            return False
        self._release(last)
        last.answer = None
        self._wait(last)
        return True

    def _begin(self, piece: Piece) -> concurrent.futures.Future[bytes]:
        piece.answer = answer = concurrent.futures.Future()
        self._held.add(piece)
        self.nbytes += piece.span[1]
        self.most_bytes = max(self.most_bytes, self.nbytes)
        return answer

    def _fetch(self, piece: Piece, answer: concurrent.futures.Future[bytes]) -> None:
        try:
            data = piece.file.fetch(piece.span)
            answer.set_result(data if piece.kept else b"")
        except BaseException as error:
            with self._changed:
                piece.answer = None  # who reads another part of it later asks again
                self._release(piece)
            answer.set_exception(error)
        if not piece.kept or not piece.uses:
            with self._changed:
                self._release(piece)

    def _release(self, piece: Piece) -> None:
        if piece in self._held:
            self._held.remove(piece)
            self.nbytes -= piece.span[1]
            if self._waiting:
                self._changed.notify_all()


def _start(piece: Piece) -> int:
    return piece.span[0]


def _note(piece: Piece, spans: list[Span]) -> None:
    """Have readers of spans find the piece they lie in, after those they were expected in before."""
    expected, new = piece.file.expected, dict.fromkeys(spans, (piece,))
    if len(new) == len(spans) and expected.keys().isdisjoint(new):
        expected.update(new)
        return
    for span in spans:
        expected[span] = (*expected.get(span, ()), piece)


def _forget_first(file: Fetchable, span: Span) -> Piece:
    """The piece that a span is expected in next, which is no longer expected."""
    piece, *later = file.expected[span]
    if later:
        file.expected[span] = tuple(later)
    else:
        del file.expected[span]
    return piece


def _cut(piece: Piece, data: bytes, span: Span) -> bytes:
    start = span[0] - piece.span[0]
    return data if span == piece.span else data[start : start + span[1]]


def _is_here(piece: Piece) -> bool:
    return piece.kept and bool(piece.uses) and piece.answer is not None and piece.answer.done()


def group_spans(numbers: np.ndarray, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort spans of files by file and place, and find equal ones.

    Args:
        numbers: The number of each span's file.
        spans: Start and size of each, (spans, 2).

    Returns:
        The spans in that order, equal ones as they come, and the places there at which a different one begins.
    """
    order = np.lexsort((spans[:, 1], spans[:, 0], numbers))
    sorted_spans, sorted_numbers = spans[order], numbers[order]
    differs = np.ones(len(order), bool)
    differs[1:] = (sorted_spans[1:] != sorted_spans[:-1]).any(axis=1) | (sorted_numbers[1:] != sorted_numbers[:-1])
    return order, np.flatnonzero(differs)


def _runs(groups: Sequence[_Group], most: int) -> Iterable[list[_Group]]:
    """Spans that are asked for together: neighbours, with little between them, up to that many bytes."""
    run: list[_Group] = []
    start = end = wanted = 0
    for group in groups:
        number, first, size, _, _ = group
        gap = first - end
        near = gap <= _GAP or _WASTE * (end - start - wanted + gap) <= wanted + size
        inside = first + size <= end or (near and first + size - start <= most)
        if run and number == run[0][0] and inside:
            wanted += max(first + size - max(first, end), 0)
            end = max(end, first + size)
        else:
            if run:
                yield run
            run, start, end, wanted = [], first, first + size, size
        run.append(group)
    if run:
        yield run


_pools: dict[int, FetchPool] = {}


def fetch_pool(limit: int) -> FetchPool:
    """The pool of this process, one for all threads that ask."""
    found = _pools.get(limit)
    return _pools.setdefault(limit, FetchPool(limit)) if found is None else found


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # its threads are not there
