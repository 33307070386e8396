"""Sources over files: NumPy's, IDX, CSV and folders of images."""

import os
import pickle
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from formats import write_idx
from test_bad_input import refuses

from millstream.sources.csv import CsvSource
from millstream.sources.idx import IdxSource, map_idx
from millstream.sources.image_folder import ImageFolderSource
from millstream.sources.npy import NpySource, map_numpy_file

ROWS = np.array([4, 0, 2])


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {"x": rng.standard_normal((5, 2, 3)).astype(np.float32), "y": np.arange(5, dtype=np.int32)}


def is_mapped(array):
    while array is not None:
        if isinstance(array, np.memmap):
            return True
        array = getattr(array, "base", None)
    return False


def test_npy_files_are_mapped_and_read_by_row(tmp_path, arrays):
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    source = NpySource({"x": tmp_path / "x.npy", "y": str(tmp_path / "y.npy")}, "sequential")
    assert len(source) == 5
    assert source.spec()["x"].shape == (2, 3)
    batch = source.read(ROWS)
    np.testing.assert_array_equal(batch["x"], arrays["x"][ROWS])
    np.testing.assert_array_equal(batch["y"], arrays["y"][ROWS])
    assert is_mapped(source.data["x"])
    assert not source.data["x"].flags.writeable


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_members_are_mapped_in_place_or_unpacked(tmp_path, arrays, save):
    save(tmp_path / "all.npz", **arrays)
    source = NpySource(tmp_path / "all.npz")
    np.testing.assert_array_equal(source.read(ROWS)["x"], arrays["x"][ROWS])
    assert is_mapped(source.data["x"]) == (save is np.savez)
    assert not source.data["y"].flags.writeable


@pytest.mark.parametrize("array", [np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(4, dtype=">i4")])
def test_other_layouts_give_the_same_numbers(tmp_path, array):
    np.save(tmp_path / "x.npy", array)
    np.savez_compressed(tmp_path / "x.npz", x=array)
    for found in (map_numpy_file(tmp_path / "x.npy"), map_numpy_file(tmp_path / "x.npz")["x"]):  # pyright: ignore
        np.testing.assert_array_equal(found, array)
        assert isinstance(found, np.ndarray)
        assert found.dtype.isnative


def test_a_file_source_travels_as_its_paths(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((1000, 100), np.float32))
    packed = pickle.dumps(NpySource({"x": tmp_path / "x.npy"}, "sequential", 7))
    assert len(packed) < 1000
    copy = pickle.loads(packed)
    assert (type(copy), len(copy), copy.ordering, copy.prefetch_size) == (NpySource, 1000, "sequential", 7)


def test_a_copy_in_a_worker_process_does_without_jax(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((10, 2), np.float32))
    (tmp_path / "source").write_bytes(pickle.dumps(NpySource({"x": tmp_path / "x.npy"})))
    program = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb')); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "source")], check=True)


def test_npy_refusals_name_the_file(tmp_path):
    objects, short, text = tmp_path / "o.npy", tmp_path / "short.npy", tmp_path / "t.npy"
    np.save(objects, np.array([{}], object), allow_pickle=True)
    with refuses(ValueError, str(objects), "|O", "never unpickled"):
        NpySource(objects)
    np.save(short, np.zeros(100, np.float32))
    short.write_bytes(short.read_bytes()[:-1])
    with refuses(ValueError, str(short), "needs 400 bytes, and 399 are there"):
        NpySource(short)
    text.write_text("hello, this is not an array")
    with refuses(ValueError, str(text), "is not an .npy file", "b'hello, t'"):
        NpySource(text)
    with refuses(FileNotFoundError, "NpySource", str(tmp_path / "none.npy"), "does not exist"):
        NpySource(tmp_path / "none.npy")
    with refuses(ValueError, "NpySource needs a plain file"):
        NpySource(tmp_path)
    with refuses(TypeError, "NpySource needs paths", "3 (int)"):
        NpySource({"x": [3]})


def test_a_header_that_claims_terabytes_allocates_nothing(tmp_path):
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776, 4096), }"
    path = tmp_path / "huge.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\0" * 64)
    with refuses(ValueError, "36028797018963968 bytes, and 64 are there"):
        NpySource(path)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.float32, np.float64])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_of_every_type(tmp_path, dtype, suffix):
    array = np.arange(24).reshape(4, 3, 2).astype(dtype)
    found = map_idx(write_idx(tmp_path / f"x{suffix}", array))
    np.testing.assert_array_equal(found, array)
    assert found.dtype == dtype
    assert not found.flags.writeable
    assert is_mapped(found) == (dtype in (np.uint8, np.int8) and suffix == "")


def test_idx_source_reads_rows_of_several_files(tmp_path):
    images, labels = np.arange(5 * 4, dtype=np.uint8).reshape(5, 2, 2), np.arange(5, dtype=np.uint8)
    source = IdxSource({"image": write_idx(tmp_path / "i", images), "label": write_idx(tmp_path / "l.gz", labels)})
    np.testing.assert_array_equal(source.read(ROWS)["image"], images[ROWS])
    assert pickle.loads(pickle.dumps(source)).read(ROWS)["label"].tolist() == [4, 0, 2]


def test_idx_refusals_name_the_file(tmp_path):
    path = write_idx(tmp_path / "x", np.zeros((4, 3), np.uint8))
    path.write_bytes(path.read_bytes()[:-2])
    with refuses(ValueError, str(path), "shape (4, 3) of uint8 needs 12 bytes, and 10 are there"):
        map_idx(path)
    packed = write_idx(tmp_path / "x.gz", np.zeros((4, 3), np.uint8))
    packed.write_bytes(packed.read_bytes()[:-9])
    with refuses(ValueError, str(packed), "damaged"):
        map_idx(packed)
    with refuses(TypeError, "IdxSource needs a mapping"):
        IdxSource(path)  # pyright: ignore[reportArgumentType]
    path.write_bytes(b"<html>not found</html>")
    with refuses(ValueError, "is not an IDX file", "b'<htm'"):
        map_idx(path)


def write(path, text):
    path.write_text(text)
    return path


def test_csv_columns_become_leaves(tmp_path):
    path = write(tmp_path / "t.csv", '"day","temp","count"\n"1981-01-01",20.5,3\n\n"1981-01-02",-1e1,4\n')
    source = CsvSource(path, ["temp", "count"], {"temp": np.float32, "count": np.int32}, "sequential")
    assert (len(source), source.spec()["temp"].shape) == (2, ())
    batch = source.read(np.array([1, 0]))
    assert (batch["temp"].tolist(), batch["count"].tolist()) == ([-10.0, 20.5], [4, 3])
    assert (batch["temp"].dtype, batch["count"].dtype) == (np.float32, np.int32)
    assert pickle.loads(pickle.dumps(source)).data["count"].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("text", "columns", "words"),
    [
        ("", None, ["CsvSource needs a header line and at least one row", "is empty"]),
        ("a,b\n", None, ["['a', 'b'], no rows"]),
        ("a,b\n1,2\n", ["c"], ["Column 'c' is there 0 times", "['a', 'b']"]),
        ("a,a\n1,2\n", ["a"], ["Column 'a' is there 2 times"]),
        ("a,b\n1,2\n3,?4\n", None, ["line 3, column 'b'", "'?4' is not a number"]),
        ("a,b\n1,2\n3\n", None, ["line 3: 1 cells, but the header has 2"]),
        ('a\n"1\n', None, ["cannot be read as CSV"]),
    ],
)
def test_csv_refusals_name_line_and_column(tmp_path, text, columns, words):
    path = write(tmp_path / "t.csv", text)
    with refuses(ValueError, str(path), *words):
        CsvSource(path, columns)


def test_csv_refuses_dtypes_that_do_not_fit(tmp_path):
    path = write(tmp_path / "t.csv", "a\n300\n")
    with refuses(ValueError, "line 2, column 'a'", "300 does not fit uint8"):
        CsvSource(path, dtype=np.uint8)
    with refuses(TypeError, "column 'a' is object"):
        CsvSource(path, dtype=object)
    with refuses(ValueError, "a dtype for every column", "'a'"):
        CsvSource(path, dtype={"b": np.float32})
    with refuses(TypeError, "CsvSource needs columns to be a list of names", "write ['a']"):
        CsvSource(path, "a")
    path.write_bytes(b"a\n\xff\xfe\n")
    with refuses(ValueError, "in UTF-8"):
        CsvSource(path)


@pytest.fixture
def pictures(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    for number, name in enumerate(["cat/b.png", "cat/a.png", "ant/deep/c.png"]):
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 6, 3), 40 * number, np.uint8)).save(path)
    (tmp_path / "root" / "cat" / "notes.txt").write_text("not an image")
    return tmp_path / "root"


def test_image_folders_are_classes(pictures):
    source = ImageFolderSource(pictures, ordering="sequential")
    assert source.classes == ("ant", "cat")
    batch = source.read(np.array([0, 1, 2]))
    assert batch["label"].tolist() == [0, 1, 1]
    assert batch["label"].dtype == np.int32
    assert (batch["image"].shape, batch["image"].dtype) == ((3, 4, 6, 3), np.uint8)
    assert batch["image"][:, 0, 0, 0].tolist() == [80, 40, 0]
    assert ImageFolderSource(pictures, size=(2, 5)).spec()["image"].shape == (2, 5, 3)


def test_unreadable_pictures_are_named(pictures):
    (pictures / "cat" / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n but no more")
    source = ImageFolderSource(pictures, ordering="sequential")
    with refuses(ValueError, str(pictures / "cat" / "a.png"), "cannot be read as an image"):
        source.read(np.array([0, 1]))


def test_links_out_of_the_folder_are_refused(pictures, tmp_path):
    secret = tmp_path / "secret.png"
    shutil.copy(pictures / "cat" / "a.png", secret)
    os.symlink(secret, pictures / "ant" / "x.png")
    with refuses(ValueError, "ImageFolderSource reads only what is in", "x.png is a link to", str(secret)):
        ImageFolderSource(pictures)


def test_image_folder_refusals(pictures, tmp_path, monkeypatch):
    with refuses(FileNotFoundError, "folder of class folders", "nowhere is none"):
        ImageFolderSource(tmp_path / "nowhere")
    (tmp_path / "empty" / "a").mkdir(parents=True)
    with refuses(ValueError, "no images in them", "['a']"):
        ImageFolderSource(tmp_path / "empty")
    with refuses(ValueError, "size (height, width)", "(3,)"):
        ImageFolderSource(pictures, size=(3,))  # pyright: ignore[reportArgumentType]
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with refuses(ImportError, "ImageFolderSource needs Pillow. Run: pip install 'pillow>=11' 'simplejpeg>=1.8'"):
        ImageFolderSource(pictures)


def test_an_npz_with_other_members_is_refused(tmp_path):
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("readme.txt", "hello")
    with refuses(ValueError, "is not an .npz file", "readme.txt"):
        NpySource(path)
