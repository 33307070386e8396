"""The package as a whole: who may import whom, what is public, what importing costs."""

import ast
import collections
import importlib
import inspect
import pathlib
import pkgutil
import re
import subprocess
import sys
import traceback

import pytest

import millstream as ms

ROOT = pathlib.Path(ms.__file__).parent

# A room may import the rooms of the rows above its own, and nothing else of the package.
LAYERS = [
    {"errors"},
    {"text"},
    {"files"},
    {"plan"},
    {"reading"},
    {"pipeline"},
    {"sources", "transforms", "sharding", "checkpoints"},
    {"loader", "loops", "tokenizers"},
    {"callbacks", "datasets", "rl", "states", "managed", "integrations", "views"},
    {"inspect", "preparation", "experiments"},
    {"dialects", "report"},
    {"cli", "__main__", "__init__"},
]
# `loader.explain()`, `verify` and `tune` call the room above, which is loaded when they are called, and an error holds
# what `verify` found.
CALLED_LATE = {("loader", "inspect"), ("errors", "inspect"), ("errors", "loops"), ("errors", "reading")}
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
            if parts[0] == "millstream" and len(parts) > 1 and parts[1] in ALLOWED and parts[1] != room:
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


@pytest.mark.parametrize(("room", "called"), sorted(CALLED_LATE))
def test_a_room_above_is_imported_in_functions_and_for_types_alone(room, called):
    late, at_once = set(), set()
    for path in [path for path in modules() if path.is_relative_to(ROOT / room) or path == ROOT / f"{room}.py"]:
        late |= set(imported_names(path))
        at_once |= set(imported_names(path, ast.iter_child_nodes))
    assert any(name.startswith(f"millstream.{called}") for name in late - at_once)
    assert not any(name.startswith(f"millstream.{called}") for name in at_once)


def test_no_room_imports_the_private_modules_of_another():
    wrong = {
        f"{place} imports {'.'.join(parts)}"
        for place, _, parts in imports_between_rooms()
        if any(part.startswith("_") for part in parts)
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_rooms_without_traced_code_do_not_load_jax():
    rooms = ", ".join(room.__name__ for room in ROOMS.values())
    command = (
        f"import sys, {rooms}; "
        "import millstream.plan.plan, millstream.reading.reader, millstream.reading.workers.worker; "
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", command], check=True)


TABLES = sorted(path for path in ROOT.rglob("__init__.pyi"))
ROOMS = {name: getattr(ms, name) for name in ms.__all__ if inspect.ismodule(getattr(ms, name))}


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.parent.name)
def test_what_a_table_of_contents_names_is_there_and_says_what_it_is(table):
    package = importlib.import_module(".".join(table.parent.relative_to(ROOT.parent).parts))
    imports = [node for node in ast.parse(table.read_text()).body if isinstance(node, ast.ImportFrom)]
    seen = [alias.name for node in imports for alias in node.names]
    assert sorted(seen) == sorted(package.__all__)
    assert set(package.__all__) <= set(dir(package))
    for name in seen:
        assert getattr(package, name).__doc__, f"{name} has no docstring"
    with pytest.raises(
        AttributeError, match=f"{re.escape(package.__name__)} has no 'DataLoadr'. Did you mean .*DataLoader"
    ):
        package.DataLoadr  # noqa: B018
    assert (ROOT / "py.typed").exists()


def test_the_top_level_has_what_a_first_program_needs_and_rooms_have_the_rest():
    assert len(ms.__all__) <= 70
    assert {room.__name__ for room in ROOMS.values()} == {f"millstream.{name}" for name in ROOMS}
    places = collections.Counter(name for room in ROOMS.values() for name in dir(room) if not name.startswith("_"))
    assert {name: count for name, count in places.items() if count > 1} == {}, "a name is in two rooms"
    alone = set(ms.__all__) - set(ROOMS) - set(places)
    assert alone == {"create_equinox_state", "create_flax_state", "create_haiku_state", "create_nnx_state", "prepare"}


def test_a_module_does_not_hide_the_public_name_of_its_room():
    for room in ROOMS.values():
        modules_of_room = {module.name for module in pkgutil.iter_modules(getattr(room, "__path__", []))}
        assert modules_of_room.isdisjoint(dir(room)), room.__name__


@pytest.mark.parametrize(
    ("room", "name", "answer"),
    [
        (ms, "keras_bar", "millstream has no 'keras_bar'. It is ms.callbacks.keras_bar."),
        (ms, "WorkerCrashed", "millstream has no 'WorkerCrashed'. It is ms.errors.WorkerCrashed."),
        (
            ms,
            "ParquetSource",
            "millstream has no 'ParquetSource'. It is millstream.integrations.parquet.ParquetSource.",
        ),
        (ms, "Dataloader", "millstream has no 'Dataloader'. Did you mean ms.DataLoader?"),
        (ms, "predict_lop", "millstream has no 'predict_lop'. Did you mean ms.predict_loop?"),
        (ms, "Zymurgy", "millstream has no 'Zymurgy'."),
        (ms, "_repr_html_", "millstream has no '_repr_html_'."),
        (ms.callbacks, "keras_bra", "millstream.callbacks has no 'keras_bra'. Did you mean ms.callbacks.keras_bar?"),
        (ms.callbacks, "DataLoader", "millstream.callbacks has no 'DataLoader'. It is ms.DataLoader."),
        (ms.checkpoints, "NoCheckpoint", "millstream.checkpoints has no 'NoCheckpoint'. It is ms.errors.NoCheckpoint."),
        (ms.errors, "WorkerCrash", "millstream.errors has no 'WorkerCrash'. Did you mean ms.errors.WorkerCrashed?"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_wrong_name_is_answered_with_the_right_one(room, name, answer):
    with pytest.raises(AttributeError) as caught:
        getattr(room, name)
    assert str(caught.value) == answer
    assert traceback.format_exception_only(caught.value) == [
        f"AttributeError: {answer}\n"
    ]  # without a guess of Python's


def test_a_name_that_is_like_several_is_answered_with_three_at_most():
    with pytest.raises(
        AttributeError, match=r"^millstream has no 'FilterTransform'. Did you mean (ms\.\w+(, | or )?){3}\?$"
    ):
        ms.FilterTransform  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_a_package_that_must_be_imported_is_answered_with_the_import():
    program = "import millstream as ms; ms.integrations"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "millstream has no 'integrations'. Write `import millstream.integrations` first." in found.stderr


def test_errors_show_the_name_by_which_they_are_caught():
    for name in dir(ms.errors):
        error = getattr(ms.errors, name)(None)
        assert traceback.format_exception_only(error)[0].startswith(f"millstream.errors.{name}")


def test_texts_name_what_is_public():
    known = {*dir(ms), "dialects", "integrations", "report"}
    texts = [path for folder in ("src", "docs", "examples") for path in (ROOT.parents[1] / folder).rglob("*.[pm][yd]")]
    wrong = [
        f"{path.name}: {found[0]}"
        for path in [*texts, *ROOT.parents[1].glob("*.md")]
        for found in re.finditer(r"(?<![\w.])ms\.(\w+)(?:\.(\w+))?", path.read_text())
        if found[1] not in known or (found[1] in ROOMS and found[2] and found[2] not in dir(ROOMS[found[1]]))
    ]
    assert wrong == []


def test_integrations_and_dialects_load_without_their_packages_and_say_what_to_install():
    program = """
import pkgutil, sys
absent = "polars pandas pyarrow datasets grain array_record tensorstore PIL simplejpeg obstore fsspec tqdm"
absent += " h5py lance zstandard crc32c ray"
sys.modules |= dict.fromkeys(absent.split())
import millstream.dialects, millstream.integrations
for room in (millstream.integrations, millstream.dialects):
    for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
        if "._" not in module.name:
            __import__(module.name)
from millstream.integrations import array_record, grain, hdf5, huggingface, lance, ray, zarr
makers = {
    "datasets": lambda: huggingface.HuggingFaceSource([]),
    "grain": lambda: grain.GrainSource([]),
    "array-record": lambda: array_record.ArrayRecordSource("x", bytes),
    "tensorstore": lambda: zarr.ZarrSource("x"),
    "h5py": lambda: hdf5.Hdf5Source("x"),
    "pylance": lambda: lance.LanceSource("x"),
    "ray": lambda: ray.RayActors(1).open(None, None, 1, False),
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
