"""Saying inside a program how a value is divided over devices."""

from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_value


def with_sharding_constraint(x: PyTree, shardings: PyTree) -> PyTree:
    """Divide values over the mesh in force, or leave them alone where there is none or it has one device.

    It works under `jax.set_mesh` and the older `with mesh:`, inside and outside `jax.jit`. On axes of type
    `Explicit`, which `jax.make_mesh` makes by default and where JAX's own constraint only checks, it reshards.

    Example:
        >>> P = jax.sharding.PartitionSpec
        >>> hidden = ms.sharding.with_sharding_constraint(jnp.ones((8, 4)), P("data", "model"))

    Args:
        x: A pytree of arrays.
        shardings: A `PartitionSpec` or a `Sharding` for all of them, or a pytree of these shaped like `x` or like the
            upper part of it.
    """
    try:
        parts = jax.tree.map(lambda _, values: values, shardings, x, is_leaf=_is_spec)
    except ValueError as error:
        raise ValueError(
            "with_sharding_constraint needs shardings shaped like x or like the upper part of it. "
            f"Got {describe_value(shardings)}."
        ) from error
    return jax.tree.map(
        lambda sharding, values: jax.tree.map(lambda value: _constrained(value, sharding), values),
        shardings,
        parts,
        is_leaf=_is_spec,
    )


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def _constrained(value: Any, sharding: Any) -> Any:
    if not isinstance(sharding, PartitionSpec | Sharding):
        raise TypeError(
            "with_sharding_constraint needs a PartitionSpec or a Sharding for every array. "
            f"Got {describe_value(sharding)}."
        )
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
    elif isinstance(sharding, PartitionSpec):
        mesh = jax.sharding.get_abstract_mesh()
    else:
        return jax.lax.with_sharding_constraint(value, sharding)
    if mesh.empty:
        return _in_entered_mesh(value, sharding)
    if mesh.size == 1:
        return value
    if all(kind == AxisType.Explicit for kind in mesh.axis_types):
        return jax.sharding.reshard(value, sharding)
    return jax.lax.with_sharding_constraint(value, sharding)


def _in_entered_mesh(value: Any, sharding: Any) -> Any:
    # Only JAX itself sees the mesh of `with mesh:`; where there is none either, it refuses a spec before all else.
    try:
        return jax.lax.with_sharding_constraint(value, sharding)
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # an error of the device
            raise
        return value
