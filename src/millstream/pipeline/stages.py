"""Running one stage on one element or on many, wherever its values come from."""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from millstream.pipeline.jaxprs import is_input
from millstream.plan.keys import Array, fold, named_key
from millstream.reading.contracts import PyTree
from millstream.text.errors import table

if TYPE_CHECKING:
    from millstream.pipeline.transform import Transform

_VALUE_DEPENDENT = (jax.errors.ConcretizationTypeError, jax.errors.NonConcreteBooleanIndexError)


def stage_names(stages: Sequence["Transform"]) -> list[str]:
    """One name per stage; a name that comes again is numbered, so that every stage has its own keys."""
    seen: collections.Counter[str] = collections.Counter()
    names = []
    for stage in stages:
        seen[stage.name] += 1
        names.append(stage.name if seen[stage.name] == 1 else f"{stage.name}#{seen[stage.name]}")
    return names


def element_key(words: Array, name: str, epoch: Array, element: Array) -> jax.Array:
    """The typed keys of a stage's elements: functions of run key, stage name, epoch and element number alone."""
    key = fold(jnp, fold(jnp, named_key(words, f"millstream stage 1 {name}"), epoch), element)
    return jax.random.wrap_key_data(jnp.stack(jnp.broadcast_arrays(*key), axis=-1), impl="threefry2x32")


def apply_stage(
    name: str, stage: "Transform", axes: int, value: PyTree, mask: jax.Array, key: jax.Array | None
) -> tuple[PyTree, jax.Array]:
    """Run a stage `vmap`ped over the leading `axes`; a failure is told which stage it came from."""
    apply: Callable[..., Any] = stage.apply
    if axes and stage.effects:
        apply = functools.partial(stage.apply_each, axes)
    else:
        for _ in range(axes):
            apply = jax.vmap(apply)
    try:
        return apply(value, mask, key)
    except Exception as error:
        leaves = jax.tree_util.tree_leaves_with_path(value)
        given = table((f"value{jax.tree_util.keystr(path)}", f"{a.dtype}{list(a.shape[axes:])}") for path, a in leaves)
        error.add_note(f"This came from the pipeline stage {name}, which was given\n{given}")
        if isinstance(error, _VALUE_DEPENDENT):
            error.add_note(
                "Stages are compiled, so no shape and no Python branch may depend on values. "
                "Keep the shape and select with jnp.where, or change the data before they enter the source."
            )
        raise


def keeps_mask(name: str, stage: "Transform", axes: int, value: PyTree, mask: jax.Array, key: jax.Array | None) -> bool:
    """Whether the mask that leaves a stage is the one that came in, also if the stage is compiled on its own."""
    traced = jax.make_jaxpr(lambda mask: apply_stage(name, stage, axes, value, mask, key)[1])(mask)
    return is_input(traced.jaxpr, traced.jaxpr.outvars[0], 0)
