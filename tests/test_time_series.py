"""Batches of sequences, batched and packed."""

import jax
import numpy as np
import pytest
from test_bad_input import refuses

import millstream as ms
from millstream.transforms.time_series import TimeSeriesBatchTransform

ROWS, TIME = 5, 4


def source(*features):
    context = np.arange(ROWS * TIME * int(np.prod(features)), dtype=np.float32).reshape(ROWS, TIME, *features)
    return ms.ArraySampleSource({"context": context, "target": np.arange(ROWS)}, ordering="sequential")


def last_batch(stage, *features):
    """The second batch of four: one sequence and three of padding."""
    loader = ms.DataLoader([source(*features), ms.BatchTransform(4), stage])
    batch, _, mask = loader.next_batch(loader.init_state(jax.random.key(0), step=1))
    return jax.device_get((batch, mask))


@pytest.mark.parametrize(("features", "flat"), [((), 1), ((3,), 3), ((2, 3), 6)])
def test_sequences_get_one_axis_of_features(features, flat):
    batch, mask = last_batch(TimeSeriesBatchTransform(), *features)
    assert batch["context"].shape == (4, TIME, flat)
    expected = np.arange(4 * TIME * flat, ROWS * TIME * flat, dtype=np.float32)
    np.testing.assert_array_equal(batch["context"][0].reshape(-1), expected)
    assert batch["target"].tolist() == [4, 0, 0, 0]
    assert mask.tolist() == [True, False, False, False]


def test_packed_sequences_lie_behind_each_other_and_say_where_they_start():
    batch, mask = last_batch(TimeSeriesBatchTransform(mode="packed", sequence_start_key="start"), 2)
    assert batch["context"].shape == (4 * TIME, 2)
    np.testing.assert_array_equal(
        batch["context"][:TIME].reshape(-1), np.arange(4 * TIME * 2, ROWS * TIME * 2, dtype=np.float32)
    )
    assert batch["start"].tolist() == [True] + [False] * 15
    assert mask.tolist() == [True] * TIME + [False] * 12


def test_every_real_sequence_has_one_start():
    loader = ms.DataLoader([source(), ms.BatchTransform(4), TimeSeriesBatchTransform(mode="packed")])
    batch, _, mask = loader.next_batch(loader.init_state(jax.random.key(0)))
    assert np.flatnonzero(batch["sequence_start"]).tolist() == [0, 4, 8, 12]
    assert mask.all()


def test_bad_input():
    with refuses(ValueError, "needs mode 'batched' or 'packed'", "'flat' (str)"):
        TimeSeriesBatchTransform(mode="flat")  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "needs one batch of sequences", "'context' of shape (4, 2)", "after one BatchTransform"):
        ms.DataLoader([source(2), TimeSeriesBatchTransform()])
    with refuses(ValueError, "'target' of shape (4,)"):
        ms.DataLoader([source(), ms.BatchTransform(4), TimeSeriesBatchTransform("target")])
    with refuses(KeyError, "TimeSeriesBatchTransform finds no key 'series'", "'context', 'target'"):
        ms.DataLoader([source(), ms.BatchTransform(4), TimeSeriesBatchTransform("series")])
    with refuses(TypeError, "TimeSeriesBatchTransform needs samples that are dicts"):
        ms.DataLoader([ms.ArraySampleSource(np.zeros((4, 3))), ms.BatchTransform(2), TimeSeriesBatchTransform()])
    with refuses(ValueError, "would overwrite the value 'target'"):
        stage = TimeSeriesBatchTransform(mode="packed", sequence_start_key="target")
        ms.DataLoader([source(), ms.BatchTransform(4), stage])
