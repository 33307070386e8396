"""Linear regression in plain JAX, and the simplest loop: from the pixels of a digit to ten numbers, one per class.

Run: python examples/07_linear_regression.py [--epochs 50]
Least squares have an exact answer, so what the loop has found is compared with the best there is.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import millstream as ms

BATCH, RATE = 64, 0.3


def error(weights, batch):
    """The mean squared error of the real rows of a batch, which a loader gives as (batch, mask)."""
    rows, mask = batch
    differences = rows["image"] @ weights["pixels"] + weights["bias"] - jax.nn.one_hot(rows["label"], 10)
    return jnp.sum(jnp.mean(differences**2, axis=1) * mask) / jnp.maximum(jnp.sum(mask), 1)


@jax.jit
def train_step(weights, batch):
    loss, gradients = jax.value_and_grad(error)(weights, batch)
    weights = jax.tree.map(lambda weight, gradient: weight - RATE * gradient, weights, gradients)
    return ms.logs().add_metric("error", loss), weights


def least_error(images, labels):
    inputs = np.concatenate([images.reshape(len(images), -1) / 255.0, np.ones((len(images), 1))], axis=1)
    targets = np.eye(10)[labels]
    weights = np.linalg.lstsq(inputs, targets, rcond=None)[0]
    return np.mean((inputs @ weights - targets) ** 2)


def report(weights, batch, elapsed, loop_state):
    error = loop_state.logs.metrics.error
    print(f"epoch {elapsed.epochs:>3}  step {elapsed.steps:>5}  error of this batch {error:.5f}")


def main(epochs):
    digits = ms.datasets.DigitsDataset("train").as_array_dict()
    loader = ms.DataLoader(
        [
            ms.ArraySampleSource(digits, ordering="shuffle"),
            ms.BatchTransform(BATCH),
            ms.NormalizeImageTransform(),
            ms.FlattenImageTransform(),
        ]
    )
    _, history, elapsed = ms.loop(
        {"pixels": jnp.zeros((64, 10)), "bias": jnp.zeros(10)},
        loader,
        {ms.every(1): [train_step], ms.every(epochs=max(1, epochs // 5)): [report]},
        stop=ms.at(epochs=epochs),
        key=jax.random.key(0),
    )
    last, least = (
        history.mean("error", elapsed.steps - loader.steps_per_epoch),
        least_error(digits["image"], digits["label"]),
    )
    print(f"the mean error of the last epoch is {last:.5f}; the least of any weights is {least:.5f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=50)
    main(**vars(parser.parse_args()))
