"""Files of other machines, read in pieces: retried, cached, and refused if they change while they are read."""

import bisect
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from millstream.errors import FileChanged
from millstream.files.changed import FileStamp, file_changed
from millstream.files.fetch_pool import Span, fetch_pool, group_spans
from millstream.files.file_cache import FileCache, file_cache
from millstream.files.object_stores import Piece, Store, StoreFault, open_store
from millstream.files.remote_options import CloudOptions, options_for
from millstream.files.urls import shown

BLOCK = 256 << 10  # what is asked for and kept on disk at least: as quick to send as to ask for
_HEAD = 16 << 10  # the beginning, where headers are, which is asked for at opening
_TAIL = 64 << 10  # the end, where footers are, which is asked for instead
_REGION = 8 * BLOCK  # blocks that are asked for together, by one process at a time
_TOGETHER = 8 << 20  # what is asked for at most, so that a break costs little and several connections help
_GAP = 64 << 10  # bytes between two wanted pieces that are rather thrown away than asked around

Known = tuple[int, str]  # size and version


class ListedAddress(str):
    """An address that a store has listed, with the size and version that the file had then."""

    known: Known | None


def open_remote(caller: str, url: str, *, tail: bool = False) -> "RemoteFile":
    """A file by its address, with the options that were configured for it.

    Args:
        caller: The caller's name, for errors.
        url: Where it is. Nothing is asked if it is a `ListedAddress`.
        tail: Whether its end is asked for, in place of its beginning.
    """
    return RemoteFile(caller, str(url), options_for(url), getattr(url, "known", None), tail=tail)


def list_addresses(caller: str, beginning: str) -> list[ListedAddress]:
    """The addresses of all files of a store that begin like this, in any order, with what the list says of them."""
    options, found = options_for(beginning), []
    begun = time.monotonic()
    for attempt in itertools.count():
        try:
            for file in open_store(caller, beginning, options).list_files():
                address = ListedAddress(file.url)
                address.known = (file.size, file.tag) if file.tag else None
                found.append(address)
            return found
        except StoreFault as fault:
            place, found = shown(beginning), []
            if fault.kind == "no list":
                raise ValueError(
                    f"{caller} cannot list {place}: {fault}. Give a list of addresses, one for each file."
                ) from None
            if fault.kind not in ("passing", "silent") or not _is_worth_a_try(options, attempt, begun):
                kind = PermissionError if fault.kind == "denied" else OSError
                raise kind(
                    f"{caller} cannot list {place}: {fault}. Check the address and the options of its store, or give "
                    "a list of addresses."
                ) from None
            _count(retries=1)
            time.sleep(options.backoff)
    raise AssertionError("counting has no end")


def _is_worth_a_try(options: CloudOptions, attempt: int, begun: float) -> bool:
    return attempt < options.retries and time.monotonic() - begun < options.deadline


def expect_remote(
    files: Sequence["RemoteFile"], numbers: np.ndarray, spans: np.ndarray, around: np.ndarray, *, in_memory: bool = True
) -> None:
    """Fetch spans of files that will be read in this order: whole blocks to disk where they are kept, or to memory.

    What lies around a span comes with it, unless all that is around these spans is more than may wait in memory: it
    would be given up and fetched again before it is used.

    Args:
        files: Some files.
        numbers: Which of them each span is in.
        spans: Start and size of each, (spans, 2).
        around: What lies around each.
        in_memory: Whether spans of files that are not kept on disk are fetched.
    """
    options = files[numbers[0]].options
    pool = fetch_pool(options.read_ahead)
    kept = np.isin(numbers, [number for number in np.unique(numbers).tolist() if files[number].cache is not None])
    if in_memory and not kept.all():
        own_numbers, own, wide = numbers[~kept], spans[~kept], around[~kept]
        order, firsts = group_spans(own_numbers, wide)
        if wide[order[firsts], 1].sum() > options.read_ahead:
            wide = own
        pool.expect(files, own_numbers, own, wide, options.connections)
    blocks = _new_blocks(files, numbers[kept], around[kept])
    # Half of what was told before is still to be read. More than that would drive out what is read first.
    blocks = blocks[: options.cache_limit // 4 // BLOCK]
    if blocks:
        units = np.array([unit for _, unit in blocks], np.int64)
        pool.expect(files, np.array([number for number, _ in blocks]), units, units, options.connections, kept=False)


def _new_blocks(files: Sequence["RemoteFile"], numbers: np.ndarray, spans: np.ndarray) -> list[tuple[int, Span]]:
    """The blocks of spans that are not known to be on disk, each once, in the order of their first uses."""
    order, firsts = group_spans(numbers, spans)
    first_uses = np.sort(order[firsts])
    places = zip(numbers[first_uses].tolist(), *spans[first_uses].T.tolist(), strict=True)
    blocks = ((number, unit) for number, start, size in places for unit in files[number].new_blocks((start, size)))
    return list(dict.fromkeys(blocks))


def forget_remote(files: Sequence["RemoteFile"]) -> None:
    """Hold nothing of files in memory, and fetch nothing of them ahead."""
    for file in files:
        file.drop_end()
    fetch_pool(files[0].options.read_ahead).forget(files)


@dataclasses.dataclass
class Traffic:
    """What this process has asked stores for.

    Example:
        >>> from millstream.integrations import cloud
        >>> before = cloud.traffic().requests
        >>> cloud.traffic().requests - before
        0

    Attributes:
        requests: Questions about files, with those that were asked again; lists of files are not among them.
        nbytes: Bytes that came.
        retries: Questions that were asked again after a fault.
        hedges: Questions that were asked a second time because the first answer was late.
    """

    requests: int = 0
    nbytes: int = 0
    retries: int = 0
    hedges: int = 0


_traffic, _counting = Traffic(), threading.Lock()


def traffic() -> Traffic:
    """What this process has asked stores for so far. Worker processes count for themselves.

    Example:
        >>> from millstream.integrations import cloud
        >>> before = cloud.traffic()
        >>> cloud.traffic().requests - before.requests
        0
    """
    with _counting:
        return dataclasses.replace(_traffic)


def _count(**changes: int) -> None:
    with _counting:
        for name, change in changes.items():
            setattr(_traffic, name, getattr(_traffic, name) + change)


@dataclasses.dataclass(frozen=True)
class _Part:
    """A part of a wanted piece: some bytes of what is asked for and kept as one."""

    unit: Span
    start: int
    size: int


# Units in flight, by file: other readers that need one wait for it, and ask nothing.
_flights: dict[tuple[str, Span], concurrent.futures.Future[bytes]] = {}
_claiming = threading.Lock()


class RemoteFile:
    """A file of another machine.

    Args:
        caller: The caller's name, for errors.
        url: Where it is.
        options: How it is read.
        known: Size and version that it must have; None to ask.
        tail: Whether its end is asked for at opening, in place of its beginning.

    Attributes:
        expected: What was said to be read next. It belongs to the pool that fetches it.
    """

    def __init__(
        self, caller: str, url: str, options: CloudOptions, known: Known | None = None, *, tail: bool = False
    ) -> None:
        self._store: Store = open_store(caller, url, options)
        self.name = shown(url)
        self.options = options
        self.expected: dict[Span, Any] = {}
        self._caller = caller
        self._url = url
        self._cache: FileCache | None = None
        self._prefix = ""
        self._end: tuple[int, bytes] = (0, b"")  # its beginning or end, if that is in memory, and where it starts
        self._is_whole = False
        self._opened = known is not None
        if known is not None:
            self._settle(*known)
            return
        first = self._ask(-_TAIL, _TAIL) if tail else self._ask(0, _HEAD)
        self._settle(first.size, first.tag)
        self._opened = True
        self._keep(0, first)
        self._end = (first.size - len(first.data) if tail else 0, first.data)

    def __reduce__(self) -> tuple[Any, ...]:
        known = self.size, self.version
        return RemoteFile, (self._caller, self._url, self.options, known), {"_end": self._end}

    @property
    def stamp(self) -> FileStamp:
        return self.name, self.size, self.version

    @property
    def tail(self) -> bytes:
        """Its last bytes, if they came with its opening and were not forgotten."""
        start, data = self._end
        return data if start + len(data) == self.size else b""

    @property
    def cache(self) -> FileCache | None:
        """Where its blocks are kept; None if they are not, and exactly what is wanted is asked for."""
        cache = self._cache
        keeps = cache is not None and (self._is_whole or self.options.stage or cache.has_room)
        return cache if keeps else None

    def read_at(self, start: int, size: int) -> bytes:
        return next(self.read_ranges([(start, size)]))

    def read_ranges(self, ranges: Sequence[Span]) -> Iterator[bytes]:
        if not self.expected:
            yield from self._read(ranges)
            return
        pool = fetch_pool(self.options.read_ahead)
        here = pool.take_here(self, ranges)
        unknown = [data is None and span not in self.expected for span, data in zip(ranges, here, strict=True)]
        others = self._read([span for span, is_unknown in zip(ranges, unknown, strict=True) if is_unknown])
        for span, data, is_unknown in zip(ranges, here, unknown, strict=True):
            if data is None:
                data = next(others) if is_unknown else pool.take(self, span)
            yield next(self._read([span])) if data is None else data

    def fetch(self, span: Span) -> bytes:
        """The bytes of a span, past those that are expected."""
        return next(self._read([span]))

    def new_blocks(self, span: Span) -> Iterator[Span]:
        """The blocks of a span that are not known to be on disk."""
        for part in self._parts(*span, by_block=True):
            in_memory = part.unit == (self._end[0], len(self._end[1]))
            if self._cache is not None and not in_memory and not self._cache.knows(self._name(part.unit)):
                yield part.unit

    def drop_end(self) -> None:
        """Do not hold its beginning or end in memory any more."""
        self._end = (0, b"")

    def close(self) -> None:
        pass  # connections belong to the store, which other files share

    def kept(self, name: str) -> bytes | None:
        """What was found in the file before, under this name, in this process or another."""
        return None if self._cache is None else self._cache.read(self._note(name))

    def keep(self, name: str, data: bytes) -> None:
        """Keep what was found in the file, on disk, as long as there is room."""
        if self._cache is not None:
            self._cache.write({self._note(name): data})

    def _note(self, name: str) -> str:
        return f"{hashlib.sha256(f'{self._prefix} note {name}'.encode()).hexdigest()[:40]}-0"

    def _read(self, ranges: Sequence[Span]) -> Iterator[bytes]:
        """The bytes of each of these ranges: from memory or disk, or asked for, each unit by one reader at a time."""
        by_block = self.cache is not None
        wanted = [list(self._parts(*span, by_block)) for span in ranges]
        held = self._held(itertools.chain.from_iterable(wanted), by_block)
        missing = sorted(unit for unit, found in held.items() if found is None)
        with _Claims(self._prefix, missing) as claims:
            again = self._held([_Part(unit, 0, unit[1]) for unit in claims.mine], by_block)  # it may be there by now
            for unit in [unit for unit, found in again.items() if found is not None]:
                held[unit] = again[unit]
                claims.settle(unit, again[unit][1])  # pyright: ignore[reportOptionalSubscript]
            runs = _runs(claims.mine, 0, _REGION) if by_block else _runs(claims.mine, _GAP)
            fetch = self._fetch_blocks if by_block else self._fetch
            with _Asking(fetch, runs, self.options.connections, claims) as asking:
                for parts in wanted:
                    found = [held[part.unit] or (0, self._awaited(part.unit, claims, asking)) for part in parts]
                    yield b"".join(map(_cut, parts, found))

    def _awaited(self, unit: Span, claims: "_Claims", asking: "_Asking") -> bytes:
        if unit not in claims.others:
            return asking.result(unit)
        try:
            return claims.others[unit].result()
        except concurrent.futures.CancelledError:  # its reader has ended without it
            return self._fetch(unit)
        except Exception as error:
            raise type(error)(*error.args) from None  # notes on where it was needed are each reader's own

    def _settle(self, size: int, version: str) -> None:
        self.size, self.version = size, version
        store = sorted((name, value) for name, value in self.options.store.items() if isinstance(value, str | int))
        text = repr((self._url, store, size, version, BLOCK))  # an address can mean another place at another endpoint
        self._prefix = hashlib.sha256(text.encode()).hexdigest()[:40]
        if version and self.options.cache_limit:  # what has no version cannot be known again
            self._cache = file_cache(self.options.folder, self.options.cache_limit)
            self._cache.want(self, self._prefix, size)

    def _parts(self, start: int, size: int, by_block: bool) -> Iterator[_Part]:
        if start < 0 or size < 0 or start + size > self.size:
            raise self._changed(f"it has {self.size} bytes, and {size} from {start} on are wanted")
        end, first, held = start + size, *self._end
        if size and first <= start and end <= first + len(held):
            yield _Part((first, len(held)), start - first, size)
            return
        while start < end:
            if by_block:
                first = start // BLOCK * BLOCK
                unit = (first, min(BLOCK, self.size - first))
            else:
                unit = (start, min(_TOGETHER, end - start))
            part = _Part(unit, start - unit[0], min(end, sum(unit)) - start)
            yield part
            start += part.size

    def _name(self, unit: Span) -> str:
        return f"{self._prefix}-{unit[0] // BLOCK}"

    def _held(self, parts: Iterable[_Part], by_block: bool) -> dict[Span, tuple[int, bytes] | None]:
        """What is here of each unit, from the first wanted byte to the last, and where that begins; None if nothing."""
        hulls: dict[Span, Span] = {}
        for part in parts:
            first, end = hulls.get(part.unit, (part.start, 0))
            hulls[part.unit] = (min(first, part.start), max(end, part.start + part.size))
        return {unit: self._found(unit, *hull, by_block) for unit, hull in hulls.items()}

    def _found(self, unit: Span, first: int, end: int, by_block: bool) -> tuple[int, bytes] | None:
        start, data = self._end
        if unit == (start, len(data)):
            return 0, data
        if self._cache is None or not by_block:
            return None
        kept = self._cache.read(self._name(unit), first, end - first)
        return None if kept is None else (first, kept)

    def _fetch(self, run: Span) -> bytes:
        piece = self._ask(*run)
        if (piece.size, piece.tag) != (self.size, self.version):
            raise self._changed(f"it had {self.size} bytes, version {self.version}; now {piece.size}, {piece.tag}")
        self._keep(run[0], piece)
        return piece.data

    def _fetch_blocks(self, run: Span) -> bytes:
        """Blocks of one region, which one process of this machine asks for, and the others take from the disk."""
        assert self._cache is not None
        with self._cache.alone(f"{self._prefix}-{run[0] // _REGION}", self.options.timeout):
            blocks = [(start, min(BLOCK, sum(run) - start)) for start in range(run[0], sum(run), BLOCK)]
            found = [self._cache.read(self._name(block), 0, block[1]) for block in blocks]
            kept = [data for data in found if data is not None]
            return b"".join(kept) if len(kept) == len(blocks) else self._fetch(run)

    def _keep(self, start: int, piece: Piece) -> None:
        if self._cache is None:
            return
        if piece.whole is not None:
            self._is_whole = True  # asking for parts would send all of it every time
            start, data = 0, piece.whole
        elif self.cache is None or start % BLOCK or (len(piece.data) % BLOCK and start + len(piece.data) < piece.size):
            return  # not blocks
        else:
            data = piece.data
        spans = range(0, len(data), BLOCK)
        self._cache.write({self._name((start + at, 0)): data[at : at + BLOCK] for at in spans})

    def _ask(self, start: int, size: int) -> Piece:
        """A piece as it is now, after as many tries as the options allow; of a negative start, the end of the file."""
        begun = time.monotonic()
        for attempt in itertools.count():
            try:
                piece = self._answer(start, size)
                if len(piece.data) == min(size, piece.size if start < 0 else max(piece.size - start, 0)):
                    return piece
                fault = StoreFault("passing", f"it sent {len(piece.data)} of {size} bytes")
            except StoreFault as error:
                if error.kind not in ("passing", "silent"):
                    raise self._final(error) from None
                fault = error
            pause = 0.0 if attempt == 0 else self.options.backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)
            left = begun + self.options.deadline - time.monotonic() - pause
            if attempt >= self.options.retries or left < 0:
                what = f"the last {size} bytes" if start < 0 else f"bytes {start} to {start + size}"
                raise self._unavailable(fault, f"at the last of {attempt + 1} tries for {what}") from None
            _count(retries=1)
            time.sleep(pause)
        raise AssertionError("counting has no end")

    def _answer(self, start: int, size: int) -> Piece:
        """One answer; of two, if the first is late, whichever comes first."""
        if self.options.hedge is None:
            return self._get(start, size)
        answers: queue.SimpleQueue[Piece | BaseException] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put(self._get(start, size))
            except BaseException as error:
                answers.put(error)

        asked, found = 0, None
        for wait in (self.options.hedge, None):
            threading.Thread(target=ask, daemon=True, name="millstream-hedge").start()
            asked += 1
            with contextlib.suppress(queue.Empty):
                found = answers.get(timeout=wait)
                break
            _count(hedges=1)
        if isinstance(found, BaseException) and asked == 2:
            found = answers.get()  # the other one may be good
        if isinstance(found, Piece):
            return found
        assert found is not None
        raise found

    def _get(self, start: int, size: int) -> Piece:
        _count(requests=1)
        piece = self._store.get(start, size)
        _count(nbytes=len(piece.data if piece.whole is None else piece.whole))
        return piece

    def _final(self, fault: StoreFault) -> OSError:
        text = f"{self._caller} cannot read {self.name}: {fault}."
        if self._opened and fault.kind in ("missing", "too short"):
            return self._changed(str(fault))
        if fault.kind == "missing":
            return FileNotFoundError(f"{text} Is the address right?")
        if fault.kind == "denied":
            return PermissionError(
                f"{text} Give credentials, in the environment variables of the store's own tools or by "
                "millstream.integrations.cloud.configure('<beginning of the address>', store={...}). "
                "For public data that is store={'skip_signature': True}."
            )
        if fault.kind == "no ranges":
            return OSError(
                f"{text} Copy the file to a server or store that knows range requests, or to this machine, or allow "
                "more than twice its size: millstream.integrations.cloud.configure(cache_limit=...)."
            )
        if fault.kind == "too short":
            return OSError(f"{text} The file is empty; write it again.")
        return OSError(f"{text} Check the address and the options of its store.")

    def _unavailable(self, fault: StoreFault, tries: str) -> OSError:
        kind = TimeoutError if fault.kind == "silent" else ConnectionError
        return kind(
            f"{self._caller} cannot read {self.name}: {fault}, {tries}. Is the server up? A slow one is given more "
            "time by millstream.integrations.cloud.configure(timeout=..., deadline=..., retries=...)."
        )

    def _changed(self, found: str) -> FileChanged:
        return file_changed(self._caller, self.name, found)


def _cut(part: _Part, held: tuple[int, bytes]) -> bytes:
    start = part.start - held[0]
    return held[1][start : start + part.size]


def _runs(spans: Iterable[Span], gap: int, region: int | None = None) -> list[Span]:
    """Spans in rising order, put together where they touch, overlap or are not far apart, and in one region."""
    runs: list[Span] = []
    for start, size in spans:
        is_near = bool(runs) and start <= sum(runs[-1]) + gap and start + size - runs[-1][0] <= _TOGETHER
        if is_near and (region is None or start // region == runs[-1][0] // region):
            runs[-1] = (runs[-1][0], max(sum(runs[-1]), start + size) - runs[-1][0])
        else:
            runs.append((start, size))
    return runs


class _Claims:
    """Units that a reader asks for, and those that others ask for already."""

    def __init__(self, prefix: str, units: Sequence[Span]) -> None:
        self.mine: list[Span] = []
        self.others: dict[Span, concurrent.futures.Future[bytes]] = {}
        self._prefix = prefix
        self._answers: dict[Span, concurrent.futures.Future[bytes]] = {}
        with _claiming:
            for unit in units:
                flight = _flights.get((prefix, unit))
                if flight is None:
                    self._answers[unit] = _flights[prefix, unit] = concurrent.futures.Future()
                    self.mine.append(unit)
                else:
                    self.others[unit] = flight

    def __enter__(self) -> "_Claims":
        return self

    def __exit__(self, *_: object) -> None:
        for unit in list(self._answers):
            self._settle(unit, None)

    def settle(self, unit: Span, data: bytes) -> None:
        """Give all who wait for a unit its bytes, which need not be asked for."""
        self.mine.remove(unit)
        self._settle(unit, data)

    def settle_run(self, run: Span, answer: bytes | BaseException) -> None:
        """Give all who wait for the units of a run their bytes, or what went wrong."""
        for unit in [unit for unit in list(self._answers) if run[0] <= unit[0] < sum(run)]:
            start = unit[0] - run[0]
            self._settle(unit, answer[start : start + unit[1]] if isinstance(answer, bytes) else answer)

    def _settle(self, unit: Span, answer: bytes | BaseException | None) -> None:
        with _claiming:
            flight = self._answers.pop(unit, None)
            if flight is None:  # its reader has ended
                return
            del _flights[self._prefix, unit]
        if isinstance(answer, bytes):
            flight.set_result(answer)
        elif isinstance(answer, Exception):
            flight.set_exception(answer)
        else:
            flight.cancel()


class _Asking:
    """Several runs on their way at once. Nobody begins another one after the block has ended."""

    def __init__(self, fetch: Callable[[Span], bytes], runs: list[Span], connections: int, claims: _Claims) -> None:
        self._fetch = fetch
        self._runs = runs
        self._claims = claims
        self._starts = [start for start, _ in runs]
        self._answers: list[concurrent.futures.Future[bytes]] = [concurrent.futures.Future() for _ in runs]
        self._connections = connections
        self._next = itertools.count()  # counts atomically
        self._over = False

    def __enter__(self) -> "_Asking":
        if len(self._runs) == 1:
            self._work()
            return self
        for _ in range(min(self._connections, len(self._runs))):
            threading.Thread(target=self._work, daemon=True, name="millstream-remote-file").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True

    def result(self, unit: Span) -> bytes:
        """The bytes of a unit, which is in one of the runs."""
        number = bisect.bisect_right(self._starts, unit[0]) - 1
        start, data = unit[0] - self._starts[number], self._answers[number].result()
        return data if len(data) == unit[1] else data[start : start + unit[1]]

    def _work(self) -> None:
        while not self._over and (number := next(self._next)) < len(self._runs):
            run = self._runs[number]
            try:
                data = self._fetch(run)
            except BaseException as error:
                self._claims.settle_run(run, error)
                self._answers[number].set_exception(error)
            else:
                self._claims.settle_run(run, data)
                self._answers[number].set_result(data)
