"""Every example runs, on less than it asks for, and says nothing on stderr."""

import os
import pathlib
import runpy
import subprocess
import sys

import pytest
from conftest import CACHE

FIRST, *OTHERS = sorted((pathlib.Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_the_example_runs(path, usual_promotion, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name, value in CACHE.items():  # for programs that an example starts
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", [str(path), "--epochs", "2"])
    runpy.run_path(str(path), run_name="__main__")
    said, complained = capfd.readouterr()
    assert complained == ""
    assert "epoch" in said
    assert list(tmp_path.iterdir()) == []


def test_the_first_example_runs_as_a_program(tmp_path):
    command = [sys.executable, str(FIRST), "--epochs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=tmp_path, env=os.environ | CACHE)
    assert (done.returncode, done.stderr) == (0, "")
    assert "epoch" in done.stdout
    assert list(tmp_path.iterdir()) == []
