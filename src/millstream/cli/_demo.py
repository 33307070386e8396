"""The demo: the whole way from data to a trained network, in one screen."""

import os
import shutil
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import millstream as ms
from millstream.report.page import write_report

_BATCH, _HIDDEN, _RATE, _MOMENTUM, _FUSE = 64, 128, 0.1, 0.9, 100


def run(epochs: int, seed: int, folder: str | os.PathLike[str] | None) -> int:
    """Train on the embedded digits, test, compare a resumed stream with an uninterrupted one, and write a report.

    Args:
        epochs: How many to train.
        seed: Of the run's key.
        folder: Where the record of the run and the report go; None for a new temporary folder.
    """
    if folder is not None:
        return show(epochs, seed, folder)
    folder = tempfile.mkdtemp(prefix="millstream-demo-")
    try:
        return show(epochs, seed, folder)
    except BaseException:
        shutil.rmtree(folder)  # nobody was told of it
        raise


def show(epochs: int, seed: int, folder: str | os.PathLike[str]) -> int:
    """The demo, with its record and report in a folder."""
    train, test = make_loader("train", "shuffle"), make_loader("test", "sequential")
    digits, key = ms.datasets.DigitsDataset, jax.random.key(seed)
    model = make_model(key)
    print(f"millstream {ms.__version__}, JAX {jax.__version__} on {jax.devices()[0].platform}")
    print(
        f"{len(digits('train')):,} handwritten digits, {train.steps_per_epoch} batches of {_BATCH} per epoch, "
        f"up to {_FUSE} steps per program",
        flush=True,
    )
    output = ms.train_loop(
        model,
        train,
        {ms.on_train_step: train_step, ms.every(epochs=max(1, epochs // 4)): ms.callbacks.throughput()},
        callbacks=[ms.callbacks.keras_bar(), ms.record(folder, overwrite=True, loaders={"test": test})],
        stop=ms.at(epochs=epochs),
        key=key,
        fuse=_FUSE,
    )
    if output.interrupted:
        raise KeyboardInterrupt
    tested = ms.test_loop(output.state, test, {ms.on_test_step: test_step}, key=key)
    if tested.interrupted:
        raise KeyboardInterrupt

    seconds, rates = output.history.collect("seconds", "samples_per_second")
    accuracy, count = tested.history.mean("accuracy"), tested.elapsed.samples
    print(f"\ntest accuracy     {accuracy:.2%} of {count} digits never trained on")
    print(f"speed             {rates[-1]:,.0f} samples per second (at first, with compilation: {seconds[0]:.1f} s)")
    same, compared = resumes_exactly(train, key)
    verdict = "identical" if same else "DIFFERENT"
    print(f"resumed stream    {verdict}: {compared} batches after a stop in mid-epoch, bit for bit")
    print(f"report            {write_report(folder)}, to be opened in a browser")
    return 0 if same else 1


def make_loader(split: Any, ordering: Any) -> ms.DataLoader:
    """The digits of a split, shuffled or not, as batches of floats."""
    return ms.DataLoader(
        [
            ms.ArraySampleSource(ms.datasets.DigitsDataset(split).as_array_dict(), ordering=ordering),
            ms.BatchTransform(_BATCH),
            ms.NormalizeImageTransform(),
            ms.FlattenImageTransform(),
            ms.DevicePutTransform(),
        ]
    )


def make_model(key: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
    """Weights of a network with one hidden layer, and their momenta."""
    first, second = jax.random.split(key)
    weights = [
        jax.random.normal(first, (64, _HIDDEN)) * np.sqrt(2 / 64),
        jnp.zeros(_HIDDEN),
        jax.random.normal(second, (_HIDDEN, 10)) * np.sqrt(1 / _HIDDEN),
        jnp.zeros(10),
    ]
    return weights, jax.tree.map(jnp.zeros_like, weights)


def logits(weights: list[jax.Array], images: jax.Array) -> jax.Array:
    """Scores of the ten digits."""
    return jax.nn.relu(images @ weights[0] + weights[1]) @ weights[2] + weights[3]


def loss_and_accuracy(weights: list[jax.Array], batch: Any) -> tuple[jax.Array, jax.Array]:
    """The means over the real rows of a batch."""
    rows, mask = batch
    scores = jax.nn.log_softmax(logits(weights, rows["image"]))
    losses = -jnp.take_along_axis(scores, rows["label"][:, None], axis=1)[:, 0]
    hits = jnp.argmax(scores, axis=1) == rows["label"]
    return jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1), jnp.sum(hits * mask) / jnp.maximum(jnp.sum(mask), 1)


@jax.jit
def train_step(model: Any, batch: Any) -> tuple[ms.loops.Logs, Any]:
    """One step of gradient descent with momentum."""
    weights, momenta = model
    (loss, accuracy), gradients = jax.value_and_grad(loss_and_accuracy, has_aux=True)(weights, batch)
    momenta = jax.tree.map(lambda m, g: _MOMENTUM * m + g, momenta, gradients)
    weights = jax.tree.map(lambda w, m: w - _RATE * m, weights, momenta)
    return ms.logs().add_metric("accuracy", accuracy).add_metric("loss", loss), (weights, momenta)


@jax.jit
def test_step(model: Any, batch: Any) -> ms.loops.Logs:
    """What the network makes of a batch."""
    return ms.logs().add_metric("accuracy", loss_and_accuracy(model[0], batch)[1])


def resumes_exactly(loader: ms.DataLoader, key: jax.Array) -> tuple[bool, int]:
    """Whether a run stopped in mid-epoch resumes exactly like one that was not, and over how many batches."""
    steps = loader.steps_per_epoch + loader.steps_per_epoch // 2
    straight = [jax.device_get(item) for item in loader.iterate(loader.init_state(key), steps=2 * steps)]
    half = loader.iterate(loader.init_state(key), steps=steps)
    for _ in half:
        pass
    saved = np.asarray(half.state.key).tolist(), int(half.state.step)  # all there is to save
    words, step = saved
    resumed = loader.iterate(loader.init_state(np.array(words, np.uint32), step=step), steps=steps)
    pairs = zip(straight[steps:], (jax.device_get(item) for item in resumed), strict=True)
    return all(jax.tree.all(jax.tree.map(np.array_equal, a, b)) for a, b in pairs), steps
