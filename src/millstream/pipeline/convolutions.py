"""Convolutions inside loops, as CPUs compute them fast.

XLA's compiler for CPUs has a fast convolution for one order of axes: rows, space, channels. It brings others into that
order, such as those of gradients, but only outside loops. A step with two convolutions and its gradient took 10 to 34
times the CPU time inside a scan. So here they are put into that order before the compiler sees them; the numbers are
those of a step outside a loop.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun, jaxprs_in_params

_CONVOLUTION = lax.conv_general_dilated_p
# What may have convolutions inside. Others, such as kernels and parts of a mesh, are left as they are.
_CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "checkpoint",
    "remat2",
    "scan",
    "while",
    "cond",
    "custom_jvp_call",
    "custom_vjp_call",
}


def with_fast_convolutions(body: Callable[..., Any]) -> Callable[..., Any]:
    """The body of a loop, with convolutions in the order of axes that is fast on a CPU; elsewhere, as it is."""
    if jax.default_backend() != "cpu":
        return body

    def rewritten(*values: Any) -> Any:
        closed, shape = jax.make_jaxpr(body, return_shape=True)(*values)
        leaves = jaxpr_as_fun(_edited(closed))(*jax.tree.leaves(values))
        return jax.tree.unflatten(jax.tree.structure(shape), leaves)

    return rewritten


def _edited(value: Any) -> Any:
    """A traced program, or several, with the convolutions replaced; other values as they are."""
    if isinstance(value, tuple):
        return tuple(map(_edited, value))
    if isinstance(value, Jaxpr):
        return value.replace(eqns=[*map(_edited_equation, value.eqns)]) if _has_convolution(value) else value
    if isinstance(value, ClosedJaxpr):  # newer JAX has one class for both
        return value.replace(jaxpr=_edited(value.jaxpr))
    return value


def _has_convolution(jaxpr: Jaxpr) -> bool:
    return any(
        equation.primitive is _CONVOLUTION or any(map(_has_convolution, jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )


def _edited_equation(equation: JaxprEqn) -> JaxprEqn:
    if equation.primitive is _CONVOLUTION:
        function = functools.partial(_convolution, equation.params)
        call = jax.make_jaxpr(jax.jit(function))(*(variable.aval for variable in equation.invars)).jaxpr.eqns[0]
        return call.replace(invars=equation.invars, outvars=equation.outvars)
    if equation.primitive.name in _CALLS:
        return equation.replace(params={name: _edited(value) for name, value in equation.params.items()})
    return equation


def _convolution(params: dict[str, Any], rows: Any, kernel: Any) -> Any:
    """A convolution by way of one whose axes are rows, space and channels, and space, input and output channels."""
    old = params["dimension_numbers"]
    last = rows.ndim - 1
    space = range(1, last)
    new = lax.ConvDimensionNumbers((0, last, *space), (last, last - 1, *range(last - 1)), (0, last, *space))
    rows = lax.transpose(rows, (old.lhs_spec[0], *old.lhs_spec[2:], old.lhs_spec[1]))
    kernel = lax.transpose(kernel, (*old.rhs_spec[2:], old.rhs_spec[1], old.rhs_spec[0]))
    made = _CONVOLUTION.bind(rows, kernel, **{**params, "dimension_numbers": new})
    places = (old.out_spec[0], *old.out_spec[2:], old.out_spec[1])
    return lax.transpose(made, tuple(map(places.index, range(rows.ndim))))
