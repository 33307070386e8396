"""A loop inside a loop: what its rows become, and what is left of it when it is interrupted."""

import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millstream as ms

pytestmark = pytest.mark.optimized

SAMPLES = np.arange(10, dtype=np.float32)


@jax.jit
def eval_step(state, batch):
    values, mask = batch
    mean = jnp.sum(jnp.where(mask, values["x"], 0)) / jnp.sum(mask, dtype=jnp.float32)
    logs = ms.logs().add_metric("mean", mean).add_loss("loss", mean + 1).add_entry("mine", "thing", mean + 2)
    return logs.add_stateful_metric("largest", jnp.max(values["x"])).add_output("x", values["x"])


@pytest.fixture(scope="module")
def loader():
    """Ten samples in order: batches of 4, 4, and 2 with padding."""
    source = ms.ArraySampleSource({"x": SAMPLES})
    return ms.DataLoader([source, ms.BatchTransform(4)])


@pytest.fixture
def evaluate(loader, key):
    def run(state):
        return ms.loop(state, loader, {ms.every(1): eval_step}, stop=ms.at(epochs=1), key=key)

    return run


def rows(*values, weights=None, collection="metrics"):
    """A loop that logs given values of an entry, at steps with that many samples."""

    def run(state):
        history, samples = ms.loops.history(), 0
        for number, value in enumerate(values):
            weight = 1 if weights is None else weights[number]
            elapsed = ms.loops.Elapsed(number + 1, samples + weight, samples_before=samples)
            history.commit(elapsed, {collection: {"value": value}})
            samples += weight
        return state, history, ms.loops.Elapsed(len(values), samples)

    return run


def aggregated(aggregation, *values, weights=None, collection="metrics"):
    logs, _ = ms.inner_loop(rows(*values, weights=weights, collection=collection), aggregation=aggregation)(None)
    return logs.entry_value("value")


def test_everything_is_averaged_over_real_samples_but_stateful_metrics_and_outputs(evaluate):
    logs, state = ms.inner_loop("test", evaluate)(7)
    assert state == 7
    assert logs == {
        "metrics": {"mean_test": pytest.approx(SAMPLES.mean())},
        "losses": {"loss_test": pytest.approx(SAMPLES.mean() + 1)},
        "mine": {"thing_test": pytest.approx(SAMPLES.mean() + 2)},
        "stateful_metrics": {"largest_test": evaluate(7).history.collect("largest")[-1]},
    }


def test_the_last_value_of_a_stateful_metric_counts():
    assert aggregated(None, 1.0, 3.0, 2.0, collection="stateful_metrics") == 2.0


def test_outputs_are_joined_without_padding_if_asked_for(evaluate):
    logs, _ = ms.inner_loop("test", evaluate, aggregation={"outputs": "concatenate"})(None)
    np.testing.assert_array_equal(np.sort(logs.outputs.x_test), SAMPLES)
    assert logs.metrics.mean_test == pytest.approx(SAMPLES.mean())


def test_the_outputs_of_a_single_padded_batch_are_cut_too(key):
    loader = ms.DataLoader([ms.ArraySampleSource({"x": SAMPLES[:3]}), ms.BatchTransform(4)])

    def run(state):
        return ms.loop(state, loader, {ms.every(1): eval_step}, stop=1, key=key)

    logs, _ = ms.inner_loop(run, aggregation="concatenate")(None)
    np.testing.assert_array_equal(np.sort(logs.outputs.x), SAMPLES[:3])


@pytest.mark.parametrize(
    ("word", "expected"),
    [("mean", 2.5), ("last", 3.0), ("first", 1.0), ("sum", 6.0), ("min", 1.0), ("max", 3.0)],
)
def test_a_word_says_what_becomes_of_the_values(word, expected):
    assert aggregated(word, 1.0, 2.0, 3.0, weights=[1, 1, 4]) == expected


@pytest.mark.parametrize(
    ("word", "expected"), [("mean", [2.5, 5]), ("sum", [4, 8]), ("min", [1, 2]), ("max", [3, 6]), ("last", [3, 6])]
)
def test_arrays_are_aggregated_element_by_element(word, expected):
    value = aggregated(word, np.array([1.0, 2.0]), np.array([3.0, 6.0]), weights=[1, 3])
    np.testing.assert_array_equal(value, expected)


def test_steps_without_samples_count_in_a_mean_only_if_there_are_no_others():
    assert aggregated("mean", np.nan, 1.0, 2.0, weights=[0, 1, 1]) == 1.5
    assert aggregated("mean", 1.0, 2.0, weights=[0, 0]) == 1.5


def test_arrays_are_joined_and_numbers_stand_side_by_side():
    joined = aggregated("concatenate", np.ones((2, 3)), np.zeros((1, 3)), weights=[2, 1])
    np.testing.assert_array_equal(joined, [[1] * 3, [1] * 3, [0] * 3])
    np.testing.assert_array_equal(aggregated("concatenate", 1, 2, 3), [1, 2, 3])


def test_arrays_that_have_no_row_per_sample_are_not_cut():
    assert aggregated("concatenate", np.ones(8), np.ones(8), weights=[2, 1]).shape == (16,)
    assert aggregated("concatenate", np.ones(8), weights=[0]).shape == (8,)


def test_a_function_gets_values_and_if_it_wants_the_samples_of_each():
    assert aggregated(max, 1.0, 3.0, 2.0) == 3.0
    assert aggregated(np.median, 1.0, 3.0, 7.0) == 3.0
    assert aggregated(lambda values, weights: (values, weights), 1.0, 3.0, weights=[4, 2]) == ([1.0, 3.0], [4, 2])


def test_a_dict_chooses_by_collection_and_by_entry(evaluate):
    choice = {"metrics": "max", "losses.loss": "first", "thing": "drop", "stateful_metrics": "min"}
    logs, _ = ms.inner_loop("test", evaluate, aggregation=choice)(None)
    steps = evaluate(None).history
    assert logs == {
        "metrics": {"mean_test": max(steps.collect("mean"))},
        "losses": {"loss_test": steps.collect("loss")[0]},
        "stateful_metrics": {"largest_test": min(steps.collect("largest"))},
    }


def test_a_name_that_is_never_logged_is_refused(evaluate):
    inner = ms.inner_loop("test", evaluate, aggregation={"metrics": "last", "metric": "last"})
    with pytest.raises(ValueError, match=r"inner_loop 'test' got an aggregation for 'metric'.*metrics.mean"):
        inner(None)


def test_an_entry_that_is_only_logged_at_first_is_no_mistake():
    values = iter([{"seldom": 1.0, "loss": 1.0}, {"loss": 2.0}])

    def run(state):
        history = ms.loops.history()
        history.commit(ms.loops.Elapsed(1), next(values))
        return state, history, ms.loops.Elapsed(1)

    inner = ms.inner_loop(run, aggregation={"seldom": "last"})
    assert inner(None)[0].metrics == {"seldom": 1.0, "loss": 1.0}
    assert inner(None)[0].metrics == {"loss": 2.0}


def test_values_that_cannot_be_aggregated_are_named():
    with pytest.raises(ValueError) as caught:
        aggregated(None, "well", "worse")
    assert "aggregation of metrics.value in inner_loop; its last value is 'worse'" in caught.value.__notes__[0]
    with pytest.raises(ValueError) as caught:
        aggregated("mean", np.ones(4), np.ones(2))
    assert "aggregation={'metrics.value': 'last'}" in caught.value.__notes__[0]


def test_results_are_logged_at_the_step_of_the_outer_loop(evaluate):
    def train_step(state):
        return ms.logs().add_metric("loss", 0.5), state + 1

    tasks = {ms.every(1): train_step, ms.every(2): ms.inner_loop("test", evaluate)}
    state, history, _ = ms.loop(0, range(4), tasks)
    assert state == 4
    assert history.collect("steps", "mean_test") == ([2, 4], [pytest.approx(4.5)] * 2)
    assert history.collect("metrics.loss") == [0.5] * 4
    assert "elapsed.steps_test" not in history.names()


@pytest.mark.parametrize(("output_state", "expected"), [(False, 2), (True, 22)])
def test_the_inner_state_is_kept_only_if_asked_for(output_state, expected):
    def add_ten(state):
        return ms.loop(state, range(5), {ms.every(1): lambda state: state + 2})

    tasks = {ms.every(1): [lambda state: state + 1, ms.inner_loop("inner", add_ten, output_state=output_state)]}
    assert ms.loop(0, range(2), tasks).state == expected


def test_a_state_that_is_a_tuple_or_nothing_is_kept(evaluate):
    assert ms.loop((0, 1), range(1), {ms.every(1): ms.inner_loop("test", evaluate)}).state == (0, 1)
    assert ms.loop(None, range(1), {ms.every(1): ms.inner_loop("test", evaluate)}).state is None


def test_only_rows_that_this_call_added_count():
    history, numbers = ms.loops.history(), iter(range(1, 5))

    def run(state):
        elapsed = history.elapsed() if len(history) else None
        steps = {ms.every(1): lambda state: ms.logs().add_metric("number", next(numbers))}
        return ms.loop(state, range(2), steps, history=history, elapsed=elapsed)

    inner = ms.inner_loop(run)
    assert inner(None)[0].metrics.number == 1.5
    assert inner(None)[0].metrics.number == 3.5


@pytest.mark.parametrize("steps", [1, 2])
def test_a_new_run_does_not_write_into_the_rows_of_an_earlier_one(steps):
    history, numbers = ms.loops.history(), iter(range(9))

    def run(state):
        tasks = {ms.every(1): lambda: ms.logs().add_metric("number", next(numbers))}
        return ms.loop(state, range(steps), tasks, history=history)

    inner = ms.inner_loop(run, aggregation="last")
    assert [inner(None)[0].metrics.number for _ in range(3)] == [steps - 1, 2 * steps - 1, 3 * steps - 1]
    assert history.collect("number") == list(range(3 * steps))


def test_a_loop_that_logs_nothing_adds_nothing():
    inner = ms.inner_loop("test", lambda state: ms.loop(state, [], {}))
    assert inner("state") == ({}, "state")
    assert ms.loop(0, range(2), {ms.every(1): inner}).history.names() == []


def test_an_interrupted_loop_logs_nothing_and_ends_the_outer_one(capfd):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def press(state, batch):
        if batch == 1:
            signal.raise_signal(signal.SIGINT)
        return ms.logs().add_metric("loss", 1.0), state + 1

    inner = ms.inner_loop("test", lambda state: ms.loop(state, range(3), {ms.every(1): press}), output_state=True)
    try:
        output = ms.loop(0, range(5), {ms.every(1): inner})
        logs, state = inner(0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert output.interrupted
    assert (output.state, output.elapsed.steps, output.history.names()) == (0, 1, [])  # half a test is not a test
    assert (logs, state) == ({}, 2)


def test_mistakes_are_refused_before_anything_runs(evaluate):
    with pytest.raises(TypeError, match=r"inner_loop needs a function of the state .* Got None"):
        ms.inner_loop("test")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"inner_loop needs a name, and then a function. Got 3"):
        ms.inner_loop(3, evaluate)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"needs aggregation as mean, last, .* Got 'median'"):
        ms.inner_loop("test", evaluate, aggregation="median")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"Got None"):
        ms.inner_loop("test", evaluate, aggregation={"outputs": None})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"by names of collections and entries. Got 1"):
        ms.inner_loop("test", evaluate, aggregation={1: "mean"})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"<lambda> needs 3 arguments"):
        ms.inner_loop("test", evaluate, aggregation=lambda values, weights, more: None)
    with pytest.raises(TypeError, match=r"to return what a loop returns, \(state, history, elapsed\). Got 5"):
        ms.inner_loop("test", lambda state: 5)(None)  # pyright: ignore[reportArgumentType]
