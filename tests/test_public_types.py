"""Types at the door: where public names still have `Any`, and that type checkers find nothing in a user's program.

The tables of contents and the modules they name are read as text.
"""

import ast
import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterator

import typed_program

SOURCE = pathlib.Path(__file__).parents[1] / "src"
_SHOWN = {"__init__", "__call__", "__iter__", "__next__", "__getitem__", "__getattr__", "__enter__"}

LOGGED = "what was logged: numbers mostly, but also arrays, text and metric objects"
USERS_OWN = "the user's own objects, as they were given"
ALLOWED = {
    "BatchInfo.items()": USERS_OWN,
    "DatasetSource.item()": USERS_OWN,
    "FillSource.item()": USERS_OWN,
    "LoopState.metadata": USERS_OWN,
    "GymnaxSource.env": "an environment of any library whose reset and step are like those of gymnax",
    "FillSource.__init__(fill)": "its random generator is None with seeded=False: a function says which it takes",
    "DataLoader.pipeline()": "a Pipeline or a stream, which a list of stages does not tell a type checker",
    "DataLoader.options()": "options of several types, of which only one is there after jax.jit",
    "DevicePutTransform.placement()": "a device, for which JAX has no type, or a sharding",
    "Entries.__getattr__()": LOGGED,
    "History.collect()": LOGGED,
    "History.to_dict()": LOGGED,
    "Logs.entries()": LOGGED,
    "Logs.entry_value()": LOGGED,
    "History.units()": "ints for steps and samples, floats for time, None for an unknown epoch",
}

Definition = ast.ClassDef | ast.FunctionDef


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A module as its text: what it imports from the package, and what it defines."""

    imports: dict[str, tuple[str, str]]
    aliases: dict[str, ast.expr]
    definitions: dict[str, list[Definition]]


@functools.cache
def module(name: str) -> Module:
    path = SOURCE.joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = Module({}, {}, {})
    for node in _statements(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("millstream"):
            found.imports.update({alias.asname or alias.name: (str(node.module), alias.name) for alias in node.names})
        elif isinstance(node, Definition):
            found.definitions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found.aliases[node.target.id] = node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.aliases[node.targets[0].id] = node.value
    return found


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a module, and those that only a type checker sees."""
    for node in tree.body:
        yield from node.body if isinstance(node, ast.If) else [node]


def public_names() -> Iterator[tuple[str, str]]:
    """Every name of the tables of contents: the module it is defined in, and its name there."""
    for table in sorted(SOURCE.joinpath("millstream").glob("**/__init__.pyi")):
        if "dialects" not in table.parts:  # which have the types of the libraries whose names they keep
            yield from _listed(table)


def _listed(table: pathlib.Path) -> Iterator[tuple[str, str]]:
    for node in ast.parse(table.read_text()).body:
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            path = SOURCE.joinpath(*f"{node.module}.{alias.name}".split("."))
            if path.with_suffix(".py").exists():  # a module as a namespace
                home = f"{node.module}.{alias.name}"
                yield from ((home, name) for name in module(home).definitions if not name.startswith("_"))
            elif not path.is_dir():  # which has a table of its own
                yield str(node.module), alias.name


def loose_types() -> Iterator[str]:
    """The parameters, results and attributes of public names whose types have `Any` in them."""
    for home, name in public_names():
        for definition in _visible(module(home).definitions.get(name, [])):
            if isinstance(definition, ast.FunctionDef):
                yield from _of_function(name, home, definition)
            else:
                yield from _of_class(home, definition)


def _of_class(home: str, definition: ast.ClassDef) -> Iterator[str]:
    methods: dict[str, list[Definition]] = {}
    for node in definition.body:
        if isinstance(node, ast.FunctionDef) and (node.name in _SHOWN or not node.name.startswith("_")):
            methods.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
            if is_loose(home, node.annotation):
                yield f"{definition.name}.{node.target.id}"
    for name, nodes in methods.items():
        for node in _visible(nodes):
            assert isinstance(node, ast.FunctionDef)
            yield from _of_function(f"{definition.name}.{name}", home, node)
    for base in definition.bases:
        found = _definition(home, base)
        if found is not None:
            yield from _of_class(*found)


def _definition(home: str, base: ast.expr) -> tuple[str, ast.ClassDef] | None:
    """Where a base class is defined, if that is in the package."""
    base = base.value if isinstance(base, ast.Subscript) else base
    if not isinstance(base, ast.Name):
        return None
    home, name = module(home).imports.get(base.id, (home, base.id))
    for definition in module(home).definitions.get(name, []):
        if isinstance(definition, ast.ClassDef):
            return home, definition
    return None


def _visible(definitions: list[Definition]) -> list[Definition]:
    """What a type checker shows: the overloads, if there are any."""
    overloads = [one for one in definitions if any(ast.unparse(mark) == "overload" for mark in one.decorator_list)]
    return overloads or definitions


def _of_function(name: str, home: str, function: ast.FunctionDef) -> Iterator[str]:
    given = function.args
    for parameter in [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]:
        if parameter is None or parameter.arg in ("self", "cls"):
            continue
        if parameter.annotation is None or is_loose(home, parameter.annotation):
            yield f"{name}({parameter.arg})"
    if function.returns is None or is_loose(home, function.returns):
        yield f"{name}()"


def is_loose(home: str, annotation: ast.expr) -> bool:
    """Whether a type is `Any`, or has it inside, directly or by an alias. `PyTree`, a tree of anything, is not."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return is_loose(home, ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        return False
    if isinstance(annotation, ast.Name) and annotation.id != "PyTree":
        place, name = module(home).imports.get(annotation.id, (home, annotation.id))
        alias = module(place).aliases.get(name)
        return name == "Any" or (alias is not None and not isinstance(alias, ast.Call) and is_loose(place, alias))
    return any(is_loose(home, part) for part in ast.iter_child_nodes(annotation) if isinstance(part, ast.expr))


def test_any_is_left_only_where_there_is_a_reason():
    assert set(loose_types()) == ALLOWED.keys()
    assert len(ALLOWED) < 20


def test_any_is_found_inside_types_and_through_aliases():
    for loose in ("Any", "dict[str, list[Any]]", "'Any | None'", "Callable[..., Any]", "BodyFn"):
        assert is_loose("millstream.loader._program", ast.parse(loose, mode="eval").body)
    for exact in ("PyTree", "list[int]", "Literal['Any']", "StaticPart"):
        assert not is_loose("millstream.loader._program", ast.parse(exact, mode="eval").body)


def test_the_program_that_type_checkers_find_nothing_in_runs(tmp_path):
    assert math.isfinite(typed_program.main(str(tmp_path / "run")))
