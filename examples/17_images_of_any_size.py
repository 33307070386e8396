"""A dataset as PyTorch has it, with images of any size: split, balanced, resized by workers, flipped on the device.

Run: python examples/17_images_of_any_size.py [--epochs 6]
Nothing says what a sample looks like: images stay images of Pillow until a function makes arrays of them.
"""

import argparse
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import PIL.ImageDraw

import millstream as ms

SIZE = (24, 24)


class Shapes:
    """Photographs of shapes, of many sizes; one class is rare."""

    def __init__(self, folder):
        self.paths = sorted(folder.glob("*.png"))
        self.labels = np.array([int(path.stem.partition("-")[2]) for path in self.paths])

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return {"image": PIL.Image.open(self.paths[index]), "label": self.labels[index]}


def draw(folder, count):
    """Disks, and one triangle in six images."""
    rng = np.random.default_rng(0)
    for number in range(count):
        width, height = rng.integers(32, 80, 2).tolist()
        image = PIL.Image.new("RGB", (width, height), tuple(rng.integers(0, 90, 3).tolist()))
        pen, color = PIL.ImageDraw.Draw(image), tuple(rng.integers(150, 256, 3).tolist())
        label = int(number % 6 == 0)
        if label:
            pen.polygon([(4, height - 4), (width - 4, height - 4), (width // 2, 4)], fill=color)
        else:
            pen.ellipse((4, 4, width - 4, height - 4), fill=color)
        image.save(folder / f"{number:04}-{label}.png")


def resized(sample):
    return {**sample, "image": np.asarray(sample["image"].resize(SIZE))}


def flip(sample, mask, key):
    mirrored = jnp.where(jax.random.bernoulli(key), sample["image"][:, ::-1], sample["image"])
    return {**sample, "image": mirrored}


def scores_of(weights, images):
    flat = images.reshape(len(images), -1)
    return jax.nn.log_softmax((flat - flat.mean(axis=1, keepdims=True)) @ weights)


@jax.jit
def train_step(weights, batch):
    rows, mask = batch

    def loss_fn(weights):
        losses = -jnp.take_along_axis(scores_of(weights, rows["image"]), rows["label"][:, None], axis=1)[:, 0]
        return jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1)

    loss, gradient = jax.value_and_grad(loss_fn)(weights)
    return ms.logs().add_metric("loss", loss), weights - 0.05 * gradient


@jax.jit
def test_step(weights, batch):
    rows, mask = batch
    right = jnp.argmax(scores_of(weights, rows["image"]), axis=1) == rows["label"]
    return ms.logs().add_metric("accuracy", jnp.sum(right * mask) / jnp.maximum(jnp.sum(mask), 1))


def main(epochs):
    with tempfile.TemporaryDirectory() as name:
        folder, key = pathlib.Path(name), jax.random.key(0)
        draw(folder, 240)
        shapes = Shapes(folder)
        train, test = ms.views.split(ms.DatasetSource(shapes), {"train": 0.8, "test": 0.2}, stratify=shapes.labels)
        labels = shapes.labels[train.locate(np.arange(len(train)))]
        loader = ms.DataLoader(
            [
                ms.views.balanced(train, labels),  # every class equally often, drawn anew every epoch
                ms.HostMapTransform(resized),
                ms.BatchTransform(32),
                ms.RandomMapTransform(flip),  # on the device, with a key per sample
                ms.NormalizeImageTransform(),
            ],
            executor=ms.Processes(2),
        )
        tests = ms.DataLoader([test.map(resized), ms.BatchTransform(32), ms.NormalizeImageTransform()])
        weights = jnp.zeros((SIZE[0] * SIZE[1] * 3, 2))
        output = ms.train_loop(
            weights,
            loader,
            {ms.on_train_step: train_step, ms.on_test_step: test_step},
            test_dataset=tests,
            stop=ms.at(epochs=epochs),
            key=key,
        )
        accuracies = output.history.collect("accuracy_test")
        for epoch, accuracy in enumerate(accuracies, 1):
            print(f"epoch {epoch}  accuracy {accuracy:.3f} on {len(test)} images it has not seen")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    main(**vars(parser.parse_args()))
