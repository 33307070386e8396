"""Compiled programs: a source taken apart into arrays, which are arguments, and all the rest, which is static.

Two loaders whose static parts are equal share their programs, so building a second one compiles nothing.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from millstream.loader.build import stages
from millstream.pipeline.compose import StagedPipeline
from millstream.pipeline.convolutions import with_fast_convolutions
from millstream.pipeline.host_calls import call_and_wait
from millstream.pipeline.static_part import StaticPart, require_arrays, split, split_carry
from millstream.reading.contracts import PyTree
from millstream.text.errors import function_name

BodyFn = Callable[[Any, Any, jax.Array], tuple[Any, Any]]
BeforeFn = Callable[[PyTree, Any], PyTree] | None  # (state, carry) -> state, before a batch is drawn


_PROGRAMS = 512  # kept for loaders that are alike


class Program:
    """A source as compiled programs take it, and how they are run.

    Args:
        source: The composed source.
        taken_apart: Its static part and its arrays, if they are known.

    Attributes:
        static: All of it but the arrays; two loaders with equal static parts share their programs.
        arrays: The arrays.
        effects: Whether a stage calls a Python function, whose errors are to come out as they were raised.
        mesh: The mesh that the batches lie on; None if there is none.
    """

    def __init__(self, source: Any, taken_apart: tuple[StaticPart, list[Any]] | None = None) -> None:
        self.static, self.arrays = split(source) if taken_apart is None else taken_apart
        self.effects = any(stage.effects for stage in stages(source))
        placement = source.placement if isinstance(source, StagedPipeline) else None
        self.mesh = None if placement is None else placement.mesh

    def runner(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """A compiled program as it is to be called: itself, unless it needs care."""
        if self.mesh is None and not self.effects:
            return program
        return functools.partial(self._run_with_care, program)

    def run(self, program: Callable[..., Any], *arguments: Any) -> Any:
        """Run a compiled program; it is the same whatever mesh the caller has set."""
        return self.runner(program)(*arguments)

    def _run_with_care(self, program: Callable[..., Any], *arguments: Any) -> Any:
        with self.own_mesh():
            if not self.effects:
                return program(*arguments)
            return call_and_wait(program, *arguments)

    def own_mesh(self) -> contextlib.AbstractContextManager[Any]:
        """The mesh of the batches, whatever the caller's."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)


@functools.partial(jax.jit, static_argnums=0)
def next_batch(static: StaticPart, arrays: list[Any], state: PyTree) -> tuple[PyTree, PyTree, jax.Array]:
    """One batch of a state that is traced, or of a stream."""
    value, mask, state = static.join(arrays).next(state)
    return value, state, mask


@functools.lru_cache(maxsize=_PROGRAMS)
def gathering(static: StaticPart) -> Callable[[list[Any], Any, Any], tuple[PyTree, jax.Array]]:
    """From arrays, key and coordinates to a batch of arrays and its mask, for a step that was planned on the host."""

    @jax.jit
    def gathered_batch(arrays: list[Any], words: Any, numbers: Any) -> tuple[PyTree, jax.Array]:
        return static.join(arrays).planned(words, numbers, apart=True)

    return gathered_batch


@functools.lru_cache(maxsize=_PROGRAMS)
def finishing(static: StaticPart, passing: tuple[int, ...]) -> Callable[[Any, Any, list[Any], Any], list[Any]]:
    """From rows that were read on the host to the leaves of a batch and its mask.

    The compiled function takes the run's key, if a stage is random; the coordinates of the step, if stages want any;
    an array per leaf, or None for a leaf that nothing looks at; and which rows could be read, None if all could.

    Args:
        static: The pipeline.
        passing: The leaves that need not be made, because they are such rows.
    """

    @jax.jit
    def finished_batch(words: Any, numbers: Any, rows: list[Any], intact: Any) -> list[Any]:
        source = static.join([])
        specs = source.row_specs()
        given = [
            jnp.zeros(spec.shape, spec.dtype) if row is None else row for row, spec in zip(rows, specs, strict=True)
        ]
        made = jax.tree.leaves(source.planned(words, numbers, given, intact, apart=True))
        return [leaf for number, leaf in enumerate(made) if number not in passing]

    return finished_batch


def scan(
    program: StaticPart,
    arrays: list[Any],
    state: PyTree,
    static: StaticPart,
    carried: list[Any],
    body_fn: BodyFn,
    unroll: int | bool,
) -> tuple[PyTree, list[Any], Any]:
    """One epoch's number of steps as one `lax.scan`. The carry comes as its static part and its arrays."""
    source = program.join(arrays)

    def body(before: tuple[PyTree, list[Any]], _: None) -> tuple[tuple[PyTree, list[Any]], Any]:
        state, carry, output = _draw_and_run(source, before[0], static.join(before[1]), body_fn)
        return (state, static.arrays_of(carry, before[1])), output

    body = with_fast_convolutions(body)
    (state, carried), outputs = lax.scan(body, (state, carried), None, length=source.steps_per_epoch, unroll=unroll)
    return state, carried, outputs


def run_steps(
    program: StaticPart,
    arrays: list[Any],
    state: PyTree,
    static: StaticPart,
    carried: list[Any],
    count: Any,
    body_fn: BodyFn,
    before_fn: BeforeFn,
    width: int,
) -> tuple[PyTree, list[Any], Any]:
    """That many steps, at most `width`, as one loop. How many is an argument: one program serves all numbers."""
    source = program.join(arrays)

    def step(state: PyTree, carried: list[Any]) -> tuple[PyTree, list[Any], Any]:
        state, carry, output = _draw_and_run(source, state, static.join(carried), body_fn, before_fn)
        return state, static.arrays_of(carry, carried), output

    def body(number: Any, before: tuple[PyTree, list[Any], Any]) -> tuple[PyTree, list[Any], Any]:
        state, carried, outputs = before
        state, carried, output = step(state, carried)
        outputs = jax.tree.map(
            lambda kept, new: lax.dynamic_update_index_in_dim(kept, jnp.asarray(new), number, 0), outputs, output
        )
        return state, carried, outputs

    spec = jax.eval_shape(step, state, carried)[2]
    outputs = jax.tree.map(lambda leaf: jnp.zeros((width, *leaf.shape), leaf.dtype), spec)
    return lax.fori_loop(0, count, with_fast_convolutions(body), (state, carried, outputs))


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def part_after(
    program: StaticPart,
    arrays: list[Any],
    state: PyTree,
    body_fn: BodyFn,
    before_fn: BeforeFn,
    static: StaticPart,
    carried: list[Any],
) -> StaticPart:
    """The static part of a carry after one step; only ever traced, which JAX remembers."""
    _, carry, _ = _draw_and_run(program.join(arrays), state, static.join(carried), body_fn, before_fn)
    return split_carry(carry)[0]


def _draw_and_run(
    source: Any, state: PyTree, carry: PyTree, body_fn: BodyFn, before_fn: BeforeFn = None
) -> tuple[PyTree, PyTree, Any]:
    value, mask, state = source.next(state if before_fn is None else before_fn(state, carry))
    result = body_fn(carry, value, mask)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(
            f"body_fn must return (carry, output). {function_name(body_fn)} returned {_kinds(result)}. If there is "
            "nothing to give out, write: return carry, None."
        )
    carry, output = result
    require_arrays("output", output)
    return state, carry, output


def _kinds(result: Any) -> str:
    """What a body returned, by its types: values are not known when it is traced."""
    if isinstance(result, tuple | list):
        return f"{len(result)} values"
    if hasattr(result, "shape") and hasattr(result, "dtype"):
        return f"one value, {result.dtype}{list(result.shape)}"
    return "None" if result is None else f"one value ({type(result).__name__})"


compiled_steps = jax.jit(run_steps, static_argnums=(0, 6, 7, 8))
compiled_scan = jax.jit(scan, static_argnums=(0, 5, 6))
