"""The demo: the whole way from data to a trained network, in one screen."""

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import millstream as ms

_BATCH, _HIDDEN, _RATE, _MOMENTUM = 64, 128, 0.1, 0.9


def run(epochs: int, seed: int) -> int:
    """Train on the embedded digits, test, and compare a resumed stream with an uninterrupted one."""
    train, test = make_loader("train", "shuffle"), make_loader("test", "sequential")
    samples = len(ms.datasets.DigitsDataset("train"))
    key = jax.random.key(seed)
    state, model = train.init_state(key), make_model(key)
    print(f"millstream {ms.__version__}, JAX {jax.__version__} on {jax.devices()[0].platform}")
    print(
        f"{samples:,} handwritten digits, {train.steps_per_epoch} batches of {_BATCH} per epoch, one program per epoch"
    )

    started = time.perf_counter()
    state, model, losses = jax.block_until_ready(train.scan_epoch(state, model, train_step))
    compiled = time.perf_counter()
    rate = samples / (compiled - started)
    _show_progress(1, epochs, losses, rate)
    for epoch in range(2, epochs + 1):
        state, model, losses = jax.block_until_ready(train.scan_epoch(state, model, train_step))
        rate = (epoch - 1) * samples / (time.perf_counter() - compiled)
        _show_progress(epoch, epochs, losses, rate)

    _, (_, right, count), _ = test.scan_epoch(test.init_state(key), (model[0], jnp.int32(0), jnp.int32(0)), score)
    accuracy = int(right) / int(count)
    print(f"\ntest accuracy     {accuracy:.2%} of {int(count)} digits never trained on")
    print(
        f"speed             {rate:,.0f} samples per second (first epoch with compilation: {compiled - started:.1f} s)"
    )
    same, compared = resumes_exactly(train, key)
    verdict = "identical" if same else "DIFFERENT"
    print(f"resumed stream    {verdict}: {compared} batches after a stop in mid-epoch, bit for bit")
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


def train_step(model: Any, batch: Any, mask: jax.Array) -> tuple[Any, jax.Array]:
    """One step of gradient descent with momentum on the mean loss of the real rows."""

    def loss_fn(weights: Any) -> jax.Array:
        scores = jax.nn.log_softmax(logits(weights, batch["image"]))
        losses = -jnp.take_along_axis(scores, batch["label"][:, None], axis=1)[:, 0]
        return jnp.sum(losses * mask) / jnp.sum(mask)

    weights, momenta = model
    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    momenta = jax.tree.map(lambda m, g: _MOMENTUM * m + g, momenta, gradients)
    return (jax.tree.map(lambda w, m: w - _RATE * m, weights, momenta), momenta), loss


def score(carry: Any, batch: Any, mask: jax.Array) -> tuple[Any, None]:
    """Count right answers and real rows."""
    weights, right, count = carry
    hits = (jnp.argmax(logits(weights, batch["image"]), axis=1) == batch["label"]) & mask
    return (weights, right + hits.sum(), count + mask.sum()), None


def resumes_exactly(loader: ms.DataLoader, key: jax.Array) -> tuple[bool, int]:
    """Whether a run stopped in mid-epoch goes on exactly like one that was not, and over how many batches."""
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


def _show_progress(epoch: int, epochs: int, losses: jax.Array, rate: float) -> None:
    width = 30
    done = width * epoch // epochs
    bar = "=" * done + " " * (width - done)
    line = f"epoch {epoch:>3}/{epochs} [{bar}] loss {float(losses.mean()):.4f}  {rate:>9,.0f} samples/s"
    if sys.stdout.isatty():
        print(f"\r{line}", end="\n" if epoch == epochs else "", flush=True)
    elif epoch == epochs or epoch % 10 == 1:
        print(line, flush=True)
