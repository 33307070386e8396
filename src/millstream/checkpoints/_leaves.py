"""The leaves of a tree that is saved, in words, and what differs between those of two trees."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millstream.checkpoints import _document
from millstream.reading.dtypes import check_array, dtype_name, holds_numbers, named_dtype
from millstream.text.errors import describe_leaf, differences

_VALUES = (bool, int, float, complex, str)
# What JAX makes of Python numbers.
_ARRAYS_OF = {
    "bool": ("bool",),
    "int": ("int32", "int64"),
    "float": ("float32", "float64"),
    "complex": ("complex64", "complex128"),
}


@dataclasses.dataclass(frozen=True)
class SavedLeaf:
    """What is known of a leaf besides its bytes.

    Attributes:
        path: Where it is in the tree.
        dtype: The name of its dtype, or of its type if it is a Python value.
        shape: Its shape; None for a Python value.
        impl: The kind of a typed PRNG key; None for anything else.
        value: A Python value itself.
    """

    path: str
    dtype: str
    shape: tuple[int, ...] | None = None
    impl: str | None = None
    value: Any = None

    @property
    def is_stored(self) -> bool:
        """Whether there are bytes of it among the arrays."""
        return self.shape is not None and math.prod(self.shape) > 0

    def words(self) -> str:
        """As an error shows it."""
        return self.dtype if self.shape is None else f"shape {self.shape}, {self.dtype}"

    def can_replace(self, other: "SavedLeaf") -> bool:
        """Whether this one, which was saved, can take the place of another.

        A Python number, such as the first `step` of a state, is an array as soon as a compiled step has changed it.
        """
        became_array = self.shape == () and self.dtype in _ARRAYS_OF.get(other.dtype, ()) and other.shape is None
        return became_array or (self.dtype, self.shape) == (other.dtype, other.shape)


def leaves_of(caller: str, tree: Any) -> dict[str, tuple[SavedLeaf, Any]]:
    """The leaves of a tree by their paths, each in words and as it is."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    found = {}
    for keys, leaf in flat:
        path = jax.tree_util.keystr(keys)
        if path in found:
            raise ValueError(f"{caller} needs one path for each leaf of a tree. Two are at tree{path}.")
        found[path] = (_describe(caller, path, leaf), leaf)
    return found


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys, or stands for one."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _describe(caller: str, path: str, leaf: Any) -> SavedLeaf:
    if type(leaf) in _VALUES:
        return SavedLeaf(path, type(leaf).__name__, value=leaf)
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        check_array(f"{caller}: tree{path}", leaf)
        shape = tuple(leaf.shape)
        if is_key(leaf):
            impl = str(jax.random.key_impl(leaf)) if isinstance(leaf, jax.Array) else None
            return SavedLeaf(path, str(leaf.dtype), shape, impl)
        if _can_be_stored(np.dtype(leaf.dtype)):
            return SavedLeaf(path, dtype_name(np.dtype(leaf.dtype)), shape)
    raise TypeError(
        f"{caller} keeps trees of arrays of numbers, typed PRNG keys, Python numbers and text. "
        f"Got tree{path}: {describe_leaf(leaf)}. Leave it out of the tree, and put it back in after loading."
    )


def _can_be_stored(dtype: np.dtype) -> bool:
    # What a long double is depends on the machine.
    return holds_numbers(dtype) and dtype.type not in (np.longdouble, np.clongdouble)


def encode(leaves: Sequence[SavedLeaf]) -> bytes:
    """The leaves as JSON, one on a line."""
    lines = []
    for leaf in leaves:
        facts = {"path": leaf.path, "dtype": leaf.dtype}
        if leaf.shape is None:
            facts["value"] = json.loads(_document.encode("", leaf.value))
        else:
            facts |= {"shape": leaf.shape} | ({} if leaf.impl is None else {"impl": leaf.impl})
        lines.append(json.dumps(facts))
    return ("[\n" + ",\n".join(lines) + "\n]\n").encode()


def decode(data: bytes) -> dict[str, SavedLeaf]:
    """The leaves that `encode` was given, by their paths, in their order; any other bytes raise some error."""
    leaves = {}
    for facts in _document.decode(data):
        shape = tuple(facts["shape"]) if "shape" in facts else None
        leaf = SavedLeaf(facts["path"], facts["dtype"], shape, facts.get("impl"), facts.get("value"))
        _require_sense(leaf)
        leaves[leaf.path] = leaf
    return leaves


def _require_sense(leaf: SavedLeaf) -> None:
    """Refuse a leaf that `encode` cannot have written."""
    if leaf.shape is None:
        sense = type(leaf.value) in _VALUES and type(leaf.value).__name__ == leaf.dtype
    else:
        sense = all(type(size) is int and size >= 0 for size in leaf.shape)
        if 0 in leaf.shape:
            np.empty(leaf.shape, np.complex128)  # a ValueError if no array can have this shape
        if leaf.impl is None:
            sense = sense and _can_be_stored(named_dtype(leaf.dtype))
        else:
            key = jax.eval_shape(lambda: jax.random.key(0, impl=leaf.impl))
            sense = sense and str(key.dtype) == leaf.dtype
    if not sense or type(leaf.path) is not str:
        raise ValueError(f"no leaf is {leaf.words()} at {leaf.path!r}")


def require_same(caller: str, where: str, saved: Mapping[str, SavedLeaf], now: Mapping[str, SavedLeaf]) -> None:
    """Refuse to load into a tree with other leaves than were saved, naming what differs side by side."""
    alike = {path for path in saved if path in now and saved[path].can_replace(now[path])}
    then, current = (
        {f"tree{path}": leaf.words() for path, leaf in tree.items() if path not in alike} for tree in (saved, now)
    )
    if differing := differences(then, current):
        raise ValueError(
            f"{caller} needs a tree like the one {where} was saved from. They differ in\n{differing}\n"
            "Build the state as it was. To continue with another one on purpose, load with like=None, which gives what "
            "was saved by its paths, and put it where it belongs."
        )
