"""A pipeline that changes at given steps of a run: in its batch size, its stages, or all of it."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np
from jax.typing import ArrayLike

from millstream.pipeline.bucketed import BucketedPipeline
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.placement import BatchPlacement, BatchShardings
from millstream.pipeline.state import LoaderState, Origin, first_state, from_step, without_steps
from millstream.plan.phases import PhasedPlan, phased_plan
from millstream.plan.plan import Plan
from millstream.reading.contracts import PyTree
from millstream.reading.read_config import ReadConfig
from millstream.reading.samples import ObjectSpec

if TYPE_CHECKING:
    from millstream.pipeline.transform import Transform


@dataclasses.dataclass(frozen=True, eq=False)
class PhasedPipeline:
    """Pipelines that take over from one another at given steps; the state is a key and a step.

    Attributes:
        phases: The pipelines, each with its plan as it is in this run.
        starts: The step at which each begins; the first one is 0.
    """

    phases: tuple[Pipeline | BucketedPipeline, ...]
    starts: tuple[int, ...]

    def __repr__(self) -> str:
        from millstream.pipeline.summary import pipeline_text  # which knows all kinds of pipelines

        return pipeline_text(self)

    @functools.cached_property
    def plan(self) -> PhasedPlan:
        """Which samples are in which batch."""
        return PhasedPlan(tuple(phase.plan for phase in self.phases), self.starts)

    @property
    def stages(self) -> tuple["Transform", ...]:
        """The stages of all phases, each one once."""
        return tuple(dict.fromkeys(stage for phase in self.phases for stage in phase.stages))

    @property
    def host(self) -> ReadConfig | None:
        """How samples are read in the first phase that reads them on the host; None if none does."""
        return next((phase.host for phase in self.phases if phase.host is not None), None)

    @property
    def placement(self) -> BatchPlacement | None:
        """Where the batches of the first phase lie; the others lie over the same mesh."""
        return self.phases[0].placement

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the first epoch."""
        return self.plan.steps_per_epoch

    def then(self, transform: "Transform") -> "PhasedPipeline":
        """This pipeline with one more stage in all phases."""
        if transform.batches:
            raise TypeError(f"Batches whose size changes by step cannot be batched again. Leave out {transform!r}.")
        return self._of([phase.then(transform) for phase in self.phases])

    @property
    def is_weighted(self) -> bool:
        """Whether samples are drawn by weights that may be changed, in all phases."""
        return all(isinstance(phase, Pipeline) and phase.is_weighted for phase in self.phases)

    def with_weights(self, caller: str, weights: np.ndarray) -> "PhasedPipeline":
        """This pipeline, which is weighted and not yet over a mesh, with its samples drawn by other weights."""
        return self._of([phase.with_weights(caller, weights) for phase in self.phases if isinstance(phase, Pipeline)])

    def over(self, shardings: BatchShardings) -> "PhasedPipeline":
        """This pipeline with its batches over a mesh."""
        return self._of([phase.over(shardings) for phase in self.phases])

    def read_by(self, **how: Any) -> "PhasedPipeline":
        """This pipeline with its samples read on the host, with these fields of `ReadConfig`."""
        read = []
        for phase, start in zip(self.phases, self.starts, strict=True):
            cache = how.get("cache")
            own = {} if cache is None else {"cache": cache.of_phase(start, phase.origin)}
            read.append(phase.read_by(**{**how, **own}))
        return self._of(read)

    def _of(self, phases: Sequence[Pipeline | BucketedPipeline]) -> "PhasedPipeline":
        return PhasedPipeline(tuple(phases), self.starts)

    @functools.cached_property
    def origin(self) -> Origin:
        """What this pipeline is, in words: the first phase, and what changes from a step on.

        So the states of runs are known to be of one pipeline as long as only phases that come later are different.
        """
        known = without_steps(self.phases[0].origin)
        words = list(known.items())
        for phase, start in zip(self.phases[1:], self.starts[1:], strict=True):
            now = without_steps(phase.origin)
            changed = {what: now.get(what, "none") for what in {**known, **now} if known.get(what) != now.get(what)}
            words += [(from_step(start, what), said) for what, said in changed.items()]
            if not changed:
                words.append((from_step(start, "phase"), "as before"))
            known = now
        changes = {change for phase in self.phases if isinstance(phase, Pipeline) for change in phase.changes}
        words += [(from_step(self._step_of(after), "weights"), digest[:12]) for after, digest in sorted(changes)]
        return tuple(words)

    def _step_of(self, sample: int) -> int:
        """The first step that has this sample of a run or a later one."""
        ends = (*self.starts[1:], None)
        for phase, start, end in zip(self.phases, self.starts, ends, strict=True):
            step = start + (phase.step_of(sample) if isinstance(phase, Pipeline) else 0)
            if end is None or step < end:
                return step
        raise AssertionError("the last phase has no end")

    @property
    def objects(self) -> ObjectSpec | None:
        """What the samples are, if they are Python objects in a phase."""
        return next((phase.objects for phase in self.phases if phase.objects is not None), None)

    @property
    def is_random(self) -> bool:
        """Whether batches depend on the key in a phase."""
        return any(phase.is_random for phase in self.phases)

    @property
    def sources(self) -> list[tuple[str, Any]]:
        """Where samples come from, with what to call their contents; a source of several phases comes once."""
        found: list[tuple[str, Any]] = []
        for phase, start in zip(self.phases, self.starts, strict=True):
            for what, source in phase.sources:
                if not any(source is known for _, known in found):
                    found.append((from_step(start, what) if start else what, source))
        return found

    def init_state(self, key: jax.Array | np.ndarray, step: int | ArrayLike = 0) -> LoaderState:
        """The state of the run with this key before batch number `step`."""
        return first_state(key, step, self.plan.step_limit, self.origin)

    def state_in(self, phase: int, state: LoaderState, step: int) -> LoaderState:
        """The state of a phase's own pipeline before its batch number `step`, in the run of a state."""
        return LoaderState(state.key, np.asarray(step, np.uint32), self.phases[phase].origin)  # pyright: ignore[reportArgumentType]

    def next(self, state: LoaderState) -> NoReturn:
        """A compiled program has one shape, and which one depends on the step."""
        raise TypeError(
            "Batches change from one phase of the run to the next, and a compiled program has one shape: next_batch "
            "inside jax.jit cannot draw them. Use iterate, scan_epoch, next_batch outside jax.jit, or a loop, also "
            "with fuse=; your step is compiled once for each phase."
        )

    def element_spec(self) -> NoReturn:
        """There is one for each phase."""
        raise TypeError(f"Batches of this loader have {len(self.phases)} phases. Ask loader.element_specs().")

    def trace(self) -> tuple[list[PyTree], tuple[str, ...]]:
        """The shapes and dtypes of batches in all phases, and the names of the stages that set the mask."""
        traced = [phase.trace() for phase in self.phases]
        specs = [
            spec
            for phase, (found, _) in zip(self.phases, traced, strict=True)
            for spec in (found if isinstance(phase, BucketedPipeline) else [found])
        ]
        return specs, tuple(dict.fromkeys(name for _, names in traced for name in names))


jax.tree_util.register_pytree_node(
    PhasedPipeline,
    lambda pipeline: (pipeline.phases, pipeline.starts),
    lambda starts, phases: PhasedPipeline(tuple(phases), starts),
)


def phased(phases: Mapping[int, Pipeline | BucketedPipeline]) -> PhasedPipeline:
    """Pipelines by the step at which each begins, each continuing where the one before it ends, if it can."""
    starts = tuple(sorted(phases))
    plan = phased_plan([phases[start].plan for start in starts], starts)
    parts: list[Any] = [
        dataclasses.replace(phases[start], plan=own) if isinstance(own, Plan) else phases[start]
        for start, own in zip(starts, plan.phases, strict=True)
    ]
    return PhasedPipeline(tuple(parts), starts)
