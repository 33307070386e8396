"""Batches that have names and can be taken apart."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax

from millstream.pipeline.transform import Transform
from millstream.reading.contracts import PyTree


class Batch(dict[str, Any]):
    """A dict that can also be taken apart into its values, in the order of their names.

    Iterating over it gives the values; `keys()` gives the names.

    Example:
        >>> from millstream.dialects.cereal import Batch
        >>> images, labels = batch = Batch(label=3, image=7)
        >>> images, batch["label"]
        (7, 3)
    """

    def __iter__(self) -> Iterator[Any]:
        return (self[name] for name in sorted(self.keys()))


def _flatten_with_keys(batch: Batch) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    names = tuple(sorted(batch.keys()))
    return [(jax.tree_util.DictKey(name), batch[name]) for name in names], names


jax.tree_util.register_pytree_with_keys(
    Batch, _flatten_with_keys, lambda names, values: Batch(zip(names, values, strict=True))
)


@dataclasses.dataclass(frozen=True)
class AsBatch(Transform):
    """The stage that makes each dict a `Batch`."""

    passive: ClassVar[bool] = True

    def apply(self, value: PyTree, mask: jax.Array, key: jax.Array | None) -> tuple[PyTree, jax.Array]:
        return Batch(value), mask
