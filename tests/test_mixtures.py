"""Mixtures: samples of several sources in every batch, compared with loops over lists."""

import collections
import itertools
import math
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from conftest import assert_trees_equal
from hypothesis import given, settings

import millstream as ms
from millstream.plan.mixture import Part, block_size, mixed, mixed_once, reweighted
from millstream.plan.selection import Selection, listed
from millstream.plan.selection import drawn as drawn_by_weight

LENGTHS = (300, 40, 75)
NAMES = ("a", "b", "c")


def arrays(number, length, ordering: Any = "shuffle"):
    x = 1000 * number + np.arange(length, dtype=np.int32)
    return ms.ArraySampleSource({"x": x}, ordering)


def dataset(number, length, ordering: Any = "shuffle"):
    return ms.DatasetSource([{"x": np.int32(1000 * number + i)} for i in range(length)], ordering)


def sources(make=arrays, **options):
    return {
        name: make(number, length, **options) for number, (name, length) in enumerate(zip(NAMES, LENGTHS, strict=True))
    }


def drawn(loader, key, steps):
    found = []
    for batch, mask in loader.iterate(loader.init_state(key), steps=steps):
        found.append(np.asarray(batch["x"])[np.asarray(mask)].tolist())
    return found


def parts_of(*lengths, shuffled=False):
    firsts = np.cumsum([0, *lengths])
    return [Part(f"s{k}", n, shuffled, int(firsts[k])) for k, n in enumerate(lengths)]


def blocks_of(length):
    return np.diff([*range(0, length, block_size(length)), length])


def located(function, table, epoch, positions, words=(3, 5)):
    positions = np.asarray(positions, np.uint64)
    return function.locate(np, table, np.array(words, np.uint32), np.full(len(positions), epoch, np.uint32), positions)


def bound(count):
    """How far a source may be from its exact number of samples: half a sample for every division that it is in."""
    return math.ceil(math.log2(count)) / 2 if count > 1 else 0.0


def naive_owner(position, shares, numbers):
    """The source at a position, and how many of its samples come before: halves follow their exact share, rounded."""
    if len(numbers) == 1:
        return numbers[0], position
    left, right = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
    share = sum(shares[k] for k in left) / sum(shares[k] for k in numbers)
    before, after = (math.floor(count * share + Fraction(1, 2)) for count in (position, position + 1))
    if after > before:
        return naive_owner(before, shares, left)
    return naive_owner(position - before, shares, right)


@settings(max_examples=30)
@given(root=st.integers(1, 15), sides=st.tuples(st.integers(1, 7), st.integers(1, 7)), length=st.integers(1, 700))
def test_positions_have_the_sources_that_a_naive_division_gives_them(root, sides, length):
    halves = Fraction(root, 16), Fraction(16 - root, 16)
    shares = [half * Fraction(k, 8) for half, side in zip(halves, sides, strict=True) for k in (side, 8 - side)]
    rows = np.tile([float(share) for share in shares], (len(blocks_of(length)), 1))
    function, table = mixed(rows, length, parts_of(*[1000] * 4))
    expected = [naive_owner(position, shares, range(4)) for position in range(length)]
    assert located(function, table, 0, range(length)).tolist() == [1000 * k + own for k, own in expected]
    wholes = collections.Counter(k for k, _ in expected)
    again = [1000 * k + (wholes[k] + own) % 1000 for k, own in expected]  # the next epoch continues every source
    assert located(function, table, 1, range(length)).tolist() == again


WEIGHTS = st.lists(st.floats(0, 10).map(lambda x: 0.0 if x < 0.01 else x), min_size=1, max_size=8).filter(any)


@given(
    weights=WEIGHTS,
    length=st.integers(1, 30 * 256),
    kind=st.sampled_from(["constant", "ramp", "jumps"]),
    seed=st.integers(0, 999),
)
def test_no_source_is_ever_far_from_its_exact_number(weights, length, kind, seed):
    sizes, rng = blocks_of(length), np.random.default_rng(seed)
    times = {
        "constant": np.ones((len(sizes), len(weights))),
        "ramp": np.linspace(rng.random(len(weights)), rng.random(len(weights)), len(sizes)),
        "jumps": rng.choice([0.0, 1.0, 0.001], (len(sizes), len(weights)), p=[0.2, 0.7, 0.1]),
    }[kind]
    rows = np.array(weights) * times
    rows[rows.sum(axis=1) == 0] = weights
    shares = rows / rows.sum(axis=1, keepdims=True)
    function, table = mixed(shares, length, parts_of(*[10**6] * len(weights)))
    which = located(function, table, 0, range(length)) // 10**6
    counts = np.cumsum(which[:, None] == np.arange(len(weights)), axis=0)
    each = np.repeat(shares, sizes, axis=0)
    if kind != "jumps" or len(weights) <= 2:  # of more sources, nothing bounds what jumps add up to
        times_bound = 1.25 if kind == "ramp" else 1  # a ramp over two blocks is nearly a jump
        assert np.abs(counts - np.cumsum(each, axis=0)).max() < times_bound * bound(len(weights)) + 1e-3
    assert (each[np.arange(length), which] > 0).all()  # none of a source whose weight is zero there
    assert (function.counts(table, np.arange(1, length)) == counts[:-1]).all()
    assert (
        function.counts(table, np.arange(length, length + 3)) == counts[-1] + function.counts(table, np.arange(3))
    ).all()
    assert (function.numbers(table, np.zeros(length), np.arange(length)) == which).all()


@settings(max_examples=60)
@given(
    weights=st.lists(st.floats(0.01, 1), min_size=2, max_size=4),
    lengths=st.lists(st.integers(1, 60), min_size=4, max_size=4),
    length=st.integers(1, 900),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_source_goes_through_its_own_epochs_in_its_own_order(weights, lengths, length, seed):
    lengths = lengths[: len(weights)]
    shares = np.tile(np.array(weights) / np.sum(weights), (len(blocks_of(length)), 1))
    for shuffled in (False, True):
        function, table = mixed(shares, length, parts_of(*lengths, shuffled=shuffled))
        found = np.concatenate([located(function, table, epoch, range(length), (seed, 5)) for epoch in range(3)])
        for part, whole in zip(function.parts, function.counts(table, np.array(length)), strict=True):
            own = found[(part.first <= found) & (found < part.first + part.length)] - part.first
            assert len(own) == 3 * whole
            if not shuffled:
                assert own.tolist() == [number % part.length for number in range(len(own))]
            epochs = [own[start : start + part.length].tolist() for start in range(0, len(own), part.length)]
            assert all(len(set(epoch)) == len(epoch) for epoch in epochs)


def test_the_order_of_a_source_does_not_depend_on_the_weights():
    orders = []
    for weights in ([0.5, 0.5], [0.9, 0.1]):
        function, table = mixed(np.tile(weights, (4, 1)), 1000, parts_of(37, 300, shuffled=True))
        found = located(function, table, 0, range(1000))
        orders.append([found[found < 37].tolist(), found[found >= 37].tolist()])
    for one, two in zip(*orders, strict=True):
        assert one[:90] == two[:90]
    assert len({tuple(orders[0][0][start : start + 37]) for start in range(0, 480, 37)}) > 10  # a new one every epoch


def test_batches_planned_alone_are_those_that_are_planned_together():
    shares = np.tile([0.1, 0.2, 0.3, 0.4], (len(blocks_of(6000)), 1))
    parts = [*parts_of(37, 700, 2000, shuffled=True), Part("d", 3000, False, 5000)]
    function, table = mixed(shares, 6000, parts)
    together = located(function, table, 2, range(6000))
    alone = [located(function, table, 2, range(first, first + 50)) for first in range(0, 6000, 50)]
    assert np.concatenate(alone).tolist() == together.tolist()


def test_compiled_programs_draw_the_same_samples():
    inner = mixed(np.tile([0.25, 0.75], (1, 1)), 90, parts_of(50, 7, shuffled=True))
    draws = drawn_by_weight(np.arange(1.0, 31.0), 60)
    chosen = listed(np.array([5, 3, 8]), 9)
    selections = [Selection().after(*one) for one in (inner, draws, chosen)]
    parts = [
        Part("mixture", 90, False, 0, Selection(selections[0].functions)),
        Part("draws", 60, True, 57, Selection(selections[1].functions)),
        Part("plain", 1500, True, 87),
        Part("few", 3, True, 2000, Selection(selections[2].functions)),
        Part("one", 1, True, 3000),
    ]
    tables = [selections[0].tables, selections[1].tables, (), selections[2].tables, ()]
    shares = np.array([[0.3, 0.2, 0.3, 0.1, 0.1], [0.1, 0.2, 0.5, 0.2, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2]])
    plain = mixed(shares, 700, parts, tables)
    changed = reweighted(*reweighted(*plain, shares[::-1], 900), shares, 1700)
    for function, table in (plain, changed):
        located_in_graph = jax.jit(
            lambda words, epoch, positions, table, function=function: function.locate(
                jax.numpy, table, words, epoch, positions
            )
        )
        for seed, epoch in enumerate((0, 1, 2, 7)):
            words, positions = np.array([seed, 2], np.uint32), np.arange(700)
            epochs = epoch + (positions > 400)  # a batch may have samples of two
            found = function.locate(np, table, words, epochs.astype(np.uint32), positions.astype(np.uint64))
            traced = located_in_graph(words, epochs.astype(np.uint32), positions.astype(np.uint32), table)
            assert traced.tolist() == found.tolist()


@settings(max_examples=60)
@given(
    weights=st.lists(st.lists(st.floats(0.01, 1), min_size=3, max_size=3), min_size=3, max_size=3),
    length=st.integers(150, 700),
    afters=st.lists(st.integers(1, 2000), min_size=2, max_size=2, unique=True).map(sorted),
)
def test_a_change_of_weights_loses_and_repeats_nothing(weights, length, afters):
    shares = [np.tile(np.array(row) / np.sum(row), (len(blocks_of(length)), 1)) for row in weights]
    mixtures = [mixed(shares[0], length, parts_of(40, 11, 300))]
    for new, after in zip(shares[1:], afters, strict=True):
        mixtures.append(reweighted(*mixtures[-1], new, after))
    epochs = afters[-1] // length + 2
    runs = [
        np.concatenate([located(*mixture, epoch, range(length)) for epoch in range(epochs)]) for mixture in mixtures
    ]
    for (one, two), after in zip(itertools.pairwise(runs), afters, strict=True):
        assert one[:after].tolist() == two[:after].tolist()
    function, table = mixtures[-1]
    for number, part in enumerate(function.parts):
        own = runs[-1][(part.first <= runs[-1]) & (runs[-1] < part.first + part.length)] - part.first
        assert own.tolist() == [k % part.length for k in range(len(own))]
        assert len(own) == function.counts(table, np.array(epochs * length))[number]
        # Past the last change, its share is the new one.
        late = (runs[-1][afters[-1] :] >= part.first) & (runs[-1][afters[-1] :] < part.first + part.length)
        exact = shares[-1][0, number] * np.arange(1, len(late) + 1)
        slack = epochs * bound(3) + 1  # an epoch ends with whole samples, and so does the change
        assert np.abs(np.cumsum(late) - exact).max() < 1 + slack


def complicated(make=arrays):
    """A mixture with the number of its source, of a mixture, draws by weight and a source, whose weights change."""
    whole = make(0, sum(LENGTHS))
    one, two = ms.views.mix({"a": whole[:300], "b": whole[300:340]}, {"a": 1, "b": 1}, samples=120), whole[340:]
    drawn_again = ms.views.weighted(whole, np.arange(sum(LENGTHS)), samples=200)
    mixture = ms.views.mix(
        {"mixture": one, "plain": two, "drawn": drawn_again},
        {"mixture": 2, "plain": ms.views.ramp(0, 1, samples=300), "drawn": 1},
        samples=450,
        source_field="source",
    )
    return ms.views.reweight(mixture, {"mixture": 1, "plain": 3, "drawn": 0}, after=500)


def test_a_mixture_gives_the_same_batches_wherever_it_is_read(key):
    stages = [ms.RandomMapTransform(_noisy), ms.BatchTransform(32)]
    plain = ms.DataLoader([complicated(), *stages])
    steps = plain.steps_per_epoch + 3
    expected = [jax.device_get(pair) for pair in plain.iterate(plain.init_state(key), steps=steps)]
    for make, executor in ((dataset, None), (arrays, ms.Threads(2)), (dataset, ms.Processes(2))):
        loader = ms.DataLoader([complicated(make), *stages], executor=executor)
        assert_trees_equal([jax.device_get(p) for p in loader.iterate(loader.init_state(key), steps=steps)], expected)
    for step in range(steps):  # wherever it is resumed
        batch, _, mask = plain.next_batch(plain.init_state(key, step=step))
        assert_trees_equal(jax.device_get((batch, mask)), expected[step])
    collected = lambda carry, batch, mask: (carry, (batch, mask))  # noqa: E731
    state, _, scanned = plain.scan_epoch(plain.init_state(key), None, collected)
    _, _, later = plain.scan_epoch(state, None, collected)
    for step in range(steps):
        found, number = (scanned, step) if step < plain.steps_per_epoch else (later, step - plain.steps_per_epoch)
        assert_trees_equal(jax.tree.map(lambda leaf, at=number: np.asarray(leaf[at]), found), expected[step])


@pytest.mark.parametrize("make", [arrays, dataset])
def test_samples_say_which_source_they_are_from(make, key):
    whole = make(0, 100)  # two sources may have samples in common
    view = ms.views.mix({"low": whole[:60], "high": whole[40:]}, {"low": 1, "high": 3}, source_field="from")
    loader = ms.DataLoader([view, ms.BatchTransform(16)])
    assert loader.element_spec()["from"].dtype == np.int32
    numbers, names, items = [], [], []
    for batch, mask, info in loader.iterate(loader.init_state(key), with_info=True):
        real = np.asarray(mask)
        numbers += np.asarray(batch["from"])[real].tolist()
        assert info.sources is not None
        names += info.sources[real].tolist()
        items += [int(item["x"]) for item in info.items if item is not None]
        assert np.asarray(batch["x"])[real].tolist() == items[-real.sum() :] and set(info.sources[~real]) <= {""}
    assert names == [["low", "high"][number] for number in numbers]
    assert collections.Counter(names) == {"low": 30, "high": 90} == loader.stats().sources
    low = sorted(x for x, name in zip(items, names, strict=True) if name == "low")
    assert len(set(low)) == 30 and low[-1] < 60
    high = collections.Counter(x for x, name in zip(items, names, strict=True) if name == "high")
    assert set(high) == set(range(40, 100)) and set(high.values()) == {1, 2}


def test_samples_of_any_kind_get_the_number_of_their_source(key):
    texts = {name: ms.DatasetSource([{"text": name}] * 4, "sequential") for name in NAMES}
    view = ms.views.mix(texts, dict.fromkeys(NAMES, 1), source_field="source")
    mapped = ms.HostMapTransform(lambda sample: {"ok": np.bool_(NAMES[sample["source"]] == sample["text"])})
    loader = ms.DataLoader([view, mapped, ms.BatchTransform(12)])
    assert next(loader.iterate(loader.init_state(key)))[0]["ok"].all()
    large = ms.HostArraySource({"x": np.arange(5) + 2**40})  # functions on the host get all bits
    view = ms.views.mix({"a": large, "b": large}, {"a": 1, "b": 1}, source_field="source")
    kept = ms.HostMapTransform(lambda sample: {"x": np.int32(sample["x"] - 2**40), "source": sample["source"]})
    loader = ms.DataLoader([view, kept, ms.BatchTransform(10)])
    batch, _ = next(loader.iterate(loader.init_state(key)))
    assert sorted(batch["x"].tolist()) == sorted([*range(5)] * 2) and int(batch["source"].sum()) == 5


def test_a_mixture_in_a_mixture_goes_through_its_own_epochs(key):
    inner = ms.views.mix(sources(ordering="sequential"), {"a": 3, "b": 2, "c": 1}, samples=70)
    alone = ms.DataLoader([inner, ms.BatchTransform(35)])
    outer = ms.views.mix({"in": inner, "other": arrays(7, 30)}, {"in": 0.4, "other": 0.6}, samples=100)
    loader = ms.DataLoader([outer, ms.BatchTransform(25)])
    found = [x for batch in drawn(loader, key, 40) for x in batch]  # ten epochs of the outer one, 400 of the inner
    expected = [x for batch in drawn(alone, key, 12) for x in batch]
    assert [x for x in found if x < 7000] == expected[:400]
    assert collections.Counter(x for x in found if x >= 7000) == {7000 + k: 20 for k in range(30)}


def test_draws_by_weight_in_a_mixture_are_those_of_its_own_epochs(key):
    weighted = ms.views.weighted(arrays(0, 10), np.arange(10.0), samples=45)  # sample k comes k times
    view = ms.views.mix({"drawn": weighted, "other": arrays(1, 50)}, {"drawn": 1, "other": 2}, samples=270)
    loader = ms.DataLoader([view, ms.BatchTransform(27)])
    found = [x for batch in drawn(loader, key, 20) for x in batch if x < 1000]  # 180 draws: four of its epochs
    epochs = [found[start : start + 45] for start in range(0, 180, 45)]
    assert [sorted(collections.Counter(epoch).items()) for epoch in epochs] == [[(k, k) for k in range(1, 10)]] * 4
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_changed_mixture_continues_a_run(key):
    weights = {"a": 1, "b": 1, "c": 0}
    before = ms.views.mix(sources(), weights, samples=256)
    after = ms.views.reweight(before, {"a": 0, "b": 1, "c": 3}, after=3 * 256 + 64)
    runs = [drawn(ms.DataLoader([view, ms.BatchTransform(32)]), key, 60) for view in (before, after)]
    assert runs[0][:26] == runs[1][:26] and not any(x < 1000 for batch in runs[1][26:] for x in batch)
    b = [x for batch in runs[1] for x in batch if 1000 <= x < 2000]
    assert [len(set(b[start : start + 40])) for start in range(0, len(b) - 39, 40)] == [40] * (len(b) // 40)
    # What has changed, and when, is part of what the view and the pipeline are called.
    assert "changed after 832 samples" in repr(after) and "changed" not in repr(before)
    loader = ms.DataLoader([after, ms.BatchTransform(32)])
    assert dict(loader.pipeline.origin)["weights from step 26"] == after.selection.changes[0][1][:12]
    assert loader.explain().plan["sources"] == (
        "a 50.0 %, b 50.0 %, c 0.0 %; after 832 samples a 0.0 %, b 25.0 %, c 75.0 %"
    )


@pytest.mark.parametrize("ending", [{}, {"drop_last": True}, {"pad_last_batch": False}])
def test_stats_count_the_samples_of_each_source(ending, key):
    view = ms.views.mix(sources(), {"a": 2, "b": 1, "c": 1}, samples=70)
    loader = ms.DataLoader([view, ms.BatchTransform(32, **ending)])
    assert loader.stats().sources == {"a": 0, "b": 0, "c": 0} and ms.DataLoader([arrays(0, 9)]).stats().sources == {}
    seen = collections.Counter(dict.fromkeys(NAMES, 0))
    for first, steps in ((0, 7), (0, 1), (5, 4)):
        state = loader.init_state(key, step=first)
        for _, mask, info in loader.iterate(state, steps=steps, with_info=True):
            assert info.sources is not None
            seen.update(info.sources[np.asarray(mask)].tolist())
        assert loader.stats().sources == seen
    state, _, _ = loader.scan_epoch(loader.init_state(key), None, lambda carry, batch, mask: (carry, None))
    loader.next_batch(state)
    for _, mask, info in loader.iterate(loader.init_state(key), steps=loader.steps_per_epoch + 1, with_info=True):
        assert info.sources is not None
        seen.update(2 * info.sources[np.asarray(mask)].tolist())
    assert loader.stats().sources == seen and "of a" in repr(loader.stats())


def _noisy(value, mask, key):
    return {**value, "noise": jax.random.bits(key, (2,))}


def test_a_mixture_is_verified_and_explained(key):
    loader = ms.DataLoader([ms.views.mix(sources(dataset), {"a": 1, "b": 1, "c": 0}), ms.BatchTransform(32)])
    checked = loader.verify(key, executors=[ms.Threads(2)], hosts=[1, 2], progress=False)
    assert all(row.result == "ok" for row in checked.rows), checked
    assert "mixed of a: 300; b: 40; c: 75" in loader.explain().plan["view"]
    assert loader.explain().plan["sources"] == "a 50.1 %, b 49.9 %, c 0.0 %"
    assert loader.is_random
    assert not any(2000 <= x for batch in drawn(loader, key, 13) for x in batch)


def test_mixing_views_of_one_source_keeps_to_their_samples(key):
    source = arrays(0, 100)
    view = ms.views.mix({"low": source[:30], "high": source[60:]}, {"low": 1, "high": 1}, samples=64)
    loader = ms.DataLoader([view, ms.BatchTransform(32)])
    for batch in drawn(loader, key, 4):
        assert 15 <= sum(x < 30 for x in batch) <= 17 and not any(30 <= x < 60 for x in batch)


def test_weights_may_change(key):
    weights = {"a": ms.views.ramp(0.0, 1.0, samples=2560), "b": ms.views.ramp(1.0, 0.0, samples=2560), "c": 0.0}
    loader = ms.DataLoader([ms.views.mix(sources(), weights, samples=5120), ms.BatchTransform(256)])
    shares = [sum(x < 1000 for x in batch) / 256 for batch in drawn(loader, key, 20)]
    assert shares == sorted(shares) and np.abs(np.array(shares[:10]) - (np.arange(10) + 0.5) / 10).max() < 0.01
    assert shares[10:] == [1.0] * 10
    steps = {"a": ms.views.levels({0: 1.0, 512: 0.0}), "b": 1.0, "c": 0.0}
    loader = ms.DataLoader([ms.views.mix(sources(), steps, samples=1024), ms.BatchTransform(256)])
    assert [sum(x < 1000 for x in batch) for batch in drawn(loader, key, 4)] == [128, 128, 0, 0]
    cosine = ms.views.ramp(0.0, 1.0, samples=100, after=100, shape="cosine")
    assert cosine(np.array([0, 100, 150, 200, 300])).round(6).tolist() == [0, 0, 0.5, 1, 1]


def test_an_epoch_stops_before_a_source_comes_again(key):
    view = ms.views.mix(sources(), {"a": 2, "b": 1, "c": 1}, exhausted="stop")
    assert len(view) in (159, 160, 161)
    loader = ms.DataLoader([view, ms.BatchTransform(32)])
    counts = collections.Counter(x for batch in drawn(loader, key, loader.steps_per_epoch) for x in batch)
    assert max(counts.values()) == 1 and sum(1000 <= x < 2000 for x in counts) in (39, 40)


@pytest.mark.parametrize("times", [1, 2])
def test_exhausted_sources_drop_out_and_the_others_share_their_weight(times, key):
    view = ms.views.mix(sources(), {"a": 1, "b": 4, "c": 1}, exhausted="share", times=times)
    assert len(view) == times * sum(LENGTHS)
    loader = ms.DataLoader([view, ms.BatchTransform(32)])
    batches = drawn(loader, key, loader.steps_per_epoch)
    counts = collections.Counter(x for batch in batches for x in batch)
    assert set(counts.values()) == {times} and len(counts) == sum(LENGTHS)
    last = collections.Counter(x // 1000 for batch in batches[-3:-1] for x in batch)
    assert last[1] == 0


def test_the_table_of_a_long_mixture_is_small():
    length = 10**9
    shares = np.tile(np.full(8, 0.125), (len(blocks_of(length)), 1))
    function, table = mixed(shares, length, parts_of(*[10**8] * 8, shuffled=True))
    assert table[0].nbytes <= 5e6 and (function.counts(table, np.array(length)) == length // 8).all()
    for first in (0, length // 2, length - 5000):
        which = located(function, table, 0, np.arange(first, first + 5000)) // 10**8
        assert np.bincount(which.astype(np.int64), minlength=8).max() <= 626


def test_long_mixtures_are_as_exact_as_short_ones():
    length, rng = 2_000_000_000, np.random.default_rng(0)
    sizes = blocks_of(length)
    rows = np.linspace(rng.random(5), rng.random(5), len(sizes))
    shares = rows / rows.sum(axis=1, keepdims=True)
    function, table = mixed(shares, length, parts_of(*[10**9] * 5))
    ends = np.cumsum(sizes)
    assert np.abs(function.counts(table, ends) - np.cumsum(shares * sizes[:, None], axis=0)).max() < bound(5) + 1e-3
    assert (function.counts(table, ends).sum(axis=1) == ends).all()


mix: Any = ms.views.mix
reweight: Any = ms.views.reweight


def mixture():
    return mix(sources(), dict.fromkeys(NAMES, 1))


WRONG = {
    "no sources": (lambda: mix({}, {}), "mix needs at least one source"),
    "a list": (lambda: mix([arrays(0, 3)], [1]), "mix needs sources to be a dict of sources"),
    "no source": (lambda: mix({"a": 3}, {"a": 1}), "mix needs a source"),
    "names": (lambda: mix(sources(), {"a": 1}), "mix needs a weight for each source"),
    "text": (lambda: mix({"a": arrays(0, 3)}, {"a": "1"}), "the weight of 'a' to be a finite number"),
    "negative": (
        lambda: mix(sources(), {"a": 1, "b": -1, "c": 0}),
        "weights that are finite and not negative. 'b' has -1.0",
    ),
    "nan": (
        lambda: mix(sources(), {"a": 1, "b": float("nan"), "c": 0}),
        "the weight of 'b' to be a finite number. Got nan",
    ),
    "all zero": (
        lambda: mix({"a": arrays(0, 900)}, {"a": ms.views.levels({0: 1, 512: 0})}),
        "All are zero after 512 samples",
    ),
    "impure": (
        lambda: mix({"a": arrays(0, 9)}, {"a": lambda n: np.random.random(n.shape)}),
        "That of 'a' differs when it is asked again",
    ),
    "shape": (lambda: mix({"a": arrays(0, 9)}, {"a": lambda n: [1, 2, 3, 4]}), "functions of arrays"),
    "specs": (
        lambda: mix({"a": arrays(0, 9), "b": ms.ArraySampleSource({"y": np.zeros(3)})}, {"a": 1, "b": 1}),
        "mix needs sources with equal samples",
    ),
    "specs of a view": (
        lambda: mix(
            {"low": arrays(0, 9)[:5], "dark": ms.ArraySampleSource({"x": np.zeros(3)})[:2]}, {"low": 1, "dark": 1}
        ),
        r"'low', ArraySampleSource: \['x'\] int32\[\]\n  'dark', ArraySampleSource: \['x'\] float32\[\]",
    ),
    "field of an array": (
        lambda: mix({"a": ms.ArraySampleSource(np.zeros(3))}, {"a": 1}, source_field="source"),
        "adds the field 'source' to samples, so they need to be dicts.*Name the array",
    ),
    "field of a text": (
        lambda: mix({"a": ms.DatasetSource(["oat", "rye"])}, {"a": 1}, source_field="source").source.read(np.arange(1)),
        r"Sample 0 is 'oat' \(str\). Make it one: source.map",
    ),
    "field there is": (
        lambda: mix(sources(), dict.fromkeys(NAMES, 1), source_field="x"),
        "would overwrite the field 'x' of the samples. Pass a different name",
    ),
    "field": (
        lambda: mix(sources(), dict.fromkeys(NAMES, 1), source_field=3),
        "source_field to be the name of a field. Got 3",
    ),
    "no mixture": (lambda: reweight(arrays(0, 9), {"a": 1}, after=3), "reweight needs what ms.views.mix gave"),
    "a part": (lambda: reweight(mixture()[:5], {"a": 1}, after=3), "Change the weights first, then take parts of it"),
    "other names": (lambda: reweight(mixture(), {"a": 1}, after=3), "reweight needs a weight for each source"),
    "too early": (
        lambda: reweight(reweight(mixture(), dict.fromkeys(NAMES, 2), after=9), dict.fromkeys(NAMES, 1), after=9),
        "reweight needs after to be",
    ),
    "all zero later": (
        lambda: reweight(mixture(), dict.fromkeys(NAMES, ms.views.levels({0: 1, 256: 0})), after=3),
        "reweight needs a weight above zero at all times. All are zero after 256 samples",
    ),
    "times": (lambda: mix(sources(), dict.fromkeys(NAMES, 1), times=2), "takes times= with exhausted='stop'"),
    "samples": (
        lambda: mix(sources(), dict.fromkeys(NAMES, 1), samples=5, exhausted="stop"),
        "takes samples= with exhausted='repeat' alone",
    ),
    "ordering": (
        lambda: mix({"a": arrays(0, 9, ms.Shuffle("repeat"))}, {"a": 1}),
        "mix takes sources that are shuffled or in sequence",
    ),
    "no start": (lambda: ms.views.levels({5: 1.0}), "levels needs a weight from 0 on"),
    "ramp": (lambda: ms.views.ramp(0, 1, samples=0), "ramp needs samples"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mixtures_that_cannot_work_are_refused_by_name(name):
    make, message = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_a_run_past_what_a_program_can_count_is_refused(key):
    loader = ms.DataLoader([ms.views.mix(sources(), dict.fromkeys(NAMES, 1)), ms.BatchTransform(32)])
    with pytest.raises(ValueError, match="init_state needs step"):
        loader.init_state(key, step=2**32 // 32)
    assert drawn_at(loader, key, 2**32 // 32 - 2)


def drawn_at(loader, key, step):
    batch, _, _ = loader.next_batch(loader.init_state(key, step=step))
    compiled, _, _ = jax.jit(lambda loader, state: loader.next_batch(state))(loader, loader.init_state(key, step=step))
    return np.asarray(batch["x"]).tolist() == np.asarray(compiled["x"]).tolist()


def test_sources_that_drop_out_in_the_middle_of_a_block_are_counted_exactly():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 700, 4)
        total = int(lengths.sum())
        shares = np.tile(rng.dirichlet(np.ones(4)), (len(blocks_of(total)), 1))
        function, table = mixed_once(shares, total, parts_of(*lengths.tolist()), lengths)
        assert (function.counts(table, np.array(total)) == lengths).all()
        assert sorted(located(function, table, 0, range(total)).tolist()) == list(range(total))
