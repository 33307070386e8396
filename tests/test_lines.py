"""Lines of text and JSON, plain and packed: what is found, kept, and refused."""

import bz2
import gzip
import io
import json
import os
import pickle

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import zstandard
from conftest import assert_trees_equal
from damage import DAMAGES, damaged
from hypothesis import given, settings
from test_bad_input import refuses

import millstream as ms
from millstream.files import file_index, unpacked
from millstream.sources import lines
from millstream.sources.lines import JsonlSource, TextLinesSource

PACKED = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}


def text_oracle(data: bytes) -> list[str]:
    parts = data.split(b"\n")
    if not parts[-1]:
        parts.pop()
    parts[0] = parts[0].removeprefix(b"\xef\xbb\xbf")
    return [part.removesuffix(b"\r").decode() for part in parts]


def json_oracle(data: bytes) -> list[object]:
    return [json.loads(line) for line in data.decode("utf-8-sig").split("\n") if line not in ("", "\r")]


def all_of(source):
    return [source[index] for index in range(len(source))]


pieces = st.lists(st.sampled_from(["\n", "\r\n", "\r", "a", "ü", "\u2028", "x" * 9, "\ufeff"]), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(parts=st.lists(pieces, min_size=1, max_size=3), chunk=st.sampled_from([1, 2, 5, 1 << 20]))
def test_lines_are_those_of_a_split_at_line_ends(memory, parts, chunk):
    texts = ["".join(part).encode() for part in parts]
    paths = [memory / f"law-{number}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text)
    expected = [line for text in texts for line in text_oracle(text)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "chunks", lambda file, size=chunk: file_index.chunks(file, size=chunk))
        assert all_of(TextLinesSource(paths)) == expected


values = st.sampled_from(['{"x": 1}', "[1, 2.5]", "null", '"ü"', " 7 ", "", "\r", '{"a": "\\n"}'])


@settings(max_examples=80, deadline=None)
@given(found=st.lists(values, min_size=1, max_size=9), end=st.booleans(), chunk=st.sampled_from([1, 3, 1 << 20]))
def test_json_lines_are_those_of_a_loop_over_the_lines(memory, found, end, chunk):
    data = ("\n".join(found) + ("\n" if end or found[-1] == "\r" else "")).encode()
    path = memory / "law.jsonl"
    path.write_bytes(data)
    expected = json_oracle(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "chunks", lambda file, size=chunk: file_index.chunks(file, size=chunk))
        if not expected:
            with refuses(ValueError, "JsonlSource needs at least one line", "law.jsonl"):
                JsonlSource(path)
        else:
            assert all_of(JsonlSource(path)) == expected


@pytest.mark.parametrize("executor", [None, ms.Threads(2), ms.Processes(2)], ids=["none", "threads", "processes"])
def test_lines_of_several_packings_are_one_stream_on_every_executor(folder, key, executor):
    rows = [{"label": number, "score": number / 4} for number in range(30)]
    texts = ["\n".join(map(json.dumps, rows[first : first + 10])).encode() for first in (0, 10, 20)]
    (folder / "a.jsonl").write_bytes(texts[0])
    for name, text in (("b.jsonl.gz", texts[1]), ("c.jsonl.zst", texts[2])):
        (folder / name).write_bytes(PACKED[name[name.rindex(".") :]](text))
    source = JsonlSource(folder, plans=folder / "plans")
    data = {"label": np.arange(30), "score": np.arange(30) / 4}
    runs = []
    for one, runner in ((source, executor), (ms.HostArraySource(data), None)):
        with ms.DataLoader([one, ms.BatchTransform(8)], executor=runner) as loader:
            runs.append([jax.device_get(pair) for pair in loader.iterate(loader.init_state(key), steps=6)])
    assert_trees_equal(*runs)
    assert all_of(pickle.loads(pickle.dumps(source))) == rows


def test_samples_are_objects_until_a_function_makes_arrays(folder, key):
    (folder / "words.txt").write_text("oats\nrye\nbarley\nwheat\n")
    source = TextLinesSource(folder / "words.txt", ordering="sequential")
    assert source.spec() is None and source.read(np.array([2, 0])) == ["barley", "oats"]
    letters = source.map(lambda word: {"letters": np.int32(len(word))})
    loader = ms.DataLoader([letters, ms.BatchTransform(4)])
    batch, _ = next(loader.iterate(loader.init_state(key)))
    assert batch["letters"].tolist() == [4, 3, 6, 5]


# What is kept


def test_a_file_is_looked_through_and_unpacked_once(folder, monkeypatch):
    (folder / "a.txt.gz").write_bytes(gzip.compress(b"one\ntwo"))
    (folder / "b.txt").write_bytes(b"three")
    plans, scans = folder / "plans", []
    for module, name in ((lines, "_line_bounds"), (unpacked, "_plain")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, real=real, name=name: scans.append(name) or real(*given))
    for _ in range(2):
        assert all_of(TextLinesSource(str(folder / "*.txt*"), plans=plans)) == ["one", "two", "three"]
    # A generator is made to look through a file; the second time nothing is drawn from it.
    assert scans.count("_plain") == 1
    assert sorted(path.suffix for path in plans.iterdir()) == [".plan", ".plan", ".plan", ".unpacked"]


@pytest.mark.parametrize("harm", ["changed", "cut", "gone"])
def test_a_copy_that_was_written_to_is_made_again(folder, harm):
    (folder / "a.txt.gz").write_bytes(gzip.compress(b"one\ntwo\n"))
    assert len(TextLinesSource(folder / "a.txt.gz", plans=folder / "plans")) == 2
    [copy] = (folder / "plans").glob("*.unpacked")
    if harm == "gone":
        copy.unlink()
    else:
        copy.write_bytes(b"ONE\nTWO\n" if harm == "changed" else b"one\n")
    assert all_of(TextLinesSource(folder / "a.txt.gz", plans=folder / "plans")) == ["one", "two"]
    assert copy.read_bytes() == b"one\ntwo\n"


def test_a_file_that_was_replaced_has_a_new_index(folder):
    path, plans = folder / "a.txt", folder / "plans"
    for text in (b"one\ntwo\n", b"o\nnetwo\n", b"onetwo\n\n"):
        path.write_bytes(text)
        os.utime(path, (1, 1))  # of one size and time
        assert all_of(TextLinesSource(path, plans=plans)) == text_oracle(text)


def test_a_file_that_changes_while_it_is_read_is_noticed(folder):
    (folder / "a.txt").write_bytes(b"one\ntwo\n")
    source = TextLinesSource(folder / "a.txt")
    (folder / "a.txt").write_bytes(b"one and two\n")
    with refuses(ms.errors.FileChanged, "TextLinesSource", "a.txt", "at sample 1"):
        source.read(np.array([1]))


def test_a_packed_file_needs_a_folder(folder):
    for ending, pack in PACKED.items():
        (folder / f"a.txt{ending}").write_bytes(pack(b"one\n"))
        with refuses(ValueError, "TextLinesSource needs plans=", f"a.txt{ending}", "unpack it yourself"):
            TextLinesSource(folder / f"a.txt{ending}")
    (folder / "a.txt.bz2").write_bytes(bz2.compress(b"one\n"))
    with refuses(ValueError, "a.txt.bz2", "bzip2"):
        TextLinesSource(folder / "a.txt.bz2", plans=folder)


def test_joined_streams_and_zeros_after_them_are_read(folder):
    joined = gzip.compress(b"one\nt") + gzip.compress(b"wo\n") + bytes(20_000)
    (folder / "a.txt.gz").write_bytes(joined)
    frames = PACKED[".zst"](b"three\nf") + PACKED[".zst"](b"our")
    (folder / "b.txt.zst").write_bytes(frames)
    source = TextLinesSource(folder, plans=folder / "plans")
    assert all_of(source) == ["one", "two", "three", "four"]


def test_a_file_that_unpacks_to_far_too_much_is_refused(folder):
    for ending, pack in PACKED.items():
        (folder / f"bomb.txt{ending}").write_bytes(pack(bytes(40 << 20)))
        with refuses(ValueError, f"bomb.txt{ending}", "would unpack", "200 times"):
            TextLinesSource(folder / f"bomb.txt{ending}", plans=folder / "plans")
    assert not [path for path in (folder / "plans").iterdir() if path.suffix != ".plan"]


# What is wrong


def test_a_line_that_is_not_json_or_not_text_is_named(folder):
    path = folder / "a.jsonl"
    path.write_bytes(b'{"x": 1}\n\n{"x": 2\n{"x": "\xff"}\n[' + b"9" * 5000 + b"]\n" + b"[" * 100_000)
    source = JsonlSource(path)
    assert source[0] == {"x": 1}
    for index, words in (
        (1, ["a.jsonl, line 3, character 9", "Expecting ',' delimiter"]),
        (2, ["a.jsonl, line 4, byte 8 is not text in UTF-8"]),
        (3, ["a.jsonl, line 5 cannot be read as JSON", "4300"]),
        (4, ["a.jsonl, line 6 cannot be read as JSON"]),
    ):
        with refuses(ValueError, *words, f"This came from JsonlSource at sample {index}."):
            source[index]
    path.write_bytes(b"no JSON\n" * 9)
    with refuses(ValueError, "a.jsonl, line 1, character 1"):
        JsonlSource(path)


def test_the_place_in_a_packed_file_is_that_of_the_user(folder):
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b"1\n2\n3\nx\n"))
    with refuses(ValueError, "a.jsonl.gz, line 4"):
        JsonlSource(folder / "a.jsonl.gz", plans=folder / "plans")[3]


def test_one_bad_line_can_be_left_out(folder, key):
    (folder / "a.jsonl").write_text('{"x": 0}\n{"x": 1}\nbad\n{"x": 3}\n')
    source = JsonlSource(folder / "a.jsonl", ordering="sequential")
    with ms.DataLoader([source, ms.BatchTransform(4)], on_error="skip item") as loader:
        batch, mask = next(loader.iterate(loader.init_state(key)))
    assert mask.tolist() == [True, True, False, True] and batch["x"].tolist() == [0, 1, 0, 3]


def test_nothing_to_read_is_refused(folder):
    (folder / "empty.txt").write_bytes(b"")
    (folder / "blank.jsonl").write_bytes(b"\n\r\n\n")
    for make, name in ((TextLinesSource, "empty.txt"), (JsonlSource, "blank.jsonl")):
        with refuses(ValueError, make.__name__, "at least one line", name):
            make(folder / name)
    with refuses(FileNotFoundError, "JsonlSource", "none.jsonl"):
        JsonlSource("none.jsonl")
    with refuses(TypeError, "TextLinesSource needs plans to be a folder", "7"):
        TextLinesSource(folder / "empty.txt", plans=7)  # pyright: ignore[reportArgumentType]


# Damage


def test_whatever_becomes_of_a_plain_file_is_read_as_it_is_or_refused(folder):
    data, path = "\n".join(f'{{"x": {number}, "ü": "é"}}' for number in range(30)).encode(), folder / "a.jsonl"
    for copy in damaged(data, DAMAGES):
        path.write_bytes(copy)
        expected = [line for line in copy.split(b"\n") if line not in (b"", b"\r")]
        try:
            source = JsonlSource(path)
        except ValueError as error:
            assert "a.jsonl" in str(error)
            continue
        assert len(source) == len(expected)
        for index, line in enumerate(expected):
            try:
                found = source[index]
            except ValueError as error:
                assert "a.jsonl, line" in str(error)
                with pytest.raises((ValueError, RecursionError)):
                    json.loads(line.decode())
            else:
                assert found == json.loads(line.decode())


@pytest.mark.parametrize("ending", PACKED)
def test_a_damaged_packed_file_is_refused_or_gives_what_was_in_it(folder, ending):
    stream = io.StringIO()
    for number in range(200):
        stream.write(f"line {number} of {number * number}\n")
    data, path, refused = PACKED[ending](stream.getvalue().encode()), folder / f"a.txt{ending}", 0
    expected = stream.getvalue().splitlines()
    for number, copy in enumerate(damaged(data, DAMAGES)):
        path.write_bytes(copy)
        try:
            found = all_of(TextLinesSource(path, plans=folder / f"plans-{number}"))
        except ValueError as error:
            refused += 1
            assert f"a.txt{ending}" in str(error)
        else:
            assert found == expected
    assert refused > DAMAGES * 3 // 4
