"""Ctrl-C inside a `with loader.iterate(...)` block: stop, then raise, then leave at once."""

import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from futures_executor import Futures, FuturesBackend

import millstream as ms
from millstream.reading.interrupts import Interrupts


def loader():
    return ms.DataLoader([ms.ArraySampleSource({"x": np.arange(12.0, dtype=np.float32)}), ms.BatchTransform(4)])


def press():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_the_first_ends_the_stream_after_the_current_batch(key, capfd):
    data, seen = loader(), []
    with data.iterate(data.init_state(key)) as batches:
        for batch, _ in batches:
            press()
            seen.append(batch)
    assert len(seen) == 1
    assert batches.interrupted
    assert "Press Ctrl-C again" in capfd.readouterr().err
    assert int(batches.state.step) == 1


def test_the_second_raises_at_the_next_batch(key):
    data = loader()
    with pytest.raises(KeyboardInterrupt), data.iterate(data.init_state(key)) as batches:
        next(batches)
        press()
        press()
        next(batches)
    assert batches.interrupted


def test_the_second_raises_at_once_if_a_batch_is_waited_for():
    interrupts = Interrupts()
    interrupts.install()
    interrupts.waiting = True
    press()
    with pytest.raises(KeyboardInterrupt):
        press()
    interrupts.restore()


def test_the_second_may_come_in_the_next_stream_of_the_loader(key):
    data = loader()
    with data.iterate(data.init_state(key)) as batches:
        press()
    with pytest.raises(KeyboardInterrupt), data.iterate(data.init_state(key)) as batches:
        press()
        next(batches)


def test_the_third_ends_the_process():
    code = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from millstream.reading.interrupts import Interrupts
Interrupts().install()
for _ in range(3):
    signal.raise_signal(signal.SIGINT)
print("never")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (130, "")
    assert "Traceback" not in ran.stderr


def test_a_stream_inside_of_another_is_stopped_too(key):
    data, other = loader(), loader()
    with data.iterate(data.init_state(key)) as outer:
        for _ in outer:
            with other.iterate(other.init_state(key)) as inner:
                seen = [press() for _ in inner]
            assert inner.interrupted and len(seen) == 1
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert outer.interrupted
    assert int(outer.state.step) == 1


def test_outside_of_a_block_it_raises_at_once(key):
    data = loader()
    with pytest.raises(KeyboardInterrupt):
        for _ in data.iterate(data.init_state(key)):
            press()


def test_a_handler_of_the_program_stays_in_force(key):
    data, pressed = loader(), []
    signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
    with data.iterate(data.init_state(key)) as batches:
        press()
        assert len(list(batches)) == 3
    assert pressed == [1] and not batches.interrupted
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_handler_set_inside_of_the_block_stays(key):
    data = loader()
    with data.iterate(data.init_state(key)):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_block_in_another_thread_leaves_signals_alone(key):
    data, handlers = loader(), []

    def run():
        with data.iterate(data.init_state(key)) as batches:
            handlers.append(signal.getsignal(signal.SIGINT))
            handlers.append(len(list(batches)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler, 3]


class Collected:
    """Ctrl-C comes while Python collects this, which prints the interrupt and forgets it."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


class LosingBackend(FuturesBackend):
    def collect(self, job):
        Collected()
        return super().collect(job)


class Losing(Futures):
    def open(self, source, layout, ahead, tolerant):
        return LosingBackend(source, layout, self.workers, tolerant)


def slow(value):
    time.sleep(1e-3)
    return True


LONG_CALLS = {
    "prepare": lambda folder: ms.prepare(
        ms.DatasetSource(range(100)), folder, lambda n: n if n != 50 or Collected() else None, samples_per_shard=10
    ),
    "select": lambda folder: ms.views.select(ms.DatasetSource(range(2000)), slow, executor=Losing(2)),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("call", LONG_CALLS)
def test_an_interrupt_that_python_forgets_ends_a_long_call(tmp_path, call):
    with pytest.raises(KeyboardInterrupt):
        LONG_CALLS[call](tmp_path / "out")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
