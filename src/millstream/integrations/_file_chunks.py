"""Chunks that are read from files when they are needed, and kept up to a limit."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from millstream.files.changed import FileStamp
from millstream.files.data_files import File, FileStream, LocalFile, expect, forget, is_staging, open_files
from millstream.files.paths import Path
from millstream.integrations._table import cells
from millstream.reading.chunk_cache import ChunkCache
from millstream.text.errors import noted

Span = tuple[int, int]  # start and size
_TOGETHER = 64 << 20  # bytes of chunks that are read by one call: enough for all cores, little enough to hold


class DataFile:
    """A file that pyarrow reads, and that must stay what it is. It is open only while it is read.

    Args:
        file: The file.

    Attributes:
        file: The file.
        name: As the user wrote it.
    """

    def __init__(self, file: File) -> None:
        self.file = file
        self.name = file.name

    @property
    def stamp(self) -> FileStamp:
        """Its name, size, and time or version."""
        return self.file.stamp

    @property
    def is_remote(self) -> bool:
        """Whether it is on another machine."""
        return not isinstance(self.file, LocalFile)

    @contextlib.contextmanager
    def opened(self, *, mapped: bool = False, held: Sequence[tuple[int, bytes]] = ()) -> Iterator[Any]:
        """The file, for pyarrow; `FileChanged` if it has become another one before the end of the block.

        Args:
            mapped: Whether a file of this machine is mapped into memory. What is read of it then stays valid.
            held: Parts of a file of another machine that are in memory, each with its position.
        """
        import pyarrow as pa

        if not isinstance(self.file, LocalFile):
            yield FileStream(self.file, held)
            return
        self.file.check()
        path = str(self.file.path)
        try:
            with pa.memory_map(path) if mapped else pa.OSFile(path) as stream:
                yield stream
        finally:
            self.file.check()  # which says more than whatever pyarrow made of a file that has changed

    def check(self) -> None:
        """Refuse to continue if it has changed; for those who read it by a map that they keep."""
        if isinstance(self.file, LocalFile):
            self.file.check()


@contextlib.contextmanager
def readable(kind: str, file: DataFile) -> Iterator[None]:
    """Around what pyarrow does with a file: what it cannot make sense of is said to be damaged.

    Args:
        kind: What the file should be.
        file: The file.
    """
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, UnicodeError, OSError) as error:
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
            raise  # it says more: a file that has changed, a server that does not answer, too many open files
        raise ValueError(
            f"{file.name} is damaged, cut short, or no {kind} file: {error}. Get it again, or write it again."
        ) from None


def open_data_files(caller: str, paths: Sequence[Path]) -> list[DataFile]:
    """The files at these paths and addresses, whose footers are read next."""
    return [DataFile(file) for file in open_files(caller, paths, tail=True)]


def sample_ranges(sizes: Sequence[int]) -> list[range]:
    """The samples of each chunk.

    Example:
        >>> from millstream.integrations._file_chunks import sample_ranges
        >>> sample_ranges([2, 3])
        [range(0, 2), range(2, 5)]
    """
    return [range(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


class FileChunks:
    """The chunks of all files, one after another. A subclass reads them. A copy in another process has its own cache.

    Args:
        files: The files.
        sizes: For each file, how many rows each of its chunks has.
        decode: `decode(table)` makes of chunks what is kept of them.
        limit: Bytes to keep.
        together: Whether several chunks of a file are read by one call. Their contents must be columns.

    Attributes:
        regular: Whether all columns that were read so far are arrays.
        cache_bytes: Bytes to keep.
        is_remote: Whether some of the files are on another machine.
    """

    def __init__(
        self,
        files: Sequence[DataFile],
        sizes: Sequence[Sequence[int]],
        decode: Callable[[Any], Any],
        limit: int,
        together: bool = False,
    ) -> None:
        self.sizes = [size for of_file in sizes for size in of_file]
        self.row_bytes = 0.0
        self.regular = True
        self.is_remote = any(file.is_remote for file in files)
        self._samples = sample_ranges(self.sizes)
        self._files, self._opened = files, [file.file for file in files]
        self._places = [(file, number) for file, of_file in enumerate(sizes) for number in range(len(of_file))]
        self._decode = decode
        self.cache_bytes = self._limit = limit
        self._at_once = min(limit, _TOGETHER) if together else -1
        self._begin()

    @property
    def stamps(self) -> list[FileStamp]:
        """The stamps of the files."""
        return [file.stamp for file in self._files]

    def _begin(self) -> None:
        """What every process has for itself."""
        self._cache = ChunkCache(self._limit)
        # Whoever needs a chunk that another thread is reading waits for it. Several files are read at a time.
        self._locks = [threading.Lock() for _ in self._files]
        self._expecting = threading.Lock()
        self._expected: set[int] = set()  # chunks that are on their way from other machines
        self._is_here: Callable[[int], Any] = self._cache.__contains__

    def _read(self, file: int, numbers: list[int]) -> Any:
        """Chunks of a file, one after the other: a table or a record batch of Arrow."""
        raise NotImplementedError

    def _spans(self, file: int, number: int) -> list[Span]:
        """What has to be read of a file of another machine for a chunk; nothing if that is not known."""
        raise NotImplementedError

    def _held(self, file: int, numbers: list[int]) -> list[tuple[int, bytes]]:
        """The bytes of chunks of another machine, each part with its position."""
        data = self._files[file]
        spans = [span for number in numbers for span in self._spans(file, number)] if data.is_remote else []
        return [(start, part) for (start, _), part in zip(spans, data.file.read_ranges(spans), strict=True)]

    def _cost(self, file: int, contents: Any) -> int:
        """The bytes that it takes to keep something."""
        return contents.nbytes if hasattr(contents, "nbytes") else sum(array.nbytes for array in contents.values())

    def __getstate__(self) -> dict[str, Any]:
        own = ("_cache", "_locks", "_expecting", "_expected", "_is_here")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def contents(self, numbers: Sequence[int]) -> Iterator[tuple[list[int], Any]]:
        missing = []
        for number in numbers:  # what is there comes first: reading others may drive it out
            found = self._cache.get(number)
            if found is None:
                missing.append(number)
            else:
                yield [number], found
        if self.is_remote:
            self.fetch(missing)
        for run in self._runs(missing):
            yield from self._loaded(run)

    def expect(self, numbers: np.ndarray) -> None:
        """Prepare for rows of these chunks, which will be wanted in this order."""
        if not is_staging():
            self._cache.expect(numbers.tolist())
        self.fetch(dict.fromkeys(numbers.tolist()))

    def advance(self, rows: int) -> None:
        """Some of the rows that were expected have been read."""
        self._cache.advance(rows)

    def forget(self) -> None:
        """Expect nothing."""
        self._cache.forget_uses()
        with self._expecting:
            self._expected.clear()
        forget(self._opened)

    def fetch(self, numbers: Iterable[int]) -> None:
        """Have chunks of other machines fetched, all files at once, unless they are here or on their way."""
        files, wanted = [], []
        with self._expecting:
            for number in numbers:
                file, inside = self._places[number]
                if self._files[file].is_remote and number not in self._expected and not self._is_here(number):
                    spans = self._spans(file, inside)
                    files += [file] * len(spans)
                    wanted += spans
                    self._expected.update([number] if spans and not is_staging() else [])
        if wanted:
            expect(self._opened, np.array(files), np.array(wanted, np.int64))

    def keep_nothing(self, is_here: Callable[[int], Any]) -> None:
        """Forget what was read: the caller keeps it, and says whether a chunk is there."""
        self._limit = 0
        self._cache = ChunkCache(0)
        self._is_here = is_here

    def _runs(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Chunks of one file that are read together."""
        run, rows = [], 0
        for number in numbers:
            rows += self.sizes[number]
            if run and (rows * self.row_bytes > self._at_once or self._file_of(run[0]) != self._file_of(number)):
                yield run
                run, rows = [], self.sizes[number]
            run.append(number)
        if run:
            yield run

    def _file_of(self, number: int) -> int:
        return self._places[number][0]

    def _loaded(self, run: list[int]) -> Iterator[tuple[list[int], Any]]:
        try:
            with self._locks[self._file_of(run[0])]:
                found = {number: self._cache.get(number) for number in run}  # another thread may have read it
                ready = [([number], contents) for number, contents in found.items() if contents is not None]
                missing = [number for number in run if found[number] is None]
                if missing:
                    contents = self._contents_of(missing)
                    self._keep(missing, contents)
                    ready.append((missing, contents))
            yield from ready
        finally:  # not before its reader has it, or another one would fetch it again
            with self._expecting:
                self._expected.difference_update(run)

    def _keep(self, numbers: list[int], contents: Any) -> None:
        file, start = self._file_of(numbers[0]), 0
        nbytes = self._cost(file, contents)
        self.row_bytes = max(self.row_bytes, nbytes / sum(self.sizes[number] for number in numbers))
        if isinstance(contents, dict):
            self.regular = self.regular and all(isinstance(column, np.ndarray) for column in contents.values())
        if len(numbers) == 1:
            self._cache.put(numbers[0], contents, nbytes)
            return
        for number in numbers if self._limit else ():
            part = slice(start, start + self.sizes[number])
            own = {name: array[part].copy() for name, array in contents.items()}  # a view would keep all of them
            self._cache.put(number, own, self._cost(file, own))
            start = part.stop

    def _contents_of(self, numbers: list[int]) -> Any:
        file, rows = self._file_of(numbers[0]), sum(self.sizes[number] for number in numbers)
        name = self._files[file].name
        try:
            table = self._read(file, [self._places[number][1] for number in numbers])
            if table.num_rows != rows:
                raise ValueError(
                    f"{name} is damaged: it has {table.num_rows} rows where it announced {rows}. Get it again."
                )
            return self._decode(table)
        except Exception as error:
            first, last = self._samples[numbers[0]].start, self._samples[numbers[-1]].stop - 1
            note = f"This came from reading samples {first} to {last}, from {name}."
            raise noted(error, note)  # noqa: B904 (`from` would take away the error's own cause)


def filled(whole: np.ndarray | None, length: int, rows: Any, part: np.ndarray) -> np.ndarray:
    """An array, or a new one, with a part of it in these rows; of objects, once parts differ in shape or dtype."""
    if whole is None:
        whole = np.empty((length, *part.shape[1:]), part.dtype)
    elif whole.shape[1:] != part.shape[1:] or whole.dtype != part.dtype:
        whole, part = (array if array.dtype.hasobject else cells(array) for array in (whole, part))
    whole[rows] = part
    return whole


class InMemoryColumns:
    """All columns in their full length, for tables that fit; filled with a chunk when a row of it is wanted.

    Args:
        chunks: Where they come from.
    """

    def __init__(self, chunks: FileChunks) -> None:
        self._chunks = chunks
        self._ends = np.cumsum(chunks.sizes, dtype=np.int64)
        self._lock = threading.Lock()
        self._filled = np.zeros(len(self._ends), bool)
        self._columns: dict[str, np.ndarray] = {}
        chunks.keep_nothing(self._filled.__getitem__)

    def __getstate__(self) -> FileChunks:
        return self._chunks

    def __setstate__(self, chunks: FileChunks) -> None:
        InMemoryColumns.__init__(self, chunks)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The rows at `indices`, an array for each column."""
        if not self._filled.all():
            numbers = np.unique(np.searchsorted(self._ends, indices, side="right"))
            if not self._filled[numbers].all():
                if self._chunks.is_remote:
                    self._chunks.fetch(numbers[~self._filled[numbers]].tolist())  # before waiting for others
                with self._lock:
                    self._fill(numbers[~self._filled[numbers]].tolist())
        return {name: np.take(column, indices, axis=0) for name, column in self._columns.items()}

    def expect(self, indices: np.ndarray) -> None:
        """Prepare for these rows, which will be wanted in this order."""
        if not self._filled.all():
            numbers = np.searchsorted(self._ends, indices, side="right")
            self._chunks.fetch(dict.fromkeys(numbers[~self._filled[numbers]].tolist()))

    def _fill(self, numbers: list[int]) -> None:
        for run, contents in self._chunks.contents(numbers):
            for name, column in contents.items():
                start = 0
                for number in run:
                    end, size = self._ends[number], self._chunks.sizes[number]
                    part = column[start : start + size]
                    part = part if isinstance(part, np.ndarray) else part.take(np.arange(size))
                    whole = self._columns.get(name)
                    self._columns[name] = filled(whole, self._ends[-1], slice(end - size, end), part)
                    start += size
            self._filled[run] = True
