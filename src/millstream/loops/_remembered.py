"""What callbacks remember, as it is saved: plain values in the document, arrays in the tree."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millstream.files import plain
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_value

_CONTAINERS: dict[str, type] = {"list": list, "tuple": tuple}


class Remembered:
    """What all callbacks remember, taken apart.

    Args:
        states: What `get_state` of each callback gave, by the callback's name.
        like: The state of the run. A tree like it, such as the best one so far, may be of any classes.

    Attributes:
        document: What describes it, in plain values.
        tree: The arrays of each callback's entries.
    """

    def __init__(self, states: Mapping[str, Mapping[str, Any]], like: PyTree) -> None:
        self.document: dict[str, dict[str, Any]] = {}
        self.tree: dict[str, dict[str, PyTree]] = {}
        for name, entries in states.items():
            self.document[name] = {}
            for key, value in entries.items():
                arrays: list[Any] = []
                if _is_plain(value):
                    outline = ["plain", value]
                elif _is_like(value, like):
                    outline, arrays = ["state"], storable(value)
                else:
                    outline = _outline(f"{name}.get_state()[{key!r}]", value, arrays)
                self.document[name][key] = outline
                if outline[0] != "plain":
                    self.tree.setdefault(name, {})[key] = arrays


def tree_like(document: Mapping[str, Mapping[str, Any]], like: PyTree) -> PyTree:
    """What the saved tree of a document looks like."""
    found: dict[str, dict[str, PyTree]] = {}
    for name, entries in document.items():
        for key, outline in entries.items():
            if outline[0] != "plain":
                found.setdefault(name, {})[key] = like if outline[0] == "state" else list(_templates(outline))
    return found


def put_together(
    document: Mapping[str, Mapping[str, Any]], tree: Mapping[str, Mapping[str, PyTree]], like: PyTree
) -> dict[str, dict[str, Any]]:
    """What the callbacks had remembered, by their names.

    Args:
        document: As it was saved.
        tree: As it was saved.
        like: A state of the run, for what of a tree like it cannot be saved.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, entries in document.items():
        found[name] = {}
        for key, outline in entries.items():
            if outline[0] == "state":
                found[name][key] = unstorable(like, tree[name][key])
            else:
                found[name][key] = _value(outline, iter([] if outline[0] == "plain" else tree[name][key]))
    return found


def storable(tree: PyTree) -> PyTree:
    """A tree without the leaves that are no data, such as functions."""
    return jax.tree.map(lambda leaf: leaf if _is_data(leaf) else None, tree)


def unstorable(like: PyTree, tree: PyTree) -> PyTree:
    """A tree with those leaves again, from one like it."""
    leaves, structure = jax.tree.flatten(like)
    loaded = iter(jax.tree.leaves(tree))
    return jax.tree.unflatten(structure, [next(loaded) if _is_data(leaf) else leaf for leaf in leaves])


def _is_data(leaf: Any) -> bool:
    kinds = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | bool | int | float | complex | str
    return isinstance(leaf, kinds)


def _is_plain(value: Any) -> bool:
    try:
        plain.encode(value)
    except TypeError:
        return False
    return True


def _is_like(value: Any, like: PyTree) -> bool:
    try:
        return _specs(storable(value)) == _specs(like)
    except ValueError:  # a dict whose keys have no order is no tree
        return False


def _specs(tree: PyTree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(getattr(leaf, "shape", None), str(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves]


def _outline(place: str, value: Any, arrays: list[Any]) -> list[Any]:
    """A value in words, its arrays collected."""
    if _is_plain(value):
        return ["plain", value]
    if isinstance(value, jax.Array | np.ndarray):
        arrays.append(value)
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        kind = str(jax.random.key_impl(value)) if is_key else value.dtype.name  # pyright: ignore
        return ["key" if is_key else type(value).__name__, list(value.shape), kind]
    for name, container in _CONTAINERS.items():
        if type(value) is container:
            return [name, [_outline(f"{place}[{at}]", item, arrays) for at, item in enumerate(value)]]
    if type(value) is dict:
        return ["dict", [[key, _outline(f"{place}[{key!r}]", item, arrays)] for key, item in value.items()]]
    raise TypeError(
        "checkpoint keeps of what a callback remembers plain values, arrays, dicts, lists and tuples of them, and "
        f"trees like the state of the loop. Got {place}: {describe_value(value)}. Return its parts from get_state, and "
        "put them together again in set_state."
    )


def _items(outline: list[Any]) -> list[list[Any]]:
    return [item for _, item in outline[1]] if outline[0] == "dict" else outline[1]


def _templates(outline: list[Any]) -> Any:
    """What the arrays of an outline look like, in order."""
    kind = outline[0]
    if kind in ("dict", *_CONTAINERS):
        for item in _items(outline):
            yield from _templates(item)
    elif kind == "key":
        dtype = jax.eval_shape(lambda: jax.random.key(0, impl=outline[2])).dtype
        yield jax.ShapeDtypeStruct(tuple(outline[1]), dtype)
    elif kind == "ndarray":
        yield np.zeros(tuple(outline[1]), jnp.dtype(outline[2]))
    elif kind != "plain":
        yield jax.ShapeDtypeStruct(tuple(outline[1]), jnp.dtype(outline[2]))


def _value(outline: list[Any], arrays: Any) -> Any:
    """The value that an outline is of."""
    kind = outline[0]
    if kind == "plain":
        return outline[1]
    if kind == "dict":
        return {key: _value(item, arrays) for key, item in outline[1]}
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](_value(item, arrays) for item in outline[1])
    return next(arrays)
