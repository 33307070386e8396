"""Callbacks that stop, watch and measure: early stopping, NaN, profiles, throughput, learning rates."""

import functools
import gzip
import json
import math
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_trees_equal
from flax import nnx

import millstream as ms
from millstream.callbacks import early_stopping, log_learning_rate, profile, terminate_on_nan, throughput
from millstream.loops import inner_loop, loop, train_loop
from millstream.loops.elapsed import Elapsed
from millstream.loops.schedules import at, every, last

pytestmark = pytest.mark.optimized


def logged(values, name="loss"):
    """A step that logs one value after the other, and counts."""
    return lambda state: (ms.logs().add_metric(name, values[state]), state + 1)


def run(values, callback, **options):
    """A loop whose steps log these values, each judged at once."""
    return loop(0, range(len(values)), {every(1): [logged(values), callback]}, **options)


def judged_by_hand(callback, values, moments):
    """At which of these moments it says stop first; None if it never does."""
    for moment, value in zip(moments, values, strict=True):
        if callback(moment, None, {"loss": value})[0]:
            return moment
    return None


# Early stopping


def test_an_improvement_has_to_be_larger_than_min_delta():
    slowly = [1.0 - 0.01 * step for step in range(50)]
    assert run(slowly, early_stopping("loss", 5)).elapsed.steps == 50
    output = run(slowly, early_stopping("loss", 5, min_delta=0.1))
    assert output.elapsed.steps == 6
    assert output.reason == "early_stopping: loss has not improved for 5 steps; its best was 1 at step 1"
    assert run([1.0, 0.5, 0.5], early_stopping("loss", 1, min_delta=0.5)).elapsed.steps == 2
    assert run([1.0, 0.5, 0.5], early_stopping("loss", 1, min_delta=0.49)).elapsed.steps == 3


def test_patience_in_time_counts_from_the_last_improvement():
    moments = [Elapsed(steps=step, time=10.0 * step) for step in range(1, 21)]
    values = [1.0 / step for step in range(1, 11)] + [0.1] * 10
    assert judged_by_hand(early_stopping("loss", at(time=15)), values, moments) is moments[11]
    assert judged_by_hand(early_stopping("loss", at(time=20)), values, moments) is moments[11]
    assert judged_by_hand(early_stopping("loss", at(time=20.1)), values, moments) is moments[12]


@pytest.mark.parametrize(("patience", "stops_at"), [(at(samples=12), 7), (at(epochs=3), 10), (at(50, samples=4), 5)])
def test_patience_counts_in_every_unit(patience, stops_at):
    moments = [Elapsed(steps=step, samples=4 * step, epochs=step // 2) for step in range(1, 12)]
    values = [4.0, 3.0, 2.0, 1.0] + [1.0] * 7
    # The best value comes at step 4, after 16 samples, where two epochs are complete.
    assert judged_by_hand(early_stopping("loss", patience), values, moments) is moments[stops_at - 1]


def test_a_value_that_was_judged_is_not_judged_again():
    values = {10: 1.0, 20: 1.0, 30: 0.5, 40: 0.5, 50: 0.5, 60: 0.5}

    def test(state, batch, elapsed):
        return ms.logs().add_metric("loss_test", values[elapsed.steps])

    def train(state):
        return ms.logs().add_metric("loss", 1.0), state + 1

    for patience, stops_at in ((15, 50), (0, 20)):
        tasks = [(every(1), train), (every(10), test), (every(1), early_stopping("loss_test", patience))]
        assert loop(0, range(60), tasks).elapsed.steps == stops_at


def test_a_value_logged_behind_the_callback_is_judged_with_the_moment_of_its_own():
    stop_early = early_stopping("loss", 5)
    tasks = [(every(1), stop_early), (every(5), logged([2.0, 1.0, 3.0, 3.0]))]
    output = loop(0, range(20), tasks)
    assert stop_early.best_elapsed is not None and stop_early.best_elapsed.steps == 10
    assert output.elapsed.steps == 16  # the value of step 15 is there at the next one


@jax.jit
def improve(weights):
    return weights + 1


donating = jax.jit(lambda weights: weights + 1, donate_argnums=0)


def test_the_best_weights_survive_donation():
    given, taken = jnp.zeros(4), []

    def step(state, batch):
        taken.append(state)
        return ms.logs().add_metric("loss", abs(3.0 - batch)), donating(state)

    stop_early = early_stopping("loss", 3, restore_best_weights=True)
    output = loop(given, range(10), {every(1): [step, stop_early]})
    assert all(state.is_deleted() for state in taken)
    np.testing.assert_array_equal(output.state, np.full(4, 4.0))  # batch 3 was the fourth
    assert output.elapsed.steps == 7
    donating(output.state)  # what was handed back is not the only copy
    np.testing.assert_array_equal(stop_early.best, np.full(4, 4.0))


def test_a_copy_keeps_where_arrays_lie_and_what_is_no_array(count_compilations):
    mesh = jax.make_mesh((1,), ("data",))
    shardings = [jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*names)) for names in ((), ("data",))]
    arrays = [jax.device_put(np.ones((2, 2)), sharding) for sharding in shardings] + [jnp.ones((2, 2))]
    state = {"arrays": arrays, "key": jax.random.key(1), "n": np.arange(3), "name": "net"}
    stop_early = early_stopping("loss", 5, restore_best_weights=True)
    stop_early(Elapsed(steps=1), state, {"loss": 1.0})
    best = stop_early.best
    assert best["name"] == "net" and best["key"].dtype == state["key"].dtype
    state["n"][:] = 0
    np.testing.assert_array_equal(best["n"], np.arange(3))
    for array in arrays:
        improve(array)
    with count_compilations() as compilations:
        for array, kept in zip(arrays, best["arrays"], strict=True):
            assert kept is not array and kept.sharding == array.sharding and kept.committed == array.committed
            improve(kept)
    assert compilations == [0]


def test_without_restore_best_weights_no_state_is_kept_or_restored():
    stop_early = early_stopping("loss", 1)
    assert run([1.0, 2.0, 3.0], stop_early).state == 2
    assert stop_early.best is None and stop_early.best_value == 1.0


def test_a_loop_that_ends_by_itself_returns_its_own_state():
    stop_early = early_stopping("loss", 10, restore_best_weights=True)
    assert run([2.0, 1.0, 3.0], stop_early).state == 3
    assert stop_early.best == 2


def test_a_stop_that_another_callback_asked_for_stays():
    state = ms.loops.LoopState(0, ms.loops.history(), Elapsed(steps=1), logs=ms.logs().add_metric("loss", 1.0))
    state.stop("enough")
    early_stopping("loss", 5).__loop_callback__(state)
    assert state.stop_iteration and state.reason == "enough"


def test_a_value_that_is_not_finite_is_never_an_improvement():
    stop_early = early_stopping("loss", 3)
    assert run([math.nan, 2.0, -math.inf, math.nan, 1.0, 1.0, 1.0, 1.0], stop_early).elapsed.steps == 8
    assert stop_early.best_value == 1.0
    output = run([1.0, math.nan, 0.5], early_stopping("loss", 3, check_finite=True))
    assert output.elapsed.steps == 2 and output.reason == "early_stopping: loss is nan"
    assert run([-math.inf, 1.0], early_stopping("loss", 3, threshold=0.0)).elapsed.steps == 2


def test_more_can_be_better():
    stop_early = early_stopping("loss", 2, mode="max", min_delta=0.5)
    assert run([1.0, 2.0, 2.5, 2.5, 9.0], stop_early).elapsed.steps == 4
    assert stop_early.best_value == 2.0


def test_reaching_the_threshold_stops_with_that_state():
    stop_early = early_stopping("loss", 10, threshold=0.5, min_delta=1.0, restore_best_weights=True)
    output = run([1.0, 0.5, 0.1], stop_early)
    assert output.reason == "early_stopping: loss is 0.5 and has reached 0.5"
    assert output.state == 2 and stop_early.best == 1
    assert run([0.1, 0.9, 1.0], early_stopping("loss", 10, threshold=0.9, mode="max")).elapsed.steps == 2


def test_the_baseline_has_to_be_beaten():
    stop_early = early_stopping("loss", 3, baseline=0.5, restore_best_weights=True)
    output = run([0.9, 0.8, 0.7, 0.6], stop_early)
    assert output.elapsed.steps == 3 and stop_early.best is None and output.state == 3
    assert output.reason.endswith("it was never better than 0.5")
    assert run([0.9, 0.4, 0.4, 0.4, 0.4], early_stopping("loss", 3, baseline=0.5)).elapsed.steps == 5


def test_values_before_start_from_do_not_count():
    values = [0.1, 0.2, 5.0, 4.0, 4.0, 4.0, 4.0]
    stop_early = early_stopping("loss", 2, start_from=3)
    assert run(values, stop_early).elapsed.steps == 6
    assert stop_early.best_value == 4.0
    assert run(values, early_stopping("loss", 2)).elapsed.steps == 3
    # Patience begins there, too.
    assert run([9.0] * 9, early_stopping("loss", 2, start_from=5, baseline=1.0)).elapsed.steps == 6


def test_it_goes_on_exactly_from_a_saved_state():
    values = [3.0, 2.5, math.nan, 2.0, 2.2, 1.0, 1.5, 1.4, 1.3, 1.2, 1.1]
    moments = [Elapsed(steps=step, samples=4 * step, epochs=step // 3, time=step / 8) for step in range(1, 12)]

    def new():
        return early_stopping("loss", at(samples=16), min_delta=0.1, restore_best_weights=True)

    def go(callback, start, stop):
        return [callback(moments[n], {"w": jnp.full(2, float(n))}, {"loss": values[n]})[0] for n in range(start, stop)]

    whole = new()
    expected = go(whole, 0, len(values))
    assert expected.index(True) == 9
    for cut in range(len(values) + 1):
        first, second = new(), new()
        before = go(first, 0, cut)
        second.set_state(first.get_state())
        assert before + go(second, cut, len(values)) == expected
        assert second.best_value == whole.best_value == 1.0
        assert_trees_equal(second.best, whole.best)


def test_a_new_run_forgets_and_a_continued_one_remembers():
    stop_early = early_stopping("loss", 3)
    first = run([1.0, 2.0], stop_early)
    assert first.elapsed.steps == 2
    again = loop(0, range(9), {every(1): [logged([2.0] * 9), stop_early]}, elapsed=first.elapsed)
    assert again.elapsed.steps == 4
    assert run([2.0] * 9, stop_early).elapsed.steps == 4


def test_an_unknown_name_is_refused_when_an_epoch_is_complete():
    values = [1.0] * 12
    message = r"early_stopping watches 'los', .* Did you mean 'loss'\? Logged: metrics\.loss\. .*start_from"
    with pytest.raises(ValueError, match=message) as raised:
        run(values, early_stopping("los", 3), epoch_duration=4)
    assert raised.value.loop_output.elapsed.steps == 5  # type: ignore[attr-defined]
    assert not any("Ending the loop failed" in note for note in raised.value.__notes__)
    with pytest.raises(ValueError, match="never logged"):
        run(values, early_stopping("los", 3), epoch_duration=4, stop=4)
    with pytest.raises(ValueError, match=message) as raised:
        train_loop(0, [0] * 12, {"train_step": logged(values)}, callbacks=[early_stopping("los", 3)], epoch_duration=4)
    assert raised.value.loop_output.elapsed.steps == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("watcher", [lambda: early_stopping("los", 3), lambda: terminate_on_nan(["los", "loss"])])
def test_an_unknown_name_is_refused_at_the_end_where_there_are_no_epochs(watcher):
    message = r"the monitor 'los' was never logged.* Did you mean 'loss'\? Logged: metrics\.loss\."
    with pytest.raises(ValueError, match=message) as raised:
        run([1.0] * 3, watcher())
    assert raised.value.loop_output.elapsed.steps == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("watcher", [lambda: early_stopping("later", 3), lambda: terminate_on_nan("later")])
def test_a_name_that_had_no_time_to_be_logged_is_not_an_error(watcher):
    def interrupt(state, batch, elapsed):
        if elapsed.steps == 2:
            raise KeyboardInterrupt

    def stop(state, batch, elapsed, loop_state):
        loop_state.stop("enough")

    def fail(state):
        raise RuntimeError("no")

    train = logged([1.0] * 3)
    assert loop(0, range(3), {every(1): [train, watcher(), interrupt]}).interrupted
    assert loop(0, range(3), {every(1): [train, watcher(), stop]}).reason == "enough"
    with pytest.raises(RuntimeError) as raised:
        loop(0, range(3), {every(1): [train, watcher(), fail]})
    assert not any("Ending the loop failed" in note for note in raised.value.__notes__)
    assert loop(0, range(3), {every(1): [train, watcher()]}, stop=0).elapsed.steps == 0


def test_a_name_is_not_expected_before_it_counts():
    assert run([1.0] * 8, early_stopping("later", 3, start_from=at(epochs=5)), epoch_duration=2).elapsed.steps == 8


def test_what_is_logged_at_the_end_of_an_epoch_behind_it_is_waited_for():
    tasks = [(every(1), logged([1.0] * 20)), (every(1), early_stopping("loss_test", at(epochs=2)))]
    tasks.append((every(epochs=1), lambda state: ms.logs().add_metric("loss_test", 1.0)))
    assert loop(0, range(20), tasks, epoch_duration=4).elapsed.steps == 13


def test_in_callbacks_it_judges_the_test_at_the_end_of_each_epoch():
    losses = iter([3.0, 2.0, 2.5, 2.4, 2.3, 2.2, 2.1])
    output = train_loop(
        jnp.zeros(3),
        [0] * 60,
        {"train_step": donating, "on_test_step": lambda state: ms.logs().add_metric("loss", next(losses))},
        callbacks=[early_stopping("loss_test", at(epochs=3), restore_best_weights=True)],
        test_dataset=[0],
        epoch_duration=4,
    )
    assert output.elapsed.steps == 20 and output.reason.startswith("early_stopping: loss_test has not improved")
    np.testing.assert_array_equal(output.state, np.full(3, 8.0))


def test_arguments_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"early_stopping needs mode 'min' or 'max'\. Got 'least'"):
        early_stopping("loss", 3, mode="least")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="early_stopping needs min_delta of at least 0"):
        early_stopping("loss", 3, min_delta=-1)
    with pytest.raises(ValueError, match=r"early_stopping needs baseline to be a number\. Got nan"):
        early_stopping("loss", 3, baseline=math.nan)
    with pytest.raises(TypeError, match="early_stopping needs patience as steps"):
        early_stopping("loss", "long")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match='early_stopping needs monitor as "name"'):
        early_stopping(None, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"early_stopping needs 'loss' to be a single number. Got shape \(2,\)"):
        run([np.zeros(2)], early_stopping("loss", 3))
    with pytest.raises(ValueError, match="terminate_on_nan needs action 'raise' or 'stop'"):
        terminate_on_nan(action="cry")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="profile needs steps to be an int of at least 1"):
        profile("here", steps=0)
    with pytest.raises(ValueError, match="throughput needs flops_per_step for peak_flops"):
        throughput(peak_flops=1e12)
    with pytest.raises(TypeError, match="log_learning_rate needs a schedule"):
        log_learning_rate(0.1)  # type: ignore[arg-type]


# NaN


@jax.jit
def loss_of(step, bad):
    """A loss that is NaN from the bad step on."""
    return jnp.where(step >= bad, jnp.nan, 1.0)


def nan_run(bad, steps, callback, **options):
    def step(state):
        return ms.logs().add_loss("loss", loss_of(np.int32(state + 1), np.int32(bad))), state + 1

    return loop(0, range(steps), {every(1): [step, callback]}, **options)


@pytest.mark.parametrize("bad", [1, 64, 65, 100, 170])
def test_the_first_bad_step_is_reported_though_the_loop_is_ahead(bad):
    with pytest.raises(FloatingPointError, match=rf"losses\.loss to be nan at step {bad}\. ") as raised:
        nan_run(bad, 1000, terminate_on_nan())
    assert f"init_state(key, step={bad - 1})" in str(raised.value)
    assert bad < raised.value.loop_output.elapsed.steps <= bad + 66  # type: ignore[attr-defined]


def test_a_loop_that_ends_right_after_it_is_told_too():
    with pytest.raises(FloatingPointError, match=r"at step 10 \(2 epochs complete\)\."):
        nan_run(10, 10, terminate_on_nan(), epoch_duration=5)
    assert nan_run(11, 10, terminate_on_nan()).elapsed.steps == 10


def test_the_loop_can_be_stopped_instead():
    output = nan_run(70, 1000, terminate_on_nan(action="stop"))
    assert "losses.loss to be nan at step 70" in output.reason and output.elapsed.steps < 140
    assert "at step 10" in nan_run(10, 10, terminate_on_nan(action="stop")).reason


def test_the_entry_that_was_first_is_reported():
    def step(state, batch, elapsed):
        logs = ms.logs().add_metric("norm", math.inf if elapsed.steps >= 62 else 1.0)
        if elapsed.steps % 10 == 0:
            logs.add_stateful_metric("rare", math.nan if elapsed.steps == 60 else 1.0)
        return logs, state

    # When it looks first, at row 64, the newest two values of each entry are left out; the rare one is among them.
    with pytest.raises(FloatingPointError, match=r"stateful_metrics\.rare to be nan at step 60"):
        loop(0, range(200), {every(1): [step, terminate_on_nan()]})
    with pytest.raises(FloatingPointError, match=r"metrics\.norm to be inf at step 62"):
        loop(0, range(200), {every(1): [step, terminate_on_nan("norm")]})


def test_only_what_is_watched_counts():
    values = [math.nan] * 3
    assert run(values, terminate_on_nan("losses.other"), on_start=other_loss).elapsed.steps == 3
    output = loop(0, range(3), {every(1): [lambda: ms.logs().add_output("y", np.nan), terminate_on_nan()]})
    assert output.elapsed.steps == 3


def other_loss():
    return ms.logs().add_loss("other", 1.0)


def test_arrays_and_whole_numbers_are_looked_at():
    values = [np.array([1.0, math.nan]) if step == 5 else np.ones(2) for step in range(9)]
    with pytest.raises(FloatingPointError, match=r"metrics\.loss to be partly not finite at step 6"):
        run(values, terminate_on_nan())
    with pytest.raises(FloatingPointError, match="at step 3"):
        run([1, True, jnp.bfloat16(math.nan)], terminate_on_nan())


def test_what_an_earlier_loop_logged_is_not_looked_at():
    bad = run([math.nan] * 3, ms.loops.noop)
    options = {"history": bad.history, "elapsed": bad.elapsed}
    loop(0, range(3), {every(1): [logged([1.0] * 3), terminate_on_nan()]}, **options)
    with pytest.raises(FloatingPointError, match="at step 5"):
        loop(0, range(3), {every(1): [logged([1.0, math.nan, 1.0]), terminate_on_nan()]}, **options)


class Slow:
    """A number that tells when it is read."""

    ndim = 0

    def __init__(self, step, reads):
        self.step, self.reads = step, reads

    def __array__(self, dtype=None, copy=None):
        self.reads.append(self.step)
        return np.asarray(math.nan if self.step == 63 else 1.0, dtype)


def test_values_that_may_be_under_way_are_not_read():
    watch, reads = terminate_on_nan(action="stop"), []
    stops = [watch(Elapsed(steps=step), {"loss": Slow(step, reads)}) for step in range(1, 65)]
    assert not any(stops) and reads == list(range(1, 63))
    assert [watch(Elapsed(steps=step), {"loss": Slow(step, reads)}) for step in range(65, 129)][-1]


@jax.jit
def fused_step(state, batch):
    """A loss that is NaN from step 77 on, and an error that is least at step 40."""
    logs = ms.logs().add_loss("loss", loss_of(state + 1, jnp.int32(77)))
    return logs.add_metric("error", jnp.abs(state.astype(jnp.float32) - 39)), state + 1


def test_steps_of_one_program_are_judged_like_others(key):
    loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(512.0, dtype=np.float32)}), ms.BatchTransform(2)])

    def run_fused(tasks):
        return loop(jnp.int32(0), loader, tasks, key=key, stop=200, fuse=16)

    with pytest.raises(FloatingPointError, match="at step 77 "):
        run_fused({every(1): [fused_step, terminate_on_nan()]})
    stop_early = early_stopping("error", 15, restore_best_weights=True)
    output = run_fused({every(1): fused_step, every(10): stop_early})
    assert output.elapsed.steps == 60 and output.state == 40 and stop_early.best_value == 0.0


# Profile


def marks(folder):
    """The step numbers that a recording has marks for."""
    (path,) = folder.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sorted(int(event["args"]["step_num"]) for event in events if event.get("name") == "loop")


def test_a_window_of_steps_is_recorded(tmp_path):
    tasks = {every(1): [improve, profile(tmp_path, first=4, steps=3)]}
    output = loop(jnp.zeros(2), range(12), tasks)
    np.testing.assert_array_equal(output.state, np.full(2, 12.0))
    assert marks(tmp_path) == [4, 5, 6]


def test_a_window_may_begin_with_the_first_step_and_the_loop_end_in_it(tmp_path):
    loop(jnp.zeros(2), range(3), {every(1): [improve, profile(tmp_path / "a", first=1, steps=9)]})
    assert marks(tmp_path / "a") == [1, 2, 3, 4]  # the fourth had begun with waiting for its batch

    def broken(state, batch):
        if batch == 3:
            raise KeyError("broken")

    watch = profile(tmp_path / "b", first=2, steps=9)
    with pytest.raises(KeyError, match="broken"):
        loop(jnp.zeros(2), range(9), {every(1): [improve, broken, watch]})
    assert marks(tmp_path / "b") == [2, 3, 4]


def test_steps_are_counted_from_the_begin_of_a_resumed_loop(tmp_path):
    tasks = {every(1): [improve, profile(tmp_path, first=2, steps=1)]}
    loop(jnp.zeros(2), range(5), tasks, elapsed=Elapsed(steps=100))
    assert marks(tmp_path) == [102]


def test_two_windows_at_once_are_refused(tmp_path):
    two = [profile(tmp_path / "a", first=2, steps=5), profile(tmp_path / "b", first=4, steps=5)]
    with pytest.raises(RuntimeError, match=r"profile cannot record step 4 and the next ones: .*already"):
        loop(jnp.zeros(2), range(9), {every(1): [improve, *two]})
    assert marks(tmp_path / "a") == [2, 3, 4]
    one_after_the_other = [profile(tmp_path / "c", first=2, steps=1), profile(tmp_path / "d", first=4, steps=1)]
    loop(jnp.zeros(2), range(9), {every(1): [improve, *one_after_the_other]})
    assert marks(tmp_path / "c") == [2] and marks(tmp_path / "d") == [4]


def test_a_trial_run_records_nothing_and_is_not_stopped(tmp_path):
    callbacks = [profile(tmp_path / "a", first=1), early_stopping("los", 1)]
    train_loop(0, [0] * 12, {"train_step": logged([1.0] * 12)}, callbacks=callbacks, epoch_duration=4, fast_dev_run=5)
    assert not (tmp_path / "a").exists()


# Throughput


def test_rates_are_those_of_the_steps_that_were_taken():
    seen = []
    batches = [np.ones(3)] * 25
    tasks = {every(1): lambda state: state + 1, every(10) | last(): [throughput(), lambda *a: seen.append(a[3].waits)]}
    output = loop(0, batches, tasks)
    columns = ("seconds", "samples_per_second", "steps_per_second", "step_time", "data_wait", "compile_time")
    seconds, samples_rate, steps_rate, step_time, data_wait, compile_time = map(
        np.asarray, output.history.collect(*(f"throughput.{name}" for name in columns))
    )
    np.testing.assert_allclose(seconds * samples_rate, [30, 30, 15])
    np.testing.assert_allclose(seconds * steps_rate, [10, 10, 5])
    np.testing.assert_allclose(step_time * steps_rate, 1)
    np.testing.assert_allclose(np.sum(data_wait * seconds), seen[-1].data)
    assert (seconds > 0).all() and (data_wait > 0).all() and (data_wait < 1).all() and (compile_time == 0).all()


def test_time_in_inner_loops_does_not_count():
    pause, waits = threading.Event(), []
    evaluate = inner_loop("test", lambda state: loop(state, range(3), {every(1): lambda: pause.wait(0.02)}))
    tasks = [
        (every(1), lambda state: state + 1),
        (every(5), [evaluate, throughput(), lambda *a: waits.append(a[3].waits)]),
    ]
    begun = time.perf_counter()
    output = loop(0, range(20), tasks)
    whole = time.perf_counter() - begun
    assert waits[-1].evaluation >= 4 * 3 * 0.02
    assert sum(output.history.collect("throughput.seconds")) + waits[-1].evaluation <= whole


def test_seconds_of_compiling_are_counted_where_they_are_spent():
    heard = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **kwargs: heard.append(duration_secs) if "backend_compile" in event else None
    )
    fresh = jax.jit(lambda x: jnp.sin(x) * 3)  # compiled at its first call

    def step(state, batch):
        if batch == 12:
            fresh(state)

    heard.clear()
    output = loop(np.ones(5, np.float32), range(30), {every(1): step, every(10): throughput()})
    compiling = output.history.collect("throughput.compile_time")
    assert heard and compiling == pytest.approx([0, sum(heard), 0])


def test_utilisation_is_logged_when_the_work_of_a_step_is_known():
    meter = throughput(flops_per_step=200.0, peak_flops=1e9)
    logs = loop(0, range(10), {every(1): lambda state: state + 1, every(10): meter}).history[-1].throughput
    assert logs.flops_per_second == pytest.approx(200 * logs.steps_per_second)
    assert logs.mfu == pytest.approx(logs.flops_per_second / 1e9)


def test_by_hand_the_first_call_opens_the_window():
    meter = throughput()
    assert meter(Elapsed(steps=1, samples=4)) is None
    assert meter(Elapsed(steps=1, samples=4)) is None  # no step since
    rates = meter(Elapsed(steps=3, samples=12))
    assert rates is not None and rates.throughput.seconds * rates.throughput.samples_per_second == pytest.approx(8)
    assert "data_wait" not in rates.throughput


def test_in_callbacks_it_measures_every_epoch():
    tasks = {ms.on_train_step: lambda state: state + 1}
    output = train_loop(0, [np.ones(3)] * 12, tasks, callbacks=[throughput()], epoch_duration=4)
    assert output.history.collect("steps", "steps_per_second")[0] == [4, 8, 12]


# Learning rate

SCHEDULE: Any = optax.warmup_cosine_decay_schedule(0.0, 0.1, 20, 400)


@pytest.fixture
def usual_promotion():
    """Schedules of optax mix integers and floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_the_rate_of_a_schedule_is_that_of_the_update(usual_promotion):
    expected = [float(SCHEDULE(step)) for step in range(300)]
    output = loop(0, range(300), {every(1): log_learning_rate(SCHEDULE)})
    np.testing.assert_allclose(output.history.collect("stateful_metrics.learning_rate"), expected, rtol=1e-5)
    plain = loop(0, range(4), {every(2): log_learning_rate(lambda step: 1 / (1 + step), name="rate")})
    assert plain.history.collect("rate") == [1 / 2, 1 / 4]


def test_a_schedule_is_compiled_once(usual_promotion, count_compilations):
    rate = log_learning_rate(SCHEDULE)
    with count_compilations() as compilations:
        loop(0, range(600), {every(1): rate})
    assert compilations == [0]


def test_a_schedule_that_cannot_be_compiled_is_refused():
    with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        log_learning_rate(lambda step: jnp.float32(0.1) if step < 10 else jnp.float32(0.01))
    assert "can be compiled, or returns plain numbers" in raised.value.__notes__[-1]


OPTIMIZER = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(learning_rate=SCHEDULE))


@jax.tree_util.register_pytree_node_class
class Packed:
    """A node whose children have no names."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def _update(state):
    params, (opt_state,) = state["params"], state["packed"].children
    updates, opt_state = OPTIMIZER.update(jnp.ones_like(params), opt_state, params)
    return {"params": optax.apply_updates(params, updates), "packed": Packed(opt_state)}


update = jax.jit(_update)


def test_the_rate_is_found_in_the_state(usual_promotion):
    params = jnp.ones(3)
    state = {"params": params, "packed": Packed(OPTIMIZER.init(params))}
    output = loop(state, range(30), {every(1): [update, log_learning_rate()]})
    expected = [float(SCHEDULE(step)) for step in range(30)]
    np.testing.assert_allclose(output.history.collect("learning_rate"), expected, rtol=1e-5)


CONSTANT: Any = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)


@functools.partial(jax.jit, donate_argnums=0)
def donating_update(opt_state):
    return CONSTANT.update(jnp.ones(3), opt_state)[1]


def test_the_rate_survives_the_donation_of_the_state():
    given = CONSTANT.init(jnp.ones(3))
    output = loop(given, range(5), {every(1): [donating_update, log_learning_rate()]})
    assert given.hyperparams["learning_rate"].is_deleted()
    assert output.history.collect("learning_rate") == [0.5] * 5


def test_the_rate_is_found_in_an_nnx_optimizer():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.inject_hyperparams(optax.sgd)(learning_rate=0.25), wrt=nnx.Param)
    logs = log_learning_rate()(Elapsed(steps=1), (model, optimizer))
    assert float(logs.entry_value("learning_rate")) == 0.25


def test_one_of_several_rates_is_chosen_by_its_path():
    injected = optax.inject_hyperparams(optax.sgd)
    transforms: Any = {"body": injected(learning_rate=0.1), "head": injected(learning_rate=0.2)}
    state = optax.partition(transforms, {"a": "body", "b": "head"}).init({"a": jnp.ones(2), "b": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"several learning rates in the state(?s:.)*\['body'\](?s:.)*\['head'\]"):
        log_learning_rate()(Elapsed(steps=1), state)
    with pytest.raises(ValueError, match="0 learning rates within 'tail'"):
        log_learning_rate(within="tail")(Elapsed(steps=1), state)
    logs = log_learning_rate(within="head", name="rate_head")(Elapsed(steps=1), state)
    assert float(logs.stateful_metrics.rate_head) == pytest.approx(0.2)


def test_a_state_without_a_rate_is_refused_with_both_ways_out():
    state = optax.sgd(0.1).init(jnp.ones(2))
    with pytest.raises(
        ValueError, match=r"finds no learning rate.*inject_hyperparams.*ms\.callbacks\.log_learning_rate\(sched"
    ):
        log_learning_rate()(Elapsed(steps=1), state)


def test_in_callbacks_the_rate_is_logged_at_every_step():
    tasks = {ms.on_train_step: lambda state: state + 1}
    output = train_loop(0, [0] * 6, tasks, callbacks=[log_learning_rate(lambda step: step)], epoch_duration=3)
    assert output.history.collect("learning_rate") == [0, 1, 2, 3, 4, 5]
