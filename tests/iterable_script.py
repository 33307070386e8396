"""A training run over a generator that kills itself at a step, or continues with what is in its folder.

`python iterable_script.py FOLDER [STEP]` prints the state and the losses of a run that comes to its end.
"""

import json
import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np

import millstream as ms

SAMPLES, ROWS, STEPS = 23, 4, 20


def samples(epoch):
    random = np.random.default_rng(epoch)
    for number in range(SAMPLES + epoch % 3):  # passes of different lengths
        yield {"x": random.normal(size=3).astype(np.float32), "number": np.float32(number)}


def noise(sample, rng):
    return {**sample, "x": sample["x"] + rng.normal(size=3).astype(np.float32)}


@jax.jit
def train_step(weights, batch):
    value, mask = batch
    loss, gradient = jax.value_and_grad(
        lambda weights: jnp.sum(jnp.where(mask, jnp.square(value["x"] @ weights - value["number"]), 0.0))
    )(weights)
    return ms.logs().add_metric("loss", loss), weights - 1e-3 * gradient


def run(folder, killed_at=None):
    """Train; the history and the state."""

    def kill(state, batch, elapsed):
        if elapsed.steps == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    source = ms.sources.IterableSource(samples, shuffle_buffer=6)
    loader = ms.DataLoader([source, ms.RandomHostMapTransform(noise), ms.BatchTransform(ROWS)])
    return ms.train_loop(
        jnp.zeros(3),
        loader,
        {ms.on_train_step: train_step, ms.every(3): ms.checkpoint(folder), ms.every(1): kill},
        stop=STEPS,
        key=jax.random.key(5),
        resume=True,
    )


def outcome(output):
    """What came of it, in values to compare."""
    losses = np.asarray(output.history.collect("loss"))
    return [np.asarray(output.state).tolist(), losses.tolist(), output.elapsed.samples]


if __name__ == "__main__":
    print(json.dumps(outcome(run(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None))))
