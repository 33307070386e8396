"""Readers on other machines: the same batches from Ray actors, real ones, in a cluster on this machine."""

import contextlib
import gc
import importlib.util
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import cloudpickle
import jax
import numpy as np
import pipelines
import pytest
from conftest import assert_trees_equal
from pipelines import BATCH, PIPELINES, data
from test_bad_input import refuses

import millstream as ms
from millstream.errors import WorkerCrashed, WorkerStalled
from millstream.integrations.ray import RayActors
from millstream.reading import Layout, Request, is_worker

pytestmark = [
    pytest.mark.optimized,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray has no wheel for this Python"),
]

for module in (pipelines, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)  # so that actors do not import it, and JAX with it
SCRIPT = pathlib.Path(__file__).with_name("ray_cluster_script.py")
CPUS = 16  # to Ray, which counts what it is told
NUMBER = jax.ShapeDtypeStruct((), np.int32)


@pytest.fixture(scope="module")
def cluster():
    """The address of a cluster with a process group of its own, which ends with its standard input."""
    before = signal.getsignal(signal.SIGTERM), sys.excepthook, sys.path[:]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        import ray

        folder = tempfile.mkdtemp(prefix="ms")  # short: the names of its sockets may have 107 bytes
        started = subprocess.Popen(
            [sys.executable, str(SCRIPT), folder, str(CPUS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            with started:
                assert started.stdin is not None and started.stdout is not None
                address = started.stdout.readline().strip()
                ray.init(address=address, log_to_driver=False, configure_logging=False)
                yield address
                ray.shutdown()
                started.stdin.close()
                assert started.wait(60) == 0
        finally:
            ray.shutdown()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)
            signal.signal(signal.SIGTERM, before[0])  # Ray takes them over, and keeps them
            sys.excepthook, sys.path[:] = before[1:]


@pytest.fixture(autouse=True)
def connected(cluster):
    """Ray, connected; nothing of a test is left in it."""
    import ray

    if not ray.is_initialized():
        ray.init(address=cluster, log_to_driver=False, configure_logging=False)
    before = actors()
    yield
    gc.collect()
    wait_until(lambda: actors() <= before, 20)


@pytest.fixture
def all_free():
    """All of the cluster free again, which it counts twice a second."""
    import ray

    wait_until(lambda: ray.available_resources().get("CPU") == CPUS, 20)


def actors():
    """The processes of actors, of this cluster and others."""
    found = set()
    for path in pathlib.Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if path.read_text().startswith("ray::PartRead"):
                found.add(int(path.parent.name))
    return found


def wait_until(condition, limit=60.0):
    end = time.monotonic() + limit
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def numbers(length, read, batch=4, executor=None, **options):
    """A loader of what `read` says of every number, in sequence."""
    source = ms.DiskSampleSource(length, read, ordering="sequential", sample_spec=NUMBER)
    return ms.DataLoader([source, ms.BatchTransform(batch)], executor=executor or RayActors(1), **options)


def epoch(loader, key, steps=None):
    return [jax.device_get(pair) for pair in loader.iterate(loader.init_state(key), steps=steps)]


CONTRACT = [
    *("pad", "wrap", "random map before", "host random map", "host fill", "host dataset", "host, batch of batches"),
    *("host, view", "host padding", "host, packed", "host, fields beside"),
]


@pytest.mark.parametrize("name", CONTRACT)
def test_every_pipeline_gives_the_same_batches(name, key):
    own = ms.DataLoader(PIPELINES[name]())
    steps = own.steps_per_epoch + 3
    with ms.DataLoader(PIPELINES[name](), executor=RayActors(1)) as loader:
        assert_trees_equal(epoch(loader, key, steps), epoch(own, key, steps))


def test_it_serves_stepping_scanning_and_a_lack_of_order(key):
    own = ms.DataLoader(PIPELINES["pad"]())
    state = own.init_state(key)
    pairs, after = epoch(own, key), state
    with ms.DataLoader(PIPELINES["pad"](), executor=RayActors(2)) as loader:
        for pair in pairs:
            batch, after, mask = loader.next_batch(after)
            assert_trees_equal((batch, mask), pair)
        _, total, _ = loader.scan_epoch(state, 0, lambda total, batch, mask: (total + batch["label"].sum(), None))
        assert int(total) == sum(int(batch["label"].sum()) for batch, _ in pairs)
    loader = loader.replace(executor=RayActors(2, ordered=False))
    labels = [np.asarray(batch["label"])[np.asarray(mask)] for batch, mask in loader.iterate(state)]
    assert sorted(np.concatenate(labels).tolist()) == sorted(np.concatenate([b["label"][m] for b, m in pairs]).tolist())


def test_a_run_goes_from_actors_to_threads_and_back(key):
    stages = PIPELINES["host random map"]
    whole = epoch(ms.DataLoader(stages()), key, 8)
    state, seen = None, []
    for executor, steps in [(RayActors(2), 2), (ms.Threads(2), 3), (RayActors(1), 3)]:
        with ms.DataLoader(stages(), executor=executor) as loader:
            batches = loader.iterate(loader.init_state(key) if state is None else state, steps=steps)
            seen += [jax.device_get(pair) for pair in batches]
            state = jax.device_get(batches.state)
    assert_trees_equal(seen, whole)


def test_several_actors_share_a_batch(folder, key):
    def meet():
        (folder / str(os.getpid())).touch()
        while len(list(folder.iterdir())) < 4:
            time.sleep(0.01)

    def read(index):
        time.sleep(0.01)
        return np.int32(os.getpid())

    with numbers(64, read, batch=16, executor=RayActors(4, startup=meet)) as loader:
        first = epoch(loader, key)  # whoever is ready first has both parts of the first batch
        again = epoch(loader, key)
    for batch, _ in first + again:
        assert len({*batch[:8].tolist()}) == len({*batch[8:].tolist()}) == 1  # two parts, each by one actor
    assert again[0][0][0] != again[0][0][8]


def test_a_killed_actor_is_replaced_and_nothing_is_lost(folder, key):
    def read(index):
        (folder / f"{os.getpid()} {index}").touch()
        time.sleep(0.01)
        return np.int32(index)

    loader = numbers(120, read, executor=RayActors(2))
    batches = loader.iterate(loader.init_state(key))
    seen = [next(batches)[0].tolist() for _ in range(3)]
    os.kill(int(next(folder.iterdir()).name.split()[0]), signal.SIGKILL)
    with pytest.warns(UserWarning, match=r"Ray actor \d \(pid \d+\) died.* is read again, so nothing is lost"):
        seen += [batch.tolist() for batch, _ in batches]
    assert seen == np.arange(120).reshape(30, 4).tolist()
    assert loader.stats().restarts == 1


@pytest.mark.parametrize("on_error", ["raise", "skip item"])
def test_a_sample_that_ends_every_actor_is_named(on_error, key):
    """Also where one actor has all of it, and takes answers for samples before it along."""

    def read(index):
        if index == 6:
            os._exit(3)
        return np.int32(index)

    loader = numbers(8, read, executor=RayActors(1), on_error=on_error)
    named = "died while it was at sample 6. This sample has now ended 3 actors"
    with pytest.warns(UserWarning, match="died while it was at .*rows 0 to 3 of batch 1"):
        if on_error == "raise":
            with refuses(WorkerCrashed, named, "Ray's logs"):
                epoch(loader, key)
        else:
            assert [mask.tolist() for _, mask in epoch(loader, key)] == [[True] * 4, [True, True, False, True]]
            assert (loader.stats().failed, loader.stats().restarts) == (1, 4)


def test_errors_name_the_sample_and_bring_the_traceback_along(key):
    def read(index):
        if index == 5:
            raise OSError(f"{index}.png is cut short")
        return np.int32(index)

    loader = numbers(8, read, executor=RayActors(1))
    batches = loader.iterate(loader.init_state(key))
    next(batches)
    with pytest.raises(OSError, match=r"5\.png is cut short") as caught:
        next(batches)
    first, *_, last = caught.value.__notes__
    assert "Traceback in the worker:" in first and "in read\n" in first
    assert last == "It happened at sample 5, in Ray actor 0."
    skipping = loader.replace(on_error="skip item")
    assert [mask.tolist() for _, mask in epoch(skipping, key)] == [[True] * 4, [True, False, True, True]]


def test_objects_come_back_and_what_cannot_is_refused_by_name(key):
    words = ms.DatasetSource(["a", "b", "c"], "sequential")
    joined = ms.DataLoader([words, ms.BatchTransform(2, collate="+".join)], executor=RayActors(1))
    assert [batch for batch, _ in joined.iterate(joined.init_state(key))] == ["a+b", "c"]
    plain = ms.DataLoader([words, ms.BatchTransform(2)], executor=RayActors(1))
    assert [list(batch) for batch, _ in plain.iterate(plain.init_state(key))] == [["a", "b"], ["c", None]]
    bad = ms.DataLoader([ms.DatasetSource([object()]), ms.BatchTransform(1)], executor=RayActors(1))
    with refuses(TypeError, "plain values", "object", "use Threads"):
        next(bad.iterate(bad.init_state(key)))
    lock = threading.Lock()
    with refuses(TypeError, "RayActors sends startup to worker processes", "its variable 'lock'", "RayActors(startup="):
        epoch(numbers(8, np.int32, executor=RayActors(1, startup=lambda: lock)), key)


class CountedPickles:
    """A function with arrays of its own, which counts how often it is sent."""

    sent = 0

    def __init__(self):
        self.table, self.scratch = np.arange(1 << 19, dtype=np.int32), np.zeros(10, np.int32)

    def __call__(self, index):
        self.scratch[:] = index  # small, so that it may be written to
        shared = not self.table.flags.writeable
        no_jax = "jax" not in sys.modules and is_worker()
        return np.int32(self.table[self.scratch[3]] if shared and no_jax else -1)

    def __getstate__(self):
        CountedPickles.sent += 1
        return vars(self)


def test_a_source_is_sent_once_and_its_arrays_are_shared(key):
    sent = CountedPickles.sent
    with numbers(40, CountedPickles(), executor=RayActors(2)) as loader:
        assert np.concatenate([batch for batch, _ in epoch(loader, key)]).tolist() == list(range(40))
    assert CountedPickles.sent == sent + 1


def test_startup_runs_once_in_each_actor_and_what_it_raises_is_told(folder, key):
    def fail():
        raise ValueError("no licence here")

    with numbers(8, np.int32, executor=RayActors(1, startup=lambda: (folder / str(os.getpid())).touch())) as loader:
        assert len(epoch(loader, key)) == 2
    assert len(list(folder.iterdir())) == 1
    with pytest.raises(ValueError, match="no licence here") as caught:
        epoch(numbers(8, np.int32, executor=RayActors(1, startup=fail)), key)
    assert any("its startup function" in note for note in caught.value.__notes__)


def test_batches_stay_where_ray_has_put_them_until_that_is_too_much(key):
    """A batch has 8 MB, and 50 MB of the store may be in use; what is held is never written to again."""
    shape = (1 << 20,)
    source = ms.DiskSampleSource(40, lambda index: np.full(shape, index, np.float32), ordering="sequential")
    backend = RayActors(1).open(source, Layout((2,), (shape,), (np.dtype(np.float32),)), 1, False)
    held, first = [], np.arange(2)
    for step in range(12):
        job = backend.start(Request(step, first + 2 * step, np.ones(2, bool)))
        held.append(backend.collect(job).rows[0])
    copied = [array.flags.writeable for array in held]
    assert copied == [False] * 6 + [True] * 6
    assert not any(array.ctypes.data % 64 for array in held)
    assert [array[:, -1].tolist() for array in held] == [[2.0 * step, 2.0 * step + 1] for step in range(12)]
    held.clear()
    gc.collect()
    assert not backend.collect(backend.start(Request(0, first, np.ones(2, bool)))).rows[0].flags.writeable
    backend.close()
    assert backend.closed
    backend.close()


def test_actors_end_with_the_iterator_the_loader_and_an_interrupt(folder, key):
    def read(index):
        (folder / str(os.getpid())).touch()
        time.sleep(600 if index > 7 else 0)
        return np.int32(index)

    def started():
        return {int(one.name) for one in folder.iterdir()}

    loader = numbers(40, read, executor=RayActors(1))
    batches = loader.iterate(loader.init_state(key))
    next(batches)
    del batches  # forgotten
    wait_until(lambda: not any(map(is_running, started())))
    batches = loader.iterate(loader.init_state(key))
    assert [len(next(batches)[0]) for _ in range(2)] == [4, 4]
    timers = [threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)) for seconds in (0.5, 1.0)]
    try:
        for timer in timers:
            timer.start()
        with pytest.raises(KeyboardInterrupt):  # at the second one at the latest, while a batch is waited for
            next(batches)
    finally:
        for timer in timers:
            timer.cancel()
            timer.join()
    assert len(started()) == 2
    wait_until(lambda: not any(map(is_running, started())))


@pytest.mark.filterwarnings("ignore:.*fork")  # by Python, JAX, and Lance if it is loaded
def test_a_forked_process_refuses_the_actors_of_its_parent_and_leaves_them_alone(key):
    loader = numbers(40, np.int32, executor=RayActors(1))
    with loader.iterate(loader.init_state(key)) as batches:
        next(batches)
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # instead of a wait without end
            refused = False
            try:
                next(batches)
            except RuntimeError as error:
                refused = "was forked from it" in str(error)
            with contextlib.suppress(Exception):
                batches.close()
            os._exit(0 if refused else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(list(batches)) == 9
    assert loader.stats().restarts == 0


def test_actors_that_cannot_be_placed_are_an_error_with_both_sides(all_free, key):
    executor = RayActors(2, num_cpus=64, options={"resources": {"reader": 1}}, start_timeout=0.5)
    with refuses(
        WorkerStalled,
        "RayActors(2, num_cpus=64, options={resources: {reader: 1}}, start_timeout=0.5): none of its actors could be "
        "started within 0.5 s. Each asks for 64 CPU, 1 reader. The cluster has 16 CPU, ",
        "4 reader, of which free: 16 CPU",
        "Ask for less, add machines, or wait longer (start_timeout).",
    ):
        epoch(numbers(8, np.int32, executor=executor), key)


def test_those_that_can_be_placed_read_for_the_others(all_free, key, monkeypatch):
    loader = numbers(80, np.int32, executor=RayActors(2, num_cpus=9, start_timeout=500))
    batches = loader.iterate(loader.init_state(key))
    next(batches)
    monotonic = time.monotonic
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="1 of 2 actors could not be started within"):
        patch.setattr(time, "monotonic", lambda: monotonic() + 1000)
        assert len(list(batches)) == 19


def test_a_stalled_actor_is_named(key):
    def read(index):
        time.sleep(600)
        return np.int32(index)

    loader = numbers(8, read, executor=RayActors(1, timeout=1.0))
    with refuses(WorkerStalled, "no batch for 1 s", "is at rows 0 to 3 of batch 0", "give RayActors a longer timeout"):
        epoch(loader, key)


def test_a_cluster_that_is_not_there_is_an_error_at_once(cluster, key, monkeypatch):
    import ray

    with refuses(ValueError, f"connected to, {cluster}. Got address='10.0.0.1:6379'", "call ray.shutdown() before"):
        epoch(numbers(8, np.int32, executor=RayActors(1, address="10.0.0.1:6379")), key)
    loader = numbers(80, np.int32, executor=RayActors(1, address=cluster))
    batches = loader.iterate(loader.init_state(key))
    next(batches)
    ray.shutdown()
    with refuses(RuntimeError, "Ray was shut down while this stream was reading"):
        list(batches)
    words = "and there is none: ", "`ray start --head`", "RAY_ADDRESS"
    with refuses(ConnectionError, "RayActors needs a Ray cluster at '127.0.0.1:1', ", *words):
        epoch(numbers(8, np.int32, executor=RayActors(1, address="127.0.0.1:1")), key)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:2")
    with refuses(ConnectionError, "'127.0.0.1:2'", *words):
        epoch(numbers(8, np.int32, executor=RayActors(1)), key)
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    terminated = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    assert len(epoch(numbers(8, np.int32, executor=RayActors(1)), key)) == 2
    os.kill(os.getpid(), signal.SIGTERM)  # Ray would have it abort this process
    assert terminated.wait(10)


def test_wrong_arguments_are_named():
    cases = {
        "needs workers to be an int from 1": {"workers": 0},
        "needs num_cpus to be a number above 0. Got 0": {"num_cpus": 0},
        "needs options to be a dict of what ray.remote takes": {"options": "cpu"},
        "needs options without 'num_cpus'": {"options": {"num_cpus": 2}},
        "needs start_timeout to be a number of seconds above 0": {"start_timeout": -1},
        "needs startup to be a function": {"startup": 3},
        "needs address to be a str": {"address": 6379},
    }
    for text, arguments in cases.items():
        with pytest.raises((ValueError, TypeError), match=f"RayActors {text}"):
            RayActors(**{"workers": 1, **arguments})
    executor = RayActors(2, options={"resources": {"reader": 1}})
    assert executor == RayActors(2, options={"resources": {"reader": 1}}) != RayActors(2)
    assert hash(executor) == hash(RayActors(2, options={"resources": {"reader": 1}}))


def test_it_reads_well_in_summaries():
    loader = ms.DataLoader([ms.HostArraySource(data()), BATCH], executor=RayActors(2))
    assert "executor=RayActors(2)" in repr(loader)
    text = loader.explain().table()
    assert "by 2 Ray actors, 3 ahead of the one in use, in order" in text
    assert "4 batches in flight, of" in text
