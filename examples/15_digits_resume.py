"""A run that may be killed at any moment: the one that continues ends with the same bits as one that was left alone.

Run: pip install '.[train]', then python examples/15_digits_resume.py [--epochs 5]
That starts itself three times: undisturbed; killed, so that nothing can be tidied up; and once more on what is left.
To kill it yourself, as often as you like: python examples/15_digits_resume.py --folder run --epochs 2000
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
import optax

import millstream as ms

BATCH, SAVE_EVERY, HIDDEN = 64, 10, 64


@ms.managed.train_step
def train_step(state, batch):
    rows, mask = batch
    logits = jax.nn.relu(rows["image"] @ state.params["hidden"]) @ state.params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows["label"])
    return ms.logs().add_loss("loss", jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1))


def train(folder, epochs, kill_at):
    loader = ms.DataLoader(
        [
            ms.ArraySampleSource(ms.datasets.DigitsDataset("train").as_array_dict(), ordering="shuffle"),
            ms.BatchTransform(BATCH),
            ms.NormalizeImageTransform(),
            ms.FlattenImageTransform(),
        ]
    )
    first, second = jax.random.split(jax.random.key(0))
    params = {"hidden": jax.random.normal(first, (64, HIDDEN)) / 8, "out": jax.random.normal(second, (HIDDEN, 10)) / 8}
    tasks = {
        ms.loops.on_train_begin: lambda state, batch, elapsed: print(
            f"  begins after step {elapsed.steps}", flush=True
        ),
        ms.on_train_step: train_step,
        ms.every(SAVE_EVERY): ms.checkpoint(folder),
    }
    if kill_at is not None:
        tasks[ms.at(kill_at)] = lambda state: os.kill(os.getpid(), signal.SIGKILL)
    state, history, elapsed = ms.train_loop(
        ms.managed.ManagedState.create(params, optax.adam(3e-3), strategy="jit_donate"),
        loader,
        tasks,
        stop=ms.at(epochs=epochs),
        key=jax.random.key(1),
        resume=True,
    )
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]
    digest = hashlib.sha256(b"".join(leaves) + repr(history.collect("steps", "loss")).encode()).hexdigest()
    print(f"  ends with epoch {elapsed.epochs}, step {elapsed.steps}; digest of all parameters and logs {digest[:16]}")


def main(epochs):
    with tempfile.TemporaryDirectory() as name:
        left_alone, disturbed = pathlib.Path(name) / "left alone", pathlib.Path(name) / "disturbed"
        ends = []
        for words, folder, more in (
            ("a run that is left alone", left_alone, []),
            ("a run that is killed", disturbed, ["--kill-at", f"{epochs * 13}"]),
            ("the same again", disturbed, []),
        ):
            print(words, flush=True)
            command = [sys.executable, __file__, "--epochs", f"{epochs}", "--folder", f"{folder}", *more]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            print(f"{done.stdout}  exit status {done.returncode}")
            ends.append(done.stdout.splitlines()[-1])
    if ends[0] != ends[2]:
        sys.exit("the two ends are DIFFERENT")
    print("the two ends are identical")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--folder", help="train here, and continue with what is there")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="be killed at this step")
    options = parser.parse_args()
    if options.folder is None:
        main(options.epochs)
    else:
        train(options.folder, options.epochs, options.kill_at)
