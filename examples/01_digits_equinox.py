"""A convolutional classifier in Equinox, trained on the embedded digits, one compiled program per epoch.

Run: pip install '.[train,equinox]', then python examples/01_digits_equinox.py [--epochs 20]
The pipeline is the same for MNIST: write ms.datasets.MNISTDataset in place of DigitsDataset.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import millstream as ms

BATCH = 64


class Classifier(eqx.Module):
    """Two convolutions and a linear layer."""

    layers: list

    def __init__(self, key):
        first, second, third = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 16, 3, padding=1, key=first),
            eqx.nn.Conv2d(16, 32, 3, stride=2, padding=1, key=second),
            eqx.nn.Linear(32 * 4 * 4, 10, key=third),
        ]

    def __call__(self, image):
        x = jnp.transpose(image, (2, 0, 1))
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x.reshape(-1))


def shift(sample, mask, key):
    """Move the digit by up to one pixel; every sample, in every epoch, by its own key."""
    rows, columns = jax.random.randint(key, (2,), -1, 2)
    return {**sample, "image": jnp.roll(sample["image"], (rows, columns), axis=(0, 1))}


def make_loader(split, *augmentation, ordering):
    return ms.DataLoader(
        [
            ms.ArraySampleSource(ms.datasets.DigitsDataset(split).as_array_dict(), ordering=ordering),
            *augmentation,
            ms.BatchTransform(BATCH),
            ms.NormalizeImageTransform(),
        ]
    )


def main(epochs):
    train = make_loader("train", ms.RandomMapTransform(shift), ordering="shuffle")
    test = make_loader("test", ordering="sequential")
    arrays, static = eqx.partition(Classifier(jax.random.key(0)), eqx.is_array)
    optimizer = optax.adam(3e-3)

    def train_step(carry, batch, mask):
        def loss_fn(arrays):
            logits = jax.vmap(eqx.combine(arrays, static))(batch["image"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1)

        arrays, moments = carry
        loss, gradients = jax.value_and_grad(loss_fn)(arrays)
        updates, moments = optimizer.update(gradients, moments)
        return (optax.apply_updates(arrays, updates), moments), loss

    def test_step(carry, batch, mask):
        arrays, right = carry
        answers = jnp.argmax(jax.vmap(eqx.combine(arrays, static))(batch["image"]), axis=1)
        return (arrays, right + jnp.sum((answers == batch["label"]) & mask)), None

    carry = arrays, optimizer.init(arrays)
    state, start = train.init_state(jax.random.key(1)), test.init_state(jax.random.key(1))
    count = len(ms.datasets.DigitsDataset("test"))
    for epoch in range(1, epochs + 1):
        state, carry, losses = train.scan_epoch(state, carry, train_step)
        _, (_, right), _ = test.scan_epoch(start, (carry[0], jnp.int32(0)), test_step)
        print(f"epoch {epoch:>2}  loss {losses.mean():.4f}  test accuracy {int(right) / count:.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    main(**vars(parser.parse_args()))
