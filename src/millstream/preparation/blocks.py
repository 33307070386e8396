"""The blocks of shards as columns: mapped, or read from another machine, by what the index says of them."""

import contextlib
import functools
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from millstream.files.arrow_memory import array_of, numbers_of
from millstream.files.changed import file_unreadable
from millstream.files.data_files import File, FileStream, LocalFile, at_once, expect, forget, is_staging, open_file
from millstream.preparation.index import FileEntry, Index, Shard, joined
from millstream.preparation.sample_form import Leaf
from millstream.preparation.shard_files import arrow_schema, npy_header
from millstream.reading.chunk_cache import ChunkCache
from millstream.reading.host_source import FoundSpans, Spans
from millstream.sources.file_rows import RangedRows, map_rows
from millstream.sources.npy import decode_npy, map_numpy_file
from millstream.text.errors import noted

_CALLER = "PreparedSource"
_MAPPED = 256  # files: NumPy's maps need a descriptor as long as they are there, and 1,024 is a usual limit
_ENTRY = 1 << 14  # bytes of a block that is mapped, besides its data
_DIVIDED = ("npy", "megatron")  # kinds whose samples are read without the rest of their block
_EXPECTED = 512  # samples whose first leaf is asked for before the next one


class ShardFiles:
    """The files of an index: those of this machine are opened at once, others when they are first needed.

    Args:
        folder: Where they are: a path or an address.
        entries: What the index says of them.

    Attributes:
        is_remote: Whether they are on another machine.
    """

    def __init__(self, folder: str, entries: Sequence[FileEntry]) -> None:
        self._folder, self._entries = folder, {entry.name: entry for entry in entries}
        self._files: dict[str, File] = {}
        self.is_remote = "://" in folder
        if not self.is_remote:
            for entry in entries:
                self.open(entry.name)

    @property
    def opened(self) -> list[File]:
        """Those that were needed so far."""
        return list(self._files.values())

    def open(self, name: str) -> File:
        """A file, which must have the size that the index says."""
        if name not in self._files:
            entry, path = self._entries[name], joined(self._folder, name)
            try:
                file = open_file(_CALLER, path)
            except FileNotFoundError as error:
                note = f"{joined(self._folder, 'index.json')} names it. Copy it there, or prepare the data again."
                raise noted(error, note)  # noqa: B904
            if file.size != entry.bytes:
                raise ValueError(
                    f"{_CALLER}: {file.name} has {file.size:,} bytes, and {entry.bytes:,} by its index. It is cut "
                    "short or of a different preparation; get it again, or prepare the data again."
                )
            self._files[name] = file
        return self._files[name]

    def open_all(self, names: Sequence[str]) -> dict[str, File]:
        """Files, many at a time. Those that cannot be opened are left out: who reads them says why."""

        def tried(name: str) -> File | None:
            with contextlib.suppress(OSError, ValueError):
                return self.open(name)
            return None

        found = zip(names, at_once(tried, names), strict=True)
        return {name: file for name, file in found if file is not None}


class RaggedColumn:
    """Arrays of any length or shape: their numbers in a row, and where each ends.

    Args:
        values: The numbers.
        ends: Where each array ends, after a zero.
        shapes: The shape of each; None for arrays with one axis.
    """

    def __init__(self, values: np.ndarray | RangedRows, ends: np.ndarray, shapes: np.ndarray | None = None) -> None:
        self._values, self._ends, self._shapes = values, ends, shapes

    def take(self, indices: np.ndarray) -> list[Any]:
        """The arrays at `indices`; those of a mapped file are not copied."""
        begins, ends, values = self._ends[indices].tolist(), self._ends[indices + 1].tolist(), self._values
        if isinstance(values, np.ndarray):
            found = [values[begin:end] for begin, end in zip(begins, ends, strict=True)]
        else:
            size = values.stored.itemsize
            ranges = [
                (values.offset + begin * size, (end - begin) * size) for begin, end in zip(begins, ends, strict=True)
            ]
            found = [np.frombuffer(data, values.stored) for data in values.file.read_ranges(ranges)]
        if self._shapes is None:
            return found
        return [array.reshape(shape) for array, shape in zip(found, self._shapes[indices].tolist(), strict=True)]

    def find_spans(self, indices: np.ndarray) -> Spans | None:
        """Where the arrays at `indices` lie, if they have one axis and are in memory or mapped."""
        if self._shapes is not None or not isinstance(self._values, np.ndarray):
            return None
        return self._values, self._ends[indices], self._ends[indices + 1]


class _Rows:
    """Arrays of one shape, or numbers."""

    def __init__(self, rows: np.ndarray | RangedRows) -> None:
        self._rows = rows

    def take(self, indices: np.ndarray) -> Any:
        """The rows at `indices`."""
        if isinstance(self._rows, np.ndarray):
            return self._rows[indices]
        out = np.empty((len(indices), *self._rows.shape[1:]), self._rows.dtype)
        self._rows.take(_CALLER, indices, out)
        return out


class _Cells:
    """Text, bytes, and lists of them."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def take(self, indices: np.ndarray) -> list[Any]:
        """The values at `indices`."""
        if len(indices) == 1:
            return [self._column[int(indices[0])].as_py()]
        return self._column.take(array_of(indices)).to_pylist()


class _Records:
    """The records of an ArrayRecord file."""

    def __init__(self, path: pathlib.Path) -> None:
        from array_record.python.array_record_module import ArrayRecordReader

        self._path = path
        self._reader = ArrayRecordReader(str(path), "max_parallelism:0,readahead_buffer_size:0")

    def take(self, indices: np.ndarray) -> list[bytes]:
        """The records at `indices`."""
        try:
            return self._reader.read(indices.tolist())
        except (RuntimeError, IndexError) as error:
            raise file_unreadable(_CALLER, str(self._path), indices, error) from None


Column = RaggedColumn | _Rows | _Cells | _Records


class Blocks:
    """The blocks of all shards, one after the other. A copy in another process opens the files again.

    Args:
        folder: Where the shards are.
        index: What is in them.
        cache_bytes: How much to keep of what had to be unpacked or fetched.

    Attributes:
        sizes: How many samples each block has.
        divided: Whether samples are read without the rest of their block.
        looks_ahead: Whether they are read from another machine, by parts of files that are known before.
    """

    def __init__(self, folder: str, index: Index, cache_bytes: int) -> None:
        self._index, self._limit = index, cache_bytes
        self.files = ShardFiles(folder, index.files)
        shards = list(enumerate(index.shards))
        self.sizes = np.array([rows for _, shard in shards for rows in shard.blocks], np.int64)
        self._places = [(number, place) for number, shard in shards for place in range(len(shard.blocks))]
        self._ends = np.cumsum(self.sizes)
        self.divided = index.kind in _DIVIDED
        known = self.divided or all(shard.ends for shard in index.shards)
        self.looks_ahead = self.files.is_remote and known
        self._begin()

    def _begin(self) -> None:
        self._cache, self._maps = ChunkCache(self._limit), ChunkCache(_MAPPED)
        # Whoever needs a block that another thread is reading waits for it. Several shards are read at a time.
        self._locks = [threading.Lock() for _ in self._index.shards]
        self._expecting = threading.Lock()
        self._expected: set[int | str] = set()  # blocks, and files whose footers, are on their way from another machine

    def __getstate__(self) -> dict[str, Any]:
        own = ("_cache", "_maps", "_locks", "_expecting", "_expected", "_token_places")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def __len__(self) -> int:
        return int(self._ends[-1])

    @functools.cached_property
    def lengths(self) -> dict[str, np.ndarray]:
        """How long every sample is, by the name of each leaf that has a length."""
        index, found = self._index, {}
        for leaf, first, same in zip(index.form.leaves, index.first, index.fixed, strict=True):
            if leaf.name in index.lengths:
                found[leaf.name] = self._stored_lengths(index.lengths[leaf.name].name)
            elif same and leaf.axes:
                found[leaf.name] = np.broadcast_to(np.int64(first[0]), len(self))
        return found

    def _stored_lengths(self, name: str) -> np.ndarray:
        file = self.files.open(name)
        if isinstance(file, LocalFile):
            found = map_numpy_file(file.path)
        else:
            found = decode_npy(file.name, file.read_at(0, file.size))
        if not isinstance(found, np.ndarray) or found.shape != (len(self),) or found.dtype.kind not in "iu":
            raise _damaged(file, f"it is not a length for each of {len(self):,} samples")
        return found

    def pieces(self, indices: np.ndarray) -> Iterator[tuple[np.ndarray, list[Any]]]:
        """What each block has of some samples: which of them, and their values for each leaf."""
        return self._of_blocks(indices, lambda columns, inside: [column.take(inside) for column in columns])

    def find_spans(self, leaves: Sequence[int], indices: np.ndarray) -> Iterator[FoundSpans | None]:
        """Find where some leaves lie, block by block; see `HostSource.find_spans`."""

        def spans_of(columns: list[Column], inside: np.ndarray) -> list[Spans]:
            chosen = [column for column in (columns[leaf] for leaf in leaves) if isinstance(column, RaggedColumn)]
            return [span for span in (column.find_spans(inside) for column in chosen) if span is not None]

        for rows, spans in self._of_blocks(indices, spans_of):
            yield (rows, spans) if len(spans) == len(leaves) else None

    def expect(self, indices: np.ndarray | None, bounds: np.ndarray | None = None) -> None:
        """Prepare for these samples, which will be read in this order; None for no more.

        Args:
            indices: Which samples.
            bounds: The first and the last sample around each that are read soon with all between them.
        """
        if indices is None:
            self._cache.forget_uses()
            with self._expecting:
                self._expected.clear()
            return forget(self.files.opened)
        numbers = np.searchsorted(self._ends, indices, side="right")
        names = {one: self._names(one) for one in dict.fromkeys(numbers.tolist())}
        files = self.files.open_all(list(dict.fromkeys(name for own in names.values() for name in own)))
        names = {one: own for one, own in names.items() if all(name in files for name in own)}
        places = {name: place for place, name in enumerate(files)}
        opened = list(files.values())
        if not self.divided:
            parts = [(places[name], *span) for name, span in self._new_parts(numbers.tolist(), names)]
            which, *spans = np.array(parts, np.int64).reshape(-1, 3).T
            return expect(opened, which, np.stack(spans, axis=1))
        for some in np.array_split(np.flatnonzero(np.isin(numbers, list(names))), max(1, len(indices) // _EXPECTED)):
            for leaf in range(len(self._index.form.leaves)):
                which = np.array([places[names[one][leaf]] for one in numbers[some].tolist()], np.int64)
                spans = self._sample_spans(leaf, numbers[some], indices[some], indices[some])
                around = None if bounds is None else self._sample_spans(leaf, numbers[some], *bounds[some].T)
                expect(opened, which, spans, around)

    def _names(self, number: int) -> list[str]:
        """The files that a block is read from: Megatron's own index is for others."""
        shard = self._index.shards[self._places[number][0]]
        return [entry.name for entry in shard.files[: len(self._index.form.leaves)]]

    def _new_parts(self, numbers: list[int], names: dict[int, list[str]]) -> list[tuple[str, tuple[int, int]]]:
        """Note the blocks that samples will be read from; what has to be fetched for them, and of which file."""
        parts = []
        with self._expecting:
            told: set[int | str] = set() if is_staging() else self._expected
            for one in names:
                [name], shard = names[one], self._index.shards[self._places[one][0]]
                if one in self._cache or one in told:
                    continue
                if self._index.kind == "parquet" and name not in self._maps and name not in told:
                    parts.append((name, _footer_span(shard)))
                    told.add(name)
                parts.append((name, self._span(one)))
                told.add(one)
            if not is_staging():
                self._cache.expect(numbers)
        return parts

    def _sample_spans(self, leaf: int, numbers: np.ndarray, firsts: np.ndarray, lasts: np.ndarray) -> np.ndarray:
        """Start and size, in the files of a leaf, of neighbours in blocks, without those in others, (spans, 2)."""
        begins, ends = self._ends[numbers] - self.sizes[numbers], self._ends[numbers]
        firsts, stops, own = np.maximum(firsts, begins), np.minimum(lasts + 1, ends), self._index.form.leaves[leaf]
        if self._index.kind == "npy":
            size = int(np.prod(own.shape or (), dtype=np.int64)) * own.dtype.itemsize
            return np.stack([len(npy_header(own, 0)) + (firsts - begins) * size, (stops - firsts) * size], axis=1)
        before, first, stop = (self._token_places[documents] for documents in (begins, firsts, stops))
        return np.stack([first - before, stop - first], axis=1) * own.dtype.itemsize

    @functools.cached_property
    def _token_places(self) -> np.ndarray:
        """How many tokens come before each document, and how many there are in all."""
        [lengths] = self.lengths.values()
        return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    def _span(self, number: int) -> tuple[int, int]:
        """Where a record batch of Arrow or a row group of Parquet begins in its file, and its bytes."""
        shard_number, place = self._places[number]
        shard = self._index.shards[shard_number]
        start = shard.start if place == 0 else shard.ends[place - 1]
        return start, shard.ends[place] - start

    def _of_blocks(
        self, indices: np.ndarray, look: Callable[[list[Column], np.ndarray], list[Any]]
    ) -> Iterator[tuple[np.ndarray, list[Any]]]:
        """What is found in the columns of each block, with which of the samples are in it."""
        numbers = np.searchsorted(self._ends, indices, side="right")
        for number in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == number)
            inside = indices[rows] - (self._ends[number] - self.sizes[number])
            files = [self.files.open(name) for name in self._names(number)]
            _check(files)
            try:
                values = look(self._columns(number, files), inside)
            except Exception as error:
                _check(files)  # which says more
                raise noted(error, f"This came from reading sample {indices[rows[0]]}, from {files[0].name}.")  # noqa: B904
            yield rows, values
            _check(files)  # a map shows what the file holds now
        self._cache.advance(len(indices))

    def _columns(self, number: int, files: Sequence[File]) -> list[Column]:
        found = self._cache.get(number)
        if found is not None:
            return found
        try:
            with self._locks[self._places[number][0]]:
                found = self._cache.get(number)  # another thread may have read it
                if found is None:
                    found, nbytes = self._open(number, files)
                    self._cache.put(number, found, max(nbytes, _ENTRY))
                return found
        finally:
            with self._expecting:
                self._expected.discard(number)

    def _open(self, number: int, files: Sequence[File]) -> tuple[list[Column], int]:
        """The columns of a block, and the bytes of memory that they take."""
        leaves, rows = self._index.form.leaves, int(self.sizes[number])
        match self._index.kind:
            case "npy":
                return [self._npy(file, leaf, rows) for file, leaf in zip(files, leaves, strict=True)], 0
            case "megatron":
                return [self._tokens(files[0], leaves[0], number)], 0
            case "array_record":
                return [_Records(_local(files[0]))], 0
            case "arrow":
                batch, nbytes = self._batch(files[0], *self._span(number))
            case _:
                batch, nbytes = self._row_group(files[0], number)
        if batch.num_rows != rows:
            raise _damaged(files[0], f"a block has {batch.num_rows} rows where its index says {rows}")
        return [_column(leaf, batch.column(at)) for at, leaf in enumerate(leaves)], nbytes

    def _batch(self, file: File, start: int, size: int) -> tuple[Any, int]:
        import pyarrow as pa

        with _sound(file):
            if isinstance(file, LocalFile):
                whole = self._maps.get(file.name)
                if whole is None:
                    with pa.memory_map(str(file.path)) as stream:  # the map lives as long as somebody uses it
                        whole = stream.read_buffer()
                    self._maps.put(file.name, whole, 1)
                data, nbytes = whole.slice(start, size), 0
            else:
                data, nbytes = pa.py_buffer(file.read_at(start, size)), size
            batch = pa.ipc.read_record_batch(data, arrow_schema(self._index.form.leaves))
            batch.validate(full=True)  # places in a damaged file could lead anywhere
            return batch, nbytes

    def _row_group(self, file: File, number: int) -> tuple[Any, int]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        shard_number, place = self._places[number]
        with _sound(file):
            footer, held = None, []
            if not isinstance(file, LocalFile) and self.looks_ahead:
                footer = self._footer(file, self._index.shards[shard_number])
                start, size = self._span(number)
                held = [(start, file.read_at(start, size))]
            with pa.OSFile(str(file.path)) if isinstance(file, LocalFile) else FileStream(file, held) as stream:
                reader = pq.ParquetFile(stream, metadata=footer, page_checksum_verification=True)
                table = reader.read_row_group(place, use_threads=False)
            batch = table.combine_chunks().to_batches()[0]
            batch.validate(full=True)
            return batch, batch.nbytes

    def _footer(self, file: File, shard: Shard) -> Any:
        """What a Parquet file says of itself, behind its last row group."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        name = shard.files[0].name
        footer = self._maps.get(name)
        if footer is None:
            footer = pq.read_metadata(pa.BufferReader(b"PAR1" + file.read_at(*_footer_span(shard))))
            self._maps.put(name, footer, 1)
            with self._expecting:
                self._expected.discard(name)
        return footer

    def _npy(self, file: File, leaf: Leaf, rows: int) -> _Rows:
        whole = self._maps.get(file.name)
        if whole is None:
            whole = map_rows(file, leaf.dtype, (rows, *(leaf.shape or ())), len(npy_header(leaf, 0)))
            self._maps.put(file.name, whole, 1)
        return _Rows(whole)

    def _tokens(self, file: File, leaf: Leaf, number: int) -> RaggedColumn:
        last = int(self._ends[number])
        places = self._token_places[last - int(self.sizes[number]) : last + 1]
        ends = places - places[0]
        if int(ends[-1]) * leaf.dtype.itemsize != file.size:
            raise _damaged(file, f"its documents have {ends[-1]} tokens, and it has {file.size} bytes")
        if not file.size:
            return RaggedColumn(np.zeros(0, leaf.dtype), ends)
        return RaggedColumn(map_rows(file, leaf.dtype, (int(ends[-1]),), 0), ends)


def _footer_span(shard: Shard) -> tuple[int, int]:
    """Where the footer of a Parquet file begins, and its bytes."""
    return shard.ends[-1], shard.files[0].bytes - shard.ends[-1]


def _check(files: Sequence[File]) -> None:
    for file in files:
        if isinstance(file, LocalFile):
            file.check()


@contextlib.contextmanager
def _sound(file: File) -> Iterator[None]:
    """Around what pyarrow does with a file: what it cannot make sense of is said to be damaged."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, UnicodeError, IndexError, OSError) as error:
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
            raise  # it says more: a file that has changed, a server that does not answer, too many open files
        raise _damaged(file, str(error)) from None


def _damaged(file: File, found: str) -> ValueError:
    return ValueError(
        f"{_CALLER} cannot read {file.name}: {found}. The file is damaged; get it again, or prepare the data again."
    )


def _local(file: File) -> pathlib.Path:
    if not isinstance(file, LocalFile):
        raise ValueError(f"{_CALLER} reads ArrayRecord files of this machine alone. Copy {file.name} here.")
    return file.path


def _column(leaf: Leaf, array: Any) -> Column:
    """A column of Arrow."""
    if not leaf.is_numbers:
        return _Cells(array)
    if not leaf.axes:
        return _Rows(numbers_of(array))
    lists = array if leaf.axes == 1 else array.field("data")
    values, ends = numbers_of(lists.values), numbers_of(lists.offsets)
    if leaf.axes == 1:
        return RaggedColumn(values, ends)
    shapes = array.field("shape")
    return RaggedColumn(values, ends, numbers_of(shapes.values).reshape(-1, leaf.axes))
