"""Lance datasets: fragments, versions, deleted rows, text and lists, threads, processes, damage."""

import concurrent.futures
import pathlib
import pickle
import shutil
import subprocess
import sys
from typing import Any

import jax
import lance
import numpy as np
import pyarrow as pa
import pytest
from conftest import assert_trees_equal
from damage import DAMAGES
from hypothesis import given
from hypothesis import strategies as st
from test_bad_input import refuses

import millstream as ms
from millstream.integrations.lance import LanceSource

N = 23


def arrays(n=N, seed=0):
    chance = np.random.default_rng(seed)
    return {
        "flag": chance.integers(0, 2, n).astype(bool),
        "image": chance.integers(0, 256, (n, 3, 2), dtype=np.uint8),
        "label": np.arange(n, dtype=np.int32) + 100 * seed,
        "x": chance.random(n),
    }


def write(path, data, mode="create", rows=5) -> Any:
    columns = {**data, "image": pa.FixedShapeTensorArray.from_numpy_ndarray(data["image"])}
    return lance.write_dataset(pa.table(columns), str(path), mode=mode, max_rows_per_file=rows, max_rows_per_group=rows)


def assert_rows(source, data, indices):
    found = source.read(indices)
    assert found.keys() == data.keys()
    for name, array in data.items():
        np.testing.assert_array_equal(found[name], array[indices].astype(found[name].dtype))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("lance") / "a.lance"
    write(path, arrays())
    return path


@given(indices=st.lists(st.integers(0, N - 1), min_size=1, max_size=30))
def test_rows_are_those_that_were_written_in_any_order_and_any_number_of_times(written, indices):
    source = LanceSource(written)
    assert len(source) == N and np.asarray(source.blocks).tolist() == [5, 5, 5, 5, 3]
    for one in (source, pickle.loads(pickle.dumps(source))):
        assert_rows(one, arrays(), np.array(indices))


def test_a_function_gets_the_chosen_columns_of_a_row(written):
    source = LanceSource(written, ["label"], row_fn=lambda row: {"y": np.int32(row.pop("label") + len(row))})
    assert source.read(np.array([20, 3, 20]))["y"].tolist() == [20, 3, 20]


@pytest.mark.parametrize("executor", [None, ms.Threads(3), ms.Processes(1)], ids=["none", "threads", "processes"])
def test_every_executor_gives_the_stream_of_the_same_arrays(written, key, executor):
    runs = []
    for one, runner in ((LanceSource(written), executor), (ms.HostArraySource(arrays()), None)):
        with ms.DataLoader([one, ms.BatchTransform(4)], executor=runner) as loader:
            runs.append([jax.device_get(pair) for pair in loader.iterate(loader.init_state(key), steps=8)])
    assert_trees_equal(*runs)


def test_threads_read_one_source_at_once(written):
    source = LanceSource(written)

    def read(seed):
        assert_rows(source, arrays(), np.random.default_rng(seed).integers(0, N, 12))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(60)))


def test_text_gaps_and_lists_are_python_objects(folder):
    ids = [[0], [0, 1], [], None]
    table = {"word": ["oats", "rye", None, "Äpfel"], "ids": ids, "size": [1, None, 3, 4]}
    lance.write_dataset(pa.table(table), str(folder / "a.lance"), max_rows_per_file=2, max_rows_per_group=2)
    source = LanceSource(folder / "a.lance")
    found = source.read(np.array([3, 1, 0]))
    assert [(row["word"], row["size"]) for row in found] == [("Äpfel", 4), ("rye", None), ("oats", 1)]
    assert found[0]["ids"] is None and [row["ids"].tolist() for row in found[1:]] == [[0, 1], [0]]
    some = source[:3].map(lambda row: {"ids": row["ids"]})
    padded = [some, ms.PadTransform({"ids": 0}, length=4), ms.BatchTransform(3)]
    assert ms.DataLoader(padded).element_spec()["ids"].shape == (3, 4)


def test_deleted_rows_are_left_out_and_emptied_fragments_too(folder):
    data = arrays()
    write(folder / "a.lance", data).delete("label % 3 = 1 OR (label >= 5 AND label < 10)")
    kept = np.array([row for row in range(N) if row % 3 != 1 and not 5 <= row < 10])
    source = LanceSource(folder / "a.lance")
    assert len(source) == len(kept) and np.asarray(source.blocks).tolist() == [3, 3, 3, 2]
    assert_rows(source, {name: array[kept] for name, array in data.items()}, np.arange(len(kept))[::-1])
    assert_rows(LanceSource(folder / "a.lance", version=1), data, np.arange(N))


def test_a_dataset_that_changes_while_it_is_read_gives_the_version_that_was_opened(folder, key):
    path, data = folder / "a.lance", arrays()
    dataset = write(path, data)
    dataset.tags.create("first", 1)
    source = LanceSource(path, ordering="sequential")
    copied = pickle.dumps(source)
    with ms.DataLoader([source, ms.BatchTransform(4)], executor=ms.Processes(1)) as loader:
        batches = loader.iterate(loader.init_state(key), steps=6)
        rows = [next(batches)[0]["label"]]
        write(path, arrays(9, 1), "append")
        dataset = lance.dataset(str(path))
        dataset.delete("label < 20")
        dataset.optimize.compact_files()
        rows += [batch["label"][np.asarray(mask)] for batch, mask in batches]
    assert np.concatenate(rows).tolist() == list(range(N))
    for same in (source, pickle.loads(copied), LanceSource(path, version="first"), LanceSource(path, version=1)):
        assert_rows(same, data, np.arange(N))
        assert same.stamps == source.stamps
    newer = LanceSource(path)
    assert len(newer) == 12 and newer.stamps != source.stamps
    shutil.rmtree(path)
    write(path, data)  # which is version 1 again, of other files
    assert LanceSource(path).stamps != source.stamps
    for gone, words in ((pickle.loads(copied), "the dataset has changed"), (source, "LanceSource cannot read")):
        with refuses(ms.errors.FileChanged, words, "a.lance", "sample 3", "build the source again"):
            gone.read(np.array([3]))
    shutil.rmtree(path)
    with refuses(ms.errors.FileChanged, "LanceSource cannot read", "a.lance", "sample 3"):
        pickle.loads(copied).read(np.array([3]))


def test_wrong_arguments_are_refused(folder, written):
    versions: dict[Any, str] = {
        0: "version to be an int from 1",
        1.0: "version to be an int from 1",
        77: "cannot open version 77 of",
        "best": "cannot open version 'best' of",
    }
    for version, words in versions.items():
        with refuses(ValueError, "LanceSource", words):
            LanceSource(written, version=version)
    with refuses(ValueError, "whose latest is 1", "dataset.versions()"):
        LanceSource(written, version=2)
    with refuses(ValueError, "each column once", "'z'"):
        LanceSource(written, ["z"])
    with refuses(ValueError, "LanceSource", "this machine alone", "s3://bucket/a.lance"):
        LanceSource("s3://bucket/a.lance")
    with refuses(FileNotFoundError, "LanceSource", "none.lance does not exist"):
        LanceSource(folder / "none.lance")
    (folder / "file.lance").write_text("text")
    with refuses(ValueError, "LanceSource", "folder of a Lance dataset", "file.lance has none"):
        LanceSource(folder / "file.lance")
    write(folder / "empty.lance", arrays()).delete("true")
    with refuses(ValueError, "LanceSource", "at least one row"):
        LanceSource(folder / "empty.lance")
    blobs = pa.field("blob", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    lance.write_dataset(pa.table([pa.array([b"a"], blobs.type)], pa.schema([blobs])), str(folder / "blobs.lance"))
    with refuses(ValueError, "LanceSource does not read blobs", "blobs.lance", "'blob'"):
        LanceSource(folder / "blobs.lance")


DAMAGE = """
import pathlib, shutil, sys
import numpy as np
from damage import damaged
from millstream.integrations.lance import LanceSource

folder, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
good, refused = folder / "good.lance", 0
files = sorted(good.glob("data/*.lance")) + sorted(good.glob("_versions/*.manifest"))
for file in files:
    for number, copy in enumerate(damaged(file.read_bytes(), count // len(files))):
        path = folder / f"bad-{file.stem}-{number}.lance"  # a name of its own: Lance remembers files
        shutil.copytree(good, path)
        (path / file.relative_to(good)).write_bytes(copy)
        try:
            LanceSource(path).read(np.arange(23))
        except (ValueError, OSError) as error:
            assert path.name in str(error) and ".rs:" not in str(error), error
            refused += 1
        shutil.rmtree(path)
print(refused)
"""


def test_damage_is_named_and_ends_no_process(folder):
    """Lance has no checksums, so other values than those that were written cannot be noticed."""
    write(folder / "good.lance", arrays(), rows=12)
    words = pa.table({"word": [f"word {row}" for row in range(N)], "label": np.arange(N, dtype=np.int32)})
    lance.dataset(str(folder / "good.lance")).merge(words, "label")
    here = str(pathlib.Path(__file__).parent)
    command = [sys.executable, "-c", DAMAGE, str(folder), str(DAMAGES)]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > DAMAGES // 10
