"""The dialect ciclo: programs that do what each of the library's six examples does, by the same calls."""

from typing import Any

import clu.metrics
import flax.linen as nn
import flax.struct
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.core import Tracer
from test_bad_input import refuses

import millstream as ms
from millstream.dialects import ciclo
from millstream.dialects.ciclo import managed

pytestmark = pytest.mark.optimized

BATCH, STEPS = 8, 20
RNG = np.random.default_rng(0)
LABELS = np.tile(np.arange(10, dtype=np.int32), 8)
IMAGES = (RNG.integers(0, 64, (80, 4, 4, 1)) + 190 * np.eye(16).reshape(16, 4, 4, 1)[LABELS]).astype(np.uint8)


@pytest.fixture(scope="module", autouse=True)
def usual_promotion():
    """The programs are written for users, who rarely set strict promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(autouse=True)
def work_in_a_folder(monkeypatch, folder):
    monkeypatch.chdir(folder)


def batches(count=None):
    """Batches of images, in turn; without end if no number is given."""
    number = 0
    while count is None or number < count:
        rows = np.arange(number * BATCH, (number + 1) * BATCH) % len(IMAGES)
        yield {"image": IMAGES[rows], "label": LABELS[rows]}
        number += 1


class Linear(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(features=10)((x / 255.0).reshape((x.shape[0], -1)))


MODEL = Linear()
PARAMS = MODEL.init(jax.random.PRNGKey(0), jnp.empty((1, 4, 4, 1)))["params"]
TX = optax.adamw(3e-2)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=labels).mean()


def learned(state, batch):
    """One step of gradient descent: the next state, the loss and the logits."""

    def loss_of(params):
        logits = state.apply_fn({"params": params}, batch["image"])
        return cross_entropy(logits, batch["label"]), logits

    (loss, logits), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), loss, logits


def share_right(logits, labels):
    return jnp.mean(jnp.argmax(logits, -1) == labels)


@pytest.fixture(scope="module")
def train_step(usual_promotion):
    @jax.jit
    def train_step(state, batch):
        state, loss, logits = learned(state, batch)
        logs = ciclo.logs()
        logs.add_metrics(loss=loss, accuracy=share_right(logits, batch["label"]))
        return logs, state

    return train_step


def new_train_state():
    state = flax.training.train_state.TrainState.create(apply_fn=MODEL.apply, params=PARAMS, tx=TX)
    return state.replace(step=jnp.int32(0))  # as it is after a step, to compare it with what was saved


# The programs


def test_00_linear_regression_in_pure_jax(capsys):
    x = np.linspace(0, 1, 100, dtype=np.float32)
    y = 0.8 * x + 0.1

    def dataset(batch_size):
        while True:
            rows = RNG.choice(len(x), size=batch_size)
            yield x[rows], y[rows]

    @jax.jit
    def train_step(state, batch):
        loss, grads = jax.value_and_grad(lambda s: jnp.mean((s["w"] * batch[0] + s["b"] - batch[1]) ** 2))(state)
        logs = ciclo.logs()
        logs.add_metric("loss", loss)
        return logs, jax.tree_util.tree_map(lambda w, g: w - 0.5 * g, state, grads)

    @jax.jit
    def test_step(state):
        logs = ciclo.logs()
        logs.add_metric("mse", jnp.mean((state["w"] * x + state["b"] - y) ** 2))
        return logs

    state, history, elapsed = ciclo.loop(
        state={"w": 0.0, "b": 0.0},
        dataset=dataset(batch_size=32),
        tasks={
            ciclo.every(100): [test_step],
            ciclo.every(1): [train_step, ciclo.keras_bar(total=300)],
        },
        stop=300,
    )
    assert elapsed.steps == 300 and float(state["w"]) == pytest.approx(0.8, abs=0.05)
    assert len(history.collect("mse")) == 3
    assert capsys.readouterr().out.splitlines()[-1].startswith("300/300 [")


def test_01_a_simple_loop_with_a_callback_unpacked_into_it(train_step, capsys):
    state, history, _ = ciclo.loop(
        new_train_state(),
        batches(),
        {
            ciclo.every(1): train_step,
            ciclo.every(STEPS // 2): ciclo.checkpoint("logdir/simple"),
            **ciclo.keras_bar(total=STEPS),
        },
        stop=STEPS,
    )
    steps, loss, accuracy = history.collect("steps", "loss", "accuracy")
    assert len(steps) == STEPS and loss[-1] < loss[0] and accuracy[-1] > accuracy[0]
    assert ms.restore("logdir/simple", new_train_state()).elapsed.steps == int(state.step) == STEPS
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{STEPS}/{STEPS} [")


def test_02_train_loop_with_a_collection_of_metrics(capsys):
    @flax.struct.dataclass
    class Metrics(clu.metrics.Collection):
        loss: clu.metrics.Average.from_output("loss")  # type: ignore[valid-type]
        accuracy: clu.metrics.Accuracy

        def update(self, **kwargs):
            return self.merge(self.single_from_model_output(**kwargs))

    class TrainState(flax.training.train_state.TrainState):
        metrics: Metrics

    @jax.jit
    def train_step(state, batch):
        state, loss, logits = learned(state, batch)
        metrics = state.metrics.update(loss=loss, logits=logits, labels=batch["label"])
        logs = ciclo.logs()
        logs.add_stateful_metrics(**metrics.compute())
        return logs, state.replace(metrics=metrics)

    @jax.jit
    def test_step(state, batch):
        logits = state.apply_fn({"params": state.params}, batch["image"])
        loss = cross_entropy(logits, batch["label"])
        metrics = state.metrics.update(loss=loss, logits=logits, labels=batch["label"])
        logs = ciclo.logs()
        logs.add_stateful_metrics(**metrics.compute())
        return logs, state.replace(metrics=metrics)

    def reset_step(state):
        return state.replace(metrics=state.metrics.empty())

    state, history, _ = ciclo.train_loop(
        TrainState.create(apply_fn=MODEL.apply, params=PARAMS, tx=TX, metrics=Metrics.empty()),
        batches(),
        {
            ciclo.on_train_step: [train_step],
            ciclo.on_test_step: [test_step],
            ciclo.on_reset_step: [reset_step],
        },
        callbacks=[
            ciclo.checkpoint("logdir/train_loop", monitor="accuracy_test", mode="max"),
            ciclo.keras_bar(total=STEPS),
        ],
        test_dataset=lambda: batches(2),
        epoch_duration=STEPS // 4,
        stop=STEPS,
    )
    steps_test, loss_test, accuracy_test = history.collect("steps", "loss_test", "accuracy_test")
    assert steps_test == [5, 10, 15, 20] and loss_test[-1] < loss_test[0] and accuracy_test[-1] > accuracy_test[0]
    assert len(history.collect("loss")) == STEPS and int(state.step) == STEPS
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{STEPS}/{STEPS} [")


def test_03_iterating_by_hand(train_step, capsys):
    due = ciclo.every(steps=8)
    checkpoint = ciclo.checkpoint("logdir/by_hand")
    keras_bar = ciclo.keras_bar(total=STEPS)
    end_period = ciclo.at(STEPS)
    state, history = new_train_state(), ciclo.history()
    for elapsed, batch in ciclo.elapse(batches()):
        logs, state = train_step(state, batch)
        if due(elapsed):
            checkpoint(elapsed, state)
        keras_bar(elapsed, logs)
        history.commit(elapsed, logs)
        if elapsed >= end_period:
            break
    checkpoint.close()
    steps, loss, accuracy = history.collect("steps", "loss", "accuracy")
    assert steps == list(range(1, STEPS + 1)) and loss[-1] < loss[0] and accuracy[-1] > accuracy[0]
    assert ms.restore("logdir/by_hand", new_train_state()).elapsed.steps == 16
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{STEPS}/{STEPS} [")


AverageLoss = clu.metrics.Average.from_output("loss")


class MetricsState(managed.ManagedState):
    accuracy: clu.metrics.Accuracy
    loss: AverageLoss  # type: ignore[valid-type]


def loss_fn(state, batch):
    logits = state.apply_fn({"params": state.params}, batch["image"])
    loss = cross_entropy(logits, batch["label"])
    logs = ciclo.logs()
    logs.add_loss("loss", loss)
    logs.add_stateful_metric("accuracy", clu.metrics.Accuracy.from_model_output(logits=logits, labels=batch["label"]))
    logs.add_stateful_metric("loss", AverageLoss.from_model_output(loss=loss))
    return logs, state


@managed.step
def reset_metrics(state):
    return state.replace(accuracy=clu.metrics.Accuracy.empty(), loss=AverageLoss.empty())


def new_metrics_state(strategy):
    return MetricsState.create(
        apply_fn=MODEL.apply,
        params=PARAMS,
        tx=TX,
        accuracy=clu.metrics.Accuracy.empty(),
        loss=AverageLoss.empty(),
        strategy=strategy,
    )


@pytest.mark.parametrize("offset", ["steps_offset", "after"])
def test_04_the_managed_api_with_metrics_in_the_state(offset, capsys):
    strategy = ciclo.get_strategy("jit")
    batch_size = strategy.lift_batch_size(BATCH)
    total_samples, total_steps = STEPS * batch_size, STEPS
    train_step, eval_step = managed.train_step(loss_fn), managed.step(loss_fn)
    due = ciclo.every(5, steps_offset=1) if offset == "steps_offset" else ciclo.after(1).every(5)
    state, history, *_ = ciclo.loop(
        new_metrics_state(strategy),
        batches(),
        {
            **train_step,
            due: [
                reset_metrics,
                ciclo.inner_loop(
                    "valid", lambda state: ciclo.loop(state, batches(2), {ciclo.every(steps=1): eval_step})
                ),
                ciclo.checkpoint("logdir/managed", monitor="accuracy_valid", mode="max", keep=3),
                ciclo.early_stopping(monitor="accuracy_valid", mode="max", patience=100),
                reset_metrics,
            ],
            **ciclo.keras_bar(total=total_steps),
        },
        stop=ciclo.at(samples=total_samples),
    )
    steps, loss_valid, accuracy_valid = history.collect("steps", "loss_valid", "accuracy_valid")
    assert steps == [6, 11, 16] and loss_valid[-1] < loss_valid[0] and accuracy_valid[-1] > accuracy_valid[0]
    # From one reset to the next, metrics stand for all batches so far.
    stateful = [row["stateful_metrics"]["loss"] for row in history.rows(0, 6)]
    losses = history.collect("losses.loss")[:6]
    assert stateful == pytest.approx([np.mean(losses[: number + 1]) for number in range(6)])
    (after_reset,) = history.rows(6, 7)
    assert after_reset["stateful_metrics"]["loss"] == pytest.approx(after_reset["losses"]["loss"])
    assert int(state.step) == STEPS and int(state.loss.count) == 4
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{STEPS}/{STEPS} [")


@flax.struct.dataclass
class Accuracy(clu.metrics.Accuracy):
    @classmethod
    def from_model_output(cls, *, preds, target, **_):
        return super().from_model_output(logits=preds, labels=target)


@pytest.fixture(scope="module")
def flax_state(usual_promotion):
    def cross_entropy_loss(*, preds, target, **_):
        return cross_entropy(preds, target)

    return ciclo.create_flax_state(
        MODEL,
        inputs=jnp.empty((1, 4, 4, 1)),
        tx=TX,
        losses={"loss": cross_entropy_loss},
        metrics={"accuracy": Accuracy, "avg_loss": AverageLoss},
    )


def test_05_a_flax_state_with_metrics_of_its_own(flax_state, capsys):
    def pairs(count=None):
        return ((batch["image"], batch["label"]) for batch in batches(count))

    _, history, _ = ciclo.train_loop(
        flax_state,
        pairs(),
        callbacks=[
            ciclo.keras_bar(total=STEPS),
            ciclo.checkpoint("logdir/flax_state", monitor="accuracy_test", mode="max"),
        ],
        test_dataset=lambda: pairs(2),
        epoch_duration=STEPS // 2,
        stop=STEPS,
    )
    names = ("steps", "avg_loss", "accuracy", "avg_loss_test", "accuracy_test")
    steps, avg_loss, accuracy, avg_loss_test, accuracy_test = history.collect(*names)
    assert steps == [10, 20] and avg_loss[1] < avg_loss[0] and avg_loss_test[1] < avg_loss_test[0]
    assert accuracy[1] > accuracy[0] and accuracy_test[1] >= accuracy_test[0]
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{STEPS}/{STEPS} [")


def test_steps_of_a_users_own_work_on_flax_states(flax_state):
    kernel = flax_state.params["Dense_0"]["kernel"]
    halve = managed.step(lambda state: state.replace(params=jax.tree_util.tree_map(lambda p: p / 2, state.params)))
    _, new = halve(flax_state)
    assert isinstance(new, ciclo.FlaxState)
    np.testing.assert_array_equal(new.params["Dense_0"]["kernel"], kernel / 2)
    decay = managed.train_step(
        lambda state, batch: ciclo.logs().add_loss("loss", jnp.sum(state.params["Dense_0"]["kernel"] ** 2))
    )
    logs, new = decay(flax_state, None)
    assert int(new.step) == 1 and float(logs.losses.loss) == pytest.approx(float(jnp.sum(kernel**2)))


# Logs


def test_logs_take_several_entries_as_keywords():
    logs = ciclo.logs().add_metrics(loss=1, accuracy=2).add_stateful_metrics(a=3).add_outputs(preds=4)
    logs.add_losses(loss=5, penalty=6).add_entries("lengths", words=7)
    assert logs == {
        "metrics": {"loss": 1, "accuracy": 2},
        "stateful_metrics": {"a": 3},
        "outputs": {"preds": 4},
        "losses": {"loss": 5, "penalty": 6},
        "lengths": {"words": 7},
    }
    assert ciclo.logs().add_losses(loss=5, add_metrics=True) == {"losses": {"loss": 5}, "metrics": {"loss": 5}}


def test_entries_may_have_the_names_of_arguments():
    values = {"self": 1, "metrics": 2, "entries": 3, "collection": 4}
    assert ciclo.logs().add_metrics(**values).metrics == values
    assert ciclo.logs().add_entries("own", **values).own == values


def test_logs_can_begin_with_collections():
    given = {"metrics": {"loss": 1}}
    logs = ciclo.logs(given).add_metric("accuracy", 2)
    assert logs == {"metrics": {"loss": 1, "accuracy": 2}} and given == {"metrics": {"loss": 1}}
    assert ciclo.logs(losses={"loss": 3}).losses.loss == 3


# Callbacks and steps as mappings


class Doubling(ciclo.LoopCallbackBase):
    def __loop_callback__(self, loop_state):
        return ciclo.logs(), loop_state.state * 2


@pytest.mark.parametrize(
    "element",
    [
        Doubling(),
        ciclo.callback(lambda state: state * 2),
        ciclo.inner_loop(lambda state: ciclo.loop(state, [1], {ciclo.every(1): Doubling()}), output_state=True),
    ],
)
def test_a_callback_unpacked_is_due_at_every_step(element):
    assert ciclo.loop(1, range(3), {**element}).state == 8
    assert ciclo.loop(1, range(3), {**element, **ciclo.noop}).state == 8


def test_a_callback_by_itself_is_what_it_was():
    bar = ciclo.keras_bar(total=3)
    assert isinstance(bar, ciclo.LoopElement)
    assert ciclo.loop(1, range(4), {ciclo.every(2): ciclo.callback(lambda state: state * 2)}).state == 4
    stop = ciclo.early_stopping("x", patience=2, mode="max")
    step = ciclo.callback(lambda state, batch: ciclo.logs().add_metric("x", -batch))
    assert ciclo.loop(None, range(9), {**step, **stop}).elapsed.steps == 3
    assert stop.best_value == 0  # and its attributes are there


def test_a_bar_of_tqdm_takes_the_batch_by_hand(capsys):
    bar = ciclo.tqdm_bar(total=2)
    for elapsed, batch in ciclo.elapse([{"loss": np.ones(3)}] * 2):
        bar(elapsed, batch)
    shown = capsys.readouterr().err
    assert "2/2" in shown and "loss" not in shown


def test_inject_hands_over_as_many_arguments_as_a_function_takes():
    class Adder:
        def two(self, x, y):
            return x + y

        def __call__(self, x):
            return x

    assert ciclo.inject(lambda x, y, z: x + y + z)(1, 2, 3) == 6
    assert ciclo.inject(Adder().two)(1, 2, 3) == 3
    assert ciclo.inject(Adder())(1, 2, 3) == 1


# Schedules


def due_at(schedule, steps=30):
    return [step for step in range(1, steps) if schedule(ciclo.Elapsed(steps=step))]


def test_every_counts_from_an_offset():
    assert due_at(ciclo.every(10, steps_offset=3)) == due_at(ciclo.after(3).every(10)) == [13, 23]
    assert due_at(ciclo.every(10)) == due_at(ciclo.every(steps=10, steps_offset=0)) == [10, 20]
    with refuses(ValueError, "every", "steps_offset", "-1"):
        ciclo.every(10, steps_offset=-1)
    with refuses(ValueError, "every", "steps_offset", "samples"):
        ciclo.every(samples=10, steps_offset=1)


def test_dates_are_timestamps_too():
    assert ciclo.Elapsed(date_start=100.0) >= ciclo.at(date=99.0)
    assert not ciclo.Elapsed(date_start=100.0) >= ciclo.at(date=101.0)
    assert due_at(ciclo.piecewise(schedule=ciclo.every(2), period_schedules={ciclo.at(4): ciclo.never()}), 9) == [2]


# Samples


def counted(**options):
    return [elapsed.samples for elapsed, _ in ciclo.elapse([np.full((3, 2), 7.0)] * 3, **options)]


def test_batch_size_fn_gets_the_shapes():
    assert counted(batch_size_fn=lambda shapes: min(shape[0] for shape in shapes)) == [3, 6, 9]
    seen = []

    def size(shapes):
        seen.append(shapes)
        return shapes[0][1]

    tasks: dict[Any, Any] = {ciclo.on_train_step: lambda state: state, ciclo.on_test_step: lambda state: state}
    batch = {"a": np.ones((2, 5)), "b": 3, "c": np.float32(1)}
    elapsed = ciclo.train_loop(
        0, [batch] * 2, tasks, test_dataset=lambda: [batch], epoch_duration=2, batch_size_fn=size
    ).elapsed
    assert elapsed.samples == 10 and seen == [[(2, 5), (1,), (1,)]] * 3
    for loop, name in ((ciclo.test_loop, ciclo.on_test_step), (ciclo.predict_loop, ciclo.on_predict_step)):
        assert loop(0, [batch], {name: lambda state: None}, batch_size_fn=size).elapsed.samples == 5
    assert ciclo.loop(0, [batch], {}, batch_size_fn=size).elapsed.samples == 5
    assert ciclo.loop(0, [()], {}, batch_size_fn=size).elapsed.samples == 1


def test_elapse_takes_its_arguments_by_position():
    steps = [elapsed.steps for elapsed, _ in ciclo.elapse(range(9), ciclo.Elapsed(steps=2), 4)]
    assert steps == [3, 4]


# Managed states


@flax.struct.dataclass
class Process:
    betas: jax.Array


class Diffusion(managed.ManagedState):
    key: jax.Array
    ema_params: Any
    process: Process
    options: dict[str, Any]
    loss_scale: float
    config: int = flax.struct.field(pytree_node=False)
    loss_fn: Any = flax.struct.field(pytree_node=False)

    @classmethod
    def create(cls, *, params, key, **fields):
        return super().create(params=params, key=key, ema_params=params, **fields)


def new_diffusion(strategy) -> Any:
    return Diffusion.create(
        params={"w": jnp.ones(3)},
        tx=optax.sgd(0.5),
        key=jax.random.PRNGKey(0),
        process=Process(jnp.ones(2)),
        options={"rate": 0.5},
        loss_scale=2.0,
        config=1,
        loss_fn=squared,
        strategy=strategy,
    )


def squared(w, noise):
    return jnp.sum((w + 0 * noise) ** 2) / 2


@managed.train_step
def ema_step(state, batch):
    noise = state.key.sum() * state.process.betas.sum() * state.config
    ema = jax.tree_util.tree_map(lambda e, p: e + state.options["rate"] * (p - e), state.ema_params, state.params)
    logs = ciclo.logs()
    logs.add_loss("loss", state.loss_fn(state.params["w"], noise))
    return logs, state.replace(ema_params=ema, loss_scale=state.loss_scale + 1)


@pytest.mark.parametrize(
    "strategy", ["eager", "jit", "jit_donate", "data_parallel", "data_parallel_donate", "data-parallel"]
)
def test_a_managed_state_may_have_fields_of_any_name(strategy):
    state = new_diffusion(strategy)
    assert issubclass(type(state), flax.training.train_state.TrainState)
    for number in range(2):
        logs, state = ema_step(state, None)
        assert float(logs.losses.loss) == pytest.approx(1.5 * 0.25**number)
    assert float(state.params["w"][0]) == 0.25 and float(state.ema_params["w"][0]) == 0.75
    assert float(state.loss_scale) == 4 and state.config == 1 and int(state.step) == 2


def test_a_step_is_compiled_once():
    traced = []

    @managed.step
    def count(state, batch):
        traced.append(batch)
        return state.replace(loss_scale=state.loss_scale + 1)

    state = new_diffusion("jit")
    for _ in range(3):
        _, state = count(state, np.ones(2, np.float32))
    assert len(traced) == 1 and float(state.loss_scale) == 5


def test_a_train_step_applies_gradients_as_the_state_says():
    class Averaging(managed.ManagedState):
        ema_params: Any

        def apply_gradients(self, *, grads, **kwargs):
            new = super().apply_gradients(grads=grads, **kwargs)
            return new.replace(ema_params=new.params)

    state = Averaging.create(params=jnp.ones(2), tx=optax.sgd(0.5), ema_params=None)
    step = managed.train_step(lambda state: ciclo.logs().add_loss("loss", jnp.sum(state.params)))
    _, state = step(state)
    np.testing.assert_array_equal(state.ema_params, [0.5, 0.5])


def test_a_state_can_change_its_strategy():
    state = new_diffusion("jit").with_strategy("eager")
    assert state.strategy == ciclo.get_strategy("eager") and state.with_strategy(state.strategy) is state
    kept = state.params["w"]
    donating = state.with_strategy("jit_donate")
    ema_step(donating, None)
    np.testing.assert_array_equal(kept, 1)  # it had arrays of its own
    with refuses(RuntimeError, "ema_step", "donates"):
        ema_step(donating, None)


def test_a_step_that_minimises_nothing_keeps_a_donated_state():
    state = new_diffusion("jit_donate")
    measure = managed.step(lambda state: ciclo.logs().add_metric("sum", state.params["w"].sum()))
    assert [float(measure(state)[0].metrics.sum) for _ in range(2)] == [3, 3]


def test_steps_are_methods_of_states():
    class State(managed.ManagedState):
        @managed.train_step
        def train_step(self, batch):
            return ciclo.logs().add_loss("loss", jnp.sum(self.params * batch))

        @managed.step
        def test_step(self, batch, elapsed):
            return ciclo.logs().add_metric("loss", jnp.sum(self.params * batch) * elapsed.steps)

    state = State.create(params=jnp.ones(2), tx=optax.sgd(0.5))
    logs, new = state.train_step(np.ones(2, np.float32))
    assert float(logs.losses.loss) == 2 and float(new.params.sum()) == 1
    data = [np.ones(2, np.float32)] * 2
    _, history, _ = ciclo.train_loop(state, data, test_dataset=lambda: data, epoch_duration=2)
    assert history.collect("losses.loss") == [2, 1] and history.collect("loss_test") == [0]


def test_a_step_runs_plain_train_states_by_its_own_strategy():
    state = flax.training.train_state.TrainState.create(apply_fn=len, params={"w": jnp.ones(3)}, tx=optax.sgd(0.5))
    compiled = []

    def step(state):
        compiled.append(isinstance(state.step, Tracer))
        return ciclo.logs().add_loss("loss", jnp.sum(state.params["w"]))

    for strategy in ("eager", "jit"):
        logs, new = managed.train_step(step, strategy)(state)
        assert int(new.step) == 1 and float(logs.losses.loss) == 3
    assert compiled == [False, True]


def test_a_step_says_what_it_may_take():
    for fn in (lambda state, batch, elapsed, statics: state, lambda state, *, rate: state):
        with refuses(TypeError, "(state, batch, elapsed)", "<lambda> takes (state", "functools.partial"):
            managed.step(fn)
    with refuses(TypeError, "(state, batch, elapsed)", "Got 'jit'"):
        managed.train_step("jit")  # type: ignore[arg-type]


def test_steps_are_fused_over_a_loader():
    data = ms.ArraySampleSource({"x": np.arange(8, dtype=np.float32)}, ordering="sequential")
    loader = ms.DataLoader([data, ms.BatchTransform(batch_size=2)])

    @managed.train_step
    def step(state, batch, elapsed):
        return ciclo.logs().add_loss("loss", jnp.sum(state.params["w"]) * elapsed.steps + jnp.sum(batch[0]["x"]))

    def run(**options):
        state = managed.ManagedState.create(params={"w": jnp.ones(1)}, tx=optax.sgd(0.125))
        return ciclo.loop(state, loader, {**step}, stop=4, **options).history.collect("loss")

    assert run() == run(fuse=2) == pytest.approx([2, 6.75, 10.875, 14])


def test_a_step_says_what_it_may_return():
    state = new_diffusion("eager")
    with refuses(TypeError, "wrong", "logs(), a state, or (logs, state)", "dict"):

        @managed.step
        def wrong(state):
            return {"loss": 1.0}

        wrong(state)
    with refuses(ValueError, "no_loss", "at least one loss"):

        @managed.train_step
        def no_loss(state):
            return state

        no_loss(state)


# Strategies


def test_lift_batch_size_says_how_many_rows_all_devices_have():
    for name in ("eager", "jit", "jit_donate"):
        assert ciclo.get_strategy(name).lift_batch_size(32) == 32
    assert ciclo.get_strategy("data_parallel").lift_batch_size(32) == 32 * jax.device_count()
    with refuses(ValueError, "lift_batch_size", "at least 1", "0"):
        ciclo.get_strategy("jit").lift_batch_size(0)


# What a checkpoint keeps


def test_a_monitored_checkpoint_keeps_the_best_and_the_latest():
    def step(state, batch):
        return ciclo.logs().add_metric("score", batch), state + 1

    checkpoint = ciclo.checkpoint("logdir", monitor="score", mode="max", keep=1)
    ciclo.loop(np.int32(0), [1.0, 3.0, 2.0], {ciclo.every(1): [step, checkpoint]})
    with ms.checkpoints.CheckpointStore("logdir") as store:
        assert store.steps() == [2, 3]
    checkpoint = ciclo.checkpoint("every", keep=1, keep_every_n_steps=2)
    ciclo.loop(np.int32(0), [1.0] * 5, {ciclo.every(1): [step, checkpoint]})
    with ms.checkpoints.CheckpointStore("every") as store:
        assert store.steps() == [2, 4, 5]


def test_a_checkpoint_by_hand_takes_logs_to_monitor():
    checkpoint = ciclo.checkpoint("logdir", monitor="score", mode="max", keep=1)
    for elapsed, score in ciclo.elapse([1.0, 3.0, 2.0]):
        checkpoint(elapsed, np.int32(elapsed.steps), ciclo.logs().add_metric("score", score))
    checkpoint.close()
    with ms.checkpoints.CheckpointStore("logdir") as store:
        assert store.steps() == [2, 3]
