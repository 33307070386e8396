"""TFRecord files: framing, checksums, messages, damage."""

import gzip
import pickle
import struct
from typing import Any

import crc32c as package
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from conftest import assert_trees_equal
from damage import DAMAGES, damaged
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, unknown_fields
from hypothesis import given, settings
from tensorboardX.record_writer import RecordWriter
from test_bad_input import refuses

import millstream as ms
from millstream.files import checksum
from millstream.sources import tfrecord
from millstream.sources.example_message import decode_example
from millstream.sources.tfrecord import TFRecordSource


def write(path, records):
    """Write records with a writer of others."""
    writer = RecordWriter(str(path))
    for record in records:
        writer.write(record)
    writer.close()
    return path


def example_class():
    """`tf.train.Example`, as protobuf makes it of its description."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="test", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto

    def message(name, *fields, oneof=None):
        made = file.message_type.add(name=name)
        if oneof:
            made.oneof_decl.add(name=oneof)
        for number, (field, kind, label, of) in enumerate(fields, 1):
            added = made.field.add(name=field, number=number, type=kind, label=label)
            if of:
                added.type_name = f".test.{of}"
            if oneof:
                added.oneof_index = 0
        return made

    one, many, whole = kinds.LABEL_OPTIONAL, kinds.LABEL_REPEATED, kinds.TYPE_MESSAGE
    message("BytesList", ("value", kinds.TYPE_BYTES, many, None))
    message("FloatList", ("value", kinds.TYPE_FLOAT, many, None))
    message("Int64List", ("value", kinds.TYPE_INT64, many, None))
    lists = [(f"{name}_list", whole, one, f"{name.capitalize()}List") for name in ("bytes", "float", "int64")]
    message("Feature", *lists, oneof="kind")
    features = message("Features", ("feature", whole, many, "Features.FeatureEntry"))
    entry = features.nested_type.add(name="FeatureEntry")
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=one)
    entry.field.add(name="value", number=2, type=whole, label=one, type_name=".test.Feature")
    entry.options.map_entry = True
    message("Example", ("features", whole, one, "Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("test.Example"))


Example: Any = example_class()


def encoded(features):
    example = Example()
    for name, values in features.items():
        kind = {bytes: "bytes_list", float: "float_list", int: "int64_list"}[type(values[0])]
        getattr(example.features.feature[name], kind).value.extend(values)
    return example.SerializeToString(deterministic=True)


@pytest.fixture
def shards(folder):
    chance = np.random.default_rng(0)
    records = [chance.bytes(int(size)) for size in chance.integers(0, 400, 30)]
    for number in range(3):
        write(folder / f"train-{number}.tfrecord", records[10 * number : 10 * number + 10])
    return folder, records


# Checksums


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=70), times=st.sampled_from([1, 3, 4, 9, 64, 300]))
def test_the_checksum_by_tables_is_that_of_the_package(data, times):
    assert checksum.by_tables(data * times) == package.crc32c(data * times)


def test_the_checksum_of_many_bytes_and_of_published_ones(monkeypatch):
    assert checksum.by_tables(b"123456789") == checksum.crc32c(b"123456789") == 0xE3069283
    for size in (63, 64, 255, 256, 257, (1 << 20) - 1, 1 << 20, (1 << 20) + 5, 2_500_000):
        data = np.random.default_rng(size).bytes(size)
        assert checksum.by_tables(data) == package.crc32c(data)


# Records


def test_records_are_those_that_were_written(shards):
    folder, records = shards
    for paths in (folder, str(folder / "train-*.tfrecord"), sorted(folder.glob("*.tfrecord"))):
        source = TFRecordSource(paths)
        assert source.read(np.arange(30)) == records
    assert source.read(np.array([29, 0, 11])) == [records[29], records[0], records[11]]
    assert pickle.loads(pickle.dumps(source)).read(np.array([15])) == [records[15]]


@pytest.mark.parametrize("executor", [None, ms.Threads(2), ms.Processes(2)], ids=["none", "threads", "processes"])
def test_the_stream_is_the_same_on_every_executor(folder, key, executor):
    write(folder / "n.tfrecord", [np.full(4, number, np.int32).tobytes() for number in range(21)])
    source = TFRecordSource(folder / "n.tfrecord").map(lambda record: {"x": np.frombuffer(record, np.int32)})
    expected = ms.HostArraySource({"x": np.repeat(np.arange(21, dtype=np.int32)[:, None], 4, 1)})
    runs = []
    for one, runner in ((source, executor), (expected, None)):
        with ms.DataLoader([one, ms.BatchTransform(4)], executor=runner) as loader:
            runs.append([jax.device_get(pair) for pair in loader.iterate(loader.init_state(key), steps=8)])
    assert_trees_equal(*runs)


def test_records_are_looked_for_once(shards, monkeypatch):
    folder, records = shards
    assert TFRecordSource(folder, plans=folder / "plans").read(np.arange(30)) == records
    monkeypatch.setattr(tfrecord, "_bounds", lambda file, name: iter(()))
    assert TFRecordSource(folder, plans=folder / "plans").read(np.arange(30)) == records


def test_more_records_than_are_found_at_a_time(folder, monkeypatch):
    monkeypatch.setattr(tfrecord, "_TOGETHER", 3)
    monkeypatch.setattr(tfrecord, "_AHEAD", 40)
    records = [bytes([number]) * (number % 30) for number in range(50)]
    assert TFRecordSource(write(folder / "n.tfrecord", records)).read(np.arange(50)) == records


def test_packed_files_are_unpacked_once(shards):
    folder, records = shards
    plain = folder / "train-0.tfrecord"
    (folder / "packed.tfrecord.gz").write_bytes(gzip.compress(plain.read_bytes()))
    packed = folder / "packed.tfrecord.gz"
    assert TFRecordSource(packed, plans=folder / "plans").read(np.arange(10)) == records[:10]
    with refuses(ValueError, "TFRecordSource needs plans=", "packed.tfrecord.gz"):
        TFRecordSource(packed)


def test_a_length_that_looks_like_a_packed_file_is_a_length(folder):
    length = int.from_bytes(b"\x1f\x8b\x08\0\0\0\0\0", "little")
    path = write(folder / "long.tfrecord", [bytes(length)])
    assert path.read_bytes().startswith(b"\x1f\x8b\x08")
    assert len(TFRecordSource(path)[0]) == length


def test_a_file_that_changes_while_it_is_read_is_noticed(shards):
    folder, _ = shards
    source = TFRecordSource(folder)
    write(folder / "train-1.tfrecord", [b"other"])
    assert source[3]
    with refuses(ms.errors.FileChanged, "TFRecordSource", "train-1.tfrecord", "at sample 12"):
        source[12]


# Messages

numbers = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=9)
floats = st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5)
features = st.dictionaries(
    st.text(max_size=5), numbers | floats | st.lists(st.binary(max_size=9), min_size=1, max_size=4), max_size=4
)


@settings(max_examples=80, deadline=None)
@given(features=features)
def test_an_example_is_read_as_protobuf_reads_it(features):
    found = decode_example(encoded(features))
    assert found.keys() == features.keys()
    for name, values in features.items():
        if isinstance(values[0], bytes):
            assert found[name] == values
        else:
            array = np.asarray(found[name])
            assert array.dtype == (np.float32 if isinstance(values[0], float) else np.int64)
            assert array.tolist() == values


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_bytes_are_an_example_or_refused_as_protobuf_does(data):
    good = encoded({"a": [1, 300], "b": [1.5], "c": [b"x", b""]})
    place = data.draw(st.integers(0, len(good) - 1))
    changed = good[:place] + data.draw(st.binary(max_size=3)) + good[place + data.draw(st.integers(0, 2)) :]
    try:
        found = decode_example(changed)
    except ValueError:
        return  # protobuf refuses no more than these, and some in other ways
    message = Example()
    try:
        message.ParseFromString(changed)
    except Exception:
        return
    if len(unknown_fields.UnknownFieldSet(message.features)):
        return  # a whole feature counts as unknown where anything in its entry is
    expected = {}
    for name, feature in message.features.feature.items():
        kind = feature.WhichOneof("kind")
        expected[name] = repr([] if kind is None else list(getattr(feature, kind).value))  # NaN is not NaN
    assert {name: repr(np.array(value, object).tolist()) for name, value in found.items()} == expected


def test_unpacked_numbers_and_unknown_fields_are_read():
    def field(number, data):
        return bytes([number << 3 | 2, len(data)]) + data

    numbers = b"\x08\x07\x08\x96\x01"  # field 1, twice, each a number of its own
    floats = b"\x0d" + struct.pack("<f", 1.5) + b"\x0d" + struct.pack("<f", 2.5)
    unknown = b"\x78\x01" + b"\x7d\0\0\0\0" + b"\x79" + bytes(8)
    entries = [field(1, b"n") + field(2, field(3, numbers)), field(2, field(2, floats)) + field(1, b"f") + unknown]
    found = decode_example(unknown + field(1, b"".join(field(1, entry) for entry in entries)))
    assert np.asarray(found["n"]).tolist() == [7, 150] and np.asarray(found["f"]).tolist() == [1.5, 2.5]


def test_examples_are_samples(folder, key):
    rows = [{"x": [float(number), 1.5], "label": [number]} for number in range(6)]
    path = write(folder / "e.tfrecord", map(encoded, rows))
    source = TFRecordSource(path, "example", ordering="sequential")
    loader = ms.DataLoader([source, ms.BatchTransform(3)])
    batch, _ = next(loader.iterate(loader.init_state(key)))
    assert batch["label"].tolist() == [[0], [1], [2]] and batch["x"].tolist() == [[0, 1.5], [1, 1.5], [2, 1.5]]
    text = write(folder / "t.tfrecord", [encoded({"text": [b"oats"]})])
    assert TFRecordSource(text, "example").read(np.array([0])) == [{"text": [b"oats"]}]


# What is wrong


def test_what_is_wrong_is_named_with_its_place(shards):
    folder, records = shards
    path = folder / "train-0.tfrecord"
    data = bytearray(path.read_bytes())
    second = 16 + len(records[0])
    data[second + 20] ^= 1
    path.write_bytes(bytes(data))
    source = TFRecordSource(path)
    words = [f"train-0.tfrecord, record 1, at byte {second},", "checksum", "TFRecordSource at sample 1."]
    with refuses(ValueError, *words):
        source[1]
    assert source[2] == records[2]
    path.write_bytes(bytes(data[:-1]))
    with refuses(ValueError, "train-0.tfrecord", "at byte", "bytes are left", "cut short"):
        TFRecordSource(path)
    path.write_bytes(b"nothing of that kind")
    with refuses(ValueError, "train-0.tfrecord", "at byte 0 there is no record"):
        TFRecordSource(path)
    path.write_bytes(b"")
    with refuses(ValueError, "TFRecordSource needs at least one record", "train-0.tfrecord"):
        TFRecordSource(path)
    with refuses(ValueError, "TFRecordSource needs parse 'bytes' or 'example'", "'json'"):
        TFRecordSource(path, "json")  # pyright: ignore[reportArgumentType]
    write(path, [b"\xff\xff"])
    with refuses(ValueError, "record 0, at byte 0, is not a tf.train.Example", "has no end"):
        TFRecordSource(path, "example")


@pytest.mark.parametrize("fast", [True, False], ids=["package", "tables"])
def test_a_damaged_file_never_gives_a_wrong_byte(folder, monkeypatch, fast):
    if not fast:
        monkeypatch.setattr(tfrecord, "crc32c", checksum.by_tables)
    chance = np.random.default_rng(1)
    records = [chance.bytes(int(size)) for size in chance.integers(0, 60, 12)]
    path = write(folder / "r.tfrecord", records)
    data, refused = path.read_bytes(), 0
    for copy in damaged(data, DAMAGES):
        path.write_bytes(copy)
        try:
            source = TFRecordSource(path)
        except ValueError as error:
            refused += 1
            assert "r.tfrecord" in str(error)
            continue
        assert len(source) <= len(records)
        for index in range(len(source)):
            try:
                assert source[index] == records[index]
            except ValueError as error:
                refused += 1
                assert f"r.tfrecord, record {index}, at byte" in str(error)
    assert refused >= DAMAGES * 9 // 10
