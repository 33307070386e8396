"""Tables of contents: a package offers what its `__init__.pyi` imports, and loads it when it is asked for.

A name that is not there is answered with where it is, or with names like it.
"""

import importlib
import pathlib
import re
from collections.abc import Callable
from typing import Any

_ROOT = pathlib.Path(__file__).parent
_LINE = re.compile(r"^from ([\w.]+) import (\w+) as \2$", re.MULTILINE)
_IMPORTED = ("dialects", "integrations", "report")  # packages that are imported by name, each for what it needs
_DEFINED = re.compile(r"^(?:class|def) ([a-zA-Z]\w*)", re.MULTILINE)


def table_of_contents(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: Its name.
        file: Its `__init__.py`; the table is beside it.
    """
    homes = {name: home for home, name in _LINE.findall(pathlib.Path(file).with_suffix(".pyi").read_text())}

    def load(name: str) -> Any:
        if name not in homes:
            raise no_such_name(package, name)
        home = importlib.import_module(homes[name])
        if name in vars(home):
            return getattr(home, name)
        return importlib.import_module(f"{homes[name]}.{name}")  # a room

    return load, lambda: sorted([*homes, "__version__"] if package == "millstream" else homes), list(homes)


def no_such_name(package: str, name: str) -> AttributeError:
    """The error for a name that a package does not have: where it is, or up to three names like it."""
    text = f"{package} has no {name!r}."
    if not name.startswith("_"):  # Python and notebooks ask for such names all the time
        text += _hint(package, name)
    return AttributeError(text, name=name)  # with a name of its own, Python adds no guess to it


def _hint(package: str, name: str) -> str:
    import difflib  # only now: importing it takes longer than importing millstream

    if package == "millstream" and name in _IMPORTED:
        return f" Write `import millstream.{name}` first."
    places = _public_names(package)
    if name in places:
        return f" It is {places[name]}."
    by_case = {known.lower(): known for known in reversed(places)}
    wrong, known = name.lower(), list(by_case)
    close = difflib.get_close_matches(wrong, known, cutoff=0.85) or difflib.get_close_matches(wrong, known, cutoff=0.65)
    *others, last = [places[by_case[found]] for found in close] or [""]
    return f" Did you mean {', '.join(others)}{' or ' if others else ''}{last}?" if last else ""


def _public_names(package: str) -> dict[str, str]:
    """Every public name as its users write it; where a name is in several places, the first that is listed counts."""
    tables = {package: _ROOT.parent.joinpath(*package.split("."), "__init__.pyi"), "millstream": _ROOT / "__init__.pyi"}
    tables |= {f"millstream.{table.parent.name}": table for table in sorted(_ROOT.glob("*/__init__.pyi"))}
    places: dict[str, str] = {}
    for owner, table in tables.items():
        for name in [name for _, name in _LINE.findall(table.read_text())] if table.exists() else []:
            places.setdefault(name, _written(owner, name))
    for module in [_ROOT / "errors.py", *sorted(_ROOT.glob("integrations/[a-z]*.py"))]:
        owner = ".".join(module.relative_to(_ROOT.parent).with_suffix("").parts)
        for name in _DEFINED.findall(module.read_text()):
            places.setdefault(name, _written(owner, name))
    return places


def _written(owner: str, name: str) -> str:
    is_room = owner.count(".") < 2
    return f"{owner}.{name}".replace("millstream", "ms", 1) if is_room else f"{owner}.{name}"
