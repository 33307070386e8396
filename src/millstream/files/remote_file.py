"""Files of other machines, read in pieces: retried, cached, and refused if they change while they are read."""

import bisect
import concurrent.futures
import dataclasses
import hashlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from millstream.errors import FileChanged
from millstream.files.changed import FileStamp, file_changed
from millstream.files.file_cache import FileCache, file_cache
from millstream.files.object_stores import Piece, Store, StoreFault, open_store
from millstream.files.remote_options import CloudOptions, options_for
from millstream.files.urls import shown

BLOCK = 256 << 10  # what is asked for and kept at least: as quick to send as to ask for
_HEAD = 16 << 10  # the beginning, where headers are, which is asked for at opening and held if it is not kept on disk
_TOGETHER = 8 << 20  # what is asked for at most, so that a break costs little and several connections help
_GAP = 64 << 10  # bytes between two wanted pieces that are rather thrown away than asked around

Span = tuple[int, int]  # start and size


def open_remote(caller: str, url: str) -> "RemoteFile":
    """A file by its address, with the options that were configured for it. Its beginning is asked for.

    Args:
        caller: The caller's name, for errors.
        url: Where it is.
    """
    return RemoteFile(caller, url, options_for(url))


@dataclasses.dataclass(frozen=True)
class _Part:
    """A part of a wanted piece: some bytes of what is asked for and kept as one."""

    unit: Span
    start: int
    size: int


class RemoteFile:
    """A file of another machine.

    Args:
        caller: The caller's name, for errors.
        url: Where it is.
        options: How it is read.
        known: Size and version that it must have; None to ask.
    """

    def __init__(self, caller: str, url: str, options: CloudOptions, known: tuple[int, str] | None = None) -> None:
        self._store: Store = open_store(caller, url, options)
        self.name = shown(url)
        self._caller = caller
        self._url = url
        self._options = options
        self._cache: FileCache | None = None
        self._prefix = ""
        self._head = b""
        self._opened = known is not None
        if known is not None:
            self._settle(*known)
            return
        first = self._ask(0, BLOCK if options.cache_limit > 0 else _HEAD)
        self._settle(first.size, first.tag)
        self._opened = True
        self._keep(0, first)
        if self._cache is None:
            self._head = first.data[:_HEAD]

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFile, (self._caller, self._url, self._options, (self.size, self.version))

    @property
    def stamp(self) -> FileStamp:
        return self.name, self.size, self.version

    def read_at(self, start: int, size: int) -> bytes:
        return next(self.read_ranges([(start, size)]))

    def read_ranges(self, ranges: Sequence[Span]) -> Iterator[bytes]:
        wanted = [list(self._parts(start, size)) for start, size in ranges]
        held = self._held(itertools.chain.from_iterable(wanted))
        missing = sorted(unit for unit, found in held.items() if found is None)
        runs = _runs(missing, _GAP if self._cache is None else 0)
        with _Asking(self._fetch, runs, self._options.connections) as asking:
            for parts in wanted:
                yield b"".join([_cut(part, held[part.unit] or (0, asking.result(part.unit))) for part in parts])

    def close(self) -> None:
        pass  # connections belong to the store, which other files share

    def _settle(self, size: int, version: str) -> None:
        self.size, self.version = size, version
        # What has no version cannot be known again, and what does not fit would only drive out the rest.
        if version and 2 * size <= self._options.cache_limit:
            self._cache = file_cache(self._options.folder, self._options.cache_limit)
        store = sorted((name, value) for name, value in self._options.store.items() if isinstance(value, str | int))
        text = repr((self._url, store, size, version, BLOCK))  # an address can mean another place at another endpoint
        self._prefix = hashlib.sha256(text.encode()).hexdigest()[:40]

    def _parts(self, start: int, size: int) -> Iterator[_Part]:
        if start < 0 or size < 0 or start + size > self.size:
            raise self._changed(f"it has {self.size} bytes, and {size} from {start} on are wanted")
        end = start + size
        while start < end:
            if self._cache is None:
                unit = (start, min(_TOGETHER, end - start))
            else:
                first = start // BLOCK * BLOCK
                unit = (first, min(BLOCK, self.size - first))
            part = _Part(unit, start - unit[0], min(end, sum(unit)) - start)
            yield part
            start += part.size

    def _name(self, unit: Span) -> str:
        return f"{self._prefix}-{unit[0] // BLOCK}"

    def _held(self, parts: Iterable[_Part]) -> dict[Span, tuple[int, bytes] | None]:
        """What is here of each unit, from the first wanted byte to the last, and where that begins; None if nothing."""
        hulls: dict[Span, Span] = {}
        for part in parts:
            first, end = hulls.get(part.unit, (part.start, 0))
            hulls[part.unit] = (min(first, part.start), max(end, part.start + part.size))
        return {unit: self._found(unit, *hull) for unit, hull in hulls.items()}

    def _found(self, unit: Span, first: int, end: int) -> tuple[int, bytes] | None:
        if self._cache is not None:
            data = self._cache.read(self._name(unit), first, end - first)
            return None if data is None else (first, data)
        return (0, self._head[unit[0] : sum(unit)]) if sum(unit) <= len(self._head) else None

    def _fetch(self, run: Span) -> bytes:
        piece = self._ask(*run)
        if (piece.size, piece.tag) != (self.size, self.version):
            raise self._changed(f"it had {self.size} bytes, version {self.version}; now {piece.size}, {piece.tag}")
        self._keep(run[0], piece)
        return piece.data

    def _keep(self, start: int, piece: Piece) -> None:
        if self._cache is not None:
            start, data = (start, piece.data) if piece.whole is None else (0, piece.whole)
            spans = range(0, len(data), BLOCK)
            self._cache.write({self._name((start + at, 0)): data[at : at + BLOCK] for at in spans})

    def _ask(self, start: int, size: int) -> Piece:
        """A piece as it is now, after as many tries as the options allow."""
        begun = time.monotonic()
        for attempt in itertools.count():
            try:
                piece = self._store.get(start, size)
                if len(piece.data) == min(size, max(piece.size - start, 0)):
                    return piece
                fault = StoreFault("passing", f"it sent {len(piece.data)} of {size} bytes")
            except StoreFault as error:
                if error.kind not in ("passing", "silent"):
                    raise self._final(error) from None
                fault = error
            pause = 0.0 if attempt == 0 else self._options.backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)
            left = begun + self._options.deadline - time.monotonic() - pause
            if attempt >= self._options.retries or left < 0:
                tries = f"at the last of {attempt + 1} tries for bytes {start} to {start + size}"
                raise self._unavailable(fault, tries) from None
            time.sleep(pause)
        raise AssertionError("counting has no end")

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


def _runs(spans: Iterable[Span], gap: int) -> list[Span]:
    """Spans in rising order, put together where they touch, overlap or are not far apart."""
    runs: list[Span] = []
    for start, size in spans:
        if runs and start <= sum(runs[-1]) + gap and start + size - runs[-1][0] <= _TOGETHER:
            runs[-1] = (runs[-1][0], max(sum(runs[-1]), start + size) - runs[-1][0])
        else:
            runs.append((start, size))
    return runs


class _Asking:
    """Several runs on their way at once. Nobody begins another one after the block has ended."""

    def __init__(self, fetch: Callable[[Span], bytes], runs: list[Span], connections: int) -> None:
        self._fetch = fetch
        self._runs = runs
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
            try:
                self._answers[number].set_result(self._fetch(self._runs[number]))
            except BaseException as error:
                self._answers[number].set_exception(error)
