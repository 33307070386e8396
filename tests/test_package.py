"""The package as a whole: who may import whom, what is public, what importing costs."""

import ast
import importlib
import pathlib
import subprocess
import sys

import pytest

import millstream as ms

ROOT = pathlib.Path(ms.__file__).parent

# A room may import the rooms of the rows above its own, and nothing else of the package.
LAYERS = [
    {"text"},
    {"files"},
    {"plan"},
    {"reading"},
    {"pipeline"},
    {"sources", "transforms", "sharding", "checkpoints"},
    {"loader", "loops"},
    {"inspect", "callbacks", "datasets", "rl", "states", "integrations"},
    {"dialects", "report"},
    {"cli", "__main__", "__init__"},
]
# `loader.explain()`, `verify` and `tune` call the room above, which is loaded when they are called.
CALLED_LATE = {("loader", "inspect")}
ALLOWED = {room: set().union(*LAYERS[:number], {room}) for number, layer in enumerate(LAYERS) for room in layer}


def modules():
    return sorted(ROOT.rglob("*.py"))


def imported_names(path, nodes=ast.walk):
    for node in nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; write the whole path"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_between_rooms():
    """Every import of a room from another one: the module that imports, its room, and the parts of the name."""
    for path in modules():
        place = path.relative_to(ROOT)
        room = place.parts[0].removesuffix(".py")
        for name in imported_names(path):
            parts = name.split(".")
            if parts[0] == "millstream" and len(parts) > 1 and (ROOT / parts[1]).is_dir() and parts[1] != room:
                yield str(place), room, parts[1:]


def test_imports_go_one_way():
    wrong = [
        f"{place} imports {'.'.join(parts)}"
        for place, room, parts in imports_between_rooms()
        if room not in ("cli", "__main__", "__init__")
        and parts[0] not in ALLOWED[room]
        and (room, parts[0]) not in CALLED_LATE
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("room", "called"), CALLED_LATE)
def test_a_room_above_is_imported_in_functions_and_for_types_alone(room, called):
    late, at_once = set(), set()
    for path in (ROOT / room).rglob("*.py"):
        late |= set(imported_names(path))
        at_once |= set(imported_names(path, ast.iter_child_nodes))
    assert f"millstream.{called}" in late - at_once
    assert not any(name.startswith(f"millstream.{called}") for name in at_once)


def test_no_room_imports_the_private_modules_of_another():
    wrong = {
        f"{place} imports {'.'.join(parts)}"
        for place, _, parts in imports_between_rooms()
        if any(part.startswith("_") for part in parts)
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_rooms_without_traced_code_do_not_load_jax():
    command = (
        "import sys, millstream, millstream.reading, millstream.sources, millstream.datasets; "
        "import millstream.plan.plan, millstream.reading.reader, millstream.reading.workers.worker; "
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", command], check=True)


TABLES = sorted(path for path in ROOT.rglob("__init__.pyi"))


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.parent.name)
def test_what_a_table_of_contents_names_is_there_and_says_what_it_is(table):
    package = importlib.import_module(".".join(table.parent.relative_to(ROOT.parent).parts))
    imports = [node for node in ast.parse(table.read_text()).body if isinstance(node, ast.ImportFrom)]
    seen = [alias.name for node in imports for alias in node.names]
    assert sorted(seen) == sorted(package.__all__)
    assert set(package.__all__) <= set(dir(package))
    for name in seen:
        assert getattr(package, name).__doc__, f"{name} has no docstring"
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'DataLoadr'. It has: "):
        package.DataLoadr  # noqa: B018
    assert (ROOT / "py.typed").exists()


def test_integrations_and_dialects_load_without_their_packages_and_say_what_to_install():
    program = """
import pkgutil, sys
absent = "polars pandas pyarrow datasets grain array_record tensorstore PIL simplejpeg obstore fsspec tqdm"
sys.modules |= dict.fromkeys(absent.split())
import millstream.dialects, millstream.integrations
for room in (millstream.integrations, millstream.dialects):
    for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
        if "._" not in module.name:
            __import__(module.name)
from millstream.integrations import array_record, grain, huggingface, zarr
makers = {
    "datasets": lambda: huggingface.HuggingFaceSource([]),
    "grain": lambda: grain.GrainSource([]),
    "array-record": lambda: array_record.ArrayRecordSource("x", bytes),
    "tensorstore": lambda: zarr.ZarrSource("x"),
}
for package, make in makers.items():
    try:
        make()
    except ImportError as error:
        assert f"pip install '{package}>=" in str(error), error
    else:
        raise AssertionError(package)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
