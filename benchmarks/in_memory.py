"""Data in memory: 60,000 images of (28, 28, 1) uint8 with int32 labels, shuffled, batch 128, beside the peers.

Every leaf of every batch is a JAX array when it counts, and is waited for. Run with `make bench`.
"""

import functools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _measure import available, interleaved, print_machine, print_table, ratio, verdict

import millstream as ms

SAMPLES, BATCH, KEY = 60_000, 128, jax.random.key(0)
STEPS = -(-SAMPLES // BATCH)
ROUNDS = 7


def data(samples: int = SAMPLES) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (samples, 28, 28, 1), dtype=np.uint8)
    return {"image": images, "label": np.arange(samples, dtype=np.int32)}


def consume(batches: Iterator[Any]) -> None:
    """Wait for every leaf of every batch."""
    for batch in batches:
        jax.block_until_ready(batch)


def to_jax(batch: Any) -> Any:
    return jax.tree.map(jnp.asarray, batch)


def millstream_case(arrays: dict[str, np.ndarray]) -> Callable[[], None]:
    loader = ms.DataLoader([ms.ArraySampleSource(arrays), ms.BatchTransform(BATCH)])
    state = loader.init_state(KEY)
    return lambda: consume(loader.iterate(state))


def numpy_case(arrays: dict[str, np.ndarray]) -> Callable[[], None]:
    random = np.random.default_rng(0)

    def run() -> None:
        order = random.permutation(SAMPLES)
        for first in range(0, SAMPLES, BATCH):
            rows = order[first : first + BATCH]
            jax.block_until_ready(to_jax({name: array[rows] for name, array in arrays.items()}))

    return run


def jax_dataloader_case(arrays: dict[str, np.ndarray]) -> Callable[[], None]:
    import jax_dataloader as jdl

    loader = jdl.DataLoader(jdl.ArrayDataset(*arrays.values()), "jax", batch_size=BATCH, shuffle=True)
    return lambda: consume(to_jax(batch) for batch in loader)


def torch_case(arrays: dict[str, np.ndarray]) -> Callable[[], None]:
    import torch
    import torch.utils.data as torch_data

    dataset = torch_data.TensorDataset(*(torch.from_numpy(array) for array in arrays.values()))
    loader = torch_data.DataLoader(dataset, batch_size=BATCH, shuffle=True)
    return lambda: consume(to_jax([leaf.numpy() for leaf in batch]) for batch in loader)


def grain_case(arrays: dict[str, np.ndarray]) -> Callable[[], None]:
    """Grain at its best for data in memory: batched before iteration, no threads."""
    import grain

    class Rows:
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            return {name: array[index] for name, array in arrays.items()}

    dataset = grain.MapDataset.source(Rows()).shuffle(seed=0).batch(BATCH)
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return lambda: consume(to_jax(batch) for batch in dataset.to_iter_dataset(options))


def cyreal_loader(arrays: dict[str, np.ndarray]) -> Any:
    from cyreal.loader import DataLoader
    from cyreal.sources import ArraySource
    from cyreal.transforms import BatchTransform

    return DataLoader([ArraySource(to_jax(arrays), ordering="shuffle"), BatchTransform(BATCH, pad_last_batch=True)])


def cyreal_case(arrays: dict[str, np.ndarray]) -> Callable[[], None]:
    loader = cyreal_loader(arrays)
    step = jax.jit(loader.next)
    start = loader.init_state(KEY)

    def run() -> None:
        state = start
        for _ in range(STEPS):
            batch, state, mask = step(state)
            jax.block_until_ready((batch, mask))

    return run


def sum_batch(total: jax.Array, batch: dict[str, jax.Array], mask: jax.Array) -> tuple[jax.Array, None]:
    """Use every number of the batch."""
    rows = batch["image"].astype(jnp.int32).sum(axis=(1, 2, 3)) + batch["label"]
    return total + jnp.sum(rows * mask), None


def millstream_scan(arrays: dict[str, np.ndarray]) -> Callable[[], None]:
    loader = ms.DataLoader([ms.ArraySampleSource(arrays), ms.BatchTransform(BATCH)])
    state = loader.init_state(KEY)
    return lambda: jax.block_until_ready(loader.scan_epoch(state, jnp.int32(0), sum_batch)) and None


def hand_written_scan(arrays: dict[str, np.ndarray]) -> Callable[[], None]:
    """What one would write without a library, with the permutation and the mask ready-made."""
    placed = to_jax(arrays)
    order = np.random.default_rng(0).permutation(SAMPLES).astype(np.int32)
    padded = np.zeros(STEPS * BATCH, np.int32)
    padded[:SAMPLES] = order
    steps = (
        jnp.asarray(padded.reshape(STEPS, BATCH)),
        jnp.asarray((np.arange(STEPS * BATCH) < SAMPLES).reshape(STEPS, BATCH)),
    )

    @jax.jit
    def epoch(placed: Any, steps: Any, total: jax.Array) -> Any:
        def body(total: jax.Array, step: Any) -> Any:
            rows, mask = step
            return sum_batch(total, jax.tree.map(lambda leaf: leaf[rows], placed), mask)

        return jax.lax.scan(body, total, steps)

    return lambda: jax.block_until_ready(epoch(placed, steps, jnp.int32(0))) and None


def cyreal_scan(arrays: dict[str, np.ndarray]) -> Callable[[], None]:
    loader = cyreal_loader(arrays)
    start = loader.init_state(KEY)
    epoch = jax.jit(lambda state: loader.scan_epoch(state, jnp.int32(0), sum_batch))
    return lambda: jax.block_until_ready(epoch(start)) and None


def iteration(arrays: dict[str, np.ndarray]) -> None:
    peers: dict[str, Callable[..., Any]] = {
        "numpy take + jnp.asarray": numpy_case,
        "jax-dataloader": jax_dataloader_case,
        "torch DataLoader": torch_case,
        "grain, 0 threads": grain_case,
        "cyreal jit(next)": cyreal_case,
    }
    cases = available({"millstream iterate": millstream_case, **peers}, arrays)
    wall, cpu = interleaved(cases, ROUNDS)
    print_table("Python iteration", wall, cpu, scale=1e6 / STEPS, unit="us per batch", base="millstream iterate")
    bars = {"jax-dataloader": 1.5, "torch DataLoader": 8, "grain, 0 threads": 40, "cyreal jit(next)": 30}
    for name, bar in bars.items():
        if name in wall:
            verdict(f"times as fast as {name}", ratio(wall, name, "millstream iterate"), at_least=bar)


def scanning(arrays: dict[str, np.ndarray]) -> None:
    makers = {
        "millstream scan_epoch": millstream_scan,
        "hand-written scan": hand_written_scan,
        "cyreal scan_epoch": cyreal_scan,
    }
    wall, cpu = interleaved(available(makers, arrays), ROUNDS)
    print_table(
        "One epoch in one program", wall, cpu, scale=1e6 / STEPS, unit="us per batch", base="millstream scan_epoch"
    )
    verdict("times a hand-written scan", ratio(wall, "millstream scan_epoch", "hand-written scan"), at_most=1.1)
    if "cyreal scan_epoch" in wall:
        verdict("times as fast as cyreal", ratio(wall, "cyreal scan_epoch", "millstream scan_epoch"), at_least=8)


def growth() -> None:
    """Step cost for 10,000 and 5,000,000 rows of 16 bytes."""
    cases = {}
    for samples in (10_000, 5_000_000):
        rows = np.random.default_rng(0).integers(0, 2**31, (samples, 4), dtype=np.int32)
        loader = ms.DataLoader([ms.ArraySampleSource(rows), ms.BatchTransform(BATCH)])
        state = loader.init_state(KEY)
        cases[f"{samples:,} rows"] = functools.partial(
            lambda loader, state: consume(loader.iterate(state, steps=1000)), loader, state
        )
    wall, cpu = interleaved(cases, ROUNDS)
    small, large = cases
    print_table("Growth with the data", wall, cpu, scale=1e3, unit="us per batch", base=small)
    verdict("times the step cost at 500 times the rows", ratio(wall, large, small), at_most=1.3)


def order_cost() -> None:
    """Nanoseconds per shuffled index in a compiled program."""
    from millstream._core import order

    words = np.array([0, 1], np.uint32)
    worst = 0.0
    for samples in (60_000, 65_536, 65_537, 1_000_003, 5_000_000):
        for block in (8_192, 65_536):
            positions = jnp.arange(block, dtype=jnp.uint32) % jnp.uint32(samples)

            @jax.jit
            def shuffle(positions: jax.Array, words: Any, samples: int = samples) -> jax.Array:
                return order.shuffled(jnp, positions, samples, order.epoch_key(jnp, words, jnp.uint32(3)))

            wall, _ = interleaved({"": lambda f=shuffle, p=positions: f(p, words).block_until_ready()}, 200)
            cost = float(np.median(wall[""])) / block * 1e9
            worst = max(worst, cost)
            print(f"  order of {samples:,} in blocks of {block:,}: {cost:.1f} ns per index")
    verdict("ns per index, the worst of these", worst, at_most=40)


def first_batch() -> None:
    """Seconds from `DataLoader(...)` to the first batch, compilation included, in a fresh process."""
    script = (
        "import time, jax, numpy as np, millstream as ms\n"
        "from in_memory import data, BATCH\n"
        "arrays = data(); jax.block_until_ready(jax.numpy.zeros(1))\n"
        "begun = time.perf_counter()\n"
        "stages = [ms.ArraySampleSource(arrays), ms.BatchTransform(BATCH), ms.NormalizeImageTransform()]\n"
        "loader = ms.DataLoader(stages)\n"
        "jax.block_until_ready(next(loader.iterate(loader.init_state(jax.random.key(0)))))\n"
        "print(time.perf_counter() - begun)"
    )
    seconds = [_fresh(script) for _ in range(3)]
    verdict("seconds to the first batch", float(np.median(seconds)), at_most=1.5)


def import_cost() -> None:
    """Seconds that `import millstream` adds to `import jax`, and those of its loader."""
    for names, bar in (("millstream", 0.15), ("millstream.loader, millstream.datasets", 0.15)):
        script = f"import time, jax, jax.numpy; t = time.perf_counter(); import {names}; print(time.perf_counter() - t)"
        verdict(
            f"seconds to import {names} after jax", float(np.median([_fresh(script) for _ in range(3)])), at_most=bar
        )


def _fresh(script: str) -> float:
    place = __file__.rpartition("/")[0] or "."
    return float(
        subprocess.run([sys.executable, "-c", script], cwd=place, capture_output=True, text=True, check=True).stdout
    )


def main() -> None:
    begun = time.perf_counter()
    print_machine(["jax", "numpy", "millstream", "jax-dataloader", "torch", "grain", "cyreal"])
    arrays = data()
    iteration(arrays)
    scanning(arrays)
    growth()
    print("\nThe order")
    order_cost()
    print("\nStarting")
    first_batch()
    import_cost()
    print(f"\nmeasured in {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
