"""What is found in every sample of a source, as the samples of a source. It loads no JAX: worker processes measure."""

import dataclasses
import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from millstream.files import plain
from millstream.reading.contracts import IndexedSource, PyTree
from millstream.reading.host_source import SampleReader, as_host_source
from millstream.reading.samples import ObjectSpec, SampleSpec
from millstream.reading.stats import timed
from millstream.text.errors import describe_value, function_name, noted

_BOOLS = {bool, np.bool_}
_READERS = 4  # threads, if there is no executor
_AT_ONCE = 1 << 20  # bytes of samples that are read by one call
_OBJECTS = 32  # samples, if they may have any size


class Measure(Protocol):
    """What is asked of every sample: a frozen value.

    Attributes:
        what: The field or the function of the user's.
        dtype: Of what it finds.
    """

    dtype: ClassVar[np.dtype]

    @property
    def what(self) -> str | Callable[[PyTree], Any]: ...

    @property
    def name(self) -> str:
        """A word for the kind, and the user's name for what is asked."""
        ...

    def __call__(self, samples: Iterable[PyTree]) -> list[Any]:
        """What it finds in each of some samples, one after the other: numbers or bools."""
        ...


@dataclasses.dataclass(frozen=True)
class Kept:
    """Whether a user's predicate keeps a sample."""

    what: Callable[[PyTree], Any]
    caller: str
    dtype: ClassVar[np.dtype] = np.dtype(bool)

    @property
    def name(self) -> str:
        return f"kept-{_asked(self.what)}"

    def __call__(self, samples: Iterable[PyTree]) -> list[Any]:
        what = self.what
        return [kept if type(kept := what(sample)) in _BOOLS else self._bool(kept) for sample in samples]

    def _bool(self, kept: Any) -> Any:
        array = np.asarray(kept)
        if array.shape != () or array.dtype != bool:
            raise TypeError(f"{self.caller} must return True or False. Got {describe_value(kept)}.")
        return array[()]


@dataclasses.dataclass(frozen=True)
class Hashed:
    """A number that is equal for equal values of a field, or of what a function gives."""

    what: str | Callable[[PyTree], Any]
    dtype: ClassVar[np.dtype] = np.dtype(np.uint64)

    @property
    def name(self) -> str:
        return f"values-{_asked(self.what)}"

    def __call__(self, samples: Iterable[PyTree]) -> list[Any]:
        return [number_of(_value(self.what, sample)) for sample in samples]


@dataclasses.dataclass(frozen=True)
class Length:
    """The length of a field, or the number that a function gives for it."""

    what: str | Callable[[PyTree], Any]
    caller: str
    dtype: ClassVar[np.dtype] = np.dtype(np.int64)

    @property
    def name(self) -> str:
        return f"lengths-{_asked(self.what)}"

    def __call__(self, samples: Iterable[PyTree]) -> list[Any]:
        return [self._length(_value(self.what, sample)) for sample in samples]

    def _length(self, value: Any) -> int:
        if callable(self.what):
            return whole_length(self.caller, value)
        try:
            return len(value)
        except TypeError:
            raise TypeError(f"{self.caller} needs a field with a length. Got {describe_value(value)}.") from None


@dataclasses.dataclass(frozen=True)
class Count:
    """The number that a field is, or that a function gives."""

    what: str | Callable[[PyTree], Any]
    caller: str
    dtype: ClassVar[np.dtype] = np.dtype(np.int64)

    @property
    def name(self) -> str:
        return f"counts-{_asked(self.what)}"

    def __call__(self, samples: Iterable[PyTree]) -> list[Any]:
        return [whole_length(self.caller, _value(self.what, sample)) for sample in samples]


def whole_length(caller: str, value: Any) -> int:
    """A length or a count as an int; refuses what is not a whole number, or negative."""
    try:
        length = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        length = None
    if length is None or not 0 <= length < 1 << 63:
        raise ValueError(f"{caller} needs whole numbers, 0 or more. Got {describe_value(value)}.")
    return length


def _asked(what: str | Callable[[PyTree], Any]) -> str:
    return what if isinstance(what, str) else function_name(what)


def _value(what: str | Callable[[PyTree], Any], sample: Any) -> Any:
    if callable(what):
        return what(sample)
    try:
        return sample[what]
    except (KeyError, IndexError, TypeError) as error:
        raise noted(error, f"There is no field {what!r} in {describe_value(sample)}.")  # noqa: B904


def number_of(value: Any) -> int:
    """64 bits that stand for a value: integers for themselves, everything else by a hash."""
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        value = array.item() if array.ndim == 0 else array
    if isinstance(value, int):
        return value & 0xFFFF_FFFF_FFFF_FFFF
    return int.from_bytes(hashlib.blake2b(plain.encode(value, "a split"), digest_size=8).digest(), "little")


def _rows_at_once(spec: SampleSpec | ObjectSpec) -> int:
    """How many samples are read by one call: as many as do not fill the memory."""
    if isinstance(spec, ObjectSpec):
        return _OBJECTS
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
    return max(1, _AT_ONCE // max(size, 64))


class MeasuredSource(SampleReader):
    """What a measure finds in each sample of a source.

    Rows of arrays are read many at a time, and a sample is a view of what was read: that costs a tenth of reading each.

    Args:
        inner: The source.
        measure: What is asked.
        name: The caller, for errors.
    """

    calls_users = True

    def __init__(self, inner: IndexedSource, measure: Measure, name: str) -> None:
        self._inner = source = as_host_source(inner)
        self._measure = measure
        self._name = name
        self.keyed, self.ordering, self.readers = source.keyed, source.ordering, _READERS
        self.reads_samples, self.reads_together = source.reads_samples, source.reads_together
        self.sample_spec = SampleSpec(0, True, ("",), ((),), (measure.dtype,), (measure.dtype,))
        self._rows = _rows_at_once(source.sample_spec)

    def __len__(self) -> int:
        return len(self._inner)

    def read_row(self, index: int, out: Sequence[np.ndarray], row: int, key: np.ndarray | None) -> None:
        with timed("reading"):
            sample, _ = self._inner.read_sample(index, key)
        self._write([sample], [index], out[0][row : row + 1])

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> None:
        for first in range(0, len(indices), self._rows):
            part = slice(first, first + self._rows)
            with timed("reading"):
                samples, _ = self._inner.read_samples(indices[part], None if keys is None else keys[part])
            self._write(samples, indices[part], out[0][part])

    def _write(self, samples: list[PyTree], indices: Sequence[int] | np.ndarray, out: np.ndarray) -> None:
        left = iter(samples)
        try:
            with timed(self._name):
                out[...] = self._measure(left)
        except Exception as error:
            row = len(samples) - operator.length_hint(left) - 1
            raise noted(error, f"This came from {self._name} at sample {indices[row]}.")  # noqa: B904

    def shown_spec(self) -> None:
        """None: to know it, a sample would be read."""

    def __repr__(self) -> str:
        return f"{self._inner!r} -> {self._name}"
