"""Fine-tune a small language model on labelled texts: only adapters of a few numbers are trained, the base is frozen.

The texts are made here, by a small grammar, and are a dataset of Hugging Face. A model learns to continue them, in
packed rows; that is the base. Then it learns to tell good reviews from bad ones: texts of similar length make a batch,
padded to its bucket alone, and low-rank adapters (LoRA) and a head are all that is trained and saved. The run stops
half-way, and continues from its checkpoint.

Run: pip install '.[train,equinox,huggingface,tokenizers]', then python examples/20_fine_tuning_text.py [--epochs 8]
"""

import argparse
import pathlib
import random
import tempfile

import datasets
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers

import millstream as ms
from millstream.integrations.huggingface import HuggingFaceSource

WIDTH, HEADS, LAYERS, RANK, LONGEST = 48, 4, 2, 4, 64
PACKED, BUCKETS, TOKENS = 64, 3, 1024
OPTIMIZER = optax.flatten(optax.adam(5e-3))  # one vector for all arrays, which is compiled faster
GOOD, BAD = ("lovely", "brilliant", "moving", "funny", "clever"), ("boring", "awful", "clumsy", "dull", "silly")
THINGS = "film plot cast music ending script camera hero".split()


def reviews(count, seed):
    """Made-up reviews: 'the plot was not boring and the cast is lovely', with a label. All of a review agree."""
    chance, rows = random.Random(seed), []
    for _ in range(count):
        label, clauses = chance.randrange(2), []
        for _ in range(chance.randint(1, 6)):
            negated = chance.random() < 0.4
            word = chance.choice((BAD, GOOD)[label != negated])
            verb = chance.choice(("was", "is", "seemed")) + " not" * negated
            clauses.append(f"the {chance.choice(THINGS)} {verb} {word}")
        rows.append({"text": chance.choice((" and ", ", ", "; ")).join(clauses), "label": label})
    return datasets.Dataset.from_list(rows)


def make_tokenizer(texts):
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=340, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(texts, trainer)
    return ms.tokenizers.Tokenizer(model, eos="<eos>")


def ids_of(dataset, tokenizer, ordering="shuffle"):
    source = HuggingFaceSource(dataset, ordering=ordering)
    return source.map(lambda row: {"ids": tokenizer(row["text"]), "label": np.int32(row["label"])})


class Linear(eqx.Module):
    """A matrix, and the small correction that an adapter adds to it."""

    weight: jax.Array
    down: jax.Array
    up: jax.Array

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.weight = jax.random.normal(first, (WIDTH, WIDTH)) / WIDTH**0.5
        self.down, self.up = jax.random.normal(second, (WIDTH, RANK)) / WIDTH**0.5, jnp.zeros((RANK, WIDTH))

    def __call__(self, x):
        return x @ self.weight + (x @ self.down) @ self.up


class Block(eqx.Module):
    """Attention and one hidden layer."""

    query: Linear
    key: Linear
    value: Linear
    out: Linear
    hidden: jax.Array
    back: jax.Array

    def __init__(self, key):
        *keys, first, second = jax.random.split(key, 6)
        self.query, self.key, self.value, self.out = map(Linear, keys)
        self.hidden = jax.random.normal(first, (WIDTH, 4 * WIDTH)) / WIDTH**0.5
        self.back = jax.random.normal(second, (4 * WIDTH, WIDTH)) / (4 * WIDTH) ** 0.5

    def __call__(self, x, allowed):
        inner = normalized(x)
        query, key, value = (part(inner).reshape(len(x), HEADS, -1) for part in (self.query, self.key, self.value))
        x = x + self.out(jax.nn.dot_product_attention(query, key, value, mask=allowed[None]).reshape(x.shape))
        return x + jax.nn.gelu(normalized(x) @ self.hidden) @ self.back


class Model(eqx.Module):
    """A language model of one row, with a head for labels."""

    tokens: jax.Array
    places: jax.Array
    blocks: Block  # all of them: their arrays have one more axis
    head: jax.Array

    def __init__(self, vocabulary, key):
        first, second, third = jax.random.split(key, 3)
        self.tokens = jax.random.normal(first, (vocabulary, WIDTH)) * 0.1
        self.places = jax.random.normal(second, (LONGEST, WIDTH)) * 0.1
        self.blocks = jax.vmap(Block)(jax.random.split(third, LAYERS))
        self.head = jnp.zeros((WIDTH, 2))

    def __call__(self, ids, positions, allowed):
        x = self.tokens[ids] + self.places[positions]
        x, _ = jax.lax.scan(lambda x, block: (block(x, allowed), None), x, self.blocks)
        return normalized(x)


def normalized(x):
    return (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5)


def continuation_loss(model, batch):
    """The mean loss of the next token, in packed rows."""
    allowed = ms.transforms.segment_mask(batch["segments"])
    found = jax.vmap(model)(batch["ids"], batch["positions"], allowed) @ model.tokens.T
    losses = optax.softmax_cross_entropy_with_integer_labels(found[:, :-1], batch["ids"][:, 1:])
    counts = batch["loss_mask"][:, 1:]
    return jnp.sum(losses * counts) / jnp.sum(counts)


@jax.jit
def pretraining_step(model, moments, batch):
    loss, gradients = jax.value_and_grad(continuation_loss)(model, batch)
    updates, moments = OPTIMIZER.update(gradients, moments)
    return optax.apply_updates(model, updates), moments, loss


def pretrained(source, tokenizer):
    """A model that can continue such texts."""
    rows = ms.views.pack(source, PACKED, leaves="ids", eos=tokenizer.eos, too_long="cut")
    loader = ms.DataLoader([rows, ms.BatchTransform(16, drop_last=True)])
    model = Model(tokenizer.vocabulary_size, jax.random.key(0))
    moments, losses = OPTIMIZER.init(model), []
    for batch, _ in loader.iterate(loader.init_state(jax.random.key(1)), steps=80):
        model, moments, loss = pretraining_step(model, moments, batch)
        losses.append(loss)
    print(f"the base: {len(losses)} steps on packed rows, loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    return model


def adapters_and_base(model):
    """The model in two parts: what is trained, and what is frozen."""
    frozen = jax.tree.map(lambda _: False, model)
    blocks = lambda tree: [tree.blocks.query, tree.blocks.value]  # noqa: E731
    where = lambda tree: [tree.head, *(array for one in blocks(tree) for array in (one.down, one.up))]  # noqa: E731
    return eqx.partition(model, eqx.tree_at(where, frozen, replace_fn=lambda _: True))


def label_loss(adapters, base, batch):
    """The mean loss of the real rows, and the logs; the last real token of a text knows all of it."""
    rows, mask = batch
    model, real = eqx.combine(adapters, base), rows["ids_mask"]
    positions = jnp.broadcast_to(jnp.arange(real.shape[1]), real.shape)
    found = jax.vmap(model)(rows["ids"], positions, ms.transforms.segment_mask(real.astype(jnp.int32)))
    last = jnp.take_along_axis(found, jnp.maximum(real.sum(1) - 1, 0)[:, None, None], axis=1)[:, 0]
    logits = last @ model.head
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows["label"])
    hits = jnp.argmax(logits, axis=1) == rows["label"]
    loss, accuracy = (jnp.sum(values * mask) / jnp.maximum(jnp.sum(mask), 1) for values in (losses, hits))
    return loss, ms.logs().add_metric("loss", loss).add_metric("accuracy", accuracy)


@jax.jit
def tuning_step(state, base, batch):
    adapters, moments = state
    gradients, logs = jax.grad(label_loss, has_aux=True)(adapters, base, batch)
    updates, moments = OPTIMIZER.update(gradients, moments)
    return logs, (optax.apply_updates(adapters, updates), moments)


@jax.jit
def test_step(state, base, batch):
    return label_loss(state[0], base, batch)[1]


def tune(state, base, train, test, folder, epochs):
    """Train to this epoch, from the newest checkpoint on. The base is an argument of the steps, and not saved."""
    return ms.train_loop(
        state,
        train,
        {
            ms.on_train_step: lambda state, batch: tuning_step(state, base, batch),
            ms.on_test_step: lambda state, batch: test_step(state, base, batch),
            ms.every(epochs=1): ms.checkpoint(folder),
        },
        test_dataset=test,
        stop=ms.at(epochs=epochs),
        key=jax.random.key(2),
        resume=True,
    )


def numbers_in(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def main(epochs):
    train_texts, test_texts = reviews(1200, 0), reviews(300, 1)
    tokenizer = make_tokenizer(train_texts["text"])
    print(tokenizer)
    source = ids_of(train_texts, tokenizer)
    adapters, base = adapters_and_base(pretrained(source, tokenizer))
    print(f"trained: {numbers_in(adapters):,} numbers beside {numbers_in(base):,} frozen ones")

    in_buckets = ms.views.buckets(source, "ids", BUCKETS, tokens_per_batch=TOKENS)
    train = ms.DataLoader([in_buckets, ms.PadTransform({"ids": 0})])
    lengths = [spec["ids"].shape[1] for spec in train.element_specs()]
    in_buckets = ms.views.buckets(
        ids_of(test_texts, tokenizer, "sequential"), "ids", lengths, tokens_per_batch=TOKENS, too_long="cut"
    )
    test = ms.DataLoader([in_buckets, ms.PadTransform({"ids": 0}, too_long="cut end")])
    plan = train.explain().plan
    print(f"an epoch: {plan['epoch']}; {plan['padding']} are padding")

    state = adapters, OPTIMIZER.init(adapters)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name) / "adapters"
        _, _, elapsed = tune(state, base, train, test, folder, max(1, epochs // 2))
        saved = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"stopped after step {elapsed.steps}; the checkpoints take {saved / 1e3:.0f} kB")
        state, history, elapsed = tune(state, base, train, test, folder, epochs)
    for epoch, loss, accuracy in zip(*history.collect("epochs", "loss_test", "accuracy_test"), strict=True):
        print(f"epoch {epoch:>2}  test loss {loss:.4f}  test accuracy {accuracy:.1%}")
    print(f"continued to step {elapsed.steps}; compiled for {tuning_step._cache_size()} shapes of a batch")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    main(parser.parse_args().epochs)
