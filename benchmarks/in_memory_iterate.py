"""Shuffled batches of images in memory, in a Python loop.

60,000 images of (28, 28, 1) uint8 with int32 labels, batch 128. Every leaf of every batch is a JAX array when it
counts, and is waited for. Every peer runs in a process of its own.
"""

import functools

import jax
from _case import Options, main
from _images import BATCH, SAMPLES, consume, data, numpy_take, steps
from _libraries import Libraries, Stream, grains
from _measure import Entry, Run, measured
from _result import Table

import millstream as ms

OURS, TORCH, GRAIN = "Millstream, iterate", "torch, DataLoader", "Grain, samples"
PEERS = [
    Stream("jax-dataloader", "jax_dataloader", "jax-dataloader", "jax-dataloader"),
    Stream(TORCH, "torch_loader", "torch", "torch"),
    Stream("torch, sampler of batches", "torch_by_batch", "torch", "torch"),
    *grains("samples", "grain_batched"),
    *grains("rows of a batch at once", "grain_gathered"),
    Stream("tf.data", "tf_data", "tensorflow", "tensorflow"),
    Stream("cyreal, jit(next)", "cyreal_next", "cyreal", "cyreal"),
]
BARS = {"jax-dataloader": 1.5, TORCH: 8, GRAIN: 40, "cyreal, jit(next)": 30}


def millstream_iterate(samples: int) -> Run:
    loader = ms.DataLoader([ms.ArraySampleSource(data(samples)), ms.BatchTransform(BATCH)])
    state = loader.init_state(jax.random.key(0))
    return lambda: consume(loader.iterate(state))


def measure(options: Options) -> list[Table]:
    samples = options.size(SAMPLES, 2_000)
    count = steps(samples)
    with Libraries(options.also) as libraries:
        question = {"how": "pass", "module": "_images", "arguments": [samples]}
        entries = [
            Entry(OURS, functools.partial(millstream_iterate, samples), "millstream", count),
            Entry("NumPy take, jnp.asarray", functools.partial(numpy_take, samples), "", count),
            *libraries.entries(PEERS, per_round=count, **question),
        ]
        table = measured("One epoch, batch by batch", "µs per batch", OURS, entries, options.rounds(5))
    for peer, bar in BARS.items():
        table.hold(f"times as fast as {peer}", table.ratio(peer, OURS), at_least=bar)
    table.hold("programs compiled after the first pass", table.compiled(OURS), at_most=0)
    return [table]


if __name__ == "__main__":
    main(measure)
