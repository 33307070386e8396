"""Batches placed on eight devices: ours beside JAX's own placement, and a whole step beside one made by hand.

The devices are virtual ones of the CPU, so this measures the work of the host, not a network. `BatchPlacement.place` on
every leaf stands beside a bare `jax.make_array_from_process_local_data` of the same tree. A whole step of a loader,
which also plans, takes the rows and has a mask, stands beside the same made by hand from known indices.
"""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import numpy as np
from _case import Options, main
from _measure import Entry, measured
from _result import Table

import millstream as ms

BARE, PLACED = "make_array_from_process_local_data", "Millstream, place"
BY_HAND, STEP = "rows by hand, then the same", "Millstream, a whole step"


def tree_of(rows: int, pixels: int) -> dict[str, np.ndarray]:
    image = np.random.default_rng(0).integers(0, 255, (rows, pixels, pixels, 3), np.uint8)
    return {"image": image, "label": np.arange(rows, dtype=np.int32), "weight": np.ones(rows, np.float32)}


def placing(rows: int, pixels: int, options: Options) -> Table:
    repeats = options.size(40, 2)
    sharding = ms.sharding.as_batch_sharding(ms.sharding.make_ddp_mesh_config())
    batch, order = tree_of(rows, pixels), np.random.default_rng(1).permutation(rows)
    source = ms.HostArraySource(batch, ordering="shuffle")
    loader = ms.DataLoader([source, ms.BatchTransform(rows)], sharding=sharding)
    state, placement = loader.init_state(jax.random.key(0)), loader.pipeline.placement
    assert placement is not None
    chosen = placement.local_rows()

    def bare() -> None:
        for _ in range(repeats):
            jax.block_until_ready(jax.make_array_from_process_local_data(sharding, batch))

    def ours() -> None:
        for _ in range(repeats):
            jax.block_until_ready(jax.tree.map(lambda leaf: placement.place(leaf, chosen), batch))

    def by_hand() -> None:
        for _ in range(repeats):
            taken = {name: leaf.take(order, axis=0) for name, leaf in batch.items()}
            jax.block_until_ready(jax.make_array_from_process_local_data(sharding, (taken, np.ones(rows, bool))))

    def steps() -> None:
        for batch_and_mask in loader.iterate(state, steps=repeats):
            jax.block_until_ready(batch_and_mask)

    entries = [
        Entry(PLACED, lambda: ours, "millstream", repeats),
        Entry(BARE, lambda: bare, "jax", repeats),
        Entry(STEP, lambda: steps, "millstream", repeats),
        Entry(BY_HAND, lambda: by_hand, "jax", repeats),
    ]
    title = f"{rows} rows of {pixels} x {pixels} x 3 bytes, a label and a weight"
    table = measured(title, "µs per batch", PLACED, entries, options.rounds(15))
    table.hold("placement of a batch, times that of JAX", table.ratio(PLACED, BARE), at_most=1.2)
    table.hold("a whole step, times rows taken and placed by hand", table.ratio(STEP, BY_HAND), at_most=1.2)
    return table


def measure(options: Options) -> list[Table]:
    return [placing(256, 64, options), placing(32, 8, options)]


if __name__ == "__main__":
    main(measure)
