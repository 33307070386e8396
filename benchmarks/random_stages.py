"""The first batch of pipelines with many random stages, compilation included, in a fresh process.

Each stage adds uniform noise to samples of 8 floats, with a key per sample. By hand, one compiled function gathers the
same batch, folds the number of each stage and sample into a key, and draws the same noise with `jax.vmap`: what JAX
itself takes to compile so many generators. JAX is imported and its device is up when the clock starts.
"""

from _case import Options, main
from _fresh import fresh
from _measure import Entry, measured
from _result import Table

MOST = {1: 0.3, 5: 0.5, 20: 1.2}  # seconds to the first batch, by the number of stages
SETUP = """
import time, jax, jax.numpy as jnp, numpy as np, millstream as ms
def noisy(sample, mask, key):
    return {"x": sample["x"] + jax.random.uniform(key, sample["x"].shape)}
x = np.zeros((10_000, 8), np.float32)
jax.block_until_ready(jnp.zeros(1) + 1)
begun, begun_cpu = time.perf_counter(), time.process_time()
"""
OURS = """
stages = [ms.RandomMapTransform(noisy)] * STAGES
loader = ms.DataLoader([ms.ArraySampleSource({"x": x}), *stages, ms.BatchTransform(128)])
jax.block_until_ready(next(loader.iterate(loader.init_state(jax.random.key(0)))))
"""
BY_HAND = """
@jax.jit
def draw(x, indices, key):
    batch = {"x": x[indices]}
    for stage in range(STAGES):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, stage), indices)
        batch = jax.vmap(lambda sample, key: noisy(sample, True, key))(batch, keys)
    return batch
jax.block_until_ready(draw(jnp.asarray(x), jnp.arange(128), jax.random.key(0)))
"""
END = "print(time.perf_counter() - begun, time.process_time() - begun_cpu)"


def script(body: str, stages: int) -> str:
    return SETUP + body.replace("STAGES", str(stages)) + END


def measure(options: Options) -> list[Table]:
    tables = []
    for stages, most in MOST.items():
        ours, by_hand = f"Millstream, {stages} stages", f"by hand, {stages} stages"
        entries = [
            Entry(ours, lambda stages=stages: fresh(script(OURS, stages)), "millstream"),
            Entry(by_hand, lambda stages=stages: fresh(script(BY_HAND, stages))),
        ]
        table = measured(f"To the first batch, {stages} random stages", "s", ours, entries, options.rounds(3))
        table.hold(f"{stages} random stages: seconds to the first batch", table.median(ours), at_most=most)
        table.hold(f"{stages} random stages: times as long as by hand", table.ratio(ours, by_hand), at_most=1.5)
        tables.append(table)
    return tables


if __name__ == "__main__":
    main(measure)
