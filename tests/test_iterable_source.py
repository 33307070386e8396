"""Samples that can only be drawn in order: shuffled in a buffer, batched, saved and resumed exactly."""

import contextlib
import dataclasses
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import datasets
import iterable_script
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CACHE, STRICT, assert_trees_equal
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream.plan.keys import fold, named_key
from millstream.plan.shuffle_buffer import held_items
from millstream.sources import IterableSource

pytestmark = pytest.mark.optimized

ROWS = 4


def numbers(count=10):
    """A function that makes generators of that many samples."""

    def make():
        for number in range(count):
            yield {"x": np.float32(number)}

    return make


def loader_of(source, *stages, rows=ROWS, drop_last=False, **options):
    return ms.DataLoader([source, *stages, ms.BatchTransform(rows, drop_last=drop_last)], **options)


def small(count=10, **options):
    return loader_of(IterableSource(numbers(count), **options))


def real(batch, mask, leaf="x"):
    return np.asarray(batch[leaf])[np.asarray(mask)].tolist()


def run(loader, state, steps):
    """That many batches, and the state before each of them and after the last."""
    batches, states = [], [state]
    with loader.iterate(state, steps=steps) as iterator:
        for batch, mask in iterator:
            batches.append((jax.tree.map(np.asarray, batch), np.asarray(mask)))
            states.append(iterator.state)
    return batches, states


# The order


def naive_pass(key, epoch, items, size):
    """What a shuffle buffer gives out, and what is in it after each of them, with lists and one number at a time."""
    words = np.asarray(jax.random.key_data(key))
    buffer, given_out, held = [], [], []

    def slot():
        of_pass = fold(np, named_key(words, "millstream shuffle buffer 1"), np.uint32(epoch))
        random = fold(np, of_pass, np.uint64(len(given_out)))[0]
        return int(random) * len(buffer) // 2**32

    for item in items:
        if len(buffer) < size:
            buffer.append(item)
        else:
            place = slot()
            given_out.append(buffer[place])
            buffer[place] = item
            held.append((list(buffer), item))
    while buffer:
        place = slot()
        given_out.append(buffer[place])
        last = buffer.pop()
        if place < len(buffer):
            buffer[place] = last
        held.append((list(buffer), items[-1]))
    return given_out, held


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 25), st.integers(0, 5))
def test_what_a_buffer_holds_follows_from_the_key_and_the_place(seed, count, size, epoch):
    key = jax.random.key(seed)
    words = np.asarray(jax.random.key_data(key))
    given_out, held = naive_pass(key, epoch, range(count), size)
    assert sorted(given_out) == list(range(count))
    for place, (buffer, newest) in enumerate(held, 1):
        assert held_items(words, epoch, size, place, newest + 1) == buffer


def test_what_a_buffer_holds_late_in_a_long_pass_takes_no_longer():
    words, size, place = np.array([3, 4], np.uint32), 50, 4_000_000_000
    held = held_items(words, 0, size, place, place + size)
    assert len(set(held)) == size and max(held) == place + size - 1
    assert min(held) > place - 100 * size
    before = held_items(words, 0, size, place - 1, place + size - 1)
    assert sum(one != other for one, other in zip(before, held, strict=True)) == 1


@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(0, 12), st.booleans())
def test_batches_are_those_of_the_naive_shuffle_pass_after_pass(seed, count, size, drops):
    if drops and count < ROWS:
        return
    key = jax.random.key(seed)
    loader = loader_of(IterableSource(numbers(count), shuffle_buffer=size), drop_last=drops)
    state = loader.init_state(key)
    for epoch in range(3):
        order, _ = naive_pass(key, epoch, range(count), max(1, size))
        expected = [order[first : first + ROWS] for first in range(0, count, ROWS)]
        with loader.iterate(state) as batches:
            found = [real(*drawn) for drawn in batches]
        assert found == [rows for rows in expected if len(rows) == ROWS or not drops]
        state = batches.state
        assert np.asarray(state.progress).tolist() == [epoch + 1, 0, 0, 0, 0]


@given(st.integers(0, 2**32), st.integers(4, 30), st.integers(0, 12), st.booleans())
def test_a_run_resumes_from_every_step(seed, count, size, drops):
    loader = loader_of(IterableSource(numbers(count), shuffle_buffer=size), drop_last=drops)
    steps = 2 * -(-count // ROWS) + 1
    batches, states = run(loader, loader.init_state(jax.random.key(seed)), steps)
    assert [int(state.step) for state in states] == list(range(steps + 1))
    for step, state in enumerate(states):
        assert_trees_equal(run(loader, state, 2)[0][: steps - step], batches[step : step + 2])


def test_a_pass_can_depend_on_its_number(key):
    def make(epoch):
        return ({"x": np.float32(100 * epoch + number)} for number in range(epoch + 1))

    loader = loader_of(IterableSource(make))
    batches, states = run(loader, loader.init_state(key), 7)
    assert [real(*drawn) for drawn in batches][:4] == [[0], [100, 101], [200, 201, 202], [300, 301, 302, 303]]
    assert [real(*drawn) for drawn in run(loader, states[4], 3)[0]] == [
        [400, 401, 402, 403],
        [404],
        [500, 501, 502, 503],
    ]


# As indexed sources


def jitter(value, mask, key):
    return {**value, "x": value["x"] + jax.random.uniform(key, value["x"].shape)}


def host_jitter(sample, rng):
    return {**sample, "y": np.float32(rng.normal())}


STAGES = [
    ms.RandomHostMapTransform(host_jitter),
    ms.RandomMapTransform(jitter),
    ms.BatchTransform(ROWS),
    ms.RandomMapTransform(jitter, label="whole"),
]


def test_samples_in_order_are_batched_and_changed_like_those_with_an_index(key):
    samples = list(numbers(10)())
    indexed = ms.DataLoader([ms.DatasetSource(samples, ordering="sequential"), *STAGES])
    drawn = ms.DataLoader([IterableSource(samples), *STAGES])
    assert drawn.is_random and drawn.element_spec() == indexed.element_spec()
    expected, _ = run(indexed, indexed.init_state(key), 7)
    found, states = run(drawn, drawn.init_state(key), 7)
    assert_trees_equal(found, expected)
    assert_trees_equal(run(drawn, states[4], 3)[0], expected[4:])


def test_what_a_random_stage_makes_of_a_sample_does_not_depend_on_the_buffer(key):
    samples = [{**sample, "number": number} for number, sample in enumerate(numbers(10)())]
    rows = []
    for size in (0, 6):
        loader = ms.DataLoader([IterableSource(samples, shuffle_buffer=size), *STAGES[:3]])
        batches, _ = run(loader, loader.init_state(key), 3)
        values = [zip(*(real(*drawn, leaf=leaf) for leaf in ("number", "x", "y")), strict=True) for drawn in batches]
        rows.append([*itertools.chain.from_iterable(values)])
    assert rows[0] != rows[1] and sorted(rows[0]) == sorted(rows[1])


def test_next_batch_gives_the_same_and_any_state_again(key, assert_nothing_is_left):
    loader = small(shuffle_buffer=3)
    expected, states = run(loader, loader.init_state(key), 5)
    state = loader.init_state(key)
    for batch, mask in expected:
        found, state, found_mask = loader.next_batch(state)
        assert_trees_equal((jax.tree.map(np.asarray, found), np.asarray(found_mask)), (batch, mask))
    for step in (4, 0, 2):
        found, after, _ = loader.next_batch(states[step])
        assert_trees_equal(jax.tree.map(np.asarray, found), expected[step][0])
        assert_trees_equal(jax.tree.map(np.asarray, after), jax.tree.map(np.asarray, states[step + 1]))
    del loader
    gc.collect()
    assert_nothing_is_left()


def test_without_a_batch_samples_come_one_by_one(key):
    loader = ms.DataLoader([IterableSource(numbers(3)), ms.RandomMapTransform(jitter)])
    indexed = ms.DataLoader(
        [ms.DatasetSource(list(numbers(3)()), ordering="sequential"), ms.RandomMapTransform(jitter)]
    )
    assert_trees_equal(run(loader, loader.init_state(key), 4)[0], run(indexed, indexed.init_state(key), 4)[0])


def test_python_objects_ragged_samples_and_collate_functions_work(key):
    words = ["a", "bcd", "ef", "ghij", "k"]
    loader = loader_of(IterableSource(lambda: iter(words)), rows=2)
    assert [batch for batch, _ in loader.iterate(loader.init_state(key))] == [["a", "bcd"], ["ef", "ghij"], ["k", None]]

    def padded(sample):
        return np.pad(np.frombuffer(sample.encode(), np.uint8), (0, 4 - len(sample)))

    mapped = loader_of(IterableSource(words, shuffle_buffer=2), ms.HostMapTransform(padded), rows=2)
    rows = [
        row for batch, mask in mapped.iterate(mapped.init_state(key)) for row in np.asarray(batch)[np.asarray(mask)]
    ]
    assert sorted(row.tobytes().rstrip(b"\0").decode() for row in rows) == sorted(words)

    def collate(samples):
        return {"text": np.stack([padded(sample) for sample in samples]), "length": np.array([*map(len, samples)])}

    collated = ms.DataLoader([IterableSource(words), ms.BatchTransform(2, drop_last=True, collate=collate)])
    batches, states = run(collated, collated.init_state(key), 3)
    assert [batch["length"].tolist() for batch, _ in batches] == [[1, 3], [2, 4], [1, 3]]
    assert_trees_equal(run(collated, states[2], 1)[0], batches[2:])


def test_an_iterator_may_use_its_memory_again(key):
    def make():
        memory = {"x": np.zeros(3, np.float32)}
        for number in range(9):
            memory["x"][:] = number
            yield memory

    loader = loader_of(IterableSource(make, shuffle_buffer=4))
    rows = [row for batch, mask in loader.iterate(loader.init_state(key)) for row in real(batch, mask)]
    assert sorted(rows) == [[number] * 3 for number in range(9)]


def test_a_streaming_dataset_of_hugging_face_and_its_skip(key):
    stream = datasets.Dataset.from_dict({"x": [float(number) for number in range(11)]}).to_iterable_dataset()
    loader = loader_of(IterableSource(stream, shuffle_buffer=5))
    skipping = loader_of(IterableSource(lambda start: stream.skip(start), shuffle_buffer=5))
    batches, states = run(loader, loader.init_state(key), 5)
    assert sorted(itertools.chain(*(real(*drawn) for drawn in batches[:3]))) == list(range(11))
    for step in range(5):
        assert_trees_equal(run(skipping, states[step], 1)[0], batches[step : step + 1])


def test_batches_lie_over_a_mesh(key):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    loader = small(shuffle_buffer=3)
    sharded = loader.replace(sharding=mesh)
    assert next(sharded.iterate(sharded.init_state(key)))[0]["x"].sharding.mesh == mesh
    assert_trees_equal(run(sharded, sharded.init_state(key), 4)[0], run(loader, loader.init_state(key), 4)[0])


# How much is drawn, and when it ends


class Watched:
    """Makes generators of samples, and counts what happens to them."""

    def __init__(self, count=1000, at: dict[int, Any] | None = None):
        self.count, self.at = count, {} if at is None else at
        self.starts: list[int] = []
        self.drawn = self.ended = 0

    def __call__(self, start=0):
        return self.make(start)

    def make(self, start):
        self.starts.append(start)
        try:
            for number in range(start, self.count):
                if number in self.at:
                    self.at[number]()
                self.drawn += 1
                yield {"x": np.float32(number)}
        finally:
            self.ended += 1


def test_no_more_is_drawn_than_prefetch_and_steps_say(key, assert_nothing_is_left):
    watched = Watched()
    loader = loader_of(IterableSource(watched), prefetch=0)
    watched.drawn = 0  # the first sample is drawn to see what samples are
    batches = loader.iterate(loader.init_state(key), steps=100)
    next(batches)
    assert watched.drawn == ROWS + 1  # one more says that the pass is not over
    next(batches)
    assert watched.drawn == 2 * ROWS + 1
    batches.close()
    ahead = loader.replace(prefetch=50)
    watched.drawn = 0
    assert len(list(ahead.iterate(ahead.init_state(key), steps=3))) == 3
    assert watched.drawn == 3 * ROWS + 1
    assert_nothing_is_left()


@pytest.mark.parametrize("kept", [True, False])
def test_in_the_block_of_a_loader_iterators_continue_where_the_last_one_ended(key, kept, assert_nothing_is_left):
    watched, threads = Watched(), set()
    loader = loader_of(IterableSource(watched, shuffle_buffer=7), ms.HostMapTransform(lambda sample: sample))
    watched.at = dict.fromkeys(range(1, 100), lambda: threads.add(threading.current_thread()))
    state, rows = loader.init_state(key), []
    with loader if kept else contextlib.nullcontext():
        for _ in range(5):
            batches = loader.iterate(state, steps=3)
            rows += [real(*drawn) for drawn in batches]
            state = batches.state
        assert len(watched.starts) == (2 if kept else 6)  # the first one looked at one sample
        assert len(threads) == (1 if kept else 5)  # a connection to a database, say, may be used in one thread only
        assert watched.ended == (1 if kept else 6)
        assert real(*next(loader.iterate(loader.init_state(key)))) == rows[0]
    gc.collect()
    assert_nothing_is_left()
    assert watched.ended == len(watched.starts)
    assert rows == [real(*drawn) for drawn in run(loader, loader.init_state(key), 15)[0]]


def test_resuming_starts_at_the_oldest_sample_in_the_buffer(key):
    watched = Watched(20_000)
    loader = loader_of(IterableSource(watched, shuffle_buffer=10))
    with loader.iterate(loader.init_state(key), steps=1000) as batches:
        for _ in range(500):
            next(batches)
    watched.starts.clear()
    resumed = loader.iterate(batches.state, steps=1)
    next(resumed)
    words = np.asarray(jax.random.key_data(key))
    assert watched.starts == [min(held_items(words, 0, 10, 500 * ROWS, 500 * ROWS + 10))]
    assert watched.starts[0] > 1_500


@pytest.mark.parametrize("how", ["close", "break", "forget", "with", "exception"])
def test_however_it_is_left_the_thread_and_the_generator_end(key, assert_nothing_is_left, how):
    watched = Watched()
    loader = loader_of(IterableSource(watched, shuffle_buffer=5))
    batches: Any = loader.iterate(loader.init_state(key), steps=50)
    next(batches)
    if how == "close":
        batches.close()
    elif how == "break":
        for _ in batches:
            break
        del batches
    elif how == "forget":
        del batches
    elif how == "with":
        with batches:
            next(batches)
    else:
        with pytest.raises(KeyError), batches:
            raise KeyError
    gc.collect()
    assert_nothing_is_left()
    assert watched.ended == 2


def test_an_error_of_the_iterable_comes_after_the_good_batches_as_it_was_raised(key, assert_nothing_is_left):
    failing = [True]

    def fail():
        if failing.pop():
            raise OSError("the line is dead")

    watched = Watched(at={10: fail})
    loader = loader_of(IterableSource(lambda: watched.make(0)))
    batches, rows = loader.iterate(loader.init_state(key), steps=4), []
    with pytest.raises(OSError, match="the line is dead") as caught:
        for drawn in batches:
            rows.append(real(*drawn))
    assert caught.value.__notes__ == ["This came from IterableSource(<lambda>) after 10 items of pass 0."]
    assert rows == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert_nothing_is_left()
    failing.append(False)
    assert real(*next(batches)) == [8, 9, 10, 11]  # the iterable is started again, and gets over it
    batches.close()
    state = loader.init_state(key)
    failing.append(True)
    with pytest.raises(OSError, match="the line is dead"):
        for _ in range(3):
            _, state, _ = loader.next_batch(state)
    failing.append(False)
    assert real(*loader.next_batch(state)[::2]) == [8, 9, 10, 11]
    loader.close()
    assert_nothing_is_left()


def test_an_error_of_a_host_stage_names_the_sample(key):
    def halve(sample):
        if sample["x"] == 6:
            raise ZeroDivisionError("six")
        return sample

    loader = loader_of(IterableSource(numbers()), ms.HostMapTransform(halve))
    batches = loader.iterate(loader.init_state(key))
    assert real(*next(batches)) == [0, 1, 2, 3]
    with pytest.raises(ZeroDivisionError) as caught:
        next(batches)
    assert caught.value.__notes__ == ["This came from HostMapTransform(halve) at sample 6."]


def test_what_would_end_a_thread_or_a_loop_silently_is_raised_aloud(key):
    def leave():
        raise SystemExit(3)

    loader = loader_of(IterableSource(Watched(at={2: leave})))
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        next(loader.iterate(loader.init_state(key)))


def test_ctrl_c_ends_it_after_the_batch(key, assert_nothing_is_left):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        loader, seen = small(1000), []
        with loader.iterate(loader.init_state(key)) as batches:
            for drawn in batches:
                signal.raise_signal(signal.SIGINT)
                seen.append(real(*drawn))
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [[0, 1, 2, 3]] and batches.interrupted
    assert real(*next(loader.iterate(batches.state))) == [4, 5, 6, 7]
    gc.collect()
    assert_nothing_is_left()


def test_an_iterable_that_gives_nothing_is_warned_about_and_then_an_error(key, monkeypatch):
    silent, goes_on = threading.Event(), threading.Event()

    def wait():
        silent.set()
        goes_on.wait()

    watched = Watched(at={6: wait})
    loader = loader_of(IterableSource(watched))
    batches = loader.iterate(loader.init_state(key), steps=3)
    next(batches)
    assert silent.wait(60)
    monkeypatch.setattr(ms.reading.settings, "warn_seconds", 0.05)
    monkeypatch.setattr(ms.reading.settings, "stall_seconds", 0.1)
    with (
        pytest.warns(
            UserWarning, match=r"IterableSource\(Watched\) has given nothing for 0 s, after 6 items of pass 0"
        ),
        pytest.raises(ms.errors.WorkerStalled, match=r"ms.reading.settings.stall_seconds"),
    ):
        next(batches)
    goes_on.set()


# Data that are not the same again


def resume_with(make, key, steps=3, **options):
    """A run over 30 samples, resumed over another iterable."""
    loader, other = (loader_of(IterableSource(one, **options)) for one in (numbers(30), make))
    return run(other, run(loader, loader.init_state(key), steps)[1][-1], 1)[0]


def test_data_that_differ_are_refused_when_a_run_resumes(key):
    assert len(resume_with(numbers(30), key)) == 1
    with pytest.raises(
        ValueError, match=r"after 13 items of pass 0, and now it has 9. Give it the same data, with see"
    ):
        resume_with(numbers(9), key)
    with pytest.raises(ValueError, match=r"resumes only where .* the last of them is a different one"):
        resume_with(lambda: ({"x": np.float32(number**2)} for number in range(30)), key)
    with pytest.raises(ValueError, match="after 30 items of pass 0, and now there are more"):
        resume_with(numbers(31), key, steps=7, shuffle_buffer=8)
    assert len(resume_with(numbers(30), key, steps=7, shuffle_buffer=8)) == 1


def test_samples_that_have_no_hash_are_told_by_their_number_alone(key):
    loader = loader_of(IterableSource(lambda: (object() for _ in range(9))), rows=2)
    _, states = run(loader, loader.init_state(key), 2)
    assert np.asarray(states[1].progress).tolist() == [0, 2, 3, 0, 0]
    assert len(run(loader, states[2], 1)[0]) == 1


def test_a_length_that_is_wrong_is_refused(key):
    for length, found in ((12, "ended after 10"), (9, "has more")):
        loader = small(length=length)
        with pytest.raises(ValueError, match=f"has length={length}, and pass 0 {found}. Give the number of samples"):
            list(loader.iterate(loader.init_state(key)))


def test_a_pass_of_more_items_than_a_state_can_count_is_refused(key):
    loader = loader_of(IterableSource(lambda start: ({"x": np.float32(1)} for _ in itertools.count(start))))
    late = np.array([0, 2**32 - 8, 2**32 - 7, 0, 0], np.uint32)
    batches = loader.iterate(dataclasses.replace(loader.init_state(key), progress=late), steps=2)
    assert real(*next(batches)) == [1] * ROWS
    assert np.asarray(batches.state.progress).tolist()[1:3] == [2**32 - 4, 2**32 - 3]
    with pytest.raises(ValueError, match=r"a pass can have at most 4,294,967,295 items.*itertools.islice"):
        next(batches)


def test_a_mesh_over_several_processes_is_refused(monkeypatch):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    monkeypatch.setattr(jax.sharding.NamedSharding, "is_fully_addressable", property(lambda sharding: False))
    with pytest.raises(TypeError, match=r"over several processes needs an indexed source.*distribute_global_batch"):
        small().replace(sharding=mesh)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_length_that_is_known_says_how_many_steps_are_left(key, drop_last):
    loader = loader_of(IterableSource(numbers(10), shuffle_buffer=3, length=10), drop_last=drop_last)
    length = 2 if drop_last else 3
    assert loader.steps_per_epoch == length
    state = loader.init_state(key)
    for _ in range(3):
        batches = loader.iterate(state)
        assert len(batches) == length
        next(batches)
        assert len(loader.iterate(batches.state)) == length - 1
        assert len(list(batches)) == length - 1
        state = batches.state
    loader.close()


def test_states_of_other_pipelines_and_forged_ones_are_refused(key):
    loader = small(shuffle_buffer=3)
    state = loader.init_state(key)
    with pytest.raises(ValueError, match="iterable: shuffle buffer of 4 in the state, shuffle buffer of 3 here"):
        loader.iterate(small(shuffle_buffer=4).init_state(key))
    with pytest.raises(TypeError, match=r"iterate needs a state from loader.init_state"):
        loader.iterate(jax.random.key(0))
    for progress in ([0, 4, 3, 0, 0], [0, 4, 9, 0, 0], [0, 0, 2, 0, 0], [0, 4, 7]):
        forged = dataclasses.replace(state, progress=np.array(progress, np.uint32))
        with pytest.raises(ValueError, match=r"iterate needs a state as loader.init_state or an iterator has given it"):
            loader.iterate(forged)


# Loops


def sum_up(state, batch):
    value, mask = batch
    return ms.logs().add_metric("sum", jnp.sum(jnp.where(mask, value["x"], 0.0)))


def counting_step(state, batch):
    return sum_up(state, batch), state + jnp.sum(batch[1])


COUNTING = {ms.on_train_step: counting_step}
TESTING = {ms.on_test_step: sum_up}
ZERO = jnp.int32(0)


def test_a_loop_runs_through_passes_of_unknown_length(key):
    output = ms.train_loop(ZERO, small(), COUNTING, stop=7, key=key)
    assert (int(output.state), output.elapsed.steps, output.elapsed.samples) == (24, 7, 24)
    assert output.elapsed.epochs is None
    by_samples = ms.train_loop(ZERO, small(), COUNTING, stop=ms.at(samples=20), key=key)
    assert by_samples.elapsed.samples == 20
    assert ms.train_loop(ZERO, small(), COUNTING, stop=7, key=key, epoch_duration=3).elapsed.epochs == 2
    again = ms.train_loop(output.state, small(), COUNTING, stop=9, elapsed=output.elapsed, data_state=output.data_state)
    assert int(again.state) == 30


def test_a_loop_that_stops_by_epochs_needs_to_know_them(key):
    with pytest.raises(ValueError, match=r"needs a run that knows how long an epoch is.* if that has length="):
        ms.train_loop(ZERO, small(), COUNTING, stop=ms.at(epochs=2), key=key)
    with pytest.raises(ValueError, match=r"train_loop needs epoch_duration .*these data do not say how long an epoch"):
        ms.train_loop(ZERO, small(), COUNTING | {ms.on_epoch_end: print}, stop=4, key=key)
    output = ms.train_loop(ZERO, small(length=10), COUNTING, stop=ms.at(epochs=2), key=key)
    assert (output.elapsed.epochs, output.elapsed.steps, int(output.state)) == (2, 6, 20)


def test_testing_and_predicting_are_one_pass(key):
    loader = small(shuffle_buffer=3)
    assert ms.test_loop(None, loader, TESTING, key=key).elapsed.samples == 10
    predicted = ms.predict_loop(
        None, loader, {ms.on_predict_step: lambda state, batch: ms.logs().add_output("x", batch[0]["x"])}, key=key
    )
    assert sorted(predicted.outputs["x"].tolist()) == list(range(10))
    assert [elapsed.samples for elapsed, _ in ms.loops.elapse(loader, key=key)] == [4, 8, 10]
    with pytest.raises(ValueError, match="test_loop over a DataLoader that shuffles or is random needs key="):
        ms.test_loop(None, loader, TESTING)
    tested = ms.train_loop(ZERO, small(length=10), COUNTING | TESTING, test_dataset=small(), stop=3)
    assert tested.history.collect("sum_test") == [pytest.approx((4 * 6 + 4 * 22 + 2 * 17) / 10)]


def test_a_run_is_saved_and_resumes(key, folder):
    tasks = {ms.on_train_step: counting_step, ms.every(1): ms.checkpoint(folder / "run")}
    expected = ms.train_loop(ZERO, small(23, shuffle_buffer=6), COUNTING, stop=17, key=key)
    for stop in (4, 6, 11, 17):
        output = ms.train_loop(ZERO, small(23, shuffle_buffer=6), tasks, stop=stop, key=key, resume=True)
    assert int(output.state) == int(expected.state)
    assert list(output.history.collect("sum")) == list(expected.history.collect("sum"))
    saved = ms.restore(folder / "run", ZERO)
    assert np.asarray(saved.data_state.progress).tolist()[:2] == [2, 20]
    with pytest.raises(ValueError, match="shuffle buffer of 6 saved, shuffle buffer of 7 now"):
        ms.train_loop(ZERO, small(23, shuffle_buffer=7), tasks, stop=19, key=key, resume=True)
    with pytest.raises(ValueError, match="iterable: shuffle buffer of 6 saved, none now"):
        indexed = loader_of(ms.DatasetSource(list(numbers(23)())))
        ms.train_loop(ZERO, indexed, tasks, stop=19, key=key, resume=True)
    with pytest.raises(ValueError, match="resumes only where its iterable gives the same items again"):
        ms.train_loop(ZERO, small(5, shuffle_buffer=6), tasks, stop=19, key=key, resume=True)


def test_a_run_that_is_killed_resumes_in_a_new_process(tmp_path):
    expected = iterable_script.outcome(iterable_script.run(tmp_path / "whole"))
    command = [sys.executable, *STRICT, iterable_script.__file__, str(tmp_path / "killed")]
    killed = subprocess.run([*command, "11"], capture_output=True, text=True, timeout=180)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert os.listdir(tmp_path / "killed")
    resumed = subprocess.run(command, capture_output=True, text=True, timeout=180, env=os.environ | CACHE)
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert json.loads(resumed.stdout) == expected


def test_a_position_is_plain_and_leads_back(key):
    loader = small(23, shuffle_buffer=6)
    expected, _ = run(loader, loader.init_state(key), 12)
    batches = loader.iterate(loader.init_state(key), steps=12)
    for _ in range(7):
        next(batches)
    saved = json.loads(json.dumps(batches.get_state()))
    batches.close()
    assert saved["left"] == 5 and saved["step"] == 7
    other = small(23, shuffle_buffer=6).iterate(loader.init_state(key))
    next(other)
    other.set_state(saved)
    assert [real(*drawn) for drawn in other] == [real(*drawn) for drawn in expected[7:]]
    whole = loader.iterate(loader.init_state(key))
    next(whole)
    rest = small(23, shuffle_buffer=6).iterate(loader.init_state(key), steps=1)
    rest.set_state(json.loads(json.dumps(whole.get_state())))
    assert [real(*drawn) for drawn in rest] == [real(*drawn) for drawn in expected[1:6]]
    with pytest.raises(ValueError, match="set_state needs a progress of numbers from 0"):
        rest.set_state({**saved, "progress": [0, -1, 0, 0, 0]})
    with pytest.raises(ValueError, match="set_state needs left to be an int of at least 0"):
        indexed = loader_of(ms.DatasetSource(list(numbers(23)())))
        position = indexed.iterate(indexed.init_state(key)).get_state()
        indexed.iterate(indexed.init_state(key)).set_state({**position, "left": None})


# What is said of it


def test_it_is_shown_counted_explained_and_verified(key):
    loader = loader_of(IterableSource(numbers(), shuffle_buffer=5), ms.HostMapTransform(lambda sample: sample))
    assert repr(IterableSource(numbers(), shuffle_buffer=5)) == (
        "IterableSource(make, shuffle buffer of 5, {x: f32[]})"
    )
    assert "IterableSource(make) -> HostMapTransform(<lambda>) -> BatchTransform(4)" in repr(loader)
    assert "epochs of unknown length" in repr(loader) and loader.steps_per_epoch is None
    batches = loader.iterate(loader.init_state(key))
    assert repr(batches) == "BatchIterator(step 0, to the end of the pass)"
    assert len(list(batches)) == 3
    assert repr(batches.state) == f"IterableState(key={np.asarray(jax.random.key_data(key)).tolist()}, step=3)"
    stats = loader.stats()
    assert (stats.batches, stats.samples) == (3, 10)
    assert {"the iterable", "HostMapTransform(<lambda>)"} <= set(stats.reading)
    explained = loader.explain()
    assert [row.stage for row in explained.rows] == [
        "IterableSource(make)",
        "HostMapTransform(<lambda>)",
        "BatchTransform",
    ]
    assert explained.rows[0].memory_bytes == 5 * 4 and explained.rows[0].note == "drawn in order; shuffle buffer of 5"
    assert explained.plan["epoch"] == "one pass, batches of 4"
    assert explained.plan["last batch"] == "padded to 4 rows"
    assert "as many as the iterable gives" in str(explained)
    assert small(length=10).explain().plan["epoch"] == "one pass, 3 batches of 4"
    verified = loader.verify(steps=7, progress=False)
    assert [row.result for row in verified.rows] == ["ok", "left out", "ok", "ok", "left out"]


def test_verify_finds_an_iterable_that_gives_other_items(key):
    random = np.random.default_rng(0)
    loader = loader_of(IterableSource(lambda: iter(random.normal(size=(20, 1)).astype(np.float32))))
    with pytest.raises(ms.errors.VerificationFailed, match="gives different items when it is started again: seed"):
        loader.verify(steps=3, progress=False)


def test_without_a_shuffle_or_random_stages_no_key_is_needed():
    assert not small().is_random and small(shuffle_buffer=2).is_random
    assert ms.train_loop(ZERO, small(), COUNTING, stop=2).elapsed.samples == 8


# What cannot work


def compiled(loader, key):
    return jax.jit(lambda state: loader.next_batch(state)[0])(loader.init_state(key))


REFUSED = {
    "next_batch in jit": (compiled, "next_batch inside jax.jit cannot draw from an IterableSource.*Use iterate"),
    "scan_epoch": (
        lambda loader, key: loader.scan_epoch(loader.init_state(key), 0, lambda carry, batch, mask: (carry, None)),
        "scan_epoch cannot draw from an IterableSource",
    ),
    "run_steps": (
        lambda loader, key: loader.run_steps(
            loader.init_state(key), 0, lambda carry, batch, mask: (carry, None), 1, width=2
        ),
        "run_steps cannot draw from an IterableSource",
    ),
    "fuse": (
        lambda loader, key: ms.train_loop(
            ZERO, loader, {ms.on_train_step: jax.jit(counting_step)}, stop=4, fuse=2, key=key
        ),
        "fuse= cannot draw from an IterableSource",
    ),
    "executor": (lambda loader, key: loader.replace(executor=ms.Threads(2)), "has an index|have an index"),
    "on_error": (lambda loader, key: loader.replace(on_error="skip item"), "readers=4.* Leave them out"),
    "cache": (lambda loader, key: loader.replace(cache=ms.BatchCache("folder")), "Leave them out"),
    "a step": (lambda loader, key: loader.init_state(key, step=3), "an IterableSource is a stream.*batches.state"),
    "info": (lambda loader, key: loader.iterate(loader.init_state(key), with_info=True), "no info on the batches of"),
    "replay": (lambda loader, key: loader.iterate(loader.init_state(key), replay=2), "needs steps="),
    "len of an iterator": (
        lambda loader, key: len(loader.iterate(loader.init_state(key))),
        r"has no len\(\). Give iterate steps=n, or the source length=n",
    ),
    "len of a loader": (lambda loader, key: len(loader), r"here unknown \(None\)"),
    "batches of batches": (
        lambda loader, key: ms.DataLoader([IterableSource(numbers()), ms.BatchTransform(2), ms.BatchTransform(2)]),
        "can be batched once",
    ),
    "wrap": (
        lambda loader, key: ms.DataLoader([IterableSource(numbers()), ms.BatchTransform(4, pad_last_batch=False)]),
        "A pass over an IterableSource ends when it ends: use pad_last_batch=True or drop_last=True",
    ),
    "a buffer": (
        lambda loader, key: ms.DataLoader([IterableSource(numbers()), ms.BufferTransform(8, 4)]),
        "A compiled program cannot draw from an IterableSource",
    ),
    "a view": (lambda loader, key: ms.views.select(IterableSource(numbers()), print), "no samples to choose from"),  # type: ignore[arg-type]
    "a mixed loader": (
        lambda loader, key: ms.loader.MixedLoader({"a": loader, "b": loader}),
        "has to be drawn in order",
    ),
    "tune": (lambda loader, key: loader.tune(), "nothing to choose for an IterableSource"),
    "too few to fill a batch": (
        lambda loader, key: next(
            (one := loader_of(IterableSource(numbers(3)), drop_last=True)).iterate(one.init_state(key))
        ),
        "would drop everything: pass 0 of IterableSource.make. has only 3 samples",
    ),
    "a host stage after a compiled one": (
        lambda loader, key: ms.DataLoader(
            [IterableSource(numbers()), ms.RandomMapTransform(jitter), ms.HostMapTransform(print)]
        ),
        "comes after the source and before all compiled stages",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_what_can(key, case):
    make, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=message):
        make(small(), key)


def shared():
    generator = numbers()()
    return lambda: generator


def zipped():
    iterator = zip(range(5), range(5), strict=True)
    return lambda: iterator


WRONG: dict[str, tuple[Any, str]] = {
    "a generator": (numbers()(), "needs what can be started again.*IterableSource.make., or IterableSource.lambda"),
    "an iterator": (iter([1, 2]), "is used up after one pass"),
    "a dict": ({"x": np.arange(3)}, "Wrap arrays in ms.ArraySampleSource"),
    "a text": ("samples.txt", "needs a function that returns an iterator over samples"),
    "a number": (3, "or an object that can be iterated again. Got 3"),
    "a function with arguments": (lambda path, epoch: [], "lambda> needs path. Write: lambda: <lambda>"),
    "a function that returns a number": (lambda: 3, r"must return an iterator. It returned 3 \(int\)"),
    "a function that fails": (lambda: 1 / 0, "division by zero"),
    "nothing": (lambda: [], "needs at least one sample. It gave none"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_an_iterable_is_refused_by_name(case):
    given_iterable, message = WRONG[case]
    with pytest.raises((TypeError, ValueError, ZeroDivisionError), match=message):
        IterableSource(given_iterable)


@pytest.mark.parametrize("make", [shared, zipped])
def test_a_function_that_returns_the_same_iterator_every_time_is_refused(key, make):
    loader = loader_of(IterableSource(make()))
    with pytest.raises(TypeError, match=r"must return a new iterator at every call.*same (generator|zip) again"):
        next(loader.iterate(loader.init_state(key)))


def test_a_pass_without_samples_is_refused(key):
    loader = loader_of(IterableSource(lambda epoch: numbers(3 if epoch < 2 else 0)()))
    with pytest.raises(ValueError, match=r"needs at least one sample in a pass. Pass 2 gave none"):
        run(loader, loader.init_state(key), 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle_buffer": -1}, "needs shuffle_buffer to be an int of at least 0. Got -1"),
        ({"shuffle_buffer": 2.5}, "needs shuffle_buffer to be an int"),
        ({"length": 0}, "needs length to be an int of at least 1"),
        ({"length": 2**31}, "needs a length below 2,147,483,647"),
        ({"buffer": 3}, "IterableSource has no argument 'buffer'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        IterableSource(numbers(), **options)
