"""A ramp of learning rates: the numbers of a loop by hand, a suggestion by a stated rule, and nothing changed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("usual_promotion")]  # adam of optax mixes dtypes

DATA = {"x": np.random.default_rng(0).normal(size=(96, 3)).astype(np.float32)}
DATA["y"] = DATA["x"] @ np.array([[1.0], [-2.0], [0.5]], np.float32)
STEPS, LOW, HIGH = 40, 1e-4, 100.0
RATES = np.geomspace(LOW, HIGH, STEPS).astype(np.float32)
RAMP = {"low": LOW, "high": HIGH, "steps": STEPS, "key": jax.random.key(3)}


def make_loader(rows=16, **options):
    return ms.DataLoader([ms.ArraySampleSource(DATA), ms.BatchTransform(rows)], **options)


def loss_of(params, batch):
    rows, mask = batch
    return jnp.sum(jnp.mean((rows["x"] @ params["w"] - rows["y"]) ** 2, 1) * mask) / jnp.sum(mask)


def plain_step(state, batch, learning_rate):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = optax.adam(learning_rate).update(grads, opt_state, params)
    return ms.logs().add_loss("loss", loss), (optax.apply_updates(params, updates), opt_state)


def injected_step(state, batch):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = INJECTED.update(grads, opt_state, params)
    return {"loss": loss}, (optax.apply_updates(params, updates), opt_state)


INJECTED = optax.inject_hyperparams(optax.adam)(learning_rate=0.5)
PARAMS = {"w": jnp.zeros((3, 1))}


@ms.managed.train_step
def managed_step(state, batch):
    return ms.logs().add_loss("loss", loss_of(state.params, batch))


def by_hand(loader):
    """The losses of a loop in Python with these rates."""
    state, losses = (PARAMS, optax.adam(0.0).init(PARAMS)), []
    step = jax.jit(plain_step)
    batches = loader.iterate(loader.init_state(RAMP["key"]), steps=STEPS)
    for batch, rate in zip(batches, RATES, strict=True):
        logs, state = step(state, batch, jnp.float32(rate))
        losses.append(float(logs.losses.loss))
    return np.array(losses)


def managed(tx, **options):
    return ms.managed.ManagedState.create(PARAMS, tx, **options)


def test_losses_are_those_of_a_loop_by_hand_and_the_state_stays_as_it_was():
    loader = make_loader()
    expected = by_hand(loader)
    trials = {
        "plain": (plain_step, (PARAMS, optax.adam(0.0).init(PARAMS)), {}),
        "injected": (injected_step, (PARAMS, INJECTED.init(PARAMS)), {}),
        "managed": (managed_step, managed(optax.adam(optax.constant_schedule(1.0))), {"optimizer": optax.adam}),
        "donated": (managed_step, managed(INJECTED, strategy="jit_donate"), {}),
    }
    found = []
    for name, (step, state, options) in trials.items():
        before = jax.tree.map(np.array, state)
        curve = ms.find_learning_rate(step, state, loader, **RAMP, **options)
        np.testing.assert_array_equal(curve.rates, RATES[: len(curve.rates)].astype(np.float64))
        # Rounding differs between programs, and what differs is multiplied where the loss is about to diverge.
        np.testing.assert_allclose(curve.losses[:20], expected[:20], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(curve.losses, expected[: len(curve.losses)], rtol=1e-3, err_msg=name)
        jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, state))
        found.append(len(curve.rates))
    assert 10 < min(found) and max(found) < STEPS  # it diverges


def test_all_steps_are_one_program_wherever_the_data_are_read():
    state = PARAMS, optax.adam(0.0).init(PARAMS)
    in_graph = ms.find_learning_rate(plain_step, state, make_loader(), **RAMP)
    calls = []

    def counted(state, batch, learning_rate):
        calls.append(1)
        return plain_step(state, batch, learning_rate)

    threads = ms.find_learning_rate(counted, state, make_loader(executor=ms.Threads(2)), **RAMP)
    assert len(calls) < 8  # traced, not called for each step
    np.testing.assert_array_equal(threads.losses, in_graph.losses)
    loader = make_loader()
    batches = list(loader.iterate(loader.init_state(RAMP["key"]), steps=STEPS))
    listed = ms.find_learning_rate(plain_step, state, batches, **RAMP)
    np.testing.assert_allclose(listed.losses, in_graph.losses, rtol=1e-3)


def mean_square(preds, target):
    return jnp.mean((preds - target) ** 2, axis=-1)


OPTIONS = {"losses": {"loss": mean_square}, "input_key": "x", "target_key": "y"}


def equinox_state(tx):
    import equinox as eqx

    return ms.create_equinox_state(eqx.nn.Linear(3, 1, key=jax.random.key(0)), tx, **OPTIONS)


def linen_state(tx):
    from flax import linen as nn

    return ms.create_flax_state(nn.Dense(1), jnp.zeros((1, 3)), tx, key=jax.random.key(0), **OPTIONS)


def nnx_state(tx):
    from flax import nnx

    return ms.create_nnx_state(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), tx, **OPTIONS)


def haiku_state(tx):
    import haiku as hk

    transformed = hk.transform(lambda x: hk.Linear(1)(x))
    return ms.create_haiku_state(transformed, jnp.zeros((1, 3)), tx, key=jax.random.key(0), **OPTIONS)


@pytest.mark.parametrize("make", [equinox_state, linen_state, nnx_state, haiku_state], ids=lambda make: make.__name__)
def test_states_of_all_frameworks_can_be_tried_by_their_own_steps(make):
    state = make(optax.adam(1e-3))
    curve = ms.find_learning_rate(state.train_step, state, make_loader(96), optimizer=optax.adam, **RAMP)
    assert curve.suggestion is not None and 1e-3 < curve.suggestion < 10


def sigmoid(rates, middle):
    return 1 / (1 + (rates / middle) ** 2)


@settings(max_examples=50, deadline=None)
@given(st.floats(-2.5, -1.5), st.floats(0.5, 1e3), st.floats(0, 20), st.integers(0, 2**32 - 1))
def test_the_suggestion_is_where_a_known_curve_falls_most_steeply(middle, scale, shift, seed):
    rates = np.geomspace(1e-5, 1.0, 200)
    noise = 0.005 * np.random.default_rng(seed).normal(size=200)
    curve = ms.loops.LearningRateCurve.of(rates, scale * (sigmoid(rates, 10**middle) + noise + shift))
    assert curve.diverges_at is None
    assert curve.suggestion is not None and abs(np.log10(curve.suggestion) - middle) < 0.4


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.05, 10.0))
def test_noise_alone_gives_no_suggestion(seed, size):
    losses = 2.0 + size * np.random.default_rng(seed).normal(size=200)
    curve = ms.loops.LearningRateCurve.of(np.geomspace(1e-5, 1.0, 200), losses)
    assert curve.suggestion is None
    assert "too little for its noise" in curve.reason or "flat" in curve.reason or "diverges within" in curve.reason


def test_what_a_curve_says():
    rates = np.geomspace(1e-5, 1.0, 100)
    flat = ms.loops.LearningRateCurve.of(rates, np.full(100, 2.3))
    assert (flat.suggestion, flat.diverges_at) == (None, None)
    assert "the loss is flat" in flat.reason and "cannot be told" in str(flat)
    losses = sigmoid(rates, 0.01)
    losses[80:] = 50.0
    diverging = ms.loops.LearningRateCurve.of(rates, losses)
    assert diverging.diverges_at is not None and len(diverging.rates) == len(diverging.losses) <= 80
    assert rates[76] <= diverging.diverges_at <= rates[80]
    assert diverging.reason == "a tenth of the rate at which the loss diverges"
    assert diverging.suggestion == pytest.approx(diverging.diverges_at / 10)
    losses[5:] = np.nan
    at_once = ms.loops.LearningRateCurve.of(rates, losses)
    assert at_once.suggestion is None and len(at_once.losses) == 5 and "smaller low=" in at_once.reason
    assert at_once.diverges_at == rates[5]
    assert "none of them finite" in str(ms.loops.LearningRateCurve.of(rates, np.full(100, np.inf)))
    with pytest.raises(
        ValueError, match=r"LearningRateCurve.of needs at least 10 rates .*Got shapes \(3,\) and \(3,\)"
    ):
        ms.loops.LearningRateCurve.of(rates[:3], losses[:3])


def test_the_picture_has_the_suggestion(tmp_path):
    rates = np.geomspace(1e-5, 1.0, 100)
    curve = ms.loops.LearningRateCurve.of(rates, sigmoid(rates, 0.01))
    assert f"{curve.suggestion:.2g}" in curve._repr_html_() and "<svg" in curve._repr_html_()
    assert curve.plot(tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    (axis,) = curve.plot().axes
    np.testing.assert_array_equal(axis.lines[1].get_ydata(), curve.smoothed)
    assert axis.lines[2].get_xdata()[0] == curve.suggestion  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"low": 1.0, "high": 0.1}, ValueError, "needs low below high. Got low=1 and high=0.1"),
        ({"low": 0}, ValueError, "needs low to be a finite number above 0"),
        ({"steps": 3}, ValueError, "needs steps to be an int from 10 to 1,000,000. Got 3"),
        (
            {"step": 3},
            TypeError,
            r"needs a step: a managed.train_step, or a function of \(state, batch, learning_rate\)",
        ),
        ({"step": managed_step, "state": managed(optax.adam(0.1))}, ValueError, "It finds none. Give optimizer=optax"),
        ({"step": lambda state, batch, rate: 1.0}, TypeError, r"needs <lambda> to return \(logs, state\)"),
        ({"monitor": "los"}, ValueError, "'los' was never logged. Did you mean 'loss'"),
        ({"dataset": [(DATA, np.ones(96, bool))] * 3}, ValueError, "dataset of at least 10 batches. It ended after 3"),
        (
            {"step": lambda state, batch, rate: ({"loss": jnp.ones(2)}, state)},
            ValueError,
            r"needs 'loss' to be a single number per step. The step logs shape \(2,\), float32",
        ),
        ({"optimizer": optax.adam}, TypeError, "can use optimizer= only with a managed state"),
        (
            {"step": managed_step, "state": managed(optax.inject_hyperparams(optax.sgd)(optax.constant_schedule(1.0)))},
            ValueError,
            r"cannot set the learning rate at .*opt_state: a schedule sets it",
        ),
    ],
)
def test_what_cannot_be_tried_is_refused(change, kind, message):
    arguments = {"step": plain_step, "state": (PARAMS, optax.adam(0.0).init(PARAMS)), "dataset": make_loader()}
    with pytest.raises(kind, match=message):
        ms.find_learning_rate(**(arguments | RAMP | change))
