"""Rows that come from named files."""

from collections.abc import Callable
from typing import Any

from millstream._core.contracts import PyTree
from millstream._core.host_source import ArrayRows
from millstream._core.ordering import Ordering
from millstream.sources._host_array import HostArraySource


class FileSource(HostArraySource):
    """Rows of files. A copy in another process opens the files again instead of carrying their contents there.

    Args:
        open_files: Gives the arrays.
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
        super().__init__(open_files(*arguments), ordering, prefetch_size)
        self._opened_by = (open_files, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        rest = (self.sample_spec, self.ordering, self.prefetch_size)
        return _reopen, (type(self), *self._opened_by, *rest)


def _reopen(
    kind: type[FileSource], open_files: Callable[..., PyTree], arguments: tuple[Any, ...], *rest: Any
) -> FileSource:
    """The source again, without the checks of its constructor: they need JAX, which worker processes do without."""
    source = kind.__new__(kind)
    ArrayRows.__init__(source, kind.__name__, open_files(*arguments), *rest)
    source._opened_by = (open_files, arguments)
    return source
