"""Many runs at once: each with the numbers that it would have alone, and none in the way of another."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.report.page import write_report

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("usual_promotion")]  # adam of optax mixes dtypes

DATA = {"x": np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)}
DATA["y"] = DATA["x"] @ np.array([[1.0], [-2.0], [0.5]], np.float32)
KEY = jax.random.key(7)
GRID = {"lr": [0.3, 0.01], "seed": [0, 1]}


def make_loader(**options):
    return ms.DataLoader([ms.ArraySampleSource(DATA), ms.BatchTransform(8)], **options)


LOADER = make_loader()


def loss_of(params, batch):
    rows, mask = batch
    hidden = jnp.tanh(rows["x"] @ params["a"])
    return jnp.sum(jnp.mean((hidden @ params["b"] - rows["y"]) ** 2, 1) * mask) / jnp.sum(mask)


def init(hyperparameters):
    first, second = jax.random.split(jax.random.key(hyperparameters["seed"]))
    return {"a": jax.random.normal(first, (3, 5)), "b": jax.random.normal(second, (5, 1))}


def step(params, batch, hyperparameters):
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    new = jax.tree.map(lambda param, grad: param - hyperparameters["lr"] * grad, params, grads)
    return ms.logs().add_loss("loss", loss), new


def evaluate(params, batch):
    return ms.logs().add_metric("loss", loss_of(params, batch))


PARAMS, SGD = init({"seed": 0}), optax.sgd(0.1)


@jax.jit
def step_alone(state, batch):
    params, hyperparameters = state
    logs, params = step(params, batch, hyperparameters)
    return logs, (params, hyperparameters)


def alone(hyperparameters, stop, loader=LOADER):
    """One run by itself."""
    arrays = {name: jnp.asarray(value) for name, value in hyperparameters.items()}
    return ms.train_loop((init(hyperparameters), arrays), loader, {ms.on_train_step: step_alone}, stop=stop, key=KEY)


def equal(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def close(ours, theirs, rtol=1e-4):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), ours, theirs)


@settings(max_examples=5, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1e-4, 0.01, 0.1, 0.3]), st.integers(0, 2**31 - 1)), min_size=4, max_size=4)
)
def test_every_run_has_the_numbers_that_it_has_alone(pairs):
    grid = [{"lr": rate, "seed": seed} for rate, seed in pairs]
    output = ms.sweep(step, grid, init, LOADER, stop=15, key=KEY)
    assert [run.hyperparameters for run in output] == grid
    for run in output:
        expected = alone(run.hyperparameters, 15)
        assert run.history.collect("steps") == list(range(1, 16))
        close(run.history.collect("loss"), expected.history.collect("loss"))
        close(run.state, expected.state[0])


def test_one_run_at_once_is_bit_for_bit_the_run_alone():
    output = ms.sweep(step, GRID, init, LOADER, stop=12, key=KEY, at_once=1)
    assert [run.hyperparameters for run in output] == [
        {"lr": 0.3, "seed": 0},
        {"lr": 0.3, "seed": 1},
        {"lr": 0.01, "seed": 0},
        {"lr": 0.01, "seed": 1},
    ]
    for run in output:
        expected = alone(run.hyperparameters, 12)
        assert run.history.collect("loss") == expected.history.collect("loss")
        equal(run.state, expected.state[0])


def test_groups_and_fused_steps_change_nothing_but_rounding():
    whole = ms.sweep(step, {"lr": [0.3, 0.01, 0.1], "seed": [0]}, init, LOADER, stop=12, key=KEY)
    groups = ms.sweep(step, {"lr": [0.3, 0.01, 0.1], "seed": [0]}, init, LOADER, stop=12, key=KEY, at_once=2)
    fused = ms.sweep(step, {"lr": [0.3, 0.01, 0.1], "seed": [0]}, init, LOADER, stop=12, key=KEY, fuse=5)
    for other in (groups, fused):
        assert [run.name for run in other] == [run.name for run in whole]
        for ours, theirs in zip(whole, other, strict=True):
            close(ours.history.collect("loss"), theirs.history.collect("loss"))
            close(ours.state, theirs.state)
    assert groups.nbytes == whole.nbytes * 2 // 3


def test_a_run_that_diverges_does_not_touch_the_others():
    calm = ms.sweep(step, {"lr": [0.1, 0.2], "seed": [0]}, init, LOADER, stop=30, key=KEY)
    wild = ms.sweep(step, {"lr": [0.1, 1e12], "seed": [0]}, init, LOADER, stop=30, key=KEY)
    assert wild.runs[0].history.collect("loss") == calm.runs[0].history.collect("loss")
    equal(wild.runs[0].state, calm.runs[0].state)
    diverged = wild.runs[1].diverged_at("loss")
    assert diverged is not None and math.isnan(wild.runs[1].value("loss"))
    assert wild.best is wild.runs[0] and wild.ranked[-1] is wild.runs[1]
    assert f"not finite from step {diverged}" in str(wild)
    lost = ms.sweep(step, {"lr": [1e12, 1e13], "seed": [0]}, init, LOADER, stop=30, key=KEY)
    with pytest.raises(ValueError, match=r"Sweep.best: every run diverged: loss is not finite at the end of any"):
        lost.best  # noqa: B018


def test_as_many_runs_as_rows_are_not_taken_for_rows():
    grid = [{"lr": 0.1, "seed": seed} for seed in range(8)]  # and 8 rows
    output = ms.sweep(step, grid, init, LOADER, stop=3, key=KEY, test_step=evaluate, test_dataset=LOADER)
    assert output.runs[0].history.names() == ["losses.loss", "metrics.loss_test"]
    losses = np.array([run.history.collect("losses.loss") for run in output])
    assert losses.shape == (8, 3) and len(np.unique(losses[:, 0])) == 8


def test_a_batch_is_read_once_for_all_runs():
    read = []

    def count(sample):
        read.append(1)
        return sample

    loader = ms.DataLoader(
        [ms.ArraySampleSource(DATA), ms.HostMapTransform(count), ms.BatchTransform(8)],
        executor=ms.Threads(1),
        prefetch=1,
    )
    output = ms.sweep(step, GRID, init, loader, stop=5, key=KEY)
    assert len(read) <= 8 * (5 + 4)  # and what is read ahead, and to know the shapes
    close(output.runs[0].history.collect("loss"), alone(output.runs[0].hyperparameters, 5).history.collect("loss"))


@ms.managed.train_step
def managed_step(state, batch):
    return ms.logs().add_loss("loss", loss_of(state.params, batch))


def managed_init(tx):
    return lambda hyperparameters: ms.managed.ManagedState.create(init(hyperparameters), tx, log_learning_rate=True)


def test_managed_states_take_an_optimizer_per_run_or_rates_of_their_own():
    output = ms.sweep(
        managed_step,
        GRID,
        managed_init(optax.adam(1.0)),
        LOADER,
        optimizer=lambda hyperparameters: optax.adam(hyperparameters["lr"]),
        test_step=lambda state, batch: evaluate(state.params, batch),
        test_dataset=LOADER,
        stop=ms.at(epochs=2),
        key=KEY,
    )
    assert output.monitor == "loss_test"
    for run in output:
        tx = optax.adam(run.hyperparameters["lr"])
        state = ms.managed.ManagedState.create(init(run.hyperparameters), tx)
        expected = ms.train_loop(
            state,
            LOADER,
            {ms.on_train_step: managed_step, ms.on_test_step: lambda state, batch: evaluate(state.params, batch)},
            test_dataset=LOADER,
            stop=ms.at(epochs=2),
            key=KEY,
        )
        close(run.history.collect("loss"), expected.history.collect("loss"))
        close(run.history.collect("loss_test"), expected.history.collect("loss_test"))
        assert run.history.collect("loss_test") != run.history.collect("loss")[-2:]
        close(run.state.params, expected.state.params)
    assert min(run.value("loss_test") for run in output) == output.best.value("loss_test")


def test_states_of_a_framework_bring_their_own_tests_and_metrics():
    from flax import linen as nn

    net = nn.Dense(1)
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)

    def init(hyperparameters):
        state = ms.create_flax_state(
            net,
            jnp.zeros((1, 3)),
            tx,
            key=jax.random.key(hyperparameters["seed"]),
            losses={"loss": lambda preds, target: jnp.mean((preds - target) ** 2, axis=-1)},
            metrics={"error": lambda preds, target: jnp.mean(jnp.abs(preds - target), axis=-1)},
            input_key="x",
            target_key="y",
        )
        rate = {**state.opt_state.hyperparams, "learning_rate": jnp.float32(hyperparameters["lr"])}
        return state.replace(opt_state=state.opt_state._replace(hyperparams=rate))

    options = {"test_dataset": LOADER, "stop": ms.at(epochs=2), "key": KEY}
    output = ms.sweep(init({"lr": 0.1, "seed": 0}).train_step, GRID, init, LOADER, **options)
    for run in (output.runs[0], output.runs[3]):
        expected = ms.train_loop(init(run.hyperparameters), LOADER, **options)
        assert run.history.names() == expected.history.names()
        for name in ("loss", "loss_test", "error_test"):
            close(run.history.collect(name), expected.history.collect(name))
    assert output.by("error_test").best.value("error_test") == min(run.value("error_test") for run in output)
    assert ms.test_loop(output.best.state, LOADER, key=KEY).history.collect("loss")


def test_a_test_that_differs_between_runs_is_refused():
    def init(hyperparameters):
        return ms.managed.ManagedState.create(PARAMS, SGD, apply_fn=lambda x: hyperparameters["lr"] * x)

    def evaluate(state, batch):
        return ms.logs().add_metric("loss", state.apply_fn(jnp.ones(())))

    with pytest.raises(ValueError, match=r"one evaluate for all runs. Those of runs 0 and 2 differ, .*\(apply_fn\)"):
        ms.sweep(
            managed_step, GRID, init, LOADER, test_step=evaluate, test_dataset=LOADER, stop=ms.at(epochs=1), key=KEY
        )


def lines(folder, name):
    records = [json.loads(line) for line in (folder / name / "record.jsonl").read_text().splitlines()]
    return {line["steps"]: line["logged"] for line in records if "logged" in line}


def test_records_of_all_runs_are_compared_in_one_page(tmp_path):
    folder = tmp_path / "sweep"
    output = ms.sweep(step, GRID, init, LOADER, stop=12, key=KEY, directory=folder, at_once=3)
    names = ["0-lr=0.3-seed=0", "1-lr=0.3-seed=1", "2-lr=0.01-seed=0", "3-lr=0.01-seed=1"]
    assert sorted(path.name for path in folder.iterdir()) == names
    for run in output:
        assert lines(folder, run.name) == {
            number: {"loss": loss} for number, loss in enumerate(run.history.collect("loss"), start=1)
        }
    page = write_report(sorted(folder.iterdir()), output=tmp_path / "page.html").read_text()
    assert all(name in page for name in names)
    with pytest.raises(FileExistsError, match=r"has the records of another sweep, such as \d-lr.*resume=True"):
        ms.sweep(step, GRID, init, LOADER, stop=12, key=KEY, directory=folder)


def test_a_sweep_resumes_where_it_stopped_with_whole_records(tmp_path):
    options = {"key": KEY, "at_once": 2, "resume": True}
    ms.sweep(step, GRID, init, LOADER, stop=7, directory=tmp_path / "a", **options)
    resumed = ms.sweep(step, GRID, init, LOADER, stop=12, directory=tmp_path / "a", **options)
    whole = ms.sweep(step, GRID, init, LOADER, stop=12, directory=tmp_path / "b", **options)
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours.history.collect("steps", "loss") == theirs.history.collect("steps", "loss")
        equal(ours.state, theirs.state)
        assert lines(tmp_path / "a", ours.name) == lines(tmp_path / "b", theirs.name)
    # A different grid does not continue with these states.
    other = ms.sweep(
        step, {"lr": [0.3, 0.02], "seed": [0, 1]}, init, LOADER, stop=12, directory=tmp_path / "a", **options
    )
    close(other.runs[2].history.collect("loss")[0], whole.runs[2].history.collect("loss")[0])
    assert other.runs[2].history.collect("loss")[-1] != whole.runs[2].history.collect("loss")[-1]


def test_an_interrupt_ends_it_with_what_there_is(tmp_path):
    def interrupt(state, batch, elapsed):
        if elapsed.steps == 4:
            raise KeyboardInterrupt

    class Interrupting(ms.Callback):
        def on_train_batch_end(self, state, batch, elapsed):
            interrupt(state, batch, elapsed)

    options = {"key": KEY, "at_once": 2, "directory": tmp_path / "sweep", "callbacks": [Interrupting()]}
    output = ms.sweep(step, GRID, init, LOADER, stop=12, **options)
    assert (output.interrupted, len(output)) == (True, 2)
    assert "2 runs, interrupted" in str(output)
    assert lines(tmp_path / "sweep", "0-lr=0.3-seed=0").keys() >= {1, 2}  # the step that was cut short is not written


def test_bars_and_stops_see_the_best_loss(capsys):
    seen = []

    class Look(ms.Observer):
        named_schedules = ("on_train_batch_end",)

        def observe(self, loop_state, start, stop):
            seen.extend(row.metrics.best_loss for row in loop_state.history.rows(start, stop))

    output = ms.sweep(step, GRID, init, LOADER, stop=5, key=KEY, callbacks=[Look(), ms.callbacks.console_logger()])
    losses = np.array([history.collect("loss") for history in output.histories])
    np.testing.assert_array_equal(seen, losses.min(0).astype(np.float32))
    assert output.runs[0].history.names() == ["losses.loss"]
    assert capsys.readouterr().out.splitlines()[0].startswith("step        1  epoch    0  best_loss")


def test_runs_are_divided_among_devices():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("runs",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("runs"))
    output = ms.sweep(step, GRID, init, LOADER, stop=3, key=KEY, sharding=sharding)
    assert output.runs[0].states["a"].sharding.device_set == set(jax.devices())


def test_a_table_a_picture_and_a_page():
    output = ms.sweep(step, GRID, init, LOADER, stop=30, key=KEY)
    title, header, _, *rows = str(output).splitlines()
    assert title == f"4 runs; the states of those at once take {output.nbytes} B"
    assert header.split() == ["lr", "seed", "loss", "steps"]
    assert [float(row.split()[2]) for row in rows] == sorted(float(row.split()[2]) for row in rows)
    assert output.ranked == sorted(output, key=lambda run: run.value("loss"))
    last = output.runs[0].history.collect("loss")[-3:]
    assert output.runs[0].value("loss") == pytest.approx(np.mean(last))
    page = output._repr_html_()
    assert page.count("<polyline") == 4 and "lr 0.3, seed 1" in page
    (axis,) = output.plot().axes
    assert {line.get_label() for line in axis.lines} == {
        f"lr {rate}, seed {seed}" for rate in (0.3, 0.01) for seed in (0, 1)
    }
    with pytest.raises(ValueError, match=r"Sweep.best: 'los' was never logged. Did you mean 'loss'\?"):
        output.by("los").best  # noqa: B018


def bad_shapes(hyperparameters):
    return {"a": jnp.zeros((hyperparameters["seed"] + 1,))}


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"grid": {}}, ValueError, "needs at least one hyperparameter"),
        ({"grid": 3}, TypeError, "needs a dict of lists"),
        ({"grid": {"lr": 0.1}}, ValueError, r"needs a list of values for 'lr', such as .* Got 0.1 \(float\)"),
        ({"grid": {"lr": ["adam"]}}, TypeError, r"needs numbers: .* 'lr' has 'adam' \(str\)"),
        ({"grid": {1: [0.1]}}, TypeError, r"names of hyperparameters that are text. Got 1 \(int\)"),
        ({"grid": [{"lr": 1.0}, {"rate": 1.0}]}, ValueError, "Run 0 has lr; run 1 has rate"),
        (
            {"init": bad_shapes},
            ValueError,
            r"Runs 0 and 1 differ in state\['a'\]: shape \(1,\), float32 and shape \(2,\)",
        ),
        ({"init": lambda h: {"f": jnp.tanh}}, TypeError, r"needs states of arrays. state\['f'\] is"),
        ({"init": lambda h: [0.0] * (1 + h["seed"])}, ValueError, "Runs 0 and 1 differ in it"),
        (
            {"step": 3},
            TypeError,
            r"needs a step: a managed.train_step, or a function of \(state, batch, hyperparameters\)",
        ),
        ({"optimizer": lambda h: optax.sgd(0.1)}, TypeError, "can use optimizer= only with a managed state"),
        ({"mode": "best"}, ValueError, "needs mode 'min' or 'max'"),
        ({"at_once": 0}, ValueError, "needs at_once to be an int of at least 1"),
        ({"resume": True}, ValueError, "with resume=True needs directory="),
        ({"callbacks": [ms.checkpoint("x")]}, ValueError, "give directory= and resume=True instead of ms.checkpoint"),
        ({"callbacks": 3}, TypeError, "needs callbacks as a list"),
        (
            {"step": lambda s, batch: (ms.logs().add_output("x", batch[0]["x"]), s)},
            ValueError,
            "sweep keeps numbers. <lambda> logs outputs.x. Leave that out",
        ),
        (
            {"step": managed_step, "init": lambda h: managed_init(optax.adam(h["lr"]))(h)},
            ValueError,
            r"one managed_step for all runs. Those of runs 0 and 2 differ, .* \(tx\). A learning rate: give optimizer=",
        ),
    ],
)
def test_what_cannot_be_swept_is_refused(change, kind, message):
    arguments = {"step": step, "grid": GRID, "init": init, "dataset": LOADER, "stop": 3, "key": KEY}
    with pytest.raises(kind, match=message):
        ms.sweep(**(arguments | change))


def test_an_error_says_how_much_the_states_take():
    def broken(state, batch, hyperparameters):
        raise ZeroDivisionError("in the step")

    with pytest.raises(ZeroDivisionError) as caught:
        ms.sweep(broken, GRID, init, LOADER, stop=3, key=KEY)
    notes = "\n".join(caught.value.__notes__)
    assert "sweep with 4 runs at once. Their states take 352 B" in notes and "at_once=" in notes
