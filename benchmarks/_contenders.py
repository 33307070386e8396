"""The loaders that read samples with workers, each as a stream: an iterator of batches as JAX arrays.

`steps` is how many batches it has; samples have no end. A function is named by its library and the kind of the stream.
"""

import collections
import concurrent.futures
import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from _work import Work, fill_small


def millstream_threads(todo: Work, workers: int, steps: int) -> Iterator[Any]:
    import millstream as ms

    return _millstream(ms.DiskSampleSource(steps * todo.batch, todo.sample), todo, ms.Threads(workers))


def millstream_processes(todo: Work, workers: int, steps: int) -> Iterator[Any]:
    import millstream as ms

    return _millstream(ms.DiskSampleSource(steps * todo.batch, todo.sample), todo, ms.Processes(workers))


def millstream_fill(todo: Work, workers: int, steps: int) -> Iterator[Any]:
    """Processes and the function that hydrax has, which writes a sample where it belongs."""
    import millstream as ms

    spec = {"image": ((28, 28), np.uint8)}
    source = ms.sources.FillSource(range(steps * todo.batch), fill_small, spec, seeded=False)
    return _millstream(source, todo, ms.Processes(workers))


def _millstream(source: Any, todo: Work, executor: Any) -> Iterator[Any]:
    import jax

    import millstream as ms

    loader = ms.DataLoader([source, ms.BatchTransform(todo.batch, drop_last=True)], executor=executor, prefetch=2)
    with contextlib.closing(loader.iterate(loader.init_state(jax.random.key(0)))) as batches:
        for batch, _ in batches:
            yield batch


def bare_loop(todo: Work, workers: int, steps: int) -> Iterator[Any]:
    """No loader and no worker."""
    return (_placed(_batch(todo, step)) for step in range(steps))


def bare_threads(todo: Work, workers: int, steps: int) -> Iterator[Any]:
    """A thread pool without a loader. No thread waits for the end of a batch: the next two are under way."""
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for samples in _two_ahead(lambda step: pool.map(todo.sample, _indices(todo, step)), steps):
            yield _placed(_stacked(list(samples)))


def bare_processes(todo: Work, workers: int, steps: int) -> Iterator[Any]:
    """A process pool without a loader: how much two processes are worth on this machine at this moment."""
    context = multiprocessing.get_context("forkserver")
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        for batch in _two_ahead(lambda step: pool.submit(_batch, todo, step), steps):
            yield _placed(batch.result())


def _two_ahead(begin: Callable[[int], Any], steps: int) -> Iterator[Any]:
    begun = collections.deque()
    for step in range(steps + 2):
        if step < steps:
            begun.append(begin(step))
        if step >= 2:
            yield begun.popleft()


def torch_forkserver(todo: Work, workers: int, steps: int) -> Iterator[Any]:
    return _torch(todo, workers, steps, "forkserver")


def torch_fork(todo: Work, workers: int, steps: int) -> Iterator[Any]:
    """Its default before Python 3.14. JAX warns of it, for a forked child may hang."""
    return _torch(todo, workers, steps, "fork")


def torch_copied(todo: Work, workers: int, steps: int) -> Iterator[Any]:
    """As most users turn a tensor into a JAX array."""
    import jax.numpy as jnp

    return _torch(todo, workers, steps, "forkserver", jnp.asarray)


class Samples:
    """What torch calls a dataset."""

    def __init__(self, todo: Work, steps: int) -> None:
        self.todo, self.steps = todo, steps

    def __len__(self) -> int:
        return self.steps * self.todo.batch

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.todo.sample(index)


def _torch(todo: Work, workers: int, steps: int, start: str, place: Any = None) -> Iterator[Any]:
    import jax
    from torch.utils.data import DataLoader

    place = place or jax.device_put  # uses the tensor's memory where it is aligned
    dataset: Any = Samples(todo, steps)
    loader = DataLoader(dataset, todo.batch, num_workers=workers, multiprocessing_context=start)
    for batch in loader:
        yield {name: place(leaf.numpy()) for name, leaf in batch.items()}


def grain_threads(todo: Work, workers: int, steps: int) -> Iterator[Any]:
    """Its threads read samples, and batches are made of them afterwards."""
    import grain

    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * todo.batch)
    dataset = grain.MapDataset.range(steps * todo.batch).map(todo.sample)
    return map(_placed, iter(dataset.to_iter_dataset(options).batch(todo.batch)))


def grain_threads_by_batch(todo: Work, workers: int, steps: int) -> Iterator[Any]:
    """Its threads read whole batches."""
    import grain

    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=workers)
    dataset = grain.MapDataset.range(steps * todo.batch).map(todo.sample).batch(todo.batch)
    return map(_placed, iter(dataset.to_iter_dataset(options)))


def grain_processes(todo: Work, workers: int, steps: int) -> Iterator[Any]:
    """Batches, not samples, are its elements here, and its processes read without further threads."""
    import grain

    return _grain_processes(todo, workers, steps, grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


def grain_processes_with_threads(todo: Work, workers: int, steps: int) -> Iterator[Any]:
    """Two threads in each of its processes, which read batches ahead."""
    import grain

    return _grain_processes(todo, workers, steps, grain.ReadOptions(num_threads=2, prefetch_buffer_size=2))


def _grain_processes(todo: Work, workers: int, steps: int, reading: Any) -> Iterator[Any]:
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # 0.2.18 asks a flag that nobody has parsed in an ordinary script
    dataset = grain.MapDataset.range(steps * todo.batch).map(todo.sample).batch(todo.batch)
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=1)
    return map(_placed, iter(dataset.to_iter_dataset(reading).mp_prefetch(options)))


def hydrax_processes(todo: Work, workers: int, steps: int) -> Iterator[Any]:
    """It waits for JAX to let go of its buffers, and hangs if no computation follows a batch, so here one does."""
    import hydrax
    import jax
    import jax.numpy as jnp

    compute, number = jax.jit(jnp.negative), np.float32(1)
    layout = {"image": ((28, 28), np.uint8, jnp.uint8)}
    group = hydrax.DataGroup(todo.batch, range(min(steps, 200) * todo.batch), loader_arrays=layout)
    options: Any = {"depth": 8, "loader_count": workers, "end_at": ("batch", steps), "timeout_sec": 20}
    with hydrax.Dataloader(fill_small, group, **options) as loader:
        for batch in loader:
            arrays = [batch.get_array("image")]
            del batch
            try:
                yield arrays.pop()
            finally:
                compute(number)


def loadax_threads(todo: Work, workers: int, steps: int) -> Iterator[Any]:
    import loadax

    dataset = loadax.MappedDataset(loadax.RangeDataset(0, min(steps, 2000) * todo.batch), todo.sample)
    builder = loadax.DataloaderBuilder(loadax.Batcher(_stacked)).batch_size(todo.batch)
    batches: Any = builder.workers(workers).prefetch(2).build(dataset)
    return map(_placed, batches)


def _indices(todo: Work, step: int) -> range:
    return range(step * todo.batch, (step + 1) * todo.batch)


def _batch(todo: Work, step: int) -> dict[str, np.ndarray]:
    return _stacked([todo.sample(index) for index in _indices(todo, step)])


def _stacked(samples: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def _placed(batch: Any) -> Any:
    import jax

    return jax.device_put(batch)
