"""Comparing two batches or samples bit for bit, and naming the first place where they differ."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millstream.text.errors import describe_leaf, describe_value

# Contracting `x * a + b`, or adding in a different order, moves a result by a few units in the last place of the
# largest number that took part. The largest of the leaf stands for that one.
_ROUNDING = 4


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A leaf in which two trees differ."""

    leaf: str
    place: tuple[int, ...]  # of the first value that differs; () if it is the whole leaf
    expected: str
    found: str
    rounding: float | None = None  # the largest difference in the leaf, if rounding explains it

    @property
    def shown(self) -> str:
        """The leaf and the place, as code."""
        return f"{self.leaf}[{', '.join(map(str, self.place))}]" if self.place else self.leaf


def raw_key(leaf: Any) -> Any:
    """The raw data of a typed key; anything else as it is."""
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def on_host(tree: Any, *, copied: bool = False) -> Any:
    """A tree with its arrays as NumPy arrays, copied if asked."""

    def fetched(leaf: Any) -> Any:
        leaf = raw_key(leaf)
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            return leaf
        return np.array(leaf) if copied else np.asarray(leaf)

    return jax.tree.map(fetched, tree)


def compare(name: str, expected: Any, found: Any) -> list[Mismatch]:
    """Where two trees on the host differ: one entry per leaf, those that rounding explains last."""
    ours, theirs = (jax.tree_util.tree_leaves_with_path(tree) for tree in (expected, found))
    if jax.tree.structure(expected) != jax.tree.structure(found):
        return [Mismatch(name, (), str(jax.tree.structure(expected)), str(jax.tree.structure(found)))]
    found_ones = [
        mismatch
        for (path, left), (_, right) in zip(ours, theirs, strict=True)
        if (mismatch := _of_leaf(name + jax.tree_util.keystr(path), left, right)) is not None
    ]
    return sorted(found_ones, key=lambda mismatch: mismatch.rounding is not None)


def _of_leaf(name: str, expected: Any, found: Any) -> Mismatch | None:
    if not isinstance(expected, np.ndarray) or not isinstance(found, np.ndarray):
        same = _same_object(expected, found)
        return None if same else Mismatch(name, (), describe_value(expected), describe_value(found))
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return Mismatch(name, (), describe_leaf(expected), describe_leaf(found))
    if expected.dtype.hasobject:
        pairs = enumerate(zip(expected.flat, found.flat, strict=True))
        differing = np.array([place for place, (left, right) in pairs if not _same_object(left, right)], np.intp)
    else:
        differing = np.flatnonzero((_bytes(expected) != _bytes(found)).any(axis=1))
        if differing.size and jnp.issubdtype(expected.dtype, jnp.inexact):
            both = np.isnan(expected.ravel()[differing]) & np.isnan(found.ravel()[differing])
            differing = differing[~both]  # all NaNs are alike
    if not differing.size:
        return None
    place = tuple(map(int, np.unravel_index(differing[0], expected.shape)))
    shown = describe_value if expected.dtype.hasobject else str
    return Mismatch(name, place, shown(expected[place]), shown(found[place]), _rounding(expected, found))


def _bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of every value, one row each."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, array.dtype.itemsize)


def _rounding(expected: np.ndarray, found: np.ndarray) -> float | None:
    """The largest difference of two leaves, if rounding explains it."""
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        return None
    wide = np.complex128 if jnp.issubdtype(expected.dtype, jnp.complexfloating) else np.float64
    left, right = expected.astype(wide), found.astype(wide)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    if not np.isfinite(left[~same]).all() or not np.isfinite(right[~same]).all():
        return None
    apart = float(np.abs(left - right)[~same].max(initial=0.0))
    largest = float(np.abs(left[np.isfinite(left)]).max(initial=0.0))
    return apart if apart <= _ROUNDING * float(jnp.finfo(expected.dtype).eps) * largest else None


def _same_object(left: Any, right: Any) -> bool:
    """Whether two Python values are equal, arrays in them bit for bit, whatever their own `==` returns."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray | jax.Array):
        return not compare("", np.asarray(left), np.asarray(right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same_object(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_same_object, left, right))
    if isinstance(left, float) and left != left:
        return right != right
    if type(left).__eq__ is object.__eq__ and hasattr(left, "__dict__"):
        return _same_object(vars(left), vars(right))
    return bool(left == right)


def compare_batches(expected: tuple[Any, Any], found: tuple[Any, Any]) -> list[Mismatch]:
    """Where two batches with their masks differ, on the host."""
    return [*compare("mask", expected[1], found[1]), *compare("batch", expected[0], found[0])]
