"""ciclo 0.1.9 on a JAX of today: those modules of it that a loop runs, unchanged.

Its own `__init__` cannot be imported any more: it loads managed states, which need names that JAX has removed and
packages that pin an old JAX. Loop, schedules, logs and bars need one such name, `jax.tree_map`.
"""

import functools
import importlib
import importlib.util
import sys
import types
import warnings
from typing import Any

import jax


@functools.cache
def import_ciclo() -> Any:
    """The package with `loop`, `every` and `keras_bar`."""
    spec = importlib.util.find_spec("ciclo")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("No module named 'ciclo'")
    ciclo: Any = types.ModuleType("ciclo")
    ciclo.__path__ = list(spec.submodule_search_locations)
    sys.modules["ciclo"] = ciclo
    for adapted in ("clu", "tensorflow"):
        sys.modules.setdefault(adapted, None)  # type: ignore[arg-type]  # as if missing: it adapts to what it finds
    if not hasattr(jax, "tree_map"):
        jax.tree_map = jax.tree.map  # type: ignore[attr-defined]
    parts = {"loop": "loops.loop", "every": "schedules", "inject": "utils", "keras_bar": "callbacks"}
    with warnings.catch_warnings(action="ignore"):  # its bar's package asks setuptools for a version, as nobody should
        for name, module in parts.items():
            setattr(ciclo, name, getattr(importlib.import_module(f"ciclo.{module}"), name))
    return ciclo
