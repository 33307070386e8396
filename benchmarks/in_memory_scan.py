"""Shuffled batches of images in memory, an epoch in one compiled program.

The same 60,000 images. Every number of every batch is used. The scan that is written by hand has its permutation and
its mask ready-made; ours makes them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _case import Options, main
from _images import BATCH, SAMPLES, cyreal_loader, data, steps, to_jax
from _measure import Entry, Run, measured
from _result import Table

import millstream as ms

OURS, BY_HAND, CYREAL = "Millstream, scan_epoch", "a scan by hand", "cyreal, scan_epoch"


def sum_batch(total: jax.Array, batch: dict[str, jax.Array], mask: jax.Array) -> tuple[jax.Array, None]:
    """Use every number of the batch."""
    rows = batch["image"].astype(jnp.int32).sum(axis=(1, 2, 3)) + batch["label"]
    return total + jnp.sum(rows * mask), None


def millstream_scan(samples: int) -> Run:
    loader = ms.DataLoader([ms.ArraySampleSource(data(samples)), ms.BatchTransform(BATCH)])
    state = loader.init_state(jax.random.key(0))
    return lambda: jax.block_until_ready(loader.scan_epoch(state, jnp.int32(0), sum_batch))


def scan_by_hand(samples: int) -> Run:
    count, placed = steps(samples), to_jax(data(samples))
    padded = np.zeros(count * BATCH, np.int32)
    padded[:samples] = np.random.default_rng(0).permutation(samples)
    mask = np.arange(count * BATCH) < samples
    plan = jnp.asarray(padded.reshape(count, BATCH)), jnp.asarray(mask.reshape(count, BATCH))

    @jax.jit
    def epoch(placed: Any, plan: Any, total: jax.Array) -> Any:
        def body(total: jax.Array, step: Any) -> Any:
            rows, mask = step
            return sum_batch(total, jax.tree.map(lambda leaf: leaf[rows], placed), mask)

        return jax.lax.scan(body, total, plan)

    return lambda: jax.block_until_ready(epoch(placed, plan, jnp.int32(0)))


def cyreal_scan(samples: int) -> Run:
    loader = cyreal_loader(samples)
    start = loader.init_state(jax.random.key(0))
    epoch = jax.jit(lambda state: loader.scan_epoch(state, jnp.int32(0), sum_batch))
    return lambda: jax.block_until_ready(epoch(start))


def measure(options: Options) -> list[Table]:
    samples = options.size(SAMPLES, 2_000)
    makers = {
        (OURS, "millstream"): millstream_scan,
        (BY_HAND, ""): scan_by_hand,
        (CYREAL, "cyreal"): cyreal_scan,
    }
    entries = [
        Entry(name, functools.partial(make, samples), package, steps(samples))
        for (name, package), make in makers.items()
    ]
    table = measured("One epoch in one program", "µs per batch", OURS, entries, options.rounds(7))
    table.hold("times a scan by hand", table.ratio(OURS, BY_HAND), at_most=1.1)
    table.hold("times as fast as cyreal", table.ratio(CYREAL, OURS), at_least=8)
    table.hold("programs compiled after the first epoch", table.compiled(OURS), at_most=0)
    return [table]


if __name__ == "__main__":
    main(measure)
