"""Making a shard: a pure function of a range of the input. It loads no JAX: worker processes make shards."""

import dataclasses
import hashlib
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from millstream.files import plain
from millstream.files.atomic import written
from millstream.plan.planned import sample_keys
from millstream.preparation.sample_form import SampleForm
from millstream.preparation.shard_files import file_names, open_writer
from millstream.reading.contracts import PyTree
from millstream.reading.host_source import HostSource, SampleReader
from millstream.reading.samples import ObjectSpec, SampleSpec
from millstream.text.errors import describe_value, function_name, noted

_AT_ONCE = 1 << 20  # bytes of samples that are read by one call
_OBJECTS = 64  # samples, if they may have any size
WORK = ".prepare"  # the folder, in the one that is prepared, with what is not part of the result

# What samples are told apart by: a field, what a function gives, or all of a sample.
Unique = str | Callable[[PyTree], object] | bool


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The samples that are prepared, in ranges of which each becomes a shard.

    Attributes:
        source: The samples.
        fn: What is made of each: a sample, a list of samples, or None for nothing; None to keep them as they are.
        per_range: How many samples a range has.
        at_once: How many samples of a range the function gets as a list, for a list of what is made of each; None for
            one sample after the other.
    """

    source: HostSource
    fn: Callable[[PyTree], PyTree] | None
    per_range: int
    at_once: int | None = None

    @property
    def count(self) -> int:
        """How many ranges there are."""
        return -(-len(self.source) // self.per_range)

    @property
    def name(self) -> str:
        """The caller, for errors."""
        return "prepare" if self.fn is None else f"prepare({function_name(self.fn)})"

    def positions(self, number: int) -> np.ndarray:
        """The samples of a range."""
        return np.arange(number * self.per_range, min((number + 1) * self.per_range, len(self.source)))

    def read(self, positions: np.ndarray) -> Iterator[tuple[int, PyTree]]:
        """Samples as functions on the host get them, each with its position, which random stages have their keys by."""
        size = _rows_at_once(self.source.sample_spec)
        for first in range(0, len(positions), size):
            part = positions[first : first + size]
            keys = None
            if self.source.keyed:
                keys = sample_keys(np.zeros(2, np.uint32), np.zeros(len(part), np.uint32), part.astype(np.uint64))
            yield from zip(part.tolist(), self.source.read_samples(part, keys)[0], strict=True)

    def results(self, positions: np.ndarray) -> Iterator[tuple[int, PyTree]]:
        """What the function makes of samples, each with the position of the sample that it is made of."""
        if self.fn is None:
            yield from self.read(positions)
            return
        for position, made in self._calls(self.fn, self.read(positions)):
            for one in made if type(made) is list else [] if made is None else [made]:
                yield position, one

    def _calls(
        self, fn: Callable[[PyTree], PyTree], samples: Iterator[tuple[int, PyTree]]
    ) -> Iterator[tuple[int, PyTree]]:
        """What a function returns for each sample."""
        if self.at_once is None:
            for position, sample in samples:
                try:
                    made = fn(sample)
                except Exception as error:
                    raise noted(error, f"This came from {self.name} at sample {position}.")  # noqa: B904
                yield position, made
            return
        while group := list(itertools.islice(samples, self.at_once)):
            positions, given = [position for position, _ in group], [sample for _, sample in group]
            try:
                made = fn(given)
                self._check_results(made, len(given))
            except Exception as error:
                where = f"sample {positions[0]}" if len(group) == 1 else f"samples {positions[0]} to {positions[-1]}"
                raise noted(error, f"This came from {self.name} at {where}.")  # noqa: B904
            yield from zip(positions, made, strict=True)

    def _check_results(self, made: Any, count: int) -> None:
        """Refuse what is not a list with a result for each of the samples that a function got at once."""
        rule = f"{self.name} needs a list with one result for each sample from a function with at_once="
        returned = f"For {'1 sample' if count == 1 else f'{count:,} samples'} it returned"
        if not isinstance(made, list | tuple):
            fix = " Make a dict of each: [{...} for value in values]." if isinstance(made, dict) else ""
            raise TypeError(f"{rule}. {returned} {describe_value(made)}.{fix}")
        if len(made) != count:
            raise ValueError(
                f"{rule}. {returned} {len(made):,}. Return None for a sample that is left out, and a list of samples "
                "for one that becomes several."
            )


def _rows_at_once(spec: SampleSpec | ObjectSpec) -> int:
    if isinstance(spec, ObjectSpec):
        return _OBJECTS
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
    return max(1, min(_AT_ONCE // max(size, 64), 4096))


class RangeMaker(SampleReader):
    """What is made of each range, as the samples of a source: executors read it, and so have it made.

    Args:
        inputs: The ranges.
        folder: Where what is made goes.
    """

    calls_users = True
    whole_samples = True
    ordering = "sequential"
    sample_spec = ObjectSpec("what was written")

    def __init__(self, inputs: Inputs, folder: pathlib.Path) -> None:
        self._inputs, self._folder = inputs, folder

    def __len__(self) -> int:
        return self._inputs.count

    def read_row(self, index: int, out: Sequence[np.ndarray], row: int, key: np.ndarray | None) -> None:
        out[0][row] = self.make(index)

    def path(self, number: int) -> pathlib.Path:
        """The file that is there when what is made of a range is complete."""
        raise NotImplementedError

    def make(self, number: int) -> int:
        """Make what belongs to a range; how many samples it has."""
        raise NotImplementedError


class HashMaker(RangeMaker):
    """Hashes of 128 bits of what tells the samples of a range apart.

    Args:
        inputs: The ranges.
        folder: Where the result goes.
        by: What tells samples apart.
    """

    def __init__(self, inputs: Inputs, folder: pathlib.Path, by: Unique) -> None:
        super().__init__(inputs, folder)
        self._by = by

    def path(self, number: int) -> pathlib.Path:
        return self._folder / WORK / f"{number:05d}.hashes.npy"

    def make(self, number: int) -> int:
        positions = self._inputs.positions(number)
        found = np.empty((len(positions), 2), "<u8")
        for row, (position, sample) in enumerate(self._inputs.read(positions)):
            found[row] = np.frombuffer(self._hash(position, sample), "<u8")
        with written(self.path(number), alone=False) as file:  # durably: nothing tells if it is whole
            np.save(file, found)
        return len(positions)

    def _hash(self, position: int, sample: PyTree) -> bytes:
        try:
            value = plain.encode(_comparable(self._value(sample)), "prepare(deduplicate=...)")
            return hashlib.blake2b(value, digest_size=16).digest()
        except Exception as error:
            raise noted(error, f"This came from prepare(deduplicate={self._by!r}) at sample {position}.")  # noqa: B904

    def _value(self, sample: PyTree) -> Any:
        if self._by is True:
            return sample
        if callable(self._by):
            return self._by(sample)
        if type(sample) is not dict or self._by not in sample:
            raise KeyError(f"There is no field {self._by!r} in {describe_value(sample)}.")
        return sample[self._by]


def _comparable(value: Any) -> Any:
    """A value whose bytes are equal for equal ones: dicts in one order, arrays of any library as NumPy has them."""
    if type(value) is dict:
        return {key: _comparable(value[key]) for key in sorted(value, key=repr)}
    return np.asarray(value)[()] if hasattr(value, "__array__") else value


class ShardMaker(RangeMaker):
    """Shards: the files of each, and a record that says what is in them.

    Args:
        inputs: The ranges.
        folder: Where shards go.
        kind: Their format.
        form: Of the samples.
        kept: A file with a bool for each sample of the input, False for those that are left out; None to keep all.
    """

    def __init__(
        self, inputs: Inputs, folder: pathlib.Path, kind: str, form: SampleForm, kept: pathlib.Path | None
    ) -> None:
        super().__init__(inputs, folder)
        self._kind, self._form, self._kept = kind, form, kept

    def path(self, number: int) -> pathlib.Path:
        return self._folder / WORK / f"{number:05d}.json"

    def lengths_path(self, number: int) -> pathlib.Path:
        """The file of the lengths of a shard's samples: a row for each leaf that has one."""
        return self._folder / WORK / f"{number:05d}.lengths.npy"

    def names(self, number: int) -> list[str]:
        """The files of a shard."""
        return file_names(self._kind, self._form, number)

    def make(self, number: int) -> int:
        inputs = self._inputs
        positions = inputs.positions(number)
        if self._kept is not None:
            kept = np.load(self._kept, mmap_mode="r")
            positions = positions[kept[positions[0] : positions[-1] + 1]]
        name, results = inputs.name, inputs.results(positions)
        samples = ((position, self._form.values(name, position, made)) for position, made in results)
        first = next(samples, None)
        record = self._empty() if first is None else self._write(number, first, samples)
        with written(self.path(number), alone=False, durable=False) as file:
            file.write(json.dumps(record).encode())
        return record["samples"]

    def _empty(self) -> dict[str, Any]:
        return {"samples": 0, "files": [], "blocks": [], "start": 0, "ends": [], "first": [], "fixed": []}

    def _write(
        self, number: int, first: tuple[int, list[Any]], rest: Iterator[tuple[int, list[Any]]]
    ) -> dict[str, Any]:
        names, measured = self.names(number), _Measured(self._form)
        with open_writer(self._kind, self._folder, names, self._form) as writer:
            position, values = first
            while True:
                measured.add(values)
                try:
                    writer.add(values)
                except (UnicodeError, ValueError) as error:
                    raise noted(error, f"This came from {self._inputs.name} at sample {position}.")  # noqa: B904
                following = next(rest, None)
                if following is None:
                    break
                position, values = following
        with written(self.lengths_path(number), alone=False, durable=False) as file:
            np.save(file, np.array(measured.lengths, np.int64))
        return {
            "samples": sum(writer.rows),
            "files": [file_entry(self._folder / name) for name in names],
            "lengths": file_entry(self.lengths_path(number)),
            "blocks": writer.rows,
            "start": writer.start,
            "ends": writer.ends,
            "first": measured.first,
            "fixed": measured.fixed,
        }


class _Measured:
    """What is known of samples without reading them again.

    Attributes:
        lengths: For each leaf that has one, the length of every sample.
        first: The shape of each leaf in the first sample.
        fixed: For each leaf, whether it has that shape in all.
    """

    def __init__(self, form: SampleForm) -> None:
        self.lengths: list[list[int]] = [[] for leaf in form.leaves if leaf.has_length]
        self.first: list[tuple[int, ...]] = []
        self.fixed = [leaf.is_numbers for leaf in form.leaves]
        self._leaves = form.leaves
        self._measured = [number for number, leaf in enumerate(form.leaves) if leaf.has_length]

    def add(self, values: Sequence[Any]) -> None:
        """Take note of a sample."""
        shapes = [value.shape if leaf.is_numbers else () for leaf, value in zip(self._leaves, values, strict=True)]
        if not self.first:
            self.first = shapes
        elif shapes != self.first:
            pairs = zip(self.fixed, shapes, self.first, strict=True)
            self.fixed = [same and shape == first for same, shape, first in pairs]
        for lengths, number in zip(self.lengths, self._measured, strict=True):
            lengths.append(len(values[number]))


def file_entry(path: pathlib.Path) -> dict[str, Any]:
    """What an index says of a file."""
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": file_hash(path)}


def file_hash(path: pathlib.Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
