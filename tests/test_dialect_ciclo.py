"""The dialect ciclo: every code block of its document runs and does what the text says."""

import pathlib
import re

import clu.metrics
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_dialect_cyreal import blocks_of, check_what_is_replaced, run

import millstream as ms
from millstream.dialects import ciclo

pytestmark = pytest.mark.optimized

DOCUMENT = pathlib.Path(__file__).parent.parent / "docs" / "coming-from" / "ciclo.md"
INSTALL, IMPORT, LOOP, TRAIN, CREATE, MANAGED, STEP, FLAX, FLAX_LOOP, BY_METHOD, BY_HAND = blocks_of("002_ciclo.md")
FILLS = {
    LOOP: {"state": "state, loss, accuracy = learned(state, batch)"},
    TRAIN: {"stuff": "_, loss, accuracy = learned(state, batch)"},
    MANAGED: {"loss": "squared_error(state.params, batch)"},
    STEP: {"loss": "squared_error(state.params, batch)"},
}


def test_only_import_lines_and_dots_are_replaced():
    assert INSTALL == "pip install ciclo\n"  # no Python, though it says so
    for block in (IMPORT, LOOP, TRAIN, CREATE, MANAGED, STEP, FLAX, FLAX_LOOP, BY_METHOD, BY_HAND):
        check_what_is_replaced(block, **FILLS.get(block, {}))


@pytest.fixture(scope="module", autouse=True)
def usual_promotion():
    """The document is written for users, who rarely set strict promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(autouse=True)
def work_in_a_folder(monkeypatch, folder):
    """What the document saves goes to a folder of each test's own."""
    monkeypatch.chdir(folder)


# A small problem: which of two classes a point is in.

POINTS = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
BATCH = {"x": POINTS, "y": (POINTS[:, 0] > POINTS[:, 1]).astype(np.int32)}


def learned(weights, batch):
    """One step of gradient descent: new weights, loss and accuracy."""

    def loss_of(weights):
        scores = batch["x"] @ weights
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"]).mean(), scores

    (loss, scores), gradient = jax.value_and_grad(loss_of, has_aux=True)(weights)
    return weights - 0.5 * gradient, loss, jnp.mean(scores.argmax(-1) == batch["y"])


def squared_error(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def given(**more):
    """What the blocks take as given."""
    known = {"jax": jax, "jnp": jnp, "optax": optax, "learned": learned, "squared_error": squared_error}
    return run(IMPORT, {**known, "train_dataset": [BATCH] * 100, "dataset": [BATCH] * 100, **more})


def create_state():
    return jnp.zeros((4, 2))


@pytest.fixture(scope="module")
def compiled(usual_promotion):
    """The train step of the first block, compiled once for all tests that use it."""
    step = re.search(r"@jax.jit\n.*?return logs, state\n", LOOP, re.DOTALL)
    assert step is not None
    namespace = {"jax": jax, "ciclo": ciclo, "learned": learned}
    return run(step.group(), namespace, **FILLS[LOOP])["train_step"]


def test_loop_runs_tasks_in_order_saves_and_shows_a_bar(capsys):
    made = run(LOOP, given(create_state=create_state), **FILLS[LOOP])
    history, elapsed = made["history"], made["elapsed"]
    losses, accuracies = history.collect("loss", "accuracy")
    assert len(history) == elapsed.steps == made["total_steps"] == 100
    assert losses[0] > 2 * losses[-1] and accuracies[-1] > 0.9
    saved = ms.restore("logdir/model", create_state())
    assert saved.elapsed.steps == 100
    np.testing.assert_array_equal(saved.state, made["state"])
    assert [ms.restore("logdir/model", create_state(), step=step).elapsed.steps for step in (80, 90)] == [80, 90]
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"100/100 \[={27}\] - .* - loss: \d\.\d+ - accuracy: \d\.\d+", last)


def test_train_loop_tests_at_the_end_of_epochs_and_registers_callbacks(compiled, capsys):
    asked, called = [], []

    class Watcher:
        def on_epoch_end(self, state, batch, elapsed):
            called.append(elapsed.steps)

    watcher = Watcher()

    def get_test_dataset():
        asked.append(len(called))
        return [BATCH, BATCH]

    def some_callback(state, batch, elapsed):
        called.append(-elapsed.steps)

    made = given(state=create_state(), train_step=compiled, get_test_dataset=get_test_dataset)
    made |= {"some_callback": some_callback, "steps_per_epoch": 25, "total_steps": 100}
    run(TRAIN, made, **FILLS[TRAIN])
    assert called == [-20, -40, -60, -80, -100]
    assert len(asked) == 4
    history = made["history"]
    assert history.collect("steps", "loss_test")[0] == [25, 50, 75, 100]
    assert len(history.collect("loss")) == 100
    assert ms.restore("logdir/model", create_state(), step=75).elapsed.steps == 75
    assert capsys.readouterr().out.splitlines()[-1].startswith("100/100 [===========================]")
    tasks = {ciclo.on_train_step: [compiled]}
    ciclo.train_loop(create_state(), [BATCH] * 4, tasks, callbacks=[watcher], epoch_duration=2)
    assert called[5:] == [2, 4]


@pytest.mark.parametrize("strategy", ["jit", "data-parallel", "eager"])
def test_managed_steps_follow_the_loss_under_every_strategy(strategy, capsys):
    made = given(params={"w": jnp.zeros(4)}, train_dataset=[BATCH] * 5)
    run(CREATE, made)
    assert made["state"].strategy == ciclo.get_strategy("jit")
    made["state"] = made["managed"].ManagedState.create(params=made["params"], tx=optax.adamw(1e-2), strategy=strategy)
    run(MANAGED, made, **FILLS[MANAGED])
    losses = [float(line.removeprefix("loss: ")) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == int(made["state"].step) == 5
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
    before = made["state"]
    run(STEP, made, **FILLS[STEP])
    logs, state = made["test_step"](before, BATCH)
    assert float(logs.metrics.loss) < losses[-1]
    np.testing.assert_array_equal(state.params["w"], before.params["w"])


@flax.struct.dataclass
class AverageLoss(clu.metrics.Average.from_output("loss")):
    """A metric of the user's own."""


def test_a_flax_state_brings_its_steps(capsys):
    batch = np.random.default_rng(1).integers(0, 256, (8, 28, 28, 1), np.uint8), np.arange(8, dtype=np.int32)
    made = given(train_dataset=[batch] * 6, get_test_dataset=lambda: [batch], total_steps=6, steps_per_epoch=3)
    made |= {"Accuracy": clu.metrics.Accuracy, "AverageLoss": AverageLoss}
    made["cross_entropy_loss"] = lambda preds, target: optax.softmax_cross_entropy_with_integer_labels(preds, target)
    run(FLAX, made)
    run(FLAX_LOOP, made)
    history = made["history"]
    steps, tested, accuracy, average = history.collect("steps", "loss_test", "accuracy_test", "avg_loss_test")
    assert steps == [3, 6] and tested[1] < tested[0]
    assert average == pytest.approx(tested)
    assert 0 <= accuracy[0] <= accuracy[1] <= 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("6/6 [")
    run(BY_METHOD, made)
    losses = [float(line.removeprefix("loss: ")) for line in capsys.readouterr().out.splitlines()]
    assert losses == sorted(losses, reverse=True) and int(made["state"].step) == 12


def test_parts_of_a_loop_work_by_hand(compiled, capsys):
    made = given(train_step=compiled, state=create_state(), train_dataset=[BATCH] * 1500, total_steps=1000)
    run(BY_HAND, made)
    losses = made["history"].collect("loss")
    assert len(losses) == made["elapsed"].steps == 1000 and losses[-1] < losses[0]
    made["checkpoint"].close()
    saved = ms.restore("logdir/model", create_state())
    assert saved.elapsed.steps == 1000
    np.testing.assert_array_equal(saved.state, made["state"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("1000/1000 [===========================]")


def test_methods_of_a_state_are_registered_by_their_names():
    class Counting:
        def __init__(self, steps=0, tests=0):
            self.steps, self.tests = steps, tests

        def train_step(self, batch):
            return ciclo.logs().add_metric("tests", self.tests), Counting(self.steps + 1, self.tests)

        def test_step(self, batch):
            return ciclo.logs().add_metric("steps", self.steps)

    state, history, _ = ciclo.train_loop(
        Counting(), [BATCH] * 6, test_dataset=lambda: [BATCH] * 4, epoch_duration=3, stop=6
    )
    assert state.steps == 6
    assert history.collect("steps_test") == [3, 6]
