"""More samples than 32 bits can count: all that is read on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.plan import order
from millstream.plan.keys import fold, named_key
from millstream.plan.ordering import Ordering

SIZES = (2**31, 2**32 + 1, 10**10, 10**12)
BATCH = 16


def numbers(length, ordering: Ordering = "shuffle"):
    """A source whose samples are their own numbers, in two halves."""
    return ms.DiskSampleSource(length, halves, ordering=ordering)


def halves(index):
    return {"low": np.uint32(index & 0xFFFFFFFF), "high": np.uint32(index >> 32)}


def indices_of(batch):
    return (np.asarray(batch["high"]).astype(np.int64) << 32) | np.asarray(batch["low"])


def noise(value, mask, key):
    return {**value, "noise": jax.random.bits(key)}


def words_of(seed):
    return np.asarray(jax.random.key_data(jax.random.key(seed)))


def expected_indices(length, seed, step, ending="pad"):
    """The samples of a step as the order has them, and which are real, in Python's own integers."""
    steps = -(-length // BATCH)
    if ending == "wrap":
        places = [divmod(step * BATCH + row, length) for row in range(BATCH)]
    else:
        places = [(step // steps, step % steps * BATCH + row) for row in range(BATCH)]
    found = []
    for epoch, place in places:
        if place >= length:
            found.append(None)
            continue
        key = order.epoch_key(np, words_of(seed), np.array([epoch], np.uint32))
        found.append(int(order.shuffled(np, np.array([place], np.uint64), length, key)[0]))
    return found


def expected_noise(seed, epoch, index):
    key = fold(np, named_key(words_of(seed), "millstream stage 1 RandomMapTransform(noise)"), np.uint32(epoch))
    pair = fold(np, key, np.uint64(index))
    return int(jax.random.bits(jax.random.wrap_key_data(jnp.array(pair, np.uint32), impl="threefry2x32")))


@pytest.mark.parametrize("length", SIZES)
def test_samples_and_keys_at_the_end_of_an_epoch_and_after_it(length):
    loader = ms.DataLoader([numbers(length), ms.RandomMapTransform(noise), ms.BatchTransform(BATCH)])
    per_epoch = loader.steps_per_epoch
    assert per_epoch == -(-length // BATCH)
    steps = [step for step in (0, per_epoch - 1, per_epoch, 3 * per_epoch - 1) if step < 2**32 - 2] + [2**32 - 3]
    compiled = jax.jit(loader.next_batch)
    for step in steps:
        state = loader.init_state(jax.random.key(5), step=step)
        [(batch, mask)] = loader.iterate(state, steps=1)
        expected = expected_indices(length, 5, step)
        assert np.asarray(mask).tolist() == [index is not None for index in expected]
        real = [index for index in expected if index is not None]
        assert indices_of(batch)[: len(real)].tolist() == real
        assert int(batch["noise"][0]) == expected_noise(5, step // per_epoch, real[0])
        for again, _, its_mask in (loader.next_batch(state), compiled(state)):
            jax.tree.map(np.testing.assert_array_equal, (again, its_mask), (batch, mask))


@settings(max_examples=60, deadline=None)
@given(length=st.integers(2**31 + 1, 2**60), seed=st.integers(0, 100), place=st.floats(0, 3))
def test_any_length_by_any_step_is_as_pythons_integers_say(length, seed, place):
    for ending in ("pad", "wrap"):
        loader = ms.DataLoader([numbers(length), ms.BatchTransform(BATCH, pad_last_batch=ending == "pad")])
        step = min(int(place * loader.steps_per_epoch), 2**32 - 3)
        [(batch, mask)] = loader.iterate(loader.init_state(jax.random.key(seed), step=step), steps=1)
        expected = expected_indices(length, seed, step, ending)
        found = [index if real else None for index, real in zip(indices_of(batch).tolist(), mask, strict=True)]
        assert found == expected


@pytest.mark.parametrize("executor", [ms.Threads(2), ms.Processes(1)], ids=repr)
def test_other_executors_read_the_same(executor):
    stages = [ms.RandomMapTransform(noise), ms.BatchTransform(BATCH)]
    plain = ms.DataLoader([numbers(10**12), *stages])
    other = ms.DataLoader([numbers(10**12), *stages], executor=executor)
    state = plain.init_state(jax.random.key(1), step=2**31)
    for one, two in zip(plain.iterate(state, steps=3), other.iterate(state, steps=3), strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, two)


def test_a_mesh_holds_the_same():
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    size = BATCH * len(jax.devices())
    stages = [ms.RandomMapTransform(noise), ms.BatchTransform(size)]
    plain = ms.DataLoader([numbers(10**12), *stages])
    placed = ms.DataLoader([numbers(10**12), *stages], sharding=mesh)
    state = plain.init_state(jax.random.key(1), step=10**9)
    for one, two in zip(plain.iterate(state, steps=2), placed.iterate(state, steps=2), strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, two)


def test_a_scan_holds_the_same():
    loader = ms.DataLoader([numbers(10**10, "sequential"), ms.RandomMapTransform(noise), ms.BatchTransform(BATCH)])
    state = loader.init_state(jax.random.key(1), step=loader.steps_per_epoch - 4)
    batches = [batch for batch, _ in loader.iterate(state)]
    assert indices_of(batches[-1])[-1] == 10**10 - 1

    def draw(state, _):
        batch, state, _ = loader.next_batch(state)
        return state, batch

    _, found = jax.jit(lambda state: jax.lax.scan(draw, state, length=4))(state)
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


VIEWS = {
    "slice": (lambda: numbers(10**12)[5 * 10**9 : 7 * 10**11 : 3], lambda place: 5 * 10**9 + 3 * place),
    "indices": (lambda: numbers(10**12)[np.array([5 * 10**9, 10**12 - 1, 3])], [5 * 10**9, 10**12 - 1, 3].__getitem__),
    "concat": (
        lambda: ms.views.concat(numbers(10**10), numbers(10**12)),
        lambda place: place - 10**10 * (place >= 10**10),
    ),
    "repeat": (lambda: ms.views.repeat(numbers(10**10), 30), lambda place: place % 10**10),
    "map": (lambda: numbers(10**12).map(dict), lambda place: place),
    "zip": (
        lambda: ms.views.zip(numbers(10**12), numbers(10**11)[::-1], shortest=True).map(second),
        lambda place: 10**11 - 1 - place,
    ),
}


def second(pair):
    return pair[1]


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_more_samples_than_32_bits_count(name):
    make, located = VIEWS[name]
    view = make()
    assert len(view) == 3 or len(view) > 2**32
    loader = ms.DataLoader([view, ms.BatchTransform(BATCH)])
    for step in (0, min(loader.steps_per_epoch, 2**32) // 2, min(loader.steps_per_epoch, 2**32 - 2) - 1):
        places = [place for place in expected_indices(len(view), 2, step) if place is not None]
        [(batch, _)] = loader.iterate(loader.init_state(jax.random.key(2), step=step), steps=1)
        assert indices_of(batch)[: len(places)].tolist() == [located(place) for place in places]


def test_a_mixture_continues_in_its_sources():
    sources = {"one": numbers(10**12, "sequential"), "two": numbers(2**33, "sequential")}
    mixed = ms.views.mix(sources, weights={"one": 1.0, "two": 3.0}, samples=64, source_field="source")
    loader = ms.DataLoader([mixed, ms.BatchTransform(BATCH)])
    seen = {0: [], 1: []}
    for batch, _ in loader.iterate(loader.init_state(jax.random.key(0)), steps=12):
        for index, source in zip(indices_of(batch).tolist(), batch["source"].tolist(), strict=True):
            seen[source].append(index)
    assert seen == {0: list(range(48)), 1: list(range(144))}


def test_more_samples_than_can_be_indexed():
    class Arrays:
        ordering = "sequential"
        arrays = ()

        def __len__(self):
            return 2**31

        def spec(self): ...
        def read(self, indices, out=None): ...

    with pytest.raises(ValueError, match=r"Arrays has 2,147,483,648 samples; a compiled .* at most 2,147,483,647 rows"):
        ms.DataLoader([Arrays(), ms.BatchTransform(2)])
    with pytest.raises(ValueError, match=r"samples; a plan can index at most 1,152,921,504,606,846,976 rows"):
        ms.DataLoader([numbers(2**60 + 1), ms.BatchTransform(2)])


@pytest.mark.parametrize(
    "view, words",
    [
        (lambda source: ms.views.split(source, {"train": 0.9, "test": 0.1}), "split makes a table"),
        (lambda source: ms.views.folds(source, 3), "folds makes a table"),
        (lambda source: ms.views.select(source, lambda sample: True), r"select\(.*\) makes a table"),
        (lambda source: ms.views.weighted(source, np.ones(3)), "weighted draws from at most"),
        (lambda source: ms.views.repeat(source, 2**21), "repeat: 2,097,152 times"),
        (lambda source: ms.views.mix({"a": source}, weights={"a": 1.0}), "pass samples="),
    ],
)
def test_views_that_would_need_too_much_are_refused(view, words):
    with pytest.raises(ValueError, match=words):
        view(numbers(10**12))
