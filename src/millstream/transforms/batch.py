"""Batching."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import ClassVar, overload

from millstream.pipeline.bucketed import BucketedPipeline
from millstream.pipeline.iterable import IterablePipeline
from millstream.pipeline.phased import phased
from millstream.pipeline.pipeline import Pipeline, as_stream
from millstream.pipeline.transform import Transform
from millstream.plan.plan import Batching, Ending
from millstream.reading.contracts import IndexedSource, PyTree, Stream
from millstream.reading.derived_sources import CollatedSource
from millstream.reading.iterable import IterableSource
from millstream.reading.samples import TRIED
from millstream.text.errors import (
    describe_value,
    function_name,
    require_bool,
    require_callable,
    require_int,
    require_steps,
)
from millstream.text.keywords import answer_keywords
from millstream.text.summaries import call_text

_MOST_ROWS = (1 << 31) - 1  # that an array of a compiled program can have


@answer_keywords
@dataclasses.dataclass(frozen=True)
class BatchTransform(Transform):
    """Stack `batch_size` elements along a new first axis.

    Example:
        >>> loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(10)}), ms.BatchTransform(4)])
        >>> loader.steps_per_epoch, loader.element_spec()["x"].shape
        (3, (4,))

    Args:
        batch_size: Elements per batch. Batches can be batched again. A dict such as `{0: 256, 10_000: 512}` changes the
            size at these steps of the run: the samples come in the same order, epochs stay complete, and a step is
            compiled once for each size.
        drop_last: Leave out the samples that do not fill a batch at the end of an epoch. Wins over `pad_last_batch`.
        pad_last_batch: Complete the last batch of an epoch with zeros whose mask is False. If both are False, it is
            completed with the first samples of the next epoch, which then starts that much later.
        collate: `collate(samples) -> batch`, a Python function that makes a batch of a list of samples, which may be
            any objects; it runs where they are read. Arrays with a row per sample, of the same shapes every time,
            continue into compiled stages; anything else is handed out as it is, by `iterate`.
    """

    batches: ClassVar[bool] = True

    batch_size: int | Mapping[int, int]
    drop_last: bool = False
    pad_last_batch: bool = True
    collate: Callable[[list[PyTree]], PyTree] | None = None

    def __post_init__(self) -> None:
        if self.collate is not None:
            require_callable("BatchTransform", "collate", self.collate, "samples")
        if isinstance(self.batch_size, Mapping):
            require_steps("BatchTransform", "batch_size", self.batch_size, "{0: 256, 10_000: 512}")
        for size in self._sizes.values():
            require_int("BatchTransform", "batch_size", size, least=1)
            if size > _MOST_ROWS:
                raise ValueError(f"BatchTransform needs a batch_size of at most {_MOST_ROWS:,}. Got {size:,}.")
        for name in ("drop_last", "pad_last_batch"):
            require_bool("BatchTransform", name, getattr(self, name))

    @property
    def _sizes(self) -> Mapping[int, int]:
        """The batch size from each step on."""
        return self.batch_size if isinstance(self.batch_size, Mapping) else {0: self.batch_size}

    @property
    def name(self) -> str:
        return "BatchTransform" if self.collate is None else f"BatchTransform({function_name(self.collate)})"

    @overload
    def __call__(self, source: IndexedSource | Pipeline) -> Pipeline: ...
    @overload
    def __call__(self, source: Stream | IterableSource) -> Stream: ...
    def __call__(self, source: IndexedSource | Stream | IterableSource) -> Stream:
        """Put this stage after a source."""
        inner = as_stream(source)
        if isinstance(self.batch_size, Mapping):
            return self._by_step(inner, self.batch_size)
        if self.collate is None or isinstance(inner, BucketedPipeline):
            return super().__call__(source)
        if not isinstance(inner, Pipeline | IterablePipeline) or inner.stages or inner.source is None:
            raise TypeError(
                "BatchTransform with a collate function works on samples as they are read, so it comes after the "
                "source or a HostMapTransform and before all compiled stages. Move those after it."
            )
        assert isinstance(self.batch_size, int)
        collated = CollatedSource(inner.source, self.collate, self.batch_size, inner.plan.first_indices(TRIED))
        return super().__call__(inner.read_through(collated))

    def _by_step(self, inner: Stream, sizes: Mapping[int, int]) -> Stream:
        """A pipeline whose batch size changes."""
        words = f"BatchTransform({dict(sizes)})"
        if not isinstance(inner, Pipeline) or inner.plan.batchings:
            raise TypeError(
                f"{words} makes batches of samples that have an index, so it comes after an indexed source and is the "
                f"only BatchTransform. Got {describe_value(inner)} before it."
            )
        inner = inner.ordered_for(math.gcd(*sizes.values()))
        parts = {start: dataclasses.replace(self, batch_size=size)(inner) for start, size in sizes.items()}
        if not all(part.plan.can_start for part in parts.values()):
            raise ValueError(
                f'{words} needs a source whose samples are shuffled, or in sequence. With "repeat" and "batchwise", '
                f"the same batches come back, which other sizes have not. Got {inner.plan.shuffle!r}."
            )
        return phased(parts) if len(parts) > 1 else parts[0]

    @property
    def ending(self) -> Ending:
        """What becomes of an epoch's last, incomplete batch."""
        return "drop" if self.drop_last else "pad" if self.pad_last_batch else "wrap"

    def batching(self, inner: int) -> Batching:
        assert isinstance(self.batch_size, int)
        if self.drop_last and inner < self.batch_size:
            raise ValueError(
                f"BatchTransform(batch_size={self.batch_size}, drop_last=True) would drop everything: "
                f"an epoch has only {inner} elements. Use a batch_size of at most {inner}, or drop_last=False."
            )
        return Batching(self.batch_size, self.ending, inner)

    def __repr__(self) -> str:
        return call_text(self)
