"""Texts of different lengths in buckets.

Tokens of lognormal lengths (median 90, at most 256), as many places in a batch of buckets as in one of 64 rows that are
all padded to 256. A step that reads every place is part of it: padding costs what is computed for nothing. torch
pads each batch to its longest text in a `collate_fn`: nearly every batch then has a shape of its own.
"""

from typing import Any

import numpy as np
from _case import Options, main
from _measure import Entry, Missing, compilations, measured
from _result import Table

LONGEST, ROWS = 256, 64
BUCKETS, PADDED, TORCH = "Millstream, 3 buckets", "Millstream, padded to 256", "torch, padded to the longest"


def texts(count: int) -> list[dict[str, np.ndarray]]:
    lengths = np.random.default_rng(0).lognormal(4.5, 0.5, count)
    return [{"ids": np.arange(int(length), dtype=np.int32)} for length in np.clip(lengths, 1, LONGEST)]


def step() -> Any:
    import jax
    import jax.numpy as jnp

    table = jnp.ones((LONGEST, 64))

    @jax.jit
    def embed(ids: Any) -> Any:
        found = table[ids]
        return jnp.sum(jnp.tanh(found @ jnp.ones((64, 64))))

    return embed


def epoch_of(stages: list[Any]) -> Any:
    import jax

    import millstream as ms

    loader, run = ms.DataLoader(stages, executor=ms.Threads(1)), step()

    def epoch() -> None:
        result = None
        for batch, _ in loader.iterate(loader.init_state(jax.random.key(0))):
            result = run(batch["ids"])
        jax.block_until_ready(result)

    return epoch


def with_buckets(samples: list[Any]) -> Any:
    import millstream as ms

    view = ms.views.buckets(ms.DatasetSource(samples), "ids", 3, tokens_per_batch=ROWS * LONGEST)
    return epoch_of([view, ms.PadTransform({"ids": 0})])


def padded(samples: list[Any]) -> Any:
    import millstream as ms

    return epoch_of([ms.DatasetSource(samples), ms.PadTransform({"ids": 0}, LONGEST), ms.BatchTransform(ROWS)])


def torch_padded(samples: list[Any]) -> Any:
    try:
        import torch
    except ImportError as error:
        raise Missing("torch is not installed") from error
    import jax

    def collate(batch: list[Any]) -> np.ndarray:
        rows = [torch.from_numpy(sample["ids"]) for sample in batch]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).numpy()

    loader, run = torch.utils.data.DataLoader(samples, ROWS, shuffle=True, collate_fn=collate), step()

    def epoch() -> None:
        result = None
        for ids in loader:
            result = run(jax.numpy.asarray(ids))
        jax.block_until_ready(result)

    return epoch


def measure(options: Options) -> list[Table]:
    import jax

    import millstream as ms

    samples = texts(options.size(20_000, 300))
    entries = [
        Entry(BUCKETS, lambda: with_buckets(samples), "millstream"),
        Entry(PADDED, lambda: padded(samples), "millstream"),
        Entry(TORCH, lambda: torch_padded(samples), "torch"),
    ]
    table = measured("An epoch with its steps", "s per epoch", BUCKETS, entries, options.rounds(5))
    source, real = ms.DatasetSource(samples), sum(len(sample["ids"]) for sample in samples)
    for count, most in ((1, 65), (3, 26), (6, 15)):  # the lengths are the best there are: no three do better
        view = ms.views.buckets(source, "ids", count, tokens_per_batch=ROWS * LONGEST)
        places = sum(bucket.samples * length for bucket, length in zip(view.plan.buckets, view.lengths, strict=True))
        table.hold(f"padding, {count} bucket{'s' * (count > 1)}, % of tokens", 100 * (1 - real / places), at_most=most)
    view = ms.views.buckets(source, "ids", 3, tokens_per_batch=ROWS * LONGEST)
    loader, run = ms.DataLoader([view, ms.PadTransform({"ids": 0})]), step()
    batches = [batch["ids"] for batch, _ in loader.iterate(loader.init_state(jax.random.key(0)))]
    before = compilations()
    for ids in batches:
        run(ids)
    table.hold("compilations of a step in an epoch", compilations() - before, at_most=3)
    table.hold("times as fast as padded to 256", table.ratio(PADDED, BUCKETS), at_least=2)
    return [table]


if __name__ == "__main__":
    main(measure)
