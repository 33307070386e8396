"""The managed API on the embedded digits: write the loss, and the state knows how to accumulate, clip, update, average.

Run: pip install '.[train]', then python examples/10_digits_managed.py [--epochs 20] [--strategy jit_donate]
Every batch of 256 is computed in four parts. The same script runs on many devices with --strategy data_parallel.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

import millstream as ms

BATCH, HIDDEN, DROPPED = 256, 256, 0.2


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


def score(params, batch, dropout_key=None):
    """Mean loss and accuracy of the real rows."""
    rows, mask = batch
    hidden = jax.nn.relu(rows["image"] @ params["hidden"] + params["bias"])
    if dropout_key is not None:
        hidden = hidden * jax.random.bernoulli(dropout_key, 1 - DROPPED, hidden.shape) / (1 - DROPPED)
    logits = hidden @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows["label"])
    hits = jnp.argmax(logits, axis=1) == rows["label"]
    return tuple(jnp.sum(values * mask) / jnp.maximum(jnp.sum(mask), 1) for values in (losses, hits))


@ms.managed.train_step
def train_step(state, batch):
    loss, accuracy = score(state.params, batch, state.step_key())
    return ms.logs().add_loss("loss", loss).add_metric("accuracy", accuracy)


@ms.managed.step
def test_step(state, batch):
    logs = ms.logs().add_metric("accuracy", score(state.params, batch)[1])
    return logs.add_metric("average_accuracy", score(state.ema_params, batch)[1])


def report(state, batch, elapsed, loop_state):
    losses, metrics = loop_state.logs.losses, loop_state.logs.metrics
    text = f"test accuracy {metrics.accuracy_test:.2%}, by averaged parameters {metrics.average_accuracy_test:.2%}"
    print(f"epoch {elapsed.epochs:>3}  loss {losses.loss:.4f}  gradient norm {metrics.grad_norm:.3f}  {text}")


def main(epochs, strategy):
    state = ms.managed.ManagedState.create(
        make_params(jax.random.key(0)),
        optax.adam(3e-3),
        strategy=strategy,
        key=jax.random.key(1),
        accumulate=4,
        clip_norm=1.0,
        ema=0.9,
        log_norms=True,
    )
    print(ms.overview(state.params))
    ms.train_loop(
        state,
        make_loader("train", "shuffle"),
        {ms.on_train_step: train_step, ms.on_test_step: test_step, ms.every(epochs=max(1, epochs // 5)): report},
        test_dataset=make_loader("test", "sequential"),
        stop=ms.at(epochs=epochs),
        key=jax.random.key(2),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--strategy", default="jit_donate")
    main(**vars(parser.parse_args()))
