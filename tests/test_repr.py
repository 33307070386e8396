"""What things show of themselves: one or two lines that say what they are, at no cost and without fail."""

import dataclasses
import functools
import re

import fuzz_table
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipelines import PIPELINES
from test_views import VIEWS, arrays, dataset

import millstream as ms
from millstream.text.summaries import array_text, value_text
from millstream.transforms.buffer_stream import BufferState


def images(count=10):
    return ms.ArraySampleSource({"image": np.zeros((count, 8, 8), np.uint8), "label": np.arange(count)})


def new_loader(**options):
    return ms.DataLoader([images(), ms.BatchTransform(4)], **options)


def train_step(state, batch):
    return ms.logs().add_metric("loss", 0.5), state


def check(value):
    """What every repr and every page for notebooks keeps to."""
    text = repr(value)
    assert 3 < len(text) <= 400 and text.count("\n") <= 2, text
    # No address, no data, and no memory of the class behind it.
    assert not re.search(r" at 0x|[Aa]rray\(|<function|millstream\.|^<", text), text
    for page in [value._repr_html_()] if hasattr(value, "_repr_html_") else []:
        assert len(page) < 3000 and not re.search(r" at 0x|[Aa]rray\(|&lt;function|<script", page), page


@pytest.mark.parametrize("name", [name for name in PIPELINES if name == "stream" or "stream" not in name])
def test_every_stage_loader_state_and_iterator_shows_itself_in_a_few_words(name):
    stages = PIPELINES[name]()
    for stage in stages if isinstance(stages, list) else [stages]:
        if type(stage).__module__.startswith("millstream."):
            check(stage)
    loader = ms.DataLoader(stages)
    for value in (loader, loader.pipeline, loader.stats(), jax.eval_shape(loader.init_state, jax.random.key(0))):
        check(value)
    state = loader.init_state(jax.random.key(0))
    check(state)
    check(loader.iterate(state))


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_shows_itself_in_a_few_words(name):
    for source in (arrays("shuffle"), dataset("shuffle")):
        check(VIEWS[name](source))


def test_every_public_class_shows_itself_in_a_few_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = set()
    for name, call in fuzz_table.calls(tmp_path).items():
        # Loops and frameworks, whose results compile something, have tests of their own; some loggers their packages.
        room, _, last = name.rpartition(".")
        is_callback = room == "" and hasattr(ms.callbacks, name) and name not in ("mlflow_logger", "wandb_logger")
        if room in ("", "sharding", "tokenizers") and (last[0].isupper() or is_callback):
            check(call.bound()(**call.good))
            shown.add(name)
    assert {"DataLoader", "ArraySampleSource", "Processes", "MixedLoader", "keras_bar", "Period", "Metrics"} <= shown


def test_managed_states_show_their_step_and_size_also_those_of_a_users_class():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class WithStatistics(ms.managed.ManagedState):
        mean: jax.Array

    params = {"w": jnp.zeros((1000, 500)), "b": jnp.zeros(500)}
    state = WithStatistics.create(params, optax.adam(1e-3), mean=jnp.zeros(500))
    assert repr(state) == "WithStatistics(step 0, 500k parameters in 2 arrays, 2 MB, Jit(donate=False))"
    assert repr(jax.eval_shape(lambda: state)).startswith("WithStatistics(step i32[], 500k parameters")

    @ms.managed.train_step
    def fit(state, batch):
        return ms.logs()

    assert repr(fit) == "ManagedStep(fit)"


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (np.float32, "f32"),
        (jnp.bfloat16, "bf16"),
        (jnp.float8_e4m3fn, "f8_e4m3fn"),
        (np.uint8, "u8"),
        (np.int64, "i64"),
        (np.complex64, "c64"),
        (bool, "bool"),
    ],
)
def test_arrays_are_written_as_jax_writes_them(dtype, text):
    assert array_text((64, 10), np.dtype(dtype)) == f"{text}[64,10]"
    assert array_text((), np.dtype(dtype)) == f"{text}[]"


def test_a_key_is_written_as_jax_writes_it():
    assert value_text(jax.random.split(jax.random.key(0), 3)) == "key<fry>[3]"


def test_values_are_written_in_a_few_words():
    assert value_text({"a": [1, "b"], "c": (np.zeros(3),)}) == "{a: [1, 'b'], c: (f64[3],)}"
    assert value_text(list(range(100))) == "[0, 1, 2, 3, 4, 5, ... 94 more]"
    assert value_text(functools.partial(train_step, 0)) == "train_step"
    assert value_text(object()) == "object"
    assert value_text("x" * 100) == f"'...{'x' * 57}'"
    assert value_text([[[[[[1]]]]]]) == "[[[[...]]]]"


def test_a_number_is_shown_if_it_is_there():
    assert value_text({"loss": jnp.float32(0.5), "step": np.int32(3)}) == "{loss: 0.5, step: 3}"
    assert value_text(jax.ShapeDtypeStruct((), np.float32)) == "f32[]"
    shown = []
    jax.jit(lambda x: shown.append(value_text(x)) or x)(jnp.float32(1))
    assert shown == ["f32[]"]


def test_a_loader_shows_its_stages_its_batches_and_its_epoch():
    assert repr(ms.DataLoader([ms.ArraySampleSource(np.zeros(9)), ms.BatchTransform(4)])) == (
        "DataLoader(ArraySampleSource(9 samples) -> BatchTransform(4), batch f32[4], 3 steps per epoch)"
    )
    source = ms.HostArraySource({"x": np.zeros((10, 3), np.float32)})
    stages = [source, ms.HostMapTransform(sample_fn), ms.BatchTransform(4), ms.MapTransform(batch_fn)]
    assert repr(ms.DataLoader(stages, executor=ms.Threads(2))) == (
        "DataLoader(HostArraySource(10 samples) -> HostMapTransform(sample_fn) -> BatchTransform(4) -> "
        "MapTransform(batch_fn),\n  batch {x: f32[4,3]}, 3 steps per epoch, executor=Threads(2))"
    )


def sample_fn(sample):
    return sample


def batch_fn(batch, mask):
    return batch


def test_a_loader_of_python_objects_says_so():
    loader = ms.DataLoader([ms.DatasetSource(["a", "b"]), ms.BatchTransform(2)])
    assert repr(loader) == (
        "DataLoader(DatasetSource(2 samples) -> BatchTransform(2), Python objects, 1 step per epoch)"
    )


def test_a_loader_inside_a_compiled_program_shows_the_same():
    shown = []

    def draw(loader, state):
        shown.append((repr(loader), repr(state)))
        return loader.next_batch(state)[2]

    loader = new_loader()
    jax.jit(draw)(loader, loader.init_state(jax.random.key(0)))
    assert shown == [(repr(loader).replace("ArraySampleSource", "arrays"), "LoaderState(key=u32[2], step=u32[])")]


def test_a_repr_reads_no_data_and_does_not_trace_twice():
    calls = []

    class Items:
        def __len__(self):
            return 5

        def __getitem__(self, index):
            calls.append(index)
            return np.float32(index)

    assert repr(ms.DatasetSource(Items())) == "DatasetSource(5 items of Items)"
    assert calls == []
    source = ms.DatasetSource(Items(), readers=1)
    _ = source.spec()
    calls.clear()
    assert repr(source) == "DatasetSource(5 items of Items, f32[])"
    assert calls == []

    def note(batch, mask):
        calls.append("traced")
        return batch

    loader = ms.DataLoader([images(), ms.BatchTransform(4), ms.MapTransform(note)])
    first = repr(loader)
    calls.clear()
    assert repr(loader) == first and calls == []


def test_sources_and_datasets_show_how_many_samples_of_which_shape(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((10, 3), np.float32))
    (tmp_path / "t.csv").write_text("a,b\n1,2\n3,4\n")
    shown = {
        "ArraySampleSource(10 samples, {image: u8[8,8], label: i32[]})": images(),
        "HostArraySource(4 samples, f32[2])": ms.HostArraySource(np.zeros((4, 2), np.float32)),
        "NpySource(10 samples, f32[3])": ms.NpySource(tmp_path / "x.npy"),
        "CsvSource(2 samples, {a: f32[], b: f32[]})": ms.CsvSource(tmp_path / "t.csv"),
        "DiskSampleSource(3 samples of float32, f32[])": ms.DiskSampleSource(3, np.float32),
        "DigitsDataset(359 samples, {image: u8[8,8,1], label: i32[]})": ms.datasets.DigitsDataset("test"),
    }
    assert {text: repr(value) for text, value in shown.items()} == {text: text for text in shown}


def test_a_source_whose_length_raises_is_named():
    class Broken(ms.sources.HostSource):
        def __len__(self):
            raise RuntimeError("no length")

    assert repr(Broken()) == "<Broken>"


def test_states_and_iterators_show_where_they_are():
    loader = new_loader()
    state = loader.init_state(jax.random.key(7), step=2)
    assert repr(state) == "LoaderState(key=[0, 7], step=2)"
    with loader.iterate(state, steps=3) as batches:
        next(batches)
        assert repr(batches) == "BatchIterator(step 3, 2 of 3 batches left)"
    assert repr(jax.vmap(loader.init_state)(jax.random.split(jax.random.key(0), 5))) == (
        "LoaderState(key=u32[5,2], step=u32[5])"
    )
    jax.tree.map(lambda leaf: leaf.delete(), state)
    assert repr(state) == "<LoaderState>"


def test_the_state_of_a_buffer_shows_no_data():
    rows, number = {"x": jnp.zeros((100, 3))}, jnp.int32(4)
    key, items = jnp.zeros(2, jnp.uint32), (rows, jnp.ones(100, bool))
    state = BufferState({"n": number}, key, number, items, number, number, number, number, priorities=None)
    check(state)
    assert "items=({x: f32[100,3]}, bool[100]), count=4" in repr(state)


def test_loaders_of_loaders_show_their_mix_and_passes():
    mixed = ms.loader.MixedLoader({"a": new_loader(), "b": new_loader()})
    assert repr(mixed) == "MixedLoader(1 of 'a', 1 of 'b', 6 steps per epoch)"
    stream = ms.loader.TrainStream(new_loader(), validation=new_loader(), every=("batch", 2))
    assert repr(stream) == "TrainStream(3 batches per epoch, 3 for validation after every 2)"
    assert repr(ms.loader.TrainStream(new_loader())) == "TrainStream(3 batches per epoch)"
    with stream.iterate(stream.init_state(jax.random.key(0))) as items:
        item = next(items)
        assert repr(items) == "StreamIterator(step 1, endless)"
    assert repr(item) == ("StreamItem(training=True, step=0, batch={image: u8[4,8,8], label: i32[4]}, mask=bool[4])")


def test_results_of_a_run_never_show_the_weights(tmp_path):
    weights = {"dense": {"kernel": jnp.full((64, 10), 0.125), "bias": jnp.full(10, 0.125)}, "step": jnp.int32(0)}
    data = [np.ones(4)] * 6
    output = ms.train_loop(
        weights, data, {ms.on_train_step: train_step, ms.every(5): ms.checkpoint(tmp_path / "run")}, stop=5
    )
    saved = ms.restore(tmp_path / "run", weights)
    state = ms.loops.LoopState(weights, output.history, output.elapsed)
    for result in (output, saved, state):
        text = repr(result)
        assert "{dense: {kernel: f32[64,10], bias: f32[10]}, step: 0}" in text or (
            "{dense: {bias: f32[10], kernel: f32[64,10]}, step: 0}" in text
        )
        assert "History(5 rows: metrics.loss)" in text and "Elapsed(steps=5" in text
        assert "0.125" not in text and "\n" not in text
    assert repr(output).endswith("'it reached its stop')")


def test_a_large_state_is_shown_by_its_type_and_its_size():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class TrainState:
        layers: list

    output = ms.loop(TrainState([jnp.zeros((100, 100))] * 12), [1], {ms.every(1): lambda state: None})
    assert repr(output).startswith("LoopOutput(TrainState of 12 arrays, 480 kB, History(")


def test_logs_show_numbers_and_the_shapes_of_arrays():
    logs = ms.logs().add_metric("loss", 1.5).add_output("preds", jnp.zeros((4, 2)))
    assert repr(logs) == "Logs({metrics: {loss: 1.5}, outputs: {preds: f32[4,2]}})"


def test_callbacks_show_how_they_were_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Sampled(ms.Callback):
        def __init__(self, count, model=None):
            self.count, self.model = count, model

    shown = {
        "csv_logger('a.csv')": ms.callbacks.csv_logger("a.csv"),
        "record('run')": ms.record("run"),
        "early_stopping(monitor='loss', patience=at(steps=3))": ms.callbacks.early_stopping("loss", patience=3),
        "keras_bar(total=at(epochs=3))": ms.callbacks.keras_bar(ms.at(epochs=3)),
        "noop": ms.loops.noop,
        "inner_loop('test', sample_fn)": ms.inner_loop("test", sample_fn),
        "checkpoint('/run')": ms.checkpoint("/run"),
        "Sampled(count=3, model=f32[2,2])": Sampled(3, jnp.zeros((2, 2))),
    }
    assert {text: repr(value) for text, value in shown.items()} == {text: text for text in shown}


def drawn_fn(sample, rng):
    return sample


def test_transforms_and_executors_show_the_call_that_makes_them():
    shown = {
        "BatchTransform(4)": ms.BatchTransform(4),
        "BatchTransform(4, drop_last=True)": ms.BatchTransform(4, drop_last=True),
        "MapTransform(batch_fn)": ms.MapTransform(batch_fn),
        "RandomHostMapTransform(drawn_fn)": ms.RandomHostMapTransform(drawn_fn),
        "RenameTransform({a: 'b'})": ms.RenameTransform({"a": "b"}),
        "Threads(2)": ms.Threads(2),
        "Processes(2, nice=5)": ms.Processes(2, nice=5),
        "Shuffle(mode='repeat')": ms.Shuffle("repeat"),
        "BatchCache('kept')": ms.BatchCache("kept"),
    }
    assert {text: repr(value) for text, value in shown.items()} == {text: text for text in shown}
