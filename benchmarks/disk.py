"""Data on disk: memory-mapped records in shuffled batches, and a slow reading function beside a busy device.

Every batch is waited for as JAX arrays. Run with `make bench`.
"""

import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _measure import available, interleaved, print_machine, print_table, ratio, verdict

import millstream as ms

RECORDS, BATCH, KEY = 100_000, 256, jax.random.key(0)
STEPS = RECORDS // BATCH
ROUNDS = 5


def make_records(folder: pathlib.Path) -> np.ndarray:
    """Records of 784 bytes in a file, mapped."""
    path = folder / "records.npy"
    np.save(path, np.random.default_rng(0).integers(0, 256, (RECORDS, 784), dtype=np.uint8))
    return np.load(path, mmap_mode="r")


def numpy_take(records: np.ndarray) -> Callable[[], None]:
    """NumPy's own reading of the same rows, delivered nowhere."""
    random = np.random.default_rng(0)

    def run() -> None:
        order = random.permutation(RECORDS)
        for step in range(STEPS):
            np.take(records, order[step * BATCH : (step + 1) * BATCH], axis=0)

    return run


def millstream_mapped(records: np.ndarray) -> Callable[[], None]:
    return _iterating(ms.HostArraySource({"image": records}, prefetch_size=2 * BATCH))


def millstream_function(records: np.ndarray) -> Callable[[], None]:
    """The same records through a function per sample."""
    read = lambda index: {"image": records[index]}  # noqa: E731
    return _iterating(ms.DiskSampleSource(RECORDS, read, prefetch_size=2 * BATCH, readers=2))


def _iterating(source: Any) -> Callable[[], None]:
    loader = ms.DataLoader([source, ms.BatchTransform(BATCH, drop_last=True)])
    state = loader.init_state(KEY)

    def run() -> None:
        for batch in loader.iterate(state):
            jax.block_until_ready(batch)

    return run


def cyreal_function(records: np.ndarray) -> Callable[[], None]:
    from cyreal.loader import DataLoader
    from cyreal.sources import DiskSource
    from cyreal.transforms import BatchTransform

    source = DiskSource(RECORDS, lambda index: {"image": records[int(index)]}, prefetch_size=1024)
    loader = DataLoader([source, BatchTransform(BATCH, drop_last=True)])
    step = jax.jit(loader.next)
    start = loader.init_state(KEY)

    def run() -> None:
        state = start
        for _ in range(STEPS // 10):  # a tenth of the epoch, for it takes long
            batch, state, mask = step(state)
            jax.block_until_ready((batch, mask))

    return run


def mapped_records() -> None:
    with tempfile.TemporaryDirectory() as folder:
        records = make_records(pathlib.Path(folder))
        makers = {
            "millstream HostArraySource": millstream_mapped,
            "numpy take from the map": numpy_take,
            "millstream DiskSampleSource": millstream_function,
            "cyreal disk source (a tenth)": cyreal_function,
        }
        wall, cpu = interleaved(available(makers, records), ROUNDS)
    base = "millstream HostArraySource"
    print_table("784-byte records, batch 256", wall, cpu, scale=1e6 / STEPS, unit="us per batch", base=base)
    verdict("times NumPy's own take", ratio(wall, base, "numpy take from the map"), at_most=4)
    if "cyreal disk source (a tenth)" in wall:
        verdict("times as fast as cyreal", 10 * ratio(wall, "cyreal disk source (a tenth)", base), at_least=20)


def overlap() -> None:
    """1 ms per sample and 10 ms per step, batch 32: reading and computing together, and each alone."""

    def slow_sample(index: int) -> dict[str, Any]:
        time.sleep(0.001)
        return {"x": np.float32(index)}

    source = ms.DiskSampleSource(100_000, slow_sample, prefetch_size=128, readers=4)
    loader = ms.DataLoader([source, ms.BatchTransform(32)])
    state = loader.init_state(KEY)
    turns = _turns_for(0.010)

    def read() -> None:
        for batch in loader.iterate(state, steps=50):
            jax.block_until_ready(batch)

    def compute() -> None:
        for _ in range(50):
            jax.block_until_ready(_busy(jnp.float32(0), turns))

    def both() -> None:
        for batch, _ in loader.iterate(state, steps=50):
            jax.block_until_ready(_busy(batch["x"].sum(), turns))

    def both_in_one_program() -> None:
        begun = loader.init_state(KEY)
        jax.block_until_ready(_many_steps(loader, begun, turns))

    wall, cpu = interleaved(
        {"together": both, "in one program": both_in_one_program, "reading": read, "computing": compute}, 3
    )
    print_table("A slow function beside a busy device", wall, cpu, scale=1e3 / 50, unit="ms per step", base="together")
    larger = max(("reading", "computing"), key=lambda name: np.median(wall[name]))
    verdict("times the larger of the two", ratio(wall, "together", larger), at_most=1.2)
    verdict("times the larger of the two, in one program", ratio(wall, "in one program", larger), at_most=1.2)


@jax.jit
def _busy(seed: jax.Array, turns: int) -> jax.Array:
    """Keep one core busy, as a device would be that leaves the host alone."""
    return jax.lax.fori_loop(0, turns, lambda _, x: jnp.sin(x) + 1.0, seed)


@jax.jit
def _many_steps(loader: ms.DataLoader, state: Any, turns: int) -> jax.Array:
    def body(carry: Any, _: None) -> Any:
        state, total = carry
        batch, state, _ = loader.next_batch(state)
        return (state, total + _busy(batch["x"].sum(), turns)), None

    return jax.lax.scan(body, (state, jnp.float32(0)), None, length=50)[0][1]


def _turns_for(seconds: float) -> int:
    """How many turns take this long here and now."""
    turns = 100_000
    jax.block_until_ready(_busy(jnp.float32(0), turns))
    begun = time.perf_counter()
    jax.block_until_ready(_busy(jnp.float32(0), turns))
    return max(1, int(turns * seconds / (time.perf_counter() - begun)))


def main() -> None:
    print_machine(["jax", "numpy", "millstream", "cyreal"])
    mapped_records()
    overlap()


if __name__ == "__main__":
    main()
