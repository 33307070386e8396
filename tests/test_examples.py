"""Every example runs, on less than it asks for, and says nothing on stderr."""

import pathlib
import subprocess
import sys

import pytest

EXAMPLES = sorted((pathlib.Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(path, tmp_path):
    command = [sys.executable, str(path), "--epochs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "epoch" in done.stdout
    assert list(tmp_path.iterdir()) == []
