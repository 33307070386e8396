"""ArrayRecord files."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from millstream.files.changed import WatchedFiles, file_unreadable
from millstream.files.data_files import LocalFile, local_path
from millstream.files.paths import Paths, listed_paths
from millstream.integrations._table import made_samples
from millstream.plan.ordering import Ordering
from millstream.reading.contracts import PyTree
from millstream.reading.host_source import HostSource
from millstream.reading.samples import first_sample, spec_or_objects
from millstream.reading.stats import timed
from millstream.sources.array import check_reading
from millstream.text.errors import describe_value, needs, require_callable, require_readers

_OPTIONS = "max_parallelism:0,readahead_buffer_size:0"  # what is read is known, and none of it is next to the other


class ArrayRecordSource(HostSource):
    """The records of ArrayRecord files, one file after the other. Those of a batch are read together.

    Example:
        >>> from array_record.python.array_record_module import ArrayRecordWriter
        >>> from millstream.integrations.array_record import ArrayRecordSource
        >>> writer = ArrayRecordWriter("train.array_record", "group_size:1")
        >>> for number in range(3):
        ...     _ = writer.write(np.full(4, number, np.uint8).tobytes())
        >>> writer.close()
        >>> source = ArrayRecordSource("train.array_record", lambda record: {"x": np.frombuffer(record, np.uint8)})
        >>> source.read(np.array([2, 0]))["x"].tolist()
        [[2, 2, 2, 2], [0, 0, 0, 0]]

    Args:
        paths: A file, or several. They must not change while they are read.
        record_fn: `record_fn(record) -> sample` makes a pytree of arrays of a record, which is `bytes`. Without it,
            samples are the bytes themselves. It is called from several threads.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
        readers: How many threads read, if the loader has no executor.
    """

    whole_samples = True
    divides_blocks = True

    def __init__(
        self,
        paths: Paths,
        record_fn: Callable[[bytes], PyTree] | None = None,
        *,
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
        readers: int = 1,
    ) -> None:
        self._caller = "ArrayRecordSource"
        with needs(self._caller, "array_record", "array_record"):
            import array_record.python.array_record_module  # noqa: F401
        check_reading(self._caller, ordering, prefetch_size)
        require_readers(self._caller, "readers", readers)
        if record_fn is not None:
            require_callable(self._caller, "record_fn", record_fn)
        listed = listed_paths(self._caller, paths)
        self._paths = [os.fspath(LocalFile(self._caller, local_path(self._caller, path)).path) for path in listed]
        self._record_fn = record_fn
        self.ordering: Ordering = ordering
        self.prefetch_size = prefetch_size
        self.readers = readers
        self._files = WatchedFiles(self._caller, self._paths)
        self.stamps = self._files.stamps
        self._opened: dict[int, Any] = {}
        self._ends = np.cumsum([self._count(number) for number in range(len(self._paths))], dtype=np.int64)
        self.blocks = np.diff(self._ends, prepend=0)
        if len(self) == 0:
            raise ValueError(f"{self._caller} needs at least one record. There is none in {describe_value(listed)}.")
        self.first_sample, samples = first_sample(lambda index: self._samples(np.array([index])), range(len(self)))
        self.sample_spec = spec_or_objects(self._caller, samples[0])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": {}}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> None:
        for row, (index, sample) in enumerate(zip(indices.tolist(), self._samples(indices), strict=True)):
            self.sample_spec.write(self._caller, out, row, index, sample)

    def _samples(self, indices: np.ndarray) -> list[Any]:
        with timed("read"):
            records = self._records(indices)
        if self._record_fn is None:
            return records
        return made_samples(self._caller, "record_fn", self._record_fn, indices.tolist(), records)

    def _records(self, indices: np.ndarray) -> list[bytes]:
        records: list[bytes] = [b""] * len(indices)
        files = np.searchsorted(self._ends, indices, side="right")
        for number in np.unique(files).tolist():
            rows = np.flatnonzero(files == number)
            for row, record in zip(rows.tolist(), self._read(number, indices[rows]), strict=True):
                records[row] = record
        self._files.check(indices)
        return records

    def _read(self, number: int, indices: np.ndarray) -> list[bytes]:
        """Records of one file."""
        first = int(self._ends[number - 1]) if number else 0
        try:
            return self._reader(number).read((indices - first).tolist())
        except RuntimeError as error:
            if len(indices) == 1:
                raise file_unreadable(self._caller, self._paths[number], indices, error) from None
            return [record for index in indices for record in self._read(number, np.array([index]))]

    def _reader(self, number: int) -> Any:
        if number not in self._opened:
            from array_record.python.array_record_module import ArrayRecordReader

            self._opened[number] = ArrayRecordReader(self._paths[number], _OPTIONS)
        return self._opened[number]

    def _count(self, number: int) -> int:
        """How many records a file has."""
        try:
            reader = self._reader(number)
            if not reader.ok():
                reader.close()  # which says why
            return reader.num_records()
        except RuntimeError as error:
            raise ValueError(
                f"{self._caller} needs ArrayRecord files. {self._paths[number]} is none: {error}."
            ) from None
