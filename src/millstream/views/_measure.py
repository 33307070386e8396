"""Looking at every sample of a source once, on any executor: what predicates, groups, labels and lengths need."""

import collections
import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from millstream.files.plan_folder import Building, PlanFolder, Plans, find_plan, folder_of, kept_array
from millstream.plan.planned import Request, sample_keys
from millstream.plan.selection import index_dtype
from millstream.reading.contracts import IndexedSource, PyTree
from millstream.reading.executor import Backend, Executor
from millstream.reading.interrupts import interruptible
from millstream.reading.iterable import IterableSource
from millstream.reading.made_of import made_of
from millstream.reading.measured_source import Hashed, Kept, Length, Measure, MeasuredSource, number_of, whole_length
from millstream.reading.slots import Layout
from millstream.reading.threads import ThreadBackend
from millstream.reading.view import View
from millstream.text.bar_line import ProgressLine
from millstream.text.errors import describe_leaf, describe_value, function_name

# What samples have in common: a field by its name, what a function gives for each, or a value per sample.
Property = str | Callable[[PyTree], PyTree] | Sequence[object] | np.ndarray

_MOST = 1 << 14  # samples per batch: an answer from a worker costs as much as reading many small samples
_SECONDS = 0.1  # that a batch should take: it is what a killed process loses, and what a bar moves by
_TRIAL = 0.05  # seconds after which it is known how long the rest takes
_SHORT = 0.6  # seconds that are not worth an executor: worker processes take 0.3 to start, and two halve the rest
_PREFETCH = 16
_PATIENCE = 1.0  # seconds without a bar
_CHUNK = 1 << 20  # rows of a table that are made at a time
_MOST_LISTED = 1 << 34  # 128 GiB in 64-bit numbers


def require_source(caller: str, source: Any) -> None:
    """Refuse what is not an indexed source."""
    if isinstance(source, type) or not isinstance(source, IndexedSource):
        fix = "Wrap a dataset with [index] and a length: ms.DatasetSource(it)."
        if hasattr(source, "init_state") or isinstance(source, IterableSource):
            fix = "A stream has no samples to choose from. Make the view of its source, and put the stages after it."
        raise TypeError(
            f"{caller} needs a source, such as ms.ArraySampleSource(data), or a view of one. "
            f"Got {describe_value(source)}. {fix}"
        )


def as_array(caller: str, name: str, value: Any) -> np.ndarray:
    """A value as an array; refuses by name what cannot be one."""
    try:
        return np.asarray(value)
    except Exception:
        raise TypeError(f"{caller} needs {name} to be an array. Got {describe_value(value)}.") from None


def measure(
    caller: str, source: IndexedSource, asked: Measure, executor: Executor | None, folder: PlanFolder | None = None
) -> np.ndarray:
    """What is found in every sample: an array with a row per position, mapped if it is kept in a plan file.

    Args:
        caller: The caller's name, for errors.
        source: The samples.
        asked: What is asked of them.
        executor: Where they are looked at; None for threads.
        folder: Where what is found is kept; None to keep it in memory.
    """
    _require_one_epoch(caller, source)
    if folder is None:
        found, done = np.empty(len(source), asked.dtype), 0

        def put(values: np.ndarray) -> None:
            nonlocal done
            found[done : done + len(values)] = values
            done += len(values)

        _look(caller, source, asked, executor, 0, put)
        return found

    def build(building: Building) -> None:
        with building.writer(asked.dtype, len(source)) as writer:
            _look(caller, source, asked, executor, writer.done, writer.write)
            writer.finish()

    return kept_array(folder, caller, asked.name, measured_of(caller, folder, source, asked), build)[0]


def kept_positions(
    caller: str,
    source: IndexedSource,
    fn: Callable[[PyTree], Any],
    executor: Executor | None,
    folder: PlanFolder | None,
) -> tuple[np.ndarray, str | None]:
    """The positions of the samples that a predicate keeps, and the hash of this table if it is in a plan file."""
    asked, length = Kept(fn, caller), len(source)
    _require_one_epoch(caller, source)

    def require_some(count: int) -> None:
        if not count:
            raise ValueError(f"{caller} kept none of the {length:,} samples. A view needs at least one.")

    if folder is None:
        kept = np.flatnonzero(measure(caller, source, asked, executor))
        require_some(len(kept))
        return kept, None

    def build(building: Building) -> None:
        with building.values(asked.dtype, length) as writer:
            _look(caller, source, asked, executor, writer.done, writer.write)
            kept = writer.array()
            count = sum(int(np.count_nonzero(kept[first : first + _CHUNK])) for first in range(0, length, _CHUNK))
            require_some(count)
            building.store(index_dtype(length), count, _positions(kept))

    return kept_array(folder, caller, asked.name, measured_of(caller, folder, source, asked), build)


def _positions(kept: np.ndarray) -> Iterator[np.ndarray]:
    for first in range(0, len(kept), _CHUNK):
        yield np.flatnonzero(kept[first : first + _CHUNK]) + first


def measured_of(caller: str, folder: PlanFolder, source: IndexedSource, asked: Measure) -> bytes:
    """The hash of what is found in samples is made from."""
    return made_of(caller, folder, source, type(asked).__name__, asked.what)


def kept_tables(
    caller: str,
    source: IndexedSource,
    folder: PlanFolder,
    arguments: Sequence[Any],
    names: Sequence[str],
    make: Callable[[], Sequence[np.ndarray]],
) -> list[tuple[np.ndarray, str]]:
    """The tables of views in plan files, mapped, each with its SHA-256.

    Args:
        caller: The caller's name, for errors.
        source: The samples.
        folder: Where the tables are kept.
        arguments: What they depend on besides. A field or a function among them makes them depend on what samples hold.
        names: A name for each table.
        make: Makes all of them.
    """
    reads = any(isinstance(argument, str) or callable(argument) for argument in arguments)
    of = made_of(caller, folder, source, caller, *arguments, reads=reads)
    keys = [
        (f"{caller}-{name}", hashlib.sha256(of + f"{number} {name}".encode()).digest())
        for number, name in enumerate(names)
    ]
    found = [find_plan(folder, *key) for key in keys]
    if all(one is not None for one in found):
        return [one for one in found if one is not None]
    # Before any lock of a table is held: who waits for a table looks at its file to see whether its maker gets on.
    tables = make()

    def stored(table: np.ndarray) -> Callable[[Building], None]:
        return lambda building: building.store(table.dtype, len(table), [table])

    return [kept_array(folder, caller, *key, stored(table)) for key, table in zip(keys, tables, strict=True)]


def require_listable(caller: str, source: IndexedSource) -> None:
    """Refuse more samples than a table can have a row for."""
    if len(source) > _MOST_LISTED:
        raise ValueError(
            f"{caller} makes a table with a row for every sample, at most {_MOST_LISTED:,}. Got a source of "
            f"{len(source):,}. Apply it to a part, as in source[:1_000_000_000], or take slices of the source instead."
        )


def _require_one_epoch(caller: str, source: IndexedSource) -> None:
    require_listable(caller, source)
    if isinstance(source, View) and source.selection.is_keyed:
        raise TypeError(f"{caller}: {source!r} differs from epoch to epoch. Apply {caller} to its source instead.")


def _look(
    caller: str,
    source: IndexedSource,
    asked: Measure,
    executor: Executor | None,
    first: int,
    put: Callable[[np.ndarray], None],
) -> None:
    """Look at all samples from `first` on, in order, and hand over what is found."""
    base = source.source if isinstance(source, View) else source
    reader, length = MeasuredSource(base, asked, caller), len(source)
    progress = _Progress(caller, first, length)
    try:
        done, seconds = _try_here(source, reader, first, put)
        if done == length:
            return
        workers = getattr(executor, "workers", reader.readers)
        size = max(1, min(_MOST, int(_SECONDS / seconds), -(-(length - done) // (4 * workers))))
        backend, ahead = _open(reader, asked, executor, size)
        jobs: collections.deque[tuple[Any, int]] = collections.deque()
        with interruptible() as check_interrupt, contextlib.closing(backend):
            while done < length or jobs:
                while done < length and len(jobs) <= ahead:
                    rows = min(size, length - done)
                    jobs.append((backend.start(_request(source, reader, done, rows, size)), rows))
                    done += rows
                job, rows = jobs.popleft()
                put(backend.collect(job).rows[0][:rows])
                check_interrupt()
                progress.show(done - sum(rows for _, rows in jobs))
    finally:
        progress.close()


def _try_here(
    source: IndexedSource, reader: MeasuredSource, first: int, put: Callable[[np.ndarray], None]
) -> tuple[int, float]:
    """Look at a few samples in this thread, or at all: up to which, and how many seconds each of the last ones took."""
    done, rows, begun, seconds = first, 1, time.perf_counter(), 0.0
    while done < len(source) and (time.perf_counter() - begun < _TRIAL or seconds * (len(source) - done) < _SHORT):
        rows = min(rows, len(source) - done)
        before, found = time.perf_counter(), np.empty(rows, reader.sample_spec.dtypes[0])
        asked = _request(source, reader, done, rows, rows)
        reader.read_rows(asked.indices, [found], asked.keys)
        put(found)
        done, seconds = done + rows, (time.perf_counter() - before) / rows
        rows = min(2 * rows, _MOST)
    return done, max(seconds, 1e-9)


def _open(reader: MeasuredSource, asked: Measure, executor: Executor | None, size: int) -> tuple[Backend[Any], int]:
    layout = Layout((size,), ((),), (asked.dtype,))
    if executor is None:
        return ThreadBackend(reader, layout, reader.readers, _PREFETCH), _PREFETCH
    ahead = executor.ahead(_PREFETCH)
    return executor.open(reader, layout, ahead, False), ahead


def _request(source: IndexedSource, reader: MeasuredSource, first: int, rows: int, size: int) -> Request:
    """What to read for `rows` positions, in a batch of `size`."""
    positions = np.minimum(np.arange(first, first + size), first + rows - 1)
    indices = source.locate(positions) if isinstance(source, View) else positions
    epochs = np.zeros(size, np.uint32)
    keys = sample_keys(np.zeros(2, np.uint32), epochs, positions.astype(np.uint64)) if reader.keyed else None
    return Request(first, indices, np.arange(size) < rows, keys)


class _Progress:
    """A line that says how far the looking is, if it takes long and someone can see it."""

    def __init__(self, caller: str, first: int, length: int) -> None:
        self._line = ProgressLine(caller)
        self._first, self._length = first, length
        self._begun = time.monotonic()
        if first:
            self._line.say(f"continues at sample {first:,} of {length:,}")

    def show(self, done: int) -> None:
        seconds = time.monotonic() - self._begun
        if seconds > _PATIENCE:
            rate = (done - self._first) / seconds
            continued = f", continued at {self._first:,}" if self._first else ""
            self._line.show(f"{done:,} of {self._length:,} samples, {rate:,.0f} per second{continued}")

    def close(self) -> None:
        self._line.close()


def values_of(
    caller: str,
    name: str,
    source: IndexedSource,
    what: Any,
    executor: Executor | None,
    folder: PlanFolder | None = None,
) -> np.ndarray:
    """A number per sample that is equal for equal values of what is asked for, as uint64.

    Args:
        caller: The caller's name, for errors.
        name: The name of the argument.
        source: The samples.
        what: The name of a field, a function of a sample, or an array with a value per sample.
        executor: Where samples are looked at, if they have to be.
        folder: Where what is found is kept, if samples have to be looked at; None for nowhere.
    """
    if isinstance(what, str) or callable(what):
        field = None if callable(what) else _column(source, what)
        if field is None:
            return measure(f"{caller}({name}={_shown(what)})", source, Hashed(what), executor, folder)
        what = field
    values = _one_each(caller, name, source, what)
    if values.dtype.kind in "bi":
        return values.astype(np.int64).view(np.uint64)
    if values.dtype.kind == "u":
        return values.astype(np.uint64)
    return np.array([number_of(value) for value in values.tolist()], np.uint64)


def lengths_of(
    caller: str, name: str, source: IndexedSource, by: Any, executor: Executor | None, plans: Plans = None
) -> np.ndarray:
    """The length of every sample, as int64: that of a field, or what else is asked for.

    A source that has `lengths`, an array or an array for each of its fields, knows them without reading.

    Args:
        caller: The caller's name, for errors.
        name: The name of the argument.
        source: The samples.
        by: The name of a field that has a length, a function from a sample to its length, or an array of lengths.
        executor: Where samples are looked at, if they have to be.
        plans: Where what is found is kept, if samples have to be looked at.
    """
    folder = folder_of(caller, plans)
    asked = f"{caller}({name}={_shown(by)})" if isinstance(by, str) or callable(by) else caller
    _require_one_epoch(asked, source)
    if isinstance(by, str):
        base = source.source if isinstance(source, View) else source
        known = getattr(base, "lengths", None)
        known = known.get(by) if isinstance(known, Mapping) else known
        if known is not None:
            known = _one_each(type(base).__name__, "lengths", base, known)
            by = known[source.locate(np.arange(len(source)))] if isinstance(source, View) else known
    if isinstance(by, str) or callable(by):
        return measure(asked, source, Length(by, asked), executor, folder)
    lengths = _one_each(caller, name, source, by)
    if lengths.dtype.kind not in "iu":
        raise TypeError(f"{caller} needs {name} to be whole numbers. Got {describe_leaf(lengths)}.")
    for extreme in (lengths.min(), lengths.max()):
        whole_length(f"{caller}({name})", extreme)
    return lengths.astype(np.int64, copy=False)


def _one_each(caller: str, name: str, source: IndexedSource, given: Any) -> np.ndarray:
    values = as_array(caller, name, given)
    if values.ndim != 1 or len(values) != len(source):
        raise ValueError(
            f"{caller} needs {name} to be the name of a field, a function of a sample, or an array with one value for "
            f"each of the {len(source):,} samples. Got {describe_leaf(values)}."
        )
    return values


def _column(source: IndexedSource, field: str) -> np.ndarray | None:
    """A field of samples that are rows of arrays in memory; None if they have to be read."""
    base = source.source if isinstance(source, View) else source
    data = getattr(base, "data", None) if base.arrays is not None else None
    if not isinstance(data, dict) or field not in data:
        return None
    column = np.asarray(data[field])
    if column.ndim != 1:
        return None
    return column[source.locate(np.arange(len(source)))] if isinstance(source, View) else column


def _shown(what: Any) -> str:
    return repr(what) if isinstance(what, str) else function_name(what)
