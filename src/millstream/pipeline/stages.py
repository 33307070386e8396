"""Running one stage on one element or on many, wherever its values come from."""

import collections
import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.extend.random import threefry2x32_p

from millstream.plan.keys import Array, Key, fold, named_keys
from millstream.reading.contracts import PyTree
from millstream.text.errors import table

_COMPILED = ("jit", "pjit")
_REARRANGING = ("broadcast_in_dim", "reshape", "squeeze", "transpose", "copy", "sharding_constraint")
_VALUE_DEPENDENT = (jax.errors.ConcretizationTypeError, jax.errors.NonConcreteBooleanIndexError)


def _is_input(jaxpr: Any, atom: Any, number: int) -> bool:
    """Whether a value is one of the inputs, as it was given."""
    if isinstance(atom, Literal):
        return False
    if atom is jaxpr.invars[number]:
        return True
    equation = _maker(jaxpr, atom)
    if equation is None or equation.primitive.name not in _COMPILED:
        return False
    inner = equation.params["jaxpr"].jaxpr
    out = inner.outvars[equation.outvars.index(atom)]
    return any(
        _is_input(inner, out, position) and _is_input(jaxpr, given, number)
        for position, given in enumerate(equation.invars)
    )


def is_all_true(jaxpr: Any, consts: list[Any], atom: Any) -> bool:
    """Whether a value is True everywhere, whatever the inputs are; False also if that cannot be seen."""
    if isinstance(atom, Literal):
        return bool(np.all(atom.val))
    if atom in jaxpr.constvars:
        return bool(np.all(np.asarray(consts[jaxpr.constvars.index(atom)])))
    equation = _maker(jaxpr, atom)
    if equation is None:
        return False
    name = equation.primitive.name
    if name in _REARRANGING:
        return is_all_true(jaxpr, consts, equation.invars[0])
    if name not in (*_COMPILED, "scan"):
        return False
    inner, number = equation.params["jaxpr"], equation.outvars.index(atom)
    out = inner.jaxpr.outvars[number]
    if name == "scan" and atom.aval.ndim == out.aval.ndim:  # carried on; what is stacked has an axis more
        return False
    return is_all_true(inner.jaxpr, inner.consts, out)


def _maker(jaxpr: Any, variable: Any) -> Any:
    """The equation that a variable comes from; None for an input."""
    return next((equation for equation in jaxpr.eqns if variable in equation.outvars), None)


if TYPE_CHECKING:
    from millstream.pipeline.transform import Transform


def stage_names(stages: Sequence["Transform"]) -> list[str]:
    """One name per stage; a name that comes again is numbered, so that every stage has its own keys."""
    seen: collections.Counter[str] = collections.Counter()
    names = []
    for stage in stages:
        seen[stage.name] += 1
        names.append(stage.name if seen[stage.name] == 1 else f"{stage.name}#{seen[stage.name]}")
    return names


def element_key(words: Array, name: str, epoch: Array, element: Array, high: Array = None) -> jax.Array:
    """The typed keys of a stage's elements: functions of run key, stage name, epoch and element number alone."""
    return element_keys(words, [name], epoch, element, high)[0]


def element_keys(
    words: Array, names: Sequence[str], epoch: Array, element: Array, high: Array = None
) -> list[jax.Array]:
    """The same for several stages, made together: 5 or 20 random stages compile in nine tenths of the time."""
    key = named_keys(words, [f"millstream stage 1 {name}" for name in names], jnp.ndim(element), _threefry2x32)
    high = None if high is None else high[None]
    key = fold(jnp, key, jnp.asarray(epoch)[None], _threefry2x32)
    key = fold(jnp, key, jnp.asarray(element)[None], _threefry2x32, high)
    found = jnp.stack(jnp.broadcast_arrays(*key), axis=-1)
    return [jax.random.wrap_key_data(found[number], impl="threefry2x32") for number in range(len(names))]


def _threefry2x32(key: Key, counter: Key) -> Key:
    """The cipher as a primitive of JAX, which makes five random stages compile in 1.1 s of CPU instead of 2.8.

    The order keeps the rounds written out: in a scan they take 4.7 us a step, and the primitive 6.9.
    """
    arrays = [jnp.asarray(word, np.uint32) for word in (*key, *counter)]
    # The primitive wants four of one shape. Under vmap they have one only if each depends on all of them.
    nothing = functools.reduce(operator.or_, (array & np.uint32(0) for array in arrays))
    left, right = threefry2x32_p.bind(*(array | nothing for array in arrays))
    return left, right


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
        if isinstance(error, jax.errors.TracerArrayConversionError):
            error.add_note(
                "Stages are compiled, so NumPy cannot see the values. Write jnp in place of np, or call NumPy where "
                "samples are read, before all compiled stages: ms.HostMapTransform(lambda sample: ...)."
            )
        if isinstance(error, _VALUE_DEPENDENT):
            error.add_note(
                "Stages are compiled, so no shape and no Python branch may depend on values. Keep the shape and select "
                "with jnp.where, or do it where samples are read: ms.HostMapTransform(lambda sample: ...)."
            )
        raise


def keeps_mask(name: str, stage: "Transform", axes: int, value: PyTree, mask: jax.Array, key: jax.Array | None) -> bool:
    """Whether the mask that leaves a stage is the one that came in, also if the stage is compiled on its own."""
    traced = jax.make_jaxpr(lambda mask: apply_stage(name, stage, axes, value, mask, key)[1])(mask)
    return _is_input(traced.jaxpr, traced.jaxpr.outvars[0], 0)
