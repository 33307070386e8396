"""Tables of contents: a package offers what its `__init__.pyi` imports, and loads it when it is asked for."""

import importlib
import pathlib
import re
from collections.abc import Callable
from typing import Any

_LINE = re.compile(r"^from ([\w.]+) import (\w+) as \2$", re.MULTILINE)


def table_of_contents(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: Its name.
        file: Its `__init__.py`; the table is beside it.
    """
    homes = {name: home for home, name in _LINE.findall(pathlib.Path(file).with_suffix(".pyi").read_text())}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}. It has: {', '.join(sorted(homes))}.")
        home = importlib.import_module(homes[name])
        if name in vars(home):
            return getattr(home, name)
        return importlib.import_module(f"{homes[name]}.{name}")  # a room

    return load, lambda: sorted([*homes, "__version__"] if package == "millstream" else homes), list(homes)
