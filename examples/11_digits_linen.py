"""A convolutional network in flax.linen with batch normalisation and dropout: model, losses and metrics make a state.

Run: pip install '.[train]', then python examples/11_digits_linen.py [--epochs 10]
The state brings its own train, test and predict steps, so the loops need nothing but data.
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import millstream as ms

BATCH = 64


class Classifier(nn.Module):
    """Two convolutions and a linear layer."""

    @nn.compact
    def __call__(self, x, training):
        for features, stride in ((16, 1), (32, 2)):
            x = nn.Conv(features, (3, 3), strides=stride, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not training, momentum=0.9)(x))
        x = nn.Dropout(0.3, deterministic=not training)(x.reshape(len(x), -1))
        return nn.Dense(10)(x)


def make_loader(split, ordering):
    return ms.DataLoader(
        [
            ms.ArraySampleSource(ms.datasets.DigitsDataset(split).as_array_dict(), ordering=ordering),
            ms.BatchTransform(BATCH, drop_last=ordering == "shuffle"),  # padding would count in batch statistics
            ms.NormalizeImageTransform(),
        ]
    )


def main(epochs):
    train, test = make_loader("train", "shuffle"), make_loader("test", "sequential")
    state = ms.create_flax_state(
        Classifier(),
        inputs=jnp.empty((1, 8, 8, 1)),
        tx=optax.adam(3e-3),
        losses={"loss": optax.softmax_cross_entropy_with_integer_labels},
        metrics={"accuracy": lambda preds, target: jnp.argmax(preds, axis=-1) == target},
        key=jax.random.key(0),
    )
    print(ms.overview(state.variables))
    state, history, _ = ms.train_loop(
        state,
        train,
        callbacks=[ms.callbacks.keras_bar()],
        test_dataset=test,
        stop=ms.at(epochs=epochs),
        key=jax.random.key(1),
    )
    for epoch, accuracy in zip(*history.collect("epochs", "accuracy_test"), strict=True):
        print(f"epoch {epoch:>3}  test accuracy {accuracy:.2%}")
    preds = ms.predict_loop(state, test, key=jax.random.key(1)).outputs["preds"]
    wrong = jnp.flatnonzero(jnp.argmax(preds, axis=1) != ms.datasets.DigitsDataset("test").as_array_dict()["label"])
    print(
        f"{len(wrong)} of {len(preds)} test digits are taken for others, first of all {', '.join(map(str, wrong[:5]))}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    main(**vars(parser.parse_args()))
