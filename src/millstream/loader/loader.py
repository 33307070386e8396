"""The loader."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import ArrayLike

from millstream.loader._answers import answer_habits
from millstream.loader._program import (
    Program,
    compiled_scan,
    compiled_steps,
    next_batch,
    part_after,
    scan,
)
from millstream.loader.batch_info import BatchInfo
from millstream.loader.build import build, check_first_sample, read_on_host, sharded, stages
from millstream.loader.feed import Cursor, Feed, check_run, feed_of, state_at
from millstream.loader.iterator import BatchIterator
from millstream.loader.phased_feed import PhasedFeed
from millstream.loader.summary import loader_html, loader_text
from millstream.pipeline.bucketed import BucketedPipeline
from millstream.pipeline.compose import SeekablePipeline, masking_stages
from millstream.pipeline.host_calls import call_and_wait
from millstream.pipeline.iterable import IterablePipeline
from millstream.pipeline.phased import PhasedPipeline
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.policy import has_policy, set_policy_state
from millstream.pipeline.state import S, check_origin, check_position, checked_step, is_traced
from millstream.pipeline.static_part import StaticPart, settled
from millstream.plan.phases import EpochLengths
from millstream.plan.plan import STEP_LIMIT
from millstream.reading import is_worker
from millstream.reading.caches import BatchCache
from millstream.reading.contracts import B, IndexedSource, PyTree, Stream
from millstream.reading.executor import Executor, InGraph
from millstream.reading.fingerprint import fingerprint
from millstream.reading.interrupts import Interrupts
from millstream.reading.iterable import IterableSource
from millstream.reading.reading import OnError
from millstream.reading.stats import LoaderStats
from millstream.sharding.batch_sharding import BatchSharding, LeafShardings, as_batch_shardings
from millstream.text import html
from millstream.text.errors import (
    describe_value,
    function_name,
    require_arguments,
    require_bool,
    require_choice,
    require_int,
    shortened,
)
from millstream.text.keywords import answer_keywords
from millstream.transforms.device import DevicePutTransform

if TYPE_CHECKING:
    from millstream.inspect import Explanation, Tuning, Verification

_LARGE_CONSTANT = 64 * 2**20

Carry = TypeVar("Carry")
Output = TypeVar("Output")
Value = TypeVar("Value")

# Stages that keep samples readable in any order, and those that may not: what comes after these has its own states.
IndexedStage = IndexedSource | IterableSource | Callable[[Pipeline], Pipeline]
Stage = IndexedSource | IterableSource | Stream | Callable[[Pipeline], Stream]


class LoaderOptions(TypedDict, total=False):
    """The options of a `DataLoader`."""

    executor: Executor | InGraph | None
    prefetch: int
    on_error: OnError
    cache: BatchCache | None
    sharding: BatchSharding | LeafShardings | None


@answer_habits
@answer_keywords
class DataLoader(Generic[B, S]):
    """A source and its stages as one stream of batches, in Python, under `jit` and in a `scan`.

    Example:
        >>> loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(10.0)}), ms.BatchTransform(4)])
        >>> state = loader.init_state(jax.random.key(0))
        >>> batch, state, mask = loader.next_batch(state)

    A loader is a pytree whose leaves are the data: passed to your jitted function as an argument, the data stay an
    argument. Closed over, they become a constant of the compiled function.

    A type checker cannot know what a list of stages makes. `loader: ms.DataLoader[MyBatch] = ms.DataLoader([...])` says
    it, and `iterate`, `next_batch`, `scan_epoch` and loops over this loader follow.

    Args:
        pipeline: A list, source first, or a composed source such as `BatchTransform(4)(source)`. A stage is a
            transform or any function from source to source.
        executor: Where samples are read. By default data that are arrays are gathered on the device (`InGraph()`), and
            others are read by threads as their source wishes. `Threads(n)` and `Processes(n)` read any indexed source.
        prefetch: How many batches are ready or in flight besides the one that is handed out. (Without an executor, a
            source that is read on the host has a `prefetch_size` of its own, in samples.)
        on_error: What becomes of a sample that raises while it is read: "raise" raises it, "skip item" masks its row,
            "skip batch" leaves its batch out (in a compiled program: masks all of it). What is skipped is counted.
        cache: A `BatchCache`, to keep on disk what is read.
        sharding: Where batches lie, if they lie over several devices: a mesh with an axis "data", over which rows are
            divided; a `sharding.MeshConfig`; a `NamedSharding`, for every leaf as far as it has the axes, such as one
            with `PartitionSpec("data", "sequence")`; or a dict of these, or a tree, by leaf. Batches are then global
            arrays, and each process reads only the rows that its devices need.
    """

    if not TYPE_CHECKING:
        __class_getitem__ = classmethod(GenericAlias)  # `DataLoader[MyBatch]` is enough: the state's type has a default

    _agreed = False  # whether other processes are known to step through the same batches
    _scanned_to: PyTree = None  # the state after the last scan

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _register(cls)

    @overload
    def __init__(
        self,
        pipeline: Sequence[IndexedStage] | IndexedSource | IterableSource | Pipeline,
        **options: Unpack[LoaderOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: "DataLoader[Value, PyTree]", pipeline: Stream[Value], **options: Unpack[LoaderOptions]
    ) -> None: ...
    @overload
    def __init__(
        self: "DataLoader[PyTree, PyTree]", pipeline: Sequence[Stage], **options: Unpack[LoaderOptions]
    ) -> None: ...
    def __init__(
        self,
        pipeline: Sequence[Stage] | IndexedSource | IterableSource | Stream,
        *,
        executor: Executor | InGraph | None = None,
        prefetch: int = 2,
        on_error: OnError = "raise",
        cache: BatchCache | None = None,
        sharding: BatchSharding | LeafShardings | None = None,
    ) -> None:
        if isinstance(executor, type) or not isinstance(executor, InGraph | Executor | None):
            raise TypeError(
                f"DataLoader needs an executor: InGraph(), Threads(4) or Processes(4). Got {describe_value(executor)}."
            )
        require_int("DataLoader", "prefetch", prefetch, least=0)
        require_choice("DataLoader", "on_error", on_error, ("raise", "skip item", "skip batch"))
        if not isinstance(cache, BatchCache | None):
            raise TypeError(f"DataLoader needs cache to be a BatchCache. Got {describe_value(cache)}.")
        if is_worker():
            raise RuntimeError(
                "DataLoader cannot be made in a worker process. Guard it with: if not ms.reading.is_worker()."
            )
        source = build(pipeline)
        self._made_of: tuple[Any, dict[str, Any]] | None = (
            source,
            {"executor": executor, "prefetch": prefetch, "on_error": on_error, "cache": cache, "sharding": sharding},
        )
        executor = None if isinstance(executor, InGraph) else executor
        if executor is not None or on_error != "raise" or cache is not None:
            source = read_on_host(source, executor, prefetch, on_error, cache)
        check_first_sample(source)
        if sharding is not None:
            source = sharded(source, as_batch_shardings("DataLoader", sharding), _placements(source))
        self._set(source, _device_of(source), prefetch)
        # Traces every stage, so that a wrong one is found here.
        _ = self._masking if isinstance(source, SeekablePipeline) else self.element_spec()

    def _set(self, source: Any, device: Any, prefetch: int, program: Program | None = None) -> None:
        self._source = source
        self._program = Program(source) if program is None else program
        self._device = device
        self._prefetch = prefetch

    @functools.cached_property
    def _feed(self) -> Feed:
        """The service that makes the batches."""
        if isinstance(self._source, PhasedPipeline):
            return PhasedFeed(self._source, lambda phase: self._phases[phase]._feed)
        with self._program.own_mesh():
            return feed_of(self._source, self._program, bool(self._masking), self._device, self._prefetch)

    @functools.cached_property
    def _phases(self) -> "list[DataLoader[B, Any]]":
        """A loader for each phase of a pipeline that changes at given steps."""
        return [_loader_of(phase, _device_of(phase), self._prefetch) for phase in self._source.phases]

    @property
    def phases(self) -> "dict[int, DataLoader[B, S]]":
        """The loaders of a run's phases, by the step at which each begins; this one from 0, if it never changes."""
        if not isinstance(self._source, PhasedPipeline):
            return {0: self}
        return dict(zip(self._source.starts, self._phases, strict=True))

    @functools.cached_property
    def _interrupts(self) -> Interrupts:
        return Interrupts()

    @functools.cached_property
    def _body_fns(self) -> dict[Any, set[int]]:
        return {}

    def replace(self, **options: Unpack[LoaderOptions]) -> "DataLoader[B, S]":
        """A loader of the same pipeline with other options: the same batches, made elsewhere.

        Example:
            >>> threads = loader.replace(executor=ms.Threads(2), prefetch=4)

        Args:
            **options: Those of `DataLoader`; the others stay as they are.
        """
        pipeline, known = self._built("replace")
        if unknown := sorted(options.keys() - known.keys()):
            raise TypeError(f"replace got {', '.join(unknown)}. A DataLoader's options are: {', '.join(known)}.")
        changed: Any = {**known, **options}
        return DataLoader(pipeline, **changed)

    @property
    def is_weighted(self) -> bool:
        """Whether samples are drawn by weights that `with_weights` and loops can change."""
        return isinstance(self._source, Pipeline | PhasedPipeline) and self._source.is_weighted

    def with_weights(self, weights: ArrayLike) -> "DataLoader[B, S]":
        """The loader with its samples drawn by other weights: what comes at a step is known before, as always.

        In a loop, a callback changes them with `loop_state.set_weights(weights)`, and they are saved with the run.

        Example:
            >>> view = ms.views.weighted(ms.ArraySampleSource({"x": np.arange(4)}), [1, 1, 1, 1])
            >>> easy = ms.DataLoader([view, ms.BatchTransform(4)])
            >>> hard = easy.with_weights([0, 0, 1, 1])
            >>> batch, mask = next(hard.iterate(hard.init_state(jax.random.key(0), step=5)))
            >>> sorted(batch["x"].tolist())
            [2, 2, 3, 3]

        Args:
            weights: A number per sample, as for `ms.views.weighted`.
        """
        if not self.is_weighted:
            raise TypeError(
                "with_weights needs a loader that draws by weight: DataLoader([ms.views.weighted(source, weights), "
                "ms.BatchTransform(64)])."
            )
        return self.drawn_by("with_weights", weights)

    def drawn_by(self, caller: str, weights: ArrayLike) -> "DataLoader[B, S]":
        """As `with_weights`, for a caller that errors name."""
        pipeline, options = self._built(caller)
        try:
            found = np.array(weights)  # a copy, which later changes leave as it is
        except Exception:  # lists of different lengths, keys of JAX
            found = np.array(None)
        return DataLoader(pipeline.with_weights(caller, found), **options)

    def _built(self, caller: str) -> tuple[Any, dict[str, Any]]:
        """The pipeline and the options that this loader was built of."""
        if self._made_of is None:
            raise TypeError(
                f"{caller} needs a loader that was built, not one that came out of jax.jit or jax.tree.map."
            )
        return self._made_of

    @property
    def pipeline(self) -> Any:
        """The source with all its stages as one value: a `Pipeline`, or a stream."""
        return self._source

    @property
    def options(self) -> dict[str, Any]:
        """The options that this loader was built with; after `jax.jit` or `jax.tree.map`, only `prefetch` is known.

        Example:
            >>> loader.options["prefetch"]
            2
        """
        return {"prefetch": self._prefetch} if self._made_of is None else dict(self._made_of[1])

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch; None for an `IterableSource` without a length. Where that changes, of the first one."""
        return self._source.steps_per_epoch

    def element_spec(self) -> PyTree:
        """The shape and dtype of a batch, as a pytree of `jax.ShapeDtypeStruct`."""
        with self._program.own_mesh():
            return self._source.element_spec()

    def element_specs(self) -> list[PyTree]:
        """The shapes and dtypes that batches have: one `element_spec`, or one per bucket or phase of the run.

        Example:
            >>> [spec["x"].shape for spec in loader.element_specs()]
            [(4,)]
        """
        if not isinstance(self._source, BucketedPipeline | PhasedPipeline):
            return [self.element_spec()]
        with self._program.own_mesh():
            return self._source.trace()[0]

    @property
    def epoch_lengths(self) -> EpochLengths | None:
        """How long each epoch is, if they differ because batches change at given steps; None if they do not."""
        return self._source.plan.epochs if isinstance(self._source, PhasedPipeline) else None

    def phase_steps_left(self, step: int) -> float:
        """How many batches of a phase are left from batch number `step` on; infinity if it is the last phase."""
        return self._source.plan.phase_steps_left(step) if isinstance(self._source, PhasedPipeline) else math.inf

    @functools.cached_property
    def _masking(self) -> tuple[str, ...]:
        """The stages that set the mask: the plan does not say then how many rows of a batch count."""
        with self._program.own_mesh():
            return masking_stages(self._source)

    @property
    def is_random(self) -> bool:
        """Whether batches depend on the key: samples are shuffled or drawn, a stage is random, or it is a stream."""
        return not isinstance(self._source, SeekablePipeline | IterablePipeline) or self._source.is_random

    @functools.cached_property
    def has_policy(self) -> bool:
        """Whether a policy makes the batches: the pipeline starts with an environment, such as `rl.GymnaxSource`."""
        if isinstance(self._source, SeekablePipeline):
            return False
        return has_policy(jax.eval_shape(self._source.init_state, jax.random.key(0)))

    def contents(self) -> tuple[tuple[str, str], ...]:
        """What the samples are, as a fingerprint that changes when they do: a hash of a few of them.

        There is none for a stream, or if one of them cannot be read.
        """
        return self._contents

    @functools.cached_property
    def _contents(self) -> tuple[tuple[str, str], ...]:
        sources = self._source.sources if isinstance(self._source, SeekablePipeline) else []
        found = [(what, fingerprint(source)) for what, source in sources]
        return tuple((what, words) for what, words in found if words is not None)

    def init_state(self, key: jax.Array | np.ndarray, step: int | ArrayLike = 0) -> S:
        """The state of a run before its first batch, or before batch number `step`.

        Args:
            key: `jax.random.key(seed)`; a different key is a different run.
            step: Where to start; any step costs the same. Only for indexed sources, since a stream has to be drawn in
                order.
        """
        if isinstance(self._source, SeekablePipeline):
            return self._beside_data(self._source.init_state(key, step))
        step = checked_step("init_state", step, STEP_LIMIT)
        if is_traced(step) or step != 0:
            found = "an IterableSource" if isinstance(self._source, IterablePipeline) else type(self._source).__name__
            raise ValueError(
                f"init_state can start only indexed sources at step {step}; {found} is a stream, which has to be drawn "
                "in order. Keep a state that an iterator had: batches.state."
            )
        return self._beside_data(self._source.init_state(key))

    def _beside_data(self, state: PyTree) -> PyTree:
        """The state where the data have been put, as all later states will be: programs are compiled for a place."""
        if is_traced((state, self._program.arrays)):
            return state
        placed = [leaf.sharding for leaf in self._program.arrays if isinstance(leaf, jax.Array) and leaf.committed]
        if not placed or not placed[0].is_fully_addressable:
            return state
        if isinstance(placed[0], NamedSharding):
            return jax.device_put(state, NamedSharding(placed[0].mesh, PartitionSpec()))
        return jax.device_put(state, SingleDeviceSharding(next(iter(placed[0].device_set))))

    def next_batch(self, state: S) -> tuple[B, S, jax.Array]:
        """The next batch, the state after it, and the mask of real rows. Pure: works under jit, vmap, grad and scan."""
        self._check_state("next_batch", state)
        if is_traced(state):
            self._require_program("next_batch inside jax.jit")
            self._warn_of_constants()
            return next_batch(self._program.static, self._program.arrays, state)
        if isinstance(self._source, SeekablePipeline):
            check_position("next_batch", state, self._source.plan.step_limit - 1)
            if not self._agreed:
                check_run("next_batch", self._source, state, 1)
                self._agreed = True
        return self._feed.next(state)

    @overload
    def iterate(
        self, state: S, *, steps: int | None = None, with_info: Literal[False] = False, replay: int | None = None
    ) -> BatchIterator[B, S]: ...
    @overload
    def iterate(
        self, state: S, *, steps: int | None = None, with_info: Literal[True], replay: int | None = None
    ) -> BatchIterator[B, S, tuple[B, jax.Array, BatchInfo]]: ...
    @overload
    def iterate(
        self, state: S, *, steps: int | None = None, with_info: bool, replay: int | None = None
    ) -> BatchIterator[B, S, tuple[B, jax.Array] | tuple[B, jax.Array, BatchInfo]]: ...
    @answer_keywords
    def iterate(
        self, state: Any, *, steps: int | None = None, with_info: bool = False, replay: int | None = None
    ) -> BatchIterator[B, S, Any]:
        """An iterator over (batch, mask), with the state to resume from as its `.state`.

        Args:
            state: Where to start; it is not changed, so iterating from it again gives the same batches.
            steps: How many batches; they may run through several epochs. By default those left in the state's epoch, so
                also to the end of a pass whose length is not known.
            with_info: Yield (batch, mask, info), where `info` is a `BatchInfo`: epoch, indices, seeds and the like.
            replay: Make only that many batches and hand them out again and again: how fast would the loop be if batches
                took no time?
        """
        self._check_state("iterate", state)
        steps = self._steps_left(state) if steps is None else steps
        if steps is not None:
            require_int("iterate", "steps", steps, least=0)
        require_bool("iterate", "with_info", with_info)
        if replay is not None:
            require_int("iterate", "replay", replay, least=1)
            if steps is None:
                raise ValueError("iterate with replay= over an IterableSource needs steps=, how many batches to give.")
        if isinstance(self._source, SeekablePipeline):
            assert steps is not None
            check_run("iterate", self._source, state, steps)
        feed, self._interrupts = self._feed, self._interrupts.following()
        made = steps if replay is None or steps is None else min(steps, replay)
        cursor = feed.cursor(state, made, with_info)
        return BatchIterator(cursor, state, steps, feed.stats, self._interrupts, ahead=feed.made_ahead, replay=replay)

    def open_cursor(self, caller: str, state: S, steps: int, with_info: bool) -> Cursor:
        """What draws `steps` batches from a state on, for a stream that this loader is a part of."""
        check_run(caller, self._source, state, steps)
        return self._feed.cursor(state, steps, with_info)

    @property
    def made_ahead(self) -> int:
        """How many batches an iterator draws before they are asked for."""
        return self._feed.made_ahead

    def _steps_left(self, state: Any) -> int | None:
        """Batches left in the epoch of a state; None if that is not known."""
        if isinstance(self._source, IterablePipeline):
            return self._source.steps_left(state)
        if not isinstance(self._source, SeekablePipeline):
            return self.steps_per_epoch
        plan = self._source.plan
        return plan.steps_left(check_position("iterate", state, plan.step_limit))

    def stats(self) -> LoaderStats:
        """Counts and times of all batches of this loader so far; printed, a table that names the bottleneck."""
        self._feed.settle()
        stats = self._feed.stats
        return dataclasses.replace(stats, reading=stats.reading.copy(), sources=self._feed.samples_by_source())

    def explain(self) -> "Explanation":
        """The pipeline as a table of its stages and its plan; see `ms.inspect.explain`.

        Example:
            >>> loader.explain().plan["last batch"]  # print all of it with print(loader.explain())
            '2 of 4 rows real, the others padding'
        """
        from millstream.inspect import explain

        return explain(self)

    def verify(
        self,
        key: jax.Array | np.ndarray | None = None,
        *,
        steps: int | None = None,
        seconds: float = 60.0,
        executors: Sequence[Executor | InGraph] | None = None,
        hosts: Sequence[int] = (1, 2, 4),
        progress: bool = True,
        raises: bool = True,
    ) -> "Verification":
        """Prove on your own data what a loader promises; see `ms.inspect.verify` for the arguments."""
        from millstream.inspect import verify

        options: dict[str, Any] = {"seconds": seconds, "executors": executors, "hosts": hosts}
        return verify(self, key, steps=steps, progress=progress, raises=raises, **options)

    def tune(
        self,
        key: jax.Array | np.ndarray | None = None,
        *,
        seconds: float = 15.0,
        step: Callable[[B, jax.Array], PyTree] | None = None,
        progress: bool = True,
    ) -> "Tuning":
        """Find the executor and the prefetch that read fastest; see `ms.inspect.tune` for the arguments."""
        from millstream.inspect import tune

        return tune(self, key, seconds=seconds, step=step, progress=progress)

    def __enter__(self) -> Self:
        """Keep worker processes and threads from one stream to the next, until the block is left."""
        self._feed.keep()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all threads and worker processes that no iterator uses; closing twice does no harm."""
        self._feed.close()

    def scan_epoch(
        self,
        state: S,
        carry: Carry,
        body_fn: Callable[[Carry, B, jax.Array], tuple[Carry, Output]],
        *,
        unroll: int | bool = 1,
    ) -> tuple[S, Carry, Output]:
        """Run `steps_per_epoch` steps as one compiled program, from wherever `state` is.

        Example:
            >>> def body_fn(total, batch, mask):
            ...     return total + jnp.sum(batch["x"] * mask), None
            >>> state, total, _ = loader.scan_epoch(state, 0.0, body_fn)

        Args:
            state: The loader's state.
            carry: What `body_fn` hands from step to step, such as a model: any pytree. Its arrays may change, and so
                may its Python numbers, which are arrays then; what `body_fn` leaves as it is, such as a function or the
                size of a layer, is part of the program.
            body_fn: `body_fn(carry, batch, mask) -> (carry, output)`. Programs are looked up by function: define it
                once, not per epoch.
            unroll: Steps per turn of the loop, as in `lax.scan`.

        Returns:
            The new state, the last carry, and the outputs stacked.
        """
        self._check_state("scan_epoch", state)
        if not callable(body_fn):
            raise TypeError(f"scan_epoch needs body_fn to be a function. Got {describe_value(body_fn)}.")
        traced = is_traced((state, carry))
        if traced or not self._has_run(body_fn):  # a signature is slow to look at
            require_arguments("scan_epoch", "body_fn", body_fn, "carry, batch, mask")
        if not isinstance(unroll, bool):
            require_int("scan_epoch", "unroll", unroll, least=1)
        self._require_program("scan_epoch")
        if traced:
            self._warn_of_constants()
            return self._scan_carry(scan, state, carry, body_fn, unroll)
        self._warn_of_fresh_functions(body_fn)
        if isinstance(self._source, PhasedPipeline):
            check_run("scan_epoch", self._source, state, 0)
            position: Any = state
            steps = len(self._source.plan.epochs.steps_of(int(position.step)))
            return self._run_phases("scan_epoch", state, carry, body_fn, steps)
        if isinstance(self._source, SeekablePipeline) and not self._has_scanned_to(state):
            check_run("scan_epoch", self._source, state, 0)
        self._feed.begin_program()
        try:
            run = self._scan_carry(compiled_scan, state, carry, body_fn, unroll)
        finally:
            self.end_steps()
        self._feed.count_program(state, self.steps_per_epoch, run[0])
        self._scanned_to = run[0] if isinstance(self._source, Pipeline) else None
        return run

    def _has_scanned_to(self, state: PyTree) -> bool:
        """Whether a state comes from the last scan: checking its step would wait for that, and it is one of ours."""
        placement = self._source.placement
        return state is self._scanned_to and (placement is None or placement.is_local)

    def _scan_carry(
        self, program: Any, state: PyTree, carry: Any, body_fn: Any, unroll: int | bool
    ) -> tuple[PyTree, Any, Any]:
        static, carried = self._settled(state, carry, body_fn, None)
        arguments = self._program.static, self._program.arrays, state, static, carried, body_fn, unroll
        run = self._run(program, *arguments)
        return run[0], static.join(run[1]), run[2]

    def _settled(self, state: PyTree, carry: Any, body_fn: Any, before_fn: Any) -> tuple[StaticPart, list[Any]]:
        def after(static: StaticPart, carried: list[Any]) -> StaticPart:
            arguments = self._program.static, self._program.arrays, state, body_fn, before_fn, static, carried
            with self._program.own_mesh():
                return part_after.eval_shape(*arguments)

        return settled(carry, after)

    def _run(self, program: Callable[..., Any], *arguments: Any) -> Any:
        """Run a program that draws its own batches; what reading raises comes out as it was raised."""
        if not self._reads or is_traced(arguments):
            return self._program.run(program, *arguments)
        return call_and_wait(self._program.run, program, *arguments)

    @property
    def _reads(self) -> bool:
        """Whether samples are read on the host."""
        return isinstance(self._source, SeekablePipeline) and self._source.host is not None

    def run_steps(
        self,
        state: S,
        carry: Carry,
        body_fn: Callable[[Carry, B, jax.Array], tuple[Carry, Output]],
        count: int,
        *,
        width: int,
        before_fn: Callable[[S, Carry], S] | None = None,
        caller: str = "run_steps",
    ) -> tuple[S, Carry, Output]:
        """Run `count` steps as one compiled program, which serves every count up to `width`.

        Example:
            >>> def body_fn(total, batch, mask):
            ...     return total + jnp.sum(batch["x"] * mask), jnp.sum(mask)
            >>> state, total, real = loader.run_steps(state, 0.0, body_fn, 2, width=10)

        Args:
            state: The loader's state.
            carry: What `body_fn` hands from step to step; see `scan_epoch`.
            body_fn: `body_fn(carry, batch, mask) -> (carry, output)`, defined once.
            count: How many steps.
            width: The most steps it will ever be asked for.
            before_fn: `before_fn(state, carry) -> state`, called before each batch is drawn, such as to act with the
                policy that the carry holds.
            caller: The name of the caller, for errors.

        Returns:
            The new state, the last carry, and the outputs: `width` rows, of which the first `count` count.
        """
        self._check_state(caller, state)
        require_int(caller, "width", width, least=1)
        if not 0 <= count <= width:
            raise ValueError(f"{caller} needs a count from 0 to its width, {width}. Got {count}.")
        self._require_program(caller)
        if isinstance(self._source, PhasedPipeline):
            return self._run_phases(caller, state, carry, body_fn, count, width, before_fn)
        static, carried = self._settled(state, carry, body_fn, before_fn)
        self._feed.begin_program()
        number = _count_on_device(count) if self._program.mesh is None else np.int32(count)
        given = state, static, carried, number, body_fn, before_fn, width
        run = self._run(compiled_steps, self._program.static, self._program.arrays, *given)
        self._feed.count_program(state, count, run[0])
        return run[0], static.join(run[1]), run[2]

    def _run_phases(
        self,
        caller: str,
        state: Any,
        carry: Any,
        body_fn: Any,
        count: int,
        width: int | None = None,
        before_fn: Any = None,
    ) -> tuple[Any, Any, Any]:
        """As `run_steps`, by a program for each phase that has some of the steps; all their outputs without a width."""
        source, first, outputs = self._source, int(state.step), []
        parts = source.plan.split(range(first, first + count)) or [(source.plan.phase_at(first)[0], range(0))]
        for phase, own in parts:
            loader, begun = self._phases[phase], source.state_in(phase, state, own.start)
            rows = max(1, len(own)) if width is None else width
            _, carry, output = loader.run_steps(
                begun, carry, body_fn, len(own), width=rows, before_fn=before_fn, caller=caller
            )
            outputs.append((output, len(own)))
            if (phase, own) != parts[-1]:
                loader.end_steps()
        if width is None:
            self.end_steps()
        # The step is counted here, so that nothing waits for a program to know the phase of the next one.
        return state_at(state, first + count), carry, _joined(caller, outputs, width)

    def end_steps(self) -> None:
        """End the reading that `run_steps` has begun, unless threads and worker processes are kept.

        Example:
            >>> loader.end_steps()
        """
        self._feed.end_programs()

    def sample_counter(self, state: S) -> Callable[[range], list[int]] | None:
        """How many samples the batches from this state on have: a function of a range of 0, 1, 2, ...

        None if that is known only when a batch is made, since a stage sets the mask or samples may be skipped.
        """
        self._check_state("sample_counter", state)
        if isinstance(self._source, IterablePipeline):
            self._source.refuse_program("fuse=")
        if self._masking or (self._reads and self._source.host.tolerant):
            return None
        if isinstance(self._source, SeekablePipeline):
            position: Any = state
            plan, words, first = self._source.plan, np.asarray(position.key), int(position.step)
            return lambda numbers: plan.real_samples_of(words, range(first + numbers.start, first + numbers.stop))
        mask = jax.eval_shape(self._source.next, state)[1]
        return lambda numbers: [mask.size] * len(numbers)

    def count_samples(self, state: S, count: int, *, width: int) -> list[int]:
        """How many samples each of the next `count` batches has, by making them for the sake of their masks.

        Args:
            state: The loader's state.
            count: How many batches.
            width: The most batches it will ever be asked for.
        """
        if self._program.effects:
            effects = [stage.name for stage in stages(self._source) if stage.effects]
            raise ValueError(
                f"count_samples would have to run {', '.join(effects)} once more for every batch: the mask is known "
                f"only when a batch is made, because of {', '.join(self._masking) or 'samples that may be skipped'}. "
                "With fuse=, give schedules and stop= in steps or epochs, not in samples or time, or leave fuse out."
            )
        _, _, counts = self.run_steps(state, None, _count, count, width=width)
        return np.asarray(counts)[:count].tolist()

    def set_policy_state(
        self, state: S, policy_state: PyTree, *, new_episode: ArrayLike | Sequence[bool] | None = None
    ) -> S:
        """The state with another policy state, for a pipeline that starts with an environment.

        Args:
            state: This loader's state. An iterator that is in progress has its own: use its `set_policy_state`.
            policy_state: The new one, shaped like the source's template.
            new_episode: What the policy is told at its next step; None leaves it as it is.
        """
        self._check_state("set_policy_state", state)
        return set_policy_state("set_policy_state", state, policy_state, new_episode)

    def _require_program(self, caller: str) -> None:
        """Refuse a pipeline that a compiled program cannot draw from."""
        if isinstance(self._source, IterablePipeline):
            self._source.refuse_program(caller)
        if isinstance(self._source, SeekablePipeline) and self._source.placement is not None:
            self._source.placement.require_auto(caller)

    def _check_state(self, caller: str, state: PyTree) -> None:
        if isinstance(self._source, IterablePipeline):
            return self._source.check_state(caller, state)
        if isinstance(self._source, SeekablePipeline):
            return check_origin(caller, state, self._source.origin)
        expected, found = self._state_structure, jax.tree.structure(state)
        if expected != found:
            raise ValueError(
                f"{caller} got a state of a different pipeline. It has\n  {shortened(found)}\n"
                f"and this loader's states have\n  {shortened(expected)}"
            )

    @functools.cached_property
    def _state_structure(self) -> Any:
        return jax.tree.structure(jax.eval_shape(self._source.init_state, jax.random.key(0)))

    def _warn_of_constants(self) -> None:
        size = sum(array.nbytes for array in self._program.arrays if not is_traced(array))
        if size >= _LARGE_CONSTANT:
            warnings.warn(
                f"DataLoader: {size / 2**20:.0f} MiB of data become a constant of your compiled function, which makes "
                "it slow to compile and holds the data twice. Pass the loader to it as an argument: "
                "jax.jit(train_epoch)(loader, state).",
                stacklevel=3,
            )

    def _has_run(self, body_fn: Any) -> bool:
        return hash(body_fn) in self._body_fns.get(getattr(body_fn, "__code__", body_fn), ())

    def _warn_of_fresh_functions(self, body_fn: Any) -> None:
        seen = self._body_fns.setdefault(getattr(body_fn, "__code__", body_fn), set())
        seen.add(hash(body_fn))
        if len(seen) == 3:
            warnings.warn(
                f"DataLoader.scan_epoch got the function {function_name(body_fn)} as a new object for the third time "
                "and compiles it again each time. Define it once, outside the loop over epochs.",
                stacklevel=3,
            )

    @functools.cached_property
    def _summary(self) -> str:
        return loader_text(self)

    def __repr__(self) -> str:
        return self._summary

    @html.never_raising
    def _repr_html_(self) -> str:
        return loader_html(self)


def _placements(source: Any) -> list[Any]:
    """Where the stages of a source put batches."""
    return [stage.placement for stage in stages(source) if isinstance(stage, DevicePutTransform)]


def _device_of(source: Any) -> Any:
    """Where the last of these stages puts batches; None if none says it."""
    return next(reversed(_placements(source)), None)


def _joined(caller: str, outputs: list[tuple[PyTree, int]], width: int | None) -> PyTree:
    """Outputs of several programs, each with how many of its rows count, as those of one; `width` rows, if given."""
    if len(outputs) == 1:
        return outputs[0][0]
    missing = 0 if width is None else width - sum(count for _, count in outputs)

    def join(*leaves: jax.Array) -> jax.Array:
        if len(shapes := {leaf.shape[1:] for leaf in leaves}) > 1:
            raise ValueError(
                f"{caller} stacks what body_fn gives out, whose shape changes with the phase of the run: "
                f"{', '.join(map(str, shapes))}. Give out numbers that do not depend on the batch size, such as a sum."
            )
        rows = [leaf[:count] for leaf, (_, count) in zip(leaves, outputs, strict=True)]
        return jnp.concatenate([*rows, jnp.zeros((missing, *leaves[0].shape[1:]), leaves[0].dtype)])

    return jax.tree.map(join, *(output for output, _ in outputs))


def _count(carry: None, batch: PyTree, mask: jax.Array) -> tuple[None, jax.Array]:
    return carry, jnp.count_nonzero(mask)


def _flatten(loader: DataLoader[Any, Any]) -> tuple[tuple[list[Any]], tuple[Any, ...]]:
    return (loader._program.arrays,), (loader._program.static, loader._device, loader._prefetch)


def _unflatten(
    kind: type[DataLoader[Any, Any]], static: tuple[Any, ...], children: tuple[list[Any]]
) -> DataLoader[Any, Any]:
    program, device, prefetch = static
    source = program.join(children[0])
    return _loader_of(source, device, prefetch, kind, Program(source, (program, children[0])))


def _loader_of(
    source: Any,
    device: Any,
    prefetch: int,
    kind: type[DataLoader[Any, Any]] = DataLoader,
    program: Program | None = None,
) -> DataLoader[Any, Any]:
    """A loader over a composed source that was checked before."""
    loader = object.__new__(kind)
    loader._made_of = None
    loader._set(source, device, prefetch, program)
    return loader


@functools.lru_cache(maxsize=1024)
def _count_on_device(count: int) -> jax.Array:
    """A count as an argument of a program, put there once: a number of the host is put there at every call."""
    with jax.ensure_compile_time_eval():
        return jnp.asarray(count, jnp.int32)


def _register(kind: type[DataLoader[Any, Any]]) -> None:
    """Make a kind of loader a pytree whose leaves are the data."""
    jax.tree_util.register_pytree_node(kind, _flatten, functools.partial(_unflatten, kind))


_register(DataLoader)
