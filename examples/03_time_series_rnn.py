"""Forecasting with a recurrent network: eleven-year cycles, windows of 48 months, the next month as the target.

The series is made here: cycles of uneven length and height with noise, as sunspot counts have. It is cut into windows
by time, so that nothing of the test years is seen in training, and a whole epoch runs as one compiled scan.

Run: pip install '.[train]', then python examples/03_time_series_rnn.py [--epochs 30]
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import millstream as ms
from millstream.transforms.time_series import TimeSeriesBatchTransform

MONTHS, CONTEXT, HIDDEN, BATCH = 3000, 48, 32, 64
OPTIMIZER = optax.adam(3e-3)


def sunspots(random):
    """Monthly counts, about zero to three hundred."""
    phase = np.cumsum(2 * np.pi / (132 + 15 * random.standard_normal(MONTHS)))
    height = 120 + 50 * np.sin(phase / 9)
    return np.maximum(height * (1 - np.cos(phase)) / 2 + 10 * random.standard_normal(MONTHS), 0).astype(np.float32)


def windows(series, ordering):
    """Every month with the months before it, as a view of the series: nothing is copied."""
    return ms.views.windows(ms.ArraySampleSource(series, ordering=ordering), CONTEXT + 1, stride=1)


def divide(months, mask):
    return {"context": months[:-1], "target": months[-1]}


def init(key):
    keys = jax.random.split(key, 3)
    return {
        "in": jax.random.normal(keys[0], (1, HIDDEN)),
        "carry": jnp.linalg.qr(jax.random.normal(keys[1], (HIDDEN, HIDDEN)))[0],
        "bias": jnp.zeros(HIDDEN),
        "out": jax.random.normal(keys[2], (HIDDEN,)) / HIDDEN**0.5,
    }


def forecast(params, context):
    """The month after each window of shape (time, 1): a step away from its last month."""

    def step(carry, value):
        return jnp.tanh(value @ params["in"] + carry @ params["carry"] + params["bias"]), None

    carry, _ = jax.lax.scan(step, jnp.zeros(HIDDEN), context)
    return context[-1, 0] + carry @ params["out"]


def errors(params, batch, mask):
    """The sum of squared errors over the real rows."""
    found = jax.vmap(forecast, in_axes=(None, 0))(params, batch["context"])
    return jnp.sum(jnp.where(mask, (found - batch["target"]) ** 2, 0.0))


def train_step(carry, batch, mask):
    params, opt_state = carry
    total, gradients = jax.value_and_grad(errors)(params, batch, mask)
    gradients = jax.tree.map(lambda leaf: leaf / jnp.maximum(mask.sum(), 1), gradients)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state)
    return (optax.apply_updates(params, updates), opt_state), total


def test_step(params, batch, mask):
    last = jnp.sum(jnp.where(mask, (batch["context"][:, -1, 0] - batch["target"]) ** 2, 0.0))
    return params, (errors(params, batch, mask), last)


def make_loader(source):
    return ms.DataLoader([source, ms.MapTransform(divide), ms.BatchTransform(BATCH), TimeSeriesBatchTransform()])


def main(epochs):
    series = sunspots(np.random.default_rng(0)) / 100
    cut = MONTHS * 4 // 5
    train, test = windows(series[:cut], "shuffle"), windows(series[cut - CONTEXT :], "sequential")
    loader, test_loader = make_loader(train), make_loader(test)
    state, test_state = loader.init_state(jax.random.key(0)), test_loader.init_state(jax.random.key(0))
    params = init(jax.random.key(1))
    carry = (params, OPTIMIZER.init(params))

    print(f"{len(train):,} windows to learn from, {len(test):,} later ones to test on")
    begun = time.perf_counter()
    for epoch in range(1, epochs + 1):
        state, carry, losses = loader.scan_epoch(state, carry, train_step)
        if epoch % max(1, epochs // 6) == 0:
            spots = 100 * (losses.sum() / len(train)) ** 0.5
            print(f"  epoch {epoch:3d}   error {spots:5.2f} spots   {time.perf_counter() - begun:5.1f} s")
    _, _, sums = test_loader.scan_epoch(test_state, carry[0], test_step)
    ours, naive = (100 * (jnp.sum(total) / len(test)) ** 0.5 for total in sums)
    print(f"test error {ours:.2f} spots; saying 'as last month' gives {naive:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    main(parser.parse_args().epochs)
