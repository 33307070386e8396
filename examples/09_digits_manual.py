"""The same parts without a loop that calls them: a `for` of your own, with schedules, a bar, logs and checkpoints.

Run: pip install '.[train]', then python examples/09_digits_manual.py [--epochs 10] [--folder run]
It trains for half of the time, forgets everything, and resumes from its last checkpoint.
"""

import argparse
import tempfile

import jax
import jax.numpy as jnp

import millstream as ms

BATCH, RATE, KEY = 64, 0.5, jax.random.key(0)


def make_loader(split, ordering):
    return ms.DataLoader(
        [
            ms.ArraySampleSource(ms.datasets.DigitsDataset(split).as_array_dict(), ordering=ordering),
            ms.BatchTransform(BATCH),
            ms.NormalizeImageTransform(),
            ms.FlattenImageTransform(),
        ]
    )


def loss_fn(weights, batch):
    rows, mask = batch
    scores = jax.nn.log_softmax(rows["image"] @ weights)
    losses = -jnp.take_along_axis(scores, rows["label"][:, None], axis=1)[:, 0]
    hits = jnp.argmax(scores, axis=1) == rows["label"]
    loss, accuracy = (jnp.sum(values * mask) / jnp.maximum(jnp.sum(mask), 1) for values in (losses, hits))
    return loss, ms.logs().add_metric("loss", loss).add_metric("accuracy", accuracy)


@jax.jit
def train_step(weights, batch):
    gradient, logs = jax.grad(loss_fn, has_aux=True)(weights, batch)
    return logs, weights - RATE * gradient


@jax.jit
def test_step(weights, batch):
    return loss_fn(weights, batch)[1]


def test(weights, loader):
    results = ms.loops.history()
    for elapsed, batch in ms.loops.elapse(loader, key=KEY):
        results.commit(elapsed, test_step(weights, batch))
    return results.mean("accuracy")  # over samples: the last batch, which is not full, counts for less


def train(folder, train_data, test_data, epochs):
    try:
        saved = ms.restore(folder, jnp.zeros((64, 10)), train_data, key=KEY)
    except FileNotFoundError:
        weights, history, start = jnp.zeros((64, 10)), ms.loops.history(), ms.loops.Elapsed(epochs=0)
        print("nothing is saved, so the run begins")
    else:
        weights, history, start = saved.state, saved.history, saved.elapsed
        print(f"continuing after step {start.steps} (epoch {start.epochs}), with {len(history)} rows of history")

    save, report = ms.every(20), ms.every(epochs=1)
    checkpoint, bar = ms.checkpoint(folder), ms.callbacks.keras_bar(total=ms.at(epochs=epochs))
    for elapsed, batch in ms.loops.elapse(train_data, initial=start, stop=ms.at(epochs=epochs), key=KEY):
        logs = ms.logs()
        logs.updates, weights = train_step(weights, batch)
        if report(elapsed):
            logs.add_stateful_metric("accuracy_test", test(weights, test_data))
        history.commit(elapsed, logs)
        if save(elapsed):
            where = train_data.init_state(KEY, elapsed.steps)  # batch = f(key, step), so this is all there is to know
            checkpoint(elapsed, weights, data_state=where, history=history)
        bar(elapsed, logs)
    checkpoint.close()
    return history


def main(epochs, folder):
    loaders = make_loader("train", "shuffle"), make_loader("test", "sequential")
    train(folder, *loaders, max(1, epochs // 2))
    history = train(folder, *loaders, epochs)
    for epoch, accuracy in zip(*history.collect("epochs", "accuracy_test"), strict=True):
        print(f"epoch {epoch:>3}  test accuracy {accuracy:.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", help="where checkpoints go; by default nowhere that stays")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as nowhere:
        main(options.epochs, nowhere if options.folder is None else options.folder)
