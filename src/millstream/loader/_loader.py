"""The loader."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from millstream._core.callbacks import original_errors
from millstream._core.contracts import PyTree
from millstream._core.errors import describe_value, function_name, require_int
from millstream._core.host_source import HostSource
from millstream._core.pipeline import Pipeline
from millstream._core.policy import set_policy_state
from millstream._core.read_ahead import ReadAhead
from millstream._core.state import LoaderState, check_origin, is_traced
from millstream.host import InGraph
from millstream.loader._build import build, stages
from millstream.loader._iterator import BatchIterator
from millstream.loader._program import BodyFn, batch_at, compiled_scan, next_batch, scan, split
from millstream.transforms import DevicePutTransform

_LARGE_CONSTANT = 64 * 2**20


class DataLoader:
    """A source and its stages as one stream of batches, in Python, under `jit` and in a `scan`.

    Example:
        >>> loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(10.0)}), ms.BatchTransform(4)])
        >>> state = loader.init_state(jax.random.key(0))
        >>> batch, state, mask = loader.next_batch(state)

    A loader is a pytree whose leaves are the data: passed to your jitted function as an argument, the data stay an
    argument. Closed over, they become a constant of the compiled function.

    Args:
        pipeline: A list, source first, or a composed source such as `BatchTransform(4)(source)`. A stage is a
            transform or any function from source to source.
        executor: Where batches are made. `InGraph()`, the default, makes them on the device, from data that are arrays.
        prefetch: How many batches `iterate` has under way besides the one it hands out. (A source that is read on the
            host has a `prefetch_size` of its own, in samples.)
    """

    def __init__(self, pipeline: Any, *, executor: InGraph | None = None, prefetch: int = 2) -> None:
        if not isinstance(executor, InGraph | None):
            raise TypeError(f"DataLoader needs an executor such as InGraph(). Got {describe_value(executor)}.")
        require_int("DataLoader", "prefetch", prefetch, least=0)
        source = build(pipeline)
        source.element_spec()  # traces every stage, so that a wrong one is found here
        placements = [stage.placement for stage in stages(source) if isinstance(stage, DevicePutTransform)]
        self._placement = placements[-1] if placements else None
        self._prefetch = prefetch
        self._set_source(source)

    def _set_source(self, source: Any) -> None:
        self._source = source
        self._effects = any(stage.effects for stage in stages(source))
        self._host_source = source.host_source if isinstance(source, Pipeline) else None
        self._reader: ReadAhead | None = None
        self._program, self._arrays = split(source)
        self._origin = source.origin if isinstance(source, Pipeline) else None
        self._body_fns: dict[Any, set[int]] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch."""
        return self._source.steps_per_epoch

    def element_spec(self) -> PyTree:
        """The shape and dtype of a batch, as a pytree of `jax.ShapeDtypeStruct`."""
        return self._source.element_spec()

    def init_state(self, key: Any, step: int = 0) -> PyTree:
        """The state of a run before its first batch, or before batch number `step`.

        Args:
            key: `jax.random.key(seed)`; another key is another run.
            step: Where to start; any step costs the same. Only for indexed sources, since a stream has to be drawn in
                order.
        """
        if isinstance(self._source, Pipeline):
            return self._source.init_state(key, step)
        if step != 0:
            raise ValueError(
                f"init_state can start only indexed sources at step {step}; {type(self._source).__name__} is a stream."
            )
        return self._source.init_state(key)

    def next_batch(self, state: PyTree) -> tuple[PyTree, PyTree, jax.Array]:
        """The next batch, the state after it, and the mask of real rows. Pure: works under jit, vmap, grad and scan."""
        self._check_state("next_batch", state)
        if is_traced(state):
            self._warn_of_constants()
            return next_batch(self._program, self._arrays, state, False)
        if self._host_source is None:
            return self._draw(state)
        if self._reader is None:
            self._reader = ReadAhead(self._host_source, self._source.plan)
        return self._draw_read(state, int(state.step), self._reader)

    def iterate(self, state: PyTree, *, steps: int | None = None) -> BatchIterator:
        """An iterator over (batch, mask), with the state to go on from as its `.state`.

        Args:
            state: Where to start; it is not changed, so iterating from it again gives the same batches.
            steps: How many batches; they may run through several epochs. By default those left in the state's epoch.
        """
        self._check_state("iterate", state)
        if steps is None:
            steps = self.steps_per_epoch - int(getattr(state, "step", 0)) % self.steps_per_epoch
        require_int("iterate", "steps", steps, least=0)
        if isinstance(self._source, Pipeline):
            end, limit = int(state.step) + steps, self._source.plan.step_limit
            if end > limit:
                raise ValueError(f"iterate can reach step {limit:,}, not {end:,}. Start a run with another key.")
            if self._host_source is not None:
                return self._iterate_read(self._host_source, state, steps)
        # A stream may depend on what the caller does with its values, so it is never drawn ahead.
        ahead = self._prefetch if isinstance(self._source, Pipeline) and not self._effects else 0
        return BatchIterator(self._draw, state, steps, ahead)

    def _iterate_read(self, source: HostSource, state: LoaderState, steps: int) -> BatchIterator:
        """Iterate over samples read on the host. Steps are counted here, so nothing waits for the device to tell."""
        step = int(state.step)
        reader = ReadAhead(source, self._source.plan, stop=step + steps)

        def draw(state: LoaderState) -> tuple[PyTree, LoaderState, Any]:
            nonlocal step
            drawn = self._draw_read(state, step, reader)
            step += 1
            return drawn

        return BatchIterator(draw, state, steps, ahead=0, on_close=reader.close)

    def scan_epoch(
        self, state: PyTree, carry: Any, body_fn: BodyFn, *, unroll: int | bool = 1
    ) -> tuple[PyTree, Any, Any]:
        """Run `steps_per_epoch` steps as one compiled program, from wherever `state` is.

        Example:
            >>> def body_fn(total, batch, mask):
            ...     return total + jnp.sum(batch["x"] * mask), None
            >>> state, total, _ = loader.scan_epoch(state, 0.0, body_fn)

        Args:
            state: The loader's state.
            carry: What `body_fn` hands from step to step, such as a model.
            body_fn: `body_fn(carry, batch, mask) -> (carry, output)`. Programs are looked up by function: define it
                once, not per epoch.
            unroll: Steps per turn of the loop, as in `lax.scan`.

        Returns:
            The new state, the last carry, and the outputs stacked.
        """
        self._check_state("scan_epoch", state)
        if not callable(body_fn):
            raise TypeError(f"scan_epoch needs body_fn to be a function. Got {describe_value(body_fn)}.")
        if is_traced((state, carry)):
            self._warn_of_constants()
            return scan(self._program, self._arrays, state, carry, body_fn, unroll)
        self._warn_of_fresh_functions(body_fn)
        if not self._effects and self._host_source is None:
            return compiled_scan(self._program, self._arrays, state, carry, body_fn, unroll)
        with original_errors():
            return jax.block_until_ready(compiled_scan(self._program, self._arrays, state, carry, body_fn, unroll))

    def set_policy_state(self, state: PyTree, policy_state: PyTree, *, new_episode: Any = None) -> PyTree:
        """The state with another policy state, for a pipeline that starts with an environment.

        Args:
            state: This loader's state. An iterator that is under way has its own: use its `set_policy_state`.
            policy_state: The new one, shaped like the source's template.
            new_episode: What the policy is told at its next step; None leaves it as it is.
        """
        self._check_state("set_policy_state", state)
        return set_policy_state("set_policy_state", state, policy_state, new_episode)

    def _draw(self, state: PyTree) -> tuple[PyTree, PyTree, jax.Array]:
        value, state, mask = self._run(next_batch, state, True)
        value, mask = self._placed(value, mask)
        return value, state, mask

    def _draw_read(self, state: LoaderState, step: int, reader: ReadAhead) -> tuple[PyTree, LoaderState, Any]:
        """The batch of a state whose step is known, from samples that are read on the host."""
        words = np.asarray(state.key)
        rows = reader.rows(words, step)
        after = dataclasses.replace(state, step=np.asarray(step + 1, np.uint32))
        if self._source.objects is not None:
            _, levels = self._source.plan.at(np, words, step)
            return rows[0].tolist(), after, levels[-1].mask
        value, mask = self._placed(*self._run(batch_at, state.key, np.uint32(step), rows))
        return value, after, mask

    def _run(self, program: Callable[..., Any], *arguments: Any) -> Any:
        """Run one of the compiled programs; errors of callbacks come out as they were raised."""
        if not self._effects:
            return program(self._program, self._arrays, *arguments)
        with original_errors():
            return jax.block_until_ready(program(self._program, self._arrays, *arguments))

    def _placed(self, value: PyTree, mask: jax.Array) -> tuple[PyTree, jax.Array]:
        return (value, mask) if self._placement is None else jax.tree.map(self._place, (value, mask))

    def _place(self, leaf: jax.Array) -> jax.Array:
        target = self._placement
        if isinstance(target, jax.sharding.NamedSharding):  # the mask has fewer axes than the images
            target = jax.sharding.NamedSharding(target.mesh, jax.sharding.PartitionSpec(*target.spec[: leaf.ndim]))
        elif leaf.devices() == {target}:
            return leaf
        return jax.device_put(leaf, target)

    def _check_state(self, who: str, state: PyTree) -> None:
        if self._origin is not None:
            return check_origin(who, state, self._origin)
        expected, found = self._state_structure, jax.tree.structure(state)
        if expected != found:
            raise ValueError(
                f"{who} got a state of another pipeline. It has\n  {found}\nand this loader's states have\n  {expected}"
            )

    @functools.cached_property
    def _state_structure(self) -> Any:
        return jax.tree.structure(jax.eval_shape(self._source.init_state, jax.random.key(0)))

    def _warn_of_constants(self) -> None:
        size = sum(array.nbytes for array in self._arrays if not is_traced(array))
        if size >= _LARGE_CONSTANT:
            warnings.warn(
                f"DataLoader: {size / 2**20:.0f} MiB of data become a constant of your compiled function, which makes "
                "it slow to compile and holds the data twice. Pass the loader to it as an argument: "
                "jax.jit(train_epoch)(loader, state).",
                stacklevel=3,
            )

    def _warn_of_fresh_functions(self, body_fn: Any) -> None:
        seen = self._body_fns.setdefault(getattr(body_fn, "__code__", body_fn), set())
        seen.add(hash(body_fn))
        if len(seen) == 3:
            warnings.warn(
                f"DataLoader.scan_epoch got the function {function_name(body_fn)} as a new object for the third time "
                "and compiles it again each time. Define it once, outside of the loop over epochs.",
                stacklevel=3,
            )


def _flatten(loader: DataLoader) -> tuple[tuple[list[Any]], tuple[Any, ...]]:
    return (loader._arrays,), (loader._program, loader._placement, loader._prefetch)


def _unflatten(static: tuple[Any, ...], children: tuple[list[Any]]) -> DataLoader:
    loader = object.__new__(DataLoader)
    program, loader._placement, loader._prefetch = static
    loader._set_source(program.source(children[0]))
    return loader


jax.tree_util.register_pytree_node(DataLoader, _flatten, _unflatten)
