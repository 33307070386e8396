"""The command `millstream`, as a person runs it."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import CACHE

import millstream as ms

COMMAND = [sys.executable, "-m", "millstream"]


def run(*arguments):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120, env=os.environ | CACHE)


def test_the_demo_trains_and_resumes(tmp_path):
    done = run("demo", "--folder", str(tmp_path / "run"))
    assert (done.returncode, done.stderr) == (0, "")
    accuracy = re.search(r"test accuracy +([\d.]+)%", done.stdout)
    assert accuracy and float(accuracy[1]) > 95
    assert re.search(r"^40/40 epochs \[=+\] - .+ - loss: 0\.0\d+ - accuracy: [01]\.\d+$", done.stdout, re.MULTILINE)
    assert re.search(r"speed +[\d,]+ samples per second", done.stdout)
    assert "identical: 34 batches after a stop in mid-epoch" in done.stdout


def test_one_epoch_is_enough_to_run(tmp_path):
    assert run("demo", "--epochs", "1", "--folder", str(tmp_path / "run")).returncode == 0


def test_ctrl_c_ends_the_demo_quietly(tmp_path):
    record = tmp_path / "run" / "record.jsonl"
    command = [*COMMAND, "demo", "--epochs", "1000000", "--folder", str(record.parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (record.exists() and record.stat().st_size):  # the loop has begun, and may be compiling
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, err.strip().splitlines()[1:]) == (130, [])
    assert "Stopping after this batch" in err
    assert out.endswith("stopped\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["demo", "--epochs", "0"], "must be at least 1, got 0"),
        (["demo", "--epochs", "few"], "--epochs: must be a whole number, got 'few'"),
        (["demo", "--folder", __file__], "--folder: must be a folder, got the file"),
        ([], "required: command"),
    ],
)
def test_wrong_arguments_are_named(arguments, text):
    done = run(*arguments)
    assert done.returncode == 2
    assert text in done.stderr


def test_the_version_is_the_packages():
    assert run("--version").stdout == f"millstream {ms.__version__}\n"
