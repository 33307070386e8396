"""Which learning rate, and does the seed matter? A ramp finds where to look, and one program trains all candidates.

Run: pip install '.[train]', then python examples/22_sweep.py [--epochs 10]
The ramp says where the loss falls fastest. Around that rate, twelve runs (four rates, three seeds) are trained at once
on the same batches, each with a history of its own. With --directory sweep, `millstream report sweep/*` compares them.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

import millstream as ms


def make_loader(split, ordering):
    return ms.DataLoader(
        [
            ms.ArraySampleSource(ms.datasets.DigitsDataset(split).as_array_dict(), ordering=ordering),
            ms.BatchTransform(64),
            ms.NormalizeImageTransform(),
            ms.FlattenImageTransform(),
        ]
    )


def score(params, batch):
    """Mean loss and accuracy of the real rows."""
    rows, mask = batch
    logits = jax.nn.relu(rows["image"] @ params["hidden"]) @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows["label"])
    hits = jnp.argmax(logits, axis=1) == rows["label"]
    return tuple(jnp.sum(values * mask) / jnp.sum(mask) for values in (losses, hits))


@ms.managed.train_step
def train_step(state, batch):
    return ms.logs().add_loss("loss", score(state.params, batch)[0])


def test_step(state, batch):
    loss, accuracy = score(state.params, batch)
    return ms.logs().add_metrics(loss=loss, accuracy=accuracy)


def init(hyperparameters):
    hidden, out = jax.random.split(jax.random.key(hyperparameters["seed"]))
    params = {"hidden": jax.random.normal(hidden, (64, 64)) / 8, "out": jax.random.normal(out, (64, 10)) / 8}
    return ms.managed.ManagedState.create(params, optax.adam(1e-3))


def main(epochs, directory):
    loader = make_loader("train", "shuffle")
    curve = ms.find_learning_rate(train_step, init({"seed": 0}), loader, optimizer=optax.adam, low=1e-5, high=10.0)
    print(curve)
    middle = 1e-2 if curve.suggestion is None else curve.suggestion
    output = ms.sweep(
        train_step,
        {"lr": [middle / 10, middle / 3, middle, 3 * middle], "seed": [0, 1, 2]},
        init,
        loader,
        optimizer=lambda hyperparameters: optax.adam(hyperparameters["lr"]),
        test_step=test_step,
        test_dataset=make_loader("test", "sequential"),
        stop=ms.at(epochs=epochs),
        key=jax.random.key(0),
        directory=directory,
    )
    print(output)
    best = output.by("accuracy_test", "max").best
    print(f"after epoch {epochs}: accuracy {best.value('accuracy_test'):.2%} with {best.hyperparameters}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--directory", default=None)
    main(**vars(parser.parse_args()))
