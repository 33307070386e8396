"""SIGTERM and Ctrl-C end a run after its step, with everything saved, and it resumes as if nothing had been."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import resume_script as script
from conftest import CACHE, STRICT, free_address

import millstream as ms
from millstream.checkpoints import CheckpointStore

pytestmark = pytest.mark.optimized

KEY = jax.random.key(script.KEY_SEED)
SCRIPT = pathlib.Path(script.__file__)
PATIENCE = 300.0


@pytest.fixture(scope="module")
def loader():
    return script.loader()


@pytest.fixture(scope="module")
def on_disk():
    return script.loader(ms.Threads(2), on_disk=True)


@pytest.fixture(scope="module")
def expected(memory, loader):
    """What a run comes to that nothing disturbs."""
    script.faults.set(None)
    return script.run(memory / "whole", batches=loader)[1]


@pytest.fixture(autouse=True)
def handlers_as_they_were():
    """Whatever a loop does, signals are handled afterwards as they were before."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    script.faults.set(None)
    assert [signal.getsignal(number) for number in numbers] == before


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


PLACES = [
    ("compile", 1),
    ("first step", 1),
    ("data", 1),
    ("data", 30),
    ("step", 5),
    ("step", 6),
    ("step", 18),
    ("evaluation", 1),
    ("evaluation", 5),
    ("evaluation", 9),
    ("save", 3),
    ("save", 40),
    ("epoch begin", 1),
    ("epoch begin", 2),
    ("epoch end", 1),
    ("epoch end", 3),
    ("shutdown", 1),
]


@pytest.mark.parametrize(("place", "count"), PLACES)
def test_sigterm_anywhere_saves_and_the_run_goes_on_from_there(expected, folder, loader, on_disk, place, count):
    batches = on_disk if place == "data" else loader
    script.faults.watch_files()
    if place == "compile":
        script.train_step.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
    script.faults.set(place, count, signal.SIGTERM)
    with pytest.raises(ms.errors.Preempted) as raised:
        script.run(folder, batches=batches)
    assert raised.value.code == 143
    output = raised.value.loop_output
    if place == "step":
        assert output.elapsed.steps == count  # the step in which it came is the last
    with CheckpointStore(folder / "run", read_only=True) as store:
        assert store.latest() == (output.elapsed.steps or None)
    _, found = script.run(folder, batches=batches)
    assert not script.differences(found, expected)


def test_a_test_that_was_cut_short_is_done_again_and_the_rest_of_the_step_too(expected, folder, loader):
    for count in (2, 1, 3):  # again and again, at the end of one epoch
        script.faults.set("evaluation", count, signal.SIGTERM)
        with pytest.raises(ms.errors.Preempted) as raised:
            script.run(folder, batches=loader)
        assert raised.value.loop_output.elapsed.steps == script.EPOCH
        assert ms.restore(folder / "run", script.start()).unfinished is not None
    _, found = script.run(folder, batches=loader)
    assert not script.differences(found, expected)


class AfterBatch:
    """A loader during whose batches SIGTERM comes: when a batch is there already, and has not been handed out."""

    def __init__(self, loader, step, action):
        self._loader, self._step, self._action = loader, step, action
        self.steps_per_epoch, self.init_state, self.contents = (
            loader.steps_per_epoch,
            loader.init_state,
            loader.contents,
        )

    def iterate(self, state, *, steps=None):
        batches, step, action = self._loader.iterate(state, steps=steps), self._step, self._action

        class Iterator(type(batches)):
            def __next__(self):
                batch = super().__next__()
                if int(self.state.step) == step:
                    action()
                return batch

        batches.__class__ = Iterator
        return batches


def interrupt_twice():
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("action", [terminate, interrupt_twice])
def test_a_batch_that_comes_in_the_moment_of_a_signal_is_not_lost(expected, folder, loader, action):
    with contextlib.suppress(ms.errors.Preempted):
        output, _ = script.run(folder, batches=AfterBatch(loader, 6, action))
        assert output.interrupted
    saved = ms.restore(folder / "run", script.start(), loader)
    assert saved.elapsed.steps == int(saved.data_state.step) == 5
    _, found = script.run(folder, batches=loader)
    assert not script.differences(found, expected)


@pytest.mark.parametrize("executor", [ms.Threads(1), ms.Processes(1)], ids=["threads", "processes"])
def test_nobody_waits_for_a_batch_that_does_not_come(folder, executor):
    def read(index):
        if (index == 9 and threading.current_thread().name != "MainThread") or ms.reading.is_worker():
            time.sleep(30 if index == 9 else 0)
        return np.float32(index)

    def terminate_soon(state, batch, elapsed):
        if elapsed.steps == 4:
            threading.Timer(0.3, terminate).start()

    spec = jax.ShapeDtypeStruct((), np.float32)
    source = ms.DiskSampleSource(12, read, sample_spec=spec, ordering="sequential")
    slow = ms.DataLoader([source, ms.BatchTransform(2)], executor=executor)
    tasks = {ms.every(1): [lambda state: state + 1, terminate_soon], ms.every(1): ms.checkpoint(folder)}
    with pytest.raises(ms.errors.Preempted) as raised:
        ms.loop(jnp.int32(0), slow, tasks, stop=6, key=KEY)
    assert raised.value.loop_output.elapsed.steps == 4  # and not five: that batch would have come in the end
    assert int(ms.restore(folder, jnp.int32(0), slow).state) == 4


def test_before_the_first_step_there_is_nothing_to_save(folder, loader):
    tasks = {ms.every(1): script.train_step, ms.every(1): ms.checkpoint(folder)}
    with pytest.raises(ms.errors.Preempted) as raised:
        ms.loop(script.start(), loader, tasks, stop=3, key=KEY, on_start=[terminate])
    assert raised.value.loop_output.elapsed.steps == 0
    assert ms.loop(script.start(), loader, tasks, stop=3, key=KEY, resume=True).elapsed.steps == 3


def test_ctrl_c_returns_what_there_is_and_the_run_can_go_on(expected, folder, loader):
    script.faults.set("step", 7, signal.SIGINT)
    output, _ = script.run(folder, batches=loader)
    assert output.interrupted
    assert output.elapsed.steps == 7
    script.faults.set("evaluation", 2, signal.SIGINT)
    output, _ = script.run(folder, batches=loader)
    assert output.interrupted
    assert output.elapsed.steps == 2 * script.EPOCH
    _, found = script.run(folder, batches=loader)
    assert not script.differences(found, expected)


def count_up(folder, *more, **options):
    tasks = {ms.every(1): [lambda state: state + 1, *more], ms.every(100): ms.checkpoint(folder)}
    return ms.loop(jnp.int32(0), lambda: range(5), tasks, **options)


def test_a_handler_of_the_program_is_called_when_all_is_saved(folder):
    told = []

    def handler(number, frame):
        told.append((number, ms.restore(folder, jnp.int32(0)).elapsed.steps))

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(ms.errors.Preempted):
            count_up(folder, terminate)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == [(signal.SIGTERM, 1)]


def test_a_program_that_ignores_sigterm_goes_on_to_do_so(folder):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert count_up(folder, terminate).elapsed.steps == 5
    finally:
        signal.signal(signal.SIGTERM, before)


def test_several_sigterms_are_one(folder):
    with pytest.raises(ms.errors.Preempted) as raised:
        count_up(folder, terminate, terminate, terminate)
    assert raised.value.loop_output.elapsed.steps == 1


def test_a_failing_step_is_no_preemption(folder):
    def fail(state):
        terminate()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        count_up(folder, fail)


def test_without_anything_to_save_with_sigterm_is_left_alone():
    handlers = []
    ms.loop(0, range(2), {ms.every(1): lambda state: handlers.append(signal.getsignal(signal.SIGTERM))})
    assert handlers == [signal.getsignal(signal.SIGTERM)] * 2


def test_sigterm_is_given_back_inside_of_a_block_that_handles_ctrl_c(folder, loader):
    before = signal.getsignal(signal.SIGTERM)
    with loader.iterate(loader.init_state(KEY), steps=2) as batches:
        count_up(folder)
        assert signal.getsignal(signal.SIGTERM) is before
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert len(list(batches)) == 2


def test_a_loop_in_another_thread_leaves_signals_alone(folder):
    handlers = []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        look = lambda state: handlers.append(signal.getsignal(signal.SIGTERM))  # noqa: E731
        assert pool.submit(count_up, folder, look).result().elapsed.steps == 5
    assert set(handlers) == {signal.getsignal(signal.SIGTERM)}


def test_a_run_inside_of_another_is_saved_too(folder):
    done = []

    def trial(state, batch):
        done.append(count_up(folder / str(batch), *([terminate] if batch == 1 else [])).elapsed.steps)

    with pytest.raises(ms.errors.Preempted) as raised:
        ms.loop(None, range(3), {ms.every(1): trial})
    assert raised.value.loop_output.elapsed.steps == 2
    assert done == [5, 1]
    assert ms.restore(folder / "1", jnp.int32(0)).elapsed.steps == 1


def evaluate(*actions):
    """An inner loop of three steps that does something in the second of them, once."""
    left = list(actions)

    def step(state, batch):
        if batch == 1 and left:
            left.pop()()

    return ms.inner_loop("test", lambda state: ms.loop(state, [0, 1, 2], {ms.every(1): step}))


def trace(folder, evaluation, dataset, **options):
    """A run with an evaluation in front of its steps, and what callbacks after it saw of batches."""
    seen = []

    def note(state, batch, elapsed):
        seen.append((elapsed.steps, int(np.sum(batch[0]["index"]))))

    tasks = [(ms.every(2), evaluation), (ms.every(1), [script.train_step, note]), (ms.every(1), ms.checkpoint(folder))]
    return ms.loop(script.start(), dataset, tasks, stop=5, **options), seen


@pytest.mark.parametrize("kind", ["loader", "iterable"])
def test_a_step_that_was_cut_short_at_its_begin_is_done_with_its_own_batch(folder, loader, kind):
    batches = list(loader.iterate(loader.init_state(KEY), steps=5))
    dataset, key = (loader, {"key": KEY}) if kind == "loader" else (batches, {})
    whole, seen = trace(folder / "whole", evaluate(), dataset, **key)
    with pytest.raises(ms.errors.Preempted) as raised:
        trace(folder / "cut", evaluate(terminate), dataset, **key)
    assert raised.value.loop_output.elapsed.steps == 2
    with contextlib.nullcontext() if kind == "loader" else pytest.warns(UserWarning, match="1 batches are drawn"):
        rest, rest_seen = trace(folder / "cut", evaluate(), dataset, resume=True, **key)
    assert rest_seen == seen[1:]
    assert script.bits(rest.state) == script.bits(whole.state)
    assert script.table(rest.history) == script.table(whole.history)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_an_evaluation_at_the_begin_of_the_run_ends_it_too(folder):
    with pytest.raises(ms.errors.Preempted) as raised:
        count_up(folder, on_start=[evaluate(terminate)])
    assert raised.value.loop_output.elapsed.steps == 0
    assert count_up(folder, on_start=[evaluate(interrupt)]).elapsed.steps == 0


def test_fused_steps_are_saved_and_go_on(folder, loader):
    def run(name, *actions, **options):
        tasks = [
            (ms.every(3), evaluate(*actions)),
            (ms.every(1), script.train_step),
            (ms.every(50), ms.checkpoint(folder / name)),
        ]
        return ms.loop(script.start(), loader, tasks, stop=8, key=KEY, fuse=3, **options)

    whole = run("whole")
    with pytest.raises(ms.errors.Preempted) as raised:
        run("cut", terminate)
    assert raised.value.loop_output.elapsed.steps == 2
    rest = run("cut", resume=True)
    assert script.bits(rest.state) == script.bits(whole.state)
    assert script.table(rest.history) == script.table(whole.history)


def test_a_program_that_is_terminated_ends_with_143_and_without_a_word(expected, folder, loader):
    words = ["place=evaluation", "count=2", f"number={int(signal.SIGTERM)}"]
    command = [sys.executable, *STRICT, SCRIPT, folder, *words]
    environment = os.environ | CACHE | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert (run.returncode, run.stdout, run.stderr) == (143, "", "")
    _, found = script.run(folder, batches=loader)
    assert not script.differences(found, expected)


def run_together(count, *words):
    """The same run on that many processes with two devices in all: exit codes, what was told, and errors."""
    address = free_address()
    flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={2 // count}"]
    flags = " ".join([*flags, "--xla_backend_optimization_level=0"])  # what takes time here is compiling
    environment = os.environ | CACHE | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", SCRIPT, *words]
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen([*command, f"together={address},{count},{number}"], env=environment, stdout=pipe, stderr=pipe)
        for number in range(count)
    ]
    try:
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            ended = list(pool.map(lambda process: process.communicate(timeout=PATIENCE), started))
    finally:
        for process in started:
            process.kill()
            process.communicate()
    lines = [[json.loads(line) for line in out.splitlines() if line.startswith(b"{")] for out, _ in ended]
    return [process.returncode for process in started], lines, [error.decode() for _, error in ended]


def test_sigterm_to_one_process_of_a_run_stops_all_of_them_at_the_same_step(folder):
    codes, stopped, errors = run_together(2, folder / "cut", "terminated=1,5")
    assert codes == [143, 143], errors
    (steps,) = stopped[0]
    assert stopped == [[steps]] * 2
    assert steps["steps"] >= 5
    shutil.copytree(folder / "cut", folder / "copy")
    codes, ((whole, on_one),), errors = run_together(1, folder / "whole", f"more={folder / 'copy'}")
    assert codes == [0], errors
    assert whole["steps"] > steps["steps"]
    assert on_one == whole
    codes, on_two, errors = run_together(2, folder / "cut")
    assert codes == [0, 0], errors
    assert on_two == [[whole]] * 2
