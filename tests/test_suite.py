"""What the other tests rest on: programs that processes share, the counter of compilations, and interrupts."""

import os
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import CACHE, STRICT, drop_bad_entries, require_interrupts

cached = pytest.mark.skipif(not CACHE, reason="with this JAX, processes do not share what they compile")


def new_program(name):
    def program(x):
        return 3 * x + 2

    program.__name__ = name
    return jax.jit(program)


def entries(name):
    return list(pathlib.Path(CACHE["JAX_COMPILATION_CACHE_DIR"]).glob(f"jit_{name}-*-cache"))


def forget(name):
    for entry in entries(name):  # of a different checkout, say
        entry.unlink()


@cached
def test_a_program_that_was_compiled_before_is_counted_all_the_same(count_compilations):
    forget("program_that_is_counted")
    for _ in range(2):
        with count_compilations() as count:
            assert float(new_program("program_that_is_counted")(np.float32(1))) == 5
        assert count == [1]
    assert len(entries("program_that_is_counted")) == 1


@cached
def test_half_an_entry_is_compiled_again():
    forget("program_that_is_halved")
    new_program("program_that_is_halved")(np.float32(1))
    (entry,) = entries("program_that_is_halved")
    whole = entry.read_bytes()
    for half in (whole[: len(whole) // 2], b""):
        entry.write_bytes(half)
        assert float(new_program("program_that_is_halved")(np.float32(1))) == 5


@pytest.mark.parametrize("options", [(), STRICT])
def test_a_program_says_nothing_of_an_entry_that_is_still_written(tmp_path, options):
    run = [sys.executable, *options, "-c", "import jax; print(jax.jit(lambda x: x * 7 - 1)(5))"]
    environment = os.environ | CACHE | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    for _ in range(2):
        done = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=120)
        assert (done.returncode, done.stdout, done.stderr) == (0, "34\n", "")
        for entry in tmp_path.glob("*-cache"):
            entry.write_bytes(entry.read_bytes()[:-9])
    assert any(tmp_path.iterdir()) == bool(CACHE)


def test_half_entries_and_old_ones_are_dropped(tmp_path):
    from jax._src.compilation_cache import compress_executable  # how depends on the packages that are installed

    whole = compress_executable(b"a program")
    for name, content, time in (
        ("whole", whole, 200),
        ("half", whole[:-3], 200),
        ("empty", b"", 200),
        ("old", whole, 1),
    ):
        entry = tmp_path / f"{name}-cache"
        entry.write_bytes(content)
        os.utime(entry, (time, time))
    drop_bad_entries(tmp_path, oldest=100)
    assert [entry.name for entry in tmp_path.iterdir()] == ["whole-cache"]


def test_the_suite_does_not_start_where_interrupts_are_ignored():
    require_interrupts()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(pytest.UsageError, match=r"need SIGINT.* write: env --default-signal=INT make tests &"):
            require_interrupts()
    finally:
        signal.signal(signal.SIGINT, before)
