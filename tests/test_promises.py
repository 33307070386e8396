"""Promises that span several parts, or that are made to parts which users write themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_trees_equal

import millstream as ms

pytestmark = pytest.mark.optimized

SAMPLES = 22


class Squares:
    """An indexed source by its five names alone."""

    ordering = "shuffle"
    arrays = None

    def __len__(self):
        return SAMPLES

    def spec(self):
        return {"x": jax.ShapeDtypeStruct((2,), np.float32)}

    def read(self, indices, out=None):
        return {"x": np.stack([indices, indices**2], axis=1).astype(np.float32)}


class SquaresInGraph(Squares):
    """The same as arrays."""

    @property
    def arrays(self):
        return {"x": jnp.asarray(self.read(np.arange(SAMPLES))["x"])}


class Noise(ms.sources.HostSource):
    """A host source that wants keys."""

    ordering = "shuffle"
    keyed = True

    def __init__(self):
        self.sample_spec = ms.sources.spec_of("Noise", {"index": np.int32(0), "noise": np.zeros(3, np.float32)})

    def __len__(self):
        return SAMPLES

    def read_rows(self, indices, out, keys=None):
        out[0][...] = indices
        for row, words in enumerate(np.zeros((len(indices), 2), np.uint32) if keys is None else keys):
            out[1][row] = np.random.default_rng(words).random(3, np.float32)


def batches_of(source, executor=None):
    loader = ms.DataLoader([source, ms.BatchTransform(4)], executor=executor)
    return [jax.device_get(pair) for pair in loader.iterate(loader.init_state(jax.random.key(3)), steps=8)]


@pytest.mark.parametrize("make", [Squares, SquaresInGraph, Noise])
def test_sources_of_ones_own_give_one_stream_on_every_executor(make):
    expected = batches_of(make())
    for executor in (ms.Threads(1), ms.Threads(3), ms.Processes(2)):
        assert_trees_equal(batches_of(make(), executor), expected)
    seen = np.concatenate([jax.tree.leaves(batch)[0][mask].reshape(mask.sum(), -1)[:, 0] for batch, mask in expected])
    assert sorted(seen[:SAMPLES]) == list(range(SAMPLES))


def test_random_numbers_of_a_keyed_source_differ_by_epoch_and_by_run():
    loader = ms.DataLoader([Noise(), ms.BatchTransform(SAMPLES)])
    firsts = {}
    for seed in (0, 1):
        for epoch, (batch, _) in enumerate(loader.iterate(loader.init_state(jax.random.key(seed)), steps=2)):
            firsts[seed, epoch] = np.asarray(batch["noise"])[np.argmin(batch["index"])].tobytes()
    assert len(set(firsts.values())) == 4


class Walk:
    """A stream by its four names alone."""

    steps_per_epoch = 10

    def init_state(self, key):
        return {"key": key, "place": jnp.float32(0)}

    def next(self, state):
        key, step_key = jax.random.split(state["key"])
        place = state["place"] + jax.random.normal(step_key)
        return {"place": place}, jnp.bool_(True), {"key": key, "place": place}

    def element_spec(self):
        return {"place": jax.ShapeDtypeStruct((), jnp.float32)}


def follow(state, batch):
    return ms.logs().add_metric("place", batch[0]["place"][-1]), state + 1


def test_a_stream_of_ones_own_resumes_from_a_checkpoint(folder):
    def run(name, stop):
        loader = ms.DataLoader([Walk(), ms.BatchTransform(2)])
        tasks = {ms.every(1): follow, ms.every(3): ms.checkpoint(folder / name)}
        return ms.loop(jnp.int32(0), loader, tasks, stop=stop, key=jax.random.key(5), resume=True)

    whole = run("whole", 8).history.collect("place")
    run("parts", 3)
    resumed = run("parts", 8)
    assert resumed.elapsed.steps == int(resumed.state) == 8
    assert resumed.history.collect("place") == whole


def values_of(jaxpr):
    """The shapes of all values that a program computes, in whatever program inside it."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from values_of(inner)


@pytest.mark.parametrize("ending", [{}, {"drop_last": True}, {"pad_last_batch": False}], ids=["pad", "drop", "wrap"])
def test_nothing_in_a_step_is_as_large_as_the_data(ending):
    programs = []
    for samples in (2_000, 200_000):
        source = ms.ArraySampleSource({"x": np.zeros((samples, 3), np.float32)})
        loader = ms.DataLoader([source, ms.BatchTransform(16, **ending)])
        step = jax.make_jaxpr(lambda loader, state: loader.next_batch(state))
        programs.append(list(values_of(step(loader, loader.init_state(jax.random.key(0))).jaxpr)))
    assert len(programs[0]) > 50  # the order is among them
    largest = [max(np.prod(shape) for shape in program) for program in programs]
    assert 16 * 3 <= largest[0] == largest[1] < 2_000
