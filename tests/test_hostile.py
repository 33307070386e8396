"""Hostile files are refused by name, run nothing, and write nowhere."""

import json
import pathlib
import pickle
import subprocess
import sys

import numpy as np
import pytest
from formats import cifar_batch, tar_bytes, zip_bytes

from millstream.datasets._archive import ArchiveLimits, UnsafeArchive, extract
from millstream.datasets._pickle import read_plain_pickle
from millstream.files.safe_path import UnsafePath, safe_path

REFUSALS = {"ValueError", "UnsafeArchive", "UnsafePath", "UnsafePickle"}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile")
    program = str(pathlib.Path(__file__).parent / "hostile.py")
    subprocess.run([sys.executable, program, "make", str(root)], check=True)
    done = subprocess.run([sys.executable, program, "open", str(root)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return root, json.loads(done.stdout)


def test_every_file_of_the_corpus_is_refused_by_name(report):
    _, found = report
    results = found["results"]
    assert len(results) >= 40
    wrong = {name: result for name, result in results.items() if result[0] not in REFUSALS or name not in result[1]}
    assert not wrong, json.dumps(wrong, indent=1)


def test_no_code_runs_and_nothing_is_written_outside(report):
    root, found = report
    events = {name: result[3] for name, result in found["results"].items() if result[3]}
    assert not events, json.dumps(events, indent=1)
    assert list((root / "outside").iterdir()) == []
    assert sorted(path.name for path in root.iterdir()) == ["in", "out", "outside"]
    assert sorted(path.name for path in (root / "out").rglob("*")) == []
    assert not pathlib.Path("/tmp/millstream-evil").exists()


def test_refusing_takes_little_time_and_memory(report):
    _, found = report
    slow = {name: result[2] for name, result in found["results"].items() if result[2] > 2}
    assert not slow
    assert found["megabytes"] < 256


@pytest.mark.parametrize("pack", [tar_bytes, zip_bytes])
def test_honest_archives_give_what_was_asked_for_and_no_more(tmp_path, pack):
    archive = tmp_path / "data.archive"
    archive.write_bytes(pack({"./top/a": b"one", "top/b": b"two", "c": b"three"}))
    assert [path.read_bytes() for path in extract(archive, ["c", "top/a"], tmp_path / ".")] == [b"three", b"one"]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["a", "c", "data.archive"]


def test_archives_have_limits(tmp_path):
    archive = tmp_path / "data.tar"
    archive.write_bytes(tar_bytes({"a": bytes(5000), "b": bytes(5000)}, "w"))
    for limits in (ArchiveLimits(members=1), ArchiveLimits(size=6000)):
        with pytest.raises(UnsafeArchive, match=r"data\.tar"):
            extract(archive, ["a"], tmp_path, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["data.tar"]


@pytest.mark.parametrize("name", ["a/b.jpg", "x", "folder/", "a b.txt", "é.png"])
def test_plain_names_are_paths(tmp_path, name):
    assert safe_path(tmp_path, name, "a list") == tmp_path / name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/../b", "/a", "a//b", "a\\b", "C:a", "a\0", "a\n", "a./b", "a ", "~/x/.."]
)
def test_other_names_are_not(tmp_path, name):
    with pytest.raises(UnsafePath, match="a list names the file"):
        safe_path(tmp_path, name, "a list")


def test_names_do_not_lead_through_links(tmp_path):
    (tmp_path / "link").symlink_to("/etc")
    with pytest.raises(UnsafePath):
        safe_path(tmp_path, "link/passwd", "a list")


@pytest.mark.parametrize("protocol", [None, 2, 4], ids=["published", "protocol 2", "protocol 4"])
def test_every_cut_and_every_flipped_byte_of_a_batch_is_survived(protocol):
    """A small fuzzer: whatever comes out is a refusal or plain data."""
    pixels = np.zeros((1, 12), np.uint8)
    batch = {"data": pixels, "labels": [1]}
    data = cifar_batch(pixels, {b"labels": [1]}) if protocol is None else pickle.dumps(batch, protocol)
    variants = [data[:end] for end in range(len(data))]
    variants += [
        data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :] for at in range(len(data)) for bit in range(8)
    ]
    for variant in variants:
        try:
            found = read_plain_pickle("batch", variant)
        except ValueError as error:
            assert "batch is not a CIFAR batch" in str(error)
        else:
            assert all(
                isinstance(value, bytes | str | list | np.ndarray | type(None) | dict | tuple | int)
                for value in found.values()
            )
