"""A pipeline whose batches have several shapes: one pipeline for each of them, read by the same readers."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np
from jax.typing import ArrayLike

from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.placement import BatchPlacement, BatchShardings
from millstream.pipeline.stages import stage_names
from millstream.pipeline.state import LoaderState, Origin, first_state
from millstream.plan.bucket_plan import BucketPlan
from millstream.plan.planned import PlannedSteps
from millstream.reading.contracts import IndexedSource, PyTree
from millstream.reading.host_source import HostSource
from millstream.reading.read_config import ReadConfig
from millstream.reading.samples import ObjectSpec

if TYPE_CHECKING:
    from millstream.pipeline.transform import Transform

_PADDED = "Put a PadTransform after buckets, such as ms.PadTransform({'ids': 0}): it pads to the length of each bucket."


@dataclasses.dataclass(frozen=True, eq=False)
class BucketedPipeline:
    """An indexed source with its stages, whose batches are made by buckets; its state is a key and a step.

    Attributes:
        plan: Which samples are in which batch.
        lengths: What samples are padded to, for each bucket.
        fill: The share of all places in the batches of an epoch that samples fill.
        source: Where the samples come from.
        host: How they are read, for all buckets together.
        stages: The first one makes the batches.
        sharding: Where batches lie, if they lie over a mesh.
    """

    plan: BucketPlan
    lengths: tuple[int, ...]
    fill: float
    source: IndexedSource | None
    host: ReadConfig
    stages: tuple["Transform", ...]
    shardings: BatchShardings | None = None

    def __repr__(self) -> str:
        from millstream.pipeline.summary import pipeline_text  # which knows all kinds of pipelines

        return pipeline_text(self)

    @functools.cached_property
    def buckets(self) -> tuple[Pipeline, ...]:
        """A pipeline for each shape."""
        if len(self.host.source.bucket_specs) != len(self.lengths):
            raise TypeError(f"These samples are in buckets by length, and nothing pads them. {_PADDED}")
        return tuple(
            Pipeline(None, plan, self.stages, self.source, self.host.of_bucket(number), self._placement(number))
            for number, plan in enumerate(self.plan.buckets)
        )

    @property
    def is_untouched(self) -> bool:
        """Whether samples come as they are read, so that functions on the host may still be added."""
        return len(self.stages) == 1

    def read_through(self, source: HostSource) -> "BucketedPipeline":
        """The pipeline whose samples are those of a source over this one's source; there are no stages yet."""
        if len(self.host.source.bucket_specs) > 1:
            raise TypeError(
                "PadTransform after buckets makes samples of several shapes, so it comes after all other stages that "
                "run on the host. Move it down, or use a MapTransform after it."
            )
        return dataclasses.replace(self, source=source, host=dataclasses.replace(self.host, source=source))

    def then(self, transform: "Transform") -> "BucketedPipeline":
        """This pipeline with one more stage."""
        if transform.batches:
            raise TypeError(f"buckets makes the batches. Leave out {transform!r}.")
        return dataclasses.replace(self, stages=(*self.stages, transform))

    def over(self, shardings: BatchShardings) -> "BucketedPipeline":
        """This pipeline with its batches over a mesh."""
        placed = dataclasses.replace(self, shardings=shardings)
        rows = tuple(BatchPlacement(shardings, plan.axes[0]).local_rows() for plan in self.plan.buckets)
        return placed.read_by(rows=rows)

    def read_by(self, **how: Any) -> "BucketedPipeline":
        """This pipeline with these fields of `ReadConfig`."""
        return dataclasses.replace(self, host=dataclasses.replace(self.host, **how))

    def _placement(self, bucket: int) -> BatchPlacement | None:
        return None if self.shardings is None else BatchPlacement(self.shardings, self.plan.buckets[bucket].axes[0])

    @property
    def placement(self) -> BatchPlacement | None:
        """Where the batches of the first bucket lie; the others lie over the same mesh."""
        return self._placement(0)

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.steps_per_epoch

    @functools.cached_property
    def origin(self) -> Origin:
        """What this pipeline is, in words."""
        whole, selection = dict(self.buckets[-1].origin), self.plan.selection
        sizes = zip(self.lengths, self.plan.buckets, strict=True)
        return (
            ("samples", f"{self.plan.samples:,}"),
            *(() if selection is None else (("view", selection.words),)),
            ("ordering", self.plan.shuffle.words),
            ("buckets", ", ".join(f"{plan.samples:,} of {length} by {plan.axes[0]}" for length, plan in sizes)),
            ("sample", whole["sample"]),
            ("stages", ", ".join(stage_names(self.stages)[1:]) or "none"),
        )

    @property
    def objects(self) -> ObjectSpec | None:
        """Batches of buckets are arrays."""
        return None

    @property
    def is_keyed(self) -> bool:
        """Whether a stage is random."""
        return any(stage.keyed for stage in self.stages)

    @property
    def is_random(self) -> bool:
        """Whether batches depend on the key: samples are shuffled or drawn, or a stage is random."""
        return self.plan.is_random or self.is_keyed or self.host.source.keyed

    @property
    def sources(self) -> list[tuple[str, IndexedSource]]:
        """Where samples come from, with what to call their contents; none after `jax.jit` or `jax.tree.map`."""
        return [] if self.source is None else [("contents", self.source)]

    def planned_steps(self, words: np.ndarray) -> PlannedSteps:
        """The steps of a run, planned on the host, with the rows that are read and what compiled stages want to know.

        Args:
            words: The run's raw key data, uint32.
        """
        coordinates = tuple(bucket.coordinates for bucket in self.buckets)
        return PlannedSteps(self.plan, words, self.host.rows, coordinates)

    def init_state(self, key: jax.Array | np.ndarray, step: int | ArrayLike = 0) -> LoaderState:
        """The state of the run with this key before batch number `step`."""
        return first_state(key, step, self.plan.step_limit, self.origin)

    def next(self, state: LoaderState) -> NoReturn:
        """A compiled program has one shape, so it cannot draw these batches."""
        raise TypeError(
            f"Batches of buckets have {len(self.lengths)} shapes, and a compiled program has one: fuse=, scan_epoch "
            "and next_batch inside jax.jit cannot draw them. Use iterate, next_batch outside jax.jit, or a loop "
            "without fuse=; your step is compiled once for each shape."
        )

    def element_spec(self) -> NoReturn:
        """There is one for each bucket."""
        raise TypeError(f"Batches of buckets have {len(self.lengths)} shapes. Ask loader.element_specs().")

    def trace(self) -> tuple[list[PyTree], tuple[str, ...]]:
        """The shape and dtype of a batch of each bucket, and the names of the stages that set the mask."""
        traced = [bucket.trace() for bucket in self.buckets]
        masking = dict.fromkeys(name for _, names in traced for name in names)
        return [spec for spec, _ in traced], tuple(masking)


jax.tree_util.register_pytree_node(
    BucketedPipeline,
    lambda pipeline: (
        (),
        (pipeline.plan, pipeline.lengths, pipeline.fill, None, pipeline.host, pipeline.stages, pipeline.shardings),
    ),
    lambda static, _: BucketedPipeline(*static),
)
