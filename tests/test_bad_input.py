"""Bad input is refused when a thing is built, in words that name it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipelines import BATCH, Echo, data, source

import millstream as ms
from millstream.checkpoints import CheckpointStore


def refuses(kind, *words):
    """Expect an error of this kind that says all of these words, notes included."""

    class Check:
        def __enter__(self):
            return self

        def __exit__(self, found, error, trace):
            assert found is not None, "nothing was refused"
            assert issubclass(found, kind), error
            text = "\n".join([str(error), *getattr(error, "__notes__", [])])
            missing = [word for word in words if word not in text]
            assert not missing, f"{missing} not in:\n{text}"
            return True

    return Check()


class Nameless:
    """An object that cannot be shown."""

    def __repr__(self):
        raise RuntimeError("no repr")


def test_workers_that_cannot_be_shown():
    for executor in (ms.Threads, ms.Processes):
        with refuses(ValueError, executor.__name__, "workers"):
            executor(Nameless())  # pyright: ignore[reportArgumentType]


def test_more_threads_than_a_machine_can_start():
    one = lambda index: {"x": np.float32(index)}  # noqa: E731
    for make in (
        lambda: ms.Threads(2**40),
        lambda: ms.Processes(2**40),
        lambda: ms.DiskSampleSource(4, one, readers=2**40),
        lambda: ms.HostMapTransform(one, readers=2**40),
        lambda: ms.sources.FillSource([1], print, {"x": ((), np.int32)}, readers=2**40),
    ):
        with refuses(ValueError, "from 1 to 4,096. Got 1099511627776 (int)."):
            make()


def test_an_empty_tree():
    with refuses(ValueError, "ArraySampleSource needs at least one array", "empty tree"):
        ms.ArraySampleSource({})


def test_zero_rows():
    with refuses(ValueError, "same, non-zero number of rows", "data['x']: shape (0, 3), float32"):
        ms.ArraySampleSource({"x": np.zeros((0, 3), np.float32)})


def test_ragged_rows_name_each_leaf():
    ragged = {"image": np.zeros((60, 2), np.uint8), "label": [np.zeros(59, np.int32), np.zeros(60, np.int32)]}
    with refuses(
        ValueError,
        "data['image']: shape (60, 2), uint8",
        "data['label'][0]: shape (59,), int32",
        "data['label'][1]: shape (60,), int32",
        "Slice or pad them to one length",
    ):
        ms.ArraySampleSource(ragged)


def test_a_leaf_without_rows():
    with refuses(ValueError, "same, non-zero number of rows", "data['y']: shape (), int32"):
        ms.ArraySampleSource({"x": np.zeros(3, np.int32), "y": np.array(1, np.int32)})


def test_lists_in_place_of_arrays():
    with refuses(TypeError, "ArraySampleSource needs arrays", "data['x'][0]: 1 (int)", "np.asarray"):
        ms.ArraySampleSource({"x": [1, 2, 3]})


@pytest.mark.parametrize(
    "values", [np.array([{}, {}]), np.array(["a", "b"]), np.array(["2026-01-01"], "datetime64[D]")]
)
def test_dtypes_that_are_no_numbers(values):
    with refuses(TypeError, "needs numbers or bools", "data['x']", str(values.dtype), "Encode text, dates and objects"):
        ms.ArraySampleSource({"x": values})


def test_integers_that_jax_would_wrap():
    with refuses(ValueError, "int64 as int32", "3000000000", "jax_enable_x64"):
        ms.ArraySampleSource({"id": np.array([1, 3_000_000_000])})


def managed(batch, **state):
    params = {"w": jnp.ones(2)}
    made = ms.managed.ManagedState.create(params, optax.sgd(0.1), **state)
    step = ms.managed.train_step(lambda state, batch: ms.logs().add_loss("loss", jnp.sum(state.params["w"])))
    return step(made, batch)


@pytest.mark.parametrize(
    "caller, use",
    [
        ("host_to_global_device_array", lambda x, mesh: ms.sharding.host_to_global_device_array(x, mesh=mesh)),
        (
            "host_to_global_device_array",
            lambda x, mesh: ms.sharding.host_to_global_device_array(
                x, mesh=mesh, partition=ms.sharding.DataPartitionType.REPLICATED
            ),
        ),
        ("distribute_global_batch", ms.sharding.distribute_global_batch),
        ("<lambda>", lambda x, mesh: managed(x)),
        ("<lambda>", lambda x, mesh: managed(x, strategy="data_parallel")),
        ("params['n']", lambda x, mesh: ms.managed.ManagedState.create({"n": x["x"]}, optax.sgd(0.1))),
    ],
)
def test_integers_that_jax_would_wrap_are_refused_on_every_way_to_the_device(caller, use):
    with refuses(ValueError, caller, "JAX keeps int64 as int32, but the values run from 1 to 1099511627781", "x64"):
        use({"x": np.array([1, 2**40 + 5])}, jax.make_mesh((1,), ("data",)))


def test_integers_that_fit_are_narrowed():
    assert ms.ArraySampleSource({"id": np.array([1, 2])}).spec()["id"].dtype == np.int32


def test_an_unknown_ordering():
    with refuses(ValueError, "'shuffle' or 'sequential'", "'random' (str)"):
        ms.ArraySampleSource(data(), ordering="random")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "4", None])
def test_a_batch_size_that_is_no_positive_int(size):
    with refuses(ValueError, "BatchTransform needs batch_size to be an int of at least 1", repr(size)):
        ms.BatchTransform(size)


def test_a_flag_that_is_no_bool():
    with refuses(TypeError, "BatchTransform needs drop_last to be a bool", "'yes' (str)"):
        ms.BatchTransform(4, drop_last="yes")  # pyright: ignore[reportArgumentType]


def test_dropping_everything():
    with refuses(ValueError, "would drop everything", "only 11 elements", "at most 11"):
        ms.DataLoader([source(), ms.BatchTransform(12, drop_last=True)])


def test_no_stages():
    with refuses(ValueError, "Got an empty list"):
        ms.DataLoader([])


def test_a_first_stage_that_is_no_source():
    with refuses(TypeError, "A pipeline starts with a source, such as ArraySampleSource(data)", "(dict)"):
        ms.DataLoader([data(), BATCH])  # pyright: ignore[reportArgumentType, reportCallIssue]
    with refuses(TypeError, "A pipeline starts with a source", "BatchTransform"):
        ms.DataLoader([BATCH, source()])
    with refuses(TypeError, "Got the class ArraySampleSource"):
        ms.DataLoader([ms.ArraySampleSource, BATCH])  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_a_stage_that_is_no_transform():
    with refuses(TypeError, "stage 2 is not a transform. Got 4 (int)", "BatchTransform(128)"):
        ms.DataLoader([source(), 4])  # pyright: ignore[reportArgumentType, reportCallIssue]
    with refuses(TypeError, "stage 3 is the class NormalizeImageTransform", "NormalizeImageTransform(...)"):
        ms.DataLoader([source(), BATCH, ms.NormalizeImageTransform])  # pyright: ignore[reportArgumentType, reportCallIssue]
    with refuses(TypeError, "stage 2 is a source (ArraySampleSource)"):
        ms.DataLoader([source(), source()])


def test_a_function_in_place_of_a_map():
    with refuses(TypeError, "stage 3 must return a source", "MapTransform(fn)"):
        ms.DataLoader([source(), BATCH, lambda batch: None])  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_a_map_that_is_no_function():
    with refuses(TypeError, "MapTransform needs fn to be a function", "3 (int)"):
        ms.MapTransform(3)  # pyright: ignore[reportArgumentType]


def test_a_map_that_cannot_be_hashed():
    class Module:
        __hash__ = None  # pyright: ignore[reportAssignmentType]

        def __call__(self, value, mask):
            return value

    with refuses(TypeError, "needs fn to be hashable", "Module is not", "wrap it in a function"):
        ms.MapTransform(Module())


def test_a_map_whose_shape_depends_on_values():
    def keep_bright(value, mask):
        return value["image"][value["image"] > 7]

    with refuses(
        jax.errors.NonConcreteBooleanIndexError,
        "MapTransform(keep_bright)",
        "value['image']: uint8[2, 3, 1]",
        "jnp.where",
    ):
        ms.DataLoader([source(), ms.MapTransform(keep_bright), BATCH])


def test_a_branch_on_values():
    def choose(value, mask):
        return value if value["label"] > 3 else {}

    with refuses(jax.errors.ConcretizationTypeError, "MapTransform(choose)", "no Python branch may depend on values"):
        ms.DataLoader([source(), ms.MapTransform(choose), BATCH])


def test_the_users_own_error_keeps_its_type():
    class Mine(Exception):
        pass

    def fail(value, mask, key):
        raise Mine("as it was")

    with refuses(Mine, "as it was", "RandomMapTransform(fail)", "value['label']: int32[]"):
        ms.DataLoader([source(), ms.RandomMapTransform(fail), BATCH])


def test_keys_that_are_not_there():
    with refuses(KeyError, "NormalizeImageTransform finds no key 'photo'", "It has 'image', 'label'"):
        ms.DataLoader([source(), BATCH, ms.NormalizeImageTransform("photo")])
    with refuses(KeyError, "RenameTransform finds no key 'photo'"):
        ms.DataLoader([source(), ms.RenameTransform({"photo": "image"})])


def test_two_values_with_one_key():
    with refuses(ValueError, "two values the key 'label'"):
        ms.DataLoader([source(), ms.RenameTransform({"image": "label"})])


def test_samples_that_are_no_dicts():
    with refuses(TypeError, "FlattenImageTransform needs samples that are dicts. Got a bare array."):
        ms.DataLoader([ms.ArraySampleSource(np.zeros((3, 2))), ms.FlattenImageTransform()])


def test_bad_arguments_of_small_stages():
    with refuses(TypeError, "RenameTransform needs a mapping of names to names"):
        ms.RenameTransform(["a"])  # pyright: ignore[reportArgumentType]
    with refuses(TypeError, "floating-point dtype"):
        ms.NormalizeImageTransform(dtype=jnp.int32)
    with refuses(ValueError, "scale other than 0"):
        ms.NormalizeImageTransform(scale=0)
    with refuses(TypeError, "DevicePutTransform needs a jax.Device", "5 (int)"):
        ms.DevicePutTransform(5)


@pytest.mark.parametrize("name", ["tpu9", "cpu:99", "cpu:x", "gpu:1"])
def test_a_device_that_is_not_there(name):
    with refuses(ValueError, f"knows no device {name!r}", "This process has cpu:0"):
        ms.DataLoader([source(), BATCH, ms.DevicePutTransform(name)])


def test_bad_arguments_of_the_loader():
    with refuses(TypeError, "an executor: InGraph(), Threads(4) or Processes(4)", "'threads' (str)"):
        ms.DataLoader([source(), BATCH], executor="threads")  # pyright: ignore[reportArgumentType, reportCallIssue]
    with refuses(ValueError, "on_error 'raise', 'skip item' or 'skip batch'", "'ignore' (str)"):
        ms.DataLoader([source(), BATCH], on_error="ignore")  # pyright: ignore[reportArgumentType, reportCallIssue]
    with refuses(TypeError, "cache to be a BatchCache", "'folder' (str)"):
        ms.DataLoader([source(), BATCH], cache="folder")  # pyright: ignore[reportArgumentType, reportCallIssue]
    with refuses(ValueError, "Threads needs workers to be an int from 1 to 4,096", "0 (int)"):
        ms.Threads(0)
    with refuses(ValueError, "Processes needs timeout to be a number of seconds above 0", "-1 (int)"):
        ms.Processes(2, timeout=-1)
    with refuses(TypeError, "Processes needs startup to be a function", "3 (int)"):
        ms.Processes(2, startup=3)  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "prefetch to be an int of at least 0", "-1 (int)"):
        ms.DataLoader([source(), BATCH], prefetch=-1)


def test_a_state_of_another_pipeline_names_what_differs(key):
    small, large = ms.DataLoader([source(), BATCH]), ms.DataLoader([source("sequential"), ms.BatchTransform(5)])
    state = small.init_state(key)
    told = (
        "state of a different pipeline",
        "batches of: 4 (pad) in the state, 5 (pad) here",
        "ordering: shuffle in the state",
    )
    with refuses(ValueError, "next_batch", *told, "init_state(state.key, step=int(state.step))"):
        large.next_batch(state)
    with refuses(ValueError, "iterate", *told):
        large.iterate(state)
    with refuses(ValueError, "scan_epoch", *told):
        large.scan_epoch(state, None, lambda carry, batch, mask: (carry, None))
    with refuses(TypeError, "next_batch needs a state from loader.init_state(key)", "0 (int)"):
        large.next_batch(0)  # pyright: ignore[reportArgumentType]


def test_a_state_of_another_stream(key):
    stream = ms.DataLoader([source(), lambda inner: Echo(inner)])
    with refuses(ValueError, "next_batch got a state of a different pipeline"):
        stream.next_batch(ms.DataLoader([source()]).init_state(key))


@pytest.mark.parametrize("wrong", [0, None, np.zeros(2, np.int32), np.zeros(3, np.uint32), jnp.zeros((), jnp.uint32)])
def test_a_key_that_is_no_key(wrong):
    with refuses(TypeError, "init_state needs a key such as jax.random.key(0)"):
        ms.DataLoader([source(), BATCH]).init_state(wrong)


def test_several_keys_for_one_state(key):
    with refuses(ValueError, "needs one key", "(3,) keys", "jax.vmap(loader.init_state)(keys)"):
        ms.DataLoader([source(), BATCH]).init_state(jax.random.split(key, 3))


def test_steps_out_of_range(key):
    loader = ms.DataLoader([source(), BATCH])
    with refuses(ValueError, "steps to be an int of at least 0", "-1 (int)"):
        loader.iterate(loader.init_state(key), steps=-1)
    with refuses(ValueError, "init_state needs step to be an int from 0 to 4,294,967,294. Got -1 (int)."):
        loader.init_state(key, step=-1)
    with refuses(ValueError, "iterate can reach step 4,294,967,295, not 4,294,967,298"):
        loader.iterate(loader.init_state(key, step=2**32 - 2), steps=4)
    with refuses(ValueError, "can start only indexed sources at step 3"):
        ms.DataLoader([source(), lambda inner: Echo(inner)]).init_state(key, step=3)


def joined_loaders():
    plain = ms.DataLoader([source(), BATCH])
    return {
        "in memory": plain,
        "read on the host": ms.DataLoader([ms.HostArraySource({"x": np.arange(20)}), BATCH]),
        "mixed": ms.loader.MixedLoader({"a": plain, "b": plain}),
    }


NO_STEPS = [1.9999999, "3", True, None, np.nan, np.float64(1), np.bool_(True), np.array([1, 2]), jnp.float32(2.7), -1]
NO_STEPS += [jnp.int32(-1), np.int64(-5), 2**32 - 1, np.uint64(2**40), jax.random.key(0)]


@pytest.mark.parametrize("name", ["in memory", "read on the host", "mixed"])
def test_only_integers_are_steps(name, key):
    loader = joined_loaders()[name]
    for step in (3, np.int64(3), np.uint8(3), np.array(3), jnp.int32(3)):
        assert int(loader.init_state(key, step=step).step) == 3
    assert int(jax.jit(lambda step: loader.init_state(key, step).step)(3)) == 3
    state = loader.init_state(key)
    for step in NO_STEPS:
        with refuses(ValueError, "init_state needs step to be an int from 0 to ", ". Got "):
            loader.init_state(key, step=step)
        if not isinstance(step, int) or step < 0:
            with refuses(ValueError, "iterate needs step to be an int from 0 to ", ". Got "):
                loader.iterate(dataclasses.replace(state, step=step))
    with refuses(TypeError, "iterate needs a key such as jax.random.key(0)", "shape (3,), float32"):
        loader.iterate(dataclasses.replace(state, key=np.zeros(3, np.float32)))


def test_a_state_that_was_changed_after_a_scan(key):
    loader = ms.DataLoader([source(), BATCH])
    state, _, _ = loader.scan_epoch(loader.init_state(key), jnp.int32(0), lambda carry, batch, mask: (carry, None))
    for step in (jnp.float32(2), np.int64(2**40)):
        with refuses(ValueError, "scan_epoch needs step to be an int from 0 to ", ". Got "):
            loader.scan_epoch(dataclasses.replace(state, step=step), jnp.int32(0), lambda carry, *rest: (carry, None))


def test_a_traced_step_that_is_not_an_integer(key):
    loader = ms.DataLoader([source(), BATCH])
    with refuses(ValueError, "init_state needs step to be an int from 0 to"):
        jax.jit(lambda step: loader.init_state(key, step).step)(1.5)


def test_steps_of_streams(key):
    train, stream = (
        ms.loader.TrainStream(ms.DataLoader([source(), BATCH])),
        ms.DataLoader([source(), lambda inner: Echo(inner)]),
    )
    with refuses(ValueError, "iterate needs step to be an int from 0 to 4,294,967,295. Got -1"):
        train.iterate(dataclasses.replace(train.init_state(key), step=jnp.int32(-1)))
    with refuses(ValueError, "init_state needs step to be an int from 0 to"):
        stream.init_state(key, step=False)


def test_a_position_that_get_state_has_not_given(key):
    loader = ms.DataLoader([source(), BATCH])
    batches = loader.iterate(loader.init_state(key))
    saved = batches.get_state()
    for wrong in ({}, None, [], np.zeros(0), {**saved, "origin": 3}, {**saved, "key": None}):
        with refuses(
            TypeError, "set_state needs what get_state has given: a dict with key, step, left and origin. Got "
        ):
            batches.set_state(wrong)  # pyright: ignore[reportArgumentType]
    for step in (-1, 1.5, "3", True, 2**32):
        with refuses(ValueError, "set_state needs step to be an int from 0 to 4,294,967,295."):
            batches.set_state({**saved, "step": step})
    with refuses(ValueError, "set_state needs left to be an int of at least 0. Got -1"):
        batches.set_state({**saved, "left": -1})
    with refuses(ValueError, "set_state needs a key of numbers from 0 to 4,294,967,295. Got [-1, 0]"):
        batches.set_state({**saved, "key": [-1, 0]})
    batches.set_state(saved)
    assert len(list(batches)) == loader.steps_per_epoch


def test_steps_that_can_be_counted_no_further_are_empty_in_programs_and_refused_outside(key):
    last = 2**32 - 2
    for name, loader in joined_loaders().items():
        if name == "mixed":
            continue
        state = loader.init_state(key, step=last)
        step = jax.jit(loader.next_batch)
        _, state, mask = step(state)
        assert (int(state.step), mask.any()) == (last + 1, True)
        _, state, mask = step(state)
        assert (int(state.step), mask.any()) == (last + 1, False)
        with refuses(ValueError, "iterate can reach step 4,294,967,295, not 4,294,967,296"):
            loader.iterate(state, steps=1)
        if name == "read on the host":
            with refuses(ValueError, "next_batch needs step to be an int from 0 to 4,294,967,294. Got 4294967295"):
                loader.next_batch(state)


def test_masked_arrays_are_refused_where_arrays_enter(key):
    masked = np.ma.MaskedArray(np.arange(8.0), np.arange(8) % 2 == 0)
    words = "a masked array (shape (8,), float64) would lose its mask. Fill it, as in array.filled(0), and pass"
    for make in (ms.ArraySampleSource, ms.HostArraySource):
        with refuses(TypeError, f"{make.__name__}: data['x']: ", words):
            make({"x": masked})
    with refuses(TypeError, "DiskSampleSource: sample['x']: ", words):
        ms.DiskSampleSource(4, lambda index: {"x": masked})
    later = ms.DiskSampleSource(4, lambda index: {"x": masked if index == 3 else np.zeros(8)}, ordering="sequential")
    loader = ms.DataLoader([later, BATCH])
    with refuses(TypeError, "sample 3['x']: ", words):
        list(loader.iterate(loader.init_state(key)))
    with refuses(TypeError, words):
        ms.DataLoader([source(), ms.HostMapTransform(lambda value: masked), BATCH])


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_numbers_of_more_than_64_bits_are_refused_when_the_source_is_built(dtype):
    words = f"JAX has no {np.dtype(dtype)}. Convert it, as in array.astype(np.float32)."
    for make in (ms.ArraySampleSource, ms.HostArraySource):
        with refuses(TypeError, "data['x']: ", words):
            make({"x": np.zeros(4, dtype)})
    with refuses(TypeError, "sample: ", words):
        ms.DiskSampleSource(4, lambda index: dtype(index))


def test_a_body_that_is_no_function(key):
    loader = ms.DataLoader([source(), BATCH])
    with refuses(TypeError, "scan_epoch needs body_fn to be a function"):
        loader.scan_epoch(loader.init_state(key), None, None)  # pyright: ignore[reportArgumentType]


def test_more_rows_in_a_batch_than_an_array_can_have():
    with refuses(ValueError, "BatchTransform needs a batch_size of at most 2,147,483,647. Got 1,099,511,627,776."):
        ms.BatchTransform(2**40)


def test_an_unknown_split():
    with refuses(ValueError, "DigitsDataset needs split 'train' or 'test'", "'valid' (str)"):
        ms.datasets.DigitsDataset("valid")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("address", ["s3://", "s3://?SECRET", "gs://:SECRET@", "ftp://", "http://[SECRET"])
def test_an_address_without_a_host_shows_no_secrets(address):
    with pytest.raises(ValueError, match="CsvSource needs the address of a file, such as s3://bucket/name") as caught:
        ms.CsvSource(address)
    assert "SECRET" not in str(caught.value)


class WithoutRepr:
    def __repr__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        (3, TypeError, "Got 3 (int)"),
        (b"run", TypeError, "Got b'run' (bytes)"),
        (WithoutRepr(), TypeError, "Got a value without a repr (WithoutRepr)"),
        ("", ValueError, "Got an empty one; the current folder is '.'"),
        ("a\0b", ValueError, "which has a zero byte in it"),
    ],
)
def test_a_path_that_is_none(wrong, kind, words):
    with refuses(kind, "CsvSource needs a path", words):
        ms.CsvSource(wrong)
    with refuses(kind, "ImageFolderSource needs a path", words):
        ms.ImageFolderSource(wrong)
    with refuses(kind, "checkpoint needs directory to be a path", words):
        ms.checkpoint(wrong)
    with refuses(kind, "restore needs directory to be a path", words):
        ms.restore(wrong, 0)
    with refuses(kind, "MNISTDataset needs cache_dir to be a path", words):
        ms.datasets.MNISTDataset(cache_dir=wrong)


def test_what_restore_cannot_use(tmp_path):
    callback = ms.checkpoint(tmp_path / "run")
    callback(ms.loops.Elapsed(steps=1), 0)
    callback.close()
    with refuses(TypeError, "restore needs loader to be a DataLoader or the like. Got 's3://' (str)."):
        ms.restore(tmp_path / "run", 0, "s3://")  # pyright: ignore[reportArgumentType]
    with refuses(TypeError, "Got tree['state']: shape (1,), <U1", "restore resumes only with a state like the one"):
        ms.restore(tmp_path / "run", np.array(["a"]))
    with refuses(ValueError, "restore needs step to be an int of at least 0. Got -1 (int)."):
        ms.restore(tmp_path / "run", 0, step=-1)
    with refuses(FileNotFoundError, f"restore: {tmp_path / 'run'} has no checkpoint of step 7. It has: [1]."):
        ms.restore(tmp_path / "run", 0, step=7)


def test_what_a_checkpoint_store_cannot_use(tmp_path):
    with refuses(TypeError, "CheckpointStore needs read_only to be a bool. Got 3 (int)."):
        CheckpointStore(tmp_path, read_only=3)  # pyright: ignore[reportArgumentType]
    with CheckpointStore(tmp_path) as store:
        with refuses(TypeError, "CheckpointStore.save needs files to be a dict of bytes by their names. Got 3 (int)."):
            store.save(1, 0, files=3)  # pyright: ignore[reportArgumentType]


def test_what_steps_cannot_carry(key):
    loader = ms.DataLoader([source(), BATCH])
    with refuses(TypeError, "(fuse= or scan_epoch) need leaves that are arrays of numbers", "carry[0]: array(['a']"):
        loader.scan_epoch(loader.init_state(key), [np.array(["a"])], lambda carry, batch, mask: (carry, None))


def test_flags_of_tune_and_verify_and_labels_and_policies():
    loader = ms.DataLoader([source(), BATCH])
    for call in (loader.tune, loader.verify):
        with refuses(TypeError, f"{call.__name__} needs progress to be a bool. Got 3 (int)."):
            call(progress=3)  # pyright: ignore[reportArgumentType]
    assert loader.verify(steps=1, executors=[], hosts=np.zeros(0, int), progress=False)  # pyright: ignore[reportArgumentType]
    with refuses(TypeError, "rich_bar needs desc to be a str. Got 3 (int)."):
        ms.callbacks.rich_bar(desc=3)  # pyright: ignore[reportArgumentType]
    with refuses(TypeError, "RandomMapTransform needs label to be a str. Got 3 (int)."):
        ms.RandomMapTransform(lambda value, mask, key: value, label=3)  # pyright: ignore[reportArgumentType]
    with refuses(TypeError, "loop needs policy to be a function of the state", "array("):
        ms.loop(0, range(3), {}, policy=np.zeros(2))  # pyright: ignore[reportArgumentType]
    with refuses(TypeError, "Raised in batch_size_fn."):
        ms.loop(0, [np.ones(2)], {}, batch_size_fn=int)


def test_what_is_no_sharding():
    with refuses(TypeError, "shard_count needs sharding to be a NamedSharding", "3 (int)"):
        ms.sharding.shard_count(3)  # pyright: ignore[reportArgumentType]
    with refuses(TypeError, "batch_axes needs sharding to be a NamedSharding", "3 (int)"):
        ms.sharding.batch_axes(3)  # pyright: ignore[reportArgumentType]


def test_a_scale_that_is_no_number():
    with refuses(TypeError, "NormalizeImageTransform needs scale to be a finite number", "set() (set)"):
        ms.NormalizeImageTransform(scale=set())  # pyright: ignore[reportArgumentType]
