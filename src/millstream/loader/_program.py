"""Compiled programs: a source taken apart into arrays, which are arguments, and all the rest, which is static.

Two loaders whose static parts are equal share their programs, so building a second one compiles nothing.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.static_part import StaticPart, require_arrays, split_carry
from millstream.reading.contracts import PyTree

BodyFn = Callable[[Any, Any, jax.Array], tuple[Any, Any]]
BeforeFn = Callable[[PyTree, Any], PyTree] | None  # (state, carry) -> state, before a batch is drawn


@functools.partial(jax.jit, static_argnums=(0, 3))
def next_batch(program: StaticPart, arrays: list[Any], state: PyTree, apart: bool) -> tuple[PyTree, PyTree, jax.Array]:
    """One batch, as a program of its own (`apart`) or as part of one that is being traced."""
    source = program.join(arrays)
    value, mask, state = source.next(state, apart=apart) if isinstance(source, Pipeline) else source.next(state)
    return value, state, mask


@functools.partial(jax.jit, static_argnums=(0, 5))
def batch_of(
    program: StaticPart, words: jax.Array, step: Any, rows: list[Any], intact: Any, passing: tuple[int, ...]
) -> list[Any]:
    """The leaves of batch number `step` and its mask, from rows that were read on the host.

    Args:
        program: The pipeline.
        words: The run's key.
        step: The batch's number.
        rows: One array per leaf, or None for a leaf that nothing looks at.
        intact: Which rows could be read; None if all could.
        passing: The leaves that need not be made, because they are such rows.
    """
    source = program.join([])
    specs = source.row_specs()
    given = [jnp.zeros(spec.shape, spec.dtype) if row is None else row for row, spec in zip(rows, specs, strict=True)]
    made = jax.tree.leaves(source.at(words, step, apart=True, rows=given, intact=intact))
    return [leaf for number, leaf in enumerate(made) if number not in passing]


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
        return (state, static.arrays_of(carry)), output

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
        return state, static.arrays_of(carry), output

    def body(number: Any, before: tuple[PyTree, list[Any], Any]) -> tuple[PyTree, list[Any], Any]:
        state, carried, outputs = before
        state, carried, output = step(state, carried)
        outputs = jax.tree.map(
            lambda kept, new: lax.dynamic_update_index_in_dim(kept, jnp.asarray(new), number, 0), outputs, output
        )
        return state, carried, outputs

    spec = jax.eval_shape(step, state, carried)[2]
    outputs = jax.tree.map(lambda leaf: jnp.zeros((width, *leaf.shape), leaf.dtype), spec)
    return lax.fori_loop(0, count, body, (state, carried, outputs))


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
    carry, output = body_fn(carry, value, mask)
    require_arrays("output", output)
    return state, carry, output


compiled_steps = jax.jit(run_steps, static_argnums=(0, 6, 7, 8))
compiled_scan = jax.jit(scan, static_argnums=(0, 5, 6))
