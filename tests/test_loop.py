"""The loop: what is called when, with what, and what becomes of what it returns."""

import collections
import functools
import os
import signal
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_trees_equal
from flax import nnx

import millstream as ms

pytestmark = pytest.mark.optimized

BATCHES = [np.full((4, 2), number, np.float32) for number in range(6)]


@jax.jit
def count_step(state, batch):
    return ms.logs().add_metric("mean", jnp.mean(batch)), state + 1


@jax.jit
def loader_step(state, batch):
    values, mask = batch
    total = jnp.sum(jnp.where(mask, values["x"], 0))
    return ms.logs().add_metric("total", total).add_metric("rows", jnp.sum(mask)), state + total


@pytest.fixture(scope="module")
def loader():
    source = ms.ArraySampleSource({"x": np.arange(10, dtype=np.float32)})
    return ms.DataLoader([source, ms.BatchTransform(4)])


def loop_output_of(error):
    return error.loop_output


def plus_one(state):
    return state + 1


def test_tasks_are_done_in_order_at_their_steps():
    done = []

    def note(name):
        return lambda state, batch, elapsed: done.append((name, elapsed.steps))

    ms.loop(None, range(4), {ms.every(2): [note("a"), note("b")], ms.every(1): note("c"), ms.at(3): note("d")})
    assert done == [
        *[("c", 1)],
        *[("a", 2), ("b", 2), ("c", 2)],
        *[("c", 3), ("d", 3)],
        *[("a", 4), ("b", 4), ("c", 4)],
    ]


def test_tasks_may_be_pairs_and_are_left_as_they_are():
    pairs, tasks = [(ms.every(1), plus_one)], {ms.every(1): [plus_one], ms.every(2): []}
    assert ms.loop(0, range(3), pairs).state == 3
    assert ms.loop(0, range(3), tasks).state == 3
    assert ms.loop(0, range(3), tasks).state == 3  # a second time
    assert pairs[0][1] is plus_one and [len(callbacks) for callbacks in tasks.values()] == [1, 0]


def test_equal_schedules_do_not_lose_a_task_under_a_frozen_clock(monkeypatch):
    monkeypatch.setattr("time.time", lambda: 0.0)
    monkeypatch.setattr("time.perf_counter", lambda: 0.0)
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    done = []
    ms.loop(0, range(3), {ms.every(1): plus_one, ms.every(1): lambda state: done.append(state)})
    assert done == [1, 2, 3]


@pytest.mark.parametrize("stop", [0, ms.at(0), ms.at(samples=0), ms.at(time=0)])
def test_a_run_that_is_at_its_end_draws_nothing(stop):
    def data():
        raise AssertionError("nothing should be drawn")
        yield

    started, ended = [], []
    state, history, elapsed = ms.loop(
        7,
        data(),
        {ms.every(1): plus_one},
        stop=stop,
        on_start=lambda: started.append(1),
        on_end=lambda: ended.append(1),
    )
    assert (state, len(history), elapsed.steps, started, ended) == (7, 0, 0, [1], [1])


def test_no_batch_is_drawn_behind_the_stop():
    drawn = []

    def data():
        for number in range(10):
            drawn.append(number)
            yield number

    for stop in (3, ms.at(samples=3), lambda elapsed: elapsed.steps == 3):
        drawn.clear()
        assert ms.loop(0, data(), {ms.every(1): plus_one}, stop=stop).elapsed.steps == 3
        assert drawn == [0, 1, 2]


def test_elapsed_counts_the_current_step_and_a_run_goes_on_without_repeating_one():
    seen = []
    tasks = {ms.every(1): [plus_one, lambda state, batch, elapsed: seen.append(elapsed.steps)]}
    state, _, elapsed = ms.loop(0, range(10), tasks, stop=10)
    assert elapsed.steps == 10
    state, _, elapsed = ms.loop(state, range(100), tasks, stop=20, elapsed=elapsed)
    assert (state, elapsed.steps, seen) == (20, 20, list(range(1, 21)))


@pytest.mark.parametrize(
    "make",
    [
        lambda fn: fn,
        jax.jit,
        nnx.jit,
        eqx.filter_jit,
        lambda fn: functools.partial(fn),
        lambda fn: functools.partial(lambda extra, state, batch: fn(state, batch), 1),
        lambda fn: functools.partial(lambda state, batch, extra: fn(state, batch), extra=1),
        lambda fn: jax.jit(functools.partial(fn)),
        lambda fn: types.MethodType(lambda self, state, batch: fn(state, batch), object()),
        lambda fn: type("Called", (), {"__call__": lambda self, state, batch: fn(state, batch)})(),
    ],
    ids=["function", "jit", "nnx.jit", "filter_jit", "partial", "bound", "keyword", "jit partial", "method", "object"],
)
def test_every_kind_of_callable_gets_its_arguments(make):
    step = make(lambda state, batch: (ms.logs().add_metric("mean", jnp.mean(batch)), state + 1))
    state, history, _ = ms.loop(jnp.int32(0), BATCHES[:3], {ms.every(1): step})
    assert int(state) == 3 and history.collect("mean") == [0, 1, 2]


def test_arguments_are_counted_once_and_defaults_stay():
    seen = []

    def with_default(state, flag=5):
        seen.append(flag)

    def all_of_them(*args):
        seen.append(len(args))

    ms.loop(0, range(1), {ms.every(1): [with_default, all_of_them, lambda: seen.append("none")]})
    assert seen == [5, 4, "none"]


def test_a_callback_with_arguments_of_its_own_is_refused():
    with pytest.raises(TypeError, match=r"at most four arguments.*It needs rate"):
        ms.loop(0, range(1), {ms.every(1): lambda state, *, rate: None})
    with pytest.raises(TypeError, match="at most four arguments"):
        ms.loop(0, range(1), {ms.every(1): lambda a, b, c, d, e: None})
    with pytest.raises(TypeError, match=r"needs callbacks.*Got 3"):
        ms.loop(0, range(1), {ms.every(1): 3})


Pair = collections.namedtuple("Pair", ["a", "b"])


@pytest.mark.parametrize(
    ("state", "after"),
    [
        (3, lambda state: state - 1),
        (0.5, lambda state: state - 0.5),
        ({"n": 0}, lambda state: {}),
        ({}, lambda state: {}),
        ((1, 2), lambda state: (state[0] + 1, state[1])),
        ((1, 2, 3), lambda state: (*state[1:], 0)),
        ((None, 2), lambda state: (None, state[1] + 1)),
        (({"w": 1}, {"m": 0}), lambda state: ({"w": 2}, {"m": 1})),
        (Pair(1, 2), lambda state: Pair(state.a + 1, state.b)),
        ([1, 2], lambda state: [*state, 3]),
        (np.zeros(3), lambda state: state + 1),
        (jnp.zeros(3), lambda state: state + jnp.float32(1)),
        (False, lambda state: not state),
    ],
)
def test_any_value_can_be_a_state(state, after):
    for wrap in (lambda new: new, lambda new: (ms.logs().add_metric("x", 1), new)):
        expected = state
        for _ in range(3):
            expected = after(expected)
        found, _, _ = ms.loop(state, range(3), {ms.every(1): lambda state, wrap=wrap: wrap(after(state))})
        if isinstance(found, jax.Array | np.ndarray):
            np.testing.assert_array_equal(found, expected)
        else:
            assert found == expected and type(found) is type(expected)


def test_a_counter_reaches_zero():
    assert ms.loop(3, range(3), {ms.every(1): lambda state: state - 1}).state == 0


def test_a_pair_may_lack_logs_or_state():
    assert ms.loop(1, range(2), {ms.every(1): lambda state: (None, state + 1)}).state == 3
    state, history, _ = ms.loop(1, range(2), {ms.every(1): lambda state: (ms.logs().add_metric("x", 5), None)})
    assert state == 1 and history.collect("x") == [5, 5]


def test_logs_may_be_dicts_and_plain_values_are_metrics():
    outputs = iter([{"metrics": {"a": 1.0}, "mine": {"b": 2.0}}, {"a": 3.0}])
    _, history, _ = ms.loop(0, range(2), {ms.every(1): lambda state: (next(outputs), state)})
    assert history.collect("metrics.a") == [1.0, 3.0] and history.collect("mine.b") == [2.0]


@pytest.mark.parametrize("kind", ["losses", "metrics", "stateful_metrics", "outputs"])
@pytest.mark.parametrize("entries", [3, [("loss", 0.5)], "loss"], ids=str)
def test_several_entries_are_a_dict(kind, entries):
    with pytest.raises(TypeError, match=rf"Logs needs several {kind} as a dict from names to values.* Got "):
        getattr(ms.logs(), f"add_{kind}")(entries)


def test_several_entries_are_given_as_to_an_update_of_a_dict():
    values = {"self": 1, "metrics": 2, "collection": 3, "a/b": 4}
    given = ms.logs().add_metrics(values).add_stateful_metrics(**values).add_outputs({"a/b": 4}, self=1)
    assert given == {"metrics": values, "stateful_metrics": values, "outputs": {"a/b": 4, "self": 1}}
    assert ms.logs().add_entries("own", values, entries=5).own == {**values, "entries": 5}
    both = ms.logs().add_losses({"loss": 1}, penalty=2, add_metrics=True)
    assert both.losses == both.metrics == {"loss": 1, "penalty": 2}


def test_logs_that_are_a_dict_are_told_from_a_state_that_is_a_tuple():
    def step(state):
        return {"loss": state[1]}, (state[0], state[1] + 1)

    state, history, _ = ms.loop(({"w": 1}, 0), range(3), {ms.every(1): step})
    assert state == ({"w": 1}, 3) and history.collect("loss") == [0, 1, 2]


def test_what_cannot_be_a_state_is_refused_with_what_it_was():
    with pytest.raises(TypeError, match=r"may return nothing, ms.logs\(\), a state.*returned \{'loss': 1\}"):
        ms.loop(0, range(1), {ms.every(1): lambda state: {"loss": 1}})
    with pytest.raises(TypeError, match=r"returned \(1, 2, 3\)"):
        ms.loop(0, range(1), {ms.every(1): lambda state: (1, 2, 3)})


def test_logs_that_a_callback_keeps_are_not_changed():
    kept = ms.logs().add_metric("a", 1)
    _, history, _ = ms.loop(0, range(2), {ms.every(1): [lambda: kept, lambda: ms.logs().add_metric("b", 2)]})
    assert kept == {"metrics": {"a": 1}} and history.collect("a", "b") == ([1, 1], [2, 2])


def test_history_has_a_row_for_every_step_that_logged():
    def log_sometimes(state, batch, elapsed):
        return ms.logs().add_metric("step", elapsed.steps) if elapsed.steps % 2 else None

    _, history, _ = ms.loop(0, range(5), {ms.every(1): log_sometimes})
    assert history.collect("steps", "step") == ([1, 3, 5], [1, 3, 5])


def test_a_callback_can_stop_the_loop_and_the_rest_of_its_step_is_left_out():
    done = []

    def stop_at_two(state, batch, elapsed, loop_state):
        if elapsed.steps == 2:
            loop_state.stop_iteration = True
        return ms.logs().add_metric("x", 1)

    output = ms.loop(
        0, range(9), {ms.every(1): [stop_at_two, lambda: done.append("rest")]}, on_end=lambda: done.append("end")
    )
    assert done == ["rest", "end"] and output.elapsed.steps == 2 and output.reason == "a callback stopped it"
    assert len(output.history) == 2


def test_last_is_due_at_the_end_whether_it_was_foreseen_or_not():
    for stop in (None, 5, ms.at(samples=5), lambda elapsed: elapsed.steps == 5):
        done = []
        tasks = {
            ms.every(2) | ms.loops.last(): lambda state, batch, elapsed, done=done: done.append(elapsed.steps),
            ms.every(5) | ms.loops.last(): lambda state, batch, elapsed, done=done: done.append(-elapsed.steps),
        }
        ms.loop(0, range(5 if stop is None else 50), tasks, stop=stop)
        assert sorted(done) == [-5, 2, 4, 5]


def test_what_the_last_task_logs_is_in_the_row_of_the_last_step():
    tasks = {
        ms.every(1): lambda: ms.logs().add_metric("loss", 1.0),
        ms.loops.last(): lambda: ms.logs().add_metric("final", 2.0),
    }
    _, history, _ = ms.loop(0, range(3), tasks)
    assert len(history) == 3 and history.collect("steps", "final") == ([3], [2.0])


def test_an_error_has_the_results_so_far_and_the_end_still_runs():
    ended = []

    def fail_at_three(state, batch, elapsed):
        if elapsed.steps == 3:
            raise KeyError("boom")
        return ms.logs().add_metric("x", 1), state + 1

    with pytest.raises(KeyError, match="boom") as caught:
        ms.loop(0, range(9), {ms.every(1): fail_at_three}, on_end=lambda: ended.append(1))
    state, history, elapsed = loop_output_of(caught.value)
    assert (state, len(history), elapsed.steps, ended) == (2, 2, 3, [1])
    assert any("in fail_at_three at step 3 of loop" in note for note in caught.value.__notes__)


def test_an_error_of_the_data_and_one_of_the_end_are_both_told():
    def data():
        yield 1
        raise OSError("disk")

    def fail():
        raise RuntimeError("end")

    with pytest.raises(OSError, match="disk") as caught:
        ms.loop(0, data(), {ms.every(1): plus_one}, on_end=fail)
    assert loop_output_of(caught.value).state == 1
    assert any("RuntimeError: end" in note for note in caught.value.__notes__)
    with pytest.raises(RuntimeError, match="end"):
        ms.loop(0, range(2), {ms.every(1): plus_one}, on_end=fail)


def test_an_observer_that_fails_at_the_end_is_named():
    class Broken(ms.Observer):
        def observe(self, loop_state, start, stop):
            raise KeyError("boom")

    with pytest.raises(KeyError) as caught:
        ms.loop(0, range(2), {ms.every(1): plus_one, ms.loops.last(): Broken()})
    assert any("in Broken at step 2" in note for note in caught.value.__notes__)


def press(times=1):
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)


def test_the_first_interrupt_ends_the_loop_behind_its_step(capfd):
    ended = []

    def interrupted(state, batch, elapsed):
        if elapsed.steps == 3:
            press()
        return ms.logs().add_metric("x", 1), state + 1

    before = signal.getsignal(signal.SIGINT)
    output = ms.loop(0, range(9), {ms.every(1): [interrupted, plus_one]}, on_end=lambda: ended.append(1))
    assert output.interrupted and output.reason == "interrupted"
    assert (output.state, len(output.history), output.elapsed.steps, ended) == (6, 3, 3, [1])
    assert signal.getsignal(signal.SIGINT) is before
    assert "Press Ctrl-C again" in capfd.readouterr().err


def test_the_second_interrupt_does_not_wait_for_a_batch(capfd):
    def data():
        yield 1
        press(2)
        raise AssertionError("the second interrupt raises at once")

    output = ms.loop(0, data(), {ms.every(1): plus_one})
    assert output.interrupted and output.state == 1


def test_interrupts_raise_if_they_are_not_to_be_caught():
    with pytest.raises(KeyboardInterrupt) as caught:
        ms.loop(0, range(5), {ms.every(1): [plus_one, press]}, catch_keyboard_interrupt=False)
    assert loop_output_of(caught.value).state == 1


def test_an_interrupt_inside_an_inner_loop_ends_the_outer_one(capfd):
    def evaluate(state, batch, elapsed):
        ms.loop(0, range(5), {ms.at(2): press, ms.after(3): lambda: pytest.fail("continued")})

    output = ms.loop(0, range(9), {ms.every(2): evaluate, ms.every(1): plus_one})
    assert output.interrupted and output.elapsed.steps == 2


def inner(*actions):
    """A loop of three steps that does something in its second one, once."""
    left = list(actions)

    def step(state, batch):
        if batch == 1 and left:
            left.pop()()

    return lambda state: ms.loop(state, range(3), {ms.every(1): step})


def test_everything_at_the_end_is_called_though_an_interrupt_has_cut_loops_short(capfd):
    done = []

    def evaluate(state):
        inner(press)(state)

    def evaluate_at_the_end(state):
        done.append(inner()(state).elapsed.steps)

    ends = [evaluate_at_the_end, lambda: done.append("a"), lambda: ms.logs().add_metric("late", 1)]
    output = ms.loop(0, range(5), {ms.every(2): evaluate, ms.every(1): plus_one}, on_end=ends)
    assert output.interrupted and done == [1, "a"] and output.history.collect("steps", "late") == ([2], [1])


def test_a_callback_is_cut_short_if_any_of_its_loops_was(capfd):
    def two_loops(state):
        inner(press)(state)
        ms.loop(state, [], {}, stop=0)  # which has nothing to do, and so cannot be interrupted
        return state + 100

    assert ms.loop(0, range(5), {ms.every(1): [plus_one, two_loops]}).state == 1


def test_interrupts_that_are_not_to_be_caught_raise_out_of_inner_loops():
    with pytest.raises(KeyboardInterrupt) as caught:
        ms.loop(0, range(5), {ms.every(1): [plus_one, inner(press)]}, catch_keyboard_interrupt=False)
    assert len(caught.value.__notes__) == 2


def test_loops_run_in_other_threads():
    found = []
    thread = threading.Thread(target=lambda: found.append(ms.loop(0, range(3), {ms.every(1): plus_one}).state))
    thread.start()
    thread.join()
    assert found == [3]


def test_inner_loops_know_the_outer_one():
    parents = []

    def inner(state, batch, elapsed, loop_state):
        def look(state, batch, elapsed, inner_state):
            parents.append(inner_state.parent is loop_state)

        ms.loop(0, range(1), {ms.every(1): look})

    ms.loop(0, range(2), {ms.every(1): inner})
    assert parents == [True, True]


def test_a_loader_is_stepped_through_epoch_by_epoch_with_masks(loader, key):
    _, history, _ = ms.loop(jnp.float32(0), loader, {ms.every(1): loader_step}, stop=7, key=key)
    assert history.collect("rows") == [4, 4, 2, 4, 4, 2, 4]
    assert history.collect("samples") == [4, 8, 10, 14, 18, 20, 24]
    assert history.collect("epochs") == [0, 0, 1, 1, 1, 2, 2]
    assert sum(history.collect("total")[:3]) == 45
    assert history.mean("rows") == pytest.approx((4 * 4 * 5 + 2 * 2 * 2) / 24)


def test_a_run_over_a_loader_resumes_exactly_at_every_step(loader, key):
    whole = ms.loop(jnp.float32(0), loader, {ms.every(1): loader_step}, stop=7, key=key)
    for step in range(8):
        first = ms.loop(jnp.float32(0), loader, {ms.every(1): loader_step}, stop=step, key=key)
        for position in ({"key": key}, {"data_state": first.data_state} if step else {"key": key}):
            second = ms.loop(
                first.state,
                loader,
                {ms.every(1): loader_step},
                stop=7,
                elapsed=first.elapsed,
                **position,
            )
            assert_trees_equal(second.state, whole.state)
            assert (
                first.history.collect("total", missing=0)[:step]
                + second.history.collect("total", missing=0)[-7 + step :]
                == whole.history.collect("total")
                or step == 7
            )


def test_iterators_of_loaders_and_mixes_count_real_samples(loader, key):
    elapsed = ms.loop(jnp.float32(0), loader.iterate(loader.init_state(key)), {ms.every(1): loader_step}).elapsed
    assert elapsed.samples == 10
    mixed = ms.loader.MixedLoader({"a": loader, "b": loader})
    assert ms.loop(jnp.float32(0), mixed, {ms.every(1): loader_step}, stop=6, key=key).elapsed.samples == 20


def test_batches_that_cannot_be_read_are_left_out_and_made_up_for(key):
    def read(index):
        if index == 2:
            raise OSError("bad file")
        return {"x": np.float32(index)}

    source = ms.DiskSampleSource(6, read, ordering="sequential")
    skipping = ms.DataLoader([source, ms.BatchTransform(2)], on_error="skip batch")
    output = ms.loop(jnp.float32(0), skipping, {ms.every(1): loader_step}, stop=4, key=key)
    assert output.history.collect("total") == [1, 9, 1, 9] and int(output.data_state.step) == 6
    masking = ms.DataLoader([source, ms.BatchTransform(2)], on_error="skip item")
    output = ms.loop(jnp.float32(0), masking, {ms.every(1): loader_step}, stop=3, key=key)
    assert output.history.collect("rows", "samples") == ([2, 1, 2], [2, 3, 5])


def test_a_loader_that_skips_all_its_batches_does_not_keep_the_loop_for_ever(key):
    def read(index):
        raise OSError("gone")

    source = ms.DiskSampleSource(6, read, sample_spec=jax.ShapeDtypeStruct((), np.float32))
    skipping = ms.DataLoader([source, ms.BatchTransform(2)], on_error="skip batch")
    with pytest.raises(
        RuntimeError, match=r"loop needs batches that can be read\. The loader has skipped the last 1\d\d\."
    ):
        ms.loop(0, skipping, {ms.every(1): plus_one}, stop=3, key=key)


def test_a_loader_that_can_count_few_steps_need_not_count_more_than_are_taken(key):
    source = ms.ArraySampleSource({"x": np.arange(4096, dtype=np.float32)})
    nested = ms.DataLoader([source, ms.BatchTransform(2), ms.BatchTransform(1024)])
    assert ms.loop(0, nested, {ms.every(1): plus_one}, stop=ms.at(epochs=2), key=key).state == 4


@pytest.fixture
def overtaking():
    """A loader whose first batch waits until all others have come, or an event is set; and that event."""
    released = threading.Event()

    def read(index):
        if index < 2:
            released.wait(60)
        return {"x": np.float32(index)}

    spec = {"x": jax.ShapeDtypeStruct((), np.float32)}
    source = ms.DiskSampleSource(64, read, sample_spec=spec, ordering="sequential")
    executor = ms.Threads(4, ordered=False)
    yield ms.DataLoader([source, ms.BatchTransform(2)], executor=executor, prefetch=8), released.set
    released.set()


def test_a_loop_may_end_while_batches_have_overtaken_others(overtaking, key):
    loader, release = overtaking
    output = ms.loop(0, loader, {ms.every(1): plus_one}, stop=ms.at(samples=6), key=key, on_end=release)
    assert output.state == 3 and output.data_state is None


def test_an_error_is_told_while_batches_have_overtaken_others(overtaking, key):
    loader, release = overtaking

    def fail(state):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ms.loop(0, loader, {ms.every(1): fail}, stop=ms.at(samples=6), key=key, on_end=release)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "runs forever, unless told when to stop"),
        ({"stop": 3}, "that shuffles or is random needs key=jax.random.key"),
        ({"stop": "soon", "key": jax.random.key(0)}, "needs stop as steps"),
        ({"stop": 3, "key": jax.random.key(0), "epoch_duration": ms.at(epochs=2)}, "epoch_duration in steps"),
        ({"stop": 3, "key": jax.random.key(0), "history": []}, "history and elapsed as an earlier loop"),
    ],
)
def test_mistakes_with_loaders_are_named(loader, arguments, text):
    with pytest.raises((TypeError, ValueError), match=text):
        ms.loop(jnp.float32(0), loader, {ms.every(1): loader_step}, **arguments)


@pytest.mark.parametrize(
    ("dataset", "tasks", "arguments", "text"),
    [
        (3, {}, {}, "needs a dataset: a DataLoader, an iterable"),
        (range(2), 3, {}, "tasks as a dict from schedule to callbacks"),
        (range(2), {3: plus_one}, {}, "needs a schedule such as every"),
        (range(2), {"on_train_step": plus_one}, {}, "named schedule 'on_train_step'"),
        (range(2), {}, {"data_state": 1}, "data_state only with a DataLoader"),
        (range(2), {ms.every(1): plus_one}, {"fuse": 2}, "nothing to fuse"),
        (range(2), {ms.every(1): count_step}, {"fuse": 2}, "only over a DataLoader"),
        (range(2), {ms.every(1): count_step}, {"fuse": 0}, "fuse to be an int of at least 1"),
    ],
)
def test_mistakes_are_named_before_the_first_step(dataset, tasks, arguments, text):
    with pytest.raises((TypeError, ValueError), match=text):
        ms.loop(0, dataset, tasks, **arguments)


def test_samples_are_counted_by_shape_or_by_a_function():
    assert ms.loop(0, [{"a": np.ones((3, 2)), "b": np.ones(5)}, np.ones(2)], {}).elapsed.samples == 7
    assert ms.loop(0, ["text", 3], {}).elapsed.samples == 2
    assert ms.loop(0, ["text", "ab"], {}, batch_size_fn=len).elapsed.samples == 6


@pytest.mark.parametrize("size", [7.0, np.float32(7), -1, "3", np.ones(2)])
def test_a_function_that_gives_no_number_of_samples_is_named(size):
    def count(batch):
        return size

    for run in (
        lambda: ms.loop(0, [1], {}, batch_size_fn=count),
        lambda: next(ms.loops.elapse([1], batch_size_fn=count)),
    ):
        with pytest.raises(TypeError, match=r"batch_size_fn must return how many samples .* count returned"):
            run()


def test_a_dataset_may_be_a_function_that_makes_one():
    assert ms.loop(0, lambda: iter(range(3)), {ms.every(1): plus_one}).state == 3


def test_what_a_function_makes_may_be_a_loader(loader, key):
    assert ms.loop(0, lambda: loader, {ms.every(1): plus_one}, stop=ms.at(epochs=2), key=key).state == 6
    assert len(list(ms.loops.elapse(lambda: loader, key=key))) == 3
    with pytest.raises(ValueError, match="runs forever, unless told when to stop"):
        ms.loop(0, lambda: loader, {ms.every(1): plus_one}, key=key)
    with pytest.raises(TypeError, match=r"elapse needs a dataset.* Got 3 \(int\) from the function"):
        ms.loops.elapse(lambda: 3)  # pyright: ignore[reportArgumentType]


def test_samples_are_counted_of_a_dict_that_is_used_again():
    @jax.jit
    def step(state, batch):
        return {"sum": batch["x"].sum()}, state + 1

    def data():
        batch = {}
        for size in (4, 4, 2, 2, 4):
            batch["x"] = np.ones(size, np.float32)
            yield batch

    _, history, _ = ms.loop(jnp.int32(0), data(), {ms.every(1): step})
    assert history.collect("samples", "sum") == ([4, 8, 10, 12, 16], [4, 4, 2, 2, 4])


def test_epochs_are_counted_in_any_unit():
    for epoch in (2, ms.at(samples=8)):
        _, history, elapsed = ms.loop(jnp.int32(0), BATCHES, {ms.every(1): count_step}, epoch_duration=epoch)
        assert history.collect("epochs") == [0, 1, 1, 2, 2, 3] and elapsed.epochs == 3


def test_metadata_and_name_reach_callbacks():
    seen = []

    def look(state, batch, elapsed, loop_state):
        seen.append((loop_state.metadata, loop_state.name))

    ms.loop(0, range(1), {ms.every(1): look}, metadata={"run": 7}, name="mine")
    assert seen == [({"run": 7}, "mine")]


def test_accumulated_logs_have_the_newest_of_everything():
    seen = []

    def look(state, batch, elapsed, loop_state):
        seen.append({path[1]: value for path, value in loop_state.accumulated_logs.entries()})

    tasks = {ms.at(1): lambda: ms.logs().add_metric("a", 1), ms.every(1): [lambda: ms.logs().add_metric("b", 2), look]}
    ms.loop(0, range(2), tasks)
    assert seen == [{"a": 1, "b": 2}, {"a": 1, "b": 2}]


def test_foreign_objects_are_accepted_through_an_adapter():
    class Bell:
        rings = 0

    class LoudBell(Bell):
        pass

    def ring(bell):
        def callback(state):
            bell.rings += 1

        return callback

    ms.loops.register_adapter(Bell, ring)
    bell = LoudBell()
    ms.loop(0, range(4), {ms.every(2): bell})
    assert bell.rings == 2
    with pytest.raises(ValueError, match="an adapter for Bell already"):
        ms.loops.register_adapter(Bell, ring)
    with pytest.raises(TypeError, match="a class and a function"):
        ms.loops.register_adapter(3, ring)  # type: ignore[arg-type]


def test_observers_see_whole_rows_wherever_they_stand():
    class Watch(ms.Observer):
        def __init__(self):
            self.rows, self.calls = [], []

        def start(self, loop_state):
            self.calls.append("start")

        def observe(self, loop_state, start, stop):
            self.rows += [dict(row.metrics) for row in loop_state.history.rows(start, stop)]

        def finish(self, loop_state):
            self.calls.append("finish")

    first, rare = Watch(), Watch()
    tasks = {
        ms.every(1): [first, lambda: ms.logs().add_metric("a", 1)],
        ms.every(2): rare,
        ms.every(1): lambda state, batch, elapsed: ms.logs().add_metric("b", elapsed.steps),
    }
    ms.loop(0, range(3), tasks)
    assert first.rows == [{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 3}] and rare.rows == [{"a": 1, "b": 2}]
    assert first.calls == ["start", "finish"]
    by_hand = Watch()
    for elapsed, _ in ms.loops.elapse(range(2)):
        by_hand(elapsed, ms.logs().add_metric("a", elapsed.steps))
    assert by_hand.rows == [{"a": 1}, {"a": 2}]


def test_elapse_is_the_loop_by_hand(loader, key):
    seen = [(elapsed.steps, elapsed.samples, elapsed.epochs) for elapsed, _ in ms.loops.elapse(loader, key=key)]
    assert seen == [(1, 4, 0), (2, 8, 0), (3, 10, 1)]
    assert [elapsed.steps for elapsed, _ in ms.loops.elapse(range(9), stop=3)] == [1, 2, 3]
    assert [elapsed.final for elapsed, _ in ms.loops.elapse(range(9), stop=3)] == [False, False, True]
    assert list(ms.loops.elapse(range(9), stop=0)) == []
    with pytest.raises(TypeError, match=r"elapse needs initial as an earlier run's elapsed\. Got 4"):
        ms.loops.elapse(range(9), initial=4)  # type: ignore[arg-type]
    initial = ms.loops.Elapsed(steps=4, samples=4)
    assert [elapsed.steps for elapsed, _ in ms.loops.elapse(range(9), initial=initial, stop=6)] == [5, 6]
    assert [elapsed.samples for elapsed, _ in ms.loops.elapse(["ab", "c"], batch_size_fn=len)] == [2, 3]


def test_manual_iteration_reads_as_documented():
    state, history, saved = jnp.int32(0), ms.loops.history(), []
    due = ms.every(steps=2)
    for elapsed, batch in ms.loops.elapse(BATCHES, stop=5):
        logs = ms.logs()
        logs.updates, state = count_step(state, batch)
        if due(elapsed):
            saved.append(int(state))
        history.commit(elapsed, logs)
    assert saved == [2, 4] and history.collect("steps", "mean") == ([1, 2, 3, 4, 5], [0, 1, 2, 3, 4])


def test_nothing_waits_for_the_device_between_steps():
    """Values are read two steps late at the earliest: when a step is dispatched, those before it are still unread."""
    _, history, _ = ms.loop(jnp.int32(0), BATCHES, {ms.every(1): count_step})
    column = history.column("mean")
    assert column is not None and len(column._waiting) == 6


def test_a_loop_never_has_more_than_two_steps_in_flight():
    finished, dispatched = [], []

    def slow(number):
        finished.append(int(number))
        return np.float32(number)

    @jax.jit
    def step(state):
        value = jax.pure_callback(slow, jax.ShapeDtypeStruct((), np.float32), state)
        return ms.logs().add_metric("value", value), state + 1

    def watch(state, batch, elapsed):
        dispatched.append(elapsed.steps - 1 - len(finished))

    ms.loop(jnp.float32(0), range(20), {ms.every(1): [watch, step]})
    assert max(dispatched) <= 1 and len(finished) == 20


@pytest.mark.parametrize("fuse", [1, 4, 100])
def test_fused_steps_give_the_same_state_logs_and_calls(loader, key, fuse, count_compilations):
    def run(**options):
        calls = []

        def note(state, batch, elapsed):
            calls.append((elapsed.steps, elapsed.samples, elapsed.epochs, float(state)))

        def log(state, batch, elapsed):
            return ms.logs().add_metric("noted", elapsed.steps)

        tasks = [
            (ms.every(3), log),
            (ms.every(1), timed_step),
            (ms.every(5), note),
            (ms.every(samples=8), note),
            (ms.every(epochs=2), [note, log]),
            (ms.loops.last(), note),
            (ms.at(1) | ms.at(2), note),
        ]
        output = ms.loop(jnp.float32(0), loader, tasks, stop=17, key=key, **options)
        table = {
            name: output.history.collect("steps", name)
            for name in ("samples", "epochs", "total", "step", "epoch", "final", "starts", "noted")
        }
        return output.state, calls, table, output.elapsed.replace(time=0, time_before=0, date_start=0)

    expected, found = run(), run(fuse=fuse)
    assert_trees_equal(found[0], expected[0])
    assert found[1:] == expected[1:]
    with count_compilations() as count:
        run(fuse=fuse)
    assert count == [0]


@jax.jit
def timed_step(state, batch, elapsed):
    logs, state = loader_step(state, batch)
    logs.add_metric("step", elapsed.steps).add_metric("epoch", elapsed.epochs).add_metric("final", elapsed.final)
    return logs.add_metric("starts", elapsed.starts_epoch), state


@pytest.mark.parametrize("schedule", [ms.loops.last(), ms.every(4) | ms.loops.last(), ms.at(6)], ids=repr)
@pytest.mark.parametrize("stop", [7, ms.at(samples=24)], ids=repr)
def test_what_comes_before_a_fused_step_comes_at_the_same_steps(loader, key, schedule, stop):
    def run(**options):
        seen = []

        def look(state, batch, elapsed):
            seen.append((float(state), elapsed.steps, elapsed.final))
            return ms.logs().add_metric("seen", elapsed.steps).add_metric("rows", -1)  # of which the step logs its own

        tasks = [(schedule, look), (ms.every(1), loader_step)]
        output = ms.loop(jnp.float32(0), loader, tasks, stop=stop, key=key, **options)
        return seen, output.history.collect("steps", "rows"), output.history.collect("steps", "seen")

    assert run(fuse=3) == run(fuse=100) == run()


def test_a_callback_before_a_fused_step_can_stop_the_loop(loader, key):
    def run(**options):
        def stop_here(state, batch, elapsed, loop_state):
            loop_state.stop("enough")

        tasks = [(ms.at(3), stop_here), (ms.every(1), loader_step), (ms.at(3), lambda: ms.logs().add_metric("late", 1))]
        output = ms.loop(jnp.float32(0), loader, tasks, stop=20, key=key, **options)
        where = output.elapsed.steps, output.elapsed.samples, int(output.data_state.step)
        return (
            float(output.state),
            where,
            output.reason,
            output.history.collect("steps", "total"),
            output.history.names(),
        )

    assert run(fuse=10) == run()


def test_fused_steps_can_count_more_samples_than_32_bits_hold(loader, key):
    for samples in (2**31 - 6, 2**31, 2**40):
        start = ms.loops.Elapsed(steps=6, samples=samples)
        output = ms.loop(jnp.float32(0), loader, {ms.every(1): timed_step}, stop=9, key=key, elapsed=start, fuse=3)
        assert output.elapsed.samples == samples + 10 and output.history.collect("step") == [7, 8, 9]


@jax.jit
def sampled_step(state, batch, elapsed):
    return ms.logs().add_metric("samples_seen", elapsed.samples), state + 1


def test_fused_steps_see_the_samples_of_a_long_run(loader, key):
    start = ms.loops.Elapsed(steps=6, samples=2**31 - 6)
    output = ms.loop(jnp.float32(0), loader, {ms.every(1): sampled_step}, stop=9, key=key, elapsed=start, fuse=3)
    np.testing.assert_allclose(output.history.collect("samples_seen"), output.history.collect("samples"), rtol=1e-6)


def test_fused_runs_stop_and_resume_at_any_step(loader, key):
    for stop in (5, ms.at(samples=18), lambda elapsed: elapsed.steps == 5, ms.at(epochs=9, samples=18)):
        first = ms.loop(jnp.float32(0), loader, {ms.every(1): loader_step}, stop=stop, key=key, fuse=4)
        assert first.elapsed.steps == 5
        rest = ms.loop(first.state, loader, {ms.every(1): loader_step}, stop=9, key=key, fuse=4, elapsed=first.elapsed)
        whole = ms.loop(jnp.float32(0), loader, {ms.every(1): loader_step}, stop=9, key=key)
        assert_trees_equal(rest.state, whole.state)
        assert int(rest.data_state.step) == 9


def test_fused_observers_see_every_row(loader, key):
    class Watch(ms.Observer):
        def __init__(self):
            self.rows = []

        def observe(self, loop_state, start, stop):
            self.rows += [row.elapsed.steps for row in loop_state.history.rows(start, stop)]

    always, rare = Watch(), Watch()
    tasks = {ms.every(1): [loader_step, always], ms.every(3): rare}
    ms.loop(jnp.float32(0), loader, tasks, stop=10, key=key, fuse=100)
    assert always.rows == list(range(1, 11)) and rare.rows == [3, 6, 9]


def test_what_cannot_be_fused_is_named(loader, key):
    with pytest.raises(ValueError, match=r"around plus_one, which is due at every step"):
        ms.loop(jnp.float32(0), loader, {ms.every(1): [loader_step, plus_one]}, stop=3, key=key, fuse=2)


class Cell(eqx.Module):
    """Holds every kind of leaf: arrays, sizes, rates, flags, text, functions, and nothing."""

    weight: jax.Array
    scale: np.ndarray
    hidden_size: int
    rate: float
    is_on: bool
    name: str
    activation: Callable[..., Any]
    nothing: None = None

    def __call__(self, x):
        assert self.is_on and self.name == "cell"
        return jnp.sum(self.activation(jnp.full(self.hidden_size, x) * self.weight * self.scale)) * self.rate


def equinox_model(kind):
    if kind == "mlp":
        return eqx.nn.MLP("scalar", "scalar", 4, 1, key=jax.random.key(0))
    return Cell(jnp.full(3, 0.5), np.full(3, 2, np.float32), 3, 0.25, True, "cell", jax.nn.tanh)


def mean_square(values, mask):
    return jnp.mean(jnp.where(mask, values**2, 0))


@eqx.filter_jit
def equinox_step(state, batch):
    values, mask = batch
    loss, grads = eqx.filter_value_and_grad(lambda model: mean_square(jax.vmap(model)(values["x"]), mask))(state[0])
    model = eqx.apply_updates(state[0], jax.tree.map(lambda grad: -0.125 * grad, grads))
    return ms.logs().add_metric("loss", loss), (model, state[1] + 1, *state[2:])


@pytest.mark.parametrize("kind", ["mlp", "cell"])
def test_fused_steps_carry_what_is_not_an_array_as_it_is(loader, key, kind, count_compilations):
    state = (equinox_model(kind), jnp.int32(0), {"note": "kept", "fn": plus_one, "none": None, "size": 7, "rate": 0.1})

    def run(**options):
        output = ms.loop(state, loader, {ms.every(1): equinox_step}, stop=11, key=key, **options)
        return output.state, output.history.collect("loss")

    (expected, losses), (found, fused_losses) = run(), run(fuse=4)
    assert jax.tree.structure(found) == jax.tree.structure(expected) and fused_losses == losses
    for before, one, other in zip(*map(jax.tree.leaves, (state, expected, found)), strict=True):
        assert type(other) is type(one)
        assert np.array_equal(other, one) if isinstance(one, jax.Array) else other is before
    with count_compilations() as count:
        run(fuse=4)
    assert count == [0]


@jax.jit
def numbers_step(state, batch):
    return {**state, "count": state["count"] + 1, "sum": state["sum"] + state["rate"]}


def test_fused_steps_of_jit_have_arrays_of_python_numbers_as_without_fuse(loader, key, count_compilations):
    state = {"count": 0, "sum": jnp.float32(0), "rate": 0.1, "flag": True}

    def run(**options):
        return ms.loop(state, loader, {ms.every(1): numbers_step}, stop=7, key=key, **options).state

    expected, found = run(), run(fuse=3)
    assert_trees_equal(found, expected)
    assert {name: leaf.dtype for name, leaf in found.items()} == {name: leaf.dtype for name, leaf in expected.items()}
    with count_compilations() as count:
        run(fuse=3)
    assert count == [0]


@nnx.jit
def nnx_step(state, batch):
    values, mask = batch
    loss, grads = nnx.value_and_grad(lambda model: mean_square(model(values["x"][:, None])[:, 0], mask))(state[0])
    nnx.update(state[0], jax.tree.map(lambda leaf, grad: leaf - 0.125 * grad, nnx.state(state[0], nnx.Param), grads))
    return ms.logs().add_metric("loss", loss)


def test_fused_steps_change_modules_of_nnx_in_place(loader, key):
    def run(**options):
        state = nnx.Sequential(nnx.Linear(1, 2, rngs=nnx.Rngs(0)), nnx.tanh, nnx.Dropout(0.5, rngs=nnx.Rngs(1))), 0.5
        output = ms.loop(state, loader, {ms.every(1): nnx_step}, stop=7, key=key, **options)
        assert output.state[1] == 0.5 and output.state[0].layers[1] is nnx.tanh
        return nnx.state(output.state[0], nnx.Param), output.history.collect("loss")

    expected, found = run(), run(fuse=3)
    assert_trees_equal(found[0], expected[0])
    assert found[1] == expected[1]


@pytest.mark.parametrize(
    ("state", "change", "words"),
    [
        (
            {"n": 0},
            lambda n: n + 1,
            ["fuse= runs several steps", "state['n']: 0 (int) became 1 (int)", "jnp.asarray(0)"],
        ),
        ({"n": True}, lambda n: not n, ["fuse= runs several steps", "state['n']: True (bool) became False (bool)"]),
        ({"n": 0.0}, lambda n: -n, ["fuse= runs several steps", "state['n']: 0.0 (float) became -0.0 (float)"]),
        ({"n": "a"}, lambda n: n + "b", ["(fuse= or scan_epoch)", "carry.state['n']: 'a' (str) became 'ab'"]),
        ({"n": None}, lambda n: "a", ["(fuse= or scan_epoch)", "The step changed its structure"]),
    ],
    ids=["int", "bool", "float", "text", "structure"],
)
def test_fused_steps_that_change_what_is_not_an_array_are_refused_by_name(loader, key, state, change, words):
    @eqx.filter_jit
    def step(state, batch):
        return {"x": state["x"] + 1, "n": change(state["n"])}

    state = {"x": jnp.int32(0), **state}
    assert ms.loop(state, loader, {ms.every(1): step}, stop=1, key=key).state["n"] == change(state["n"])
    with pytest.raises(TypeError) as caught:
        ms.loop(state, loader, {ms.every(1): step}, stop=3, key=key, fuse=2)
    for word in words:
        assert word in str(caught.value)
    assert "With fuse=2, up to that many steps are one program." in caught.value.__notes__


def test_what_fused_steps_cannot_carry_or_log_is_named(loader, key):
    @eqx.filter_jit
    def step(state, batch):
        return ms.logs().add_metric("word", state["name"]), state

    with pytest.raises(TypeError, match=r"fuse=.*can log and give out arrays and numbers.*\n.*word.*'a' \(str\)"):
        ms.loop({"name": "a", "x": jnp.ones(1)}, loader, {ms.every(1): step}, stop=3, key=key, fuse=2)
    with pytest.raises(
        TypeError, match=r"fuse=.*arrays of numbers, or else hashable.*\n  carry.state\['x'\]: \{1\} \(set\)"
    ):
        ms.loop({"x": {1}}, loader, {ms.every(1): step}, stop=3, key=key, fuse=2)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharded = loader.replace(sharding=mesh)
    with pytest.raises(TypeError, match=r"^loop with fuse=2 compiles your function together"):
        ms.loop(jnp.float32(0), sharded, {ms.every(1): loader_step}, stop=3, key=key, fuse=2)


def test_fused_errors_of_the_host_and_interrupts_end_the_run(loader, key, capfd):
    output = ms.loop(jnp.float32(0), loader, {ms.every(1): loader_step, ms.at(6): press}, stop=50, key=key, fuse=100)
    assert output.interrupted and output.elapsed.steps == 6


def test_a_clean_loop_warns_of_nothing(loader, key):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ms.loop(jnp.float32(0), loader, {ms.every(1): loader_step}, stop=4, key=key)


@functools.partial(jax.jit, donate_argnums=0)
def donating_step(state, batch):
    return jax.tree.map(lambda leaf: leaf + 1, state)


def test_donated_states_without_logs_are_fine():
    state = {"w": jnp.zeros(3), "more": [jnp.zeros(())] * 1}
    state, _, _ = ms.loop(state, range(20), {ms.every(1): donating_step})
    assert int(state["w"][0]) == 20


def test_a_loader_whose_batches_do_not_depend_on_it_needs_no_key():
    source = ms.ArraySampleSource({"x": np.arange(10, dtype=np.float32)}, ordering="sequential")
    in_sequence = ms.DataLoader([source, ms.BatchTransform(4)])
    assert not in_sequence.is_random
    _, history, _ = ms.loop(jnp.float32(0), in_sequence, {ms.every(1): loader_step}, stop=3)
    assert history.collect("total") == [6, 22, 17]
    assert ms.DataLoader([source, ms.RandomMapTransform(lambda x, mask, key: x), ms.BatchTransform(4)]).is_random
