"""`ms.inspect.statistics` and `drift`: against NumPy and fractions, on every executor, without false alarms."""

import fractions
import math
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_html import parsed

import millstream as ms
from millstream.inspect._tallies import KEPT, QUANTILES, NumberTally

SEEDS = st.integers(0, 2**32 - 1)


def look(data: Any, *args: Any, **options: Any) -> Any:
    return ms.inspect.statistics(data, *args, progress=False, **options)


def compare(a: Any, b: Any, **options: Any) -> ms.inspect.Drift:
    return ms.inspect.drift(a, b, progress=False, **options)


def summary_of(tally: NumberTally) -> ms.inspect.NumberSummary:
    summary = tally.summary()
    assert summary is not None
    return summary


def arrays(**leaves):
    return ms.ArraySampleSource(leaves, ordering="sequential")


# Against NumPy


@given(seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_integers_are_exact(seed):
    rng = np.random.default_rng(seed)
    dtype = np.dtype(str(rng.choice(["u1", "i2", "i4", "u4", "i8", "u8"])))
    info, tally = np.iinfo(dtype), NumberTally(0)
    numbers = rng.integers(info.min, info.max, rng.integers(1, 400), dtype, endpoint=True)
    for part in np.array_split(numbers, rng.integers(1, 6)):
        tally.add(part[:, None])
    summary, whole = summary_of(tally), [int(number) for number in numbers]
    mean = fractions.Fraction(sum(whole), len(whole))
    variance = sum((number - mean) ** 2 for number in whole) / len(whole)
    assert summary.count == len(whole) and (summary.minimum, summary.maximum) == (min(whole), max(whole))
    assert summary.mean == float(mean)
    assert math.isclose(summary.std, math.sqrt(variance), rel_tol=1e-15)


@given(seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_floats_do_not_lose_digits_however_they_are_divided(seed):
    rng = np.random.default_rng(seed)
    numbers = 10.0 ** rng.integers(0, 9) + rng.normal(size=rng.integers(2, 500))
    tally = NumberTally(0)
    for part in np.array_split(numbers, rng.integers(1, 20)):
        tally.add(part[:, None])
    exact = [fractions.Fraction(number) for number in numbers.tolist()]
    mean = sum(exact) / len(exact)
    std = math.sqrt(sum((number - mean) ** 2 for number in exact) / len(exact))
    summary = summary_of(tally)
    assert math.isclose(summary.mean, mean, rel_tol=1e-15)
    assert math.isclose(summary.std, std, rel_tol=1e-12)


@given(seed=SEEDS)
@settings(max_examples=25, deadline=None)
def test_quantiles_are_those_of_numpy_while_all_values_are_kept(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 3000))
    numbers = [rng.normal(size=n), rng.integers(0, 9, n), np.round(rng.normal(size=n))][rng.integers(3)]
    for values in (numbers, rng.integers(0, 256, n, np.uint8)):
        tally = NumberTally(seed)
        for part in np.array_split(values, 3):
            tally.add(part[:, None])
        summary = summary_of(tally)
        assert summary.exact
        for share in QUANTILES:
            assert summary.quantiles[share] == np.quantile(values, share, method="inverted_cdf")
        assert math.isclose(summary.weights.sum(), 1.0)


@pytest.mark.parametrize("seed", range(4))
def test_quantiles_of_many_values_are_close_and_say_so(seed):
    numbers = np.random.default_rng(seed).exponential(size=300_000)
    tally = NumberTally(seed)
    for part in np.array_split(np.sort(numbers), 40):
        tally.add(part[:, None])
    summary = summary_of(tally)
    assert not summary.exact and len(summary.values) == KEPT
    for share in QUANTILES:
        below = np.mean(numbers <= summary.quantiles[share])
        assert abs(below - share) < 5 * math.sqrt(share * (1 - share) / KEPT)


@given(seed=SEEDS)
@settings(max_examples=20, deadline=None)
def test_leaves_of_a_source_are_counted(seed):
    rng = np.random.default_rng(seed)
    n = 150
    x = rng.normal(size=(n, 3)).astype(np.float32)
    x[rng.random((n, 3)) < 0.1] = np.nan
    x[0, 0], x[1, 1] = np.inf, -np.inf
    image = rng.integers(0, 256, (n, 4, 4, 3), np.uint8)
    label, flag = rng.integers(0, 4, n), rng.random(n) < 0.3
    found = look(arrays(x=x, image=image, label=label, flag=flag))
    finite = x[np.isfinite(x)].astype(np.float64)
    leaf = found["x"]
    assert (leaf.nan, leaf.infinite, leaf.missing, leaf.present) == (np.isnan(x).sum(), 2, 0, n)
    assert math.isclose(leaf.numbers.mean, finite.mean(), rel_tol=1e-12, abs_tol=1e-12)
    assert math.isclose(leaf.numbers.std, finite.std(), rel_tol=1e-12)
    assert leaf.what == "f32[3]" and leaf.classes is None and leaf.lengths is None
    wide = image.reshape(-1, 3).astype(np.float64)
    assert np.allclose(found["image"].channel_mean, wide.mean(axis=0), rtol=1e-14)
    assert np.allclose(found["image"].channel_std, wide.std(axis=0), rtol=1e-14)
    assert math.isclose(found["image"].numbers.mean, wide.mean(), rel_tol=1e-14)
    values, counts = np.unique(label, return_counts=True)
    assert found["label"].classes == dict(zip(values.tolist(), counts.tolist(), strict=True))
    assert list(found["label"].classes.values()) == sorted(counts.tolist(), reverse=True)
    assert found["flag"].classes == {False: n - flag.sum(), True: flag.sum()}
    assert found.samples == found.total == n and found.complete


def test_ragged_and_missing_leaves_are_counted():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, 200)
    items = [
        {"ids": rng.integers(0, 9, n).tolist(), "text": "ab" * (n % 4), "w": None if n % 5 == 0 else float(n)}
        for n in lengths.tolist()
    ]
    items[7] = {"ids": items[7]["ids"], "text": items[7]["text"]}
    found = look(ms.DatasetSource(items))
    ids = np.concatenate([np.asarray(item["ids"]) for item in items])
    assert found["ids"].shapes == ((lengths.min(), lengths.max()),) and found["ids"].numbers.count == len(ids)
    assert found["ids"].numbers.mean == ids.mean() and found["ids"].lengths.mean == lengths.mean()
    assert found["text"].classes == {
        "ab" * n: count for n, count in sorted(zip(*np.unique(lengths % 4, return_counts=True), strict=True))
    }
    assert found["text"].lengths.maximum == 6 and found["text"].numbers is None
    there = [item["w"] for item in items if item.get("w") is not None]
    assert found["w"].missing == 200 - len(there) and math.isclose(found["w"].numbers.mean, np.mean(there))


def test_images_of_different_sizes_keep_their_channels():
    rng = np.random.default_rng(0)
    items = [{"image": rng.integers(0, 256, (h, 5, 3), np.uint8)} for h in (4, 7, 9)]
    found = look(ms.DatasetSource(items))["image"]
    wide = np.concatenate([item["image"].reshape(-1, 3) for item in items]).astype(float)
    assert found.what == "u8[4..9,5,3]" and np.allclose(found.channel_mean, wide.mean(axis=0))
    items.append({"image": np.zeros((4, 4, 1), np.uint8)})
    mixed = look(ms.DatasetSource(items))["image"]
    assert mixed.numbers.count == wide.size + 16 and math.isclose(mixed.numbers.mean, wide.sum() / (wide.size + 16))


def test_numbers_that_are_all_different_are_not_classes():
    found = look(arrays(id=np.arange(500), few=np.arange(500) % 7))
    assert found["id"].classes is None and len(found["few"].classes) == 7


# Executors, choices, views, loaders


def same(one, other):
    """Whether two statistics are equal bit for bit."""
    flat = [
        jax.tree.leaves([[vars(leaf), vars(leaf.numbers) if leaf.numbers else 0] for leaf in s.values()])
        for s in (one, other)
    ]
    pairs = list(zip(*flat, strict=True))
    plain = [(a, b) for a, b in pairs if not isinstance(a, ms.inspect.NumberSummary)]
    return list(one) == list(other) and len(plain) > 10 and all(np.array_equal(a, b) for a, b in plain)


@pytest.mark.parametrize("ragged", [False, True])
def test_every_executor_finds_the_same_bits(ragged):
    rng = np.random.default_rng(0)
    if ragged:
        source = ms.DatasetSource([{"x": rng.normal(size=rng.integers(1, 9)), "y": n % 3} for n in range(300)])
    else:
        source = ms.sources.HostArraySource({"x": rng.normal(size=(20_000, 4)), "y": rng.integers(0, 5, 20_000)})
    first = look(source)
    for executor in (ms.InGraph(), ms.Threads(1), ms.Threads(3), ms.Processes(2)):
        assert same(look(source, executor=executor), first)
    assert not same(look(source[:-1]), first)


def test_some_samples_are_chosen_by_the_key_and_it_says_so():
    source = arrays(x=np.arange(5000))
    one, again, other = (look(source, jax.random.key(seed), samples=700) for seed in (0, 0, 1))
    assert same(one, again) and not same(one, other)
    assert not one.complete and one.samples == 700 and one["x"].numbers.count == 700
    assert len(np.unique(one["x"].numbers.values)) == 700, "none is chosen twice"
    assert abs(one["x"].numbers.mean - 2499.5) < 5 * 5000 / math.sqrt(12 * 700)
    assert str(one).startswith("700 of 5,000 samples, chosen at random: all figures are those of the choice")
    assert look(source, samples=9999).complete


def test_views_are_looked_at_as_they_are():
    source = arrays(x=np.arange(100))
    assert look(source[10:20])["x"].numbers.mean == 14.5
    assert look(ms.views.select(source, lambda sample: sample["x"] % 2 == 0))["x"].numbers.count == 50
    heavy = look(ms.views.weighted(source, np.arange(100) >= 90))["x"].numbers
    assert heavy.minimum == 90 and heavy.count == 100
    mixed = look(ms.views.mix({"a": source[:10], "b": source[90:]}, {"a": 1, "b": 1}))["x"].numbers
    assert (mixed.minimum, mixed.maximum) == (0, 99)


def test_a_loader_is_looked_at_without_rows_that_do_not_count():
    image = np.random.default_rng(0).integers(0, 256, (50, 8, 8, 1), np.uint8)
    source = arrays(image=image)
    normalize = ms.NormalizeImageTransform(**look(source)["image"].normalization)
    loader = ms.DataLoader([source, ms.BatchTransform(16), normalize])
    found = look(loader)
    assert found.samples == 50 and found.complete and found["image"].numbers.count == image.size
    assert abs(found["image"].numbers.mean) < 1e-6 and abs(found["image"].numbers.std - 1) < 1e-6
    some = look(loader, samples=20)
    assert some.samples == 20 and not some.complete and str(some).startswith("the first 20 samples")
    mixed = look(ms.loader.MixedLoader({"a": loader, "b": loader}))
    assert mixed.samples == 100


# What people see


def test_statistics_are_tables():
    found = look(arrays(**{"<x>": np.arange(100) % 5, "y": np.linspace(0, 1, 100, dtype=np.float32)}))
    assert [line for line in str(found).splitlines() if "──" not in line] == [
        "100 samples, all of them",
        "",
        "leaf  what   mean    std  min  median  max  spread        more",
        "<x>   i32[]     2   1.41    0       2    4                5 classes: 0: 20, 1: 20, 2: 20, 3: 20, ...",
        "y     f32[]   0.5  0.292    0   0.495    1  ▇▇▇▇▇▇▇▇▇▇▇█",
    ]
    assert "<x>" in parsed(found).words
    result = compare(arrays(**{"<x>": np.zeros(50)}), arrays(**{"<x>": np.ones(50)}))
    assert "<x>" in parsed(result).words


def test_classes_with_hostile_names_are_escaped():
    source = ms.DatasetSource([{"name": "<script>alert(1)</script>"}] * 30)
    page = parsed(look(source))
    assert any("'<script>alert(1)</sc..." in word for word in page.words)


def test_wrong_arguments_are_refused_by_name():
    source = arrays(x=np.arange(4))
    loader = ms.DataLoader([source, ms.BatchTransform(2)])
    with pytest.raises(
        TypeError, match=r"statistics needs a source, such as ms.ArraySampleSource\(data\), a view, or a"
    ):
        look([1, 2])
    with pytest.raises(TypeError, match=r"statistics needs executor to be one such as ms.Threads\(4\).*Got 3"):
        look(source, executor=3)
    with pytest.raises(ValueError, match=r"statistics reads a loader with its own executor. Write loader.replace"):
        look(loader, executor=ms.Threads(2))
    with pytest.raises(ValueError, match=r"statistics needs samples to be an int of at least 1. Got 0"):
        look(source, samples=0)
    with pytest.raises(ValueError, match=r"normalization needs numbers that differ. Those of 'x' do not"):
        _ = look(arrays(x=np.zeros(4)))["x"].normalization
    total = ms.MapTransform(lambda value, mask: {**value, "total": value["x"].sum()})
    with pytest.raises(ValueError, match=r"statistics needs a row for each sample in every leaf .*'total'"):
        look(ms.DataLoader([source, ms.BatchTransform(2), total]))
    with pytest.raises(TypeError, match="statistics needs a source") as raised:
        compare(source, 3)
    assert raised.value.__notes__ == ["drift was looking at b."]


# Drift


def mixed_leaves(rng, n):
    """Leaves of many kinds: heavy tails, rare classes, numbers that depend on each other, missing values."""
    return {
        "normal": rng.normal(size=n),
        "cauchy": rng.standard_cauchy(n),
        "spread": np.exp(3 * rng.normal(size=n)),
        "class": rng.integers(0, 5, n),
        "rare": np.minimum(rng.zipf(1.5, n), 10**6),
        "id": rng.permutation(n),
        "flag": rng.random(n) < 0.01,
        "image": (rng.random((n, 1, 1, 3)) * np.ones((1, 4, 4, 1))).astype(np.float32),
        "zeros": np.where(rng.random(n) < 0.9, 0.0, rng.random(n)),
        "gaps": np.where(rng.random(n) < 0.2, np.nan, rng.normal(size=n)),
        "same": np.ones(n),
    }


@pytest.mark.parametrize("n", [6, 40, 300, 1500])
def test_two_parts_of_one_data_set_do_not_differ(n):
    wrong = []
    for seed in range(12):
        rng = np.random.default_rng((seed, n))
        leaves, order, cut = mixed_leaves(rng, n), rng.permutation(n), int(n * rng.choice([0.5, 0.8]))
        one, other = (
            arrays(**{name: leaf[some] for name, leaf in leaves.items()}) for some in (order[:cut], order[cut:])
        )
        wrong += [(seed, str(row)) for row in compare(one, other).rows if row.drifted]
    assert wrong == []


@pytest.mark.parametrize("seed", range(3))
def test_halves_of_digits_do_not_differ(seed):
    source = ms.ArraySampleSource(ms.datasets.DigitsDataset("train").as_array_dict())
    order = np.random.default_rng(seed).permutation(len(source))
    result = compare(source[order[:700]], source[order[700:]])
    assert result.drifted == () and result.sentence.startswith("No leaf differs by more than chance explains: 2 leaves")


@pytest.mark.parametrize(
    ("measure", "change"),
    [
        ("shift", lambda rng, leaves: {**leaves, "x": leaves["x"] + 0.5}),
        ("distance", lambda rng, leaves: {**leaves, "x": 2 * leaves["x"]}),
        ("outside", lambda rng, leaves: {**leaves, "x": np.where(rng.random(1000) < 0.05, 99.0, leaves["x"])}),
        ("missing", lambda rng, leaves: {**leaves, "x": np.where(rng.random(1000) < 0.1, np.nan, leaves["x"])}),
        ("classes", lambda rng, leaves: {**leaves, "y": np.minimum(leaves["y"], 2)}),
        ("new classes", lambda rng, leaves: {**leaves, "y": np.where(rng.random(1000) < 0.05, 7, leaves["y"])}),
        ("structure", lambda rng, leaves: {**leaves, "x": leaves["x"].astype(np.float16)}),
        ("structure", lambda rng, leaves: {"x": leaves["x"]}),
        ("structure", lambda rng, leaves: {**leaves, "z": leaves["x"]}),
    ],
)
def test_each_measure_finds_its_difference(measure, change):
    rng = np.random.default_rng(0)
    one, other = ({"x": rng.normal(size=1000), "y": rng.integers(0, 4, 1000)} for _ in range(2))
    changed = change(rng, other)
    result = compare(arrays(**one), arrays(**changed))
    leaf = next(name for name in ("z", "x", "y") if changed.get(name) is not other.get(name))
    assert result.drifted == (leaf,)
    assert measure in [row.measure for row in result.rows if row.drifted and row.leaf == leaf]
    weights = [row.weight for row in result.rows]
    assert weights == sorted(weights, reverse=True)
    assert result.sentence.startswith("1 of ") and f". {leaf}: " in result.sentence


def test_lengths_that_differ_are_found_and_statistics_can_be_given():
    rng = np.random.default_rng(0)
    short, long = (ms.DatasetSource([{"t": [0] * n} for n in rng.integers(1, top, 300).tolist()]) for top in (20, 40))
    one, other = look(short), look(long)
    result = compare(one, other)
    assert result.drifted == ("t",) and {row.measure for row in result.rows if row.drifted} >= {"shift of lengths"}
    assert str(result) == str(compare(short, long)) and result.samples == (300, 300)


def test_a_few_samples_are_too_few_to_tell():
    result = compare(arrays(x=np.zeros(5)), arrays(x=np.ones(5)))
    assert result.drifted == ()
    assert "too few samples to tell" in str(result)
