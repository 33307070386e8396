"""The plan: which samples are in which batch, for every ending and any nesting."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream.plan.ordering import Shuffle
from millstream.plan.plan import STEP_LIMIT, Batching, Plan
from millstream.plan.planned import Coordinates, PlannedSteps

WORDS = np.array([5, 6], np.uint32)
MODES = ("itemwise", "reseed", "repeat", "batchwise")
SHUFFLES = [Shuffle(mode, first_epoch) for mode in MODES for first_epoch in (True, False)]
WRAPPING = [shuffle for shuffle in SHUFFLES if shuffle.mode in ("itemwise", "reseed")]


def draw(plan, steps):
    """The real sample indices of some steps, in order."""
    indices, rows = plan.at(np, WORDS, np.asarray(steps))
    return indices[rows[-1].mask]


def make_plan(samples, ordering, *levels):
    batchings, inner = [], samples
    for size, ending in levels:
        batchings.append(Batching(size, ending, inner))
        inner = batchings[-1].length
    return Plan(samples, ordering, tuple(batchings))


@given(
    samples=st.integers(1, 300),
    size=st.integers(1, 40),
    ending=st.sampled_from(["pad", "drop", "wrap"]),
    epoch=st.integers(0, 1000),
)
def test_every_epoch_visits_every_sample_once(samples, size, ending, epoch):
    if ending == "drop" and size > samples:
        return
    plan = make_plan(samples, "shuffle", (size, ending))
    if ending == "wrap":  # any run of samples, wherever batches end, is cut into whole epochs
        seen = draw(plan, np.arange(3 * plan.steps_per_epoch))
        epochs = [seen[i : i + samples] for i in range(0, len(seen) - samples + 1, samples)]
        assert all(sorted(each.tolist()) == list(range(samples)) for each in epochs)
        return
    first = epoch * plan.steps_per_epoch
    counts = collections.Counter(draw(plan, first + np.arange(plan.steps_per_epoch)).tolist())
    assert max(counts.values()) == 1
    assert len(counts) == (samples if ending == "pad" else samples // size * size)


@given(
    samples=st.integers(1, 100),
    inner=st.integers(1, 9),
    outer=st.integers(1, 5),
    endings=st.tuples(st.sampled_from(["pad", "wrap"]), st.sampled_from(["pad", "wrap"])),
)
def test_batches_of_batches_visit_every_sample_once_per_epoch(samples, inner, outer, endings):
    plan = make_plan(samples, "shuffle", (inner, endings[0]), (outer, endings[1]))
    indices, rows = plan.at(np, WORDS, np.arange(4 * plan.steps_per_epoch))
    assert indices.shape == (4 * plan.steps_per_epoch, outer, inner)
    seen = indices[rows[-1].mask]
    for first in range(0, len(seen) - samples + 1, samples):
        assert sorted(seen[first : first + samples].tolist()) == list(range(samples))


@given(
    samples=st.integers(1, 60),
    size=st.integers(1, 9),
    outer=st.sampled_from([0, 1, 3]),
    ending=st.sampled_from(["pad", "drop", "wrap"]),
    shuffle=st.sampled_from(SHUFFLES),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_shuffle_visits_every_sample_once_per_epoch(samples, size, outer, ending, shuffle, seed):
    if (ending == "drop" and size > samples) or (ending == "wrap" and shuffle not in WRAPPING):
        return
    plan = make_plan(samples, shuffle, (size, ending), *([(outer, "pad")] if outer else []))
    length = plan.steps_per_epoch
    indices, rows = plan.at(np, np.array([0, seed], np.uint32), np.arange(3 * length))
    mask = rows[-1].mask
    if ending == "wrap":
        seen = indices[mask]
        epochs = [seen[first : first + samples] for first in range(0, len(seen) - samples + 1, samples)]
    else:
        epochs = [indices[first : first + length][mask[first : first + length]] for first in (0, length, 2 * length)]
    assert len(epochs) >= 3
    for each in epochs:
        assert len(np.unique(each)) == len(each) == (samples // size * size if ending == "drop" else samples)


def three_epochs(shuffle, ending="pad"):
    """Of three epochs of batches of 4 of 50 samples: each batch's indices, the epoch of its keys, and its number."""
    plan = make_plan(50, shuffle, (4, ending))
    indices, (batch, rows) = plan.at(np, WORDS, np.arange(3 * plan.steps_per_epoch))
    assert (rows.epoch == batch.epoch[:, None]).all()  # the stages before and after the batch agree
    real = [tuple(row[mask].tolist()) for row, mask in zip(indices, rows.mask, strict=True)]
    batches = list(zip(real, batch.epoch.tolist(), batch.element.tolist(), strict=True))
    return [batches[first : first + plan.steps_per_epoch] for first in range(0, len(batches), plan.steps_per_epoch)]


def order_of(epoch):
    return [index for indices, _, _ in epoch for index in indices]


def key_epochs(epochs):
    return [{key_epoch for _, key_epoch, _ in epoch} for epoch in epochs]


@pytest.mark.parametrize("ending", ["pad", "drop"])
def test_what_each_shuffle_keeps_from_epoch_to_epoch(ending):
    def orders(epochs):
        return len({tuple(order_of(epoch)) for epoch in epochs})

    itemwise, reseed, repeat, batchwise = (three_epochs(Shuffle(mode), ending) for mode in MODES)
    assert (orders(itemwise), key_epochs(itemwise)) == (3, [{0}, {1}, {2}])
    assert (orders(reseed), key_epochs(reseed)) == (1, [{0}, {1}, {2}])
    assert (orders(repeat), key_epochs(repeat)) == (1, [{0}, {0}, {0}])
    assert (orders(batchwise), key_epochs(batchwise)) == (3, [{0}, {0}, {0}])
    # A batch brings its contents and its number, which random stages after it are keyed by, to wherever it goes.
    assert all(sorted(epoch) == sorted(batchwise[0]) for epoch in batchwise)
    assert all(order_of(epoch) != sorted(order_of(epoch)) for epoch in (itemwise[0], reseed[0], repeat[0]))


def test_a_first_epoch_in_sequence():
    itemwise, reseed, repeat, batchwise = (three_epochs(Shuffle(mode, first_epoch=False)) for mode in MODES)
    assert all(order_of(epochs[0]) == list(range(50)) for epochs in (itemwise, reseed, repeat, batchwise))
    assert itemwise[1:] == three_epochs("shuffle")[1:]
    assert reseed == three_epochs("sequential")
    assert repeat == [reseed[0]] * 3
    assert sorted(batchwise[1]) == sorted(batchwise[2]) == batchwise[0]
    assert batchwise[0] != batchwise[1] != batchwise[2]


def test_the_words_for_orderings_mean_these_shuffles():
    assert three_epochs("shuffle") == three_epochs(Shuffle())
    assert three_epochs("sequential") == three_epochs(Shuffle("reseed", first_epoch=False))
    words = [shuffle.words for shuffle in SHUFFLES]
    assert len(set(words)) == len(words)
    assert words[:2] == ["shuffle", "itemwise, first epoch in sequence"]
    assert Plan(3, "shuffle").shuffle.words == "shuffle" and Plan(3, "sequential").shuffle.words == "sequential"


@pytest.mark.parametrize("first_epoch", [True, False])
def test_a_shuffled_wrap_cuts_the_same_run_of_samples(first_epoch):
    for mode in ("itemwise", "reseed"):
        whole = draw(make_plan(10, Shuffle(mode, first_epoch), (10, "pad")), np.arange(4))
        wrapped = draw(make_plan(10, Shuffle(mode, first_epoch), (4, "wrap")), np.arange(10))
        np.testing.assert_array_equal(wrapped, whole)


@pytest.mark.parametrize("mode", ["repeat", "batchwise"])
def test_batches_that_cross_epochs_cannot_come_back(mode):
    source = ms.ArraySampleSource({"x": np.arange(8)}, ordering=Shuffle(mode))
    told = (
        rf"Shuffle\(mode='{mode}'.*Got BatchTransform\(4, pad_last_batch=False\).*pad_last_batch=True or drop_last=True"
    )
    with pytest.raises(ValueError, match=told):
        ms.DataLoader([source, ms.BatchTransform(2), ms.BatchTransform(4, pad_last_batch=False)])


def test_bad_shuffles_are_refused():
    with pytest.raises(ValueError, match=r"Shuffle needs mode 'itemwise', .* or 'blocks'. Got 'samples' \(str\)"):
        Shuffle("samples")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"first_epoch to be a bool. Got 0 \(int\)"):
        Shuffle(first_epoch=0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"a Shuffle such as Shuffle\('batchwise'\). Got 'batchwise' \(str\)"):
        ms.ArraySampleSource({"x": np.arange(8)}, ordering="batchwise")  # pyright: ignore[reportArgumentType]


def noisy_epochs(shuffle, key, *, before):
    """Three epochs of batches, with noise drawn before or after the batch, as tuples of numbers."""
    noise = ms.RandomMapTransform(lambda value, mask, key: {"x": value["x"], "noise": jax.random.bits(key)})
    source, batch = ms.ArraySampleSource({"x": np.arange(11)}, ordering=shuffle), ms.BatchTransform(4)
    loader = ms.DataLoader([source, noise, batch] if before else [source, batch, noise])
    pairs = loader.iterate(loader.init_state(key), steps=3 * loader.steps_per_epoch)
    batches = [(tuple(value["x"].tolist()), tuple(np.ravel(value["noise"]).tolist())) for value, _ in pairs]
    return [batches[:3], batches[3:6], batches[6:]]


@pytest.mark.parametrize("before", [True, False])
def test_random_stages_follow_the_shuffle(before, key):
    first, second, third = noisy_epochs(Shuffle("repeat"), key, before=before)
    assert first == second == third
    again = noisy_epochs(Shuffle("batchwise"), key, before=before)
    assert [sorted(epoch) for epoch in again] == [sorted(first)] * 3
    reseeded = noisy_epochs(Shuffle("reseed"), key, before=before)
    assert [x for x, _ in reseeded[0]] == [x for x, _ in reseeded[1]] == [x for x, _ in first]
    noise = [number for epoch in reseeded for _, numbers in epoch for number in numbers if number != 0]
    assert len(set(noise)) == len(noise) == (33 if before else 9)


def test_without_batches_every_sample_is_a_batch():
    plan = make_plan(50, Shuffle("batchwise"))
    indices, rows = plan.at(np, WORDS, np.arange(150))
    first, second, third = indices.reshape(3, 50).tolist()
    assert first != second != third and sorted(first) == sorted(second) == sorted(third) == list(range(50))
    assert not rows[0].epoch.any()


def test_the_three_endings():
    steps = np.arange(4)

    def batches(ending):
        indices, rows = make_plan(5, "sequential", (3, ending)).at(np, WORDS, steps)
        return [
            [int(i) if real else None for i, real in zip(*row, strict=True)]
            for row in zip(indices, rows[-1].mask, strict=True)
        ]

    assert batches("pad") == [[0, 1, 2], [3, 4, None], [0, 1, 2], [3, 4, None]]
    assert batches("drop") == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert batches("wrap") == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


def test_wrapping_takes_each_row_from_its_own_epoch():
    plan = make_plan(5, "shuffle", (3, "wrap"))
    whole = [draw(make_plan(5, "shuffle", (5, "pad")), [epoch]) for epoch in range(3)]
    np.testing.assert_array_equal(draw(plan, np.arange(5)), np.concatenate(whole))


@pytest.mark.parametrize(("size", "steps"), [(3, 1300), (5000, 30)])
def test_steps_that_are_planned_in_blocks_are_those_of_the_plan_in_any_order(size, steps):
    plan = make_plan(7001, "shuffle", (size, "pad"))
    indices, (places, rows) = plan.at(np, WORDS, np.arange(steps))
    planned = PlannedSteps(plan, WORDS, coordinates=(Coordinates(plan, indices=True),))
    jumps = np.random.default_rng(0).integers(0, steps, 40).tolist()
    for step in (*range(steps), *jumps, *range(steps - 1, 0, -steps // 9), *range(steps // 2, steps)):
        request = planned.request(step, keyed=False)
        np.testing.assert_array_equal(request.indices, indices[step])
        np.testing.assert_array_equal(request.real, rows.mask[step])
        assert request.place == (places.epoch[step], places.element[step])
        np.testing.assert_array_equal(planned.numbers(step), [*indices[step], *rows.mask[step]])


@pytest.mark.parametrize(
    "levels", [[], [(4, "pad")], [(4, "drop")], [(7, "wrap")], [(4, "pad"), (3, "wrap")], [(3, "wrap"), (2, "pad")]]
)
@pytest.mark.parametrize("ordering", ["shuffle", "sequential", *SHUFFLES[1:]], ids=str)
def test_numpy_and_jax_make_the_same_plan(levels, ordering):
    if ordering not in ("shuffle", "sequential", *WRAPPING) and any(ending == "wrap" for _, ending in levels):
        return
    plan = make_plan(31, ordering, *levels)

    @jax.jit
    def in_graph(words, step):
        indices, rows = plan.at(jnp, words, step)
        return indices, [(row.epoch, row.element, row.mask) for row in rows]

    for step in (0, 1, 7, 1000, 3_000_000):
        indices, rows = plan.at(np, WORDS, step)
        theirs, their_rows = in_graph(WORDS, np.uint32(step))
        np.testing.assert_array_equal(indices, theirs)
        for row, (epoch, element, mask) in zip(rows, their_rows, strict=True):
            np.testing.assert_array_equal(row.epoch, epoch)
            np.testing.assert_array_equal(row.element, element)
            np.testing.assert_array_equal(row.mask, mask)


def test_many_steps_at_once_are_the_single_steps_stacked():
    plan = make_plan(50, "shuffle", (7, "wrap"))
    together, _ = plan.at(np, WORDS, np.arange(20))
    alone = np.stack([plan.at(np, WORDS, step)[0] for step in range(20)])
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("ending", ["pad", "wrap"])
def test_a_trillion_samples_need_no_more_than_the_batch(ending):
    plan = make_plan(10**12, "shuffle", (256, ending))
    indices, rows = plan.at(np, WORDS, plan.steps_per_epoch - 1)
    assert indices.shape == (256,) and rows[-1].mask.all()
    assert len(np.unique(indices)) == 256 and indices.max() < 10**12


def test_the_step_limit_keeps_wrapped_rows_inside_32_bits():
    plan = make_plan(10, "sequential", (64, "wrap"))
    last = plan.step_limit - 1
    assert 2**20 < last < STEP_LIMIT
    position = last * 64  # in Python's own integers
    indices, rows = plan.at(np, WORDS, last)
    assert indices.tolist() == [(position + row) % 10 for row in range(64)]
    assert rows[-1].epoch.tolist() == [(position + row) // 10 for row in range(64)]


@pytest.mark.parametrize("levels", [[(4, "pad")], [(4, "pad"), (3, "pad")]], ids=["batchwise", "two levels"])
def test_steps_counted_together_are_those_counted_alone(levels):
    plan, words = make_plan(22, Shuffle("batchwise"), *levels), np.array([3, 4], np.uint32)
    steps = range(1, 3 * plan.steps_per_epoch + 600)  # more than are counted at once
    assert plan.real_samples_of(words, steps) == [plan.real_samples(words, step) for step in steps]
