"""Rows that come from named files."""

from collections.abc import Callable
from typing import Any

from millstream._core.contracts import PyTree
from millstream._core.plan import Ordering
from millstream.sources._host_array import HostArraySource


class FileSource(HostArraySource):
    """Rows of files. A copy in another process opens the files again instead of carrying their contents there.

    Args:
        open_files: Gives the arrays.
        arguments: What it is called with, here and there.
        ordering: "shuffle" for a new order every epoch, or "sequential".
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
        object.__setattr__(self, "_opened_by", (open_files, arguments))

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (type(self), *vars(self)["_opened_by"], self.ordering, self.prefetch_size)


def _reopen(
    kind: type[FileSource],
    open_files: Callable[..., PyTree],
    arguments: tuple[Any, ...],
    ordering: Ordering,
    prefetch_size: int,
) -> FileSource:
    """The source again, without the checks of its constructor: they need JAX, which worker processes do without."""
    source = kind.__new__(kind)
    fields = {
        "data": open_files(*arguments),
        "ordering": ordering,
        "prefetch_size": prefetch_size,
        "_opened_by": (open_files, arguments),
    }
    for name, value in fields.items():
        object.__setattr__(source, name, value)
    return source
