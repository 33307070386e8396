"""Reading one batch on the host: what is asked for, what comes of it. Threads and worker processes share this."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from millstream.plan.planned import Request
from millstream.reading.contracts import PyTree
from millstream.reading.host_source import HostSource, SampleReader
from millstream.reading.stats import collect_into, timed

OnError = Literal["raise", "skip item", "skip batch"]


@dataclasses.dataclass
class Report:
    """What came of reading some rows.

    Attributes:
        failed: Rows that could not be read, and why; they are zeros.
        extras: What the source returned beside the arrays, by row.
        times: Seconds per stage.
    """

    failed: dict[int, BaseException] = dataclasses.field(default_factory=dict)
    extras: dict[int, PyTree] = dataclasses.field(default_factory=dict)
    times: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, other: "Report") -> None:
        """Take in what came of other rows."""
        self.failed.update(other.failed)
        self.extras.update(other.extras)
        for name, seconds in other.times.items():
            self.times[name] = self.times.get(name, 0.0) + seconds


@dataclasses.dataclass
class ReadBatch:
    """A batch that has been read.

    Attributes:
        rows: One array per leaf, with the axes of a batch in front.
        report: What came of it.
        seconds: How long it took to read, all readers together.
        samples: Samples that were asked for.
        restarts: Worker processes that died since the last batch.
        cached: Whether it comes from the cache on disk.
        request: What was asked for.
    """

    rows: list[np.ndarray]
    report: Report
    seconds: float
    samples: int
    restarts: int = 0
    cached: bool = False
    request: Request | None = None


class Reading:
    """The reading of one batch, or of some of its rows.

    Args:
        source: What to read.
        request: The batch.
        out: One array per leaf, for the whole batch; they may hold anything.
        tolerant: Whether a sample that raises becomes a failed row; otherwise it raises.
        at: Told the row and the sample index before each is read.
    """

    def __init__(
        self,
        source: HostSource,
        request: Request,
        out: Sequence[np.ndarray],
        *,
        tolerant: bool = False,
        at: Callable[[int, int], None] = lambda row, index: None,
    ) -> None:
        self._source = source
        self._request = request
        self._out = out
        self._tolerant = tolerant
        self._at = at
        self._report = Report()

    def read(self, first: int, end: int) -> Report:
        """Write the rows from `first` to before `end`; padding becomes zeros."""
        collect_into(self._report.times)
        try:
            with timed("writing into the batch"):
                if self._source.reads_samples:
                    self._read_samples(first, end)
                else:
                    self._read_together(first, end)
        finally:
            collect_into(None)
        return self._report

    def _read_samples(self, first: int, end: int) -> None:
        source = self._source
        assert isinstance(source, SampleReader)
        request, out, at = self._request, self._out, self._at
        numbers, real = request.indices[first:end].tolist(), request.real[first:end].tolist()
        for row, (index, is_real) in enumerate(zip(numbers, real, strict=True), first):
            if not is_real:
                self._blank(row)
                continue
            at(row, index)
            try:
                extra = source.read_row(index, out, row, None if request.keys is None else request.keys[row])
            except Exception as error:
                self._fail(row, error)
                continue
            if extra is not None:
                self._report.extras[row] = extra

    def _read_together(self, first: int, end: int) -> None:
        real, rows = self._request.real[first:end], range(first, end)
        if np.count_nonzero(real) < len(real):  # a tenth of what `real.all()` takes
            for row in (first + np.flatnonzero(~real)).tolist():
                self._blank(row)
            rows = (first + np.flatnonzero(real)).tolist()
        try:
            self._read_rows(rows)
        except Exception as error:
            if not self._tolerant:
                raise
            for row in rows:  # to find out which of them cannot be read
                if self._source.whole_batches:
                    self._fail(row, error)
                    continue
                try:
                    self._read_rows([row])
                except Exception as its_own:
                    self._fail(row, its_own)

    def _read_rows(self, rows: Sequence[int]) -> None:
        if not rows:
            return
        request, out = self._request, self._out
        self._at(rows[0], int(request.indices[rows[0]]))
        if rows[-1] - rows[0] == len(rows) - 1:  # as they are, unless batches of batches are padded inside
            part = slice(rows[0], rows[-1] + 1)
            keys = None if request.keys is None else request.keys[part]
            beside = self._source.read_rows(request.indices[part], [leaf[part] for leaf in out], keys)
        else:
            indices, keys = request.indices[rows], None if request.keys is None else request.keys[rows]
            chosen = [np.empty((len(rows), *leaf.shape[1:]), leaf.dtype) for leaf in out]
            beside = self._source.read_rows(indices, chosen, keys)
            for leaf, read in zip(out, chosen, strict=True):
                leaf[rows] = read
        if isinstance(beside, dict):  # sources of users may return anything
            self._report.extras.update({rows[row]: extra for row, extra in beside.items()})

    def _fail(self, row: int, error: Exception) -> None:
        if not self._tolerant:
            raise error
        self._report.failed[row] = error
        self._blank(row)

    def _blank(self, row: int) -> None:
        for leaf in self._out:
            leaf[row] = None if leaf.dtype.hasobject else 0
