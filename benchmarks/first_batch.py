"""From `DataLoader(...)` to its first batch, and to the end of a first `scan_epoch`, compilation included.

60,000 images in memory, shuffled, normalized; a scan sums its batches. By hand, one compiled function takes the rows of
a permutation, which JAX draws for the whole epoch. Each is a fresh process, in which JAX is imported and its device is
up when the clock starts.
"""

from _case import Options, main
from _fresh import fresh
from _measure import Entry, measured
from _result import Table

BEFORE = """
import time, jax, jax.numpy as jnp, numpy as np, millstream as ms
from _images import BATCH, SAMPLES, data
arrays = data(SAMPLES)
total = lambda so_far, batch: so_far + batch["image"].sum()
jax.block_until_ready(jnp.zeros(1))
begun, begun_cpu = time.perf_counter(), time.process_time()
"""
LOADER = """
loader = ms.DataLoader([ms.ArraySampleSource(arrays), ms.BatchTransform(BATCH), ms.NormalizeImageTransform()])
state = loader.init_state(jax.random.key(0))
"""
DRAW = """
def draw(arrays, order, step):
    rows = jax.lax.dynamic_slice_in_dim(order, step * BATCH, BATCH)
    batch = {name: array[rows] for name, array in arrays.items()}
    return batch | {"image": batch["image"].astype(jnp.float32) / 255}
"""
ORDER = "jax.device_put(arrays), jax.random.permutation(jax.random.key(0), SAMPLES)"
FIRST_BATCH = (
    LOADER + "jax.block_until_ready(next(loader.iterate(state)))",
    DRAW + f"jax.block_until_ready(jax.jit(draw)({ORDER}, 0))",
)
FIRST_SCAN = (
    LOADER
    + "jax.block_until_ready(loader.scan_epoch(state, 0.0, lambda so_far, batch, mask: (total(so_far, batch), None)))",
    DRAW
    + f"""
@jax.jit
def scan(arrays, order):
    step = lambda so_far, number: (total(so_far, draw(arrays, order, number)), None)
    return jax.lax.scan(step, 0.0, jnp.arange(SAMPLES // BATCH))
jax.block_until_ready(scan({ORDER}))
""",
)
AFTER = "\nprint(time.perf_counter() - begun, time.process_time() - begun_cpu)"


def measure(options: Options) -> list[Table]:
    return [
        measure_one(options, "first batch", FIRST_BATCH, 0.15),
        measure_one(options, "first scan", FIRST_SCAN, 0.3),
    ]


def measure_one(options: Options, what: str, scripts: tuple[str, str], most: float) -> Table:
    ours, by_hand = f"Millstream, {what}", f"by hand, {what}"
    entries = [
        Entry(ours, lambda: fresh(BEFORE + scripts[0] + AFTER), "millstream"),
        Entry(by_hand, lambda: fresh(BEFORE + scripts[1] + AFTER)),
    ]
    table = measured(f"To the {what}", "s", ours, entries, options.rounds(7))
    table.hold(f"{what}: seconds", table.median(ours), at_most=most)
    table.hold(f"{what}: times as long as by hand", table.ratio(ours, by_hand), at_most=1)
    return table


if __name__ == "__main__":
    main(measure)
