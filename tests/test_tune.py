"""Tuning: what it advises where the best choice is beyond doubt, what it refuses, and that it leaves nothing behind."""

import ctypes
import os
import signal
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest
from conftest import assert_trees_equal
from pipelines import Echo

import millstream as ms
from millstream.inspect._tune import preferred

pytestmark = pytest.mark.optimized

SAMPLES = 400


def waiting(index):
    """What a disk or a server is like: others can continue meanwhile."""
    time.sleep(0.003)
    return {"x": np.full(3, index, np.float32)}


def locking(index):
    """What Python code is like: it keeps the GIL all the while. That it sleeps makes cores no matter."""
    ctypes.PyDLL(None).usleep(20_000)
    return {"x": np.full(3, index, np.float32)}


def loader_of(read: Any, *, batch: int = 16, **options: Any) -> ms.DataLoader:
    return ms.DataLoader([ms.DiskSampleSource(SAMPLES, read), ms.BatchTransform(batch)], **options)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch, assert_nothing_is_left):
    # Where many tests run at once, a worker may be long in coming.
    monkeypatch.setattr(ms.reading.settings, "warn_seconds", 300.0)
    monkeypatch.setattr(ms.reading.settings, "stall_seconds", 300.0)
    yield
    assert_nothing_is_left()


def assert_same_batches(left, right, key):
    pairs = zip(left.iterate(left.init_state(key), steps=3), right.iterate(right.init_state(key), steps=3), strict=True)
    for a, b in pairs:
        assert_trees_equal(a, b)


def rates(tuning, kind):
    return {t.executor.workers: t.samples_per_second for t in tuning.tried if isinstance(t.executor, kind)}


def test_samples_that_wait_are_read_by_many_threads(key):
    loader = loader_of(waiting, executor=ms.Threads(1))
    tuning = loader.tune(key, seconds=4)
    executor = tuning.options["executor"]
    assert isinstance(executor, ms.Threads) and executor.workers >= 4
    assert "Reading takes" in tuning.reason and "of the present Threads(1)" in tuning.reason
    assert loader.replace(**tuning.options).explain().plan["read"].startswith(f"by {executor.workers} threads")
    assert_same_batches(loader, loader.replace(**tuning.options), key)


def test_samples_that_keep_the_lock_are_read_by_processes(key):
    loader = loader_of(locking, batch=4)
    tuning = loader.tune(key, seconds=4)
    assert isinstance(tuning.options["executor"], ms.Processes) and tuning.options["executor"].workers > 1
    assert_same_batches(loader, loader.replace(**tuning.options), key)


def test_arrays_are_gathered_by_the_program(key):
    data = {f"leaf {number}": np.arange(SAMPLES, dtype=np.float32) for number in range(40)}
    loader = ms.DataLoader([ms.ArraySampleSource(data), ms.BatchTransform(16)], executor=ms.Threads(1))
    tuning = loader.tune(key, seconds=2)
    assert tuning.options["executor"] == ms.InGraph()
    assert {type(tried.executor) for tried in tuning.tried} == {ms.InGraph, ms.Threads}
    assert_same_batches(loader, loader.replace(**tuning.options), key)


def test_beside_a_slow_step_a_few_threads_are_enough():
    loader, steps = loader_of(waiting, batch=4), []

    def step(batch, mask):
        assert batch["x"].shape == (4, 3) and mask.shape == (4,)
        steps.append(1)
        time.sleep(0.1)

    tuning = loader.tune(seconds=4, step=step)
    assert not isinstance(tuning.options["executor"], ms.Processes)
    chosen = next(t for t in tuning.tried if {"executor": t.executor, "prefetch": t.prefetch} == tuning.options)
    assert chosen.idle is not None and chosen.idle < 0.5 and steps
    assert "the loop waits" in tuning.reason


@pytest.mark.parametrize(
    ("others", "best"),
    [
        ({}, (ms.Threads(4), 2)),
        ({(ms.Processes(2), 2): 150.0}, (ms.Processes(2), 2)),
        ({(ms.Threads(4), 1): 95.0}, (ms.Threads(4), 1)),
        ({(ms.Threads(2), 8): 95.0}, (ms.Threads(2), 8)),
        ({(ms.InGraph(), 2): 80.0}, (ms.InGraph(), 2)),
    ],
)
def test_the_simplest_of_those_that_are_as_good_is_preferred(others, best):
    rates: Any = {(ms.Processes(2), 2): 101.0, (ms.Threads(8), 2): 100.0, (ms.Threads(4), 2): 96.0}
    assert preferred(rates | others, present=ms.Threads(4), readers=4) == best


def test_no_executor_is_preferred_to_as_many_threads_as_it_has():
    assert preferred({(None, 2): 99.0, (ms.Threads(4), 2): 100.0}, present=None, readers=4) == (None, 2)


def test_the_text_has_the_times_the_trials_and_code_that_runs():
    stages = [
        ms.DiskSampleSource(SAMPLES, waiting),
        ms.HostMapTransform(lambda sample: {"y": sample["x"] + 1}),
        ms.BatchTransform(4),
        ms.MapTransform(lambda batch, mask: batch["y"] * 2),
    ]
    tuning = ms.DataLoader(stages, on_error="skip item").tune(seconds=1)
    names = [stage.stage for stage in tuning.stages]
    assert {"sample_fn", "HostMapTransform(<lambda>)", "reading, all of it", "hand-over", "compiled stages"} <= {*names}
    assert all(stage.seconds > 0 for stage in tuning.stages)
    text = str(tuning)
    assert max(map(len, text.splitlines())) <= 120
    assert "advised" in text and "as it is" in text and tuning.code in text
    again = eval(tuning.code, {"ms": ms, "pipeline": stages})
    others = {"on_error": "skip item", "cache": None, "sharding": None}
    assert again.options == tuning.options | others


def test_the_loader_and_its_cache_stay_as_they_are(tmp_path):
    loader = loader_of(waiting, executor=ms.Threads(2), cache=ms.BatchCache(tmp_path / "batches"))
    tuning = loader.tune(seconds=1)
    assert not (tmp_path / "batches").exists()
    assert loader.stats().batches == 0
    assert tuning.code.endswith("cache=cache)")
    assert loader.replace(**tuning.options).explain().plan["cache"].startswith(str(tmp_path))


def test_objects_and_whole_batches_can_be_tuned():
    words = ms.DatasetSource(["a", "bb", "ccc", "dddd"] * 20)
    tuning = ms.DataLoader([words, ms.BatchTransform(4, collate=lambda batch: list(map(len, batch)))]).tune(seconds=1)
    assert [stage.per for stage in tuning.stages] == ["sample"] * len(tuning.stages)
    assert tuning.tried[0].samples_per_second


def test_a_sample_that_raises_is_named():
    def read(index):
        if index == 7:
            raise OSError("the disk is gone")
        return {"x": np.float32(index)}

    with pytest.raises(OSError, match="the disk is gone") as raised:
        loader_of(read).tune(seconds=1)
    notes = " ".join(raised.value.__notes__)
    assert "sample_fn(7)" in notes and "tune was" in notes and 'on_error="skip item"' in notes
    tolerant = loader_of(read, on_error="skip item").tune(seconds=1)
    assert tolerant.code.endswith("on_error='skip item')")


def test_what_cannot_go_to_workers_is_left_out_with_the_reason():
    lock = threading.Lock()

    def read(index):
        with lock:
            return waiting(index)

    tuning = loader_of(read, batch=4).tune(seconds=1)
    notes = [tried.note for tried in tuning.tried if isinstance(tried.executor, ms.Processes)]
    assert notes and all("not tried" in note and "lock" in note for note in notes)


def test_what_needs_the_startup_of_workers_is_read_by_workers_alone():
    def startup():
        os.environ["MILLSTREAM_TUNE_TEST"] = "ready"

    def fill(item, arrays, rng):
        assert os.environ["MILLSTREAM_TUNE_TEST"] == "ready"
        arrays["x"][...] = item

    source = ms.sources.FillSource(list(range(SAMPLES)), fill, {"x": ((), np.int32)})
    loader = ms.DataLoader([source, ms.BatchTransform(16)], executor=ms.Processes(1, startup=startup))
    tuning = loader.tune(seconds=1)
    assert isinstance(tuning.options["executor"], ms.Processes) and tuning.options["executor"].startup is startup
    assert "startup=startup" in tuning.code and not rates(tuning, ms.Threads)


def test_an_error_of_the_step_is_its_own():
    def step(batch, mask):
        raise ZeroDivisionError("in the step")

    with pytest.raises(ZeroDivisionError, match="in the step") as raised:
        loader_of(waiting).tune(step=step)
    assert raised.value.__notes__ == ["tune was trying None, prefetch=2."]


def test_batches_that_take_too_long_are_not_begun():
    def read(index):
        time.sleep(0.1)
        return {"x": np.float32(index)}

    with pytest.raises(ValueError, match=r"tune has too little time .* a batch would take about .* Give it more"):
        loader_of(read, batch=64).tune(seconds=0.5)
    tried = loader_of(read, batch=64, executor=ms.Threads(1)).tune(seconds=6).tried
    left_out = [row.executor for row in tried if row.samples_per_second is None]
    assert ms.Threads(1) in left_out and ms.Threads(32) not in left_out


def test_what_cannot_be_tuned_is_refused(key):
    stages = [ms.ArraySampleSource({"x": np.arange(8.0)}), lambda inner: Echo(inner)]
    with pytest.raises(TypeError, match="tune has nothing to choose for Echo: a stream"):
        ms.DataLoader(stages).tune()
    loader = loader_of(waiting)
    with pytest.raises(TypeError, match=r"tune needs a loader that was built, not one that came out of jax\.jit"):
        jax.tree.map(lambda leaf: leaf, loader).tune()
    for seconds in (0, -1, True, "ten", float("inf")):
        with pytest.raises(ValueError, match="tune needs seconds to be a number above 0"):
            loader.tune(seconds=seconds)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"^tune needs seconds to be at most 86,400, a day\. Got 1099511627776"):
        loader.tune(seconds=2**40)
    with pytest.raises(TypeError, match="tune needs step to be a function"):
        loader.tune(step=3)  # pyright: ignore[reportArgumentType]


def test_an_interrupt_in_a_step_ends_it_at_once():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            loader_of(waiting, executor=ms.Processes(2)).tune(step=lambda *_: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_while_a_batch_is_read_ends_it_at_once():
    main, calls = threading.main_thread(), []

    def read(index):
        if threading.current_thread() is not main:
            calls.append(index)
            if len(calls) == 1:
                signal.pthread_kill(main.ident, signal.SIGINT)  # pyright: ignore[reportArgumentType]
            time.sleep(1)
        return {"x": np.float32(index)}

    loader = loader_of(read, executor=ms.Threads(2))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            loader.tune(seconds=10)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(calls) < 8  # of the batches that were wanted, nobody reads the rest


@pytest.mark.parametrize(
    ("executor", "code"),
    [
        (ms.Threads(3), "ms.Threads(3)"),
        (ms.Processes(2, nice=5, startup=waiting), "ms.Processes(2, startup=waiting, nice=5)"),  # pyright: ignore
        (ms.InGraph(), "ms.InGraph()"),
        (None, "None"),
    ],
)
def test_executors_are_written_as_they_would_be_in_a_program(executor, code):
    tuning = ms.inspect.Tuning([], [], {"executor": executor, "prefetch": 2}, "", {"cache": "cache"})
    assert tuning.code == f"ms.DataLoader(pipeline, executor={code}, prefetch=2, cache=cache)"
