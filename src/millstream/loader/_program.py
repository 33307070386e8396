"""Compiled programs: a source taken apart into arrays, which are arguments, and all the rest, which is static.

Two loaders whose static parts are equal share their programs, so building a second one compiles nothing.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from millstream._core.contracts import PyTree, Stream
from millstream._core.pipeline import Pipeline

BodyFn = Callable[[Any, Any, jax.Array], tuple[Any, Any]]


class Program:
    """The static part of a source, hashed once."""

    def __init__(self, structure: Any, leaves: tuple[Any, ...]):
        self._parts = (structure, leaves)
        self._hash = hash(self._parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Program) and self._parts == other._parts)

    def source(self, arrays: list[Any]) -> Any:
        """The source again, over these arrays."""
        structure, leaves = self._parts
        rest = iter(arrays)
        return jax.tree.unflatten(structure, [next(rest) if leaf is _ARRAY else leaf for leaf in leaves])


_ARRAY = object()  # stands for a leaf that is passed as an argument


def split(source: Stream) -> tuple[Program, list[Any]]:
    """A source as a program and its arrays."""
    leaves, structure = jax.tree.flatten(source)
    is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
    arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]
    statics = tuple(_ARRAY if array else leaf for leaf, array in zip(leaves, is_array, strict=True))
    return Program(structure, statics), arrays


@functools.partial(jax.jit, static_argnums=(0, 3))
def next_batch(program: Program, arrays: list[Any], state: PyTree, apart: bool) -> tuple[PyTree, PyTree, jax.Array]:
    """One batch, as a program of its own (`apart`) or as part of one that is being traced."""
    source = program.source(arrays)
    value, mask, state = source.next(state, apart=apart) if isinstance(source, Pipeline) else source.next(state)
    return value, state, mask


@functools.partial(jax.jit, static_argnums=(0, 5))
def batch_of(
    program: Program, words: jax.Array, step: Any, rows: list[Any], intact: Any, passing: tuple[int, ...]
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
    source = program.source([])
    specs = source.row_specs()
    given = [jnp.zeros(spec.shape, spec.dtype) if row is None else row for row, spec in zip(rows, specs, strict=True)]
    made = jax.tree.leaves(source.at(words, step, apart=True, rows=given, intact=intact))
    return [leaf for number, leaf in enumerate(made) if number not in passing]


def scan(
    program: Program, arrays: list[Any], state: PyTree, carry: Any, body_fn: BodyFn, unroll: int | bool
) -> tuple[PyTree, Any, Any]:
    """One epoch's number of steps as one `lax.scan`."""
    source = program.source(arrays)

    def body(carried: tuple[PyTree, Any], _: None) -> tuple[tuple[PyTree, Any], Any]:
        state, carry = carried
        value, mask, state = source.next(state)
        carry, output = body_fn(carry, value, mask)
        return (state, carry), output

    (state, carry), outputs = lax.scan(body, (state, carry), None, length=source.steps_per_epoch, unroll=unroll)
    return state, carry, outputs


def run_steps(
    program: Program, arrays: list[Any], state: PyTree, carry: Any, count: Any, body_fn: BodyFn, width: int
) -> tuple[PyTree, Any, Any]:
    """So many steps, at most `width`, as one loop. How many is an argument: one program serves all numbers."""
    source = program.source(arrays)

    def draw_and_run(state: PyTree, carry: Any) -> tuple[PyTree, Any, Any]:
        value, mask, state = source.next(state)
        carry, output = body_fn(carry, value, mask)
        return state, carry, output

    def body(number: Any, carried: tuple[PyTree, Any, Any]) -> tuple[PyTree, Any, Any]:
        state, carry, outputs = carried
        state, carry, output = draw_and_run(state, carry)
        outputs = jax.tree.map(lambda kept, new: lax.dynamic_update_index_in_dim(kept, new, number, 0), outputs, output)
        return state, carry, outputs

    spec = jax.eval_shape(draw_and_run, state, carry)[2]
    outputs = jax.tree.map(lambda leaf: jnp.zeros((width, *leaf.shape), leaf.dtype), spec)
    return lax.fori_loop(0, count, body, (state, carry, outputs))


compiled_steps = jax.jit(run_steps, static_argnums=(0, 5, 6))
compiled_scan = jax.jit(scan, static_argnums=(0, 4, 5))
