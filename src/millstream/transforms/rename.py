"""Keys of a mapping."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from millstream.pipeline.transform import Transform
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_value
from millstream.text.summaries import call_text


@dataclasses.dataclass(frozen=True)
class RenameTransform(Transform):
    """Rename keys of a mapping; the others stay.

    Example:
        >>> stage = ms.RenameTransform({"image": "pixels"})
    """

    renames: Mapping[str, str]

    def __post_init__(self) -> None:
        is_mapping = isinstance(self.renames, Mapping)
        if not is_mapping or not all(isinstance(name, str) for pair in self.renames.items() for name in pair):
            raise TypeError(
                'RenameTransform needs a mapping of names to names, such as {"old": "new"}. '
                f"Got {describe_value(self.renames)}."
            )
        object.__setattr__(self, "renames", _FrozenDict(self.renames))

    def apply(self, value: PyTree, mask: jax.Array, key: jax.Array | None) -> tuple[PyTree, jax.Array]:
        require_keys("RenameTransform", value, self.renames)
        names = [self.renames.get(name, name) for name in value]
        twice = sorted({repr(name) for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"RenameTransform would give two values the key {', '.join(twice)}. Rename or drop one of them first."
            )
        return dict(zip(names, value.values(), strict=True)), mask

    def __repr__(self) -> str:
        return call_text(self)


class _FrozenDict(dict[str, str]):
    """A stage is looked up by its fields, so they are hashable."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self.items()))


def require_keys(caller: str, value: Any, keys: Iterable[str]) -> None:
    """Refuse a value that is not a mapping or lacks one of the keys."""
    if not isinstance(value, Mapping):
        found = "a bare array" if hasattr(value, "dtype") else f"a {type(value).__name__}"
        raise TypeError(f"{caller} needs samples that are dicts. Got {found}.")
    missing = [repr(key) for key in keys if key not in value]
    if missing:
        raise KeyError(
            f"{caller} finds no key {', '.join(missing)} in the sample. It has {', '.join(map(repr, value))}."
        )
