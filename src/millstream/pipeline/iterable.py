"""Samples that are drawn in order, with their stages."""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

from millstream.pipeline.placement import BatchPlacement, BatchShardings
from millstream.pipeline.state import IterableState, Origin, check_origin, check_position, is_traced, key_words
from millstream.plan.plan import STEP_LIMIT, Plan
from millstream.reading.contracts import IndexedSource, PyTree
from millstream.reading.drawing import BEGINNING, Progress
from millstream.reading.host_source import HostSource
from millstream.reading.iterable import IterableSource
from millstream.reading.samples import ObjectSpec

if TYPE_CHECKING:
    from millstream.pipeline.pipeline import Pipeline
    from millstream.pipeline.transform import Transform


@dataclasses.dataclass(frozen=True, eq=False)
class IterablePipeline:
    """An `IterableSource` with its stages: a stream that is drawn on the host and finished in a compiled program.

    Attributes:
        iterable: The source.
        body: The same pipeline over samples that have numbers: their specs, host stages and compiled stages. Its plan
            says how they are batched; which samples there are, the iterable says.
    """

    iterable: IterableSource
    body: "Pipeline"

    def __repr__(self) -> str:
        from millstream.pipeline.summary import pipeline_text  # which knows all kinds of pipelines

        return pipeline_text(self)

    @property
    def stages(self) -> tuple["Transform", ...]:
        return self.body.stages

    @property
    def source(self) -> IndexedSource | None:
        """What host stages read, sample by sample."""
        return self.body.source

    @property
    def plan(self) -> Plan:
        return self.body.plan

    @property
    def objects(self) -> ObjectSpec | None:
        return self.body.objects

    @property
    def placement(self) -> BatchPlacement | None:
        return self.body.placement

    @property
    def steps_per_epoch(self) -> Any:  # `Stream` has an int
        """Batches in a pass; None if only the iterable knows."""
        return None if self.iterable.length is None else self.body.steps_per_epoch

    def steps_left(self, state: IterableState) -> int | None:
        """Batches from a state to the end of its pass, or of the next one if only a rest is left that is dropped."""
        if self.iterable.length is None:
            return None
        given = Progress.of(state.progress).given
        return self.steps_per_epoch - given // math.prod(self.plan.axes) or self.steps_per_epoch

    @property
    def drops(self) -> bool:
        """Whether samples that do not fill a batch at the end of a pass are left out."""
        return any(batching.ending == "drop" for batching in self.plan.batchings)

    @property
    def is_random(self) -> bool:
        """Whether batches depend on the key."""
        host = self.body.host
        return self.iterable.slots > 1 or self.body.is_keyed or (host is not None and host.source.keyed)

    @property
    def is_untouched(self) -> bool:
        """Whether samples come as they are read, so that functions on the host may still be added."""
        return self.body.is_untouched

    def read_through(self, source: HostSource) -> "IterablePipeline":
        """The pipeline whose samples are those of a source over this one's source; there are no stages yet."""
        return dataclasses.replace(self, body=self.body.read_through(source))

    def then(self, transform: "Transform") -> "IterablePipeline":
        """This pipeline with one more stage."""
        body = self.body.then(transform)
        if not transform.batches:
            return dataclasses.replace(self, body=body)
        *earlier, batching = body.plan.batchings
        if earlier:
            raise TypeError(
                "An IterableSource can be batched once. For batches of batches reshape them after the BatchTransform, "
                "or use an indexed source."
            )
        if batching.ending == "wrap":
            raise ValueError(
                f"BatchTransform({batching.size}, pad_last_batch=False) completes the last batch from the next "
                "epoch. A pass over an IterableSource ends when it ends: use pad_last_batch=True or drop_last=True."
            )
        return dataclasses.replace(self, body=body)

    def over(self, shardings: BatchShardings) -> "IterablePipeline":
        """This pipeline with its batches over a mesh."""
        return dataclasses.replace(self, body=self.body.over(shardings))

    @functools.cached_property
    def origin(self) -> Origin:
        """What this pipeline is, in words."""
        samples = "" if self.iterable.length is None else f"{self.iterable.length:,} samples, "
        drawn = f"{samples}shuffle buffer of {self.iterable.shuffle_buffer:,}"
        return ("iterable", drawn), *(pair for pair in self.body.origin if pair[0] not in ("samples", "ordering"))

    def init_state(self, key: jax.Array | np.ndarray) -> IterableState:
        """The state of the run with this key before its first batch."""
        words: Any = key_words("init_state", key)
        step: Any = np.zeros((), np.uint32)
        progress: Any = BEGINNING.words()
        return IterableState(words, step, self.origin, progress)

    def check_state(self, caller: str, state: Any) -> None:
        """Refuse a state that a different pipeline made, and one that no run can have."""
        check_origin(caller, state, self.origin)
        if is_traced(state):
            return
        check_position(caller, state, STEP_LIMIT)
        words, slots = np.asarray(getattr(state, "progress", ())), self.iterable.slots
        if words.shape == (5,) and words.dtype == np.uint32:
            _, given, drawn, _ = Progress.of(words)
            if given <= drawn <= slots + given and (drawn > 0) == (given > 0):
                return
        raise ValueError(
            f"{caller} needs a state as loader.init_state or an iterator has given it. Its progress is "
            f"{words.tolist()}."
        )

    def element_spec(self) -> PyTree:
        """The shape and dtype of one batch, derived by tracing; None for Python objects."""
        return self.body.element_spec()

    def next(self, state: IterableState) -> NoReturn:
        """Refuse to be traced."""
        self.refuse_program("A compiled program")

    def refuse_program(self, caller: str) -> NoReturn:
        """Say why a compiled program cannot draw from an iterable, and what can."""
        raise TypeError(
            f"{caller} cannot draw from an IterableSource: a compiled program knows its batches by their numbers, and "
            "an iterable has none. Use iterate, next_batch outside jax.jit, or a loop without fuse=. Samples that "
            "have an index work everywhere: ms.DatasetSource(dataset), or ms.DiskSampleSource(length, fn)."
        )
