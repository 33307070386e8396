"""The pipeline: an indexed source and its stages as one pure function of (key, step).

The way of a batch: the plan turns the step into sample indices; one gather fetches them; stages before the batch are
`vmap`ped over its rows, stages after it see it whole. Nothing is drawn one by one, so any step can be computed alone.
"""

import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING, Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from millstream.pipeline.iterable import IterablePipeline
from millstream.pipeline.placement import BatchPlacement, BatchShardings
from millstream.pipeline.read_in_graph import read_in_graph
from millstream.pipeline.rows import blank, sample_spec, take
from millstream.pipeline.stages import apply_stage, element_keys, keeps_mask, stage_names
from millstream.pipeline.state import LoaderState, Origin, check_origin, first_state, from_step, is_traced
from millstream.plan import order
from millstream.plan.keys import Array
from millstream.plan.plan import Plan, Rows, Start
from millstream.plan.planned import Coordinates, PlannedSteps
from millstream.plan.selection import Drawn, Selection
from millstream.plan.weights import drawn_by
from millstream.reading.blocks import stored_blocks
from millstream.reading.contracts import IndexedSource, PyTree, Stream
from millstream.reading.host_source import HostSource, as_host_source
from millstream.reading.iterable import IterableSource
from millstream.reading.read_config import ReadConfig
from millstream.reading.samples import ObjectSpec
from millstream.reading.view import View
from millstream.text.errors import describe_value
from millstream.text.wrapping import source_advice

if TYPE_CHECKING:
    from millstream.pipeline.transform import Transform

MAX_IN_GRAPH = (1 << 31) - 1


def most_samples(source: IndexedSource) -> int:
    """How many samples a plan over a source can have: compiled programs, which gather from arrays, have 32 bits."""
    base = source.source if isinstance(source, View) else source
    return order.MAX_SAMPLES if base.arrays is None else MAX_IN_GRAPH


@overload
def as_stream(source: "IndexedSource | Pipeline") -> "Pipeline": ...
@overload
def as_stream(source: object) -> Stream: ...
def as_stream(source: object) -> Stream:
    """A pipeline over an indexed source, or the stream itself. Refuses anything else."""
    if isinstance(source, type):
        raise TypeError(
            f"A pipeline starts with a source. Got the class {source.__name__}: write {source.__name__}(...)."
        )
    if isinstance(source, Stream):
        return source
    if isinstance(source, IterableSource):
        return IterablePipeline(source, _over(source.items, Plan(len(source.items), source.items.ordering)))
    if isinstance(source, IndexedSource):
        most = most_samples(source)
        if len(source) > most:
            who = "a compiled program" if most == MAX_IN_GRAPH else "a plan"
            raise ValueError(
                f"{type(source).__name__} has {len(source):,} samples; {who} can index at most {most:,} rows. Split "
                "the data into several sources."
            )
        return _over(source, _plan_of(source))
    advice = source_advice(source) or (
        "A source has `spec`, `read`, `arrays`, `ordering` and a length, or is a stream with "
        "`init_state`, `next`, `element_spec` and `steps_per_epoch`."
    )
    raise TypeError(
        f"A pipeline starts with a source, such as ArraySampleSource(data). Got {describe_value(source)}. {advice}"
    )


def _plan_of(source: IndexedSource) -> Plan:
    """The plan of the samples of a source or a view, without batches."""
    plan = Plan(len(source), source.ordering, selection=source.selection if isinstance(source, View) else None)
    return plan.in_blocks(stored_blocks(plan.shuffle, source)) if plan.shuffle.mode == "blocks" else plan


def _over(source: IndexedSource, plan: Plan) -> "Pipeline":
    """A pipeline without stages, of what lies below views: they are in the plan."""
    source = source.source if isinstance(source, View) else source
    if source.arrays is None:
        return Pipeline(None, plan, (), source, ReadConfig(as_host_source(source)))
    return Pipeline(source.arrays, plan, (), source, tables=_placed_tables(plan))


def _placed_tables(plan: Plan) -> tuple[Any, ...]:
    # Placed once, as the arrays are: an array of NumPy would be sent to the device whenever a program is called.
    return () if plan.selection is None else jax.tree.map(jax.device_put, plan.selection.merged_tables())


@dataclasses.dataclass(frozen=True, eq=False)
class Pipeline:
    """An indexed source with its stages; itself a stream, whose state is a key and a step."""

    arrays: PyTree | None
    plan: Plan
    stages: tuple["Transform", ...]
    source: IndexedSource | None = None
    host: ReadConfig | None = None  # how the samples are read, unless they are gathered from the arrays
    placement: BatchPlacement | None = None  # where batches lie, if they lie over a mesh
    tables: tuple[Any, ...] = ()  # of the plan's selection, for compiled programs that gather

    def __repr__(self) -> str:
        from millstream.pipeline.summary import pipeline_text  # which knows all kinds of pipelines

        return pipeline_text(self)

    def read_through(self, source: HostSource) -> "Pipeline":
        """The pipeline whose samples are those of a source over this one's source; there are no stages yet."""
        return _over(source, self.plan)

    def planned_on_host(self) -> "Pipeline":
        """The pipeline as `planned` needs it: it is told indices, so views of equal length share their programs."""
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, selection=None), source=None, tables=())

    def then(self, transform: "Transform") -> "Pipeline":
        """This pipeline with one more stage."""
        batched = self
        if transform.batches:
            batched = self._with_plan(self.plan.batched(transform.batching(self.plan.steps_per_epoch)))
        return dataclasses.replace(batched, stages=(*self.stages, transform))

    def ordered_for(self, batch_size: int) -> "Pipeline":
        """This pipeline with an order that batches of this size, and multiples of it, have in common."""
        return self._with_plan(self.plan.ordered_for(batch_size))

    def _with_plan(self, plan: Plan) -> "Pipeline":
        kept = plan.selection is self.plan.selection or self.host is not None
        return dataclasses.replace(self, plan=plan, tables=self.tables if kept else _placed_tables(plan))

    @property
    def is_weighted(self) -> bool:
        """Whether samples are drawn by weights that may be changed."""
        return self._drawn is not None

    @property
    def _drawn(self) -> Drawn | None:
        """The draws by weights that were given for each sample."""
        function = None if self.plan.view is None else self.plan.view.functions[0]
        return function if isinstance(function, Drawn) and function.kind != "balanced" else None

    def with_weights(self, caller: str, weights: np.ndarray) -> "Pipeline":
        """This pipeline, which is weighted and not yet over a mesh, with its samples drawn by other weights."""
        selection, before = self.plan.selection, self._drawn
        assert selection is not None and before is not None
        once = before.kind == "once"
        function, table = drawn_by(caller, weights, before.samples, before.length, once=once)
        at = selection.functions.index(before)  # after the order of a block shuffle

        def put(parts: tuple[Any, ...], new: Any) -> tuple[Any, ...]:
            return (*parts[:at], new, *parts[at + 1 :])

        changed = Selection(put(selection.functions, function), put(selection.tables, table))
        tables = put(self.tables, jax.device_put(table)) if self.tables else ()
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, selection=changed), tables=tables)

    def over(self, shardings: BatchShardings) -> "Pipeline":
        """This pipeline with its batches over a mesh."""
        placement = BatchPlacement(shardings, self.plan.batchings[-1].size)
        if self.host is None:
            arrays, tables = placement.replicate((self.arrays, self.tables))
            return dataclasses.replace(self, arrays=arrays, tables=tables, placement=placement)
        rows, cache = placement.local_rows(), self.host.cache
        if cache is not None and len(rows) < placement.size:
            cache = cache.of_rows(rows, placement.size)
        return dataclasses.replace(self.read_by(rows=(rows,), cache=cache), placement=placement)

    def read_by(self, **how: Any) -> "Pipeline":
        """This pipeline with its samples read on the host, with these fields of `ReadConfig`."""
        host = self.host
        if host is None:
            assert self.source is not None
            host = ReadConfig(as_host_source(self.source))
        return dataclasses.replace(self, arrays=None, tables=(), host=dataclasses.replace(host, **how))

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.steps_per_epoch

    @functools.cached_property
    def origin(self) -> Origin:
        """What this pipeline is, in words."""
        leaves = jax.tree_util.tree_leaves_with_path(self.sample_spec())
        sample = ", ".join(f"{jax.tree_util.keystr(path)} {a.dtype}{list(a.shape)}" for path, a in leaves)
        batches = ", ".join(f"{b.size} ({b.ending})" for b in self.plan.batchings)
        view, begins = self.plan.view, [b.start for b in self.plan.batchings if b.start != Start()]
        return (
            ("samples", f"{self.plan.samples:,}"),
            *(() if view is None else (("view", view.words),)),
            ("ordering", self.plan.order_words),
            ("batches of", batches or "none"),
            *(("begins", start.words) for start in begins),
            ("sample", sample or "Python objects"),
            ("stages", ", ".join(stage_names(self.stages)) or "none"),
            *((from_step(self.step_of(after), "weights"), digest[:12]) for after, digest in self.changes),
        )

    @property
    def changes(self) -> list[tuple[int, str]]:
        """After how many samples of a run what is selected changes, and what stands for that."""
        return [] if self.plan.view is None else self.plan.view.changes

    def step_of(self, sample: int) -> int:
        """The first step that has this sample of a run or a later one; 0 if that is not known."""
        return self.plan.batchings[0].step_of(sample) if len(self.plan.batchings) == 1 else 0

    @property
    def objects(self) -> ObjectSpec | None:
        """What the samples are, if they are Python objects."""
        spec = None if self.host is None else self.host.source.sample_spec
        return spec if isinstance(spec, ObjectSpec) else None

    def sample_spec(self) -> PyTree:
        """The shape and dtype of one sample as the source gives it."""
        if self.host is not None:
            return self.host.source.spec()
        return sample_spec(self.arrays)

    def init_state(self, key: jax.Array | np.ndarray, step: int | ArrayLike = 0) -> LoaderState:
        """The state of the run with this key before batch number `step`."""
        return first_state(key, step, self.plan.step_limit, self.origin)

    def next(self, state: LoaderState, *, apart: bool = False) -> tuple[PyTree, jax.Array, LoaderState]:
        """The batch of this state, its mask and the state after it."""
        check_origin("next", state, self.origin)
        if not is_traced((state, self.arrays)):
            return _compiled_next(self, state)
        value, mask = self.at(state.key, state.step, apart=apart)
        # A compiled program cannot raise. Where steps can be counted no further, batches are empty and the state stays.
        countable = state.step < np.uint32(self.plan.step_limit)
        after = state.step + jnp.asarray(countable, np.uint32)
        return value, mask & countable, dataclasses.replace(state, step=after)

    def element_spec(self) -> PyTree:
        """The shape and dtype of one batch, derived by tracing; None for Python objects."""
        return self.trace()[0]

    def trace(self) -> tuple[PyTree, tuple[str, ...]]:
        """The shape and dtype of one batch, None for Python objects, and the names of the stages that set its mask."""
        if self.objects is not None:
            self.objects.require_samples()
            for name, stage in zip(stage_names(self.stages), self.stages, strict=True):
                if not stage.batches:
                    self.objects.require_host(name)
            return None, ()
        masking: list[str] = []
        spec = jax.eval_shape(lambda *given: self.planned(*given, masking=masking)[0], *self.planned_specs())
        return spec, tuple(masking)

    def planned_specs(self) -> tuple[Any, Any, Any]:
        """The shapes and dtypes of key, numbers and rows that `planned` takes."""
        words = jax.ShapeDtypeStruct((2,), np.uint32)
        numbers = jax.ShapeDtypeStruct((self.coordinates.size,), np.uint32)
        return words, numbers, None if self.host is None else self.row_specs()

    def row_specs(self) -> list[Any]:
        """The shape and dtype of the samples of one (global) batch, leaf by leaf."""
        leaves = jax.tree.leaves(self.sample_spec())
        return [jax.ShapeDtypeStruct((*self.plan.axes, *leaf.shape), leaf.dtype) for leaf in leaves]

    @functools.cached_property
    def coordinates(self) -> Coordinates:
        """What `planned` wants to know of a step."""
        level = len(self.plan.batchings)
        keyed = []
        for stage in self.stages:
            level -= stage.batches
            if stage.keyed and level not in keyed:
                keyed.append(level)
        return Coordinates(self.plan, self.host is None, tuple(keyed))

    @property
    def buckets(self) -> "tuple[Pipeline, ...]":
        """The pipelines of the shapes that batches have: this one alone."""
        return (self,)

    def planned_steps(self, words: np.ndarray) -> PlannedSteps:
        """The steps of a run, planned on the host, with the rows that are read and what compiled stages want to know.

        Args:
            words: The run's raw key data, uint32.
        """
        rows = None if self.host is None else self.host.rows
        return PlannedSteps(self.plan, words, rows, (self.coordinates,))

    @property
    def is_untouched(self) -> bool:
        """Whether samples come as they are read, so that functions on the host may still be added."""
        return not self.stages

    @property
    def is_keyed(self) -> bool:
        """Whether a stage is random."""
        return any(stage.keyed for stage in self.stages)

    @property
    def is_random(self) -> bool:
        """Whether batches depend on the key: samples are shuffled or drawn, or a stage is random."""
        return self.plan.is_random or self.is_keyed or (self.host is not None and self.host.source.keyed)

    @property
    def sources(self) -> list[tuple[str, IndexedSource]]:
        """Where samples come from, with what to call their contents; none after `jax.jit` or `jax.tree.map`."""
        return [] if self.source is None else [("contents", self.source)]

    def at(self, words: Array, step: Array, *, apart: bool = False) -> tuple[PyTree, jax.Array]:
        """Batch number `step` of the run with this key, and its mask. Pure and traceable, with its plan.

        Args:
            words: The run's raw key data, uint32.
            step: The batch's number.
            apart: Whether the program makes this batch and nothing else; the values are the same, their making differs.
        """
        apart = apart and self.placement is None  # those ways of making a batch are for one device
        if self.host is not None:
            found = read_in_graph(self.host, self.coordinates, words, step)
            return self.planned(words, found.numbers, found.rows, found.intact, apart=apart)
        levels = self.plan.rows_at(jnp, words, step)
        positions = self.plan.positions(jnp, words, levels)
        indices = self.plan.indices(jnp, words, levels[-1].epoch, positions, self.tables)
        levels[-1] = dataclasses.replace(levels[-1], element=positions)
        return self._through_stages(words, levels, self._take(indices, levels[-1].mask, apart=apart), apart=apart)

    @property
    def _blanks_rows(self) -> bool:
        """Whether samples come to the first stage with zeros where there is nothing: it makes batches of them."""
        return self.host is not None or (bool(self.stages) and self.stages[0].batches)

    def _take(self, indices: jax.Array, mask: jax.Array, *, apart: bool) -> PyTree:
        """The samples of the arrays."""
        keep = mask if self._blanks_rows and any(batching.pads for batching in self.plan.batchings) else None
        return take(self.arrays, indices, apart=apart, keep=keep)

    def planned(
        self,
        words: Array,
        numbers: Array,
        rows: list[Any] | None = None,
        intact: Any = None,
        *,
        apart: bool = False,
        masking: list[str] | None = None,
    ) -> tuple[PyTree, jax.Array]:
        """A batch whose step was planned on the host, and its mask: a gather and the stages.

        Args:
            words: The run's raw key data, uint32; None if no stage is random.
            numbers: The step's coordinates; None if there are none.
            rows: The leaves of its samples, if they were read on the host.
            intact: Which of these samples could be read; None if all could.
            apart: As in `at`.
            masking: Where to add the names of stages that return a mask other than the one they were given.
        """
        apart = apart and self.placement is None
        levels, indices = self.coordinates.unpack(jnp, numbers)
        if rows is None:
            assert indices is not None
            value = self._take(indices, levels[-1].mask, apart=apart)
        else:
            value = self._sample_tree(rows)
        return self._through_stages(words, levels, value, intact, apart=apart, masking=masking)

    def _sample_tree(self, leaves: list[Any]) -> PyTree:
        return jax.tree.unflatten(jax.tree.structure(self.sample_spec()), leaves)

    def _through_stages(
        self,
        words: Array,
        levels: list[Rows],
        value: PyTree,
        intact: Any = None,
        *,
        apart: bool,
        masking: list[str] | None = None,
    ) -> tuple[PyTree, jax.Array]:
        """What the stages make of the samples of a batch, whose elements are their positions."""
        levels, batchings = list(levels), iter(self.plan.batchings)
        level = levels.pop()
        mask = keep = level.mask if intact is None else level.mask & intact
        untouched = self._blanks_rows
        named = list(zip(stage_names(self.stages), self.stages, strict=True))
        keys: dict[str, jax.Array] = {}
        for number, (name, stage) in enumerate(named):
            if stage.batches:
                if (next(batchings).pads or intact is not None) and not untouched:
                    value, mask = blank((value, mask), keep, apart=apart)
                level, intact = levels.pop(), None
                keep = level.mask
                continue
            untouched = False
            key = None
            if stage.keyed:
                if name not in keys:
                    alike = itertools.takewhile(lambda one: not one[1].batches, named[number:])
                    names = [name for name, stage in alike if stage.keyed]
                    made = element_keys(words, names, level.epoch, level.element, level.high)
                    keys.update(zip(names, made, strict=True))
                key = keys[name]
            given = value, mask, key
            value, mask = apply_stage(name, stage, level.mask.ndim, *given)
            if masking is not None and not (mask is given[1] or keeps_mask(name, stage, level.mask.ndim, *given)):
                masking.append(name)
        return (value, mask) if self.placement is None else self.placement.constrain(value, mask)


# A source of arrays stays outside the traced tree: a compiled program depends on shapes and stages, not on who owns the
# data, so loaders of equal shape share their programs. A program that reads on the host does depend on the reader.
jax.tree_util.register_pytree_node(
    Pipeline,
    lambda pipeline: (
        (pipeline.arrays, pipeline.tables),
        (pipeline.plan, pipeline.stages, pipeline.host, pipeline.placement),
    ),
    lambda static, children: Pipeline(children[0], *static[:2], None, *static[2:], tables=children[1]),
)


@jax.jit
def _compiled_next(pipeline: Pipeline, state: LoaderState) -> tuple[PyTree, jax.Array, LoaderState]:
    return pipeline.next(state, apart=True)
