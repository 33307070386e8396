"""What a new state is made of: arrays of fixed dtype that are its own."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from millstream.pipeline.state import strong_or_none
from millstream.reading.contracts import PyTree
from millstream.reading.dtypes import to_jax_dtype
from millstream.states._precision import at_least_32_bits
from millstream.text.errors import describe_leaf, table


class FlatLeaves:
    """How a tree is taken apart into a dict of arrays by their paths, and put together again.

    Args:
        tree: A tree of such a structure.
    """

    def __init__(self, tree: PyTree) -> None:
        paths = [path for path, _ in jax.tree.leaves_with_path(tree)]
        self._structure = jax.tree.structure(tree)
        names = [jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value") for path in paths]
        distinct = len(set(names)) == len(names)
        self._names = names if distinct else [jax.tree_util.keystr(path) for path in paths]

    def flat(self, tree: PyTree) -> dict[str, Any]:
        """The arrays of a tree, by their paths."""
        leaves, structure = jax.tree.flatten(tree)
        if structure != self._structure:
            raise ValueError(
                "A model must keep its structure when it is called: what it holds besides its parameters is carried "
                f"from step to step. It was\n  {self._structure}\nand is\n  {structure}"
            )
        return dict(zip(self._names, leaves, strict=True))

    def tree(self, flat: dict[str, Any]) -> PyTree:
        """The tree of such arrays."""
        return jax.tree.unflatten(self._structure, [flat[name] for name in self._names])


def as_arrays(caller: str, name: str, tree: PyTree, *, copy: bool) -> PyTree:
    """The leaves as JAX arrays."""

    def as_array(path: Any, leaf: Any) -> jax.Array:
        array = strong_or_none(to_jax_dtype(f"{caller}: {name}{jax.tree_util.keystr(path)}", leaf))
        if array is None:
            found = table([(f"{name}{jax.tree_util.keystr(path)}", describe_leaf(leaf))])
            raise TypeError(
                f"{caller} needs arrays and numbers in {name}. Got:\n{found}\n"
                'Anything else belongs in a static field: dataclasses.field(metadata={"static": True}).'
            )
        return copied(array) if copy else array

    return jax.tree.map_with_path(as_array, tree)


def copied(leaf: Any) -> Any:
    """A copy of an array; anything else, a traced value too, as it is."""
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) else leaf


def unshared(tree: PyTree, others: PyTree) -> PyTree:
    """The tree with copies of those arrays that it has twice, or that others have."""
    seen = {id(leaf) for leaf in jax.tree.leaves(others)}

    def own(leaf: Any) -> Any:
        if id(leaf) in seen:
            return copied(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, tree)


def wide_copy(leaf: jax.Array) -> jax.Array:
    """A copy of at least 32 bits: in fewer, an average that changes little at each step would not change at all."""
    return jnp.array(at_least_32_bits(leaf), copy=True)


def check_key(caller: str, key: Any) -> None:
    """Refuse anything but one key: a seed, other numbers, several keys."""
    is_array = isinstance(key, jax.Array | np.ndarray)
    is_typed = is_array and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()
    if not is_typed and not (is_array and key.dtype == np.uint32 and key.shape in ((2,), (4,))):
        raise TypeError(f"{caller} needs a key such as jax.random.key(0). Got {describe_leaf(key)}.")


def check_params(caller: str, params: PyTree) -> None:
    """Refuse parameters that have no gradients."""
    leaves = [(f"params{jax.tree_util.keystr(path)}", leaf) for path, leaf in jax.tree.leaves_with_path(params)]
    if not leaves:
        raise ValueError(
            f"{caller} needs params with at least one array of floats. Got a tree without arrays: {params!r}."
        )
    wrong = [(name, describe_leaf(leaf)) for name, leaf in leaves if not jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if wrong:
        raise TypeError(
            f"{caller} needs params to be floats, which have gradients. Got:\n{table(wrong)}\n"
            "Keep other arrays in a field of your own: a frozen dataclass that inherits from ManagedState."
        )


def split_fields(caller: str, own: tuple[Any, ...], given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values for the fields that a subclass has of its own, defaults included: those of arrays, and static ones.

    Args:
        caller: The caller's name, for errors.
        own: The subclass's own dataclass fields.
        given: Values by name.
    """
    names = {field.name for field in own}
    missing = [field.name for field in own if _has_no_default(field) and field.name not in given]
    unknown = [name for name in given if name not in names]
    if unknown or missing:
        wrong = f"Got {', '.join(unknown)}" if unknown else f"{', '.join(missing)} missing"
        raise TypeError(f"{caller} takes these fields of its own: {', '.join(sorted(names)) or 'none'}. {wrong}.")
    dynamic, static = {}, {}
    for field in own:
        if field.init:
            part = static if field.metadata.get("static", False) else dynamic
            part[field.name] = given[field.name] if field.name in given else _default(field)
    return dynamic, static


def _has_no_default(field: Any) -> bool:
    return field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _default(field: Any) -> Any:
    return field.default_factory() if field.default is dataclasses.MISSING else field.default
