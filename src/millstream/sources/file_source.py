"""Rows that come from named files."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from millstream.files.changed import FileChanged
from millstream.files.data_files import File, LocalFile, recorded
from millstream.plan.ordering import Ordering
from millstream.reading.contracts import PyTree
from millstream.reading.host_source import ArrayRows
from millstream.reading.memory import mapped_file
from millstream.sources.file_rows import ChainedRows, FileRows, take_rows
from millstream.sources.host_array import HostArraySource
from millstream.text.errors import noted


class FileSource(HostArraySource):
    """Rows of files. A copy in another process opens the files again instead of carrying their contents there.

    A file that is mapped or read row by row must stay as it is: what has changed is refused, here and there.

    Args:
        open_files: Gives the arrays, mapped, in memory, or as `FileRows`.
        arguments: What it is called with, here and there.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
    """

    def __init__(
        self,
        open_files: Callable[..., PyTree],
        arguments: tuple[Any, ...],
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
    ) -> None:
        import jax

        with recorded() as files:
            data = open_files(*arguments)
        super().__init__(jax.tree.map(_stand_in, data), ordering, prefetch_size)
        self._opened_by = (open_files, arguments)
        self._hold(data, files)

    def __reduce__(self) -> tuple[Any, ...]:
        rest = (self.sample_spec, self.ordering, self.prefetch_size)
        return _reopen, (type(self), *self._opened_by, self._files, *rest)

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> None:
        self._check(indices)
        for leaf, target in zip(self._leaves, out, strict=True):
            take_rows(self._who, leaf, indices, target)
        self._check(indices)  # what was written in between is noticed, too

    def _hold(self, data: PyTree, files: list[File]) -> None:
        self._leaves = self.sample_spec.flatten(self._who, data)  # pyright: ignore[reportAttributeAccessIssue]
        self._files = files
        mapped = any(map(is_mapped, self._leaves))
        self._mapped = [file for file in files if mapped and isinstance(file, LocalFile)]

    def _check(self, indices: np.ndarray) -> None:
        for file in self._mapped:
            try:
                file.check()
            except FileChanged as error:
                raise noted(error, f"This came from {self._who} at sample {indices[0]}.")  # noqa: B904


def _reopen(
    kind: type[FileSource],
    open_files: Callable[..., PyTree],
    arguments: tuple[Any, ...],
    files: list[File],
    *rest: Any,
) -> FileSource:
    """The source again, without the checks of its constructor: they need JAX, which worker processes do without."""
    with recorded(files):
        data = open_files(*arguments)
    source = kind.__new__(kind)
    spec = rest[0]
    stand_ins = spec.unflatten([_stand_in(leaf) for leaf in spec.flatten(kind.__name__, data)])
    ArrayRows.__init__(source, kind.__name__, stand_ins, *rest)
    source._opened_by = (open_files, arguments)
    source._hold(data, files)
    return source


def _stand_in(rows: np.ndarray | FileRows) -> np.ndarray:
    """An array of the same shape and dtype that takes no memory."""
    return rows if isinstance(rows, np.ndarray) else np.broadcast_to(np.zeros((), rows.dtype), rows.shape)


def is_mapped(rows: Any) -> bool:
    """Whether rows lie in a memory-mapped file, or some of them do."""
    if isinstance(rows, ChainedRows):
        return any(map(is_mapped, rows.parts))
    return mapped_file(rows) is not None
