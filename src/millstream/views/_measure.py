"""Looking at every sample of a source once, on any executor: what predicates, groups and labels need."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from millstream.files import plain
from millstream.pipeline.pipeline import Pipeline, as_stream
from millstream.plan.plan import Batching
from millstream.reading.contracts import IndexedSource, PyTree
from millstream.reading.derived_sources import MappedSource
from millstream.reading.executor import Executor
from millstream.reading.reader import reader_of
from millstream.reading.samples import TRIED
from millstream.reading.stats import LoaderStats
from millstream.reading.view import View
from millstream.text.errors import describe_leaf, describe_value, function_name, noted

# What samples have in common: a field by its name, what a function gives for each, or a value per sample.
Property = str | Callable[[PyTree], PyTree] | Sequence[object] | np.ndarray

_AT_ONCE = 4096  # samples per batch: an answer from a worker costs as much as reading many small samples
_READERS = 4


def require_source(caller: str, source: Any) -> None:
    """Refuse what is not an indexed source."""
    if isinstance(source, type) or not isinstance(source, IndexedSource):
        fix = "Wrap a dataset with [index] and a length: ms.DatasetSource(it)."
        if hasattr(source, "init_state"):
            fix = "A stream has no samples to choose from. Make the view of its source, and put the stages after it."
        raise TypeError(
            f"{caller} needs a source, such as ms.ArraySampleSource(data), or a view of one. "
            f"Got {describe_value(source)}. {fix}"
        )


def require_executor(caller: str, executor: Any) -> None:
    """Refuse what does not read samples."""
    if isinstance(executor, type) or not isinstance(executor, Executor | None):
        raise TypeError(
            f"{caller} needs executor to be one such as ms.Threads(4) or ms.Processes(4). "
            f"Got {describe_value(executor)}."
        )


def as_array(caller: str, name: str, value: Any) -> np.ndarray:
    """A value as an array; refuses by name what cannot be one."""
    try:
        return np.asarray(value)
    except Exception:
        raise TypeError(f"{caller} needs {name} to be an array. Got {describe_value(value)}.") from None


def measure(caller: str, source: IndexedSource, fn: Callable[[Any], Any], executor: Executor | None) -> np.ndarray:
    """What a function gives for every sample: an array with a row per position.

    Args:
        caller: The caller's name, for errors.
        source: The samples.
        fn: `fn(sample)`: a bool, or numbers of the same shape and dtype for every sample.
        executor: Where it runs; None for threads.
    """
    inner = as_stream(source)
    assert isinstance(inner, Pipeline) and inner.source is not None
    if inner.plan.selection is not None and inner.plan.selection.is_keyed:
        raise TypeError(f"{caller}: {source!r} differs from epoch to epoch. Apply {caller} to its source instead.")
    size = min(_AT_ONCE, len(source))
    plan = dataclasses.replace(inner.plan, ordering="sequential", batchings=(Batching(size, "pad", len(source)),))
    mapped = MappedSource(inner.source, fn, _READERS, caller, False, inner.plan.first_indices(TRIED))
    pipeline = dataclasses.replace(inner.read_through(mapped), plan=plan).read_by(executor=executor)
    assert pipeline.host is not None
    reading = reader_of(pipeline.host, plan).read_ahead(np.zeros(2, np.uint32), LoaderStats(), plan.steps_per_epoch)
    found = None
    try:
        for step in range(plan.steps_per_epoch):
            rows = reading.rows(step).rows[0]
            if found is None:
                found = np.empty((len(source), *rows.shape[1:]), rows.dtype)
            first = step * size
            found[first : first + size] = rows[: len(source) - first]
    finally:
        reading.close()
    assert found is not None
    return found


def values_of(caller: str, name: str, source: IndexedSource, what: Any, executor: Executor | None) -> np.ndarray:
    """A number per sample that is equal for equal values of what is asked for, as uint64.

    Args:
        caller: The caller's name, for errors.
        name: The name of the argument.
        source: The samples.
        what: The name of a field, a function of a sample, or an array with a value per sample.
        executor: Where samples are looked at, if they have to be.
    """
    if isinstance(what, str) or callable(what):
        field = None if callable(what) else _column(source, what)
        if field is None:
            hashed = measure(f"{caller}({name}={_shown(what)})", source, _Hashed(what), executor)
            return hashed.view(np.uint64)[:, 0]
        what = field
    values = as_array(caller, name, what)
    if values.ndim != 1 or len(values) != len(source):
        raise ValueError(
            f"{caller} needs {name} to be the name of a field, a function of a sample, or an array with one value for "
            f"each of the {len(source):,} samples. Got {describe_leaf(values)}."
        )
    if values.dtype.kind in "bi":
        return values.astype(np.int64).view(np.uint64)
    if values.dtype.kind == "u":
        return values.astype(np.uint64)
    return np.array([_number(value) for value in values.tolist()], np.uint64)


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


@dataclasses.dataclass(frozen=True)
class _Hashed:
    """The hash of a field of a sample, or of what a function gives for it, as two 32-bit words."""

    what: str | Callable[[Any], Any]

    def __call__(self, sample: Any) -> np.ndarray:
        if callable(self.what):
            value = self.what(sample)
        else:
            try:
                value = sample[self.what]
            except (KeyError, IndexError, TypeError) as error:
                raise noted(error, f"There is no field {self.what!r} in {describe_value(sample)}.")  # noqa: B904
        return np.array([_number(value)], "<u8").view("<u4")


def _number(value: Any) -> int:
    """64 bits that stand for a value: integers for themselves, everything else by a hash."""
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        value = array.item() if array.ndim == 0 else array
    if isinstance(value, int):
        return value & 0xFFFF_FFFF_FFFF_FFFF
    return int.from_bytes(hashlib.blake2b(plain.encode(value, "a split"), digest_size=8).digest(), "little")
