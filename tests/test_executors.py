"""The same batches from threads and from worker processes, in memory that is used again."""

import collections
import concurrent.futures
import functools
import gc
import re
import sys
import threading
import time

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pipelines
import pytest
from conftest import assert_trees_equal
from pipelines import BATCH, PIPELINES, SAMPLES, data, sample, source
from test_bad_input import refuses

import millstream as ms
from millstream.pipeline.pipeline import as_stream
from millstream.reading import batch_holders
from millstream.reading.reader import Reader, reader_of
from millstream.reading.slots import Layout, Slots

pytestmark = pytest.mark.optimized

cloudpickle.register_pickle_by_value(pipelines)  # so that workers do not import it, and JAX with it

IN_THREADS = [  # each compiles again, so not all of them
    *(
        "samples",
        "sequential",
        "drop",
        "larger than the data",
        "map between",
        "random map after",
        "random map, wrapped",
    ),
    *("device put", "host arrays", "host function", "host fill", "host random map", "host, batch of batches"),
    *("host callback", "time series", "repeated order", "first epoch in sequence"),
]
IN_PROCESSES = [
    "pad",
    "wrap",
    "batch of batches",
    "random map before",
    "host map",
    "host dataset",
    "shuffled batchwise",
]


def epochs(loader, key, steps=None):
    steps = 2 * loader.steps_per_epoch + 1 if steps is None else steps
    return [jax.device_get(pair) for pair in loader.iterate(loader.init_state(key), steps=steps)]


@pytest.mark.parametrize("name", IN_THREADS)
def test_threads_give_the_batches_of_the_compiled_pipeline(name, key):
    expected = epochs(ms.DataLoader(PIPELINES[name]()), key)
    loader = ms.DataLoader(PIPELINES[name](), executor=ms.Threads(3), prefetch=2)
    assert_trees_equal(epochs(loader, key), expected)


@pytest.mark.parametrize("name", IN_PROCESSES)
def test_processes_give_the_batches_of_the_compiled_pipeline(name, key):
    expected = epochs(ms.DataLoader(PIPELINES[name]()), key)
    loader = ms.DataLoader(PIPELINES[name](), executor=ms.Processes(2), prefetch=2)
    assert_trees_equal(epochs(loader, key), expected)


def test_a_state_goes_from_one_executor_to_the_next(key):
    plain = ms.DataLoader([source(), BATCH])
    expected = epochs(plain, key, 8)
    state, seen = plain.init_state(key), []
    for executor in (None, ms.Threads(2), ms.Processes(1), ms.Threads(1)):
        loader = ms.DataLoader([source(), BATCH], executor=executor)
        batches = loader.iterate(state, steps=2)
        seen += [jax.device_get(pair) for pair in batches]
        state = batches.state
    assert_trees_equal(seen, expected)


@pytest.mark.parametrize("executor", [ms.Threads(2), ms.Processes(1)])
def test_stepping_and_scanning_read_through_the_executor(executor, key):
    loader = ms.DataLoader([source(), BATCH, ms.MapTransform(pipelines.halve)], executor=executor)
    expected = epochs(loader, key, loader.steps_per_epoch)
    with loader:
        state = loader.init_state(key)
        _, _, scanned = loader.scan_epoch(state, None, lambda carry, batch, mask: (carry, (batch, mask)))
        for number, pair in enumerate(expected):
            batch, state, mask = loader.next_batch(state)
            assert_trees_equal(jax.device_get((batch, mask)), pair)
            assert_trees_equal(jax.tree.map(lambda leaf, number=number: np.asarray(leaf)[number], scanned), pair)


def test_order_does_not_depend_on_workers_prefetch_or_delays(key):
    """Three hundred streams, each with delays of its own, against the compiled pipeline."""
    loader = ms.DataLoader([source(), BATCH])
    expected = [pair[0]["label"] for pair in epochs(loader, key, loader.steps_per_epoch)]
    random, delays = np.random.default_rng(0), [0.0] * SAMPLES

    def slow(index):
        time.sleep(delays[index])
        return sample(index)

    reading = ms.DiskSampleSource(SAMPLES, slow, sample_spec=source().spec())
    for _ in range(12):
        executor = ms.Threads(int(random.integers(1, 9)))
        loader = ms.DataLoader([reading, BATCH], executor=executor, prefetch=int(random.integers(0, 8)))
        for _ in range(25):
            delays[:] = random.exponential(0.0002, SAMPLES).tolist()
            np.testing.assert_array_equal([batch["label"] for batch, _ in epochs(loader, key, len(expected))], expected)


@pytest.mark.parametrize("make", [ms.Threads, ms.Processes])
def test_whichever_comes_first_still_brings_every_sample_once(make, key):
    def uneven(index):
        time.sleep(0.03 if index % 7 == 0 else 0.0)
        return {"x": np.int32(index)}

    loader = ms.DataLoader([ms.DiskSampleSource(60, uneven), ms.BatchTransform(4)], executor=make(3, ordered=False))
    ordered = ms.DataLoader([ms.DiskSampleSource(60, uneven), ms.BatchTransform(4)])
    infos, seen = [], []
    with loader.iterate(loader.init_state(key), with_info=True) as batches:
        for batch, _, info in batches:
            infos.append(info.step)
            seen += batch["x"].tolist()
            assert batch["x"].tolist() == info.indices.tolist()
    assert sorted(seen) == list(range(60))
    assert sorted(infos) == list(range(15))
    assert infos != list(range(15))
    assert int(batches.state.step) == 15
    first = next(ordered.iterate(ordered.init_state(key)))[0]["x"]
    assert first.tolist() in [seen[4 * place : 4 * place + 4] for place in range(15)]


def test_a_position_that_is_not_exact_is_not_given(key):
    def uneven(index):
        time.sleep(0.2 if index == first else 0.0)
        return {"x": np.int32(index)}

    plain = ms.DataLoader([ms.HostArraySource({"x": np.arange(40, dtype=np.int32)}), ms.BatchTransform(4)])
    first = int(next(plain.iterate(plain.init_state(key)))[0]["x"][0])
    spec = {"x": jax.ShapeDtypeStruct((), np.int32)}
    loader = ms.DataLoader(
        [ms.DiskSampleSource(40, uneven, spec), ms.BatchTransform(4)], executor=ms.Threads(2, ordered=False)
    )
    batches = loader.iterate(loader.init_state(key))
    next(batches)
    with refuses(RuntimeError, "batches have overtaken", "ordered=True"):
        batches.state  # noqa: B018
    list(batches)
    assert int(batches.state.step) == loader.steps_per_epoch


def test_several_threads_share_a_slow_batch(key):
    together = threading.Barrier(4, timeout=120)

    def meet(index):
        together.wait()  # continues when four samples of the batch are being read at once
        return {"x": np.int32(index)}

    spec = {"x": jax.ShapeDtypeStruct((), np.int32)}
    reading = ms.DiskSampleSource(32, meet, spec)
    loader = ms.DataLoader([reading, ms.BatchTransform(32)], executor=ms.Threads(4), prefetch=0)
    batch, _ = next(loader.iterate(loader.init_state(key)))
    assert sorted(batch["x"].tolist()) == list(range(32))


def test_workers_have_no_jax_and_know_what_they_are(key):
    def look(index):
        return {
            "jax": np.bool_("jax" in sys.modules or "jaxlib" in sys.modules),
            "worker": np.bool_(ms.reading.is_worker()),
        }

    spec = {name: jax.ShapeDtypeStruct((), bool) for name in ("jax", "worker")}
    loader = ms.DataLoader([ms.DiskSampleSource(8, look, spec), ms.BatchTransform(4)], executor=ms.Processes(2))
    for batch, _ in loader.iterate(loader.init_state(key)):
        assert not batch["jax"].any() and batch["worker"].all()
    assert not ms.reading.is_worker()


def test_startup_runs_once_in_each_worker_before_it_reads(key):
    def startup():
        import os

        os.environ["STARTED"] = os.environ.get("STARTED", "") + "x"

    def look(index):
        import os

        return {"started": np.int32(len(os.environ.get("STARTED", ""))), "nice": np.int32(os.nice(0))}

    spec = {name: jax.ShapeDtypeStruct((), np.int32) for name in ("started", "nice")}
    loader = ms.DataLoader(
        [ms.DiskSampleSource(8, look, spec), ms.BatchTransform(2)], executor=ms.Processes(2, startup=startup, nice=3)
    )
    for batch, _ in loader.iterate(loader.init_state(key)):
        assert batch["started"].tolist() == [1, 1] and (batch["nice"] >= 3).all()


@pytest.mark.parametrize("executor", [None, ms.Threads(2), ms.Processes(1)])
def test_a_collate_function_makes_batches_of_any_objects(executor, key):
    words = ["a", "bb", "ccc", "dddd", "eeeee"]

    def collate(samples):
        letters = np.zeros((len(samples), 5), np.uint8)
        for row, word in enumerate(samples):
            letters[row, : len(word)] = [ord(letter) for letter in word]
        return {"letters": letters, "length": np.array([len(word) for word in samples], np.int32)}

    stages = [ms.DatasetSource(words, "sequential"), ms.BatchTransform(2, collate=collate)]
    loader = ms.DataLoader(
        [*stages, ms.MapTransform(lambda batch, mask: {**batch, "twice": batch["length"] * 2})], executor=executor
    )
    pairs = epochs(loader, key, 3)
    assert [batch["length"].tolist() for batch, _ in pairs] == [[1, 2], [3, 4], [5, 0]]
    assert [batch["twice"].tolist() for batch, _ in pairs] == [[2, 4], [6, 8], [10, 0]]
    assert pairs[1][0]["letters"][1].tolist() == [100, 100, 100, 100, 0]
    assert pairs[-1][1].tolist() == [True, False]


@pytest.mark.parametrize("executor", [None, ms.Threads(2), ms.Processes(1)])
def test_a_collate_function_may_return_anything(executor, key):
    loader = ms.DataLoader(
        [
            ms.DatasetSource(["a", "b", "c"], "sequential"),
            ms.BatchTransform(2, collate=lambda samples: "+".join(samples)),
        ],
        executor=executor,
    )
    assert [batch for batch, _ in loader.iterate(loader.init_state(key))] == ["a+b", "c"]


def test_objects_a_worker_cannot_send_are_refused_by_name(key):
    items = [object(), object()]
    loader = ms.DataLoader([ms.DatasetSource(items), ms.BatchTransform(2)], executor=ms.Processes(1))
    with refuses(TypeError, "plain values", "object", "use Threads"):
        next(loader.iterate(loader.init_state(key)))


@pytest.mark.parametrize("executor", [None, ms.Threads(2), ms.Processes(2)])
def test_random_numbers_of_a_host_map_are_the_same_everywhere(executor, key):
    def jitter(value, rng):
        return {"label": value["label"], "noise": rng.random(2, np.float32)}

    stages = [ms.HostArraySource(data()), ms.RandomHostMapTransform(jitter), BATCH]
    expected = epochs(ms.DataLoader(stages), key)
    assert_trees_equal(epochs(ms.DataLoader(stages, executor=executor), key), expected)
    noise = np.concatenate([batch["noise"][mask] for batch, mask in expected])
    assert len(np.unique(noise)) == noise.size  # another epoch, other numbers


def breaks_at(*broken):
    def read(index):
        if index in broken:
            raise OSError(f"broken {index}")
        return {"x": np.float32(index)}

    return read


@pytest.mark.parametrize("way", ["function", "dataset", "map", "collate"])
def test_a_first_sample_that_fails_is_skipped_like_any_other(way, key):
    class Dataset:
        __len__, __getitem__ = (lambda self: 8), (lambda self, index: breaks_at(0, 1)(index))

    broken = ms.DiskSampleSource(8, breaks_at(0, 1))
    numbers = ms.DiskSampleSource(8, lambda index: index)
    stages = {
        "function": [broken, ms.BatchTransform(4)],
        "dataset": [ms.DatasetSource(Dataset()), ms.BatchTransform(4)],
        "map": [numbers, ms.HostMapTransform(lambda index: breaks_at(0, 1)(int(index))), ms.BatchTransform(4)],
        "collate": [broken, ms.BatchTransform(4, collate=lambda samples: {"x": np.array([s["x"] for s in samples])})],
    }[way]
    loader = ms.DataLoader(stages, on_error="skip item")
    found = [x for batch, mask in loader.iterate(loader.init_state(key)) for x in batch["x"][mask].tolist()]
    assert set(found) <= set(range(2, 8))
    assert way == "collate" or sorted(found) == list(range(2, 8))
    with refuses(OSError, "broken 0"):
        ms.DataLoader(stages)


def test_a_source_of_which_no_sample_can_be_read_says_why():
    with refuses(OSError, "broken 0"):
        ms.DiskSampleSource(100, breaks_at(*range(100)))


@pytest.mark.parametrize("executor", [None, ms.Threads(2), ms.Processes(1)])
def test_a_sample_that_fails_is_masked_and_counted(executor, key):
    def bad(index):
        if index in (3, 7):
            raise OSError("no such file")
        return sample(index)

    stages = [ms.DiskSampleSource(SAMPLES, bad), ms.MapTransform(pipelines.halve), BATCH]
    loader = ms.DataLoader(stages, executor=executor, on_error="skip item")
    pairs = epochs(loader, key, loader.steps_per_epoch)
    labels = np.concatenate([batch["label"][mask] for batch, mask in pairs])
    assert sorted(labels.tolist()) == [index for index in range(SAMPLES) if index not in (3, 7)]
    for batch, mask in pairs:
        assert not batch["half"][~mask].any() and not batch["label"][~mask].any()
    assert (loader.stats().failed, loader.stats().samples) == (2, SAMPLES - 2)
    _, _, (_, masks) = loader.scan_epoch(
        loader.init_state(key), None, lambda carry, batch, mask: (carry, (batch, mask))
    )
    np.testing.assert_array_equal(masks, [mask for _, mask in pairs])


def test_a_batch_with_a_sample_that_fails_is_left_out_and_counted(key):
    def bad(index):
        if index == 3:
            raise OSError("no such file")
        return sample(index)

    loader = ms.DataLoader([ms.DiskSampleSource(SAMPLES, bad), BATCH], on_error="skip batch")
    batches = loader.iterate(loader.init_state(key))
    labels = [label for batch, mask in batches for label in np.asarray(batch["label"])[np.asarray(mask)].tolist()]
    assert 3 not in labels
    assert loader.stats().dropped == 1
    assert int(batches.state.step) == loader.steps_per_epoch


def test_info_tells_where_a_batch_comes_from(key):
    for executor in (None, ms.Threads(2)):
        loader = ms.DataLoader([source(), BATCH], executor=executor)
        for number, (batch, mask, info) in enumerate(loader.iterate(loader.init_state(key), steps=7, with_info=True)):
            assert (info.step, info.epoch, info.step_in_epoch) == (number, *divmod(number, 3))
            assert info.indices[np.asarray(mask)].tolist() == np.asarray(batch["label"])[np.asarray(mask)].tolist()
            assert (info.indices < 0).tolist() == (~np.asarray(mask)).tolist()
            assert len(np.unique(info.seeds[info.indices >= 0])) == np.sum(info.indices >= 0)
            assert info.items[0]["label"] == batch["label"][0]
            assert info.additional == {}


def test_replayed_batches_are_made_once(key):
    read = []

    def counted(index):
        read.append(index)
        return {"x": np.int32(index)}

    spec = {"x": jax.ShapeDtypeStruct((), np.int32)}
    loader = ms.DataLoader([ms.DiskSampleSource(100, counted, spec), ms.BatchTransform(5)], executor=ms.Threads(2))
    batches = list(loader.iterate(loader.init_state(key), steps=20, replay=2))
    assert len(batches) == 20 and len(read) == 10
    assert len({tuple(batch["x"].tolist()) for batch, _ in batches}) == 2


def test_stats_name_the_bottleneck(key):
    def slow(sample):
        time.sleep(0.005)
        return sample

    stages = [ms.HostArraySource(data()), ms.HostMapTransform(slow), BATCH]
    loader = ms.DataLoader(stages, executor=ms.Threads(1), prefetch=1)
    for _ in loader.iterate(loader.init_state(key), steps=6):
        pass
    stats = loader.stats()
    assert stats.batches == 6 and stats.samples == 22
    assert stats.bottleneck.startswith("HostMapTransform(slow)")
    assert stats.speedup_of_an_instant_loader > 1
    for word in ("idle", "bottleneck", "HostMapTransform(slow)", "instant loader"):
        assert word in str(stats)


class Keeper:
    """Keeps batches in an attribute, as a user's class may."""

    def __init__(self, batches):
        self.log = {"train": batches}


def closing_over(batches):
    return lambda: batches


def suspended(batches):
    yield len(batches)


def started(generator):
    next(generator)
    return generator


@pytest.mark.parametrize(
    "keep, words",
    [
        (lambda batches: batches, r"item 1 of the list `holder`, a local variable of test_kept\w+\(\) in .*\.py:\d+"),
        (Keeper, r"item 1 of the list `holder\.log\['train'\]`, where `holder` is a local variable of test_kept"),
        (closing_over, r"item 1 of the list `batches`, a variable that the function closing_over.<locals>.<lambda>"),
        (
            lambda batches: started(suspended(batches)),
            r"item 1 of the list `batches`, a local variable of suspended\(\)",
        ),
        (lambda batches: [[[[[batches]]]]], r"item 1 of the list `holder\[0\]\[0\]\[0\]\[0\]\[0\]`, where `holder` is"),
    ],
    ids=["variable", "attribute", "closure", "generator", "nested"],
)
def test_kept_batches_are_named_by_the_variable_that_holds_them(keep, words, key, capsys):
    batch_holders._handed_out.clear()
    loader = ms.DataLoader([source(), BATCH], executor=ms.Threads(1))
    holder = keep([batch for batch, _ in loader.iterate(loader.init_state(key), steps=2)])
    ms.reading.debug_batch_references()
    printed = capsys.readouterr().out
    first, *lines = printed.splitlines()
    assert first == "2 batches are held:" and [line[:11] for line in lines] == ["  batch 0: ", "  batch 1: "]
    assert re.search(words, lines[1]), printed
    assert "millstream" not in printed.replace(__file__, "")  # no function of the library is named
    del holder
    gc.collect()
    ms.reading.debug_batch_references()
    assert capsys.readouterr().out == "No batch is held.\n"  # looking has kept nothing alive


def test_a_batch_that_is_kept_twice_is_named_twice(key, capsys):
    batch_holders._handed_out.clear()
    loader = ms.DataLoader([source(), BATCH], executor=ms.Threads(1))
    kept = []
    for batch, _ in loader.iterate(loader.init_state(key), steps=1):
        kept.append(batch)
    ms.reading.debug_batch_references()
    printed = capsys.readouterr().out
    assert "`batch`, a local variable of" in printed and "item 0 of the list `kept`, a local" in printed
    held = locals()  # a copy that someone holds is left alone
    ms.reading.debug_batch_references()
    assert held["kept"] is kept


class _Poisoning(collections.deque):
    """Overwrites every slot that becomes free."""

    def append(self, slot):
        slot.memory[:] = 0xFF
        super().append(slot)


@pytest.fixture
def poisoned(monkeypatch):
    """Have memory overwritten as soon as it counts as free."""
    make = Slots.__init__

    def poisoning(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self._free = _Poisoning(self._free)

    monkeypatch.setattr(Slots, "__init__", poisoning)


@jax.jit
def _slow_sum(x):
    return jax.lax.fori_loop(0, 20, lambda _, total: total + x.sum(axis=(1, 2)) / 20, jnp.zeros(x.shape[0]))


_donating_sum = jax.jit(lambda x: x.sum(axis=(1, 2)), donate_argnums=0)


@pytest.mark.parametrize(
    "shape", [(120, 120), (7, 3)]
)  # one large enough to be handed over as it is, one that is copied
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_memory_is_used_again_only_when_nobody_looks_at_it(shape, key, poisoned):
    def read(index):
        return {"x": np.full(shape, index, np.float32), "index": np.int32(index)}

    loader = ms.DataLoader([ms.DiskSampleSource(200, read), ms.BatchTransform(10)], executor=ms.Threads(2), prefetch=1)
    random, kept, sums = np.random.default_rng(0), collections.deque(), []
    for number, (batch, _) in enumerate(loader.iterate(loader.init_state(key), steps=800)):
        index = np.asarray(batch["index"])
        if number % 3 == 0:
            sums.append((index.copy(), _slow_sum(batch["x"])))  # still running when the batch is let go
        elif number % 3 == 1:
            sums.append((index.copy(), _donating_sum(batch["x"])))
        else:
            kept.append((index.copy(), batch["x"]))
        while len(kept) > random.integers(1, 12):
            index, x = kept.popleft()
            np.testing.assert_array_equal(np.asarray(x), np.broadcast_to(index[:, None, None], (10, *shape)))
    for index, total in sums:
        np.testing.assert_allclose(total, index * np.prod(shape), rtol=1e-5)


def test_large_batches_reach_jax_without_a_copy(key):
    def read(index):
        return {"x": np.full((128, 128), index, np.float32)}

    addresses = []
    make = Slots.lend

    def spying(self, slot, bucket):
        rows = make(self, slot, bucket)
        addresses.append(rows[0].ctypes.data)
        return rows

    Slots.lend = spying
    try:
        for executor in (ms.Threads(1), ms.Processes(1)):
            addresses.clear()
            loader = ms.DataLoader([ms.DiskSampleSource(40, read), ms.BatchTransform(10)], executor=executor)
            for number, (batch, _) in enumerate(loader.iterate(loader.init_state(key))):
                assert batch["x"].unsafe_buffer_pointer() == addresses[number]
    finally:
        Slots.lend = make


def test_streams_that_are_left_early_give_their_memory_back(key):
    loader = ms.DataLoader([source(), ms.HostMapTransform(_slowly), BATCH], executor=ms.Threads(3), prefetch=3)
    with loader:
        sizes = set()
        for _ in range(60):
            batches = loader.iterate(loader.init_state(key))
            next(batches)
            batches.close()
            sizes.add(loader._feed.reader._backend.nbytes)  # pyright: ignore
    assert max(sizes) <= 2 * min(sizes)


def _slowly(value):
    time.sleep(0.001)
    return value


def test_a_ring_grows_to_its_limit_and_then_copies():
    layout = Layout((4,), ((256,),), (np.dtype(np.float32),))
    told = []
    slots = Slots(layout, 2, limit=4 * layout.nbytes, on_limit=told.append)
    held = [slots.lend(slots.take(), 0) for _ in range(10)]
    assert slots.count == 4 and told == [3]
    assert slots.n_held == 3
    held.clear()
    assert slots.n_held == 0


def test_threads_may_hand_out_batches_at_the_same_time():
    before, errors = sys.getswitchinterval(), []

    def lend():
        try:
            for step in range(2000):
                batch_holders.remember(step, [np.empty(1), np.empty(1)])
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=lend) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert errors == []


# What reaches a worker


class Handle:
    """Something that is open in this process alone."""

    def __init__(self):
        self.lock = threading.Lock()


@pytest.mark.parametrize("way", ["function", "object", "map", "partial", "startup"])
def test_what_cannot_be_sent_to_a_worker_is_named_with_its_variable(way, key):
    handle, spec = Handle(), jax.ShapeDtypeStruct((), np.int32)

    def read(index):
        assert handle is not None
        return np.int32(index)

    def held(index, other):
        return np.int32(index)

    class Dataset:
        def __init__(self):
            self.connection = handle

        __len__, __getitem__ = (lambda self: 8), (lambda self, index: np.int32(index))

    good = ms.DiskSampleSource(8, lambda index: np.int32(index), sample_spec=spec)
    partial = functools.partial(held, other=handle)
    variable = {"function": "its variable 'handle', lock", "object": "dataset, connection, lock", "map": "fn, its var"}
    stages = {
        "function": [ms.DiskSampleSource(8, read, sample_spec=spec)],
        "object": [ms.DatasetSource(Dataset())],
        "map": [good, ms.HostMapTransform(read)],
        "partial": [ms.DiskSampleSource(8, partial, sample_spec=spec)],
    }
    names = {"function": "DiskSampleSource(read)", "object": "DatasetSource(Dataset)", "map": "HostMapTransform(read)"}
    names |= {"partial": "DiskSampleSource(held)", "startup": "startup"}
    variable |= {"partial": "sample_fn, other, lock", "startup": "its variable 'handle', lock"}
    executor = ms.Processes(1, startup=(lambda: handle) if way == "startup" else None)
    loader = ms.DataLoader([*stages.get(way, [good]), ms.BatchTransform(4)], executor=executor)
    with refuses(
        TypeError,
        f"Processes sends {names[way]} to worker processes, and it cannot be pickled: ",
        variable[way],
        "cannot pickle '_thread.lock' object",
        "Open such a thing inside the function",
        "Processes(startup=...)",
        "use Threads",
    ):
        next(loader.iterate(loader.init_state(key)))


@pytest.mark.parametrize("executor", [ms.Threads(1), ms.Processes(1)], ids=["threads", "processes"])
def test_a_function_may_write_into_an_array_of_its_own(executor, key):
    scratch, table = np.zeros(1000, np.int32), np.arange(1000, dtype=np.int32)
    table.flags.writeable = False

    def read(index):
        scratch[:] = table + index
        assert not table.flags.writeable
        return scratch[:2].copy()

    source = ms.DiskSampleSource(8, read, sample_spec=jax.ShapeDtypeStruct((2,), np.int32), ordering="sequential")
    loader = ms.DataLoader([source, ms.BatchTransform(4)], executor=executor)
    batches = [np.asarray(batch).tolist() for batch, _ in loader.iterate(loader.init_state(key))]
    assert batches == [[[row, row + 1] for row in rows] for rows in (range(4), range(4, 8))]
    assert isinstance(executor, ms.Threads) or not scratch.any()


def test_threads_that_ask_at_the_same_time_get_one_reader(monkeypatch):
    """Each of several would start threads or worker processes of its own."""
    pipeline = as_stream(ms.HostArraySource(np.arange(8)))
    assert pipeline.host is not None
    host, plan, begin = pipeline.host, pipeline.plan, Reader.__init__

    def begin_slowly(*arguments):
        time.sleep(0.05)
        begin(*arguments)

    monkeypatch.setattr(Reader, "__init__", begin_slowly)
    together = threading.Barrier(4)

    def ask(_):
        together.wait()
        return reader_of(host, plan)

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert len({id(reader) for reader in list(threads.map(ask, range(4)))}) == 1
