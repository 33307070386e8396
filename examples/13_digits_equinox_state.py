"""A convolutional network in Equinox with augmented data: 01 with a state that has its own steps, and a loop.

Run: pip install '.[train,equinox]', then python examples/13_digits_equinox_state.py [--epochs 15]
The model has no notion of batches, losses or loops; the learning rate follows a schedule and is logged.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import millstream as ms

BATCH = 64


class Classifier(eqx.Module):
    """Two convolutions and a linear layer, for one image."""

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
    steps = epochs * train.steps_per_epoch
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, steps // 10, steps)
    state = ms.create_equinox_state(
        Classifier(jax.random.key(0)),
        optax.adam(schedule),
        losses={"loss": optax.softmax_cross_entropy_with_integer_labels},
        metrics={"accuracy": lambda preds, target: jnp.argmax(preds, axis=-1) == target},
    )
    state, history, _ = ms.train_loop(
        state,
        train,
        {ms.every(epochs=1): ms.callbacks.log_learning_rate(schedule)},
        callbacks=[ms.callbacks.keras_bar()],
        test_dataset=make_loader("test", ordering="sequential"),
        stop=ms.at(epochs=epochs),
        key=jax.random.key(1),
    )
    shown = history.collect("epochs", "learning_rate", "accuracy_test")
    for epoch, rate, accuracy in list(zip(*shown, strict=True))[:: max(1, epochs // 5)]:
        print(f"epoch {epoch:>3}  learning rate {rate:.5f}  test accuracy {accuracy:.2%}")
    module = state.model()
    blank = jax.nn.softmax(module(jnp.zeros((8, 8, 1))))
    print(f"asked about an empty image, the module says {jnp.argmax(blank)} with a certainty of {jnp.max(blank):.0%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    main(**vars(parser.parse_args()))
