"""Several loaders in one stream: mixed in turn, and training with validation."""

import gc
import multiprocessing
import os
import re
import signal
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest
from conftest import assert_trees_equal
from hypothesis import given
from hypothesis import strategies as st
from worker_processes import children

import millstream as ms
from millstream.loader.mixed import MixedLoader, WeightedOrder
from millstream.loader.train_stream import PassSchedule, TrainStream
from millstream.pipeline.state import LoaderState


def loader_of(
    samples: int, *, first: int = 0, batch: int = 2, ordering: Any = "shuffle", **options: Any
) -> ms.DataLoader:
    source = ms.ArraySampleSource({"x": first + np.arange(samples, dtype=np.int32)}, ordering=ordering)
    return ms.DataLoader([source, ms.BatchTransform(batch)], **options)


def mixed(**options: Any) -> MixedLoader:
    return MixedLoader({"a": loader_of(9), "b": loader_of(5, first=100), "c": loader_of(2, first=200)}, **options)


def stream(every: Any = ("epoch", 1)) -> TrainStream:
    return TrainStream(loader_of(5), validation=loader_of(6, first=100, ordering="sequential", batch=4), every=every)


def real(batch: Any, mask: Any) -> list[int]:
    return np.asarray(batch["x"])[np.asarray(mask)].tolist()


def shown(item: ms.loader.StreamItem) -> tuple[str, int, list[int]]:
    return "train" if item.training else "validate", item.step, real(item.batch, item.mask)


def kinds(items: Any) -> str:
    return "".join("t" if item.training else "v" for item in items)


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("millstream-reader")]


def refuses(kind: type[Exception], *words: str) -> Any:
    return pytest.raises(kind, match="(?s)" + ".*".join(map(re.escape, words)))


# The turns


weights_of_loaders = st.lists(st.integers(1, 40), min_size=1, max_size=7)


@given(weights_of_loaders)
def test_at_every_step_each_loader_has_given_its_share_rounded_down_or_up(weights):
    turns, given_so_far = WeightedOrder(weights), np.zeros(len(weights), int)
    for step in range(2 * turns.period + 1):
        share = step * np.array(weights) / sum(weights)
        assert (np.abs(given_so_far - share) < 1 - 1e-9).all()
        assert turns.before(step) == given_so_far.tolist()
        given_so_far[turns.at(step)] += 1


def test_loaders_of_equal_length_come_in_turn():
    turns = WeightedOrder([5, 5, 5])
    assert [turns.at(step) for step in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_few_batches_among_many_do_not_come_together():
    turns = WeightedOrder([90, 2, 2, 2, 2, 2])
    order = [turns.at(step) for step in range(turns.period)]
    rare = [step for step, loader in enumerate(order) if loader != 0]
    assert min(np.diff(rare)) > 3


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 60), st.integers(0, 60))
def test_a_schedule_counts_the_items_it_has(interval, length, step, end):
    schedule = PassSchedule(interval, length)
    passes, batch = schedule.before(step)
    expected = 0
    for slot in schedule.slots(step):
        if slot.batch > end or (slot.training and slot.batch == end):
            break
        expected += 1
    assert schedule.count(step, end) == expected
    assert schedule.before(schedule.step_of(batch)) == (batch // interval, batch)
    assert passes in (batch // interval, batch // interval - 1)


# Mixed loaders


def test_an_epoch_of_a_mix_goes_through_every_loader_once(key):
    mix = mixed()
    assert mix.steps_per_epoch == 5 + 3 + 1
    state = mix.init_state(key)
    for _ in range(3):
        batches = mix.iterate(state)
        seen = [value for pair in batches for value in real(*pair)]
        assert sorted(seen) == [*range(9), *range(100, 105), 200, 201]
        state = batches.state
    assert int(state.step) == 27


def test_a_mix_continues_from_every_state(key):
    mix = mixed()
    batches, states, seen = mix.iterate(mix.init_state(key), steps=20), [], []
    states.append(batches.state)
    for batch, _ in batches:
        seen.append(batch)
        states.append(batches.state)
    for step, state in enumerate(states):
        assert_trees_equal([batch for batch, _ in mix.iterate(state, steps=20 - step)], seen[step:])
        assert int(state.step) == step == int(mix.init_state(key, step).step)


def test_loaders_of_a_mix_have_keys_of_their_own(key):
    same = loader_of(64, batch=64)
    mix = MixedLoader({"a": same, "b": same})
    a, b = (real(*pair) for pair in mix.iterate(mix.init_state(key)))
    alone = real(*next(same.iterate(same.init_state(key))))
    assert len({tuple(a), tuple(b), tuple(alone)}) == 3
    renamed = MixedLoader({"b": same})
    assert real(*next(renamed.iterate(renamed.init_state(key)))) == b


def test_weights_set_the_proportion_and_leave_every_epoch_of_a_loader_whole(key):
    mix = mixed(weights={"a": 2, "b": 6, "c": 2})
    assert mix.steps_per_epoch == 5 * 5  # five rounds of 1 + 3 + 1 take the five batches of "a"
    seen: dict[str | None, list[int]] = {"a": [], "b": [], "c": []}
    counts = dict.fromkeys(seen, 0)
    for batch, mask, info in mix.iterate(mix.init_state(key), steps=25, with_info=True):
        seen[info.group] += real(batch, mask)
        counts[info.group] += 1
    assert counts == {"a": 5, "b": 15, "c": 5}
    assert sorted(seen["a"]) == list(range(9))
    for epoch in range(5):
        assert sorted(seen["b"][5 * epoch :][:5]) == list(range(100, 105))
        assert sorted(seen["c"][2 * epoch :][:2]) == [200, 201]


def test_batches_of_a_mix_may_differ_and_info_tells_them_apart(key):
    images = ms.DataLoader([ms.ArraySampleSource(np.ones((4, 2, 2), np.float32)), ms.BatchTransform(2)])
    mix = MixedLoader([images, loader_of(2, ordering="sequential", executor=ms.Threads(1))])
    found = list(mix.iterate(mix.init_state(key, step=3), steps=3, with_info=True))
    assert [(info.group, info.step, info.epoch, info.step_in_epoch) for _, _, info in found] == [
        ("0", 3, 1, 0),
        ("1", 4, 1, 1),
        ("0", 5, 1, 2),
    ]
    assert found[0][0].shape == (2, 2, 2)
    assert found[1][2].indices.tolist() == [0, 1]
    assert found[1][2].seeds.shape == (2,)


def test_batches_left_out_leave_the_others_of_a_mix_in_their_places(key):
    def fails(index):
        if index in (4, 5, 11):
            raise ValueError("no such sample")
        return {"x": np.int32(index)}

    broken = ms.DataLoader(
        [ms.DiskSampleSource(12, fails, ordering="sequential"), ms.BatchTransform(2)],
        executor=ms.Threads(2),
        on_error="skip batch",
    )
    mix = MixedLoader({"broken": broken, "whole": loader_of(6, first=100, ordering="sequential")})
    batches, seen, states = mix.iterate(mix.init_state(key), steps=18), [], []
    for batch, mask in batches:
        seen.append(real(batch, mask))
        states.append(batches.state)
    epoch = [[0, 1], [100, 101], [2, 3], [102, 103], [6, 7], [8, 9], [104, 105]]
    assert seen == 2 * epoch
    for number, state in enumerate(states):
        rest = [real(*pair) for pair in mix.iterate(state, steps=18 - int(state.step))]
        assert rest == seen[number + 1 :]


def test_an_error_names_its_loader_and_the_same_batch_can_be_asked_for_again(key):
    failing = [3]

    def fails_once(index):
        if index in failing:
            failing.remove(index)
            raise ValueError("the disk is not there")
        return {"x": np.int32(index)}

    shaky = ms.DataLoader(
        [ms.DiskSampleSource(4, fails_once, ordering="sequential"), ms.BatchTransform(2)], executor=ms.Threads(1)
    )
    mix = MixedLoader({"shaky": shaky, "whole": loader_of(4, first=100, ordering="sequential")})
    batches, seen, notes = mix.iterate(mix.init_state(key)), [], []
    while len(seen) < 4:
        try:
            seen.append(real(*next(batches)))
        except ValueError as error:
            notes += error.__notes__
    assert seen == [[0, 1], [100, 101], [2, 3], [102, 103]]
    assert "This came from the loader 'shaky'." in notes


def test_a_mix_keeps_the_workers_of_its_loaders(key):
    pids = set()

    def caller(index):

        return {"x": np.int32(os.getpid())}

    spec = {"x": jax.ShapeDtypeStruct((), np.int32)}
    loader = ms.DataLoader(
        [ms.DiskSampleSource(2, caller, sample_spec=spec), ms.BatchTransform(2)], executor=ms.Processes(1)
    )
    before = set(children())
    with MixedLoader([loader]) as mix:
        for _ in range(2):
            pids.update(np.asarray(next(mix.iterate(mix.init_state(key)))[0]["x"]).tolist())
        assert len(pids) == 1
    assert set(children()) == before


# Training with validation


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (("epoch", 1), "tttvv" * 4),
        (("epoch", 2), "ttttttvv" * 2),
        (("epoch", 3), "tttttttttvvttt"),
        (("batch", 1), "tvv" * 12),
        (("batch", 5), "tttttvv" * 2 + "tt"),
        (("batch", 100), "t" * 12),
    ],
)
def test_every_validation_pass_is_complete_and_comes_every_time(key, every, expected):
    both = stream(every)
    items = both.iterate(both.init_state(key), end_at=("epoch", 4))
    assert len(items) == len(expected)
    found = [shown(item) for item in items]
    assert "".join(kind[0] for kind, _, _ in found) == expected
    validated = [values for kind, _, values in found if kind == "validate"]
    assert validated == [[100, 101, 102, 103], [104, 105]] * (len(validated) // 2)
    assert [step for kind, step, _ in found if kind == "train"] == list(range(12))


def test_training_batches_are_those_of_the_loader_alone(key):
    both, alone = stream(("batch", 2)), loader_of(5)
    trained = [item.batch for item in both.iterate(both.init_state(key), end_at=("epoch", 3)) if item.training]
    assert_trees_equal(trained, [batch for batch, _ in alone.iterate(alone.init_state(key), steps=9)])


def test_a_shuffled_validation_is_complete_and_in_another_order_each_time(key):
    both = TrainStream(loader_of(2), validation=loader_of(30, batch=30))
    items = both.iterate(both.init_state(key), end_at=("epoch", 3))
    passes = [real(item.batch, item.mask) for item in items if not item.training]
    assert [sorted(values) for values in passes] == [list(range(30))] * 3
    assert len(set(map(tuple, passes))) == 3


def test_validation_on_the_training_data_has_another_order(key):
    data = loader_of(30, batch=30)
    both = TrainStream(data, validation=data)
    train, validation = (
        real(item.batch, item.mask) for item in both.iterate(both.init_state(key), end_at=("epoch", 1))
    )
    assert train != validation


@pytest.mark.parametrize(
    ("start_at", "end_at", "expected", "first", "last"),
    [
        ((0, 0), ("epoch", 1), "tttvv", 0, 2),
        ((0, 0), ("batch", 4), "tttvvt", 0, 3),
        ((0, 2), ("epoch", 2), "tvvtttvv", 2, 5),
        ((1, 0), ("epoch", 2), "tttvv", 3, 5),
        ((0, 3), ("epoch", 2), "tttvv", 3, 5),
        ((1, 4), ("epoch", 3), "ttvv", 7, 8),
        ((0, 7), ("batch", 8), "t", 7, 7),
        ((2, 0), ("epoch", 2), "", 6, 5),
        ((2, 0), ("epoch", 1), "", 6, 2),
        ((0, 0), ("epoch", 0), "", 0, -1),
    ],
)
def test_where_a_stream_starts_and_ends(key, start_at, end_at, expected, first, last):
    both = stream()
    items = both.iterate(both.init_state(key, start_at), end_at=end_at)
    assert (items.first_batch, items.last_batch, len(items)) == (first, last, len(expected))
    assert kinds(items) == expected
    assert (both.batches_per_epoch, both.batches_per_validation) == (3, 2)


def test_without_an_end_a_stream_goes_on(key):
    both = stream()
    items = both.iterate(both.init_state(key))
    assert items.last_batch is None
    assert kinds(next(items) for _ in range(50)) == "tttvv" * 10
    with refuses(TypeError, "endless TrainStream has no length", "end_at"):
        len(items)


def test_without_validation_a_stream_is_training_alone(key):
    both = TrainStream(loader_of(5))
    assert both.batches_per_validation == 0
    assert kinds(both.iterate(both.init_state(key, (1, 1)), end_at=("batch", 12))) == "t" * 8


@pytest.mark.parametrize("every", [("epoch", 1), ("batch", 2)])
def test_a_stream_continues_from_every_state(key, every):
    both = stream(every)
    items, found, states = both.iterate(both.init_state(key), end_at=("batch", 8)), [], []
    for item in items:
        found.append(shown(item))
        states.append(items.state)
    for number, state in enumerate(states):
        rest = [shown(item) for item in both.iterate(state, end_at=("batch", 8))]
        pass_is_over = found[number][2] != [100, 101, 102, 103]  # if not, it comes again from its beginning
        assert rest == found[number + pass_is_over :]


def test_a_stream_may_mix_loaders_for_training_and_validation(key):
    train = mixed()
    validation = MixedLoader([loader_of(2, first=1000), loader_of(2, first=2000)])
    both = TrainStream(train, validation=validation, every=("batch", 5))
    items = list(both.iterate(both.init_state(key), end_at=("batch", 10), with_info=True))
    assert kinds(items) == ("ttttt" + "vv") * 2
    assert [item.info and item.info.group for item in items if not item.training] == ["0", "1", "0", "1"]
    alone = [batch for batch, _ in train.iterate(train.init_state(key), steps=10)]
    assert_trees_equal([item.batch for item in items if item.training], alone)


def test_validation_comes_in_its_place_when_the_batch_before_it_is_left_out(key):
    def fails(index):
        if index >= 4:
            raise ValueError("no such sample")
        return {"x": np.int32(index)}

    train = ms.DataLoader(
        [ms.DiskSampleSource(6, fails, ordering="sequential"), ms.BatchTransform(2)],
        executor=ms.Threads(1),
        on_error="skip batch",
    )
    both = TrainStream(train, validation=loader_of(2, first=100))
    items, found, states = both.iterate(both.init_state(key), end_at=("epoch", 2)), [], []
    for item in items:
        found.append(shown(item)[:2])
        states.append(items.state)
    assert found == [("train", 0), ("train", 1), ("validate", 3), ("train", 3), ("train", 4), ("validate", 6)]
    for number, state in enumerate(states):
        assert [shown(item)[:2] for item in both.iterate(state, end_at=("epoch", 2))] == found[number + 1 :]


def test_nothing_is_read_twice_because_validation_came_between(key):
    reads: list[tuple[str, int]] = []

    def reading(name):
        def read(index):
            reads.append((name, index))
            return {"x": np.int32(index)}

        spec = {"x": jax.ShapeDtypeStruct((), np.int32)}
        source = ms.DiskSampleSource(6, read, ordering="sequential", sample_spec=spec)
        return ms.DataLoader([source, ms.BatchTransform(2)], executor=ms.Threads(2))

    both = TrainStream(reading("train"), validation=reading("validation"), every=("batch", 1))
    found = kinds(both.iterate(both.init_state(key), end_at=("epoch", 2)))
    assert found == "tvvv" * 6
    assert reads.count(("train", 5)) == 2
    assert reads.count(("validation", 5)) == 6


@pytest.mark.parametrize("executor", [ms.Threads(2), ms.Processes(1)], ids=["threads", "processes"])
def test_executors_give_the_same_stream_and_leave_nothing_behind(key, executor):
    def read(index):
        return {"x": np.int32(index)}

    def read_held_out(index):
        return {"x": np.int32(100 + index)}

    def on_host(samples, function, batch, ordering):
        source = ms.DiskSampleSource(samples, function, ordering=ordering)
        return ms.DataLoader([source, ms.BatchTransform(batch)], executor=executor)

    before, threads = set(children()), len(reader_threads())
    theirs = stream(("batch", 4))
    expected = [shown(item) for item in theirs.iterate(theirs.init_state(key), end_at=("batch", 9))]
    train, validation = on_host(5, read, 2, "shuffle"), on_host(6, read_held_out, 4, "sequential")
    ours = TrainStream(train, validation=validation, every=("batch", 4))
    state = ours.init_state(key)
    items = ours.iterate(state, end_at=("batch", 9))  # to the end
    assert [shown(item) for item in items] == expected
    abandoned = ours.iterate(state)
    assert kinds(next(abandoned) for _ in range(5)) == "ttttv"
    assert executor == ms.Threads(2) or len(children()) == len(before) + 2
    del abandoned
    with pytest.raises(ZeroDivisionError), ours.iterate(state) as items:
        for item in items:
            _ = 1 // item.training
    for item in ours.iterate(state):
        if not item.training:
            break
    del items
    gc.collect()
    deadline = time.monotonic() + 120
    while (len(reader_threads()) > threads or set(children()) != before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(reader_threads()) <= threads  # those of an earlier test may have ended meanwhile
    assert set(children()) == before
    assert not multiprocessing.active_children()


def test_an_abandoned_stream_ends_without_the_garbage_collector(key):
    source = ms.DiskSampleSource(40, lambda index: {"x": np.int32(index)})
    loader, threads = ms.DataLoader([source, ms.BatchTransform(2)], executor=ms.Threads(2)), len(reader_threads())
    both = TrainStream(MixedLoader([loader, loader]), validation=loader)
    gc.disable()
    try:
        items = both.iterate(both.init_state(key))
        next(items)
        assert len(reader_threads()) > threads
        del items
        deadline = time.monotonic() + 120
        while len(reader_threads()) > threads and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(reader_threads()) <= threads  # those of an earlier test may have ended meanwhile
    finally:
        gc.enable()


def test_the_first_ctrl_c_ends_a_stream_and_the_second_raises(key):
    both, handler = stream(), signal.getsignal(signal.SIGINT)
    found = ""
    with both.iterate(both.init_state(key)) as items:
        for item in items:
            found += "t" if item.training else "v"
            if len(found) == 4:
                signal.raise_signal(signal.SIGINT)
    assert found == "tttv"
    assert items.interrupted
    assert signal.getsignal(signal.SIGINT) is handler
    assert kinds(both.iterate(items.state, end_at=("epoch", 1))) == "vv"  # the pass again
    with pytest.raises(KeyboardInterrupt), both.iterate(items.state) as items:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        next(items)


def test_a_stream_compiles_nothing_after_its_first_epoch(key, count_compilations):
    both = stream()
    items = both.iterate(both.init_state(key), end_at=("epoch", 4))
    assert kinds(next(items) for _ in range(8)) == "tttvvttt"
    with count_compilations() as count:
        assert kinds(items) == "vv" + "tttvv" * 2
    assert count == [0]


# What is refused


def test_mixed_loaders_refuse_what_cannot_be_mixed():
    fine = loader_of(4)
    with refuses(TypeError, "MixedLoader needs loaders by name, in a dict, or in a list. Got", "DataLoader"):
        MixedLoader(fine)  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "MixedLoader needs loaders, at least one", "Got []"):
        MixedLoader([])
    with refuses(ValueError, "names are strings. Got [1]"):
        MixedLoader({1: fine})  # pyright: ignore[reportArgumentType]
    with refuses(TypeError, "MixedLoader needs loaders['1'] to be a DataLoader. Got 3 (int)"):
        MixedLoader([fine, 3])  # pyright: ignore[reportArgumentType]
    history = ms.DataLoader([ms.ArraySampleSource(np.arange(4)), ms.BufferTransform(2, 1, mode="sequential")])
    with refuses(TypeError, "MixedLoader needs loaders['old'] to start with an indexed source", "a stream"):
        MixedLoader({"old": history})
    with refuses(ValueError, "keep its batches in order", "Leave ordered=False out"):
        MixedLoader([loader_of(4, executor=ms.Threads(1, ordered=False))])
    with refuses(ValueError, "a weight for every loader. Got ['a'] for ['a', 'b']"):
        MixedLoader({"a": fine, "b": fine}, weights={"a": 1})
    with refuses(TypeError, "whole numbers; for 0.7 and 0.3 write 7 and 3. Got 0.5 for 'a'"):
        MixedLoader({"a": fine, "b": fine}, weights={"a": 0.5, "b": 1})  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "MixedLoader needs weights['0'] to be an int of at least 1. Got 0 (int)"):
        MixedLoader([fine], weights=[0])
    with refuses(ValueError, "at most 1,000,000 in lowest terms. Got 1,000,001. Round them."):
        MixedLoader([fine, fine], weights=[1, 1_000_000])


def test_streams_refuse_what_they_cannot_do(key):
    fine, both = loader_of(5), stream()
    with refuses(TypeError, "TrainStream needs train to be a DataLoader. Got 'x' (str)"):
        TrainStream("x")  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, 'TrainStream needs every to be ("epoch", n) or ("batch", n). Got', "'step'"):
        TrainStream(fine, validation=fine, every=("step", 3))  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "the number of every to be an int of at least 1. Got 0 (int)"):
        TrainStream(fine, validation=fine, every=("batch", 0))
    with refuses(ValueError, "validation to come once per pass. Leave weights out"):
        TrainStream(fine, validation=MixedLoader([fine, fine], weights=[1, 2]))
    wrapped = ms.DataLoader([ms.ArraySampleSource(np.arange(5)), ms.BatchTransform(2, pad_last_batch=False)])
    with refuses(ValueError, "every validation pass to be complete", "pad_last_batch=True"):
        TrainStream(fine, validation=wrapped)
    with refuses(ValueError, "init_state needs start_at=(epoch, batch). Got 3 (int)"):
        both.init_state(key, 3)  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "init_state needs the batch of start_at to be an int of at least 0. Got -1 (int)"):
        both.init_state(key, (0, -1))
    with refuses(ValueError, "TrainStream needs end_at to be", "Got 'never' (str)"):
        both.iterate(both.init_state(key), end_at="never")  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "training batches, not 9,000,000,000. Use another key."):
        both.iterate(both.init_state(key), end_at=("batch", 9_000_000_000))


def test_states_of_other_streams_are_refused(key):
    both, mix = stream(), mixed()
    with refuses(ValueError, "state of a different pipeline", "3 batches in the state, 2 batches here"):
        stream(("batch", 2)).iterate(both.init_state(key))
    with refuses(ValueError, "mix: 5 of 'a', 3 of 'b', 1 of 'c' in the state, 1 of 'a', 1 of 'b', 1 of 'c' here"):
        mixed(weights={"a": 1, "b": 1, "c": 1}).iterate(mix.init_state(key))
    with refuses(TypeError, "iterate needs a state from loader.init_state(key). Got None"):
        mix.iterate(None)  # pyright: ignore[reportArgumentType]


def test_a_stream_that_cannot_count_further_says_so(key):
    both = TrainStream(loader_of(5))
    start = both.init_state(key)
    state = LoaderState(start.key, np.asarray(2**32 - 3, np.uint32), start.origin)  # pyright: ignore[reportArgumentType]
    items = both.iterate(state)
    assert [next(items).step, next(items).step] == [2**32 - 3, 2**32 - 2]
    with refuses(ValueError, "iterate can reach 4,294,967,295 training batches"):
        next(items)
