"""Faults that the random cases of `soak` do not meet, or do not judge: a slice of its trials.

Every row counts its runs, and says with which seed it ran. What hangs shows all its stacks and is killed.
"""

import gc
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from soak import chaos

import millstream as ms
from millstream.reading.workers.channel import _HEADER, MAX_FRAME, Channel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes and what they hold are counted in /proc")

SEED = int(os.environ.get("PYTEST_XDIST_TESTRUNUID", os.urandom(2).hex())[:4], 16)  # one for all workers
ROWS = {
    "death": 10,
    "kills": 6,
    "exceptions": 15,
    "epochs": 20,
    "held": 2,
    "many_held": 100,
    "warning_as_error": 1,
    "forked": 1,
}


def check(outcome, runs):
    assert outcome.failures == [], f"seed {SEED}\n" + "\n".join(outcome.failures)
    assert outcome.ok == outcome.runs >= runs
    assert (outcome.lost, outcome.repeated, outcome.leaks) == (0, 0, 0)


@pytest.fixture(scope="module")
def outcomes(once_per_run):
    return once_per_run(lambda: chaos.trials(ROWS, SEED, limit=180))


def hang(index):
    time.sleep(60)


def test_a_program_that_stalled_leaves_no_shared_memory(key, monkeypatch):
    monkeypatch.setattr(logging.getLogger("jax._src.callback"), "disabled", True)  # or pytest would keep the error

    def segments():
        gc.collect()
        with open("/proc/self/maps") as maps:
            return maps.read().count("memfd:millstream")

    jax.clear_caches()  # of programs of earlier tests
    before = segments()
    loader = ms.DataLoader(
        [ms.DiskSampleSource(4, hang, sample_spec=jax.ShapeDtypeStruct((), np.float32)), ms.BatchTransform(2)],
        executor=ms.Processes(1, timeout=0.5),
    )
    with pytest.raises(ms.errors.WorkerStalled):
        loader.scan_epoch(loader.init_state(key), (), lambda carry, batch, mask: (carry, batch))
    del loader
    jax.clear_caches()  # compiled programs hold on to what they read from
    assert segments() <= before


@pytest.mark.parametrize("row", ROWS)
def test_a_stream_survives_or_names(row, outcomes):
    outcome = outcomes[row]
    if row == "epochs":  # too few to tell a slope of memory
        outcome.failures = [failure for failure in outcome.failures if "KiB" not in failure]
    check(outcome, ROWS[row])


@pytest.mark.parametrize(("row", "runs"), [("interrupted", 6), ("clean_exit", 6)])
def test_nothing_is_left_of_a_program_that_is(row, runs):
    check(chaos.driven(row, runs, SEED), runs)


def test_a_frame_comes_whole_or_not_at_all():
    ours, theirs = socket.socketpair()
    channel, sender = Channel(ours), Channel(theirs)
    sender.send(3, b"first")
    sender.send(4, b"")
    theirs.sendall(_HEADER.pack(5, 100_000) + b"half")
    assert channel.receive_all() == ([(3, b"first"), (4, b"")], False)
    theirs.sendall(b"x" * 99_996)
    frames = []
    while not frames:
        frames, _ = channel.receive_all()
    assert frames == [(5, b"half" + b"x" * 99_996)]
    theirs.sendall(_HEADER.pack(5, MAX_FRAME + 1))
    with pytest.raises(ValueError, match="at most"):
        channel.receive_all()
    sender.close()
    channel.close()
    channel.close()


def test_the_other_end_is_gone_after_its_last_frame():
    ours, theirs = socket.socketpair()
    channel, sender = Channel(ours), Channel(theirs)
    channel.send(1, b"never read")
    sender.send(3, b"last")
    sender.close()
    assert channel.receive_all() == ([(3, b"last")], False)
    assert channel.receive_all() == ([], True)
    channel.close()


# What the soak has found


def quick(index):
    return {"x": np.float32(index)}


SPEC = {"x": jax.ShapeDtypeStruct((), np.float32)}


def test_next_batch_goes_on_after_its_workers_have_ended(tmp_path, key):
    well = tmp_path / "well"
    executor = ms.Processes(1, startup=lambda: well.exists() or os._exit(1))
    loader = ms.DataLoader([ms.DiskSampleSource(8, quick, sample_spec=SPEC), ms.BatchTransform(4)], executor=executor)
    state = loader.init_state(key)
    with (
        pytest.raises(ms.errors.WorkerCrashed, match="ended 3 times in a row before it could read a batch"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        loader.next_batch(state)
    well.touch()
    _, state, mask = loader.next_batch(state)
    loader.close()
    assert (int(state.step), int(mask.sum())) == (1, 4)


@pytest.mark.parametrize(("how", "times"), [("exit code 7", 3), ("SIGKILL", 10)])
def test_a_worker_that_can_never_start_ends_the_stream_with_a_name(how, times, tmp_path, key):
    def startup():
        (tmp_path / str(os.getpid())).touch()
        os._exit(7) if how == "exit code 7" else os.kill(os.getpid(), signal.SIGKILL)

    source = ms.DiskSampleSource(8, lambda index: {"x": np.float32(index)}, sample_spec=SPEC)
    loader = ms.DataLoader([source, ms.BatchTransform(4)], executor=ms.Processes(1, startup=startup))
    text = f"{how} while it started. It has now ended {times} times in a row before it could read a batch."
    with pytest.raises(ms.errors.WorkerCrashed, match=text), pytest.warns(UserWarning, match="read again"):
        next(loader.iterate(loader.init_state(key)))
    assert len(list(tmp_path.iterdir())) == times


@pytest.mark.parametrize(("number", "times"), [(signal.SIGSEGV, 3), (signal.SIGKILL, 10)])
def test_a_sample_that_ends_every_worker_is_named(number, times, tmp_path, key):
    def read(index):
        if index == 5:
            (tmp_path / str(os.getpid())).touch()
            os.kill(os.getpid(), number)
        return {"x": np.float32(index)}  # not `quick`: a worker that imports this module loads JAX

    source = ms.DiskSampleSource(8, read, sample_spec=SPEC, ordering="sequential")
    loader = ms.DataLoader([source, ms.BatchTransform(4)], executor=ms.Processes(1))
    text = f"reading sample 5. This sample has now ended {times} workers."
    batches = loader.iterate(loader.init_state(key))
    with pytest.raises(ms.errors.WorkerCrashed, match=text), pytest.warns(UserWarning, match="read again"):
        for _ in range(2):
            next(batches)
    assert len(list(tmp_path.iterdir())) == times


def test_workers_that_cannot_be_started_leave_no_file_open(key, assert_nothing_is_left):
    source = ms.DiskSampleSource(8, quick, sample_spec=SPEC)
    loader = ms.DataLoader([source, ms.BatchTransform(4)], executor=ms.Processes(2))
    state = loader.init_state(key)
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # files of other tests that nobody has closed
    highest, fillers = max(map(int, os.listdir("/proc/self/fd"))), [os.dup(0)]
    while fillers[-1] < highest:  # the limit is one of numbers, so that free ones below it must not be there
        fillers.append(os.dup(0))
    opened, refused, started = os.listdir("/proc/self/fd"), 0, 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        while started < 2:
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2 + refused + started, most))
            try:
                with loader.iterate(state) as stream:
                    next(stream)
                started += 1
            except OSError:
                refused += 1
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
        gc.collect()
    left = os.listdir("/proc/self/fd")
    for filler in fillers:
        os.close(filler)
    assert_nothing_is_left()
    assert refused > 0
    assert [str(warning.message) for warning in told if issubclass(warning.category, ResourceWarning)] == []
    assert set(left) <= set(opened)


def test_a_loader_that_is_closed_and_forgotten_takes_its_data_along(key):
    source = ms.HostArraySource({"x": np.zeros(8, np.float32)})
    loader = ms.DataLoader([source, ms.BatchTransform(4)], executor=ms.Threads(1))
    with loader:
        next(loader.iterate(loader.init_state(key)))
    kept, deadline = weakref.ref(source), time.monotonic() + 60
    del source, loader
    while kept() is not None and time.monotonic() < deadline:  # a thread ends after the sample it is at
        gc.collect()
        time.sleep(0.05)
    assert kept() is None


@jax.jit
def add(state, batch):
    return state + jnp.sum(batch[0]["x"])


def test_nothing_reads_on_behind_a_fused_run(key):
    loader = ms.DataLoader([ms.DiskSampleSource(8, quick, sample_spec=SPEC, readers=1), ms.BatchTransform(4)])
    before = threading.enumerate()
    output = ms.train_loop(jnp.float32(0), loader, {ms.on_train_step: add}, stop=4, fuse=2, key=key)
    left = [thread for thread in threading.enumerate() if thread not in before and "millstream" in thread.name]
    for thread in left:
        thread.join(60)
    assert float(output.state) == 2 * sum(range(8))
    assert not any(thread.is_alive() for thread in left)


def test_a_sample_that_could_not_be_read_for_a_while_keeps_no_run_from_going_on(folder, key):
    ill = folder / "ill"

    def read(index):
        if index == 7 and ill.exists():
            raise OSError("the disk is busy")
        return quick(index)

    def run(stop):
        source = ms.DiskSampleSource(8, read, sample_spec=SPEC, ordering="sequential")
        loader = ms.DataLoader([source, ms.BatchTransform(4)], on_error="skip item")
        tasks = {ms.on_train_step: add, ms.every(1): ms.checkpoint(folder / "run")}
        return ms.train_loop(jnp.float32(0), loader, tasks, stop=stop, key=key, resume=True)

    ill.touch()
    assert float(run(2).state) == sum(range(7))
    ill.unlink()
    assert float(run(4).state) == sum(range(7)) + sum(range(8))


UNGUARDED = """
import sys
import jax, numpy as np, millstream as ms

print("runs once")
spec = jax.ShapeDtypeStruct((), np.int32)
rows = [ms.BatchTransform(4)]
read = lambda index: np.int32(100 * ("jax" in sys.modules) + ms.reading.is_worker())
source = ms.DiskSampleSource(8, read, sample_spec=spec)
loader = ms.DataLoader([source, *rows], executor=ms.Processes(2))
with loader.iterate(loader.init_state(jax.random.key(0))) as batches:
    for batch, mask in batches:
        print(batch)
"""
CELLS = """
cells = text.split("\\n\\n")
namespace = {"__name__": "__main__"}
for number, cell in enumerate(cells):
    exec(compile(cell, f"<cell {number}>", "exec"), namespace)
"""


@pytest.mark.parametrize("way", ["a file", "standard input", "cells"])
def test_workers_need_no_main_guard_and_load_no_jax_in(way, tmp_path):
    text = textwrap.dedent(UNGUARDED)
    (tmp_path / "train.py").write_text(text)
    arguments = {
        "a file": ["train.py"],
        "standard input": ["-"],
        "cells": ["-c", f"text = {text!r}\n{CELLS}"],
    }
    command = [sys.executable, *arguments[way]]
    given = text if way == "standard input" else ""
    ran = subprocess.run(command, input=given, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (ran.stdout, ran.stderr) == ("runs once\n" + 2 * "[1 1 1 1]\n", "")
