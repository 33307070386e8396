"""Samples in tar files and tensors in safetensors files, near and far, honest and not."""

import gzip
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import tempfile
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from conftest import assert_trees_equal
from hostile import named
from hypothesis import given, settings, strategies
from loopback import Loopback
from test_bad_input import refuses

import millstream as ms
from millstream.files import remote_options
from millstream.files.data_files import LocalFile
from millstream.integrations import _tar_samples, cloud
from millstream.integrations.safetensors import SafetensorsSource
from millstream.integrations.webdataset import WebDatasetSource

SAMPLES = 23


@pytest.fixture(autouse=True)
def quick(folder, monkeypatch):
    monkeypatch.setattr(remote_options, "_configured", {})
    cloud.configure(cache_folder=folder / "cache", timeout=2, backoff=0.01)


@pytest.fixture
def server():
    server = Loopback()
    yield server
    server.close()


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def tar(members, format=tarfile.PAX_FORMAT):
    """A tar file of (name or info, bytes) pairs."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=format) as archive:
        for name, data in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(data) if info.isreg() else 0
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def sample(number):
    return np.random.default_rng(number).standard_normal((3, 2)).astype(np.float32)


def members(numbers):
    for number in numbers:
        yield f"train/{number:04}.x.npy", npy(sample(number))
        yield f"train/{number:04}.CLS", b"%d\n" % number
        yield f"train/{number:04}.meta.json", json.dumps({"at": [number, 1.5], "deep": {"n": number}}).encode()


@pytest.fixture
def shards(folder):
    """Three tar files, the middle one of them larger, with all kinds of members that are no samples."""
    parts = [range(5), range(5, 19), range(19, SAMPLES)]
    other = [(named("train", tarfile.DIRTYPE), b""), ("README", b"no sample"), ("train/.hidden", b"x")]
    for number, part in enumerate(parts):
        (folder / f"train-{number:02}.tar").write_bytes(tar([*other, *members(part)]))
    return str(folder / "train-{00..02}.tar")


def stream_of(source, key, executor=None, steps=9, state=None):
    with ms.DataLoader([source, ms.BatchTransform(4)], executor=executor) as loader:
        batches = loader.iterate(loader.init_state(key) if state is None else state, steps=steps)
        return [jax.device_get(pair) for pair in batches], batches.state


def test_files_with_one_name_are_a_sample(shards):
    source = WebDatasetSource(shards, ordering="sequential")
    assert (len(source), source.extensions) == (SAMPLES, ("x.npy", "cls", "meta.json"))
    assert list(source.keys) == [f"train/{number:04}" for number in range(SAMPLES)]
    batch = source.read(np.array([22, 0, 5]))
    np.testing.assert_array_equal(batch["x.npy"], [sample(22), sample(0), sample(5)])
    assert batch["cls"].tolist() == batch["meta.json"]["deep"]["n"].tolist() == [22, 0, 5]
    np.testing.assert_array_equal(batch["meta.json"]["at"], np.array([[22, 1.5], [0, 1.5], [5, 1.5]], np.float32))
    assert WebDatasetSource(shards, [".CLS"]).read(np.array([3]))["cls"].tolist() == [3]


@pytest.mark.parametrize(
    "executor", [None, ms.Threads(3), ms.Processes(2)], ids=["in sequence", "threads", "processes"]
)
def test_the_stream_is_the_same_on_every_executor_and_goes_on_where_it_was(shards, key, executor):
    data = {"cls": np.arange(SAMPLES), "x.npy": np.stack([sample(number) for number in range(SAMPLES)])}
    expected, state = stream_of(ms.HostArraySource(data), key)
    source = WebDatasetSource(shards, ["x.npy", "cls"])
    found, after = stream_of(source, key, executor)
    assert_trees_equal(found, expected)
    rest, _ = stream_of(source, key, executor, state=jax.device_get(after))
    assert_trees_equal(rest, stream_of(ms.HostArraySource(data), key, state=state)[0])
    seen = [batch["cls"][mask] for batch, mask in found[:6]]
    assert sorted(np.concatenate(seen).tolist()) == list(range(SAMPLES))


def test_headers_are_read_once_if_they_are_kept(shards, folder, server, monkeypatch):
    name = "caf\xe9".encode("latin-1").decode("utf-8", "surrogateescape")
    (folder / "odd.tar").write_bytes(tar([(f"{name}.cls", b"7")]))
    (folder / "big.tar").write_bytes(tar([*members(range(SAMPLES)), ("filler", bytes(4 << 20))]))
    server.put("/big.tar", (folder / "big.tar").read_bytes())
    cloud.configure(cache_limit=0)
    paths = {"near": shards, "odd": folder / "odd.tar", "far": f"{server.address}/big.tar"}
    sources = {}
    for turn in range(2):
        with ms.views.plans(folder / "plans"):
            for key, path in paths.items():
                sources[key, turn] = WebDatasetSource(path, ["cls"])
        monkeypatch.setattr(_tar_samples, "tar_members", None)
    for key in paths:
        first, again = sources[key, 0], sources[key, 1]
        assert list(first.keys) == list(again.keys)
        assert first.read(np.arange(len(first)))["cls"].tolist() == again.read(np.arange(len(first)))["cls"].tolist()
    path = folder / "train-01.tar"
    path.write_bytes(tar(members(range(40, 45))))
    with pytest.raises(TypeError, match="not callable"):  # it is a different file, whose headers are looked for
        WebDatasetSource(shards, ["cls"], plans=folder / "plans")


@pytest.mark.parametrize("limit", [0, 1 << 30], ids=["uncached", "cached"])
def test_shards_behind_an_address(server, shards, folder, limit):
    cloud.configure(cache_limit=limit)
    for number in range(3):
        server.put(f"/s/train-{number:02}.tar", (folder / f"train-{number:02}.tar").read_bytes())
    near, far = WebDatasetSource(shards), WebDatasetSource(f"{server.address}/s/train-{{00..02}}.tar")
    pick = np.array([22, 1, 18, 7])
    assert_trees_equal(far.read(pick), near.read(pick))
    copy = pickle.loads(pickle.dumps(far))
    assert_trees_equal(copy.read(pick), near.read(pick))
    server.put("/s/train-01.tar", tar(members(range(5, 20))))
    if limit == 0:
        with refuses(cloud.FileChanged, "train-01.tar", "at sample 18, 'train/0018'"):
            far.read(pick)


def test_a_worker_needs_no_jax(shards, folder):
    (folder / "source").write_bytes(pickle.dumps(WebDatasetSource(shards)))
    program = (
        "import pickle, sys, numpy as np; source = pickle.load(open(sys.argv[1], 'rb')); "
        "source.read(np.array([3])); assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(folder / "source")], check=True)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_kind_of_tar_and_long_names(folder, format):
    long = "/".join(["a" * 40] * 3) + "/" + "b" * 90
    names = [f"{long}{number}.cls" for number in range(3)] + ["ü.cls"] * (format != tarfile.USTAR_FORMAT)
    path = folder / "x.tar"
    path.write_bytes(tar([(name, b"%d" % number) for number, name in enumerate(names)], format))
    source = WebDatasetSource(path, ordering="sequential")
    assert list(source.keys) == [name.removesuffix(".cls") for name in names]
    assert source.read(np.arange(len(names)))["cls"].tolist() == list(range(len(names)))


@settings(max_examples=60, deadline=None)
@given(
    strategies.lists(
        strategies.tuples(strategies.integers(0, 30_000), strategies.sampled_from(["", "long", "folder", "prefix"])),
        max_size=40,
    ),
    strategies.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    strategies.booleans(),
)
def test_members_are_those_that_tarfile_finds(drawn, format, ends):
    """Plain headers are read many at a time, and others one by one, in any mixture and any window."""
    pairs = []
    for number, (size, kind) in enumerate(drawn):
        name = {"long": "n" * 90 + "/" + "m" * 60, "prefix": "p" * 60 + "/" + "q" * 60}.get(kind, "x")
        name = f"{name}{number}.bin"
        pairs.append((named(name, tarfile.DIRTYPE) if kind == "folder" else name, bytes(size)))
    data = tar(pairs, format)
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        file.write(data)
        file.flush()
        if not ends:
            file.truncate(len(data.rstrip(b"\0")) // 512 * 512)  # cut short
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            expected = [(one.name, one.offset_data, one.size) for one in archive if one.isreg()]
        if ends:
            found = list(_tar_samples.tar_members("Test", LocalFile("Test", file.name)))
            assert [tuple(one) for one in found] == expected
        else:
            with pytest.raises(ValueError, match=r"cannot read .* as a tar file"):
                list(_tar_samples.tar_members("Test", LocalFile("Test", file.name)))


def test_own_decoders_and_pictures(folder):
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    path = folder / "x.tar"
    path.write_bytes(tar([("0.left.png", stream.getvalue()), ("0.txt", b"a cat"), ("0.raw", b"\1\2")]))
    read = np.zeros(1, int)
    with refuses(ValueError, "'raw'", "decode={'raw': function}", "extensions=[...]", "npy, json, cls"):
        WebDatasetSource(path)
    source = WebDatasetSource(path, ["left.png", "raw"], decode={"raw": lambda data: np.frombuffer(data, np.uint8)})
    np.testing.assert_array_equal(source.read(read)["left.png"][0], pixels)
    assert source.read(read)["raw"].tolist() == [[1, 2]]
    for name in ("left.png", "LEFT.png", ".left.png"):
        own = WebDatasetSource(path, ["left.png"], decode={name: lambda data: np.int32(len(data))})
        assert own.read(read)["left.png"].tolist() == [len(stream.getvalue())]
    own = WebDatasetSource(
        path, ["txt"], sample_fn=lambda key, files: {"n": np.int32(len(files["txt"])), "k": int(key)}
    )
    assert own.read(read)["n"].tolist() == [5]
    assert WebDatasetSource(path, ["txt"]).read(read) == [{"txt": "a cat"}]
    with refuses(ZeroDivisionError, "its sample_fn <lambda> at sample 0, '0'", str(path)):
        WebDatasetSource(path, ["txt"], sample_fn=lambda key, files: 1 // 0)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("0.cls", b"7.5", ["is not a whole number: '7.5'"]),
        ("0.cls", b"9" * 5000, ["is not a whole number"]),
        ("0.json", b"{", ["is not JSON"]),
        ("0.json", b"[" * 100_000, ["is not JSON"]),
        ("0.txt", b"\xff", ["is not text in UTF-8"]),
        ("0.npy", npy(np.zeros(9))[:-1], ["does not hold what its header says", "71 bytes are there"]),
        ("0.npy", pickle.dumps(1), ["is not an .npy file"]),
        ("0.jpg", b"\xff\xd8 but no more", ["cannot be read as an image"]),
    ],
)
def test_what_cannot_be_decoded_is_named(folder, name, data, words):
    path = folder / "x.tar"
    path.write_bytes(tar([(name, data)]))
    with refuses(ValueError, str(path), name, "at sample 0, '0'", *words):
        WebDatasetSource(path)


def test_refusals_of_what_is_asked_for(shards, folder):
    with refuses(ValueError, "['depth']", "train/0000", "['x.npy', 'cls', 'meta.json']"):
        WebDatasetSource(shards, ["depth"])
    with refuses(FileNotFoundError, "WebDatasetSource", "train-09.tar"):
        WebDatasetSource(str(folder / "train-09.tar"))
    with refuses(TypeError, "extensions to be a list of names", "['cls']"):
        WebDatasetSource(shards, "cls")
    with refuses(ValueError, "{3..1}"):
        WebDatasetSource("x-{3..1}.tar")
    with refuses(ValueError, "at least one tar file"):
        WebDatasetSource([])
    with refuses(TypeError, "decode['x'] to be a function"):
        WebDatasetSource(shards, decode={"x": 3})  # pyright: ignore[reportArgumentType]
    for name in ("npy", "clss"):  # which would be left out without a word
        with refuses(ValueError, f"decode for extensions that are read. Got {name!r}", "['x.npy', 'cls', 'meta.json']"):
            WebDatasetSource(shards, decode={name: len})
    with refuses(ValueError, "decode= or sample_fn=, not both"):
        WebDatasetSource(shards, decode={"cls": len}, sample_fn=lambda key, files: files)
    with refuses(TypeError, "extensions to be a list of names. Got [3] (list)"):
        WebDatasetSource(shards, [3])  # pyright: ignore[reportArgumentType]
    for wrong in (3, [3]):
        with refuses(TypeError, "WebDatasetSource needs a path, or a list of paths", "3"):
            WebDatasetSource(wrong)  # pyright: ignore[reportArgumentType]


def test_braces_that_name_too_many_files_are_refused_before_they_fill_the_memory():
    for path in ("{0..99999}-{0..99999}-{0..99999}.tar", "{0..99999999999}.tar"):
        with refuses(ValueError, "takes 100000 tar files at most", path):
            WebDatasetSource(path)


def raw_header(name="0.cls", size=b"00000000001\0", kind=b"0"):
    """A header with a right checksum, whatever is in it."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT))
    block[124:136], block[156:157], block[148:156] = size, kind, b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


END = bytes(1024)
HONEST = tar([("0.cls", b"1")])
HOSTILE = {
    "packed": (lambda: gzip.compress(HONEST), ["packed with gzip", "unpack it once"]),
    "no tar": (lambda: b"<html>not found</html>" * 100, ["there is no header at byte 0"]),
    "empty": (lambda: b"", ["ends at byte 0"]),
    "nothing in it": (lambda: END, ["at least one sample"]),
    "cut in a header": (lambda: HONEST[:300], ["ends at byte 300"]),
    "cut in a member": (lambda: tar([("0.txt", b"x" * 5000)])[:3000], ["claims 5000 bytes, and 2488 are left"]),
    "cut between members": (lambda: tar([("0.cls", b"1"), ("1.cls", b"2")])[:2048], ["without the mark of an end"]),
    "damaged in the middle": (
        lambda: tar([("0.cls", b"1"), ("1.cls", b"2")])[:1034] + b"!" + tar([("0.cls", b"1"), ("1.cls", b"2")])[1035:],
        ["there is no header at byte 1024"],
    ),
    "joined": (lambda: HONEST + HONEST, ["something follows its end"]),
    "terabytes": (lambda: raw_header(size=b"\x80" + (1 << 60).to_bytes(11, "big")) + END, [f"claims {1 << 60} bytes"]),
    "negative": (lambda: raw_header(size=b"\xff" * 12) + END, ["claims -1 bytes"]),
    "sparse": (lambda: raw_header(kind=b"S") + bytes(512) + END, ["stored with holes"]),
    "pax sparse": (
        lambda: raw_header(kind=b"x", size=b"%011o\0" % 22) + b"22 GNU.sparse.major=1\n".ljust(512, b"\0") + HONEST,
        ["stored with holes"],
    ),
    "pax lies": (
        lambda: raw_header(kind=b"x", size=b"%011o\0" % 9) + b"99 path=x".ljust(512, b"\0") + HONEST,
        ["extended"],
    ),
    "pax size": (
        lambda: raw_header(kind=b"x", size=b"%011o\0" % 12) + b"12 size=-99\n".ljust(512, b"\0") + HONEST,
        ["the size of '0.cls' is '-99'"],
    ),
    "endless name": (
        lambda: raw_header(kind=b"L", size=b"%011o\0" % (2 << 20)) + bytes(3 << 20),
        ["1048576 are allowed"],
    ),
    "twice": (lambda: tar([("0.cls", b"1"), ("0.CLS", b"2")]), ["'0.CLS' again"]),
    "apart": (lambda: tar([("0.cls", b"1"), ("1.cls", b"2"), ("0.txt", b"2")]), ["apart from the others of '0'"]),
    "incomplete": (lambda: tar([("0.cls", b"1"), ("1.txt", b"2")]), ["'1'", "has ['txt']"]),
    "links": (lambda: tar([(named("0.cls", tarfile.SYMTYPE, "/etc/passwd"), b"")]), ["at least one sample"]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tar_files_are_refused_by_name(folder, name):
    make, words = HOSTILE[name]
    path = folder / "evil.tar"
    path.write_bytes(make())
    tracemalloc.start()
    with refuses(ValueError, "WebDatasetSource", str(path), *words):
        WebDatasetSource(path)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    assert sorted(found.name for found in folder.iterdir()) == ["evil.tar"]


def test_names_that_lead_elsewhere_are_labels(folder):
    names = ["/etc/passwd.cls", "../../up.cls", "C:\\x.cls"]
    path = folder / "x.tar"
    path.write_bytes(tar([(name, b"%d" % number) for number, name in enumerate(names)]))
    source = WebDatasetSource(path, ordering="sequential")
    assert list(source.keys) == [name.removesuffix(".cls") for name in names]
    assert os.listdir(folder) == ["x.tar"]


def test_every_cut_and_every_flipped_byte_of_a_tar_is_survived(folder):
    """A small fuzzer: whatever is accepted has the samples that were written, or a name that was changed."""
    data = tar([("0.cls", b"1"), ("a" * 120 + "1.cls", b"2")])
    data = data[:5120]
    path = folder / "x.tar"
    for at in [*range(0, 600, 7), *range(1000, 4100, 13)]:
        for variant in (data[:at], data[:at] + bytes([data[at] ^ 0x11]) + data[at + 1 :]):
            path.write_bytes(variant)
            try:
                found = WebDatasetSource(path, ordering="sequential", sample_fn=lambda key, files: np.int32(1))
            except ValueError as error:
                assert str(path) in str(error)
            else:
                assert len(found) == 2


def test_a_tar_that_changes_under_way_is_an_error_with_the_sample(shards, folder, key):
    source = WebDatasetSource(shards)
    source.read(np.arange(SAMPLES))
    (folder / "train-01.tar").write_bytes(tar(members(range(4, 18))))
    with refuses(cloud.FileChanged, "train-01.tar", "at sample 6, 'train/0006'"):
        source.read(np.array([6]))
    with refuses(cloud.FileChanged, "train-01.tar"):
        stream_of(source, key, ms.Threads(2))


# Safetensors


TENSORS = {
    "x": np.arange(60, dtype=np.float32).reshape(10, 3, 2),
    "y": np.arange(10, dtype=np.int32),
    "half": np.arange(20).reshape(10, 2).astype(ml_dtypes.bfloat16),
    "flag": np.arange(10) % 3 == 0,
}


@pytest.fixture
def file(folder):
    safetensors.numpy.save_file(TENSORS, folder / "rows.safetensors", {"made": "here"})
    return folder / "rows.safetensors"


@pytest.mark.parametrize("far", [False, True], ids=["near", "far"])
def test_tensors_are_columns(file, server, far):
    path = server.put("/rows.safetensors", file.read_bytes()) if far else file
    source = SafetensorsSource(path, ordering="sequential")
    pick = np.array([9, 0, 4])
    assert_trees_equal(source.read(pick), {name: array[pick] for name, array in TENSORS.items()})
    both = SafetensorsSource([path, path, path], ["y", "half"])
    assert len(both) == 30
    assert both.read(np.array([29, 0, 10, 15]))["y"].tolist() == [9, 0, 0, 5]
    assert_trees_equal(pickle.loads(pickle.dumps(both)).read(pick), both.read(pick))


@pytest.mark.parametrize(
    "executor", [None, ms.Threads(2), ms.Processes(1)], ids=["in sequence", "threads", "processes"]
)
def test_rows_of_tensors_stream_alike_on_every_executor(file, key, executor):
    names = ["flag", "half", "x", "y"]
    expected, _ = stream_of(ms.HostArraySource({name: TENSORS[name] for name in names}), key)
    found, _ = stream_of(SafetensorsSource([file], names), key, executor)
    assert_trees_equal(found, expected)


@pytest.mark.parametrize(
    "dtype", ["uint8", "int8", "uint16", "int16", "uint32", "float16", "float8_e4m3fn", "float8_e5m2", "complex64"]
)
def test_every_dtype_that_the_package_writes(folder, dtype):
    array = np.arange(12).reshape(6, 2).astype(dtype)
    path = folder / "x.safetensors"
    safetensors.numpy.save_file({"x": array}, path)
    np.testing.assert_array_equal(SafetensorsSource(path, ordering="sequential").read(np.arange(6))["x"], array)


def test_tensors_that_are_no_columns_are_refused(folder, file):
    path = folder / "w.safetensors"
    safetensors.numpy.save_file({"w": np.zeros((3, 2)), "b": np.zeros(4), "s": np.zeros(1)}, path)
    with refuses(ValueError, "same, non-zero first axis", str(path), "w: shape (3, 2)", "tensors=[...]"):
        SafetensorsSource(path)
    assert len(SafetensorsSource(path, ["w"])) == 3
    with refuses(ValueError, "no tensor 'none'", "['b', 's', 'w']"):
        SafetensorsSource(path, ["none"])
    other = folder / "y.safetensors"
    safetensors.numpy.save_file({"x": TENSORS["x"].astype(np.float64), "y": TENSORS["y"]}, other)
    with refuses(ValueError, "the same tensors", f"{file}: x (3, 2) float32", f"{other}: x (3, 2) float64"):
        SafetensorsSource([file, other], ["x", "y"])
    with refuses(TypeError, "tensors to be a list of names", "write ['w']"):
        SafetensorsSource(path, "w")
    with refuses(TypeError, "needs a path"):
        SafetensorsSource([])
    with refuses(TypeError, "needs a path, or a list of paths. Got 3 (int)"):
        SafetensorsSource(3)  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "at least one tensor"):
        SafetensorsSource(path, [])


def entry(dtype="U8", shape=(4,), offsets=(0, 4), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def st(header, body=b"\0" * 4, size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + body


EVIL = {
    "empty": (b"", "claims 0 bytes"),
    "short": (b"\1\2\3", "claims 0 bytes"),
    "huge header": (st({"x": entry()}, size=1 << 62), f"claims {1 << 62} bytes"),
    "cut": (st({"x": entry()})[:-1], "its tensors have 4 bytes, and 3 are there"),
    "more": (st({"x": entry()}) + b"x", "its tensors have 4 bytes, and 5 are there"),
    "no json": (st(b"{'x': 1}"), "is not JSON"),
    "deep json": (st(b"[" * 100_000), "is not JSON"),
    "list": (st([1, 2]), "not a dictionary"),
    "nothing": (st({}, b""), "no tensors"),
    "twice": (st(b'{"x": 1, "x": 2}'), "there twice"),
    "no entry": (st({"x": 3}), "is described by"),
    "more fields": (st({"x": entry(evil=1)}), "is described by"),
    "dtype": (st({"x": entry("O")}), "has the dtype 'O'"),
    "negative shape": (st({"x": entry(shape=(-1, -4))}), "has the shape"),
    "float shape": (st({"x": entry(shape=(4.0,))}), "has the shape"),
    "bool shape": (st({"x": entry(shape=(True, 4))}), "has the shape"),
    "many axes": (st({"x": entry(shape=(1,) * 40 + (4,))}), "has the shape"),
    "terabytes": (st({"x": entry("F64", (1 << 50, 1 << 50))}), "needs"),
    "negative offset": (st({"x": entry(offsets=(-4, 0))}), "at -4 to 0"),
    "overlap": (st({"x": entry(), "y": entry(offsets=(2, 6))}, bytes(6)), "'y' begins at 2"),
    "hole": (st({"x": entry(), "y": entry(offsets=(6, 10))}, bytes(10)), "'y' begins at 6"),
    "no rows": (st({"x": entry(shape=(0,), offsets=(0, 0))}, b""), "same, non-zero first axis"),
}


@pytest.mark.parametrize("name", EVIL)
def test_hostile_safetensors_are_refused_by_name(folder, name):
    data, words = EVIL[name]
    path = folder / "evil.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    with refuses(ValueError, "SafetensorsSource", str(path), words):
        SafetensorsSource(path)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_every_flipped_byte_of_a_header_is_survived(folder):
    data = st({"x": entry("F32", (2, 2), (0, 16)), "y": entry("I16", (2,), (16, 20))}, bytes(range(20)))
    path = folder / "x.safetensors"
    for at in range(len(data) - 20):
        for bit in (1, 4, 0x20, 0x80):
            path.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
            try:
                SafetensorsSource(path).read(np.array([1]))
            except (ValueError, TypeError) as error:
                assert str(path) in str(error)


def test_a_safetensors_file_that_changes_is_an_error_with_the_sample(file):
    source = SafetensorsSource(file)
    safetensors.numpy.save_file({name: array[:5] for name, array in TENSORS.items()}, file)
    with refuses(cloud.FileChanged, str(file), "at sample 7"):
        source.read(np.array([7]))
