"""Token files of nanoGPT, llm.c, Megatron and OLMo: their documents, and windows of their tokens."""

import contextlib
import io
import itertools
import os
import pathlib
import pickle
import struct
import threading
import tokenize
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from conftest import assert_trees_equal
from damage import DAMAGES, damaged
from hypothesis import given, settings
from loopback import Loopback
from test_bad_input import refuses

import millstream as ms
from millstream.files import remote_options
from millstream.integrations import cloud
from millstream.reading.memory import mapped_file
from millstream.sources import token_file
from millstream.sources.token_file import TokenFileSource

END = 0


def megatron(path, documents, dtype=np.uint16, code=8):
    """Write documents, which are lists of sequences, as Megatron's builder does."""
    sequences = [np.asarray(sequence, dtype) for document in documents for sequence in document]
    sizes = np.array([len(sequence) for sequence in sequences], np.int32)
    pointers = (np.cumsum(sizes, dtype=np.int64) - sizes) * np.dtype(dtype).itemsize
    ends = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sizes), len(ends))
    path.with_suffix(".bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    path.with_suffix(".idx").write_bytes(head + sizes.tobytes() + pointers.tobytes() + ends.tobytes())
    return path.with_suffix(".bin")


def megatron_oracle(index, tokens):
    """Documents as Megatron reads them, which trusts the index; None where it would fail."""
    try:
        magic, version, code, count, documents = struct.unpack_from("<9sQBQQ", index)
        dtype = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}[code]
        assert magic == b"MMIDIDX\0\0" and version == 1 and count + documents < 1000
        sizes = np.frombuffer(index, "<i4", count, 34)
        pointers = np.frombuffer(index, "<i8", count, 34 + 4 * count)
        ends = np.frombuffer(index, "<i8", documents, 34 + 12 * count)
        found = []
        for first, last in itertools.pairwise(ends):
            parts = [np.frombuffer(tokens, dtype, sizes[k], pointers[k]) for k in range(first, last)]
            found.append(np.concatenate([np.zeros(0, dtype), *parts]).tolist())
        return found
    except (AssertionError, KeyError, IndexError, ValueError, struct.error):
        return None


def numpy_oracle(data):
    """The array of a file as NumPy reads it, which is stricter about what follows the description in a header."""
    try:
        return np.load(io.BytesIO(data)).tolist()
    except ValueError:
        return np.frombuffer(data, np.uint16, offset=128).tolist()


def llm_c(tokens, magic=20240520, version=1, dtype: type[np.unsignedinteger] = np.uint16):
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(tokens)
    return header.tobytes() + np.asarray(tokens, dtype).tobytes()


def split_after(tokens, end):
    documents = [[]]
    for token in tokens:
        documents[-1].append(token)
        if token == end:
            documents.append([])
    return [document for document in documents if document]


def split_before(tokens, start):
    documents = []
    for token in tokens:
        if token == start or not documents:
            documents.append([])
        documents[-1].append(token)
    return documents


def documents_of(source):
    samples, _ = source.read_samples(np.arange(len(source)), None)
    assert source.lengths.tolist() == [len(sample["tokens"]) for sample in samples]
    return [sample["tokens"].tolist() for sample in samples]


@pytest.fixture
def corpus(folder):
    """Three raw files, with their documents."""
    chance = np.random.default_rng(0)
    documents = [[[*chance.integers(1, 60_000, n), END] for n in chance.integers(0, 30, 9)] for _ in range(3)]
    for number, part in enumerate(documents):
        np.concatenate(part).astype(np.uint16).tofile(folder / f"part-{number}.bin")
    return folder, [[int(token) for token in document] for part in documents for document in part]


tokens_lists = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=12), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(files=tokens_lists, ends=st.booleans(), dtype=st.sampled_from(["<u2", "<u4", ">u2", "<i8"]))
def test_documents_are_those_of_a_loop_over_the_tokens(memory, files, ends, dtype):
    for number in range(4):
        (memory / f"law-{number}.bin").unlink(missing_ok=True)
    for number, tokens in enumerate(files):
        np.array(tokens, dtype).tofile(memory / f"law-{number}.bin")
    split = split_after if ends else split_before
    name = "end_token" if ends else "start_token"
    options: Any = {name: 3}
    expected = [document for tokens in files for document in split(tokens, 3)]
    if not any(3 in tokens for tokens in files):
        with refuses(ValueError, "TokenFileSource", f"{name}=3", "none of the files"):
            TokenFileSource(str(memory / "law-*.bin"), dtype, **options)
        return
    source = TokenFileSource(str(memory / "law-*.bin"), dtype, **options)
    assert documents_of(source) == expected
    assert len(source.tokens) == sum(map(len, files))
    everything = source.tokens.read(np.arange(len(source.tokens)))["tokens"]
    assert everything.tolist() == [token for tokens in files for token in tokens]


def test_a_file_without_a_split_is_one_document_and_is_not_copied(folder):
    tokens = np.arange(1000, dtype=np.uint32)
    tokens.tofile(folder / "train.bin")
    source = TokenFileSource(folder / "train.bin", np.uint32)
    out = np.empty(1, object)
    source.read_rows(np.array([0]), [out])
    assert mapped_file(out[0]["tokens"]) is not None and not out[0]["tokens"].flags.writeable
    np.testing.assert_array_equal(out[0]["tokens"], tokens)
    assert len(pickle.dumps(source)) < 4000


def test_the_source_travels_as_a_path_and_notices_a_file_that_has_changed(corpus):
    folder, documents = corpus
    source = TokenFileSource(str(folder / "part-*.bin"), np.uint16, end_token=END)
    assert documents_of(source) == documents
    carried = pickle.dumps(source)
    assert documents_of(pickle.loads(carried)) == documents
    path = folder / "part-1.bin"
    path.write_bytes(path.read_bytes()[:-4])
    with refuses(ms.errors.FileChanged, "TokenFileSource", "part-1.bin", "at sample 9"):
        documents_of(source)
    with refuses(ms.errors.FileChanged, "part-1.bin"):
        pickle.loads(carried)
    with refuses(ms.errors.FileChanged, "part-1.bin"):
        source.tokens.read(np.arange(len(source.tokens)))


@pytest.mark.parametrize("executor", [None, ms.Threads(2), ms.Processes(2)], ids=["none", "threads", "processes"])
def test_windows_and_padded_documents_are_the_same_on_every_executor(corpus, key, executor):
    folder, documents = corpus
    source = TokenFileSource(str(folder / "part-*.bin"), np.uint16, end_token=END)
    flat = np.concatenate(documents).astype(np.uint16)
    crops = ms.views.windows(source.tokens, 8, stride=1)
    expected = ms.views.windows(ms.HostArraySource({"tokens": flat}), 8, stride=1)
    longest = max(map(len, documents))
    for view, other in ((crops, expected), (source, ms.DatasetSource([{"tokens": np.uint16(d)} for d in documents]))):
        pad = [] if view is crops else [ms.PadTransform({"tokens": END}, length=longest)]
        runs = []
        for stages, runner in (([view, *pad], executor), ([other, *pad], None)):
            with ms.DataLoader([*stages, ms.BatchTransform(8)], executor=runner) as loader:
                runs.append([jax.device_get(pair) for pair in loader.iterate(loader.init_state(key), steps=5)])
        assert_trees_equal(*runs)


def test_views_know_the_lengths_without_reading(corpus, monkeypatch):
    folder, documents = corpus
    source = TokenFileSource(str(folder / "part-*.bin"), np.uint16, end_token=END)
    monkeypatch.setattr(TokenFileSource, "read_rows", None)
    view = ms.views.buckets(source, "tokens", (16, 32), batch_size=2)
    assert sum(bucket.steps_per_epoch for bucket in view.plan.buckets) >= len(documents) // 2
    inside = ms.views.windows(source.tokens, 4, counts=source.lengths)
    assert len(inside) == sum(len(document) // 4 for document in documents)
    flat, at = np.concatenate(documents), 0
    found = [inside[number]["tokens"].tolist() for number in range(len(inside))]
    for document in documents:
        for first in range(0, len(document) - 3, 4):
            assert found.pop(0) == flat[at + first : at + first + 4].tolist()
        at += len(document)


@pytest.mark.parametrize("mapped", [2, 256], ids=["in ranges", "mapped"])
def test_windows_reach_from_file_to_file(corpus, monkeypatch, mapped):
    folder, documents = corpus
    monkeypatch.setattr(token_file, "_MAPPED", mapped)
    source = TokenFileSource(str(folder / "part-*.bin"), np.uint16, end_token=END)
    flat = np.concatenate(documents)
    ways: list[dict[str, Any]] = [{"stride": 1}, {"stride": 3, "step": 4}, {"stride": 1, "end": "pad"}]
    for options in ways:
        found = ms.views.windows(source.tokens, 50, **options)
        expected = ms.views.windows(ms.HostArraySource({"tokens": flat.astype(np.uint16)}), 50, **options)
        assert_trees_equal(found.read(np.arange(len(found))), expected.read(np.arange(len(expected))))


def test_many_files_are_read_without_keeping_them_open(corpus, monkeypatch):
    folder, documents = corpus
    monkeypatch.setattr(token_file, "_MAPPED", 2)
    source = TokenFileSource(str(folder / "part-*.bin"), np.uint16, end_token=END)
    assert documents_of(source) == documents
    flat = np.concatenate(documents)
    places = np.concatenate([np.arange(20, 60), [3], np.arange(len(flat) - 9, len(flat)), [4, 5, 3]])
    assert source.tokens.read(places)["tokens"].tolist() == flat[places].tolist()


def test_files_behind_an_address(corpus, monkeypatch):
    folder, documents = corpus
    monkeypatch.setattr(remote_options, "_configured", {})
    cloud.configure(cache_folder=folder / "cache", timeout=2, backoff=0.01)
    server = Loopback()
    try:
        for number in range(3):
            server.put(f"/part-{number}.bin", (folder / f"part-{number}.bin").read_bytes())
        megatron(folder / "index", [[[1, 2], [3]], [[4]]])
        for kind in ("bin", "idx"):
            server.put(f"/m.{kind}", (folder / f"index.{kind}").read_bytes())
        paths = [f"{server.address}/part-{number}.bin" for number in range(3)]
        source = TokenFileSource(paths, np.uint16, end_token=END, plans=folder / "plans")
        assert documents_of(source) == documents
        flat = np.concatenate(documents)
        crop = ms.views.windows(source.tokens, 20, stride=1).read(np.array([7, 100]))["tokens"]
        assert crop.tolist() == [flat[7:27].tolist(), flat[100:120].tolist()]
        assert documents_of(TokenFileSource(f"{server.address}/m.idx")) == [[1, 2, 3], [4]]
    finally:
        server.close()


VIEWS = {
    "documents": lambda source: source,
    "windows": lambda source: ms.views.windows(source.tokens, 100, stride=100),
    "spread windows": lambda source: ms.views.windows(source.tokens, 50, stride=100, step=2),
    "packed": lambda source: ms.views.pack(source, 300, rule="concat"),
}


ORDERINGS = ["sequential", "shuffle", ms.Shuffle("blocks", lanes=2, window=30, block_size=30)]


@pytest.mark.parametrize("ordering", ORDERINGS, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_tokens_behind_an_address_are_fetched_ahead(folder, key, monkeypatch, view, ordering):
    monkeypatch.setattr(remote_options, "_configured", {})
    server, together, asked = Loopback(), threading.Barrier(4), itertools.count()
    cloud.configure(f"{server.address}/", cache_limit=0)

    def fault(handler):  # four of what is read is answered together: one thread would wait for ever
        if handler.headers["Range"] != "bytes=0-16383" and next(asked) < 4:
            together.wait(timeout=10)
        return False

    def stream_of(place, executor, fault=lambda handler: False):
        paths = [f"{place}/{number}.bin" for number in range(6)]
        source = TokenFileSource(paths, np.uint16, end_token=END, plans=folder / "plans", ordering=ordering)
        whole = VIEWS[view](source)
        pipeline = [whole.map(lambda row: {"x": row["tokens"][:50]}), ms.BatchTransform(20)]
        with ms.DataLoader(pipeline, executor=executor, prefetch=1) as loader:
            server.start_counting()
            server.fault = fault
            found = [jax.device_get(pair) for pair in loader.iterate(loader.init_state(key))]
        return found, len(server.requests), server.nbytes

    try:
        for number in range(6):
            tokens = np.arange(number, number + 12_000, dtype=np.uint16) % 7 + 1
            tokens[99::100] = END
            tokens.tofile(folder / f"{number}.bin")
            server.put(f"/{number}.bin", tokens.tobytes())
        near, _, _ = stream_of(folder, ms.Threads(2))
        far, requests, nbytes = stream_of(server.address, ms.Threads(2), fault)
        assert_trees_equal(far, near)
        assert next(asked) > 4 and requests <= 12 and nbytes <= 1.1 * 6 * 24_000
        assert_trees_equal(stream_of(server.address, ms.Processes(2))[0], near)
    finally:
        server.close()


def test_more_tokens_than_32_bits_count(folder):
    path = folder / "huge.bin"
    count = (1 << 32) + 1000
    with open(path, "wb") as file:  # a hole, which takes no room
        file.truncate(2 * count)
        file.seek(2 * (count - 8))
        file.write(np.arange(1, 9, dtype=np.uint16).tobytes())
    source = TokenFileSource(path, np.uint16)
    assert source.lengths.tolist() == [count]
    crops = ms.views.windows(source.tokens, 8, stride=1)
    assert len(crops) == count - 7
    assert crops[count - 8]["tokens"].tolist() == list(range(1, 9))
    crops = ms.views.windows(source.tokens, 8, stride=8)  # not more than a plan has places for
    assert crops[len(crops) - 1]["tokens"].tolist() == list(range(1, 9))
    loader = ms.DataLoader([crops, ms.BatchTransform(4)])
    batch, mask = next(loader.iterate(loader.init_state(jax.random.key(0))))
    assert batch["tokens"].shape == (4, 8) and mask.all()


# Where documents begin is kept


def test_where_documents_begin_is_looked_for_once(corpus, monkeypatch):
    folder, documents = corpus
    plans, scans = folder / "plans", []
    bounds = token_file._bounds
    monkeypatch.setattr(token_file, "_bounds", lambda part, split: scans.append(part) or bounds(part, split))
    for _ in range(2):
        with ms.views.plans(plans):
            source = TokenFileSource(str(folder / "part-*.bin"), np.uint16, end_token=END)
        assert documents_of(source) == documents
    assert len(scans) == 6 and len(list(plans.glob("TokenFileSource-part-*.plan"))) == 3


def test_a_kept_index_is_of_one_file_one_token_and_one_dtype(folder):
    """Files of one name, size and time are told apart by what is in them."""
    plans, found = folder / "plans", []
    for number in range(3):
        tokens = np.ones(5000, np.uint16)
        tokens[[10 * number + 3, 4000]] = END, END
        tokens.tofile(folder / "t.bin")
        os.utime(folder / "t.bin", (1, 1))
        found += [TokenFileSource(folder / "t.bin", np.uint16, end_token=END, plans=plans).lengths.tolist()]
    assert found == [[10 * number + 4, 3997 - 10 * number, 999] for number in range(3)]
    assert TokenFileSource(folder / "t.bin", np.uint16, start_token=END, plans=plans).lengths.tolist() == [
        23,
        3977,
        1000,
    ]
    assert len(TokenFileSource(folder / "t.bin", np.uint8, end_token=END, plans=plans)) == 5002


# Formats


def test_a_llm_c_file_has_a_header(folder):
    (folder / "gpt.bin").write_bytes(llm_c([7, 1, 2, 7, 3]))
    (folder / "llama.bin").write_bytes(llm_c([7, 1, 2, 70_000, 3], 20240801, 7, np.uint32))
    assert documents_of(TokenFileSource(folder / "gpt.bin", start_token=7)) == [[7, 1, 2], [7, 3]]
    llama = TokenFileSource(folder / "llama.bin")
    assert documents_of(llama) == [[7, 1, 2, 70_000, 3]]
    (folder / "cut.bin").write_bytes(llm_c([7, 1, 2])[:-2])
    with refuses(ValueError, "cut.bin", "3 tokens", "6 bytes", "4 are there"):
        TokenFileSource(folder / "cut.bin")


def test_npy_files_and_raw_files_that_are_called_so(folder):
    """OLMo's files are called .npy and have no header."""
    (folder / "both").mkdir()
    np.save(folder / "both" / "a.npy", np.array([1, 2, END, 3], np.uint32))
    np.array([4, END], np.uint32).tofile(folder / "both" / "b.npy")
    source = TokenFileSource(folder / "both", np.uint32, end_token=END)
    assert documents_of(source) == [[1, 2, END], [3], [4, END]]
    with refuses(ValueError, "TokenFileSource needs dtype=", "b.npy", "np.uint16"):
        TokenFileSource(folder / "both")
    with refuses(ValueError, "a.npy", "uint32", "dtype=", "uint16"):
        TokenFileSource(folder / "both", np.uint16)


@pytest.mark.parametrize(("dtype", "code"), [(np.uint16, 8), (np.int32, 4), (np.uint8, 1), (np.int64, 5)])
def test_megatron_documents_are_their_sequences(folder, dtype, code):
    documents = [[[1, 2, 3], [4]], [[5, 6]], [], [[7], [], [8, 9]]]
    path = megatron(folder / "corpus", documents, dtype, code)
    expected = [[token for sequence in document for token in sequence] for document in documents]
    for one_of_them in (path, path.with_suffix(".idx")):
        source = TokenFileSource(one_of_them)
        assert documents_of(source) == expected
    assert source[0]["tokens"].dtype == dtype
    assert len(source.stamps) == 2
    assert source.tokens.read(np.arange(9))["tokens"].tolist() == list(range(1, 10))


def test_a_megatron_pair_is_refused_where_it_is_ambiguous(folder):
    path = megatron(folder / "corpus", [[[1, 2]], [[3]]])
    with refuses(ValueError, "corpus.bin twice", "An .idx stands for its .bin"):
        TokenFileSource(str(folder / "corpus.*"))
    with refuses(ValueError, "corpus.idx", "Leave end_token= out"):
        TokenFileSource(path, end_token=3)
    with refuses(ValueError, "corpus.bin", "uint16", "dtype= that they are uint32"):
        TokenFileSource(path, np.uint32)


# Damage


def test_a_damaged_megatron_index_is_refused_or_read_as_megatron_reads_it(folder):
    documents = [[[1, 2, 3], [4]], [[5, 6]], [[7], [8, 9]]]
    path = megatron(folder / "corpus", documents)
    index, tokens = path.with_suffix(".idx").read_bytes(), path.read_bytes()
    refused = 0
    for copy in damaged(index, DAMAGES):
        path.with_suffix(".idx").write_bytes(copy)
        try:
            found = documents_of(TokenFileSource(path))
        except ValueError as error:
            refused += 1
            assert "TokenFileSource" in str(error) and "corpus." in str(error)
        else:
            assert found == megatron_oracle(copy, tokens)
    assert refused > DAMAGES // 2
    path.with_suffix(".idx").write_bytes(index)
    for copy in (tokens[:-1], tokens[:-2], tokens + b"\0\0", b""):
        path.write_bytes(copy)
        with refuses(ValueError, "corpus.bin", f"{len(copy)} are there"):
            TokenFileSource(path)


def test_a_damaged_npy_is_refused_or_read_as_numpy_reads_it(folder):
    stream = io.BytesIO()
    np.save(stream, np.arange(1, 20, dtype=np.uint16))
    data, path, refused = stream.getvalue(), folder / "tokens.npy", 0
    for copy in damaged(data, DAMAGES):
        path.write_bytes(copy)
        try:
            [found] = documents_of(TokenFileSource(path))
        except (ValueError, TypeError) as error:
            refused += 1
            assert "tokens.npy" in str(error)
        else:
            with contextlib.suppress(tokenize.TokenError):  # by which NumPy refuses odd spaces, from Python 3.12 on
                assert found == numpy_oracle(copy)
    assert refused > DAMAGES // 4


def test_a_damaged_llm_c_file_is_refused_or_read_as_it_is(folder):
    data, path = llm_c(np.arange(500)), folder / "tokens.bin"
    for copy in damaged(data, DAMAGES):
        path.write_bytes(copy)
        try:
            [found] = documents_of(TokenFileSource(path))
        except ValueError as error:
            assert "tokens.bin" in str(error)
        else:
            assert found == np.frombuffer(copy, np.uint16, 500, 1024).tolist()


def test_what_is_wrong_with_a_megatron_index_is_said(folder):
    path = megatron(folder / "corpus", [[[1, 2, 3]], [[4, 5]]])
    index = path.with_suffix(".idx")
    good = index.read_bytes()

    def changed(at: int, form: str, value: int) -> bytes:
        data = bytearray(good)
        struct.pack_into(form, data, at, value)
        return bytes(data)

    for data, words in (
        (b"TNTIDX\0\0" + good[8:], ["this with b'TNTIDX", "MMIDIDX", "move it away"]),
        (changed(9, "<Q", 2), ["version 2", "known are version 1"]),
        (changed(17, "<B", 7), ["dtype 7", "8 (<u2)"]),
        (changed(18, "<Q", 1 << 60), ["sequences", "need", "bytes"]),
        (good[:-1], ["need 82 bytes", "81 are there"]),
        (changed(38, "<i", -2), ["sequence 1 has -2 tokens"]),
        (changed(50, "<q", 4), ["sequence 1", "at byte 4", "ends at byte 6"]),
        (changed(74, "<q", 1), ["ends of documents do not rise from 0 to 2"]),
    ):
        index.write_bytes(data)
        with refuses(ValueError, "TokenFileSource", "corpus.idx", *words):
            TokenFileSource(path)


def test_what_is_not_a_token_file_is_refused(folder):
    np.save(folder / "grid.npy", np.zeros((2, 3), np.uint16))
    np.save(folder / "float.npy", np.zeros(3, np.float32))
    (folder / "odd.bin").write_bytes(b"abc")
    (folder / "empty.bin").write_bytes(b"")
    np.ones(4, np.uint16).tofile(folder / "short.bin")
    np.save(folder / "long.npy", np.ones(4, np.uint32))
    np.save(folder / "short.npy", np.ones(4, np.uint16))
    with refuses(ValueError, "one axis", "grid.npy", "(2, 3)"):
        TokenFileSource(folder / "grid.npy")
    with refuses(TypeError, "whole numbers", "float32", "float.npy"):
        TokenFileSource(folder / "float.npy")
    with refuses(ValueError, "odd.bin", "3 bytes are not a whole number of tokens of uint16"):
        TokenFileSource(folder / "odd.bin", np.uint16)
    with refuses(ValueError, "at least one token", "empty.bin has none"):
        TokenFileSource(folder / "empty.bin", np.uint16)
    with refuses(ValueError, "tokens of one dtype", "short.npy: uint16", "long.npy: uint32"):
        TokenFileSource([folder / "long.npy", folder / "short.npy"])
    with refuses(ValueError, "end_token= or start_token=, not both"):
        TokenFileSource(folder / "short.bin", np.uint16, end_token=1, start_token=1)
    with refuses(ValueError, "end_token", "70000", "uint16", "short.bin"):
        TokenFileSource(folder / "short.bin", np.uint16, end_token=70_000)
    with refuses(TypeError, "whole numbers", "float32 from dtype"):
        TokenFileSource(folder / "short.bin", np.float32)
    with refuses(FileNotFoundError, "TokenFileSource", "none.bin"):
        TokenFileSource(pathlib.Path("none.bin"), np.uint16)
