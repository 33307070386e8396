"""A residual network in flax.nnx, at the speed of a compiled function of arrays: the module is split only once.

Run: pip install '.[train]', then python examples/12_digits_nnx.py [--epochs 20]
Metrics are objects of nnx; up to a hundred steps are one program; what was learned comes back as a module of nnx.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import millstream as ms

BATCH, WIDTH, BLOCKS = 64, 64, 4


class Block(nnx.Module):
    """Two layers beside a shortcut."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.widen = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.narrow = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.narrow(self.dropout(nnx.gelu(self.widen(self.norm(x)))))


class Classifier(nnx.Module):
    """Blocks on the pixels, and ten scores."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])
        self.out = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def make_loader(split, ordering):
    return ms.DataLoader(
        [
            ms.ArraySampleSource(ms.datasets.DigitsDataset(split).as_array_dict(), ordering=ordering),
            ms.BatchTransform(BATCH),
            ms.NormalizeImageTransform(),
            ms.FlattenImageTransform(),
        ]
    )


def main(epochs):
    state = ms.create_nnx_state(
        Classifier(nnx.Rngs(0)),
        optax.adamw(1e-3),
        losses={"loss": optax.softmax_cross_entropy_with_integer_labels},
        metrics={"accuracy": nnx.metrics.Accuracy()},
        strategy="jit_donate",
    )
    begun = time.perf_counter()
    state, history, elapsed = ms.train_loop(
        state,
        make_loader("train", "shuffle"),
        test_dataset=make_loader("test", "sequential"),
        stop=ms.at(epochs=epochs),
        key=jax.random.key(0),
        fuse=100,
    )
    tested = history.collect("epochs", "loss_test", "accuracy_test")
    for epoch, loss, accuracy in list(zip(*tested, strict=True))[:: max(1, epochs // 5)]:
        print(f"epoch {epoch:>3}  test loss {loss:.4f}  test accuracy {accuracy:.2%}")
    seconds = time.perf_counter() - begun
    print(f"{elapsed.steps} steps and {len(tested[0])} tests in {seconds:.1f} s, compilation and all")

    model = state.model()
    model.eval()
    digits = ms.datasets.DigitsDataset("test").as_array_dict()
    answers = jnp.argmax(model(jnp.asarray(digits["image"].reshape(-1, 64) / 255.0, jnp.float32)), axis=1)
    print(f"as a module again it says {answers[:10].tolist()} to digits that are {digits['label'][:10].tolist()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    main(**vars(parser.parse_args()))
