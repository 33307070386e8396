"""What can be said about the outputs of a traced function without running it."""

from typing import Any

import numpy as np
from jax.extend.core import Literal

_COMPILED = ("jit", "pjit")
_REARRANGING = ("broadcast_in_dim", "reshape", "squeeze", "transpose", "copy", "sharding_constraint")


def is_input(jaxpr: Any, atom: Any, number: int) -> bool:
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
        is_input(inner, out, position) and is_input(jaxpr, given, number)
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
    if name == "scan" and number < equation.params["num_carry"]:
        return False
    return is_all_true(inner.jaxpr, inner.consts, inner.jaxpr.outvars[number])


def _maker(jaxpr: Any, variable: Any) -> Any:
    """The equation that a variable comes from; None for an input."""
    return next((equation for equation in jaxpr.eqns if variable in equation.outvars), None)
