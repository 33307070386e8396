"""One row of the table that a pipeline is explained by."""

import dataclasses

import jax

from millstream.reading.contracts import PyTree
from millstream.reading.memory import nbytes


@dataclasses.dataclass(frozen=True)
class ExplainedStage:
    """One stage of a pipeline, and what comes out of it.

    Example:
        >>> stage = loader.explain().rows[-1]
        >>> stage.stage, stage.where, stage.shapes, stage.bytes_per_batch
        ('BatchTransform', 'device', {'x': (4,)}, 16)

    Attributes:
        stage: Its name.
        where: Where it runs: on the device, in threads, in worker processes.
        shapes: The shape of each array that comes out of it, by its path, which is "" if there is but one array. Before
            the batch, those of a sample. Empty for Python objects.
        dtypes: Their dtypes, likewise.
        bytes_per_batch: Bytes that leave it for one batch; None for Python objects.
        memory_bytes: Memory that it holds in this process as long as the loader is used; None if nobody knows.
        note: What else there is to say.
    """

    stage: str
    where: str
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    bytes_per_batch: int | None
    memory_bytes: int | None = None
    note: str = ""


def explained(
    stage: str, where: str, value: PyTree, times: int, memory: int | None = None, notes: list[str] | None = None
) -> ExplainedStage:
    """A row.

    Args:
        stage: Its name.
        where: Where it runs.
        value: What comes out, as a tree of shapes and dtypes; None for Python objects.
        times: How many such values make a batch.
        memory: Bytes that it holds.
        notes: What else there is to say.
    """
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(value)
    }
    return ExplainedStage(
        stage,
        where,
        {path: tuple(leaf.shape) for path, leaf in leaves.items()},
        {path: str(leaf.dtype) for path, leaf in leaves.items()},
        None if value is None else times * nbytes(value),
        memory,
        "; ".join(notes or []),
    )
