"""The laws of views, on random views of random sources: what lists and loops make, wherever and from wherever on."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from conftest import CACHE, assert_trees_equal
from hypothesis import given, settings
from nested_views import SAMPLES, SOURCES, cumulated, first_above, nested_view
from soak.split_leaks import leaks_of

import millstream as ms
from millstream.plan.plan import Plan
from millstream.plan.planned import PlannedSteps
from millstream.plan.selection import Drawn, drawn
from millstream.reading.reader import Reader

SEEDS = st.integers(0, 2**32)
LENGTH, BATCH, STEPS = 21, 8, 7  # of which an epoch has three steps, the last one with padding
WORDS = np.array([3, 4], np.uint32)


@settings(max_examples=200)
@given(SEEDS)
def test_a_view_is_what_lists_and_loops_make(seed):
    nested = nested_view(seed)
    view, length = nested.view, len(nested.view)
    selection = getattr(view, "selection", None)
    plan = Plan(length, view.ordering, selection=selection)
    for epoch in (0, 1, 5):
        positions, rows = plan.at(np, WORDS, np.arange(length) + epoch * length)
        indices = plan.indices(np, WORDS, rows[-1].epoch, positions)
        assert indices.tolist() == nested.epoch(WORDS, epoch)
        assert sorted(positions.tolist()) == list(range(length))
    if nested.drawn:
        with pytest.raises(TypeError, match="only a loader can read them"):
            view.read(np.arange(length))
    else:
        assert view.read(np.arange(length))["x"].tolist() == nested.samples


def loader_of(nested, **options):
    return ms.DataLoader([nested.view, ms.RandomMapTransform(_noisy), ms.BatchTransform(BATCH)], **options)


def _noisy(value, mask, key):
    return {**value, "noise": jax.random.bits(key, (2,))}


def drawn_from(loader, key, first=0):
    state = loader.init_state(key, step=first)
    return [jax.device_get(pair) for pair in loader.iterate(state, steps=STEPS - first)]


def naive_batches(nested, words):
    """The samples of every step, and which of its rows are padding."""
    batches, per_epoch = [], -(-LENGTH // BATCH)
    for step in range(STEPS):
        epoch, number = divmod(step, per_epoch)
        rows = nested.epoch(words, epoch)[number * BATCH : (number + 1) * BATCH]
        padding = BATCH - len(rows)
        batches.append((rows + [0] * padding, [True] * len(rows) + [False] * padding))
    return batches


@settings(max_examples=12)
@given(SEEDS)
def test_a_view_gives_the_same_batches_in_graph_in_threads_and_on_hosts_from_every_step_on(seed):
    nested, key = nested_view(seed, LENGTH), jax.random.key(seed % 1000)
    words = np.asarray(jax.random.key_data(key))
    loader, threads = loader_of(nested), loader_of(nested, executor=ms.Threads(2))
    batches = drawn_from(loader, key)
    found = [(batch["x"].tolist(), mask.tolist()) for batch, mask in batches]
    assert found == naive_batches(nested, words)
    assert_trees_equal(drawn_from(threads, key), batches)
    for count in (1, 2, 4):
        assert_trees_equal(read_by_hosts(threads.pipeline, words, count), [batch["x"] for batch, _ in batches])
    iterator = loader.iterate(loader.init_state(key), steps=STEPS)
    for step in range(STEPS):
        saved = json.dumps(iterator.get_state())
        for way in (loader, threads):  # a state is the same wherever it is resumed
            resumed = way.iterate(way.init_state(key), steps=0)
            resumed.set_state(json.loads(saved))
            assert_trees_equal([jax.device_get(pair) for pair in resumed], batches[step:])
        batch, _, mask = loader.next_batch(iterator.state)
        assert_trees_equal(jax.device_get((batch, mask)), batches[step])
        next(iterator)


def read_by_hosts(pipeline, words, count):
    """The samples of every step, each host reading its rows alone, with the keys that they have on one host."""
    share = BATCH // count
    readers = []
    for host in range(count):
        rows = tuple(range(host * share, (host + 1) * share))
        readers.append(Reader(pipeline.read_by(rows=(rows,), executor=None).host, pipeline.plan))
        whole, own = (PlannedSteps(pipeline.plan, words, chosen) for chosen in (None, (rows,)))
        for step in range(STEPS):
            one, other = (steps.request(step, keyed=True) for steps in (whole, own))
            assert one.keys is not None
            np.testing.assert_array_equal(other.keys, one.keys[list(rows)])
            np.testing.assert_array_equal(other.real, one.real[list(rows)])
    steps = [[reader.rows(words, step).rows[0] for reader in readers] for step in range(STEPS)]  # of the leaf "x"
    for reader in readers:
        reader.close()
    return [np.concatenate(parts) for parts in steps]


@pytest.mark.parametrize("kind", ["arrays", "joined", "side by side, on the host"])
def test_a_view_gives_the_same_batches_in_worker_processes_from_every_step_on(kind, key):
    nested = nested_view(100 + len(kind), LENGTH, kind)
    expected = drawn_from(loader_of(nested), key)
    with loader_of(nested, executor=ms.Processes(2)) as processes:
        for step in range(STEPS):
            assert_trees_equal(drawn_from(processes, key, step), expected[step:])


def test_a_view_gives_the_same_batches_over_eight_devices():
    script = f"""
        import sys
        sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
        import jax, numpy as np, millstream as ms
        from nested_views import nested_view
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        kinds = ["arrays", "joined arrays", "arrays on the host", "a dataset"]
        for seed in range(16):
            stages = [nested_view(seed, {LENGTH}, kinds[seed % len(kinds)]).view, ms.BatchTransform({BATCH})]
            plain, over = ms.DataLoader(stages), ms.DataLoader(stages, sharding=mesh)
            for first in (0, 4):
                state = plain.init_state(jax.random.key(seed), step=first)
                runs = [loader.iterate(state, steps=4) for loader in (plain, over)]
                for one, two in zip(*runs, strict=True):
                    assert len(two[1].sharding.device_set) == 8
                    jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(two))
    """
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", **CACHE}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env={**os.environ, **environment})


@pytest.mark.parametrize("kind", ["joined arrays", "a dataset"])
def test_verify_passes_on_random_views(kind):
    loader = loader_of(nested_view(200, LENGTH, kind))
    verification = loader.verify(executors=[ms.InGraph(), ms.Threads(2)], hosts=[1, 2, 4], progress=False)
    assert [row.result for row in verification.rows] == ["ok"] * 5


@pytest.mark.parametrize("kind", SOURCES)
def test_a_user_can_nest_views_of_every_kind_of_source(kind, key):
    source = SOURCES[kind]("shuffle")
    train, test = ms.views.split(source, {"train": 0.7, "test": 0.3})
    joined = ms.views.concat(train, test[::-1])
    loader = ms.DataLoader([ms.views.balanced(joined, "y", samples=2 * SAMPLES), ms.BatchTransform(2 * SAMPLES)])
    for batch, mask in loader.iterate(loader.init_state(key), steps=2):
        counts = np.bincount(np.asarray(batch["y"])[np.asarray(mask)])
        assert counts.sum() == 2 * SAMPLES and all(abs(count - SAMPLES / 2) <= 1 for count in counts)


def test_no_division_of_a_view_leaks():
    assert [wrong for number in range(500) for wrong in leaks_of(number)] == []


# Draws by weight: a guide and a short search in place of a long one


def weights_of(seed, samples):
    """Weights of many kinds: equal, wild, mostly zero, and one that has nearly everything."""
    chance = np.random.default_rng(seed)
    weights = [
        np.ones(samples),
        chance.exponential(1.0, samples),
        chance.random(samples) ** 20,
        (chance.random(samples) < 0.05) * chance.random(samples),
        np.where(np.arange(samples) == chance.integers(samples), 1e9, 1.0),
    ][seed % 5]
    weights[chance.integers(samples)] += 0.5
    return weights


def wanted_of(numbers, length, seed):
    """All draws with random offsets, and those that are at, just below and just above a number."""
    chance = np.random.default_rng(seed)
    draws = np.arange(length, dtype=np.uint64) << np.uint64(32)
    near = numbers[numbers < np.uint64(length) << np.uint64(32)]
    near = np.concatenate([near, near + np.uint64(1), near - (near > 0).astype(np.uint64)])
    offsets = [chance.integers(0, 2**32, length, dtype=np.uint64), np.uint64(0), np.uint64(2**32 - 1)]
    wanted = np.concatenate([*(draws | offset for offset in offsets), near])
    return wanted[wanted < np.uint64(length) << np.uint64(32)]


@given(
    seed=st.integers(0, 10_000), samples=st.sampled_from([1, 2, 40, 1000]), length=st.sampled_from([1, 30, 1000, 9000])
)
def test_draws_are_those_of_a_binary_search(seed, samples, length):
    weights = weights_of(seed, samples)
    function, table = drawn(weights, length)
    numbers = np.array(cumulated(weights.tolist(), length), np.uint64)
    wanted = wanted_of(numbers, length, seed)
    draws, offsets = (wanted >> np.uint64(32)).astype(np.uint64), wanted.astype(np.uint32)
    found = function.first_above(np, table, draws, offsets)
    assert found.tolist() == np.searchsorted(numbers, wanted, side="right").tolist()
    assert [first_above(numbers.tolist(), int(one)) for one in wanted[:20]] == found[:20].tolist()
    assert table.nbytes <= 4 * (min(length, 2 * samples) + 2 * samples + 3)


@pytest.mark.parametrize("samples, length", [(300, 300), (40, 900)])
def test_draws_are_the_same_in_a_compiled_program(samples, length):
    search = jax.jit(Drawn(length, samples, "").first_above, static_argnums=0)
    for seed in range(5):
        weights = weights_of(seed, samples)
        function, table = drawn(weights, length)
        numbers = np.array(cumulated(weights.tolist(), length), np.uint64)
        chosen = np.random.default_rng(seed).choice(wanted_of(numbers, length, seed), 1000)
        draws, offsets = (chosen >> np.uint64(32)).astype(np.uint32), chosen.astype(np.uint32)
        found = function.first_above(np, table, draws, offsets)
        assert found.tolist() == search(jax.numpy, table, draws, offsets).tolist()


def test_draws_are_what_they_were_when_they_were_first_published():
    """A change would change the batches of every run that is resumed."""
    function, table = drawn(np.random.default_rng(0).exponential(1.0, 1000), 700)
    epochs = np.repeat(np.arange(3, dtype=np.uint32), 700)
    found = function.locate(np, table, WORDS, epochs, np.tile(np.arange(700, dtype=np.uint32), 3))
    assert (int(found.sum()), found[:5].tolist(), found[1400:1405].tolist()) == GOLDEN


GOLDEN = (1005878, [0, 1, 5, 6, 8], [1, 4, 5, 7, 8])  # of the binary search over all samples


@given(seed=st.integers(0, 10_000), samples=st.sampled_from([3, 37, 150]))
def test_draws_without_replacement_are_at_most_one_apart(seed, samples):
    weights = weights_of(seed, samples)
    positive = np.count_nonzero(weights)
    count = 1 + seed % positive
    view = ms.views.weighted(ms.HostArraySource(np.zeros(samples)), weights, samples=count, replacement=False)
    (function,), (table,) = view.selection.functions, view.selection.tables
    assert isinstance(function, Drawn) and table is not None
    draws = np.arange(count, dtype=np.uint64)
    low = table[count + 1 :]  # what is drawn changes where an offset passes one of these words
    for offset in {0, 2**32 - 1, *low.tolist(), *(low - np.uint32(1)).tolist()}:
        found = function.first_above(np, table, draws, np.full(count, offset, np.uint32))
        assert len(set(found.tolist())) == count
        assert np.all(weights[found] > 0)


@pytest.mark.parametrize("scale", [1e-320, 1e-250, 1e250, 5e307])
def test_only_the_proportions_of_weights_count(scale, key):
    source, weights = SOURCES["arrays"]("shuffle"), np.arange(SAMPLES) % 5 + 1.0
    runs = []
    for given_weights in (weights, weights / 8 * scale):
        loader = ms.DataLoader([ms.views.weighted(source, given_weights, samples=60), ms.BatchTransform(60)])
        runs.append(np.asarray(next(loader.iterate(loader.init_state(key)))[0]["x"]))
    counts = [np.bincount(run, minlength=SAMPLES) for run in runs]
    assert np.abs(counts[0] - counts[1]).max() <= 1
