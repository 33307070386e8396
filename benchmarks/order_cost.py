"""What one index of a shuffled epoch costs in a compiled program.

Sizes beside which a power of two is near and far, and blocks of two lengths. NumPy's permutation of the whole epoch,
per index, stands beside them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from _case import Options, main
from _measure import Entry, Run, measured
from _result import Table

from millstream.plan import order

SIZES, BLOCKS = (60_000, 65_536, 65_537, 1_000_003, 5_000_000), (8_192, 65_536)
REPEATS = 20


def shuffle(samples: int, block: int) -> Run:
    words = np.array([0, 1], np.uint32)
    positions = jnp.arange(block, dtype=jnp.uint32) % jnp.uint32(samples)

    @jax.jit
    def shuffled(positions: jax.Array, words: np.ndarray) -> jax.Array:
        return order.shuffled(jnp, positions, samples, order.epoch_key(jnp, words, jnp.uint32(3)))

    def run() -> None:
        for _ in range(REPEATS):
            shuffled(positions, words).block_until_ready()

    return run


def permutation(samples: int) -> Run:
    random = np.random.default_rng(0)
    return lambda: random.permutation(samples)


def measure(options: Options) -> list[Table]:
    sizes = SIZES[: options.size(len(SIZES), 1)]
    ours = {f"{samples:,} in blocks of {block:,}": (samples, block) for samples in sizes for block in BLOCKS}
    entries = [
        Entry(name, functools.partial(shuffle, *size), "millstream", REPEATS * size[1]) for name, size in ours.items()
    ]
    entries += [
        Entry(f"NumPy, permutation of {samples:,}", functools.partial(permutation, samples), "", samples)
        for samples in (sizes[0], sizes[-1])[: len(sizes)]
    ]
    table = measured("Shuffled indices", "ns per index", next(iter(ours)), entries, options.rounds(15))
    worst = max(median for name in ours if (median := table.median(name)) is not None)
    table.hold("ns per index, the worst of ours", worst, at_most=40)
    return [table]


if __name__ == "__main__":
    main(measure)
