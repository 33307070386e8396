"""Texts of different lengths: batches by length, each padded to its bucket alone, and one compiled step per bucket.

The texts are made here: reviews of three to eighty words, some of which say whether the film was liked. A text is its
bytes. The lengths decide beforehand which texts make which batch, so a run can start at any step, and every text comes
once in an epoch.

Run: pip install '.[train]', then python examples/18_text_by_length.py [--epochs 12]
"""

import argparse
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax

import millstream as ms

WORDS = "the a film plot actor scene music was is very quite long short and but with".split()
GOOD, BAD = ("lovely", "brilliant", "moving", "funny"), ("boring", "awful", "clumsy", "dull")
WIDTH, TOKENS = 32, 8192
OPTIMIZER = optax.adam(1e-2)


def reviews(count, seed):
    """Made-up reviews, as a dataset of dicts."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        words = chance.choices(WORDS, k=min(3 + int(chance.expovariate(0.06)), 80))
        label = chance.randrange(2)
        for _ in range(1 + len(words) // 20):
            words[chance.randrange(len(words))] = chance.choice((BAD, GOOD)[label])
        found.append({"text": " ".join(words), "label": label})
    return found


def tokenize(sample):
    return {"ids": np.frombuffer(sample["text"].encode(), np.uint8), "label": np.int32(sample["label"])}


def make_loader(samples, ordering):
    source = ms.DatasetSource(samples, ordering)
    by_length = ms.views.buckets(source, lambda sample: len(sample["text"]), 4, tokens_per_batch=TOKENS)
    return ms.DataLoader([by_length, ms.HostMapTransform(tokenize), ms.PadTransform({"ids": 0})])


def make_params(key):
    first, second, third = jax.random.split(key, 3)
    return {
        "bytes": jax.random.normal(first, (256, WIDTH)),
        "words": jax.random.normal(second, (7, WIDTH, WIDTH)) / (7 * WIDTH) ** 0.5,
        "out": jax.random.normal(third, (WIDTH, 2)) / WIDTH**0.5,
    }


def logits_of(params, rows):
    """Windows of seven bytes, of which the one that says most counts; padding says nothing."""
    known = params["bytes"][rows["ids"]] * rows["ids_mask"][..., None]
    found = jax.lax.conv_general_dilated(known, params["words"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    found = jnp.where(rows["ids_mask"][..., None], jax.nn.relu(found), 0.0)
    return jnp.max(found, axis=1) @ params["out"]


def loss_fn(params, batch):
    """The mean loss of the real rows, and the logs."""
    rows, mask = batch
    logits = logits_of(params, rows)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows["label"])
    hits = jnp.argmax(logits, axis=1) == rows["label"]
    loss, accuracy = (jnp.sum(values * mask) / jnp.maximum(jnp.sum(mask), 1) for values in (losses, hits))
    return loss, ms.logs().add_metric("loss", loss).add_metric("accuracy", accuracy)


@jax.jit
def train_step(state, batch):
    params, moments = state
    gradients, logs = jax.grad(loss_fn, has_aux=True)(params, batch)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return logs, (optax.apply_updates(params, updates), moments)


@jax.jit
def test_step(state, batch):
    return loss_fn(state[0], batch)[1]


def main(epochs):
    loader = make_loader(reviews(4000, 0), "shuffle")
    plan = loader.explain().plan
    print(f"an epoch: {plan['epoch']}; {plan['padding']} are padding")
    params = make_params(jax.random.key(0))
    output = ms.train_loop(
        (params, OPTIMIZER.init(params)),
        loader,
        {ms.on_train_step: train_step, ms.on_test_step: test_step},
        test_dataset=make_loader(reviews(500, 1), "sequential"),
        stop=ms.at(epochs=epochs),
        key=jax.random.key(1),
    )
    for epoch, loss, accuracy in zip(*output.history.collect("epochs", "loss_test", "accuracy_test"), strict=True):
        print(f"epoch {epoch:>2}  test loss {loss:.4f}  test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    main(parser.parse_args().epochs)
