"""Samples read on the host: functions, datasets, mapped arrays, and Python inside compiled programs."""

import dataclasses
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
from conftest import assert_trees_equal
from pipelines import BATCH, SAMPLES, data, sample, source
from test_bad_input import refuses

import millstream as ms
from millstream.plan.planned import Request
from millstream.reading.slots import Layout
from millstream.reading.threads import ThreadBackend


def labels(batch, mask):
    return np.asarray(batch["label"])[np.asarray(mask)].tolist()


def collect(carry, batch, mask):
    return carry, (batch, mask)


def reader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("millstream-reader")]


@pytest.mark.parametrize("readers", [1, 2, 5])
@pytest.mark.parametrize("prefetch_size", [1, 7, 100])
def test_any_number_of_readers_reads_the_same(readers, prefetch_size, key):
    def slow(index):
        time.sleep(0.001 * (index % 3))
        return sample(index)

    plain = ms.DataLoader([source(), BATCH])
    loader = ms.DataLoader([ms.DiskSampleSource(SAMPLES, slow, prefetch_size=prefetch_size, readers=readers), BATCH])
    ours = loader.iterate(loader.init_state(key), steps=7)
    theirs = plain.iterate(plain.init_state(key), steps=7)
    for mine, expected in zip(ours, theirs, strict=True):
        assert_trees_equal(mine, expected)


def test_each_sample_is_read_once_and_nothing_behind_the_end(key):
    read = []

    def counted(index):
        read.append(index)
        return sample(index)

    loader = ms.DataLoader(
        [ms.DiskSampleSource(SAMPLES, counted, sample_spec=source().spec(), prefetch_size=64), BATCH]
    )
    assert read == []
    for _ in loader.iterate(loader.init_state(key)):
        pass
    assert sorted(read) == list(range(SAMPLES))


def test_reading_goes_on_while_the_caller_computes(key):
    read = []

    def counted(index):
        read.append(index)
        return {"x": np.int32(index)}

    loader = ms.DataLoader([ms.DiskSampleSource(100, counted, prefetch_size=20), ms.BatchTransform(5)], prefetch=0)
    batches = loader.iterate(loader.init_state(key))
    next(batches)
    deadline = time.monotonic() + 120
    while len(read) < 26 and time.monotonic() < deadline:  # one for the spec, one batch, twenty ahead
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(read) == 26
    batches.close()


def test_a_scan_finds_its_samples_read_ahead(key):
    """Reading alone takes 64 x 5 ms; four readers in the background share it while the program runs."""
    busiest = []
    running = threading.Semaphore(0)

    def slow(index):
        running.release()
        time.sleep(0.005)
        busiest.append(running._value)
        running.acquire()
        return {"x": np.int32(index)}

    loader = ms.DataLoader([ms.DiskSampleSource(64, slow, prefetch_size=16, readers=4), ms.BatchTransform(4)])
    _, _, (batches, _) = loader.scan_epoch(loader.init_state(key), None, collect)
    assert sorted(batches["x"].reshape(-1).tolist()) == list(range(64))
    assert max(busiest) > 1


def test_an_error_keeps_its_type_names_the_sample_and_comes_after_the_good_batches(key):
    class Broken(OSError):
        pass

    def bad(index):
        if index == 7:
            raise Broken("disk on fire")
        return sample(index)

    loader = ms.DataLoader([ms.DiskSampleSource(SAMPLES, bad), BATCH])
    state = loader.init_state(key)
    plain = ms.DataLoader([source(), BATCH])
    pairs = list(plain.iterate(plain.init_state(key)))
    place = next(number for number, pair in enumerate(pairs) if 7 in labels(*pair))
    seen = []
    with refuses(Broken, "disk on fire", "sample_fn(7) of DiskSampleSource"):
        for batch, mask in loader.iterate(state):
            seen.append(labels(batch, mask))
    assert len(seen) == place
    with refuses(Broken, "disk on fire", "sample_fn(7)"):
        loader.scan_epoch(state, None, collect)
    with refuses(Broken, "disk on fire", "sample_fn(7)"):
        loader.next_batch(loader.init_state(key, step=place))


def test_after_an_error_the_same_batch_can_be_asked_for_again(key):
    broken = [True]

    def sometimes(index):
        if index == 7 and broken:
            broken.clear()
            raise OSError("try again")
        return sample(index)

    spec = source().spec()
    loader = ms.DataLoader([ms.DiskSampleSource(SAMPLES, sometimes, sample_spec=spec), BATCH])
    batches, seen = loader.iterate(loader.init_state(key)), []
    while len(seen) < loader.steps_per_epoch:
        try:
            seen.append(next(batches))
        except OSError:
            continue
    plain = ms.DataLoader([source(), BATCH])
    assert_trees_equal(seen, list(plain.iterate(plain.init_state(key))))


def test_stop_iteration_in_a_sample_does_not_end_the_loop(key):
    def bad(index):
        if index == 7:
            raise StopIteration
        return sample(index)

    loader = ms.DataLoader([ms.DiskSampleSource(SAMPLES, bad), BATCH])
    with refuses(RuntimeError, "raised StopIteration", "sample_fn(7)"):
        list(loader.iterate(loader.init_state(key)))


def test_stop_iteration_in_a_host_map_does_not_end_the_loop_either(key):
    def bad(value):
        return next(iter([])) if int(value["label"]) == 7 else value

    loader = ms.DataLoader([source(), ms.HostMapTransform(bad), BATCH])
    with refuses(RuntimeError, "raised StopIteration", "HostMapTransform(bad) at sample 7"):
        list(loader.iterate(loader.init_state(key)))
    with refuses(ValueError, "HostMapTransform needs readers to be an int from 1 to 4,096"):
        ms.HostMapTransform(bad, readers=0)


def test_a_sample_of_another_shape_dtype_or_structure(key):
    odd = {
        "shape": lambda: {"x": np.zeros(3, np.float32)},
        "dtype": lambda: {"x": np.zeros(2, np.int32)},
        "structure": lambda: {"y": np.zeros(2, np.float32)},
        "range": lambda: {"x": np.zeros(2, np.float32)},
    }
    texts = {
        "shape": ("sample 7 does not match", "found['x']: shape (3,), float32", "spec['x']:  shape (2,), float32"),
        "dtype": ("sample 7 does not match", "found['x']: shape (2,), int32"),
        "structure": ("sample 7 does not match the structure", "{'y': *}", "{'x': *}"),
    }
    for kind, words in texts.items():
        loader = ms.DataLoader(
            [ms.DiskSampleSource(SAMPLES, lambda i, kind=kind: odd[kind]() if i == 7 else odd["range"]()), BATCH]
        )
        with refuses((TypeError, ValueError), *words):
            list(loader.iterate(loader.init_state(key)))


def test_integers_past_32_bits_in_one_sample(key):
    loader = ms.DataLoader([ms.DiskSampleSource(SAMPLES, lambda i: {"id": i if i != 7 else 2**40}), BATCH])
    with refuses(ValueError, "sample 7['id']", "int64 as int32", str(2**40)):
        list(loader.iterate(loader.init_state(key)))


@pytest.mark.parametrize("shape", [(600,), (30, 40), (40_000,)])
@pytest.mark.parametrize(
    "dtype", ["uint8", "bool", "int16", ">i2", "float16", "bfloat16", "float32", "float64", "complex64"]
)
def test_arrays_are_copied_bit_for_bit_whatever_their_memory_looks_like(dtype, shape):
    values = np.random.default_rng(0).integers(0, 250, (3, *shape)).astype(jnp.dtype(dtype))
    apart = np.repeat(values, 2, axis=-1)[..., ::2]  # every second number in memory
    for rows in (values, apart, np.asfortranarray(values)):
        source = ms.DiskSampleSource(3, lambda index, rows=rows: {"x": rows[index]})
        for order in ("C", "F"):
            out = {"x": np.zeros((3, *shape), values.dtype, order=order)}
            source.read(np.array([2, 0]), jax.tree.map(lambda leaf: leaf[:2], out))
            np.testing.assert_array_equal(out["x"][:2], values[[2, 0]])
            assert not out["x"][2].any()


def test_nan_is_left_alone(key):
    loader = ms.DataLoader([ms.DiskSampleSource(4, lambda i: np.float32(np.nan if i == 2 else i)), BATCH])
    batch, _, _ = loader.next_batch(loader.init_state(key))
    assert np.isnan(batch).sum() == 1


def test_python_objects_are_handed_out_as_lists(key):
    words = [f"word {number}" for number in range(SAMPLES)]
    for stages in (
        [ms.DatasetSource(words)],
        [ms.DiskSampleSource(SAMPLES, lambda index: words[index])],
        [source(), ms.HostMapTransform(lambda value: f"word {int(value['label'])}")],
        [ms.DatasetSource(words), ms.HostMapTransform(str.upper), ms.HostMapTransform(str.lower)],
    ):
        loader, plain = ms.DataLoader([*stages, BATCH]), ms.DataLoader([source(), BATCH])
        assert loader.element_spec() is None
        ours, theirs = loader.iterate(loader.init_state(key), steps=5), plain.iterate(plain.init_state(key), steps=5)
        for (batch, mask), (expected, real) in zip(ours, theirs, strict=True):
            assert mask.tolist() == real.tolist()
            pairs = zip(expected["label"].tolist(), real.tolist(), strict=True)
            assert batch == [f"word {label}" if real else None for label, real in pairs]
        resumed = loader.iterate(ours.state, steps=1)
        assert next(resumed)[0] == loader.next_batch(loader.init_state(key, step=5))[0]


def test_python_objects_are_refused_in_compiled_programs(key):
    found = "these samples are Python objects (sample['caption']: 'a cat' (str))"
    captions = ms.DiskSampleSource(SAMPLES, lambda index: {"caption": "a cat"})
    with refuses(TypeError, "NormalizeImageTransform is compiled", found, "HostMapTransform after the source"):
        ms.DataLoader([captions, BATCH, ms.NormalizeImageTransform()])
    loader = ms.DataLoader([captions, BATCH])
    state = loader.init_state(key)
    with refuses(TypeError, "is compiled", found):
        loader.scan_epoch(state, None, collect)
    with refuses(TypeError, "is compiled", found):
        jax.jit(loader.next_batch)(state)
    with refuses(ValueError, "at least one array"):
        ms.DataLoader([ms.DiskSampleSource(3, lambda index: {}), BATCH])


def test_bad_arguments_of_host_sources():
    with refuses(ValueError, "DiskSampleSource needs length to be an int of at least 1"):
        ms.DiskSampleSource(0, sample)
    with refuses(ValueError, "prefetch_size to be an int"):
        ms.DiskSampleSource(3, sample, prefetch_size=0)
    with refuses(ValueError, "'shuffle' or 'sequential'"):
        ms.DiskSampleSource(3, sample, ordering="random")  # pyright: ignore[reportArgumentType]
    with refuses(TypeError, "sample_fn to be a function"):
        ms.DiskSampleSource(3, "file")  # pyright: ignore[reportArgumentType]
    with refuses(TypeError, "tree of jax.ShapeDtypeStruct"):
        ms.DiskSampleSource(3, sample, sample_spec={"x": 3})
    with refuses(TypeError, "DatasetSource needs an object with a length and [index]"):
        ms.DatasetSource(iter([1, 2]))  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "at least one item"):
        ms.DatasetSource([])
    with refuses(ValueError, "HostArraySource needs leaves with the same, non-zero number of rows"):
        ms.HostArraySource({"a": np.zeros(3), "b": np.zeros(4)})


class Tensor:
    """An array of another library, whose dtypes are words of its own."""

    def __init__(self, values):
        self._values = np.asarray(values)
        self.shape, self.dtype = self._values.shape, "tensor.float32"

    def __array__(self, dtype=None, copy=None):
        return self._values


def test_tensors_of_other_libraries_are_samples(key):
    loader = ms.DataLoader(
        [ms.DatasetSource([Tensor(np.array([i, -i], np.float32)) for i in range(6)]), ms.BatchTransform(6)]
    )
    batch, _ = next(loader.iterate(loader.init_state(key)))
    np.testing.assert_array_equal(np.sort(batch[:, 0]), np.arange(6))


@pytest.mark.parametrize("executor", [ms.InGraph(), ms.Processes(1)], ids=["in graph", "processes"])
@pytest.mark.parametrize("way", ["dataset", "together", "function", "twice", "random", "collate"])
def test_what_merely_can_be_an_array_reaches_host_functions_as_it_is(way, executor, key):
    class Together(list):
        """A dataset that reads several items at once."""

        def __getitems__(self, numbers):
            return [self[number] for number in numbers]

    def read(index):
        return {"image": PIL.Image.new("L", (3, 2), index), "label": index}

    def pixels(value, rng=None):
        return {"pixel": np.int32(value["image"].getpixel((0, 0))), "label": value["label"]}

    def smaller(value):
        return {**value, "image": value["image"].resize((2, 2))}

    def collate(values):
        return {name: np.array([pixels(value)[name] for value in values]) for name in ("pixel", "label")}

    batch, images = ms.BatchTransform(3), [read(index) for index in range(6)]
    stages = {
        "dataset": [ms.DatasetSource(images), ms.HostMapTransform(pixels), batch],
        "together": [ms.DatasetSource(Together(images)), ms.HostMapTransform(pixels), batch],
        "function": [ms.DiskSampleSource(6, read), ms.HostMapTransform(pixels), batch],
        "twice": [ms.DiskSampleSource(6, read), ms.HostMapTransform(smaller), ms.HostMapTransform(pixels), batch],
        "random": [ms.DiskSampleSource(6, read), ms.RandomHostMapTransform(pixels), batch],
        "collate": [ms.DiskSampleSource(6, read), ms.BatchTransform(3, collate=collate)],
    }[way]
    loader = ms.DataLoader(stages, executor=executor)
    batches = [batch for batch, _ in loader.iterate(loader.init_state(key))]
    assert sorted(int(label) for batch in batches for label in batch["label"]) == list(range(6))
    for found in batches:
        np.testing.assert_array_equal(found["pixel"], found["label"])


def test_an_image_without_a_host_function_becomes_an_array_of_the_batch(key):
    images = [PIL.Image.new("RGB", (3, 2), (index, 0, 0)) for index in range(4)]
    loader = ms.DataLoader([ms.DatasetSource(images, ordering="sequential"), ms.BatchTransform(4)])
    batch, _ = next(loader.iterate(loader.init_state(key)))
    assert (batch.shape, batch.dtype) == ((4, 2, 3, 3), np.uint8)
    np.testing.assert_array_equal(batch[:, 0, 0, 0], np.arange(4))


def test_arrays_and_numbers_reach_host_functions_in_the_dtypes_of_the_source(key):
    seen = []
    data = {"a": np.arange(8).reshape(4, 2), "b": np.ones(4), "c": np.arange(4)}
    rows = [{name: column[row] for name, column in data.items()} for row in range(4)]
    for made in (ms.DatasetSource(rows), ms.HostArraySource(data)):
        see = ms.HostMapTransform(lambda value: seen.append(value) or value)
        ms.DataLoader([made, see, ms.BatchTransform(4)])
        assert [leaf.dtype for leaf in seen[-1].values()] == [np.int64, np.float64, np.int64]


def test_datasets_that_read_many_items_at_once_are_asked_for_many(key):
    asked = []

    class Batched:
        def __len__(self):
            return SAMPLES

        def __getitem__(self, index):
            raise AssertionError("one by one")

        def __getitems__(self, numbers):
            asked.append(len(numbers))
            return [sample(number) for number in numbers]

    loader = ms.DataLoader([ms.DatasetSource(Batched(), readers=1), BATCH])
    seen = [label for pair in loader.iterate(loader.init_state(key)) for label in labels(*pair)]
    assert sorted(seen) == list(range(SAMPLES))
    assert max(asked) == 4


def test_an_item_that_fails_is_named(key):
    loader = ms.DataLoader([ms.DatasetSource({i: np.int32(i) for i in range(5)}), ms.BatchTransform(5)])
    del loader._source.source.dataset[3]
    loader._source.source.dataset[9] = np.int32(0)
    with refuses(KeyError, "dict[3]"):
        next(loader.iterate(loader.init_state(key)))


def test_memory_mapped_files_are_read_row_by_row(tmp_path, key):
    np.save(tmp_path / "rows.npy", np.arange(40, dtype=np.int64).reshape(20, 2))
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    loader = ms.DataLoader([ms.HostArraySource(mapped, ordering="sequential"), ms.BatchTransform(5)])
    rows = np.concatenate([batch for batch, _ in loader.iterate(loader.init_state(key))])
    assert rows.dtype == np.int32
    np.testing.assert_array_equal(rows, mapped)


def test_a_host_map_works_on_samples_where_they_are_read(key):
    calls = []

    def strings_and_all(value):
        calls.append(threading.current_thread().name)
        return {"length": len(str(int(value["label"]))), "label": value["label"]}

    loader = ms.DataLoader([source(), ms.HostMapTransform(strings_and_all), BATCH])
    for batch, mask in loader.iterate(loader.init_state(key)):
        expected = [len(str(label)) for label in labels(batch, mask)]
        assert np.asarray(batch["length"])[np.asarray(mask)].tolist() == expected


def test_host_maps_stack_and_name_the_sample_that_fails(key):
    def halve(value):
        return 100 // int(value) if int(value) != 3 else 1 // 0

    numbers = ms.ArraySampleSource(np.arange(1, 9))
    loader = ms.DataLoader([numbers, ms.HostMapTransform(lambda value: value), ms.HostMapTransform(halve), BATCH])
    with refuses(ZeroDivisionError, "HostMapTransform(halve) at sample 2"):
        list(loader.iterate(loader.init_state(key)))


def test_a_host_map_behind_compiled_stages():
    with refuses(TypeError, "comes after the source and before all compiled stages"):
        ms.DataLoader([source(), BATCH, ms.HostMapTransform(lambda value: value)])
    with refuses(TypeError, "HostMapTransform needs fn to be a function"):
        ms.HostMapTransform(3)  # pyright: ignore[reportArgumentType]


def test_a_callback_sees_every_batch_in_order_and_may_replace_it(key):
    seen = []

    def look(batch, mask):
        assert isinstance(batch["label"], np.ndarray) and isinstance(mask, np.ndarray)
        seen.append(labels(batch, mask))

    plain = ms.DataLoader([source(), BATCH])
    loader = ms.DataLoader([source(), BATCH, ms.transforms.HostCallbackTransform(look)])
    expected = [labels(*pair) for pair in plain.iterate(plain.init_state(key))]
    for number, _ in enumerate(loader.iterate(loader.init_state(key)), 1):
        assert seen == expected[:number]  # not a batch ahead
    seen.clear()
    loader.scan_epoch(loader.init_state(key), None, collect)
    assert seen == expected


def test_a_callback_may_change_shapes_if_it_says_so(key):
    spec = {"sum": jax.ShapeDtypeStruct((), np.int32)}

    def add(batch, mask):
        return {"sum": batch["label"][mask].sum()}

    loader = ms.DataLoader([source(), BATCH, ms.transforms.HostCallbackTransform(add, element_spec_override=spec)])
    total = sum(int(batch["sum"]) for batch, _ in loader.iterate(loader.init_state(key)))
    assert total == SAMPLES * (SAMPLES - 1) // 2
    wrong = ms.transforms.HostCallbackTransform(add, element_spec_override=(1, "a"))
    with pytest.raises(TypeError, match=r"HostCallbackTransform\(add\): element_spec_override needs arrays"):
        ms.DataLoader([source(), BATCH, wrong])


def test_what_a_callback_raises_or_returns_wrongly(key):
    def fail(batch, mask):
        raise LookupError("as it was")

    def shrink(batch, mask):
        return {**batch, "label": batch["label"][:2]}

    for function, kind, words in (
        (fail, LookupError, ("as it was",)),
        (shrink, ValueError, ("HostCallbackTransform(shrink)", "the result does not match", "shape (2,), int32")),
    ):
        loader = ms.DataLoader([source(), BATCH, ms.transforms.HostCallbackTransform(function)])
        state = loader.init_state(key)
        with refuses(kind, *words):
            next(loader.iterate(state))
        with refuses(kind, *words):
            loader.scan_epoch(state, None, collect)
        with refuses(kind, *words):
            loader.next_batch(state)


def test_a_callback_before_the_batch_sees_each_sample_once_and_in_order(key):
    seen = []

    def look(sample, mask):
        seen.append((int(sample["label"]), mask.shape, bool(mask)))

    def double(sample, mask):
        return {**sample, "label": sample["label"] * 2}

    pipeline = [source(), ms.transforms.HostCallbackTransform(look), ms.transforms.HostCallbackTransform(double), BATCH]
    loader, plain = ms.DataLoader(pipeline), ms.DataLoader([source(), BATCH])
    state = loader.init_state(key)
    batches = [(batch["label"], mask) for batch, mask in loader.iterate(state)]
    expected = [(batch["label"] * 2, mask) for batch, mask in plain.iterate(plain.init_state(key))]
    assert all((a == b).all() and (m == n).all() for (a, m), (b, n) in zip(batches, expected, strict=True))
    order = [int(label) for labels, mask in expected for label in np.asarray(labels)[np.asarray(mask)] // 2]
    assert [label for label, _, _ in seen] == order and len(order) == SAMPLES
    assert {(shape, real) for _, shape, real in seen} == {((), True)}
    seen.clear()
    loader.scan_epoch(state, None, collect)
    assert [label for label, _, _ in seen] == order


def test_a_callback_on_samples_may_change_their_shapes_and_raise(key):
    def halves(sample, mask):
        return {"half": np.float32(sample["label"]) / 2}

    def fail(sample, mask):
        raise LookupError("as it was")

    spec = {"half": jax.ShapeDtypeStruct((), np.float32)}
    loader = ms.DataLoader([source(), ms.transforms.HostCallbackTransform(halves, element_spec_override=spec), BATCH])
    total = sum(float(batch["half"].sum()) for batch, _ in loader.iterate(loader.init_state(key)))
    assert total == SAMPLES * (SAMPLES - 1) / 4
    loader = ms.DataLoader([source(), ms.transforms.HostCallbackTransform(fail), BATCH])
    with refuses(LookupError, "as it was"):
        next(loader.iterate(loader.init_state(key)))


def test_a_stage_of_ones_own_with_effects_says_that_it_sees_whole_batches():
    @dataclasses.dataclass(frozen=True)
    class Effect(ms.Transform):
        effects = True

    with refuses(TypeError, "Effect sees whole batches", "after the BatchTransform"):
        ms.DataLoader([source(), Effect(), BATCH])


def test_threads_end_with_the_iterator(key):
    before = len(reader_threads())
    loader = ms.DataLoader([ms.DiskSampleSource(SAMPLES, sample), BATCH])
    state = loader.init_state(key)
    for _ in loader.iterate(state):
        pass
    with loader.iterate(state) as batches:
        next(batches)
    abandoned = loader.iterate(state)
    next(abandoned)
    del abandoned, batches
    gc.collect()
    deadline = time.monotonic() + 120
    while len(reader_threads()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(reader_threads()) <= before  # those of earlier tests may have ended, too


def test_a_reader_that_never_answers_is_an_error(key, monkeypatch):
    monkeypatch.setattr(ms.reading.settings, "stall_seconds", 0.3)
    answer = threading.Event()

    def stuck(index):
        answer.wait(10)
        return {"x": np.int32(index)}

    spec = {"x": jax.ShapeDtypeStruct((), np.int32)}
    loader = ms.DataLoader([ms.DiskSampleSource(SAMPLES, stuck, sample_spec=spec), BATCH])
    try:
        with refuses(ms.errors.WorkerStalled, "DiskSampleSource has been reading for 0 s", "sample", "answer.wait(10)"):
            next(loader.iterate(loader.init_state(key)))
    finally:
        answer.set()


def test_a_stream_in_any_order_is_stalled_as_soon_as_one_in_order(monkeypatch):
    monkeypatch.setattr(ms.reading.settings, "warn_seconds", 0.05)
    answer = threading.Event()
    source = ms.DiskSampleSource(8, lambda index: np.int32(answer.wait(10)), sample_spec=np.int32(0))
    readers = ThreadBackend(source, Layout((4,), ((),), (np.dtype(np.int32),)), 1, 1, timeout=0.2)
    jobs = [readers.start(Request(step, np.arange(4), np.ones(4, bool))) for step in range(2)]
    with (
        pytest.warns(UserWarning, match="DiskSampleSource has been at a batch for 0 s. It is at sample 0"),
        refuses(ms.errors.WorkerStalled, "DiskSampleSource has been reading for 0 s", "sample 0", "answer.wait(10)"),
    ):
        readers.first_of(jobs)
    readers.close()
    answer.set()


def test_a_reader_that_sleeps_does_not_keep_the_interpreter(tmp_path):
    script = """
        import time, numpy as np, jax, millstream as ms
        def sleepy(index):
            time.sleep(600 if index > 4 else 0.01)
            return np.int32(index)
        loader = ms.DataLoader([ms.DiskSampleSource(100, sleepy, ordering="sequential"), ms.BatchTransform(2)])
        print(next(loader.iterate(loader.init_state(jax.random.key(0))))[0])
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env=dict(os.environ),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0 1]\n", "")


def test_a_jitted_epoch_over_files_under_the_users_own_jit(key):
    loader = ms.DataLoader([ms.DiskSampleSource(SAMPLES, sample), BATCH])

    @jax.jit
    def epoch(state):
        return loader.scan_epoch(state, jnp.int32(0), lambda total, batch, mask: (total + batch["label"].sum(), None))

    state, total, _ = epoch(loader.init_state(key))
    assert int(total) == SAMPLES * (SAMPLES - 1) // 2
    assert int(state.step) == loader.steps_per_epoch


def test_data_read_in_the_graph_are_those_of_arrays(key):
    loader = ms.DataLoader([ms.HostArraySource(data()), BATCH])
    plain = ms.DataLoader([source(), BATCH])
    ours = loader.scan_epoch(loader.init_state(key), None, collect)[2]
    theirs = plain.scan_epoch(plain.init_state(key), None, collect)[2]
    assert_trees_equal(ours, theirs)


class Numbers:
    """A source of the user's own, which is read by its `read`."""

    ordering = "sequential"
    arrays = None

    def __init__(self, read):
        self.made = read

    def __len__(self):
        return SAMPLES

    def spec(self):
        return {"x": jax.ShapeDtypeStruct((), np.int32)}

    def read(self, indices, out=None):
        return {"x": self.made(indices)}


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda indices: indices + (1 << 32), ("JAX keeps int64 as int32", "from 4294967296 to")),
        (lambda indices: indices + 0.5, ("found['x']", "float64", "spec['x']", "int32")),
        (lambda indices: np.zeros(1, np.int32), ("found['x']: shape (1,), int32", f"shape ({BATCH.batch_size},)")),
    ],
    ids=["too large", "no integers", "too few rows"],
)
def test_rows_that_would_be_changed_by_writing_them_are_refused(read, words, key):
    loader = ms.DataLoader([Numbers(read), BATCH])
    with refuses(ValueError, "Numbers", *words):
        next(loader.iterate(loader.init_state(key)))


def test_a_source_of_the_users_own_may_give_wide_integers_that_fit(key):
    loader = ms.DataLoader([Numbers(lambda indices: indices), BATCH])
    batch, mask = next(loader.iterate(loader.init_state(key)))
    assert batch["x"].dtype == np.int32
    assert np.asarray(batch["x"])[np.asarray(mask)].tolist() == list(range(len(mask)))


@pytest.mark.parametrize(("first", "later"), [(np.int64, np.float64), (np.float32, np.int64)])
def test_a_collate_function_that_changes_its_mind_on_the_dtype_is_an_error(first, later, key):
    dtypes = iter([first])

    def collate(samples):
        return {"x": np.array(samples, next(dtypes, later))}

    loader = ms.DataLoader([ms.DiskSampleSource(SAMPLES, np.int32), ms.BatchTransform(4, collate=collate)])
    with refuses(
        ValueError, "collate function collate", "found['x']: shape (4,), " + np.dtype(later).name, "spec['x']"
    ):
        next(loader.iterate(loader.init_state(key)))


@pytest.mark.parametrize("dtype", [">i2", ">u4", ">f4", ">i8"])
@pytest.mark.parametrize("kind", [ms.ArraySampleSource, ms.HostArraySource])
def test_arrays_of_the_other_byte_order_are_read(dtype, kind, key):
    loader = ms.DataLoader([kind({"x": np.arange(6, dtype=dtype)}, ordering="sequential"), ms.BatchTransform(6)])
    batch, _ = next(loader.iterate(loader.init_state(key)))
    assert batch["x"].dtype.kind == np.dtype(dtype).kind
    assert batch["x"].tolist() == list(range(6))


def test_samples_of_the_other_byte_order_are_read(key):
    source = ms.DiskSampleSource(6, lambda index: {"x": np.array(index, ">i2")}, ordering="sequential")
    loader = ms.DataLoader([source, ms.BatchTransform(6)])
    batch, _ = next(loader.iterate(loader.init_state(key)))
    assert batch["x"].dtype == np.int16
    assert batch["x"].tolist() == list(range(6))


@pytest.mark.parametrize("lazy", [False, True])
def test_the_memory_of_batches_that_fail_is_used_again(lazy):
    def fail(index):
        raise OSError("no disk")

    source = ms.DiskSampleSource(4, fail, sample_spec=jax.ShapeDtypeStruct((), np.int32))
    readers = ThreadBackend(source, Layout((4,), ((),), (np.dtype(np.int32),)), 2, 0)
    before = readers.nbytes
    for step in range(20):
        request = Request(step, np.arange(4), np.ones(4, bool))
        with pytest.raises(OSError, match="no disk"):
            readers.collect((readers.prepare if lazy else readers.start)(request))
    readers.close()
    assert readers.nbytes <= 2 * before


def wait_and_close(loader, key, has_begun, go_on):
    """What a thread gets that waits for a batch while another one closes the iterator."""
    batches, found = loader.iterate(loader.init_state(key)), []

    def wait():
        try:
            found.append(next(batches))
        except Exception as error:
            found.append(error)

    waiting, closing = threading.Thread(target=wait), threading.Thread(target=batches.close)
    waiting.start()
    deadline = time.monotonic() + 120
    while not has_begun() and time.monotonic() < deadline:
        time.sleep(0.01)
    closing.start()
    closing.join(120)
    ended = not closing.is_alive()
    go_on()
    waiting.join(120)
    assert ended and not waiting.is_alive()
    return found[0]


@pytest.mark.parametrize("ordered", [True, False])
def test_closing_ends_the_waiting_of_another_thread_for_threads(ordered, key):
    answer, begun = threading.Event(), threading.Event()

    def slow(index):
        begun.set()
        answer.wait(600)
        return np.int32(index)

    source = ms.DiskSampleSource(64, slow, sample_spec=jax.ShapeDtypeStruct((), np.int32))
    loader = ms.DataLoader([source, ms.BatchTransform(16)], executor=ms.Threads(2, ordered=ordered))
    # The samples that are being read come to an end. Those after them are never begun.
    with refuses(RuntimeError, "reading threads", "have been ended", "loader.iterate"):
        raise wait_and_close(loader, key, begun.is_set, answer.set)


@pytest.mark.parametrize("ordered", [True, False])
def test_closing_ends_the_waiting_of_another_thread_for_processes(ordered, key, tmp_path):
    mark = tmp_path / "begun"

    def slow(index):
        mark.touch()
        time.sleep(600)

    source = ms.DiskSampleSource(64, slow, sample_spec=jax.ShapeDtypeStruct((), np.int32))
    loader = ms.DataLoader([source, ms.BatchTransform(16)], executor=ms.Processes(1, ordered=ordered))
    with refuses(RuntimeError, "worker processes", "have been ended", "loader.iterate"):
        raise wait_and_close(loader, key, mark.exists, lambda: None)


def test_a_slow_batch_is_warned_about_once(monkeypatch):
    monkeypatch.setattr(ms.reading.settings, "warn_seconds", 0.05)
    source = ms.DiskSampleSource(8, lambda index: time.sleep(0.1) or np.int32(index), sample_spec=np.int32(0))
    readers = ThreadBackend(source, Layout((8,), ((),), (np.dtype(np.int32),)), 2, 0)
    job = readers.start(Request(0, np.arange(8), np.ones(8, bool)))
    with pytest.warns(UserWarning, match="DiskSampleSource has been at a batch for") as warned:
        readers.collect(job)
    readers.close()
    assert len(warned) == 1


@pytest.mark.parametrize("executor", [None, ms.Threads(2)], ids=["in memory", "threads"])
def test_a_batch_whose_stage_raised_is_drawn_again(executor, key):
    calls = []

    def once_wrong(batch, mask):
        calls.append(1)
        if len(calls) == 2:
            raise OSError("the disk is away")
        return batch

    source = ms.ArraySampleSource({"x": np.arange(12, dtype=np.int32)}, ordering="sequential")
    loader = ms.DataLoader(
        [source, ms.BatchTransform(4), ms.transforms.HostCallbackTransform(once_wrong)], executor=executor, prefetch=0
    )
    batches = loader.iterate(loader.init_state(key))
    assert next(batches)[0]["x"].tolist() == [0, 1, 2, 3]
    with pytest.raises(OSError, match="the disk is away"):
        next(batches)
    assert int(batches.state.step) == 1
    assert [batch["x"].tolist() for batch, _ in batches] == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_all_doors_of_a_loader_share_its_workers(key):
    loader = ms.DataLoader([ms.DiskSampleSource(12, np.int32), ms.BatchTransform(4)], executor=ms.Processes(2))
    state, found = loader.init_state(key), []

    def workers():
        return tuple(loader._feed.reader._backend.processes)  # pyright: ignore[reportAttributeAccessIssue]

    with loader:
        assert len(list(loader.iterate(state))) == 3
        found.append(workers())
        loader.next_batch(state)
        found.append(workers())
        loader.scan_epoch(state, 0, _add_up)
        found.append(workers())
        with loader.iterate(state) as one, loader.iterate(state) as other:
            assert next(one)[0].tolist() == next(other)[0].tolist()
            found.append(workers())
        assert len(set(found)) == 1 and len(found[0]) == 2
        assert loader.stats().batches == 3 + 1 + 3 + 2
    assert loader._feed.reader._backend.closed  # pyright: ignore


@pytest.mark.parametrize("executor", [None, ms.Threads(2)], ids=["in memory", "threads"])
def test_batches_of_all_doors_are_counted_by_the_loader_that_made_them(executor, key):
    stages = [ms.ArraySampleSource(np.arange(12, dtype=np.int32)), ms.BatchTransform(4)]
    loaders = [ms.DataLoader(stages, executor=executor) for _ in range(2)]  # they share a reader
    state = loaders[0].init_state(key)
    for loader, doors in zip(loaders, (1, 2), strict=True):
        for _ in range(doors):
            assert len(list(loader.iterate(state))) == 3
            loader.next_batch(state)
            loader.scan_epoch(state, 0, _add_up)
            loader.run_steps(state, 0, _add_up, 2, width=3)
    assert [loader.stats().batches for loader in loaders] == [9, 18]


def _add_up(total, batch, mask):
    return total + batch.sum(), None


RAGGED = [{"ids": np.arange(index % 5 + 1), "label": index} for index in range(20)]


@pytest.mark.parametrize("executor", [None, ms.Threads(2), ms.Processes(2)], ids=str)
@pytest.mark.parametrize("source", [ms.DatasetSource, lambda rows: ms.DiskSampleSource(20, rows.__getitem__)])
def test_samples_may_have_any_shape_until_a_function_makes_them_equal(source, executor, key):
    def pad(sample):  # local functions go to workers by value: these need neither this module nor JAX
        return {"ids": np.pad(sample["ids"], (0, 8 - len(sample["ids"]))), "label": sample["label"]}

    def pad_all(samples):
        return {name: np.stack([pad(sample)[name] for sample in samples]) for name in ("ids", "label")}

    for stages in ([ms.HostMapTransform(pad), ms.BatchTransform(4)], [ms.BatchTransform(4, collate=pad_all)]):
        loader = ms.DataLoader([source(RAGGED), *stages], executor=executor)
        for batch, _, info in loader.iterate(loader.init_state(key), with_info=True):
            for ids, label, index in zip(batch["ids"], batch["label"], info.indices.tolist(), strict=True):
                assert ids.tolist() == pad(RAGGED[index])["ids"].tolist() and label == index


def test_functions_get_copies(key):
    rows = [{"x": np.zeros(index + 1)} for index in range(4)]

    def change(sample):
        sample["x"] += 1
        return {"sum": sample["x"].sum()}

    loader = ms.DataLoader([ms.DatasetSource(rows, "sequential"), ms.HostMapTransform(change), ms.BatchTransform(4)])
    for _ in range(2):
        batch, _ = next(loader.iterate(loader.init_state(key)))
        assert batch["sum"].tolist() == [1, 2, 3, 4]
    assert not any(row["x"].any() for row in rows)


def test_the_error_of_the_first_sample_is_told_also_if_a_later_one_raises_first():
    def read(index):
        raise ValueError(f"sample {index}")

    source = ms.DiskSampleSource(4, read, sample_spec=np.int32(0))
    readers = ThreadBackend(source, Layout((2,), ((),), (np.dtype(np.int32),)), 2, 0)
    job = readers.prepare(Request(0, np.arange(2), np.ones(2, bool)))
    job.started, job.left = True, 2
    readers._work._read(job, 1, 2)
    readers._work._read(job, 0, 1)  # whose thread has waited
    with pytest.raises(ValueError, match="sample 0"):
        readers.collect(job)
    readers.close()
