"""Samples of different lengths: padding, and batches by length. Compared with lists and loops."""

import collections
import os
import subprocess
import sys
import textwrap
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CACHE, assert_trees_equal
from hypothesis import given, settings

import millstream as ms
from millstream.plan.bucket_plan import bucket_plan
from millstream.plan.planned import PlannedSteps

LENGTHS = np.random.default_rng(0).permutation(np.array([0, 1, 1, 2, 3, 3, 3, 4, 5, 6, 6, 7, 8, 8, 2, 2, 4, 7, 1]))
N = len(LENGTHS)


def ids(index: int) -> np.ndarray:
    return np.arange(100 * index, 100 * index + LENGTHS[index], dtype=np.int32)


def text(ordering: Any = "shuffle") -> ms.DatasetSource:
    return ms.DatasetSource([{"ids": ids(i), "label": np.int32(i)} for i in range(N)], ordering)


def noisy(value, mask, key):
    return {**value, "noise": jax.random.bits(key, (2,))}


def bucket_loader(source: Any = None, **options: Any) -> Any:
    view = ms.views.buckets(text() if source is None else source, "ids", (2, 4, 8), batch_size=(4, 3, 2))
    return ms.DataLoader([view, ms.PadTransform({"ids": -1}), ms.RandomMapTransform(noisy)], **options)


def drawn(loader, key, steps, first=0):
    return [jax.device_get(pair) for pair in loader.iterate(loader.init_state(key, step=first), steps=steps)]


# Padding


PADDED = {
    "right": ({}, [[5, 6, 0], [7, 0, 0], [0, 0, 0]], [[1, 1, 0], [1, 0, 0], [0, 0, 0]]),
    "left": ({"side": "left"}, [[0, 5, 6], [0, 0, 7], [0, 0, 0]], [[0, 1, 1], [0, 0, 1], [0, 0, 0]]),
}


@pytest.mark.parametrize("executor", [None, ms.Threads(2), ms.Processes(1)])
@pytest.mark.parametrize("side", PADDED)
def test_leaves_are_padded_and_say_what_is_real(side, executor, key):
    options, expected, real = PADDED[side]
    samples = [{"ids": [5, 6], "y": 1.5}, {"ids": [7], "y": 2.5}, {"ids": [], "y": 3.5}]
    loader = ms.DataLoader(
        [
            ms.DatasetSource(samples, "sequential"),
            ms.PadTransform({"ids": 0}, length=3, positions=True, **options),
            ms.BatchTransform(4),
        ],
        executor=executor,
    )
    (batch, mask) = drawn(loader, key, 1)[0]
    assert batch["ids"][:3].tolist() == expected and batch["ids_mask"][:3].tolist() == np.array(real, bool).tolist()
    assert batch["ids"].dtype == np.int32 and batch["y"].tolist() == [1.5, 2.5, 3.5, 0.0]
    counts = np.cumsum(real, axis=1) * real - np.array(real)
    assert batch["ids_positions"][:3].tolist() == counts.tolist()
    assert mask.tolist() == [True] * 3 + [False] and not batch["ids_mask"][3].any()


def test_longer_leaves_are_cut_at_either_end_or_refused(key):
    source = ms.DatasetSource([{"ids": np.arange(5)}, {"ids": np.arange(2)}], "sequential")
    cuts: dict[Any, list[int]] = {"cut end": [0, 1, 2], "cut start": [2, 3, 4]}
    for too_long, expected in cuts.items():
        loader = ms.DataLoader([source, ms.PadTransform({"ids": 0}, 3, too_long=too_long), ms.BatchTransform(2)])
        assert drawn(loader, key, 1)[0][0]["ids"].tolist() == [expected, [0, 1, 0]]
    with pytest.raises(ValueError, match=r"PadTransform: sample 0\['ids'\] has length 5, and is padded to 3"):
        loader = ms.DataLoader([source, ms.PadTransform({"ids": 0}, 3), ms.BatchTransform(2)])
        drawn(loader, key, 1)


def test_several_leaves_are_padded_each_to_its_own_length(key):
    samples = [{"ids": np.ones(n, np.int32), "boxes": np.ones((n, 4), np.float32)} for n in (1, 3)]
    pad = ms.PadTransform({"ids": 0, "boxes": np.nan}, {"ids": 4, "boxes": 3}, mask={"boxes": "is_box"})
    loader = ms.DataLoader([ms.DatasetSource(samples, "sequential"), pad, ms.BatchTransform(2)])
    batch = drawn(loader, key, 1)[0][0]
    assert sorted(batch) == ["boxes", "ids", "is_box"] and batch["ids"].shape == (2, 4)
    assert np.isnan(batch["boxes"][0, 1:]).all() and batch["boxes"].shape == (2, 3, 4)
    assert batch["is_box"].tolist() == [[True, False, False], [True, True, True]]


def test_a_mask_that_samples_bring_along_is_filled(key):
    samples = [{"ids": [1, 2], "attention_mask": [1, 1]}, {"ids": [3], "attention_mask": [1]}]
    pad = ms.PadTransform({"ids": 0}, 2, mask={"ids": "attention_mask"})
    loader = ms.DataLoader([ms.DatasetSource(samples, "sequential"), pad, ms.BatchTransform(2)])
    assert drawn(loader, key, 1)[0][0]["attention_mask"].tolist() == [[True, True], [True, False]]


def test_a_function_may_come_after_padding(key):
    stages = [ms.PadTransform({"ids": 0}, 8), ms.HostMapTransform(lambda sample: sample["ids"] * 2)]
    loader = ms.DataLoader([text("sequential"), *stages, ms.BatchTransform(N)])
    batch = drawn(loader, key, 1)[0][0]
    for index in range(N):
        assert batch[index, : LENGTHS[index]].tolist() == (2 * ids(index)).tolist()


def test_numbers_that_do_not_fit_are_refused(key):
    source = ms.DatasetSource([{"ids": np.array([2**40])}])
    with pytest.raises(ValueError, match=r"sample 0\['ids'\]: JAX keeps int64 as int32"):
        loader = ms.DataLoader([source, ms.PadTransform({"ids": 0}, 2), ms.BatchTransform(1)])
        drawn(loader, key, 1)


RAGGED = ms.DatasetSource([{"ids": [1, 2], "text": "one"}, {"ids": [3], "text": "three"}])
Pad: Any = ms.PadTransform
WRONG_PADDING = {
    "nothing": (lambda: Pad({}), "needs at least one leaf to pad"),
    "no dict": (lambda: Pad("ids"), "PadTransform needs fill to be a dict such as {'ids': 0}. Got 'ids'"),
    "no number": (lambda: Pad({"ids": "0"}), "PadTransform needs a number to pad 'ids' with"),
    "no length": (lambda: Pad({"ids": 0})(text()), "PadTransform needs length=, since no buckets say"),
    "length": (lambda: Pad({"ids": 0}, 0), "length of 'ids'"),
    "unknown length": (lambda: Pad({"ids": 0}, {"id": 3}), "has length for 'id', which it does not pad"),
    "unknown mask": (lambda: Pad({"ids": 0}, 3, mask={"x": "y"}), "has mask for 'x', which it does not"),
    "two of a name": (
        lambda: Pad({"ids": 0, "ids_mask": 0}, 3),
        "would make two leaves of the name 'ids_mask'",
    ),
    "side": (lambda: Pad({"ids": 0}, 3, side="both"), "side"),
    "absent": (lambda: Pad({"id": 0}, 3)(text()), "sample 0 has no leaf 'id'. Its leaves: ids, label"),
    "no leaf": (
        lambda: Pad({"label": 0}, 3)(text()),
        r"sample 0\['label'\] needs to be an array or a list of numbers",
    ),
    "fill": (
        lambda: Pad({"ids": 0.5}, 8)(text()),
        "pads 'ids', which is int32, with 0.5, which is not",
    ),
    "tuples": (
        lambda: Pad({"ids": 0}, 3)(ms.DatasetSource([([1], 2)])),
        "PadTransform needs samples that are dicts. Sample 0 is",
    ),
    "text": (lambda: Pad({"ids": 0}, 3)(RAGGED), r"needs arrays of numbers or bools. Got sample\['text'\]"),
    "empty": (
        lambda: Pad({"ids": 0}, 3)(ms.DatasetSource([{"ids": [], "label": 1}] * 3)),
        "'ids' is an empty list in the first samples",
    ),
    "late": (
        lambda: ms.DataLoader([text(), ms.BatchTransform(2), Pad({"ids": 0}, 8)]),
        "comes after the source and before all compiled stages",
    ),
}


@pytest.mark.parametrize("name", WRONG_PADDING)
def test_padding_that_cannot_work_is_refused_by_name(name):
    make, message = WRONG_PADDING[name]
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_a_sample_of_another_kind_is_named(key):
    samples = [{"ids": np.zeros((2, 3))}, {"ids": np.zeros((2, 4))}]
    stages = [ms.DatasetSource(samples, "sequential"), ms.PadTransform({"ids": 0}, 3), ms.BatchTransform(2)]
    with pytest.raises(ValueError, match=r"sample 1\['ids'\] does not match the spec") as raised:
        drawn(ms.DataLoader(stages), key, 1)
    assert "Only the first axis is padded" in str(raised.value)


# The plan of buckets


BUCKETS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 7)), min_size=1, max_size=4).map(tuple)
ORDERINGS = st.sampled_from(
    [
        "shuffle",
        "sequential",
        *(ms.Shuffle(mode, first) for mode in ("reseed", "repeat", "batchwise") for first in (True, False)),
    ]
)


@settings(max_examples=100)
@given(buckets=BUCKETS, ordering=ORDERINGS, ending=st.sampled_from(["pad", "drop"]), seed=st.integers(0, 2**32 - 1))
def test_an_epoch_of_buckets_has_every_sample_once_in_batches_of_one_bucket(buckets, ordering, ending, seed):
    buckets = tuple((samples, min(samples, size) if ending == "drop" else size) for samples, size in buckets)
    plan, words = bucket_plan(buckets, ordering, ending), np.array([seed, 1], np.uint32)
    firsts = np.cumsum([0, *(samples for samples, _ in buckets)])
    kept = sum(samples - samples % size if ending == "drop" else samples for samples, size in buckets)
    run: Any = PlannedSteps(plan, words)
    epochs = []
    for epoch in range(3):
        requests = [run.request(epoch * plan.steps_per_epoch + at, keyed=True) for at in range(plan.steps_per_epoch)]
        seen = []
        for request in requests:
            positions = request.positions[request.real]
            assert len(request.real) == buckets[request.bucket][1] and len(positions)
            assert (firsts[request.bucket] <= positions).all() and (positions < firsts[request.bucket + 1]).all()
            assert plan.real_samples(words, request.step) == len(positions)
            seen += positions.tolist()
        assert len(seen) == len(set(seen)) == kept
        assert len({request.place for request in requests}) == len(requests)
        assert len({tuple(key) for request in requests for key in request.keys[request.real].tolist()}) == kept
        epochs.append([request.positions.tolist() for request in requests])
    fresh: Any = PlannedSteps(plan, words)
    for step in np.random.default_rng(seed).integers(0, 3 * plan.steps_per_epoch, 5).tolist():  # any step alone
        assert (
            fresh.request(step, keyed=False).positions.tolist() == [batch for epoch in epochs for batch in epoch][step]
        )
    counts = plan.real_samples_of(words, range(3 * plan.steps_per_epoch))
    assert sum(counts) == 3 * kept
    shuffle = plan.shuffle
    if shuffle.mode in ("repeat", "batchwise"):
        assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    if shuffle.mode in ("repeat", "reseed"):
        assert epochs[0] == epochs[1] == epochs[2]
    if not shuffle.first_epoch and ending == "drop":
        in_turn = [position for batch in epochs[0] for position in batch]
        assert in_turn == sorted(in_turn)


# Buckets in a loader


def test_batches_of_buckets_are_what_a_loop_makes(key):
    loader = bucket_loader()
    seen: collections.Counter[int] = collections.Counter()
    shapes = set()
    for batch, mask, info in loader.iterate(loader.init_state(key), with_info=True):
        rows, length = batch["ids"].shape
        shapes.add((rows, length))
        for row in np.flatnonzero(mask).tolist():
            index = int(batch["label"][row])
            count = LENGTHS[index]
            assert index == info.indices[row] and min(b for b in (2, 4, 8) if b >= count) == length
            assert batch["ids"][row, :count].tolist() == ids(index).tolist()
            assert (batch["ids"][row, count:] == -1).all()
            assert batch["ids_mask"][row].tolist() == [True] * count + [False] * (length - count)
            seen[index] += 1
    assert seen == collections.Counter(range(N))
    assert shapes == {(4, 2), (3, 4), (2, 8)}
    assert [spec["ids"].shape for spec in loader.element_specs()] == [(4, 2), (3, 4), (2, 8)]


@pytest.mark.parametrize("executor", [ms.Threads(2), ms.Processes(2)])
def test_buckets_give_the_same_batches_wherever_they_are_read(executor, key):
    loader, steps = bucket_loader(), 2 * bucket_loader().steps_per_epoch + 3
    expected = drawn(loader, key, steps)
    other = bucket_loader(executor=executor)
    assert_trees_equal(drawn(other, key, steps), expected)
    with other:  # any step alone, and by next_batch
        for step in range(0, steps - 1, 3):
            assert_trees_equal(drawn(other, key, 2, step), expected[step : step + 2])
            batch, _, mask = other.next_batch(other.init_state(key, step=step))
            assert_trees_equal(jax.device_get((batch, mask)), expected[step])


def test_random_stages_treat_every_row_and_batch_differently(key):
    view = ms.views.buckets(text(), "ids", (2, 4, 8), batch_size=2)
    stages = [
        ms.PadTransform({"ids": 0}),
        ms.RandomMapTransform(lambda b, m, key: {**b, "one": jax.random.uniform(key)}),
    ]
    loader = ms.DataLoader([view, *stages])
    batches = drawn(loader, key, 2 * loader.steps_per_epoch)
    assert len({float(batch["one"]) for batch, _ in batches}) == len(batches)


def test_a_run_over_buckets_resumes_at_every_step(key):
    loader = bucket_loader()
    steps = loader.steps_per_epoch + 2
    expected = drawn(loader, key, steps)
    for stop in range(1, steps):
        batches = loader.iterate(loader.init_state(key), steps=steps)
        for _ in range(stop):
            next(batches)
        saved = batches.get_state()
        batches.close()
        resumed = bucket_loader(executor=ms.Threads(1)).iterate(loader.init_state(key), steps=0)
        resumed.set_state(saved)
        assert_trees_equal([jax.device_get(pair) for pair in resumed], expected[stop:])


def test_buckets_over_eight_devices_give_the_same_batches():
    script = """
        import jax, numpy as np, millstream as ms
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        samples = [{"ids": np.arange(i % 7, dtype=np.int32)} for i in range(100)]
        view = ms.views.buckets(ms.DatasetSource(samples), "ids", (3, 6), tokens_per_batch=50, multiple_of=8)
        stages = [view, ms.PadTransform({"ids": 0}), ms.MapTransform(lambda b, m: {**b, "sum": b["ids"].sum(-1)})]
        plain, over = ms.DataLoader(stages), ms.DataLoader(stages, sharding=mesh)
        runs = [loader.iterate(loader.init_state(jax.random.key(0)), steps=12) for loader in (plain, over)]
        for one, two in zip(*runs, strict=True):
            assert len(two[0]["ids"].sharding.device_set) == 8
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(two))
        print(over.verify(seconds=20, executors=[ms.Threads(1)]))
        odd = ms.views.buckets(ms.DatasetSource(samples), "ids", (3, 6), batch_size=(16, 12))
        try:
            ms.DataLoader([odd, *stages[1:]], sharding=mesh)
        except ValueError as error:
            assert "12" in str(error), error
        else:
            raise AssertionError("12 rows over 8 devices")
    """
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", **CACHE}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env={**os.environ, **environment})


def test_a_step_is_compiled_once_for_each_bucket(key, count_compilations):
    loader = bucket_loader()

    @jax.jit
    def run(batch, mask):
        return jnp.sum(jnp.where(batch["ids_mask"], batch["ids"], 0))

    for batch, mask in loader.iterate(loader.init_state(key)):
        run(batch, mask)
    with count_compilations() as compiled:
        for batch, mask in loader.iterate(loader.init_state(key), steps=2 * loader.steps_per_epoch):
            run(batch, mask)
    step: Any = run
    assert compiled == [0] and step._cache_size() == 3


def test_a_loop_trains_on_buckets_and_counts_samples(key):
    loader = bucket_loader()

    @jax.jit
    def step(state, batch):
        rows, mask = batch
        return {"loss": jnp.sum(jnp.where(mask[:, None], rows["ids"], 0)).astype(jnp.float32)}, state

    output = ms.train_loop({"w": jnp.zeros(2)}, loader, {ms.on_train_step: step}, stop=ms.at(epochs=2), key=key)
    assert output.elapsed.samples == 2 * N and output.elapsed.steps == 2 * loader.steps_per_epoch
    with pytest.raises(TypeError, match="Batches of buckets have 3 shapes, and a compiled program has one: fuse="):
        ms.train_loop({"w": jnp.zeros(2)}, loader, {ms.on_train_step: step}, stop=3, key=key, fuse=2)


def test_buckets_of_a_view_keep_to_its_samples(key):
    source = text()[3:15]
    loader = bucket_loader(source)
    labels = [int(x) for batch, mask in drawn(loader, key, loader.steps_per_epoch) for x in batch["label"][mask]]
    assert sorted(labels) == list(range(3, 15))


def test_host_stages_come_before_padding(key):
    view = ms.views.buckets(text("sequential"), "ids", (4, 8), batch_size=4)
    double = ms.HostMapTransform(lambda sample: {"ids": sample["ids"] * 2, "label": sample["label"]})
    loader = ms.DataLoader([view, double, ms.PadTransform({"ids": 0})])
    batch = drawn(loader, key, 1)[0][0]
    assert batch["ids"][0, : LENGTHS[batch["label"][0]]].tolist() == (2 * ids(batch["label"][0])).tolist()
    with pytest.raises(TypeError, match="PadTransform after buckets makes samples of several shapes"):
        ms.DataLoader([view, ms.PadTransform({"ids": 0}), double])


def test_buckets_are_explained_and_verified(key):
    loader = bucket_loader()
    words = loader.explain().plan
    assert words["epoch"] == f"{loader.steps_per_epoch} batches of 3 shapes"
    places = sum(
        plan.steps_per_epoch * plan.axes[0] * length
        for plan, length in zip(loader.pipeline.plan.buckets, (2, 4, 8), strict=True)
    )
    assert words["padding"] == f"{100 * (1 - LENGTHS.sum() / places):.1f} % of all places in an epoch"
    assert "4 x 2" in words["buckets"]
    checked = loader.verify(key, executors=[ms.Threads(2), ms.Processes(1)], hosts=[1, 2], progress=False)
    assert all(row.result == "ok" for row in checked.rows), checked
    assert "i32[4,2]" in repr(loader) and "buckets(2, 4, 8)" in repr(loader)
    with pytest.raises(TypeError, match="tune compares batches of one shape"):
        loader.tune()
    with pytest.raises(TypeError, match=r"have 3 shapes. Ask loader.element_specs\(\)"):
        loader.element_spec()


def test_a_sample_that_cannot_be_read_is_skipped_in_its_bucket(key):
    def read(index):
        if index == 4:
            raise OSError("gone")
        return {"ids": ids(index), "label": np.int32(index)}

    source = ms.DiskSampleSource(N, read)
    view = ms.views.buckets(source, LENGTHS, (4, 8), batch_size=4)
    for executor in (ms.Threads(2), ms.Processes(1)):
        loader = ms.DataLoader([view, ms.PadTransform({"ids": 0})], on_error="skip item", executor=executor)
        labels = [int(x) for batch, mask in drawn(loader, key, loader.steps_per_epoch) for x in batch["label"][mask]]
        assert sorted(labels) == [index for index in range(N) if index != 4]


def test_a_state_of_other_buckets_is_refused_by_name(key):
    one = bucket_loader()
    two = ms.DataLoader([ms.views.buckets(text(), "ids", (4, 8), batch_size=4), ms.PadTransform({"ids": -1})])
    with pytest.raises(ValueError, match=r"differ in\n(.*\n)*  buckets: "):
        two.next_batch(one.init_state(key))


def test_lengths_of_buckets_can_be_chosen(key):
    rng = np.random.default_rng(1)
    lengths = np.minimum(np.ceil(rng.lognormal(4, 0.8, 20_000)), 1024).astype(int)
    source = ms.ArraySampleSource({"x": np.zeros(len(lengths), np.int8)})

    def padding(chosen):
        return 1 - ms.views.buckets(source, lengths, chosen, batch_size=1).fill

    best = ms.views.buckets(source, lengths, 3, batch_size=1).lengths
    assert len(best) == 3 and best[-1] == lengths.max()
    nearby = [(best[0] + a, best[1] + b, best[2]) for a in (-9, 0, 9) for b in (-25, 0, 25)]
    assert padding(best) <= min(map(padding, nearby)) + 0.002  # candidates are quantiles
    assert padding(best) < 0.6 * padding(1)
    assert ms.views.buckets(source, np.full(len(lengths), 7), 3, batch_size=1).lengths == (7,)
    most = ms.views.buckets(source, np.arange(len(lengths)) % 9 + 1, 2**40, batch_size=1)  # which takes no time
    assert most.lengths == tuple(range(1, 10)) and most.fill == 1


def test_a_length_that_was_wrong_is_found_when_its_sample_is_read(key):
    view = ms.views.buckets(text("sequential"), np.minimum(LENGTHS, 3), (4, 8), batch_size=4)
    loader = ms.DataLoader([view, ms.PadTransform({"ids": 0})])
    with pytest.raises(ValueError, match="the lengths that buckets was given are wrong"):
        drawn(loader, key, loader.steps_per_epoch)


WRONG_BUCKETS = {
    "both sizes": (dict(batch_size=2, tokens_per_batch=3), "needs either batch_size= or tokens_per_batch="),
    "no size": (dict(), "needs either batch_size= or tokens_per_batch="),
    "falling": (dict(lengths=(8, 4), batch_size=2), r"needs lengths that rise. Got \(8, 4\)"),
    "floats": (dict(lengths=(1.5, 8), batch_size=2), "needs lengths to be whole numbers above zero"),
    "zero": (dict(lengths=0, batch_size=2), "buckets needs lengths"),
    "one size": (dict(batch_size=(2, 3)), "needs a batch_size for each length. Got 2 for 3 lengths"),
    "tokens": (dict(tokens_per_batch=7), "has no room for 1 of length 8. Pass at least 8"),
    "multiple": (dict(batch_size=2, multiple_of=2), "takes multiple_of= with tokens_per_batch= alone"),
    "too long": (
        dict(lengths=(2, 4), batch_size=2),
        r"7 of 19 samples are longer than the last bucket, 4; the longest has 8. Add a bucket, or pass too_long='cut'",
    ),
    "too short": (dict(lengths=1, by=np.full(N, 5), batch_size=30, drop_last=True), "would drop all samples of"),
    "lengths": (dict(by=np.arange(3), batch_size=2), "buckets needs by to be"),
    "policy": (dict(batch_size=2, too_long="cat"), "too_long"),
}


@pytest.mark.parametrize("name", WRONG_BUCKETS)
def test_buckets_that_cannot_work_are_refused_by_name(name):
    options, message = WRONG_BUCKETS[name]
    given = {"by": "ids", "lengths": (2, 4, 8), **options}
    with pytest.raises((TypeError, ValueError), match=message):
        ms.views.buckets(text(), **given)


def test_long_samples_are_cut_or_left_out(key):
    cut = ms.views.buckets(text(), "ids", (2, 4), batch_size=4, too_long="cut")
    loader = ms.DataLoader([cut, ms.PadTransform({"ids": 0}, too_long="cut end")])
    assert sum(int(mask.sum()) for _, mask in drawn(loader, key, loader.steps_per_epoch)) == N
    dropped = ms.views.buckets(text(), "ids", (2, 4), batch_size=4, too_long="drop")
    loader = ms.DataLoader([dropped, ms.PadTransform({"ids": 0})])
    labels = [int(x) for batch, mask in drawn(loader, key, loader.steps_per_epoch) for x in batch["label"][mask]]
    assert sorted(labels) == np.flatnonzero(LENGTHS <= 4).tolist()


def test_stages_that_do_not_go_with_buckets_are_refused(key, tmp_path):
    view: Any = ms.views.buckets(text(), "ids", (4, 8), batch_size=4)
    pad = ms.PadTransform({"ids": 0})
    with pytest.raises(TypeError, match=r"buckets makes the batches. Leave out BatchTransform\(2\)"):
        ms.DataLoader([view, pad, ms.BatchTransform(2)])
    with pytest.raises(TypeError, match=r"nothing pads them. Put a PadTransform after buckets"):
        ms.DataLoader([view])
    loader = ms.DataLoader([view, pad])
    for call in (
        lambda: jax.jit(lambda loader, state: loader.next_batch(state))(loader, loader.init_state(key)),
        lambda: loader.scan_epoch(loader.init_state(key), None, lambda carry, batch, mask: (carry, None)),
    ):
        with pytest.raises(TypeError, match=r"Use iterate, next_batch outside jax.jit, or a loop without fuse="):
            call()
    with pytest.raises(TypeError, match="BatchCache keeps batches of one shape, and buckets make 2"):
        drawn(ms.DataLoader([view, pad], cache=ms.BatchCache(tmp_path)), key, 1)
    with pytest.raises(TypeError, match=r"differs from epoch to epoch. Put its source into buckets"):
        ms.views.buckets(ms.views.weighted(text(), np.ones(N)), LENGTHS, (4, 8), batch_size=4)
    with pytest.raises(TypeError, match="buckets needs a source"):
        ms.views.buckets(view, "ids", (4, 8), batch_size=4)
