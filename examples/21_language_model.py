"""From raw text to a trained language model: prepared, split, packed, mixed, killed, resumed and sampled from.

Run: pip install '.[train,parquet]', then python examples/21_language_model.py [--epochs 12]
Two corpora are tokenized and cleaned of duplicates once. The model is trained data parallel on eight (virtual) devices,
three times: undisturbed; killed, so that nothing can be tidied up; and resumed, to the same parameters bit for bit.
--folder keeps the prepared text, the runs and their report.
"""

import argparse
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import millstream as ms
from millstream.report.page import write_report

LENGTH, BATCH, WIDTH, HEADS, LAYERS = 64, 16, 64, 4, 2
TEST_EVERY, SAVE_EVERY = 20, 10
TOKENIZER = ms.tokenizers.byte_tokenizer()
WHO, WHAT = ["the miller", "a wheel", "the river", "old grain", "the baker"], ["turns", "carries", "waits for", "feeds"]
NAMES = ["flour", "water", "wheel", "stone"]


# Raw text, as it comes: one line of JSON per document, some of them more than once, and files of code.


def write_text(folder):
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "stories.jsonl").open("w") as file:
        for _ in range(1500):
            sentences = [f"{rng.choice(WHO)} {rng.choice(WHAT)} {rng.choice(WHO)}." for _ in range(rng.integers(1, 6))]
            file.write(json.dumps({"text": " ".join(sentences)}) + "\n")
    with (folder / "code.txt").open("w") as file:
        for _ in range(500):
            file.write(f"{rng.choice(NAMES)} = {rng.choice(NAMES)} + {rng.integers(100)}\n")


def tokenized(sample):
    """What is kept of a document: its tokens. Short ones are left out."""
    text = sample["text"] if isinstance(sample, dict) else sample
    return {"tokens": TOKENIZER(text)} if len(text) > 10 else None


def prepare(folder):
    """Tokenize once. Killed and called again, this continues; once it is done, it opens what is there."""
    stories = ms.sources.JsonlSource(folder / "stories.jsonl")
    code = ms.sources.TextLinesSource(folder / "code.txt")
    return {
        "stories": ms.prepare(stories, folder / "stories", tokenized, deduplicate="text", executor=ms.Processes(2)),
        "code": ms.prepare(code, folder / "code", tokenized),
    }


# The model.


class Block(nnx.Module):
    """Attention within documents, and two layers."""

    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attend = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.widen = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.narrow = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attend(self.norms[0](x), mask=mask)
        return x + self.narrow(nnx.gelu(self.widen(self.norms[1](x))))


class GPT(nnx.Module):
    """Scores of the token after each token of a packed row."""

    def __init__(self, rngs):
        self.tokens = nnx.Embed(TOKENIZER.vocabulary_size, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens, segments, positions):
        mask = ms.transforms.segment_mask(segments)[:, None]
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.tokens.attend(self.norm(x))


def new_state(mesh):
    model = GPT(nnx.Rngs(0))
    graph, params = nnx.split(model)
    state = ms.managed.ManagedState.create(
        params.to_pure_dict(), optax.adamw(3e-3), strategy=ms.managed.DataParallel(mesh)
    )
    return state, lambda params: nnx.merge(graph, nnx.State(params))


def make_steps(model_of):
    def loss_of(state, batch):
        """Of the tokens that follow one in the same document; those that begin one are not guessed."""
        rows, mask = batch
        tokens, segments = rows["tokens"].astype(jnp.int32), rows["segments"]
        scores = model_of(state.params)(tokens, segments, rows["positions"])
        losses = optax.softmax_cross_entropy_with_integer_labels(scores[:, :-1], tokens[:, 1:])
        counts = rows["loss_mask"][:, 1:] * mask[:, None]
        return jnp.sum(losses * counts) / jnp.maximum(jnp.sum(counts), 1)

    @ms.managed.train_step
    def train_step(state, batch):
        padding = jnp.mean(batch[0]["segments"] == 0)
        return ms.logs().add_loss("loss", loss_of(state, batch)).add_metric("padding", padding)

    @ms.managed.step
    def test_step(state, batch):
        return ms.logs().add_metric("loss", loss_of(state, batch))

    return train_step, test_step


# A run.


def make_data(folder, steps, mesh):
    train, test = {}, []
    for name, source in prepare(folder).items():
        parts = dict(zip(("train", "test"), ms.views.split(source, {"train": 0.9, "test": 0.1}), strict=True))
        packed = {part: ms.views.pack(view, LENGTH, eos=TOKENIZER.eos) for part, view in parts.items()}
        train[name] = packed["train"]
        test.append(packed["test"])
    mixture = ms.views.mix(
        train,
        {"stories": 1.0, "code": ms.views.ramp(0.1, 0.5, samples=steps * BATCH // 2)},
        samples=steps * BATCH,  # all of the run, as the weights change over it
    )
    loader = ms.DataLoader([mixture, ms.BatchTransform(BATCH)], sharding=mesh, executor=ms.Threads(2))
    return loader, ms.DataLoader([ms.views.concat(*test), ms.BatchTransform(BATCH)], sharding=mesh)


def tokens_per_second():
    """A task that logs how fast it goes, for the report."""
    last = None

    def measure(state, batch, elapsed):
        nonlocal last
        now, before, last = time.perf_counter(), last, (time.perf_counter(), elapsed.samples)
        if before is None:
            return None
        return ms.logs().add_metric("tokens per second", (elapsed.samples - before[1]) * LENGTH / (now - before[0]))

    return measure


def train(folder, run, epochs, kill_at):
    mesh, steps = jax.make_mesh((8,), ("data",)), epochs * TEST_EVERY
    loader, tests = make_data(folder, steps, mesh)
    state, model_of = new_state(mesh)
    train_step, test_step = make_steps(model_of)
    tasks = {
        ms.loops.on_train_begin: lambda state, batch, elapsed: print(
            f"  begins after step {elapsed.steps}", flush=True
        ),
        ms.on_train_step: train_step,
        ms.on_test_step: test_step,
        ms.every(SAVE_EVERY): [ms.checkpoint(run), tokens_per_second()],
    }
    if kill_at is not None:
        tasks[ms.at(kill_at)] = lambda state: os.kill(os.getpid(), signal.SIGKILL)
    state, history, elapsed = ms.train_loop(
        state,
        loader,
        tasks,
        test_dataset=tests,
        test_every=TEST_EVERY,
        callbacks=[ms.record(run)],
        stop=steps,
        key=jax.random.key(1),
        resume=True,
    )
    params = jax.device_get(state.params)
    digest = hashlib.sha256(b"".join(leaf.tobytes() for leaf in jax.tree.leaves(params))).hexdigest()[:16]
    print(f"  epoch {elapsed.epochs}, step {elapsed.steps}, {elapsed.samples * LENGTH:,} tokens,", end=" ")
    print(f"{np.mean(history.collect('padding')):.1%} of them padding; loss on held-out text", end=" ")
    print(f"{history.collect('loss_test')[-1]:.2f}; parameters {digest}")
    for beginning in ("the miller ", "flour = "):
        print(f"  {sampled(model_of(params), beginning)!r}")


@nnx.jit
def next_scores(model, tokens, length):
    """The scores of the token after the first `length` ones."""
    inside = jnp.arange(LENGTH) < length
    scores = model(tokens[None], inside[None].astype(jnp.int32), jnp.arange(LENGTH)[None])
    return scores[0, length - 1]


def sampled(model, beginning):
    """How the model continues a text, drawn at a low temperature."""
    tokens = TOKENIZER(beginning).tolist()
    while len(tokens) < LENGTH and tokens[-1] != TOKENIZER.eos:
        row = np.zeros(LENGTH, np.int32)
        row[: len(tokens)] = tokens
        key = jax.random.fold_in(jax.random.key(0), len(tokens))
        tokens.append(int(jax.random.categorical(key, next_scores(model, row, len(tokens)) / 0.5)))
    return TOKENIZER.decode([token for token in tokens if token != TOKENIZER.eos])


def main(epochs, folder):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(folder or name)
        write_text(folder)
        for name, source in prepare(folder).items():
            print(f"{name}: {len(source):,} documents, {source.lengths['tokens'].sum():,} tokens")
        kill_at = epochs * TEST_EVERY // 2 + 3
        digests = []
        for name, run, more in (
            ("undisturbed", "left alone", []),
            (f"killed at step {kill_at}", "disturbed", ["--kill-at", str(kill_at)]),
            ("resumed", "disturbed", []),
        ):
            print(name)
            digests.append(start(folder, folder / run, epochs, more))
        assert digests[0] == digests[2], "the resumed run is not the one that was left alone"
        print("the same parameters, bit for bit;", end=" ")
        print(f"the report is {write_report(folder / 'disturbed').stat().st_size // 1000} kB of HTML")


def start(folder, run, epochs, more):
    """Train in a process of its own, and return what it says of its parameters."""
    command = [sys.executable, __file__, "--folder", str(folder), "--run", str(run), "--epochs", str(epochs), *more]
    found = subprocess.run(command, env=os.environ | {"JAX_NUM_CPU_DEVICES": "8"}, stdout=subprocess.PIPE, text=True)
    print(found.stdout, end="")
    assert found.returncode == (-signal.SIGKILL if more else 0), found.returncode
    return found.stdout.rpartition("parameters ")[2][:16]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--folder", type=pathlib.Path, help="where to keep text, runs and report")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--kill-at", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        train(given.folder, given.run, given.epochs, given.kill_at)
    else:
        main(given.epochs, given.folder)
