"""Rows that come from named files."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from millstream.errors import FileChanged
from millstream.files.changed import FileStamp
from millstream.files.data_files import File, LocalFile, expect, forget, recorded
from millstream.plan.ordering import Ordering
from millstream.reading.contracts import PyTree
from millstream.reading.host_source import RowSource
from millstream.reading.memory import mapped_file
from millstream.reading.samples import ObjectSpec, SampleSpec, spec_of
from millstream.sources.array import check_reading, check_rows
from millstream.sources.file_rows import ChainedRows, RangedRows, take_rows
from millstream.text.errors import describe_value, noted

_EXPECTED = 512  # rows of one array that are asked for before those of the next one


class OpenedRows:
    """Rows of files. A copy in another process opens the files again instead of carrying their contents there.

    A file that is mapped or read row by row must stay as it is: what has changed is refused, here and there.

    Args:
        caller: The source, in errors.
        open_files: Gives the arrays, mapped, in memory, or as `FileRows`.
        arguments: What it is called with, here and there.
        spec: The structure of a row, for a copy: finding it takes JAX, which worker processes do without.
        known: The files, for a copy.
    """

    def __init__(
        self,
        caller: str,
        open_files: Callable[..., PyTree],
        arguments: tuple[Any, ...],
        spec: SampleSpec | ObjectSpec | None = None,
        known: Sequence[File] = (),
    ) -> None:
        with recorded(known) as self._files:
            data = open_files(*arguments)
        self.spec = _row_spec(caller, data) if spec is None else spec
        self._caller, self._opened_by = caller, (open_files, arguments)
        self.stamps: Sequence[FileStamp] = [file.stamp for file in self._files]
        self._data = data
        self._leaves = list(data.values()) if isinstance(self.spec, ObjectSpec) else self.spec.flatten(caller, data)
        mapped = any(map(is_mapped, self._leaves))
        self._mapped = [file for file in self._files if mapped and isinstance(file, LocalFile)]

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenedRows, (self._caller, *self._opened_by, self.spec, self._files)

    def __len__(self) -> int:
        return len(self._leaves[0])

    @property
    def data(self) -> PyTree:
        """The arrays, or what takes their place, as a tree."""
        return self._data

    def take(self, indices: np.ndarray, out: Sequence[np.ndarray]) -> None:
        """Write the rows at `indices` into `out`, one array per leaf; or, as dicts, into an array of objects."""
        self._check(indices)
        if isinstance(self.spec, ObjectSpec):
            for row, values in enumerate(zip(*(leaf[indices] for leaf in self._leaves), strict=True)):
                out[0][row] = dict(zip(self._data, values, strict=True))
            return
        for leaf, target in zip(self._leaves, out, strict=True):
            take_rows(self._caller, leaf, indices, target)
        self._check(indices)  # what was written in between is noticed, too

    @property
    def looks_ahead(self) -> bool:
        """Whether some of the rows are read from other machines when they are needed."""
        return any(isinstance(leaf, RangedRows | ChainedRows) for leaf in self._leaves) and not all(
            isinstance(file, LocalFile) for file in self._files
        )

    def expect(self, indices: np.ndarray | None) -> None:
        """Prepare for these rows, which will be read in this order; None for no more."""
        if indices is None:
            return forget(self._files)
        ranged = [leaf for leaf in self._leaves if isinstance(leaf, RangedRows | ChainedRows)]
        for some in np.array_split(indices, max(1, len(indices) // _EXPECTED)):
            by_file = [found for leaf in ranged for found in leaf.spans(some)]
            numbers = np.repeat(np.arange(len(by_file)), [len(spans) for _, spans in by_file])
            if by_file:
                expect([file for file, _ in by_file], numbers, np.concatenate([spans for _, spans in by_file]))

    def _check(self, indices: np.ndarray) -> None:
        for file in self._mapped:
            try:
                file.check()
            except FileChanged as error:
                raise noted(error, f"This came from {self._caller} at sample {indices[0]}.")  # noqa: B904


class FileSource(RowSource):
    """The rows of the arrays that a function opens, as in `OpenedRows`."""

    def __init__(
        self,
        open_files: Callable[..., PyTree],
        arguments: tuple[Any, ...],
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
    ) -> None:
        check_reading("FileSource", ordering, prefetch_size)
        super().__init__(OpenedRows("FileSource", open_files, arguments), ordering, prefetch_size)


def _row_spec(caller: str, data: PyTree) -> SampleSpec | ObjectSpec:
    import jax

    if isinstance(data, dict) and all(isinstance(rows, np.ndarray) for rows in data.values()):
        text = [name for name, rows in data.items() if rows.dtype.hasobject]
        if text and len({len(rows) for rows in data.values()}) == 1:
            return ObjectSpec(f"sample[{text[0]!r}]: {describe_value(data[text[0]][0])}")
    check_rows(caller, data, in_files=True)
    return spec_of(caller, jax.tree.map(lambda rows: jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype), data))


def is_mapped(rows: Any) -> bool:
    """Whether rows lie in a memory-mapped file, or some of them do."""
    if isinstance(rows, ChainedRows):
        return any(map(is_mapped, rows.parts))
    return mapped_file(rows) is not None
