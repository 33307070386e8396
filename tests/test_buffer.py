"""The replay buffer against simulations in NumPy that share nothing with it but the definitions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_trees_equal
from test_bad_input import refuses

import millstream as ms
from millstream.transforms._replay import distinct, reservoir_slots, saturating_add
from millstream.transforms.buffer import BufferTransform
from millstream.transforms.buffer_stream import set_buffer_priorities

pytestmark = pytest.mark.optimized

CAPACITY, PREFILL, SIZE, ROWS = 8, 5, 3, 20


def source(rows=ROWS):
    return ms.ArraySampleSource({"x": np.arange(rows, dtype=np.int32)}, ordering="sequential")


def collect(carry, batch, mask):
    return carry, (batch, mask)


@functools.cache
def run(stage, seed=3, before=()):
    """One epoch through a buffer: the batches, the masks and the last state, as NumPy."""
    loader = ms.DataLoader([source(), *before, stage])
    state, _, (batch, mask) = loader.scan_epoch(loader.init_state(jax.random.key(seed)), (), collect)
    return jax.device_get((batch, mask, state))


def test_until_it_is_filled_values_pass_through_alone():
    batch, mask, _ = run(BufferTransform(CAPACITY, PREFILL, SIZE))
    for step in range(PREFILL):
        assert batch["x"][step].tolist() == [step, 0, 0]
        assert mask[step].tolist() == [True, False, False]
    assert mask[PREFILL:].all()


def test_sequential_reading_is_that_of_a_list():
    batch, _, state = run(BufferTransform(CAPACITY, PREFILL, SIZE))
    stored, read = [], 0
    for step in range(ROWS):
        filled = len(stored) >= PREFILL
        if len(stored) < CAPACITY:
            stored.append(step)
        else:
            stored[step % CAPACITY] = step
        if filled:
            expected = [stored[(read + i) % len(stored)] for i in range(SIZE)]
            read = (read + SIZE) % len(stored)
            assert batch["x"][step].tolist() == expected
    assert state.items[0]["x"].tolist() == stored
    assert (state.count, state.write_index, state.seen, state.read_index) == (CAPACITY, ROWS % CAPACITY, ROWS, read)


@pytest.mark.parametrize("mode", ["uniform", "without_replacement", "prioritised"])
def test_random_reading_gives_what_is_stored(mode):
    batch, _, _ = run(BufferTransform(CAPACITY, PREFILL, SIZE, mode=mode))
    for step in range(PREFILL, ROWS):
        assert set(batch["x"][step].tolist()) <= set(range(max(0, step + 1 - CAPACITY), step + 1))
    assert len({tuple(row) for row in batch["x"][PREFILL:].tolist()}) > (ROWS - PREFILL) // 2


def test_without_replacement_no_value_comes_twice_and_all_come_alike():
    counts = np.zeros(CAPACITY)
    firsts = np.zeros(CAPACITY)
    draw = jax.jit(jax.vmap(lambda key: distinct(key, SIZE, jnp.int32(CAPACITY))))
    drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 8000)))
    assert all(len(set(row)) == SIZE for row in drawn.tolist())
    np.add.at(counts, drawn.reshape(-1), 1)
    np.add.at(firsts, drawn[:, 0], 1)
    assert np.abs(counts / 8000 - SIZE / CAPACITY).max() < 0.03
    assert np.abs(firsts / 8000 - 1 / CAPACITY).max() < 0.03


def test_one_value_at_a_time_has_no_batch_axis():
    batch, mask, _ = run(BufferTransform(CAPACITY, PREFILL, mode="uniform"))
    assert batch["x"].shape == mask.shape == (ROWS,)
    assert batch["x"][:PREFILL].tolist() == list(range(PREFILL))
    assert mask.all()


def test_masked_values_are_not_stored():
    stages = (ms.BatchTransform(3), ms.BatchTransform(5))  # 20 rows: 3, ..., 3, 2; then 5 batches and 2 with 3 paddings
    loader = ms.DataLoader([source(), *stages, BufferTransform(12, 8, 8, by_row=True)])
    state, _, _ = loader.scan_epoch(loader.init_state(jax.random.key(0)), (), collect)
    assert int(state.count) == int(state.seen) == 7
    assert state.items[1][:7].any(axis=1).all()


def test_rows_of_batches_are_stored_one_by_one():
    batch, mask, state = run(BufferTransform(CAPACITY, PREFILL, SIZE, by_row=True), before=(ms.BatchTransform(6),))
    assert state.items[0]["x"].tolist() == [16, 17, 18, 19, 12, 13, 14, 15]
    assert (state.count, state.write_index, state.seen) == (CAPACITY, ROWS % CAPACITY, ROWS)
    assert batch["x"].tolist() == [[0, 1, 2], [8, 9, 10], [11, 12, 13], [14, 15, 16]]
    assert mask.all()


def test_whole_batches_are_stored_with_their_masks():
    batch, mask, state = run(BufferTransform(4, 1), before=(ms.BatchTransform(6),))
    assert state.items[0]["x"].shape == (4, 6)
    assert state.items[1][3].tolist() == [True, True, False, False, False, False]
    assert batch["x"].shape == mask.shape == (4, 6)


def test_a_reservoir_keeps_every_value_with_equal_chance():
    loader = ms.DataLoader([source(), BufferTransform(CAPACITY, 1, write_mode="reservoir")])

    @jax.jit
    def final(key):
        return loader.scan_epoch(loader.init_state(key), (), lambda carry, batch, mask: (carry, None))[0].items

    runs = 3000
    values, _ = jax.vmap(final)(jax.random.split(jax.random.key(0), runs))
    kept = np.asarray(values["x"])
    assert all(len(set(row)) == CAPACITY for row in kept.tolist())
    chance = np.bincount(kept.reshape(-1), minlength=ROWS) / runs
    expected = CAPACITY / ROWS
    assert np.abs(chance - expected).max() < 5 * np.sqrt(expected * (1 - expected) / runs)


def test_a_reservoir_of_rows_is_as_fair():
    rows, capacity, runs = 12, 4, 4000
    numbers = jnp.arange(rows)

    @jax.jit
    @jax.vmap
    def final(key):
        slots = reservoir_slots(numbers != 5, jnp.uint32(0), capacity, key)  # row 5 is padding
        return jnp.full(capacity, -1).at[slots].set(numbers, mode="drop")

    kept = np.asarray(final(jax.random.split(jax.random.key(1), runs)))
    chance = np.bincount(kept.reshape(-1), minlength=rows) / runs
    assert chance[5] == 0
    expected = capacity / (rows - 1)
    assert np.abs(np.delete(chance, 5) - expected).max() < 5 * np.sqrt(expected * (1 - expected) / runs)


def test_the_count_of_values_seen_does_not_wrap():
    top = jnp.uint32(2**32 - 3)
    assert int(saturating_add(top, jnp.int32(2))) == int(saturating_add(top, jnp.int32(9))) == 2**32 - 1


PRIORITISED = BufferTransform(
    CAPACITY, CAPACITY, SIZE, mode="prioritised", priority_exponent=0.7, importance_exponent=0.5
)


def test_priorities_decide_how_often_a_value_comes_and_weights_undo_it(key):
    loader = ms.DataLoader([source(CAPACITY), PRIORITISED])
    state, _, _ = loader.scan_epoch(loader.init_state(key), (), collect)  # the buffer now holds values 0 to 7
    given = np.array([0.5, 1, 2, 4, -1, 3, np.nan, 10], np.float32)
    state = set_buffer_priorities(state, np.arange(CAPACITY), given)

    @jax.jit
    @jax.vmap
    def draw(step):
        batch, _, _ = loader.next_batch(dataclasses.replace(state, step=step))
        return batch

    draws = jax.device_get(draw(jnp.arange(20_000, dtype=jnp.uint32)))
    # This step's own value replaces slot 0 and gets the highest priority; NaN counts as the least.
    priorities = np.array([10, 1, 2, 4, 1e-6, 3, 1e-6, 10])
    chances = priorities**0.7 / np.sum(priorities**0.7)
    found = np.bincount(draws["buffer_index"].reshape(-1), minlength=CAPACITY) / draws["buffer_index"].size
    assert np.abs(found - chances).max() < 5 * np.sqrt(0.25 / draws["buffer_index"].size)
    weights = (CAPACITY * chances) ** -0.5
    expected = (weights / weights.max())[draws["buffer_index"]]
    np.testing.assert_allclose(draws["importance_weight"], expected, rtol=1e-4)
    np.testing.assert_array_equal(draws["x"], draws["buffer_index"])


def test_while_filling_weights_are_one_and_padding_has_no_index(key):
    loader = ms.DataLoader([source(CAPACITY), PRIORITISED])
    batch, state, _ = loader.next_batch(loader.init_state(key))
    assert batch["buffer_index"].tolist() == [0, CAPACITY, CAPACITY]
    assert batch["importance_weight"].tolist() == [1, 0, 0]
    changed = set_buffer_priorities(state, batch["buffer_index"], [5.0, 6.0, 7.0])
    assert changed.priorities.tolist() == [5, *[0] * (CAPACITY - 1)]


def test_priorities_are_found_below_other_stages(key):
    loader = ms.DataLoader([source(CAPACITY), PRIORITISED, ms.BatchTransform(2)])
    batch, state, _ = loader.next_batch(loader.init_state(key))
    assert batch["buffer_index"].shape == (2, SIZE)
    changed = set_buffer_priorities(state, batch["buffer_index"], jnp.full((2, SIZE), 2.0))
    assert changed.inner.priorities[:2].tolist() == [2, 2]
    loader.next_batch(changed)


def test_bad_arguments():
    for name in ("capacity", "prefill", "sample_size"):
        with refuses(ValueError, f"BufferTransform needs {name} to be an int of at least 1", "0 (int)"):
            BufferTransform(**{"capacity": 4, "prefill": 4, name: 0})  # pyright: ignore[reportArgumentType]
    for sizes in ((4, 5, 1), (4, 2, 3)):
        with refuses(ValueError, "sample_size <= prefill <= capacity", f"prefill={sizes[1]}"):
            BufferTransform(*sizes)
    with refuses(ValueError, "needs mode 'sequential', 'uniform', 'without_replacement' or 'prioritised'", "'random'"):
        BufferTransform(4, 4, mode="random")  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "needs write_mode 'fifo' or 'reservoir'", "'lifo'"):
        BufferTransform(4, 4, write_mode="lifo")  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "BufferTransform needs priority_exponent from 0 to 1", "-1 (int)"):
        BufferTransform(4, 4, priority_exponent=-1)
    with refuses(TypeError, "by_row to be a bool", "'yes'"):
        BufferTransform(4, 4, by_row="yes")  # pyright: ignore[reportArgumentType]


def test_bad_input_of_a_pipeline(key):
    with refuses(ValueError, "BufferTransform(by_row=True) needs batches", "Got single values"):
        ms.DataLoader([source(), BufferTransform(4, 4, by_row=True)])
    with refuses(ValueError, "capacity of at least the 6 rows that arrive in one step", "capacity=4"):
        ms.DataLoader([source(), ms.BatchTransform(6), BufferTransform(4, 4, by_row=True)])
    with refuses(TypeError, "needs values that are dicts", "a ShapeDtypeStruct"):
        ms.DataLoader([ms.ArraySampleSource(np.arange(4)), BufferTransform(4, 4, mode="prioritised")])
    loader = ms.DataLoader([source(), BufferTransform(CAPACITY, PREFILL, SIZE)])
    with refuses(ValueError, "set_buffer_priorities needs the state of a pipeline with one", "BufferState with 0"):
        set_buffer_priorities(loader.init_state(key), [0], [1.0])
    state = ms.DataLoader([source(CAPACITY), PRIORITISED]).init_state(key)
    with refuses(ValueError, "one priority per index", "shape (2,)", "shape (1,)"):
        set_buffer_priorities(state, [0, 1], [1.0])
    for indices in (float("inf"), np.array([True, False])):
        with refuses(TypeError, "set_buffer_priorities needs indices that are whole numbers"):
            set_buffer_priorities(state, indices, np.ones(np.shape(indices)))


def test_a_buffer_continues_exactly_from_a_saved_state(key):
    loader = ms.DataLoader([source(), BufferTransform(CAPACITY, PREFILL, SIZE, "without_replacement", "reservoir")])
    state = loader.init_state(key)
    for _ in range(9):
        _, state, _ = loader.next_batch(state)
    saved = jax.device_get(state)
    _, _, seen = loader.scan_epoch(state, (), collect)
    _, _, again = loader.scan_epoch(saved, (), collect)
    assert_trees_equal(again, seen)
