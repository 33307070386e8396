"""Mixtures: samples of several sources in every batch, compared with loops over lists."""

import collections
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from conftest import assert_trees_equal
from hypothesis import given, settings

import millstream as ms
from millstream.plan.mixture import block_size, mixed, mixed_once, rounded

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


WEIGHTS = st.lists(st.floats(0, 10).map(lambda x: 0.0 if x < 0.01 else x), min_size=1, max_size=5).filter(any)


@given(weights=WEIGHTS, blocks=st.integers(1, 60), rest=st.integers(0, 255), seed=st.integers(0, 999))
def test_quotas_add_up_never_fall_and_are_less_than_one_off(weights, blocks, rest, seed):
    length, rng = blocks * 256 + rest, np.random.default_rng(seed)
    rows = np.array(weights) * rng.choice([0.0, 1.0, 0.001], (-(-length // 256), len(weights)), p=[0.1, 0.8, 0.1])
    rows[rows.sum(axis=1) == 0] = weights
    shares = rows / rows.sum(axis=1, keepdims=True)
    table = rounded(shares, length)
    sizes = np.diff([*range(0, length, 256), length])
    exact = np.cumsum(shares * sizes[:, None], axis=0)
    assert (table[0] == 0).all() and (np.diff(table, axis=0) >= 0).all()
    assert (table[1:].sum(axis=1) == np.cumsum(sizes)).all()
    assert np.abs(table[1:] - exact).max() < 1.0 + 1e-6
    given = np.diff(table, axis=0)
    assert not given[:, np.array(weights) == 0].any()


@settings(max_examples=60)
@given(
    weights=st.lists(st.floats(0.01, 1), min_size=2, max_size=4),
    lengths=st.lists(st.integers(1, 60), min_size=4, max_size=4),
    length=st.integers(1, 900),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_source_goes_through_its_own_epochs_in_its_own_order(weights, lengths, length, seed):
    lengths = lengths[: len(weights)]
    shares = np.tile(np.array(weights) / np.sum(weights), (-(-length // 256), 1))
    function, table = mixed(shares, length, tuple((n, True) for n in lengths))
    words, positions = np.array([seed, 5], np.uint32), np.arange(length, dtype=np.uint64)
    firsts = np.cumsum([0, *lengths])
    given = [[] for _ in lengths]
    for epoch in range(3):
        found = function.locate(np, table, words, np.full(length, epoch, np.uint32), positions)
        for number, (first, n) in enumerate(zip(firsts, lengths, strict=False)):
            own = found[(first <= found) & (found < first + n)] - first
            assert len(own) == table[-1][number]
            given[number] += own.tolist()
    for own, n in zip(given, lengths, strict=True):
        # However they lie in their blocks, no sample comes again before all others have come, a block aside.
        counts = collections.Counter(own)
        assert not own or max(counts.values()) - min(counts.get(i, 0) for i in range(n)) <= 1


def test_compiled_programs_draw_the_same_samples():
    shares = np.tile([0.5, 0.3, 0.2], (3, 1))
    function, table = mixed(shares, 700, ((300, True), (40, False), (75, True)))
    words, positions = np.array([1, 2], np.uint32), np.arange(700)
    located = jax.jit(
        lambda words, epoch, table: function.locate(jax.numpy, table, words, epoch, positions.astype(np.uint32))
    )
    for epoch in (0, 1, 7):
        epochs = np.full(700, epoch, np.uint32)
        found = function.locate(np, table, words, epochs, positions.astype(np.uint64))
        assert located(words, epochs, table).tolist() == found.tolist()


def test_samples_are_spread_evenly_inside_a_block():
    weights = np.array([0.7, 0.2, 0.07, 0.03])
    function, table = mixed(np.tile(weights, (40, 1)), 40 * 256, tuple((10**6, False) for _ in weights))
    found = function.locate(
        np, table, np.zeros(2, np.uint32), np.zeros(10240, np.uint32), np.arange(10240, dtype=np.uint64)
    )
    counts = np.cumsum(found[:, None] // 10**6 == np.arange(4), axis=0)
    exact = np.arange(1, 10241)[:, None] * weights
    assert np.abs(counts - exact).max() < 3.0
    batches = np.diff(counts[31::32], axis=0, prepend=counts[:0].sum(axis=0, keepdims=True))
    assert np.abs(batches - 32 * weights).max() < 3.0


@pytest.mark.parametrize("make", [arrays, dataset])
def test_a_mixture_gives_the_same_batches_wherever_it_is_read(make, key):
    view = ms.views.mix(sources(), {"a": 0.5, "b": 0.25, "c": 0.25})
    plain = ms.DataLoader([view, ms.RandomMapTransform(_noisy), ms.BatchTransform(32)])
    steps = plain.steps_per_epoch + 3
    expected = [jax.device_get(pair) for pair in plain.iterate(plain.init_state(key), steps=steps)]
    other = ms.views.mix(sources(make), {"a": 0.5, "b": 0.25, "c": 0.25})
    for executor in (None, ms.Threads(2), ms.Processes(2)):
        loader = ms.DataLoader([other, ms.RandomMapTransform(_noisy), ms.BatchTransform(32)], executor=executor)
        assert_trees_equal([jax.device_get(p) for p in loader.iterate(loader.init_state(key), steps=steps)], expected)
    for step in range(0, steps, 4):
        batch, _, mask = plain.next_batch(plain.init_state(key, step=step))
        assert_trees_equal(jax.device_get((batch, mask)), expected[step])
    _, _, scanned = plain.scan_epoch(plain.init_state(key), None, lambda carry, batch, mask: (carry, (batch, mask)))
    for step in range(plain.steps_per_epoch):
        assert_trees_equal(jax.tree.map(lambda leaf, step=step: np.asarray(leaf[step]), scanned), expected[step])


def _noisy(value, mask, key):
    return {**value, "noise": jax.random.normal(key, (2,))}


def test_a_mixture_is_verified_and_explained(key):
    loader = ms.DataLoader([ms.views.mix(sources(dataset), {"a": 1, "b": 1, "c": 0}), ms.BatchTransform(32)])
    checked = loader.verify(key, executors=[ms.Threads(2)], hosts=[1, 2], progress=False)
    assert all(row.result == "ok" for row in checked.rows), checked
    assert "mixed of 300, 40, 75" in loader.explain().plan["view"]
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
    shares = np.tile(np.full(8, 0.125), (-(-length // block_size(length)), 1))
    function, table = mixed(shares, length, tuple((10**8, True) for _ in range(8)))
    assert table.nbytes <= 5e6 and (table[-1] == length // 8).all()
    positions = np.array([0, length // 2, length - 1], np.uint64)
    assert function.locate(np, table, np.zeros(2, np.uint32), np.zeros(3, np.uint32), positions).shape == (3,)


mix: Any = ms.views.mix
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
    "keyed": (
        lambda: mix({"a": ms.views.weighted(arrays(0, 9), np.ones(9))}, {"a": 1}),
        "differs from epoch to epoch. Mix its sources instead",
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
        weights = np.tile(rng.dirichlet(np.ones(4)), (-(-int(lengths.sum()) // 256), 1))
        _, table = mixed_once(weights, int(lengths.sum()), tuple((int(n), True) for n in lengths), lengths)
        assert (table[-1] == lengths).all() and (np.diff(table.astype(int), axis=0) >= 0).all()
