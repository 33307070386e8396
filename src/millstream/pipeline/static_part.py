"""Pytrees taken apart into arrays, which a compiled program can change, and all the rest, which is part of it."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import jax
import numpy as np

from millstream.reading.contracts import PyTree
from millstream.reading.dtypes import holds_numbers
from millstream.text.errors import describe_value, shortened, table

_NUMBERS = (bool, int, float, complex)
_ARRAY = object()  # stands for a leaf that is an array


@jax.tree_util.register_static
class StaticPart:
    """What a pytree is besides its arrays: its structure, and the leaves that are not arrays. Hashed once.

    It is a pytree without leaves itself, so it passes into compiled programs and out of them.

    Args:
        structure: The structure of the pytree.
        leaves: Its leaves in order, `_ARRAY` for those that are arrays.

    Attributes:
        leaves: As above.
        has_numbers: Whether there are Python numbers among them.
    """

    def __init__(self, structure: Any, leaves: tuple[Any, ...]) -> None:
        self.leaves = leaves
        self.has_numbers = any(isinstance(leaf, _NUMBERS) for leaf in leaves)
        self._structure = structure
        # Numbers of different types can be equal, and so can 0.0 and -0.0; programs with them differ.
        self._parts = (structure, tuple((type(leaf), _exact(leaf)) for leaf in leaves))
        self._hash = hash(self._parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, StaticPart) and self._hash == other._hash and self._parts == other._parts

    def join(self, arrays: Iterable[Any]) -> PyTree:
        """The pytree again, with these arrays."""
        rest = iter(arrays)
        return jax.tree.unflatten(self._structure, [next(rest) if leaf is _ARRAY else leaf for leaf in self.leaves])

    def without_numbers_changed_in(self, after: Self, arrays: Sequence[Any]) -> "tuple[StaticPart, list[Any]]":
        """The part and its arrays, where numbers that are something else in another such part count as arrays."""
        if after._structure != self._structure:
            return self, list(arrays)
        rest, leaves, found = iter(arrays), [], []
        for (kind, exact), leaf, (other_kind, other) in zip(self._parts[1], self.leaves, after._parts[1], strict=True):
            if leaf is _ARRAY:
                found.append(next(rest))
            elif isinstance(leaf, _NUMBERS) and (kind, exact) != (other_kind, other):
                found.append(leaf)
                leaf = _ARRAY
            leaves.append(leaf)
        return StaticPart(self._structure, tuple(leaves)), found

    def arrays_of(self, tree: PyTree, before: Sequence[Any]) -> list[Any]:
        """The arrays of a pytree whose static part is this one, and whose arrays are like those of an earlier one.

        Args:
            tree: The pytree; refused if its static part, or the shape or dtype of an array, is different.
            before: The arrays of the earlier one.
        """
        paths, structure = jax.tree.flatten_with_path(tree)
        if structure != self._structure:
            raise TypeError(
                f"{_RULE} The step changed its structure from\n  {shortened(self._structure)}\nto\n"
                f"  {shortened(structure)}"
            )
        changed = [
            (f"carry{jax.tree_util.keystr(path)}", f"{_describe_kept(kept)} became {describe_value(leaf)}")
            for (path, leaf), kept in zip(paths, self.leaves, strict=True)
            if not _fits(kept, leaf)
        ]
        if changed:
            raise TypeError(
                f"{_RULE} The step changed:\n{table(changed)}\n"
                "Keep what changes as an array, such as jnp.asarray(0), and anything else as it is."
            )
        arrays = [(path, leaf) for (path, leaf), kept in zip(paths, self.leaves, strict=True) if kept is _ARRAY]
        resized = [
            (f"carry{jax.tree_util.keystr(path)}", f"{_typed(old)} became {_typed(new)}")
            for (path, new), old in zip(arrays, before, strict=True)
            if not _is_alike(old, new)
        ]
        if resized:
            raise TypeError(
                f"{_RULE} Their shapes and dtypes stay. The step changed:\n{table(resized)}\n"
                "Return the state as it came in, and cast what differs, as in x.astype(old.dtype)."
            )
        return [leaf for _, leaf in arrays]


_RULE = (
    "Several steps as one program (fuse= or scan_epoch) can change the arrays of what they carry from step to "
    "step, and nothing else."
)


def split(tree: PyTree, arrays: Any = jax.Array | np.ndarray) -> tuple[StaticPart, list[Any]]:
    """A pytree as its static part and its arrays.

    Args:
        tree: The pytree.
        arrays: The types of leaves that are arrays.
    """
    return _split_leaves(*jax.tree.flatten(tree), arrays)


def _split_leaves(leaves: list[Any], structure: Any, arrays: Any) -> tuple[StaticPart, list[Any]]:
    is_array = [isinstance(leaf, arrays) for leaf in leaves]
    rest = tuple(_ARRAY if array else leaf for leaf, array in zip(leaves, is_array, strict=True))
    return StaticPart(structure, rest), [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]


def split_carry(tree: PyTree) -> tuple[StaticPart, list[Any]]:
    """What steps carry as its static part and its arrays; refused by name if a leaf is neither."""
    try:
        leaves, structure = jax.tree.flatten(tree)
        if all(map(isinstance, leaves, itertools.repeat(jax.Array))):  # as most are, before every fused program
            return _of_arrays(structure), leaves
        static, arrays = _split_leaves(leaves, structure, jax.Array | np.ndarray | np.generic)
        if all(map(_is_carried, arrays)):
            return static, arrays
    except TypeError:
        pass
    wrong = [
        (f"carry{jax.tree_util.keystr(path)}", describe_value(leaf))
        for path, leaf in jax.tree.leaves_with_path(tree)
        if not _is_carried(leaf)
    ]
    raise TypeError(
        "Several steps as one program (fuse= or scan_epoch) need leaves that are arrays of numbers, or else "
        f"hashable. Got:\n{table(wrong)}"
    )


@functools.lru_cache(maxsize=64)
def _of_arrays(structure: Any) -> StaticPart:
    """The static part of a pytree of arrays, the same one every time: a program is then found by its identity."""
    return StaticPart(structure, (_ARRAY,) * structure.num_leaves)


def settled(carry: PyTree, part_after: Callable[[StaticPart, list[Any]], StaticPart]) -> tuple[StaticPart, list[Any]]:
    """The static part and the arrays of a carry that stay such from step to step.

    A Python number that a step leaves as it is stays a number, and may be the size of something. One that a step
    changes is an array from the first step on.

    Args:
        carry: What the first step is given.
        part_after: The static part that one step makes of a static part and arrays.
    """
    static, carried = split_carry(carry)
    while static.has_numbers:
        found, carried = static.without_numbers_changed_in(part_after(static, carried), carried)
        if found == static:
            break
        static = found
    return static, carried


def require_arrays(name: str, tree: PyTree) -> None:
    """Refuse what a step gives out unless it is made of arrays and numbers."""
    wrong = [
        (f"{name}{jax.tree_util.keystr(path)}", describe_value(leaf))
        for path, leaf in jax.tree.leaves_with_path(tree)
        if not _fits(_ARRAY, leaf)
    ]
    if wrong:
        raise TypeError(
            "Several steps as one program (fuse= or scan_epoch) can log and give out arrays and numbers."
            f" Got:\n{table(wrong)}"
        )


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a Python number."""
    return isinstance(leaf, _NUMBERS)


def _exact(leaf: Any) -> Any:
    return repr(leaf) if isinstance(leaf, float | complex) else leaf


def _fits(kept: Any, leaf: Any) -> bool:
    if kept is _ARRAY:  # a number becomes one
        return isinstance(leaf, (jax.Array, np.ndarray, np.generic, *_NUMBERS))
    return leaf is kept or (type(leaf) is type(kept) and _exact(leaf) == _exact(kept))


def _is_alike(old: Any, new: Any) -> bool:
    """Whether a loop can carry one array on as the other: weak types, those of Python's numbers, are promoted."""
    old, new = jax.typeof(old), jax.typeof(new)
    return old.shape == new.shape and (old.weak_type or old.dtype == new.dtype)


def _typed(array: Any) -> str:
    return jax.typeof(array).str_short()


def _describe_kept(kept: Any) -> str:
    return "an array" if kept is _ARRAY else describe_value(kept)


def _is_carried(leaf: Any) -> bool:
    """Whether steps can carry a leaf: an array of numbers, or something hashable."""
    if isinstance(leaf, jax.Array):
        return True
    if isinstance(leaf, np.ndarray | np.generic):
        return holds_numbers(leaf.dtype)
    try:
        hash(leaf)
    except TypeError:
        return False
    return True
