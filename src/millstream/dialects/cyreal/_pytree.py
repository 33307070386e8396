"""Loaders of a dialect as pytrees."""

from typing import Any

import jax

from millstream.loader import DataLoader
from millstream.loader._loader import _flatten, _unflatten


def register_loader(kind: type[DataLoader]) -> None:
    """Make a kind of loader a pytree whose leaves are the data, as the loader itself is.

    Args:
        kind: A subclass without arrays of its own.
    """

    def unflatten(static: tuple[Any, ...], children: tuple[list[Any]]) -> DataLoader:
        loader = object.__new__(kind)
        loader.__dict__.update(_unflatten(static, children).__dict__)
        return loader

    jax.tree_util.register_pytree_node(kind, _flatten, unflatten)
