"""Mixed precision: which dtype parameters are kept in, computed with and logged in, and the scale of a small loss."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_value, require_choice, require_int


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a managed step. Only floats are changed.

    Example:
        >>> precision = ms.managed.Precision(compute="bfloat16")

    Args:
        param: What parameters, and so the optimizer's state, are kept and updated in.
        compute: What a step sees parameters and batch in.
        output: What losses, metrics and outputs are logged in.
    """

    param: DTypeLike = "float32"
    compute: DTypeLike = "float32"
    output: DTypeLike = "float32"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            try:
                dtype = jnp.dtype(given)
            except Exception:
                dtype = None
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                raise TypeError(f"Precision needs {field.name} to be a dtype of floats. Got {describe_value(given)}.")
            object.__setattr__(self, field.name, dtype)


_PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(compute="bfloat16"),
    "fp16": Precision(compute="float16"),
}


def as_precision(caller: str, precision: str | Precision | None) -> Precision | None:
    """A precision given by name, as a value, or not at all."""
    if precision is None or isinstance(precision, Precision):
        return precision
    require_choice(caller, "precision to be a managed.Precision,", precision, _PRECISIONS)
    return _PRECISIONS[precision]


def at_least_32_bits(array: jax.Array) -> jax.Array:
    """The array in a dtype that sums and averages can be kept in."""
    wide = jnp.issubdtype(array.dtype, jnp.inexact) and array.dtype.itemsize >= 4
    return array if wide else array.astype(jnp.float32)


def cast(tree: PyTree, dtype: Any) -> PyTree:
    """The tree with its floats in this dtype; a leaf that needs no change is the same object."""

    def cast_leaf(leaf: Any) -> Any:
        found = getattr(leaf, "dtype", None)
        if found is None or found == dtype or not jnp.issubdtype(found, jnp.floating):
            return leaf
        return jnp.asarray(leaf).astype(dtype)

    return jax.tree.map(cast_leaf, tree)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """What a loss is multiplied with, so that small gradients survive in 16 bits; it adapts itself.

    An update whose gradients are not finite is left out and the scale halved; after that many finite ones in a row it
    is doubled.

    Example:
        >>> scale = ms.managed.LossScale(1024.0, growth_interval=2)
        >>> float(scale.adjusted(jnp.asarray(False)).scale)
        512.0

    Args:
        scale: The first value.
        finite_steps: Finite updates since the scale was changed.
        growth_interval: After how many of them the scale grows.
        factor: What it grows and shrinks by.
        limit: What it does not grow beyond.
    """

    scale: jax.Array | float = 2.0**15
    finite_steps: jax.Array | int = 0
    growth_interval: int = dataclasses.field(default=2000, metadata={"static": True})
    factor: float = dataclasses.field(default=2.0, metadata={"static": True})
    limit: float = dataclasses.field(default=2.0**24, metadata={"static": True})

    def adjusted(self, finite: jax.Array) -> "LossScale":
        """The scale after an update whose gradients were finite, or not."""
        scale = jnp.asarray(self.scale, jnp.float32)
        count = jnp.asarray(self.finite_steps, jnp.int32) + 1
        grows = count >= self.growth_interval
        grown = jnp.where(grows, jnp.minimum(scale * self.factor, self.limit), scale)
        shrunk = jnp.maximum(scale / self.factor, 1.0)
        return dataclasses.replace(
            self,
            scale=jnp.where(finite, grown, shrunk),
            finite_steps=jnp.where(finite & ~grows, count, 0),
        )


def as_loss_scale(caller: str, loss_scale: LossScale | None, precision: Precision | None) -> LossScale | None:
    """The scale a state begins with: by default one for float16, whose range is too small without, and none else."""
    if loss_scale is None:
        return LossScale() if precision is not None and precision.compute == jnp.float16 else None
    if not isinstance(loss_scale, LossScale):
        raise TypeError(f"{caller} needs loss_scale to be a managed.LossScale. Got {describe_value(loss_scale)}.")
    require_int(caller, "loss_scale.growth_interval", loss_scale.growth_interval, least=1)
    if not loss_scale.factor > 1:
        raise ValueError(f"{caller} needs loss_scale.factor to be more than 1. Got {loss_scale.factor}.")
    return loss_scale
