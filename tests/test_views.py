"""Views: which samples there are. Random ones, nested, are in test_nested_views.py."""

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
from hypothesis import given

import millstream as ms
from millstream.plan.planned import sample_keys
from millstream.plan.selection import Selection, drawn

N = 37
BATCH = 8


def arrays(ordering: Any = "sequential", n=N) -> Any:
    return ms.ArraySampleSource({"x": np.arange(n, dtype=np.int32), "y": np.arange(n, dtype=np.int32) % 4}, ordering)


def dataset(ordering: Any = "sequential", n=N) -> Any:
    return ms.DatasetSource([{"x": np.int32(i), "y": np.int32(i % 4)} for i in range(n)], ordering)


def indices_of(loader, key, steps):
    """The samples of each step, by what is in the batches and by what is said about them."""
    steps_of = []
    for batch, mask, info in loader.iterate(loader.init_state(key), steps=steps, with_info=True):
        found = np.asarray(batch["x"])[np.asarray(mask)].tolist()
        assert found == info.indices[info.indices >= 0].tolist()
        steps_of.append(found)
    return steps_of


def _is_even(sample):
    return sample["x"] % 2 == 0


VIEWS = {
    "slice": lambda source: source[3:33:2],
    "reversed": lambda source: source[::-1],
    "indices": lambda source: source[[5, 5, 36, 0, 7, 9, 11, 2, 3]],
    "mask": lambda source: ms.views.select(source, np.arange(N) % 3 != 0),
    "predicate": lambda source: ms.views.select(source, _is_even),
    "repeated": lambda source: ms.views.repeat(source[:10], 3),
    "nested": lambda source: ms.views.repeat(ms.views.select(source[1:30], _is_even)[::-1], 2)[3:],
    "split": lambda source: ms.views.split(source, {"train": 0.7, "test": 0.3})[0],
    "fold": lambda source: ms.views.folds(source, 3)[1][0],
    "concatenated": lambda source: ms.views.concat(source[:9], source[4:20], source[:2]),
    "weighted": lambda source: ms.views.weighted(source, np.arange(N), samples=50),
    "balanced": lambda source: ms.views.balanced(source[:30], "y", samples=24),
    "mixture": lambda source: ms.views.mix({"a": source[:20], "b": source[20:]}, {"a": 1, "b": 2}, samples=45),
    "packed": lambda source: ms.views.pack(ms.views.windows(source, 3), 7),
    "balanced part of a part": lambda source: ms.views.balanced(
        ms.views.split(source[[*range(3, N), 0, 0]], {"train": 0.8, "test": 0.2})[0], "y", samples=24
    ),
    "slice of weighted": lambda source: ms.views.weighted(source, np.arange(N), samples=50)[10:40],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_gives_the_same_batches_wherever_it_is_read(name, key):
    make, steps = VIEWS[name], 7
    stages = [ms.RandomMapTransform(_noisy), ms.BatchTransform(BATCH)]
    loader = ms.DataLoader([make(arrays("shuffle")), *stages])
    expected = [jax.device_get(pair) for pair in loader.iterate(loader.init_state(key), steps=steps)]
    ways = [
        ms.DataLoader([make(arrays("shuffle")), *stages], executor=ms.Threads(2)),
        ms.DataLoader([make(dataset("shuffle")), *stages]),
        ms.DataLoader([make(dataset("shuffle")), *stages], executor=ms.Processes(2)),
    ]
    for way in ways:
        found = [jax.device_get(pair) for pair in way.iterate(way.init_state(key), steps=steps)]
        assert_trees_equal(found, expected)
    state = loader.init_state(key)
    for pair in expected:
        batch, state, mask = jax.jit(_draw)(loader, state)
        assert_trees_equal(jax.device_get((batch, mask)), pair)
    for step in range(steps):  # any step alone
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


def test_views_over_eight_devices_give_the_same_batches():
    script = """
        import jax, numpy as np, millstream as ms
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        data = {"x": np.arange(100, dtype=np.int32)}
        for source in (ms.ArraySampleSource(data), ms.HostArraySource(data)):
            mixture = ms.views.mix({"a": source[:60], "b": source[30:]}, {"a": 1, "b": 2}, source_field="from")
            for view in (source[7:90:3], ms.views.weighted(source, np.arange(100), samples=60), mixture):
                key, stages = jax.random.key(0), [view, ms.BatchTransform(16)]
                plain, over = ms.DataLoader(stages), ms.DataLoader(stages, sharding=mesh)
                runs = [loader.iterate(loader.init_state(key), steps=6) for loader in (plain, over)]
                for one, two in zip(*runs, strict=True):
                    jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(two))
                total = lambda carry, batch, mask: (carry + (batch["x"] * mask).sum(), None)
                sums = [loader.scan_epoch(loader.init_state(key), np.int32(0), total)[1] for loader in (plain, over)]
                assert int(sums[0]) == int(sums[1])
    """
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", **CACHE}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env={**os.environ, **environment})


def test_views_of_equal_length_share_their_programs(key, count_compilations):
    one = ms.DataLoader([arrays()[[1, 2, 3, 4, 5]], ms.BatchTransform(BATCH)])
    next(one.iterate(one.init_state(key)))
    with count_compilations() as compiled:
        two = ms.DataLoader([arrays()[[5, 4, 3, 2, 30]], ms.BatchTransform(BATCH)])
        next(two.iterate(two.init_state(key)))
    assert compiled == [0]


def test_a_repeated_sample_has_a_key_of_its_own_every_time(key):
    view = ms.views.repeat(arrays()[:4], 2)
    loader = ms.DataLoader([view, ms.RandomMapTransform(_noisy), ms.BatchTransform(BATCH)])
    (batch, _, info) = next(loader.iterate(loader.init_state(key), with_info=True))
    assert info.indices.tolist() == [0, 1, 2, 3] * 2
    assert len({float(noise) for noise in batch["noise"][:, 0]}) == len(set(info.seeds.tolist())) == 8
    positions = sample_keys(np.asarray(jax.random.key_data(key)), np.zeros(8, np.uint32), np.arange(8)).astype(
        np.uint64
    )
    assert info.seeds.tolist() == ((positions[:, 1] << np.uint64(32)) | positions[:, 0]).tolist()


def test_a_state_of_a_different_view_is_refused_by_name(key):
    one, two = (ms.DataLoader([arrays()[picks], ms.BatchTransform(2)]) for picks in ([1, 2, 3], [1, 2, 4]))
    with pytest.raises(ValueError, match=r"differ in\n  view: 3 chosen \(.*\) in the state, 3 chosen \(.*\) here"):
        two.next_batch(one.init_state(key))


def test_functions_see_only_samples_of_the_view(key):
    def fails_for_the_first(sample):
        if sample["x"] < 20:
            raise OSError(f"cannot read {sample['x']}")
        return {"x": sample["x"]}

    loader = ms.DataLoader([dataset()[20:], ms.HostMapTransform(fails_for_the_first), ms.BatchTransform(BATCH)])
    assert list(itertools.chain(*indices_of(loader, key, loader.steps_per_epoch))) == list(range(20, N))


def test_collate_works_on_a_view(key):
    stack = lambda samples: {"x": np.stack([sample["x"] for sample in samples])}  # noqa: E731
    loader = ms.DataLoader([dataset()[::2], ms.BatchTransform(BATCH, collate=stack, drop_last=True)])
    assert list(itertools.chain(*indices_of(loader, key, 2))) == list(range(0, 32, 2))


@pytest.mark.parametrize("executor", [ms.InGraph(), ms.Threads(2)])
def test_loaders_with_views_of_equal_length_keep_their_own_tables(key, executor):
    picks = np.array([[1, 2, 3, 4, 5], [30, 2, 8, 4, 36]], np.uint32)
    loaders = [ms.DataLoader([arrays()[pick], ms.BatchTransform(5)], executor=executor) for pick in picks]
    state = [loader.init_state(key) for loader in loaders]
    for _ in range(2):
        for number, loader in enumerate(loaders):
            batch, state[number], _ = jax.jit(_draw)(loader, state[number])
            assert batch["x"].tolist() == picks[number].tolist()
            assert loader.next_batch(loader.init_state(key))[0]["x"].tolist() == picks[number].tolist()


def test_changing_the_indices_afterwards_changes_nothing(key):
    picks = np.arange(8, dtype=np.uint32)
    view, mask = arrays()[picks], np.arange(N) < 8
    masked = ms.views.select(arrays(), mask)
    loaders = [ms.DataLoader([one, ms.BatchTransform(BATCH)], executor=ms.Threads(1)) for one in (view, masked)]
    picks[:], mask[:] = 0, True
    for loader in loaders:
        assert indices_of(loader, key, 1) == [list(range(8))]


def test_small_integers_may_count_from_the_end():
    assert arrays(n=1000)[np.array([-1, 2], np.int8)].locate(np.arange(2)).tolist() == [999, 2]


def test_draws_depend_on_the_key_also_in_sequence(key, folder):
    loader = ms.DataLoader([ms.views.weighted(arrays(), np.arange(N)), ms.BatchTransform(N)])
    assert loader.is_random
    assert not ms.DataLoader([arrays()[3:], ms.BatchTransform(N)]).is_random
    with pytest.raises(ValueError, match=r"needs key=jax.random.key\(seed\)"):
        ms.loop(0, loader, {}, stop=1)
    expected = indices_of(loader, key, 4)
    assert len(set(map(tuple, expected))) > 1
    for found in (0, 4):
        cached = loader.replace(cache=ms.BatchCache(folder / "batches"))
        assert indices_of(cached, key, 4) == expected
        assert cached.stats().cached == found


def test_a_cache_of_a_different_view_is_refused_by_name(key, folder):
    for picks in ([1, 2, 3], [1, 2, 4]):
        loader = ms.DataLoader([arrays()[picks], ms.BatchTransform(3)], cache=ms.BatchCache(folder))
        if picks[-1] == 3:
            list(loader.iterate(loader.init_state(key)))
            continue
        with pytest.raises(ValueError, match=r"view: 3 chosen \(.*\) .*, 3 chosen \(.*\) "):
            list(loader.iterate(loader.init_state(key)))


def test_verify_reads_only_samples_of_the_view():
    texts = [{"x": np.int32(index), "text": f"word {index}"} for index in range(12)]

    def readable(sample):
        if sample["x"] == 0:
            raise OSError("sample 0 cannot be read")
        return sample["text"]

    loader = ms.DataLoader([ms.DatasetSource(texts)[1:], ms.HostMapTransform(readable), ms.BatchTransform(4)])
    verification = loader.verify(executors=[ms.Processes(1)], hosts=[], progress=False)
    executors = next(row for row in verification.rows if row.check == "executors")
    assert "Processes(1)" in executors.evidence and executors.notes == (
        "jax.jit and scan_epoch are left out: Python objects cannot enter a compiled program.",
    )


# Splits


@given(seed=st.integers(0, 2**32), times=st.integers(1, 3), fraction=st.floats(0.2, 0.8), cut=st.integers(0, 10))
def test_splits_never_leak(seed, times, fraction, cut):
    source = ms.views.repeat(arrays("shuffle")[cut:], times)[::-1]
    train, test = ms.views.split(source, {"train": fraction, "test": 1 - fraction}, seed=seed)
    known = [set(ms.views.repeat(part, 2)[1:].locate(np.arange(2 * len(part) - 1)).tolist()) for part in (train, test)]
    assert not known[0] & known[1]
    assert len(train) + len(test) == len(source)


def test_parts_are_divided_as_their_source_is():
    source, parts = arrays(n=2000), {"a": 0.5, "b": 0.5}
    half = ms.views.split(source, parts)[0]
    for seed in (0, 1):  # the seed of the first division, and a different one
        for part in ms.views.split(half, parts, seed=seed):
            assert abs(len(part) - len(half) / 2) < 100
    both = ms.views.concat(half, ms.views.split(arrays(n=1000), parts)[0])
    assert abs(len(ms.views.split(both, parts)[0]) - len(both) / 2) < 100
    by_group = [ms.views.split(arrays(n=2000), parts, by=np.arange(2000) // 4)[0]]
    for _ in range(2):
        last = by_group[-1]
        groups = last.locate(np.arange(len(last))) // 4
        by_group += [ms.views.split(last, parts, by=groups)[0]]
        assert abs(len(by_group[-1]) - len(last) / 2) < 150


def test_joining_sources_one_by_one_or_at_once_gives_the_same_parts():
    one, two, three = arrays(n=40), arrays(n=30), dataset(n=20)
    for sources in ((one, two, arrays(n=20)), (one, two, three)):
        at_once = ms.views.concat(*sources)
        stepwise = [
            ms.views.concat(ms.views.concat(*sources[:2]), sources[2]),
            ms.views.concat(sources[0], ms.views.concat(*sources[1:])),
        ]
        expected = [part.locate(np.arange(len(part))).tolist() for part in ms.views.folds(at_once, 3)[0]]
        for joined in stepwise:
            assert joined.read(np.arange(90))["x"].tolist() == at_once.read(np.arange(90))["x"].tolist()
            found = [part.locate(np.arange(len(part))).tolist() for part in ms.views.folds(joined, 3)[0]]
            assert found == expected


@pytest.mark.parametrize("seed", range(10))
def test_counts_are_exact_also_by_class(seed):
    chance = np.random.default_rng(seed)
    labels = chance.integers(0, 9, 200)
    sizes = np.diff([0, *sorted(chance.choice(np.arange(1, 200), 3, replace=False).tolist()), 200]).tolist()
    counts = dict(zip("abcd", sizes, strict=True))
    parts = ms.views.split(arrays(n=200), counts, stratify=labels, seed=seed)
    assert [len(part) for part in parts] == sizes
    for part, size in zip(parts, sizes, strict=True):
        found = np.bincount(labels[part.locate(np.arange(len(part)))], minlength=9)
        assert np.abs(found - np.bincount(labels) * size / 200).max() < 2


def test_a_sample_stays_in_its_part_when_others_are_appended():
    parts = {"train": 0.8, "test": 0.2}
    few, many = (ms.views.split(arrays(n=n), parts)[1] for n in (200, 300))
    before = few.locate(np.arange(len(few)))
    after = many.locate(np.arange(len(many)))
    assert after[after < 200].tolist() == before.tolist()
    joined = [ms.views.concat(arrays(n=n), arrays(n=50)) for n in (100, 130)]
    of_the_second = []
    for source, first in zip(joined, (100, 130), strict=True):
        test = ms.views.split(source, parts)[1]
        found = test.locate(np.arange(len(test)))
        of_the_second.append((found[found >= first] - first).tolist())
    assert of_the_second[0] == of_the_second[1]


@pytest.mark.parametrize("make", [arrays, dataset])
def test_groups_stay_together(make):
    for by in ("y", lambda sample: int(sample["y"]), np.arange(N) % 4):
        train, test = ms.views.split(make(), {"train": 0.5, "test": 0.5}, by=by)
        kinds = [set((part.locate(np.arange(len(part))) % 4).tolist()) for part in (train, test)]
        assert not kinds[0] & kinds[1]
        assert kinds == [{1, 2}, {0, 3}]  # a group is hashed by its value, however it is found


def test_groups_may_be_text():
    urls = [f"site{i % 5}" for i in range(40)]
    source = ms.DatasetSource([{"x": np.int32(i), "url": url} for i, url in enumerate(urls)])
    by_field = ms.views.split(source, {"a": 0.6, "b": 0.4}, by="url", seed=4)
    by_array = ms.views.split(source, {"a": 0.6, "b": 0.4}, by=np.array(urls), seed=4)
    for one, two in zip(by_field, by_array, strict=True):
        assert one.locate(np.arange(len(one))).tolist() == two.locate(np.arange(len(two))).tolist()


@pytest.mark.parametrize("seed", range(20))
def test_counts_and_classes_are_divided_exactly(seed):
    sizes = [len(part) for part in ms.views.split(arrays(), {"a": 20, "b": 10, "c": 7}, seed=seed)]
    assert sizes == [20, 10, 7]
    labels = np.random.default_rng(seed).integers(0, 5, N)
    parts = ms.views.split(arrays(), {"a": 0.6, "b": 0.4}, stratify=labels, seed=seed)
    for label, size in collections.Counter(labels.tolist()).items():
        found = sum(labels[parts[0].locate(np.arange(len(parts[0])))] == label)
        assert abs(found - 0.6 * size) <= 1


@pytest.mark.parametrize("options", [{}, {"by": "y"}, {"stratify": "y"}])
def test_folds_test_every_sample_once(options):
    tested = []
    for train, test in ms.views.folds(arrays(), 4, **options):
        found = [part.locate(np.arange(len(part))).tolist() for part in (train, test)]
        assert sorted(found[0] + found[1]) == list(range(N))
        assert abs(len(test) - N / 4) < 2
        tested += found[1]
    assert sorted(tested) == list(range(N))


# Weights


@given(seed=st.integers(0, 1000), epoch=st.integers(0, 3), samples=st.integers(1, 200))
def test_every_sample_comes_as_often_as_its_share_says(seed, epoch, samples):
    weights = np.random.default_rng(seed).exponential(1.0, N) * (np.random.default_rng(seed + 1).random(N) > 0.2)
    weights[0] += 0.01
    function, table = drawn(weights, samples)
    words, positions = np.array([seed, 7], np.uint32), np.arange(samples, dtype=np.uint32)
    epochs = np.full(samples, epoch, np.uint32)
    found = function.locate(np, table, words, epochs, positions)
    counts = np.bincount(found, minlength=N)
    shares = weights * samples / weights.sum()
    assert np.all(counts >= np.floor(shares - 1e-6)) and np.all(counts <= np.ceil(shares + 1e-6))
    assert counts.sum() == samples and not counts[weights == 0].any()


@pytest.mark.parametrize(("power", "draws"), [(1, 500), (40, 500), (40, 5000)])
def test_draws_are_the_same_in_a_compiled_program_and_new_every_epoch(power, draws):
    function, table = drawn(np.random.default_rng(0).random(1000) ** power, draws)  # 40: most samples come hardly ever
    words, positions = np.array([1, 2], np.uint32), np.arange(draws, dtype=np.uint32)
    located = jax.jit(
        lambda words, epoch, table: Selection((function,)).locate(jax.numpy, (table,), words, epoch, positions)
    )
    epochs = []
    for epoch in range(3):
        at = np.full(draws, epoch, np.uint32)
        found = function.locate(np, table, words, at, positions)
        assert found.tolist() == located(words, at, table).tolist()
        epochs.append(tuple(found.tolist()))
    assert len(set(epochs)) == 3


def test_without_replacement_a_sample_comes_at_most_once(key):
    weights = np.array([100.0, 50.0] + [1.0] * 35)
    view = ms.views.weighted(arrays(), weights, samples=12, replacement=False)
    loader = ms.DataLoader([view, ms.BatchTransform(12)])
    seen = collections.Counter()
    for epoch in indices_of(loader, key, 40):
        assert len(set(epoch)) == 12
        seen.update(epoch)
    assert seen[0] == seen[1] == 40  # their shares are above 1, so they come every time
    assert all(0 < seen[index] < 30 for index in range(2, N))


@pytest.mark.parametrize("samples", [36, 9, 300])
@pytest.mark.parametrize("labels", [np.repeat([0, 1, 2], [30, 5, 2]), np.arange(N) % 3, np.arange(N) ** 2 % 7])
def test_classes_are_balanced_exactly(key, labels, samples):
    loader = ms.DataLoader([ms.views.balanced(arrays(), labels, samples=samples), ms.BatchTransform(samples)])
    for epoch in indices_of(loader, key, 3):
        counts = [sum(labels[index] == label for index in epoch) for label in np.unique(labels)]
        assert all(abs(count - samples / len(counts)) <= 1 for count in counts)
        for label, count in zip(np.unique(labels), counts, strict=True):
            times = [epoch.count(index) for index in np.flatnonzero(labels == label)]
            assert max(times) - min(times) <= 1 + (count != samples / len(counts))


# Joined sources


def test_zipped_sources_stand_side_by_side(key):
    one, two = arrays(), dataset()
    for zipped in (ms.views.zip({"b": one, "a": two}), ms.views.zip({"b": one, "a": one})):
        sample = zipped[5]
        assert (sample["a"]["x"], sample["b"]["y"]) == (5, 1)
    pairs = ms.views.zip(one, two[::-1])
    loader = ms.DataLoader([pairs, ms.BatchTransform(BATCH)])
    (first, second), _ = next(loader.iterate(loader.init_state(key)))
    assert (np.asarray(first["x"]) + np.asarray(second["x"])).tolist() == [N - 1] * BATCH
    assert len(ms.views.zip(one, two[:5], shortest=True)) == 5


def test_concatenated_files_and_arrays_are_read_from_where_they_are(key):
    joined = ms.views.concat(dataset(), arrays(n=5))
    loader = ms.DataLoader([joined[30:], ms.BatchTransform(BATCH)])
    found = []
    for batch, mask in loader.iterate(loader.init_state(key)):
        found += np.asarray(batch["x"])[np.asarray(mask)].tolist()
    assert found == [*range(30, N), *range(5)]


@pytest.mark.parametrize("executor", [None, ms.Processes(1)])
def test_items_and_what_is_returned_beside_samples_come_through_a_join(key, executor):
    def fill(item, arrays, rng):
        arrays["x"][...] = item
        return {"name": f"number {item}"}

    spec = {"x": jax.ShapeDtypeStruct((), np.int32)}
    one, two = (ms.sources.FillSource([first, first + 1, first + 2], fill, spec) for first in (10, 20))
    loader = ms.DataLoader([ms.views.concat(one, two)[::-1], ms.BatchTransform(6)], executor=executor)
    batch, _, info = next(loader.iterate(loader.init_state(key), with_info=True))
    assert sorted(batch["x"].tolist()) == [10, 11, 12, 20, 21, 22]
    assert info.items == batch["x"].tolist()
    assert info.additional == {"name": [f"number {item}" for item in info.items]}
    mixed = ms.DataLoader([ms.views.concat(one, ms.HostArraySource({"x": np.arange(3, dtype=np.int32)}))])
    assert sorted(int(batch["x"]) for batch, _ in mixed.iterate(mixed.init_state(key))) == [0, 1, 2, 10, 11, 12]


def test_one_source_alone_takes_a_different_order_when_it_is_joined(key):
    source = arrays("shuffle")
    assert ms.views.concat(source) is source
    loader = ms.DataLoader([ms.views.concat(source, ordering="sequential"), ms.BatchTransform(N)])
    assert indices_of(loader, key, 1) == [list(range(N))]


@given(n=st.sampled_from([1, 2, 7, 1000, 2**20 + 7]), seed=st.integers(0, 100))
def test_a_permutation_is_one(n, seed):
    positions = np.arange(min(n, 500))
    found = ms.views.permutation(jax.random.key(seed), n, positions)
    assert len(set(found.tolist())) == len(positions) and 0 <= found.min() and found.max() < n
    if n == 1000:
        assert sorted(ms.views.permutation(jax.random.key(seed), n, np.arange(n)).tolist()) == list(range(n))
        assert found.tolist() == ms.views.permutation(jax.random.key(seed), n, jax.numpy.arange(500)).tolist()


# What is refused


_ANY: Any = [1, 2]
_STREAM: Any = ms.BatchTransform(2)(arrays())
_HALVES = {"a": 0.5, "b": 0.5}


def _raises(sample):
    raise KeyError("no such field")


WRONG = {
    "an empty slice": (lambda: arrays()[5:5], ValueError, r"ArraySampleSource\[5:5\] is empty: there are 37 samples"),
    "an index too far": (lambda: arrays()[37], IndexError, r"ArraySampleSource\[37\]: there are 37 samples"),
    "indices too far": (lambda: arrays()[[1, 99]], IndexError, "has 37 samples, and no sample 99"),
    "a short mask": (lambda: arrays()[[True]], ValueError, "the mask 1 bools. It needs one each"),
    "a long mask": (lambda: arrays()[[True] * 40], ValueError, "the mask 40 bools. It needs one each"),
    "no indices": (lambda: arrays()[[]], ValueError, "ArraySampleSource: nothing is selected"),
    "no indices to select": (lambda: ms.views.select(arrays(), []), ValueError, "select: nothing is selected"),
    "an empty slice of a view": (lambda: arrays()[5:][40:], ValueError, r"View\[40:\] is empty: there are 32 samples"),
    "reading past a view": (
        lambda: arrays()[5:10].read(np.array([1, 5])),
        IndexError,
        r"View\(5 samples: \[5:10\] of ArraySampleSource\) has positions from 0 to 4. Got 1 to 5",
    ),
    "reading before a view": (lambda: arrays()[5:].read(np.array([-1])), IndexError, "0 to 31. Got -1 to -1"),
    "a mask of nothing": (lambda: arrays()[np.zeros(N, bool)], ValueError, "nothing is selected"),
    "text": (
        lambda: arrays()["x"],
        TypeError,
        "takes a slice, an index, a list of indices or a mask of bools. Got 'x'",
    ),
    "a stream": (
        lambda: ms.views.select(_STREAM, _is_even),
        TypeError,
        "select needs a source.*A stream has no samples to choose from",
    ),
    "a list": (lambda: ms.views.repeat(_ANY, 2), TypeError, "repeat needs a source.*ms.DatasetSource"),
    "a predicate of numbers": (
        lambda: ms.views.select(arrays(), lambda sample: sample["x"] + 1),
        TypeError,
        r"select\(<lambda>\) must return True or False. Got np.int32\(1\)",
    ),
    "a predicate of text": (
        lambda: ms.views.select(arrays(), lambda sample: "yes"),  # pyright: ignore[reportArgumentType]
        TypeError,
        r"select\(<lambda>\) must return True or False. Got 'yes'",
    ),
    "a predicate of several": (
        lambda: ms.views.select(arrays(), lambda sample: np.array([True, False])),  # pyright: ignore[reportArgumentType]
        TypeError,
        r"select\(<lambda>\) must return True or False. Got",
    ),
    "a predicate of nothing": (
        lambda: ms.views.select(arrays(), lambda sample: None),  # pyright: ignore[reportArgumentType]
        TypeError,
        r"select\(<lambda>\) must return True or False. Got None",
    ),
    "a predicate that keeps nothing": (
        lambda: ms.views.select(arrays(), lambda s: False),
        ValueError,
        "kept none of the 37",
    ),
    "fractions above 1": (
        lambda: ms.views.split(arrays(), {"a": 0.5, "b": 0.6}),
        ValueError,
        r"add up to 1. Got 0.5 \+ 0.6 = 1.1",
    ),
    "fractions below 1": (
        lambda: ms.views.split(arrays(), {"a": 0.5, "b": 0.4}),
        ValueError,
        r"add up to 1. Got 0.5 \+ 0.4 = 0.9. Name the rest too",
    ),
    "a fraction that is not a number": (
        lambda: ms.views.split(arrays(), {"a": float("nan"), "b": 0.5}),
        ValueError,
        "fractions or counts above zero. Got {'a': nan, 'b': 0.5}",
    ),
    "a list of fractions": (
        lambda: ms.views.split(arrays(), [0.5, 0.5]),  # pyright: ignore[reportArgumentType]
        TypeError,
        "split needs parts to be a dict such as {'train': 0.9, 'test': 0.1}",
    ),
    "counts": (
        lambda: ms.views.split(arrays(), {"a": 5, "b": 6}),
        ValueError,
        "counts that add up to 37 samples. Got 11",
    ),
    "one part": (lambda: ms.views.split(arrays(), {"a": 1.0}), ValueError, "at least two parts"),
    "a negative fraction": (lambda: ms.views.split(arrays(), {"a": 1.5, "b": -0.5}), ValueError, "above zero"),
    "an empty part": (
        lambda: ms.views.split(arrays(), {"a": 1 - 1e-6, "b": 1e-6}),
        ValueError,
        "leaves nothing for 'b'",
    ),
    "too few groups": (
        lambda: ms.views.split(arrays(), {"a": 0.5, "b": 0.5}, by="y", seed=1),
        ValueError,
        "leaves nothing for 'b': there are 4 groups. Choose a different seed, fractions, or counts",
    ),
    "groups and classes": (
        lambda: ms.views.split(arrays(), {"a": 0.5, "b": 0.5}, by="y", stratify="y"),
        ValueError,
        "takes by= or stratify=, not both",
    ),
    "never": (lambda: ms.views.repeat(arrays(), 0), ValueError, "repeat needs times to be an int of at least 1. Got 0"),
    "too often": (
        lambda: ms.views.repeat(arrays(), 10**9),
        ValueError,
        "repeat: 1,000,000,000 times 37 samples are more than a view of them can have, 2,147,483,647. Repeat a part",
    ),
    "counts of what repeats": (
        lambda: ms.views.split(ms.views.repeat(arrays(), 2), {"a": 37, "b": 37}),
        ValueError,
        "Divide the source before it is repeated",
    ),
    "classes of what repeats": (
        lambda: ms.views.folds(ms.views.repeat(arrays(), 2), 2, stratify="y"),
        ValueError,
        "folds with stratify= needs samples that come once. Divide the source before it is repeated",
    ),
    "groups of counts": (
        lambda: ms.views.split(arrays(), {"a": 20, "b": 17}, by="y"),
        ValueError,
        "split by counts cannot keep groups together. Give fractions",
    ),
    "too few labels": (
        lambda: ms.views.split(arrays(), _HALVES, stratify=[0, 1]),
        ValueError,
        r"split needs stratify to be the name of a field.*each of the 37 samples. Got shape \(2,\)",
    ),
    "one fold": (lambda: ms.views.folds(arrays(), 1), ValueError, "folds needs count to be .* at least 2. Got 1"),
    "folds of draws": (
        lambda: ms.views.folds(ms.views.weighted(arrays(), np.ones(N)), 3),
        TypeError,
        "folds: .* differs from epoch to epoch. Divide its source",
    ),
    "a predicate on draws": (
        lambda: ms.views.select(ms.views.weighted(arrays(), np.ones(N)), _is_even),
        TypeError,
        r"select\(_is_even\): View.* differs from epoch to epoch. Apply select\(_is_even\) to its source instead",
    ),
    "draws that are joined": (
        lambda: ms.views.concat(ms.views.weighted(arrays(), np.ones(N)), arrays()),
        TypeError,
        "Slice, split, concatenate and zip the source first, and weight the result",
    ),
    "draws side by side": (
        lambda: ms.views.zip(ms.views.weighted(arrays(), np.ones(N)), dataset()),
        TypeError,
        "Slice, split, concatenate and zip the source first, and weight the result",
    ),
    "a seed below zero": (lambda: ms.views.folds(arrays(), 2, seed=-1), ValueError, "folds needs seed to be .*Got -1"),
    "too many folds": (
        lambda: ms.views.folds(arrays()[:3], 5),
        ValueError,
        "cannot make 5 folds: there are only 3 samples",
    ),
    "far more folds than samples": (
        lambda: ms.views.folds(arrays(), 2**40),
        ValueError,
        "cannot make 1,099,511,627,776 folds: there are only 37 samples",
    ),
    "negative weights": (lambda: ms.views.weighted(arrays(), -np.ones(N)), ValueError, "Sample 0 has -1.0"),
    "NaN": (
        lambda: ms.views.weighted(arrays(), np.where(np.arange(N) == 3, np.nan, 1)),
        ValueError,
        "Sample 3 has nan",
    ),
    "infinite weights": (
        lambda: ms.views.weighted(arrays(), np.where(np.arange(N) == 5, np.inf, 1)),
        ValueError,
        "Sample 5 has inf",
    ),
    "weights of text": (lambda: ms.views.weighted(arrays(), ["a"] * N), ValueError, "a number for each of the 37"),
    "no draws": (lambda: ms.views.weighted(arrays(), np.ones(N), samples=0), ValueError, "samples to be .*Got 0"),
    "more than weights are kept for": (
        lambda: ms.views.weighted(ms.DiskSampleSource(10**9, np.float32), [1.0]),
        ValueError,
        "weighted draws from at most 500,000,000 samples. Got 1,000,000,000. Select those with a weight first",
    ),
    "no weight": (lambda: ms.views.weighted(arrays(), np.zeros(N)), ValueError, "All are zero"),
    "too few weights": (
        lambda: ms.views.weighted(arrays(), [1.0]),
        ValueError,
        r"each of the 37 samples. Got shape \(1,\)",
    ),
    "too many without replacement": (
        lambda: ms.views.weighted(arrays(), np.arange(N) < 5, replacement=False),
        ValueError,
        "cannot draw 37 samples: 5 have a weight above zero",
    ),
    "a split of draws": (
        lambda: ms.views.split(ms.views.weighted(arrays(), np.ones(N)), {"a": 0.5, "b": 0.5}),
        TypeError,
        "differs from epoch to epoch. Divide its source",
    ),
    "different samples": (
        lambda: ms.views.concat(arrays(), ms.ArraySampleSource({"x": np.zeros(3)})),
        ValueError,
        r"concat needs sources with equal samples. Got:\n  source 0, ArraySampleSource: \['x'\] int32\[\], \['y'\]",
    ),
    "different lengths": (
        lambda: ms.views.zip(arrays(), arrays(n=3)),
        ValueError,
        "source 1: +3 samples\nPass shortest=True",
    ),
    "positions too far": (lambda: ms.views.permutation(jax.random.key(0), 5, [7]), ValueError, "positions from 0 to 4"),
    "a key as positions": (
        lambda: ms.views.permutation(jax.random.key(0), 5, jax.random.key(1)),
        TypeError,
        r"positions that are integers. Got shape \(\), key<fry>",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_viewed_is_refused_by_name(name):
    make, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        make()


@pytest.mark.parametrize(
    "view",
    [
        lambda source: ms.views.select(source, [0]),
        lambda source: ms.views.repeat(source, 2),
        lambda source: ms.views.split(source, _HALVES),
        lambda source: ms.views.folds(source, 2),
        lambda source: ms.views.weighted(source, [1.0]),
        lambda source: ms.views.balanced(source, "y"),
        lambda source: ms.views.concat(arrays(), source),
        lambda source: ms.views.zip(arrays(), source),
    ],
)
def test_a_stream_has_no_views(view):
    with pytest.raises(TypeError, match=r"^\w+ needs a source.*A stream has no samples to choose from"):
        view(_STREAM)
    with pytest.raises(TypeError, match=r"^\w+ needs a source.*Got the class|^\w+ needs a source.*Got <class"):
        view(ms.ArraySampleSource)


def test_a_predicate_that_raises_names_its_sample():
    with pytest.raises(KeyError) as caught:
        ms.views.select(arrays(), _raises)
    assert "This came from select(_raises) at sample 0." in caught.value.__notes__


@pytest.mark.parametrize("executor", [None, ms.Threads(2), ms.Processes(1)])
def test_a_predicate_that_fails_late_names_the_sample_of_the_source(executor):
    def raises_at(sample):
        if sample["x"] == 30:
            raise KeyError("no such field")
        return True

    def counts_at(sample) -> Any:
        return True if sample["x"] < 30 else 1

    with pytest.raises(KeyError) as caught:
        ms.views.select(arrays()[::-1][:20], raises_at, executor=executor)
    assert any("raises_at) at sample 30." in note for note in caught.value.__notes__)
    with pytest.raises(TypeError, match=r"must return True or False\. Got 1") as refused:
        ms.views.select(arrays()[5:], counts_at, executor=executor)
    assert any(re.search(r"counts_at\) at sample 3\d\.", note) for note in refused.value.__notes__)


def test_a_field_that_is_not_there_is_named():
    with pytest.raises(KeyError) as caught:
        ms.views.split(arrays(), _HALVES, by="z")
    assert any("There is no field 'z' in" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("name", ["nested", "weighted"])
def test_verify_proves_views(name):
    for source in (arrays("shuffle"), dataset("shuffle")):
        loader = ms.DataLoader([VIEWS[name](source), ms.RandomMapTransform(_noisy), ms.BatchTransform(BATCH)])
        verification = loader.verify(executors=[ms.InGraph(), ms.Threads(2)], hosts=[1, 2, 4], progress=False)
        assert {row.check: row.result for row in verification.rows}["samples"] == "ok"
        assert "view" in str(loader.explain())
