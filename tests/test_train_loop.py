"""Training, testing and predicting: named schedules, epochs, and tests inside training."""

import dataclasses
import datetime
import os
import signal
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_trees_equal

import millstream as ms

pytestmark = pytest.mark.optimized

BATCHES = [np.full((4,), number, np.float32) for number in range(6)]


@jax.jit
def train_step(state, batch):
    values, mask = batch
    return ms.logs().add_metric("loss", jnp.sum(jnp.where(mask, values["x"], 0))), state + 1


@jax.jit
def evaluate(state, batch):
    values, mask = batch
    rows = jnp.sum(mask, dtype=jnp.float32)
    return ms.logs().add_metric("mean", jnp.sum(jnp.where(mask, values["x"], 0)) / rows).add_metric("state", state)


def loader_of(samples, size=4, **options):
    source = ms.ArraySampleSource({"x": np.arange(samples, dtype=np.float32)}, **options)
    return ms.DataLoader([source, ms.BatchTransform(size)])


@pytest.fixture(scope="module")
def loader():
    return loader_of(10)


TASKS = {ms.on_train_step: [train_step], ms.on_test_step: [evaluate]}
ALL = [
    ms.loops.on_train_begin,
    ms.on_epoch_begin,
    ms.loops.on_reset_step,
    ms.loops.on_train_batch_begin,
    ms.on_train_step,
    ms.loops.on_test_begin,
    ms.loops.on_test_batch_begin,
    ms.on_test_step,
    ms.loops.on_test_batch_end,
    ms.loops.on_test_end,
    ms.on_epoch_end,
    ms.loops.on_train_batch_end,
    ms.loops.on_train_end,
]


def test_named_schedules_come_in_their_order():
    done = []

    def note(name):
        def callback(state, batch, elapsed, loop_state):
            done.append(f"{name}:{loop_state.elapsed.steps}")

        return callback

    tasks: dict[Any, Any] = {name: note(name.removeprefix("on_")) for name in ALL}
    tasks[ms.every(1)] = note("other")
    ms.train_loop(0, BATCHES[:3], tasks, test_dataset=BATCHES[:1], epoch_duration=2)
    tested = ["test_begin:0", "reset_step:0", "test_batch_begin:1", "test_step:1", "test_batch_end:1", "test_end:1"]
    assert done == [
        "train_begin:0",
        *["epoch_begin:1", "reset_step:1", "train_batch_begin:1", "train_step:1", "train_batch_end:1", "other:1"],
        *["train_batch_begin:2", "train_step:2", *tested, "epoch_end:2", "train_batch_end:2", "other:2"],
        *["epoch_begin:3", "reset_step:3", "train_batch_begin:3", "train_step:3", "train_batch_end:3", "other:3"],
        *tested,  # the final state is tested, too
        "train_end:3",
    ]


def test_the_model_is_tested_at_the_end_of_every_epoch_and_of_the_run(loader, key):
    output = ms.train_loop(jnp.int32(0), loader, TASKS, test_dataset=loader, stop=7, key=key)
    assert output.history.collect("steps", "state_test") == ([3, 6, 7], [3, 6, 7])
    assert output.history.collect("mean_test") == pytest.approx([4.5] * 3)  # the mean over all samples, not of means
    assert int(output.state) == 7


def test_a_test_behind_the_last_epoch_is_not_done_twice(loader, key):
    for stop in (6, ms.at(epochs=2), ms.at(samples=20)):
        output = ms.train_loop(jnp.int32(0), loader, TASKS, test_dataset=loader, stop=stop, key=key)
        assert output.history.collect("steps", "state_test") == ([3, 6], [3, 6])


@pytest.mark.parametrize(
    ("when", "steps"),
    [
        (2, [2, 4, 6, 7]),
        (ms.every(5), [5, 7]),
        (ms.every(samples=8), [2, 5, 7]),
        (ms.at(4), [4, 7]),
        (lambda elapsed: elapsed.steps in (1, 7), [1, 7]),
        (ms.every(1_000), [7]),
    ],
)
@pytest.mark.parametrize("options", [{}, {"fuse": 3}])
def test_the_model_is_tested_whenever_it_is_asked_for_and_at_the_end_of_the_run(when, steps, options, loader, key):
    ends = []
    tasks = {**TASKS, ms.on_epoch_end: lambda state, batch, elapsed: ends.append(elapsed.steps)}
    options = {"test_dataset": loader, "test_every": when, "stop": 7, "key": key, **options}
    output = ms.train_loop(jnp.int32(0), loader, tasks, **options)
    assert output.history.collect("steps", "state_test") == (steps, steps)
    assert ends == [3, 6]


def test_a_resumed_run_is_tested_at_the_same_steps(folder, loader, key):
    def run(stop, folder):
        callbacks = [ms.checkpoint(folder)]
        options = {"test_dataset": loader, "test_every": 2, "callbacks": callbacks, "resume": True, "key": key}
        return ms.train_loop(jnp.int32(0), loader, TASKS, stop=stop, **options).history.collect("steps", "mean_test")

    run(5, folder / "two")
    steps, means = run(9, folder / "two")
    assert steps == [2, 4, 5, 6, 8, 9]
    steps_at_once, means_at_once = run(9, folder / "one")
    assert steps_at_once == [2, 4, 6, 8, 9] and means == pytest.approx(
        [*means_at_once[:2], means[2], *means_at_once[2:]]
    )


def test_data_without_epochs_can_be_tested_on_by_steps():
    calls = []
    tasks = {ms.on_train_step: lambda state: state + 1, ms.on_test_step: lambda state, batch: calls.append(state)}
    ms.train_loop(0, BATCHES, tasks, test_dataset=BATCHES[:2], test_every=4)
    assert calls == [4, 4, 6, 6]


@pytest.mark.parametrize("make", [lambda: loader_of(10), lambda: [*BATCHES], lambda: lambda: iter(BATCHES)])
def test_a_test_dataset_may_be_a_loader_an_iterable_or_a_function(make, key):
    calls = []
    tasks = {ms.on_train_step: lambda state: state + 1, ms.on_test_step: lambda state, batch: calls.append(state)}
    ms.train_loop(0, BATCHES, tasks, test_dataset=make(), epoch_duration=3, key=key)
    steps = len(calls) // 2
    assert calls == [3] * steps + [6] * steps and steps == (3 if isinstance(make(), ms.DataLoader) else 6)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Model:
    """A state with methods."""

    steps: int = 0
    resets: int = 0

    def train_step(self, batch):
        return ms.logs().add_metric("steps_done", self.steps), dataclasses.replace(self, steps=self.steps + 1)

    def test_step(self, batch):
        COUNTED.append(self.steps)
        return ms.logs().add_metric("tested", self.steps), self

    def reset_step(self):
        return dataclasses.replace(self, resets=self.resets + 1)

    def predict_step(self, batch):
        return ms.logs().add_output("double", batch * 2)

    def on_epoch_end(self, batch, elapsed):
        return ms.logs().add_entry("epoch", "number", elapsed.epochs)


COUNTED = []


def test_methods_of_the_state_are_used_once_per_batch_and_epoch():
    COUNTED.clear()
    state, history, _ = ms.train_loop(Model(), BATCHES, test_dataset=BATCHES[:4], epoch_duration=2)
    assert [COUNTED.count(steps) for steps in (2, 4, 6)] == [4, 4, 4] and len(COUNTED) == 12
    assert state == Model(steps=6, resets=3)  # once per training epoch; those of tests are of their own
    assert history.collect("number") == [1, 2, 3] and history.collect("tested_test") == [2, 4, 6]


def test_a_field_of_the_state_that_is_called_like_a_step_is_no_method():
    class Counts(NamedTuple):
        train_step: int
        total: int

    state = ms.train_loop(Counts(0, 0), BATCHES, {ms.on_train_step: lambda state: state._replace(total=3)}).state
    assert state == (0, 3)


def test_test_and_predict_loops_use_methods_too():
    assert ms.test_loop(Model(steps=3), BATCHES).history.collect("tested") == [3] * 6
    output = ms.predict_loop(Model(), [np.ones(4), np.zeros(3)])
    np.testing.assert_array_equal(output.outputs["double"], [2, 2, 2, 2, 0, 0, 0])


def test_predictions_over_a_loader_are_joined_without_padding(key):
    @jax.jit
    def predict_step(state, batch):
        values, _ = batch
        return ms.logs().add_output("x", values["x"] + state)

    loader = loader_of(10, ordering="sequential")
    output = ms.predict_loop(jnp.float32(1), loader, {ms.on_predict_step: predict_step}, key=key)
    np.testing.assert_array_equal(output.outputs["x"], np.arange(10) + 1)


def test_test_loops_go_through_a_loader_once(loader, key):
    _, history, elapsed = ms.test_loop(jnp.int32(0), loader, {ms.on_test_step: evaluate}, key=key)
    assert elapsed.samples == 10 and history.mean("mean") == pytest.approx(4.5)
    begun = []
    tasks = {ms.loops.on_test_begin: lambda: begun.append("begin"), ms.loops.on_test_end: lambda: begun.append("end")}
    ms.test_loop(0, [], tasks)
    assert begun == ["begin", "end"]


def test_functions_may_make_the_loaders(loader, key):
    def make():
        return loader

    assert ms.test_loop(jnp.int32(0), make, {ms.on_test_step: evaluate}, key=key).elapsed.samples == 10
    assert ms.predict_loop(jnp.int32(0), make, {ms.on_predict_step: evaluate}, key=key).elapsed.samples == 10
    output = ms.train_loop(jnp.int32(0), make, TASKS, test_dataset=make, stop=ms.at(epochs=2), key=key)
    assert output.history.collect("steps", "state_test") == ([3, 6], [3, 6])


def test_an_iterable_that_can_be_called_is_an_iterable():
    class Data(list):
        def __call__(self):
            pytest.fail("it is the data")

    tasks = {ms.on_train_step: lambda state: state + 1, ms.on_test_step: lambda: None}
    assert ms.train_loop(0, Data(BATCHES), tasks, test_dataset=Data(BATCHES), epoch_duration=3).state == 6


def test_tasks_of_the_caller_are_left_as_they_are(loader, key):
    tasks = {ms.on_train_step: [train_step], ms.on_test_step: [evaluate], ms.every(2): [lambda: None]}
    before = {name: list(callbacks) for name, callbacks in tasks.items()}
    callbacks = []
    for _ in range(2):
        output = ms.train_loop(jnp.int32(0), loader, tasks, callbacks=callbacks, test_dataset=loader, stop=3, key=key)
        assert int(output.state) == 3
    assert tasks == before and callbacks == []


def test_callbacks_register_themselves_by_their_methods():
    class Mine:
        def __init__(self):
            self.seen = []

        def on_epoch_end(self, state):
            self.seen.append(state)

    class Watch(ms.Observer):
        named_schedules = ("on_train_batch_end", "on_test_batch_end")

        def __init__(self):
            self.rows = []

        def observe(self, loop_state, start, stop):
            self.rows += [(loop_state.name, row.elapsed.steps) for row in loop_state.history.rows(start, stop)]

    mine, watch = Mine(), Watch()
    tasks = {
        ms.on_train_step: lambda state: (ms.logs().add_metric("loss", 1.0), state + 1),
        ms.on_test_step: lambda state: ms.logs().add_metric("loss", 2.0),
    }
    ms.train_loop(0, BATCHES, tasks, callbacks=[mine, watch], test_dataset=BATCHES, epoch_duration=3)
    assert mine.seen == [3, 6] and watch.rows == [("train", step) for step in range(1, 7)]
    watch = Watch()
    ms.test_loop(0, BATCHES, {ms.on_test_step: tasks[ms.on_test_step]}, callbacks=[watch])
    assert watch.rows == [("test", step) for step in range(1, 7)]


def test_a_callback_that_would_never_be_called_is_refused():
    class Lost:
        def on_epoch_edn(self):
            pass

    with pytest.raises(TypeError, match=r"cannot tell when Lost in callbacks= is due.*on_train_begin, on_epoch_begin"):
        ms.train_loop(0, BATCHES, {ms.on_train_step: lambda state: state}, callbacks=[Lost()])
    with pytest.raises(TypeError, match="callbacks as a list"):
        ms.train_loop(0, BATCHES, {ms.on_train_step: lambda state: state}, callbacks=Lost())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tasks", "arguments", "text"),
    [
        (TASKS, {"test_dataset": BATCHES}, r"needs epoch_duration \(such as steps per epoch\) for test_dataset"),
        ({ms.on_epoch_end: train_step}, {}, "for on_epoch_end"),
        (TASKS, {"epoch_duration": 2}, "got on_test_step and no test_dataset"),
        (TASKS, {"test_every": 2}, "got test_every and no test_dataset"),
        (TASKS, {"test_dataset": BATCHES}, "Or say when to test: test_every=1_000"),
        (TASKS, {"test_dataset": BATCHES, "test_every": 0}, "needs test_every to be an int of at least 1"),
        (TASKS, {"test_dataset": BATCHES, "test_every": "epoch"}, r"needs a schedule such as every\(10\)"),
        ({}, {"test_dataset": BATCHES, "epoch_duration": 2}, "nothing to do with it"),
        (TASKS, {"test_dataset": iter(BATCHES), "epoch_duration": 2}, "used up after one test"),
        ({"on_trian_step": train_step}, {}, "no named schedule 'on_trian_step'. It has: on_train_begin"),
        ({ms.on_predict_step: train_step}, {}, "no named schedule 'on_predict_step'"),
        ({}, {"fast_dev_run": -1}, "fast_dev_run to be an int of at least 0"),
        ({}, {"limit_batches": 0}, "limit_batches to be an int of at least 1"),
    ],
)
def test_mistakes_are_named(tasks, arguments, text):
    with pytest.raises((TypeError, ValueError), match=text):
        ms.train_loop(0, BATCHES, tasks, **arguments)


def test_short_names_of_steps_are_accepted():
    state, history, _ = ms.train_loop(
        0,
        BATCHES,
        {"train_step": lambda state: state + 1, "test_step": lambda state: ms.logs().add_metric("t", state)},
        test_dataset=BATCHES,
        epoch_duration=3,
    )
    assert state == 6 and history.collect("t_test") == [3, 6]


def test_an_interrupt_during_a_test_ends_the_training_without_half_a_result(capfd):
    def interrupted(state, batch, elapsed):
        if elapsed.steps == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return ms.logs().add_metric("loss", 1.0)

    tasks = {ms.on_train_step: lambda state: state + 1, ms.on_test_step: interrupted}
    output = ms.train_loop(0, BATCHES, tasks, test_dataset=BATCHES, epoch_duration=2)
    assert output.interrupted and output.elapsed.steps == 2 and output.history.collect("loss_test", missing=0) == []


def test_an_interrupt_that_is_not_to_be_caught_raises_out_of_a_test():
    tasks = {ms.on_train_step: lambda state: state + 1, ms.on_test_step: lambda: os.kill(os.getpid(), signal.SIGINT)}
    for sanity_batches in (0, 1):
        with pytest.raises(KeyboardInterrupt):
            ms.train_loop(
                0,
                BATCHES,
                tasks,
                test_dataset=BATCHES,
                epoch_duration=2,
                sanity_batches=sanity_batches,
                catch_keyboard_interrupt=False,
            )


def test_an_interrupt_before_the_training_ends_it(capfd):
    tasks = {
        ms.loops.on_train_begin: lambda: pytest.fail("continued"),
        ms.on_train_step: lambda state: state + 1,
        ms.on_test_step: lambda: os.kill(os.getpid(), signal.SIGINT),
    }
    output = ms.train_loop(0, BATCHES, tasks, test_dataset=BATCHES, epoch_duration=2, sanity_batches=3)
    assert output.interrupted and output.state == output.elapsed.steps == 0


def test_an_error_during_a_test_has_the_results_of_the_training():
    def fail(state):
        raise ValueError("bad")

    tasks = {ms.on_train_step: lambda state: state + 1, ms.on_test_step: fail}
    with pytest.raises(ValueError, match="bad") as caught:
        ms.train_loop(0, BATCHES, tasks, test_dataset=BATCHES, epoch_duration=2)
    assert caught.value.loop_output.state == 2  # type: ignore[attr-defined]
    assert ["of test" in note or "of train" in note for note in caught.value.__notes__] == [True, True]


def test_training_resumes_exactly_at_every_step_with_its_tests(loader, key):
    def run(state, stop, **position):
        return ms.train_loop(jnp.int32(state), loader, TASKS, test_dataset=loader, stop=stop, key=key, **position)

    whole = run(0, 9)
    for step in range(10):
        first = run(0, step)
        second = run(first.state, 9, elapsed=first.elapsed, history=first.history)
        assert_trees_equal(second.state, whole.state)
        assert second.history.collect("steps", "loss") == whole.history.collect("steps", "loss")
        tested = dict(zip(*second.history.collect("steps", "state_test"), strict=True))
        assert {steps: tested[steps] for steps in (3, 6, 9)} == {3: 3, 6: 6, 9: 9}


def test_fused_training_is_the_same_training(loader, key):
    def run(**options):
        return ms.train_loop(jnp.int32(0), loader, TASKS, test_dataset=loader, stop=8, key=key, **options)

    expected, fused = run(), run(fuse=100)
    assert_trees_equal(fused.state, expected.state)
    for name in ("loss", "state_test", "mean_test", "epochs"):
        assert fused.history.collect("steps", name) == expected.history.collect("steps", name)


def test_limits_and_trial_runs(loader, key):
    class Leaves(ms.Callback):
        only_real_runs = True

        def on_epoch_end(self):
            pytest.fail("a trial run leaves nothing behind")

        def __loop_callback__(self, loop_state):
            self.on_epoch_end()

    tested = []

    def count(state, batch, elapsed):
        tested.append(elapsed.steps)

    tasks: dict[Any, Any] = {ms.on_train_step: train_step, ms.on_test_step: count}
    output = ms.train_loop(jnp.int32(0), loader, tasks, test_dataset=loader, stop=4, key=key, limit_batches=2)
    assert tested == [1, 2, 1, 2] and output.elapsed.epochs == 2
    tested.clear()
    tasks[ms.every(1)] = Leaves()
    output = ms.train_loop(
        jnp.int32(0), loader, tasks, callbacks=[Leaves()], test_dataset=loader, key=key, fast_dev_run=True
    )
    assert int(output.state) == 1 and tested == [1]
    tested.clear()
    del tasks[ms.on_train_step]
    output = ms.train_loop(
        jnp.int32(0), loader, {ms.on_test_step: count}, test_dataset=loader, stop=0, key=key, sanity_batches=2
    )
    assert tested == [1, 2] and len(output.history) == 0


@pytest.mark.parametrize(
    "durations",
    [
        {"epoch_duration": datetime.timedelta(hours=1)},
        {"epoch_duration": ms.at(samples=100)},
        {"epoch_duration": 5, "test_duration": datetime.timedelta(hours=1)},
        {"epoch_duration": ms.at(5, time=3600), "test_duration": lambda elapsed: elapsed.steps == 5},
    ],
)
def test_batches_are_limited_whatever_the_durations_are(durations):
    tested = []
    tasks = {ms.on_train_step: lambda state: state + 1, ms.on_test_step: lambda state: tested.append(state)}
    ms.train_loop(0, BATCHES, tasks, test_dataset=BATCHES, limit_batches=2, **durations)
    assert tested == [2, 2, 4, 4, 6, 6]
    wrong: Any = "all"
    with pytest.raises(TypeError, match="train_loop needs test_duration as steps"):
        ms.train_loop(0, BATCHES, tasks, test_dataset=BATCHES, limit_batches=2, epoch_duration=2, test_duration=wrong)


def test_time_is_a_limit_as_good_as_any(loader, key):
    output = ms.train_loop(jnp.int32(0), loader, {ms.on_train_step: train_step}, stop=ms.at(9999, time=0.05), key=key)
    assert output.elapsed.time >= 0.05 and output.elapsed.steps < 9999


def test_outputs_of_tests_are_dropped_unless_asked_for(key):
    def test_step(state, batch):
        return ms.logs().add_output("rows", batch)

    tasks = {ms.on_train_step: lambda state: state, ms.on_test_step: test_step}
    run = {"test_dataset": BATCHES[:2], "epoch_duration": 6}
    assert ms.train_loop(0, BATCHES, tasks, **run).history.names() == []
    kept = ms.train_loop(0, BATCHES, tasks, **run, inner_loop_kwargs={"aggregation": {"outputs": "concatenate"}})
    np.testing.assert_array_equal(kept.history.collect("rows_test")[0], np.concatenate(BATCHES[:2]))
