"""What is known about a batch besides its values."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from millstream.pipeline.compose import IndexedPipeline
from millstream.plan.mixture import sources_at
from millstream.plan.planned import Request, sample_keys
from millstream.plan.selection import Selection
from millstream.reading.contracts import PyTree
from millstream.reading.host_source import item_of
from millstream.reading.reading import Report
from millstream.text.summaries import fields_text, never_raising


@dataclasses.dataclass(frozen=True)
class BatchInfo:
    """Where a batch comes from: `for batch, mask, info in loader.iterate(state, with_info=True)`.

    Example:
        >>> source = ms.ArraySampleSource({"x": np.arange(10)}, ordering="sequential")
        >>> loader = ms.DataLoader([source, ms.BatchTransform(4)])
        >>> batch, mask, info = next(loader.iterate(loader.init_state(jax.random.key(0), step=1), with_info=True))
        >>> info.epoch, info.step_in_epoch, info.indices.tolist()
        (0, 1, [4, 5, 6, 7])

    Attributes:
        step: The number of the batch in its run.
        epoch: The epoch it belongs to.
        step_in_epoch: Its number there.
        indices: The indices of its samples, with the axes of the mask; -1 where a row is padding. If several processes
            read a batch, those of the rows that this one reads.
        positions: Where these samples stand in the view, if the source is one; otherwise the same as `indices`.
        additional: What the source returned beside the arrays, by name: a list with an element per row, None where a
            sample returned nothing. Empty if none did.
        place: The epoch it has its samples and keys from, and its number in that epoch. Batches that come back, as
            `Shuffle("repeat")` and "batchwise" have them, have the same place every time.
        failed: Rows that could not be read and are masked, and why.
        group: The name of the loader it comes from, in a `MixedLoader`.
    """

    step: int
    epoch: int
    step_in_epoch: int
    indices: np.ndarray
    positions: np.ndarray
    additional: dict[str, list[PyTree]]
    place: tuple[int, int]
    failed: dict[int, BaseException]
    _keys: Callable[[], np.ndarray] = dataclasses.field(repr=False)
    _item: Callable[[int], Any] = dataclasses.field(repr=False)
    _sources: Callable[[], tuple[tuple[str, ...], np.ndarray] | None] = dataclasses.field(repr=False)
    group: str | None = None

    @functools.cached_property
    def seeds(self) -> np.ndarray:
        """A 64-bit seed per sample: a function of run key, epoch, and the sample's index, or its position in a view."""
        words = self._keys().astype(np.uint64)
        return ((words[..., 1] << np.uint64(32)) | words[..., 0]).reshape(self.indices.shape)

    @functools.cached_property
    def sources(self) -> np.ndarray | None:
        """The name of the source of each sample of a mixture, "" where a row is padding; None if it is not a mixture.

        Example:
            >>> one, two = (ms.ArraySampleSource({"x": np.arange(n)}) for n in (6, 2))
            >>> loader = ms.DataLoader([ms.views.mix({"a": one, "b": two}, {"a": 3, "b": 1}), ms.BatchTransform(8)])
            >>> batch, mask, info = next(loader.iterate(loader.init_state(jax.random.key(0)), with_info=True))
            >>> info.sources.tolist()
            ['a', 'a', 'b', 'a', 'a', 'a', 'b', 'a']
        """
        found = self._sources()
        if found is None:
            return None
        names, numbers = found
        return np.where(self.indices < 0, "", np.array(names)[numbers.reshape(self.indices.shape)])

    @property
    def items(self) -> list[Any]:
        """The items themselves, as the source was given them: None where a row is padding."""
        return [None if index < 0 else self._item(index) for index in self.indices.reshape(-1).tolist()]

    @never_raising
    def __repr__(self) -> str:
        return fields_text(self)


def describe_batch(pipeline: IndexedPipeline, request: Request, report: Report) -> BatchInfo:
    """What is known about a batch.

    Args:
        pipeline: What it is a batch of.
        request: Its samples.
        report: What came of reading them.
    """
    epoch, step_in_epoch = divmod(request.step, pipeline.steps_per_epoch)
    plan = pipeline.plan.buckets[request.bucket]
    axes = plan.axes if pipeline.host is None else pipeline.host.layout(pipeline.plan).of(request.bucket).axes
    words, source = np.frombuffer(request.run, np.uint32), pipeline.source
    assert request.epochs is not None and request.positions is not None and source is not None
    return BatchInfo(
        request.step,
        epoch,
        step_in_epoch,
        np.where(request.real, request.indices, -1).reshape(axes),
        np.where(request.real, request.positions.astype(np.int64), -1).reshape(axes),
        _by_name(report.extras, len(request.real)),
        request.place,
        report.failed,
        functools.partial(sample_keys, words, request.epochs, request.positions),
        functools.partial(item_of, source),
        functools.partial(_sources_of, plan.selection, words, request.epochs, request.positions),
    )


def _sources_of(
    selection: Selection | None, words: np.ndarray, epochs: np.ndarray, positions: np.ndarray
) -> tuple[tuple[str, ...], np.ndarray] | None:
    return None if selection is None else sources_at(selection, words, epochs, positions.astype(np.uint64))


def _by_name(extras: dict[int, Any], rows: int) -> dict[str, list[Any]]:
    """What was returned per row, as a list of rows per name."""
    names = dict.fromkeys(name for extra in extras.values() for name in extra)
    return {name: [extras.get(row, {}).get(name) for row in range(rows)] for name in names}
