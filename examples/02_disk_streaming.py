"""Data that stay on disk: a slow reading function, read ahead by threads while the model computes.

Run: python examples/02_disk_streaming.py [--epochs 3]
The same loader is used from Python and inside one compiled program per epoch, and gives the same batches.
"""

import argparse
import pathlib
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

import millstream as ms

BATCH = 64


def write_files(folder):
    """One small file per digit, as a camera or a crawler would leave them."""
    digits = ms.datasets.DigitsDataset("train")
    for index in range(len(digits)):
        (folder / f"{index}.raw").write_bytes(digits[index]["image"].tobytes() + bytes([digits[index]["label"]]))
    return len(digits)


def main(epochs):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        count = write_files(folder)

        def read(index):
            stored = np.fromfile(folder / f"{index}.raw", np.uint8)
            return {"image": stored[:64].reshape(8, 8, 1), "label": stored[64].astype(np.int32)}

        loader = ms.DataLoader(
            [
                ms.DiskSampleSource(count, read, ordering="shuffle", prefetch_size=256),
                ms.BatchTransform(BATCH),
                ms.NormalizeImageTransform(),
                ms.FlattenImageTransform(),
            ]
        )
        weights, state = jnp.zeros((64, 10)), loader.init_state(jax.random.key(0))
        for epoch in range(1, epochs + 1):
            begun = time.perf_counter()
            state, weights, losses = loader.scan_epoch(state, weights, train_step)
            rate = count / (time.perf_counter() - begun)
            print(f"epoch {epoch}  loss {losses.mean():.4f}  {rate:,.0f} files per second, one compiled program")

        batches = loader.iterate(state)
        step = jax.jit(train_step)
        begun = time.perf_counter()
        for batch, mask in batches:
            weights, loss = step(weights, batch, mask)
        rate = count / (time.perf_counter() - begun)
        print(f"epoch {epochs + 1}  loss {loss:.4f}  {rate:,.0f} files per second, step by step from Python")
        print(f"to continue: key {batches.state.key.tolist()}, step {int(batches.state.step)}")


def train_step(weights, batch, mask):
    def loss_fn(weights):
        scores = jax.nn.log_softmax(batch["image"] @ weights)
        losses = -jnp.take_along_axis(scores, batch["label"][:, None], axis=1)[:, 0]
        return jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1)

    loss, gradient = jax.value_and_grad(loss_fn)(weights)
    return weights - 0.5 * gradient, loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    main(**vars(parser.parse_args()))
