"""Tables in terminals of any width, and in files."""

import itertools
import os
import re
import subprocess
import sys

import hypothesis.strategies as st
import numpy as np
import pytest
from conftest import CACHE
from hypothesis import given
from terminal import run_in_terminal

import millstream as ms
from millstream.text.tables import WIDTH, line_width, name_table, text_table, time_text, times_text

PROGRAM = """
import jax, numpy as np, millstream as ms
from millstream.inspect import Difference, TimedStage, TriedOptions, Tuning, Verification, VerificationRow

source = ms.HostArraySource({"image": np.zeros((1000, 8, 8, 1), np.uint8), "label": np.arange(1000)})
loader = ms.DataLoader([source, ms.HostMapTransform(lambda s: s), ms.BatchTransform(16)], executor=ms.Threads(2))
print(loader.stats())
for batch, mask in loader.iterate(loader.init_state(jax.random.key(0)), steps=3):
    pass
print("--", loader.stats(), sep="\\n")
print("--", loader.explain().table(), sep="\\n")
difference = Difference("resume", "step 3", "batch['image']", "1.5", "2.5", "The stage counts its calls. Use its key.")
row = VerificationRow("resume", "failed", "resumed before steps 1, 6, 20, 33, 62", difference, ("left " * 20,))
print("--", Verification((row,), 1.0), sep="\\n")
tried = [TriedOptions(ms.Threads(8), 2, 123456.7, 0.25, 1.5, "one run in three was 5 times as slow as the others")]
print("--", Tuning([TimedStage("HostMapTransform", "sample", 1.8e-5, 1e-5)], tried, {"executor": None, "prefetch": 2},
    "reading is the bottleneck", {}), sep="\\n")
layers = [{"attention": {"query": np.ones((512, 512))}}] * 2
print("--", ms.overview({"encoder": {"layers": layers}}, stats=True), sep="\\n")
"""


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_tables_fit_the_terminal(columns):
    status, lines = run_in_terminal([sys.executable, "-c", PROGRAM], columns, os.environ | CACHE)
    assert status == 0, "\n".join(lines)
    text = "\n".join(lines)
    unused, stats, explanation, verification, tuning, overview = text.split("--\n")
    assert unused == "nothing read yet\n"
    assert re.search(r"^samples +48$", stats, re.MULTILINE)
    assert re.search(r"^idle +\S+ [mu]s per batch", stats, re.MULTILINE)
    # A terminal breaks lines that are too long: then a rule, which is a single word, has a rest in the next line.
    rules = [line for line in lines if "─" in line]
    assert rules and all(len(line) <= columns and set(line) == {"─"} for line in rules)
    assert not [pair for pair in itertools.pairwise(lines) if all("─" in line for line in pair)]
    assert "HostArraySource" in explanation and "buffers of 4.1 kB" in " ".join(explanation.split())
    assert "The stage counts its calls. Use its key." in " ".join(verification.split())
    assert "18 us" in tuning and "123,457" in tuning
    assert "encoder.layers.0.attention.query" in overview and "524,288" in overview
    # Beside each other in a wide terminal, notes under their row in a usual one, and a line per cell in a narrow one.
    assert ("label (16,) int32" in explanation) and ("  per batch        1.09 kB" in explanation) == (columns == 40)
    assert ("\n  last batch: 8 of 16 rows real" in explanation) == (columns == 80)
    assert ("kB  last batch: 8 of 16 rows real" in explanation) == (columns == 120)


def test_tables_have_one_width_in_files_and_pipes(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=os.environ | CACHE, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert 80 < max(map(len, done.stdout.splitlines())) <= WIDTH
    assert line_width() == WIDTH


@pytest.mark.parametrize("stream", [None, "closed"])
def test_tables_need_no_standard_output(stream, monkeypatch, tmp_path):
    if stream == "closed":
        stream = open(tmp_path / "file", "w")
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    assert line_width() == WIDTH


CELLS = st.text(st.sampled_from("abc de,.()[] é"), max_size=40).map(lambda text: " ".join(text.split()))


@given(st.lists(st.tuples(CELLS.filter(bool), CELLS, CELLS), min_size=1, max_size=4), st.integers(12, 90))
def test_a_table_of_any_width_has_all_its_texts_and_fits(rows, width):
    header = ["name", "number", "note"]
    table = text_table(header, rows, numbers=["number"], prose=["note"], width=width)
    assert max(map(len, table.splitlines())) <= width
    letters = sorted("".join("".join(row) for row in rows).replace(" ", ""))
    found = sorted("".join(table.split()))
    for letter in letters:
        found.remove(letter)  # raises if one was cut off


@given(st.lists(st.tuples(CELLS.filter(bool), CELLS), min_size=1, max_size=4), st.integers(12, 90))
def test_names_and_texts_of_any_width_are_whole(rows, width):
    table = name_table(rows, width=width)
    assert max(map(len, table.splitlines())) <= width
    assert sorted("".join(table.split())) == sorted("".join(name + text for name, text in rows).replace(" ", ""))


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (times_text(1.0), "1x"),
        (times_text(99.96), "100x"),
        (times_text(1638.4), "1,600x"),
        (times_text(12_345_678), "12,000,000x"),
        (time_text(1.78e-5), "17.8 us"),
        (time_text(0), "0 us"),
        (time_text(2.5), "2.5 s"),
        (time_text(12_345), "12,345 s"),
    ],
)
def test_numbers_are_written_as_people_read_them(number, text):
    assert number == text


@pytest.mark.parametrize("ending", [{}, {"drop_last": True}, {"pad_last_batch": False}], ids=str)
def test_samples_of_arrays_in_memory_are_counted_by_all_doors(ending, key):
    loader = ms.DataLoader([ms.ArraySampleSource(np.arange(10, dtype=np.int32)), ms.BatchTransform(4, **ending)])
    state, expected = loader.init_state(key), 0
    for _, mask in loader.iterate(state, steps=5):
        expected += int(mask.sum())
    assert loader.stats().samples == expected
    expected += int(loader.next_batch(loader.init_state(key, step=2))[2].sum())
    assert loader.stats().samples == expected

    def count(total, batch, mask):
        return total + mask.sum(), None

    for step in range(10):
        state, counted, _ = loader.scan_epoch(loader.init_state(key, step=step), np.int32(0), count)
        expected += int(counted)
    state, counted, _ = loader.run_steps(state, np.int32(0), count, 2, width=3)
    assert loader.stats().samples == expected + int(counted)
    assert loader.stats().batches == 5 + 1 + 10 * loader.steps_per_epoch + 2


def test_a_loader_that_only_ran_in_programs_says_no_more_than_it_knows(key):
    loader = ms.DataLoader([ms.ArraySampleSource(np.arange(8, dtype=np.int32)), ms.BatchTransform(4)])
    assert repr(loader.stats()) == "nothing read yet"
    loader.scan_epoch(loader.init_state(key), 0, lambda total, batch, mask: (total, None))
    assert repr(loader.stats()) == ("batches     2\nsamples     8\nbottleneck  making batches in the compiled program")
