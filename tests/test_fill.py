"""Samples that a function writes into the memory of the batch: the same everywhere, never stale, in debug mode watched.

Functions that worker processes call are made inside functions, so that they travel by value and bring no JAX along.
"""

import gc
import io
import pathlib
import re
import subprocess
import sys
import warnings

import cloudpickle
import jax
import numpy as np
import pytest
from conftest import assert_trees_equal
from test_bad_input import refuses

import millstream as ms
from millstream.reading import reader
from millstream.sources.fill import FillSource

WORDS = ["oat", "rye", "barley", "wheat", "millet", "teff", "rice", "sorghum", "maize", "spelt", "fonio"]
SPEC = {"letters": ((8,), np.uint8), "length": ((), np.int64), "noise": ((2,), np.float32)}
EXECUTORS = [None, ms.Threads(2), ms.Processes(2)]
NOTHING = {"x": ((2,), np.float32)}


def word_filler():
    def fill(word, arrays, rng):
        arrays["letters"][: len(word)] = np.frombuffer(word.encode(), np.uint8)
        arrays["length"][...] = len(word)
        if rng is not None:
            arrays["noise"][:] = rng.random(2)
        if "e" in word:
            return {"word": word, "path": pathlib.Path("fields", word), "first": arrays["letters"][:1]}

    return fill


def word_source(**options):
    return FillSource(WORDS, word_filler(), SPEC, **options)


def loader_of(source, executor=None, size=4):
    return ms.DataLoader([source, ms.BatchTransform(size)], executor=executor)


def batches(loader, key, steps=None, step=0):
    return list(loader.iterate(loader.init_state(key, step), steps=steps, with_info=True))


def read(source, *indices):
    return source.read(np.array(indices))


@pytest.fixture(scope="module")
def runs():
    """Two epochs on every executor."""
    return [batches(loader_of(word_source(), executor), jax.random.key(7), 6) for executor in EXECUTORS]


def test_batches_are_the_same_on_every_executor(runs):
    for run in runs[1:]:
        for (batch, mask, _), (expected, expected_mask, _) in zip(run, runs[0], strict=True):
            assert_trees_equal(batch, expected)
            assert_trees_equal(mask, expected_mask)


def test_batches_hold_what_was_written(runs):
    for batch, mask, info in runs[0]:
        assert batch["length"].dtype == np.int32
        for row, index in enumerate(info.indices.tolist()):
            word = WORDS[index] if mask[row] else ""
            assert bytes(np.asarray(batch["letters"][row])) == word.encode().ljust(8, b"\0")
            assert int(batch["length"][row]) == len(word)


def test_what_fill_returns_travels_along(runs):
    for run in runs:
        for _, mask, info in run:
            expected = [WORDS[index] if real else None for index, real in zip(info.indices.tolist(), mask, strict=True)]
            assert info.items == expected
            told = [word if word is not None and "e" in word else None for word in expected]
            assert info.additional["word"] == told
            assert info.additional["path"] == [None if word is None else pathlib.Path("fields", word) for word in told]
            for word, first in zip(told, info.additional["first"], strict=True):
                assert first is None if word is None else bytes(first) == word[:1].encode()


def test_a_view_that_is_returned_is_copied():
    out = [np.empty((2, 3), np.float32)]
    returned = FillSource([0], lambda item, arrays, rng: {"view": arrays[:2]}, ((3,), np.float32)).read_row(
        0, out, 1, None
    )
    assert returned is not None
    assert not np.shares_memory(returned["view"], out[0])


def test_nothing_is_additional_where_nothing_is_returned(key):
    (_, _, info), *_ = batches(loader_of(FillSource([1, 2], lambda item, arrays, rng: None, NOTHING)), key)
    assert info.additional == {}


def noise_by_sample(run):
    return {
        (info.epoch, index): tuple(np.asarray(batch["noise"][row]).tolist())
        for batch, _, info in run
        for row, index in enumerate(info.indices.tolist())
        if index >= 0
    }


def test_random_numbers_belong_to_key_epoch_and_sample(runs, key):
    noise = noise_by_sample(runs[0])
    assert len(set(noise.values())) == len(noise) == 2 * len(WORDS)
    sequential = loader_of(word_source(ordering="sequential"), size=5)
    assert noise_by_sample(batches(sequential, key, 6)) == noise
    resumed = noise_by_sample(batches(sequential, key, 2, step=4))
    assert resumed.items() <= noise.items()
    other = noise_by_sample(batches(sequential, jax.random.key(8), 6))
    assert not set(other.values()) & set(noise.values())


@pytest.mark.parametrize("executor", [None, ms.Threads(2)], ids=str)
def test_there_are_no_random_numbers_unless_seeded(executor, key):
    seen = []
    source = FillSource(WORDS, lambda item, arrays, rng: seen.append(rng), NOTHING, seeded=False)
    assert len(batches(loader_of(source, executor), key)) == 3
    assert seen == [None] * len(WORDS)


def test_a_compiled_scan_sees_the_same_batches(runs, key):
    loader = loader_of(word_source())
    _, _, (scanned, masks) = loader.scan_epoch(
        loader.init_state(key), 0, lambda carry, batch, mask: (carry, (batch, mask))
    )
    for step, (batch, mask, _) in enumerate(runs[0][: loader.steps_per_epoch]):
        assert_trees_equal((jax.tree.map(lambda leaf, step=step: leaf[step], scanned), masks[step]), (batch, mask))


@pytest.mark.parametrize("executor", EXECUTORS, ids=str)
def test_stale_memory_is_never_seen(executor, key, monkeypatch):
    monkeypatch.setattr(reader, "_SLOW_SECONDS", -1.0)  # threads read even what is read in no time

    def make():
        def fill(item, arrays, rng):
            if item % 3:  # so that every row is written in some batches and not in others
                for leaf in arrays:
                    leaf[...] = 1

        return fill

    spec = [((40,), np.float32), ((), bool), ((3,), np.complex64)]
    loader = loader_of(FillSource(range(160), make(), spec, ordering="sequential"), executor, 8)
    for batch, _, info in loader.iterate(loader.init_state(key), steps=40, with_info=True):
        for leaf in batch:
            values, written = np.asarray(leaf).reshape(8, -1), info.indices % 3 > 0
            assert values[written].all()
            assert not values[~written].any()


def test_the_spec_can_be_structs_and_the_arrays_any_tree(key):
    def fill(item, arrays, rng):
        (pair, (low, high)), last = arrays
        pair["a"][()] = item
        low[...], high[:] = -item, [item, 2 * item]
        last += item
        arrays[1] += 0

    int32 = np.int32
    spec = [({"a": jax.ShapeDtypeStruct((), int32)}, (((), int32), ([2], "i4"))), ((), int32)]
    source = FillSource(np.arange(5), fill, spec)
    assert source.spec()[1] == jax.ShapeDtypeStruct((), int32)
    [(pair, (low, high)), last] = read(source, 3, 1)
    assert (pair["a"].tolist(), low.tolist(), high.tolist(), last.tolist()) == (
        [3, 1],
        [-3, -1],
        [[3, 6], [1, 2]],
        [3, 1],
    )
    alone = FillSource([5.0], lambda item, array, rng: array.fill(item), ((2,), np.float64))
    assert read(alone, 0).tolist() == [[5.0, 5.0]]
    assert read(alone, 0).dtype == np.float32


def test_debugging_names_what_is_left_unwritten_once(key):
    def fill(item, arrays, rng):
        arrays["image"][:2, :1] = 0  # zeros that are written are written
        arrays["label"][...] = rng.integers(9)

    spec = {"image": ((2, 3), np.int16), "label": ((), np.int32)}
    source = FillSource(range(4), fill, spec, ordering="sequential", debug=True)
    expected = batches(loader_of(FillSource(range(4), fill, spec, ordering="sequential")), key)
    with pytest.warns(UserWarning) as found:
        seen = batches(loader_of(source), key)
        batches(loader_of(source), key)
    assert_trees_equal(seen[0][0], expected[0][0])
    (warning,) = found
    assert re.fullmatch(  # whichever thread is first
        r"FillSource\(fill\): fill leaves elements of arrays\['image'\] unwritten \(4 of 6 at sample \d\). They are "
        "zeros. Write all of them; zeros too, if zeros are meant.",
        str(warning.message),
    )


def test_debugging_counts_elements_and_not_bytes():
    def fill(item, arrays, rng):
        arrays["x"][:3] = 0xA5
        arrays["x"][4] = 0

    source = FillSource([0], fill, {"x": ((6,), np.int32)}, debug=True)
    with pytest.warns(UserWarning, match=r"arrays\['x'\] unwritten \(2 of 6 at sample 0\)"):
        assert read(source, 0)["x"].tolist() == [[0xA5, 0xA5, 0xA5, 0, 0, 0]]


def keeps_the_array(kept, arrays):
    kept.append(arrays["x"])


def keeps_the_dict(kept, arrays):
    kept.append(arrays)


def keeps_a_slice_of_a_slice(kept, arrays):
    kept.append(arrays["x"][1:][::2])


def keeps_a_buffer(kept, arrays):
    kept.append(memoryview(arrays["x"]))


def keeps_only_the_last(kept, arrays):
    kept[:] = [arrays["x"]]


@pytest.mark.parametrize(
    "keep", [keeps_the_array, keeps_the_dict, keeps_a_slice_of_a_slice, keeps_a_buffer, keeps_only_the_last]
)
def test_debugging_names_views_that_are_kept_once(keep):
    kept = []

    def fill(item, arrays, rng):
        arrays["x"][:] = item
        keep(kept, arrays)

    source = FillSource([1.0, 2.0, 3.0], fill, {"x": ((5,), np.float32)}, debug=True)
    with pytest.warns(UserWarning) as found:
        assert read(source, 2, 0, 1)["x"][:, 0].tolist() == [3.0, 1.0, 2.0]
    (warning,) = found
    assert str(warning.message) == (
        "FillSource(fill): fill keeps a view of arrays['x'] after sample 2. Its memory is used again for another "
        "batch, whose values the view will then show. Keep a copy: np.copy."
    )


def test_debugging_is_content_with_copies_returned_views_and_garbage():
    kept = []

    def fill(item, arrays, rng):
        arrays["x"][:] = item
        kept.append(arrays["x"].copy())
        cycle = [arrays["x"]]
        cycle.append(cycle)  # pyright: ignore[reportArgumentType]
        return {"view": arrays["x"][:2]}

    gc.disable()
    try:
        assert read(FillSource([1.0, 2.0], fill, {"x": ((5,), np.float32)}, debug=True), 0, 1)["x"].shape == (2, 5)
    finally:
        gc.enable()


def test_debugging_works_in_threads_and_changes_no_batch(runs, key):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run = batches(loader_of(word_source(debug=True), ms.Threads(2)), key, 6)
    for (batch, _, info), (expected, _, expected_info) in zip(run, runs[0], strict=True):
        assert_trees_equal(batch, expected)
        assert info.additional["word"] == expected_info.additional["word"]
    assert len([each for each in found if "arrays['letters'] unwritten" in str(each.message)]) == 1
    assert len(found) == 1


class UnreadableError(Exception):
    """An error of a library, with arguments of its own."""

    def __init__(self, path, reason):
        super().__init__(path, reason)


@pytest.mark.parametrize("executor", [None, ms.Threads(2)], ids=str)
def test_an_error_of_fill_keeps_its_type_and_cause_and_gets_a_note(executor, key):
    def fill(item, arrays, rng):
        if item.startswith("w"):
            raise UnreadableError(item, "damp") from OSError("rain")

    loader = loader_of(FillSource([*WORDS[:5], "w" * 200], fill, NOTHING, ordering="sequential"), executor)
    note = "This came from FillSource(fill) at sample 3, item 'wheat' (str)."
    with pytest.raises(UnreadableError, match="damp") as caught:
        batches(loader, key)
    assert note in caught.value.__notes__
    assert isinstance(caught.value.__cause__, OSError)
    with refuses(UnreadableError, "at sample 5, item '" + "w" * 76 + "... (str)"):
        read(FillSource(["w" * 200] * 6, fill, NOTHING), 5)


def test_an_error_in_a_worker_process_names_sample_and_item(key):
    def make():
        def fill(item, arrays, rng):
            raise LookupError(f"no {item}; jax is loaded: {'jax' in sys.modules}")

        return fill

    loader = loader_of(FillSource(WORDS, make(), NOTHING, ordering="sequential"), ms.Processes(1))
    with refuses(
        LookupError, "no oat; jax is loaded: False", "This came from FillSource(fill) at sample 0, item 'oat' (str)."
    ):
        batches(loader, key)


def test_an_error_of_the_items_is_noted():
    class Torn(list):
        def __getitem__(self, index):
            raise OSError("torn page")

    with refuses(OSError, "torn page", "This came from items[2] of FillSource(fill)."):
        read(FillSource(Torn("abc"), word_filler(), SPEC), 2)


def test_stop_iteration_ends_no_loop():
    with refuses(RuntimeError, "a sample raised StopIteration", "at sample 1, item 4 (int)"):
        read(FillSource([3, 4], lambda item, arrays, rng: next(iter([])), NOTHING), 1)


def test_putting_another_array_in_place_of_the_given_one_is_refused():
    def fill(item, arrays, rng):
        arrays["x"] = np.ones(2)

    with refuses(
        TypeError,
        "FillSource(fill) needs fill to write into the arrays it is given. At sample 1 it put another value in the "
        "place of arrays['x']: shape (2,), float64. Write arrays['x'][...] = value.",
    ):
        read(FillSource([0, 1], fill, NOTHING), 1)
    with refuses(TypeError, "FillSource(<lambda>): what fill made of arrays at sample 0 does not match the structure"):
        read(FillSource([0], lambda item, arrays, rng: arrays.update(y=1), NOTHING), 0)


@pytest.mark.parametrize("returned", [3, [1], {1: "a"}, np.zeros(2)], ids=str)
def test_only_dicts_with_names_can_be_returned(returned):
    source = FillSource([0, 1], lambda item, arrays, rng: returned, NOTHING)
    with refuses(
        TypeError, "FillSource(<lambda>) needs fill to return None or a dict from names to plain values", "at sample 1"
    ):
        read(source, 1)


def test_only_plain_values_can_be_returned_also_in_threads(key):
    loader = loader_of(FillSource([0], lambda item, arrays, rng: {"file": io.StringIO()}, NOTHING), ms.Threads(1))
    with refuses(TypeError, "FillSource(<lambda>): at sample 0, fill can send back", "result['file']", "StringIO"):
        batches(loader, key)


def test_bad_arguments_are_refused_when_it_is_built():
    fill = word_filler()
    with refuses(TypeError, "FillSource needs items with a length and [index]", "iterator"):
        FillSource(iter(WORDS), fill, SPEC)  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "FillSource needs at least one item. Got list of length 0."):
        FillSource([], fill, SPEC)
    with refuses(TypeError, "FillSource needs fill to be a function. Got 3 (int)."):
        FillSource(WORDS, 3, SPEC)  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "FillSource needs ordering", "'random' (str)"):
        FillSource(WORDS, fill, SPEC, ordering="random")  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "FillSource needs readers to be an int from 1 to 4,096. Got 0 (int)."):
        FillSource(WORDS, fill, SPEC, readers=0)
    with refuses(TypeError, "FillSource needs seeded to be a bool. Got 7 (int)."):
        FillSource(WORDS, fill, SPEC, seeded=7)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("bad", [3, "uint8", ((3,), "uint9"), ((3,), None), (3, np.uint8), ((-1,), np.uint8)], ids=str)
def test_a_bad_spec_is_refused_when_it_is_built(bad):
    with refuses(
        TypeError, "FillSource needs spec to be a tree of jax.ShapeDtypeStruct or of (shape, dtype) pairs", "spec['x']"
    ):
        FillSource(WORDS, word_filler(), {"x": bad})


def test_an_empty_spec_and_a_spec_of_text_are_refused():
    with refuses(ValueError, "FillSource needs samples with at least one array. Got {} (dict)."):
        FillSource(WORDS, word_filler(), {})
    with refuses(TypeError, "FillSource needs arrays of numbers or bools"):
        FillSource(WORDS, word_filler(), {"x": ((3,), "U5")})


def test_it_is_unpickled_and_read_without_jax(tmp_path):
    file = tmp_path / "source"
    file.write_bytes(cloudpickle.dumps(word_source()))
    command = (
        "import pickle, sys, numpy as np; source = pickle.load(open(sys.argv[1], 'rb'));"
        "rows = source.read_keyed(np.array([2]), np.zeros((1, 2), np.uint32));"
        "assert rows['length'].tolist() == [6] and rows['noise'].all(), rows; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", command, str(file)], check=True)
