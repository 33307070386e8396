"""A lock between processes: what becomes of it when its folder goes, and when its holder forks."""

import functools
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import millstream as ms
from millstream.files.atomic import written
from millstream.files.lock import locked
from millstream.files.safe_path import NotPlainFile, plain_reader


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
from millstream.files.lock import locked
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


# Files that we name, in folders that others may have written to


def odd(kind, path, precious):
    """Put something else than a plain file at a path."""
    path.parent.mkdir(exist_ok=True)
    precious.write_text("mine")
    {"link": lambda: path.symlink_to(precious), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_not_a_plain_file_is_neither_locked_nor_read(tmp_path, kind):
    path, precious = tmp_path / "file", tmp_path / "precious"
    odd(kind, path, precious)
    for use in (lambda: locked(path, 0.0, holder=b"me").__enter__(), lambda: plain_reader(path)):
        with pytest.raises(NotPlainFile, match="Not a plain file, but a link, a pipe, a folder or a device"):
            use()
    assert precious.read_text() == "mine"


def test_a_link_in_the_place_of_a_temporary_file_is_replaced(tmp_path):
    precious = tmp_path / "precious"
    odd("link", tmp_path / ".final.part", precious)
    with written(tmp_path / "final", alone=True) as file:
        file.write(b"new")
    assert (tmp_path / "final").read_bytes() == b"new" and precious.read_text() == "mine"


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_record_and_a_log_are_written_to_plain_files(tmp_path, kind):
    precious = tmp_path / "precious"
    odd(kind, tmp_path / "run" / "record.jsonl", precious)
    with pytest.raises(NotPlainFile, match=r"record\.jsonl"):
        ms.loop(0, range(3), {ms.every(1): [lambda state: state + 1, ms.record(tmp_path / "run")]})
    assert precious.read_text() == "mine"
    odd(kind, tmp_path / "log.csv", precious)
    train = {
        ms.every(1): [
            lambda state: (ms.logs().add_metric("x", 1.0), state),
            ms.callbacks.csv_logger(tmp_path / "log.csv", overwrite=True),
        ]
    }
    if kind == "pipe":
        with pytest.raises(NotPlainFile, match=r"log\.csv"):
            ms.loop(0, range(3), train)
    else:  # a name that the user has given may be a link
        ms.loop(0, range(3), train)
        assert precious.read_text().startswith("steps,samples,epochs,time,date,x\n1,")


def test_a_pipe_in_the_place_of_the_manifest_of_a_cache_is_named(tmp_path):
    os.mkfifo(tmp_path / "manifest.json")
    source = ms.DiskSampleSource(4, lambda index: np.int32(index))
    loader = ms.DataLoader([source, ms.BatchTransform(2)], cache=ms.BatchCache(tmp_path))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        next(iter(loader.iterate(loader.init_state(jax.random.key(0)))))
