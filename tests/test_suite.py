"""What the other tests rest on: compiled programs that processes share, and the counter of compilations."""

import os
import pathlib
import zlib

import jax
import numpy as np
from conftest import CACHE, drop_bad_entries


def program():
    @jax.jit
    def program_of_the_test_of_the_cache(x):
        return 3 * x + 2

    return program_of_the_test_of_the_cache


def entries():
    folder = pathlib.Path(CACHE["JAX_COMPILATION_CACHE_DIR"])
    return list(folder.glob("jit_program_of_the_test_of_the_cache-*-cache"))


def test_a_program_that_was_compiled_before_is_counted_all_the_same(count_compilations):
    for _ in range(2):
        with count_compilations() as count:
            assert float(program()(np.float32(1))) == 5
        assert count == [1]
    assert len(entries()) == 1


def test_half_an_entry_is_compiled_again():
    program()(np.float32(1))
    (entry,) = entries()
    whole = entry.read_bytes()
    for half in (whole[: len(whole) // 2], b""):
        entry.write_bytes(half)
        assert float(program()(np.float32(1))) == 5
    entry.write_bytes(whole)


def test_half_entries_and_old_ones_are_dropped(tmp_path):
    whole = zlib.compress(b"a program")
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
