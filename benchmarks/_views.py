"""A million rows in memory, and how the libraries choose among them: some of them, a part, two halves, by weight.

Each function makes a round of so many batches of 256. A round goes on where the last one has ended, so what a library
does at the beginning of an epoch is not counted. Every leaf of every batch is a JAX array when it counts, and is waited
for. The functions import their library themselves, so that this module serves any environment.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _measure import Run

ROWS, BATCH = 1_000_000, 256
MIXED = (4.0, 3.0, 2.0, 1.0)  # weights of four sources


def data(rows: int) -> dict[str, np.ndarray]:
    """Rows of 64 bytes with int32 labels; nobody can write to them, so nobody copies them."""
    chance = np.random.default_rng(0)
    arrays = {"x": chance.random((rows, 16), np.float32), "label": chance.integers(0, 10, rows, dtype=np.int32)}
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def is_even(sample: dict[str, Any]) -> bool:
    return bool(sample["label"] % 2 == 0)


def chosen(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The rows with an even label."""
    return np.flatnonzero(arrays["label"] % 2 == 0)


def part(rows: int) -> slice:
    return slice(rows // 10, 9 * rows // 10)


def weights(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Rows of label 0 come a quarter of the time, all others seldom."""
    return np.where(arrays["label"] == 0, 3.0, 1.0)


def quarters(arrays: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The rows as four sources."""
    size = len(arrays["label"]) // 4
    return [{name: array[k * size : (k + 1) * size] for name, array in arrays.items()} for k in range(4)]


def rounds(make: Callable[[], Iterable[Any]], steps: int) -> Run:
    """Rounds of so many batches of an endless stream, which is begun again whenever it ends."""
    stream: Iterator[Any] = itertools.chain.from_iterable(make() for _ in itertools.count())

    def run() -> None:
        for batch in itertools.islice(stream, steps):
            jax.block_until_ready(batch)

    return run


def to_jax(batch: Any) -> Any:
    return jax.tree.map(jnp.asarray, batch)


# torch


def _torch_dataset(arrays: dict[str, np.ndarray]) -> Any:
    import torch
    import torch.utils.data as torch_data

    return torch_data.TensorDataset(*(torch.from_numpy(array.copy()) for array in arrays.values()))


def _torch_rounds(dataset: Any, steps: int, **options: Any) -> Run:
    import torch.utils.data as torch_data

    loader = torch_data.DataLoader(dataset, **options)
    return rounds(lambda: (to_jax([leaf.numpy() for leaf in batch]) for batch in loader), steps)


def _torch_by_batch(dataset: Any, sampler: Any, steps: int) -> Run:
    """A sampler of whole batches, so that a dataset that can is indexed once per batch."""
    import torch.utils.data as torch_data

    batches = torch_data.BatchSampler(sampler, BATCH, drop_last=True)
    return _torch_rounds(dataset, steps, sampler=batches, batch_size=None)


def torch_select(rows: int, steps: int) -> Run:
    import torch.utils.data as torch_data

    arrays = data(rows)
    subset = torch_data.Subset(_torch_dataset(arrays), chosen(arrays).tolist())
    return _torch_rounds(subset, steps, batch_size=BATCH, shuffle=True, drop_last=True)


def torch_select_by_batch(rows: int, steps: int) -> Run:
    import torch.utils.data as torch_data

    arrays = data(rows)
    subset = torch_data.Subset(_torch_dataset(arrays), chosen(arrays).tolist())
    return _torch_by_batch(subset, torch_data.RandomSampler(subset), steps)


def torch_part(rows: int, steps: int) -> Run:
    import torch.utils.data as torch_data

    subset = torch_data.Subset(_torch_dataset(data(rows)), range(rows)[part(rows)])
    return _torch_rounds(subset, steps, batch_size=BATCH, shuffle=True, drop_last=True)


def torch_concat(rows: int, steps: int) -> Run:
    import torch.utils.data as torch_data

    halves = torch_data.ConcatDataset([_torch_dataset(data(rows // 2)) for _ in range(2)])
    return _torch_rounds(halves, steps, batch_size=BATCH, shuffle=True, drop_last=True)


def torch_weighted(rows: int, steps: int) -> Run:
    import torch.utils.data as torch_data

    arrays = data(rows)
    sampler = torch_data.WeightedRandomSampler(weights(arrays).tolist(), rows)
    return _torch_rounds(_torch_dataset(arrays), steps, batch_size=BATCH, sampler=sampler, drop_last=True)


def _torch_mixed(rows: int) -> tuple[Any, Any]:
    """Four datasets as one, and a sampler by which they come in the shares of their weights."""
    import torch.utils.data as torch_data

    parts = [_torch_dataset(part) for part in quarters(data(rows))]
    weights = np.repeat(np.array(MIXED), [len(part) for part in parts])  # all are equally long
    return torch_data.ConcatDataset(parts), torch_data.WeightedRandomSampler(weights.tolist(), len(weights))


def torch_mixed(rows: int, steps: int) -> Run:
    dataset, sampler = _torch_mixed(rows)
    return _torch_rounds(dataset, steps, batch_size=BATCH, sampler=sampler, drop_last=True)


def torch_mixed_by_batch(rows: int, steps: int) -> Run:
    """A dataset of all rows can be indexed once per batch, which a `ConcatDataset` cannot."""
    _, sampler = _torch_mixed(rows)
    return _torch_by_batch(_torch_dataset(data(rows)), sampler, steps)


def torch_weighted_by_batch(rows: int, steps: int) -> Run:
    import torch.utils.data as torch_data

    arrays = data(rows)
    sampler = torch_data.WeightedRandomSampler(weights(arrays).tolist(), rows)
    return _torch_by_batch(_torch_dataset(arrays), sampler, steps)


# Grain


def _grain_source(arrays: dict[str, np.ndarray]) -> Any:
    import grain

    class Rows:
        def __len__(self) -> int:
            return len(arrays["label"])

        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            return {name: array[index] for name, array in arrays.items()}

    return grain.MapDataset.source(Rows())


def _grain_rounds(dataset: Any, steps: int) -> Run:
    """No threads stand in the way; what a filter leaves out is left out before batches are made."""
    import grain

    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    batches = dataset.to_iter_dataset(options).batch(BATCH, drop_remainder=True)
    return rounds(lambda: map(to_jax, batches), steps)


def _grain_gathered(numbers: Any, arrays: dict[str, np.ndarray], steps: int) -> Run:
    """Batches of row numbers, all of whose rows a map takes at once: the fastest way that we found."""
    import grain

    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    batches = numbers.batch(BATCH, drop_remainder=True)
    taken = batches.map(lambda rows: {name: array[rows] for name, array in arrays.items()})
    return rounds(lambda: map(to_jax, taken.to_iter_dataset(options)), steps)


def grain_select(rows: int, steps: int) -> Run:
    return _grain_rounds(_grain_source(data(rows)).shuffle(seed=0).filter(is_even), steps)


def grain_select_gathered(rows: int, steps: int) -> Run:
    import grain

    arrays = data(rows)
    numbers: Any = chosen(arrays)
    return _grain_gathered(grain.MapDataset.source(numbers).shuffle(seed=0), arrays, steps)


def grain_part(rows: int, steps: int) -> Run:
    return _grain_rounds(_grain_source(data(rows))[part(rows)].shuffle(seed=0), steps)


def grain_concat(rows: int, steps: int) -> Run:
    import grain

    halves = [_grain_source(data(rows // 2)) for _ in range(2)]
    return _grain_rounds(grain.MapDataset.concatenate(halves).shuffle(seed=0), steps)


def _grain_kinds(source: Callable[[Any], Any], arrays: dict[str, np.ndarray]) -> Any:
    """Grain weighs datasets, not samples: rows of label 0 and the others, mixed in the shares that they would have."""
    import grain

    first, others = (np.flatnonzero(found) for found in (arrays["label"] == 0, arrays["label"] != 0))
    shares = [3.0 * len(first), 1.0 * len(others)]
    return grain.MapDataset.mix([source(first).shuffle(seed=0), source(others).shuffle(seed=1)], shares)


def grain_weighted(rows: int, steps: int) -> Run:
    arrays = data(rows)
    taken = lambda kept: _grain_source({name: array[kept] for name, array in arrays.items()})  # noqa: E731
    return _grain_rounds(_grain_kinds(taken, arrays), steps)


def grain_weighted_gathered(rows: int, steps: int) -> Run:
    import grain

    arrays = data(rows)
    return _grain_gathered(_grain_kinds(grain.MapDataset.source, arrays), arrays, steps)


def grain_mixed(rows: int, steps: int) -> Run:
    import grain

    parts = [_grain_source(part).shuffle(seed=number) for number, part in enumerate(quarters(data(rows)))]
    return _grain_rounds(grain.MapDataset.mix(parts, MIXED), steps)


def grain_mixed_gathered(rows: int, steps: int) -> Run:
    import grain

    numbers: Any = np.arange(rows).reshape(4, -1)
    parts = [grain.MapDataset.source(part).shuffle(seed=number) for number, part in enumerate(numbers)]
    return _grain_gathered(grain.MapDataset.mix(parts, MIXED), data(rows), steps)


# Hugging Face datasets


def _datasets_source(arrays: dict[str, np.ndarray]) -> Any:
    import datasets
    import pyarrow as pa

    width = arrays["x"].shape[1]
    x = pa.FixedSizeListArray.from_arrays(pa.array(arrays["x"].reshape(-1)), width)
    return datasets.Dataset(pa.table({"x": x, "label": pa.array(arrays["label"])}))


def _datasets_rounds(dataset: Any, steps: int) -> Run:
    shuffled = dataset.shuffle(seed=0).with_format("numpy")
    return rounds(lambda: map(to_jax, shuffled.iter(BATCH, drop_last_batch=True)), steps)


def datasets_select(rows: int, steps: int) -> Run:
    """Its filter looks at whole columns at once, in memory."""
    source = _datasets_source(data(rows)).with_format("numpy")
    kept = source.filter(lambda label: label % 2 == 0, input_columns="label", batched=True, batch_size=rows)
    return _datasets_rounds(kept, steps)


def datasets_part(rows: int, steps: int) -> Run:
    return _datasets_rounds(_datasets_source(data(rows)).select(range(rows)[part(rows)]), steps)


def datasets_concat(rows: int, steps: int) -> Run:
    import datasets

    return _datasets_rounds(datasets.concatenate_datasets([_datasets_source(data(rows // 2)) for _ in range(2)]), steps)


def datasets_mixed(rows: int, steps: int) -> Run:
    import datasets

    parts = [_datasets_source(part).shuffle(seed=number) for number, part in enumerate(quarters(data(rows)))]
    shares = [weight / sum(MIXED) for weight in MIXED]
    mixed = datasets.interleave_datasets(parts, shares, seed=0).with_format("numpy")
    return rounds(lambda: map(to_jax, mixed.iter(BATCH, drop_last_batch=True)), steps)
