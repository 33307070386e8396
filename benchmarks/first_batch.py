"""From `DataLoader(...)` to its first batch, compilation included, in a fresh process.

60,000 images in memory, normalized. JAX is imported and its device is up when the clock starts.
"""

from _case import Options, main
from _fresh import fresh
from _measure import Entry, measured
from _result import Table

OURS = "Millstream, first batch"
SCRIPT = """
import time, jax, numpy as np, millstream as ms
from _images import BATCH, SAMPLES, data
arrays = data(SAMPLES)
jax.block_until_ready(jax.numpy.zeros(1))
begun, begun_cpu = time.perf_counter(), time.process_time()
loader = ms.DataLoader([ms.ArraySampleSource(arrays), ms.BatchTransform(BATCH), ms.NormalizeImageTransform()])
jax.block_until_ready(next(loader.iterate(loader.init_state(jax.random.key(0)))))
print(time.perf_counter() - begun, time.process_time() - begun_cpu)
"""


def measure(options: Options) -> list[Table]:
    entries = [Entry(OURS, lambda: fresh(SCRIPT), "millstream")]
    table = measured("To the first batch", "s", OURS, entries, options.rounds(5))
    table.hold("seconds to the first batch", table.median(OURS), at_most=1.5)
    return [table]


if __name__ == "__main__":
    main(measure)
