"""Batches over eight devices: what our placement costs beside JAX's own, and what a plan costs one host of 1,024.

The devices are virtual ones of the CPU, so this measures the work of the host, not a network. `BatchPlacement.place` on
every leaf stands beside a bare `jax.make_array_from_process_local_data` of the same tree. A whole step of a loader,
which also plans, takes the rows and has a mask, stands beside the same made by hand from known indices.

Run: python benchmarks/sharded.py
"""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import time
import tracemalloc

import jax
import numpy as np
from _measure import interleaved, print_machine, print_table, ratio, verdict

import millstream as ms
from millstream._core.placement import BatchPlacement
from millstream._core.plan import Batching, Plan
from millstream._core.read_ahead import PlannedRun

ROUNDS, REPEATS = 15, 40
BARE, OURS = "make_array_from_process_local_data", "BatchPlacement.place"
BY_HAND, STEP = "rows by hand, then the same", "a whole step of a loader"
HOSTS, SAMPLES, GLOBAL_BATCH = 1024, 10**10, 65_536


def tree_of(rows: int, pixels: int) -> dict[str, np.ndarray]:
    image = np.random.default_rng(0).integers(0, 255, (rows, pixels, pixels, 3), np.uint8)
    return {"image": image, "label": np.arange(rows, dtype=np.int32), "weight": np.ones(rows, np.float32)}


def measure_placement(title: str, rows: int, pixels: int) -> None:
    sharding = ms.sharding.as_batch_sharding(ms.sharding.make_ddp_mesh_config())
    placement, batch = BatchPlacement(sharding, rows), tree_of(rows, pixels)
    chosen, order = placement.local_rows(), np.random.default_rng(1).permutation(rows)
    source = ms.HostArraySource(batch, ordering="shuffle")
    loader = ms.DataLoader([source, ms.BatchTransform(rows)], sharding=sharding)
    state = loader.init_state(jax.random.key(0))

    def bare() -> None:
        for _ in range(REPEATS):
            jax.block_until_ready(jax.make_array_from_process_local_data(sharding, batch))

    def ours() -> None:
        for _ in range(REPEATS):
            jax.block_until_ready(jax.tree.map(lambda leaf: placement.place(leaf, chosen), batch))

    def by_hand() -> None:
        for _ in range(REPEATS):
            taken = {name: leaf.take(order, axis=0) for name, leaf in batch.items()}
            jax.block_until_ready(jax.make_array_from_process_local_data(sharding, (taken, np.ones(rows, bool))))

    def steps() -> None:
        for batch_and_mask in loader.iterate(state, steps=REPEATS):
            jax.block_until_ready(batch_and_mask)

    wall, cpu = interleaved({BARE: bare, OURS: ours, BY_HAND: by_hand, STEP: steps}, ROUNDS)
    print_table(title, wall, cpu, scale=1e6 / REPEATS, unit="us", base=BARE)
    verdict("placement of a batch, times that of JAX", ratio(wall, OURS, BARE), at_most=1.2)
    verdict("a whole step of a loader, times rows taken and placed by hand", ratio(wall, STEP, BY_HAND), at_most=1.2)


def measure_plan(ordering: str, ending: str) -> None:
    """One host's part of every batch: indices, mask and keys, as the reading asks for it."""
    plan = Plan(SAMPLES, ordering, (Batching(GLOBAL_BATCH, ending, SAMPLES),))  # pyright: ignore
    share = GLOBAL_BATCH // HOSTS
    rows, words = tuple(range(517 * share, 518 * share)), np.array([5, 6], np.uint32)
    chosen = np.array(rows, np.uint64)

    def one_by_one() -> None:
        for step in range(REPEATS):
            plan.at(np, words, step, chosen)

    def in_blocks() -> None:
        run = PlannedRun(plan, words, rows)
        for step in range(256):
            run.request(step, keyed=True)

    wall, _ = interleaved({"alone": one_by_one, "reading": in_blocks}, ROUNDS)
    alone, reading = (float(np.median(wall[name])) * 1e3 for name in ("alone", "reading"))
    tracemalloc.start()
    in_blocks()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    begun = time.perf_counter()
    PlannedRun(plan, words, rows).request(0, keyed=True)
    first = time.perf_counter() - begun
    print(
        f"\nthe plan of one host of {HOSTS:,}: {SAMPLES:.0e} samples, batches of {GLOBAL_BATCH:,}, {ordering}, {ending}"
    )
    verdict("a step on its own, ms", alone / REPEATS, at_most=1.0)
    verdict("a step of a stream, with the keys of its samples, ms", reading / 256, at_most=1.0)
    verdict("the first step of a stream, which plans 64, ms", first * 1e3, at_most=64.0)
    verdict("memory at its peak, MB", peak / 1e6, at_most=1.0)


def main() -> None:
    print_machine(["millstream", "jax", "numpy"])
    measure_placement("256 rows of 64 x 64 x 3 bytes, a label and a weight, over 8 devices", 256, 64)
    measure_placement("32 rows of 8 x 8 x 3 bytes, a label and a weight, over 8 devices", 32, 8)
    for ordering in ("sequential", "shuffle"):
        for ending in ("pad", "wrap"):
            measure_plan(ordering, ending)


if __name__ == "__main__":
    main()
