"""Workers are forked from a process that stays: they are as if this one had started them, and its death costs time."""

import os
import pathlib
import resource
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from worker_processes import children, nurseries

import millstream as ms
from millstream.reading.workers import nursery

SPEC = {"x": jax.ShapeDtypeStruct((), np.int32)}


def loader_of(read, samples=16, workers=2, **options):
    source = ms.DiskSampleSource(samples, lambda index: {"x": np.int32(read(index))}, sample_spec=SPEC)
    return ms.DataLoader([source, ms.BatchTransform(4)], executor=ms.Processes(workers, **options), prefetch=1)


def values(loader, key):
    with loader.iterate(loader.init_state(key)) as batches:
        return [int(value) for batch, _ in batches for value in np.asarray(batch["x"])]


def asked(question, key, **options):
    """What workers answer, each of them."""
    return set(values(loader_of(lambda index: question(), **options), key))


def test_streams_have_workers_of_their_own_and_one_nursery(key):
    first = asked(os.getpid, key)
    (before,) = nurseries()[-1:]
    second = asked(os.getpid, key)
    assert not first & second
    assert nurseries()[-1:] == [before]
    assert asked(os.getppid, key) == {before}


def test_a_worker_has_the_environment_the_folder_the_limits_and_the_umask_of_now(key, tmp_path, monkeypatch):
    values(loader_of(int), key)
    before = nurseries()
    monkeypatch.setenv("MILLSTREAM_TEST_NUMBER", "41")
    monkeypatch.chdir(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    umask = os.umask(0o27)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0] - 3, limits[1]))
        assert asked(lambda: int(os.environ["MILLSTREAM_TEST_NUMBER"]), key) == {41}
        assert asked(lambda: os.stat(".").st_ino % 2**31, key) == {tmp_path.stat().st_ino % 2**31}
        assert asked(lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0], key) == {limits[0] - 3}
        assert asked(lambda: os.umask(0o27), key) == {0o27}
    finally:
        os.umask(umask)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    monkeypatch.delenv("MILLSTREAM_TEST_NUMBER")
    assert asked(lambda: int("MILLSTREAM_TEST_NUMBER" in os.environ), key) == {0}
    assert asked(lambda: len(os.sched_getaffinity(0)), key) == {len(os.sched_getaffinity(0))}
    assert nurseries() == before


def test_what_python_reads_when_it_starts_is_read_by_a_new_nursery(key, monkeypatch):
    values(loader_of(int), key)
    before = nurseries()
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    assert asked(lambda: sys.flags.optimize, key) == {1}
    assert nurseries() != before
    monkeypatch.delenv("PYTHONOPTIMIZE")
    assert asked(lambda: sys.flags.optimize, key) == {0}


def test_what_a_worker_prints_goes_where_this_process_prints(key, capfd):
    def say(index):  # by one call: where Python does not buffer, print writes the end of the line by another one
        sys.stdout.write(f"sample {index} of a worker\n")
        sys.stdout.flush()
        return 0

    values(loader_of(say, samples=8), key)
    assert sorted(capfd.readouterr().out.splitlines()) == [f"sample {index} of a worker" for index in range(8)]


def test_workers_draw_different_numbers_from_the_generator_of_numpy(key):
    drawn = values(loader_of(lambda index: np.random.randint(2**31), samples=64, workers=4), key)
    assert len(set(drawn)) == 64


def test_a_killed_nursery_costs_time_and_nothing_else(key):
    loader = loader_of(lambda index: time.sleep(0.005) or index, samples=64)
    expected = values(loader, key)
    for number in (signal.SIGKILL, signal.SIGTERM):
        found = []
        with pytest.warns(UserWarning, match="was killed by SIGKILL.*Its batch is read again"):
            with loader.iterate(loader.init_state(key)) as batches:
                for step, (batch, _) in enumerate(batches):
                    found += np.asarray(batch["x"]).tolist()
                    if step in (2, 7):
                        os.kill(nurseries()[-1], number)
        assert found == expected


def test_a_nursery_that_was_killed_while_it_had_no_worker_leaves_nothing(key):
    values(loader_of(int), key)
    before, killed = set(children()), nurseries()[-1]
    os.kill(killed, signal.SIGKILL)
    os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)
    nursery.get_ready()
    assert killed not in nurseries()
    assert set(children()) == before


def test_a_nursery_that_does_not_answer_is_replaced(key, monkeypatch):
    monkeypatch.setattr(nursery, "_ANSWER", 0.5)
    expected = values(loader_of(int), key)
    held = nurseries()[-1]
    os.kill(held, signal.SIGSTOP)
    assert values(loader_of(int), key) == expected
    assert held not in nurseries()


def test_a_nursery_that_can_never_be_loaded_is_an_error_that_says_so(key, monkeypatch, capfd):
    monkeypatch.setattr(nursery, "_BOOT", "raise SystemExit('no such {module}')")
    monkeypatch.setenv("PYTHONNOUSERSITE", "1")  # so that it is a new one
    with pytest.raises(ConnectionResetError, match="has ended 3 times in a row before there was one"):
        values(loader_of(int), key)
    # One more is started while others are got ready: it may have ended before the first try, and not count.
    assert capfd.readouterr().err.count("no such nursery_process") in (3, 4)
    monkeypatch.undo()
    assert len(values(loader_of(int), key)) == 16


def test_threads_share_the_nursery(key):
    expected, found = values(loader_of(int), key), []
    threads = [threading.Thread(target=lambda: found.append(values(loader_of(int), key))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 6


def test_a_worker_that_is_forgotten_ends(key):
    values(loader_of(int), key)
    before, (ours, theirs) = set(children()), os.pipe()
    forked = nursery.start_worker([theirs] * 5, 0)
    assert set(children()) - before == {forked.pid}
    del forked
    assert set(children()) == before
    os.close(ours)
    os.close(theirs)


def test_where_a_process_can_wait_for_its_own_children_only_each_worker_is_an_interpreter(key, monkeypatch):
    expected = values(loader_of(int), key)
    monkeypatch.setattr(nursery, "can_fork", lambda: False)
    assert values(loader_of(int), key) == expected
    assert asked(os.getppid, key) == {os.getpid()}


def test_an_interpreter_that_begins_with_a_thread_is_not_forked(key, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert asked(os.getppid, key) == {os.getpid()}


def test_a_fork_of_the_program_has_a_nursery_of_its_own_and_leaves_the_other_alone(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(
        """
import os, socket, sys
from millstream.reading.workers.nursery import start_worker

ours, theirs = socket.socketpair()
inherited = [theirs.fileno(), *[os.memfd_create("test")] * 4]
os.truncate(inherited[1], 4096)
first = start_worker(inherited, 0)
child = os.fork()
if not child:
    del first
    second = start_worker(inherited, 1)
    assert second.poll() is None
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
second = start_worker(inherited, 2)
assert first.poll() is None and second.poll() is None
parents = [open(f"/proc/{worker.pid}/stat").read().rpartition(")")[2].split()[1] for worker in (first, second)]
assert parents[0] == parents[1]
print(*parents[:1], first.pid, second.pid)
"""
    )
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    deadline = time.monotonic() + 30
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in done.stdout.split()):  # they end with the program
        assert time.monotonic() < deadline
        time.sleep(0.01)
