"""Packages as tables of contents: what is in them is loaded when it is asked for."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def loads_on_demand(package: str, contents: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package.

    Args:
        package: Its name.
        contents: The names that each of its modules has to offer.
    """
    homes = {name: module for module, names in contents.items() for name in names}

    def load(name: str) -> Any:
        if name in homes:
            return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}. It has: {', '.join(sorted(homes))}.")

    return load
