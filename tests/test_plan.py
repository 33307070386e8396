"""The plan: which samples are in which batch, for every ending and any nesting."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream._core.plan import STEP_LIMIT, Batching, Plan

WORDS = np.array([5, 6], np.uint32)


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


@pytest.mark.parametrize(
    "levels", [[], [(4, "pad")], [(4, "drop")], [(7, "wrap")], [(4, "pad"), (3, "wrap")], [(3, "wrap"), (2, "pad")]]
)
@pytest.mark.parametrize("ordering", ["shuffle", "sequential"])
def test_numpy_and_jax_make_the_same_plan(levels, ordering):
    plan = make_plan(30, ordering, *levels)

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
