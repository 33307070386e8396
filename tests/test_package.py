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
    {"_core"},
    {"sources", "transforms", "host", "sharding", "checkpoints"},
    {"loader", "loops"},
    {"callbacks", "datasets", "rl", "states", "integrations"},
    {"dialects", "report"},
    {"cli", "__main__", "__init__"},
]
ALLOWED = {room: set().union(*LAYERS[:number], {room}) for number, layer in enumerate(LAYERS) for room in layer}


def modules():
    return sorted(ROOT.rglob("*.py"))


def imported_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; write the whole path"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for name in imported_names(path):
        parts = name.split(".")
        if parts[0] != "millstream" or len(parts) == 1 or not (ROOT / parts[1]).is_dir():
            continue
        if room in ("cli", "__main__", "__init__"):
            continue
        assert parts[1] in ALLOWED[room], f"{room} must not import {name}"


def test_rooms_without_traced_code_do_not_load_jax():
    command = (
        "import sys, millstream, millstream._core, millstream.host, millstream.sources, millstream.datasets; "
        "import millstream._core.plan, millstream._core.read_ahead, millstream.host._worker; "
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", command], check=True)


def test_public_names_are_these_and_all_say_what_they_are():
    assert sorted(ms.__all__) == [
        "ArrayCache",
        "ArraySampleSource",
        "BatchCache",
        "BatchInfo",
        "BatchIterator",
        "BatchTransform",
        "BufferTransform",
        "Callback",
        "CsvSource",
        "DataLoader",
        "DatasetSource",
        "DevicePutTransform",
        "Difference",
        "DiskSampleSource",
        "Elapsed",
        "Entries",
        "ExplainedStage",
        "Explanation",
        "FileChanged",
        "FillSource",
        "FlattenImageTransform",
        "History",
        "HostArraySource",
        "HostCallbackTransform",
        "HostMapTransform",
        "HostSource",
        "IdxSource",
        "ImageFolderSource",
        "InGraph",
        "IndexedSource",
        "LoaderState",
        "LoaderStats",
        "Logs",
        "LoopOutput",
        "LoopState",
        "MapTransform",
        "Metrics",
        "MixedLoader",
        "NormalizeImageTransform",
        "NpySource",
        "Observer",
        "Overview",
        "OverviewRow",
        "Period",
        "Preempted",
        "Processes",
        "RandomHostMapTransform",
        "RandomMapTransform",
        "RenameTransform",
        "SavedRun",
        "Schedule",
        "SharedMemoryFull",
        "Shuffle",
        "Stream",
        "StreamItem",
        "StreamIterator",
        "Threads",
        "TimeSeriesBatchTransform",
        "TimedStage",
        "TrainStream",
        "Transform",
        "TriedOptions",
        "Tuning",
        "Verification",
        "VerificationFailed",
        "VerificationRow",
        "WorkerCrashed",
        "WorkerStalled",
        "after",
        "always",
        "at",
        "checkpoint",
        "checkpoints",
        "create_equinox_state",
        "create_flax_state",
        "create_haiku_state",
        "create_nnx_state",
        "csv_logger",
        "datasets",
        "debug_batch_references",
        "early_stopping",
        "elapse",
        "every",
        "first",
        "history",
        "inner_loop",
        "is_worker",
        "jsonl_logger",
        "keras_bar",
        "last",
        "log_learning_rate",
        "logs",
        "loop",
        "managed",
        "mlflow_logger",
        "never",
        "noop",
        "on_epoch_begin",
        "on_epoch_end",
        "on_predict_batch_begin",
        "on_predict_batch_end",
        "on_predict_begin",
        "on_predict_end",
        "on_predict_step",
        "on_reset_step",
        "on_test_batch_begin",
        "on_test_batch_end",
        "on_test_begin",
        "on_test_end",
        "on_test_step",
        "on_train_batch_begin",
        "on_train_batch_end",
        "on_train_begin",
        "on_train_end",
        "on_train_step",
        "once",
        "overview",
        "piecewise",
        "predict_loop",
        "profile",
        "record",
        "register_adapter",
        "restore",
        "rich_bar",
        "rl",
        "set_buffer_priorities",
        "settings",
        "sharding",
        "spec_of",
        "tensorboard",
        "terminate_on_nan",
        "test_loop",
        "throughput",
        "tqdm_bar",
        "train_loop",
        "wandb_logger",
    ]
    for name in ms.__all__:
        assert getattr(ms, name).__doc__, f"{name} has no docstring"
    assert set(ms.__all__) < set(dir(ms))


def test_type_checkers_see_the_same_names_as_the_interpreter():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname or "": node.module or "" for node in imports for alias in node.names}
    assert set(seen) == set(ms.__all__)
    for name, module in seen.items():
        assert getattr(importlib.import_module(module), name) is getattr(ms, name)
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
    "huggingface": lambda: huggingface.HuggingFaceSource([]),
    "grain": lambda: grain.GrainSource([]),
    "array_record": lambda: array_record.ArrayRecordSource("x", bytes),
    "zarr": lambda: zarr.ZarrSource("x"),
}
for extra, make in makers.items():
    try:
        make()
    except ImportError as error:
        assert f"pip install 'millstream[{extra}]'" in str(error), error
    else:
        raise AssertionError(extra)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
