"""60,000 images in memory, and how the libraries make shuffled batches of 128 of them.

Each function makes a pass over all batches. Every leaf of every batch is a JAX array when it counts, and is waited for.
The functions import their library themselves, so that this module serves any environment.
"""

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _measure import Run

SAMPLES, BATCH = 60_000, 128


def data(samples: int) -> dict[str, np.ndarray]:
    """Images of (28, 28, 1) uint8 with int32 labels."""
    images = np.random.default_rng(0).integers(0, 256, (samples, 28, 28, 1), dtype=np.uint8)
    return {"image": images, "label": np.arange(samples, dtype=np.int32)}


def steps(samples: int) -> int:
    return math.ceil(samples / BATCH)


def consume(batches: Iterable[Any]) -> None:
    """Wait for every leaf of every batch."""
    for batch in batches:
        jax.block_until_ready(batch)


def to_jax(batch: Any) -> Any:
    return jax.tree.map(jnp.asarray, batch)


def numpy_take(samples: int) -> Run:
    """What one writes without a library."""
    arrays, random = data(samples), np.random.default_rng(0)

    def run() -> None:
        order = random.permutation(samples)
        for first in range(0, samples, BATCH):
            rows = order[first : first + BATCH]
            jax.block_until_ready(to_jax({name: array[rows] for name, array in arrays.items()}))

    return run


def jax_dataloader(samples: int) -> Run:
    import jax_dataloader as jdl

    loader = jdl.DataLoader(jdl.ArrayDataset(*data(samples).values()), "jax", batch_size=BATCH, shuffle=True)
    return lambda: consume(to_jax(batch) for batch in loader)


def torch_loader(samples: int) -> Run:
    import torch
    import torch.utils.data as torch_data

    dataset = torch_data.TensorDataset(*(torch.from_numpy(array) for array in data(samples).values()))
    loader = torch_data.DataLoader(dataset, batch_size=BATCH, shuffle=True)
    return lambda: consume(to_jax([leaf.numpy() for leaf in batch]) for batch in loader)


def torch_by_batch(samples: int) -> Run:
    """A sampler of whole batches, so that a tensor is indexed once per batch."""
    import torch
    import torch.utils.data as torch_data

    dataset = torch_data.TensorDataset(*(torch.from_numpy(array) for array in data(samples).values()))
    sampler = torch_data.BatchSampler(torch_data.RandomSampler(dataset), BATCH, drop_last=False)
    loader = torch_data.DataLoader(dataset, sampler=sampler, batch_size=None)
    return lambda: consume(to_jax([leaf.numpy() for leaf in batch]) for batch in loader)


def grain_batched(samples: int) -> Run:
    """Grain's elements are batches already when they are iterated over, and no threads stand in the way."""
    import grain

    arrays = data(samples)

    class Rows:
        def __len__(self) -> int:
            return samples

        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            return {name: array[index] for name, array in arrays.items()}

    dataset = grain.MapDataset.source(Rows()).shuffle(seed=0).batch(BATCH)
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return lambda: consume(to_jax(batch) for batch in dataset.to_iter_dataset(options))


def grain_gathered(samples: int) -> Run:
    """Grain makes batches of numbers, and a map takes all their rows at once: the fastest way that we found."""
    import grain

    arrays = data(samples)
    numbers = grain.MapDataset.range(samples).shuffle(seed=0).batch(BATCH)
    dataset = numbers.map(lambda rows: {name: array[rows] for name, array in arrays.items()})
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return lambda: consume(to_jax(batch) for batch in dataset.to_iter_dataset(options))


def tf_data(samples: int) -> Run:
    import tensorflow as tf

    whole = tf.data.Dataset.from_tensor_slices(data(samples)).shuffle(samples, seed=0).batch(BATCH)
    dataset = whole.prefetch(tf.data.AUTOTUNE)
    return lambda: consume(to_jax(batch) for batch in dataset.as_numpy_iterator())


def cyreal_loader(samples: int) -> Any:
    from cyreal.loader import DataLoader
    from cyreal.sources import ArraySource
    from cyreal.transforms import BatchTransform

    source = ArraySource(to_jax(data(samples)), ordering="shuffle")
    return DataLoader([source, BatchTransform(BATCH, pad_last_batch=True)])


def cyreal_next(samples: int) -> Run:
    loader = cyreal_loader(samples)
    step, start = jax.jit(loader.next), loader.init_state(jax.random.key(0))

    def run() -> None:
        state = start
        for _ in range(steps(samples)):
            batch, state, mask = step(state)
            jax.block_until_ready((batch, mask))

    return run
