"""Windows and flat_map: several samples as one, one as several. Every one is compared with lists and loops."""

import functools
import os
import re
import subprocess
import sys
import textwrap
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from conftest import CACHE, assert_trees_equal
from hypothesis import given, settings
from test_views import BATCH, N, arrays, dataset

import millstream as ms
from millstream.plan.selection import Selection, expanded
from millstream.plan.windows import Window, window_starts


def cut(rows, length, stride, step=1, sizes=None, end="drop"):
    """Windows of a list, with None for padding."""
    found, first = [], 0
    for size in [len(rows)] if sizes is None else sizes:
        group = rows[first : first + size]
        for start in range(0, size, stride):
            taken = group[start : start + (length - 1) * step + 1 : step]
            if len(taken) == length or end == "pad":
                found.append(taken + [None] * (length - len(taken)))
        first += size
    return found


# Nested views: how a view is made of a source, and what it makes of a list.


def slices(start, stop, step):
    return lambda source: source[start:stop:step], lambda known: known[start:stop:step]


def chosen(picks):
    return (
        lambda source: source[[pick % len(source) for pick in picks]],
        lambda known: [known[pick % len(known)] for pick in picks],
    )


def masked(bits):
    def keep(length):
        return [bits[i % len(bits)] for i in range(length)]

    return lambda source: source[np.array(keep(len(source)))], lambda known: [
        index for index, kept in zip(known, keep(len(known)), strict=True) if kept
    ]


def repeated(times):
    return lambda source: ms.views.repeat(source, times), lambda known: known * times


def doubled_back():
    return (
        lambda source: ms.views.concat(source, source[::-1], source[:3]),
        lambda known: [*known, *known[::-1], *known[:3]],
    )


def windowed(length, stride, step):
    return (
        lambda source: ms.views.windows(source, length, stride=stride, step=step),
        lambda known: cut(known, length, stride or length * step, step),
    )


def multiplied(counts):
    def of(length):
        return [counts[i % len(counts)] for i in range(length)]

    return lambda source: ms.views.flat_map(source, of(len(source))), lambda known: [
        item for item, times in zip(known, of(len(known)), strict=True) for _ in range(times)
    ]


LINKS = st.one_of(
    st.builds(windowed, st.integers(1, 5), st.none() | st.integers(1, 7), st.integers(1, 3)),
    st.builds(multiplied, st.lists(st.integers(0, 3), min_size=1, max_size=5)),
    st.builds(slices, st.none() | st.integers(-5, 5), st.none() | st.integers(-5, 40), st.sampled_from([1, 2, -1, -3])),
    st.builds(chosen, st.lists(st.integers(0, 100), min_size=1, max_size=12)),
    st.builds(masked, st.lists(st.booleans(), min_size=1, max_size=9).filter(any)),
    st.builds(repeated, st.integers(1, 3)),
    st.builds(doubled_back),
)
EMPTY = r"is empty|nothing is selected|rows in sequence|all counts are zero"


@settings(max_examples=150)
@given(links=st.lists(LINKS, min_size=1, max_size=4), on_host=st.booleans())
def test_nested_windows_are_what_lists_and_loops_make(links, on_host):
    source, known = dataset() if on_host else arrays(), list(range(N))
    for view, oracle in links:
        after = oracle(known)
        if not after:
            with pytest.raises(ValueError, match=EMPTY):
                view(source)
            return
        source, known = view(source), after
    assert len(source) == len(known)
    assert source.read(np.arange(len(known)))["x"].tolist() == known
    assert source.spec()["x"].shape == np.shape(known[0])
    assert source[len(known) - 1]["x"].tolist() == known[-1]


SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)


@settings(max_examples=150)
@given(
    sizes=SIZES,
    length=st.integers(1, 5),
    stride=st.integers(1, 6),
    step=st.integers(1, 3),
    end=st.sampled_from(["drop", "pad"]),
    given_as=st.sampled_from(["counts", "array", "field", "function"]),
    on_host=st.booleans(),
)
def test_windows_stay_in_their_groups(sizes, length, stride, step, end, given_as, on_host):
    x, group = np.arange(sum(sizes), dtype=np.int32), np.repeat(np.arange(len(sizes), dtype=np.int32) * 7 % 11, sizes)
    data = {"x": x, "z": np.stack([x, -x], 1), "group": group}
    source = ms.HostArraySource(data, "sequential") if on_host else ms.ArraySampleSource(data, "sequential")
    alone = {
        "counts": {"counts": sizes},
        "array": {"groups": group},
        "field": {"groups": "group"},
        "function": {"groups": lambda sample: int(sample["group"])},
    }[given_as]
    known = cut(x.tolist(), length, stride, step, sizes, end)
    make = functools.partial(
        ms.views.windows, source, length, stride=stride, step=step, end=end, mask_key="real", **alone
    )
    if not known:
        with pytest.raises(ValueError, match=EMPTY):
            make()
        return
    view = make()
    found = view.read(np.arange(len(view)))
    filled = [[0 if row is None else row for row in rows] for rows in known]
    assert found["x"].tolist() == filled
    assert found["z"].tolist() == [[[row, -row] for row in rows] for rows in filled]
    if end == "pad":
        assert found["real"].tolist() == [[row is not None for row in rows] for rows in known]
    else:
        assert "real" not in found


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), end=st.sampled_from(["drop", "pad"]))
def test_the_rows_of_windows_are_the_same_in_a_compiled_program(seed, end):
    """Groups differ, and shapes do not."""
    random = np.random.default_rng(seed)
    ends = np.sort(random.choice(np.arange(1, 60), 7, replace=False))
    sizes = np.diff(np.array([0, *ends, 60]))
    window = Window(3, 2, "mask" if end == "pad" else None)
    function, table = window_starts(window, 2, np.cumsum(sizes) - sizes, sizes, "")
    positions = random.integers(0, function.length, 32).astype(np.uint32)
    padded = np.zeros((2, 8), table.dtype) + np.array([[2**31], [0]], table.dtype)
    padded[:, : table.shape[1]] = table  # one shape for all, as programs are compiled by shape
    ends_of = None if end == "drop" else np.cumsum(sizes)
    expected, real = window.rows(np, function.locate(np, table, NONE, NONE, positions.astype(np.uint64)), ends_of)
    found, traced_real = _rows_in_graph(padded, positions, None if ends_of is None else ends_of.astype(np.uint32))
    assert np.asarray(found).tolist() == expected.tolist()
    assert_trees_equal(jax.device_get(traced_real), real)


NONE: Any = None


@jax.jit
def _rows_in_graph(table, positions, ends):
    window = Window(3, 2, None if ends is None else "mask")
    function, _ = window_starts(window, 2, np.array([0]), np.array([60]), "")
    starts = Selection((function,)).locate(jax.numpy, (table,), NONE, NONE, positions)
    return window.rows(jax.numpy, starts, ends)


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6))
def test_counts_are_looked_up_the_same_in_a_compiled_program(seed):
    random = np.random.default_rng(seed)
    counts = random.integers(0, 4, 50)
    function, table = expanded(counts)
    expected = np.repeat(np.arange(50), counts)
    positions = random.integers(0, len(expected), 32).astype(np.uint32)
    assert function.locate(np, table, NONE, NONE, positions).tolist() == expected[positions].tolist()
    assert _expanded_in_graph(table, positions).tolist() == expected[positions].tolist()


@jax.jit
def _expanded_in_graph(table, positions):
    return expanded(np.array([1]))[0].locate(jax.numpy, table, NONE, NONE, positions)


# The same batches everywhere


SIZES_OF_N = [9, 2, 14, 12]
VIEWS = {
    "overlapping": lambda source: ms.views.windows(source, 4, stride=1),
    "every second row, in groups": lambda source: ms.views.windows(source, 3, stride=1, step=2, counts=SIZES_OF_N),
    "padded": lambda source: ms.views.windows(source, 5, stride=3, counts=SIZES_OF_N, end="pad"),
    "over a view": lambda source: ms.views.windows(source[[*range(30, 3, -2), *range(9)]], 3, stride=1),
    "padded, over a view": lambda source: ms.views.windows(source[::-1], 5, stride=2, end="pad"),
    "views of windows": lambda source: ms.views.repeat(ms.views.windows(source[1:], 3, stride=1)[::2], 2)[3:],
    "weighted windows": lambda source: ms.views.weighted(ms.views.windows(source, 4), np.arange(9), samples=20),
    "windows of windows": lambda source: ms.views.windows(ms.views.windows(source, 3, stride=2), 2, stride=1),
    "repeated by counts": lambda source: ms.views.flat_map(source, np.arange(N) % 3),
}
# Workers take a while to start, and read all of them by one piece of code.
IN_WORKERS = ["padded", "padded, over a view", "windows of windows"]


@pytest.mark.parametrize("name", VIEWS)
def test_windows_give_the_same_batches_wherever_they_are_read(name, key):
    make, steps = VIEWS[name], 6
    stages = [ms.RandomMapTransform(_noisy), ms.BatchTransform(BATCH)]
    loader = ms.DataLoader([make(arrays("shuffle")), *stages])
    assert loader.pipeline.host is None  # gathered in the program
    expected = [jax.device_get(pair) for pair in loader.iterate(loader.init_state(key), steps=steps)]
    ways = [
        ms.DataLoader([make(arrays("shuffle")), *stages], executor=ms.Threads(2)),
        ms.DataLoader([make(dataset("shuffle")), *stages]),
    ]
    if name in IN_WORKERS:
        ways.append(ms.DataLoader([make(dataset("shuffle")), *stages], executor=ms.Processes(1)))
    for way in ways:
        found = [jax.device_get(pair) for pair in way.iterate(way.init_state(key), steps=steps)]
        assert_trees_equal(found, expected)
        batches = way.iterate(loader.init_state(key, step=3), steps=1)  # a state of one is a state of all
        assert_trees_equal(jax.device_get(next(batches)), expected[3])
        batches.close()
    state = loader.init_state(key)
    for pair in expected:
        batch, state, mask = jax.jit(_draw)(loader, state)
        assert_trees_equal(jax.device_get((batch, mask)), pair)
    for step in range(steps):
        batch, _, mask = loader.next_batch(loader.init_state(key, step=step))
        assert_trees_equal(jax.device_get((batch, mask)), expected[step])
    _, _, scanned = loader.scan_epoch(loader.init_state(key), None, _collect)
    for step in range(min(steps, loader.steps_per_epoch)):
        assert_trees_equal(jax.tree.map(lambda leaf, step=step: np.asarray(leaf[step]), scanned), expected[step])


def _noisy(value, mask, key):
    return {**value, "noise": jax.random.bits(key, (2,))}


def _draw(loader, state):
    return loader.next_batch(state)


def _collect(carry, batch, mask):
    return carry, (batch, mask)


@pytest.mark.parametrize("name", VIEWS)
def test_batches_hold_what_the_view_reads(name, key):
    view = VIEWS[name](arrays("shuffle"))
    loader = ms.DataLoader([view, ms.BatchTransform(BATCH, drop_last=True)])
    for batch, _, info in loader.iterate(loader.init_state(key), steps=2, with_info=True):
        if not view.selection.is_keyed:
            assert_trees_equal(view.read(info.positions), jax.device_get(batch))
        assert_trees_equal(view.source.read(info.indices), jax.device_get(batch))


def test_windows_over_eight_devices_give_the_same_batches():
    script = """
        import jax, numpy as np, millstream as ms
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        data = {"x": np.arange(300, dtype=np.int32)}
        total = lambda carry, batch, mask: (carry + (batch["x"] * mask[:, None]).sum(), None)
        for source in (ms.ArraySampleSource(data), ms.HostArraySource(data)):
            views = ms.views.windows(source, 4, stride=3), ms.views.windows(source[::-1], 5, stride=4, end="pad")
            for view in views:
                key, stages = jax.random.key(0), [view, ms.BatchTransform(16)]
                plain, over = ms.DataLoader(stages), ms.DataLoader(stages, sharding=mesh)
                runs = [loader.iterate(loader.init_state(key), steps=8) for loader in (plain, over)]
                for one, two in zip(*runs, strict=True):
                    jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(two))
                sums = [loader.scan_epoch(loader.init_state(key), np.int32(0), total)[1] for loader in (plain, over)]
                assert int(sums[0]) == int(sums[1])
    """
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", **CACHE}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env={**os.environ, **environment})


def test_a_stream_of_windows_continues_at_every_step(key):
    view = VIEWS["padded"](arrays("shuffle"))
    loader = ms.DataLoader([view, ms.BatchTransform(4, pad_last_batch=False)])
    host = loader.replace(executor=ms.Threads(2))
    expected = [jax.device_get(pair) for pair in loader.iterate(loader.init_state(key), steps=7)]
    for step in range(7):
        batches = host.iterate(host.init_state(key), steps=0)
        iterator = loader.iterate(loader.init_state(key), steps=7)
        for _ in range(step):
            next(iterator)
        batches.set_state(iterator.get_state())
        assert_trees_equal(jax.device_get(next(batches)), expected[step])
        batches.close()


def test_windows_over_views_of_equal_length_share_their_programs(key, count_compilations):
    one = ms.DataLoader([ms.views.windows(arrays()[[1, 2, 3, 4, 5, 6]], 2), ms.BatchTransform(3)])
    next(one.iterate(one.init_state(key)))
    with count_compilations() as compiled:
        two = ms.DataLoader([ms.views.windows(arrays()[[6, 5, 4, 3, 2, 30]], 2), ms.BatchTransform(3)])
        batch, _ = next(two.iterate(two.init_state(key)))
    assert compiled == [0]
    assert batch["x"].tolist() == [[6, 5], [4, 3], [2, 30]]


def test_only_the_starts_of_windows_are_planned():
    loader = ms.DataLoader([ms.views.windows(arrays(), 8, stride=1), ms.BatchTransform(5)])
    assert loader.pipeline.coordinates.size == 5


class Counting(ms.sources.HostSource):
    """Two thousand million rows that are their own numbers, and how they were asked for."""

    ordering = "shuffle"
    sample_spec = ms.sources.spec_of("Counting", {"x": np.uint32(0)})

    def __init__(self, length=2_000_000_000):
        self.length, self.asked = length, []

    def __len__(self):
        return self.length

    def read_rows(self, indices, out, keys=None):
        self.asked.append(indices.copy())
        out[0][...] = indices


def test_a_thousand_million_windows_need_no_table(key):
    source = Counting()
    view = ms.views.windows(source, 6, stride=1)
    assert len(view) == 1_999_999_995
    assert view[len(view) - 1]["x"].tolist() == list(range(1_999_999_994, 2_000_000_000))
    assert sum(np.asarray(table).nbytes for table in view.selection.tables) < 100
    loader = ms.DataLoader([view, ms.BatchTransform(4)])
    step = loader.steps_per_epoch - 1
    batch, mask, info = next(loader.iterate(loader.init_state(key, step=step), steps=1, with_info=True))
    rows = info.indices[:, None] + np.arange(6)
    assert np.asarray(batch["x"])[mask].tolist() == rows[np.asarray(mask)].tolist()


def test_rows_of_a_batch_are_read_by_one_call_and_padding_not_at_all(key):
    source = Counting(10)
    view = ms.views.windows(source, 4, counts=[6, 4], end="pad")
    source.asked.clear()
    found = view.read(np.arange(3))
    assert [asked.tolist() for asked in source.asked] == [list(range(10))]
    assert found["x"].tolist() == [[0, 1, 2, 3], [4, 5, 0, 0], [6, 7, 8, 9]]
    apart = {"x": np.full((3, 8), 99, np.uint32)[:, ::2], "mask": np.ones((3, 4), bool)}  # memory with gaps
    view.read(np.arange(3), apart)
    assert_trees_equal(apart, found)


def test_files_and_workers_give_the_same_windows(tmp_path, key):
    tokens = np.random.default_rng(0).integers(0, 1000, 500).astype(np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)
    view = ms.views.windows(ms.NpySource(tmp_path / "tokens.npy"), 9, stride=1)
    stages = [ms.MapTransform(lambda value, mask: (value[:-1], value[1:])), ms.BatchTransform(16)]
    for executor in (None, ms.Processes(1)):
        loader = ms.DataLoader([view, *stages], executor=executor)
        (x, y), _, info = next(loader.iterate(loader.init_state(key), steps=1, with_info=True))
        rows = info.indices[:, None] + np.arange(9)
        assert np.asarray(x).tolist() == tokens[rows[:, :-1]].tolist()
        assert np.asarray(y).tolist() == tokens[rows[:, 1:]].tolist()
        loader.close()


def _fill(item, out, rng):
    out["x"][...] = item
    out["noise"][...] = rng.random()


def test_rows_that_are_drawn_at_random_are_the_same_everywhere(key):
    spec = {"x": ((), np.int32), "noise": ((), np.float32)}
    view = ms.views.windows(ms.sources.FillSource(list(range(20)), _fill, spec), 3, stride=1, end="pad")
    batches = []
    for executor in (None, ms.Threads(3), ms.Processes(1)):
        loader = ms.DataLoader([view, ms.BatchTransform(20)], executor=executor)
        batches.append(jax.device_get(next(loader.iterate(loader.init_state(key), steps=1))[0]))
        loader.close()
    assert_trees_equal(batches[0], batches[1])
    assert_trees_equal(batches[0], batches[2])
    drawn = batches[0]["noise"][batches[0]["mask"]].tolist()
    assert len(set(drawn)) == len(drawn)  # a row is drawn anew in each of its windows


def test_a_row_that_cannot_be_read_takes_its_windows_along(key):
    def read(index):
        if index == 10:
            raise OSError("cannot read it")
        return {"x": np.int32(index)}

    view = ms.views.windows(ms.DiskSampleSource(20, read, ordering="sequential"), 3, stride=2)
    loader = ms.DataLoader([view, ms.BatchTransform(9)], on_error="skip item", executor=ms.Threads(2))
    batch, mask = next(loader.iterate(loader.init_state(key)))
    windows = cut(list(range(20)), 3, 2)
    assert np.asarray(mask).tolist() == [10 not in rows for rows in windows]
    assert np.asarray(batch["x"])[mask].tolist() == [rows for rows in windows if 10 not in rows]


def test_functions_on_the_host_get_whole_windows(key):
    def total(sample):
        return {"total": sample["x"].sum(), "first": sample["x"][0]}

    for source in (arrays(), dataset()):
        loader = ms.DataLoader([ms.views.windows(source, 4), ms.HostMapTransform(total), ms.BatchTransform(9)])
        batch, _ = next(loader.iterate(loader.init_state(key)))
        assert batch["total"].tolist() == [sum(rows) for rows in cut(list(range(N)), 4, 4)]


def test_workers_read_windows_of_arrays_without_jax(key):
    def doubled(sample, number):  # a function of a module would have workers load all that this one does
        return {"x": sample["x"] * 2}

    def looking(sample):
        return {**sample, "loaded": np.bool_("jax" in sys.modules)}

    for view in (ms.views.windows(arrays()[::2], 3), ms.views.flat_map(arrays()[::2], np.ones(19, int), doubled)):
        jax.block_until_ready(view.source.arrays)
        stages = [ms.HostMapTransform(looking), ms.BatchTransform(6)]
        with ms.DataLoader([view, *stages], executor=ms.Processes(1)) as loader:
            batch, _ = next(loader.iterate(loader.init_state(key), steps=1))
        assert not batch["loaded"].any()


# Parts


@given(seed=st.integers(0, 10**6), stride=st.integers(1, 4))
def test_parts_of_windows_have_no_row_in_common(seed, stride):
    sizes = np.random.default_rng(seed).integers(1, 9, 12)
    x = np.arange(sizes.sum(), dtype=np.int32)
    view = ms.views.windows(ms.ArraySampleSource({"x": x}), 3, stride=stride, counts=sizes, end="pad")
    parts = ms.views.split(view, {"train": 0.5, "test": 0.5}, seed=seed % 7)
    rows = []
    for part in parts:
        found = part.read(np.arange(len(part)))
        rows.append(set(found["x"][found["mask"]].tolist()))
    assert not rows[0] & rows[1]
    assert sum(map(len, parts)) == len(view)


def test_parts_of_flat_mapped_samples_have_no_sample_in_common():
    view = ms.views.flat_map(arrays(), np.full(N, 3), _numbered)
    train, test = ms.views.split(view, {"train": 0.5, "test": 0.5})
    found = [set((part.read(np.arange(len(part)))["whole"]).tolist()) for part in (train, test)]
    assert not found[0] & found[1] and len(found[0] | found[1]) == N
    assert {len(part) % 3 for part in (train, test)} == {0}
    same = ms.views.split(arrays(), {"train": 0.5, "test": 0.5})[0]
    assert found[0] == set(same.locate(np.arange(len(same))).tolist())  # as the source itself is divided


def _numbered(sample, number):
    return {"whole": sample["x"], "number": np.int32(number)}


# flat_map


def _halves(sample, number):
    return {"half": sample["x"][number * 2 : number * 2 + 2]}


@settings(max_examples=40)
@given(
    counts=st.lists(st.integers(0, 4), min_size=N, max_size=N).filter(any),
    picks=st.none() | st.lists(st.integers(0, 1000), min_size=1, max_size=9),
    of_view=st.booleans(),
)
def test_every_sample_becomes_as_many_as_its_count(counts, picks, of_view):
    source = arrays()[::-1] if of_view else arrays()
    wholes = list(range(N))[::-1] if of_view else list(range(N))
    known = [(whole, number) for whole, count in zip(wholes, counts, strict=True) for number in range(count)]
    view: Any = ms.views.flat_map(source, counts, _numbered)
    if picks is not None:
        picks = [pick % len(known) for pick in picks]
        view, known = view[picks], [known[pick] for pick in picks]
    found = view.read(np.arange(len(view)))
    assert list(zip(found["whole"].tolist(), found["number"].tolist(), strict=True)) == known


def test_counts_are_an_array_a_field_or_a_function(key):
    x = [np.arange(2 * size, dtype=np.float32) for size in (3, 0, 1, 2)]
    source = ms.DatasetSource([{"x": row, "n": np.int32(len(row) // 2)} for row in x], "sequential")
    expected = [row[2 * number : 2 * number + 2].tolist() for row in x for number in range(len(row) // 2)]
    for counts in ([3, 0, 1, 2], "n", lambda sample: len(sample["x"]) // 2):
        view = ms.views.flat_map(source, counts, _halves)
        assert view.read(np.arange(6))["half"].tolist() == expected


def test_flat_mapped_samples_are_the_same_wherever_they_are_made(key):
    view = ms.views.flat_map(arrays("shuffle")[3:30], np.arange(27) % 4, _numbered)
    stages = [ms.RandomMapTransform(_noisy), ms.BatchTransform(BATCH)]
    batches = []
    for executor in (None, ms.Threads(2), ms.Processes(1)):
        loader = ms.DataLoader([view, *stages], executor=executor)
        batches.append([jax.device_get(pair) for pair in loader.iterate(loader.init_state(key), steps=7)])
        loader.close()
    assert_trees_equal(batches[0], batches[1])
    assert_trees_equal(batches[0], batches[2])
    loader = ms.DataLoader([view, *stages])
    for step in range(7):
        batch, _, mask = loader.next_batch(loader.init_state(key, step=step))
        assert_trees_equal(jax.device_get((batch, mask)), batches[0][step])


def test_what_flat_map_raises_names_the_sample():
    def fails(sample, number):
        if sample["x"] == 5 and number == 1:
            raise OSError("no such part")
        return sample

    view = ms.views.flat_map(arrays(), np.full(N, 2), fails)
    with pytest.raises(OSError) as caught:
        view.read(np.arange(len(view)))
    assert "This came from flat_map(fails) at sample 5, number 1." in caught.value.__notes__


# What is said


def test_a_state_of_different_windows_is_refused_by_name(key):
    def loader(view):
        return ms.DataLoader([view, ms.BatchTransform(2)])

    rows = arrays()
    one = loader(ms.views.windows(rows[:32], 4, counts=[16, 16]))
    others = {
        r"\[0:32\]": ms.views.windows(rows[:32], 4, counts=[12, 20]),
        r"\[1:33\]": ms.views.windows(rows[1:33], 4, counts=[16, 16]),
    }
    is_8 = r"8 windows of 4 rows, stride 4 \(\w{12}\) of"
    for of, view in others.items():
        with pytest.raises(ValueError, match=rf"differ in\n  view: {is_8} \[0:32\] in the state, {is_8} {of} here"):
            loader(view).next_batch(one.init_state(key))
    flat = [loader(ms.views.flat_map(rows, np.full(N, 2), fn)) for fn in (_numbered, lambda s, n: _numbered(s, n))]
    with pytest.raises(
        ValueError, match=r"through flat_map\(_numbered\) in the state, .* through flat_map\(<lambda>\)"
    ):
        flat[1].next_batch(flat[0].init_state(key))


def test_windows_say_what_they_are():
    view = ms.views.windows(arrays(), 4, stride=2, step=3, end="pad")
    text = r"View\(19 samples: 19 windows of 4 rows, step 3, stride 2, padded \(\w{12}\) of ArraySampleSource\)"
    assert re.fullmatch(text, repr(view))
    loader = ms.DataLoader([view, ms.BatchTransform(2)])
    plan = dict(loader.explain().plan)
    assert re.fullmatch(r"19 windows of 4 rows, step 3, stride 2, padded \(\w{12}\) of 37", plan["view"])
    assert repr(loader).startswith("DataLoader(ArraySampleSource(19 samples) -> ")
    flat = ms.views.flat_map(arrays(), np.full(N, 2), _numbered)
    text = r"View\(74 samples: 74 by counts \(\w{12}\) through flat_map\(_numbered\) of ArraySampleSource\)"
    assert re.fullmatch(text, repr(flat))


def test_verify_proves_windows():
    view = VIEWS["padded, over a view"](arrays("shuffle"))
    loader = ms.DataLoader([view, ms.RandomMapTransform(_noisy), ms.BatchTransform(4)])
    assert loader.verify(executors=[ms.InGraph(), ms.Threads(2)], hosts=[1, 2, 4], progress=False).ok


def test_verify_proves_flat_mapped_samples():
    view = ms.views.flat_map(dataset("shuffle"), np.arange(N) % 3, _numbered)
    loader = ms.DataLoader([view, ms.BatchTransform(4)])
    assert loader.verify(executors=[ms.Threads(2)], hosts=[1, 2], progress=False).ok


# What is refused


_STREAM: Any = ms.BatchTransform(2)(arrays())
_ANY: Any = None
_LIST: Any = [1, 2]
_FLOAT: Any = 2.5
_OF_ONE: Any = lambda sample: sample  # noqa: E731


def _weighted() -> Any:
    return ms.views.weighted(arrays(), np.ones(N))


WRONG = {
    "a stream": (
        lambda: ms.views.windows(_STREAM, 2),
        TypeError,
        "windows needs a source.*A stream has no samples to choose from",
    ),
    "a list": (lambda: ms.views.flat_map(_LIST, [1, 1]), TypeError, "flat_map needs a source.*ms.DatasetSource"),
    "no length": (
        lambda: ms.views.windows(arrays(), 0),
        ValueError,
        "windows needs length to be an int from 1 .* Got 0",
    ),
    "a float": (lambda: ms.views.windows(arrays(), _FLOAT), ValueError, "windows needs length to be an int .* Got 2.5"),
    "no stride": (
        lambda: ms.views.windows(arrays(), 2, stride=0),
        ValueError,
        "windows needs stride to be an int from 1 to .* Got 0",
    ),
    "a negative step": (lambda: ms.views.windows(arrays(), 2, step=-1), ValueError, "windows needs step to be an int"),
    "an end": (
        lambda: ms.views.windows(arrays(), 2, end=_ANY),
        ValueError,
        "windows needs end 'drop' or 'pad'. Got None",
    ),
    "a mask_key": (lambda: ms.views.windows(arrays(), 2, mask_key=_ANY), TypeError, "mask_key to be a str. Got None"),
    "windows longer than the source": (
        lambda: ms.views.windows(arrays(), 38),
        ValueError,
        r"windows of 38 rows need 38 rows in sequence, and there are 37. Make them shorter, or pass end='pad'",
    ),
    "windows longer than every group": (
        lambda: ms.views.windows(arrays(), 5, step=4, counts=[16, 16, 5]),
        ValueError,
        "windows of 5 rows, 4 apart, need 17 rows in sequence, and the longest group has 16",
    ),
    "groups that come again": (
        lambda: ms.views.windows(arrays(), 2, groups="y"),
        ValueError,
        r"the rows of a group side by side. Row 4 belongs to the group of row 0, with others between them. Sort the "
        r"rows: source\[np.argsort\(groups, kind='stable'\)\]",
    ),
    "too few groups": (
        lambda: ms.views.windows(arrays(), 2, groups=[1, 2]),
        ValueError,
        r"windows needs groups to be the name of a field.*each of the 37 samples. Got shape \(2,\)",
    ),
    "no such field": (lambda: ms.views.windows(dataset(), 2, groups="episode"), KeyError, "episode"),
    "groups and counts": (
        lambda: ms.views.windows(arrays(), 2, groups="y", counts=[37]),
        ValueError,
        "windows takes groups= or counts=, not both",
    ),
    "counts that do not add up": (
        lambda: ms.views.windows(arrays(), 2, counts=[30, 6]),
        ValueError,
        "counts that add up to the 37 rows. Got 36 in 2 groups",
    ),
    "negative counts of rows": (
        lambda: ms.views.windows(arrays(), 2, counts=[38, -1]),
        ValueError,
        "windows needs counts of at least 0. Number 1 is -1",
    ),
    "counts of rows that are floats": (
        lambda: ms.views.windows(arrays(), 2, counts=np.array([37.0])),
        TypeError,
        r"windows needs counts to be a number of rows per group, as integers. Got shape \(1,\), float64",
    ),
    "objects": (
        lambda: ms.views.windows(ms.DatasetSource([{"text": "a"}, {"text": "b"}]), 2),
        TypeError,
        "windows needs samples that are arrays. Those of DatasetSource.* are Python objects",
    ),
    "padding of what is not a dict": (
        lambda: ms.views.windows(ms.ArraySampleSource(np.arange(5)), 2, end="pad"),
        TypeError,
        "windows adds the field 'mask' to samples that it pads, so they need to be dicts. Got .*pass end='drop'",
    ),
    "a mask that is there": (
        lambda: ms.views.windows(arrays(), 2, end="pad", mask_key="y"),
        ValueError,
        "windows would overwrite the field 'y' of the samples. Pass a different mask_key",
    ),
    "windows of draws": (
        lambda: ms.views.windows(_weighted(), 2),
        TypeError,
        "windows: .* differs from epoch to epoch. Instead, take windows of its source, and weight those",
    ),
    "a flat_map of draws": (
        lambda: ms.views.flat_map(_weighted(), np.ones(N, int)),
        TypeError,
        "flat_map: .* differs from epoch to epoch. Instead, use flat_map on its source, and weight the result",
    ),
    "parts of overlapping windows": (
        lambda: ms.views.split(ms.views.windows(arrays(), 4, stride=1), {"a": 0.5, "b": 0.5}),
        ValueError,
        "split: these windows overlap, so that parts would have rows in common. Take windows of parts of the source",
    ),
    "parts of windows of repeated rows": (
        lambda: ms.views.folds(ms.views.windows(ms.views.repeat(arrays(), 2), 4), 3),
        ValueError,
        "folds needs windows of rows that come once. Divide the rows, and take windows then",
    ),
    "too few counts": (
        lambda: ms.views.flat_map(arrays(), [1, 2]),
        ValueError,
        r"flat_map needs counts to be the name of a field.*for each of the 37 samples. Got shape \(2,\)",
    ),
    "counts that are floats": (
        lambda: ms.views.flat_map(arrays(), np.ones(N)),
        TypeError,
        r"flat_map needs counts to be a whole number per sample, as integers. Got shape \(37,\), float64",
    ),
    "negative counts": (
        lambda: ms.views.flat_map(arrays(), -np.arange(N)),
        ValueError,
        "flat_map needs counts of at least 0. Number 1 is -1",
    ),
    "counts of nothing": (
        lambda: ms.views.flat_map(arrays(), np.zeros(N, int)),
        ValueError,
        "flat_map makes nothing of the 37 samples: all counts are zero",
    ),
    "a function that counts with floats": (
        lambda: ms.views.flat_map(arrays(), lambda sample: 1.5),
        ValueError,
        r"flat_map\(counts=<lambda>\) needs whole numbers, 0 or more. Got 1.5",
    ),
    "a function that counts below zero": (
        lambda: ms.views.flat_map(arrays(), lambda sample: -2),
        ValueError,
        r"flat_map\(counts=<lambda>\) needs whole numbers, 0 or more. Got -2",
    ),
    "a function of one argument": (
        lambda: ms.views.flat_map(arrays(), np.ones(N, int), _OF_ONE),
        TypeError,
        r"flat_map calls fn\(sample, number\). <lambda> takes \(sample\)",
    ),
    "what is not a function": (
        lambda: ms.views.flat_map(arrays(), np.ones(N, int), _STREAM),
        TypeError,
        "flat_map needs fn to be a function",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_regrouped_is_refused_by_name(name):
    make, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        make()
