"""What every pipeline promises, whatever its stages and its format: `PIPELINES` and `FORMATS` list them."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_trees_equal
from format_pipelines import FORMATS
from pipelines import COMPUTED, PIPELINES, SAMPLES

import millstream as ms

ALL = PIPELINES | FORMATS
# A scan reads all formats through one piece of code, and compiles it for each: few of them are scanned. What a scan
# gives is what stepping gives, and that of every format is tested by iterating.
SCANNED = ["host, Arrow table", "host, Parquet", "host, SQLite"]


def of(names):
    """Pipelines by name, those that compute with all optimizations."""
    return [pytest.param(name, marks=[pytest.mark.optimized] if name in COMPUTED else []) for name in names]


@functools.cache
def make_loader(name):
    return ms.DataLoader(ALL[name]())


@pytest.fixture(params=of(ALL))
def loader(request):
    return make_loader(request.param)


def take(loader, state, steps):
    """So many (batch, mask) pairs by `next_batch`, and every state on the way."""
    pairs, states = [], [state]
    for _ in range(steps):
        batch, state, mask = loader.next_batch(state)
        pairs.append((batch, mask))
        states.append(state)
    return pairs, states


def test_stream_continues_from_a_saved_state(loader, key):
    seen, states = take(loader, loader.init_state(key), loader.steps_per_epoch + 3)  # crosses an epoch
    for start, state in enumerate(states):
        rest, _ = take(loader, jax.device_get(state), len(seen) - start)
        assert_trees_equal(rest, seen[start:])


def test_iteration_gives_the_same_batches_as_stepping(loader, key):
    state = loader.init_state(key)
    steps = 2 * loader.steps_per_epoch + 1
    seen, states = take(loader, state, steps)
    batches = loader.iterate(state, steps=steps)
    assert len(batches) == steps
    for pair, after in zip(seen, states[1:], strict=True):
        assert_trees_equal(next(batches), pair)
        assert_trees_equal(batches.state, after)
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("name", of([*PIPELINES, *SCANNED]))
def test_scanning_gives_the_same_batches_as_stepping(name, key):
    loader = make_loader(name)
    state = loader.init_state(key)
    seen, states = take(loader, state, loader.steps_per_epoch)
    after, _, stacked = loader.scan_epoch(state, (), _collect)
    assert_trees_equal(stacked, jax.tree.map(lambda *leaves: jnp.stack(leaves), *seen))
    assert_trees_equal(after, states[-1])


def _collect(carry, batch, mask):
    return carry, (batch, mask)


FEW = [
    "samples",
    "pad",
    "wrap",
    "batch of batches",
    "random map before",
    "host function",
    "stream",
]  # each compiles again
SHARED = [name for name in PIPELINES if "stream" not in name and not ("host" in name and "callback" not in name)]


@pytest.mark.parametrize("name", of(FEW))
def test_stepping_under_jit_gives_the_same_batches(name, key):
    loader = make_loader(name)
    state = loader.init_state(key)
    seen, _ = take(loader, state, 3)
    step = jax.jit(lambda loader, state: loader.next_batch(state))
    for pair in seen:
        batch, state, mask = step(loader, state)
        assert_trees_equal((batch, mask), pair)


@pytest.mark.parametrize("name", of([*FEW, "normalize"]))
def test_many_runs_step_together_under_vmap(name, key):
    loader = make_loader(name)
    keys = jax.random.split(key, 3)
    states = jax.vmap(loader.init_state)(keys)
    batches, states, masks = jax.vmap(loader.next_batch)(states)
    for run in range(3):
        batch, state, mask = loader.next_batch(loader.init_state(keys[run]))
        pick = functools.partial(jax.tree.map, lambda leaf, run=run: leaf[run])
        assert_trees_equal(pick((batches, states, masks)), (batch, state, mask))


def test_the_spec_is_that_of_the_batches(loader, key):
    batch, _, mask = loader.next_batch(loader.init_state(key))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), batch) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), loader.element_spec()
    )
    assert mask.dtype == bool


def test_an_epoch_visits_every_sample_once(loader, key):
    for epoch in range(3):
        state = loader.init_state(key)
        pairs, _ = take(loader, state, (epoch + 1) * loader.steps_per_epoch)
        labels = np.concatenate([np.atleast_1d(batch["label"])[np.atleast_1d(mask)] for batch, mask in pairs])
        counts = collections.Counter(labels.tolist())
        if len(labels) % SAMPLES == 0:  # every ending but dropping, and wrapping before its drift is whole
            assert counts == dict.fromkeys(range(SAMPLES), len(labels) // SAMPLES)
        assert max(counts.values()) <= epoch + 2


@pytest.mark.parametrize("name", of(["pad", "batch of batches", "map before", "random map before", "rename", "stream"]))
def test_padding_is_zero_and_masked(name, key):
    loader = make_loader(name)
    pairs, _ = take(loader, loader.init_state(key), 2 * loader.steps_per_epoch)
    assert sum(np.sum(~np.asarray(mask)) for _, mask in pairs) > 0
    for batch, mask in pairs:
        for leaf in jax.tree.leaves(batch):
            assert not np.asarray(leaf)[~np.asarray(mask)].any()


def test_nothing_compiles_after_the_first_step(loader, key, count_compilations):
    state = loader.init_state(key)
    batch, state, mask = loader.next_batch(state)
    next(loader.iterate(state))
    loader.init_state(key)
    with count_compilations() as count:
        for _ in range(2 * loader.steps_per_epoch + 1):
            batch, state, mask = loader.next_batch(state)
        for _ in loader.iterate(state, steps=2 * loader.steps_per_epoch + 1):
            pass
        jax.block_until_ready((batch, state, mask))
    assert count == [0]


@pytest.mark.parametrize("name", of([*PIPELINES, *SCANNED]))
def test_nothing_compiles_after_the_first_scan(name, key, count_compilations):
    loader = make_loader(name)
    state, _, _ = loader.scan_epoch(loader.init_state(key), (), _collect)
    with count_compilations() as count:
        for _ in range(2):
            state, _, _ = loader.scan_epoch(state, (), _collect)
        jax.block_until_ready(state)
    assert count == [0]


@pytest.mark.parametrize("name", of(SHARED))
def test_a_second_loader_of_equal_shape_compiles_nothing(name, key, count_compilations):
    loader = make_loader(name)
    loader.scan_epoch(loader.next_batch(loader.init_state(key))[1], (), _collect)
    with count_compilations() as count:
        twin = ms.DataLoader(PIPELINES[name]())
        twin.scan_epoch(twin.next_batch(twin.init_state(key))[1], (), _collect)
    assert count == [0]


@pytest.mark.parametrize("name", [name for name in PIPELINES if "stream" not in name])
def test_the_state_is_a_key_and_a_step(name, key):
    state = make_loader(name).init_state(key)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state)) - state.key.nbytes <= 64
    assert {"key", "step"} == {field for field in vars(state) if field != "origin"}


def test_passing_a_loader_through_jit_makes_its_data_arguments(key):
    loader = make_loader("pad")
    traced = jax.make_jaxpr(lambda loader, state: loader.next_batch(state))(loader, loader.init_state(key))
    assert not traced.consts
