"""Reading the same samples in several ways: again, in another order, alone, and in a worker process."""

import dataclasses
import random
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from millstream.loader._verification.compare import Mismatch, compare
from millstream.reading.derived_sources import named_parts
from millstream.reading.host_source import HostSource, as_host_source
from millstream.reading.processes import Processes
from millstream.reading.reading import Request
from millstream.reading.samples import ObjectSpec, SampleSpec
from millstream.reading.slots import Layout

IN_A_WORKER = (
    "A worker process is a new interpreter: does reading depend on a global variable, the order of a set, the current "
    "folder or the environment?"
)
_TIMED = 4  # samples that are read to see how long that takes
_ALONE = 4  # of so many samples one is read alone


@dataclasses.dataclass(frozen=True)
class Raised:
    """Stands for a sample that could not be read."""

    error: str


@dataclasses.dataclass(frozen=True)
class OtherReading:
    """A sample that was another one when it was read again.

    Attributes:
        how: How it was read then.
        index: Which sample.
        mismatch: Where it differs.
    """

    how: str
    index: int
    mismatch: Mismatch


class Level:
    """A source, or what host stages make of it.

    Args:
        name: What it is called.
        source: What is read.
    """

    def __init__(self, name: str, source: HostSource) -> None:
        self.name = name
        self.source = source

    def read(self, indices: np.ndarray, keys: np.ndarray) -> list[Any]:
        """Samples that are read together; or one by one, if one of them cannot be read."""
        source, spec = self.source, self.source.sample_spec
        try:
            samples = source.read_keyed(indices, keys if source.keyed else None)
        except Exception as error:
            if len(indices) == 1:
                return [Raised(type(error).__name__)]
            return [self.read(indices[row : row + 1], keys[row : row + 1])[0] for row in range(len(indices))]
        return samples if isinstance(spec, ObjectSpec) else _rows(spec, spec.flatten(self.name, samples))

    def differs(self, indices: np.ndarray, keys: np.ndarray) -> OtherReading | None:
        """The first sample that is another one when it is read again, in another order, or alone."""
        first = self.read(indices, keys)
        return next(
            (wrong for how, rows in self._again(indices, keys) for wrong in _others(how, indices, first, rows)), None
        )

    def _again(self, indices: np.ndarray, keys: np.ndarray) -> Iterator[tuple[str, Iterable[tuple[int, Any]]]]:
        yield "again", enumerate(self.read(indices, keys))
        if self.source.whole_batches:
            return  # such a batch is made of its samples together, in their order
        back = np.arange(len(indices))[::-1]
        yield "in another order", zip(back.tolist(), self.read(indices[back], keys[back]), strict=True)
        some = range(0, len(indices), _ALONE)
        yield "alone", ((row, self.read(indices[row : row + 1], keys[row : row + 1])[0]) for row in some)

    def differs_in_a_worker(self, executor: Processes, indices: np.ndarray, keys: np.ndarray) -> OtherReading | None:
        """The first sample that is another one in a worker process."""
        spec = self.source.sample_spec
        pool = executor.open(self.source, Layout((len(indices),), spec.shapes, spec.dtypes), 0, tolerant=True)
        try:
            real = np.ones(len(indices), bool)
            filled = pool.collect(pool.start(Request(0, indices, real, keys if self.source.keyed else None)))
            samples = filled.rows[0].tolist() if isinstance(spec, ObjectSpec) else _rows(spec, filled.rows)
            for row, error in filled.report.failed.items():
                samples[row] = Raised(type(error).__name__)
            here = self.read(indices, keys)
            return next(_others("in a worker process", indices, here, enumerate(samples)), None)
        finally:
            pool.close()


def levels_of(source: Any) -> list[Level]:
    """A source and what the host stages behind it make of it, innermost first."""
    return [Level(*part) for part in named_parts(as_host_source(source))]


def seconds_per_sample(source: Any) -> float:
    """How long it takes to read a sample, about."""
    level, indices = levels_of(source)[-1], np.arange(min(_TIMED, len(source)))
    begun = time.perf_counter()
    level.read(indices, np.zeros((len(indices), 2), np.uint32))
    return (time.perf_counter() - begun) / len(indices)


def drawn_globally(level: Level, index: int, key: np.ndarray) -> str | None:
    """The global random generator that reading a sample draws from, if it does."""
    before = random.getstate(), np.random.get_state(legacy=False)
    level.read(np.array([index]), key[None])
    after = random.getstate(), np.random.get_state(legacy=False)
    if before[0] != after[0]:
        return "Python's random module"
    return None if not compare("", before[1], after[1]) else "NumPy's global random generator (np.random)"


def _rows(spec: SampleSpec, leaves: list[Any]) -> list[Any]:
    """Samples one by one."""
    return [spec.unflatten([np.asarray(leaf[row]) for leaf in leaves]) for row in range(len(leaves[0]))]


def _others(how: str, indices: np.ndarray, first: list[Any], rows: Iterable[tuple[int, Any]]) -> Iterator[OtherReading]:
    """Samples that are not what they were the first time."""
    for row, sample in rows:
        for mismatch in compare("sample", first[row], sample):
            yield OtherReading(how, int(indices[row]), mismatch)
