"""A small network on the embedded digits, in plain JAX and Optax: `train_loop` with all that one wants around it.

Run: pip install '.[train,plot]', then python examples/08_digits_train_loop.py [--epochs 40] [--folder results]
It tests after every epoch, shows a bar, keeps the best weights and stops when nothing improves. In the folder are the
log as CSV and the curves as an image.
"""

import argparse
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import optax

import millstream as ms

BATCH, HIDDEN = 64, 128
OPTIMIZER = optax.adamw(2e-3, weight_decay=1e-2)


def make_loader(split, ordering):
    return ms.DataLoader(
        [
            ms.ArraySampleSource(ms.datasets.DigitsDataset(split).as_array_dict(), ordering=ordering),
            ms.BatchTransform(BATCH),
            ms.NormalizeImageTransform(),
            ms.FlattenImageTransform(),
        ]
    )


def make_params(key):
    first, second = jax.random.split(key)
    return {
        "hidden": jax.random.normal(first, (64, HIDDEN)) / 8,
        "bias": jnp.zeros(HIDDEN),
        "out": jax.random.normal(second, (HIDDEN, 10)) / HIDDEN**0.5,
    }


def loss_fn(params, batch):
    """The mean loss of the real rows, and the logs."""
    rows, mask = batch
    logits = jax.nn.relu(rows["image"] @ params["hidden"] + params["bias"]) @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows["label"])
    hits = jnp.argmax(logits, axis=1) == rows["label"]
    loss, accuracy = (jnp.sum(values * mask) / jnp.maximum(jnp.sum(mask), 1) for values in (losses, hits))
    return loss, ms.logs().add_metric("loss", loss).add_metric("accuracy", accuracy)


@jax.jit
def train_step(state, batch):
    params, moments = state
    gradients, logs = jax.grad(loss_fn, has_aux=True)(params, batch)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return logs, (optax.apply_updates(params, updates), moments)


@jax.jit
def test_step(state, batch):
    return loss_fn(state[0], batch)[1]


def main(epochs, folder):
    params = make_params(jax.random.key(0))
    stopping = ms.callbacks.early_stopping("loss_test", patience=ms.at(epochs=5), restore_best_weights=True)
    output = ms.train_loop(
        (params, OPTIMIZER.init(params)),
        make_loader("train", "shuffle"),
        {ms.on_train_step: train_step, ms.on_test_step: test_step},
        test_dataset=make_loader("test", "sequential"),
        callbacks=[ms.callbacks.keras_bar(), stopping, ms.callbacks.csv_logger(folder / "log.csv", overwrite=True)],
        stop=ms.at(epochs=epochs),
        key=jax.random.key(1),
    )
    output.history.plot(folder / "curves.png")
    tested = output.history.collect("epochs", "loss_test", "accuracy_test")
    for epoch, loss, accuracy in list(zip(*tested, strict=True))[:: max(1, epochs // 8)]:
        print(f"epoch {epoch:>3}  test loss {loss:.4f}  test accuracy {accuracy:.2%}")
    print(f"the best test loss was {stopping.best_value:.4f}, in epoch {stopping.best_elapsed.epochs}")
    print("wrote", ", ".join(sorted(path.name for path in folder.iterdir())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--folder", type=pathlib.Path, help="where results go; by default nowhere that stays")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as nowhere:
        folder = pathlib.Path(nowhere) if options.folder is None else options.folder
        folder.mkdir(parents=True, exist_ok=True)
        main(options.epochs, folder)
