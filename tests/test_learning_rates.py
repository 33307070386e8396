"""The rate that an optimizer uses at a step, wherever it keeps it: logged exactly, or refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import millstream as ms

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("usual_promotion")]  # adam of optax mixes dtypes

SCHEDULE = optax.cosine_decay_schedule(0.1, 20)
ROWS = {"x": np.linspace(-1, 1, 16, dtype=np.float32)}
OPTIMIZERS = {
    "schedule": lambda: optax.adam(SCHEDULE),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE, weight_decay=0.1)),
    "named": lambda: optax.named_chain(("clip", optax.clip(1.0)), ("adam", optax.sgd(SCHEDULE, momentum=0.9))),
    "groups": lambda: optax.multi_transform(
        {"a": optax.sgd(SCHEDULE), "b": optax.adam(SCHEDULE)}, lambda params: {"w": "a", "b": "b"}
    ),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
    "finite": lambda: optax.apply_if_finite(optax.adam(SCHEDULE), 3),
}


def make_loader():
    return ms.DataLoader([ms.ArraySampleSource(ROWS), ms.BatchTransform(4)])


@ms.managed.train_step
def train_step(state, batch):
    rows, _ = batch
    return ms.logs().add_loss("loss", jnp.mean((rows["x"] * state.params["w"] + state.params["b"] - 1) ** 2))


def make_state(tx, **options):
    return ms.managed.ManagedState.create({"w": jnp.ones(()), "b": jnp.ones(())}, tx, **options)


def train(state, stop, **options):
    return ms.train_loop(
        state, make_loader(), {ms.on_train_step: train_step}, stop=stop, key=jax.random.key(0), **options
    )


def rates(count):
    return [float(jnp.asarray(SCHEDULE(jnp.int32(step)))) for step in range(count)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_managed_state_logs_the_rate_that_its_optimizer_uses_fused_or_not(name):
    state = make_state(OPTIMIZERS[name](), log_learning_rate=True)
    found = train(state, 6).history.collect("stateful_metrics.learning_rate")
    np.testing.assert_allclose(found, rates(6), rtol=1e-6)
    if name == "schedule":
        assert train(state, 6, fuse=4).history.collect("learning_rate") == found
        resumed = train(train(state, 2).state, 4)
        np.testing.assert_array_equal(resumed.history.collect("learning_rate"), found[2:6])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_callback_finds_the_rate_in_a_state_with_its_optimizer(name):
    state = make_state(OPTIMIZERS[name]())
    found = train(state, 3, callbacks=[ms.callbacks.log_learning_rate()]).history.collect("learning_rate")
    np.testing.assert_allclose(found, rates(3), rtol=1e-6)


def test_a_constant_rate_is_logged_and_updates_that_are_left_out_do_not_count():
    found = train(make_state(optax.sgd(0.25), log_learning_rate=True), 2).history.collect("learning_rate")
    assert found == [0.25, 0.25]
    state = make_state(optax.sgd(SCHEDULE), log_learning_rate=True, skip_nonfinite=True)
    bad = state.replace(params={"w": jnp.asarray(jnp.nan), "b": jnp.ones(())})
    _, after = train_step(bad, (ROWS, np.ones(16, bool)))
    logs, _ = train_step(after, (ROWS, np.ones(16, bool)))
    np.testing.assert_allclose(logs.stateful_metrics.learning_rate, rates(1)[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("tx", "found"),
    [
        (optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(SCHEDULE), optax.scale(-1.0)), "no learning rate"),
        (
            optax.GradientTransformation(lambda params: (), lambda updates, state, params=None: (updates, state)),
            "no learn",
        ),
        (optax.chain(optax.sgd(SCHEDULE), optax.sgd(optax.constant_schedule(1.0))), "2 schedules"),
    ],
    ids=["by hand", "foreign", "several"],
)
def test_a_rate_that_cannot_be_known_is_refused_when_the_state_is_made(tx, found):
    with pytest.raises(
        ValueError,
        match=rf"ManagedState.create with log_learning_rate=True cannot know .*: it finds {found}.*\. Build .*",
    ):
        make_state(tx, log_learning_rate=True)
    with pytest.raises(ValueError, match=rf"log_learning_rate cannot know the learning rate .*: it finds {found}"):
        train(make_state(tx), 1, callbacks=[ms.callbacks.log_learning_rate()])


def test_several_injected_rates_are_refused_by_their_places():
    inject = optax.inject_hyperparams(optax.sgd)
    tx = optax.chain(inject(learning_rate=0.1), inject(learning_rate=0.2))
    with pytest.raises(ValueError, match=r"(?s)several learning rates .*opt_state\[0\]\n  opt_state\[1\]\nOr log it"):
        make_state(tx, log_learning_rate=True)
