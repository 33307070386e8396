"""Records of any length, one after the other in files: lines of text, TFRecords."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from millstream.files.data_files import File, LocalFile, expect, forget
from millstream.plan.ordering import Ordering
from millstream.reading.contracts import PyTree
from millstream.reading.host_source import HostSource
from millstream.reading.samples import first_sample, spec_or_objects
from millstream.reading.stats import timed
from millstream.text.errors import noted


class RecordFiles:
    """The records of files, numbered through.

    Args:
        caller: The source, in errors.
        files: The files, which must not change. A copy in another process opens them again.
        bounds: Where the records of each file begin, and where its last one ends.
        names: What errors call each file.
    """

    def __init__(self, caller: str, files: Sequence[File], bounds: Sequence[np.ndarray], names: Sequence[str]) -> None:
        self._caller, self._files, self._bounds, self._names = caller, files, bounds, names
        self._ends = np.cumsum([len(part) - 1 for part in bounds], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def counts(self) -> np.ndarray:
        """How many records each file has."""
        return np.diff(self._ends, prepend=0)

    def read(self, indices: np.ndarray) -> list[bytes]:
        """The records at `indices`; those of a file are asked for together."""
        found: list[bytes] = [b""] * len(indices)
        numbers = np.searchsorted(self._ends, indices, side="right")
        for number, rows in by_file(numbers):
            bounds = self._bounds[number]
            local = indices[rows] - (self._ends[number] - len(bounds) + 1)
            starts, ends = bounds[local], bounds[local + 1]
            ranges = list(zip(starts.tolist(), (ends - starts).tolist(), strict=True))
            try:
                for row, data in zip(rows.tolist(), self._files[number].read_ranges(ranges), strict=True):
                    found[row] = data
            except OSError as error:
                raise noted(error, f"This came from {self._caller} at sample {indices[rows[0]]}.")  # noqa: B904
        return found

    @property
    def looks_ahead(self) -> bool:
        """Whether some of the files are on another machine."""
        return not all(isinstance(file, LocalFile) for file in self._files)

    def expect(self, indices: np.ndarray | None, blocks: np.ndarray | None = None) -> None:
        """Prepare for these records, which will be read in this order; None for no more.

        Args:
            indices: Which records.
            blocks: The first and the last record of the block of each, if blocks are read soon as a whole.
        """
        if indices is None:
            return forget(self._files)
        numbers = np.searchsorted(self._ends, indices, side="right")
        around = None if blocks is None else self._spans(numbers, blocks[:, 0], blocks[:, 1])
        expect(self._files, numbers, self._spans(numbers, indices, indices), around)

    def _spans(self, numbers: np.ndarray, firsts: np.ndarray, lasts: np.ndarray) -> np.ndarray:
        """Start and size of neighbours in files, of which those in other files are left out, (spans, 2)."""
        spans = np.empty((len(numbers), 2), np.int64)
        for number, rows in by_file(numbers):
            bounds = self._bounds[number]
            begin, most = self._ends[number] - len(bounds) + 1, len(bounds) - 2
            starts = bounds[np.clip(firsts[rows] - begin, 0, most)]
            spans[rows, 0], spans[rows, 1] = starts, bounds[np.clip(lasts[rows] - begin, 0, most) + 1] - starts
        return spans

    def file(self, index: int) -> File:
        """The file that a record is in."""
        return self._files[self._number(index)]

    def place(self, index: int) -> tuple[str, int, int]:
        """The name of a record's file, its number there, and its first byte."""
        number = self._number(index)
        local = index - (int(self._ends[number]) - len(self._bounds[number]) + 1)
        return self._names[number], local, int(self._bounds[number][local])

    def _number(self, index: int) -> int:
        return int(np.searchsorted(self._ends, index, side="right"))


def by_file(numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each number of a file, and where it stands."""
    order = np.argsort(numbers, kind="stable")
    firsts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    yield from zip(numbers[order[firsts]].tolist(), np.split(order, firsts[1:]), strict=True)


class RecordSource(HostSource):
    """The records of files, each of which is made a sample."""

    whole_samples = True
    divides_blocks = True

    def __init__(self, records: RecordFiles, files: Sequence[File], ordering: Ordering, prefetch_size: int) -> None:
        self._records = records
        self.blocks = records.counts
        self.stamps = [file.stamp for file in files]
        self.ordering: Ordering = ordering
        self.prefetch_size = prefetch_size
        if records.looks_ahead:
            self.looks_ahead = self.reads_together = True
        self.first_sample, [sample] = first_sample(lambda index: self._samples(np.array([index])), range(len(records)))
        self.sample_spec = spec_or_objects(type(self).__name__, sample)

    def __len__(self) -> int:
        return len(self._records)

    def expect(self, indices: np.ndarray | None) -> None:
        if self.looks_ahead:
            self._records.expect(indices)

    def expect_blocks(self, indices: np.ndarray, bounds: np.ndarray) -> None:
        if self.looks_ahead:
            self._records.expect(indices, bounds)

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> None:
        caller = type(self).__name__
        for row, (index, sample) in enumerate(zip(indices.tolist(), self._samples(indices), strict=True)):
            self.sample_spec.write(caller, out, row, index, sample)

    def _samples(self, indices: np.ndarray) -> list[PyTree]:
        with timed("read"):
            records = self._records.read(indices)
        return [self._made(index, record) for index, record in zip(indices.tolist(), records, strict=True)]

    def _made(self, index: int, record: bytes) -> Any:
        try:
            return self._sample(index, record)
        except Exception as error:
            raise noted(error, f"This came from {type(self).__name__} at sample {index}.")  # noqa: B904

    def _sample(self, index: int, record: bytes) -> PyTree:
        """The sample that a record is; a ValueError names the file and the place."""
        raise NotImplementedError
