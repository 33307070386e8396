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
import itertools
import os
import threading
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

_PIECE = 2 << 20  # bytes of neighbours that are asked for together: more would make the first of them wait
_PIECES = 16  # there is always room for that many: fewer large ones would push each other out
_GAP = 4 << 10  # bytes between two wanted spans that are always asked for with them: headers, and small neighbours
_WASTE = 1  # how often longer gaps must fit into what is wanted around them; what is wanted later may lie there
_OVERDUE = 1 << 14  # uses after which one that should have come is not waited for: samples may be read once for two
_LOOKED_AT = 4  # pieces that a span is looked for in
_IDLE_SECONDS = 5.0  # after which a thread ends

Span = tuple[int, int]  # start and size
_Use = tuple[Span, int, Span]  # what is fetched, the number of the use, and what is read


class Fetchable(Protocol):
    """A file whose spans can be fetched.

    Attributes:
        expected: The pieces in which each expected span lies, in the order of their uses. They belong to the pool.
    """

    expected: "dict[Span, collections.deque[Piece]]"

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
        self._numbers = itertools.count()
        self._last_taken = 0
        self._threads = 0

    def expect(self, wanted: Iterable[tuple[Fetchable, Span, Span]], connections: int, kept: bool = True) -> None:
        """Fetch these spans, which will be read in this order, as soon as there is room.

        Args:
            wanted: Spans, each with its file, and with the span around it that is fetched in its place: what is
                expected there later then comes with it.
            connections: How many threads may fetch.
            kept: Whether their bytes wait in memory until each was taken.
        """
        by_file: dict[Fetchable, list[_Use]] = {}
        for file, span, around in wanted:
            by_file.setdefault(file, []).append((around, next(self._numbers), span))
        with self._changed:
            for file, uses in by_file.items():
                left = [use for use in uses if not self._found_in_piece(file, use)]
                for run in _runs(left, min(_PIECE, self.limit // _PIECES)):
                    self._add(file, run, kept)
            for _ in range(min(connections, len(self._waiting)) - self._threads):
                self._threads += 1
                threading.Thread(target=self._run, daemon=True, name="millstream-fetch").start()
            self._changed.notify_all()

    def take(self, file: Fetchable, span: Span) -> bytes | None:
        """The bytes of a span that was expected, once for each time; None if it was not."""
        with self._changed:
            pieces = file.expected.get(span)
            if pieces is None:
                return None
            piece = pieces.popleft()
            if not pieces:
                del file.expected[span]
            answer, is_mine = piece.answer, piece.answer is None
            if answer is None:
                answer = self._begin(piece)
        if is_mine:
            self._fetch(piece, answer)
        try:
            data = answer.result()
        except BaseException as error:
            if is_mine:
                raise
            if not isinstance(error, Exception):  # which was meant for the thread that fetched it
                return None
            raise type(error)(*error.args) from None  # notes on where it was needed are each reader's own
        finally:
            with self._changed:
                if piece.uses:
                    self._last_taken = max(self._last_taken, piece.uses.popleft())
                if not piece.uses:
                    self._release(piece)
                    self._end(piece)
                while self.nbytes > self.limit and self._evict(-1):
                    pass
        start = span[0] - piece.span[0]
        return data if span == piece.span else data[start : start + span[1]]

    def forget(self, files: Collection[Fetchable]) -> None:
        """Fetch nothing more of some files, and hold nothing of them."""
        with self._changed:
            own = [file for file in files if file.expected]
            for file in own:
                file.expected.clear()
                self._pieces.pop(file, None)
            gone = set(own)
            for piece in [piece for _, _, piece in self._waiting if piece.file in gone]:
                piece.uses.clear()
            self._waiting = [entry for entry in self._waiting if entry[2].uses]
            heapq.heapify(self._waiting)
            for piece in [piece for piece in self._held if piece.file in gone]:
                piece.uses.clear()
                self._release(piece)

    def _add(self, file: Fetchable, run: "list[_Use]", kept: bool) -> None:
        start = run[0][0][0]
        size = max(sum(around) for around, _, _ in run) - start
        run.sort(key=_number)  # a span that comes twice is taken in the order of its uses
        piece = Piece(file, (start, size), collections.deque(map(_number, run)), kept)
        if kept:
            for _, _, span in run:
                file.expected.setdefault(span, collections.deque()).append(piece)
            bisect.insort(self._pieces.setdefault(file, []), piece, key=_start)
        self._wait(piece)

    def _found_in_piece(self, file: Fetchable, wanted: "_Use") -> bool:
        """Whether a span lies in a piece that is to be read anyway, and is now one of its uses."""
        (_, use, span), pieces = wanted, self._pieces.get(file, [])
        place = bisect.bisect_right(pieces, span[0], key=_start)
        for piece in reversed(pieces[max(place - _LOOKED_AT, 0) : place]):
            if sum(span) <= sum(piece.span):
                piece.uses.append(use)
                file.expected.setdefault(span, collections.deque()).append(piece)
                return True
        return False

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
            self._changed.notify_all()


def _start(piece: Piece) -> int:
    return piece.span[0]


def _number(use: _Use) -> int:
    return use[1]


def _is_here(piece: Piece) -> bool:
    return piece.kept and bool(piece.uses) and piece.answer is not None and piece.answer.done()


def _runs(uses: Sequence[_Use], most: int) -> Iterable[list[_Use]]:
    """Spans that are asked for together: neighbours, with little between them, up to that many bytes."""
    run: list[_Use] = []
    start = end = wanted = 0
    for entry in sorted(uses):
        first, size = entry[0]
        gap = first - end
        near = gap <= _GAP or _WASTE * (end - start - wanted + gap) <= wanted + size
        if run and (first + size <= end or (near and first + size - start <= most)):
            wanted += max(first + size - max(first, end), 0)
            end = max(end, first + size)
        else:
            if run:
                yield run
            run, start, end, wanted = [], first, first + size, size
        run.append(entry)
    if run:
        yield run


_pools: dict[int, FetchPool] = {}


def fetch_pool(limit: int) -> FetchPool:
    """The pool of this process, one for all threads that ask."""
    found = _pools.get(limit)
    return _pools.setdefault(limit, FetchPool(limit)) if found is None else found


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # its threads are not there
