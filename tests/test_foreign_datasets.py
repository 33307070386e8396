"""Data of other libraries: Hugging Face datasets, Grain, ArrayRecord and zarr, through the real packages."""

import json
import os
import pathlib
import shutil
import sys
from typing import Any, cast

os.environ["HF_HUB_OFFLINE"] = "1"

import cloudpickle
import datasets
import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import PIL.Image
import pyarrow as pa
import pytest
import zarr
from array_record.python.array_record_module import ArrayRecordWriter
from conftest import assert_trees_equal
from pipelines import BATCH, SAMPLES, data
from test_bad_input import refuses

import millstream as ms
from millstream.errors import FileChanged
from millstream.integrations.array_record import ArrayRecordSource
from millstream.integrations.arrow import ArrowSource
from millstream.integrations.grain import GrainSource, RandomAccess, to_grain
from millstream.integrations.huggingface import HuggingFaceBatches, HuggingFaceSource
from millstream.integrations.sqlite import SqliteSource
from millstream.integrations.zarr import ZarrSource

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that workers do not import it, and JAX with it
datasets.disable_progress_bars()

FEATURES = datasets.Features({"image": datasets.Array3D((2, 3, 1), "uint8"), "label": datasets.Value("int32")})


def epochs(loader, key, steps=None):
    steps = 2 * loader.steps_per_epoch + 1 if steps is None else steps
    return [jax.device_get(pair) for pair in loader.iterate(loader.init_state(key), steps=steps)]


def in_memory() -> Any:
    return datasets.Dataset.from_dict({name: list(values) for name, values in data().items()}, features=FEATURES)


def on_disk(folder):
    """Eleven rows that are not next to each other in the file."""
    order = np.random.default_rng(0).permutation(SAMPLES)
    in_memory().select(order).save_to_disk(folder / "table")
    loaded: Any = datasets.load_from_disk(folder / "table")
    return loaded.select(np.argsort(order))


class Rows:
    """A source as Grain has them."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {name: values[index] for name, values in data().items()}

    def __repr__(self):
        return "Rows"


def decoded(record):
    return {
        "image": np.frombuffer(record, np.uint8, 6).reshape(2, 3, 1),
        "label": np.frombuffer(record, np.int32, 1, 6)[0],
    }


def records(folder, sizes=(4, 0, 7)):
    """The samples in several files."""
    paths, first = [], 0
    for number, size in enumerate(sizes):
        paths.append(folder / f"{number}.array_record")
        writer = ArrayRecordWriter(str(paths[-1]), "group_size:2")
        for row in range(first, first + size):
            writer.write(data()["image"][row].tobytes() + data()["label"][row].tobytes())
        writer.close()
        first += size
    return paths


def group(folder, **options):
    root = zarr.create_group(folder / "digits.zarr", zarr_format=options.pop("zarr_format", 3))
    for name, values in data().items():
        chunks = (2, *values.shape[1:])
        array = root.create_array(name, shape=values.shape, dtype=values.dtype, chunks=chunks, **options)
        array[:] = values
    return folder / "digits.zarr"


SOURCES = {
    "huggingface": lambda folder: HuggingFaceSource(on_disk(folder)),
    "grain": lambda folder: GrainSource(grain.MapDataset.source(Rows())),
    "array_record": lambda folder: ArrayRecordSource(records(folder), decoded),
    "zarr": lambda folder: ZarrSource(group(folder)),
}


@pytest.fixture(params=SOURCES)
def source(request, folder):
    return SOURCES[request.param](folder)


def test_every_executor_gives_the_batches_of_arrays_in_memory(source, key):
    expected = epochs(ms.DataLoader([ms.ArraySampleSource(data()), BATCH]), key)
    for executor in (None, ms.Threads(3), ms.Processes(1)):
        assert_trees_equal(epochs(ms.DataLoader([source, BATCH], executor=executor), key), expected)


def test_a_stream_goes_on_from_any_step(source, key):
    loader = ms.DataLoader([source, BATCH])
    expected = epochs(loader, key, 7)
    for step in range(7):
        rest = loader.iterate(loader.init_state(key, step), steps=7 - step)
        assert_trees_equal([jax.device_get(pair) for pair in rest], expected[step:])


def test_a_sample_may_come_twice_in_a_batch(source):
    rows = np.array([7, 0, 7, 10])
    assert_trees_equal(source.read(rows), {name: values[rows] for name, values in data().items()})


# Hugging Face datasets


def test_formats_and_transforms_of_a_dataset_are_respected():
    table = in_memory()
    chosen = HuggingFaceSource(table.with_format("numpy", columns=["label"]))
    assert chosen.read(np.array([3])) == {"label": 3}
    wide = HuggingFaceSource(table.with_format("numpy", columns=["label"], dtype=np.float16))
    assert wide.read(np.array([3]))["label"].dtype == np.float16
    shown = HuggingFaceSource(table.with_transform(lambda batch: {"ten": [10 * label for label in batch["label"]]}))
    assert shown.read(np.array([3, 1]))["ten"].tolist() == [30, 10]
    rows = HuggingFaceSource(table, columns=["label"], row_fn=lambda row: {"keys": len(row), "label": row["label"]})
    assert rows.read(np.array([4])) == {"keys": 1, "label": 4}


def test_images_are_decoded_as_they_are_read(key):
    pictures = [PIL.Image.fromarray(np.full((4, 5, 3), row, np.uint8)) for row in range(6)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=6)})
    table = datasets.Dataset.from_dict({"image": pictures, "label": range(6)}, features=features)
    loader = ms.DataLoader([HuggingFaceSource(table), ms.BatchTransform(3)], executor=ms.Threads(2))
    for batch, _ in loader.iterate(loader.init_state(key)):
        assert batch["image"].shape == (3, 4, 5, 3)
        np.testing.assert_array_equal(batch["image"][:, 0, 0, 0], batch["label"])
    pictures[2] = PIL.Image.new("RGB", (5, 9))
    odd = datasets.Dataset.from_dict({"image": pictures, "label": range(6)}, features=features)
    with refuses(ValueError, "sample 2", "found['image']: shape (9, 5, 3)", "spec['image']:  shape (4, 5, 3)"):
        HuggingFaceSource(odd).read(np.array([4, 2]))


def test_missing_values_and_lists_of_other_lengths_are_named_with_their_sample():
    table = datasets.Dataset.from_dict({"a": [1, 2, None, 4], "b": [[1], [2], [3], [4, 5]]})
    with refuses(ValueError, "sample 2 does not match the spec", "found['a']: None", "Fill the gap"):
        HuggingFaceSource(table, columns=["a"]).read(np.array([3, 2]))
    with refuses(ValueError, "sample 3", "found['b']: shape (2,), int64", "spec['b']:  shape (1,), int32"):
        HuggingFaceSource(table, columns=["b"]).read(np.array([1, 3]))
    kept = table.select([3, 0, 1])  # nothing is missing in these
    assert HuggingFaceSource(kept, columns=["a"]).read(np.array([0, 1, 2]))["a"].tolist() == [4, 1, 2]


def test_what_is_no_dataset_with_rows_is_refused():
    table = in_memory()
    parts: Any = datasets.DatasetDict({"train": table})
    with refuses(TypeError, "needs a datasets.Dataset", "dataset['train']"):
        HuggingFaceSource(parts)
    with refuses(TypeError, "needs a datasets.Dataset", "HuggingFaceBatches"):
        HuggingFaceSource(table.to_iterable_dataset())
    with refuses(TypeError, "needs a datasets.IterableDataset"):
        HuggingFaceBatches(table, 4)
    with refuses(ValueError, "each column once", "'nothing' is there 0 times"):
        HuggingFaceSource(table, columns=["nothing"])
    text = datasets.Dataset.from_dict({"text": ["a", "b"]})
    with refuses(TypeError, "needs arrays of numbers", "row_fn"):
        next(iter(HuggingFaceBatches(text.to_iterable_dataset(), 2)))


def test_a_dataset_file_that_changes_is_named_with_the_samples(folder, key):
    table = on_disk(folder)
    source, copy = HuggingFaceSource(table), cloudpickle.dumps(HuggingFaceSource(table))
    file = pathlib.Path(table.cache_files[0]["filename"])
    contents = file.read_bytes()
    file.with_suffix(".new").write_bytes(contents)
    file.with_suffix(".new").rename(file)
    for changed in (source, cloudpickle.loads(copy)):
        with refuses(FileChanged, str(file), "has changed", "sample 4"):
            changed.read(np.array([4]))
    loader = ms.DataLoader([source, BATCH], executor=ms.Processes(1))
    with refuses(FileChanged, str(file), "has changed", "samples ["):
        next(loader.iterate(loader.init_state(key)))


def numbers():
    for number in range(23):
        yield {"a": number, "b": [number / 2, 1.0]}


def doubled(batch):
    return {"a": [value for number in batch["a"] for value in (number, -number)], "b": batch["b"] + batch["b"]}


def stored():
    return datasets.Dataset.from_list(list(numbers()))


ITERABLES = {
    "arrow": lambda: stored().to_iterable_dataset(num_shards=3),
    "generator": lambda: datasets.IterableDataset.from_generator(numbers),
    "map and filter": lambda: (
        stored().to_iterable_dataset().map(lambda row: {"a": row["a"] + 1}).filter(lambda row: row["a"] % 5)
    ),
    "map over batches": lambda: stored().to_iterable_dataset().map(doubled, batched=True, batch_size=5),
    "shuffled": lambda: stored().to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=7),
    "shuffled generator": lambda: datasets.IterableDataset.from_generator(numbers).shuffle(seed=1, buffer_size=7),
    "interleaved": lambda: datasets.interleave_datasets(
        [stored().to_iterable_dataset(), datasets.IterableDataset.from_generator(numbers)]
    ),
    "skipped and cut": lambda: datasets.IterableDataset.from_generator(numbers).skip(3).take(15),
}


@pytest.mark.parametrize("name", ITERABLES)
def test_an_iterable_dataset_goes_on_exactly_from_every_batch(name):
    batches = HuggingFaceBatches(ITERABLES[name](), 4, epochs=2)
    seen, saved = [], []
    iterator = iter(batches)
    saved.append(json.dumps(iterator.get_state()))
    for pair in iterator:
        seen.append(pair)
        saved.append(json.dumps(iterator.get_state()))
    rows = [row["a"] for row in ITERABLES[name]()]
    first = [a for batch, mask in seen[: len(seen) // 2] for a in batch["a"][mask].tolist()]
    second = [a for batch, mask in seen[len(seen) // 2 :] for a in batch["a"][mask].tolist()]
    assert first == rows
    assert sorted(second) == sorted(rows)
    assert (second != rows) == ("shuffled" in name)
    for start, state in enumerate(saved):
        resumed = iter(batches)
        resumed.set_state(json.loads(state))
        assert_trees_equal(list(resumed), seen[start:])


def test_iterators_over_one_dataset_do_not_disturb_each_other():
    batches = HuggingFaceBatches(ITERABLES["generator"](), 4)
    one, other = iter(batches), iter(batches)
    for iterator in (one, other, other, one):
        next(iterator)
    one.set_state(one.get_state())
    assert next(one)[0]["a"].tolist() == [8, 9, 10, 11]
    assert next(other)[0]["a"].tolist() == [8, 9, 10, 11]


def test_batches_have_the_dtypes_of_the_features_and_whole_shapes():
    table = in_memory().to_iterable_dataset()
    *_, (batch, mask) = HuggingFaceBatches(table, 4)
    assert batch["image"].dtype == np.uint8 and batch["image"].shape == (4, 2, 3, 1)
    assert mask.tolist() == [True, True, True, False]
    assert not batch["image"][3].any()
    assert len(list(HuggingFaceBatches(table, 4, drop_last=True))) == 2
    named = HuggingFaceBatches(table, 4, row_fn=lambda row: {"sum": np.int32(np.sum(row["image"]))})
    assert next(iter(named))[0]["sum"].tolist() == data()["image"][:4].sum((1, 2, 3)).tolist()
    broken = HuggingFaceBatches(table, 4, row_fn=lambda row: {"x": np.float32(1 / (row["label"] - 5))})
    iterator = iter(broken)
    next(iterator)
    saved = iterator.get_state()
    for _ in range(2):  # it is not passed over
        with refuses(ZeroDivisionError, "row_fn of HuggingFaceBatches, at sample 5"):
            next(iterator)
    assert iterator.get_state() == saved
    with refuses(ValueError, "batches of the same size", "had 4 samples", "3 now"):
        iter(HuggingFaceBatches(table, 3)).set_state(saved)


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_dataset_that_fails_for_a_while_loses_and_repeats_nothing(shuffled):
    faults = []

    def unreliable():
        for row in numbers():
            if row["a"] in (0, 9) and faults.count(row["a"]) < 2:
                faults.append(row["a"])
                raise ConnectionError("for a while")
            yield row

    def batches(rows):
        dataset = datasets.IterableDataset.from_generator(rows)
        return iter(HuggingFaceBatches(dataset.shuffle(seed=1, buffer_size=7) if shuffled else dataset, 4, epochs=2))

    expected, iterator, seen = list(batches(numbers)), batches(unreliable), []
    while len(seen) < len(expected):
        state = iterator.get_state()
        try:
            seen.append(next(iterator))
        except ConnectionError:
            assert iterator.get_state() == state
    assert_trees_equal(seen, expected)
    assert next(iterator, None) is None
    assert sorted(faults) == [0, 0, 9, 9]


def test_what_is_wrong_with_a_row_is_said_with_its_sample():
    def batches(rows):
        return list(HuggingFaceBatches(datasets.Dataset.from_dict({"x": rows}).to_iterable_dataset(), 2))

    with refuses(ValueError, "a value in every row. Column 'x' has none at sample 3", "row_fn"):
        batches([1, 2, 3, None])
    with refuses(ValueError, "lists of one length in a column. Column 'x' has 1 values, and not 2, at sample 3"):
        batches([[1, 2], [3, 4], [5, 6], [7]])
    with refuses(ValueError, "HuggingFaceBatches needs at least one column"):
        next(iter(HuggingFaceBatches(datasets.IterableDataset.from_generator(lambda: iter([{}])), 2)))


def test_sources_that_read_from_this_machine_refuse_addresses_as_such():
    kinds: Any = [ArrayRecordSource, ZarrSource, lambda path: SqliteSource(path, table="t")]
    for kind in kinds:
        with refuses(ValueError, "Source reads from this machine alone", "s3://host/x. Copy"):
            kind("s3://me:secret@host/x")
        with refuses(TypeError, "Source needs a path", "3 (int)"):
            kind(3)


def test_a_dataset_that_has_become_shorter_is_refused():
    def batches(rows):
        return iter(HuggingFaceBatches(ITERABLES["shuffled"]().take(rows), 4))

    iterator = batches(20)
    for _ in range(4):
        next(iterator)
    with refuses(ValueError, "only with the same dataset", "4 batches of epoch 0", "the dataset has 2 now"):
        batches(8).set_state(iterator.get_state())
    with refuses(TypeError, "HuggingFaceBatches needs drop_last to be a bool. Got 'no' (str)"):
        HuggingFaceBatches(ITERABLES["arrow"](), 4, drop_last="no")  # pyright: ignore[reportArgumentType]


# Loops over what others iterate over


def total(state, batch):
    batch = batch[0] if isinstance(batch, tuple) else batch
    return ms.logs(), state * 3 % 1000 + np.sum(batch["a"])


LOOPED = {
    "huggingface": lambda: HuggingFaceBatches(ITERABLES["shuffled generator"](), 4, epochs=None),
    "grain dataset": lambda: (
        grain.MapDataset.range(50).shuffle(seed=2).map(lambda a: {"a": a}).to_iter_dataset().batch(4)
    ),
    "grain loader": lambda: grain.DataLoader(
        data_source=cast(Any, [{"a": np.int32(row)} for row in range(50)]),
        sampler=grain.samplers.IndexSampler(50, grain.sharding.NoSharding(), shuffle=True, seed=3, num_epochs=1),
        operations=[grain.transforms.Batch(4)],
        worker_count=0,
    ),
}


@pytest.mark.parametrize("name", LOOPED)
def test_a_loop_over_them_is_saved_and_goes_on_exactly(name, folder):
    def run(stop, **options):
        return ms.loop(np.int64(0), LOOPED[name](), {ms.every(1): [total]}, stop=stop, **options)[0]

    expected = run(9)
    saving = {"resume": folder / "run"}
    ms.loop(
        np.int64(0),
        LOOPED[name](),
        {ms.every(1): [total], ms.every(2): [ms.checkpoint(folder / "run")]},
        stop=4,
        **saving,
    )
    assert run(9, **saving) == expected


# Grain


def test_a_loader_is_saved_and_restored_by_grain_and_orbax(folder, key):
    loader = ms.DataLoader([ms.HostArraySource(data()), BATCH])
    dataset = to_grain(loader, loader.init_state(key), steps=8)
    expected = [jax.device_get(pair) for pair in dataset]
    assert len(expected) == 8
    batches = iter(dataset)
    for _ in range(2):
        next(batches)
    handler = grain.checkpoint.CheckpointHandler()
    (folder / "item").mkdir()
    handler.save(folder / "item", item=batches)
    restored = handler.restore(folder / "item", item=iter(dataset))
    assert_trees_equal([jax.device_get(pair) for pair in restored], expected[2:])
    with ocp.CheckpointManager(folder / "run") as manager:
        manager.save(1, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(batches)))
        manager.wait_until_finished()
        again = iter(dataset)
        manager.restore(1, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(again)))
    assert_trees_equal([jax.device_get(pair) for pair in again], expected[2:])


def test_our_sources_are_read_by_grain():
    source = RandomAccess(ms.ArraySampleSource(data()))
    assert_trees_equal(source[3], {name: values[3] for name, values in data().items()})
    chunked = RandomAccess(ArrowSource(pa.Table.from_batches(pa.table({"x": np.arange(5)}).to_batches(2))))
    for one in (source, chunked):
        assert_trees_equal(one.__getitems__([3, -1]), [one[3], one[len(one) - 1]])
        assert one.__getitems__([]) == []
    with refuses(IndexError, "11 samples", "11"):
        source[11]
    with refuses(IndexError, "11 samples", "-12"):
        source.__getitems__([3, -12])
    for read in (grain.MapDataset.source(source), [source[row] for row in range(SAMPLES)]):
        assert sorted(int(sample["label"]) for sample in read) == list(range(SAMPLES))
    sampler = grain.samplers.IndexSampler(SAMPLES, grain.sharding.NoSharding(), shuffle=True, seed=0, num_epochs=1)
    loader = grain.DataLoader(data_source=source, sampler=sampler, worker_count=0)
    assert sorted(int(sample["label"]) for sample in loader) == list(range(SAMPLES))


def test_what_grain_cannot_index_is_refused():
    dataset, nothing = grain.MapDataset.range(10), cast(Any, [1, 2, 3])
    with refuses(TypeError, "read in any order", "loop over it"):
        GrainSource(dataset.to_iter_dataset())  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "Leave out repeat()"):
        GrainSource(dataset.repeat())
    with refuses(ValueError, "[1] is None", "filter()"):
        GrainSource(dataset.filter(lambda x: x % 2 == 0)).read(np.array([0, 1]))
    ragged = GrainSource((np.zeros(2), np.zeros(3)))
    assert repr(ragged) == "GrainSource(2 items of tuple)"
    with pytest.raises(ValueError, match=r"GrainSource\(tuple\): sample 1 does not match the spec"):
        ragged.read(np.array([0, 1]))
    with refuses(TypeError, "RandomAccess needs an indexed source"):
        RandomAccess(nothing)


# ArrayRecord


def test_records_are_bytes_unless_a_function_makes_samples_of_them(folder):
    source = ArrayRecordSource(records(folder))
    image, label = (data()[name][8].tobytes() for name in ("image", "label"))
    assert source.read(np.array([8, 8])) == [image + label] * 2
    failing = ArrayRecordSource(records(folder), lambda record: {"x": np.int32(1 // (record[6] - 5))})
    with refuses(ZeroDivisionError, "record_fn of ArrayRecordSource, at sample 5"):
        failing.read(np.array([1, 5]))


def test_what_is_no_array_record_file_is_refused(folder):
    with refuses(FileNotFoundError, "none.array_record does not exist"):
        ArrayRecordSource(folder / "none.array_record")
    (folder / "text.array_record").write_text("text " * 1000)
    with refuses(ValueError, "text.array_record is none", "64KB"):
        ArrayRecordSource(folder / "text.array_record")
    with refuses(ValueError, "at least one record"):
        ArrayRecordSource(records(folder, [0]))


def test_a_damaged_or_changed_record_is_named_with_its_sample(folder, key):
    path = folder / "long.array_record"
    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for row in range(300):
        writer.write(np.full(1000, row, np.int32).tobytes())
    writer.close()
    contents = path.read_bytes()
    place = contents.index(np.full(900, 140, np.int32).tobytes())
    path.write_bytes(contents[: place + 8] + b"\xff" * 8 + contents[place + 16 :])
    source = ArrayRecordSource(path, lambda record: {"x": np.frombuffer(record, np.int32)})
    assert source.read(np.array([299, 0]))["x"][:, 7].tolist() == [299, 0]
    with refuses(FileChanged, "long.array_record", "at sample 140", "mismatch"):
        source.read(np.array([3, 140, 200]))
    path.write_bytes(contents)
    with refuses(FileChanged, "long.array_record", "has changed", "sample 9"):
        source.read(np.array([9]))
    loader = ms.DataLoader([source, BATCH], executor=ms.Processes(1))
    with refuses(FileChanged, "long.array_record", "has changed", "sample"):
        next(loader.iterate(loader.init_state(key)))


# Zarr


@pytest.mark.parametrize("options", [{}, {"zarr_format": 2}, {"shards": True}], ids=["format 3", "format 2", "shards"])
def test_arrays_of_every_form_are_read(folder, options):
    if "shards" in options:
        root = zarr.create_group(folder / "digits.zarr")
        for name, values in data().items():
            rest = values.shape[1:]
            array = root.create_array(
                name, shape=values.shape, dtype=values.dtype, chunks=(2, *rest), shards=(4, *rest)
            )
            array[:] = values
    else:
        group(folder, **options)
    source = ZarrSource(folder / "digits.zarr")
    rows = np.array([10, 2, 3, 2])
    assert_trees_equal(source.read(rows), {name: values[rows] for name, values in data().items()})
    assert_trees_equal(ZarrSource(folder / "digits.zarr" / "image").read(rows), data()["image"][rows])
    assert list(ZarrSource(folder / "digits.zarr", columns=["label"]).read(rows)) == ["label"]


def test_what_is_no_zarr_array_is_refused(folder):
    with refuses(ValueError, "needs the folder of a zarr array or group", "zarr.json"):
        ZarrSource(folder)
    root = zarr.create_group(folder / "g.zarr")
    with refuses(ValueError, "needs a group with arrays in it"):
        ZarrSource(folder / "g.zarr")
    root.create_array("a", shape=(3, 2), dtype="int32")
    root.create_array("b", shape=(4,), dtype="int32")
    with refuses(ValueError, "same, non-zero number of rows", "shape (3, 2), int32", "shape (4,), int32"):
        ZarrSource(folder / "g.zarr")
    with refuses(ValueError, "chooses columns of a group"):
        ZarrSource(folder / "g.zarr" / "a", columns=["a"])
    (folder / "g.zarr" / "a" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "array"}')
    with refuses(ValueError, "ZarrSource cannot read", "g.zarr/a"):
        ZarrSource(folder / "g.zarr" / "a")


def test_chunks_that_were_never_written_are_zeros(folder):
    array = zarr.create_array(folder / "a.zarr", shape=(10, 3), chunks=(2, 3), dtype="int32")
    array[4:6] = 7
    assert ZarrSource(folder / "a.zarr").read(np.array([4, 0]))[:, 0].tolist() == [7, 0]


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_a_chunk_that_changes_goes_or_breaks_is_named_with_its_samples(folder, key, cache_bytes):
    path = folder / "a.zarr"
    array = zarr.create_array(path, shape=(10, 300), chunks=(2, 300), dtype="int32")
    array[:] = np.random.default_rng(0).integers(0, 2**31, (10, 300))

    def built():
        source = ZarrSource(path, cache_bytes=cache_bytes)
        source.read(np.arange(10))
        return source, cloudpickle.loads(cloudpickle.dumps(source))

    source, copy = built()
    chunk = path / "c" / "2" / "0"
    chunk.rename(folder / "kept")
    for changed in (source, copy):
        assert len(changed.read(np.array([0, 9]))) == 2
        with refuses(FileChanged, str(chunk), "has changed", "samples [5, 4]"):
            changed.read(np.array([0, 5, 4]))
    loader = ms.DataLoader([source, BATCH], executor=ms.Processes(1))
    with refuses(FileChanged, str(chunk), "has changed", "sample"):
        list(loader.iterate(loader.init_state(key)))
    chunk.write_bytes((folder / "kept").read_bytes()[:100])
    source = ZarrSource(path, cache_bytes=cache_bytes)
    with refuses(FileChanged, "a.zarr", "at sample 4", "Truncated"):
        source.read(np.array([1, 4, 5]))
    array.attrs["note"] = "changed"
    with refuses(FileChanged, "zarr.json", "has changed", "sample 0"):
        source.read(np.array([0]))


def test_a_chunk_replaced_by_one_of_the_same_size_and_time_has_changed(folder):
    array = zarr.create_array(folder / "a.zarr", shape=(4, 3), chunks=(2, 3), dtype="int32")
    array[:] = 1
    for name, samples in (("c/1/0", "samples [3, 2]"), ("zarr.json", "samples [0, 3, 2]")):
        source = ZarrSource(folder / "a.zarr")
        path = folder / "a.zarr" / name
        shutil.copy2(path, folder / "new")
        (folder / "new").replace(path)
        with refuses(FileChanged, str(path), "has changed", samples):
            source.read(np.array([0, 3, 2]))


def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_an_array_is_never_in_memory_as_a_whole(folder):
    array = zarr.create_array(folder / "a.zarr", shape=(96, 1 << 18), chunks=(1, 1 << 18), dtype="uint32")
    array[:] = np.arange(96, dtype=np.uint32)[:, None]
    source = ZarrSource(folder / "a.zarr", cache_bytes=4 << 20)
    before, most = resident(), 0
    for row in range(96):
        assert source.read(np.array([row]))[0, 5] == row
        most = max(most, resident() - before)
    assert most < 32 << 20  # of 96 MB
