"""The mistakes of a first day: each is answered in a few lines that say what to write."""
# pyright: reportArgumentType=false, reportCallIssue=false

import functools
import inspect
import warnings
from typing import Any

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import pandas
import pytest

import millstream as ms

KEY = jax.random.key(0)
DATA = {"x": np.arange(8, dtype=np.float32), "y": np.arange(8, dtype=np.int32)}
RAGGED = [{"ids": np.arange(index % 5 + 1)} for index in range(40)]
LINES = 12  # of a message and the notes that belong to it

MISTAKES = []


def mistake(kind, *words):
    """Register a function that makes a mistake, with the kind of error and the words that answer it."""

    def register(fn):
        MISTAKES.append(pytest.param(fn, kind, words, id=fn.__name__))
        return fn

    return register


def source():
    return ms.ArraySampleSource(DATA)


def loader(*stages, **options):
    return ms.DataLoader([source(), *(stages or [ms.BatchTransform(4)])], **options)


def first_batch(*stages):
    made = ms.DataLoader(list(stages))
    return next(made.iterate(made.init_state(KEY)))


def train(step, state: Any = 0.0, dataset=None, **options):
    tasks = {ms.on_train_step: step}
    return ms.train_loop(state, loader() if dataset is None else dataset, tasks, key=KEY, stop=2, **options)


class MapStyleDataset:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"x": np.float32(index)}


def samples():
    yield from ({"x": np.float32(index)} for index in range(8))


# Loaders and sources in the way of other libraries


@mistake(TypeError, "loader.iterate(loader.init_state(jax.random.key(0)))", "for batch, mask in", "batches.state")
def for_batch_in_loader():
    for _ in loader():  # pyright: ignore[reportGeneralTypeIssues, reportAttributeAccessIssue]
        pass


@mistake(TypeError, "A MixedLoader is iterated from a state", "loader.iterate(loader.init_state(")
def for_batch_in_mixed_loader():
    list(ms.loader.MixedLoader([loader()]))  # pyright: ignore[reportArgumentType]


@mistake(TypeError, "has no len()", "loader.steps_per_epoch", "here 2")
def len_of_a_loader():
    len(loader())  # pyright: ignore[reportArgumentType]


@mistake(TypeError, "iterate needs state", "loader.iterate(loader.init_state(jax.random.key(0)))")
def iterate_without_a_state():
    loader().iterate()  # pyright: ignore[reportCallIssue]


@mistake(TypeError, "needs a state from loader.init_state(key)")
def iterate_with_a_key():
    loader().iterate(KEY)


@mistake(AttributeError, "no attribute 'batch_size'", "BatchTransform", "explain()")
def batch_size_of_a_loader():
    loader().batch_size  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


@mistake(AttributeError, "no attribute 'dataset'", "loader.pipeline.source")
def dataset_of_a_loader():
    loader().dataset  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


@mistake(AttributeError, "no attribute 'num_batches'", "loader.steps_per_epoch")
def num_batches_of_a_loader():
    loader().num_batches  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


@mistake(AttributeError, "no attribute 'epoch'", "int(state.step) // loader.steps_per_epoch")
def epoch_of_a_loader():
    loader().epoch  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


@mistake(TypeError, "no argument 'batch_size'", "DataLoader([source, ms.BatchTransform(8)])")
def batch_size_of_torch():
    ms.DataLoader(source(), batch_size=8)  # pyright: ignore[reportCallIssue]


@mistake(
    TypeError,
    "batch_size: batching is a stage",
    'shuffle: the source decides the order: ordering="shuffle"',
    "num_workers: write executor=ms.Processes(4)",
    "drop_last: write ms.BatchTransform(32, drop_last=True)",
    "collate_fn: write ms.BatchTransform(32, collate=fn)",
)
def a_loader_as_in_torch():
    ms.DataLoader(source(), batch_size=8, shuffle=True, num_workers=4, drop_last=True, collate_fn=None)  # pyright: ignore[reportCallIssue]


@mistake(TypeError, "no argument 'seed'", "loader.init_state(jax.random.key(0))")
def seed_of_a_loader():
    ms.DataLoader(source(), seed=0)  # pyright: ignore[reportCallIssue]


@mistake(TypeError, "no argument 'prefecth'", "Did you mean 'prefetch'?")
def a_misspelled_option():
    ms.DataLoader(source(), prefecth=2)  # pyright: ignore[reportCallIssue]


@mistake(TypeError, "takes only (pipeline) by position", "DataLoader([source, ms.BatchTransform(8)])")
def batch_size_by_position():
    ms.DataLoader(source(), 8)  # pyright: ignore[reportCallIssue]


@mistake(TypeError, "Source and stages are one list")
def stages_without_a_list():
    ms.DataLoader(source(), ms.BatchTransform(4))  # pyright: ignore[reportCallIssue]


@mistake(TypeError, "DataLoader needs pipeline", "DataLoader([source, ms.BatchTransform(32)])")
def a_loader_of_nothing():
    ms.DataLoader()  # pyright: ignore[reportCallIssue]


@mistake(TypeError, "no argument 'shuffle'", 'ordering="shuffle" (the default) or ordering="sequential"')
def shuffle_of_a_source():
    ms.ArraySampleSource(DATA, shuffle=True)  # pyright: ignore[reportCallIssue]


@mistake(TypeError, "no argument 'drop_remainder'", "Write drop_last=True")
def drop_remainder_of_tf_data():
    ms.BatchTransform(8, drop_remainder=True)  # pyright: ignore[reportCallIssue]


# What a pipeline starts with


@mistake(TypeError, "starts with a source", "(MapStyleDataset)", "ms.DatasetSource(it)")
def a_torch_dataset_as_first_stage():
    ms.DataLoader([MapStyleDataset(), ms.BatchTransform(4)])


@mistake(
    TypeError, "(generator)", "has no index", "IterableSource(make)", "ms.DatasetSource(list(samples))", "ms.train_loop"
)
def a_generator_as_first_stage():
    ms.DataLoader([samples(), ms.BatchTransform(4)])


@mistake(TypeError, "(generator)", "ms.DatasetSource(list(samples))", "ms.train_loop as the dataset")
def a_generator_in_a_dataset_source():
    ms.DatasetSource(samples())


@mistake(TypeError, "(generator)", "Give it the function that makes it, not its result: IterableSource(make)")
def a_generator_in_an_iterable_source():
    ms.sources.IterableSource(samples())


@mistake(TypeError, "no argument 'buffer_size'", "Write shuffle_buffer=10_000")
def the_buffer_of_tf_data():
    ms.sources.IterableSource(samples, buffer_size=10)  # pyright: ignore[reportCallIssue]


@mistake(TypeError, "(dict)", "ms.ArraySampleSource(data)")
def arrays_as_first_stage():
    ms.DataLoader([DATA, ms.BatchTransform(4)])


@mistake(TypeError, "(list)", "ms.DatasetSource(it)")
def a_list_as_first_stage():
    ms.DataLoader([[{"x": 1.0}] * 8, ms.BatchTransform(4)])


@mistake(TypeError, "a list of 8 dicts", "DataLoader([ms.DatasetSource(samples), ms.BatchTransform(32)])")
def samples_as_the_pipeline():
    ms.DataLoader([{"x": 1.0}] * 8)


@mistake(TypeError, "'images' (str)", "ms.ImageFolderSource")
def a_folder_as_first_stage():
    ms.DataLoader(["images", ms.BatchTransform(4)])


@mistake(TypeError, "That is a loader already", "loader.replace(...)")
def a_loader_of_a_loader():
    ms.DataLoader([loader(), ms.BatchTransform(4)])


@mistake(TypeError, "millstream.integrations.pandas.PandasSource(frame)")
def a_data_frame_as_first_stage():
    ms.DataLoader([pandas.DataFrame(DATA), ms.BatchTransform(4)])


@mistake(TypeError, "ArraySampleSource needs arrays", "millstream.integrations.pandas.PandasSource(frame)")
def a_data_frame_in_place_of_arrays():
    ms.ArraySampleSource(pandas.DataFrame({"x": np.arange(1000.0)}))


@mistake(TypeError, "ArraySampleSource needs arrays", "Write data['x'].to_numpy()")
def a_series_in_place_of_an_array():
    ms.ArraySampleSource({"x": pandas.Series([1.0, 2.0])})


@mistake(TypeError, "reads samples with [index]", "millstream.integrations.pandas.PandasSource(frame)")
def a_data_frame_in_a_dataset_source():
    ms.DatasetSource(pandas.DataFrame(DATA))


@mistake(TypeError, "millstream.integrations.huggingface.HuggingFaceSource(dataset)")
def a_hugging_face_dataset_as_first_stage():
    ms.DataLoader([datasets.Dataset.from_dict({"x": [1.0, 2.0]}), ms.BatchTransform(2)])


@mistake(ValueError, "a list of 1,000 samples (dicts)", "ms.DatasetSource(data)", "np.stack(rows)")
def a_list_of_dicts_in_place_of_arrays():
    ms.ArraySampleSource([{"x": np.ones(3), "y": np.float32(1)} for _ in range(1000)])


@mistake(TypeError, "a list of 1,000 samples (tuples)", "ms.DatasetSource(data)")
def a_list_of_pairs_in_place_of_arrays():
    ms.ArraySampleSource([(np.ones(3), 1) for _ in range(1000)])


@mistake(UserWarning, "1,000 fields of 3 samples", "np.stack(data)")
def a_list_of_arrays_in_place_of_an_array():
    ms.ArraySampleSource([np.ones(3) for _ in range(1000)])


@mistake(TypeError, "data['x'][0]: 1 (int)", "write np.asarray(data['x'])")
def lists_of_numbers_as_columns():
    ms.ArraySampleSource({"x": [1, 2, 3], "y": [1, 2, 3]})


@mistake(TypeError, "the items of data['x'] differ in length", "Pad them to one length")
def lists_of_different_lengths_as_a_column():
    ms.ArraySampleSource({"x": [[1], [2, 3]]})


@mistake(TypeError, "takes its arrays as one tree", 'ArraySampleSource({"x": x, "y": y})')
def features_and_labels_as_two_arguments():
    ms.ArraySampleSource(DATA["x"], DATA["y"])  # pyright: ignore[reportArgumentType]


@mistake(ValueError, "data['x90']: shape (7,), float64", "data['x0']: shape (8,), float64", "Slice or pad them")
def one_leaf_of_a_hundred_that_is_shorter():
    ms.ArraySampleSource({f"x{number}": np.ones(8 - (number == 90)) for number in range(100)})


# Stages


@mistake(TypeError, "MapTransform calls fn(value, mask)", "<lambda> takes (s)", "lambda value, mask:")
def a_map_of_one_argument():
    loader(ms.MapTransform(lambda s: s))  # pyright: ignore[reportArgumentType]


@mistake(TypeError, "RandomMapTransform calls fn(value, mask, key)")
def a_random_map_without_a_mask():
    loader(ms.RandomMapTransform(lambda value, key: value))  # pyright: ignore[reportArgumentType]


@mistake(TypeError, "so add would be mask", "by default, 3", "functools.partial(fn, add=...)")
def a_map_that_keeps_a_number_where_the_mask_comes():
    loader(ms.MapTransform(lambda value, add=3: {"x": value["x"] + add}))


@mistake(TypeError, "calls body_fn(carry, batch, mask)", "so scale would be mask")
def a_body_that_keeps_a_number_where_the_mask_comes():
    own = loader()
    own.scan_epoch(own.init_state(jax.random.key(0)), 0.0, lambda carry, batch, scale=2.0: (carry * scale, None))


@mistake(TypeError, "managed.train_step", "so scale would be elapsed", "functools.partial")
def a_managed_step_that_keeps_a_number_where_elapsed_comes():
    ms.managed.train_step(lambda state, batch, scale=2.0: ms.logs())


@mistake(TypeError, "HostMapTransform calls fn(sample)", "lambda sample:")
def a_host_map_with_a_mask():
    loader(ms.HostMapTransform(lambda value, mask: value))


@mistake(TypeError, "BatchTransform calls collate(samples)")
def a_collate_function_of_two_arguments():
    ms.BatchTransform(4, collate=lambda x, y: x)  # pyright: ignore[reportArgumentType]


@mistake(jax.errors.TracerArrayConversionError, "Write jnp in place of np", "ms.HostMapTransform(lambda sample: ...)")
def numpy_in_a_map():
    loader(ms.MapTransform(lambda value, mask: {"x": np.sqrt(value["x"])}))


@mistake(jax.errors.ConcretizationTypeError, "jnp.where", "ms.HostMapTransform(lambda sample: ...)")
def an_if_in_a_map():
    loader(ms.MapTransform(lambda value, mask: value if value["y"] > 3 else {}))


@mistake(KeyError, "'z'", "MapTransform(<lambda>)", "value['x']: float32[]", "value['y']: int32[]")
def a_key_that_is_not_there_in_a_map():
    loader(ms.MapTransform(lambda value, mask: value["z"]))


@mistake(KeyError, "value['x0']: float32[]", "and 92 more")
def a_key_that_is_not_there_among_a_hundred():
    many = ms.ArraySampleSource({f"x{number}": np.ones(8) for number in range(100)})
    ms.DataLoader([many, ms.MapTransform(lambda value, mask: value["z"])])


@mistake(TypeError, "with the source", "ms.MapTransform(lambda value, mask: ...)")
def a_function_as_a_stage():
    loader(lambda sample: sample["x"])


@mistake(TypeError, "found: None", "None does not leave a sample out", "ms.views.select(source, keep)")
def none_as_a_filter():
    first_batch(source(), ms.HostMapTransform(lambda s: None if s["y"] == 3 else s), ms.BatchTransform(8))


@mistake(ValueError, "None does not leave a sample out", "ms.views.select(source, keep)")
def none_as_a_filter_of_the_first_sample():
    loader(ms.HostMapTransform(lambda s: s if s["y"] > 30 else None))


@mistake(ValueError, "sample 3", "found['y']: None", "None is not a number", "Fill the gap")
def none_in_a_sample():
    rows = [{"x": 1.0, "y": None if index == 3 else 2} for index in range(8)]
    first_batch(ms.DatasetSource(rows, ordering="sequential"), ms.BatchTransform(8))


@mistake(TypeError, "spec:  {'x': *, 'y': None}", "None is not a number", "Fill the gap")
def none_in_the_first_sample():
    rows = [{"x": 1.0, "y": None if index == 0 else 2} for index in range(8)]
    first_batch(ms.DatasetSource(rows), ms.BatchTransform(8))


@mistake(ValueError, "All samples of a batch need one shape", "HostMapTransform", "BatchTransform(n, collate=fn)")
def samples_of_different_lengths():
    first_batch(ms.DatasetSource(RAGGED), ms.BatchTransform(8))


@mistake(TypeError, "make it an array", "HostMapTransform", "BatchTransform(n, collate=fn)")
def lists_of_different_lengths_in_samples():
    rows = [{"ids": list(range(index % 500 + 1))} for index in range(1000)]
    first_batch(ms.DatasetSource(rows), ms.BatchTransform(8))


@mistake(ValueError, "The mesh has: 'batch'", "NamedSharding(mesh, jax.sharding.PartitionSpec('batch'))")
def a_mesh_with_an_axis_of_another_name():
    loader(sharding=jax.make_mesh((1,), ("batch",)))


# Epochs as one program


@mistake(TypeError, "body_fn must return (carry, output)", "one value, float32[]", "return carry, None")
def a_body_that_returns_the_carry_alone():
    made = loader()
    made.scan_epoch(made.init_state(KEY), 0.0, lambda carry, batch, mask: carry + batch["x"].sum())


@mistake(TypeError, "scan_epoch calls body_fn(carry, batch, mask)")
def a_body_without_a_mask():
    made = loader()
    made.scan_epoch(made.init_state(KEY), 0.0, lambda carry, batch: (carry, None))  # pyright: ignore[reportArgumentType]


@mistake(TypeError, "fuse=", "carry.state: float32[3] became int32[3]", "astype")
def a_fused_step_that_changes_a_dtype():
    train(jax.jit(lambda state, batch: state.astype(jnp.int32)), jnp.zeros(3), fuse=2)


@mistake(TypeError, "fuse=", "HostMapTransform after the source")
def a_fused_step_over_objects():
    train(jax.jit(lambda state, batch: state), dataset=ms.DataLoader(ms.DatasetSource(["a"] * 8)), fuse=2)


@mistake(TypeError, "train_loop with fuse=2", "axis_types")
def a_fused_step_over_an_explicit_mesh():
    made = loader(sharding=jax.make_mesh((1,), ("data",)))
    train(jax.jit(lambda state, batch: state), dataset=made, fuse=2)


@mistake(ValueError, "fuse needs a compiled step (jax.jit")
def a_fused_step_that_is_not_compiled():
    train(lambda state, batch: state, fuse=2)


# Loops


@mistake(TypeError, "no argument 'epochs'", "Write stop=ms.at(epochs=2)")
def epochs_of_a_loop():
    ms.train_loop(0.0, loader(), epochs=2)  # pyright: ignore[reportCallIssue]


@mistake(TypeError, "no argument 'validation_data'", "Write test_dataset=", "ms.on_test_step")
def validation_data_of_keras():
    ms.train_loop(0.0, loader(), validation_data=loader())  # pyright: ignore[reportCallIssue]


@mistake(
    TypeError,
    "num_steps: write stop=100",
    "callback: write callbacks=[...]",
    "seed: write key=jax.random.key(0)",
    "train_step: steps are tasks: {ms.on_train_step: train_step",
    "steps_per_epoch: write epoch_duration=5",
)
def a_loop_as_in_keras():
    ms.train_loop(0.0, loader(), num_steps=100, callback=None, seed=0, train_step=None, steps_per_epoch=5)  # pyright: ignore[reportCallIssue]


@mistake(TypeError, "at has no argument 'epoch'", "Did you mean 'epochs'?")
def a_misspelled_unit():
    ms.at(epoch=2)  # pyright: ignore[reportCallIssue]


@mistake(TypeError, "no argument 'tets_dataset'", "Did you mean 'test_dataset'?")
def a_misspelled_argument_of_a_loop():
    ms.train_loop(0.0, loader(), tets_dataset=loader())  # pyright: ignore[reportCallIssue]


@mistake(TypeError, "no argument 'epochs'", "It has: state, dataset, tasks")
def epochs_of_a_test():
    ms.test_loop(0.0, loader(), epochs=2)  # pyright: ignore[reportCallIssue]


@mistake(TypeError, "filepath: write directory='run'", 'save_best_only: write best=1, monitor="loss_test"')
def a_checkpoint_as_in_keras():
    ms.checkpoint(filepath="run", save_best_only=True)  # pyright: ignore[reportCallIssue]


@mistake(TypeError, "no argument 'restore_best'", "Write restore_best_weights=True")
def early_stopping_of_another_library():
    ms.callbacks.early_stopping("loss", 3, restore_best=True)  # pyright: ignore[reportCallIssue]


@mistake(TypeError, "needs callbacks as a list", "Write callbacks=[...]")
def a_callback_without_a_list():
    train(lambda state, batch: state, callbacks=ms.loops.noop)


@mistake(ValueError, "no named schedule 'on_trian_step'", "Did you mean 'on_train_step'?")
def a_misspelled_task():
    ms.train_loop(0.0, loader(), {"on_trian_step": lambda state, batch: state}, stop=1)  # pyright: ignore[reportArgumentType]


@mistake(ValueError, "got on_test_step and no test_dataset", "Give it test_dataset=", "leave it out of tasks")
def a_test_step_without_test_data():
    step = lambda state, batch: None  # noqa: E731
    ms.train_loop(0.0, loader(), {ms.on_train_step: step, ms.on_test_step: step}, key=KEY, stop=1)


@mistake(TypeError, "Got ArraySampleSource", "ms.DataLoader([source, ms.BatchTransform(32)])")
def a_source_in_place_of_a_loader():
    train(lambda state, batch: state, dataset=source())


@mistake(TypeError, "Got a dict", "ms.DataLoader([ms.ArraySampleSource(data), ms.BatchTransform(32)])")
def arrays_in_place_of_a_loader():
    train(lambda state, batch: state, dataset=DATA)


@mistake(TypeError, "stop=1000", "'2 epochs' (str)")
def a_stop_in_words():
    ms.train_loop(0.0, loader(), stop="2 epochs")  # pyright: ignore[reportArgumentType]


MASK = "Over a DataLoader a step gets the pair (batch, mask). Begin it with: batch, mask = batch."


@mistake(TypeError, "tuple indices", MASK)
def a_step_that_forgets_the_mask():
    train(lambda state, batch: state + batch["x"].sum())


@mistake(TypeError, "tuple indices", MASK)
def a_compiled_step_that_forgets_the_mask():
    train(jax.jit(lambda state, batch: state + batch["x"].sum()))


@mistake(TypeError, "tuple indices", MASK, "fuse=2")
def a_fused_step_that_forgets_the_mask():
    train(jax.jit(lambda state, batch: state + batch["x"].sum()), fuse=2)


@mistake(AttributeError, "'tuple' object has no attribute 'sum'", MASK)
def a_model_that_is_given_the_mask():
    train(jax.jit(lambda state, batch: state + batch.sum()))


@mistake(TypeError, "It takes (state, batch, mask)", "batch, mask = batch")
def a_step_with_a_mask_of_its_own():
    train(lambda state, batch, mask: state)


@mistake(TypeError, "It takes (batch)", "Have it take (state, batch)")
def a_step_without_a_state():
    train(lambda batch: None)


WRAP = 'return ms.logs().add_metric("loss", loss), state'


@mistake(TypeError, "returned (a dict of ['w'], float32[])", WRAP)
def a_step_that_returns_state_and_loss():
    train(jax.jit(lambda state, batch: (state, jnp.float32(1))), {"w": jnp.zeros(3)})


@mistake(TypeError, "returned (float32[], a dict of ['w'])", WRAP)
def a_step_that_returns_loss_and_state():
    train(jax.jit(lambda state, batch: (jnp.float32(1), state)), {"w": jnp.zeros(3)})


@mistake(TypeError, "returned ((float32[3], float32[2]), float32[])", WRAP)
def a_step_that_returns_a_state_of_two_parts_and_a_loss():
    train(jax.jit(lambda state, batch: (state, jnp.float32(1))), (jnp.zeros(3), jnp.zeros(2)))


@mistake(TypeError, "The state is a dict of ['w'], and it returned float32[]", WRAP)
def a_step_that_returns_the_loss_alone():
    train(jax.jit(lambda state, batch: jnp.float32(1)), {"w": jnp.zeros(3)})


@mistake(TypeError, "it returned a dict of ['loss']", WRAP)
def a_step_that_returns_a_dict_of_losses_alone():
    train(jax.jit(lambda state, batch: {"loss": jnp.float32(1)}), {"w": jnp.zeros(3)})


@mistake(TypeError, "dot_general", "batch['x']: shape (4,), float32")
def a_wrong_shape_in_a_step():
    train(jax.jit(lambda state, batch: state + batch[0]["x"] @ jnp.ones(3)))


@mistake(ValueError, "batch['x']: shape (), float32", "has no BatchTransform", "ms.BatchTransform(32)")
def a_loader_without_batches():
    train(jax.jit(lambda state, batch: state + batch[0]["x"] @ jnp.ones(4)), dataset=ms.DataLoader(source()))


@mistake(TypeError, "are Python objects", "a batch is a list of them", "ms.HostMapTransform(fn)")
def text_that_reaches_a_compiled_step():
    rows = [{"text": "some words"}] * 8
    made = ms.DataLoader([ms.DatasetSource(rows), ms.BatchTransform(2)])
    train(jax.jit(lambda state, batch: state), dataset=made)


@mistake(UserWarning, "metrics.loss has a value for each of the 4 rows", "jnp.sum(loss * mask) / jnp.sum(mask)")
def a_metric_with_a_value_per_row():
    train(jax.jit(lambda state, batch: (ms.logs().add_metric("loss", batch[0]["x"]), state)))


@mistake(UserWarning, "metrics.loss has a value for each of the 4 rows", "add_output")
def a_fused_metric_with_a_value_per_row():
    train(jax.jit(lambda state, batch: (ms.logs().add_metric("loss", batch[0]["x"]), state)), fuse=2)


@mistake(TypeError, "the values of 'loss' are arrays", "shape (3,)", "Log one number per step")
def the_mean_of_arrays():
    history = ms.loops.history()
    history.commit(ms.loops.Elapsed(steps=1, samples=4), {"loss": np.ones(3)})
    history.mean("loss")


@pytest.mark.parametrize(("make", "kind", "words"), MISTAKES)
def test_a_mistake_is_answered_with_what_to_write(make, kind, words):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(kind) as caught:
            make()
    notes = [note for note in getattr(caught.value, "__notes__", []) if "JAX" not in note and "---" not in note]
    text = "\n".join([str(caught.value), *notes])
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in:\n{text}"
    if not type(caught.value).__module__.startswith("jax"):
        assert len(text.splitlines()) <= LINES, text


# What the answers say works, and what was there before them works as before


def test_every_answer_to_a_foreign_keyword_names_arguments_that_exist():
    from millstream.text import keywords

    doors = [ms.DataLoader, ms.train_loop, ms.test_loop, ms.predict_loop, ms.loop, ms.ArraySampleSource]
    doors += [ms.DatasetSource, ms.DiskSampleSource, ms.BatchTransform, ms.callbacks.early_stopping, ms.checkpoint]
    doors += [ms.sources.IterableSource]
    assert {door.__name__ for door in doors} == set(keywords._FOREIGN)
    for door in doors:
        known = set(inspect.signature(door).parameters)
        assert not known & set(keywords._FOREIGN[door.__name__]), "an argument that exists is not foreign"
        for line in keywords._FOREIGN[door.__name__].values():
            assert "{" not in line.format(value=1, caller="door").replace("{ms.", "")
            if line.startswith("write ") and "(" not in line.partition("=")[0] and "=" in line:
                assert line.removeprefix("write ").partition("=")[0] in known, (door.__name__, line)


def test_signatures_stay_as_they_are_written():
    assert list(inspect.signature(ms.DataLoader).parameters)[:2] == ["pipeline", "executor"]
    assert list(inspect.signature(ms.train_loop).parameters)[:3] == ["state", "dataset", "tasks"]
    assert "batch_size" in inspect.signature(ms.BatchTransform).parameters
    assert ms.train_loop.__name__ == "train_loop" and "Train a model" in (ms.train_loop.__doc__ or "")


def test_a_loader_is_true_and_is_a_pytree():
    made = loader()
    assert made and ms.loader.MixedLoader([made])
    assert len(jax.tree.leaves(made)) == 2
    assert not hasattr(made, "batch_size") and not hasattr(made, "anything")
    with pytest.raises(AttributeError, match="no attribute 'steps_per_epoc'"):
        made.steps_per_epoc  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_a_property_that_fails_keeps_its_own_error():
    class Broken(ms.DataLoader):
        @property
        def steps_per_epoch(self):
            raise AttributeError("as it was")

    with pytest.raises(AttributeError, match="as it was"):
        Broken([source()]).steps_per_epoch  # noqa: B018


def test_a_decorator_may_take_other_arguments_than_its_function():
    def double(value):
        return {"x": value["x"] * 2}

    @functools.wraps(double)
    def without_mask(value, mask):
        return double(value)

    for fn in (without_mask, jax.jit(without_mask), functools.partial(without_mask), lambda *arguments: arguments[0]):
        assert loader(ms.MapTransform(fn)).steps_per_epoch == 8


def test_a_loop_takes_a_loader_for_a_loader():
    output = train(jax.jit(lambda state, batch: state + batch[1].sum()), jnp.int32(0))
    assert int(output.state) == 8


def test_a_fused_step_that_sees_the_elapsed_may_return_a_state_alone():
    step = jax.jit(lambda state, batch, elapsed: state + elapsed.steps)
    assert int(train(step, jnp.int32(0), fuse=2).state) == 3


def test_an_error_over_batches_of_any_kind_is_the_users_own():
    def fail(state, batch):
        raise ValueError("a tuple of mine")

    for batches in ([np.ones(3)], [("a", "b", "c")], [None], [{"x": [1]}]):
        with pytest.raises(ValueError, match="a tuple of mine"):
            ms.loop(0, batches, {ms.every(1): fail})


def test_samples_of_different_lengths_are_read_as_the_error_says():
    def padded(index):
        return {"ids": np.pad(RAGGED[index]["ids"], (0, 5 - len(RAGGED[index]["ids"])))}

    batch, _ = first_batch(ms.DiskSampleSource(len(RAGGED), padded), ms.BatchTransform(8))
    assert batch["ids"].shape == (8, 5)


def test_parts_of_sources_are_made_as_the_errors_say():
    host = ms.HostArraySource(DATA, ordering="sequential")
    sample_fn = lambda index: jax.tree.map(lambda rows: rows[0], host.read(np.array([index])))  # noqa: E731
    batch, _ = first_batch(ms.DiskSampleSource(3, sample_fn, ordering="sequential"), ms.BatchTransform(3))
    np.testing.assert_array_equal(batch["x"], [0, 1, 2])
    assert len(ms.ArraySampleSource(jax.tree.map(lambda array: array[:3], DATA))) == 3
    dataset = MapStyleDataset()
    assert len(ms.DatasetSource([dataset[index] for index in range(3)])) == 3


def test_samples_are_left_out_as_the_error_says():
    def keep(sample):
        if sample["y"] % 2:
            raise ValueError("odd")
        return sample

    made = ms.DataLoader([source(), ms.HostMapTransform(keep), ms.BatchTransform(8)], on_error="skip item")
    (batch, mask), *_ = made.iterate(made.init_state(KEY))
    assert sorted(batch["y"][mask].tolist()) == [0, 2, 4, 6]


def test_a_list_of_samples_is_read_as_the_error_says():
    data = [{"x": np.ones(3), "y": np.float32(1)} for _ in range(10)]
    assert first_batch(ms.DatasetSource(data), ms.BatchTransform(4))[0]["x"].shape == (4, 3)
    stacked = jax.tree.map(lambda *rows: np.stack(rows), *data)
    assert first_batch(ms.ArraySampleSource(stacked), ms.BatchTransform(4))[0]["x"].shape == (4, 3)


def test_a_state_may_still_be_a_number_a_pair_or_a_dict():
    assert train(lambda state, batch: state + 1).state == 2.0
    assert train(lambda state, batch: (state[0] + 1, state[1]), (0, 1)).state == (2, 1)
    assert train(lambda state, batch: {"n": state["n"] + 1}, {"n": 0}).state == {"n": 2}
    assert train(lambda state, batch: ({"loss": 1.0}, state), {"n": 0}).history.collect("loss") == [1.0, 1.0]
