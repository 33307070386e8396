"""Every data set, from small files in its real format."""

import os
import pickle
import shutil

import jax
import numpy as np
import pytest
from formats import cifar_batch, idx_bytes, tar_bytes, write_idx, zip_bytes
from test_bad_input import refuses

import millstream as ms
from millstream.datasets import _download

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (6, 28, 28), dtype=np.uint8)
LABELS = np.array([3, 1, 4, 1, 5, 9], np.uint8)
PIXELS = RNG.integers(0, 256, (4, 3072), dtype=np.uint8)
MNIST_LIKE = [ms.datasets.MNISTDataset, ms.datasets.FashionMNISTDataset, ms.datasets.KMNISTDataset]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """A data set that finds its files asks nobody."""

    def refuse(*args, **kwargs):
        raise AssertionError("a download was tried")

    monkeypatch.setattr(_download._Transfer, "run", refuse)


def check_images(dataset, images, labels):
    arrays = dataset.as_array_dict()
    assert len(dataset) == len(labels)
    np.testing.assert_array_equal(arrays["image"], images)
    np.testing.assert_array_equal(arrays["label"], labels)
    assert (arrays["image"].dtype, arrays["label"].dtype) == (np.uint8, np.int32)
    np.testing.assert_array_equal(dataset[1]["image"], images[1])
    for array in arrays.values():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def check_source(source, images, labels):
    batch = source.read(np.array([3, 0]))
    np.testing.assert_array_equal(batch["image"], images[[3, 0]])
    np.testing.assert_array_equal(batch["label"], labels[[3, 0]])
    assert batch["label"].dtype == np.int32
    assert (len(source), source.ordering, source.prefetch_size) == (len(labels), "sequential", 8)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(source)).read(np.array([1]))["image"], images[[1]])


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("kind", MNIST_LIKE)
def test_mnist_and_its_kin_use_files_that_are_there(tmp_path, kind, suffix, inner):
    folder = tmp_path / kind.folder if inner else tmp_path
    write_idx(folder / f"t10k-images-idx3-ubyte{suffix}", IMAGES)
    write_idx(folder / f"t10k-labels-idx1-ubyte{suffix}", LABELS)
    check_images(kind("test", tmp_path), IMAGES[..., None], LABELS)
    options = {"split": "test", "ordering": "sequential", "prefetch_size": 8, "cache_dir": tmp_path}
    for _ in range(2):
        check_source(kind.make_disk_source(**options), IMAGES[..., None], LABELS)
    kept = [path.name for path in tmp_path.rglob("*.npz")]
    assert len(kept) == (suffix == ".gz"), kept


@pytest.mark.parametrize("kind", [*MNIST_LIKE, ms.datasets.EMNISTDataset])
@pytest.mark.parametrize("given", [False, True])
def test_files_that_cyreal_has_downloaded_are_used(tmp_path, monkeypatch, kind, given):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    theirs = {"mnist": "jax_mnist", "emnist": "emnist/balanced"}.get(kind.folder, kind.folder)
    folder = tmp_path / ("mine" if given else f".cache/{theirs}")
    write_idx(folder / "test_images.gz", IMAGES)
    write_idx(folder / "test_labels.gz", LABELS)
    check_images(kind("test", folder if given else None), IMAGES[..., None], LABELS)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_cifar_batches_that_python_3_has_written_are_read(tmp_path, monkeypatch, protocol):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".cache" / "cyreal_cifar10" / "cifar-10-batches-py" / "test_batch"
    path.parent.mkdir(parents=True)
    path.write_bytes(pickle.dumps({"data": PIXELS, "labels": [7, 0, 9, 2]}, protocol))
    arrays = ms.datasets.CIFAR10Dataset("test").as_array_dict()
    assert arrays["label"].tolist() == [7, 0, 9, 2]
    np.testing.assert_array_equal(arrays["image"], PIXELS.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_batch_that_python_3_has_written_runs_nothing(tmp_path, protocol):
    class Code:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps({"data": Code(), "labels": [1]}, protocol))
    with refuses(ValueError, "is not a CIFAR batch", "is not allowed", "It was not run"):
        ms.datasets.CIFAR10Dataset("test", tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_disk_cache_is_used_with_a_restored_copy_of_its_source(tmp_path):
    paths = [tmp_path / f"train-{name}.gz" for name in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    for path, array in zip(paths, (IMAGES, LABELS), strict=True):
        write_idx(path, array)
    ms.datasets.MNISTDataset.make_disk_source(cache_dir=tmp_path)
    (cached,) = tmp_path.rglob("*.npz")
    before = cached.stat()
    for path in paths:  # another inode, the same time
        shutil.copy2(path, tmp_path / "copy")
        (tmp_path / "copy").replace(path)
    ms.datasets.MNISTDataset.make_disk_source(cache_dir=tmp_path)
    assert list(tmp_path.rglob("*.npz")) == [cached] and os.path.samestat(cached.stat(), before)


def test_a_disk_cache_follows_its_source(tmp_path):
    options = {"split": "train", "cache_dir": tmp_path}
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", LABELS)
    own = tmp_path / "mnist" / "train-augmented.npz"
    own.parent.mkdir()
    own.write_bytes(b"a file of the user's")
    for images in (IMAGES, 255 - IMAGES):
        write_idx(tmp_path / "train-images-idx3-ubyte.gz", images)
        source = ms.datasets.MNISTDataset.make_disk_source(**options)
        np.testing.assert_array_equal(source.read(np.arange(6))["image"][..., 0], images)
    assert len(list(tmp_path.rglob("*.npz"))) == 2 and own.exists()
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]


def test_mnist_disk_source_is_the_function_of_that_name(tmp_path):
    write_idx(tmp_path / "train-images-idx3-ubyte", IMAGES)
    write_idx(tmp_path / "train-labels-idx1-ubyte", LABELS)
    source = ms.datasets.MNISTDiskSource("train", tmp_path, "sequential", 8)
    check_source(source, IMAGES[..., None], LABELS)


def test_images_and_labels_must_match(tmp_path):
    write_idx(tmp_path / "train-images-idx3-ubyte", IMAGES)
    write_idx(tmp_path / "train-labels-idx1-ubyte", LABELS[:5])
    with refuses(ValueError, "MNISTDataset", "a label for each", "shape (6, 28, 28), uint8", "shape (5,), uint8"):
        ms.datasets.MNISTDataset("train", tmp_path)


@pytest.mark.parametrize("subset", ["balanced", "byclass", "bymerge", "digits", "letters"])
def test_emnist_takes_one_subset_out_of_the_archive(tmp_path, subset):
    names = {
        f"gzip/emnist-{name}-{split}-{kind}.gz": b"not looked at"
        for name in ("mnist", subset)
        for split in ("train", "test")
        for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
    }
    for kind, array in (("images-idx3-ubyte", IMAGES), ("labels-idx1-ubyte", LABELS)):
        path = write_idx(tmp_path / "scratch.gz", array)
        names[f"gzip/emnist-{subset}-test-{kind}.gz"] = path.read_bytes()
        path.unlink()
    (tmp_path / "gzip.zip").write_bytes(zip_bytes(names))
    check_images(ms.datasets.EMNISTDataset("test", tmp_path, subset), IMAGES[..., None], LABELS)
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == 3
    (tmp_path / "gzip.zip").unlink()  # the unpacked files are enough
    source = ms.datasets.EMNISTDataset.make_disk_source(
        split="test", ordering="sequential", prefetch_size=8, cache_dir=tmp_path, subset=subset
    )
    check_source(source, IMAGES[..., None], LABELS)


def cifar10_members():
    batches = {f"data_batch_{number}": np.full_like(PIXELS, number) for number in range(1, 6)}
    batches["test_batch"] = PIXELS
    return {
        "cifar-10-batches-py/readme.html": b"hello",
        **{
            f"cifar-10-batches-py/{name}": cifar_batch(pixels, {b"labels": [7, 0, 9, 2]})
            for name, pixels in batches.items()
        },
    }


@pytest.mark.parametrize("unpacked", [False, True])
def test_cifar10_from_the_archive_or_unpacked(tmp_path, unpacked):
    if unpacked:
        for name, data in cifar10_members().items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(data)
    else:
        (tmp_path / "cifar-10-python.tar.gz").write_bytes(tar_bytes(cifar10_members()))
    images = PIXELS.reshape(4, 3, 32, 32).transpose(0, 2, 3, 1)
    labels = np.array([7, 0, 9, 2])
    check_images(ms.datasets.CIFAR10Dataset("test", tmp_path), images, labels)
    train = ms.datasets.CIFAR10Dataset("train", tmp_path).as_array_dict()
    assert train["image"][::4, 0, 0, 0].tolist() == [1, 2, 3, 4, 5]
    assert train["image"].flags.c_contiguous
    source = ms.datasets.CIFAR10Dataset.make_disk_source(
        split="test", ordering="sequential", prefetch_size=8, cache_dir=tmp_path
    )
    check_source(source, images, labels)
    assert not list(tmp_path.rglob("readme.html")) or unpacked


def test_cifar100_has_fine_and_coarse_labels(tmp_path):
    labels = {b"fine_labels": [99, 0, 50, 1], b"coarse_labels": [19, 0, 10, 1]}
    batch = cifar_batch(PIXELS, labels)
    archive = tar_bytes({"cifar-100-python/train": batch, "cifar-100-python/test": batch})
    (tmp_path / "cifar-100-python.tar.gz").write_bytes(archive)
    arrays = ms.datasets.CIFAR100Dataset("train", tmp_path).as_array_dict()
    assert arrays["label"].tolist() == labels[b"fine_labels"]
    assert arrays["coarse_label"].tolist() == labels[b"coarse_labels"]
    assert arrays["coarse_label"].dtype == np.int32
    source = ms.datasets.CIFAR100Dataset.make_disk_source(cache_dir=tmp_path)
    assert source.read(np.array([2]))["coarse_label"].tolist() == [10]


def test_a_cifar_batch_without_its_parts_is_named(tmp_path):
    path = tmp_path / "cifar-100-python" / "test"
    path.parent.mkdir()
    path.write_bytes(cifar_batch(PIXELS[:, :100], {}))
    with refuses(ValueError, str(path), "no array `data` with 3072 bytes a row"):
        ms.datasets.CIFAR100Dataset("test", tmp_path)
    path.write_bytes(cifar_batch(PIXELS, {b"fine_labels": [1, 2]}))
    with refuses(ValueError, str(path), "no 4 numbers `fine_labels`"):
        ms.datasets.CIFAR100Dataset("test", tmp_path)


@pytest.fixture
def celeba(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    lines, attributes = [], ["6", "Bald Smiling"]
    (tmp_path / "img_align_celeba").mkdir()
    for number, split in enumerate([0, 0, 0, 1, 2, 2]):
        name = f"{number:06}.jpg"
        lines.append(f"{name} {split}")
        attributes.append(f"{name}  {-1 if number % 2 else 1} {1 if number > 2 else -1}")
        Image.fromarray(np.full((218, 178, 3), 30 * number, np.uint8)).save(tmp_path / "img_align_celeba" / name)
    (tmp_path / "list_eval_partition.txt").write_text("\r\n".join(lines) + "\r\n")
    (tmp_path / "list_attr_celeba.txt").write_text("\r\n".join(attributes) + "\r\n")
    return tmp_path


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("place", ["cache_dir", "data_dir"])
def test_celeba_from_a_folder_or_straight_from_the_archive(celeba, zipped, place):
    folder = celeba / "img_align_celeba"
    if zipped:
        members = {f"img_align_celeba/{path.name}": path.read_bytes() for path in folder.iterdir()}
        (celeba / "img_align_celeba.zip").write_bytes(zip_bytes(members))
        shutil.rmtree(folder)
    train = ms.datasets.CelebADataset("train", **{place: celeba})
    assert (len(train), train.attribute_names) == (3, ("Bald", "Smiling"))
    assert train[2]["attributes"].tolist() == [1, 0]
    assert train[2]["attributes"].dtype == np.int32
    assert (train[2]["image"].shape, train[2]["image"].dtype) == ((218, 178, 3), np.uint8)
    assert abs(int(train[2]["image"][0, 0, 0]) - 60) < 3
    assert [len(ms.datasets.CelebADataset(split, **{place: celeba})) for split in ("valid", "test")] == [1, 2]
    arrays = ms.datasets.CelebADataset("test", include_attributes=False, **{place: celeba}).as_array_dict()
    assert (list(arrays), arrays["image"].shape) == (["image"], (2, 218, 178, 3))
    source = ms.datasets.CelebADataset.make_disk_source(split="train", ordering="sequential", **{place: celeba})
    np.testing.assert_array_equal(source.read(np.array([2]))["image"][0], train[2]["image"])
    copy = pickle.loads(pickle.dumps(train))
    np.testing.assert_array_equal(copy[1]["image"], train[1]["image"])


def test_a_list_of_celeba_may_begin_with_a_count(celeba):
    path = celeba / "list_eval_partition.txt"
    path.write_text("6\n" + path.read_text())
    assert len(ms.datasets.CelebADataset("train", data_dir=celeba)) == 3
    path.write_text("six\n" + path.read_text())
    with refuses(ValueError, "line 1: needs a file name and 0, 1 or 2. Got ['six']"):
        ms.datasets.CelebADataset("train", data_dir=celeba)


def test_celeba_names_what_is_missing(celeba):
    with refuses(ValueError, "CelebADataset needs split 'train', 'valid' or 'test'", "'val'"):
        ms.datasets.CelebADataset("val", data_dir=celeba)
    (celeba / "list_attr_celeba.txt").write_text("1\nBald\n000000.jpg 1\n")
    with refuses(ValueError, "list_attr_celeba.txt has no attributes for ['000001.jpg'"):
        ms.datasets.CelebADataset("train", data_dir=celeba)
    (celeba / "list_attr_celeba.txt").unlink()
    with refuses(FileNotFoundError, "CelebADataset needs list_attr_celeba.txt in data_dir"):
        ms.datasets.CelebADataset("train", data_dir=celeba)


def test_celeba_names_an_archive_that_is_cut_short(celeba):
    members = {f"img_align_celeba/{path.name}": path.read_bytes() for path in (celeba / "img_align_celeba").iterdir()}
    (celeba / "img_align_celeba.zip").write_bytes(zip_bytes(members)[:-100])
    shutil.rmtree(celeba / "img_align_celeba")
    faces = ms.datasets.CelebADataset("train", data_dir=celeba)
    with refuses(ValueError, "img_align_celeba.zip, 000001.jpg cannot be read", "Get the archive again"):
        faces[1]
    with refuses(TypeError, "CelebADataset needs include_attributes to be a bool. Got 'no' (str)"):
        ms.datasets.CelebADataset("train", data_dir=celeba, include_attributes="no")  # pyright: ignore[reportArgumentType]


@pytest.fixture
def sunspots(tmp_path):
    rows = "\n".join(f'"1749-{number:02}",{number}.5' for number in range(100))
    (tmp_path / "monthly-sunspots.csv").write_text(f'"Month","Sunspots"\n{rows}\n')
    return tmp_path


def test_time_series_split_by_time_with_history(sunspots):
    def first_targets(split):
        dataset = ms.datasets.SunspotsDataset(
            split, sunspots, overlapping=True, context_length=4, train_fraction=0.6, val_fraction=0.2
        )
        return dataset.as_array_dict()["target"][:, 0]

    assert first_targets("train").tolist() == [number + 0.5 for number in range(4, 60)]
    assert first_targets("val").tolist() == [number + 0.5 for number in range(60, 80)]
    assert first_targets("test").tolist() == [number + 0.5 for number in range(80, 100)]


def test_time_series_windows_do_not_overlap_unless_asked(sunspots):
    arrays = ms.datasets.SunspotsDataset("train", sunspots).as_array_dict()
    assert (arrays["context"].shape, arrays["target"].shape) == ((3, 24), (3, 1))
    assert arrays["context"].dtype == np.float32
    values = np.concatenate([arrays["context"], arrays["target"]], axis=1).ravel()
    assert len(np.unique(values)) == values.size
    source = ms.datasets.SunspotsDataset.make_disk_source(
        split="test", cache_dir=sunspots, context_length=2, prediction_length=2, ordering="sequential"
    )
    assert source.read(np.array([0]))["target"].tolist() == [[80.5, 81.5]]


def test_daily_temperatures_from_a_file_of_your_own(tmp_path):
    rows = "\n".join(f"1981-01-01,{number}" for number in range(40))
    (tmp_path / "mine.csv").write_text(f"Date,Temp\n{rows}\n")
    dataset = ms.datasets.DailyMinTemperaturesDataset(cache_dir=tmp_path, data_path=tmp_path / "mine.csv")
    assert (len(dataset), dataset[0]["context"].shape) == (1, (30,))
    (tmp_path / "mine.csv").write_text("Date,Temp\n1,2\n2,nan\n")
    with refuses(ValueError, "DailyMinTemperaturesDataset needs finite values", "Row 1"):
        ms.datasets.DailyMinTemperaturesDataset(cache_dir=tmp_path, data_path=tmp_path / "mine.csv")


@pytest.mark.parametrize("stride", [1, 2, 7])
@pytest.mark.parametrize("width", [None, 3])
def test_windows_of_one_or_many_values_at_a_time(stride, width):
    series = np.arange(20.0) if width is None else np.arange(20.0 * width).reshape(20, width)
    windows = ms.datasets.time_series_windows(series, 4, 2, stride=stride)
    assert len(windows["context"]) == len(windows["target"]) == (20 - 6) // stride + 1
    for number, (context, target) in enumerate(zip(windows["context"], windows["target"], strict=True)):
        start = number * stride
        np.testing.assert_array_equal(context, series[start : start + 4])
        np.testing.assert_array_equal(target, series[start + 4 : start + 6])


def test_window_refusals(sunspots):
    windows = ms.datasets.time_series_windows
    with refuses(ValueError, "at least as long as a window", "has 5 values, a window 5 + 1"):
        windows(np.arange(5.0), 5)
    with refuses(ValueError, "(T,) or (T, D)", "shape (2, 2, 2)"):
        windows(np.zeros((2, 2, 2)), 1)
    with refuses(ValueError, "windows of 4 values, 2 apart, overlap"):
        windows(np.arange(9.0), 3, overlapping=False, stride=2)
    with refuses(ValueError, "context_length to be an int of at least 1", "0"):
        windows(np.arange(9.0), 0)
    with refuses(ValueError, "SunspotsDataset: there is nothing for 'val'", "val_fraction 0.0"):
        ms.datasets.SunspotsDataset("val", sunspots)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"split": "dev"}, ValueError, "split 'train', 'val' or 'test'. Got 'dev' (str)"),
        ({"train_fraction": 0.9, "val_fraction": 0.2}, ValueError, "train_fraction + val_fraction <= 1. Got 0.9"),
        ({"train_fraction": "0.9"}, ValueError, "train_fraction + val_fraction <= 1. Got '0.9' (str)"),
        ({"split": "test", "context_length": "3"}, ValueError, "context_length to be an int of at least 1"),
        ({"prediction_length": 0}, ValueError, "prediction_length to be an int of at least 1"),
        ({"stride": 0}, ValueError, "stride to be an int of at least 1"),
        ({"overlapping": "no"}, TypeError, "overlapping to be a bool. Got 'no' (str)"),
    ],
)
def test_a_time_series_refuses_by_its_own_name_before_it_asks_for_its_file(tmp_path, options, error, words):
    with refuses(error, "SunspotsDataset needs", words):
        ms.datasets.SunspotsDataset(data_path=tmp_path / "not there.csv", **options)


@pytest.mark.parametrize("kind", [*MNIST_LIKE, ms.datasets.EMNISTDataset, ms.datasets.CIFAR10Dataset])
def test_unknown_splits_are_refused(tmp_path, kind):
    with refuses(ValueError, f"{kind.__name__} needs split 'train' or 'test'", "'dev'"):
        kind("dev", tmp_path)


def test_datasets_become_jax_arrays():
    digits = ms.datasets.DigitsDataset("test")
    arrays = ms.datasets.dataset_to_jax(digits, storage_device="cpu:0")
    assert isinstance(arrays["image"], jax.Array)
    items = ms.datasets.dataset_to_jax([{"x": np.float32(1)}, {"x": np.float32(2)}], jax.devices()[0])
    assert items["x"].tolist() == [1.0, 2.0]
    with refuses(ValueError, "dataset_to_jax: JAX keeps int64 as int32", str(2**40)):
        ms.datasets.dataset_to_jax([{"x": np.int64(1)}, {"x": np.int64(2**40)}])
    with refuses(TypeError, "dataset_to_jax needs as_array_dict(), or a dataset with a length and [index]", "3 (int)"):
        ms.datasets.dataset_to_jax(3)  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "dataset_to_jax needs at least one item. Got list of length 0"):
        ms.datasets.dataset_to_jax([])


def test_digits_have_a_disk_source_too():
    source = ms.datasets.DigitsDataset.make_disk_source(split="test", ordering="sequential", prefetch_size=8)
    digits = ms.datasets.DigitsDataset("test").as_array_dict()
    check_source(source, digits["image"], digits["label"])


def test_a_disk_source_runs_in_a_loader(tmp_path, key):
    write_idx(tmp_path / "train-images-idx3-ubyte", IMAGES)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(LABELS))
    source = ms.datasets.MNISTDataset.make_disk_source(cache_dir=tmp_path)
    loader = ms.DataLoader([source, ms.BatchTransform(3)])
    seen = [
        label for batch, _ in loader.iterate(loader.init_state(key)) for label in np.asarray(batch["label"]).tolist()
    ]
    assert sorted(seen) == sorted(LABELS.tolist())


def test_a_shared_cache_that_anybody_may_write_is_refused(tmp_path, monkeypatch):
    from millstream.datasets import _cache

    folder = _cache.cache_folder(tmp_path / "cache", "mnist")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    monkeypatch.setattr(_cache.os, "getuid", lambda: folder.stat().st_uid + 1)
    with refuses(PermissionError, str(folder), "anybody may write", "cache_dir of your own"):
        _cache.cache_folder(tmp_path / "cache", "mnist")
