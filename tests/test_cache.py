"""Batches on disk: what is stored comes back bit for bit, or not at all, whatever happens in between."""

import dataclasses
import errno
import json
import os
import pathlib
import pickle
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import types
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import assert_trees_equal
from test_bad_input import refuses

import millstream as ms
from millstream.files import lock
from millstream.reading import batch_file
from millstream.reading.batch_cache import OpenCache, open_cache
from millstream.reading.batch_file import DamagedBatch
from millstream.reading.cache_contents import CacheContents
from millstream.reading.caches import ArrayCache, BatchCache

CONTENTS = CacheContents(
    description={"samples": "100", "ordering": "shuffle", "batch size": "5", "seed": "00000000 00000007"},
    names=("['image']", "['label']", "['weight']"),
    shapes=((5, 7, 3), (5,), ()),
    dtypes=(np.dtype(np.uint8), np.dtype(np.int32), np.dtype(ml_dtypes.bfloat16)),
    mask_shape=(5,),
)


def batch(epoch, number):
    rng = np.random.default_rng([epoch, number])
    return [
        rng.integers(0, 255, (5, 7, 3), np.uint8),
        rng.integers(0, 9, 5, np.int32),
        np.asarray(rng.random(), ml_dtypes.bfloat16),
    ]


def opened(path, mode: Any = "read-write", contents=CONTENTS) -> OpenCache:
    return open_cache("BatchCache", pathlib.Path(path), mode, contents)


def fill(path, batches=3):
    cache = opened(path)
    for number in range(batches):
        cache.write(0, number, batch(0, number), np.arange(5) != number, [{"caption": "ä"}, None, 3, 4.5, b"raw"])
    return cache


def assert_entry(entry, epoch, number):
    assert entry is not None
    assert_trees_equal(entry.leaves, batch(epoch, number))


def names(path):
    return sorted(entry.name for entry in pathlib.Path(path).iterdir())


FILES = ["e0-b00000.msb", "e0-b00001.msb", "e0-b00002.msb", "manifest.json"]


# Storing and reading.


@pytest.mark.parametrize("mode", ["read-write", "read-only", "cache-only"])
def test_what_was_stored_comes_back_bit_for_bit(tmp_path, mode):
    fill(tmp_path / "cache")
    cache = opened(tmp_path / "cache", mode)
    for number in range(3):
        entry = cache.read(0, number)
        assert_entry(entry, 0, number)
        assert entry is not None and entry.ok is not None
        assert entry.ok.tolist() == [row != number for row in range(5)]
        assert entry.additional == [{"caption": "ä"}, None, 3, 4.5, b"raw"]
        assert not any(leaf.flags.writeable for leaf in [*entry.leaves, entry.ok])
    assert names(tmp_path / "cache") == FILES


def test_a_batch_without_bad_rows_and_words_has_none(tmp_path):
    cache = opened(tmp_path / "cache")
    cache.write(3, 12, batch(3, 12))
    entry = cache.read(3, 12)
    assert_entry(entry, 3, 12)
    assert entry is not None and entry.ok is None and entry.additional is None
    assert names(tmp_path / "cache") == ["e3-b00012.msb", "manifest.json"]


def test_an_open_cache_can_be_sent_to_another_process(tmp_path):
    sent = pickle.loads(pickle.dumps(fill(tmp_path / "cache")))
    assert_entry(sent.read(0, 2), 0, 2)
    sent.write(0, 3, batch(0, 3))
    assert_entry(sent.read(0, 3), 0, 3)


def test_jax_uses_the_memory_of_the_file_and_never_writes_to_it(tmp_path):
    entry = fill(tmp_path / "cache").read(0, 1)
    assert entry is not None
    double = jax.jit(lambda x: x + x, donate_argnums=0)
    for leaf in entry.leaves:
        assert leaf.ctypes.data % 64 == 0
        on_device = jax.device_put(leaf, jax.devices("cpu")[0])
        assert on_device.unsafe_buffer_pointer() == leaf.ctypes.data
        double(on_device).block_until_ready()
    assert_entry(entry, 0, 1)


def test_a_batch_outlives_its_file(tmp_path):
    entry = fill(tmp_path / "cache").read(0, 1)
    for path in (tmp_path / "cache").iterdir():
        path.unlink()
    assert_entry(entry, 0, 1)


def test_who_keeps_many_batches_does_not_run_out_of_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_file, "_MOST_MAPPED", len(batch_file._mapped) + 10)
    cache = fill(tmp_path / "cache")
    before = len(os.listdir("/proc/self/fd"))
    kept = [cache.read(0, number % 3) for number in range(60)]
    assert len(os.listdir("/proc/self/fd")) - before <= 10
    for number, entry in enumerate(kept):
        assert_entry(entry, 0, number % 3)
        assert entry is not None and all(leaf.ctypes.data % 64 == 0 for leaf in entry.leaves)
        assert not any(leaf.flags.writeable for leaf in entry.leaves)


def test_the_folder_is_for_its_user_alone(tmp_path):
    opened(tmp_path / "cache")
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_another_user_shares_with_everybody_is_refused(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with refuses(PermissionError, "BatchCache", str(tmp_path / "cache"), "another user", "a folder of your own"):
        opened(tmp_path / "cache")


# Modes.


def test_read_write_and_read_only_leave_what_is_missing_to_the_caller(tmp_path):
    fill(tmp_path / "cache")
    for mode in ("read-write", "read-only"):
        assert opened(tmp_path / "cache", mode).read(1, 0) is None


def test_read_only_stores_nothing(tmp_path):
    fill(tmp_path / "cache")
    cache = opened(tmp_path / "cache", "read-only")
    cache.write(0, 3, batch(0, 3))
    assert cache.read(0, 3) is None
    assert names(tmp_path / "cache") == FILES


def test_cache_only_names_the_batch_that_is_missing(tmp_path):
    fill(tmp_path / "cache")
    with refuses(FileNotFoundError, "BatchCache", "cache-only", "Batch 4 of epoch 2", str(tmp_path), "read-write"):
        opened(tmp_path / "cache", "cache-only").read(2, 4)


@pytest.mark.parametrize("mode", ["read-only", "cache-only"])
def test_a_cache_that_was_never_filled_is_no_cache(tmp_path, mode):
    with refuses(FileNotFoundError, "BatchCache", repr(mode), "manifest.json", "read-write"):
        opened(tmp_path / "cache", mode)
    assert not (tmp_path / "cache").exists()


# Refusals: another cache.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"description": {**CONTENTS.description, "samples": "120"}}, "samples: 100 in the cache, 120 here"),
        ({"description": {**CONTENTS.description, "stages": "Map"}}, "stages: nothing in the cache, Map here"),
        ({"description": {}}, "ordering: shuffle in the cache, nothing here"),
        (
            {"shapes": ((5, 8, 3), (5,), ())},
            "leaf['image']: shape (5, 7, 3), uint8 in the cache, shape (5, 8, 3), uint8 here",
        ),
        (
            {"dtypes": (np.dtype(np.int8), *CONTENTS.dtypes[1:])},
            "leaf['image']: shape (5, 7, 3), uint8 in the cache, shape (5, 7, 3), int8 here",
        ),
        ({"names": ("['picture']", *CONTENTS.names[1:])}, "leaf['picture']: nothing in the cache, shape (5, 7, 3)"),
        ({"mask_shape": (1, 5)}, "shape of the mask: [5] in the cache, [1, 5] here"),
    ],
)
@pytest.mark.parametrize("mode", ["read-write", "cache-only"])
def test_a_cache_of_something_else_is_refused_with_what_differs(tmp_path, change, words, mode):
    fill(tmp_path / "cache")
    other = dataclasses.replace(CONTENTS, **change)
    with refuses(ValueError, "BatchCache", str(tmp_path / "cache"), words, "Give another folder, or delete this one"):
        opened(tmp_path / "cache", mode, other)
    assert names(tmp_path / "cache") == FILES


def test_all_differences_are_named_and_nothing_else(tmp_path):
    fill(tmp_path / "cache")
    other = dataclasses.replace(CONTENTS, description={**CONTENTS.description, "samples": "120", "seed": "1" * 999})
    with pytest.raises(ValueError) as caught:
        opened(tmp_path / "cache", contents=other)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines[1:-1]] == ["  samples", "  seed"]
    assert all(len(line) < 500 for line in lines)


def test_a_cache_of_another_format_is_refused(tmp_path):
    fill(tmp_path / "cache")
    manifest = tmp_path / "cache" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format version": 1', '"format version": 2'))
    with refuses(ValueError, "format version: 2 in the cache, 1 here"):
        opened(tmp_path / "cache")


MANIFESTS = [b"", b"{", b"[]", b"[" * 100_000, b"\xff\xfe", b'{"format": "other"}', b" " * (17 << 20)]


@pytest.mark.parametrize("text", MANIFESTS, ids=lambda text: repr(text[:12]))
def test_a_damaged_manifest_is_refused(tmp_path, text):
    fill(tmp_path / "cache")
    (tmp_path / "cache" / "manifest.json").write_bytes(text)
    for make in (lambda: opened(tmp_path / "cache"), lambda: ArrayCache(tmp_path / "cache", of={})):
        with refuses(ValueError, "manifest.json is damaged", "delete"):
            make()


def test_every_bit_of_the_manifest_counts(tmp_path):
    fill(tmp_path / "cache")
    path, rng = tmp_path / "cache" / "manifest.json", random.Random(1)
    whole = path.read_bytes()
    for _ in range(200):
        position, bit = rng.randrange(len(whole) - 1), rng.randrange(8)
        path.write_bytes(flipped(whole, position, bit))
        if (
            whole[position : position + 1].isspace()
            and flipped(whole, position, bit)[position : position + 1].isspace()
        ):
            continue
        with pytest.raises(ValueError, match=r"something else|damaged"):
            opened(tmp_path / "cache")


def test_a_folder_with_other_files_is_not_taken_over(tmp_path):
    (tmp_path / "thesis.tex").touch()
    (tmp_path / ".thesis.lock").touch()
    with refuses(ValueError, "BatchCache needs a folder of its own", "1 other files", "'thesis.tex'"):
        opened(tmp_path)
    assert names(tmp_path) == [".thesis.lock", "thesis.tex"]


def test_a_batch_of_another_shape_is_not_stored(tmp_path):
    cache = opened(tmp_path / "cache")
    leaves = batch(0, 0)
    with refuses(ValueError, "Batch 0 of epoch 0", "leaf['label']: shape (5,), int32 in the cache, shape (5,), int64"):
        cache.write(0, 0, [leaves[0], leaves[1].astype(np.int64), leaves[2]])
    with refuses(ValueError, "which rows are good", "shape (5,), bool in the cache, shape (4,), bool here"):
        cache.write(0, 0, leaves, np.ones(4, bool))
    with refuses(TypeError, "BatchCache", "object"):
        cache.write(0, 0, leaves, None, [object()])
    assert names(tmp_path / "cache") == ["manifest.json"]


# Damage.


def flipped(whole, position, bit):
    return whole[:position] + bytes([whole[position] ^ 1 << bit]) + whole[position + 1 :]


def damages(whole, rng):
    for _ in range(200):
        yield flipped(whole, rng.randrange(len(whole)), rng.randrange(8))
    for _ in range(50):
        yield whole[: rng.randrange(len(whole))]
    yield whole + b"\0"
    yield whole + whole
    yield b"\0" * len(whole)
    yield b""
    for size in (1 << 20, 1 << 40, 1 << 63):  # headers that claim what is not there
        yield whole[:16] + size.to_bytes(8, "little") + whole[24:]
        yield whole[:24] + size.to_bytes(8, "little") + whole[32:]


def test_no_damage_is_read_as_data(tmp_path):
    fill(tmp_path / "cache")
    path = tmp_path / "cache" / "e0-b00001.msb"
    for number, damaged in enumerate(damages(path.read_bytes(), random.Random(7))):
        path.write_bytes(damaged)
        mode = ("read-only", "cache-only")[number % 2]
        with refuses(DamagedBatch, "BatchCache", str(path), "read-write"):
            opened(tmp_path / "cache", mode).read(0, 1)
    assert_entry(opened(tmp_path / "cache").read(0, 0), 0, 0)


def test_a_file_in_the_wrong_place_is_recognised(tmp_path):
    fill(tmp_path / "cache")
    fill_other = opened(tmp_path / "other", contents=dataclasses.replace(CONTENTS, description={"seed": "8"}))
    fill_other.write(0, 2, batch(0, 2), np.ones(5, bool))
    os.replace(tmp_path / "cache" / "e0-b00000.msb", tmp_path / "cache" / "e0-b00001.msb")
    os.replace(tmp_path / "other" / "e0-b00002.msb", tmp_path / "cache" / "e0-b00002.msb")
    os.mkfifo(tmp_path / "cache" / "e0-b00003.msb")
    cache = opened(tmp_path / "cache", "read-only")
    for number, words in [(1, "not that of batch 1 of epoch 0"), (2, "not that of batch 2"), (3, "a pipe or a device")]:
        with refuses(DamagedBatch, f"e0-b0000{number}.msb", words):
            cache.read(0, number)


def test_damaged_files_are_replaced_with_one_warning(tmp_path):
    fill(tmp_path / "cache")
    paths = [tmp_path / "cache" / f"e0-b0000{number}.msb" for number in range(3)]
    paths[0].write_bytes(flipped(paths[0].read_bytes(), 1000, 3))
    paths[1].write_bytes(paths[1].read_bytes()[:-64])
    cache = opened(tmp_path / "cache")
    with pytest.warns(RuntimeWarning, match=r"e0-b00000\.msb is damaged: its checksum .* made and stored again"):
        assert cache.read(0, 0) is None
    assert cache.read(0, 1) is None
    for number in (0, 1):
        cache.write(0, number, batch(0, number))
    for number in range(3):
        assert_entry(cache.read(0, number), 0, number)
        assert_entry(opened(tmp_path / "cache", "cache-only").read(0, number), 0, number)


def test_a_replaced_file_is_checked_again(tmp_path):
    cache = fill(tmp_path / "cache")
    assert_entry(cache.read(0, 0), 0, 0)
    path = tmp_path / "cache" / "e0-b00000.msb"
    path.write_bytes(flipped(path.read_bytes(), 1000, 3))
    with pytest.warns(RuntimeWarning, match="checksum"):
        assert cache.read(0, 0) is None


# Full disks, killed processes, several processes.


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_ends_the_storing_and_not_the_run(tmp_path, monkeypatch, code):
    cache = fill(tmp_path / "cache")

    def full(temporary, final):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "replace", full)
    words = rf"BatchCache cannot store .*e0-b00003\.msb: {os.strerror(code)}\. \d+ bytes are needed and \d+ are free"
    with pytest.warns(RuntimeWarning, match=words) as caught:
        cache.write(0, 3, batch(0, 3))
    for number in range(4, 7):
        cache.write(0, number, batch(0, number))
    assert names(tmp_path / "cache") == FILES
    assert cache.read(0, 3) is None
    monkeypatch.undo()
    opened(tmp_path / "cache").write(0, 3, batch(0, 3))
    assert_entry(cache.read(0, 3), 0, 3)
    assert f" {(tmp_path / 'cache' / 'e0-b00003.msb').stat().st_size} bytes are needed" in str(caught[0].message)


def test_a_folder_that_is_deleted_ends_the_storing_and_not_the_run(tmp_path):
    cache = opened(tmp_path / "cache")
    (tmp_path / "cache" / "manifest.json").unlink()
    (tmp_path / "cache").rmdir()
    with pytest.warns(RuntimeWarning, match="the folder is gone"):
        cache.write(0, 0, batch(0, 0))


def test_what_goes_wrong_with_storing_in_the_background_reaches_the_loop(tmp_path, key):
    source = ms.DiskSampleSource(64, lambda index: {"x": np.int32(index)})
    loader = ms.DataLoader([source, ms.BatchTransform(2)], cache=ms.BatchCache(tmp_path / "cache"))
    seen = 0
    with pytest.raises(RuntimeWarning, match="cannot store"):  # which is an error in the tests
        for _ in loader.iterate(loader.init_state(key)):
            seen += 1
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    assert 0 < seen < 32


def test_an_interrupt_while_batches_are_stored_ends_the_reading_all_the_same(
    tmp_path, key, monkeypatch, assert_nothing_is_left
):
    """The disk is slow, the stream is at its end, and Ctrl-C comes while the last batches are being stored."""
    replace, reached, free = os.replace, threading.Event(), threading.Event()

    def slow(*names):
        if str(names[1]).endswith("e0-b00001.msb"):
            reached.set()
            assert free.wait(60)
        replace(*names)

    monkeypatch.setattr(os, "replace", slow)
    source = ms.DiskSampleSource(8, lambda index: {"x": np.int32(index)})
    loader = ms.DataLoader([source, ms.BatchTransform(4)], executor=ms.Threads(1), cache=BatchCache(tmp_path / "cache"))
    stream = loader.iterate(loader.init_state(key), steps=3)
    for _ in range(2):
        next(stream)
    main = threading.get_ident()

    def interrupt():
        assert reached.wait(60)
        while "end_pool" not in {frame.name for frame in traceback.extract_stack(sys._current_frames()[main])}:
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            stream.close()
            interrupting.join()
        # Python takes a thread for ended whose join is interrupted, and would not wait for it at exit.
        [storing] = [thread for thread in threading.enumerate() if thread.name.startswith("millstream-cache")]
    finally:
        free.set()
        interrupting.join()
    storing.join()
    assert (tmp_path / "cache" / "e0-b00001.msb").exists()
    assert_nothing_is_left()


def test_a_cache_in_a_folder_that_cannot_be_written_is_read(tmp_path, monkeypatch):
    fill(tmp_path / "cache")

    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(lock, "_open", refused)
    cache = opened(tmp_path / "cache")
    assert_entry(cache.read(0, 1), 0, 1)
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        cache.write(0, 3, batch(0, 3))


def test_a_file_system_without_locks_is_served_too(tmp_path, monkeypatch):
    def unsupported(handle):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock, "_try_lock", unsupported)
    fill(tmp_path / "cache")
    abandoned = [tmp_path / "cache" / f".e0-b00001.msb.{digit * 32}.part" for digit in "0f"]
    for path in abandoned:
        path.touch()
    os.utime(abandoned[0], (0, 0))
    assert_entry(opened(tmp_path / "cache").read(0, 2), 0, 2)
    assert names(tmp_path / "cache") == [abandoned[1].name, *FILES]


def test_a_batch_that_another_process_is_storing_is_left_to_it(tmp_path):
    cache = opened(tmp_path / "cache")
    with lock.locked(tmp_path / "cache" / ".e0-b00000.msb.lock", 1.0):
        (tmp_path / "cache" / ".e0-b00000.msb.part").touch()
        opened(tmp_path / "cache").write(0, 0, batch(0, 0))
        assert names(tmp_path / "cache") == [".e0-b00000.msb.lock", ".e0-b00000.msb.part", "manifest.json"]
    opened(tmp_path / "cache")
    assert names(tmp_path / "cache") == ["manifest.json"]
    assert cache.read(0, 0) is None


FILLING = """
import os, pathlib, random, resource, signal, sys, time, warnings
import numpy as np
from millstream.reading.batch_cache import open_cache
from millstream.reading.cache_contents import CacheContents
assert "jax" not in sys.modules
warnings.simplefilter("error")
folder, rng = pathlib.Path(sys.argv[1]), random.Random(11)
dtypes = (np.dtype("f8"), np.dtype("i4"))
contents = CacheContents({"seed": "7"}, ("['x']", "['y']"), ((64, 2048), (64,)), dtypes, (64,))

def opened():
    return open_cache("BatchCache", folder, "read-write", contents)

def batch(number):
    return [np.full((64, 2048), number / 7), np.full(64, number, np.int32)]

def fill(numbers):
    cache = opened()
    for number in numbers:
        entry = cache.read(0, number)
        if entry is None:
            cache.write(0, number, batch(number), None, [number] * 64)
        else:
            require(entry, number)

def require(entry, number):
    assert all(map(np.array_equal, entry.leaves, batch(number))) and entry.additional == [number] * 64

def forked(function, *arguments):
    child = os.fork()
    if child == 0:
        try:
            function(*arguments)
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    return child

def require_complete(count):
    cache = open_cache("BatchCache", folder, "cache-only", contents)
    for number in range(count):
        require(cache.read(0, number), number)
    found = sorted(os.listdir(folder))
    assert found == [f"e0-b{number:05d}.msb" for number in range(count)] + ["manifest.json"], found
"""


def run(tmp_path, program):
    command = [sys.executable, "-c", FILLING + textwrap.dedent(program), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_killed_processes_leave_a_good_cache(tmp_path):
    cut = run(
        tmp_path,
        """
        def store_for_ever():
            cache = opened()
            while True:
                for number in range(20):
                    cache.write(0, number, batch(number), None, [number] * 64)

        kills = cut = attempts = 0
        while attempts < 20 or (not cut and attempts < 400):
            attempts += 1
            child = forked(store_for_ever)
            time.sleep(0.05 * rng.random())
            os.kill(child, signal.SIGKILL)
            kills += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
            cut += folder.exists() and any(name.endswith(".part") for name in os.listdir(folder))
        assert kills == attempts
        fill(range(20))
        require_complete(20)
        print(cut)
        """,
    )
    assert int(cut) > 0, "no process was killed while it was storing"


def test_processes_fill_one_cache_together(tmp_path):
    run(
        tmp_path,
        """
        orders = [list(range(40)) for _ in range(3)]
        rng.shuffle(orders[0])
        children = [forked(fill, order) for order in orders]
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
        require_complete(40)
        """,
    )


def test_a_limit_on_file_sizes_is_a_full_disk(tmp_path):
    run(
        tmp_path,
        """
        cache = opened()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(3):
                cache.write(0, number, batch(number))
        assert len(caught) == 1 and "File too large" in str(caught[0].message), caught
        assert os.listdir(folder) == ["manifest.json"]
        """,
    )


def test_nothing_is_unpickled_or_run(tmp_path):
    run(
        tmp_path,
        """
        fill(range(2))
        forbidden = {"pickle.find_class", "os.system", "os.exec", "os.fork", "subprocess.Popen", "exec", "import"}
        sys.addaudithook(lambda event, arguments: os._exit(9) if event in forbidden else None)
        fill(range(4))
        require_complete(4)
        """,
    )


# The values.


@pytest.mark.parametrize("kind", [BatchCache, lambda path, **other: ArrayCache(path, of={}, **other)])
def test_caches_check_their_arguments(tmp_path, kind):
    with refuses(ValueError, "needs mode 'read-write', 'read-only' or 'cache-only'", "'write'"):
        kind(tmp_path, mode="write")
    with refuses(TypeError, "needs directory to be the path of a folder", "3 (int)"):
        kind(3)
    (tmp_path / "file").touch()
    with refuses(NotADirectoryError, "file is a file"):
        kind(tmp_path / "file")


def test_a_batch_cache_is_a_value(tmp_path):
    assert BatchCache("folder") == BatchCache("folder", mode="read-write")
    assert hash(BatchCache("folder")) == hash(BatchCache("folder"))
    assert BatchCache("~/folder").folder == pathlib.Path.home() / "folder"


# Arrays of the user's.

OF = {"encoder": "vit, step 10"}


def latents(number):
    return {"z": jnp.full((4, 3), number, jnp.bfloat16), "a": [np.arange(4) + number, (None, np.array(number > 1))]}


def info(epoch, number):
    return types.SimpleNamespace(epoch=np.int64(epoch), step_in_epoch=number)


def test_arrays_come_back_in_the_tree_they_were_put_in(tmp_path):
    cache = ArrayCache(tmp_path / "cache", of=OF)
    assert cache.get(info(0, 0)) is None  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "cache").exists()
    for number in range(3):
        cache.put(info(0, number), latents(number))  # pyright: ignore[reportArgumentType]
    for again in (cache, *(ArrayCache(tmp_path / "cache", of=OF, mode=mode) for mode in ("read-only", "cache-only"))):
        for number in range(3):
            found = again.get((0, number))
            assert found is not None
            assert_trees_equal(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, latents(number)))
            assert isinstance(found["a"], list) and isinstance(found["a"][1], tuple) and found["a"][1][0] is None
            assert all(leaf.ctypes.data % 64 == 0 for leaf in jax.tree.leaves(found))


def test_a_spec_fixes_the_structure_before_the_first_arrays(tmp_path):
    spec = {"z": jax.ShapeDtypeStruct((4,), jnp.float32)}
    cache = ArrayCache(tmp_path / "cache", spec, of=OF)
    with refuses(ValueError, "leaf['z']: shape (4,), float32 in the cache, shape (5,), float32 here"):
        cache.put((0, 0), {"z": np.zeros(5, np.float32)})
    cache.put((0, 0), {"z": np.zeros(4, np.float32).astype(">f4")})
    assert ArrayCache(tmp_path / "cache", of=OF).get((0, 0))["z"].dtype == np.float32  # pyright: ignore[reportOptionalSubscript]


def test_another_structure_is_refused_with_the_difference(tmp_path):
    cache = ArrayCache(tmp_path / "cache", of=OF)
    cache.put((0, 0), latents(0))
    for again in (cache, ArrayCache(tmp_path / "cache", of=OF)):
        with refuses(ValueError, "leaf['new']: nothing in the cache, shape (4,), int64 here", "leaf['z']"):
            again.put((0, 1), {"new": np.arange(4), "a": latents(0)["a"]})
        with refuses(ValueError, "structure", "in the cache", '["list", "*", ["list", null, "*"]]'):
            again.put((0, 1), {**latents(1), "a": [np.arange(4), [None, np.array(True)]]})
    with refuses(ValueError, "encoder: vit, step 10 in the cache, vit, step 20 here"):
        ArrayCache(tmp_path / "cache", of={"encoder": "vit, step 20"})
    with refuses(ValueError, "structure", "leaf['z']"):
        opened(tmp_path / "cache")
    assert names(tmp_path / "cache") == FILES[:1] + FILES[3:]


def test_modes_of_an_array_cache(tmp_path):
    with refuses(FileNotFoundError, "ArrayCache", "manifest.json"):
        ArrayCache(tmp_path / "cache", of=OF, mode="cache-only")
    ArrayCache(tmp_path / "cache", of=OF).put((0, 0), latents(0))
    reader = ArrayCache(tmp_path / "cache", of=OF, mode="read-only")
    reader.put((0, 1), latents(1))
    assert reader.get((0, 1)) is None
    with refuses(FileNotFoundError, "ArrayCache", "Batch 1 of epoch 0"):
        ArrayCache(tmp_path / "cache", of=OF, mode="cache-only").get((0, 1))


class Point(tuple):
    pass


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"z": "text"}, "tree['z']: 'text' (str)"),
        ({"z": [1.5]}, "tree['z'][0]: 1.5 (float)"),
        ({"z": np.array(["a"])}, "tree['z']: shape (1,), <U1"),
        ({"z": np.array([None])}, "tree['z']: shape (1,), object"),
        ({"z": jax.random.key(0)}, "tree['z']: shape (), key<fry>"),
        ({1: np.zeros(2)}, "words as keys"),
        (Point([np.zeros(2)]), "Point"),
    ],
)
def test_only_plain_trees_of_arrays_are_kept(tmp_path, tree, words):
    with refuses(TypeError, "ArrayCache keeps", words):
        ArrayCache(tmp_path / "cache", of=OF).put((0, 0), tree)
    assert not (tmp_path / "cache").exists()


def test_other_arguments_of_an_array_cache_are_checked(tmp_path):
    cache = ArrayCache(tmp_path / "cache", of=OF)
    with refuses(TypeError, "info or a pair", "3 (int)"):
        cache.get(3)  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "the number of the batch", "-1"):
        cache.put((0, -1), latents(0))
    with refuses(ValueError, "at least one array"):
        cache.put((0, 0), {"z": None})
    with refuses(TypeError, "of to be a mapping of words"):
        ArrayCache(tmp_path / "cache", of={"step": 3})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("structure", {"z": "*"}),
        ("structure", ["set", "*", "*", "*"]),
        ("structure", 3),
        ("structure", [[]]),
        ("leaves", 3),
        ("leaves", []),
        ("leaves", [{"name": "['z']", "shape": [-1], "dtype": "float32"}]),
        ("leaves", [{"name": "['z']", "shape": [2], "dtype": "object"}]),
        ("leaves", [{"name": "['z']", "shape": [2], "dtype": "__doc__"}]),
        ("description", 3),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(tmp_path, name, value):
    ArrayCache(tmp_path / "cache", of=OF).put((0, 0), latents(0))
    path = tmp_path / "cache" / "manifest.json"
    facts = (
        json.loads(path.read_text()) | {"structure": {"z": "*"}} if name == "leaves" else json.loads(path.read_text())
    )
    path.write_text(json.dumps(facts | {name: value}))
    with refuses(ValueError, "ArrayCache", "manifest.json is damaged", "delete this one"):
        ArrayCache(tmp_path / "cache", of=OF)


def test_no_warning_is_given_when_nothing_is_wrong(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fill(tmp_path / "cache")
        assert_entry(fill(tmp_path / "cache").read(0, 0), 0, 0)
