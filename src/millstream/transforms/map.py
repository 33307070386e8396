"""Functions of the user's, traced."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax

from millstream.pipeline.transform import Transform
from millstream.reading.contracts import PyTree
from millstream.text.errors import function_name, require_callable, require_text
from millstream.text.summaries import call_text


@dataclasses.dataclass(frozen=True)
class MapTransform(Transform):
    """Apply a traced function to every sample, or to every batch after `BatchTransform`.

    Example:
        >>> double = ms.MapTransform(lambda value, mask: {"x": value["x"] * 2})

    Args:
        fn: `fn(value, mask) -> value`. It may change keys, shapes and dtypes; what comes out is derived by tracing it.
    """

    fn: Callable[[PyTree, jax.Array], PyTree]

    def __post_init__(self) -> None:
        require_callable("MapTransform", "fn", self.fn, "value, mask")

    @property
    def name(self) -> str:
        return f"MapTransform({function_name(self.fn)})"

    def apply(self, value: PyTree, mask: jax.Array, key: jax.Array | None) -> tuple[PyTree, jax.Array]:
        return self.fn(value, mask), mask

    def __repr__(self) -> str:
        return call_text(self)


@dataclasses.dataclass(frozen=True)
class RandomMapTransform(Transform):
    """Apply a traced function that needs randomness, such as an augmentation.

    The key depends on the run's key, the stage's name, the epoch and the sample (after a `BatchTransform`: the
    batch), and on nothing else: the same sample in the same epoch is augmented alike on every runtime, and other stages
    do not disturb it.

    Example:
        >>> def jitter(value, mask, key):
        ...     return {"x": value["x"] + 0.1 * jax.random.normal(key, value["x"].shape)}
        >>> stage = ms.RandomMapTransform(jitter)

    Args:
        fn: `fn(value, mask, key) -> value`.
        label: The stage's name; by default the function's. Two stages of one name in a pipeline are numbered.
    """

    keyed: ClassVar[bool] = True

    fn: Callable[[PyTree, jax.Array, jax.Array], PyTree]
    label: str | None = None

    def __post_init__(self) -> None:
        require_callable("RandomMapTransform", "fn", self.fn, "value, mask, key")
        if self.label is not None:
            require_text("RandomMapTransform", "label", self.label)

    @property
    def name(self) -> str:
        return f"RandomMapTransform({function_name(self.fn) if self.label is None else self.label})"

    def apply(self, value: PyTree, mask: jax.Array, key: jax.Array | None) -> tuple[PyTree, jax.Array]:
        assert key is not None
        return self.fn(value, mask, key), mask

    def __repr__(self) -> str:
        return call_text(self)
