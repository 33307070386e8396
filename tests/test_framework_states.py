"""States of models in four frameworks: the same steps, the same loops, the same answers."""

import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import flax.struct
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_trees_equal
from flax import nnx

import millstream as ms
from millstream.states.equinox import create_equinox_state
from millstream.states.haiku import create_haiku_state
from millstream.states.linen import create_flax_state
from millstream.states.nnx import create_nnx_state

pytestmark = pytest.mark.optimized

KEY = jax.random.key(7, impl="rbg")  # of all kinds of keys the one that compiles fastest
TX = optax.sgd(0.05, momentum=0.9)
WIDTH, RATE = 24, 0.2


@pytest.fixture
def usual_promotion():
    """Other packages are rarely written for strict promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


# One model, in four frameworks


def pixels(images):
    return images.reshape(images.shape[0], -1).astype(jnp.float32) / 255


class Linen(nn.Module):
    @nn.compact
    def __call__(self, images, training):
        x = nn.Dense(WIDTH)(pixels(images))
        x = nn.BatchNorm(use_running_average=not training, momentum=0.8)(x)
        x = nn.Dropout(RATE, deterministic=not training)(nn.relu(x))
        return nn.Dense(10)(x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(64, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 10, rngs=rngs)])
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.8, rngs=rngs)
        self.dropout = nnx.Dropout(RATE, rngs=rngs)

    def __call__(self, images):
        return self.layers[1](self.dropout(nnx.relu(self.norm(self.layers[0](pixels(images))))))


class Equinox(eqx.Module):
    layers: list[eqx.nn.Linear]
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.layers = [eqx.nn.Linear(64, WIDTH, key=first), eqx.nn.Linear(WIDTH, 10, key=second)]
        self.norm = eqx.nn.BatchNorm(WIDTH, "batch", momentum=0.8, mode="ema")
        self.dropout = eqx.nn.Dropout(RATE)

    def __call__(self, image, state, *, key):
        x, state = self.norm(self.layers[0](pixels(image[None])[0]), state)
        return self.layers[1](self.dropout(jax.nn.relu(x), key=key)), state


def haiku(images, is_training):
    with jax.numpy_dtype_promotion("standard"):
        x = hk.BatchNorm(True, True, 0.8)(hk.Linear(WIDTH)(pixels(images)), is_training)
        x = hk.dropout(hk.next_rng_key(), RATE, jax.nn.relu(x)) if is_training else jax.nn.relu(x)
        return hk.Linear(10)(x)


def cross_entropy(preds, target):
    return optax.softmax_cross_entropy_with_integer_labels(preds, target)


def accuracy(preds, target):
    return preds.argmax(-1) == target


IMAGES = jnp.empty((1, 8, 8, 1), jnp.uint8)
FRAMEWORKS = ["linen", "nnx", "equinox", "haiku"]


@functools.cache
def start(framework) -> Any:
    """One state for many tests: programs are compiled for its model."""
    options: dict[str, Any] = {"losses": {"loss": cross_entropy}, "metrics": {"accuracy": accuracy}}
    if framework == "linen":
        return create_flax_state(Linen(), IMAGES, TX, key=KEY, **options)
    if framework == "nnx":
        return create_nnx_state(Nnx(nnx.Rngs(KEY)), TX, **options)
    if framework == "haiku":
        return create_haiku_state(hk.transform_with_state(haiku), IMAGES, TX, key=KEY, **options)
    module, state = eqx.nn.make_with_state(Equinox)(KEY)
    return create_equinox_state(module, TX, state=state, key=KEY, **options)


DIGITS = {split: ms.datasets.DigitsDataset(split).as_array_dict() for split in ("train", "test")}
SIZES = {"train": 480, "test": 359}  # batches of 120; the last one of the test has an odd row to fill


@functools.cache
def digits(split):
    samples = {name: rows[: SIZES[split]] for name, rows in DIGITS[split].items()}
    source = ms.ArraySampleSource(samples, "shuffle" if split == "train" else "sequential")
    return ms.DataLoader([source, ms.BatchTransform(120)])


def train(state, epochs=3, **options):
    options = {"test_dataset": digits("test"), "stop": ms.at(epochs=epochs), "key": jax.random.key(1)} | options
    return ms.train_loop(state, digits("train"), **options)


@functools.cache
def trained(framework):
    return train(start(framework))


@functools.cache
def trained_with(framework, strategy):
    """A shorter run under another strategy, from arrays of its own."""
    strategy = ms.managed.get_strategy(strategy)
    return train(strategy.place(jax.tree.map(jnp.copy, start(framework))).replace(strategy=strategy), epochs=2)


@pytest.fixture(params=FRAMEWORKS)
def framework(request):
    return request.param


def plain(tree):
    """A tree whose keys are arrays of numbers, which can be compared."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, tree)


def is_key(leaf):
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


BATCH = (
    {name: rows[:120] for name, rows in DIGITS["train"].items()},
    np.ones(120, bool),
)

# In loops


def test_a_classifier_learns_and_is_tested_on_every_real_sample_once_per_epoch(framework):
    output = trained(framework)
    steps, losses, accuracies = output.history.collect("steps", "loss_test", "accuracy_test")
    assert steps == [4, 8, 12] and losses[-1] < 0.8 * losses[0] < 2
    first, *_, last = output.history.collect("metrics.loss")
    assert last < 0.6 * first and accuracies[-1] > 0.5
    preds = ms.predict_loop(output.state, digits("test"), key=KEY).outputs["preds"]
    labels = DIGITS["test"]["label"]
    assert preds.shape == (359, 10)
    assert accuracies[-1] == np.float32((preds.argmax(-1) == labels).mean())
    expected = np.mean(np.log(np.exp(preds).sum(-1)) - preds[np.arange(359), labels])
    np.testing.assert_allclose(losses[-1], expected, rtol=1e-5)


def test_training_metrics_begin_anew_with_every_epoch(framework):
    history, state = trained(framework).history, trained(framework).state
    found = history.collect("stateful_metrics.accuracy")
    assert len(found) == 12 and int(state.step) == 12
    hits = np.array(found) * [120 * (step % 4 + 1) for step in range(12)]  # of that many rows the epoch has had
    np.testing.assert_allclose(hits, hits.round(), atol=1e-2)
    assert hits.round()[4] <= 120
    assert np.isnan(state.reset_step().metrics.compute()["accuracy"])
    assert not np.isnan(state.metrics.compute()["accuracy"])


def test_nothing_is_compiled_after_the_first_run(framework, count_compilations):
    trained(framework)
    with count_compilations() as count:
        train(start(framework), epochs=2)
    assert count == [0]


def test_statistics_are_updated_in_training_only(framework):
    before = start(framework)
    logs, tested = before.test_step(BATCH)
    assert sorted(logs) == ["metrics", "stateful_metrics"]
    assert_trees_equal(plain(tested.replace(metrics=before.metrics)), plain(before))
    _, predicted = before.predict_step(BATCH)
    assert_trees_equal(plain(predicted), plain(before))
    _, after = before.train_step(BATCH)
    assert any(
        np.any(np.asarray(old) != np.asarray(new))
        for old, new in zip(jax.tree.leaves(before.model_state), jax.tree.leaves(after.model_state), strict=True)
        if jnp.issubdtype(old.dtype, jnp.floating)
    )


def test_dropout_differs_from_step_to_step_and_is_a_function_of_the_step(framework):
    state = start(framework)
    logs, after = state.train_step(BATCH)
    later = state.replace(step=after.step, model_state=after.model_state)  # the same parameters
    losses = [float(one.train_step(BATCH)[0].losses.loss) for one in (state, later, later)]
    assert losses[0] == float(logs.losses.loss) and losses[1] == losses[2] != losses[0]
    assert float(later.test_step(BATCH)[0].metrics.loss) != losses[1]


@pytest.mark.parametrize(
    ("framework", "strategy"),
    [*((framework, "jit_donate") for framework in FRAMEWORKS), ("nnx", "data_parallel"), ("equinox", "data_parallel")],
)
def test_other_strategies_give_the_same_losses(framework, strategy):
    found, expected = trained_with(framework, strategy).history, trained(framework).history
    for name in ("metrics.loss", "loss_test", "accuracy_test"):
        values = found.collect(name)
        np.testing.assert_allclose(values, expected.collect(name)[: len(values)], rtol=1e-5)


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_a_resumed_run_is_the_uninterrupted_one(framework, tmp_path):
    callbacks = [ms.checkpoint(tmp_path)]
    train(start(framework), stop=6, callbacks=callbacks)  # in the middle of an epoch, with metrics half done
    output, whole = train(start(framework), resume=tmp_path, callbacks=callbacks), trained(framework)
    assert_trees_equal(plain(output.state), plain(whole.state))
    for name in ("metrics.loss", "stateful_metrics.accuracy"):
        assert output.history.collect(name) == whole.history.collect(name)


def test_steps_can_be_fused():
    class Dropping(nnx.Module):
        def __init__(self):
            self.weight, self.dropout = nnx.Param(jnp.ones(4)), nnx.Dropout(0.5, rngs=nnx.Rngs(KEY))

        def __call__(self, x):
            return (self.dropout(x) * self.weight[...][None]).sum(-1, keepdims=True)

    error = {"losses": {"loss": squared_error}, "metrics": {"error": squared_error}}
    state = create_nnx_state(Dropping(), optax.sgd(0.01), **error)  # pyright: ignore
    loader = ms.DataLoader([ms.ArraySampleSource({"x": ROWS, "y": TARGETS}), ms.BatchTransform(2)])
    fused, single = (ms.train_loop(state, loader, stop=7, key=KEY, fuse=fuse).history for fuse in (3, None))
    for name in ("metrics.loss", "stateful_metrics.error"):
        np.testing.assert_allclose(fused.collect(name), single.collect(name), rtol=1e-5)


def test_the_example_of_the_documents_runs(usual_promotion):
    clu = pytest.importorskip("clu.metrics")
    model = nn.Sequential(
        [
            lambda x: x.reshape((x.shape[0], -1)) / 255.0,
            nn.Dense(16),
            nn.relu,
            nn.Dense(10),
        ]
    )

    @flax.struct.dataclass
    class AverageLoss(clu.Average.from_output("loss")):  # pyright: ignore
        pass

    state = create_flax_state(
        model,
        inputs=jnp.empty((1, 8, 8, 1)),
        tx=optax.adamw(1e-3),
        losses={"loss": cross_entropy},
        metrics={"accuracy": clu.Accuracy, "avg_loss": AverageLoss},
        strategy="jit",
    )
    whole = DIGITS["train"]
    train_dataset = [(whole["image"][i : i + 64], whole["label"][i : i + 64]) for i in range(0, 256, 64)]
    rows = []
    for batch in train_dataset:
        logs, state = state.train_step(batch)
        rows.append(logs)
    losses = [row.losses.loss for row in rows]
    np.testing.assert_allclose(rows[-1].stateful_metrics.avg_loss, np.mean(losses), rtol=1e-5)
    state, history, elapsed = ms.train_loop(
        state, train_dataset, test_dataset=lambda: train_dataset[:2], epoch_duration=2, stop=4
    )
    assert elapsed.steps == 4 and len(history.collect("avg_loss_test")) == 2 and int(state.step) == 8


# Batches, losses and metrics, with the smallest of models

ROWS = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
TARGETS = np.arange(6, dtype=np.float32)
MASK = np.arange(6) < 4
DENSE = nn.Dense(1, use_bias=False, kernel_init=nn.initializers.ones)


def squared_error(preds, target):
    return jnp.square(preds[:, 0] - target)


def regression(losses=None, **options):
    losses = {"loss": squared_error} if losses is None else losses
    return create_flax_state(DENSE, ROWS[:1], optax.sgd(0.1), key=KEY, losses=losses, **options)


def test_batches_may_be_pairs_or_dicts_with_or_without_a_mask():
    state, expected = regression(), np.square(ROWS.sum(-1) - TARGETS)
    for batch in ([ROWS, TARGETS], {"inputs": ROWS, "y": TARGETS}):
        assert float(state.train_step(batch)[0].losses.loss) == pytest.approx(expected.mean(), rel=1e-6)
    for batch in ((ROWS, TARGETS), {"image": ROWS, "target": TARGETS}):
        logs, new = state.train_step((batch, MASK))
        assert float(logs.losses.loss) == pytest.approx(expected[:4].mean(), rel=1e-6)
        gradient = 2 * ((ROWS.sum(-1) - TARGETS)[:4, None] * ROWS[:4]).mean(0)
        np.testing.assert_allclose(new.params["kernel"][:, 0], 1 - 0.1 * gradient, rtol=1e-5)
    named = regression(input_key="rows", target_key="wanted")
    batch = {"x": ROWS * 0, "rows": ROWS, "wanted": TARGETS}
    assert float(named.test_step(batch)[0].metrics.loss) == pytest.approx(expected.mean(), rel=1e-6)
    for batch in (ROWS, (ROWS, MASK), {"x": ROWS}):  # to predict, no target is needed
        np.testing.assert_allclose(state.predict_step(batch)[0].outputs.preds[:, 0], ROWS.sum(-1), rtol=1e-5)


def test_a_batch_of_nothing_but_padding_counts_nothing():
    state = regression(metrics={"error": squared_error})
    logs, new = state.train_step(((ROWS, TARGETS), np.zeros(6, bool)))
    assert float(logs.losses.loss) == 0 and np.isnan(logs.stateful_metrics.error)
    assert_trees_equal(new.params, state.params)


def test_a_model_may_take_several_inputs_and_say_several_things():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, left, right):
            return {"sum": nn.Dense(1)(left) + nn.Dense(1)(right), "both": (left, right)}

    losses = {"loss": lambda preds: preds["sum"] ** 2}
    state = create_flax_state(Two(), (ROWS[:1], ROWS[:1]), TX, losses=losses, input_key=("a", "b"), key=KEY)
    assert float(state.train_step({"a": ROWS, "b": ROWS})[0].losses.loss) > 0
    outputs = state.predict_step(((ROWS, ROWS * 2), TARGETS))[0].outputs
    assert sorted(outputs) == ["preds_both_0", "preds_both_1", "preds_sum"]
    np.testing.assert_array_equal(outputs.preds_both_1, ROWS * 2)


def test_losses_get_what_they_ask_for_and_are_summed():
    seen = {}

    def curious(preds, target, targets, inputs, mask, sample_weight, params, key, weight, absent=3):
        seen.update(locals())
        return jnp.sum(preds[:, 0] * sample_weight) / jnp.sum(sample_weight)

    losses = {
        "direct": optax.l2_loss,
        "curious": curious,
        "decay": lambda params: 0.5 * jnp.sum(params["kernel"] ** 2),
    }
    state = regression(losses, metrics={"total": lambda loss: loss, "half": lambda decay: decay / 2})
    batch = {"x": ROWS, "y": TARGETS[:, None], "weight": ROWS[:, 0]}
    logs, new = state.train_step((batch, MASK))
    assert seen["absent"] == 3 and seen["mask"].dtype == bool and seen["params"]["kernel"].shape == (4, 1)
    assert is_key(seen["key"]) and seen["weight"].shape == (6,)
    real, predicted = ROWS[:4], ROWS[:4].sum(-1)
    expected = {"direct": np.mean((predicted - TARGETS[:4]) ** 2) / 2, "curious": predicted.mean(), "decay": 2.0}
    assert logs.losses == pytest.approx(expected, rel=1e-5) and logs.metrics == pytest.approx(expected, rel=1e-5)
    gradient = ((predicted - TARGETS[:4])[:, None] * real).mean(0) + real.mean(0) + 1
    np.testing.assert_allclose(new.params["kernel"][:, 0], 1 - 0.1 * gradient, rtol=1e-5)
    assert float(logs.stateful_metrics.total) == pytest.approx(sum(expected.values()), rel=1e-5)
    assert float(logs.stateful_metrics.half) == pytest.approx(1.0)


def test_a_batch_without_any_real_row_changes_nothing_and_is_no_nan():
    state = regression(metrics={"squared": lambda preds, target: jnp.square(preds[:, 0] - target)})
    logs, trained = state.train_step(((ROWS, TARGETS), MASK))
    before = float(logs.stateful_metrics.squared)
    logs, new = trained.train_step(((ROWS, TARGETS), np.zeros(6, bool)))
    assert float(logs.losses.loss) == 0 and float(logs.stateful_metrics.squared) == before
    jax.tree.map(np.testing.assert_array_equal, new.params, trained.params)


def test_metrics_may_be_of_any_kind_and_go_before_losses_of_their_name(usual_promotion):
    metrics = {"loss": nnx.metrics.Average("loss"), "mean": lambda preds: preds[:, 0]}
    state = regression(metrics=metrics)
    for mask in (np.ones(6, bool), MASK):
        logs, state = state.test_step(((ROWS, TARGETS), mask))
    assert "metrics" not in logs
    errors = np.square(ROWS.sum(-1) - TARGETS)
    assert float(logs.stateful_metrics.loss) == pytest.approx(np.concatenate([errors, errors[:4]]).mean(), rel=1e-5)
    predicted = ROWS.sum(-1)
    assert float(logs.stateful_metrics.mean) == pytest.approx(
        np.concatenate([predicted, predicted[:4]]).mean(), rel=1e-4
    )


def test_what_a_linen_module_sows_is_added_under_names_of_its_own():
    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = nn.Dense(4, kernel_init=nn.initializers.ones)(x)
                self.sow("losses", "decay", 1e-3 * jnp.mean(jnp.abs(x), -1))
            self.sow("losses", "loss", jnp.float32(0.5))
            self.sow("metrics", "size", jnp.abs(x))
            self.sow("intermediates", "unseen", x)
            return x[:, :1]

    state = create_flax_state(Sowing(), ROWS[:1], TX, losses={"loss": squared_error}, key=KEY)
    logs, new = state.train_step(((ROWS, TARGETS), MASK))
    assert sorted(logs.losses) == ["decay", "decay_2", "loss", "loss_2"] and float(logs.losses.loss_2) == 0.5
    np.testing.assert_allclose(logs.losses.decay, 1e-3 * np.abs(ROWS[:4].sum(-1)).mean(), rtol=1e-5)
    np.testing.assert_allclose(logs.metrics.size, 4 * np.abs(ROWS[:4].sum(-1)).mean(), rtol=1e-5)
    assert state.model_state == {} and sorted(new.variables) == ["params"]
    alone = create_flax_state(Sowing(), ROWS[:1], TX, key=KEY)
    assert sorted(alone.train_step(ROWS)[0].losses) == ["decay", "decay_2", "loss"]


def test_options_of_managed_states_are_passed_on(usual_promotion):
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x, deterministic):
            return nn.Dense(1)(nn.BatchNorm(use_running_average=deterministic)(x))

    options = {"precision": "bf16", "accumulate": 2, "ema": 0.9, "clip_norm": 1.0, "log_norms": True}
    state = create_flax_state(Normed(), ROWS[:1], TX, losses={"loss": squared_error}, key=KEY, **options)
    _, state = state.train_step(((ROWS, TARGETS), MASK))
    logs, state = state.train_step(((ROWS, TARGETS), MASK))
    assert state.ema_params is not None and logs.metrics.grad_norm > 0
    assert {leaf.dtype for leaf in jax.tree.leaves((state.params, state.batch_stats))} == {jnp.dtype("float32")}


# What is special about each framework


def test_a_linen_module_may_be_called_by_another_method_and_losses_see_its_statistics():
    class Coder(nn.Module):
        def setup(self):
            self.layer, self.norm = nn.Dense(4), nn.BatchNorm(momentum=0.5)

        def encode(self, x, train):
            return self.norm(self.layer(x), use_running_average=not train)

    losses = {"loss": lambda preds, batch_stats: jnp.mean(preds**2, -1) + jnp.mean(batch_stats["norm"]["mean"])}
    state = create_flax_state(Coder(), ROWS[:1], TX, losses=losses, method="encode", key=KEY)
    _, state = state.train_step(ROWS)
    expected: Any = Coder().apply(state.variables, ROWS, False, method="encode")
    np.testing.assert_allclose(state.predict_step(ROWS)[0].outputs.preds, expected, rtol=1e-6)
    assert np.any(state.batch_stats["norm"]["mean"] != 0)


def test_an_nnx_model_comes_back():
    state = jax.tree.map(jnp.copy, trained_with("nnx", "jit_donate").state)
    model = state.model()
    expected = np.asarray(state.predict_step(BATCH)[0].outputs.preds)
    state.train_step(BATCH)  # takes over the memory of the state, not of the model
    model.eval()
    np.testing.assert_allclose(model(BATCH[0]["image"]), expected, rtol=1e-4, atol=1e-5)
    names = ["bias", "kernel"]
    layers = [f"layers.{number}.{name}" for number in (0, 1) for name in names]
    assert isinstance(model, Nnx) and sorted(state.params) == [*layers, "norm.bias", "norm.scale"]


def test_the_nnx_model_that_was_given_stays_as_it_was():
    given: Any = nnx.Dropout(0.5, rngs=nnx.Rngs(KEY))
    given.weight = nnx.Param(jnp.ones(4))
    given.eval()
    state = create_nnx_state(
        given, optax.sgd(1.0), losses={"loss": lambda preds, params: preds * params["weight"][None]}
    )
    _, state = state.train_step(ROWS)
    _, state = state.train_step(ROWS)
    assert given.deterministic and np.all(given.weight[...] == 1) and int(given.rngs.count[...]) == 0
    model = state.model()
    assert model.deterministic and np.all(model.weight[...] != 1) and int(model.rngs.count[...]) == 2


def test_only_chosen_variables_of_an_nnx_model_are_trained():
    class Frozen(nnx.Variable):
        pass

    class Shared(nnx.Module):
        def __init__(self):
            self.scale, self.weight = Frozen(jnp.ones(4)), nnx.Param(jnp.ones(4))
            self.also = self.weight

        def __call__(self, x):
            return (x * self.scale[...][None] * self.weight[...][None] * self.also[...][None]).sum(-1, keepdims=True)

    state = create_nnx_state(Shared(), optax.sgd(0.1), losses={"loss": squared_error})
    _, state = state.train_step((ROWS, TARGETS))
    model = state.model()
    assert list(state.params) == ["also"] and model.also is model.weight and np.any(model.weight[...] != 1)
    assert np.all(model.scale[...] == 1)
    both = create_nnx_state(Shared(), TX, losses={"loss": squared_error}, wrt=(nnx.Param, Frozen))
    assert sorted(both.params) == ["also", "scale"] and both.model_state == {}


def test_an_equinox_module_comes_back(usual_promotion):
    state = trained("equinox").state
    module, inner = state.model()
    module = eqx.nn.inference_mode(module)
    assert isinstance(module, Equinox) and isinstance(inner, eqx.nn.State)
    preds, _ = jax.vmap(lambda image: module(image, inner, key=None))(BATCH[0]["image"])
    expected = state.predict_step(BATCH)[0].outputs.preds
    np.testing.assert_allclose(preds, expected, rtol=1e-4, atol=1e-5)


def test_an_equinox_module_may_take_whole_batches_and_hold_arrays_that_are_not_trained():
    class Batched(eqx.Module):
        weight: jax.Array
        places: jax.Array
        activation: Any

        def __call__(self, x, inference):
            assert x.shape == (6, 4)
            return self.activation((x[:, self.places] * self.weight[None]).sum(-1, keepdims=True)) * (1 - inference)

    module = Batched(jnp.ones(4), jnp.arange(4), jnp.tanh)
    state = create_equinox_state(module, optax.sgd(0.1), losses={"loss": squared_error}, vmap=False)
    logs, state = state.train_step((ROWS, TARGETS))
    assert float(logs.losses.loss) == pytest.approx(np.mean((np.tanh(ROWS.sum(-1)) - TARGETS) ** 2), rel=1e-5)
    assert float(state.test_step((ROWS, TARGETS))[0].metrics.loss) == pytest.approx(np.mean(TARGETS**2))
    assert list(state.params) == ["weight"] and state.model().activation is jnp.tanh


def test_haiku_functions_may_do_without_state_and_keys():
    def line(x):
        return hk.Linear(1, w_init=hk.initializers.Constant(1.0))(x)

    for transformed in (hk.transform(line), hk.without_apply_rng(hk.transform(line))):
        state = create_haiku_state(transformed, ROWS[:1], TX, key=KEY, losses={"loss": squared_error})
        logs, state = state.train_step((ROWS, TARGETS))
        assert float(logs.losses.loss) == pytest.approx(np.square(ROWS.sum(-1) - TARGETS).mean(), rel=1e-5)
        assert state.model_state == {}


# Errors


def test_what_losses_and_batches_must_be():
    state = regression()
    with pytest.raises(ValueError, match=r"train_step cannot tell the inputs .* 'picture', 'y'. It looks for 'inputs'"):
        state.train_step({"picture": ROWS, "y": TARGETS})
    with pytest.raises(ValueError, match=r"looks for 'rows'. Say which it is when you create the state: input_key="):
        regression(input_key="rows").predict_step({"x": ROWS})
    with pytest.raises(
        ValueError, match=r"test_step needs batches that are \(inputs, targets\), a dict.*Got a tuple of 3"
    ):
        state.test_step((ROWS, TARGETS, TARGETS))
    with pytest.raises(
        ValueError, match=r"needs inputs with one row per sample along their first axis. Got shape \(\)"
    ):
        state.predict_step(np.float32(1))
    with pytest.raises(
        ValueError, match=r"The loss 'loss' asks for target. There are: .*predictions.*target_key="
    ) as info:
        state.train_step({"x": ROWS, "wanted": TARGETS})
    assert "wanted" in str(info.value)
    mean = regression({"loss": lambda preds, target: jnp.mean(preds[:, 0] - target)})
    assert mean.train_step((ROWS, TARGETS))
    with pytest.raises(ValueError, match=r"The loss 'loss' gave one number for a batch with a mask, so padding would"):
        mean.train_step(((ROWS, TARGETS), MASK))
    odd = regression({"loss": lambda preds: preds[:2]})
    with pytest.raises(
        ValueError, match=r"The loss 'loss' must give one number, or one value per row.*\(6,\); got shape"
    ):
        odd.train_step((ROWS, TARGETS))
    with pytest.raises(ValueError, match=r"train_step of a FlaxState needs something to minimise. Give losses"):
        regression({}).train_step((ROWS, TARGETS))

    def broken(preds):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as raised:
        regression({"bad": broken}).train_step((ROWS, TARGETS))
    assert "Raised in the loss 'bad', which was given preds." in raised.value.__notes__


def test_a_model_must_keep_its_structure():
    class Growing(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones(4))

        def __call__(self, x):
            self.seen = nnx.Variable(x)
            return x * self.weight[...][None]

    state = create_nnx_state(Growing(), TX, losses={"loss": squared_error})
    with pytest.raises(ValueError, match=r"A model must keep its structure when it is called"):
        state.train_step((ROWS, TARGETS))


def test_what_states_are_made_from():
    with pytest.raises(
        TypeError, match=r"(?s)create_flax_state needs a module of flax.linen. Got .*There are create_nnx"
    ):
        create_flax_state(nnx.Linear(2, 2, rngs=nnx.Rngs(KEY)), ROWS, TX)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"create_nnx_state needs a module of flax.nnx. Got "):
        create_nnx_state(DENSE, TX)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"create_equinox_state needs a module of Equinox that can be called. Got"):
        create_equinox_state(DENSE, TX)
    with pytest.raises(TypeError, match=r"create_haiku_state needs what hk.transform or .* returned. Got"):
        create_haiku_state(lambda x: x, ROWS, TX, key=KEY)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"create_flax_state needs a key such as jax.random.key\(0\). Got 3"):
        create_flax_state(DENSE, ROWS, TX, key=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"create_haiku_state needs a key such as jax.random.key\(0\). Got 3"):
        create_haiku_state(hk.transform(lambda x: x), ROWS, TX, key=3)  # pyright: ignore[reportArgumentType]
    module, state = eqx.nn.make_with_state(Equinox)(KEY)
    with pytest.raises(ValueError, match=r"needs a key for Equinox, which is called with one: key=jax.random.key\(0\)"):
        create_equinox_state(module, TX, state=state)
    with pytest.raises(TypeError, match=r"needs state to be an eqx.nn.State, from eqx.nn.make_with_state. Got 3"):
        create_equinox_state(module, TX, state=3)
    with pytest.raises(
        TypeError, match=r'create_flax_state needs losses as a dict of functions by name: losses={"loss"'
    ):
        regression(squared_error)
    with pytest.raises(TypeError, match=r"create_flax_state needs losses\['loss'\] to be a function. Got 3"):
        regression({"loss": 3})
    with pytest.raises(TypeError, match=r"needs names of losses to be text. Got 3"):
        regression({3: squared_error})
    with pytest.raises(
        TypeError, match=r"losses\['loss'\] is called with keyword arguments, which it does not accept. Wrap it"
    ):
        regression({"loss": lambda preds, /: preds})
    with pytest.raises(TypeError, match=r'create_flax_state needs metrics as a dict by name, metrics={"accuracy": fn}'):
        regression(metrics=[accuracy])
    with pytest.raises(TypeError, match=r"needs input_key to be a key of the batches, or a tuple of them. Got 3"):
        regression(input_key=3)
    with pytest.raises(
        TypeError, match=r"create_flax_state knows no argument loses. It passes on: precision, loss_scale, acc"
    ):
        regression(loses={})


def test_a_method_that_is_neither_a_name_nor_a_function_is_refused():
    with pytest.raises(TypeError, match=r"create_flax_state needs method to be the name of .* Got 3 \(int\)"):
        create_flax_state(DENSE, ROWS[:1], TX, key=KEY, method=3)  # pyright: ignore[reportArgumentType]
