"""Made text, a tokenizer that is trained on it, and programs that tokenize it: each prints its seconds."""

import json
import os
import pathlib
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np

WORKERS, AT_ONCE = 2, 1_000
_WORDS, _VOCABULARY = 20_000, 8_000
_LETTERS = np.frombuffer(b"etaoinshrdlucmfwypvbgkjqxz", np.uint8)


def write_texts(path: pathlib.Path, megabytes: float) -> None:
    """Documents of lognormal lengths, 1.5 kB on average, of words that are as rare as in a language."""
    chance = np.random.default_rng(0)
    sizes = chance.integers(2, 12, _WORDS)
    words = [bytes(_LETTERS[np.minimum(chance.geometric(0.12, size) - 1, 25)]).decode() for size in sizes]
    left = megabytes * 1e6
    with path.open("w") as file:
        while left > 0:
            count = int(np.clip(chance.lognormal(5.0, 1.0), 1, 5_000))
            text = " ".join(words[number] for number in chance.zipf(1.3, count) % _WORDS)
            left -= file.write(json.dumps({"text": text}) + "\n")


def train_tokenizer(texts: pathlib.Path, path: pathlib.Path) -> None:
    """A byte-level BPE of the library `tokenizers`."""
    from tokenizers import ByteLevelBPETokenizer

    with texts.open() as file:
        lines = [json.loads(line)["text"] for _, line in zip(range(2_000), file, strict=False)]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(lines, _VOCABULARY, show_progress=False)
    tokenizer.save(str(path))


def load_tokenizer(folder: str) -> Any:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many processes as cores
    from tokenizers import Tokenizer

    return Tokenizer.from_file(f"{folder}/tokenizer.json")


def by_prepare(folder: str) -> None:
    """From JSON Lines to shards of Arrow with an index, verified."""
    tokenizer = load_tokenizer(folder)

    def fn(samples: list[dict[str, str]]) -> list[dict[str, Any]]:
        return [{"ids": encoding.ids} for encoding in tokenizer.encode_batch([sample["text"] for sample in samples])]

    _by_prepare(folder, fn)


def by_prepare_and_adapter(folder: str) -> None:
    """The same with the tokenizer as docs/text.md has it: ids are arrays of 16 bits."""
    import millstream as ms

    tokenizer = ms.tokenizers.Tokenizer(load_tokenizer(folder))

    def fn(samples: list[dict[str, str]]) -> list[dict[str, Any]]:
        return [{"ids": ids} for ids in tokenizer.encode_batch([sample["text"] for sample in samples])]

    _by_prepare(folder, fn)


def _by_prepare(folder: str, fn: Callable[[list[dict[str, str]]], list[dict[str, Any]]]) -> None:
    import jax  # noqa: F401 (which millstream loads; datasets is loaded before its clock runs, too)

    import millstream as ms

    begun = time.perf_counter()
    source = ms.sources.JsonlSource(f"{folder}/texts.jsonl", ordering="sequential")
    out = f"{folder}/prepared"
    made = ms.prepare(source, out, fn, at_once=AT_ONCE, executor=ms.Processes(WORKERS), version="1")
    _told(begun, sum(int(part) for part in made.lengths["ids"]), folder)


def by_map(folder: str) -> None:
    """From a dataset in Arrow, which is made of the same lines before the clock runs, to Arrow."""
    _by_map(folder, from_lines=False)


def by_map_from_lines(folder: str) -> None:
    """From JSON Lines to Arrow, which counts: the dataset has to be made first."""
    _by_map(folder, from_lines=True)


def _by_map(folder: str, *, from_lines: bool) -> None:
    import datasets

    datasets.disable_progress_bars()
    tokenizer = load_tokenizer(folder)

    def fn(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"ids": [encoding.ids for encoding in tokenizer.encode_batch(batch["text"])]}

    begun = time.perf_counter()
    given = datasets.Dataset.from_json(f"{folder}/texts.jsonl", cache_dir=f"{folder}/datasets")
    if not from_lines:
        begun = time.perf_counter()
    options = {"batched": True, "batch_size": AT_ONCE, "num_proc": WORKERS, "load_from_cache_file": False}
    made = given.map(fn, remove_columns=["text"], **options)
    seconds = time.perf_counter()
    tokens = sum(map(len, made.with_format("numpy")["ids"]))
    _told(begun + time.perf_counter() - seconds, tokens, folder)


def _told(begun: float, tokens: int, folder: str) -> None:
    """Print seconds and those of CPU, in all processes that have ended; both must have found as many tokens."""
    seconds = time.perf_counter() - begun
    known = pathlib.Path(folder, "tokens")
    if not known.exists():
        known.write_text(str(tokens))
    if known.read_text() != str(tokens):
        raise AssertionError(f"{tokens} tokens, and {known.read_text()} before")
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(seconds, sum(one.ru_utime + one.ru_stime for one in used))
