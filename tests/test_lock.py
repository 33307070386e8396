"""A lock between processes: what becomes of it when its folder goes, and when its holder forks."""

import functools
import shutil
import subprocess
import sys

import pytest

from millstream._core.lock import locked


def test_a_folder_that_vanishes_while_a_lock_is_waited_for_is_told_as_such(tmp_path):
    # Closing the lock's file twice would tell of a bad descriptor, or close what another thread has just opened.
    folder = tmp_path / "folder"
    folder.mkdir()
    path, remove = folder / "lock", functools.partial(shutil.rmtree, folder)
    with locked(path, 1.0), pytest.raises(FileNotFoundError), locked(path, 1.0, remove):
        raise AssertionError("two holders")


def test_a_fork_of_the_holder_does_not_give_the_lock_away(tmp_path):
    script = f"""
import os, pathlib
from millstream._core.lock import locked
path = pathlib.Path({str(tmp_path)!r}, "lock")
with locked(path, 1.0):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        assert path.exists()
        try:
            with locked(path, 0.0):
                print("two holders")
        except TimeoutError:
            print("one holder")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("one holder\n", "")
