"""A checkpoint in memory: what was saved, as it is loaded."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from millstream.reading.contracts import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """What was saved: unpacks into tree, document and files.

    Example:
        >>> from millstream.checkpoints import CheckpointStore
        >>> with CheckpointStore("first run") as store:
        ...     store.save(3, {"w": jnp.ones(2)}, {"epoch": 1})
        ...     tree, document, files = store.load(like={"w": jnp.zeros(2)})
        >>> document
        {'epoch': 1}

    Attributes:
        tree: The tree.
        document: The document.
        files: Contents of the further files by their names.
        step: The step it was saved at.
        metrics: The metrics it was saved with; None for those that were not finite.
    """

    tree: PyTree
    document: Any
    files: Mapping[str, bytes]
    step: int
    metrics: Mapping[str, float | None]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.tree, self.document, self.files))
