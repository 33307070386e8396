"""HDF5 files: datasets in one piece and in chunks, text, lists, several files, threads, processes, damage."""

import concurrent.futures
import pathlib
import pickle
import subprocess
import sys

import h5py
import jax
import numpy as np
import pytest
from conftest import assert_trees_equal
from damage import DAMAGES
from test_bad_input import refuses

import millstream as ms
from millstream.integrations.hdf5 import Hdf5Source

N = 23


def arrays(n=N, seed=0):
    chance = np.random.default_rng(seed)
    return {
        "flag": chance.integers(0, 2, n).astype(bool),
        "image": chance.integers(0, 256, (n, 3, 2), dtype=np.uint8),
        "deep/label": np.arange(n, dtype=np.int32) + 100 * seed,
        "x": chance.random(n),
    }


LAYOUTS = {
    "in one piece": {},
    "in chunks": {"chunks": True},
    "packed": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "of little rows": {"little": True},
}


def write(path, data, layout):
    options = dict(LAYOUTS[layout])
    little = options.pop("little", False)
    with h5py.File(path, "w") as file:
        for name, array in data.items():
            chunks = {"chunks": (4, *array.shape[1:])} if little else {}
            file.create_dataset(name, data=array, **options, **chunks)
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_those_that_were_written(folder, layout):
    data = arrays()
    source = Hdf5Source(write(folder / "a.h5", data, layout))
    for one in (source, pickle.loads(pickle.dumps(source))):
        for indices in (np.arange(N), np.array([22, 0, 0, 13, 7])):
            found = one.read(indices)
            for name, array in data.items():
                np.testing.assert_array_equal(found[name], array[indices].astype(found[name].dtype))
    some = Hdf5Source(folder / "a.h5", ["deep/label"], row_fn=lambda row: {"label": np.int32(row["deep/label"] + 1)})
    assert some.read(np.array([5]))["label"].tolist() == [6]


@pytest.mark.parametrize("layout", ["in one piece", "packed"])
@pytest.mark.parametrize("executor", [None, ms.Threads(3), ms.Processes(2)], ids=["none", "threads", "processes"])
def test_several_files_are_one_stream_on_every_executor(folder, key, layout, executor):
    parts = [arrays(n, seed) for seed, n in enumerate((5, 11, 7))]
    for number, part in enumerate(parts):
        write(folder / f"part-{number}.h5", part, layout)
    data = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    source = Hdf5Source(str(folder / "part-*.h5"))
    runs = []
    for one, runner in ((source, executor), (ms.HostArraySource(data), None)):
        with ms.DataLoader([one, ms.BatchTransform(4)], executor=runner) as loader:
            runs.append([jax.device_get(pair) for pair in loader.iterate(loader.init_state(key), steps=8)])
    assert_trees_equal(*runs)


@pytest.mark.parametrize("layout", ["in one piece", "packed"])
def test_threads_read_one_source_at_once(folder, layout):
    data = arrays(200)
    source = Hdf5Source(write(folder / "a.h5", data, layout), cache_bytes=0)

    def read(seed):
        indices = np.random.default_rng(seed).integers(0, 200, 40)
        return indices, source.read(indices)["image"]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for indices, found in pool.map(read, range(60)):
            np.testing.assert_array_equal(found, data["image"][indices])


def test_text_and_lists_are_python_objects(folder):
    with h5py.File(folder / "a.h5", "w") as file:
        file["word"] = ["oats", "rye", "wheat"]
        file["fixed"] = np.array([b"a", b"bc", b""])
        ids = file.create_dataset("ids", (3,), h5py.vlen_dtype(np.int32))
        for row in range(3):
            ids[row] = np.arange(row + 1)
    source = Hdf5Source(folder / "a.h5")
    found = source.read(np.array([2, 0]))
    assert [(row["word"], row["fixed"], row["ids"].tolist()) for row in found] == [
        ("wheat", "", [0, 1, 2]),
        ("oats", "a", [0]),
    ]
    padded = [source.map(lambda row: {"ids": row["ids"]}), ms.PadTransform({"ids": 0}, length=4), ms.BatchTransform(3)]
    assert ms.DataLoader(padded).element_spec()["ids"].shape == (3, 4)


def test_datasets_in_one_piece_are_mapped_and_others_are_not(folder):
    for layout, mapped in (("in one piece", True), ("in chunks", False)):
        source = Hdf5Source(write(folder / f"{mapped}.h5", arrays(), layout))
        file = source._table._files[0]  # pyright: ignore[reportAttributeAccessIssue]
        assert {name: file._map(name) is not None for name in arrays()} == dict.fromkeys(arrays(), mapped)


def test_what_is_before_the_file_and_what_was_never_written(folder):
    with h5py.File(folder / "a.h5", "w", userblock_size=512) as file:
        file["x"] = np.arange(6)
        file.create_dataset("y", (6, 2), np.int16, fillvalue=7)
    found = Hdf5Source(folder / "a.h5").read(np.array([4, 1]))
    assert found["x"].tolist() == [4, 1] and found["y"].tolist() == [[7, 7], [7, 7]]


def test_big_endian_numbers_are_those_of_this_machine(folder):
    with h5py.File(folder / "a.h5", "w") as file:
        file["x"] = np.arange(5, dtype=">i4")
    assert Hdf5Source(folder / "a.h5").read(np.arange(5))["x"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("layout", ["in one piece", "packed"])
def test_a_file_that_changes_while_it_is_read_is_noticed(folder, layout):
    path = write(folder / "a.h5", arrays(), layout)
    source = Hdf5Source(path)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-100])
    with refuses(ms.errors.FileChanged, "Hdf5Source", "a.h5", "sample 3"):
        source.read(np.array([3]))


def test_what_does_not_fit_together_is_refused(folder):
    write(folder / "a.h5", {"x": np.zeros(3), "y": np.zeros(4)}, "in one piece")
    write(folder / "b.h5", {"x": np.zeros((3, 2))}, "in one piece")
    with h5py.File(folder / "c.h5", "w") as file:
        file["record"] = np.zeros(3, [("a", np.int32), ("b", np.float32)])
        file["scalar"] = 5
    with refuses(ValueError, "same, non-zero number of rows", "['x']", "['y']", "columns=[...]"):
        Hdf5Source(folder / "a.h5")
    with refuses(ValueError, "in every file", "a.h5['x']: float64 ()", "b.h5['x']: float64 (2,)"):
        Hdf5Source([folder / "a.h5", folder / "b.h5"], ["x"])
    with refuses(ValueError, "numbers, text and lists", "c.h5['record']"):
        Hdf5Source(folder / "c.h5")
    with refuses(ValueError, "each column once", "'z'"):
        Hdf5Source(folder / "a.h5", ["z"])
    with refuses(ValueError, "the same datasets in every file", "b.h5 has no 'y'"):
        Hdf5Source([folder / "a.h5", folder / "b.h5"], ["y"])
    (folder / "d.h5").write_bytes(b"no HDF5 at all")
    with refuses(ValueError, "Hdf5Source cannot read", "d.h5", "as HDF5"):
        Hdf5Source(folder / "d.h5")
    with refuses(FileNotFoundError, "Hdf5Source", "none.h5"):
        Hdf5Source(folder / "none.h5")
    with refuses(ValueError, "Hdf5Source", "address", "s3://"):
        Hdf5Source("s3://bucket/a.h5")


DAMAGE = """
import pathlib, sys
import numpy as np
from damage import damaged
from millstream.integrations.hdf5 import Hdf5Source

folder, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
data = (folder / "good.h5").read_bytes()
expected, refused = Hdf5Source(folder / "good.h5").read(np.arange(23)), 0
for number, copy in enumerate(damaged(data, count)):
    path = folder / f"bad-{number}.h5"  # a name of its own: HDF5 remembers files
    path.write_bytes(copy)
    try:
        found = Hdf5Source(path).read(np.arange(23))
    except (ValueError, OSError) as error:
        assert path.name in str(error), error
        refused += 1
    else:
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in found), number
    path.unlink()
print(refused)
"""


def test_a_damaged_file_with_checksums_never_gives_a_wrong_byte(folder):
    with h5py.File(folder / "good.h5", "w", libver="latest") as file:
        for name, array in arrays().items():
            file.create_dataset(name, data=array, chunks=True, fletcher32=True)
    here = str(pathlib.Path(__file__).parent)
    command = [sys.executable, "-c", DAMAGE, str(folder), str(DAMAGES)]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > DAMAGES // 10
