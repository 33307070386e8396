"""All that users call, each with arguments that are right: what `fuzz_calls.py` puts wrong ones into.

A call is named as its errors name it. Arguments with a default are left to it, so a new callable needs a line only for
those without one.
"""

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import pathlib
import pkgutil
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pipelines
from formats import tar_bytes, write_idx

import millstream as ms
import millstream.integrations
from millstream.loops._weights import SampleWeights

TOP = ["callbacks", "loader", "loops", "reading", "sources", "transforms", ""]  # errors name these without the room
ROOMS = [*TOP, "checkpoints", "datasets", "inspect", "managed", "rl", "sharding", "tokenizers", "views"]
ROOMS += [f"integrations.{room.name}" for room in pkgutil.iter_modules(millstream.integrations.__path__)]

# What only the library makes: results, errors, and classes to inherit from.
RESULTS = """
Backend BatchInfo BatchIterator BucketPadding Callback Checkpoint DataPartitionType Difference Drift DriftRow Entries
EpochOrders Executor ExplainedStage Explanation GymnaxSourceState HostSource IndexedSource Layout LeafStatistics
LearningRateCurve LengthDistribution LoaderState LoaderStats LoopOutput LoopState ManagedState ManagedStep MixturePlan
NumberSummary Observer OrderedEpoch Overview OverviewRow PlanFolder ReadBatch Reading ReplayedStep Report Request
SavedRun Schedule ShownBatch ShownRow Statistics Strategy Stream StreamItem StreamIterator Sweep SweptRun TimedStage
Transform TriedOptions Tuning Verification VerificationRow View
""".split()
# Methods that only the library calls, and functions whose caller is named.
PROTOCOL = """
ahead append_state apply batching begin_run check columns commit commit_block commit_columns compile constrain
contents count_samples expect_runs fetch find_spans finish from_state get_state item joined next next_due observe open
per_channel place ranked read read_keyed read_row read_rows read_runs read_sample read_samples rows run_steps
sample_counter shard spec start state_sharding step_key take to_delete to_state updated
""".split()
PROTOCOL += ["check_batch_size", "noop", "spec_of"]


@dataclasses.dataclass(frozen=True)
class Call:
    """A callable with arguments that it takes.

    Attributes:
        name: As its user writes it.
        bound: Makes what is called: a method is bound to a new thing.
        make_good: Makes arguments that are right, by name.
        parameters: The names of all that its signature has.
    """

    name: str
    bound: Callable[[], Callable[..., Any]]
    make_good: Callable[[], dict[str, Any]]
    parameters: dict[str, bool]

    @functools.cached_property
    def good(self) -> dict[str, Any]:
        """Arguments that are right, by name."""
        shared = {name: SHARED[name]() for name, needed in self.parameters.items() if needed and name in SHARED}
        return shared | self.make_good()


def public() -> Iterator[tuple[str, Any]]:
    """Every public callable by its name: functions, classes, and methods of classes. Some are in two rooms."""
    for room in ROOMS:
        if "._" in room:
            continue
        module = importlib.import_module(f"millstream.{room}".rstrip("."))
        short = "" if room in TOP else room.rpartition(".")[2]
        for name in getattr(module, "__all__", None) or _exported(module):
            value = getattr(module, name)
            home = getattr(value, "__module__", None) or ""
            if not name.startswith("_") and callable(value) and home.startswith("millstream."):
                yield from _callables(f"{short}.{name}".lstrip("."), value)


def _exported(module: Any) -> Iterator[str]:
    """The names that a module defines, or imports under their own name for others."""
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if alias.asname == alias.name)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name


def _callables(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if name.rpartition(".")[2] not in [*RESULTS, *PROTOCOL]:
        yield name, value
    if not inspect.isclass(value):
        return
    for method, _ in inspect.getmembers(value, callable):
        home = getattr(inspect.getattr_static(value, method), "__module__", None) or getattr(
            getattr(value, method), "__module__", ""
        )
        if not method.startswith("_") and method not in PROTOCOL and (home or "").startswith("millstream."):
            yield f"{name}.{method}", getattr(value, method)


def calls(folder: pathlib.Path) -> dict[str, Call]:
    """Every public callable with arguments that are right, by its name. Files that are read are in `folder`."""
    files, found = Files(folder), {}
    for name, function in public():
        owner, _, method = name.rpartition(".")
        instance = METHODS.get(name, INSTANCES.get(owner))
        if instance is None and owner and owner.rpartition(".")[2][0].isupper() and not inspect.ismethod(function):
            continue  # nothing but the library makes such a thing
        parameters = _parameters(function)
        if parameters or name in GOOD:
            bound = functools.partial(_bound, instance, method, function)
            make_good = functools.partial(GOOD.get(name, lambda f: {}), files)
            found[name] = Call(name, bound, make_good, parameters)
    return found


def _bound(instance: Callable[[], Any] | None, method: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return function if instance is None else getattr(instance(), method)


def _parameters(function: Any) -> dict[str, bool]:
    """The names of its parameters, and whether they are needed; *names as such."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return {}
    found = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            found[f"*{name}"] = False
        elif parameter.kind is not parameter.VAR_KEYWORD and name not in ("self", "caller"):
            found[name] = parameter.default is parameter.empty
    return found


def step(state: Any, batch: Any) -> Any:
    """A step of a loop, without JAX."""
    return ms.logs().add_metric("loss", 1.0 / (1 + state)), state + 1


def tried_step(state: Any, batch: Any, tried: Any) -> Any:
    """A step that is given what is tried."""
    return ms.logs().add_loss("loss", jax.numpy.float32(0.5)), state


def _curve() -> dict[str, Any]:
    rates = np.geomspace(1e-4, 1.0, 20)
    return {"rates": rates, "losses": 1 / (1 + rates)}


def _run_of_sweep() -> Any:
    return ms.loops.SweptRun("0-lr=0.1", {"lr": 0.1}, INSTANCES["History"](), np.float32(1), None)


def read(state: Any, batch: Any) -> Any:
    """A step of a loop that only logs."""
    return ms.logs().add_metric("loss", 1.0)


@functools.cache
def loader() -> Any:
    """A small loader of arrays in memory."""
    return ms.DataLoader([pipelines.source(), pipelines.BATCH])


@functools.cache
def by_weight() -> Any:
    """A loader whose samples are drawn by weight."""
    source = pipelines.source()
    return ms.DataLoader([ms.views.weighted(source, np.ones(len(source))), pipelines.BATCH])


@functools.cache
def _mixture() -> Any:
    """A loader of two sources in one."""
    view = ms.views.mix({"a": pipelines.source(), "b": pipelines.source()}, {"a": 1, "b": 2})
    return ms.DataLoader([view, pipelines.BATCH])


def _weighted_run() -> Any:
    """A loop over it, in progress."""
    loop_state = ms.loops.LoopState(0, ms.loops.history(), ms.loops.Elapsed(steps=3))
    loop_state.sample_weights = SampleWeights(by_weight())
    return loop_state


@functools.cache
def mixed() -> Any:
    """Two loaders in one."""
    return ms.loader.MixedLoader({"a": loader(), "b": loader()})


@functools.cache
def stream() -> Any:
    """Training and validation."""
    return ms.loader.TrainStream(loader(), validation=loader())


@functools.cache
def acting() -> Any:
    """A loader whose source acts by a policy."""
    return ms.DataLoader([_gymnax()])


@functools.cache
def _gymnax() -> Any:
    return ms.rl.GymnaxSource(**_environment())


def _environment() -> dict[str, Any]:
    env = _module("gymnax.environments.classic_control.cartpole").CartPole()
    return {"env": env, "env_params": env.default_params, "policy_fn": lambda state, obs, key: 0}


@functools.cache
def _managed() -> Any:
    return ms.managed.ManagedState.create(_params(), _sgd())


def _params() -> Any:
    return {"w": np.ones(3, np.float32)}


@functools.cache
def _sgd() -> Any:
    return _module("optax").sgd(0.1)


def _store() -> Any:
    store = ms.checkpoints.CheckpointStore("run")
    store.save(1, {"x": np.ones(3)})
    store.wait()
    return store


def _mesh() -> Any:
    return jax.make_mesh((1,), ("data",))


def _batch_sharding() -> Any:
    return ms.sharding.as_batch_sharding(_mesh())


def _key() -> Any:
    return jax.random.key(0)


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _state(of: Any) -> Any:
    return of.init_state(_key())


@functools.cache
def _info() -> Any:
    with loader().iterate(_state(loader()), steps=1, with_info=True) as batches:
        return next(batches)[2]


def _own(value: Any) -> Any:
    return value


class _Metric:
    """A metric of the user's."""


class _WandbRun:
    """As much of a run of Weights & Biases as is asked for."""

    def log(self, values: Any, step: Any = None) -> None: ...


def _trained() -> dict[str, Any]:
    return {"tx": _sgd(), "losses": {"loss": _loss}}


def _linear() -> dict[str, Any]:
    return {"inputs": np.ones((1, 2), np.float32), **_trained()}


def _haiku() -> Any:
    return _module("haiku").transform(lambda x: _module("haiku").Linear(1)(x))


def _nnx() -> Any:
    return _module("flax.nnx").Linear(2, 1, rngs=_module("flax.nnx").Rngs(0))


def _series(f: "Files") -> dict[str, Any]:
    return {"data_path": f / "series.csv", "context_length": 3}


def _cached(f: "Files") -> dict[str, Any]:
    return {"cache_dir": "data"}


def _pixels(f: "Files") -> dict[str, Any]:
    return {"image": PIXELS}


def _run(tasks: Any) -> dict[str, Any]:
    return {"state": 0, "dataset": BATCHES, "tasks": tasks}


@functools.cache
def _buffered() -> Any:
    return ms.DataLoader([pipelines.source(), ms.BufferTransform(8, 4, 4, mode="prioritised")])


def _hugging() -> Any:
    return _module("datasets").Dataset.from_dict(FRAME)


def _images() -> Any:
    return _module("millstream.integrations.images")


def _loss(preds: Any, target: Any) -> Any:
    return ((preds - target) ** 2).mean()


class Files:
    """Small files of every format, written when they are asked for.

    Args:
        folder: Where they are.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder

    def __truediv__(self, name: str) -> pathlib.Path:
        path = self._folder / name
        if not path.exists():
            _WRITERS[name](path)
        return path


def _write_text(text: str) -> Callable[[pathlib.Path], Any]:
    return lambda path: path.write_text(text)


def _write_images(path: pathlib.Path) -> None:
    for label in "ab":
        (path / label).mkdir(parents=True)
        _image().save(path / label / "0.png")


def _image() -> Any:
    return _module("PIL.Image").new("RGB", (4, 2))


def _table() -> Any:
    return _module("pyarrow").table({"x": np.arange(8, dtype=np.float32), "label": np.arange(8, dtype=np.int32)})


def _write_arrow(path: pathlib.Path) -> None:
    with _module("pyarrow").ipc.new_file(path, _table().schema) as file:
        file.write_table(_table())


def _write_records(path: pathlib.Path) -> None:
    writer = _module("array_record.python.array_record_module").ArrayRecordWriter(str(path), "group_size:1")
    for number in range(4):
        writer.write(np.int32(number).tobytes())
    writer.close()


def _write_hdf5(path: pathlib.Path) -> None:
    with _module("h5py").File(path, "w") as file:
        file["x"] = np.arange(8, dtype=np.float32)


def _write_lance(path: pathlib.Path) -> None:
    _module("lance").write_dataset(_table(), str(path))


def _write_mds(path: pathlib.Path) -> None:
    column = {"column_names": ["n"], "column_encodings": ["int"], "column_sizes": [8], "compression": None}
    shard = {**column, "format": "mds", "version": 2, "samples": 2, "zip_data": None}
    shard["raw_data"] = {"basename": "a.mds", "bytes": 32}
    path.mkdir()
    (path / "a.mds").write_bytes(np.array([2, 16, 24, 32], np.uint32).tobytes() + np.array([5, 6]).tobytes())
    (path / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))


def _write_tfrecord(path: pathlib.Path) -> None:
    writer = _module("tensorboardX.record_writer").RecordWriter(str(path))
    for number in range(4):
        writer.write(b"\n\x0c\n\n\n\x01n\x12\x05\x1a\x03\n\x01" + bytes([number]))  # an Example with a number
    writer.close()


def _write_zarr(path: pathlib.Path) -> None:
    _module("zarr").create_array(path, shape=(8,), dtype="float32", chunks=(4,))[:] = np.arange(8)


def _write_database(path: pathlib.Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE t (x REAL, y INTEGER)")
        db.executemany("INSERT INTO t VALUES (?, ?)", [(n / 2, n) for n in range(8)])


def _write_checkpoint(path: pathlib.Path) -> None:
    ms.train_loop(0, BATCHES, {ms.on_train_step: step, ms.every(1): ms.checkpoint(path)}, stop=2)


def _write_run(path: pathlib.Path) -> None:
    tasks = {ms.every(1): [lambda state: state + 1, ms.checkpoint(path)]}
    ms.loop(0, loader(), tasks, stop=2, key=_key())


_WRITERS: dict[str, Callable[[pathlib.Path], Any]] = {
    "images": _write_images,
    "prepared": lambda path: ms.prepare(pipelines.source(), path),
    "replayed": _write_run,
    "mds": _write_mds,
    "saved": _write_checkpoint,
    "series.csv": _write_text("Temp,Sunspots\n" + "".join(f"{day}.5,{day}\n" for day in range(60))),
    "t.array_record": _write_records,
    "t.arrow": _write_arrow,
    "lines.jsonl": _write_text('{"x": 1.5}\n' * 4),
    "tokens.bin": lambda path: np.arange(8, dtype=np.uint16).tofile(path),
    "t.csv": _write_text("a,b\n1,2\n3,4\n5,6\n7,8\n"),
    "t.db": _write_database,
    "t.h5": _write_hdf5,
    "t.idx": lambda path: write_idx(path, pipelines.data()["label"]),
    "t.lance": _write_lance,
    "t.jsonl": _write_text('{"steps": 1, "loss": 1.0}\n'),
    "t.npy": lambda path: np.save(path, pipelines.data()["image"]),
    "t.parquet": lambda path: _module("pyarrow.parquet").write_table(_table(), path),
    "t.png": lambda path: _image().save(path),
    "t.safetensors": lambda path: _module("safetensors.numpy").save_file({"x": np.zeros((4, 2), np.float32)}, path),
    "t.tar": lambda path: path.write_bytes(tar_bytes({f"{number}.cls": b"1" for number in range(4)}, "w")),
    "t.tfrecord": _write_tfrecord,
    "t.txt": _write_text("oats\nrye\n"),
    "t.zarr": _write_zarr,
}

BATCHES = [np.ones(4)] * 3
PIXELS = np.full((2, 4, 3), 0.5, np.float32)
FRAME = {"x": [1.0, 2.0], "y": [1, 2]}
FILLED = {"image": ((2, 3, 1), np.uint8), "label": ((), np.int32)}

DOWNLOADED = [
    "CIFAR100Dataset",
    "CIFAR10Dataset",
    "CelebADataset",
    "EMNISTDataset",
    "FashionMNISTDataset",
    "KMNISTDataset",
]
DOWNLOADED += ["MNISTDataset", "MNISTDiskSource"]
SERIES = ["DailyMinTemperaturesDataset", "SunspotsDataset"]
COLORS = ["srgb_to_linear", "linear_to_srgb", "srgb_to_oklab", "oklab_to_srgb", "linear_to_oklab", "oklab_to_linear"]

# Well-made things whose methods are called.
INSTANCES: dict[str, Callable[[], Any]] = {
    "ArrayCache": lambda: ms.reading.ArrayCache("kept", of={"model": "1"}),
    "BatchIterator": lambda: loader().iterate(_state(loader()), steps=1),
    "DataLoader": loader,
    "Elapsed": lambda: ms.loops.Elapsed(steps=3, samples=12, epochs=1),
    "History": lambda: ms.loop(0, [np.ones(2)] * 3, {ms.every(1): step}).history,
    "Logs": lambda: ms.logs().add_metric("loss", 1.0),
    "LearningRateCurve": lambda: ms.loops.LearningRateCurve.of(*_curve().values()),
    "LoopState": _weighted_run,
    "Metrics": lambda: ms.loops.Metrics(loss=_own),
    "MixedLoader": mixed,
    "Period": lambda: ms.at(3),
    "PreparedSource": lambda: ms.prepare(pipelines.source(), "out"),
    "Sweep": lambda: ms.loops.Sweep((_run_of_sweep(),), "loss", "min", 4),
    "SweptRun": lambda: _run_of_sweep(),
    "TrainStream": stream,
    "checkpoints.CheckpointStore": _store,
    "tokenizers.Tokenizer": ms.tokenizers.byte_tokenizer,
    "managed.ManagedState": _managed,
    "rl.GymnaxSource": _gymnax,
    "inspect.Explanation": lambda: loader().explain(),
    "sharding.MeshConfig": lambda: ms.sharding.MeshConfig((-1,), ("data",)),
}
METHODS: dict[str, Callable[[], Any]] = {
    "BatchIterator.set_policy_state": lambda: acting().iterate(_state(acting())),
    "DataLoader.set_policy_state": acting,
    "DataLoader.with_weights": by_weight,
}

# Arguments that are needed, by parameter.
SHARED: dict[str, Callable[[], Any]] = {
    "batch_size": lambda: 4,
    "data": pipelines.data,
    "directory": lambda: "run",
    "elapsed": lambda: ms.loops.Elapsed(steps=3, samples=12, epochs=1, samples_before=8, epochs_before=0),
    "fn": lambda: read,
    "key": _key,
    "losses": lambda: {"loss": 1.0},
    "metrics": lambda: {"loss": 1.0},
    "monitor": lambda: "loss",
    "name": lambda: "loss",
    "other": lambda: None,
    "outputs": lambda: {"loss": 1.0},
    "path": lambda: "out",
    "sharding": lambda: _batch_sharding(),
    "state": lambda: _state(loader()),
    "step": lambda: 1,
    "tree": lambda: {"x": np.ones(3)},
    "value": lambda: 1.0,
}

# Arguments that are needed, or can be given by any name, by callable.
GOOD: dict[str, Callable[[Files], dict[str, Any]]] = {
    "ArrayCache": lambda f: {"of": {"model": "1"}},
    "ArrayCache.get": lambda f: {"info": _info()},
    "ArrayCache.put": lambda f: {"info": _info()},
    "BatchIterator.set_policy_state": lambda f: {"policy_state": None},
    "BatchIterator.set_state": lambda f: {"saved": loader().iterate(_state(loader()), steps=1).get_state()},
    "BufferTransform": lambda f: {"capacity": 8, "prefill": 4},
    "CsvSource": lambda f: {"path": f / "t.csv"},
    "DataLoader": lambda f: {"pipeline": [pipelines.source(), pipelines.BATCH]},
    "DataLoader.replace": lambda f: {"prefetch": 1},
    "DataLoader.scan_epoch": lambda f: {"carry": 0, "body_fn": lambda carry, batch, mask: (carry, None)},
    "DataLoader.set_policy_state": lambda f: {"state": _state(acting()), "policy_state": None},
    "DataLoader.tune": lambda f: {"seconds": 0.2, "progress": False},
    "DataLoader.with_weights": lambda f: {"weights": np.ones(len(pipelines.source()))},
    "LoopState.set_weights": lambda f: {"weights": np.ones(len(pipelines.source()))},
    "DataLoader.verify": lambda f: {"steps": 2, "executors": [], "hosts": (1,), "progress": False, "raises": False},
    "DatasetSource": lambda f: {"dataset": [{"x": np.float32(1)}] * 4},
    "DiskSampleSource": lambda f: {"length": 4, "sample_fn": lambda index: {"x": np.int32(index)}},
    "FillSource": lambda f: {
        "items": [0, 1],
        "fill": lambda item, arrays, rng: None,
        "spec": {"x": ((2,), np.float32)},
    },
    "Elapsed.replace": lambda f: {"steps": 3},
    "History.from_jsonl": lambda f: {"path": f / "t.jsonl"},
    "History.rows": lambda f: {"start": 0, "stop": 2},
    "HostCallbackTransform": lambda f: {"fn": lambda value, mask: value},
    "HostMapTransform": lambda f: {"fn": lambda value: value},
    "InfoTransform": lambda f: {"fields": "label"},
    "IdxSource": lambda f: {"paths": {"x": f / "t.idx"}},
    "ImageFolderSource": lambda f: {"root": f / "images"},
    "Logs.add_entries": lambda f: {"collection": "metrics", "entries": {"loss": 1.0}},
    "Logs.add_entry": lambda f: {"collection": "metrics"},
    "Logs.add_histogram": lambda f: {"values": np.ones(3)},
    "Logs.add_image": lambda f: {"image": np.zeros((4, 4))},
    "MapTransform": lambda f: {"fn": lambda value, mask: value},
    "Metrics": lambda f: {"loss": _own},
    "Metrics.merge": lambda f: {"other": ms.loops.Metrics(loss=_own)},
    "Metrics.update": lambda f: {"value": 1.0},
    "MixedLoader": lambda f: {"loaders": {"a": loader(), "b": loader()}},
    "prepare": lambda f: {"source": pipelines.source(), "directory": "out"},
    "phases": lambda f: {"loaders": {0: loader(), 2: loader()}},
    "MixedLoader.iterate": lambda f: {"state": _state(mixed())},
    "IterableSource": lambda f: {"iterable": [{"x": np.float32(1)}] * 4},
    "NpySource": lambda f: {"paths": f / "t.npy"},
    "PreparedSource": lambda f: {"folder": f / "prepared"},
    "PreparedSource.map": lambda f: {"fn": lambda sample: sample},
    "JsonlSource": lambda f: {"paths": f / "lines.jsonl"},
    "MdsSource": lambda f: {"folder": f / "mds"},
    "TFRecordSource": lambda f: {"paths": f / "t.tfrecord", "parse": "example"},
    "TextLinesSource": lambda f: {"paths": f / "t.txt"},
    "TokenFileSource": lambda f: {"paths": f / "tokens.bin", "dtype": np.uint16},
    "Processes": lambda f: {"workers": 1},
    "RandomHostMapTransform": lambda f: {"fn": lambda value, rng: value},
    "RandomMapTransform": lambda f: {"fn": lambda value, mask, key: value},
    "PadTransform": lambda f: {"fill": {"image": 0}, "length": 4},
    "RenameTransform": lambda f: {"renames": {"image": "pixels"}},
    "Threads": lambda f: {"workers": 1},
    "TimeSeriesBatchTransform": lambda f: {"sequence_key": "image"},
    "TrainStream": lambda f: {"train": loader(), "validation": loader()},
    "TrainStream.iterate": lambda f: {"state": _state(stream())},
    "after": lambda f: {"steps": 3, "samples": None, "epochs": None, "time": None, "date": None},
    "at": lambda f: {"steps": 3},
    "create_equinox_state": lambda f: {"module": _module("equinox").nn.Linear(2, 1, key=_key()), **_trained()},
    "create_flax_state": lambda f: {"module": _module("flax.linen").Dense(1), "key": _key(), **_linear()},
    "create_haiku_state": lambda f: {"transformed": _haiku(), "key": _key(), **_linear()},
    "create_nnx_state": lambda f: {"model": _nnx(), **_trained()},
    "early_stopping": lambda f: {"patience": 2},
    "elapse": lambda f: {"dataset": BATCHES},
    "every": lambda f: {"steps": 2},
    "find_learning_rate": lambda f: {"step": tried_step, "state": np.float32(1), "dataset": loader(), "steps": 10},
    "first": lambda f: {"steps": 2, "samples": None, "epochs": None, "time": None, "date": None},
    "inner_loop": lambda f: {"name": "test", "fn": lambda state: ms.test_loop(state, BATCHES, {ms.on_test_step: read})},
    "LearningRateCurve.of": lambda f: _curve(),
    "log_learning_rate": lambda f: {"source": lambda step: 0.1},
    "loop": lambda f: _run({ms.every(1): step}),
    "once": lambda f: {"steps": 3, "samples": None, "epochs": None, "time": None, "date": None},
    "Period": lambda f: {"steps": 3},
    "piecewise": lambda f: {"schedule": ms.every(1), "later": {2: ms.never()}},
    "predict_loop": lambda f: _run({ms.on_predict_step: read}),
    "register_adapter": lambda f: {"kind": _Metric, "adapter": lambda metric: metric},
    "restore": lambda f: {"directory": f / "saved", "state": 0},
    "segment_mask": lambda f: {"segments": np.array([1, 1, 2, 0], np.int32)},
    "segment_positions": lambda f: {"segments": np.array([1, 1, 2, 0], np.int32)},
    "set_buffer_priorities": lambda f: {
        "state": _state(_buffered()),
        "indices": np.array([0]),
        "priorities": np.array([1.0], np.float32),
    },
    "sweep": lambda f: {
        "step": tried_step,
        "grid": {"lr": [0.1, 0.2]},
        "init": lambda hyperparameters: np.float32(1),
        "dataset": loader(),
        "stop": 2,
        "key": _key(),
    },
    "test_loop": lambda f: _run({ms.on_test_step: read}),
    "train_loop": lambda f: _run({ms.on_train_step: step}) | {"stop": 3},
    "wandb_logger": lambda f: {"run": _WandbRun()},
    "checkpoints.CheckpointStore.save": lambda f: {"step": 2},
    **{f"datasets.{name}": _cached for name in DOWNLOADED},
    **{f"datasets.{name}.make_disk_source": _cached for name in DOWNLOADED},
    **{f"datasets.{name}{made}": _series for name in SERIES for made in ("", ".make_disk_source")},
    "datasets.dataset_to_jax": lambda f: {"dataset": ms.datasets.DigitsDataset("test")},
    "datasets.time_series_windows": lambda f: {"series": np.arange(20.0, dtype=np.float32), "context_length": 3},
    "inspect.drift": lambda f: {"a": pipelines.source(), "b": pipelines.source(), "progress": False},
    "inspect.show": lambda f: {"loader": loader()},
    "inspect.statistics": lambda f: {"data": pipelines.source(), "progress": False},
    "replay": lambda f: {"directory": f / "replayed", "loader": loader()},
    "managed.Accumulate": lambda f: {"microbatches": 2},
    "managed.ManagedState.create": lambda f: {"params": _params(), "tx": _sgd()},
    "managed.ManagedState.apply_gradients": lambda f: {"grads": _params()},
    "managed.ManagedState.replace": lambda f: {"key": _key()},
    "managed.step": lambda f: {"fn": read},
    "managed.train_step": lambda f: {"fn": read},
    "managed.get_strategy": lambda f: {"strategy": "jit"},
    "managed.register_strategy": lambda f: {"name": "careful", "strategy": ms.managed.Eager()},
    "rl.GymnaxSource": lambda f: _environment(),
    "rl.GymnaxSource.set_policy_state": lambda f: {"state": _state(_gymnax()), "policy_state": None},
    "rl.combine": lambda f: {"parts": {"a": [pipelines.source(), pipelines.BATCH]}},
    "rl.get_policy_state": lambda f: {"state": _state(_gymnax())},
    "rl.set_loader_policy_state": lambda f: {"state": _state(acting()), "policy_state": None},
    "rl.set_source_policy_state": lambda f: {"state": _state(_gymnax()), "policy_state": None},
    "sharding.HostSplit": lambda f: {"dataset": "abcdef", "items": range(0, 6, 2)},
    "sharding.HybridMeshShape": lambda f: {"ici_mesh_shape": (1,), "dcn_mesh_shape": (1,)},
    "sharding.MeshConfig": lambda f: {"mesh_shape": (-1,), "mesh_axis_names": ("data",)},
    "sharding.MeshConfig.batch_sharding": lambda f: {"mesh": _mesh()},
    "sharding.MeshConfig.shape_for": lambda f: {"selector": "h100"},
    "sharding.as_batch_sharding": lambda f: {"sharding": _mesh()},
    "sharding.distribute_global_batch": lambda f: {"local_batch": pipelines.data()},
    "sharding.global_to_host_array": lambda f: {"global_arrays": jax.device_put(pipelines.data())},
    "sharding.host_to_global_device_array": lambda f: {"host_arrays": pipelines.data(), "mesh": _mesh()},
    "sharding.shard_bounds": lambda f: {"num_shards": 3, "shard_id": 0, "size": 8},
    "sharding.split_by_host": lambda f: {"dataset": "abcdefg", "num_shards": 3, "shard_id": 0},
    "sharding.with_sharding_constraint": lambda f: {"x": np.ones(3), "shardings": _batch_sharding()},
    "tokenizers.Tokenizer": lambda f: {"model": lambda text: [len(text)], "vocabulary_size": 100},
    "tokenizers.Tokenizer.decode": lambda f: {"ids": [104, 105]},
    "tokenizers.Tokenizer.encode_batch": lambda f: {"texts": ["mill", "stream"]},
    "inspect.Explanation.save": lambda f: {"path": "pipeline.svg"},
    "inspect.lengths": lambda f: {"source": pipelines.source(), "by": np.arange(pipelines.SAMPLES)},
    "inspect.mixture": lambda f: {"loader": _mixture()},
    "views.balanced": lambda f: {"source": pipelines.source(), "labels": "label"},
    "views.buckets": lambda f: {
        "source": pipelines.source(),
        "by": np.arange(pipelines.SAMPLES),
        "lengths": (4, 16),
        "batch_size": 2,
    },
    "views.concat": lambda f: {"*sources": (pipelines.source(), pipelines.source()[:3])},
    "views.flat_map": lambda f: {"source": pipelines.source(), "counts": np.ones(pipelines.SAMPLES, int)},
    "views.folds": lambda f: {"source": pipelines.source(), "count": 3},
    "views.mix": lambda f: {"sources": {"a": pipelines.source(), "b": pipelines.source()}, "weights": {"a": 1, "b": 2}},
    "views.pack": lambda f: {"source": ms.DatasetSource([{"tokens": np.arange(n)} for n in (5, 3, 2)]), "length": 8},
    "views.permutation": lambda f: {"n": 10, "positions": np.arange(3)},
    "views.levels": lambda f: {"values": {0: 1.0, 10: 0.5}},
    "views.ramp": lambda f: {"start": 0.0, "end": 1.0, "samples": 10},
    "views.reweight": lambda f: {
        "mixture": ms.views.mix({"a": pipelines.source(), "b": pipelines.source()}, {"a": 1, "b": 2}),
        "weights": {"a": 2, "b": 1},
        "after": 5,
    },
    "views.repeat": lambda f: {"source": pipelines.source(), "times": 2},
    "views.select": lambda f: {"source": pipelines.source(), "chosen": [1, 2]},
    "views.split": lambda f: {"source": pipelines.source(), "parts": {"a": 0.5, "b": 0.5}},
    "views.weighted": lambda f: {"source": pipelines.source(), "weights": np.ones(pipelines.SAMPLES)},
    "views.windows": lambda f: {"source": pipelines.source(), "length": 3},
    "views.zip": lambda f: {"*sources": (pipelines.source(), pipelines.source()[::-1])},
    "array_record.ArrayRecordSource": lambda f: {
        "paths": f / "t.array_record",
        "record_fn": lambda record: {"x": np.frombuffer(record, np.int32)},
    },
    "arrow.ArrowSource": lambda f: {"data": f / "t.arrow"},
    "cloud.configure": lambda f: {"prefix": "s3://", "timeout": 1.0, "store": {}},
    "cloud.options_for": lambda f: {"url": "s3://bucket/x"},
    "cloud.traffic": lambda f: {},
    "grain.GrainSource": lambda f: {"dataset": [{"x": np.float32(1)}] * 4},
    "grain.RandomAccess": lambda f: {"source": pipelines.source()},
    "grain.to_grain": lambda f: {"loader": loader()},
    "ray.RayActors": lambda f: {"workers": 1},
    "hdf5.Hdf5Source": lambda f: {"paths": f / "t.h5"},
    "huggingface.HuggingFaceBatches": lambda f: {"dataset": _hugging().to_iterable_dataset(), "batch_size": 1},
    "huggingface.HuggingFaceSource": lambda f: {"dataset": _hugging()},
    "images.Coefficients": lambda f: {"scale": 1.0, "offset": 0.0},
    "images.rescale": lambda f: {"image": PIXELS, "old": _images().FRACTIONAL, "new": _images().IMAGENET},
    "images.standardized": lambda f: {"mean": (0.5,), "std": (0.5,)},
    "images.to_pillow": lambda f: {"array": PIXELS, "coefficients": _images().FRACTIONAL},
    **{f"images.{name}": _pixels for name in COLORS},
    "images.open_srgb": lambda f: {"file": (f / "t.png").read_bytes()},
    "images.read_srgb": lambda f: {"file": (f / "t.png").read_bytes()},
    "images.write_chw": lambda f: {"image": _image(), "array": np.empty((3, 2, 4), np.float32)},
    "images.write_hwc": lambda f: {"image": _image(), "array": np.empty((2, 4, 3), np.float32)},
    "lance.LanceSource": lambda f: {"path": f / "t.lance"},
    "pandas.PandasRows": lambda f: {"frame": _module("pandas").DataFrame(FRAME)},
    "pandas.PandasSource": lambda f: {"frame": _module("pandas").DataFrame(FRAME)},
    "parquet.ParquetSource": lambda f: {"paths": f / "t.parquet"},
    "polars.PolarsSource": lambda f: {"frame": _module("polars").DataFrame(FRAME)},
    "safetensors.SafetensorsSource": lambda f: {"paths": f / "t.safetensors"},
    "sqlite.SqliteSource": lambda f: {"path": f / "t.db", "table": "t"},
    "webdataset.WebDatasetSource": lambda f: {"shards": f / "t.tar"},
    "zarr.ZarrSource": lambda f: {"path": f / "t.zarr"},
}
