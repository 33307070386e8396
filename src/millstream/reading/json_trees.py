"""Trees of arrays whose structure can be written to a file: dicts with words as keys, lists, tuples and None."""

import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from millstream.reading.dtypes import dtype_of_array, holds_numbers
from millstream.text.errors import describe_leaf


def flatten(who: str, tree: Any) -> tuple[Any, dict[str, Any]]:
    """The structure of a tree in JSON, where a star is a leaf, and its leaves by their paths, in JAX's order.

    Example:
        >>> from millstream.reading.json_trees import flatten
        >>> structure, leaves = flatten("ArrayCache", {"b": [np.ones(2), None], "a": np.zeros(3)})
        >>> structure, list(leaves)
        ({'a': '*', 'b': ['list', '*', None]}, ["['a']", "['b'][0]"])
    """
    leaves: dict[str, Any] = {}
    return _flatten(who, tree, "", leaves), leaves


def unflatten(structure: Any, leaves: Iterator[Any]) -> Any:
    """The tree of this structure with these leaves."""
    if structure is None:
        return None
    if structure == "*":
        return next(leaves)
    if isinstance(structure, dict):
        return {key: unflatten(branch, leaves) for key, branch in structure.items()}
    kind, *branches = structure
    return {"list": list, "tuple": tuple}[kind](unflatten(branch, leaves) for branch in branches)


def names_in(structure: Any, count: int) -> list[str]:
    """The paths of the leaves, at most `count`, of a structure that came from a file."""
    leaf = types.SimpleNamespace(shape=(), dtype=np.dtype(bool))
    return list(flatten("", unflatten(structure, iter([leaf] * count)))[1])


def _flatten(who: str, tree: Any, name: str, leaves: dict[str, Any]) -> Any:
    if tree is None:
        return None
    if type(tree) is dict and all(type(key) is str for key in tree):
        return {key: _flatten(who, tree[key], f"{name}[{key!r}]", leaves) for key in sorted(tree)}
    if type(tree) in (list, tuple):
        return [type(tree).__name__, *(_flatten(who, branch, f"{name}[{i}]", leaves) for i, branch in enumerate(tree))]
    dtype = dtype_of_array(tree)
    if dtype is None or not holds_numbers(dtype):
        raise TypeError(
            f"{who} keeps dicts with words as keys, lists, tuples and None, and in them arrays of numbers or bools. "
            f"Got tree{name}: {describe_leaf(tree)}."
        )
    leaves[name] = tree
    return "*"
