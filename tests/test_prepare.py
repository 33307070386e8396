"""Preparing data in shards: what is written, how it is divided, and what becomes of it when something goes wrong."""

import hashlib
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import threading

import jax
import numpy as np
import prepare_script
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from loopback import Loopback

import millstream as ms
from millstream.cli.main import main
from millstream.integrations import cloud
from millstream.preparation.duplicates import first_occurrences
from millstream.sources import PreparedSource

TESTS = pathlib.Path(__file__).parent
SCRIPT = TESTS / "prepare_script.py"


def source(items):
    return ms.DatasetSource(items, ordering="sequential")


def samples_of(prepared):
    return [prepared[index] for index in range(len(prepared))]


def same(left, right):
    """Whether two samples are the same, with kinds, dtypes and shapes."""
    if type(left) is dict or type(left) is tuple:
        keys, others = (set(one) if type(one) is dict else range(len(one)) for one in (left, right))
        return type(left) is type(right) and keys == others and all(same(left[key], right[key]) for key in keys)
    if isinstance(left, str | bytes | list):
        return type(left) is type(right) and left == right
    left, right = np.asarray(left), np.asarray(right)
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


DTYPES = ["bool", "int8", "uint16", "int32", "uint64", "float16", "float32", "float64"]
LEAVES = st.one_of(
    st.just(st.text(max_size=6)),
    st.just(st.binary(max_size=6)),
    st.just(st.lists(st.text(max_size=3), min_size=1, max_size=3)),
    st.sampled_from(DTYPES).map(lambda dtype: hnp.from_dtype(np.dtype(dtype))),
    st.tuples(st.sampled_from(DTYPES), st.integers(1, 3)).map(
        lambda kind: hnp.arrays(kind[0], hnp.array_shapes(min_dims=kind[1], max_dims=kind[1], min_side=0, max_side=4))
    ),
)
FORMS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: st.tuples(*parts)),
        st.dictionaries(st.text("abc' é", min_size=1, max_size=3), inner, min_size=1, max_size=3).map(
            st.fixed_dictionaries
        ),
    ),
    max_leaves=4,
)


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@settings(max_examples=40)
@given(data=st.data())
def test_samples_come_out_as_they_went_in(memory_folder, kind, data):
    form = data.draw(FORMS)
    samples = data.draw(st.lists(form, min_size=1, max_size=5))
    folder = memory_folder()
    made = ms.prepare(source(samples), folder, format=kind, samples_per_shard=data.draw(st.integers(1, 5)), version="1")
    assert len(made) == len(samples)
    order = data.draw(st.permutations(range(len(samples))))
    assert all(same(made[index], samples[index]) for index in order), samples
    made.verify()


@pytest.fixture(scope="module")
def memory_folder(memory):
    """New folders in memory, where files cost nothing."""
    number = itertools.count()
    return lambda: memory / f"prepared-{next(number)}"


def grown(number):
    """Filters, and makes several of one."""
    if number % 3 == 0:
        return None
    many = [{"n": number, "ids": np.arange(number % 5, dtype=np.int32)}] * (number % 4)
    return many if number % 2 else {"n": number, "ids": np.full(number % 7, number, np.int32)}


def oracle(numbers, unique):
    seen, found = set(), []
    for number in numbers:
        if unique and number in seen:
            continue
        seen.add(number)
        made = grown(number)
        found += made if type(made) is list else [] if made is None else [made]
    return found


@settings(max_examples=20)
@given(
    numbers=st.lists(st.integers(0, 12), min_size=1, max_size=30),
    size=st.integers(1, 12),
    parts=st.integers(1, 4),
    unique=st.booleans(),
    at_once=st.none() | st.integers(1, 5),
)
def test_any_size_of_shards_and_any_parts_give_the_samples_of_an_oracle(
    memory_folder, numbers, size, parts, unique, at_once
):
    numbers = [*numbers, 1]
    folder = memory_folder()
    options = {"samples_per_shard": size, "deduplicate": True if unique else None, "at_once": at_once}

    def all_grown(numbers):
        assert 0 < len(numbers) <= at_once
        return [grown(number) for number in numbers]

    fn = grown if at_once is None else all_grown
    *before, made = [ms.prepare(source(numbers), folder, fn, **options, part=(part, parts)) for part in range(parts)]
    assert made is not None
    ranges = -(-len(numbers) // size)
    assert [one is None for one in before] == [part < ranges - 1 for part in range(parts - 1)]
    expected = [{**sample, "n": np.int64(sample["n"])} for sample in oracle(numbers, unique)]
    assert len(made) == len(expected) and all(map(same, samples_of(made), expected))
    assert made.lengths["ids"].tolist() == [len(sample["ids"]) for sample in expected]
    assert sum(made.blocks) == len(expected)


@given(numbers=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1), at_once=st.integers(1, 9))
def test_the_first_of_equal_hashes_is_kept(numbers, at_once):
    hashes = np.array(numbers, np.uint64)
    kept = first_occurrences(np.array_split(hashes, 3), len(hashes), at_once)
    assert kept.tolist() == [pair not in numbers[:place] for place, pair in enumerate(numbers)]


def test_equal_samples_are_told_by_a_field_a_function_or_all_of_them(folder):
    rows = [{"text": text, "id": number} for number, text in enumerate(["a", "b", "a", "c", "B"])]
    turned = [dict(reversed(row.items())) for row in rows]
    by_field = ms.prepare(source(rows), folder / "field", deduplicate="text")
    assert [sample["id"] for sample in samples_of(by_field)] == [0, 1, 3, 4]
    by_function = ms.prepare(source(rows), folder / "function", deduplicate=lambda row: row["text"].lower())
    assert [sample["id"] for sample in samples_of(by_function)] == [0, 1, 3]
    assert len(ms.prepare(source(rows + turned), folder / "all", deduplicate=True)) == 5
    with pytest.raises(KeyError, match="no field 'words'") as caught:
        ms.prepare(source(rows), folder / "none", deduplicate="words")
    assert "at sample 0" in caught.value.__notes__[0]


def test_any_number_of_workers_writes_the_same_files(folder):
    texts, options = prepare_script.SOURCE, prepare_script.OPTIONS
    ways = {
        "here": {},
        "threads": {"executor": ms.Threads(3)},
        **{f"{workers} workers": {"executor": ms.Processes(workers)} for workers in (1, 2, 4)},
    }
    for name, way in ways.items():
        ms.prepare(texts, folder / name, lambda text: {"ids": np.frombuffer(text.encode(), np.uint8)}, **options, **way)
    found = {name: prepare_script.contents(folder / name) for name in ways}
    assert all(contents == found["here"] for contents in found.values())


RAY = """
import sys, numpy as np, millstream as ms, prepare_script, ray
folder = sys.argv[1]
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000)
ms.prepare(prepare_script.SOURCE, folder + "/ray", prepare_script.tokens, **prepare_script.OPTIONS, ray="auto")
def bad(text):
    raise RuntimeError("no such token")
try:
    ms.prepare(prepare_script.SOURCE, folder + "/bad", lambda text: bad(text) if "40" in text else text, ray="auto")
except RuntimeError as error:
    assert "no such token" in str(error) and "This came from prepare(<lambda>) at sample" in str(error), error
assert ray.is_initialized()  # which was there before
ray.shutdown()
for address in ["nowhere", "\\0", "foo://bar"]:
    try:
        ms.prepare(prepare_script.SOURCE, folder + "/wrong", prepare_script.tokens, ray=address)
    except ValueError as error:
        assert f"prepare needs ray to be the address of a cluster" in str(error) and repr(address) in str(error), error
    else:
        raise AssertionError(address)
ms.prepare(prepare_script.SOURCE, folder + "/here", prepare_script.tokens, **prepare_script.OPTIONS)
assert prepare_script.contents(folder + "/ray") == prepare_script.contents(folder + "/here")
"""


def test_the_tasks_of_a_ray_cluster_write_the_same_files(tmp_path):
    pytest.importorskip("ray")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}

    def run(folder):
        folder.mkdir()
        command = [sys.executable, "-c", RAY, str(folder)]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, start_new_session=True, timeout=300
        )

    done = run(tmp_path / "first")
    if "likely discovered a bug in Ray" in done.stderr:  # seldom: "Tried to complete task that was not pending"
        done = run(tmp_path / "second")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["kill", 5, 7], "killed 5 of 5 times"),
        (["together"], "the same"),
        (["interrupt"], "continued"),
        (["full"], "of 60 shards. Make room, and prepare again"),
    ],
    ids=["kill", "together", "interrupt", "full"],
)
def test_processes_that_are_killed_run_together_or_have_no_room_lose_nothing(tmp_path, command, said):
    name, *rest = map(str, command)
    arguments = [sys.executable, str(SCRIPT), name, str(tmp_path), *rest]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


# What is written, for other readers.


def tokens(text):
    return {"tokens": np.frombuffer(text.encode(), np.uint8), "name": text}


TEXTS = ["oat", "", "barley", "rye und Dinkel", "ä" * 9]


def test_arrow_and_parquet_files_are_read_by_others(folder):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from millstream.integrations.arrow import ArrowSource
    from millstream.integrations.parquet import ParquetSource

    for kind in ("arrow", "parquet"):
        ms.prepare(source(TEXTS), folder / kind, tokens, format=kind, samples_per_shard=2)
    files = sorted((folder / "arrow").glob("*.arrow"))
    assert len(files) == 3
    rows = [row for file in files for row in pa.ipc.open_file(file).read_all().to_pylist()]
    assert [row["name"] for row in rows] == TEXTS and rows[4]["tokens"] == list(TEXTS[4].encode())
    assert pq.read_table(folder / "parquet" / "00001.parquet").to_pylist() == rows[2:4]
    for other in (ArrowSource(folder / "arrow"), ParquetSource(folder / "parquet")):
        assert [sample["name"] for sample in other] == TEXTS


def test_npy_files_are_read_by_others(folder):
    data = {"x": np.arange(24, dtype=np.int16).reshape(6, 2, 2), "y": np.arange(6) % 2 == 0}
    made = ms.prepare(ms.HostArraySource(data, ordering="sequential"), folder, samples_per_shard=4)
    assert np.array_equal(np.load(folder / "00001.x.npy"), data["x"][4:])
    assert (
        ms.NpySource({"y": folder / "00000.y.npy"}, "sequential").read(np.arange(4))["y"].tolist() == [True, False] * 2
    )
    jax.tree.map(np.testing.assert_array_equal, made.read(np.arange(6)), data)
    assert made.spec()["x"] == jax.ShapeDtypeStruct((2, 2), np.int16)
    assert {name: lengths.tolist() for name, lengths in made.lengths.items()} == {"x": [2] * 6}


def test_megatron_and_array_record_files_are_read_by_others(folder):
    from millstream.integrations.array_record import ArrayRecordSource

    documents = ms.prepare(
        source(TEXTS),
        folder / "m",
        lambda text: {"ids": tokens(text)["tokens"]},
        format="megatron",
        samples_per_shard=2,
    )
    read = ms.sources.TokenFileSource(folder / "m", ordering="sequential")
    assert read.lengths.tolist() == documents.lengths["ids"].tolist() == [len(text.encode()) for text in TEXTS]
    assert all(
        same(one["tokens"], other["ids"]) for one, other in zip(samples_of(read), samples_of(documents), strict=True)
    )
    records = ms.prepare(source(TEXTS), folder / "r", str.encode, format="array_record", samples_per_shard=2)
    files = sorted((folder / "r").glob("*.array_record"))
    read = ArrayRecordSource(files, ordering="sequential")
    assert samples_of(read) == samples_of(records) == [text.encode() for text in TEXTS]


def test_the_index_says_what_is_there(folder):
    ms.prepare(source(TEXTS), folder, tokens, samples_per_shard=2)
    index = json.loads((folder / "index.json").read_text())
    assert index["samples"] == 5 and index["format"] == "arrow" and len(index["shards"]) == 3
    for entry in [*(file for shard in index["shards"] for file in shard["files"]), *index["lengths"].values()]:
        data = (folder / entry["name"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["bytes"], entry["sha256"])
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


# Reading.


def test_a_source_opens_and_plans_without_a_look_at_shards(folder):
    made = ms.prepare(source(TEXTS), folder, tokens)
    packed = ms.views.pack(made, 8, leaves="tokens")
    assert sum(np.count_nonzero(row["segments"]) for row in packed) == sum(len(text.encode()) for text in TEXTS)
    for path in folder.glob("*.arrow"):
        path.unlink()
    assert ms.views.buckets(made, "tokens", (8, 32), batch_size=2).steps_per_epoch == 3
    with pytest.raises(ms.errors.FileChanged, match=r"00000\.arrow"):
        made[0]


@pytest.mark.parametrize("kind", ["arrow", "npy", "parquet"])
def test_batches_are_the_same_on_every_executor(folder, kind, key):
    data = {"x": np.arange(60, dtype=np.float32).reshape(20, 3), "y": np.arange(20, dtype=np.int32)}
    ms.prepare(ms.HostArraySource(data), folder, format=kind, samples_per_shard=7)
    batches = []
    for executor in (None, ms.Threads(2), ms.Processes(2)):
        loader = ms.DataLoader([PreparedSource(folder), ms.BatchTransform(6)], executor=executor)
        batches.append([jax.device_get(item) for item in loader.iterate(loader.init_state(key), steps=5)])
    jax.tree.map(np.testing.assert_array_equal, batches[0], batches[1])
    jax.tree.map(np.testing.assert_array_equal, batches[0], batches[2])
    ys = np.concatenate([batch["y"][mask] for batch, mask in batches[0][:4]])
    assert sorted(ys.tolist()) == list(range(20))


@pytest.mark.parametrize("kind", ["arrow", "npy", "parquet", "megatron"])
def test_shards_are_read_by_their_address(folder, kind):
    numbers = [np.arange(5 if kind == "npy" else n % 4 + 1, dtype=np.int32) for n in range(9)]
    made = ms.prepare(source(numbers), folder, format=kind, samples_per_shard=4)
    server = Loopback()
    try:
        for path in folder.iterdir():
            server.put(f"/data/{path.name}", path.read_bytes())
        far = PreparedSource(f"{server.address}/data", ordering="sequential")
        assert {path.rpartition("/")[2] for path, _ in server.requests} == {"index.json"}
        assert all(map(same, samples_of(far), samples_of(made))) and far.lengths["value"].tolist() == list(
            map(len, numbers)
        )
        far.verify()
    finally:
        server.close()


@pytest.mark.parametrize("ordering", ["sequential", ms.Shuffle("blocks", lanes=4, window=20)], ids=str)
@pytest.mark.parametrize("kind", ["arrow", "npy", "megatron", "parquet"])
def test_shards_by_their_address_are_fetched_ahead_each_block_once(folder, key, kind, ordering):
    values = [np.arange(n, n + 5000 + (n % 3 if kind != "npy" else 0), dtype=np.int32) for n in range(240)]
    made = ms.prepare(source(values), folder / "near", format=kind, samples_per_shard=20)
    server, together, asked = Loopback(), threading.Barrier(8), itertools.count()

    def fault(handler):  # the first eight blocks are answered together, if they are asked for at once
        if handler.headers["Range"] != "bytes=0-16383" and next(asked) < 8:  # which opens a file
            together.wait(timeout=10)
        return False

    def stream_of(place, executor, fault=lambda handler: False):
        cut = PreparedSource(place, ordering=ordering).map(lambda value: {"x": value[:5000]})
        with ms.DataLoader([cut, ms.BatchTransform(16)], executor=executor, prefetch=1) as loader:
            server.start_counting()  # the loader has read the first block
            server.fault = fault
            return [jax.device_get(pair) for pair in loader.iterate(loader.init_state(key), steps=15)]

    cloud.configure(f"{server.address}/", cache_limit=0)
    try:
        for path in (folder / "near").iterdir():
            server.put(f"/data/{path.name}", path.read_bytes())
        expected, far = stream_of(folder / "near", ms.Threads(2)), f"{server.address}/data"
        jax.tree.map(np.testing.assert_array_equal, stream_of(far, ms.Threads(2), fault), expected)
        assert next(asked) >= 8 and len(server.requests) == len(set(server.requests))
        assert len(server.requests) <= 12 + len(made.blocks)
        jax.tree.map(np.testing.assert_array_equal, stream_of(far, ms.Processes(2)), expected)
    finally:
        server.close()


def test_a_missing_shard_is_no_error_before_it_is_read(folder, key):
    """What will be read is a hint: a shard that is gone ends the stream at its own samples, or these are skipped."""
    ms.prepare(source(list(np.arange(40, dtype=np.int32))), folder / "near", format="arrow", samples_per_shard=10)
    server = Loopback()
    cloud.configure(f"{server.address}/", cache_limit=0)
    try:
        for path in (folder / "near").iterdir():
            if path.name != "00002.arrow":
                server.put(f"/data/{path.name}", path.read_bytes())
        far, seen = PreparedSource(f"{server.address}/data", ordering="sequential"), []
        with ms.DataLoader([far, ms.BatchTransform(5)], executor=ms.Threads(2), prefetch=1) as loader:
            with pytest.raises(FileNotFoundError, match=r"00002\.arrow"):
                for batch, _ in loader.iterate(loader.init_state(key)):
                    seen += batch.tolist()
        assert seen == list(range(20))
        options = {"executor": ms.Threads(2), "on_error": "skip item"}
        with ms.DataLoader([far, ms.BatchTransform(5)], **options) as loader:
            pairs = [jax.device_get(pair) for pair in loader.iterate(loader.init_state(key))]
        assert [x for batch, mask in pairs for x in batch[mask].tolist()] == [*range(20), *range(30, 40)]
    finally:
        server.close()


def test_a_damaged_missing_or_shorter_shard_is_named(folder):
    made = ms.prepare(source(TEXTS * 40), folder, tokens, samples_per_shard=50)
    shard = folder / "00002.arrow"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-60] + bytes([whole[-60] ^ 1]) + whole[-59:])
    with pytest.raises(ms.errors.FileChanged, match=r"00002\.arrow"):
        made.verify()
    with pytest.raises(ValueError, match=r"00002\.arrow is damaged: its SHA-256 is not that of its index"):
        PreparedSource(folder).verify()
    shard.write_bytes(whole[:-1])
    with pytest.raises(
        ValueError, match=rf"00002\.arrow has {len(whole) - 1:,} bytes, and {len(whole):,} by its index"
    ):
        PreparedSource(folder)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=r"00002\.arrow does not exist") as caught:
        PreparedSource(folder)
    assert "index.json names it" in caught.value.__notes__[0]


@settings(max_examples=60)
@given(data=st.data())
def test_flipped_and_cut_shards_give_samples_or_errors_and_never_a_crash(once, data):
    folder = once("flips", lambda place: ms.prepare(source(TEXTS * 8), place, tokens, samples_per_shard=40))
    shard = folder / "00000.arrow"
    whole = shard.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    try:
        shard.write_bytes(whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :])
        found = PreparedSource(folder, ordering="sequential")
        with pytest.raises(ValueError, match="SHA-256"):
            found.verify()
        try:
            assert len(samples_of(found)) == len(found)
        except (ValueError, UnicodeError):
            pass
    finally:
        shard.write_bytes(whole)


@pytest.fixture(scope="module")
def once(memory_folder):
    """A folder that is made once for all examples of a test."""
    made = {}

    def make(name, write):
        if name not in made:
            made[name] = memory_folder()
            write(made[name])
        return made[name]

    return make


@pytest.mark.parametrize(
    "change",
    [
        lambda index: b"{",
        lambda index: b'{"kind": "other"}',
        lambda index: index.replace(b'"version": 1', b'"version": 2', 1),
        lambda index: index.replace(b'"samples": 5', b'"samples": 6'),
        lambda index: index.replace(b'"structure": {', b'"structure": {"more": "*", ', 1),
        lambda index: index.replace(b"00000.arrow", b"../00000.arrow"),
        lambda index: re.sub(rb'"ends": \[\d+', b'"ends": [1', index),
        lambda index: index.replace(b'"axes": 1', b'"axes": 99', 1),
        lambda index: index.replace(b"|u1", b"|O8"),
    ],
)
def test_an_index_that_says_nonsense_is_refused(folder, change):
    ms.prepare(source(TEXTS), folder, tokens)
    path = folder / "index.json"
    before = path.read_bytes()
    path.write_bytes(change(before))
    assert path.read_bytes() != before
    with pytest.raises(ValueError, match=r"PreparedSource needs the folder of ms.prepare|names the file '../00000"):
        PreparedSource(folder)


# Continuing, and what is refused.


class Stopping:
    """`tokens`, until it is asked for too many; it counts its calls, which a version stands for."""

    def __init__(self, most):
        self.most, self.calls = most, []

    def __call__(self, text):
        if len(self.calls) == self.most:
            raise KeyboardInterrupt
        self.calls.append(text)
        return tokens(text)


def test_finished_shards_are_kept_and_a_damaged_one_is_made_again(folder):
    options = {"samples_per_shard": 2, "version": "1"}
    straight = ms.prepare(source(TEXTS), folder / "straight", tokens, **options)
    first, then = Stopping(5), Stopping(9)
    with pytest.raises(KeyboardInterrupt):
        ms.prepare(source(TEXTS), folder / "job", first, **options)
    assert first.calls == ["oat", *TEXTS[:4]]  # the first for the form of the samples
    damaged = folder / "job" / "00001.arrow"
    whole = damaged.read_bytes()
    damaged.write_bytes(bytes([*whole[:200], whole[200] ^ 1, *whole[201:]]))
    made = ms.prepare(source(TEXTS), folder / "job", then, **options)
    assert then.calls == [TEXTS[4], *TEXTS[2:4]]  # what was missing, and what the checksum did not fit
    assert damaged.read_bytes() == whole and all(map(same, samples_of(made), samples_of(straight)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a | {"source": source([*TEXTS, "more"])}, "samples: 5 there, 6 now"),
        (lambda a: a | {"source": source([*TEXTS[:4], "other"])}, "contents: "),
        (lambda a: a | {"fn": lambda text: {"length": len(text)}}, "functions: "),
        (lambda a: a | {"samples_per_shard": 3}, "samples_per_shard: 256 there, 3 now"),
        (lambda a: a | {"at_once": 3}, "at_once: None there, 3 now"),
        (lambda a: a | {"format": "parquet"}, "format: arrow there, parquet now"),
        (lambda a: a | {"deduplicate": True}, "deduplicate: None there, True now"),
        (lambda a: a | {"version": "2"}, "version: None there, 2 now"),
    ],
)
def test_a_folder_of_something_else_is_refused_with_what_differs(folder, change, said):
    arguments = {"source": source(TEXTS), "directory": folder, "fn": tokens}
    ms.prepare(**arguments)
    assert ms.prepare(**arguments) is not None  # the same again reads what is there
    with pytest.raises(ValueError, match="was prepared from something else") as caught:
        ms.prepare(**change(arguments))
    assert said in str(caught.value) and "Give a new folder, or remove this one" in str(caught.value)


def test_an_input_file_that_changed_is_named(folder):
    path = folder / "words.jsonl"
    path.write_text('{"word": "oat"}\n')
    ms.prepare(ms.sources.JsonlSource(path), folder / "out")
    path.write_text('{"word": "barley"}\n')
    with pytest.raises(ValueError, match=r"file words\.jsonl: 16 bytes, \w+ there, 19 bytes, \w+ now"):
        ms.prepare(ms.sources.JsonlSource(path), folder / "out")


def test_a_folder_in_which_nothing_was_made_yet_is_free_for_a_corrected_function(folder):
    def fn(text):
        return text.undefined

    with pytest.raises(AttributeError):
        ms.prepare(source(TEXTS), folder, fn)
    assert len(ms.prepare(source(TEXTS), folder, tokens, samples_per_shard=2)) == 5
    with pytest.raises(ValueError, match="was prepared from something else"):
        ms.prepare(source(TEXTS), folder, fn)


def test_a_folder_with_a_finished_shard_or_a_process_at_work_is_not_free(folder):
    def fails_later(text):
        if text == "barley":
            raise LookupError
        return tokens(text)

    with pytest.raises(LookupError):
        ms.prepare(source(TEXTS), folder / "shard", fails_later, samples_per_shard=2)
    with pytest.raises(ValueError, match="was prepared from something else"):
        ms.prepare(source(TEXTS), folder / "shard", tokens, samples_per_shard=2)

    def begins_another(text):
        with pytest.raises(ValueError, match="was prepared from something else"):
            ms.prepare(source(TEXTS), folder / "busy", lambda text: text)
        return tokens(text)

    assert len(ms.prepare(source(TEXTS), folder / "busy", begins_another, version="1")) == 5


def test_a_changed_map_of_the_source_is_seen(folder):
    ms.prepare(source(TEXTS).map(lambda text: text or "none"), folder)
    with pytest.raises(ValueError, match="functions: "):
        ms.prepare(source(TEXTS).map(lambda text: text if text else "none"), folder)


def test_a_folder_with_other_files_is_refused(folder):
    (folder / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match=r"needs a folder of its own. .*'thesis.txt'"):
        ms.prepare(source(TEXTS), folder)


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([{"a": 1}, {"a": 1, "b": 2}], "sample 1 has a different structure"),
        ([{"a": np.int32(1)}, {"a": np.int64(1)}], "found\\['a'\\]:  shape \\(\\), int64\n  others\\['a'\\]: int32"),
        ([{"a": [1, 2]}, {"a": [1.5]}], "sample 1 does not match the others"),
        ([{"a": "x"}, {"a": None}], "None is not kept. Fill the gap"),
        ([{"a": np.zeros(2)}, {"a": np.zeros((2, 2))}], "others\\['a'\\]: 1 axis, float64"),
        ([{"a": object()}], "keeps numbers, bools, arrays of them, text, bytes"),
        ([{"a": {1, 2}}], "Sample 0 has sample\\['a'\\]: {1, 2} \\(set\\)"),
        ([{"a": [[1], [2, 3]]}], "keeps numbers"),
        ([{"a": np.zeros(1, complex)}], "keeps numbers"),
        ([None, "a"], "None is not kept"),
        ([{"a": []}, {"a": []}], "cannot tell what sample\\['a'\\] holds: it is an empty list in every sample"),
        ([{"a.b": 1, "a": {"b": 2}}], "needs a name of its own for every leaf. 'a.b'"),
    ],
)
def test_samples_that_cannot_be_kept_are_refused_by_name(folder, items, said):
    with pytest.raises((TypeError, ValueError), match=said):
        ms.prepare(source(items), folder, version="1")


def test_an_empty_list_takes_the_kind_of_the_others(folder):
    made = ms.prepare(source([{"a": [], "b": [1]}, {"a": [], "b": []}, {"a": [2.5], "b": [3]}]), folder)
    assert [sample["a"].dtype.name for sample in samples_of(made)] == ["float64"] * 3
    assert [sample["b"].tolist() for sample in samples_of(made)] == [[1], [], [3]]


def test_a_function_may_use_its_memory_again(folder):
    buffer = np.zeros(3, np.int64)

    def fill(number):
        buffer[:] = number
        return {"x": buffer}

    made = ms.prepare(source([1, 2, 3]), folder, fill, version="1")
    assert [sample["x"].tolist() for sample in samples_of(made)] == [[1] * 3, [2] * 3, [3] * 3]


def test_an_error_of_the_function_keeps_its_type_and_names_the_sample(folder):
    def checked(text):
        if text == "barley":
            raise LookupError(text)
        return text

    with pytest.raises(LookupError) as caught:
        ms.prepare(source(TEXTS), folder, checked, version="1")
    assert "This came from prepare(checked) at sample 2." in caught.value.__notes__
    with pytest.raises(LookupError) as caught:
        ms.prepare(source(TEXTS), folder / "two", lambda texts: list(map(checked, texts)), at_once=2, version="1")
    assert "This came from prepare(<lambda>) at samples 2 to 3." in caught.value.__notes__


def test_views_and_random_stages_are_prepared_in_the_order_of_positions(folder):
    view = source(list(range(20)))[::-2]
    assert [int(n) for n in ms.prepare(view, folder / "view")] == list(range(19, 0, -2))
    noisy = [source(list(range(6))), ms.RandomHostMapTransform(lambda n, rng: {"x": rng.integers(1 << 40)})]
    drawn = [ms.prepare(noisy, folder / str(size), samples_per_shard=size, version="1") for size in (2, 5)]
    assert [sample["x"] for sample in samples_of(drawn[0])] == [sample["x"] for sample in samples_of(drawn[1])]
    assert len({int(sample["x"]) for sample in samples_of(drawn[0])}) == 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"source": [1, 2]}, "takes a source and stages on the host. Got 2"),
        ({"source": "text"}, "needs a source, such as ms.sources.JsonlSource"),
        ({"source": [source(TEXTS), ms.BatchTransform(2)]}, "writes samples before they are batched"),
        ({"source": ms.views.weighted(source(TEXTS), np.ones(5))}, "differs from epoch to epoch"),
        (
            {"directory": "s3://bucket/x"},
            "writes to disks of this machine and those it shares. Got the address s3://bucket/x",
        ),
        ({"directory": __file__}, "needs directory to be a folder of its own"),
        ({"fn": 3}, "needs fn to be a function"),
        ({"format": "zip"}, "needs format 'arrow', 'npy'"),
        ({"samples_per_shard": 0}, "needs samples_per_shard to be an int of at least 1"),
        ({"fn": len, "at_once": 0}, "needs at_once to be an int of at least 1"),
        ({"at_once": 3}, "takes at_once= with a function"),
        ({"fn": lambda: 0, "at_once": 3}, "calls fn\\(samples\\)"),
        (
            {"fn": lambda texts: {"text": texts}, "at_once": 3},
            r"For 1 sample it returned .*dict.*Make a dict of each: \[{...}",
        ),
        (
            {"fn": lambda texts: texts[1:], "at_once": 3},
            "one result for each sample .* For 1 sample it returned 0. Return None for",
        ),
        (
            {"fn": lambda texts: texts[: max(1, len(texts) - 1)], "at_once": 3},
            "one result for each sample .* For 3 samples it returned 2. Return None for",
        ),
        ({"executor": 4}, "needs executor to be one such as ms.Threads"),
        ({"executor": ms.Threads(1), "ray": "auto"}, "takes executor= or ray=, not both"),
        ({"part": 3}, "needs part to be a pair such as \\(3, 64\\)"),
        ({"part": (4, 4)}, "part\\[0\\], which counts from 0, to be an int from 0 to 3. Got 4"),
        ({"deduplicate": 3}, "needs deduplicate to be the name of a field, a function of a sample, or True"),
        ({"version": 2}, "version"),
        ({"format": "npy"}, "format='npy' needs samples of numbers and arrays of one shape. Got sample: text"),
        ({"format": "npy", "fn": lambda text: np.zeros(len(text))}, "hold arrays of one shape: pad it"),
        ({"format": "megatron"}, "format='megatron' needs samples of one leaf, an array with one axis of uint8"),
        ({"format": "array_record"}, "needs samples of one leaf, bytes: serialize them"),
        ({"fn": lambda text: None}, "has kept none of the 5 samples"),
        ({"fn": lambda text, held=sys.stdin: text}, "cannot tell whether <lambda> is the function of shards"),
    ],
)
def test_wrong_arguments_are_refused_by_name(folder, arguments, said):
    with pytest.raises((TypeError, ValueError, NotADirectoryError), match=said):
        ms.prepare(**{"source": source(TEXTS), "directory": folder} | arguments)


def test_ray_that_is_not_installed_is_asked_for(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"prepare\(ray=...\) needs ray. Run: pip install"):
        ms.prepare(source(TEXTS), folder, ray="auto")


# The command.

PREPARED = """
import millstream as ms
from helper import LETTERS

source = ms.DatasetSource(["oat", "rye", "oat", "barley"] * 9, ordering="sequential")
options = {"deduplicate": True, "samples_per_shard": 2}


def fn(text):
    return {"text": text, "ids": [LETTERS.index(letter) for letter in text]}


if __name__ == "__main__":
    import sys

    ms.prepare(source, sys.argv[1], fn, **options)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "helper.py").write_text("LETTERS = 'abcdefghijklmnopqrstuvwxyz'")
    (tmp_path / "script.py").write_text(PREPARED)
    return tmp_path / "script.py"


def test_the_command_prepares_what_a_script_says(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    straight = tmp_path / "straight"
    subprocess.run([sys.executable, str(script), str(straight)], check=True)
    ways = {"here": [], "workers": ["--workers", "2"], "0": ["--part", "0/2"], "1": ["--part", "1/2"]}
    said = []
    for name, way in ways.items():
        folder = tmp_path / ("parts" if way[:1] == ["--part"] else name)
        assert main(["prepare", str(script), "--to", str(folder), *way]) == 0
        said.append(capsys.readouterr().out.partition(": ")[2].strip())
    assert said == ["3 samples in 2 blocks"] * 2 + [
        "this part is finished; others are not yet",
        "3 samples in 2 blocks",
    ]
    wanted = prepare_script.contents(straight)
    assert all(prepare_script.contents(tmp_path / name) == wanted for name in ("here", "workers", "parts"))
    assert PreparedSource(straight, ordering="sequential")[2]["ids"].tolist() == [1, 0, 17, 11, 4, 24]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent.py"], "there is no script 'absent.py'"),
        (["{script}", "--workers", "0"], "--workers must be at least 1. Got 0."),
        (["{script}", "--part", "2/2"], "--part must be I/N with I from 0 to N - 1, such as 0/64. Got '2/2'."),
        (["{script}", "--part", "half"], "Got 'half'."),
        (["{script}", "--workers", "2", "--ray", "auto"], "not allowed with argument"),
        (["{empty}"], "must say what to prepare: source = ..."),
        (["{odd}"], "must be a dict of arguments of ms.prepare. Got 3."),
    ],
)
def test_the_command_refuses_what_it_cannot_do(script, tmp_path, arguments, said, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "odd.py").write_text("source = options = 3")
    names = {"{script}": str(script), "{empty}": str(tmp_path / "empty.py"), "{odd}": str(tmp_path / "odd.py")}
    with pytest.raises(SystemExit):
        main(
            ["prepare", *(names[word] if word in names else word for word in arguments), "--to", str(tmp_path / "out")]
        )
    assert said in capsys.readouterr().err
