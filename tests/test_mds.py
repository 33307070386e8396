"""MosaicML's MDS shards, written as its writer does."""

import gzip
import io
import json
import pickle

import jax
import numpy as np
import pytest
import zstandard
from conftest import assert_trees_equal
from damage import DAMAGES, damaged
from PIL import Image
from test_bad_input import refuses

import millstream as ms
from millstream.files.safe_path import UnsafePath
from millstream.sources.mds import MdsSource

PACKINGS = {"zstd": zstandard.ZstdCompressor(write_checksum=True).compress, "gz": gzip.compress}
VALUE_CODES = {"uint16": 16, "int64": 65, "float32": 34}


def encode(encoding, value):
    """A value as the format has it: see the encodings of MosaicML Streaming."""
    kind, _, rest = encoding.partition(":")
    if kind == "ndarray":
        dtype, _, shape = rest.partition(":")
        head = b"" if dtype else bytes([VALUE_CODES[value.dtype.name]])
        if not shape:
            width = next(width for width in range(4) if max(value.shape) < 1 << (8 << width))
            sizes = np.array(value.shape, f"<u{1 << width}").tobytes()
            head += bytes([value.ndim << 2 | width]) + sizes
        return head + value.tobytes()
    if kind == "bytes":
        return value
    if kind == "jpeg" or kind == "png":
        stream = io.BytesIO()
        Image.fromarray(value).save(stream, kind)
        return stream.getvalue()
    if kind == "json":
        return json.dumps(value).encode()
    if kind == "pkl":
        return pickle.dumps(value)
    if kind in ("str", "str_int", "str_float"):
        return str(value).encode()
    return np.dtype("int64" if kind == "int" else kind).type(value).tobytes()


def size_of(encoding):
    kind, _, rest = encoding.partition(":")
    if kind == "ndarray" and rest.count(":") == 1:
        dtype, shape = rest.split(":")
        return int(np.prod(list(map(int, shape.split(","))))) * np.dtype(dtype).itemsize
    plain = ("bytes", "str", "json", "pkl", "str_int", "str_float", "jpeg", "png", "ndarray")
    return None if kind in plain else np.dtype("int64" if kind == "int" else kind).itemsize


def write(folder, columns, parts, packed=None):
    """Write shards of samples."""
    folder.mkdir()
    names = sorted(columns)
    sizes = [size_of(columns[name]) for name in names]
    shards = []
    for number, samples in enumerate(parts):
        rows = []
        for sample in samples:
            data = [encode(columns[name], sample[name]) for name in names]
            head = [len(one) for one, size in zip(data, sizes, strict=True) if size is None]
            rows.append(np.array(head, np.uint32).tobytes() + b"".join(data))
        description = {
            "column_encodings": [columns[name] for name in names],
            "column_names": names,
            "column_sizes": sizes,
            "compression": packed,
            "format": "mds",
            "hashes": [],
            "size_limit": 1 << 26,
            "version": 2,
        }
        config = json.dumps(description, sort_keys=True).encode()
        offsets = np.cumsum([0, *map(len, rows)]).astype(np.uint32)
        offsets += np.uint32(4 + offsets.nbytes + len(config))
        data = np.uint32(len(rows)).tobytes() + offsets.tobytes() + config + b"".join(rows)
        name = f"shard.{number:05}.mds"
        info = {"basename": name, "bytes": len(data), "hashes": {}}
        zipped = None
        if packed:
            kind, _, _ = packed.partition(":")
            small = PACKINGS[kind](data)
            zipped = {"basename": f"{name}.{kind}", "bytes": len(small), "hashes": {}}
            (folder / f"{name}.{kind}").write_bytes(small)
        else:
            (folder / name).write_bytes(data)
        shards.append({**description, "raw_data": info, "samples": len(rows), "zip_data": zipped})
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    return folder


COLUMNS = {
    "array": "ndarray",
    "bytes": "bytes",
    "fixed": "ndarray:float32:2,3",
    "half": "float16",
    "int": "int",
    "json": "json",
    "number": "str_int",
    "real": "str_float",
    "text": "str",
    "tokens": "ndarray:uint16",
    "u8": "uint8",
}


def sample(number):
    chance = np.random.default_rng(number)
    return {
        "array": chance.integers(0, 99, (number % 3 + 1, 300 if number == 4 else 2)),
        "bytes": chance.bytes(number),
        "fixed": chance.random((2, 3), np.float32),
        "half": np.float16(number / 2),
        "int": -number,
        "json": {"n": [number, None]},
        "number": 10**30 + number,
        "real": number / 3,
        "text": "é" * number,
        "tokens": chance.integers(0, 60_000, number + 1).astype(np.uint16),
        "u8": number,
    }


SAMPLES = [sample(number) for number in range(13)]
PARTS = [SAMPLES[:5], SAMPLES[5:6], SAMPLES[6:]]


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            assert found[name].dtype == value.dtype
            np.testing.assert_array_equal(found[name], value)
        else:
            assert found[name] == value


@pytest.mark.parametrize("packed", [None, "zstd:3", "gz"])
def test_samples_are_those_that_were_written(folder, packed):
    write(folder / "data", COLUMNS, PARTS, packed)
    source = MdsSource(folder / "data", plans=folder / "plans")
    assert len(source) == 13
    for one in (source, pickle.loads(pickle.dumps(source))):
        for index, found in enumerate(one.read(np.arange(13))):
            assert_equal(found, SAMPLES[index])
    some = MdsSource(folder / "data", ["u8", "fixed"], plans=folder / "plans", ordering="sequential")
    assert some.read(np.array([12, 4]))["u8"].tolist() == [12, 4]
    if packed:
        with refuses(ValueError, "MdsSource needs plans=", f"shard.00000.mds.{packed.partition(':')[0]}"):
            MdsSource(folder / "data")


@pytest.mark.parametrize("executor", [None, ms.Threads(2), ms.Processes(2)], ids=["none", "threads", "processes"])
def test_the_stream_is_the_same_on_every_executor(folder, key, executor):
    write(folder / "data", COLUMNS, PARTS)
    source = MdsSource(folder / "data", ["int", "fixed"])
    arrays = {name: np.stack([np.asarray(one[name]) for one in SAMPLES]) for name in ("int", "fixed")}
    runs = []
    for one, runner in ((source, executor), (ms.HostArraySource(arrays), None)):
        with ms.DataLoader([one, ms.BatchTransform(4)], executor=runner) as loader:
            runs.append([jax.device_get(pair) for pair in loader.iterate(loader.init_state(key), steps=6)])
    assert_trees_equal(*runs)


def test_images_are_pixels_and_a_function_may_read_a_column(folder):
    image = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    write(folder / "data", {"image": "png", "thing": "pkl"}, [[{"image": image, "thing": (1, 2)}]])
    with refuses(ValueError, "Column 'thing' is 'pkl'", "could run code", "decode={'thing': function}", "columns="):
        MdsSource(folder / "data")
    np.testing.assert_array_equal(MdsSource(folder / "data", ["image"])[0]["image"], image)
    own = MdsSource(folder / "data", decode={"thing": len})
    assert own[0]["thing"] == len(pickle.dumps((1, 2)))

    def broken(data):
        raise KeyError("nothing")

    with refuses(KeyError, "nothing", "This came from MdsSource at sample 0."):
        MdsSource(folder / "data", decode={"thing": broken})


def test_what_is_wrong_with_an_index_is_said(folder):
    path = write(folder / "data", {"n": "int"}, [[{"n": 5}], [{"n": 6}]])
    index = path / "index.json"
    good = json.loads(index.read_text())

    def changed(**values):
        copy = json.loads(json.dumps(good))
        copy["shards"][1] |= values
        return json.dumps(copy)

    raw = good["shards"][1]["raw_data"]
    for text, words in (
        ("{", ["is not JSON"]),
        ("[]", ["needs an index of MDS shards"]),
        ('{"version": 2, "shards": []}', ["needs an index of MDS shards"]),
        (changed(version=3), ["shard 1 is not described as an MDS shard of version 2"]),
        (changed(format="json"), ["shard 1 is not described"]),
        (changed(column_sizes=[-1]), ["shard 1 has columns of the sizes [-1]"]),
        (changed(column_names=[3]), ["shard 1 has the columns [3]"]),
        (changed(column_names=["m"]), ["the same columns in every shard", "shard 1"]),
        (changed(compression="br:11"), ["shard 1 is packed with 'br:11'; gz and zstd are known"]),
        (changed(raw_data=raw | {"bytes": 7}), ["7 bytes are expected"]),
        (changed(samples=2), ["2 samples"]),
        (changed(samples=-1), ["-1 samples"]),
    ):
        index.write_text(text)
        with refuses(ValueError, "MdsSource", *words):
            MdsSource(path)
    index.write_text(changed(raw_data=raw | {"basename": "../../etc/passwd"}))
    with refuses(UnsafePath, "index.json", "../../etc/passwd"):
        MdsSource(path)
    index.write_text(json.dumps(good))
    with refuses(ValueError, "finds no column 'm'", "['n']"):
        MdsSource(path, ["m"])
    with refuses(ValueError, "at least one column"):
        MdsSource(path, [])
    with refuses(ValueError, "decode for columns that are read", "'m'"):
        MdsSource(path, decode={"m": len})
    with refuses(FileNotFoundError, "MdsSource", "index.json"):
        MdsSource(folder / "none")


def test_a_damaged_shard_is_refused_or_read_as_it_is(folder):
    write(folder / "data", COLUMNS, [SAMPLES])
    path = folder / "data" / "shard.00000.mds"
    data, refused = path.read_bytes(), 0
    offsets = np.frombuffer(data, np.uint32, 15)[1:]
    for copy in damaged(data, DAMAGES):
        path.write_bytes(copy)
        try:
            source = MdsSource(folder / "data", ordering="sequential")
        except ValueError as error:
            refused += 1
            assert "shard.00000.mds" in str(error)
            continue
        for index in range(13):
            whole = copy[offsets[index] : offsets[index + 1]] == data[offsets[index] : offsets[index + 1]]
            try:
                found = source[index]
            except ValueError as error:
                assert not whole or copy[: offsets[0]] != data[: offsets[0]]
                assert "shard.00000.mds, sample" in str(error)
            else:
                if whole and copy[: offsets[0]] == data[: offsets[0]]:
                    assert_equal(found, SAMPLES[index])
    assert refused >= DAMAGES // 4
