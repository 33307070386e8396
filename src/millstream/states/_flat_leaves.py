"""The arrays of a model as one flat dict: a framework's own tree costs its Python at every step."""

from typing import Any

import jax

from millstream.reading.contracts import PyTree


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
