"""Workers that die, hang or leave, memory that is too small, programs that are killed: a slice of `soak.py`.

Every row counts its runs, and says with which seed it ran. What hangs shows all its stacks and is killed.
"""

import os
import socket
import subprocess
import sys
import textwrap

import chaos
import pytest

from millstream.host._channel import _HEADER, MAX_FRAME, Channel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes and what they hold are counted in /proc")

SEED = int.from_bytes(os.urandom(2))
ROWS = {
    "killed_worker": 3,
    "death": 10,
    "poison": 2,
    "exceptions": 15,
    "stalled": 3,
    "leaving": 5,
    "no_room": 2,
    "abandoned": 3,
    "epochs": 60,
    "held": 1,
    "many_held": 100,
    "warning_as_error": 1,
    "interrupted_inside": 3,
    "forked": 1,
    "closed_elsewhere": 1,
}


def check(outcome, runs):
    assert outcome.failures == [], f"seed {SEED}\n" + "\n".join(outcome.failures)
    assert outcome.ok == outcome.runs >= runs
    assert (outcome.lost, outcome.repeated, outcome.leaks) == (0, 0, 0)


@pytest.fixture(scope="module")
def outcomes():
    return chaos.trials(ROWS, SEED, limit=180)


@pytest.mark.parametrize("row", ROWS)
def test_a_stream_survives_or_names(row, outcomes):
    outcome = outcomes[row]
    if row == "epochs":  # too few to tell a slope of memory
        outcome.failures = [failure for failure in outcome.failures if "KiB" not in failure]
    check(outcome, ROWS[row])


@pytest.mark.parametrize(("row", "runs"), [("main_killed", 6), ("interrupted", 6), ("clean_exit", 6)])
def test_nothing_is_left_of_a_program_that_is(row, runs):
    check(chaos.driven(row, runs, SEED), runs)


def test_a_tmpfs_that_is_too_small_is_named_before_the_first_batch(tmp_path):
    """In a mount namespace of its own, where that is allowed."""
    code = f"import sys; sys.path.insert(0, {str(chaos.HERE)!r}); import chaos; "
    code += f"outcome = chaos.trials({{'no_room': 2}}, {SEED}, SMALL_TMPFS={str(tmp_path)!r})['no_room']; "
    code += "print(outcome.failures); sys.exit(outcome.ok != 2 or outcome.leaks > 0)"
    mount = f'mount -t tmpfs -o size=1m none {tmp_path} || exit 99; exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", code]
    try:
        ran = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if ran.returncode == 99 or "unshare" in ran.stderr:
        pytest.skip(f"a mount namespace is not allowed: {ran.stderr.strip()}")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert os.listdir(tmp_path) == []


def test_a_frame_comes_whole_or_not_at_all():
    ours, theirs = socket.socketpair()
    channel, sender = Channel(ours), Channel(theirs)
    sender.send(3, b"first")
    sender.send(4, b"")
    theirs.sendall(_HEADER.pack(5, 100_000) + b"half")
    assert channel.received() == ([(3, b"first"), (4, b"")], False)
    theirs.sendall(b"x" * 99_996)
    frames = []
    while not frames:
        frames, _ = channel.received()
    assert frames == [(5, b"half" + b"x" * 99_996)]
    theirs.sendall(_HEADER.pack(5, MAX_FRAME + 1))
    with pytest.raises(ValueError, match="at most"):
        channel.received()
    sender.close()
    channel.close()
    channel.close()


def test_the_other_end_is_gone_after_its_last_frame():
    ours, theirs = socket.socketpair()
    channel, sender = Channel(ours), Channel(theirs)
    channel.send(1, b"never read")
    sender.send(3, b"last")
    sender.close()
    assert channel.received() == ([(3, b"last")], False)
    assert channel.received() == ([], True)
    channel.close()


UNGUARDED = """
import sys
import jax, numpy as np, millstream as ms

print("runs once")
spec = jax.ShapeDtypeStruct((), np.int32)
rows = [ms.BatchTransform(4)]
source = ms.DiskSampleSource(8, lambda index: np.int32(100 * ("jax" in sys.modules) + ms.is_worker()), sample_spec=spec)
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
