"""Two corpora whose mixture and batch size change in the run, tested on held-out text, killed and resumed.

Run: python examples/19_mixture_that_changes.py [--epochs 6]
That starts itself three times: undisturbed; killed, so that nothing can be tidied up; and once more on what is left.
The report of the last one shows how the mixture was planned and what was seen of it: --folder run keeps it in run.
"""

import argparse
import hashlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import millstream as ms
from millstream.report.page import write_report

LENGTH, TEST_EVERY = 24, 20
SUBJECTS, VERBS = ["the miller", "a mill wheel", "the river", "old grain"], ["turns", "carries", "waits for", "feeds"]
NAMES = ["flour", "water", "wheel", "stone"]


def prose(rng):
    return f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(SUBJECTS)}. "


def code(rng):
    return f"{rng.choice(NAMES)} = {rng.choice(NAMES)} + {rng.integers(100)}\n"


def corpus(write, sentences, seed):
    """Rows of text, as bytes."""
    rng = np.random.default_rng(seed)
    text = np.frombuffer("".join(write(rng) for _ in range(sentences)).encode(), np.uint8)
    rows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    return ms.ArraySampleSource({"text": rows})


def loss_of(params, rows, mask):
    """How badly the next letter is guessed from two letters before it."""
    text = rows["text"].astype(jnp.int32)
    before = params["last"][text[:, 1:-1]] + params["one before"][text[:, :-2]]
    scores = jax.nn.log_softmax(before @ params["out"])
    losses = -jnp.take_along_axis(scores, text[:, 2:, None], axis=-1)[..., 0].mean(axis=1)
    return jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1)


@jax.jit
def train_step(params, batch):
    rows, mask = batch
    loss, gradient = jax.value_and_grad(loss_of)(params, rows, mask)
    share = jnp.sum((rows["source"] == 1) * mask) / jnp.maximum(jnp.sum(mask), 1)
    logs = ms.logs().add_metric("loss", loss).add_metric("code in the batch", share)
    return logs, jax.tree.map(lambda old, change: old - 2.0 * change, params, gradient)


@jax.jit
def test_step(params, batch):
    rows, mask = batch
    return ms.logs().add_metric("loss", loss_of(params, rows, mask))


def train(folder, epochs, kill_at):
    parts = {"train": 0.9, "test": 0.1}
    prose_train, prose_test = ms.views.split(corpus(prose, 3000, seed=0), parts)
    code_train, code_test = ms.views.split(corpus(code, 1000, seed=1), parts)
    steps = epochs * TEST_EVERY
    sizes = {0: 16, steps // 3: 32}  # small batches at first
    samples = 16 * (steps // 3) + 32 * (steps - steps // 3)
    mixture = ms.views.mix(
        {"prose": prose_train, "code": code_train},
        {"prose": 1.0, "code": ms.views.ramp(0.1, 1.0, samples=samples // 2)},
        samples=samples,  # all of the run, as the weights change over it
        source_field="source",
    )
    loader = ms.DataLoader([mixture, ms.BatchTransform(sizes)])
    tests = ms.DataLoader([ms.views.concat(prose_test, code_test), ms.BatchTransform(64)])
    tasks = {
        ms.loops.on_train_begin: lambda state, batch, elapsed: print(
            f"  begins after step {elapsed.steps}", flush=True
        ),
        ms.on_train_step: train_step,
        ms.on_test_step: test_step,
        ms.every(5): ms.checkpoint(folder),
    }
    if kill_at is not None:
        tasks[ms.at(kill_at)] = lambda state: os.kill(os.getpid(), signal.SIGKILL)
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "last": jax.random.normal(keys[0], (256, 32)),
        "one before": jax.random.normal(keys[1], (256, 32)),
        "out": jax.random.normal(keys[2], (32, 256)) / 6,
    }
    params, history, elapsed = ms.train_loop(
        params,
        loader,
        tasks,
        test_dataset=tests,
        test_every=TEST_EVERY,
        callbacks=[ms.record(folder)],
        stop=steps,
        key=jax.random.key(1),
        resume=True,
    )
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]
    digest = hashlib.sha256(b"".join(leaves) + repr(history.collect("steps", "loss")).encode()).hexdigest()
    shares = history.collect("code in the batch")
    print(f"  epoch {elapsed.epochs}, step {elapsed.steps}, {elapsed.samples} samples; code went from", end=" ")
    print(f"{np.mean(shares[:10]):.2f} to {np.mean(shares[-10:]):.2f} of a batch, the loss on held-out text", end=" ")
    print(f"to {history.collect('loss_test')[-1]:.2f}; digest of all parameters and logs {digest[:16]}")


def main(epochs, folder):
    with tempfile.TemporaryDirectory() as name:
        left_alone, disturbed = pathlib.Path(name) / "left alone", pathlib.Path(folder or name) / "disturbed"
        kill_at = epochs * TEST_EVERY // 2 + 3
        print("undisturbed")
        start(left_alone, epochs)
        print(f"killed at step {kill_at}")
        start(disturbed, epochs, "--kill-at", str(kill_at))
        print("resumed")
        start(disturbed, epochs)
        print(f"the report is {write_report(disturbed).stat().st_size // 1000} kB of HTML")


def start(folder, epochs, *more):
    command = [sys.executable, __file__, "--run", str(folder), "--epochs", str(epochs), *more]
    code = subprocess.run(command, check=False).returncode
    assert code == (-signal.SIGKILL if more else 0), code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--folder", help="where to keep the run and its report")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--kill-at", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        train(given.run, given.epochs, given.kill_at)
    else:
        main(given.epochs, given.folder)
