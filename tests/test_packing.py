"""Rows of documents. Compared with lists and loops: what a rule says, written down once more without any speed."""

import collections
import itertools
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

import millstream as ms
from millstream.plan.packing import PackedRows, Packing
from millstream.reading.memory import mapped_file

LENGTHS = [5, 0, 9, 3, 3, 1, 8, 2, 21, 4, 7, 6, 1, 1, 2, 12, 5, 3, 0, 8, 2, 2, 4]
ROW = 8


def documents(lengths: Any = LENGTHS) -> list[list[int]]:
    """Documents whose tokens are all different."""
    return [list(range(100 * number + 1, 100 * number + 1 + length)) for number, length in enumerate(lengths)]


def source_of(docs: list[list[int]], ordering: Any = "sequential") -> ms.DatasetSource:
    return ms.DatasetSource([{"tokens": np.array(doc, np.int32)} for doc in docs], ordering)


def text(ordering: Any = "shuffle") -> ms.DatasetSource:
    return source_of(documents(), ordering)


def drawn(loader, key, steps, first=0):
    return [jax.device_get(pair) for pair in loader.iterate(loader.init_state(key, step=first), steps=steps)]


# What the rules say


def pieces_of(docs, length, too_long, eos):
    found = []
    for doc in docs:
        whole = doc if eos is None else [*doc, eos]
        if len(whole) > length and too_long == "drop":
            continue
        kept = whole[:length] if too_long == "cut" else whole
        found += [kept[start : start + length] for start in range(0, len(kept), length)]
    return found


def concatenated(docs, length, eos):
    tokens = [(number, token) for number, doc in enumerate(docs) for token in (doc if eos is None else [*doc, eos])]
    rows = [tokens[start : start + length] for start in range(0, len(tokens), length)]
    return [[[token for _, token in run] for _, run in itertools.groupby(row, lambda pair: pair[0])] for row in rows]


def first_fit(pieces, length, most):
    rows: list[list[int]] = []
    for number, piece in enumerate(pieces):
        for row in rows:
            if sum(len(pieces[one]) for one in row) + len(piece) <= length and len(row) < most:
                row.append(number)
                break
        else:
            rows.append([number])
    return rows


def best_fit(pieces, length, most):
    """The longest first, each into the row with the least room; of equal ones, that which has had it longest."""
    rows: list[list[int]] = []
    since: list[int] = []
    for clock, number in enumerate(sorted(range(len(pieces)), key=lambda one: -len(pieces[one]))):
        room = [length - sum(len(pieces[one]) for one in row) for row in rows]
        fit = [at for at, row in enumerate(rows) if room[at] >= len(pieces[number]) and len(row) < most]
        if fit:
            at = min(fit, key=lambda at: (room[at], since[at]))
            rows[at].append(number)
            since[at] = clock
        else:
            rows.append([number])
            since.append(clock)
    return rows


def rows_by_hand(docs, length, rule, too_long="split", most=None, eos=None, block=1 << 20):
    """Every row as a list of segments, which are lists of tokens."""
    if rule == "concat":
        return concatenated(docs, length, eos)
    rows = []
    for first in range(0, len(docs), block):
        pieces = pieces_of(docs[first : first + block], length, too_long, eos)
        fit = first_fit if rule == "first-fit" else best_fit
        found = sorted(sorted(row) for row in fit(pieces, length, length if most is None else most))
        rows += [[pieces[number] for number in row] for row in found]
    return rows


def described(rows, length, fill=0, unscored="first"):
    """The leaves of rows."""
    leaves = collections.defaultdict(list)
    for row in rows:
        rest = length - sum(map(len, row))
        leaves["tokens"].append([token for segment in row for token in segment] + [fill] * rest)
        leaves["segments"].append([n for n, segment in enumerate(row, 1) for _ in segment] + [0] * rest)
        leaves["positions"].append([place for segment in row for place in range(len(segment))] + [0] * rest)
        counts = {"first": lambda n, at: at > 0, "last": lambda n, at: at < n - 1, "none": lambda n, at: True}[unscored]
        scored = [counts(len(segment), at) for segment in row for at in range(len(segment))]
        leaves["loss_mask"].append(scored + [False] * rest)
    return dict(leaves)


def read(view):
    return {name: leaf.tolist() for name, leaf in view.read(np.arange(len(view))).items()}


SIZES = st.lists(st.integers(0, 12) | st.integers(0, 40), min_size=1, max_size=40)
RULES = st.sampled_from(["best-fit", "first-fit", "concat"])


@settings(max_examples=300)
@given(
    sizes=SIZES,
    length=st.integers(1, 16),
    rule=RULES,
    too_long=st.sampled_from(["split", "cut", "drop"]),
    most=st.none() | st.integers(1, 4),
    eos=st.none() | st.just(-1),
    block=st.sampled_from([1, 7, 1 << 20]),
    unscored=st.sampled_from(["first", "last", "none"]),
)
def test_rows_are_what_lists_and_loops_make(sizes, length, rule, too_long, most, eos, block, unscored):
    docs = documents(sizes)
    options: dict[str, Any] = dict(eos=eos, block_size=block, unscored=unscored, fill=-7, seed=None)
    if rule != "concat":
        options |= dict(too_long=too_long, max_segments=most)
    rows = rows_by_hand(docs, length, rule, too_long, most, eos, block)
    if not rows:
        with pytest.raises(ValueError, match=rf"pack makes nothing of the {len(docs)} samples: all are empty"):
            ms.views.pack(source_of(docs), length, rule, **options)
        return
    view = ms.views.pack(source_of(docs), length, rule, **options)
    assert read(view) == described(rows, length, -7, unscored)
    assert len(view) == len(rows)


@settings(max_examples=300)
@given(
    kinds=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    seed=st.integers(0, 10**6),
    length=st.integers(9, 20),
    most=st.none() | st.integers(2, 5),
)
def test_many_documents_of_few_lengths_fill_rows_in_turn(kinds, seed, length, most):
    """Rows with equal room are filled together; those that came to it first come first."""
    sizes = np.random.default_rng(seed).choice(kinds, 60)
    rows = PackedRows(Packing(length, most=most, seed=None).table(sizes))
    pieces = rows.pieces(np.arange(len(rows)))
    found = [pieces.documents[pieces.rows == row].tolist() for row in range(len(rows))]
    expected = best_fit([[0] * size for size in sizes], length, length if most is None else most)
    assert found == sorted(sorted(row) for row in expected)


@settings(max_examples=60)
@given(sizes=SIZES.filter(any), rule=RULES, seed=st.integers(0, 2**40), block=st.sampled_from([5, 1 << 20]))
def test_documents_are_shuffled_first_and_none_is_lost(sizes, rule, seed, block):
    docs = documents(sizes)
    packing = Packing(ROW, rule, block=block, seed=seed)
    order = np.concatenate(list(packing._blocks(len(docs)))).tolist()
    assert sorted(order) == list(range(len(docs)))
    view = ms.views.pack(source_of(docs), ROW, rule, seed=seed, block_size=block)
    found = read(view)
    assert found == described(rows_by_hand([docs[at] for at in order], ROW, rule, block=block), ROW)
    tokens = np.array(found["tokens"])[np.array(found["segments"]) > 0]
    assert sorted(tokens.tolist()) == [token for doc in docs for token in doc]


def test_the_rows_of_a_seed_stay_what_they_are():
    """States and plan files of earlier versions depend on it."""
    view = ms.views.pack(text(), ROW, seed=3, eos=0)
    assert read(view[:3])["tokens"] == GOLDEN


GOLDEN = [
    [0, 1101, 1102, 1103, 1104, 1105, 1106, 0],
    [1401, 1402, 0, 2201, 2202, 2203, 2204, 0],
    [701, 702, 0, 1509, 1510, 1511, 1512, 0],
]


def test_best_fit_leaves_little_padding():
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 1.0, 30_000), 1, 20_000).astype(np.int64)
    bounds: dict[Any, float] = {"best-fit": 1.002, "first-fit": 1.02, "concat": 1.0001}
    for rule, most in bounds.items():
        rows = PackedRows(Packing(2048, rule).table(lengths))
        assert rows.tokens == lengths.sum()
        assert len(rows) <= most * lengths.sum() / 2048 + 1
        pieces = rows.pieces(np.arange(len(rows)))
        assert np.bincount(pieces.rows, pieces.counts).max() <= 2048
        assert np.bincount(pieces.documents, pieces.counts, len(lengths)).tolist() == lengths.tolist()


def test_rows_do_not_begin_with_the_longest_documents():
    lengths = np.random.default_rng(0).integers(1, 1000, 5000)
    rows = PackedRows(Packing(2048).table(lengths))
    first = lengths[rows.first_documents(np.arange(len(rows)))]
    assert abs(first.mean() - lengths.mean()) < 60
    half = len(rows) // 2
    assert abs(first[:half].mean() - first[half:].mean()) < 60


def test_a_plan_takes_twelve_bytes_a_document():
    lengths = np.random.default_rng(0).integers(1, 200, 10_000)
    table = Packing(2048).table(lengths)
    assert table.dtype == np.uint32
    assert table.nbytes == 12 * len(lengths) + 4 * len(PackedRows(table)) + 16


def test_long_documents_have_numbers_past_32_bits():
    lengths = np.array([3, (1 << 32) + 5])
    rows = PackedRows(Packing(1 << 30, "concat", seed=None).table(lengths))
    pieces = rows.pieces(np.array([0, 4]))
    assert rows.tokens == lengths.sum() and len(rows) == 5
    assert pieces.starts.tolist() == [0, 0, (1 << 32) - 3] and pieces.counts.tolist() == [3, (1 << 30) - 3, 8]


# Leaves


def test_several_leaves_are_packed_together():
    docs = documents([3, 2, 6])
    samples = [
        {"tokens": doc, "weights": np.array(doc) / 2, "vectors": np.outer(doc, [1.0, 2.0]), "url": "a"} for doc in docs
    ]
    names = ["tokens", "weights", "vectors"]
    eos = {"tokens": 7, "weights": 0.5, "vectors": 9}
    view = ms.views.pack(ms.DatasetSource(samples), ROW, leaves=names, eos=eos, fill={"weights": np.nan})
    found = view.read(np.arange(len(view)))
    assert sorted(found) == sorted([*names, "segments", "positions", "loss_mask"])
    assert found["vectors"].shape == (len(view), ROW, 2) and found["weights"].dtype == np.float32
    real, end = found["segments"] > 0, found["tokens"] == 7
    assert sorted(found["tokens"][real & ~end].tolist()) == [token for doc in docs for token in doc]
    assert (found["weights"] == found["tokens"] / 2)[real & ~end].all() and (found["weights"][end] == 0.5).all()
    assert (found["vectors"][..., 1] == 2 * found["tokens"])[real & ~end].all() and (found["vectors"][end] == 9).all()
    assert np.isnan(found["weights"][~real]).all() and not found["tokens"][~real].any() and end.sum() == 3


def test_leaves_that_are_added_have_the_names_that_are_given():
    names: dict[str, Any] = dict(segments="ids", positions=None, loss_mask="weights")
    view = ms.views.pack(text(), ROW, **names)
    assert sorted(view.spec()) == ["ids", "tokens", "weights"]
    alone: dict[str, Any] = dict.fromkeys(names)
    view = ms.views.pack(text(), ROW, "concat", seed=None, **{**alone, "segments": None, "loss_mask": None})
    assert sorted(view[0]) == ["tokens"] and view[0]["tokens"].tolist() == [1, 2, 3, 4, 5, 201, 202, 203]


KINDS = {
    "lists": lambda doc: {"tokens": doc},
    "64 bits": lambda doc: {"tokens": np.array(doc, np.int64)},
    "16 bits": lambda doc: {"tokens": np.array(doc, np.uint16)},
    "read-only": lambda doc: {"tokens": np.broadcast_to(np.array(doc, np.int32), (len(doc),))},
}


@pytest.mark.parametrize("kind", KINDS)
def test_documents_may_be_lists_and_arrays_of_any_kind(kind):
    view = ms.views.pack(ms.DatasetSource([KINDS[kind](doc) for doc in documents()]), ROW)
    expected = read(ms.views.pack(text(), ROW))
    assert read(view) == expected
    assert view.spec()["tokens"].dtype == (np.uint16 if kind == "16 bits" else np.int32)


def test_rows_of_arrays_are_documents_of_one_length():
    data = np.arange(60, dtype=np.int32).reshape(20, 3)
    for source in (ms.ArraySampleSource({"tokens": data}), ms.HostArraySource({"tokens": data})):
        found = ms.views.pack(source, 7, "concat", seed=None).read(np.arange(8))
        assert found["tokens"].tolist() == data.ravel()[:56].reshape(8, 7).tolist()


def test_lengths_are_given_known_or_found_by_a_function():
    expected = read(ms.views.pack(text(), ROW))
    ways: list[Any] = [LENGTHS, np.array(LENGTHS, np.uint8), "tokens", lambda sample: len(sample["tokens"])]
    for lengths in ways:
        assert read(ms.views.pack(text(), ROW, lengths=lengths)) == expected
    known = Known(documents())
    view = ms.views.pack(known, ROW)
    assert len(known.asked) <= 10  # whose shapes stand for all
    assert read(view) == expected
    assert read(ms.views.pack(known[::-1], ROW, seed=None)) == read(ms.views.pack(text()[::-1], ROW, seed=None))


class Known(ms.sources.HostSource):
    """Documents whose lengths are known, and which says what is read of them."""

    ordering = "sequential"
    whole_samples = True
    sample_spec: Any = ms.sources.spec_of("Known", {"tokens": np.zeros(5, np.int32)})

    def __init__(self, docs):
        self._docs = docs
        self.lengths = np.array([len(doc) for doc in docs])
        self.asked: list[list[int]] = []

    def __len__(self):
        return len(self._docs)

    def read_rows(self, indices, out, keys=None):
        self.asked.append(indices.tolist())
        for row, index in enumerate(indices.tolist()):
            out[0][row] = {"tokens": np.array(self._docs[index], np.int32)}


def test_documents_of_a_batch_are_read_by_one_call_and_each_once():
    known = Known(documents([21, 3, 2]))
    view = ms.views.pack(known, ROW, "concat", seed=None)
    known.asked.clear()
    assert len(view) == 4 and view.read(np.array([0, 3, 1, 2]))["tokens"][1].tolist() == [201, 202, 0, 0, 0, 0, 0, 0]
    assert known.asked == [[0, 1, 2]]
    known.asked.clear()
    view.read(np.array([1]))
    assert known.asked == [[0]]


# The same batches everywhere


def noisy(value, mask, key):
    return {**value, "noise": jax.random.bits(key, (2,))}


VIEWS = {
    "best-fit": lambda source: ms.views.pack(source, ROW, eos=0),
    "first-fit": lambda source: ms.views.pack(source, ROW, "first-fit", max_segments=2, too_long="cut"),
    "concat": lambda source: ms.views.pack(source, ROW, "concat", eos=0),
    "of a view": lambda source: ms.views.pack(source[::-2], ROW, too_long="drop"),
    "view of it": lambda source: ms.views.repeat(ms.views.pack(source, ROW)[1:], 2)[::-1],
    "weighted": lambda source: ms.views.weighted(ms.views.pack(source, ROW)[:10], np.arange(10), samples=20),
    "mixture": lambda source: ms.views.mix(
        {"a": ms.views.pack(source[:9], ROW), "b": ms.views.pack(source[9:], ROW)}, {"a": 1, "b": 2}, samples=25
    ),
    "joined": lambda source: ms.views.concat(*(ms.views.pack(source, ROW, seed=seed) for seed in (1, 2))),
    "random": lambda source: ms.views.pack(source.map(shaken, random=True), ROW),
}


def shaken(sample, rng):
    return {"tokens": sample["tokens"] + rng.integers(0, 50, len(sample["tokens"]), np.int32) * 10_000}


@pytest.mark.parametrize("name", VIEWS)
def test_packed_rows_are_the_same_wherever_they_are_read(name, key):
    make, steps = VIEWS[name], 6
    stages = [ms.RandomMapTransform(noisy), ms.BatchTransform(4)]
    loader = ms.DataLoader([make(text()), *stages])
    expected = drawn(loader, key, steps)
    executors = [ms.Threads(2), ms.Processes(1)] if name in ("best-fit", "mixture", "random") else [ms.Threads(2)]
    for executor in executors:
        with ms.DataLoader([make(text()), *stages], executor=executor) as way:
            assert_trees_equal(drawn(way, key, steps), expected)
            for first in range(1, steps, 2):  # a state of one is a state of all
                assert_trees_equal(drawn(way, key, 1, first), expected[first : first + 1])
    for step in range(steps):
        batch, _, mask = loader.next_batch(loader.init_state(key, step=step))
        assert_trees_equal(jax.device_get((batch, mask)), expected[step])


def test_packed_rows_are_read_from_compiled_programs(key):
    """Documents lie on the host; a program asks for its rows by a callback."""
    loader = ms.DataLoader([VIEWS["best-fit"](text()), ms.BatchTransform(4)])
    expected, state = drawn(loader, key, loader.steps_per_epoch), loader.init_state(key)
    step = jax.jit(lambda loader, state: loader.next_batch(state))
    for pair in expected:
        batch, state, mask = step(loader, state)
        assert_trees_equal(jax.device_get((batch, mask)), pair)
    _, _, scanned = loader.scan_epoch(loader.init_state(key), None, lambda carry, batch, mask: (carry, (batch, mask)))
    for number, pair in enumerate(expected):
        assert_trees_equal(jax.tree.map(lambda leaf, number=number: np.asarray(leaf[number]), scanned), pair)


def test_a_run_over_packed_rows_resumes_at_every_step(key):
    loader = ms.DataLoader([VIEWS["best-fit"](text()), ms.BatchTransform(4, pad_last_batch=False)])
    steps = 2 * loader.steps_per_epoch + 1
    expected = drawn(loader, key, steps)
    other = loader.replace(executor=ms.Threads(1))
    for stop in range(1, steps):
        batches = loader.iterate(loader.init_state(key), steps=steps)
        for _ in range(stop):
            next(batches)
        resumed = other.iterate(loader.init_state(key), steps=0)
        resumed.set_state(batches.get_state())
        batches.close()
        assert_trees_equal([jax.device_get(pair) for pair in resumed], expected[stop:])


def test_every_token_comes_once_in_an_epoch_and_in_different_batches_in_the_next(key):
    loader = ms.DataLoader([ms.views.pack(text(), ROW), ms.BatchTransform(4)])
    epochs = []
    for epoch in range(2):
        batches = drawn(loader, key, loader.steps_per_epoch, epoch * loader.steps_per_epoch)
        epochs.append([batch["tokens"][batch["segments"] > 0].tolist() for batch, _ in batches])
        assert sorted(itertools.chain(*epochs[-1])) == [token for doc in documents() for token in doc]
    assert epochs[0] != epochs[1]
    in_turn = ms.DataLoader([ms.views.pack(text(), ROW, ordering="sequential"), ms.BatchTransform(4)])
    assert_trees_equal(drawn(in_turn, key, 1)[0][0], ms.views.pack(text(), ROW).read(np.arange(4)))


def test_packed_rows_over_eight_devices_are_the_same():
    script = """
        import jax, numpy as np, millstream as ms
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        samples = [{"tokens": np.arange(i * 7 % 13, dtype=np.int32) + 100 * i} for i in range(100)]
        view = ms.views.pack(ms.DatasetSource(samples), 16, eos=0)
        plain, over = (ms.DataLoader([view, ms.BatchTransform(8)], sharding=one) for one in (None, mesh))
        runs = [loader.iterate(loader.init_state(jax.random.key(0)), steps=12) for loader in (plain, over)]
        for one, two in zip(*runs, strict=True):
            assert len(two[0]["tokens"].sharding.device_set) == 8
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(two))
    """
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", **CACHE}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env={**os.environ, **environment})


def test_workers_read_packed_rows_without_jax(key):
    def looking(sample):
        return {**sample, "loaded": np.bool_("jax" in sys.modules)}

    stages = [ms.views.pack(text(), ROW), ms.HostMapTransform(looking), ms.BatchTransform(4)]
    with ms.DataLoader(stages, executor=ms.Processes(1)) as loader:
        batch, _ = next(loader.iterate(loader.init_state(key), steps=1))
    assert not batch["loaded"].any()


def test_packed_rows_are_verified_and_say_what_they_are(key):
    view = ms.views.pack(text()[1:], ROW)
    loader = ms.DataLoader([view, ms.BatchTransform(4)])
    assert loader.verify(executors=[ms.Threads(2)], hosts=[1, 2], progress=False).ok
    words = rf"13 rows of 8 tokens, 100\.00 % full, best-fit \(\w{{12}}\) of \[1:{len(LENGTHS)}\]"
    assert re.fullmatch(rf"View\(13 samples: {words} of DatasetSource\)", repr(view))
    assert re.fullmatch(rf"{words} of {len(LENGTHS)}", loader.explain().plan["view"])
    other = ms.DataLoader([ms.views.pack(text()[1:], ROW, seed=1), ms.BatchTransform(4)])
    with pytest.raises(ValueError, match=r"differ in\n  view: 13 rows of 8 tokens, .* in the state, .* here"):
        other.next_batch(loader.init_state(key))


# Parts


def test_parts_have_no_document_in_common():
    docs = documents(np.random.default_rng(0).integers(1, ROW + 1, 60))
    options: list[dict[str, Any]] = [{"too_long": "cut"}, {"max_segments": 2}]
    for given_options in options:
        view = ms.views.pack(source_of(docs), ROW, **given_options)
        tokens = []
        for rows in ms.views.split(view, {"train": 0.6, "test": 0.4}):
            found = rows.read(np.arange(len(rows)))
            tokens.append(set(found["tokens"][found["segments"] > 0].tolist()))
        assert not tokens[0] & tokens[1]
        assert tokens[0] | tokens[1] == {token for doc in docs for token in doc}
    parts = ms.views.split(text(), {"train": 0.6, "test": 0.4})
    packed = [read(ms.views.pack(part, ROW, "concat"))["tokens"] for part in parts]
    one, two = (set(itertools.chain(*rows)) - {0} for rows in packed)
    assert not one & two and one | two == {token for doc in documents() for token in doc}


@pytest.mark.parametrize(
    "make",
    [
        lambda: ms.views.pack(text(), ROW),
        lambda: ms.views.pack(text(), ROW, "concat"),
        lambda: ms.views.pack(ms.views.repeat(text(), 2), ROW, too_long="cut"),
    ],
)
def test_parts_that_would_share_a_document_are_refused(make):
    with pytest.raises(
        ValueError,
        match=r"split: some documents are in several of these rows.*Divide the documents, and pack each part",
    ):
        ms.views.split(make(), {"train": 0.5, "test": 0.5})


# Plan files


def test_documents_are_measured_once_and_the_plan_is_mapped_from_then_on(folder):
    def with_log(sample):
        with open(folder / "log", "ab") as file:
            file.write(b".")
        return len(sample["tokens"])

    expected = ms.views.pack(text(), ROW, lengths=with_log)
    os.remove(folder / "log")
    views = [ms.views.pack(text(), ROW, lengths=with_log, plans=folder / "plans") for _ in range(3)]
    assert (folder / "log").stat().st_size == len(LENGTHS)
    for view in views:
        assert view.selection == expected.selection and read(view) == read(expected)  # states of one fit the other
        base: Any = view.source
        assert mapped_file(base.on_host._rows._documents) is not None
    names = sorted(path.name for path in (folder / "plans").glob("*.plan"))
    assert len(names) == 2 and names[0].startswith("lengths-") and names[1].startswith("pack-rows-")
    changed: list[dict[str, Any]] = [{"eos": 0}, {"seed": 1}, {"too_long": "cut"}, {"max_segments": 2}]
    for number, options in enumerate(changed, 3):
        with ms.views.plans(folder / "plans"):
            view = ms.views.pack(text(), ROW, lengths=with_log, **options)
        assert read(view) == read(ms.views.pack(text(), ROW, **options))
        assert len(list((folder / "plans").glob("*.plan"))) == number
    assert (folder / "log").stat().st_size == len(LENGTHS)


def test_workers_map_the_plan_file(folder, key):
    view = ms.views.pack(text(), ROW, plans=folder)
    expected = drawn(ms.DataLoader([ms.views.pack(text(), ROW), ms.BatchTransform(4)]), key, 4)
    with ms.DataLoader([view, ms.BatchTransform(4)], executor=ms.Processes(1)) as loader:
        assert_trees_equal(drawn(loader, key, 4), expected)


# What is wrong with documents


WRONG_DOCUMENTS = {
    "longer than planned": (
        {"tokens": np.zeros(4, np.int32)},
        r"sample 2\['tokens'\] has length 4, and 3 was planned for it. Packed leaves of a sample need one length",
    ),
    "shorter than planned": ({"tokens": []}, r"sample 2\['tokens'\] has length 0, and 3 was planned"),
    "no leaf": ({"ids": [1, 2, 3]}, r"pack: sample 2 has no leaf 'tokens'. Got \{'ids': \[1, 2, 3\]\}"),
    "floats": (
        {"tokens": [0.5, 1, 2]},
        r"sample 2\['tokens'\] does not match the spec.\n  found: shape \(3,\), float64",
    ),
    "axes": ({"tokens": np.zeros((3, 2), np.int32)}, r"spec:  shape \(any\), int32\nDocuments are packed along"),
    "a number": ({"tokens": 3}, r"sample 2\['tokens'\] needs to be an array or a list of numbers. Got 3"),
    "large numbers": ({"tokens": np.array([1, 2, 2**40])}, r"sample 2\['tokens'\]: JAX keeps int64 as int32"),
}


@pytest.mark.parametrize("name", WRONG_DOCUMENTS)
def test_a_document_of_a_different_kind_is_named(name, key):
    document, message = WRONG_DOCUMENTS[name]
    samples = [{"tokens": np.arange(3, dtype=np.int32)} for _ in range(4)]
    view = ms.views.pack(ms.DatasetSource([*samples[:2], document, samples[3]]), 3, lengths=[3] * 4, seed=None)
    with pytest.raises(ValueError, match=message):
        view.read(np.arange(4))
    assert view[3]["tokens"].tolist() == [0, 1, 2]


def test_a_piece_of_a_document_that_became_shorter_is_named():
    view = ms.views.pack(source_of(documents([5, 20])), ROW, lengths=[5, 30], seed=None)
    with pytest.raises(ValueError, match=r"sample 1\['tokens'\] has length 20, and more than 24 was planned for it"):
        view.read(np.arange(len(view)))


def test_a_document_that_cannot_be_read_takes_its_row_along(key):
    def read_document(index):
        if index == 5:
            raise OSError("gone")
        return {"tokens": np.full(3, index, np.int32)}

    view = ms.views.pack(ms.DiskSampleSource(12, read_document), 7, lengths=np.full(12, 3), seed=None)
    for executor in (ms.Threads(2), ms.Processes(1)):
        loader = ms.DataLoader([view, ms.BatchTransform(6)], on_error="skip item", executor=executor)
        batch, mask = drawn(loader, key, 1)[0]
        assert sorted(set(batch["tokens"][mask].ravel().tolist())) == [0, 1, 2, 3, 6, 7, 8, 9, 10, 11]
        assert mask.sum() == 5
        loader.close()


# What is refused


def weighted() -> Any:
    return ms.views.weighted(text(), np.ones(len(LENGTHS)))


def with_label(**more: Any) -> Any:
    return ms.DatasetSource([{"tokens": [1, 2, 3], **more}] * 4)


Pack: Any = ms.views.pack
WRONG = {
    "a list": (lambda: Pack([[1, 2]], 8), "pack needs a source.*ms.DatasetSource"),
    "draws": (lambda: Pack(weighted(), 8), "differs from epoch to epoch. Instead, pack its sources, and mix or weight"),
    "no length": (lambda: Pack(text(), 0), "pack needs length to be an int from 1 to .* Got 0"),
    "a rule": (lambda: Pack(text(), 8, "worst-fit"), "pack needs rule 'best-fit', 'first-fit' or 'concat'. Got 'worst"),
    "too_long": (lambda: Pack(text(), 8, too_long="raise"), "pack needs too_long 'split', 'cut' or 'drop'"),
    "unscored": (lambda: Pack(text(), 8, unscored=True), "pack needs unscored 'first', 'last' or 'none'. Got True"),
    "no segments": (lambda: Pack(text(), 8, max_segments=0), "pack needs max_segments to be an int of at least 1. Got"),
    "no block": (lambda: Pack(text(), 8, block_size=0), "pack needs block_size to be an int of at least 1. Got 0"),
    "a seed": (lambda: Pack(text(), 8, seed=-1), "pack needs seed to be an int from 0 .* Got -1"),
    "concat that cuts": (
        lambda: Pack(text(), 8, "concat", too_long="cut"),
        "pack with rule 'concat' cuts every 8 tokens, whatever lies there, and cannot follow too_long='cut'. Use 'best",
    ),
    "concat with segments": (lambda: Pack(text(), 8, "concat", max_segments=3), "cannot follow max_segments. Use"),
    "an ordering": (lambda: Pack(text(), 8, ordering="random"), "pack needs ordering 'shuffle' or 'sequential'"),
    "an executor": (lambda: Pack(text(), 8, executor=ms.Threads), "pack needs executor to be one such as ms.Threads"),
    "tuples": (
        lambda: Pack(ms.DatasetSource([([1, 2], 3)]), 8),
        r"pack needs samples that are dicts. Sample 0 is .*source.map\(lambda sample: \{'tokens': sample\}\)",
    ),
    "a label": (
        lambda: Pack(with_label(label=3), 8),
        r"a value for each token in every leaf that it packs. Sample 0 has:\n  tokens: 3 values\n  label: 3 \(int\)\n"
        r"Name the leaves to pack: leaves=\['tokens'\]",
    ),
    "a different length": (
        lambda: Pack(with_label(label=[1, 2]), 8),
        r"  tokens: 3 values\n  label: 2 values\nName the leaves to pack: leaves=\['tokens'\]",
    ),
    "nothing but text": (
        lambda: Pack(ms.DatasetSource([{"text": "abc"}]), 8),
        r"Sample 0 has:\n  text: 'abc' \(str\)\nMake one an array or a list of numbers",
    ),
    "an absent leaf": (
        lambda: Pack(text(), 8, leaves=["ids"]),
        "pack: sample 0 has no leaf 'ids'. Its leaves: tokens",
    ),
    "no leaves": (lambda: Pack(text(), 8, leaves=[]), r"pack needs at least one leaf, and each once. Got \[\]"),
    "leaves": (lambda: Pack(text(), 8, leaves=3), "pack needs leaves to be a list of names. Got 3"),
    "a name that is taken": (
        lambda: Pack(text(), 8, positions="tokens"),
        "pack would make two leaves of the name 'tokens'. Pass a different positions=",
    ),
    "two of a name": (lambda: Pack(text(), 8, loss_mask="segments"), "of the name 'segments'. Pass a different loss_m"),
    "a name": (lambda: Pack(text(), 8, segments=3), "pack needs segments to be the name of a leaf, or None. Got 3"),
    "an end of one leaf": (
        lambda: Pack(with_label(weights=[1, 2, 3]), 8, eos=0),
        r"pack needs eos to have a value for each leaf it packs: \{'tokens': ..., 'weights': ...\}. Got 0",
    ),
    "an end that is text": (lambda: Pack(text(), 8, eos="</s>"), "pack needs eos to be a number for 'tokens'. Got '</"),
    "an end that does not fit": (
        lambda: Pack(text(), 8, eos=0.5),
        "pack has eos=0.5 for 'tokens', which is int32, and cannot hold it",
    ),
    "a fill that does not fit": (lambda: Pack(text(), 8, fill=2**31), "pack has fill=2147483648 for 'tokens'"),
    "a fill of something else": (
        lambda: Pack(text(), 8, fill={"ids": 0}),
        "pack has fill for 'ids', which it does not pack: it packs 'tokens'",
    ),
    "lengths": (
        lambda: Pack(text(), 8, lengths=[1, 2]),
        r"pack needs lengths to be .*each of the 23 samples. Got shape",
    ),
    "negative lengths": (lambda: Pack(text(), 8, lengths=-np.arange(23)), r"pack\(lengths\) needs whole numbers, 0 or"),
    "nothing": (
        lambda: Pack(text(), 8, lengths=np.zeros(23, int)),
        "pack makes nothing of the 23 samples: all are empty",
    ),
    "all too long": (
        lambda: Pack(text()[[2, 8]], 8, too_long="drop"),
        "pack makes nothing of the 2 samples: all are empty or longer than 8",
    ),
    "empty lists": (
        lambda: Pack(ms.DatasetSource([{"tokens": []}] * 20), 8, eos=0),
        "pack: 'tokens' is an empty list in the first samples. Return it as an array with a dtype",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_packed_is_refused_by_name(name):
    make, message = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=message):
        make()


# What an attention layer needs


@given(seed=st.integers(0, 10**6), causal=st.booleans())
def test_masks_and_positions_are_what_loops_make(seed, causal):
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 5, (3, 4))
    segments = np.zeros((3, 14), np.int32)
    for row, its in enumerate(counts):
        found = np.repeat(np.arange(1, 5), its)[:14]
        segments[row, : len(found)] = found
    mask = np.asarray(mask_in_graph(segments, causal=causal))
    positions = np.asarray(positions_in_graph(segments))
    assert mask.shape == (3, 14, 14) and mask.dtype == bool
    for row in range(3):
        for query in range(14):
            same = [segments[row, query] == segments[row, key] and (key <= query or not causal) for key in range(14)]
            assert mask[row, query].tolist() == same
            first = segments[row].tolist().index(segments[row, query])
            assert positions[row, query] == (query - first if segments[row, query] else 0)


mask_in_graph = jax.jit(ms.transforms.segment_mask, static_argnames="causal")
positions_in_graph = jax.jit(ms.transforms.segment_positions)


def test_positions_in_a_program_are_those_of_the_rows():
    rows = ms.views.pack(text(), 14).read(np.arange(3))
    assert_trees_equal(np.asarray(positions_in_graph(rows["segments"])), rows["positions"])
    alone = ms.transforms.segment_positions(rows["segments"][0])  # of one row, and outside a program
    assert_trees_equal(np.asarray(alone), rows["positions"][0])


def test_attention_stays_in_its_segment(usual_promotion):
    """A packed row gives what each document gives alone, moved to one place and padded."""
    linen, equinox = pytest.importorskip("flax.linen"), pytest.importorskip("equinox")
    flax_layer = linen.MultiHeadDotProductAttention(num_heads=2)
    layer = equinox.nn.MultiheadAttention(2, 8, key=jax.random.key(2))

    @jax.jit
    def attend(vectors, segments):
        mask = ms.transforms.segment_mask(segments)
        variables = flax_layer.init(jax.random.key(1), vectors)
        rows = jax.vmap(lambda x, its: layer(x, x, x, mask=its))(vectors, mask)
        return flax_layer.apply(variables, vectors, mask=mask[:, None]), rows

    vectors = np.random.default_rng(0).normal(size=(1, 14, 8)).astype(np.float32)
    together = attend(vectors, np.repeat([1, 2, 3, 0], [3, 4, 5, 2])[None].astype(np.int32))
    for start, count in ((0, 3), (3, 4), (7, 5)):
        alone, segments = np.zeros_like(vectors), np.zeros((1, 14), np.int32)
        alone[:, :count], segments[:, :count] = vectors[:, start : start + count], 1
        for packed, expected in zip(together, attend(alone, segments), strict=True):
            np.testing.assert_allclose(packed[:, start : start + count], expected[:, :count], atol=1e-5)
    assert all(np.isfinite(leaf).all() for leaf in together)


@pytest.mark.parametrize("make", [ms.transforms.segment_mask, ms.transforms.segment_positions])
@pytest.mark.parametrize("wrong", [np.zeros(3), np.int32(1), [1, 2], None])
def test_wrong_segments_are_refused_by_name(make, wrong):
    with pytest.raises(TypeError, match=rf"{make.__name__} needs segments to be whole numbers with an axis of tokens"):
        make(wrong)
