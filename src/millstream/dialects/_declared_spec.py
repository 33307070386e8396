"""Transforms that can be told the shapes they are to find, as in cyreal; here these are always derived."""

import dataclasses
from typing import Any

import jax

import millstream as ms
from millstream.pipeline.pipeline import as_stream
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_leaf, differences


@dataclasses.dataclass(frozen=True)
class BatchTransform(ms.BatchTransform):
    """`millstream.BatchTransform`, which can also be told what it is to find.

    Example:
        >>> from millstream.dialects import cyreal
        >>> stage = cyreal.BatchTransform(4, element_spec_override=jax.ShapeDtypeStruct((), jnp.int32))
        >>> cyreal.DataLoader([cyreal.ArraySource(np.arange(10)), stage]).element_spec().shape
        (4,)

    Args:
        element_spec_override: The shapes and dtypes of the elements that are stacked. They are derived in any case;
            others than those are refused.
    """

    element_spec_override: PyTree | None = dataclasses.field(default=None, compare=False)

    def __call__(self, source: Any) -> Any:
        """Put this stage after a source."""
        inner = as_stream(source)
        require_spec("BatchTransform", self.element_spec_override, inner.element_spec())
        return ms.BatchTransform(self.batch_size, self.drop_last, self.pad_last_batch, self.collate)(inner)


@dataclasses.dataclass(frozen=True)
class MapTransform(ms.MapTransform):
    """`millstream.MapTransform`, which can also be told what comes out.

    Example:
        >>> from millstream.dialects import cyreal
        >>> spec = {"twice": jax.ShapeDtypeStruct((), jnp.float32)}
        >>> stage = cyreal.MapTransform(lambda value, mask: {"twice": 2 * value}, element_spec_override=spec)
        >>> loader = cyreal.DataLoader([cyreal.ArraySource(np.arange(10.0)), stage])

    Args:
        element_spec_override: The shapes and dtypes of what `fn` returns. They are derived in any case; others than
            those are refused.
    """

    element_spec_override: PyTree | None = dataclasses.field(default=None, compare=False)

    def __call__(self, source: Any) -> Any:
        """Put this stage after a source."""
        stream = ms.MapTransform(self.fn)(source)
        require_spec(self.name, self.element_spec_override, stream.element_spec())
        return stream


def require_spec(caller: str, declared: PyTree | None, derived: PyTree) -> None:
    """Refuse a declared spec that differs from the one that is there."""
    if declared is None:
        return
    if differing := differences(_leaves(declared), _leaves(derived), ("declared", "found")):
        raise ValueError(
            f"{caller} got an element_spec_override that differs from what is there:\n{differing}\n"
            "Leave it out: shapes and dtypes are derived. To change a dtype, use a MapTransform."
        )


def _leaves(spec: PyTree) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(spec)
    return {jax.tree_util.keystr(path) or "value": describe_leaf(leaf) for path, leaf in leaves}
